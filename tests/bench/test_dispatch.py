"""The suite `dispatch` at tiny sizes: configuration, rows, schema, standings, the search, the report."""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pytest
from bench_helpers import load, rows_of

from probjax.bench import device_time
from probjax.bench.attention import jax_rows
from probjax.bench.attention import suite as attention_suite
from probjax.bench.attention.cells import AttentionCell
from probjax.bench.attention.suite import program_length
from probjax.bench.dispatch import find_max
from probjax.bench.dispatch.cells import DispatchCell
from probjax.bench.dispatch.config import IMPLS, DispatchConfig
from probjax.bench.dispatch.run import run_dispatch
from probjax.bench.dispatch.summary import geometric_mean, print_standings, standings
from probjax.bench.measure import Unavailable
from probjax.bench.parallel import waves
from probjax.bench.report import render, write_report
from probjax.bench.report_data import ReportFile, suites

# The columns of a row, and the keys of the configuration, of the reference file.
COLUMNS = {
    "suite", "impl", "dtype", "head_dim", "seq", "causal", "mode", "batch", "heads", "rel_err", "xla_temp_mb",
    "xla_arg_mb", "xla_out_mb", "compile_s", "inner", "median_ms", "q1_ms", "q3_ms", "tag",
}  # fmt: skip
KEYS = {
    "device", "suite", "output", "append", "tag", "batch", "heads", "head_dims", "seq_lens", "dtypes",
    "modes", "causal", "impls", "find_max", "max_seq", "child",
}  # fmt: skip
TINY = {
    "device": "cpu", "batch": 2, "heads": 2, "head_dims": "8", "seq_lens": "16", "dtypes": "float32",
    "repeats": 3, "min_sample_ms": 0.1,
}  # fmt: skip


@pytest.fixture
def small(tmp_path):
    """Fields of a configuration that runs in a moment."""
    return {**TINY, "output": str(tmp_path / "out.json")}


def run(small, console, **fields):
    return run_dispatch(DispatchConfig(**{**small, **fields}), console=console)


class TestConfig:
    def test_the_defaults_are_the_grid_of_the_reference_file(self):
        cells = DispatchConfig().cells()
        assert len(cells) == len(set(cells)) == 96
        assert {cell.seq for cell in cells} == {16, 32, 64, 128, 256, 512}
        assert all((cell.batch, cell.heads) == (64, 8) for cell in cells)

    def test_header_has_the_keys_and_lists_of_the_reference_file(self):
        header = DispatchConfig(device="cpu", causal="1", torch_python="/some/where/python").header()
        assert set(header) >= KEYS
        assert header["suite"] == "dispatch" and header["max_seq"] == 262144 and header["child"] is None
        assert header["causal"] == [1] and header["head_dims"] == [32, 64]
        assert "where" not in json.dumps(header)
        assert DispatchConfig.from_header(header).causal == (1,)

    def test_flags_carry_the_names_of_the_keys(self):
        parser = argparse.ArgumentParser()
        DispatchConfig.add_arguments(parser)
        given = parser.parse_args(["--head-dims", "32", "--causal", "0", "--seq-lens", "16,32", "--find-max"])
        config = DispatchConfig(**DispatchConfig.given(given))
        assert (config.head_dims, config.causal, config.seq_lens, config.find_max) == (
            (32,),
            (0,),
            (16, 32),
            True,
        )

    @pytest.mark.parametrize("value", ["2", "", "yes"])
    def test_causal_is_zero_or_one(self, value):
        with pytest.raises(ValueError, match=r"causal: got .* wanted 0, 1 or both"):
            DispatchConfig(causal=value)

    def test_only_float32_has_precisions(self):
        cells = DispatchConfig(precision="default,highest", seq_lens="16", head_dims="32").cells()
        assert sum(cell.dtype == "float32" for cell in cells) == 2 * sum(
            cell.dtype == "bfloat16" for cell in cells
        )


