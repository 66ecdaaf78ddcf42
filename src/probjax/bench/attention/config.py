"""The attention suite's configuration and its presets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from probjax.bench.attention.cells import DTYPES, FIRST_VARIANTS, MODES, VARIANTS, AttentionCell
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
    Preset,
    choice,
    expand,
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
TORCH_IMPLS = ("torch_sdpa", "torch_cudnn", "torch_flash", "torch_flex")
# The rows of the preset `gpu`: those that are worth their time at long sequences.
GPU_IMPLS = (
    "probjax_default",
    "probjax_mha",
    "probjax_flex",
    "probjax_cudnn",
    "jax_xla",
    "jax_cudnn",
    "pallas_mha",
    "tokamax_mosaic",
    "tokamax_triton",
    *TORCH_IMPLS,
)
ALL_IMPLS = tuple(dict.fromkeys((*IMPLS, *GPU_IMPLS, "tokamax_xla")))
PEERS = {"cpu": ("jax_xla", "torch_sdpa"), "gpu": ("jax_cudnn", "tokamax_mosaic", "torch_flex")}
TIMES = ("wall", "program", "device")


@dataclass(frozen=True)
class AttentionConfig(Config):
    """What `probjax bench attention` measures; every field is also a flag and a key of the JSON header."""

    device: str = option("cpu", choice("cpu", "gpu"), "the platform to measure on")
    append: bool = option(
        False, FLAG, "continue the output file: cells that it has under the same tag are not measured again"
    )
    seqs: tuple[int, ...] = option((128, 512, 1024, 2048), INTS, "sequence lengths")
    dims: tuple[int, ...] = option((64,), INTS, "head sizes")
    dtypes: tuple[str, ...] = option(("float32",), names(*DTYPES), f"input dtypes out of {', '.join(DTYPES)}")
    variants: tuple[str, ...] = option(
        FIRST_VARIANTS,
        names(*VARIANTS),
        "plain; causal; masked_bias: causal with a T5-style bias table, which is differentiated too;"
        " documents: causal, 8 documents a row; window: causal, the last 256 keys; bias: a dense array with"
        " its gradient; mask: a random boolean array",
    )
    modes: tuple[str, ...] = option(
        MODES, names(*MODES), "fwd: the output; fwdbwd: all gradients of sum(output * a fixed random array)"
    )
    batch: int = option(1, INTEGER, "sequences per call")
    tokens: int | None = option(
        None, INTEGER, "tokens per call: the batch is tokens / length (default: --batch for every length)"
    )
    heads: int = option(8, INTEGER, "heads")
    impls: tuple[str, ...] = option(IMPLS, names(*ALL_IMPLS), f"rows out of {', '.join(ALL_IMPLS)}")
    times: tuple[str, ...] = option(
        ("wall",),
        names(*TIMES),
        "wall: calls from Python; program: the operation chained in one program; device: the kernels alone",
    )
    workers: int = option(
        1, INTEGER, "processes that compile at the same time; they are timed one after the other"
    )
    interpret_max_seq: int = option(1024, INTEGER, "longest sequence for the row mha_interpret")
    no_ref: bool = option(False, FLAG, "leave out the comparison with the float64 reference")
    peaks: bool = option(False, FLAG, "also measure peak memory, each case in a fresh child process")
    peak_seqs: tuple[int, ...] = option((4096, 8192, 16384), INTS, "sequence lengths for --peaks")
    peak_impls: tuple[str, ...] = option(
        ("probjax_default", "xla_tiled", "xla_dense", "jax_xla", "torch_sdpa"),
        names(*ALL_IMPLS),
        "rows for --peaks",
    )
    peak_timeout: float = option(300, SECONDS, "time limit of each child process of --peaks and --max-fit")
    max_fit: bool = option(False, FLAG, "also find the longest of --fit-seqs that runs within --memory-limit")
    fit_seqs: tuple[int, ...] = option(
        (4096, 8192, 16384, 32768, 65536, 131072), INTS, "sequence lengths for --max-fit"
    )
    fit_impls: tuple[str, ...] = option(
        ("probjax_default", "xla_tiled", "xla_dense", "jax_xla"), names(*ALL_IMPLS), "rows for --max-fit"
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
        choice("quick", "reference", "gpu"),
        "quick: a small grid within three minutes; reference: the whole reference grid; gpu: documents,"
        " window, bias and mask over 16,384 tokens",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_fit and self.memory_limit is None:
            raise ValueError("max_fit: got no memory_limit, wanted one, such as --memory-limit 4G")
        if self.memory_limit is not None and not self.max_fit:
            raise ValueError("memory_limit: it is for max_fit, which was not asked for: add --max-fit")

        if self.device == "gpu" and (self.peaks or self.max_fit):
            raise ValueError(
                "device: got 'gpu' with peaks or max_fit, which read the memory of a process: on a GPU see"
                " the column xla_temp_mb, or `probjax bench dispatch --find-max`"
            )
        uneven = [seq for seq in self.seqs if self.tokens is not None and self.tokens % seq]
        if uneven:
            raise ValueError(
                f"tokens: got {self.tokens}, wanted a multiple of every length, such as {uneven[0]}"
            )

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
            AttentionCell(mode, variant, dtype, self._batch(seq), seq, self.heads, dim)
            for dtype in self.dtypes
            for dim in self.dims
            for variant in self.variants
            for seq in seqs
            for mode in modes
        ]

    def _batch(self, seq: int) -> int:
        return self.batch if self.tokens is None else max(1, self.tokens // seq)

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
# The shapes of section 6 of the GPU baseline, then those of its section 5 that share them.
_GPU: tuple[Mapping[str, Any], ...] = (
    {"variants": "documents,window", "seqs": "8192"},
    {"variants": "bias,mask", "seqs": "4096,1024"},
    {"variants": "plain,causal", "seqs": "4096,1024,8192"},
)
_GPU_COMMON = {
    "device": "gpu",
    "dtypes": "bfloat16",
    "heads": 16,
    "dims": "128",
    "tokens": 16384,
    "impls": GPU_IMPLS,
    "repeats": 7,
    "min_sample_ms": 10.0,
    "workers": 4,
}
_PRESETS = {
    "quick": Preset(_QUICK, {"budget": 150.0, "repeats": 7}),
    "reference": Preset(_REFERENCE),
    "gpu": Preset(_GPU, _GPU_COMMON),
}


def configs(given: Mapping[str, Any]) -> list[AttentionConfig]:
    """Return the configurations that a set of fields stands for, see `config.expand`."""
    return expand(AttentionConfig, _PRESETS, given)
