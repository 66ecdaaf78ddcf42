"""A program compiled ahead of time: the seconds that took, and XLA's own account of its memory."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from probjax.bench.config import parse_bytes
from probjax.bench.measure import Skipped

_MB = 2**20
# Of the memory that is free, the share that one program may take when no limit is given.
_SHARE = 0.9
# The targets of the native library's custom calls, as they stand in a compiled program.
_NATIVE_TARGET = 'custom_call_target="probjax'


@dataclass
class Program:
    """A compiled program.

    Attributes:
      call: runs it.
      trace_s: seconds to trace and lower it.
      compile_s: seconds to compile it after that.
      memory: the columns xla_temp_mb, xla_arg_mb, xla_out_mb and xla_alias_mb in units of 2**20 bytes, empty
        where the platform gives no account.
      native: whether it calls the native library.
    """

    call: Callable[..., Any]
    trace_s: float
    compile_s: float
    memory: dict[str, float]
    native: bool

    @property
    def megabytes(self) -> float:
        """What one call takes at most: arguments, results and temporaries, in units of 2**20 bytes."""
        taken = sum(self.memory.get(f"xla_{name}_mb", 0.0) for name in ("temp", "arg", "out"))
        return taken - self.memory.get("xla_alias_mb", 0.0)

    def require(self, limit: str | None, device: str) -> None:
        """Refuse a program that needs too much memory, before it is called.

        Args:
          limit: a size such as 4G; None takes most of the memory that is free on a CPU, and no limit on a
            GPU, which refuses by itself.
          device: ``cpu`` or ``gpu``.

        Raises:
          Skipped: when it needs more.
        """
        allowed = parse_bytes(limit) / _MB if limit is not None else _free_megabytes(device)
        if allowed is not None and self.megabytes > allowed:
            named = f"--memory-limit {limit}" if limit else f"the {allowed:.0f} MB free (see --memory-limit)"
            raise Skipped(f"by XLA's account it needs {self.megabytes:.0f} MB, more than {named}")


def compile_program(
    function: Callable[..., Any], arguments: Sequence[Any], *, donate: Sequence[int] = ()
) -> Program:
    """Compile a function for its arguments.

    Args:
      function: what is compiled.
      arguments: arrays, or their shapes and dtypes; pytrees of them.
      donate: positions of arguments whose memory the results may take.
    """
    begin = time.perf_counter()
    lowered = jax.jit(function, donate_argnums=tuple(donate)).lower(*arguments)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    analysis = compiled.memory_analysis()
    memory = {}
    if analysis is not None:
        memory = {
            "xla_temp_mb": analysis.temp_size_in_bytes / _MB,
            "xla_arg_mb": analysis.argument_size_in_bytes / _MB,
            "xla_out_mb": analysis.output_size_in_bytes / _MB,
            "xla_alias_mb": analysis.alias_size_in_bytes / _MB,
        }
    native = _NATIVE_TARGET in (compiled.as_text() or "")
    return Program(compiled, traced - begin, done - traced, memory, native)


def caller(call: Callable[..., Any], arguments: Sequence[Any], *, wait: bool) -> Callable[[int], float]:
    """Return the function that makes a number of calls and returns their seconds.

    Args:
      call: a compiled program.
      arguments: its arguments, the same in each call.
      wait: wait for each call's results before the next call; else for the last one's only, as one does on a
        GPU.
    """

    def run(repetitions: int) -> float:
        begin = time.perf_counter()
        for _ in range(repetitions):
            outputs = call(*arguments)
            if wait:
                jax.block_until_ready(outputs)
        jax.block_until_ready(outputs)
        return time.perf_counter() - begin

    return run


def _free_megabytes(device: str) -> float | None:
    """Return most of the main memory that is free, None where the system does not tell."""
    if device != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        return _SHARE * int(fields["MemAvailable"].split()[0]) / 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return _SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _MB
    except (ValueError, OSError, AttributeError):
        return None
