"""The report page: what it holds, which roles the columns get, and that odd files do no harm."""

import json
import re
from pathlib import Path

import pytest

from probjax.bench.report import read_report_file, render, write_report
from probjax.bench.report_data import (
    ReportFile,
    cell_of,
    device_label,
    file_payload,
    measure_kind,
    problems,
    suites,
)

CELL = {"batch": 1, "heads": 8, "head_dim": 64, "dtype": "float32"}
CPU = {"jax": "0.11.2", "backend": "cpu", "device_kind": "cpu", "gpu": "Some GPU 3090"}


def attention_row(impl: str, seq: int, median: float, **more: object) -> dict[str, object]:
    times = {"median_ms": median, "q1_ms": 0.9 * median, "q3_ms": 1.1 * median}
    return {"impl": impl, "mode": "fwd", "variant": "plain", **CELL, "seq": seq, **times, **more}


def attention_rows() -> list[dict[str, object]]:
    return [
        attention_row(impl, seq, speed * seq, mode=mode, variant=variant, xla_temp_mb=seq / 64, rel_err=1e-7)
        for impl, speed in [("probjax_default", 0.01), ("jax_xla", 0.02), ("torch_sdpa", 0.005)]
        for mode in ("fwd", "fwdbwd")
        for variant in ("plain", "causal")
        for seq in (128, 512)
    ]


def save(folder: Path, name: str = "a.json", **content: object) -> Path:
    path = folder / name
    path.write_text(json.dumps({"device": CPU, "config": {"seqs": "128,512"}, "results": [], **content}))
    return path


def payload_of(page: str) -> dict:
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert text is not None
    return json.loads(text[1])


def only_suite(rows: list[dict[str, object]]) -> dict:
    (suite,) = suites([ReportFile("a.json", rows)])
    return suite


class TestPage:
    def test_is_self_contained(self, tmp_path):
        output = tmp_path / "new" / "report.html"
        write_report([save(tmp_path, results=attention_rows())], output)
        page = output.read_text(encoding="utf-8")
        assert page.startswith("<!doctype html>")
        assert 'name="viewport"' in page and "prefers-color-scheme: dark" in page and "@media print" in page
        # The one address in it is the name of SVG, which nothing is loaded from.
        assert set(re.findall(r"https?://[^\"'\s]+", page)) == {"http://www.w3.org/2000/svg"}
        assert not re.search(r"<(link|img|iframe)|\ssrc=|@import|url\(", page)
        assert "@@" not in page

    def test_holds_every_number_and_column(self, tmp_path):
        rows = [*attention_rows(), attention_row("jax_xla", 99, 1.23456789, something_new="yes")]
        write_report([save(tmp_path, results=rows)], tmp_path / "r.html")
        (file,) = payload_of((tmp_path / "r.html").read_text(encoding="utf-8"))["files"]
        assert set(file["columns"]) == {column for row in rows for column in row}
        assert len(file["rows"]) == len(rows)
        last = dict(zip(file["columns"], file["rows"][-1], strict=True))
        assert last["median_ms"] == 1.23457 and last["seq"] == 99 and last["something_new"] == "yes"
        assert last["rel_err"] is None

    def test_header(self, tmp_path):
        run = {"run": 0, "git_revision": "abc123", "git_dirty": True}
        path = save(tmp_path, note="quiet machine", configs=[{"seqs": "64"}], runs=[run], threads=2)
        write_report([path], tmp_path / "r.html")
        (file,) = payload_of((tmp_path / "r.html").read_text(encoding="utf-8"))["files"]
        assert file["name"] == "a.json" and file["note"] == "quiet machine" and file["device"] == CPU
        assert file["config"] == [{"seqs": "128,512"}, [{"seqs": "64"}]]
        assert file["runs"] == [run] and file["extra"] == {"threads": 2}

    @pytest.mark.parametrize("place", ["note", "device", "config", "label", "reason", "name"])
    def test_text_cannot_break_out(self, tmp_path, place):
        evil = "</script><script>alert(1)</script><!-- <b> & \u2028 @@DATA@@"
        row = attention_row(evil if place == "label" else "jax_xla", 128, 1.0)
        file = ReportFile(
            evil if place == "name" else "a.json",
            [row, {"impl": "x", "status": "error", "reason": evil if place == "reason" else ""}],
            device={"jax": evil} if place == "device" else {},
            config={"seqs": evil} if place == "config" else None,
            note=evil if place == "note" else "",
        )
        page = render([file])
        assert "alert(1)</script>" not in page and "<b>" not in page
        assert page.count("<script") == 2 and page.count("</script>") == 2
        assert evil in json.dumps(payload_of(page), ensure_ascii=False)

    def test_files_side_by_side(self, tmp_path):
        (tmp_path / "old").mkdir()
        ours, seed = (
            save(tmp_path, results=attention_rows()),
            save(tmp_path / "old", results=attention_rows()),
        )
        write_report([ours, seed], tmp_path / "r.html")
        data = payload_of((tmp_path / "r.html").read_text(encoding="utf-8"))
        assert [file["name"] for file in data["files"]] == ["a.json (1)", "a.json (2)"]
        (suite,) = data["suites"]
        assert {point["file"] for point in suite["points"]} == {0, 1}

    def test_large_file_stays_small(self):
        rows = [
            attention_row(
                f"impl_{i}", 16 * 2**j, 0.123456789 * (i + 1), tag=tag, xla_temp_mb=1 / 3, compile_s=2 / 3
            )
            for i in range(16)
            for j in range(8)
            for tag in ("a", "b", "c", "d", "e", "f")
        ]
        assert len(rows) == 768
        assert len(render([ReportFile("a.json", rows)])) < 500_000


