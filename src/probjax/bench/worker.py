"""A process that compiles a part of a suite's cells while others compile theirs, and times them when told to.

Usage: PYTHON -m probjax.bench.worker PARENT_PID, then one JSON object per line of standard input:

  {"op": "open", "suite": NAME, "config": {...}}       makes the suite; what torch says of itself
  {"op": "prepare", "jobs": [[I, [LABEL, ...]], ...], "left": SECONDS or null}
                                                       compiles and checks rows of the cells number I; those
                                                       that the time did not reach are in "late"
  {"op": "measure", "cell": I, "left": SECONDS or null}
                                                       times the rows of a prepared cell; its rows
  {"op": "once", "cell": {...}, "impl": LABEL}         compiles a row of a cell given by columns, calls it
"""

import json
import os
import sys
from typing import Any

from probjax.bench.attention.torch_child import die_with_parent
from probjax.bench.measure import Deadline, OutOfTime, Prepared, Unavailable, describe


class _Log:
    """Stands in for the progress bar: the last line tells what a process was at when it died."""

    def begin(self, work: float) -> None:
        """Nothing to show."""

    def show(self, text: str, share: float = 0.0) -> None:
        """Write what is being done to standard error."""
        print(text, file=sys.stderr, flush=True)


class Server:
    """One suite, its prepared cells, and the operations on them."""

    def __init__(self) -> None:
        self._log: Any = _Log()
        self._torch: Any = None
        self._ready: dict[int, tuple[dict[str, dict[str, Any]], list[Prepared]]] = {}

    def open(self, suite: str, config: dict[str, Any]) -> dict[str, Any]:
        """Make the suite, with the platform that its configuration names."""
        import jax

        from probjax.bench.suites import open_suite

        if config["device"] == "cpu":
            jax.config.update("jax_platforms", "cpu")
        jax.devices()
        self._suite, self._config, self._torch = open_suite(suite, config, self._torch)
        self._cells = self._suite.cells()
        return {"torch": self._torch.hello if self._torch else None}

    def prepare(self, jobs: list[tuple[int, list[str]]], left: float | None) -> dict[str, Any]:
        """Compile and check; cells that the time does not reach are left out."""
        from probjax.bench.runner import prepare_cell

        deadline = Deadline(left)
        late = []
        for index, impls in jobs:
            try:
                self._ready[index] = prepare_cell(
                    self._suite, self._cells[index], impls, deadline=deadline, bar=self._log
                )
            except OutOfTime:
                late.append(index)
        return {"late": late}

    def measure(self, cell: int, left: float | None) -> dict[str, Any]:
        """Time a prepared cell."""
        from probjax.bench.runner import time_cell

        rows, prepared = self._ready.pop(cell)
        measured = time_cell(
            self._suite,
            self._cells[cell],
            rows,
            prepared,
            settings=self._config,
            deadline=Deadline(left),
            bar=self._log,
            shared={},
        )
        return {"rows": measured, "idle": self._torch.idle() if self._torch else None}

    def once(self, cell: dict[str, Any], impl: str) -> dict[str, Any]:
        """Compile one row and call it, without comparing its result."""
        self._suite.once(cell, impl)
        return {}


def main() -> None:
    """Serve requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    die_with_parent(int(sys.argv[1]))
    server = Server()
    for line in sys.stdin:
        request = json.loads(line)
        operation = getattr(server, request.pop("op"))
        try:
            answer = operation(**request)
        except (Unavailable, NotImplementedError) as error:
            answer = {"error": describe(error), "unavailable": True}
        except OutOfTime:
            answer = {"late": True}
        except Exception as error:
            answer = {"error": describe(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
