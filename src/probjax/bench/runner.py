"""The loop over a suite's cells: prepare, check, time, write; budget, progress and interruption."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from probjax.bench.measure import (
    Cell,
    Deadline,
    Failed,
    OutOfTime,
    Prepared,
    Samples,
    Skipped,
    Unavailable,
    Wrong,
    check_stop,
    describe,
    drain,
    interleave,
    request_stop,
)
from probjax.bench.results import ResultFile

# Part of a cell's progress that preparing (mostly compiling) its implementations stands for.
_PREPARE_SHARE = 0.5
# Seconds of fixed cost per cell, in units of `Cell.work`, for the progress bar's idea of how far a run is.
_FIXED_WORK = 2e10


class Suite(Protocol):
    """What the loop needs of a suite."""

    def cells(self) -> Sequence[Cell]:
        """Return the grid, in the order of measuring."""
        ...

    def impls(self) -> Sequence[str]:
        """Return the row labels wanted."""
        ...

    def prepare(self, impl: str, cell: Any) -> Prepared:
        """Compile and warm up one implementation; raises Unavailable, Skipped or Failed."""
        ...

    def check(self, cell: Any, prepared: Prepared) -> dict[str, Any]:
        """Return the error columns of one implementation; raises Failed when its result is wrong."""
        ...


class Bar:
    """A progress bar in a terminal, nothing elsewhere.

    Args:
      console: where to.
      works: the work of each cell to come, see `Cell.work`.
    """

    def __init__(self, console: Console, works: Sequence[float]) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:>3.0f}%, left"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            # Drawn between samples only: a thread that draws by the clock would disturb what is timed.
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=sum(works) + _FIXED_WORK * len(works))
        self._work = 0.0

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, work: float) -> None:
        """Start a cell of this much work."""
        self._work = work + _FIXED_WORK

    def show(self, text: str, share: float = 0.0) -> None:
        """Show what is being done, and add a share of the cell's work to what is done."""
        self._progress.update(self._task, description=text, advance=share * self._work, refresh=True)


class CostModel:
    """Guesses how long a cell will take from those that were measured before."""

    def __init__(self) -> None:
        self._known: list[tuple[tuple[Any, ...], float, float]] = []

    def learn(self, cell: Cell, seconds: float) -> None:
        """Record the duration of a cell."""
        self._known.append((cell.kind, cell.work, seconds))

    def guess(self, cell: Cell) -> float:
        """Return the seconds that a cell should take; zero when nothing is known yet.

        The time is taken to be a constant (compiling) plus something in proportion to the work, from the two
        known cells nearest in work; where only one is known, half of its time counts as constant.
        """
        alike = [entry for entry in self._known if entry[0] == cell.kind] or self._known
        if not alike:
            return 0.0
        near = sorted(alike, key=lambda entry: abs(entry[1] - cell.work))
        _, work, seconds = near[0]
        other = next((entry for entry in near if entry[1] != work), None)
        slope = (seconds - other[2]) / (work - other[1]) if other else seconds / 2 / work
        return max(0.0, seconds + max(0.0, slope) * (cell.work - work))


def measure_cell(
    suite: Suite,
    cell: Cell,
    impls: Sequence[str],
    *,
    settings: Any,
    deadline: Deadline,
    bar: Bar,
    shared: dict[str, Any],
) -> list[dict[str, Any]]:
    """Measure the given implementations of one cell.

    Args:
      suite: where they come from.
      cell: the cell.
      impls: row labels.
      settings: has `repeats` and `min_sample_ms`.
      deadline: the end of the time budget.
      bar: shows the progress.
      shared: columns that every row gets.

    Returns:
      One row per implementation, in the given order.

    Raises:
      OutOfTime: when the budget ended before anything was timed.
    """
    bar.begin(cell.work)
    rows, prepared = prepare_cell(suite, cell, impls, deadline=deadline, bar=bar)
    return time_cell(
        suite, cell, rows, prepared, settings=settings, deadline=deadline, bar=bar, shared=shared
    )


def prepare_cell(
    suite: Suite, cell: Cell, impls: Sequence[str], *, deadline: Deadline, bar: Bar
) -> tuple[dict[str, dict[str, Any]], list[Prepared]]:
    """Compile and check the given implementations of one cell.

    Returns:
      The rows by implementation, and what is ready to be timed.

    Raises:
      OutOfTime: when the budget ended before all were prepared.
    """
    rows = {impl: {"impl": impl, **cell.columns()} for impl in impls}
    prepared: list[Prepared] = []
    try:
        for impl in impls:
            bar.show(f"{cell.title}: {impl}")
            check_stop()
            deadline.check()
            ready = _prepare(suite, impl, cell, rows[impl])
            if ready is not None:
                prepared.append(ready)
            bar.show(f"{cell.title}: {impl}", _PREPARE_SHARE / len(impls))
    except BaseException:
        _release(prepared)
        raise
    return rows, prepared


