"""Several processes that compile a suite's cells at the same time, and are timed one after the other.

Tracing and lowering hold Python's lock, so that threads would not help. Cells go in waves: within a wave all
processes compile, then each times its cells while the others stand still. Nothing is compiled while something
is timed.
"""

import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from probjax.bench.child import Child
from probjax.bench.measure import Deadline, Failed, Unavailable, check_stop, describe
from probjax.bench.results import ResultFile
from probjax.bench.runner import Bar, CostModel, Suite, run_cells

type Job = tuple[int, list[str]]
_START_S = 300.0
_COMPILE_S = 3600.0
# Beyond the budget, for a step that has begun to end.
_GRACE_S = 120.0
# Cells that one process takes in a wave: many use the processes evenly, few lose little when interrupted.
# Four is what shares one set of inputs in the suite `dispatch`.
_CELLS_PER_WAVE = 4


def environment() -> dict[str, str]:
    """Return the environment of a process that is not alone on its GPU."""
    return {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


class Workers:
    """The processes.

    Args:
      number: how many.
      name: of the suite.
      config: its configuration.
    """

    def __init__(self, number: int, name: str, config: Any) -> None:
        self._name, self._config = name, config
        self._children: list[Child | None] = [None] * number
        # The configuration that each process has been told.
        self._told: list[Any] = [None] * number
        self._torch: dict[str, Any] | None = None
        self.number = number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            if child is not None:
                child.close()

    def start(self) -> dict[str, Any] | None:
        """Start all processes at the same time; return what torch says of itself in one of them.

        Raises:
          Failed: when one does not start.
        """
        self._spawn(self.number)
        with ThreadPoolExecutor(self.number) as pool:
            list(pool.map(self._ready, range(self.number)))
        return self._torch

    def use(self, config: Any) -> None:
        """Take a configuration of the same suite, whose cells are then prepared."""
        self._config = config

    def prepare(
        self, wave: Sequence[Sequence[Job]], deadline: Deadline
    ) -> list[tuple[list[int], str | None]]:
        """Let the processes compile, each a part.

        Returns:
          For each part the cells that came too late, and the reason when all failed.
        """
        self._spawn(len(wave))
        with ThreadPoolExecutor(len(wave)) as pool:
            asked = [pool.submit(self._prepare, worker, part, deadline) for worker, part in enumerate(wave)]
            return [future.result() for future in asked]

    def _spawn(self, number: int) -> None:
        """Start those processes that do not run. Not from a thread: they would end with it (see `child`)."""
        for worker, child in enumerate(self._children[:number]):
            if child is not None and not child.alive:
                self._drop(worker)
            if self._children[worker] is None:
                command = [sys.executable, "-m", "probjax.bench.worker"]
                # Not stopped between requests: it has a child of its own, and its idle threads sleep.
                self._children[worker] = Child(command, env=environment(), pause=False)

    def _ready(self, worker: int) -> Child:
        """Return a process that knows the configuration."""
        child = self._children[worker]
        assert child is not None
        if self._told[worker] != self._config:
            fields = dataclasses.asdict(self._config)
            answer = child.request(_START_S, op="open", suite=self._name, config=fields)
            self._torch = answer["torch"] or self._torch
            self._told[worker] = self._config
        return child

    def _prepare(self, worker: int, jobs: Sequence[Job], deadline: Deadline) -> tuple[list[int], str | None]:
        limit, left = _limits(deadline)
        try:
            answer = self._ready(worker).request(limit, op="prepare", jobs=jobs, left=left)
        except (Failed, Unavailable) as error:
            self._drop(worker)
            return [], f"the process that compiles it failed: {describe(error)}"
        return answer["late"], None

    def measure(self, worker: int, cell: int, deadline: Deadline) -> list[dict[str, Any]] | None:
        """Let one process time a cell; return its rows, None when the time was over.

        Raises:
          Failed: when the process died.
        """
        limit, left = _limits(deadline)
        child = self._children[worker]
        if child is None or not child.alive:
            raise Failed("the process that compiled it has died")
        answer = child.request(limit, op="measure", cell=cell, left=left)
        return None if answer.get("late") else answer["rows"]

    def _drop(self, worker: int) -> None:
        child, self._children[worker] = self._children[worker], None
        self._told[worker] = None
        if child is not None:
            child.close()


def _limits(deadline: Deadline) -> tuple[float, float | None]:
    left = deadline.left()
    if math.isinf(left):
        return _COMPILE_S, None
    return max(0.0, left) + _GRACE_S, max(0.0, left)


def waves(jobs: Sequence[Job], workers: int, most: int = _CELLS_PER_WAVE) -> list[list[list[Job]]]:
    """Return the jobs as waves of one list per worker, neighbours together."""
    size = max(1, min(most, math.ceil(len(jobs) / workers)))
    parts = [list(jobs[start : start + size]) for start in range(0, len(jobs), size)]
    return [parts[start : start + workers] for start in range(0, len(parts), workers)]


def run_parallel(
    suite: Suite,
    workers: Workers,
    *,
    results: ResultFile,
    deadline: Deadline,
    bar: Bar,
    shared: dict[str, Any],
    dropped_before: Sequence[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Measure a suite's cells in several processes and write the file as they come; see `runner.run_cells`.

    Args:
      suite: the suite, for its cells and labels; it prepares nothing here.
      workers: the processes.
      results: the file; what it holds already is not measured again.
      deadline: the end of the time budget.
      bar: shows the progress.
      shared: columns that every row gets.
      dropped_before: cells dropped earlier in this run.

    Returns:
      The cells that were dropped, with the reason.
    """
    cells = suite.cells()
    jobs: list[Job] = []
    for index, cell in enumerate(cells):
        keys = {impl: {"impl": impl, **cell.columns(), **shared} for impl in suite.impls()}
        wanted = [impl for impl, key in keys.items() if not results.measured(key)]
        if wanted:
            jobs.append((index, wanted))
    dropped: list[dict[str, Any]] = []

    def drop(index: int) -> None:
        dropped.append({**cells[index].columns(), "reason": "the time budget was spent"})
        results.annotate(dropped=[*dropped_before, *dropped])

    for number, wave in enumerate(parts := waves(jobs, workers.number)):
        check_stop()
        if deadline.left() <= 0:
            for index, _ in (job for part in wave for job in part):
                drop(index)
            continue
        bar.show(f"wave {number + 1} of {len(parts)}: compiling")
        answers = workers.prepare(wave, deadline)
        for worker, (part, (late, failure)) in enumerate(zip(wave, answers, strict=True)):
            for index, impls in part:
                cell = cells[index]
                bar.begin(cell.work)
                bar.show(f"{cell.title}: timing", 1.0)
                if index in late:
                    drop(index)
                    continue
                try:
                    rows = None
                    if failure is not None:
                        raise Failed(failure)
                    rows = workers.measure(worker, index, deadline)
                except (Failed, Unavailable) as error:
                    lost = {**cell.columns(), "status": "error", "reason": describe(error)}
                    rows = [{"impl": impl, **lost} for impl in impls]
                if rows is None:
                    drop(index)
                else:
                    results.add([{**row, **shared} for row in rows])
    return dropped


def run_suite(
    suite: Any, workers: Workers | None, *, settings: Any, costs: CostModel, note: Any, **rest: Any
) -> list[dict[str, Any]]:
    """Measure a suite's cells in this process, or in those given; see `runner.run_cells`."""
    if workers is None:
        return run_cells(suite, settings=settings, costs=costs, note=note, **rest)
    workers.use(settings)
    return run_parallel(suite, workers, **rest)
