"""The suite `recurrence`: its float64 reference, rows and columns, options, missing peers, tables."""

import os
import sys

import numpy as np
import pytest
from bench_helpers import load, rows_of

from probjax.bench.attention.torch_row import VARIABLE
from probjax.bench.recurrence import rows as recurrence_rows
from probjax.bench.recurrence import suite as recurrence_suite
from probjax.bench.recurrence.cells import MODES, OPS, RecurrenceCell, make_inputs
from probjax.bench.recurrence.config import ALL_IMPLS, IMPLS, RecurrenceConfig, configs
from probjax.bench.recurrence.oracle import reference
from probjax.bench.recurrence.run import run_recurrence
from probjax.bench.report import read_report_file
from probjax.bench.report_data import suites
from probjax.cli import build_parser

COLUMNS = {
    "impl", "suite", "op", "mode", "dtype", "batch", "seq", "heads", "channels", "state", "lower_compile_s",
    "xla_temp_mb", "xla_arg_mb", "xla_out_mb", "compile_s", "inner", "median_ms", "q1_ms", "q3_ms", "min_ms",
    "samples", "rel_err", "status", "tag", "run", "threads", "precision", "implementation",
}  # fmt: skip
SMALL = {
    "seqs": "3", "channels": 6, "state": 3, "ssd_shapes": "2x3", "batch": 2, "repeats": 3,
    "min_sample_ms": 0.1,
}  # fmt: skip
PLAIN = "probjax_default,probjax_scan,xla_associative,xla_sequential"
REAL_TORCH = os.environ.get(VARIABLE)


def run(tmp_path, console, **fields):
    config = RecurrenceConfig(**{**SMALL, "output": str(tmp_path / "out.json"), **fields})
    return run_recurrence(config, console=console)


class TestReference:
    @pytest.mark.parametrize("op", OPS)
    def test_gradients_are_the_slopes_of_its_own_output(self, op):
        # 70 steps are more than two of the chunks that states are made again in.
        cell = RecurrenceCell(op, "fwdbwd", "float32", 2, 70, 6, 3 if op != "linear_scan" else 1, 2)
        inputs = {
            name: array.astype(np.result_type(array, np.float64)) for name, array in make_inputs(cell).items()
        }
        found = reference(op, inputs, gradients=True)
        generator = np.random.default_rng(0)
        for name in cell.operands:
            parts = (1, 1j) if np.iscomplexobj(inputs[name]) else (1,)
            for part in parts:
                way = part * generator.standard_normal(inputs[name].shape)
                values = []
                for sign in (1, -1):
                    moved = {**inputs, name: inputs[name] + sign * 1e-5 * way}
                    output = reference(op, moved, gradients=False)["output"]
                    values.append(np.sum(output * inputs["cotangent"]).real)
                slope = (values[0] - values[1]) / 2e-5
                np.testing.assert_allclose(np.sum(found[name] * way).real, slope, rtol=1e-6, atol=1e-7)

    def test_output_of_three_steps_by_hand(self):
        a, b = np.array([[[0.5], [0.25], [2.0]]]), np.array([[[1.0], [3.0], [5.0]]])
        found = reference("linear_scan", {"a": a, "b": b}, gradients=False)
        np.testing.assert_array_equal(found["output"][0, :, 0], [1.0, 3.25, 11.5])


class TestRun:
    def test_columns_are_those_of_attention_and_memory(self, tmp_path, console):
        path = run(tmp_path, console, impls=PLAIN)
        rows = load(path)["results"]
        assert len(rows) == len(OPS) * len(MODES) * 4
        for row in rows:
            assert set(row) == COLUMNS and row["status"] == "ok"
            assert 0 < row["rel_err"] < 1e-5 and row["xla_temp_mb"] >= 0
        text = console.file.getvalue()
        assert "associative" in text and "1.00x" in text
        for peer in ("xla_associative", "xla_sequential"):
            assert peer in text.split("times faster than")[1]

    def test_finished_rows_are_not_measured_again(self, tmp_path, console, monkeypatch):
        wanted = {"operations": "linear_scan", "impls": "probjax_default", "modes": "fwd"}
        before = load(run(tmp_path, console, **wanted))["results"]
        monkeypatch.setattr(recurrence_rows, "prepare", None)
        assert load(run(tmp_path, console, append=True, **wanted))["results"] == before

    def test_half_precision(self, tmp_path, console):
        path = run(
            tmp_path, console, impls="probjax_default", dtypes="bfloat16", operations="selective_scan,ssd"
        )
        for row in load(path)["results"]:
            assert row["status"] == "ok" and 1e-4 < row["rel_err"] < 2e-2

    def test_named_implementations(self, tmp_path, console):
        path = run(tmp_path, console, impls="probjax_reference,probjax_native", modes="fwd", operations="ssd")
        (exact,), (native,) = rows_of(path, impl="probjax_reference"), rows_of(path, impl="probjax_native")
        assert exact["status"] == "ok" and exact["implementation"] == "reference"
        assert native["status"] == "unavailable" and "native" in native["reason"]

    def test_long_sequences_of_slow_rows_are_skipped(self, tmp_path, console):
        path = run(tmp_path, console, impls="xla_associative", slow_max_seq=2, modes="fwd")
        skipped = rows_of(path, status="skipped")
        assert {row["op"] for row in skipped} == {"selective_scan", "ssd"}
        assert all("--slow-max-seq 2" in row["reason"] for row in skipped)

    def test_what_needs_too_much_memory_is_skipped(self, tmp_path, console):
        path = run(
            tmp_path,
            console,
            impls="xla_associative",
            operations="linear_scan",
            memory_limit="16",
            modes="fwd",
        )
        assert "--memory-limit 16" in load(path)["results"][0]["reason"]

    def test_a_wrong_result_gets_no_time(self, tmp_path, console, monkeypatch):
        real = recurrence_suite.reference

        def off(*arguments, **options):
            return {name: 1.1 * array for name, array in real(*arguments, **options).items()}

        monkeypatch.setattr(recurrence_suite, "reference", off)
        path = run(tmp_path, console, impls="probjax_default", operations="linear_scan", modes="fwd")
        (row,) = load(path)["results"]
        assert row["status"] == "wrong" and "median_ms" not in row


