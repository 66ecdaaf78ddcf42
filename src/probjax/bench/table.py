"""The tables that a benchmark run prints."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]


def ratio(row: Row, peers: Mapping[tuple[Any, ...], float], key: tuple[Any, ...]) -> float | None:
    """Return the peer's time over this row's: above 1 the row is faster. None without both times."""
    theirs, ours = peers.get(key), row.get("median_ms")
    return theirs / ours if theirs and ours else None


def peer_times(rows: Iterable[Row], cell: Sequence[str], peer: str) -> dict[tuple[Any, ...], float]:
    """Return the peer's median by cell, tag and run: ratios are taken inside one run only."""
    return {
        _cell_key(row, cell): row["median_ms"] for row in rows if row["impl"] == peer and row.get("median_ms")
    }


def _cell_key(row: Row, cell: Sequence[str]) -> tuple[Any, ...]:
    return (*(row.get(name) for name in cell), row.get("tag"), row.get("run"))


def _number(value: float | None, digits: int = 3) -> str:
    """Return a number with about `digits` significant digits and no exponent in the range of times."""
    if value is None:
        return ""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.{max(0, digits - 1 - (value >= 10))}f}" if value >= 1 else f"{value:.{digits}f}"


def _times(value: float | None) -> Text:
    if value is None:
        return Text("")
    return Text(f"{value:.2f}x" if value < 100 else f"{value:.0f}x", style="green" if value >= 1 else "red")


def _error(row: Row) -> str:
    error = row.get("rel_err")
    return "" if error is None else f"{error:.0e}"


def _temporary(row: Row) -> str:
    value = row.get("xla_temp_mb")
    return "" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


# Columns that a narrow terminal leaves out; they are in the file.
_DETAILS: dict[str, Callable[[Row], str]] = {"error": _error, "temp MB": _temporary}
_WIDE = 90
_SHORT = 11


def _table(title: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.title_justify = "left"
    return table


def print_rows(
    console: Console, rows: Sequence[Row], *, group: Sequence[str], line: Sequence[str], peers: Sequence[str]
) -> None:
    """Print one table per group of rows: times, quartiles, ratio to each peer, error, memory.

    Rows of what is unavailable have nothing to show and are left to `print_reasons`.

    Args:
      console: where to.
      rows: result rows.
      group: columns that are equal within one table.
      line: columns that together with the implementation name a line.
      peers: implementations to give the ratio to.
    """
    rows = [row for row in rows if row.get("status") != "unavailable"]
    cell = (*group, *line)
    times = {peer: peer_times(rows, cell, peer) for peer in peers}
    details = _DETAILS if console.width >= _WIDE else {}
    for key in dict.fromkeys(tuple(row.get(name) for name in group) for row in rows):
        title = ", ".join(f"{name} {value}" for name, value in zip(group, key, strict=True))
        table = _table(title)
        for name in line:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("implementation", no_wrap=True)
        members = [row for row in rows if tuple(row.get(name) for name in group) == key]
        labels = {row["impl"] for row in members}
        # A peer that this table has no row of has no ratio here.
        here = {peer: found for peer, found in times.items() if peer in labels}
        for name in ("median ms", "q1-q3 ms", *map(_heading, here), *details):
            table.add_column(name, justify="right", no_wrap=True)
        _fill(table, members, cell, line, here, details)
        console.print(table)


def _heading(peer: str) -> str:
    """Return a column's heading in two lines of about the same length."""
    return f"vs\n{peer}" if len(peer) <= _SHORT else "vs " + peer.replace("_", "\n", 1)


def _fill(
    table: Table,
    rows: Sequence[Row],
    cell: Sequence[str],
    line: Sequence[str],
    times: Mapping[str, Mapping[tuple[Any, ...], float]],
    details: Mapping[str, Callable[[Row], str]],
) -> None:
    previous: tuple[Any, ...] | None = None
    for row in rows:
        here = tuple(row.get(name) for name in line)
        if previous is not None and here != previous:
            table.add_section()
        shown = ["" if here == previous or value is None else str(value) for value in here]
        previous = here
        name = _label(row)
        if row.get("status", "ok") != "ok":
            table.add_row(*shown, name, Text(row["status"], style="yellow"), style="dim")
            continue
        table.add_row(
            *shown,
            name,
            _number(row["median_ms"]),
            f"{_number(row['q1_ms'])}-{_number(row['q3_ms'])}",
            *(_times(ratio(row, times[peer], _cell_key(row, cell))) for peer in times),
            *(show(row) for show in details.values()),
        )


def _label(row: Row) -> str:
    """Return the row label, with what ran behind it where the label leaves that open."""
    ran = row.get("implementation")
    hidden = ran and not row["impl"].endswith(f"_{ran}") and row["impl"].startswith("probjax")
    return f"{row['impl']} ({ran})" if hidden else row["impl"]


def print_summary(
    console: Console,
    rows: Sequence[Row],
    *,
    group: Sequence[str],
    column: str,
    impl: str,
    peers: Sequence[str],
) -> None:
    """Print how many times faster one implementation is than its peers, over the values of one column.

    Args:
      console: where to.
      rows: result rows.
      group: columns that name a line.
      column: the column whose values go across.
      impl: the implementation.
      peers: those it is compared with.
    """
    ours = [row for row in rows if row["impl"] == impl and row.get("median_ms")]
    if not ours:
        return
    across = sorted({row[column] for row in ours})
    table = _table(f"{impl}: times faster than")
    for name in ("peer", *group):
        table.add_column(name, no_wrap=True)
    for value in across:
        table.add_column(f"{column} {value}", justify="right", no_wrap=True)
    cell = (*group, column)
    filled = False
    for peer in peers:
        times = peer_times(rows, cell, peer)
        if not times or peer == impl:
            continue
        filled = True
        table.add_section()
        for key in dict.fromkeys(tuple(row.get(name) for name in group) for row in ours):
            found = {row[column]: row for row in ours if tuple(row.get(name) for name in group) == key}
            ratios = [
                ratio(found[value], times, _cell_key(found[value], cell)) if value in found else None
                for value in across
            ]
            if any(value is not None for value in ratios):
                table.add_row(peer, *map(str, key), *map(_times, ratios))
    if filled:
        console.print(table)


def print_list(console: Console, rows: Sequence[Row], *, title: str, columns: Sequence[str]) -> None:
    """Print rows as they are, without empty columns and without rows of what is unavailable.

    Args:
      console: where to.
      rows: result rows.
      title: of the table.
      columns: in the order wanted.
    """
    rows = [row for row in rows if row.get("status") != "unavailable"]
    if not rows:
        return
    shown = [name for name in columns if any(row.get(name) is not None for row in rows)]
    table = _table(title)
    for name in shown:
        table.add_column(name, justify="right" if any(_is_number(row.get(name)) for row in rows) else "left")
    for row in rows:
        table.add_row(*(Text(_plain(row.get(name))) for name in shown))
    console.print(table)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {what}" for name, what in value.items())
    return "" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)


def print_reasons(console: Console, rows: Sequence[Row]) -> None:
    """Print each distinct reason of the rows without times, once, with the rows it holds for."""
    found: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if row.get("status", "ok") != "ok":
            key = (row["impl"], row["status"], row.get("reason") or "")
            found[key] = found.get(key, 0) + 1
    for (impl, status, reason), count in found.items():
        console.print(Text(f"{impl}: {status} in {count} cell{'s' * (count > 1)}: {reason}", style="yellow"))
