"""The attention suite at tiny sizes: rows, schema, continuing, budget, memory."""

import os
import sys

import numpy as np
import pytest
from bench_helpers import load, rows_of

from probjax.bench.attention import jax_rows, memory, suite
from probjax.bench.attention.cells import AttentionCell
from probjax.bench.attention.config import AttentionConfig, configs
from probjax.bench.attention.run import run_attention
from probjax.bench.attention.torch_row import VARIABLE, TorchPeer
from probjax.bench.measure import Unavailable

# The columns of the reference result file, of a JAX row and of a torch row.
JAX_COLUMNS = [
    "impl", "mode", "variant", "dtype", "batch", "seq", "heads", "head_dim", "lower_compile_s", "xla_temp_mb",
    "xla_arg_mb", "xla_out_mb", "compile_s", "inner", "median_ms", "q1_ms", "q3_ms", "rel_err",
]  # fmt: skip
TORCH_COLUMNS = [name for name in JAX_COLUMNS if name != "lower_compile_s" and not name.startswith("xla_")]
DEVICE_KEYS = {"jax", "backend", "devices", "python", "device_kind", "torch"}
REAL_TORCH = os.environ.get(VARIABLE)


def run(tiny, console, **fields):
    return run_attention(AttentionConfig(**{**tiny, **fields}), console=console)


def test_columns_and_headers_are_those_of_the_reference_file(tiny, console, fake_torch):
    path = run(tiny, console, impls="jax_xla,torch_sdpa", torch_python=str(fake_torch))
    data = load(path)
    assert set(data["device"]) >= DEVICE_KEYS | {
        "processor", "cores_used", "threads", "memory_gb", "jaxlib", "numpy", "allocator",
    }  # fmt: skip
    assert set(data["runs"][0]) >= {"git_revision", "git_dirty", "started", "seconds", "idle", "load_average"}
    assert len(data["results"]) == 2 * 2 * 3
    for row in data["results"]:
        wanted = JAX_COLUMNS if row["impl"] == "jax_xla" else TORCH_COLUMNS
        assert [name for name in row if name in JAX_COLUMNS] == wanted
        assert set(row) - set(wanted) == {
            "status", "tag", "run", "threads", "precision", "implementation", "min_ms", "samples",
        }  # fmt: skip
        assert row["status"] == "ok"
        assert 0 < row["min_ms"] <= row["q1_ms"] <= row["median_ms"] <= row["q3_ms"]
        assert 0 < row["rel_err"] < 2e-6
        assert row["samples"] == 3


def test_memory_columns_count_the_table_and_the_gradients(tiny, console):
    path = run(tiny, console, impls="jax_xla", heads=8)
    array = 16 * 8 * 8 * 4
    for row in load(path)["results"]:
        biased = row["variant"] == "masked_bias"
        table = 1024 if biased else 0
        assert row["xla_arg_mb"] * 2**20 == 3 * array + table
        # Gradients only, and eight bytes for each entry of the tuple that holds them.
        outputs = array if row["mode"] == "fwd" else 3 * array + table + 8 * (3 + biased)
        assert row["xla_out_mb"] * 2**20 == outputs


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_are_measured_against_their_own_rounded_inputs(tiny, console, fake_torch, dtype):
    path = run(tiny, console, impls="xla_dense,torch_sdpa", torch_python=str(fake_torch), dtypes=dtype)
    for row in load(path)["results"]:
        assert row["status"] == "ok"
        if row["impl"] == "torch_sdpa":
            # The stand-in computes in float64: what is left is its rounding to float32.
            assert row["rel_err"] < 1e-6
        else:
            assert 1e-5 < row["rel_err"] < 5e-2


def test_the_error_column_takes_the_worst_gradient(tiny, console, monkeypatch):
    real = jax_rows.prepare

    def off(impl, cell, inputs, **more):
        ready = real(impl, cell, inputs, **more)
        exact = ready.result
        name = "table" if cell.mode == "fwdbwd" else "output"
        ready.result = lambda: {n: a * (1 + 1e-4 * (n == name)) for n, a in exact().items()}
        return ready

    monkeypatch.setattr(suite.jax_rows, "prepare", off)
    path = run(tiny, console, impls="jax_xla", variants="masked_bias")
    for row in load(path)["results"]:
        assert row["rel_err"] == pytest.approx(1e-4, rel=0.1)