class TestRun:
    def test_rows_have_the_columns_of_the_reference_file(self, small, console):
        data = load(
            run(small, console, impls="jax_xla,probjax_default,probjax_flex,probjax_flax,probjax_mha")
        )
        assert len(data["results"]) == 5 * 4
        for row in data["results"]:
            assert row["status"] == "ok", row
            assert set(row) >= COLUMNS | {"program_us", "q1_program_us", "q3_program_us", "precision"}
            assert 0 < row["rel_err"] < 2e-6
            assert isinstance(row["causal"], bool) and row["mode"] in ("fwd", "fwd_bwd")
            assert 0 < row["q1_ms"] <= row["median_ms"] <= row["q3_ms"]
            assert 0 < row["q1_program_us"] <= row["program_us"] <= row["q3_program_us"]
            # No GPU, no time of kernels.
            assert "device_us" not in row

    def test_the_output_is_returned_with_the_gradients(self, small, console):
        path = run(small, console, impls="jax_xla", causal="1")
        array = 2 * 16 * 2 * 8 * 4
        for row in load(path)["results"]:
            arrays = 1 if row["mode"] == "fwd" else 4
            tuple_bytes = 0 if arrays == 1 else 8 * arrays
            assert row["xla_out_mb"] * 2**20 == arrays * array + tuple_bytes
            assert row["xla_arg_mb"] * 2**20 == (3 if arrays == 1 else 4) * array

    def test_what_is_missing_is_a_row_with_its_reason(self, small, console):
        path = run(
            small,
            console,
            impls="jax_cudnn,pallas_mha,mha_interpret",
            causal="0",
            seq_lens="16,32",
            modes="fwd",
        )
        assert {row["status"] for row in rows_of(path, impl="jax_cudnn")} == {"unavailable"}
        assert {row["status"] for row in rows_of(path, impl="pallas_mha")} == {"unavailable"}
        (row,) = rows_of(path, impl="mha_interpret", seq=32)
        assert row["status"] == "skipped" and "--interpret-max-seq 16" in row["reason"]
        assert rows_of(path, impl="mha_interpret", seq=16)[0]["status"] == "ok"

    def test_times_can_be_left_out(self, small, console):
        path = run(small, console, impls="jax_xla", causal="0", modes="fwd", times="program")
        (row,) = load(path)["results"]
        assert row["program_us"] > 0 and "median_ms" not in row and row["status"] == "ok"

    def test_long_sequences_are_not_timed_in_a_program(self, small, console):
        path = run(
            small, console, impls="jax_xla", causal="0", modes="fwd", seq_lens="16,32", program_max_seq=16
        )
        assert ["program_us" in row for row in load(path)["results"]] == [True, False]

    @pytest.mark.parametrize("factor", [1.1, np.nan])
    def test_a_wrong_gradient_is_no_result(self, small, console, monkeypatch, factor):
        real = jax_rows.prepare

        def off(impl, cell, inputs, **more):
            ready = real(impl, cell, inputs, **more)
            exact = ready.result
            name = "key" if impl == "jax_xla" else ""
            ready.result = lambda: {n: a * (factor if n == name else 1) for n, a in exact().items()}
            return ready

        monkeypatch.setattr(attention_suite.jax_rows, "prepare", off)
        path = run(small, console, impls="jax_xla,probjax_default", causal="0")
        (forward,) = rows_of(path, impl="jax_xla", mode="fwd")
        (wrong,) = rows_of(path, impl="jax_xla", mode="fwd_bwd")
        assert forward["status"] == "ok"
        assert wrong["status"] == "wrong" and "the result is wrong" in wrong["reason"]
        assert "median_ms" not in wrong and "program_us" not in wrong
        assert ("rel_err" in wrong) == math.isfinite(factor)
        # Not ranked: the cell has no peer left.
        assert all(one.cell[5] == "fwd" for one in standings(load(path)["results"]))

    def test_append_measures_only_what_is_missing(self, small, console):
        path = run(small, console, impls="jax_xla", modes="fwd")
        before = load(path)["results"]
        run(small, console, impls="jax_xla,probjax_default", modes="fwd", append=True, tag=None)
        data = load(path)
        assert data["results"][: len(before)] == before
        assert [row["run"] for row in data["results"]] == [0, 0, 1, 1]

    def test_torch_on_the_processor(self, small, console, fake_torch):
        fields = {"impls": "torch_sdpa,jax_xla", "causal": "1", "torch_python": str(fake_torch)}
        path = run(small, console, batch=1, heads=1, **fields)
        for row in rows_of(path, impl="torch_sdpa"):
            assert row["status"] == "ok" and row["precision"] == "default" and row["rel_err"] < 1e-6

    def test_several_processes_find_the_same_rows(self, small, console, fake_torch):
        fields = {"impls": "jax_xla,probjax_default,jax_cudnn", "seq_lens": "8,16,24"}
        data = load(run(small, console, workers=2, **fields))
        assert len(data["results"]) == 3 * 12
        states = {row["status"] for row in data["results"] if row["impl"] != "jax_cudnn"}
        assert states == {"ok"}
        assert all(row["tag"] is None and row["run"] == 0 for row in data["results"])

    def test_a_spent_budget_drops_cells(self, small, console):
        data = load(run(small, console, workers=2, impls="jax_xla", budget=0.001))
        assert len(data["results"]) + len(data["runs"][0]["dropped"]) == 4