class TestFiles:
    def test_no_path(self, tmp_path):
        with pytest.raises(ValueError, match="paths: got no file"):
            write_report([], tmp_path / "r.html")

    def test_missing_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"nowhere\.json does not exist"):
            write_report([tmp_path / "nowhere.json"], tmp_path / "r.html")

    @pytest.mark.parametrize(
        "text",
        ["", "hello", "[1, 2]", "3", "{}", '{"device": {}, "results": 5}', '{"device": {}, "results": [1]}'],
    )
    def test_no_result_file(self, tmp_path, text):
        path = tmp_path / "x.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"x\.json"):
            write_report([path], tmp_path / "r.html")
        assert not (tmp_path / "r.html").exists()

    def test_other_sections_become_suites(self, tmp_path):
        peaks = [
            {"impl": i, **CELL, "seq": s, "peak_mb": s / 9}
            for i in ("jax_xla", "xla_tiled")
            for s in (4096, 8192)
        ]
        fits = [
            {"impl": i, **CELL, "memory_limit_mb": 4096.0, "max_seq": s} for i, s in (("a", 512), ("b", None))
        ]
        file = read_report_file(save(tmp_path, results=attention_rows(), peaks=peaks, max_fit=fits))
        found = {suite["name"]: suite for suite in suites([file])}
        assert list(found) == ["attention", "peaks", "max_fit"]
        assert found["peaks"]["x"] == "seq" and found["peaks"]["measures"]["memory"] == ["peak_mb"]
        assert found["max_fit"]["x"] is None and found["max_fit"]["measures"]["other"] == ["max_seq"]
        assert ["memory_limit_mb", 4096.0] in found["max_fit"]["constants"]
        assert [problem["label"] for problem in problems([file])] == ["b"]


