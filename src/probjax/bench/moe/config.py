"""The configuration of the suite `moe`, its cells and presets."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from probjax.bench.config import INTEGER, INTS, Preset, choice, expand, names, option
from probjax.bench.network.config import DTYPES, ProgramConfig, TableStyle, also, cell_columns

IMPLS = ("dense", "dropless", "capacity")
CELL_COLUMNS = ("suite", "dtype", "tokens", "batch", "model_dim", "experts", "selected", "op", "variant")


@dataclass(frozen=True)
class MoeCell:
    """One program: a mixture of experts, forward or a train step.

    Attributes:
      dtype: of the computation and of inputs and outputs; parameters are float32.
      tokens: length of the sequences.
      batch: number of them.
      model_dim: channels; the experts' hidden layers have four times as many.
      experts: number of experts.
      selected: how many each token goes to.
      op: ``forward`` or ``train_step``.
      variant: None, ``plain`` or ``donate``.
    """

    dtype: str
    tokens: int
    batch: int
    model_dim: int
    experts: int
    selected: int
    op: str
    variant: str | None = None

    @property
    def title(self) -> str:
        """A short name for the progress bar."""
        return f"moe {self.op} {self.variant or ''} {self.dtype} T {self.tokens}"

    @property
    def kind(self) -> tuple[Any, ...]:
        """What has to be equal for the duration of one cell to tell that of another."""
        return (self.op, self.dtype)

    @property
    def work(self) -> float:
        """Arithmetic operations of one call, every token through every expert."""
        each = 24.0 * self.model_dim**2 * self.experts
        return self.batch * self.tokens * each * (3 if self.op == "train_step" else 1)

    def columns(self) -> dict[str, Any]:
        """The result columns that name this cell."""
        return cell_columns(self, "moe", CELL_COLUMNS)


@dataclass(frozen=True)
class MoeConfig(ProgramConfig):
    """What `probjax bench moe` measures; every field is also a flag and a key of the JSON header."""

    SUITE: ClassVar[str] = "moe"
    CELL_COLUMNS: ClassVar[tuple[str, ...]] = CELL_COLUMNS
    TABLE: ClassVar[TableStyle] = TableStyle(
        group=("dtype", "batch", "model_dim", "experts", "selected"),
        line=("op", "tokens", "variant", "tag"),
        peers=("dense",),
    )

    dtypes: tuple[str, ...] = option(
        ("float32", "bfloat16"), names(*DTYPES), f"dtypes of the computation out of {', '.join(DTYPES)}"
    )
    moe_tokens: tuple[int, ...] = option((1024,), INTS, "lengths of the sequences")
    batch: int = option(1, INTEGER, "sequences per call")
    model_dim: int = option(256, INTEGER, "channels; experts have four times as many hidden units")
    experts: int = option(8, INTEGER, "experts")
    selected: int = option(2, INTEGER, "experts that each token goes to")
    impls: tuple[str, ...] = option(
        IMPLS,
        names(*IMPLS),
        "rows: dense: every token through every expert; dropless: through its own; capacity: experts take a"
        " fixed number of tokens",
    )
    preset: str | None = option(
        None, choice("quick", "reference"), "quick: float32; reference: the whole grid"
    )

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add one flag per field, and --tokens, the name of the column."""
        super().add_arguments(parser)
        also(parser, "--tokens", "moe_tokens", INTS)

    def grid(self) -> list[MoeCell]:
        """Return the cells to measure; those that share a model and inputs follow each other."""
        return [
            MoeCell(dtype, tokens, self.batch, self.model_dim, self.experts, self.selected, op, variant)
            for dtype in self.dtypes
            for tokens in self.moe_tokens
            for op, variant in self.programs()
        ]


_PRESETS = {
    "quick": Preset(({"dtypes": "float32"},), {"budget": 150.0, "repeats": 5}),
    "reference": Preset(({},)),
}


def configs(given: Mapping[str, Any]) -> list[MoeConfig]:
    """Return the configurations that a set of fields stands for, see `config.expand`."""
    return expand(MoeConfig, _PRESETS, given)
