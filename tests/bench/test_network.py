"""The suites of whole networks: reference workloads, rows and columns, errors, peers, tables, the report."""

import json
import os

import jax
import numpy as np
import pytest
from bench_helpers import load, rows_of
from flax import nnx
from rich.console import Console

from probjax.bench import (
    DiffusionConfig,
    MoeConfig,
    RematConfig,
    ScanRematConfig,
    TransformerConfig,
    UnetConfig,
)
from probjax.bench import run_network as run_suite
from probjax.bench.attention.torch_row import VARIABLE
from probjax.bench.help import SUITES
from probjax.bench.network import models, rows
from probjax.bench.network.peers import flax_network
from probjax.bench.network.tables import against, attention_cost, print_tables
from probjax.bench.report import read_report_file
from probjax.bench.report_data import suites
from probjax.bench.suites import load as load_object
from probjax.bench.unet.model import narrow_unet
from probjax.cli import build_parser

MEMORY = {"xla_temp_mb", "xla_arg_mb", "xla_out_mb", "xla_alias_mb"}
TIMES = {"inner", "median_ms", "q1_ms", "q3_ms", "first_call_s", "trace_s", "compile_s"}
# The columns of the reference file's rows.
SEED_COLUMNS = {
    "transformer": {"attention", "tokens", "model_dim"},
    "diffusion": {"attention", "tokens", "model_dim"},
    "scan_remat": {"attention", "tokens", "model_dim", "model", "layers", "scan", "remat"},
    "unet": {"resolution"},
}
SEED_COLUMNS = {
    suite: {"suite", "dtype", "batch", "op", "params", "finite"} | columns | MEMORY | TIMES
    for suite, columns in SEED_COLUMNS.items()
}
# The keys of its configurations.
SEED_KEYS = {
    "transformer": {"tokens", "batch", "model_dim", "attention"},
    "diffusion": {"tokens", "batch", "model_dim", "attention"},
    "unet": {"unet_res", "batch"},
    "moe": {"moe_tokens", "batch"},
    "remat": {"tokens", "ssm_tokens", "unet_res", "batch", "attention", "cells"},
    "scan_remat": {"models", "layers", "scan_tokens", "scan_batch", "attention"},
}
SMALL = {"model_dim": 16, "layers": 1, "dtypes": "float32", "repeats": 3, "min_sample_ms": 0.1}
SHORT = {**SMALL, "tokens": "4,6", "batch": 2}
OURS = ("probjax_default", "jax_xla", "no_attention", "probjax_flax", "flax")
REAL_TORCH = os.environ.get(VARIABLE)


def run(tmp_path, console, make, **fields):
    return run_suite(make(**{"output": str(tmp_path / "out.json"), **fields}), console=console)


def configs_of(suite, **given):
    return load_object(SUITES[suite].configs)(given)


