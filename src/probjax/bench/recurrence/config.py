"""The configuration of the suite `recurrence` and its presets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    Kind,
    Preset,
    choice,
    expand,
    names,
    option,
)
from probjax.bench.recurrence.cells import DTYPES, MODES, OPS, RecurrenceCell

PEERS = ("xla_associative", "xla_sequential", "torch_reference", "jax_linear_attention")
IMPLS = ("probjax_default", "probjax_scan", "probjax_native", *PEERS)
ALL_IMPLS = ("probjax_default", "probjax_scan", "probjax_native", "probjax_reference", *PEERS)
TIMES = ("wall", "device")
# Rows that keep all states, or take every step from Python.
SLOW = ("probjax_reference", "xla_associative", "xla_sequential", "torch_reference")


def _parse_shapes(text: Any) -> tuple[str, ...]:
    shapes = [part.strip() for part in str(text).split(",") if part.strip()]
    for shape in shapes:
        heads, cross, width = shape.partition("x")
        if not (cross and heads.isdigit() and width.isdigit() and int(heads) and int(width)):
            raise ValueError(f"{shape} is no heads x value size")
    if not shapes:
        raise ValueError("an empty list")
    return tuple(dict.fromkeys(shapes))


_SHAPES = Kind(_parse_shapes, INTS.show, "HxP,...", "pairs heads x value size, such as 1x128,4x64")


@dataclass(frozen=True)
class RecurrenceConfig(Config):
    """What `probjax bench recurrence` measures; every field is also a flag and a key of the JSON header."""

    device: str = option("cpu", choice("cpu", "gpu"), "the platform to measure on")
    append: bool = option(
        False, FLAG, "continue the output file: cells that it has under the same tag are not measured again"
    )
    operations: tuple[str, ...] = option(OPS, names(*OPS), f"operations out of {', '.join(OPS)}")
    seqs: tuple[int, ...] = option((256, 1024, 4096), INTS, "sequence lengths")
    dtypes: tuple[str, ...] = option(
        ("float32",),
        names(*DTYPES),
        f"input dtypes out of {', '.join(DTYPES)}; linear_scan_complex is measured in float32 parts only",
    )
    modes: tuple[str, ...] = option(
        MODES, names(*MODES), "fwd: the output; fwdbwd: all gradients of sum(output * a fixed random array)"
    )
    batch: int = option(4, INTEGER, "sequences per call")
    channels: int = option(128, INTEGER, "channels of the scans")
    state: int = option(128, INTEGER, "numbers of state per channel of selective_scan and ssd")
    ssd_shapes: tuple[str, ...] = option(("1x128", "4x64"), _SHAPES, "heads x value size of ssd")
    impls: tuple[str, ...] = option(IMPLS, names(*ALL_IMPLS), f"rows out of {', '.join(ALL_IMPLS)}")
    slow_max_seq: int = option(
        1024,
        INTEGER,
        f"longest sequence for the rows {', '.join(SLOW)} of selective_scan and ssd, and of"
        " torch_reference and probjax_reference everywhere",
    )
    times: tuple[str, ...] = option(
        ("wall",), names(*TIMES), "wall: calls from Python; device: the kernels alone, on a GPU"
    )
    no_ref: bool = option(False, FLAG, "leave out the comparison with the float64 reference")
    memory_limit: str | None = option(
        None,
        SIZE,
        "rows that need more by XLA's account are skipped (default: nine tenths of the memory that is free)",
    )
    repeats: int = option(7, INTEGER, "samples of each row")
    min_sample_ms: float = option(
        20, NUMBER, "shortest sample in milliseconds: short calls are made several times in a row"
    )
    workers: int = option(
        1, INTEGER, "processes that compile at the same time; they are timed one after the other"
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
    output: str | None = option(None, PATH, "the result file (default: recurrence_<device>.json)")
    preset: str | None = option(
        None,
        choice("quick", "reference", "gpu"),
        "quick: 256 tokens within three minutes; reference: the whole grid, half precision too;"
        " gpu: 1,024 to 16,384 tokens against the associative form",
    )

    def header(self) -> dict[str, Any]:
        """Return the header; an interpreter's name says nothing, its versions are in the device header."""
        return {**super().header(), "torch_python": None if self.torch_python is None else "given"}

    def grid(self) -> list[RecurrenceCell]:
        """Return the cells to measure, modes innermost so that they share a float64 reference."""
        return [
            RecurrenceCell(op, mode, dtype, self.batch, seq, **sizes)
            for op in self.operations
            for dtype in (self.dtypes if op != "linear_scan_complex" else ("float32",))
            for sizes in self._sizes(op)
            for seq in self.seqs
            for mode in self.modes
        ]

    def _sizes(self, op: str) -> list[dict[str, int]]:
        if op == "selective_scan":
            return [{"channels": self.channels, "state": self.state}]
        if op != "ssd":
            return [{"channels": self.channels}]
        shapes = [tuple(map(int, shape.split("x"))) for shape in self.ssd_shapes]
        return [{"channels": heads * width, "state": self.state, "heads": heads} for heads, width in shapes]


_GPU = {
    "device": "gpu",
    "seqs": "1024,2048,4096,8192,16384",
    "impls": "probjax_default,probjax_scan,xla_associative,jax_linear_attention",
    "slow_max_seq": 16384,
    "times": "wall,device",
    "min_sample_ms": 10.0,
}
_PRESETS = {
    "quick": Preset(({"seqs": "256"},), {"budget": 150.0, "repeats": 5}),
    "reference": Preset(({}, {"dtypes": "bfloat16", "seqs": "1024"})),
    "gpu": Preset(({},), _GPU),
}


def configs(given: Mapping[str, Any]) -> list[RecurrenceConfig]:
    """Return the configurations that a set of fields stands for, see `config.expand`."""
    return expand(RecurrenceConfig, _PRESETS, given)
