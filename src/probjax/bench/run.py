"""One run of a suite that adds nothing to the common way: from configurations to a result file and tables."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from probjax.bench.machine import cores_used, device_header
from probjax.bench.measure import Deadline
from probjax.bench.parallel import run_suite
from probjax.bench.results import ResultFile
from probjax.bench.runner import Bar, CostModel, interruptible
from probjax.bench.suites import open_peers, suite_class

type Print = Callable[[Console, list[dict[str, Any]]], None]


def run(
    name: str,
    configs: Sequence[Any],
    *,
    key: Sequence[str],
    print_tables: Print,
    console: Console | None = None,
    started: float | None = None,
) -> Path:
    """Measure a suite, write a result file and print its tables.

    Args:
      name: of the suite, see `suites`.
      configs: what to measure; several are run one after the other into one file, under the output, the
        budget and the interpreter of the first.
      key: the row columns that together name one measurement.
      print_tables: prints the rows of the run.
      console: where the progress bar and the tables go; standard output by default.
      started: when the budget began, on the clock of `time.monotonic`; now by default.

    Returns:
      The path of the result file.

    Raises:
      ValueError: when a setting cannot be met (no such device, a file of another machine to append to).
      KeyboardInterrupt: after Ctrl-C; the file then holds the cells finished so far.
    """
    console = console or default_console()
    first = configs[0]
    deadline = Deadline(first.budget, time.monotonic() if started is None else started)
    require_backend(first.device)
    path = Path(first.output or f"{name}_{first.device}.json")
    dropped: list[dict[str, Any]] = []
    with open_peers(name, configs) as (torch, workers, hello):
        results = ResultFile(path, device_header(hello), append=first.append, key=key)
        costs = CostModel()
        works = [cell.work for config in configs for cell in config.grid()]
        try:
            with interruptible(results), Bar(console, works) as bar:
                for config in configs:
                    results.begin(config.header())
                    dropped += run_suite(
                        suite_class(name)(config, torch),
                        workers,
                        settings=config,
                        results=results,
                        deadline=deadline,
                        bar=bar,
                        costs=costs,
                        shared={"tag": config.tag, "run": results.run, "threads": cores_used()},
                        dropped_before=dropped,
                        note=lambda: {"idle": torch.idle()} if torch else {},
                    )
                if dropped:
                    results.annotate(dropped=dropped)
        finally:
            # Those of this run, or of the whole file when it had everything already.
            rows = [row for row in results.rows if row.get("run") == results.run] or results.rows
            if rows:
                print_tables(console, rows)
            console.print(f"written: {path}", markup=False, soft_wrap=True)
    report_dropped(console, dropped)
    report_load(console, results.load_average)
    return path


def require_backend(device: str) -> None:
    """Raise ValueError when JAX's default backend is not the platform to measure on."""
    if device == "gpu":
        # Other processes use the same GPU: none may take all of its memory.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if jax.default_backend() != device:
        name = "cuda" if device == "gpu" else device
        raise ValueError(
            f"device: got {device!r}, but JAX's default backend is {jax.default_backend()!r}:"
            f" set JAX_PLATFORMS={name} before JAX starts"
        )


def default_console() -> Console:
    """Return a console on standard output that is wide enough for the table also when that is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)


def report_dropped(console: Console, dropped: Sequence[dict[str, Any]]) -> None:
    """List the cells that the time budget left out."""
    if dropped:
        console.print(f"{len(dropped)} cells were dropped, since the time budget ran out:", style="yellow")
    for cell in dropped:
        parts = [
            value if isinstance(value, str) else f"{name} {value}"
            for name, value in cell.items()
            if name not in ("reason", "suite") and value is not None
        ]
        console.print(Text(f"  {' '.join(parts)}: {cell['reason']}", "yellow"))


def report_load(console: Console, load: list[float] | None) -> None:
    """Say so when something else used the machine: ratios then hold less well than the quartiles suggest."""
    if load is not None and load[0] > 0.5 * cores_used():
        console.print(
            f"the machine was busy: load average {load[0]:.1f} on {cores_used()} cores before the run;"
            " times are noisy and ratios less certain",
            style="yellow",
        )
