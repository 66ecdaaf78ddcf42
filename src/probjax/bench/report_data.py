"""Turns result files into what the report page draws: which column is an axis, a series, a panel, a selector.

Suites name their columns differently (``seq`` or ``tokens``, ``impl`` or ``attention``, ``causal`` or
``variant``), so roles are found from the data: the first known name that varies takes a role, and a column
that follows from columns already placed takes none.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]

# Other spellings of the same column or value in files of other suites and versions.
_COLUMN_ALIASES = {"seq_len": "seq", "length": "seq", "dim": "head_dim"}
_VALUE_ALIASES = {"fwd_bwd": "fwdbwd"}

_X_COLUMNS = ("seq", "tokens", "resolution", "width", "layers")
_SERIES_COLUMNS = ("impl", "attention", "cell", "op", "remat", "variant", "model")
_COLUMN_FACETS = ("variant", "scan", "model", "cell")
_ROW_FACETS = ("mode", "op")
# Operations that are stages of one workload, not alternatives to compare with each other.
_STAGES = {"fwd", "fwdbwd", "forward", "backward", "train_step"}
# What a row says about itself, not what was measured or on which problem. `implementation` is what the row's
# label chose.
_BOOKKEEPING = {"implementation", "suite", "tag", "run", "inner", "samples", "repeats", "params", "finite"}
_BOOKKEEPING |= {"threads", "status", "reason", "error", "note"}
_BOOKKEEPING |= {"kernels", "device_source", "device_reason", "program_reason"}
_GOOD_STATUS = {"ok", "measured", "done"}
_PEERS = ("jax_xla", "torch_sdpa", "bare_jit", "none", "plain")
# On a GPU the dense form is no peer to speak of.
_PEERS_OF = {
    "dispatch": ("jax_cudnn", *_PEERS),
    "moe": ("dense", *_PEERS),
    "recurrence": ("xla_associative", *_PEERS),
    "remat": ("xla_associative", *_PEERS),
    "ssm": ("xla_associative", *_PEERS),
}
# Suites that had one row per cell before they had peers: that row is what this label is now.
_ONE_ROW = ("ssm", "unet")
# And what a column was before there were several.
_BEFORE = {"unet": ("model", "unet_narrow")}
_OURS = "probjax_default"
# Suites of several models, whose lengths are not points of one line.
_NO_AXIS = ("remat",)
# Columns that say nothing about why a cell was not measured, and how many cells are few enough to be listed.
_NOT_IN_PROBLEMS = {"impl", "section", "batch", "heads", "model_dim"}
_FEW_CELLS = 16
# The share of rows that must have a number in a column before it can be the horizontal axis.
_X_COVERAGE = 0.8


@dataclass(frozen=True)
class ReportFile:
    """One result file, as the report needs it.

    Attributes:
      name: what the page calls it.
      rows: the measured cells; those of sections beside ``results`` have the section's name as their suite.
      device, config, note, runs, extra: the header; ``extra`` holds the entries with no place of their own.
    """

    name: str
    rows: Sequence[Row]
    device: Mapping[str, Any] = field(default_factory=dict)
    config: Any = None
    note: str = ""
    runs: Sequence[Mapping[str, Any]] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


def measure_kind(column: str) -> str | None:
    """``time``, ``memory`` or ``other`` for a column of measurements, ``None`` for one that names a cell."""
    if column.startswith(("q1_", "q3_")) or "limit" in column:
        return None
    if column.endswith(("_ms", "_us")):
        return "time"
    if column.endswith(("_mb", "_gb", "_bytes")):
        return "memory"
    if column.endswith(("_s", "_err", "_error")) or column == "max_seq":
        return "other"
    return None


def is_number(value: object) -> bool:
    """True for a finite number; booleans do not count."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def problem_reason(row: Row) -> str | None:
    """Why the row has no measurement, or ``None`` when it has one."""
    status = str(row.get("status") or "ok")
    if row.get("error") or status not in _GOOD_STATUS:
        reason = row.get("error") or row.get("reason") or "no reason given"
        return str(reason) if status in _GOOD_STATUS else f"{status}: {reason}"
    if not any(measure_kind(column) and is_number(value) for column, value in row.items()):
        if isinstance(row.get("tried"), dict):
            tried = ", ".join(f"{length} {outcome}" for length, outcome in row["tried"].items())
            return f"none of the lengths tried fits: {tried}"
        return str(row.get("reason") or "the row has no measurement")
    return None


