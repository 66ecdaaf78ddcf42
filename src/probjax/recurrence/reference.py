"""The recurrences token by token, with products of the highest precision: what the others are compared
with."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from probjax._op import Array, Arrays, Call, batch_shape
from probjax.recurrence import _steps
from probjax.recurrence._engine import Step, Timeline, Tree, by_jvp, records, run, run_chunk, state_shape


@dataclass(frozen=True)
class Reference:
    """The recurrence of one step function; derivatives are JAX's own.

    Attributes:
      step: one token.
      state_axes: named axes of its state.
      initial_at: position of the initial state among the operands.
      swapped: operands that the step takes with their last two axes exchanged, as it does the state, if any.
      only_out: the outputs are all there is; else the last state and the states entering chunks follow.
    """

    step: Step
    state_axes: tuple[str, ...]
    initial_at: int
    swapped: tuple[int, ...] = ()
    only_out: bool = False

    def forward(self, call: Call, platform: str | None, operands: Arrays) -> Arrays:
        time = Timeline.of(call, operands)
        state = jnp.broadcast_to(operands[self.initial_at], state_shape(call, operands, self.state_axes))
        moving, fixed = time.split(call, operands)
        fixed |= {i: self._turned(fixed[i]) for i in self.swapped}
        end, outs, states = run(self._chunk, self._turned(state), moving, fixed)
        out = time.join(outs)
        out = jnp.broadcast_to(out, batch_shape(call, operands) + out.shape[time.axis :])
        if self.only_out:
            return (out,)
        results = out, self._turned(end)
        return (*results, jnp.moveaxis(self._turned(states), 0, time.axis)) if records(call) else results

    def tangent(
        self, call: Call, platform: str | None, operands: Arrays, outputs: Arrays, tangents: dict[int, Array]
    ) -> Arrays:
        moved = by_jvp(lambda operands: self.forward(call, platform, operands), operands, tangents)
        # The states entering chunks are no result of the operation: see `scan`.
        return (*moved[:2], *(jnp.zeros_like(x) for x in moved[2:]))

    def backward(
        self,
        call: Call,
        platform: str | None,
        operands: Arrays,
        outputs: Arrays,
        cotangents: tuple[Array | None, ...],
        wanted: tuple[int, ...],
    ) -> Arrays:
        def of_wanted(*some: Array) -> Arrays:
            filled = list(operands)
            for i, x in zip(wanted, some, strict=True):
                filled[i] = x
            return self.forward(call, platform, tuple(filled))[:2]

        found, pull = jax.vjp(of_wanted, *(operands[i] for i in wanted))
        given = zip(cotangents, found, strict=False)
        return pull(tuple(jnp.zeros_like(x) if ct is None else ct for ct, x in given))

    def _chunk(self, state: Array, moving: Tree, fixed: Tree) -> tuple[Array, Array]:
        return run_chunk(self.step, state, moving, fixed)

    def _turned(self, state: Array) -> Array:
        return jnp.swapaxes(state, -1, -2) if self.swapped else state


LINEAR_SCAN = Reference(_steps.linear_scan, ("C",), 2, only_out=True)
SELECTIVE_SCAN = Reference(_steps.selective_scan, ("D", "N"), 5, swapped=(2,))
SSD = Reference(_steps.ssd, ("H", "N", "P"), 4)