class TestPeers:
    def test_missing_torch_is_a_row_with_its_reason(self, tmp_path, console, monkeypatch):
        monkeypatch.setenv(VARIABLE, str(tmp_path / "no-such-python"))
        path = run(tmp_path, console, impls="torch_reference", operations="selective_scan,ssd", modes="fwd")
        selective, ssd = load(path)["results"]
        assert selective["status"] == ssd["status"] == "unavailable"
        assert VARIABLE in selective["reason"] and "selective scan only" in ssd["reason"]
        assert "torch_reference: unavailable" in console.file.getvalue()

    def test_an_interpreter_without_torch_is_a_row_with_its_reason(self, tmp_path, console):
        program = tmp_path / "python"
        program.write_text('#!/bin/sh\necho "ModuleNotFoundError: No module named torch" >&2\nexit 1\n')
        program.chmod(0o755)
        path = run(
            tmp_path,
            console,
            impls="torch_reference",
            operations="selective_scan",
            modes="fwd",
            torch_python=str(program),
        )
        (row,) = load(path)["results"]
        assert row["status"] == "unavailable" and "No module named torch" in row["reason"]

    @pytest.mark.skipif(not REAL_TORCH, reason=f"{VARIABLE} is not set")
    def test_the_loop_in_torch(self, tmp_path, console):
        path = run(tmp_path, console, impls="torch_reference", operations="selective_scan")
        assert len(load(path)["results"]) == 2
        for row in load(path)["results"]:
            assert row["status"] == "ok" and 0 < row["rel_err"] < 1e-5 and row["median_ms"] > 0

    def test_missing_package_is_a_row_with_its_reason(self, tmp_path, console, monkeypatch):
        monkeypatch.setitem(sys.modules, "jla", None)
        monkeypatch.setitem(sys.modules, "jla.ops", None)
        path = run(tmp_path, console, impls="jax_linear_attention", operations="ssd", modes="fwd")
        (row,) = load(path)["results"]
        assert row["status"] == "unavailable" and "install jax-linear-attention" in row["reason"]


class TestConfig:
    def parse(self, *words):
        arguments = build_parser().parse_args(["bench", "recurrence", *words])
        return RecurrenceConfig(**RecurrenceConfig.given(arguments))

    def test_defaults(self):
        config = self.parse()
        assert config.impls == IMPLS and "probjax_reference" in set(ALL_IMPLS) - set(IMPLS)
        shapes = {(c.op, c.batch, c.heads, c.channels, c.state) for c in config.grid()}
        assert shapes == {
            ("linear_scan", 4, 1, 128, 1), ("linear_scan_complex", 4, 1, 128, 1),
            ("selective_scan", 4, 1, 128, 128), ("ssd", 4, 1, 128, 128), ("ssd", 4, 4, 256, 128),
        }  # fmt: skip
        assert {c.seq for c in config.grid()} == {256, 1024, 4096}

    @pytest.mark.parametrize("shapes", ["4", "4x", "x64", "0x64", "4x64x2", ""])
    def test_shapes_of_ssd_are_pairs(self, shapes):
        with pytest.raises(ValueError, match="ssd_shapes"):
            RecurrenceConfig(ssd_shapes=shapes)

    def test_header_round_trip(self):
        config = self.parse(
            "--operations", "ssd", "--ssd-shapes", "2x16", "--seqs", "64", "--torch-python", "x"
        )
        assert config.header()["torch_python"] == "given"
        again = RecurrenceConfig.from_header({**config.header(), "torch_python": "x"})
        assert again == config

    def test_the_gpu_preset_reaches_16384(self):
        (config,) = configs({"preset": "gpu"})
        assert config.device == "gpu" and max(config.seqs) == 16384 <= config.slow_max_seq
        assert configs({"preset": "gpu", "seqs": "1024"})[0].seqs == (1024,)


def test_the_report_has_operations_across_and_modes_down(tmp_path, console):
    impls = {"impls": "probjax_scan,xla_sequential", "operations": "linear_scan,linear_scan_complex"}
    path = run(tmp_path, console, **impls, seqs="2,3", no_ref=True, repeats=1)
    (suite,) = suites([read_report_file(path)])
    assert [suite[name] for name in ("name", "x", "series", "over", "down")] == [
        "recurrence", "seq", "impl", "op", "mode",
    ]  # fmt: skip
    assert suite["peers"] == ["probjax_scan", "xla_sequential"]