@pytest.mark.parametrize("wrong", [1.1, np.nan, np.inf])
def test_a_wrong_result_gets_no_time(tiny, console, monkeypatch, wrong):
    real = jax_rows.prepare

    def off(impl, cell, inputs, **more):
        ready = real(impl, cell, inputs, **more)
        exact = ready.result
        ready.result = lambda: {n: a * wrong for n, a in exact().items()}
        return ready

    monkeypatch.setattr(suite.jax_rows, "prepare", off)
    path = run(tiny, console, impls="jax_xla", variants="plain", modes="fwd")
    (row,) = load(path)["results"]
    assert row["status"] == "wrong"
    assert "wrong" in row["reason"]
    assert "median_ms" not in row


def test_without_a_reference_there_is_no_error_column(tiny, console):
    path = run(tiny, console, impls="jax_xla", variants="plain", no_ref=True)
    assert all(row["rel_err"] is None and row["status"] == "ok" for row in load(path)["results"])


def test_missing_torch_is_a_row_with_its_reason(tiny, console, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "no-such-python"))
    path = run(tiny, console, impls="jax_xla,torch_sdpa", variants="plain", modes="fwd")
    (row,) = rows_of(path, impl="torch_sdpa")
    assert row["status"] == "unavailable"
    assert VARIABLE in row["reason"]
    assert "median_ms" not in row
    assert rows_of(path, impl="jax_xla")[0]["status"] == "ok"
    assert "torch_sdpa: unavailable" in console.file.getvalue()


def test_an_interpreter_without_torch_is_a_row_with_its_reason(tiny, console, tmp_path):
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "ModuleNotFoundError: No module named torch" >&2\nexit 1\n')
    program.chmod(0o755)
    path = run(tiny, console, impls="torch_sdpa", variants="plain", modes="fwd", torch_python=str(program))
    (row,) = load(path)["results"]
    assert row["status"] == "unavailable"
    assert "No module named torch" in row["reason"]