class TestProgram:
    def test_a_chain_is_the_calls_one_after_the_other(self):
        import jax

        for mode in ("fwd", "fwdbwd"):
            cell = AttentionCell(mode, "causal", "float32", 1, 5, 2, 4)
            attention, _ = jax_rows.ROWS["jax_xla"](cell)
            call = jax.jit(jax_rows.step(cell, attention, output=True))
            arrays = jax.random.normal(jax.random.key(0), (len(jax_rows.names(cell)), *cell.shape))
            *first, key, value = arrays
            got = jax_rows.chain(cell, call, 4)(*arrays)
            for _ in range(4):
                found = call(*first, key, value)
                first = [found] if mode == "fwd" else [first[0], found[1]]
            np.testing.assert_allclose(jax.tree.leaves(got), jax.tree.leaves(found), rtol=1e-5)

    def test_long_operations_are_chained_less(self):
        short = AttentionCell("fwd", "plain", "float32", 64, 16, 8, 32)
        long = AttentionCell("fwdbwd", "plain", "float32", 64, 512, 8, 64)
        assert (program_length(short), program_length(long)) == (32, 4)


def row(impl, **more):
    cell = {
        "suite": "dispatch",
        "dtype": "bfloat16",
        "head_dim": 64,
        "seq": 16,
        "causal": True,
        "mode": "fwd",
    }
    return {"impl": impl, **cell, "batch": 64, "heads": 8, "precision": "default", "status": "ok", **more}


class TestStandings:
    def test_the_best_valid_peer_counts(self, console):
        rows = [
            row("probjax_default", device_us=2.0, median_ms=0.05),
            row("jax_cudnn", device_us=8.0, median_ms=0.1),
            row("pallas_mha", device_us=4.0),
            row("tokamax_triton", status="wrong", device_us=1.0),
            row("probjax_mha", device_us=1.0),
            row("torch_flex", device_us=1.0),
        ]
        found = {one.measure: one for one in standings(rows)}
        assert (found["device_us"].peer, found["device_us"].ratio) == ("pallas_mha", 0.5)
        assert (found["median_ms"].peer, found["median_ms"].ratio) == ("jax_cudnn", 0.5)
        assert found["median_ms"].ours == pytest.approx(50.0)
        print_standings(console, rows)
        assert "device: geometric mean 0.500" in console.file.getvalue()

    def test_rows_of_other_runs_and_tags_are_not_compared(self):
        rows = [row("probjax_default", device_us=2.0, run=1), row("jax_cudnn", device_us=8.0, run=0)]
        assert standings(rows) == []

    def test_geometric_mean(self):
        assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


