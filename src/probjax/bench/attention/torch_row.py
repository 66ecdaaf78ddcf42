"""The torch rows: PyTorch's attention, in a child process that may be another interpreter."""

import contextlib
import importlib.util
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from probjax.bench.attention.cells import AttentionCell, distance_buckets
from probjax.bench.attention.wanted import PLAIN, Wanted
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
# Arithmetic operations of one call from where on few calls make a graph that is long enough to time.
_LONG_WORK = 1e11


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


def start(
    python: str, *, threads: int, pause: bool = True, device: str = "cpu", script: str = SCRIPT
) -> tuple[Child, dict[str, Any]]:
    """Start the child process.

    Args:
      python: the interpreter.
      threads: how many threads torch may use.
      pause: stop the process between requests.
      device: ``cpu`` or ``cuda``.
      script: what the process runs.

    Returns:
      The child, and what it says of itself.

    Raises:
      Unavailable: when it does not start.
    """
    child = Child([python, script], env=_environment(python), pause=pause)
    try:
        return child, child.request(_START_S, op="hello", threads=threads, device=device)
    except (Failed, Unavailable) as error:
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
    arrays |= {name: inputs[name] for name in ("bias", "segment_ids", "mask") if name in cell.extra}
    np.savez(path, **arrays)  # type: ignore[arg-type]


def load_message(cell: AttentionCell, path: Path, impl: str = "torch_sdpa") -> dict[str, Any]:
    """Return the request that makes the child read a case."""
    message = {"op": "load", "path": str(path), "mode": cell.mode, "dtype": cell.dtype, "causal": cell.causal}
    if cell.window is not None:
        message["window"] = cell.window
    return message | {"backend": impl.removeprefix("torch_"), "precision": cell.precision}


class TorchPeer:
    """PyTorch in a child process that lives through a run and is started again when it died.

    Args:
      given: the interpreter, see `torch_interpreter`.
      device: ``cpu`` or ``gpu``.

    Attributes:
      hello: what torch says of itself; None when it is unavailable.
      reason: why it is unavailable.
    """

    script = SCRIPT

    def __init__(self, given: str | None, device: str = "cpu") -> None:
        self._given = given
        self._device = "cuda" if device == "gpu" else "cpu"
        self._cases = 0
        self._written: tuple[Any, Path] | None = None
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
            python = torch_interpreter(self._given)
            self._child, self.hello = start(
                python, threads=cores_used(), device=self._device, script=self.script
            )
        return self._child

    def _retire(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            self._asleep += child.asleep_cpu_s
            child.close()

    def prepare(
        self,
        cell: AttentionCell,
        inputs: dict[str, np.ndarray],
        *,
        impl: str = "torch_sdpa",
        wanted: Wanted = PLAIN,
    ) -> Prepared:
        """Load a cell into the child and call it once; see `jax_rows.prepare`."""
        if self.reason:
            raise Unavailable(self.reason)
        child = self._ensure()
        path = self._inputs(cell, inputs)
        self._cases += 1
        case = {"case": self._cases}
        try:
            child.request(
                _LOAD_S,
                **load_message(cell, path, impl),
                **case,
                **({"output": True} if wanted.output else {}),
            )
            first = child.request(_CALL_S, op="first", **case)
        finally:
            if self._device == "cpu":
                self._forget()
        assert self.hello is not None

        precision = self.hello["precision"] if self._device == "cpu" else cell.precision
        columns = {
            "compile_s": first["seconds"],
            "implementation": impl.removeprefix("torch_"),
            "precision": precision,
        }
        return Prepared(
            impl,
            self._runner(child, case),
            columns,
            result=lambda: self._result(child, case, wanted),
            release=lambda: self._drop(child, case),
            wall="wall" in wanted.times,
            device=self._device_timer(child, case, cell) if "device" in wanted.times else None,
        )

    def serve(
        self,
        impl: str,
        arrays: Mapping[str, np.ndarray],
        load: Mapping[str, Any],
        *,
        arrange: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda found: found,
    ) -> tuple[Prepared, float]:
        """Load a case of another suite into the child and call it once.

        Args:
          impl: the row label.
          arrays: what the child reads from a file.
          load: the rest of the request to load them.
          arrange: what is done to the results.

        Returns:
          The row, without columns, and the seconds of the first call.

        Raises:
          Unavailable: without torch.
          Failed: when the child does not do it.
        """
        if self.reason:
            raise Unavailable(self.reason)
        child = self._ensure()
        self._cases += 1
        case = {"case": self._cases}
        path = Path(self._folder.name) / f"inputs{self._cases}.npz"
        np.savez(path, **arrays)  # type: ignore[arg-type]
        try:
            child.request(_LOAD_S, op="load", path=str(path), **load, **case)
            first = child.request(_CALL_S, op="first", **case)["seconds"]
        finally:
            path.unlink(missing_ok=True)

        def result() -> dict[str, np.ndarray]:
            child.request(_LOAD_S, op="result", path=str(path), **case)
            try:
                with np.load(path) as file:
                    return arrange({name: file[name] for name in file.files})
            finally:
                path.unlink(missing_ok=True)

        ready = Prepared(
            impl, self._runner(child, case), result=result, release=lambda: self._drop(child, case)
        )
        return ready, first

    def _runner(self, child: Child, case: dict[str, int]) -> Callable[[int], float]:
        def run(repetitions: int) -> float:
            before = time.process_time()
            seconds = child.request(_CALL_S, op="run", n=repetitions, **case)["seconds"]
            self._waiting += time.process_time() - before
            self._ran += seconds
            return seconds

        return run

    def _drop(self, child: Child, case: dict[str, int]) -> None:
        with contextlib.suppress(Failed):
            child.request(_LOAD_S, op="drop", **case)

    def _inputs(self, cell: AttentionCell, inputs: dict[str, np.ndarray]) -> Path:
        """Return the file with the inputs; on a GPU, where many rows share them, that of the last call."""
        if self._written is not None and self._written[0] is inputs:
            return self._written[1]
        self._forget()
        path = Path(self._folder.name) / f"inputs{self._cases}.npz"
        write_inputs(cell, inputs, path)
        self._written = (inputs, path)
        return path

    def _forget(self) -> None:
        if self._written is not None:
            self._written[1].unlink(missing_ok=True)
            self._written = None

    def _device_timer(
        self, child: Child, case: dict[str, int], cell: AttentionCell
    ) -> Callable[[], dict[str, Any]] | None:
        if self._device == "cpu":
            return None
        calls = 10 if cell.work < _LONG_WORK else 2

        def measure() -> dict[str, Any]:
            try:
                found = child.request(_CALL_S, op="device", n=calls, **case)
            except (Failed, Unavailable) as error:
                return {"device_reason": f"device time unavailable: {describe(error)}"}
            return {"device_us": found["device_us"], "device_source": "cuda graph"}

        return measure

    def _result(self, child: Child, case: dict[str, int], wanted: Wanted) -> dict[str, np.ndarray]:
        path = Path(self._folder.name) / "outputs.npz"
        step = {} if wanted.step is None else {"step": wanted.step}
        child.request(_LOAD_S, op="result", path=str(path), **case, **step)
        try:
            with np.load(path) as file:
                return {
                    name: file[name] if name == "bias" else file[name].swapaxes(1, 2) for name in file.files
                }
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