def test_a_missing_library_is_a_row_with_its_reason(tiny, console, monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    path = run(tiny, console, impls="probjax_flax", variants="plain", modes="fwd")
    (row,) = load(path)["results"]
    assert row["status"] == "unavailable"
    assert "install flax" in row["reason"]


def test_a_row_left_out_by_an_option_says_so(tiny, console):
    path = run(tiny, console, impls="mha_interpret", variants="plain", modes="fwd", interpret_max_seq=8)
    (row,) = load(path)["results"]
    assert row["status"] == "skipped"
    assert "--interpret-max-seq 8" in row["reason"]


def test_a_bad_interpreter_given_by_hand_is_an_error(tiny, console):
    with pytest.raises(ValueError, match="--torch-python: got nowhere/python"):
        run(tiny, console, impls="torch_sdpa", torch_python="nowhere/python")


@pytest.mark.parametrize("operation", ["load", "first", "run", "result"])
def test_a_torch_process_that_dies_costs_one_cell(tiny, console, dying_torch, operation):
    path = run(
        tiny, console, impls="jax_xla,torch_sdpa", variants="plain", torch_python=str(dying_torch(operation))
    )
    first, second = rows_of(path, impl="torch_sdpa")
    assert first["status"] == "error"
    assert "SIGKILL" in first["reason"]
    assert "out of luck" in first["reason"]
    assert "median_ms" not in first
    assert second["status"] == "ok"
    assert all(row["status"] == "ok" for row in rows_of(path, impl="jax_xla"))


def test_a_torch_process_that_keeps_dying_is_given_up(fake_torch, dying_torch, tmp_path, monkeypatch):
    program = dying_torch("load")
    monkeypatch.setenv("FAKE_DIED", str(tmp_path / "nowhere" / "died"))
    peer = TorchPeer(str(program))
    cell = AttentionCell("fwd", "plain", "float32", 1, 8, 2, 4)
    from probjax.bench.attention.cells import make_inputs

    reasons = []
    for _ in range(6):
        try:
            peer.prepare(cell, make_inputs(cell))
        except Exception as error:
            reasons.append(type(error).__name__)
    peer.close()
    assert reasons[0] == "ChildDied"
    assert reasons[-1] == "Unavailable"


def test_append_measures_only_what_is_missing(tiny, console, fake_torch):
    fields = {"variants": "plain", "torch_python": str(fake_torch)}
    path = run(tiny, console, impls="jax_xla", modes="fwd", **fields)
    before = load(path)["results"]
    run(tiny, console, impls="jax_xla,torch_sdpa", append=True, **fields)
    data = load(path)
    assert data["results"][0] == before[0]
    assert [(row["impl"], row["mode"], row["run"]) for row in data["results"]] == [
        ("jax_xla", "fwd", 0),
        ("torch_sdpa", "fwd", 1),
        ("jax_xla", "fwdbwd", 1),
        ("torch_sdpa", "fwdbwd", 1),
    ]
    assert data["configs"][0]["modes"] == "fwd"
    assert data["config"]["modes"] == "fwd,fwdbwd"
    run(tiny, console, impls="jax_xla", modes="fwd", append=True, tag="after", **fields)
    rows = load(path)["results"]
    assert len(rows) == 5
    assert rows[-1]["tag"] == "after"


def test_a_spent_budget_drops_cells_and_lists_them(tiny, console):
    config = AttentionConfig(**{**tiny, "impls": "jax_xla", "budget": 1e-6})
    path = run_attention(config, console=console)
    data = load(path)
    assert data["results"] == []
    assert len(data["runs"][0]["dropped"]) == 6
    assert {cell["variant"] for cell in data["runs"][0]["dropped"]} == {"plain", "causal", "masked_bias"}
    assert "6 cells were dropped" in console.file.getvalue()


def test_several_configurations_go_into_one_file(tiny, console):
    parts = [
        AttentionConfig(**{**tiny, "impls": "jax_xla", "modes": "fwd", "variants": variant})
        for variant in ("plain", "causal")
    ]
    data = load(run_attention(parts, console=console))
    assert [row["variant"] for row in data["results"]] == ["plain", "causal"]
    assert data["configs"][0]["variants"] == "plain"
    assert data["config"]["variants"] == "causal"


def test_the_table_names_every_row(tiny, console, fake_torch):
    run(tiny, console, impls="jax_xla,torch_sdpa", torch_python=str(fake_torch))
    text = console.file.getvalue()
    for part in ("variant causal, mode fwdbwd", "torch_sdpa", "jax_xla", "written:"):
        assert part in text


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_grows_with_the_scores(tiny, console):
    path = run(
        tiny, console, impls="jax_xla", variants="plain", modes="fwd", dims="16", heads=4,
        peaks=True, peak_seqs="256,1024", peak_impls="jax_xla",
    )  # fmt: skip
    short, long = load(path)["peaks"]
    assert short["status"] == long["status"] == "ok"
    assert (short["seq"], long["seq"]) == (256, 1024)
    # The scores of the longer call alone take 16 MB.
    assert long["peak_mb"] > 14
    assert long["peak_mb"] > short["peak_mb"] + 8
    assert "peaks" in console.file.getvalue()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_max_fit_obeys_the_limit(tiny, console):
    path = run(
        tiny, console, impls="jax_xla", variants="plain", modes="fwd", dims="16", heads=4,
        max_fit=True, fit_seqs="256,4096", fit_impls="jax_xla", memory_limit="150M",
    )  # fmt: skip
    (row,) = load(path)["max_fit"]
    # 4096: scores of 256 MB.
    assert row["tried"] == {"4096": "memory", "256": "fits"}
    assert row["max_seq"] == 256
    assert row["memory_limit_mb"] == 150
    assert "seq" not in row


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_children_report_what_is_missing_and_what_hangs():
    cell = AttentionCell("fwd", "plain", "float32", 1, 16, 2, 8)
    slow = memory.peak_row("jax_xla", cell, timeout=0.05, torch_python=None)
    assert slow["status"] == "error"
    assert "no answer within" in slow["reason"]
    assert memory.fits("jax_xla", cell, limit=2**30, timeout=0.05, torch_python=None) == "timeout"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_of_torch_without_torch_is_unavailable(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    cell = AttentionCell("fwd", "plain", "float32", 1, 16, 2, 8)
    row = memory.peak_row("torch_sdpa", cell, timeout=30, torch_python=None)
    assert row["status"] == "unavailable"
    fit = memory.max_fit_row("torch_sdpa", [cell], limit=2**30, timeout=30, torch_python=None)
    assert fit["status"] == "unavailable"
    assert VARIABLE in fit["reason"]


def test_torch_itself(tiny, console, monkeypatch):
    """With PROBJAX_TORCH_PYTHON the real peer, otherwise the reason why there is none."""
    if REAL_TORCH:
        path = run(tiny, console, impls="torch_sdpa", dtypes="float32,bfloat16")
        data = load(path)
        assert len(data["results"]) == 12
        for row in data["results"]:
            assert row["status"] == "ok", row
            assert row["rel_err"] < (2e-6 if row["dtype"] == "float32" else 3e-2)
        cell = AttentionCell("fwdbwd", "masked_bias", "float32", 1, 64, 2, 8)
        assert memory.peak_row("torch_sdpa", cell, timeout=60, torch_python=None)["status"] == "ok"
        idle = data["runs"][0]["idle"]
        assert idle["torch_cpu_while_stopped_s"] == 0
    else:
        peer = TorchPeer(None)
        try:
            if peer.hello is None:
                assert "torch" in peer.reason
                cell = AttentionCell("fwd", "plain", "float32", 1, 8, 2, 4)
                with pytest.raises(Unavailable, match="torch"):
                    peer.prepare(cell, {})
            else:
                assert peer.hello["torch"]
        finally:
            peer.close()


@pytest.mark.parametrize("variant", ["documents", "window", "bias", "mask"])
def test_the_variants_of_the_gpu_preset_run_here_too(tiny, console, variant):
    impls = "probjax_default,probjax_flex,probjax_flax,jax_xla"
    path = run(tiny, console, impls=impls, variants=variant, seqs="16,24", batch=2)
    rows = load(path)["results"]
    assert len(rows) == 16
    assert all(row["status"] == "ok" and row["rel_err"] < 2e-6 for row in rows), rows


@pytest.mark.skipif(REAL_TORCH is None, reason=f"{VARIABLE} names no interpreter with torch")
@pytest.mark.parametrize("variant", ["documents", "window", "bias", "mask"])
def test_torch_computes_the_variants_of_the_gpu_preset(tiny, console, variant):
    path = run(tiny, console, impls="torch_sdpa", variants=variant, seqs="24", batch=2)
    assert all(row["status"] == "ok" and row["rel_err"] < 2e-6 for row in load(path)["results"])


def test_tokens_set_the_batch(tiny):
    cells = AttentionConfig(**{**tiny, "seqs": "16,32", "tokens": 64, "variants": "plain"}).cells()
    assert {(cell.seq, cell.batch) for cell in cells} == {(16, 4), (32, 2)}
    with pytest.raises(ValueError, match="tokens: got 64, wanted a multiple"):
        AttentionConfig(seqs="24", tokens=64)


def test_the_gpu_preset_has_the_shapes_of_the_baseline():
    cells = [cell for config in configs({"preset": "gpu"}) for cell in config.cells()]
    assert {cell.batch * cell.seq for cell in cells} == {16384}
    assert {(cell.heads, cell.head_dim, cell.dtype) for cell in cells} == {(16, 128, "bfloat16")}
    assert {(cell.variant, cell.seq) for cell in cells} >= {
        ("documents", 8192), ("window", 8192), ("bias", 4096), ("mask", 1024),
    }  # fmt: skip
    with pytest.raises(ValueError, match="xla_temp_mb"):
        configs({"preset": "gpu", "peaks": True})