class TestFindMax:
    def search(self, monkeypatch, ends):
        asked = []

        def runs(config, cell, impl):
            asked.append(cell.seq)
            end = ends.get(cell.seq, "runs")
            if isinstance(end, Exception):
                raise end
            return end

        monkeypatch.setattr(find_max, "runs", runs)
        config = DispatchConfig(seq_lens="16,512", max_seq=4096)
        cell = find_max.groups(config)[0]
        return find_max.find_max(config, cell, "jax_xla"), asked

    def test_the_length_doubles_until_it_fails(self, monkeypatch):
        found, asked = self.search(monkeypatch, {2048: "memory"})
        assert asked == [512, 1024, 2048]
        assert found["max_seq"] == 1024 and found["tried"]["2048"] == "memory" and "seq" not in found

    def test_it_ends_at_the_longest_length(self, monkeypatch):
        assert self.search(monkeypatch, {})[0]["max_seq"] == 4096

    def test_nothing_runs(self, monkeypatch):
        assert self.search(monkeypatch, {512: "timeout"})[0]["max_seq"] is None

    def test_what_is_not_here_is_unavailable(self, monkeypatch):
        found, _ = self.search(monkeypatch, {512: Unavailable("no GPU")})
        assert (found["status"], found["reason"]) == ("unavailable", "no GPU")

    @pytest.mark.slow
    def test_each_length_has_a_process(self, small, console):
        path = run(
            small, console, impls="jax_xla,jax_cudnn", causal="0", modes="fwd", find_max=True, max_seq=32
        )
        first, second = load(path)["max_fit"]
        assert first["max_seq"] == 32 and first["tried"] == {"16": "runs", "32": "runs"}
        assert second["status"] == "unavailable"


def test_waves_keep_neighbours_together():
    jobs = [(index, ["a"]) for index in range(20)]
    parts = waves(jobs, 3, 4)
    assert [[len(part) for part in wave] for wave in parts] == [[4, 4, 4], [4, 4]]
    assert [job for wave in parts for part in wave for job in part] == jobs
    assert waves([], 3) == []


class TestDeviceTime:
    def test_it_never_raises(self):
        found = device_time.columns(lambda x: x, [np.ones(2)], calls=2)
        assert found["device_reason"].startswith("device time unavailable: cupti: ")

    def test_the_median_call_counts(self):
        calls = [[("a", 0.001), ("b", 0.002)], [("a", 0.001), ("b", 0.004)], [("a", 0.001), ("b", 0.003)]]
        assert device_time.summary(calls) == (pytest.approx(4.0), 2)


class TestReport:
    def test_beside_the_reference_file(self, small, console, tmp_path):
        path = run(small, console, impls="jax_xla,probjax_default")
        reference = [
            {
                name: value
                for name, value in {**row("jax_cudnn"), "seq": seq, "median_ms": 1.0}.items()
                if name != "status"
            }
            for seq in (16, 32)
        ]
        other = tmp_path / "reference.json"
        other.write_text(json.dumps({"device": {"device_kind": "GPU"}, "config": {}, "results": reference}))
        write_report([path, other], tmp_path / "page.html")
        page = Path(tmp_path / "page.html").read_text()
        assert "program_us" in page and "jax_cudnn" in page

    def test_roles_of_the_columns(self):
        rows = [
            row(impl, seq=seq, mode=mode, causal=causal, device_us=1.0, median_ms=1.0, kernels=3)
            for impl in ("probjax_default", "jax_cudnn", "jax_xla")
            for seq in (16, 32)
            for mode in ("fwd", "fwd_bwd")
            for causal in (False, True)
        ] + [row("tokamax_triton", status="wrong", reason="the result is wrong")]
        (suite,) = suites([ReportFile("a.json", rows)])
        assert (suite["x"], suite["series"], suite["over"], suite["down"]) == (
            "seq",
            "impl",
            "variant",
            "mode",
        )
        assert suite["peer"] == "jax_cudnn"
        assert set(suite["measures"]["time"]) == {"median_ms", "device_us"}
        assert "tokamax_triton" not in {point["series"] for point in suite["points"]}
        assert "the result is wrong" in render([ReportFile("a.json", rows)])


def test_every_label_can_be_asked_for():
    assert {"probjax_default", "jax_cudnn", "tokamax_mosaic", "torch_flex"} <= set(IMPLS)
    cell = DispatchCell("float32", 32, 16, True, "fwd_bwd", 64, 8)
    assert (cell.attention.mode, cell.attention.variant) == ("fwdbwd", "causal")
