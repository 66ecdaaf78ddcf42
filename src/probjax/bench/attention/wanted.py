"""What is wanted of a row of the attention suites; in a module of its own, which needs no JAX."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wanted:
    """What is wanted of a row besides its time per call.

    Attributes:
      times: out of ``wall`` (calls from Python), ``program`` (the operation inside a program) and ``device``
        (the kernels alone).
      asynchronous: whether a call is made while the one before still runs, as one does on a GPU.
      output: whether the mode ``fwdbwd`` returns the output too.
      program_length: how many operations the program of ``program`` holds.
      step: batch rows and heads that are compared with the reference, see `sample`; None for all.
    """

    times: tuple[str, ...] = ("wall",)
    asynchronous: bool = False
    output: bool = False
    program_length: int = 1
    step: tuple[int, int] | None = None


PLAIN = Wanted()
"""The time per call, and the whole result."""
