"""Peak memory and the longest sequence that fits, each case in a fresh child process.

A child compiles, makes its inputs and then calls once, and this process reads the kernel's account of it
(/proc) between the steps: resident memory after the inputs is the baseline, the high-water mark after the
call minus that is the peak. The limit of `max_fit` is the kernel's limit on private writable memory
(RLIMIT_DATA), set from outside after start-up and compilation: an allocation beyond it fails, whatever the
library.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from probjax.bench.attention.cells import AttentionCell, make_inputs
from probjax.bench.attention.torch_row import load_message, start, torch_interpreter, write_inputs
from probjax.bench.child import Child, ChildDied, ChildTimeout
from probjax.bench.machine import cores_used
from probjax.bench.measure import Failed, Unavailable, describe

_MB = 2**20
# What the libraries say when an allocation fails.
_MEMORY_WORDS = (
    "resource_exhausted",
    "out of memory",
    "memoryerror",
    "bad_alloc",
    "cannot allocate",
    "can't allocate",
    "not enough memory",
    "unable to allocate",
)


def out_of_memory(text: str) -> bool:
    """Return whether an error says that an allocation failed."""
    return any(word in text.lower() for word in _MEMORY_WORDS)


def _status_kb(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise Failed(f"the kernel does not report {name}")


def _reset_peak(pid: int) -> None:
    # 5 sets the high-water mark back to what is resident now (proc(5), clear_refs).
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _limit(pid: int, limit_bytes: int) -> None:
    import resource

    whole = _status_kb(pid, "VmData") * 1024 + limit_bytes
    resource.prlimit(pid, resource.RLIMIT_DATA, (whole, whole))


class _Case:
    """A child process with one compiled case; `inputs` and `run` are its two steps.

    All steps share one time limit of `timeout` seconds.
    """

    def __init__(self, child: Child, inputs: dict[str, Any], run: dict[str, Any], timeout: float) -> None:
        self.child, self._inputs, self._run = child, inputs, run
        self._end = time.monotonic() + timeout

    def ask(self, **message: Any) -> None:
        """Send one request within what is left of the time."""
        self.child.request(max(1e-3, self._end - time.monotonic()), **message)

    def inputs(self) -> None:
        """Make the inputs."""
        self.ask(**self._inputs)

    def run(self) -> None:
        """Call once."""
        self.ask(**self._run)


@contextmanager
def _case(impl: str, cell: AttentionCell, *, timeout: float, torch_python: str | None) -> Iterator[_Case]:
    if not sys.platform.startswith("linux"):
        raise Unavailable("peak memory and memory limits are read from /proc and need Linux")
    maker = _torch_case if impl == "torch_sdpa" else _jax_case
    with maker(impl, cell, timeout, torch_python) as case:
        yield case


@contextmanager
def _jax_case(impl: str, cell: AttentionCell, timeout: float, _: str | None) -> Iterator[_Case]:
    with Child([sys.executable, "-m", "probjax.bench.attention.memory_child"], pause=False) as child:
        case = _Case(child, {"op": "inputs"}, {"op": "run"}, timeout)
        case.ask(op="compile", impl=impl, cell=cell.columns())
        yield case


@contextmanager
def _torch_case(_: str, cell: AttentionCell, timeout: float, torch_python: str | None) -> Iterator[_Case]:
    child, _hello = start(torch_interpreter(torch_python), threads=cores_used(), pause=False)
    with child, tempfile.TemporaryDirectory(prefix="probjax-bench-") as folder:
        path = Path(folder) / "inputs.npz"
        write_inputs(cell, make_inputs(cell), path)
        yield _Case(child, load_message(cell, path), {"op": "first"}, timeout)


def peak_row(impl: str, cell: AttentionCell, *, timeout: float, torch_python: str | None) -> dict[str, Any]:
    """Measure the peak memory of one call.

    Args:
      impl: row label.
      cell: the cell.
      timeout: seconds for the child.
      torch_python: an interpreter with torch.

    Returns:
      A row with `peak_mb`, the peak of resident memory above `baseline_mb` (units of 2**20 bytes), or with
      the reason why there is none.
    """
    row: dict[str, Any] = {"impl": impl, **cell.columns()}
    try:
        with _case(impl, cell, timeout=timeout, torch_python=torch_python) as case:
            case.inputs()
            baseline = _status_kb(case.child.pid, "VmRSS")
            _reset_peak(case.child.pid)
            case.run()
            peak = _status_kb(case.child.pid, "VmHWM")
    except Unavailable as error:
        return {**row, "status": "unavailable", "reason": describe(error)}
    except (Failed, OSError) as error:
        return {**row, "status": "error", "reason": describe(error)}
    return {**row, "peak_mb": (peak - baseline) / 1024, "baseline_mb": baseline / 1024, "status": "ok"}


def fits(impl: str, cell: AttentionCell, *, limit: int, timeout: float, torch_python: str | None) -> str:
    """Return whether one call runs within a memory limit.

    Args:
      impl: row label.
      cell: the cell.
      limit: bytes that the process may take on top of what it has after start-up and compilation.
      timeout: seconds for the child.
      torch_python: an interpreter with torch.

    Returns:
      "fits", "memory", "timeout", or "error: ..." for anything else.

    Raises:
      Unavailable: when the row cannot run here at all.
    """
    limited = False
    try:
        with _case(impl, cell, timeout=timeout, torch_python=torch_python) as case:
            _limit(case.child.pid, limit)
            limited = True
            case.inputs()
            case.run()
    except ChildTimeout:
        return "timeout"
    except (Failed, OSError, MemoryError) as error:
        text = describe(error)
        # A failed allocation inside C++ ends the process by a signal instead of an answer.
        if limited and (isinstance(error, ChildDied) or out_of_memory(text)):
            return "memory"
        return f"error: {text}"
    return "fits"


def max_fit_row(
    impl: str, cells: Sequence[AttentionCell], *, limit: int, timeout: float, torch_python: str | None
) -> dict[str, Any]:
    """Find the longest sequence that runs within a memory limit.

    Args:
      impl: row label.
      cells: cells that differ in their sequence length only.
      limit: see `fits`.
      timeout: seconds for each child.
      torch_python: an interpreter with torch.

    Returns:
      A row with `max_seq` (None when nothing fits) and what each length tried gave.
    """
    row = {"impl": impl, **{name: value for name, value in cells[0].columns().items() if name != "seq"}}
    row["memory_limit_mb"] = limit / _MB
    tried: dict[str, str] = {}
    # From the top: what does not fit fails at once, and what fits need not be run shorter.
    for cell in sorted(cells, key=lambda cell: -cell.seq):
        try:
            tried[str(cell.seq)] = fits(impl, cell, limit=limit, timeout=timeout, torch_python=torch_python)
        except Unavailable as error:
            return {**row, "tried": tried, "status": "unavailable", "reason": describe(error)}
        if tried[str(cell.seq)] == "fits":
            return {**row, "max_seq": cell.seq, "tried": tried, "status": "ok"}
    return {**row, "max_seq": None, "tried": tried, "status": "ok"}
