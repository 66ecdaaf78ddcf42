"""The report: result files as one self-contained HTML page, with plots, a table, and files side by side."""

from __future__ import annotations

import dataclasses
import html
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from probjax.bench import report_data
from probjax.bench.report_data import ReportFile
from probjax.bench.results import read_results

_ASSETS = Path(__file__).parent / "report_assets"
_STYLE = "style.css"
_SCRIPTS = ("basics.js", "axes.js", "charts.js", "dots.js", "table.js", "page.js")
# Lists of rows beside `results`, and all the entries that the page shows in a place of their own.
_SECTIONS = ("peaks", "max_fit")
_KNOWN_ENTRIES = {"device", "config", "configs", "results", "note", "runs", *_SECTIONS}


def write_report(paths: Sequence[str | Path], output: str | Path) -> None:
    """Writes one HTML page with the plots and the table of one or more result files.

    The page needs no network and no other file. Files given together share their axes.

    Args:
      paths: result files, as ``probjax bench`` writes them.
      output: the page to write; missing folders are made, an older page is replaced.

    Raises:
      FileNotFoundError: a path does not exist.
      ValueError: no path was given, or a file is no result file.

    Example:
      >>> write_report(["ours.json", "seed.json"], "report.html")  # doctest: +SKIP
    """
    if not paths:
        raise ValueError("paths: got no file; want one result file or more, as `probjax bench` writes them")
    files = _with_distinct_names([read_report_file(path) for path in paths])
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(render(files), encoding="utf-8")


def read_report_file(path: str | Path) -> ReportFile:
    """Reads a result file and takes it apart for the report.

    Args:
      path: a result file; ``config``, ``configs``, ``runs``, ``note`` and any column may be missing.

    Returns:
      The file, named by its file name.

    Raises:
      FileNotFoundError: the path does not exist.
      ValueError: the file is not JSON or not a result file.
    """
    path = Path(path)
    try:
        content = read_results(path)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"paths: {path} does not exist, wanted a result file of probjax bench"
        ) from None
    sections = {"": content["results"], **{name: content[name] for name in _SECTIONS if name in content}}
    for name, rows in sections.items():
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            where = name or "results"
            raise ValueError(
                f"paths: {path}: {where!r} is no list of objects, wanted a result file of probjax bench"
            )
    configs = [content[key] for key in ("config", "configs") if content.get(key)]
    runs = content.get("runs")
    return ReportFile(
        name=path.name,
        rows=[{"suite": name, **row} if name else row for name, rows in sections.items() for row in rows],
        device=content["device"],
        config=configs[0] if len(configs) == 1 else configs or None,
        note=str(content.get("note") or ""),
        runs=[run for run in runs if isinstance(run, dict)] if isinstance(runs, list) else [],
        extra={key: value for key, value in content.items() if key not in _KNOWN_ENTRIES},
    )


def render(files: Sequence[ReportFile]) -> str:
    """The page as text; see :func:`write_report`."""
    payload = {
        "files": [report_data.file_payload(file) for file in files],
        "suites": report_data.suites(files),
        "problems": report_data.problems(files),
    }
    names = ", ".join(file.name for file in files)
    parts = {
        "TITLE": html.escape(f"probjax benchmarks: {names}"),
        "STYLE": (_ASSETS / _STYLE).read_text(encoding="utf-8"),
        "DATA": _json_for_html(payload),
        "SCRIPT": "\n".join((_ASSETS / script).read_text(encoding="utf-8") for script in _SCRIPTS),
    }
    # Cut the template once: text that was put in is never searched for the next mark.
    page = (_ASSETS / "page.html").read_text(encoding="utf-8")
    pieces = page.split("@@")
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def _json_for_html(payload: Any) -> str:
    """JSON that cannot end the script element it stands in, nor open a comment in it."""
    text = json.dumps(payload, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _with_distinct_names(files: Sequence[ReportFile]) -> list[ReportFile]:
    totals = Counter(file.name for file in files)
    seen: Counter[str] = Counter()
    named = []
    for file in files:
        seen[file.name] += 1
        name = file.name if totals[file.name] == 1 else f"{file.name} ({seen[file.name]})"
        named.append(dataclasses.replace(file, name=name))
    return named
