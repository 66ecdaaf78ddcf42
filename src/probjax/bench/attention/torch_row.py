"""The row `torch_sdpa`: PyTorch's attention, in a child process that may be another interpreter."""

import importlib.util
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from probjax.bench.attention.cells import AttentionCell, distance_buckets
from probjax.bench.child import Child, script_path
from probjax.bench.machine import cores_used
from probjax.bench.measure import Failed, Prepared, Unavailable, describe

SCRIPT = script_path(__file__, "torch_child.py")
VARIABLE = "PROBJAX_TORCH_PYTHON"
_START_S = 120.0
_LOAD_S = 120.0
_CALL_S = 600.0
# A child that died is started again for the next cell, but not for ever.
_MAX_STARTS = 4


def torch_interpreter(given: str | None) -> str:
    """Return the interpreter to run torch in.

    Args:
      given: the user's choice; None takes PROBJAX_TORCH_PYTHON, or this interpreter when it has torch.

    Raises:
      ValueError: when the given path is no program.
      Unavailable: when there is none.
    """
    if given is not None:
        found = shutil.which(given)
        if found is None:
            raise ValueError(
                f"--torch-python: got {given}, which is no program, wanted a Python interpreter with torch"
            )
        return found
    if named := os.environ.get(VARIABLE):
        found = shutil.which(named)
        if found is None:
            raise Unavailable(f"{VARIABLE} is {named}, which is no program")
        return found
    if importlib.util.find_spec("torch") is None:
        raise Unavailable(
            f"torch is not installed here; give --torch-python PATH or set {VARIABLE} to a Python that has it"
        )
    return sys.executable


def start(python: str, *, threads: int, pause: bool = True) -> tuple[Child, dict[str, Any]]:
    """Start the child process.

    Args:
      python: the interpreter.
      threads: how many threads torch may use.
      pause: stop the process between requests.

    Returns:
      The child, and what it says of itself.

    Raises:
      Unavailable: when it does not start.
    """
    child = Child([python, SCRIPT], env=_environment(python), pause=pause)
    try:
        return child, child.request(_START_S, op="hello", threads=threads)
    except Failed as error:
        child.close()
        raise Unavailable(f"torch does not start in {Path(python).name}: {describe(error)}") from None


def _environment(python: str) -> dict[str, str]:
    environment = dict(os.environ)
    if python != sys.executable:
        # These point to the packages of our own interpreter, which another version cannot load.
        environment.pop("PYTHONPATH", None)
        environment.pop("PYTHONHOME", None)
    return environment


def find_torch(given: str | None) -> tuple[dict[str, Any] | None, str]:
    """Return what torch says of itself, or None and the reason why there is none."""
    try:
        child, hello = start(torch_interpreter(given), threads=cores_used())
    except (Unavailable, ValueError, OSError, subprocess.SubprocessError) as error:
        return None, str(error)
    child.close()
    return hello, ""


def write_inputs(cell: AttentionCell, inputs: dict[str, np.ndarray], path: Path) -> None:
    """Write the inputs for the child: heads ahead of tokens, as torch likes them; bias by distance."""
    names = ("query", "key", "value", "cotangent")
    arrays = {name: np.ascontiguousarray(inputs[name].swapaxes(1, 2)) for name in names}
    if cell.biased:
        # Entry d + seq - 1 is what a key at distance d after the query gets: -inf after it, the bias at or
        # before.
        past = inputs["table"][:, distance_buckets(cell.seq)[::-1]]
        future = np.full((cell.heads, cell.seq - 1), -np.inf, np.float32)
        arrays["by_distance"] = np.concatenate([past, future], axis=1)
    np.savez(path, **arrays)  # type: ignore[arg-type]


def load_message(cell: AttentionCell, path: Path) -> dict[str, Any]:
    """Return the request that makes the child read a case."""
    return {"op": "load", "path": str(path), "mode": cell.mode, "dtype": cell.dtype, "causal": cell.causal}


class TorchPeer:
    """PyTorch in a child process that lives through a run and is started again when it died.

    Args:
      given: the interpreter, see `torch_interpreter`.

    Attributes:
      hello: what torch says of itself; None when it is unavailable.
      reason: why it is unavailable.
    """

    def __init__(self, given: str | None) -> None:
        self._given = given
        self._child: Child | None = None
        self._starts = 0
        self._folder = tempfile.TemporaryDirectory(prefix="probjax-bench-")
        self.hello: dict[str, Any] | None = None
        self.reason = ""
        self._asleep = 0.0
        self._waiting = self._ran = 0.0
        try:
            self._ensure()
        except Unavailable as error:
            self.reason = str(error)

    def _ensure(self) -> Child:
        if self._child is not None and not self._child.alive:
            self._retire()
        if self._child is None:
            if self._starts >= _MAX_STARTS:
                raise Unavailable(f"the torch process died {self._starts} times in this run")
            self._starts += 1
            self._child, self.hello = start(torch_interpreter(self._given), threads=cores_used())
        return self._child

    def _retire(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            self._asleep += child.asleep_cpu_s
            child.close()

    def prepare(self, cell: AttentionCell, inputs: dict[str, np.ndarray]) -> Prepared:
        """Load a cell into the child and call it once; see `jax_rows.prepare`."""
        if self.reason:
            raise Unavailable(self.reason)
        child = self._ensure()
        path = Path(self._folder.name) / "inputs.npz"
        write_inputs(cell, inputs, path)
        try:
            child.request(_LOAD_S, **load_message(cell, path))
            first = child.request(_CALL_S, op="first")
        finally:
            path.unlink(missing_ok=True)
        assert self.hello is not None

        def run(repetitions: int) -> float:
            before = time.process_time()
            seconds = child.request(_CALL_S, op="run", n=repetitions)["seconds"]
            self._waiting += time.process_time() - before
            self._ran += seconds
            return seconds

        columns = {
            "compile_s": first["seconds"],
            "implementation": "sdpa",
            "precision": self.hello["precision"],
        }
        return Prepared("torch_sdpa", run, columns, result=lambda: self._result(child))

    def _result(self, child: Child) -> dict[str, np.ndarray]:
        path = Path(self._folder.name) / "outputs.npz"
        child.request(_LOAD_S, op="result", path=str(path))
        try:
            with np.load(path) as file:
                return {name: file[name].swapaxes(1, 2) for name in file.files}
        finally:
            path.unlink(missing_ok=True)

    def idle(self) -> dict[str, Any]:
        """Return the processor time that each side used while the other was timed, in seconds."""
        asleep = self._asleep
        if self._child is not None:
            asleep += self._child.asleep_cpu_s
        known = not math.isnan(asleep)
        return {
            "torch_cpu_while_stopped_s": round(asleep, 4) if known else None,
            "own_cpu_while_torch_ran_s": round(self._waiting, 4),
            "torch_ran_s": round(self._ran, 4),
        }

    def close(self) -> None:
        """End the child and remove its files."""
        self._retire()
        self._folder.cleanup()
