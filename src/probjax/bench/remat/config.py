"""The configuration of the suite `remat` and its presets; its cells are those of the suites of the models."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from probjax.bench.config import INTEGER, Preset, choice, expand, names, option
from probjax.bench.network.config import VARIANTS, NetworkConfig, TableStyle, also
from probjax.bench.ssm.config import CELL_COLUMNS as SSM_COLUMNS
from probjax.bench.ssm.config import CELLS, SsmCell
from probjax.bench.transformer.config import ATTENTION, TransformerCell
from probjax.bench.transformer.config import CELL_COLUMNS as TRANSFORMER_COLUMNS
from probjax.bench.unet.config import CELL_COLUMNS as UNET_COLUMNS
from probjax.bench.unet.config import UnetCell

MODELS = ("transformer", "unet", "ssm")
# A row has no column `model` where the reference file has none: the name of its suite is that.
CELL_COLUMNS = tuple(dict.fromkeys((*TRANSFORMER_COLUMNS, *UNET_COLUMNS, *SSM_COLUMNS)))


@dataclass(frozen=True)
class RematConfig(NetworkConfig):
    """What `probjax bench remat` measures; every field is also a flag and a key of the JSON header."""

    SUITE: ClassVar[str] = "remat"
    CELL_COLUMNS: ClassVar[tuple[str, ...]] = CELL_COLUMNS
    TABLE: ClassVar[TableStyle] = TableStyle(
        group=("suite", "dtype", "batch"),
        line=("cell", "tokens", "resolution", "model_dim", "variant", "tag"),
        base=("variant", "plain"),
    )

    models: tuple[str, ...] = option(MODELS, names(*MODELS), f"models out of {', '.join(MODELS)}")
    batch: int = option(4, INTEGER, "sequences or images per call")
    variants: tuple[str, ...] = option(
        VARIANTS[1:],
        names(*VARIANTS[1:]),
        "plain; remat: every block is computed again in backward; donate: the new parameters take the memory"
        " of the old",
    )
    tokens: int = option(512, INTEGER, "length of the transformer's sequences")
    ssm_tokens: int = option(1024, INTEGER, "length of the recurrent model's sequences")
    unet_res: int = option(32, INTEGER, "height and width of the UNet's images")
    cells: tuple[str, ...] = option(("lru",), names(*CELLS), f"recurrent cells out of {', '.join(CELLS)}")
    model_dim: int | None = option(
        None, INTEGER, "channels of transformer and recurrent model (default: 256 and 128)"
    )
    layers: int = option(4, INTEGER, "their blocks")
    attention: tuple[str, ...] = option(
        ("probjax_default",),
        names(*ATTENTION),
        f"rows: the transformer's attention, of {', '.join(ATTENTION)}",
    )
    preset: str | None = option(
        None, choice("quick", "reference"), "quick: 128 tokens; reference: the rows of the reference file"
    )

    @property
    def impls(self) -> tuple[str, ...]:
        """The row labels."""
        return self.attention

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add one flag per field, and --resolution, the name of the column."""
        super().add_arguments(parser)
        also(parser, "--resolution", "unet_res", INTEGER)

    def grid(self) -> list[TransformerCell | UnetCell | SsmCell]:
        """Return the cells to measure."""
        found: list[TransformerCell | UnetCell | SsmCell] = []
        for dtype in self.dtypes:
            for model in self.models:
                for cell in self.cells if model == "ssm" else ("",):
                    found += [self._cell(model, cell, dtype, variant) for variant in self.variants]
        return found

    def _cell(self, model: str, cell: str, dtype: str, variant: str) -> TransformerCell | UnetCell | SsmCell:
        ends = ("train_step", variant)
        if model == "unet":
            return UnetCell(None, dtype, self.unet_res, self.batch, *ends)
        if model == "ssm":
            width = self.model_dim or 128
            return SsmCell(cell, dtype, self.ssm_tokens, self.batch, width, self.layers, *ends)
        width = self.model_dim or 256
        return TransformerCell(model, dtype, self.tokens, self.batch, width, self.layers, *ends)


_PRESETS = {
    "quick": Preset(({"tokens": 128, "ssm_tokens": 256},), {"budget": 150.0, "repeats": 5}),
    "reference": Preset(({},)),
}


def configs(given: Mapping[str, Any]) -> list[RematConfig]:
    """Return the configurations that a set of fields stands for, see `config.expand`."""
    return expand(RematConfig, _PRESETS, given)
