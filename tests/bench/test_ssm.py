"""The suite `ssm`: the size of the reference model, rows and columns, options, tables, the report."""

import math

import jax
import numpy as np
import pytest
from bench_helpers import load, rows_of
from flax import nnx
from rich.console import Console

from probjax.bench.network import rows as network_rows
from probjax.bench.report import read_report_file
from probjax.bench.report_data import problems, suites
from probjax.bench.ssm import suite as ssm_suite
from probjax.bench.ssm.config import IMPLS, SsmCell, SsmConfig, configs
from probjax.bench.ssm.run import print_tables, run_ssm
from probjax.cli import build_parser

# The columns of the reference file's rows, and of those of its variants.
SEED_COLUMNS = {
    "suite", "cell", "dtype", "tokens", "batch", "model_dim", "op", "params", "finite", "trace_s",
    "compile_s", "xla_temp_mb", "xla_arg_mb", "xla_out_mb", "xla_alias_mb", "inner", "median_ms", "q1_ms",
    "q3_ms", "first_call_s",
}  # fmt: skip
OURS = {
    "impl", "implementation", "layers", "rel_err", "min_ms", "samples", "status", "tag", "run", "threads",
}  # fmt: skip
SMALL = {"model_dim": 8, "layers": 2, "ssm_tokens": "5", "batch": 2, "repeats": 3, "min_sample_ms": 0.1}


def run(tmp_path, console, **fields):
    return run_ssm(SsmConfig(**{**SMALL, "output": str(tmp_path / "out.json"), **fields}), console=console)


def cell(name, **fields):
    wanted = {"dtype": "float32", "tokens": 256, "batch": 4, "model_dim": 128, "layers": 4}
    return SsmCell(**{"cell": name, "op": "forward", "variant": None, **wanted, **fields})


