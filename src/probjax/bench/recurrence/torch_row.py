"""The row `torch_reference`: the selective scan as a plain loop in PyTorch, in a process of its own."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from probjax.bench.attention.torch_row import TorchPeer, torch_interpreter
from probjax.bench.child import Child, script_path
from probjax.bench.machine import cores_used
from probjax.bench.measure import Failed, Prepared, Unavailable, describe
from probjax.bench.recurrence.cells import RecurrenceCell

SCRIPT = script_path(__file__, "torch_child.py")
_WAIT_S = 600.0
_MAX_STARTS = 4
# Arrays over tokens, which the loop takes with time last.
_OVER_TOKENS = ("x", "dt", "B", "C", "cotangent", "output")


class ReferencePeer(TorchPeer):
    """PyTorch in a child process that serves `torch_child.py`; see `TorchPeer` for its life."""

    def _ensure(self) -> Child:
        if self._child is not None and not self._child.alive:
            self._retire()
        if self._child is None:
            if self._starts >= _MAX_STARTS:
                raise Unavailable(f"the torch process died {self._starts} times in this run")
            self._starts += 1
            python = torch_interpreter(self._given)
            child = Child([python, SCRIPT], env=_environment(python))
            try:
                self.hello = child.request(_WAIT_S, op="hello", threads=cores_used(), device=self._device)
            except (Failed, Unavailable) as error:
                child.close()
                raise Unavailable(f"torch does not start in {Path(python).name}: {describe(error)}") from None
            self._child = child
        return self._child

    def prepare(self, cell: Any, inputs: dict[str, np.ndarray], **_: Any) -> Prepared:
        """Load a cell into the child and call it once.

        Raises:
          Unavailable: without torch, and for operations that mamba_ssm has no such reference of.
        """
        assert isinstance(cell, RecurrenceCell)
        if cell.op != "selective_scan":
            raise Unavailable("mamba_ssm's loop in PyTorch is of the selective scan only")
        if self.reason:
            raise Unavailable(self.reason)
        child = self._ensure()
        self._cases += 1
        case = {"case": self._cases}
        path = Path(self._folder.name) / f"inputs{self._cases}.npz"
        np.savez(path, **_arranged(inputs))  # type: ignore[arg-type]
        try:
            child.request(_WAIT_S, op="load", path=str(path), mode=cell.mode, dtype=cell.dtype, **case)
            first = child.request(_WAIT_S, op="first", **case)
        finally:
            path.unlink(missing_ok=True)
        assert self.hello is not None

        def run(repetitions: int) -> float:
            return child.request(_WAIT_S, op="run", n=repetitions, **case)["seconds"]

        def result() -> dict[str, np.ndarray]:
            child.request(_WAIT_S, op="result", path=str(path), **case)
            try:
                with np.load(path) as file:
                    found = {name: file[name] for name in file.files}
            finally:
                path.unlink(missing_ok=True)
            return _arranged(found)

        def release() -> None:
            with contextlib.suppress(Failed):
                child.request(_WAIT_S, op="drop", **case)

        columns = {
            "compile_s": first["seconds"],
            "implementation": "loop",
            "precision": self.hello["precision"],
        }
        return Prepared("torch_reference", run, columns, result=result, release=release)


def _arranged(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Exchange the two layouts, time last (torch) and time after the batch (ours)."""
    return {
        name: np.ascontiguousarray(array.swapaxes(1, 2)) if name in _OVER_TOKENS else array
        for name, array in arrays.items()
    }


def _environment(python: str) -> dict[str, str]:
    # These point to the packages of our own interpreter, which another version cannot load.
    foreign = ("PYTHONPATH", "PYTHONHOME") if python != sys.executable else ()
    return {name: value for name, value in os.environ.items() if name not in foreign}
