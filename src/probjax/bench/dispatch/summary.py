"""How the rows of `probjax_default` stand beside the best peer of their cell and run."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from probjax.bench.dispatch.cells import CELL_COLUMNS
from probjax.bench.dispatch.config import JAX_PEERS

Row = Mapping[str, Any]
IMPL = "probjax_default"
# Columns of time and the factor to microseconds.
MEASURES = {"device_us": 1.0, "program_us": 1.0, "median_ms": 1e3}
_WORDS = {"device_us": "device", "program_us": "in a program", "median_ms": "from Python"}
# How much slower than the best peer still counts as level.
LEVEL = 1.03


@dataclass(frozen=True)
class Standing:
    """One cell by one measure: our time and the best peer's, in microseconds."""

    cell: tuple[Any, ...]
    measure: str
    ours: float
    best: float
    peer: str

    @property
    def ratio(self) -> float:
        """Our time over the peer's: below 1 we are faster."""
        return self.ours / self.best


def standings(rows: Iterable[Row], peers: Sequence[str] = JAX_PEERS, impl: str = IMPL) -> list[Standing]:
    """Return the standing of one implementation in every cell that a valid peer was measured in too.

    Args:
      rows: result rows; those whose result is wrong, or that were not measured, do not count.
      peers: the labels that it is compared with.
      impl: the implementation.

    Returns:
      One entry per cell, tag, run and measure.
    """
    cells: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row.get("status", "ok") == "ok":
            key = tuple(row.get(name) for name in (*CELL_COLUMNS, "tag", "run"))
            cells.setdefault(key, {})[row["impl"]] = row
    found = []
    for key, members in cells.items():
        for measure, factor in MEASURES.items():
            times = {name: factor * row[measure] for name, row in members.items() if row.get(measure)}
            rivals = {name: time for name, time in times.items() if name in peers}
            if impl in times and rivals:
                peer = min(rivals, key=lambda name: rivals[name])
                found.append(Standing(key, measure, times[impl], rivals[peer], peer))
    return found


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def print_standings(console: Console, rows: Sequence[Row]) -> None:
    """Print one line per cell with our times and their ratio to the best JAX peer, then the means."""
    found = standings(rows)
    if not found:
        return
    measures = [measure for measure in MEASURES if any(one.measure == measure for one in found)]
    table = Table(
        title=f"{IMPL}: µs, and its time over the best JAX peer's (below 1 it is faster)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in ("dtype", "D", "S", "causal", "mode", "precision"):
        table.add_column(name, justify="right" if name in ("D", "S") else "left", no_wrap=True)
    for measure in measures:
        table.add_column(_WORDS[measure], no_wrap=True)
    by_cell: dict[tuple[Any, ...], dict[str, Standing]] = {}
    for one in found:
        by_cell.setdefault(one.cell, {})[one.measure] = one
    for cell, each in by_cell.items():
        named = dict(zip((*CELL_COLUMNS, "tag", "run"), cell, strict=True))
        shown = [str(named[name]) for name in ("dtype", "head_dim", "seq", "causal", "mode", "precision")]
        table.add_row(*shown, *(_words(each.get(measure)) for measure in measures))
    console.print(table)
    for measure in measures:
        ratios = [one.ratio for one in found if one.measure == measure]
        behind = sum(ratio > LEVEL for ratio in ratios)
        mean, worst = geometric_mean(ratios), max(ratios)
        console.print(
            f"{_WORDS[measure]}: geometric mean {mean:.3f} of the best JAX peer's time, worst {worst:.3f},"
            f" behind by more than {LEVEL - 1:.0%} in {behind} of {len(ratios)} cells"
        )


def _words(one: Standing | None) -> str:
    if one is None:
        return ""
    colour = "green" if one.ratio <= 1 else "yellow" if one.ratio <= LEVEL else "red"
    return f"{one.ours:.1f} [{colour}]{one.ratio:.2f}x[/] {one.peer}"
