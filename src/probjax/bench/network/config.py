"""The options that the suites of whole networks share; a suite adds those of its model."""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from probjax.bench.config import (
    FLAG,
    INTEGER,
    NUMBER,
    PATH,
    SECONDS,
    SIZE,
    TEXT,
    Config,
    Kind,
    choice,
    names,
    option,
)

OPS = ("forward", "train_step")
VARIANTS = ("none", "plain", "remat", "donate")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class TableStyle:
    """How the rows of a suite are printed.

    Attributes:
      group: columns that are equal within one table.
      line: columns that together with the implementation name a line; those with one value are left out.
      peers: row labels that each row is compared with.
      column: whose values go across in the summary; None for no summary.
      base: a column and the value in it that the others are compared with, in time and memory.
      attention: whether a summary tells what attention costs, by the rows without it.
    """

    group: tuple[str, ...]
    line: tuple[str, ...]
    peers: tuple[str, ...] = ()
    column: str | None = None
    base: tuple[str, str] | None = None
    attention: bool = False


@dataclass(frozen=True)
class NetworkConfig(Config):
    """What a suite of whole networks measures; every field is also a flag and a key of the JSON header.

    Attributes:
      SUITE: its name.
      CELL_COLUMNS: the columns that together with the row label name a row.
      TABLE: how its rows are printed.
    """

    SUITE: ClassVar[str]
    CELL_COLUMNS: ClassVar[tuple[str, ...]]
    TABLE: ClassVar[TableStyle]

    device: str = option("cpu", choice("cpu", "gpu"), "the platform to measure on")
    append: bool = option(
        False, FLAG, "continue the output file: cells that it has under the same tag are not measured again"
    )
    dtypes: tuple[str, ...] = option(
        ("float32",), names(*DTYPES), f"dtypes of the computation out of {', '.join(DTYPES)}"
    )
    repeats: int = option(7, INTEGER, "samples of each row")
    min_sample_ms: float = option(
        20, NUMBER, "shortest sample in milliseconds: short calls are made several times in a row"
    )
    memory_limit: str | None = option(
        None,
        SIZE,
        "rows that need more by XLA's account are skipped (default: nine tenths of the memory that is free)",
    )
    no_ref: bool = option(False, FLAG, "leave out the comparison with the float64 reference")
    workers: int = option(
        1, INTEGER, "processes that compile at the same time; they are timed one after the other"
    )
    budget: float | None = option(
        None, SECONDS, "time limit of the run; cells that do not fit are dropped and listed (default: none)"
    )
    tag: str | None = option(None, TEXT, "a name for this run's rows, such as before or after")
    output: str | None = option(None, PATH, "the result file (default: SUITE_<device>.json)")

    def header(self) -> dict[str, Any]:
        """Return the header: lists as lists, as in the reference file."""
        lists = {
            field.name: list(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if isinstance(getattr(self, field.name), tuple)
        }
        return {"suites": [self.SUITE], **super().header(), **lists}


@dataclass(frozen=True)
class ProgramConfig(NetworkConfig):
    """A suite that measures forward, train step, or both, of models as they are and in variants."""

    batch: int = option(4, INTEGER, "sequences per call")
    ops: tuple[str, ...] = option(
        OPS,
        names(*OPS),
        "forward: the output; train_step: value and gradient of the mean square, and a step of Adam",
    )
    variants: tuple[str, ...] = option(
        ("none",),
        names(*VARIANTS),
        "none: rows without that column; the others are train steps only: plain; remat: every block is"
        " computed again in backward; donate: the new parameters take the memory of the old",
    )

    def programs(self) -> Iterator[tuple[str, str | None]]:
        """Yield the pairs of an operation and a variant (None: a row without one) that are wanted."""
        for variant in self.variants:
            for op in self.ops:
                if variant == "none":
                    yield op, None
                elif op == "train_step":
                    yield op, variant


def cell_columns(cell: Any, suite: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the result columns that name a cell: its suite, and its fields that are not None."""
    found = {name: getattr(cell, name) for name in names if name != "suite"}
    return {"suite": suite, **{name: value for name, value in found.items() if value is not None}}


def also(parser: argparse.ArgumentParser, flag: str, field: str, kind: Kind) -> None:
    """Add a second flag for a field: the name of its column, where the reference file's key is another."""
    parser.add_argument(
        flag,
        dest=field,
        type=kind.parse,
        default=argparse.SUPPRESS,
        metavar=kind.metavar,
        help=f"the same as --{field.replace('_', '-')}",
    )