class TestOddRows:
    @pytest.mark.parametrize(
        "rows",
        [
            [],
            [{}],
            [{"impl": None, "seq": None, "median_ms": None}],
            [{"impl": ["list"], "seq": {"a": 1}, "tag": [1], "status": ["bad"], "suite": {"x": 1}}],
            [{"median_ms": 1.0}, {"impl": "jax_xla", "median_ms": 2.0}],
            [attention_row("jax_xla", 128, float("nan")), attention_row("unheard_of", 128, float("inf"))],
            [attention_row("jax_xla", 128, 0.0), attention_row("jax_xla", 256, -1.0)],
            [{"seq": "long", "median_ms": 3}, {"seq": 128, "median_ms": "slow"}],
            [attention_row("jax_xla", 128, 1.0)] * 3,
        ],
    )
    def test_page_is_made(self, rows):
        file = ReportFile("a.json", rows)
        data = payload_of(render([file, file]))
        assert [len(entry["rows"]) for entry in data["files"]] == [len(rows)] * 2

    def test_what_json_lacks_is_spelled_out(self):
        rows = file_payload(
            ReportFile("a", [{"x": float("nan"), "y": float("-inf"), "z": [1.0, {"k": 0.1234567}]}])
        )
        assert rows["rows"] == [["nan", "-inf", '[1.0, {"k": 0.123457}]']]

    def test_problems_are_grouped_with_their_reason(self):
        rows = [
            *attention_rows(),
            {"impl": "torch_sdpa", **CELL, "seq": 128, "status": "unavailable", "reason": "no torch"},
            {"impl": "torch_sdpa", **CELL, "seq": 256, "status": "unavailable", "reason": "no torch"},
            {"cell": "ssd", **CELL, "suite": "ssm", "error": "RuntimeError: needs an accelerator"},
            attention_row("xla_dense", 128, float("nan")),
        ]
        dropped = [("fwd", 2048, 3), ("fwd", 4096, 5), ("fwdbwd", 4096, 9)]
        left_out = {"dropped": [{"mode": m, "seq": s, "reason": f"needs {t} s"} for m, s, t in dropped]}
        found = problems([ReportFile("a.json", rows, runs=[left_out])])
        assert [(p["label"], p["count"], p["reason"]) for p in found] == [
            ("left out", 3, "needs … s"),
            ("torch_sdpa", 2, "unavailable: no torch"),
            ("ssd", 1, "RuntimeError: needs an accelerator"),
            ("xla_dense", 1, "the row has no measurement"),
        ]
        assert found[0]["where"] == ["fwd, seq 2048", "fwd, seq 4096", "fwdbwd, seq 4096"]
        assert found[1]["where"] == ["head_dim 64; dtype float32; seq 128, 256"]
        plotted = [point for suite in suites([ReportFile("a.json", rows)]) for point in suite["points"]]
        assert len(plotted) == len(attention_rows())
        # What a later run has measured is not left out.
        later = [*rows, {**attention_rows()[0], "mode": "fwd", "seq": 2048}]
        found = problems([ReportFile("a.json", later, runs=[left_out])])
        assert (found[0]["label"], found[0]["count"]) == ("left out", 2)


