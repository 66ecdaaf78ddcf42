"""The tables of the suites of whole networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from probjax.bench.network.config import TableStyle
from probjax.bench.table import print_list, print_reasons, print_rows, print_summary

Row = Mapping[str, Any]


def print_tables(console: Console, rows: list[dict[str, Any]], style: TableStyle) -> None:
    """Print the rows of a run with their ratios to the peers, and the summaries that the suite has.

    Args:
      console: where to.
      rows: result rows of one run, or of one file.
      style: how.
    """
    line = [name for name in style.line if len({row.get(name) for row in rows}) > 1]
    timed = {row["impl"] for row in rows if row.get("median_ms")}
    peers = [peer for peer in style.peers if peer in timed]
    print_rows(console, rows, group=style.group, line=line, peers=peers)
    if style.column is not None:
        plain = [row for row in rows if row.get("variant") is None]
        group = [name for name in ("model", "dtype", "op") if any(name in row for row in plain)]
        print_summary(console, plain, group=group, column=style.column, impl="probjax_default", peers=peers)
    if style.attention:
        shown = [
            name for name in ("dtype", "op", "tokens", "variant", "tag") if name in (*line, "dtype", "op")
        ]
        print_list(
            console,
            attention_cost(rows, (*style.group, *style.line, "run")),
            title="what attention costs: the row without it taken off",
            columns=(
                *shown,
                "attention ms",
                "jax_xla ms",
                "time ratio",
                "attention MB",
                "jax_xla MB",
                "memory ratio",
            ),
        )
    if style.base is not None:
        column, value = style.base
        names = (*style.group, *style.line, "impl")
        varying = [name for name in names if name == column or len({row.get(name) for row in rows}) > 1]
        print_list(
            console,
            against(rows, style),
            title=f"against {column} {value}",
            columns=(
                *varying,
                "median ms",
                "times the time",
                "temp MB",
                "times the memory",
            ),
        )
    print_reasons(console, rows)
    console.print("vs X: X's median over this row's; above 1 this row is faster. temp MB: by XLA's account.")


def attention_cost(rows: Sequence[Row], cell: Sequence[str]) -> list[dict[str, Any]]:
    """Return what our attention adds to a model, and what jax_xla's adds, per cell that has all three rows.

    Args:
      rows: result rows.
      cell: the columns that name a cell.

    Returns:
      Rows with milliseconds and megabytes on top of `no_attention`, and ours over jax_xla's: below 1 is less.
    """
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row.get("median_ms"):
            found.setdefault(tuple(row.get(name) for name in cell), {})[row["impl"]] = row
    costs = []
    for members in found.values():
        if not {"probjax_default", "jax_xla", "no_attention"} <= set(members):
            continue
        entry = {name: members["probjax_default"].get(name) for name in cell}
        for measure, unit in (("median_ms", "ms"), ("xla_temp_mb", "MB")):
            base = members["no_attention"].get(measure)
            if base is None:
                continue
            ours, theirs = (members[impl][measure] - base for impl in ("probjax_default", "jax_xla"))
            entry |= {f"attention {unit}": ours, f"jax_xla {unit}": theirs}
            if theirs > 0:
                entry["time ratio" if unit == "ms" else "memory ratio"] = f"{ours / theirs:.2f}"
        costs.append(entry)
    return costs


def against(rows: Sequence[Row], style: TableStyle) -> list[dict[str, Any]]:
    """Return time and memory of each row over those of its cell's row with the base value."""
    assert style.base is not None
    column, value = style.base
    names = [name for name in (*style.group, *style.line, "impl", "run") if name != column]

    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in names)

    timed = [row for row in rows if row.get("median_ms")]
    bases = {key(row): row for row in timed if row.get(column) == value}
    entries = []
    for row in timed:
        base = bases.get(key(row))
        if base is None:
            continue
        entry = {name: row.get(name) for name in (*style.group, *style.line, "impl")}
        entry |= {
            "median ms": row["median_ms"],
            "times the time": f"{row['median_ms'] / base['median_ms']:.2f}",
        }
        if row.get("xla_temp_mb") and base.get("xla_temp_mb"):
            entry["temp MB"] = row["xla_temp_mb"]
            entry["times the memory"] = f"{row['xla_temp_mb'] / base['xla_temp_mb']:.2f}"
        entries.append(entry)
    return entries
