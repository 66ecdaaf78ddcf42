"""The recurrences as instances of `probjax._op`."""

from __future__ import annotations

import dataclasses
from typing import Any

from probjax._op import Array, Arrays, Call, Operand, Output
from probjax.recurrence import dispatch
from probjax.recurrence._engine import records
from probjax.recurrence.spec import RecurrenceSpec


@dataclasses.dataclass(eq=False)
class Recurrence:
    """One operation; see `probjax._call.Operation` for its fields and methods."""

    name: str
    shardable: frozenset[str]
    linear: frozenset[int]

    def forward(self, call: Call, platform: str | None, operands: Arrays) -> Arrays:
        return dispatch.implementation(call, platform, operands).forward(call, platform, operands)

    def tangent(
        self, call: Call, platform: str | None, operands: Arrays, outputs: Arrays, tangents: dict[int, Array]
    ) -> Arrays:
        chosen = dispatch.implementation(call, platform, operands)
        return chosen.tangent(call, platform, operands, outputs, tangents)

    def backward(
        self,
        call: Call,
        platform: str | None,
        operands: Arrays,
        outputs: Arrays,
        cotangents: tuple[Array | None, ...],
        wanted: tuple[int, ...],
    ) -> Arrays:
        chosen = dispatch.implementation(call, platform, operands)
        return chosen.backward(call, platform, operands, outputs, cotangents, wanted)

    def recording(self, call: Call) -> Call:
        """With the states that enter chunks of time, in an operation that has matrices as states."""
        if call.operation is LINEAR_SCAN or records(call):
            return call
        kept = Output("states", ("M", *call.outputs[1].axes), call.outputs[1].dtype)
        return dataclasses.replace(call, outputs=(*call.outputs, kept))

    def differentiable(self, call: Call) -> Call:
        return dataclasses.replace(call, spec=call.spec.differentiable())

    def portable(self, call: Call) -> Call:
        return dataclasses.replace(call, spec=dataclasses.replace(call.spec, portable=True))


LINEAR_SCAN = Recurrence("linear_scan", frozenset({"C"}), frozenset({1, 2}))
SELECTIVE_SCAN = Recurrence("selective_scan", frozenset({"D", "G", "K"}), frozenset({0, 5}))
SSD = Recurrence("ssd", frozenset({"G", "H"}), frozenset({2, 4}))


def linear_scan_call(dtype: Any, spec: RecurrenceSpec) -> Call:
    """`h_t = a_t h_{t-1} + b_t`."""
    operands = (Operand("a", ("L", "C")), Operand("b", ("L", "C")), Operand("initial_state", ("C",)))
    return Call(LINEAR_SCAN, operands, (Output("out", ("L", "C"), dtype),), spec)


def selective_scan_call(dtype: Any, length: int, reset: bool, spec: RecurrenceSpec) -> Call:
    """`h_t = exp(dt_t A) h_{t-1} + u_t B_t`, `y_t = sum_n C_t h_t`; with `reset`, an operand cuts h_{t-1}."""
    operands = [
        Operand("u", ("L", "D")),
        Operand("dt", ("L", "D")),
        Operand("A", ("D", "N")),
        Operand("B", ("L", "G", "N")),
        Operand("C", ("L", "K", "N")),
        Operand("initial_state", ("D", "N")),
    ]
    if reset:
        operands.append(Operand("reset", ("L",), differentiable=False))
    outputs = (
        Output("out", ("L", "D"), dtype),
        Output("last", ("D", "N"), dtype),
    )
    return Call(SELECTIVE_SCAN, tuple(operands), outputs, spec, (("M", spec.chunks(length)),))


def ssd_call(dtype: Any, length: int, spec: RecurrenceSpec) -> Call:
    """`h_t = exp(log_decay_t) h_{t-1} + key_t value_t^T`, `y_t = h_t^T query_t`."""
    operands = (
        Operand("query", ("L", "G", "N")),
        Operand("key", ("L", "G", "N")),
        Operand("value", ("L", "H", "P")),
        Operand("log_decay", ("L", "H")),
        Operand("initial_state", ("H", "N", "P")),
    )
    outputs = (
        Output("out", ("L", "H", "P"), dtype),
        Output("last", ("H", "N", "P"), dtype),
    )
    return Call(SSD, operands, outputs, spec, (("M", spec.chunks(length)),))


RESIDUAL_NAMES = (
    "linear_scan_out",
    *(f"{op.name}_{output}" for op in (SELECTIVE_SCAN, SSD) for output in ("out", "last", "states")),
)
"""Names of results that a policy such as `jax.checkpoint_policies.save_only_these_names` may keep."""
