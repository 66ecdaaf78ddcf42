"""The configuration of the suite `ssm`, its cells and its presets."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from probjax.bench.config import INTEGER, INTS, Preset, choice, expand, names, option
from probjax.bench.network.config import ProgramConfig, also, cell_columns

CELLS = ("mamba", "ssd", "lru")
IMPLS = ("probjax_default", "probjax_scan", "xla_associative")
PEERS = ("xla_associative", "probjax_scan")
# What a row is named by in the reference file, and `layers`, which does not vary there.
CELL_COLUMNS = ("suite", "cell", "dtype", "tokens", "batch", "model_dim", "layers", "op", "variant")


@dataclass(frozen=True)
class SsmCell:
    """One program: a model of one cell, forward or a train step.

    Attributes:
      cell: ``mamba``, ``ssd`` or ``lru``.
      dtype: of the computation, of inputs and outputs; parameters are float32.
      tokens: length of the sequences.
      batch: number of them.
      model_dim: channels between the blocks, and size of the state.
      layers: number of blocks.
      op: ``forward`` or ``train_step``.
      variant: None, ``plain``, ``remat`` or ``donate``.
    """

    cell: str
    dtype: str
    tokens: int
    batch: int
    model_dim: int
    layers: int
    op: str
    variant: str | None

    @property
    def title(self) -> str:
        """A short name for the progress bar."""
        return f"{self.cell} {self.op} {self.variant or ''} {self.dtype} L {self.tokens}"

    @property
    def kind(self) -> tuple[Any, ...]:
        """What has to be equal for the duration of one cell to tell that of another."""
        return (self.cell, self.op)

    @property
    def work(self) -> float:
        """Arithmetic operations of one call, those of the recurrence's peers counted in."""
        states = 1 if self.cell == "lru" else self.model_dim
        each = self.batch * self.tokens * self.model_dim
        return self.layers * each * (40.0 * self.model_dim + 60.0 * states) * (4 if self.trains else 1)

    @property
    def trains(self) -> bool:
        """Whether it is a train step."""
        return self.op == "train_step"

    def columns(self) -> dict[str, Any]:
        """The result columns that name this cell."""
        return cell_columns(self, "ssm", CELL_COLUMNS)


@dataclass(frozen=True)
class SsmConfig(ProgramConfig):
    """What `probjax bench ssm` measures; every field is also a flag and a key of the JSON header."""

    SUITE: ClassVar[str] = "ssm"

    cells: tuple[str, ...] = option(CELLS, names(*CELLS), f"recurrent cells out of {', '.join(CELLS)}")
    ssm_tokens: tuple[int, ...] = option((256, 1024), INTS, "lengths of the sequences; --tokens is the same")
    model_dim: int = option(128, INTEGER, "channels between the blocks, and size of the state")
    layers: int = option(4, INTEGER, "blocks")
    impls: tuple[str, ...] = option(IMPLS, names(*IMPLS), f"rows out of {', '.join(IMPLS)}")
    preset: str | None = option(
        None,
        choice("quick", "reference"),
        "quick: 256 tokens within three minutes; reference: the rows of the reference file, its variants for"
        " all cells",
    )

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add one flag per field, and --tokens, the name of the column."""
        super().add_arguments(parser)
        also(parser, "--tokens", "ssm_tokens", INTS)

    def grid(self) -> list[SsmCell]:
        """Return the cells to measure; those that share a model and inputs follow each other."""
        return [
            SsmCell(cell, dtype, tokens, self.batch, self.model_dim, self.layers, op, variant)
            for dtype in self.dtypes
            for tokens in self.ssm_tokens
            for cell in self.cells
            for op, variant in self.programs()
        ]


# The naive form's train step is a matter of many seconds and gigabytes: once is enough.
_REFERENCE: tuple[Mapping[str, Any], ...] = (
    {"variants": "none"},
    {"variants": "plain,remat,donate", "cells": "lru", "ssm_tokens": "1024"},
    {
        "variants": "plain,remat,donate",
        "cells": "mamba,ssd",
        "ssm_tokens": "1024",
        "impls": "probjax_default,probjax_scan",
    },
)
_QUICK: tuple[Mapping[str, Any], ...] = (
    {"variants": "none", "ssm_tokens": "256"},
    {"variants": "remat", "ssm_tokens": "256", "impls": "probjax_default"},
)
_PRESETS = {"quick": Preset(_QUICK, {"budget": 150.0, "repeats": 5}), "reference": Preset(_REFERENCE)}


def configs(given: Mapping[str, Any]) -> list[SsmConfig]:
    """Return the configurations that a set of fields stands for, see `config.expand`."""
    return expand(SsmConfig, _PRESETS, given)
