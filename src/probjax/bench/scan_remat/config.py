"""The configuration of the suite `scan_remat`, its cells and presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from probjax.bench.config import INTEGER, INTS, Preset, choice, expand, names, option
from probjax.bench.network.config import NetworkConfig, TableStyle, cell_columns
from probjax.bench.transformer.config import ATTENTION

MODELS = ("transformer", "diffusion")
# As `Transformer` has them; its module needs Flax, options do not.
REMAT = ("none", "full", "dots_saveable", "save_attention")
CELL_COLUMNS = ("suite", "model", "dtype", "tokens", "batch", "model_dim", "layers", "scan", "remat", "op")


@dataclass(frozen=True)
class ScanRematCell:
    """One program: a train step of a deep model.

    Attributes:
      model: ``transformer`` or ``diffusion``.
      dtype: of the computation.
      tokens, batch: of the sequences.
      model_dim: channels of the blocks.
      layers: number of blocks.
      scan: whether they are scanned.
      remat: what the backward pass keeps of each.
    """

    model: str
    dtype: str
    tokens: int
    batch: int
    model_dim: int
    layers: int
    scan: bool
    remat: str
    op: str = "train_step"
    variant: None = None

    @property
    def title(self) -> str:
        """A short name for the progress bar."""
        return f"{self.model} {self.layers} layers{' scanned' if self.scan else ''}, remat {self.remat}"

    @property
    def kind(self) -> tuple[Any, ...]:
        """What has to be equal for the duration of one cell to tell that of another."""
        return (self.model, self.dtype)

    @property
    def work(self) -> float:
        """Arithmetic operations of one call."""
        each = 24.0 * self.model_dim**2 + 4.0 * self.tokens * self.model_dim
        return self.layers * self.batch * self.tokens * each * (3 if self.remat == "none" else 4)

    def columns(self) -> dict[str, Any]:
        """The result columns that name this cell."""
        return cell_columns(self, "scan_remat", CELL_COLUMNS)


@dataclass(frozen=True)
class ScanRematConfig(NetworkConfig):
    """What `probjax bench scan_remat` measures; every field is also a flag and a key of the JSON header."""

    SUITE: ClassVar[str] = "scan_remat"
    CELL_COLUMNS: ClassVar[tuple[str, ...]] = CELL_COLUMNS
    TABLE: ClassVar[TableStyle] = TableStyle(
        group=("model", "dtype", "tokens", "batch", "model_dim", "layers"),
        line=("scan", "remat", "tag"),
        peers=("jax_xla",),
        base=("remat", "none"),
    )

    models: tuple[str, ...] = option(("transformer",), names(*MODELS), f"models out of {', '.join(MODELS)}")
    layers: tuple[int, ...] = option((12, 24), INTS, "numbers of blocks")
    scan_tokens: int = option(512, INTEGER, "length of the sequences")
    scan_batch: int = option(2, INTEGER, "sequences per call")
    model_dim: int = option(512, INTEGER, "channels of the blocks, a multiple of 8")
    scan: tuple[str, ...] = option(
        ("false", "true"), names("false", "true"), "whether the blocks are scanned: false, true or both"
    )
    remat: tuple[str, ...] = option(
        REMAT,
        names(*REMAT),
        "what the backward pass keeps of each block: all; its input; results of matrix products too; those of"
        " attention too",
    )
    attention: tuple[str, ...] = option(
        ("probjax_default",),
        names(*ATTENTION),
        f"rows: what is taken for attention, of {', '.join(ATTENTION)}",
    )
    preset: str | None = option(
        None,
        choice("quick", "reference"),
        "quick: 4 blocks of 256 channels; reference: the reference file's rows and the policies it lacks",
    )

    @property
    def impls(self) -> tuple[str, ...]:
        """The row labels."""
        return self.attention

    def grid(self) -> list[ScanRematCell]:
        """Return the cells to measure."""
        return [
            ScanRematCell(
                model, dtype, self.scan_tokens, self.scan_batch, self.model_dim, layers, scan == "true", remat
            )
            for model in self.models
            for dtype in self.dtypes
            for layers in self.layers
            for scan in self.scan
            for remat in self.remat
        ]


_PRESETS = {
    "quick": Preset(({"layers": "4", "model_dim": 256},), {"budget": 150.0, "repeats": 5}),
    "reference": Preset(({},)),
}


def configs(given: Mapping[str, Any]) -> list[ScanRematConfig]:
    """Return the configurations that a set of fields stands for, see `config.expand`."""
    return expand(ScanRematConfig, _PRESETS, given)
