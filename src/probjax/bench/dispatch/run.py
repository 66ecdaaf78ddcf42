"""One run of the suite `dispatch`: from a configuration to a result file and a table."""

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from probjax.bench.dispatch.cells import CELL_COLUMNS
from probjax.bench.dispatch.config import DispatchConfig
from probjax.bench.dispatch.find_max import columns, find_max, groups
from probjax.bench.dispatch.suite import DispatchSuite
from probjax.bench.dispatch.summary import print_standings
from probjax.bench.machine import cores_used, device_header
from probjax.bench.measure import Deadline
from probjax.bench.parallel import run_suite
from probjax.bench.results import ResultFile
from probjax.bench.run import default_console, report_dropped, report_load
from probjax.bench.runner import Bar, CostModel, interruptible
from probjax.bench.suites import open_peers
from probjax.bench.table import print_list, print_reasons, print_rows

_KEY = ("tag", "impl", *CELL_COLUMNS)
_GROUP = ("dtype", "head_dim", "mode", "causal", "precision")
_FOUND = ("impl", "dtype", "head_dim", "causal", "mode", "max_seq", "tried", "reason")


def run_dispatch(
    config: DispatchConfig, *, console: Console | None = None, started: float | None = None
) -> Path:
    """Measure attention at short lengths, write a result file and print tables.

    Args:
      config: what to measure.
      console: where the progress bar and the tables go; standard output by default.
      started: when the budget began, on the clock of `time.monotonic`; now by default.

    Returns:
      The path of the result file.

    Raises:
      ValueError: when a setting cannot be met (a device that is not there, a file of another machine).
      KeyboardInterrupt: after Ctrl-C; the file then holds the cells finished so far.
    """
    console = console or default_console()
    deadline = Deadline(config.budget, time.monotonic() if started is None else started)
    config = dataclasses.replace(config, device=_device(config.device))
    path = Path(config.output or f"dispatch_{config.device}.json")
    # The search starts a process for each length, and no others.
    needed = dataclasses.replace(config, workers=1, impls=("jax_xla",)) if config.find_max else config
    with open_peers("dispatch", [needed]) as (torch, workers, hello):
        results = ResultFile(path, device_header(hello), append=config.append, key=_KEY)
        dropped: list[dict[str, Any]] = []
        works = [cell.work for cell in config.cells()]
        shared = {"tag": config.tag, "run": results.run, "threads": cores_used()}
        try:
            with interruptible(results), Bar(console, works) as bar:
                results.begin(config.header())
                if config.find_max:
                    dropped = _search(config, results, deadline, bar, shared)
                else:
                    dropped = run_suite(
                        DispatchSuite(config, torch),
                        workers,
                        settings=config,
                        results=results,
                        deadline=deadline,
                        bar=bar,
                        costs=CostModel(),
                        shared=shared,
                        note=lambda: {"idle": torch.idle()} if torch else {},
                    )
                if dropped:
                    results.annotate(dropped=dropped)
        finally:
            _print(console, results)
            console.print(f"written: {path}", markup=False, soft_wrap=True)
    report_dropped(console, dropped)
    report_load(console, results.load_average)
    return path


def _device(wanted: str | None) -> str:
    """Return the platform: the one asked for, which must be there, or JAX's default backend."""
    # Other processes use the same GPU: none may take all of its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    there = jax.default_backend()
    if wanted not in (None, there):
        raise ValueError(f"device: got {wanted!r}, but JAX's default backend is {there!r}")
    if there not in ("cpu", "gpu"):
        raise ValueError(f"device: JAX's default backend is {there!r}, wanted cpu or gpu: give --device cpu")
    return there


def _search(
    config: DispatchConfig, results: ResultFile, deadline: Deadline, bar: Bar, shared: dict[str, Any]
) -> list[dict[str, Any]]:
    """Find the longest sequence of every row; return what the budget left out."""
    dropped = []
    for cell in groups(config):
        for impl in config.impls:
            named = {**columns(cell, impl), **shared}
            if results.measured(named, "max_fit"):
                continue
            if deadline.left() <= 0:
                dropped.append({"section": "max_fit", **named, "reason": "the time budget was spent"})
                continue
            bar.show(f"{cell.title}: {impl}: longest")
            results.add([{**find_max(config, cell, impl), **shared}], "max_fit")
    return dropped


def _print(console: Console, results: ResultFile) -> None:
    """Print the tables of this run, or of the whole file when it had everything already."""
    rows = [row for row in results.rows if row.get("run") == results.run] or results.rows
    timed = [row for row in rows if row.get("median_ms")]
    if timed:
        line = ("seq",) if len({row.get("tag") for row in rows}) == 1 else ("seq", "tag")
        print_rows(console, timed, group=_GROUP, line=line, peers=("jax_cudnn", "jax_xla"))
    print_standings(console, rows)
    print_reasons(console, rows)
    found = [row for row in results.section("max_fit") if row.get("run") == results.run]
    if found:
        print_list(console, found, title="longest sequence", columns=_FOUND)
        print_reasons(console, found)
