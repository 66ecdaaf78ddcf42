"""Timing: what a peer hands over to be timed, and samples of many peers taken in turn.

A sample is the mean of `inner` calls in a row, long enough for the clock and the wake-up of threads not to
matter. Samples of all implementations of one cell are taken in rotating order, so that a slow stretch of the
machine meets all of them alike and ratios stay honest.
"""

import gc
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

# A call shorter than this gets an untimed call before its sample: the first call after another program that
# freed much memory is slower (155 -> 243 ms was seen), and would charge one row with its neighbour's habits.
_WARM_BELOW_S = 0.3
_MAX_INNER = 1000
# Fewer samples than this give no quartiles worth printing; a budget that runs out does not go below it.
MIN_SAMPLES = 3


_stop = threading.Event()


def request_stop() -> None:
    """Make the next `check_stop` raise KeyboardInterrupt."""
    _stop.set()


def check_stop() -> None:
    """Raise KeyboardInterrupt when a stop was requested and has not been raised yet."""
    if _stop.is_set():
        _stop.clear()
        raise KeyboardInterrupt


class Unavailable(Exception):
    """A peer that cannot run here; the message says why and how to get it."""


class Skipped(Exception):
    """A peer that the configuration leaves out of this cell; the message says by which option."""


class Failed(Exception):
    """A peer that broke while it ran; the message says how."""