class TestWorkloads:
    @pytest.mark.parametrize(
        ("model", "sizes", "count", "leaves"),
        [
            ("transformer", {}, 3_159_040, 64),
            ("transformer", {"features": 512, "layers": 12}, 37_828_608, 192),
            ("transformer", {"features": 512, "layers": 24, "scan_layers": True}, 75_657_216, 16),
            ("diffusion", {}, 5_817_896, 105),
        ],
    )
    def test_parameters_are_those_of_the_reference(self, model, sizes, count, leaves):
        made = nnx.eval_shape(
            lambda: models.model_of(model, attention="probjax_default", dtype="float32", **sizes)
        )
        found = jax.tree.leaves(nnx.state(made))
        assert (sum(leaf.size for leaf in found), len(found)) == (count, leaves)

    def test_of_the_narrow_unet_too(self):
        found = jax.tree.leaves(nnx.state(nnx.eval_shape(lambda: narrow_unet(np.float32, nnx.Rngs(0)))))
        assert (sum(leaf.size for leaf in found), len(found)) == (2_803_968, 82)

    def test_no_kernel_is_zero(self):
        model = models.model_of(
            "diffusion", attention="probjax_default", dtype="float32", features=16, layers=1
        )
        inputs = models.inputs_of("diffusion", dtype="float32", batch=2, tokens=3, features=16)
        network = models.as_network(model, inputs)
        assert all(leaf.any() for leaf in network.arrays if leaf.ndim > 1)
        moved = network.apply(network.parameters, inputs[0], inputs[1] + 0.25)
        assert float(np.abs(moved - network.apply(network.parameters, *inputs)).max()) > 1e-3


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The result file of a run of the suite `transformer`; its table is beside it, in `text`."""
    folder = tmp_path_factory.mktemp("transformer")
    config = TransformerConfig(**SHORT, attention=OURS, output=str(folder / "out.json"))
    with (folder / "text").open("w") as text:
        return run_suite(config, console=Console(file=text, width=160))


class TestTransformer:
    def test_columns_are_those_of_the_reference_file(self, path):
        data = load(path)
        assert data["config"]["suites"] == ["transformer"] and data["config"]["tokens"] == [4, 6]
        assert [(row["op"], row["tokens"], row["impl"]) for row in data["results"]] == [
            (op, tokens, impl) for tokens in (4, 6) for op in ("forward", "train_step") for impl in OURS
        ]
        for row in data["results"]:
            assert row["status"] == "ok" and set(row) > SEED_COLUMNS["transformer"]
            assert row["attention"] == row["impl"] and row["finite"] is True
            assert 0 < row["rel_err"] < 1e-5
            assert ("grad_err" in row) == (row["op"] == "train_step") and row.get("grad_err", 0) < 1e-5

    def test_without_attention_two_projections_are_no_arguments(self, path):
        found = {row["impl"]: row for row in rows_of(path, op="forward", tokens=4)}
        less = found["jax_xla"]["xla_arg_mb"] - found["no_attention"]["xla_arg_mb"]
        assert less * 2**20 == 2 * (16 * 16 + 16) * 4

    def test_memory_columns_count_parameters_and_state(self, path):
        for row in rows_of(path, op="train_step"):
            params, x, leaves = 4 * row["params"], 4 * 2 * row["tokens"] * 16, 16
            assert row["xla_arg_mb"] * 2**20 == 3 * params + 4 + x
            assert row["xla_out_mb"] * 2**20 == 3 * params + 8 + 8 * (3 * leaves + 2)

    def test_the_tables_have_the_peers_and_what_attention_costs(self, path):
        text = (path.parent / "text").read_text()
        assert "1.00x" in text and "flax" in text and "what attention costs" in text
        assert "jax_xla ms" in text and "memory ratio" in text

    def test_the_model_in_flax_is_the_same_function_of_the_same_parameters(self):
        sizes = {"features": 16, "layers": 2}
        inputs = models.inputs_of("transformer", dtype="float32", batch=2, tokens=5, features=16)
        model = models.model_of("transformer", attention="jax_xla", dtype="float32", **sizes)
        ours = models.as_network(model, inputs)
        theirs = flax_network(ours, dtype="float32", **sizes)
        assert (theirs.count, theirs.leaves) == (ours.count, ours.leaves)
        np.testing.assert_allclose(
            theirs.apply(ours.parameters, *inputs), ours.apply(ours.parameters, *inputs), rtol=1e-5, atol=1e-5
        )

    def test_half_precision(self, tmp_path, console):
        fields = {**SHORT, "tokens": "4", "dtypes": "bfloat16", "attention": "probjax_default,flax"}
        path = run(tmp_path, console, TransformerConfig, **fields)
        for row in load(path)["results"]:
            assert row["status"] == "ok" and row["rel_err"] < 5e-2
            assert row["rel_err"] > 1e-4 or row["op"] == "train_step"

    def test_missing_torch_is_a_row_with_its_reason(self, tmp_path, console, monkeypatch):
        monkeypatch.setenv(VARIABLE, str(tmp_path / "no-such-python"))
        path = run(
            tmp_path, console, TransformerConfig, **{**SHORT, "tokens": "4"}, attention="torch", ops="forward"
        )
        (row,) = load(path)["results"]
        assert row["status"] == "unavailable" and VARIABLE in row["reason"]

    @pytest.mark.skipif(not REAL_TORCH, reason=f"{VARIABLE} is not set")
    def test_the_model_in_torch(self, tmp_path, console):
        fields = {**SHORT, "tokens": "5", "layers": 2, "dtypes": "float32,bfloat16", "attention": "torch"}
        path = run(tmp_path, console, TransformerConfig, **fields)
        assert len(load(path)["results"]) == 4
        for row in load(path)["results"]:
            assert row["status"] == "ok" and row["median_ms"] > 0 and row["finite"] is True
            assert row["rel_err"] < (1e-5 if row["dtype"] == "float32" else 5e-2)
            assert ("autocast" in row["implementation"]) == (row["dtype"] == "bfloat16")


ONE_ROW = {**SHORT, "tokens": "6", "attention": "jax_xla"}


class TestWrong:
    def only(self, path):
        (row,) = load(path)["results"]
        assert row["status"] == "wrong" and "median_ms" not in row
        return row

    def test_another_attention(self, tmp_path, console, monkeypatch):
        monkeypatch.setattr(models, "attention_function", lambda label: models._values)
        row = self.only(run(tmp_path, console, TransformerConfig, **ONE_ROW, ops="forward"))
        assert "the result is wrong" in row["reason"] and row["rel_err"] > 1e-3

    @pytest.mark.parametrize(("factor", "said"), [(1.01, "gradient is wrong"), (np.nan, "not finite")])
    def test_other_gradients(self, tmp_path, console, monkeypatch, factor, said):
        real = rows.along
        monkeypatch.setattr(rows, "along", lambda *a: tuple(factor * value for value in real(*a)))
        row = self.only(run(tmp_path, console, TransformerConfig, **ONE_ROW, ops="train_step"))
        assert said in row["reason"]


def test_diffusion(tmp_path, console):
    fields = {**SHORT, "tokens": "5", "attention": "probjax_default,no_attention"}
    path = run(tmp_path, console, DiffusionConfig, **fields)
    assert len(load(path)["results"]) == 4
    for row in load(path)["results"]:
        assert row["status"] == "ok" and set(row) > SEED_COLUMNS["diffusion"] and row["rel_err"] < 1e-5
        assert row.get("grad_err", 0) < 1e-5


def test_scan_remat(tmp_path, console):
    small = {**SMALL, "layers": "3", "scan_tokens": 32, "scan_batch": 2, "remat": "none,full"}
    path = run(tmp_path, console, ScanRematConfig, **small)
    found = {(row["scan"], row["remat"]): row for row in load(path)["results"]}
    assert set(found) == {(scan, remat) for scan in (False, True) for remat in ("none", "full")}
    for row in found.values():
        assert row["status"] == "ok" and set(row) > SEED_COLUMNS["scan_remat"]
        assert row["rel_err"] < 1e-5 and row["grad_err"] < 1e-5
    for scan in (False, True):
        assert found[scan, "full"]["xla_temp_mb"] < 0.8 * found[scan, "none"]["xla_temp_mb"]
    assert "against remat none" in console.file.getvalue()


def test_remat_and_donation(tmp_path, console):
    small = {**SMALL, "layers": 2, "batch": 2, "tokens": 32, "ssm_tokens": 32, "models": "transformer,ssm"}
    path = run(tmp_path, console, RematConfig, **small)
    for suite in ("transformer", "ssm"):
        found = {row["variant"]: row for row in rows_of(path, suite=suite)}
        assert set(found) == {"plain", "remat", "donate"}
        assert all(row["status"] == "ok" and row["grad_err"] < 1e-5 for row in found.values())
        assert found["remat"]["xla_temp_mb"] < 0.9 * found["plain"]["xla_temp_mb"]
        assert found["donate"]["xla_alias_mb"] * 2**20 == 3 * 4 * found["plain"]["params"] + 4
    assert "against variant plain" in console.file.getvalue()


def test_unet(tmp_path, console):
    small = {"unet_res": "4", "batch": 1, "dtypes": "float32", "repeats": 3, "min_sample_ms": 0.1}
    path = run(tmp_path, console, UnetConfig, **small, ops="forward")
    narrow, wide = load(path)["results"]
    assert (narrow["model"], narrow["params"]) == ("unet_narrow", 2_803_968)
    assert wide["model"] == "unet_2d" and wide["params"] > narrow["params"]
    for row in (narrow, wide):
        assert row["status"] == "ok" and set(row) > SEED_COLUMNS["unet"] and row["rel_err"] < 1e-5


def test_mixture_of_experts(tmp_path, console):
    small = {"model_dim": 8, "moe_tokens": "12", "experts": 4, "dtypes": "float32", "repeats": 3}
    path = run(tmp_path, console, MoeConfig, **small, min_sample_ms=0.1)
    found = load(path)["results"]
    assert [(row["op"], row["impl"]) for row in found] == [
        (op, impl) for op in ("forward", "train_step") for impl in ("dense", "dropless", "capacity")
    ]
    for row in found:
        assert row["status"] == "ok" and row["rel_err"] < 1e-5 and row.get("grad_err", 0) < 1e-5
        assert row["experts"] == 4 and row["selected"] == 2


class TestConfig:
    @pytest.mark.parametrize("suite", list(SEED_KEYS))
    def test_keys_of_the_reference_file_are_flags_and_header_keys(self, suite, capsys):
        keys = SEED_KEYS[suite] | {"device", "output", "suites", "dtypes", "repeats", "append"}
        (config,) = configs_of(suite)
        assert keys <= set(config.header())
        with pytest.raises(SystemExit):
            build_parser().parse_args(["bench", suite, "--help"])
        shown = capsys.readouterr().out
        for key in keys - {"suites"}:
            assert "--" + key.replace("_", "-") in shown

    @pytest.mark.parametrize("suite", list(SEED_KEYS))
    def test_presets(self, suite):
        (quick,) = configs_of(suite, preset="quick")
        assert quick.budget == 150.0 and configs_of(suite, preset="quick", repeats=3)[0].repeats == 3
        assert len(quick.grid()) <= len(configs_of(suite, preset="reference")[0].grid())

    def test_the_reference_grids(self):
        grids = {suite: configs_of(suite, preset="reference")[0].grid() for suite in SEED_KEYS}
        for suite in ("transformer", "diffusion"):
            assert {(c.dtype, c.tokens, c.op, c.batch, c.model_dim, c.layers) for c in grids[suite]} == {
                (dtype, tokens, op, 4, 256, 4)
                for dtype in ("float32", "bfloat16")
                for tokens in (128, 512)
                for op in ("forward", "train_step")
            }
        assert {(c.layers, c.scan, c.remat) for c in grids["scan_remat"]} == {
            (layers, scan, remat)
            for layers in (12, 24)
            for scan in (False, True)
            for remat in ("none", "full", "dots_saveable", "save_attention")
        }
        assert {(c.tokens, c.batch, c.model_dim) for c in grids["scan_remat"]} == {(512, 2, 512)}
        assert {(c.columns()["suite"], c.variant) for c in grids["remat"]} == {
            (suite, variant)
            for suite in ("transformer", "unet", "ssm")
            for variant in ("plain", "remat", "donate")
        }
        assert {(c.model, c.dtype, c.resolution, c.op) for c in grids["unet"]} == {
            (model, dtype, 32, op)
            for model in ("unet_narrow", "unet_2d")
            for dtype in ("float32", "bfloat16")
            for op in ("forward", "train_step")
        }


def made(suite, **more):
    """Rows as a run of the reference preset would write them."""
    (config,) = configs_of(suite, preset="reference")
    labelled = suite in ("transformer", "diffusion", "scan_remat")
    return [
        {
            "impl": impl,
            **cell.columns(),
            **({"attention": impl} if labelled else {}),
            "median_ms": 2.0,
            "q1_ms": 1.9,
            "q3_ms": 2.1,
            "xla_temp_mb": 4.0,
            "status": "ok",
            "run": 0,
            "tag": None,
            **more,
        }
        for cell in config.grid()
        for impl in config.impls
    ]


def as_seed(rows):
    """Those of the rows that the reference file has, with the columns that it has."""
    labels = ("probjax_default", "jax_xla", "no_attention")
    found = []
    for row in rows:
        if row["impl"] not in labels or row.get("model") == "unet_2d" or row.get("remat") == "save_attention":
            continue
        dropped = {"impl", "status", "run", "tag"} | ({"layers"} if row["suite"] != "scan_remat" else set())
        dropped |= {"model"} if row["suite"] == "unet" else set()
        found.append({name: value for name, value in row.items() if name not in dropped})
    return found


class TestReport:
    @pytest.mark.parametrize(
        ("suite", "roles", "peer"),
        [
            ("transformer", ("tokens", "impl", None, "op"), "jax_xla"),
            ("diffusion", ("tokens", "impl", None, "op"), "jax_xla"),
            ("unet", (None, "model", None, None), "unet_narrow"),
            ("remat", (None, "variant", None, None), "plain"),
            ("scan_remat", ("layers", "remat", "scan", None), "none"),
        ],
    )
    def test_beside_the_reference_file_rows_meet(self, tmp_path, suite, roles, peer):
        ours = made(suite)
        for name, found in (("ours.json", ours), ("seed.json", as_seed(ours))):
            (tmp_path / name).write_text(json.dumps({"device": {"backend": "cpu"}, "results": found}))
        (shown,) = suites([read_report_file(tmp_path / name) for name in ("ours.json", "seed.json")])
        assert shown["name"] == suite and shown["peer"] == peer
        assert tuple(shown[name] for name in ("x", "series", "over", "down")) == roles
        names = ("series", "x", "over", "down", "select", "label")
        places = [
            {str([point[name] for name in names]) for point in shown["points"] if point["file"] == file}
            for file in (0, 1)
        ]
        assert places[1] and places[1] <= places[0]


class TestTables:
    def test_what_attention_costs(self):
        found = made("transformer")
        times = {"probjax_default": (3.0, 20.0), "jax_xla": (6.0, 60.0), "no_attention": (2.0, 10.0)}
        for row in found:
            row["median_ms"], row["xla_temp_mb"] = times.get(row["impl"], (1.0, None))
        costs = attention_cost(found, ("dtype", "tokens", "op", "run"))
        assert len(costs) == 8
        for cost in costs:
            assert (cost["attention ms"], cost["jax_xla ms"], cost["time ratio"]) == (1.0, 4.0, "0.25")
            assert (cost["attention MB"], cost["jax_xla MB"], cost["memory ratio"]) == (10.0, 50.0, "0.20")

    def test_it_is_left_out_where_a_row_is_missing(self):
        found = [row for row in made("transformer") if row["impl"] != "no_attention"]
        assert attention_cost(found, ("dtype", "tokens", "op", "run")) == []

    def test_against_the_plain_variant(self):
        found = made("remat")
        for row in found:
            row["median_ms"] = {"plain": 2.0, "remat": 3.0, "donate": 2.0}[row["variant"]]
        entries = against(found, RematConfig.TABLE)
        assert len(entries) == 9
        assert {(entry["variant"], entry["times the time"]) for entry in entries} == {
            ("plain", "1.00"), ("remat", "1.50"), ("donate", "1.00"),
        }  # fmt: skip

    @pytest.mark.parametrize("suite", list(SEED_KEYS))
    def test_nothing_empty_is_printed(self, suite, console):
        print_tables(console, made(suite), configs_of(suite)[0].TABLE)
        text = console.file.getvalue()
        assert "2.00" in text and "None" not in text
