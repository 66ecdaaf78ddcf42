"""Result files: continued, replaced, never half written."""

import json
import os

import pytest
from bench_helpers import load

from probjax.bench.results import ResultFile, read_results

DEVICE = {"jax": "1", "backend": "cpu", "device_kind": "cpu", "processor": "P", "cores_used": 2}
KEY = ("tag", "impl", "seq")


def row(impl="a", seq=1, **more):
    return {"impl": impl, "seq": seq, "tag": None, "status": "ok", **more}


def make(path, append=False, device=DEVICE, config=None):
    results = ResultFile(path, device, append=append, key=KEY)
    results.begin(config or {"seqs": "1"})
    return results


def test_a_file_has_the_reference_schema_and_is_written_after_each_addition(tmp_path):
    path = tmp_path / "new" / "x.json"
    results = make(path)
    results.add([row()])
    data = load(path)
    assert list(data)[:2] == ["device", "config"]
    assert data["results"] == [row()]
    assert data["runs"][0]["run"] == 0
    results.add([row(seq=2)])
    assert len(load(path)["results"]) == 2
    assert os.listdir(path.parent) == ["x.json"]


def test_append_skips_what_was_measured_and_keeps_the_old_configuration(tmp_path):
    path = tmp_path / "x.json"
    first = make(path)
    first.add([row(), row("b", status="unavailable", reason="no b")])
    again = make(path, append=True, config={"seqs": "1,2"})
    assert again.run == 1
    assert again.measured(row())
    assert not again.measured(row("b"))
    assert not again.measured(row(seq=2))
    assert not again.measured({**row(), "tag": "after"})
    again.add([row("b", seq=1, run=1), row(seq=2)])
    data = load(path)
    assert data["config"] == {"seqs": "1,2"}
    assert data["configs"] == [{"seqs": "1"}]
    assert [(r["impl"], r["seq"], r["status"]) for r in data["results"]] == [
        ("a", 1, "ok"), ("b", 1, "ok"), ("a", 2, "ok"),
    ]  # fmt: skip
    assert len(data["runs"]) == 2


def test_the_same_configuration_is_kept_once(tmp_path):
    path = tmp_path / "x.json"
    make(path).add([row()])
    make(path, append=True).save()
    assert "configs" not in load(path)
    for config in ({"seqs": "2"}, {"seqs": "1"}, {"seqs": "2"}):
        make(path, append=True, config=config).save()
    assert load(path)["configs"] == [{"seqs": "1"}, {"seqs": "2"}]


def test_without_append_the_old_file_is_kept_aside(tmp_path):
    path = tmp_path / "x.json"
    make(path).add([row("old")])
    results = make(path)
    assert load(path)["results"][0]["impl"] == "old"
    results.add([row("new")])
    assert [r["impl"] for r in load(path)["results"]] == ["new"]
    assert [r["impl"] for r in load(tmp_path / "x.json.bak")["results"]] == ["old"]


def test_another_machine_is_refused(tmp_path):
    path = tmp_path / "x.json"
    make(path).add([row()])
    before = path.read_text()
    with pytest.raises(ValueError, match="processor"):
        make(path, append=True, device={name: value for name, value in DEVICE.items() if name != "processor"})
    with pytest.raises(ValueError, match=r"processor 'P', here it is 'Q'.*--output"):
        make(path, append=True, device={**DEVICE, "processor": "Q"})
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no JSON"),
        ("[]", "results"),
        ('{"results": 3, "device": {}}', "results"),
        ('{"results": []}', "device"),
    ],
)
def test_a_file_that_is_no_result_file_is_refused(tmp_path, text, said):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        make(path, append=True)
    assert path.read_text() == text


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    results = make(path)
    results.add([row()])
    with pytest.raises(ValueError):
        results.add([row(seq=2, rel_err=float("nan"))])
    with pytest.raises(TypeError):
        results.add([row(seq=3, what=object())])
    assert load(path)["results"] == [row()]
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_file_with_less_in_it_can_be_continued(tmp_path):
    """Rows of the reference program have no status and no tag, its files no runs."""
    path = tmp_path / "x.json"
    old = {"impl": "a", "seq": 1, "median_ms": 1.0}
    path.write_text(json.dumps({"device": DEVICE, "config": {"seqs": "9"}, "results": [old], "note": "mine"}))
    results = make(path, append=True)
    assert results.measured(row())
    results.add([row(seq=2)])
    data = read_results(path)
    assert data["note"] == "mine"
    assert data["configs"] == [{"seqs": "9"}]
    assert data["results"] == [old, row(seq=2)]


def test_a_path_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(ValueError, match="is a folder"):
        make(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot make the folder"):
        make(tmp_path / "file" / "x.json")


def test_sections(tmp_path):
    path = tmp_path / "x.json"
    results = make(path)
    results.add([row(peak_mb=3.0)], "peaks")
    assert results.measured(row(), "peaks")
    assert not results.measured(row())
    assert load(path)["peaks"] == [row(peak_mb=3.0)]
    assert results.section("peaks")[0]["peak_mb"] == 3.0
    assert results.section("max_fit") == []