class Wrong(Failed):
    """A peer whose result is wrong: it gets no time, and is no peer to be compared with.

    Args:
      message: what is wrong.
      columns: what is known of the error.
    """

    def __init__(self, message: str, columns: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.columns = columns or {}


class OutOfTime(Exception):
    """The time budget ended before a cell could be measured."""


@dataclass
class Prepared:
    """One implementation of one cell, compiled and warmed up.

    Attributes:
      impl: the row label.
      run: takes a number of repetitions, makes that many calls one after the other, returns their seconds in
        all.
      columns: result columns known before timing (compile times, memory, ...).
      result: returns the outputs as arrays, by name, for the error columns.
      release: frees what the implementation holds.
      program: the same operation chained inside one program, a call of `run` being one operation of the
        chain times `program_length`; None when that is not measured.
      program_length: operations in one call of `program`.
      device: measures the time of the kernels alone and returns its columns; None when that is not measured.
      wall: whether `run` itself is timed.
    """

    impl: str
    run: Callable[[int], float]
    columns: dict[str, Any] = field(default_factory=dict)
    result: Callable[[], dict[str, Any]] = dict
    release: Callable[[], None] = lambda: None
    program: Callable[[int], float] | None = None
    program_length: int = 1
    device: Callable[[], dict[str, Any]] | None = None
    wall: bool = True


class Cell(Protocol):
    """One point of a suite's grid."""

    @property
    def title(self) -> str:
        """A short name for the progress bar."""
        ...

    @property
    def kind(self) -> tuple[Any, ...]:
        """What has to be equal for the duration of one cell to tell that of another."""
        ...

    @property
    def work(self) -> float:
        """Arithmetic operations of one call, for guessing durations."""
        ...

    def columns(self) -> dict[str, Any]:
        """The result columns that name this cell."""
        ...


class Deadline:
    """The end of a time budget, or none.

    Args:
      seconds: the budget; None for no end.
      started: when it started to run, on the clock of `time.monotonic`; now by default.
    """

    def __init__(self, seconds: float | None, started: float | None = None) -> None:
        begin = time.monotonic() if started is None else started
        self._end = math.inf if seconds is None else begin + seconds

    def left(self) -> float:
        """Return the seconds left, infinite without a budget."""
        return self._end - time.monotonic()

    def check(self) -> None:
        """Raise OutOfTime when nothing is left."""
        if self.left() <= 0:
            raise OutOfTime


@dataclass
class Samples:
    """Seconds per call of one implementation, a mean of `inner` calls each; `call_s` is a first guess."""

    inner: int
    call_s: float
    seconds: list[float] = field(default_factory=list)

    def columns(self) -> dict[str, Any]:
        """Return the timing columns: inner, median, quartiles and best in milliseconds, number of samples."""
        low, middle, high = quartiles(self.seconds)
        return {
            "inner": self.inner,
            "median_ms": middle * 1e3,
            "q1_ms": low * 1e3,
            "q3_ms": high * 1e3,
            "min_ms": min(self.seconds) * 1e3,
            "samples": len(self.seconds),
        }

    def program_columns(self, length: int) -> dict[str, Any]:
        """Return the timing columns of a program that holds `length` operations: microseconds for one."""
        low, middle, high = (1e6 * value / length for value in quartiles(self.seconds))
        return {"program_us": middle, "q1_program_us": low, "q3_program_us": high}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return first quartile, median and third quartile (linear interpolation)."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def drain(limit_s: float = 0.05) -> None:
    """Wait until the threads of this process are idle, so that they cannot slow what is timed next."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        before = time.process_time()
        time.sleep(0.002)
        if time.process_time() - before < 0.0002:
            return


@contextmanager
def _no_collector() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def choose_inner(run: Callable[[int], float], min_sample_s: float) -> tuple[int, float]:
    """Return how many calls make a sample of at least `min_sample_s` seconds, and the seconds of one call.

    Args:
      run: see `Prepared.run`; it is called a few times.
      min_sample_s: the shortest sample wanted, in seconds.

    Returns:
      A number of calls, at least 1, and the mean seconds of a call in the last try.
    """
    inner, spent = 1, run(1)
    while spent < min_sample_s and inner < _MAX_INNER:
        # The first calls are slower than the later ones: grow in steps instead of trusting one quotient.
        wanted = math.ceil(1.1 * inner * min_sample_s / max(spent, 1e-9))
        inner = min(_MAX_INNER, max(inner + 1, min(inner * 10, wanted)))
        spent = run(inner)
    return inner, spent / inner


def interleave(
    peers: Sequence[Prepared],
    *,
    repeats: int,
    min_sample_s: float,
    deadline: Deadline,
    step: Callable[[], None] = lambda: None,
    quiet: Callable[[], None] = drain,
) -> tuple[dict[str, Samples], dict[str, str]]:
    """Take samples of all peers in turn.

    Args:
      peers: what to time.
      repeats: samples of each.
      min_sample_s: length of a sample, in seconds; short calls are repeated to reach it.
      deadline: rounds end here, after at least MIN_SAMPLES of them.
      step: called after each round.
      quiet: called before each sample, to wait until nothing else runs.

    Returns:
      The samples by row label, and the reasons of those peers that broke on the way.

    Raises:
      OutOfTime: when the deadline passes before the first round.
    """
    broken: dict[str, str] = {}
    samples: dict[str, Samples] = {}

    def attempt(action: Callable[[Prepared], None], peer: Prepared) -> None:
        check_stop()
        if peer.impl in broken:
            return
        quiet()
        try:
            action(peer)
        except (Failed, MemoryError, RuntimeError) as error:
            broken[peer.impl] = describe(error)
            samples.pop(peer.impl, None)

    def calibrate(peer: Prepared) -> None:
        samples[peer.impl] = Samples(*choose_inner(peer.run, min_sample_s))

    def sample(peer: Prepared) -> None:
        chosen = samples[peer.impl]
        if chosen.call_s < _WARM_BELOW_S:
            peer.run(1)
        chosen.seconds.append(peer.run(chosen.inner) / chosen.inner)

    with _no_collector():
        for peer in peers:
            deadline.check()
            attempt(calibrate, peer)
        for number in range(repeats):
            if number >= MIN_SAMPLES and deadline.left() <= 0:
                break
            shift = number % max(1, len(peers))
            for peer in [*peers[shift:], *peers[:shift]]:
                attempt(sample, peer)
            step()
    return samples, broken


def describe(error: BaseException) -> str:
    """Return an exception as one line of at most 300 characters."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    line = text if isinstance(error, Failed | Unavailable | Skipped) else f"{name}: {text}" if text else name
    return line if len(line) <= 300 else line[:297] + "..."
