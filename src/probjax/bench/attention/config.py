"""The attention suite's configuration and its presets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from probjax.bench.attention.cells import DTYPES, MODES, VARIANTS, AttentionCell
from probjax.bench.config import (
    FLAG,
    INTEGER,
    INTS,
    NUMBER,
    PATH,
    SECONDS,
    SIZE,
    TEXT,
    Config,
    choice,
    names,
    option,
    parse_bytes,
)

IMPLS = (
    "probjax_default",
    "probjax_mha",
    "probjax_flex",
    "probjax_flax",
    "xla_dense",
    "xla_tiled",
    "mha_interpret",
    "jax_xla",
    "torch_sdpa",
)
PEERS = ("jax_xla", "torch_sdpa")


@dataclass(frozen=True)
class AttentionConfig(Config):
    """What `probjax bench attention` measures; every field is also a flag and a key of the JSON header."""

    device: str = option("cpu", choice("cpu"), "the platform to measure on")
    append: bool = option(
        False, FLAG, "continue the output file: cells that it has under the same tag are not measured again"
    )
    seqs: tuple[int, ...] = option((128, 512, 1024, 2048), INTS, "sequence lengths")
    dims: tuple[int, ...] = option((64,), INTS, "head sizes")
    dtypes: tuple[str, ...] = option(("float32",), names(*DTYPES), f"input dtypes out of {', '.join(DTYPES)}")
    variants: tuple[str, ...] = option(
        VARIANTS,
        names(*VARIANTS),
        "plain; causal; masked_bias: causal with a T5-style bias table, which is differentiated too",
    )
    modes: tuple[str, ...] = option(
        MODES, names(*MODES), "fwd: the output; fwdbwd: all gradients of sum(output * a fixed random array)"
    )
    batch: int = option(1, INTEGER, "sequences per call")
    heads: int = option(8, INTEGER, "heads")
    impls: tuple[str, ...] = option(IMPLS, names(*IMPLS), f"rows out of {', '.join(IMPLS)}")
    interpret_max_seq: int = option(1024, INTEGER, "longest sequence for the row mha_interpret")
    no_ref: bool = option(False, FLAG, "leave out the comparison with the float64 reference")
    peaks: bool = option(False, FLAG, "also measure peak memory, each case in a fresh child process")
    peak_seqs: tuple[int, ...] = option((4096, 8192, 16384), INTS, "sequence lengths for --peaks")
    peak_impls: tuple[str, ...] = option(
        ("probjax_default", "xla_tiled", "xla_dense", "jax_xla", "torch_sdpa"),
        names(*IMPLS),
        "rows for --peaks",
    )
    peak_timeout: float = option(300, SECONDS, "time limit of each child process of --peaks and --max-fit")
    max_fit: bool = option(False, FLAG, "also find the longest of --fit-seqs that runs within --memory-limit")
    fit_seqs: tuple[int, ...] = option(
        (4096, 8192, 16384, 32768, 65536, 131072), INTS, "sequence lengths for --max-fit"
    )
    fit_impls: tuple[str, ...] = option(
        ("probjax_default", "xla_tiled", "xla_dense", "jax_xla"), names(*IMPLS), "rows for --max-fit"
    )
    memory_limit: str | None = option(
        None, SIZE, "memory that a child process of --max-fit may take on top of its start-up, such as 4G"
    )
    repeats: int = option(11, INTEGER, "samples of each row")
    min_sample_ms: float = option(
        20, NUMBER, "shortest sample in milliseconds: short calls are made several times in a row"
    )
    budget: float | None = option(
        None, SECONDS, "time limit of the run; cells that do not fit are dropped and listed (default: none)"
    )
    tag: str | None = option(None, TEXT, "a name for this run's rows, such as before or after")
    torch_python: str | None = option(
        None,
        PATH,
        "an interpreter with torch and numpy (default: PROBJAX_TORCH_PYTHON, else this one if it has torch)",
    )
    output: str | None = option(None, PATH, "the result file (default: attention_<device>.json)")
    preset: str | None = option(
        None,
        choice("quick", "reference"),
        "quick: a small grid within three minutes; reference: the whole reference grid",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_fit and self.memory_limit is None:
            raise ValueError("max_fit: got no memory_limit, wanted one, such as --memory-limit 4G")
        if self.memory_limit is not None and not self.max_fit:
            raise ValueError("memory_limit: it is for max_fit, which was not asked for: add --max-fit")

    def header(self) -> dict[str, Any]:
        """Return the header; an interpreter's name says nothing, its versions are in the device header."""
        return {**super().header(), "torch_python": None if self.torch_python is None else "given"}

    def cells(self) -> list[AttentionCell]:
        """Return the grid, modes innermost so that they share a float64 reference."""
        return self._cells(self.seqs, self.modes)

    def memory_cells(self, seqs: tuple[int, ...]) -> list[AttentionCell]:
        """Return the grid over other sequence lengths."""
        return self._cells(seqs, self.modes)

    def _cells(self, seqs: tuple[int, ...], modes: tuple[str, ...]) -> list[AttentionCell]:
        return [
            AttentionCell(mode, variant, dtype, self.batch, seq, self.heads, dim)
            for dtype in self.dtypes
            for dim in self.dims
            for variant in self.variants
            for seq in seqs
            for mode in modes
        ]

    @property
    def memory_limit_bytes(self) -> int:
        """The memory limit in bytes."""
        assert self.memory_limit is not None
        return parse_bytes(self.memory_limit)


# The grid of the reference result file.
_REFERENCE: tuple[Mapping[str, Any], ...] = (
    {"variants": "plain,causal", "seqs": "128,256,512,1024,2048,4096"},
    {"variants": "masked_bias", "seqs": "128,512,1024,2048,4096"},
    {"variants": "plain,causal", "seqs": "256,1024,4096", "dims": "128"},
    {"variants": "causal", "seqs": "512,2048", "dtypes": "bfloat16"},
)
# Ordered by what a first look needs most: the budget drops from the end.
_QUICK_ROWS = "probjax_default,xla_tiled,jax_xla,torch_sdpa"
_QUICK: tuple[Mapping[str, Any], ...] = (
    {"seqs": "1024", "impls": _QUICK_ROWS},
    {"seqs": "512", "impls": _QUICK_ROWS},
    {"seqs": "1024", "variants": "causal", "dtypes": "bfloat16", "impls": _QUICK_ROWS},
    {"seqs": "2048", "impls": _QUICK_ROWS},
)
_COMMON: dict[str, Mapping[str, Any]] = {"quick": {"budget": 150.0, "repeats": 7}, "reference": {}}


def configs(given: Mapping[str, Any]) -> list[AttentionConfig]:
    """Return the configurations that a set of fields stands for: one, or those of its preset.

    Args:
      given: fields by name; what is given wins over the preset.

    Returns:
      Configurations, to be run one after the other into one file.
    """
    preset = given.get("preset")
    if preset is None:
        return [AttentionConfig(**given)]
    parts = _QUICK if preset == "quick" else _REFERENCE
    return list(dict.fromkeys(AttentionConfig(**{**_COMMON[preset], **part, **given}) for part in parts))
