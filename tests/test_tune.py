"""`probjax tune` without a GPU: programs are lowered for an abstract one, and times are made up."""

from __future__ import annotations

import argparse

import jax
import pytest

from probjax import cli, tune
from probjax.attention import tables
from probjax.attention.tables import Blocks, Entry, Key, Table

KEY = Key("forward", "bfloat16", 64, 128, 128, 16, True)


@pytest.fixture
def no_compiler(monkeypatch):
    """Cuts stand in for compiled programs; what is "measured" is a function of the cut."""

    class Program:
        def __init__(self, key, implementation):
            self.key, self.implementation = key, implementation

        def lower(self, *arguments):
            from probjax.attention.gpu_triton import _forced

            self.kernels = _forced.get()
            return self

        def compile(self):
            if self.implementation == "triton" and any(b.stages == 3 for b in self.kernels.values()):
                raise RuntimeError("Shared memory size limit exceeded")
            return self

    monkeypatch.setattr(tune, "_program", Program)
    monkeypatch.setattr(tune, "_arguments", lambda key: [])


def fake(program, arguments):
    if program.implementation == "cudnn":
        return {"cudnn_kernel": 5.0, "transpose": 1.0}
    return {f"probjax_{name}": float(b.queries + 2 * b.keys + b.warps) for name, b in program.kernels.items()}


def test_the_fastest_cut_that_compiles_is_kept(no_compiler):
    found = tune.measure_key(KEY, fake)
    allowed = [c["forward"] for c in tune.candidates(KEY) if c["forward"].stages != 3]
    best = min(allowed, key=lambda b: b.queries + 2 * b.keys + b.warps)
    assert found is not None
    assert found.implementation == "triton"
    assert found.microseconds["triton"] == best.queries + 2 * best.keys + best.warps
    cut = found.kernels["forward"]
    assert (cut.queries, cut.keys, cut.warps) == (best.queries, best.keys, best.warps)
    assert cut.stages != 3


def test_backward_takes_the_kernels_apart(no_compiler):
    key = Key("backward", "bfloat16", 64, 64, 64, 16, False)
    found = tune.measure_key(key, fake)
    assert found is not None
    assert {"query", "key"} <= set(found.kernels)
    assert ("one" in found.kernels) == (found.microseconds["one"] <= found.microseconds["query+key"])


def test_cudnn_wins_only_where_the_call_is_long(no_compiler, monkeypatch):
    monkeypatch.setattr(tune.dispatch, "implementations", lambda platform: {"cudnn": None})
    long = Key("forward", "bfloat16", 64, 512, 512, 16, True)
    assert tune.measure_key(long, fake).implementation == "cudnn"
    assert tune.measure_key(long, fake).microseconds["cudnn"] == 6.0
    assert tune.measure_key(KEY, fake).implementation == "triton"


def test_a_run_goes_on_where_another_stopped(no_compiler):
    wanted = tune.keys(["bfloat16"], [64], [32, 64], 16, ["forward"])
    lines: list[str] = []
    first = tune.tune(wanted[:1], measure=fake, report=lines.append)
    assert [e.key for e in first.entries] == wanted[:1]
    stopped = tune.tune(wanted, seconds=-1, known=first, measure=fake, report=lines.append)
    assert stopped.entries == first.entries
    assert "3 of 4 keys were not measured" in lines[-1]
    whole = tune.tune(wanted, known=first, measure=fake, report=lines.append)
    assert [e.key for e in whole.entries] == wanted
    assert whole.entries[0] is first.entries[0]


def test_nothing_runs():
    class Nothing:
        pass

    def nothing(program, arguments):
        return {}

    assert tune.measure_key(Key("tangent", "bfloat16", 64, 16, 16, 1, False), nothing) is None


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("dtypes", (["int8"], [64], [64], 8, ["forward"])),
        ("kinds", (["bfloat16"], [64], [64], 8, ["sideways"])),
        ("lengths", (["bfloat16"], [64], [0], 8, ["forward"])),
        ("pairs", (["bfloat16"], [64], [64], 0, ["forward"])),
    ],
)
def test_bad_grids_are_named(name, arguments):
    with pytest.raises(ValueError, match=name):
        tune.keys(*arguments)


def test_the_command_needs_a_gpu(capsys):
    if jax.default_backend() == "gpu":
        pytest.skip("there is one")
    assert cli.main(["tune"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_what_is_written_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("PROBJAX_CACHE", str(tmp_path))
    entry = Entry(KEY, "triton", {"forward": Blocks(32, 16, 2, 1)}, {"triton": 1.5})
    path = tmp_path / tables.file_name("NVIDIA Imaginary 1")
    assert tables.table_for("NVIDIA Imaginary 1") is None
    tables.save(Table("NVIDIA Imaginary 1", {"jax": "0"}, (entry,)), path)
    found = tables.table_for("NVIDIA Imaginary 1")
    assert found is not None
    assert found.entries == (entry,)
    assert found.lookup(Key("forward", "float16", 33, 100, 90, 3, True)) == entry
    assert found.lookup(Key("backward", "bfloat16", 64, 128, 128, 16, True)) is None
    assert found.lookup(Key("forward", "bfloat16", 128, 128, 128, 16, True)) is None


def test_what_was_measured_is_kept_key_by_key(no_compiler):
    wanted, kept = tune.keys(["bfloat16"], [64], [32, 64], 16, ["forward"]), []

    def interrupted(program, arguments):
        if len(kept) == 2:
            raise KeyboardInterrupt
        return fake(program, arguments)

    with pytest.raises(KeyboardInterrupt):
        tune.tune(wanted, measure=interrupted, report=lambda line: None, keep=kept.append)
    assert [e.key for e in kept[-1].entries] == wanted[:2]


def test_one_key_that_fails_is_not_the_end(no_compiler):
    wanted, lines = tune.keys(["bfloat16"], [64], [32, 64], 16, ["forward"]), []

    def failing(program, arguments):
        if program.key == wanted[0]:
            raise RuntimeError("CUPTI saw no kernel")
        return fake(program, arguments)

    found = tune.tune(wanted, measure=failing, report=lines.append)
    assert [e.key for e in found.entries] == wanted[1:]
    assert "CUPTI saw no kernel" in lines[0]


def test_a_table_of_another_device_is_not_added_to(no_compiler):
    with pytest.raises(ValueError, match="Imaginary"):
        tune.tune([KEY], known=Table("NVIDIA Imaginary 1", {}, ()), measure=fake)


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return argparse.Namespace(
        dtypes="bfloat16",
        head_sizes="64",
        lengths="64,128",
        pairs=8,
        kinds="forward",
        seconds=float("inf"),
        append=False,
        output=tmp_path / "table.json",
    )


def test_a_gpu_without_the_kernels_is_named(words, monkeypatch, capsys):
    monkeypatch.setattr(tune.dispatch, "unavailable", lambda name, platform: f"{name} needs a newer GPU")
    assert cli._tune(words) == 2
    assert "triton needs a newer GPU" in capsys.readouterr().err
    assert not words.output.exists()


def test_an_empty_table_is_not_written(words, monkeypatch, capsys):
    monkeypatch.setattr(tune.dispatch, "unavailable", lambda name, platform: None)
    monkeypatch.setattr(tune, "tune", lambda wanted, **options: Table("GPU", {}, ()))
    assert cli._tune(words) == 1
    assert "nothing was written" in capsys.readouterr().err
    assert not words.output.exists()
