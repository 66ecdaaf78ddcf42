"""Child processes that answer JSON lines, and that stand still while something else is timed.

One request is one JSON object on a line of the child's standard input; one answer is one JSON object on its
standard output, with the key "error" when the request failed. The child is stopped by a signal between
requests, so that its idle threads (OpenMP's spin for a while after each parallel region) take no processor
time from what is timed meanwhile.
"""

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from probjax.bench.measure import Failed, Unavailable

_POSIX = os.name == "posix"


class ChildDied(Failed):
    """The child process ended before it answered."""


class ChildTimeout(Failed):
    """The child process did not answer in time; it was killed."""


def cpu_seconds(pid: int) -> float:
    """Return the processor time of another process in seconds, NaN where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return math.nan
    try:
        # Linux encodes "the processor-time clock of process pid" so (see clock_getcpuclockid(3)).
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return math.nan


class Child:
    """A child process that serves JSON requests one at a time.

    Args:
      command: program and arguments.
      env: its environment; None takes ours.
      pause: stop the process between requests.

    Attributes:
      asleep_cpu_s: processor time that the child used while stopped (should be zero); NaN where unknown.
    """

    def __init__(
        self, command: Sequence[str], *, env: dict[str, str] | None = None, pause: bool = True
    ) -> None:
        self._pause = pause and _POSIX
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._buffer = b""
        self.asleep_cpu_s = 0.0
        self._cpu_when_stopped: float | None = None
        # A session of its own: Ctrl-C in the terminal is for this process alone, which then ends the child.
        self._process = subprocess.Popen(
            [*command, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=env,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def request(self, timeout: float, **message: Any) -> dict[str, Any]:
        """Send one request and wait for its answer.

        Args:
          timeout: seconds to wait for the answer.
          **message: the request, as JSON values.

        Returns:
          The answer.

        Raises:
          ChildDied: when the child ended; the message has its last words.
          ChildTimeout: when no answer came; the child is killed.
          Failed: when the child answered with an error.
          Unavailable: when it answered that it cannot do this here at all.
        """
        self._wake()
        try:
            answer = self._exchange(json.dumps(message).encode() + b"\n", time.monotonic() + timeout)
        except ChildTimeout:
            self.close()
            raise ChildTimeout(f"no answer within {timeout:g} s to {message.get('op')!r}") from None
        finally:
            self._sleep()
        if "error" in answer:
            raise (Unavailable if answer.get("unavailable") else Failed)(str(answer["error"]))
        return answer

    def _exchange(self, line: bytes, end: float) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise self._death() from None
        out = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([out], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise ChildTimeout
            data = os.read(out, 1 << 16)
            if not data:
                raise self._death()
            self._buffer += data
        answer, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(answer)

    def _death(self) -> ChildDied:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        how = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        words = self.last_words()
        return ChildDied(f"the child process {how}" + (f": {words}" if words else ""))

    def last_words(self) -> str:
        """Return the last line that the child wrote to its standard error."""
        if self._errors.closed:
            return ""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4000))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def _wake(self) -> None:
        if not (self._pause and self.alive):
            return
        if self._cpu_when_stopped is not None:
            self.asleep_cpu_s += cpu_seconds(self.pid) - self._cpu_when_stopped
        self._process.send_signal(signal.SIGCONT)

    def _sleep(self) -> None:
        if not (self._pause and self.alive):
            return
        self._process.send_signal(signal.SIGSTOP)
        if hasattr(os, "waitid"):
            # Returns when the last thread stands still or the process has ended, which Popen still learns.
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        self._cpu_when_stopped = cpu_seconds(self.pid)

    def close(self) -> None:
        """End the process at once; a stopped one too."""
        if self.alive:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def script_path(module_file: str, name: str) -> str:
    """Return the path of a script that is kept beside a module."""
    return str(Path(module_file).with_name(name))