def suite_name(row: Row) -> str:
    """The suite that a row belongs to."""
    # The remat suite of older files wrote its rows under the model's name.
    if row.get("variant") in ("plain", "remat", "donate") and "op" in row:
        return "remat"
    if row.get("suite"):
        return str(row["suite"])
    return "attention" if "impl" in row else "results"


def cell_of(row: Row) -> dict[str, Any]:
    """The columns that say which problem was measured, under one spelling."""
    cell = {}
    for column, value in row.items():
        known = _COLUMN_ALIASES.get(column, column)
        if column in _BOOKKEEPING or column.startswith(("q1_", "q3_")) or measure_kind(column):
            continue
        if isinstance(value, list | dict) or (isinstance(value, float) and not value.is_integer()):
            continue
        cell[known] = _VALUE_ALIASES.get(value, value) if isinstance(value, str) else value
    if isinstance(cell.get("causal"), bool) and "variant" not in cell:
        cell["variant"] = "causal" if cell.pop("causal") else "plain"
    if suite_name(row) == "remat" and row.get("suite") not in (None, "remat"):
        cell["model"] = row["suite"]
        cell.setdefault("impl", row.get("attention") or _OURS)
    elif (before := _BEFORE.get(suite_name(row))) is not None:
        cell.setdefault(*before)
    # Older files named the rows of a network by what they took for attention.
    if cell.get("attention") is not None:
        cell.setdefault("impl", cell["attention"])
    if row.get("suite") in _ONE_ROW:
        cell.setdefault("impl", _OURS)
    return cell


def file_payload(file: ReportFile) -> dict[str, Any]:
    """The file's header and its table, by columns, ready for JSON."""
    columns = list(dict.fromkeys(column for row in file.rows for column in row))
    return {
        "name": file.name,
        "device": {str(key): _plain(value) for key, value in file.device.items()},
        "label": device_label(file.device),
        "config": _plain_tree(file.config),
        "note": file.note,
        "runs": [_plain_tree(run) for run in file.runs],
        "extra": {str(key): _plain(value) for key, value in file.extra.items()},
        "columns": columns,
        "rows": [[_plain(row.get(column)) for column in columns] for row in file.rows],
    }


def device_label(device: Mapping[str, Any]) -> str:
    """A short name of the machine; a CPU run is not labelled by a GPU that stood idle in it."""
    processor = device.get("processor") or device.get("cpu") or device.get("processor_name")
    if device.get("backend") == "cpu" or device.get("device_kind") == "cpu":
        return str(processor) if processor else "CPU (model not recorded)"
    return str(device.get("device_kind") or device.get("gpu") or processor or "unknown device")


def suites(files: Sequence[ReportFile]) -> list[dict[str, Any]]:
    """Every suite in the files, with the roles of its columns and the points to draw."""
    names = dict.fromkeys(suite_name(row) for file in files for row in file.rows)
    return [_suite(name, files) for name in names]


def problems(files: Sequence[ReportFile]) -> list[dict[str, Any]]:
    """Rows without a measurement, and cells that a run left out, one entry per file, label and reason."""
    grouped: dict[tuple[int, str, str, str], list[dict[str, Any]]] = {}
    reasons: dict[tuple[int, str, str, str], set[str]] = {}

    def add(file: int, suite: str, label: str, reason: str, cell: dict[str, Any]) -> None:
        # "3 s left, 5 s needed" and "3 s left, 9 s needed" are one reason.
        key = (file, suite, label, re.sub(r"\d+", "…", reason))
        grouped.setdefault(key, []).append(cell)
        reasons.setdefault(key, set()).add(reason)

    for number, file in enumerate(files):
        for cell in (cell for run in file.runs for cell in run.get("dropped") or ()):
            if _measured(cell, file.rows):  # by a later run
                continue
            label = str(cell.get("impl", "left out"))
            add(number, str(cell.get("section", "")), label, str(cell.get("reason")), cell_of(cell))
        for row in file.rows:
            if reason := problem_reason(row):
                cell = cell_of(row)
                label = next((str(row[c]) for c in _SERIES_COLUMNS if row.get(c) is not None), "")
                add(number, suite_name(row), label, reason, cell)
    return [
        {
            "file": key[0],
            "suite": key[1],
            "label": key[2],
            "reason": key[3] if len(reasons[key]) > 1 else next(iter(reasons[key])),
            "count": len(cells),
            "where": _where(cells),
        }
        for key, cells in grouped.items()
    ]