def time_cell(
    suite: Suite,
    cell: Cell,
    rows: dict[str, dict[str, Any]],
    prepared: Sequence[Prepared],
    *,
    settings: Any,
    deadline: Deadline,
    bar: Bar,
    shared: dict[str, Any],
) -> list[dict[str, Any]]:
    """Time what `prepare_cell` made ready, and let go of it; see `measure_cell`."""
    share = (1 - _PREPARE_SHARE) / settings.repeats
    bar.show(f"{cell.title}: timing")
    timed = [peer for ready in prepared for peer in _timed(ready)]
    try:
        samples, broken = interleave(
            timed,
            repeats=settings.repeats,
            min_sample_s=settings.min_sample_ms / 1e3,
            deadline=deadline,
            step=lambda: bar.show(f"{cell.title}: timing", share),
            # Threads that spin after a call disturb what runs on the processor; a device they do not.
            quiet=drain if getattr(suite, "device", "cpu") == "cpu" else lambda: None,
        )
        for ready in prepared:
            _fill(rows[ready.impl], ready, samples, broken)
    finally:
        _release(prepared)
    return [{**row, **shared} for row in rows.values()]


_PROGRAM = " in a program"


def _timed(ready: Prepared) -> list[Prepared]:
    """Return what is sampled of one implementation: its calls, and its calls inside a program."""
    inside = [] if ready.program is None else [Prepared(ready.impl + _PROGRAM, ready.program)]
    return [*([ready] if ready.wall else []), *inside]


def _fill(row: dict[str, Any], ready: Prepared, samples: dict[str, Samples], broken: dict[str, str]) -> None:
    """Add the times of one implementation to its row."""
    if ready.impl in broken:
        row.update(status="error", reason=broken[ready.impl])
        return
    error = row.pop("rel_err", None)
    if ready.impl in samples:
        row.update(samples[ready.impl].columns())
    row.update(rel_err=error, status="ok")
    if (inside := ready.impl + _PROGRAM) in samples:
        row.update(samples[inside].program_columns(ready.program_length))
    elif inside in broken:
        row.update(program_reason=broken[inside])
    if ready.device is not None:
        row.update(ready.device())


def _release(prepared: Sequence[Prepared]) -> None:
    for ready in prepared:
        ready.release()


def _prepare(suite: Suite, impl: str, cell: Cell, row: dict[str, Any]) -> Prepared | None:
    """Prepare and check one implementation; a row that cannot be timed gets its reason instead."""
    try:
        ready = suite.prepare(impl, cell)
    except Unavailable as error:
        row.update(status="unavailable", reason=describe(error))
        return None
    except Skipped as error:
        row.update(status="skipped", reason=describe(error))
        return None
    except NotImplementedError as error:
        row.update(status="unavailable", reason=describe(error))
        return None
    except (Failed, MemoryError, RuntimeError, ValueError, TypeError) as error:
        # A peer that breaks is a result of its own; only what we did not expect ends the run.
        row.update(status="error", reason=describe(error))
        return None
    row.update(ready.columns)
    try:
        row.update(suite.check(cell, ready))
    except Wrong as error:
        ready.release()
        row.update(status="wrong", reason=describe(error), **error.columns)
        return None
    except (Failed, MemoryError, RuntimeError) as error:
        ready.release()
        row.update(status="error", reason=describe(error))
        return None
    return ready


@contextmanager
def interruptible(results: ResultFile) -> Iterator[None]:
    """Keep what was measured at Ctrl-C or a request to terminate, and note the interruption in the file."""
    begin = time.monotonic()
    try:
        with _signals():
            yield
    except KeyboardInterrupt:
        results.annotate(interrupted=True)
        raise
    finally:
        results.annotate(seconds=round(time.monotonic() - begin, 1))
        results.save()


@contextmanager
def _signals() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into KeyboardInterrupt, and do not let one be lost.

    An exception raised while a finalizer or a callback of JAX runs is dropped by Python; the request is then
    met at the next step of the loop.
    """

    def interrupt(number: int, frame: Any) -> None:
        request_stop()
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt):
            check_stop()
        raise
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def run_cells(
    suite: Suite,
    *,
    settings: Any,
    results: ResultFile,
    deadline: Deadline,
    bar: Bar,
    costs: CostModel,
    shared: dict[str, Any],
    dropped_before: Sequence[dict[str, Any]] = (),
    note: Callable[[], dict[str, Any]] = dict,
) -> list[dict[str, Any]]:
    """Measure a suite's cells and write the file after each.

    Args:
      suite: the suite.
      settings: its configuration (`repeats`, `min_sample_ms`).
      results: the file; what it holds already is not measured again.
      deadline: the end of the time budget.
      bar: shows the progress.
      costs: guesses durations, so that a cell that does not fit into the budget is dropped before it starts.
      shared: columns that every row gets.
      dropped_before: cells dropped earlier in this run, to be listed in the file with these.
      note: returns facts about the run for the file.

    Returns:
      The cells that were dropped, with the reason.
    """
    dropped: list[dict[str, Any]] = []
    for cell in suite.cells():
        wanted = [
            impl for impl in suite.impls() if not results.measured({"impl": impl, **cell.columns(), **shared})
        ]
        if not wanted:
            bar.begin(cell.work)
            bar.show(cell.title, 1.0)
            continue
        begin = time.monotonic()
        guess = costs.guess(cell)
        try:
            if guess > deadline.left():
                raise OutOfTime
            rows = measure_cell(
                suite, cell, wanted, settings=settings, deadline=deadline, bar=bar, shared=shared
            )
        except OutOfTime:
            left = max(0.0, deadline.left())
            reason = f"the time budget had {left:.0f} s left, about {guess:.0f} s needed"
            dropped.append({**cell.columns(), "reason": reason})
            results.annotate(dropped=[*dropped_before, *dropped])
            continue
        costs.learn(cell, time.monotonic() - begin)
        results.annotate(**note())
        results.add(rows)
    return dropped
