"""The command `probjax tune` where it cannot do its work; measuring itself is in tests/test_tune.py."""

from __future__ import annotations

import argparse

import jax
import pytest

from probjax import cli, tune
from probjax.attention import dispatch
from probjax.attention.tables import Table


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
    monkeypatch.setattr(dispatch, "unavailable", lambda name, platform: f"{name} needs a newer GPU")
    assert cli._tune(words) == 2
    assert "triton needs a newer GPU" in capsys.readouterr().err
    assert not words.output.exists()


def test_an_empty_table_is_not_written(words, monkeypatch, capsys):
    monkeypatch.setattr(dispatch, "unavailable", lambda name, platform: None)
    monkeypatch.setattr(tune, "tune", lambda wanted, **options: Table("GPU", {}, ()))
    assert cli._tune(words) == 1
    assert "nothing was written" in capsys.readouterr().err
    assert not words.output.exists()