def _measured(cell: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    named = {name: value for name, value in cell.items() if name not in ("reason", "section")}
    return any(
        all(row.get(name) == value for name, value in named.items()) and not problem_reason(row)
        for row in rows
    )


def _where(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """The cells in words: the values covered when all combinations are meant, else each cell of a few."""
    shown = [c for c in dict.fromkeys(c for cell in cells for c in cell) if c not in _NOT_IN_PROBLEMS]
    values = {c: [v for v in _distinct(cell.get(c) for cell in cells) if v is not None] for c in shown}
    if len(cells) <= _FEW_CELLS and math.prod(len(found) for found in values.values() if found) != len(cells):
        return [_words(cell, [c for c in shown if len(values[c]) > 1 or len(cells) == 1]) for cell in cells]
    return ["; ".join(f"{c} {', '.join(map(str, found))}" for c, found in values.items() if found)]


def _words(cell: Mapping[str, Any], columns: Sequence[str]) -> str:
    present = [(c, cell[c]) for c in columns if cell.get(c) is not None]
    return ", ".join(value if isinstance(value, str) else f"{c} {value}" for c, value in present)


@dataclass(frozen=True)
class _Point:
    file: int
    row: int
    tag: str | None
    cell: Mapping[str, Any]


def _points(name: str, files: Sequence[ReportFile]) -> list[_Point]:
    points = []
    for number, file in enumerate(files):
        several_tags = len({str(row.get("tag")) for row in file.rows if suite_name(row) == name}) > 1
        for index, row in enumerate(file.rows):
            if suite_name(row) == name and problem_reason(row) is None:
                tag = row.get("tag") if several_tags else None
                points.append(_Point(number, index, None if tag is None else str(tag), cell_of(row)))
    return points


def _suite(name: str, files: Sequence[ReportFile]) -> dict[str, Any]:
    points = _points(name, files)
    rows = [files[point.file].rows[point.row] for point in points]
    varying, constants = _split_columns(points)
    x = None if name in _NO_AXIS else _choose_x(points, varying)
    placed = [x] if x else []
    series = _choose_series(points, varying, placed)
    placed += [series] if series else []
    rest = [column for column in _by_priority(varying) if column not in placed]
    free: list[str] = []
    for column in rest:
        if not _follows(column, placed + free, points):
            free.append(column)
    if x and not _is_line(x, [*free, *([series] if series else [])], points):
        free, x = [x, *free], None
    down = next((c for c in _ROW_FACETS if c in free), None) if x else None
    # What is no row of panels may be a column of them.
    across = (*_COLUMN_FACETS, *(c for c in _ROW_FACETS if c != down))
    over = next((c for c in across if c in free), None) if x else None
    selected = [c for c in free if c not in (over, down)] if x else []
    shown = [c for c in free if c not in (over, down, *selected)]
    measures = _measures(rows)
    peers = (
        [v for v in _ordered(_distinct(p.cell.get(series) for p in points)) if v is not None]
        if series
        else []
    )
    return {
        "name": name,
        "x": x,
        "series": series,
        "over": over,
        "down": down,
        "selectors": _selectors(selected, points),
        "constants": [[c, v] for c, v in constants.items() if c not in placed],
        "measures": measures,
        "peers": peers if len(peers) > 1 and series != "model" else [],
        "peer": next((p for p in _PEERS_OF.get(name, _PEERS) if p in peers), peers[0] if peers else None),
        "overValues": _ordered(_distinct(p.cell.get(over) for p in points)) if over else [None],
        "downValues": _ordered(_distinct(p.cell.get(down) for p in points)) if down else [None],
        "points": [
            {
                "file": point.file,
                "row": point.row,
                "tag": point.tag,
                "series": str(point.cell.get(series, name)) if series else name,
                "x": point.cell.get(x) if x else None,
                "over": point.cell.get(over) if over else None,
                "down": point.cell.get(down) if down else None,
                "select": [point.cell.get(column) for column in selected],
                "label": [[c, point.cell[c]] for c in shown if point.cell.get(c) is not None],
            }
            for point in points
            if x is None or is_number(point.cell.get(x))
        ],
    }


def _split_columns(points: Sequence[_Point]) -> tuple[list[str], dict[str, Any]]:
    """Columns that vary, and those with one value everywhere; a missing value is no difference."""
    varying, constants = [], {}
    for column in dict.fromkeys(column for point in points for column in point.cell):
        values = _distinct(point.cell.get(column) for point in points)
        if len([value for value in values if value is not None]) > 1:
            varying.append(column)
        elif None not in values:
            constants[column] = values[0]
    return varying, constants


def _choose_x(points: Sequence[_Point], varying: Sequence[str]) -> str | None:
    for column in _X_COLUMNS:
        numbers = [point.cell[column] for point in points if is_number(point.cell.get(column))]
        if column in varying and len(numbers) >= _X_COVERAGE * len(points) and len(set(numbers)) > 1:
            return column
    return None


def _choose_series(points: Sequence[_Point], varying: Sequence[str], placed: Sequence[str]) -> str | None:
    for column in _SERIES_COLUMNS:
        values = {point.cell.get(column) for point in points} - {None}
        if column in varying and column not in placed and len(values) > 1 and not values <= _STAGES:
            return column
    return next((c for c in ("impl", "attention", "cell") if any(p.cell.get(c) for p in points)), None)


def _by_priority(columns: Sequence[str]) -> list[str]:
    first = [*_COLUMN_FACETS, *_ROW_FACETS, "dtype", "head_dim"]
    return [c for c in first if c in columns] + [c for c in columns if c not in first]


def _follows(column: str, placed: Sequence[str], points: Sequence[_Point]) -> bool:
    """Whether the column's value, where it has one, is known once those of ``placed`` are."""
    known: dict[tuple[Any, ...], Any] = {}
    for point in points:
        value = point.cell.get(column)
        key = tuple(point.cell.get(c) for c in placed)
        if value is not None and known.setdefault(key, value) != value:
            return False
    return True


def _is_line(x: str, others: Sequence[str], points: Sequence[_Point]) -> bool:
    """Whether any line of the plot would have two points."""
    lines: dict[tuple[Any, ...], set[Any]] = {}
    for point in points:
        lines.setdefault(tuple(point.cell.get(c) for c in others), set()).add(point.cell.get(x))
    return any(len(values) > 1 for values in lines.values())


def _selectors(columns: Sequence[str], points: Sequence[_Point]) -> list[dict[str, Any]]:
    """Values of each selector; the default is the combination with the most rows."""
    counts = Counter(tuple(point.cell.get(c) for c in columns) for point in points)
    best = max(counts, key=lambda combination: (None not in combination, counts[combination]), default=())
    selectors = []
    for column, default in zip(columns, best, strict=True):
        values = _ordered([v for v in _distinct(p.cell.get(column) for p in points) if v is not None])
        selectors.append(
            {"column": column, "values": values, "default": values[0] if default is None else default}
        )
    return selectors


def _measures(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Columns of numbers by kind, the best covered first: it is the one shown at first."""
    found: dict[str, list[str]] = {"time": [], "memory": [], "other": []}
    counts = Counter(column for row in rows for column, value in row.items() if is_number(value))
    first = ["median_ms", "xla_temp_mb", "rel_err"]
    for column in sorted(
        counts, key=lambda c: (-counts[c] if measure_kind(c) == "time" else 0, c not in first)
    ):
        if kind := measure_kind(column):
            found[kind].append(column)
    return found


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _ordered(values: Sequence[Any]) -> list[Any]:
    """Numbers by size; words in the order of the file, which is the order the suite means."""
    return sorted(values) if all(is_number(value) for value in values) else list(values)


def _plain(value: Any) -> Any:
    """A value for one table cell: six digits are more than a timing has, and JSON knows no NaN."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return json.dumps(_plain_tree(value))


def _plain_tree(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain_tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_tree(item) for item in value]
    return _plain(value) if isinstance(value, bool | int | float | str) or value is None else str(value)
