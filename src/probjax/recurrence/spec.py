"""The frozen description of one call of a recurrence."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax

CHUNK = 64
"""Steps between two states that `selective_scan` keeps for its backward pass."""

LEAST_CHUNK = 16
"""Fewest steps between two states that `ssd` keeps: with fewer they would be as large as all states
together."""


@dataclass(frozen=True)
class RecurrenceSpec:
    """What every implementation receives besides the arrays.

    Attributes:
      reverse: time is processed from its end.
      chunk: steps between two kept states; the states entering steps 0, chunk, 2 chunk, ... (in the order of
        processing) are an output of the operations with a matrix state, so that backward starts from them.
      precision: of matrix products.
      implementation: the caller's choice, or None.
      plain: asks for an implementation that JAX can differentiate.
      portable: asks for one that needs nothing but JAX to run.
    """

    reverse: bool = False
    chunk: int = CHUNK
    precision: jax.lax.PrecisionLike = None
    implementation: str | None = None
    plain: bool = False
    portable: bool = False

    def differentiable(self) -> RecurrenceSpec:
        return replace(self, plain=True)

    def chunks(self, length: int) -> int:
        """Number of kept states of a sequence."""
        return -(-length // self.chunk)