class TestRoles:
    def test_attention(self):
        suite = only_suite(attention_rows())
        assert (suite["x"], suite["series"], suite["over"], suite["down"]) == (
            "seq",
            "impl",
            "variant",
            "mode",
        )
        assert suite["peer"] == "jax_xla" and suite["peers"] == ["probjax_default", "jax_xla", "torch_sdpa"]
        assert suite["selectors"] == []
        assert ["heads", 8] in suite["constants"] and ["dtype", "float32"] in suite["constants"]
        assert suite["measures"] == {"time": ["median_ms"], "memory": ["xla_temp_mb"], "other": ["rel_err"]}

    def test_selectors_start_at_the_fullest_combination(self):
        rows = attention_rows() + [attention_row("jax_xla", seq, 1.0, dtype="bfloat16") for seq in (128, 512)]
        (selector,) = only_suite(rows)["selectors"]
        assert selector == {"column": "dtype", "values": ["float32", "bfloat16"], "default": "float32"}

    def test_other_spellings(self):
        rows = [
            {"suite": "dispatch", "impl": impl, "causal": causal, "mode": mode, "seq": seq, "median_ms": 1.0}
            for impl in ("probjax_default", "jax_xla")
            for causal in (False, True)
            for mode in ("fwd", "fwd_bwd")
            for seq in (16, 32)
        ]
        suite = only_suite(rows)
        assert suite["overValues"] == ["plain", "causal"] and suite["downValues"] == ["fwd", "fwdbwd"]
        assert cell_of({"impl": "a", "implementation": "b", "seq_len": 3}) == {"impl": "a", "seq": 3}

    def test_tags_tell_series_apart_only_within_a_file(self):
        rows = [attention_row("jax_xla", seq, 1.0, tag=tag) for seq in (1, 2) for tag in (None, "after")]
        assert {point["tag"] for point in only_suite(rows)["points"]} == {None, "after"}
        assert {point["tag"] for point in only_suite(rows[1::2])["points"]} == {None}

    def test_network_suites(self):
        rows = [
            {"suite": "transformer", "attention": a, "op": op, "tokens": t, "params": 9, "median_ms": 1.0}
            for a in ("probjax_default", "jax_xla")
            for op in ("forward", "train_step")
            for t in (128, 512)
        ]
        suite = only_suite(rows)
        assert (suite["x"], suite["series"], suite["down"]) == ("tokens", "impl", "op")

    def test_alternatives_without_a_length_become_dots(self):
        rows = [
            {"suite": "unet", "op": op, "dtype": dtype, "resolution": 32, "median_ms": 1.0}
            for op in ("forward", "train_step")
            for dtype in ("float32", "bfloat16")
        ]
        suite = only_suite(rows)
        assert suite["x"] is None and suite["peers"] == []
        assert suite["points"][1]["label"] == [["op", "forward"], ["dtype", "bfloat16"]]

    def test_column_that_follows_from_others_is_no_panel(self):
        rows = [
            {"suite": "train_loop", "op": op, "width": width, "batch": 4 * width, "per_step_ms": 1.0}
            for op in ("bare_jit", "fit_array")
            for width in (64, 512)
        ]
        suite = only_suite(rows)
        assert (suite["x"], suite["series"], suite["peer"]) == ("width", "op", "bare_jit")
        assert suite["selectors"] == [] and suite["over"] is None

    def test_remat_rows_of_other_suites_are_their_own_suite(self):
        rows = [
            {"suite": model, "op": "train_step", "variant": variant, "tokens": tokens, "median_ms": 1.0}
            for model, tokens in (("transformer", 512), ("ssm", 1024), ("unet", None))
            for variant in ("plain", "remat")
        ]
        suite = only_suite(rows)
        assert suite["name"] == "remat" and suite["series"] == "variant" and suite["peer"] == "plain"
        assert {dict(point["label"])["model"] for point in suite["points"]} == {"transformer", "ssm", "unet"}

    def test_column_of_one_file_does_not_part_the_files(self):
        ours = ReportFile("ours", [{**row, "precision": "default"} for row in attention_rows()])
        (suite,) = suites([ours, ReportFile("seed", attention_rows())])
        assert suite["selectors"] == [] and "precision" not in dict(suite["constants"])

    def test_column_that_some_rows_lack_is_no_difference(self):
        rows = [
            {**row, "precision": "default"} if row["impl"] != "torch_sdpa" else row
            for row in attention_rows()
        ]
        (suite,) = suites([ReportFile("ours", rows), ReportFile("seed", attention_rows())])
        assert suite["selectors"] == [] and "precision" not in dict(suite["constants"])

    def test_column_that_one_file_lacks_fits_every_choice(self):
        ours = [{**row, "precision": p} for row in attention_rows() for p in ("default", "highest")]
        (suite,) = suites([ReportFile("ours", ours), ReportFile("seed", attention_rows())])
        assert [selector["column"] for selector in suite["selectors"]] == ["precision"]
        assert {tuple(p["select"]) for p in suite["points"] if p["file"] == 1} == {(None,)}

    @pytest.mark.parametrize(
        ("column", "kind"),
        [
            ("median_ms", "time"),
            ("per_step_ms", "time"),
            ("q1_ms", None),
            ("peak_mb", "memory"),
            ("memory_limit_mb", None),
            ("compile_s", "other"),
            ("rel_err", "other"),
            ("heads", None),
        ],
    )
    def test_measure_kind(self, column, kind):
        assert measure_kind(column) == kind


@pytest.mark.parametrize(
    ("device", "label"),
    [
        (CPU, "CPU (model not recorded)"),
        ({**CPU, "processor": "EPYC 7R13"}, "EPYC 7R13"),
        ({"backend": "gpu", "device_kind": "H200", "processor": "EPYC"}, "H200"),
        ({}, "unknown device"),
    ],
)
def test_device_label(device, label):
    assert device_label(device) == label
