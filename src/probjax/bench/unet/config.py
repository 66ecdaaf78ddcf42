"""The configuration of the suite `unet`, its cells and presets."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from probjax.bench.config import INTS, Preset, choice, expand, names, option
from probjax.bench.network.config import DTYPES, ProgramConfig, TableStyle, also, cell_columns

MODELS = ("unet_narrow", "unet_2d")
IMPLS = ("probjax_default",)
CELL_COLUMNS = ("suite", "model", "dtype", "resolution", "batch", "op", "variant")
# Arithmetic operations per pixel and channel of the finest stage, roughly: kernels of 1 x 3 or 3 x 3.
_TAPS = {"unet_narrow": 3, "unet_2d": 9}


@dataclass(frozen=True)
class UnetCell:
    """One program: a UNet, forward or a train step.

    Attributes:
      model: ``unet_narrow``, whose kernels are along the width only, as in the reference file; ``unet_2d``;
        None: the narrow one in rows without that column, as in the reference file.
      dtype: of the computation and of inputs and outputs; parameters are float32.
      resolution: height and width of the images.
      batch: number of them.
      op: ``forward`` or ``train_step``.
      variant: None, ``plain``, ``remat`` or ``donate``.
    """

    model: str | None
    dtype: str
    resolution: int
    batch: int
    op: str
    variant: str | None = None

    @property
    def title(self) -> str:
        """A short name for the progress bar."""
        return f"{self.model or MODELS[0]} {self.op} {self.variant or ''} {self.dtype}"

    @property
    def kind(self) -> tuple[Any, ...]:
        """What has to be equal for the duration of one cell to tell that of another."""
        return (self.model, self.op, self.dtype)

    @property
    def work(self) -> float:
        """Arithmetic operations of one call, roughly."""
        each = 4e5 * _TAPS[self.model or MODELS[0]]
        return self.batch * self.resolution**2 * each * (3 if self.op == "train_step" else 1)

    def columns(self) -> dict[str, Any]:
        """The result columns that name this cell."""
        return cell_columns(self, "unet", CELL_COLUMNS)


@dataclass(frozen=True)
class UnetConfig(ProgramConfig):
    """What `probjax bench unet` measures; every field is also a flag and a key of the JSON header."""

    SUITE: ClassVar[str] = "unet"
    CELL_COLUMNS: ClassVar[tuple[str, ...]] = CELL_COLUMNS
    TABLE: ClassVar[TableStyle] = TableStyle(
        group=("model", "dtype", "batch"), line=("op", "resolution", "variant", "tag")
    )

    dtypes: tuple[str, ...] = option(
        ("float32", "bfloat16"), names(*DTYPES), f"dtypes of the computation out of {', '.join(DTYPES)}"
    )
    models: tuple[str, ...] = option(
        MODELS,
        names(*MODELS),
        "unet_narrow: the reference file's, whose kernels are along the width only; unet_2d: the real one",
    )
    unet_res: tuple[int, ...] = option((32,), INTS, "heights and widths of the images")
    impls: tuple[str, ...] = option(IMPLS, names(*IMPLS), f"rows out of {', '.join(IMPLS)}")
    preset: str | None = option(
        None,
        choice("quick", "reference"),
        "quick: float32; reference: the rows of the reference file, and 2-D",
    )

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add one flag per field, and --resolution, the name of the column."""
        super().add_arguments(parser)
        also(parser, "--resolution", "unet_res", INTS)

    def grid(self) -> list[UnetCell]:
        """Return the cells to measure; those that share a model and inputs follow each other."""
        return [
            UnetCell(model, dtype, resolution, self.batch, op, variant)
            for model in self.models
            for dtype in self.dtypes
            for resolution in self.unet_res
            for op, variant in self.programs()
        ]


_PRESETS = {
    "quick": Preset(({"dtypes": "float32"},), {"budget": 150.0, "repeats": 5}),
    "reference": Preset(({},)),
}


def configs(given: Mapping[str, Any]) -> list[UnetConfig]:
    """Return the configurations that a set of fields stands for, see `config.expand`."""
    return expand(UnetConfig, _PRESETS, given)
