"""One run of the suite `recurrence`: from configurations to a result file and a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from probjax.bench.recurrence.cells import CELL_COLUMNS, OPS
from probjax.bench.recurrence.config import PEERS, RecurrenceConfig
from probjax.bench.run import run
from probjax.bench.table import print_reasons, print_rows, print_summary

_KEY = ("tag", "impl", "suite", *CELL_COLUMNS)
_GROUP = ("op", "mode", "dtype", "batch", "heads", "channels", "state")


def run_recurrence(
    configs: RecurrenceConfig | Sequence[RecurrenceConfig],
    *,
    console: Console | None = None,
    started: float | None = None,
) -> Path:
    """Measure the recurrences, write a result file and print a table; see `bench.run.run`."""
    configs = [configs] if isinstance(configs, RecurrenceConfig) else list(configs)
    return run("recurrence", configs, key=_KEY, print_tables=print_tables, console=console, started=started)


def print_tables(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print the rows of a run with their ratios to the peers."""
    ordered = sorted(rows, key=_order)
    line = ("seq",) if len({row.get("tag") for row in rows}) == 1 else ("seq", "tag")
    timed = {row["impl"] for row in rows if row.get("median_ms")}
    peers = [peer for peer in PEERS if peer in timed]
    print_rows(console, ordered, group=_GROUP, line=line, peers=peers)
    print_summary(
        console,
        ordered,
        group=("op", "mode", "dtype", "heads"),
        column="seq",
        impl="probjax_default",
        peers=(*peers, "probjax_scan"),
    )
    print_reasons(console, rows)
    console.print(
        "vs X: X's median over this row's; above 1 this row is faster. Error: against float64, step by step."
        " temp MB: by XLA's account."
    )


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    return OPS.index(row["op"]), row["dtype"], row["heads"], row["mode"], row["seq"]
