"""Time of the GPU's kernels alone, without the host's part of a call.

CUPTI counts the kernels of a few calls through JAX's own binding to it; where that fails, JAX's profiler
writes a trace and the events of its streams are added up. Neither may ever end a benchmark: the columns then
say why there is no time.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from probjax.bench.measure import describe


def columns(compiled: Callable[..., Any], arguments: Iterable[Any], *, calls: int = 10) -> dict[str, Any]:
    """Measure the kernels of one call.

    Args:
      compiled: a compiled JAX program.
      arguments: its arguments.
      calls: how many calls are measured.

    Returns:
      `device_us`, the sum of the kernel times of one call in microseconds (median over the calls),
      `kernels`, how many there are, and `device_source`; or `device_reason` why there is no time.
    """
    arguments = tuple(arguments)
    reasons = []
    for source, measure in (("cupti", _cupti), ("profiler", _profiler)):
        try:
            microseconds, kernels = measure(compiled, arguments, calls)
        # Whatever breaks in the private parts that these rest on, the other columns are still worth having.
        except Exception as error:
            reasons.append(f"{source}: {describe(error)}")
            continue
        return {"device_us": microseconds, "kernels": kernels, "device_source": source}
    return {"device_reason": "device time unavailable: " + "; ".join(reasons)}


def _cupti(compiled: Callable[..., Any], arguments: tuple[Any, ...], calls: int) -> tuple[float, int]:
    return summary(kernels(compiled, arguments, calls))


def kernels(
    compiled: Callable[..., Any], arguments: Iterable[Any], calls: int
) -> list[list[tuple[str, float]]]:
    """Return for each of some calls the names and milliseconds of its kernels, by CUPTI.

    Raises:
      RuntimeError: there is no CUPTI here, or no kernel was seen.
    """
    from jax.experimental.mosaic.gpu import profiler

    # By default it detaches CUPTI at the end, which would slow every later launch.
    measure = profiler.Cupti().measure
    _, timings = measure(compiled, aggregate=False, iterations=calls)(*arguments)
    if not timings:
        raise RuntimeError("no kernel was seen")
    return timings if calls > 1 else [timings]


def summary(timings: list[list[tuple[str, float]]]) -> tuple[float, int]:
    """Return the median over calls of the sum of kernel times, in microseconds, and the number of kernels.

    Args:
      timings: for each call a list of a kernel's name and its milliseconds.
    """
    sums = [sum(milliseconds for _, milliseconds in call) for call in timings]
    return 1e3 * statistics.median(sums), len(timings[0])


def _profiler(compiled: Callable[..., Any], arguments: tuple[Any, ...], calls: int) -> tuple[float, int]:
    import jax

    jax.block_until_ready(compiled(*arguments))
    with tempfile.TemporaryDirectory(prefix="probjax-bench-") as folder:
        jax.profiler.start_trace(folder)
        try:
            for _ in range(calls):
                outputs = compiled(*arguments)
            jax.block_until_ready(outputs)
        finally:
            jax.profiler.stop_trace()
        found = sorted(Path(folder).rglob("*.xplane.pb"))
        if not found:
            raise RuntimeError("the profiler wrote no trace")
        durations = stream_events(jax.profiler.ProfileData.from_file(str(found[-1])))
    if not durations:
        raise RuntimeError("the trace has no event on a GPU's stream")
    return sum(durations) / calls / 1e3, len(durations) // calls


def stream_events(trace: Any) -> list[float]:
    """Return the nanoseconds of each event on the streams of the GPUs in a trace."""
    return [
        float(event.duration_ns)
        for plane in trace.planes
        if plane.name.startswith("/device:GPU")
        # The other lines ("XLA Ops", "XLA Modules") show the same time again.
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
