"""The configuration of the suite `dispatch`; its defaults are the grid of the reference file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from probjax.bench.attention.cells import DTYPES
from probjax.bench.attention.config import TIMES, TORCH_IMPLS
from probjax.bench.config import (
    FLAG,
    INTEGER,
    INTS,
    NUMBER,
    PATH,
    SECONDS,
    TEXT,
    Config,
    Kind,
    choice,
    names,
    option,
)
from probjax.bench.dispatch.cells import MODES, DispatchCell

OURS = (
    "probjax_default",
    "probjax_flex",
    "probjax_flax",
    "probjax_mha",
    "probjax_cudnn",
    "mha_interpret",
)
JAX_PEERS = ("jax_xla", "jax_cudnn", "pallas_mha", "tokamax_mosaic", "tokamax_triton", "tokamax_xla")
IMPLS = (*OURS, *JAX_PEERS, *TORCH_IMPLS)
PRECISIONS = ("default", "highest")
# In the reference file these are lists.
_LISTS = ("head_dims", "seq_lens", "dtypes", "modes", "causal", "impls", "times", "precision")


def _parse_causal(text: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in names("0", "1").parse(text))


_CAUSAL = Kind(_parse_causal, INTS.show, "0,1", "0, 1 or both")


@dataclass(frozen=True)
class DispatchConfig(Config):
    """What `probjax bench dispatch` measures; every field is also a flag and a key of the JSON header."""

    device: str | None = option(
        None, choice("cpu", "gpu"), "the platform to measure on (default: JAX's default backend)"
    )
    output: str | None = option(None, PATH, "the result file (default: dispatch_<device>.json)")
    append: bool = option(
        False, FLAG, "continue the output file: cells that it has under the same tag are not measured again"
    )
    tag: str | None = option(None, TEXT, "a name for this run's rows, such as before or after")
    batch: int = option(64, INTEGER, "sequences per call")
    heads: int = option(8, INTEGER, "heads")
    head_dims: tuple[int, ...] = option((32, 64), INTS, "head sizes")
    seq_lens: tuple[int, ...] = option((16, 32, 64, 128, 256, 512), INTS, "sequence lengths")
    dtypes: tuple[str, ...] = option(
        ("float32", "bfloat16"), names(*DTYPES), f"dtypes out of {', '.join(DTYPES)}"
    )
    modes: tuple[str, ...] = option(
        MODES, names(*MODES), "fwd: the output; fwd_bwd: the output and all gradients for a given cotangent"
    )
    causal: tuple[int, ...] = option((0, 1), _CAUSAL, "0: every key is visible; 1: causal")
    precision: tuple[str, ...] = option(
        ("default",),
        names(*PRECISIONS),
        "matrix products of float32: default (TF32 on NVIDIA GPUs), highest (true float32)",
    )
    impls: tuple[str, ...] = option(IMPLS, names(*IMPLS), f"rows out of {', '.join(IMPLS)}")
    interpret_max_seq: int = option(16, INTEGER, "longest sequence for the row mha_interpret")
    times: tuple[str, ...] = option(
        TIMES,
        names(*TIMES),
        "wall: calls from Python; program: the operation chained in one program; device: the kernels alone",
    )
    program_max_seq: int = option(128, INTEGER, "longest sequence that is timed inside a program")
    no_ref: bool = option(False, FLAG, "leave out the comparison with the reference")
    find_max: bool = option(
        False, FLAG, "instead find the longest sequence that runs, each length in a fresh process"
    )
    max_seq: int = option(262144, INTEGER, "longest sequence that --find-max tries")
    child: str | None = option(
        None, PATH, "the interpreter that runs the lengths of --find-max (default: this one)"
    )
    child_timeout: float = option(300, SECONDS, "time limit of each process of --find-max")
    repeats: int = option(7, INTEGER, "samples of each row")
    min_sample_ms: float = option(
        5, NUMBER, "shortest sample in milliseconds: short calls are made several times in a row"
    )
    workers: int = option(
        1, INTEGER, "processes that compile at the same time; they are timed one after the other"
    )
    budget: float | None = option(
        None, SECONDS, "time limit of the run; cells that do not fit are dropped and listed (default: none)"
    )
    torch_python: str | None = option(
        None,
        PATH,
        "an interpreter with torch and numpy (default: PROBJAX_TORCH_PYTHON, else this one if it has torch)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.find_max and self.max_seq < max(self.seq_lens):
            raise ValueError(
                f"max_seq: got {self.max_seq}, wanted {max(self.seq_lens)} or more, the longest of seq_lens, "
                "where find_max begins"
            )

    def header(self) -> dict[str, Any]:
        """Return the header: lists as lists, as in the reference file, and no path of this machine."""
        shown = {**super().header(), **{name: list(getattr(self, name)) for name in _LISTS}}
        given = {name: "given" for name in ("torch_python", "child") if getattr(self, name) is not None}
        return {"suite": "dispatch", **shown, **given}

    def cells(self) -> list[DispatchCell]:
        """Return the grid; cells that share their inputs follow each other."""
        return [
            DispatchCell(dtype, dim, seq, bool(causal), mode, self.batch, self.heads, precision)
            for dtype in self.dtypes
            for dim in self.head_dims
            for seq in self.seq_lens
            for precision in (self.precision if dtype == "float32" else ("default",))
            for causal in self.causal
            for mode in self.modes
        ]


def configs(given: Mapping[str, Any]) -> list[DispatchConfig]:
    """Return the one configuration that a set of fields stands for; this suite has no presets."""
    return [DispatchConfig(**given)]
