"""The configurations of the suites `transformer` and `diffusion`, their cells and presets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from probjax.bench.config import INTEGER, INTS, PATH, Preset, choice, expand, names, option
from probjax.bench.network.config import DTYPES, ProgramConfig, TableStyle, cell_columns

ATTENTION = ("probjax_default", "jax_xla", "no_attention", "probjax_flax")
PEERS = ("flax", "torch")
CELL_COLUMNS = ("suite", "dtype", "tokens", "batch", "model_dim", "layers", "op", "variant")
_HELP = (
    "rows: our model with probjax_default, jax_xla (jax.nn's attention in plain XLA), probjax_flax (Flax's"
    " dense attention) or no_attention (the values as they are) for its attention"
)
_PRESET_HELP = "quick: float32, 128 tokens, within three minutes; reference: the rows of the reference file"


@dataclass(frozen=True)
class TransformerCell:
    """One program: a reference model, forward or a train step.

    Attributes:
      model: ``transformer`` or ``diffusion``; the suite's name too.
      dtype: of the computation and of inputs and outputs; parameters are float32.
      tokens: length of the sequences.
      batch: number of them.
      model_dim: channels of the blocks.
      layers: number of blocks.
      op: ``forward`` or ``train_step``.
      variant: None, ``plain``, ``remat`` or ``donate``.
    """

    model: str
    dtype: str
    tokens: int
    batch: int
    model_dim: int
    layers: int
    op: str
    variant: str | None = None

    @property
    def title(self) -> str:
        """A short name for the progress bar."""
        return f"{self.model} {self.op} {self.variant or ''} {self.dtype} T {self.tokens}"

    @property
    def kind(self) -> tuple[Any, ...]:
        """What has to be equal for the duration of one cell to tell that of another."""
        return (self.model, self.op, self.dtype)

    @property
    def work(self) -> float:
        """Arithmetic operations of one call."""
        each = 24.0 * self.model_dim**2 + 4.0 * self.tokens * self.model_dim
        return self.layers * self.batch * self.tokens * each * (3 if self.op == "train_step" else 1)

    def columns(self) -> dict[str, Any]:
        """The result columns that name this cell."""
        return cell_columns(self, self.model, CELL_COLUMNS)


@dataclass(frozen=True)
class _Config(ProgramConfig):
    """The options that both suites share."""

    CELL_COLUMNS: ClassVar[tuple[str, ...]] = CELL_COLUMNS

    dtypes: tuple[str, ...] = option(
        ("float32", "bfloat16"), names(*DTYPES), f"dtypes of the computation out of {', '.join(DTYPES)}"
    )
    tokens: tuple[int, ...] = option((128, 512), INTS, "lengths of the sequences")
    model_dim: int = option(256, INTEGER, "channels of the blocks, a multiple of 8")
    layers: int = option(4, INTEGER, "blocks")

    @property
    def impls(self) -> tuple[str, ...]:
        """The row labels."""
        raise NotImplementedError

    def grid(self) -> list[TransformerCell]:
        """Return the cells to measure; those that share a model and inputs follow each other."""
        return [
            TransformerCell(self.SUITE, dtype, tokens, self.batch, self.model_dim, self.layers, op, variant)
            for dtype in self.dtypes
            for tokens in self.tokens
            for op, variant in self.programs()
        ]


_STYLE = TableStyle(
    group=("dtype", "batch", "model_dim"),
    line=("op", "tokens", "variant", "layers", "tag"),
    peers=("jax_xla",),
    column="tokens",
    attention=True,
)


@dataclass(frozen=True)
class TransformerConfig(_Config):
    """What `probjax bench transformer` measures; every field is also a flag and a key of the JSON header."""

    SUITE: ClassVar[str] = "transformer"
    TABLE: ClassVar[TableStyle] = dataclasses.replace(_STYLE, peers=("jax_xla", *PEERS))

    attention: tuple[str, ...] = option(
        (*ATTENTION, *PEERS),
        names(*ATTENTION, *PEERS),
        f"{_HELP}; flax: the same model in plain Flax; torch: the same in PyTorch",
    )
    torch_python: str | None = option(
        None,
        PATH,
        "an interpreter with torch and numpy (default: PROBJAX_TORCH_PYTHON, else this one if it has torch)",
    )
    preset: str | None = option(None, choice("quick", "reference"), _PRESET_HELP + " and its peers")

    @property
    def impls(self) -> tuple[str, ...]:
        """The row labels."""
        return self.attention

    def header(self) -> dict[str, Any]:
        """Return the header; an interpreter's name says nothing, its versions are in the device header."""
        return {**super().header(), "torch_python": None if self.torch_python is None else "given"}


@dataclass(frozen=True)
class DiffusionConfig(_Config):
    """What `probjax bench diffusion` measures; every field is also a flag and a key of the JSON header."""

    SUITE: ClassVar[str] = "diffusion"
    TABLE: ClassVar[TableStyle] = _STYLE

    attention: tuple[str, ...] = option(ATTENTION, names(*ATTENTION), _HELP)
    preset: str | None = option(None, choice("quick", "reference"), _PRESET_HELP)

    @property
    def impls(self) -> tuple[str, ...]:
        """The row labels."""
        return self.attention


_PRESETS = {
    "quick": Preset(({"tokens": "128", "dtypes": "float32"},), {"budget": 150.0, "repeats": 5}),
    "reference": Preset(({},)),
}


def transformer_configs(given: Mapping[str, Any]) -> list[TransformerConfig]:
    """Return the configurations that a set of fields stands for, see `config.expand`."""
    return expand(TransformerConfig, _PRESETS, given)


def diffusion_configs(given: Mapping[str, Any]) -> list[DiffusionConfig]:
    """Return the configurations that a set of fields stands for, see `config.expand`."""
    return expand(DiffusionConfig, _PRESETS, given)