class TestModel:
    @pytest.mark.parametrize(("name", "count"), [("mamba", 930_704), ("ssd", 865_172), ("lru", 995_728)])
    def test_as_many_parameters_as_the_reference(self, name, count):
        model = nnx.eval_shape(lambda: ssm_suite.make_model("probjax_default", cell(name)))
        leaves = jax.tree.leaves(nnx.state(model))
        assert (sum(leaf.size for leaf in leaves), len(leaves)) == (count, 94)

    @pytest.mark.parametrize(
        ("name", "variant"),
        [
            pytest.param("mamba", None, marks=pytest.mark.slow),
            ("ssd", "remat"),
            pytest.param("lru", None, marks=pytest.mark.slow),
        ],
    )
    def test_all_forms_of_a_cell_are_one_function_of_the_same_parameters(self, name, variant):
        small = cell(name, tokens=5, batch=2, model_dim=8, layers=2, op="train_step", variant=variant)
        built = [ssm_suite.build(impl, small) for impl in IMPLS]
        losses = []
        for network in built:
            for ours, theirs in zip(
                jax.tree.leaves(built[0].parameters), jax.tree.leaves(network.parameters), strict=True
            ):
                np.testing.assert_array_equal(ours, theirs)

            def loss(parameters, network=network):
                return network_rows.mean_square(network.apply(parameters, *network.inputs))

            losses.append(jax.jit(jax.value_and_grad(loss))(built[0].parameters))
        (value, gradient), *others = losses
        assert math.isfinite(value)
        for other_value, other_gradient in others:
            np.testing.assert_allclose(other_value, value, rtol=1e-6)
            for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(other_gradient), strict=True):
                np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-5 * float(np.abs(ours).max()))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The result file of a run with variants; its table is beside it, in `text`."""
    folder = tmp_path_factory.mktemp("ssm")
    wanted = [
        SsmConfig(**{**SMALL, "cells": "lru", "output": str(folder / "out.json")}),
        SsmConfig(**{**SMALL, "cells": "lru", "variants": "donate", "impls": "probjax_default"}),
    ]
    with (folder / "text").open("w") as text:
        return run_ssm(wanted, console=Console(file=text, width=160))


class TestRun:
    def test_columns_are_those_of_the_reference_file(self, path):
        data = load(path)
        assert data["configs"][0]["suites"] == ["ssm"]
        plain = [row for row in data["results"] if "variant" not in row]
        assert [(row["op"], row["impl"]) for row in plain] == [
            (op, impl) for op in ("forward", "train_step") for impl in IMPLS
        ]
        for row in data["results"]:
            assert row["status"] == "ok"
            named = {"variant"} if "variant" in row else set()
            named |= {"grad_err"} if row["op"] == "train_step" else set()
            assert set(row) == SEED_COLUMNS | OURS | named
            assert row["finite"] is True
            assert 0 < row["q1_ms"] <= row["median_ms"] <= row["q3_ms"]
            assert 0 <= row["rel_err"] < 1e-5 and row.get("grad_err", 0) < 1e-5

    def test_memory_columns_count_parameters_and_state(self, path):
        for row in load(path)["results"]:
            params, leaves, tokens = 4 * row["params"], 6 + 2 * 22, 4 * 2 * 5 * 16
            inputs, outputs = (row[f"xla_{name}_mb"] * 2**20 for name in ("arg", "out"))
            if row["op"] == "forward":
                assert (inputs, outputs) == (params + tokens, tokens)
            else:
                # Two moments, a step counter, the loss; a pointer to each array in a tuple.
                assert inputs == 3 * params + 4 + tokens
                assert outputs == 3 * params + 8 + 8 * (3 * leaves + 2)
            assert row["xla_temp_mb"] > 0
            given = row.get("variant") == "donate"
            assert row["xla_alias_mb"] * 2**20 == (3 * params + 4 if given else 0)

    def test_the_table_has_the_ratio_to_the_naive_form(self, path):
        text = (path.parent / "text").read_text()
        assert "xla" in text and "associative" in text and "1.00x" in text
        assert "probjax_default: times faster than" in text

    def test_finished_rows_are_not_measured_again(self, path, console, monkeypatch):
        before = load(path)["results"]
        monkeypatch.setattr(ssm_suite.rows, "prepare", None)
        run_ssm(SsmConfig(**SMALL, cells="lru", output=str(path), append=True), console=console)
        assert load(path)["results"] == before


def test_remat_keeps_less(tmp_path, console):
    path = run(
        tmp_path, console, cells="lru", ssm_tokens="64", variants="plain,remat", impls="probjax_default"
    )
    (plain,), (remat,) = rows_of(path, variant="plain"), rows_of(path, variant="remat")
    assert remat["xla_temp_mb"] < 0.9 * plain["xla_temp_mb"]


def test_half_precision_rows_are_compared_with_float64(tmp_path, console):
    path = run(tmp_path, console, cells="mamba", dtypes="bfloat16", ops="forward", impls="probjax_default")
    (row,) = load(path)["results"]
    assert row["status"] == "ok" and 1e-4 < row["rel_err"] < 0.1


def test_what_needs_too_much_memory_is_skipped_with_the_reason(tmp_path, console):
    path = run(tmp_path, console, cells="lru", ops="forward", impls="xla_associative", memory_limit="1K")
    (row,) = load(path)["results"]
    assert row["status"] == "skipped" and "more than --memory-limit 1K" in row["reason"]
    assert "xla_associative: skipped in 1 cell" in console.file.getvalue()


@pytest.mark.parametrize("wrong", [np.nan, 2.0])
def test_a_wrong_result_gets_no_time(tmp_path, console, monkeypatch, wrong):
    real = ssm_suite.reference
    monkeypatch.setattr(ssm_suite, "reference", lambda *a, **k: real(*a, **k) * wrong)
    path = run(tmp_path, console, cells="lru", ops="forward", impls="probjax_scan")
    (row,) = load(path)["results"]
    assert row["status"] == "wrong" and "median_ms" not in row


class TestConfig:
    def parse(self, *words):
        return SsmConfig(**SsmConfig.given(build_parser().parse_args(["bench", "ssm", *words])))

    def test_defaults_are_the_reference_grid(self):
        grid = self.parse().grid()
        assert {(c.cell, c.tokens, c.op, c.dtype, c.batch, c.model_dim, c.variant) for c in grid} == {
            (name, tokens, op, "float32", 4, 128, None)
            for name in ("mamba", "ssd", "lru")
            for tokens in (256, 1024)
            for op in ("forward", "train_step")
        }

    def test_tokens_has_two_names(self):
        assert self.parse("--tokens", "64,128") == self.parse("--ssm-tokens", "64,128")
        with pytest.raises(SystemExit):
            self.parse("--tokens", "none")

    def test_the_reference_files_keys_are_understood(self):
        seed = {
            "ssm_tokens": [256, 1024],
            "cells": ["mamba", "ssd", "lru"],
            "dtypes": ["float32"],
            "batch": 4,
        }
        config = SsmConfig.from_header({**seed, "unet_res": [32], "repeats": 7, "peak": False})
        assert config.ssm_tokens == (256, 1024) and config.grid() == SsmConfig().grid()
        assert config.header()["ssm_tokens"] == [256, 1024]

    def test_variants_are_of_train_steps_only(self):
        grid = SsmConfig(cells="lru", ssm_tokens="64", variants="none,remat").grid()
        assert [(c.op, c.variant) for c in grid] == [
            ("forward", None), ("train_step", None), ("train_step", "remat"),
        ]  # fmt: skip

    def test_the_reference_preset_has_every_row_of_the_file_and_its_peer(self):
        wanted = configs({"preset": "reference"})
        have = {(c.cell, c.tokens, c.op, c.variant): part.impls for part in wanted for c in part.grid()}
        assert have["mamba", 1024, "train_step", None] == IMPLS
        assert have["lru", 1024, "train_step", "donate"] == IMPLS
        assert have["mamba", 1024, "train_step", "remat"] == IMPLS[:2]


def seed_rows():
    named = {"suite": "ssm", "dtype": "float32", "batch": 4}
    plain = [
        {**named, "cell": name, "tokens": tokens, "model_dim": 128, "op": op, "params": 9, "median_ms": 100.0}
        for name in ("mamba", "lru")
        for tokens in (256, 1024)
        for op in ("forward", "train_step")
    ]
    broken = {**named, "cell": "ssd", "tokens": 256, "op": "forward", "error": "needs an accelerator"}
    variants = [
        {**named, "cell": "lru", "tokens": 1024, "op": "train_step", "variant": variant, "median_ms": 90.0}
        for variant in ("plain", "remat", "donate")
    ]
    return [*plain, broken, *variants]


class TestReport:
    def files(self, tmp_path):
        import json

        ours = [
            {**row, "impl": impl, "layers": 4, "status": "ok", "run": 0, "tag": None}
            for row in seed_rows()
            if "error" not in row
            for impl in IMPLS
        ]
        for name, rows in (("ours.json", ours), ("seed.json", seed_rows())):
            (tmp_path / name).write_text(json.dumps({"device": {"backend": "cpu"}, "results": rows}))
        return [read_report_file(tmp_path / name) for name in ("ours.json", "seed.json")]

    def test_beside_the_seed_rows_meet_by_cell_length_and_operation(self, tmp_path):
        found = {suite["name"]: suite for suite in suites(self.files(tmp_path))}
        suite = found["ssm"]
        assert [suite[name] for name in ("x", "series", "over", "down")] == ["tokens", "impl", "cell", "op"]
        assert suite["selectors"] == [] and suite["peer"] == "xla_associative"
        seed = [point for point in suite["points"] if point["file"] == 1]
        assert {point["series"] for point in seed} == {"probjax_default"}
        ours = {(p["x"], p["over"], p["down"]) for p in suite["points"] if p["file"] == 0}
        assert {(p["x"], p["over"], p["down"]) for p in seed} == ours

    def test_variants_are_compared_too(self, tmp_path):
        suite = {suite["name"]: suite for suite in suites(self.files(tmp_path))}["remat"]
        labels = {str(point["label"]) for point in suite["points"] if point["file"] == 1}
        assert labels <= {str(point["label"]) for point in suite["points"] if point["file"] == 0}

    def test_what_the_seed_could_not_run_is_listed_by_its_cell(self, tmp_path):
        (problem,) = problems(self.files(tmp_path))
        assert (problem["label"], problem["file"]) == ("ssd", 1)


def test_a_table_of_variants(console):
    rows = [
        {
            **row,
            "impl": impl,
            "model_dim": 8,
            "layers": 4,
            "q1_ms": 1.0,
            "q3_ms": 2.0,
            "status": "ok",
            "xla_temp_mb": 98.3,
        }
        for row in seed_rows()
        if "error" not in row
        for impl in IMPLS
    ]
    print_tables(console, rows)
    text = console.file.getvalue()
    assert "None" not in text and "remat" in text and "98.3" in text
