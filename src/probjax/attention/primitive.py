"""Attention as an instance of `probjax._op`: which function of which implementation computes what."""

from __future__ import annotations

import dataclasses

import jax

from probjax._op import Arrays, Call, Output
from probjax.attention import dispatch
from probjax.attention.spec import VALUE, accumulator
from probjax.attention.xla import TILED

Array = jax.Array


class Attention:
    """The operation. Its outputs are the attention output and the log-sum-exp."""

    name = "attention"
    shardable = frozenset({"N", "K", "H"})
    linear = frozenset({VALUE})

    def forward(self, call: Call, platform: str | None, operands: Arrays) -> Arrays:
        return self._row(call, platform, operands, "forward").implementation.forward(call, platform, operands)

    def tangent(
        self, call: Call, platform: str | None, operands: Arrays, outputs: Arrays, tangents: dict[int, Array]
    ) -> Arrays:
        implementation = self._row(call, platform, operands, "tangent").implementation
        # An implementation may leave its tangent out.
        function = getattr(implementation, "tangent", TILED.tangent)
        return function(call, platform, operands, outputs, tangents)

    def backward(
        self,
        call: Call,
        platform: str | None,
        operands: Arrays,
        outputs: Arrays,
        cotangents: tuple[Array | None, ...],
        wanted: tuple[int, ...],
    ) -> Arrays:
        implementation = self._row(call, platform, operands, "backward").implementation
        return implementation.backward(call, platform, operands, outputs, cotangents, wanted)

    def recording(self, call: Call) -> Call:
        return call

    def differentiable(self, call: Call) -> Call:
        return dataclasses.replace(call, spec=call.spec.differentiable())

    def portable(self, call: Call) -> Call:
        return dataclasses.replace(call, spec=dataclasses.replace(call.spec, portable=True))

    def _row(self, call: Call, platform: str | None, operands: Arrays, kind: str) -> dispatch.Row:
        name, _ = dispatch.choose(dispatch.Problem.of(call, operands), platform, kind)
        return dispatch.ROWS[name]


ATTENTION = Attention()


def outputs_for(dtype: jax.typing.DTypeLike) -> tuple[Output, Output]:
    """The two results of a call with inputs of this dtype."""
    return Output("out", ("T", "N", "V"), jax.numpy.dtype(dtype)), Output(
        "lse", ("T", "N"), accumulator(dtype)
    )
