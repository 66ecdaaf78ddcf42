"""The description of an operation and of one call of it; `probjax._op` says what is made of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

Array = jax.Array
Arrays = tuple[Array, ...]


@dataclass(frozen=True)
class Operand:
    """One array argument: its name, its named axes, and whether derivatives flow through it.

    An axis called None belongs to this operand alone: it has no partner in other operands and is never
    sharded.
    """

    name: str
    axes: tuple[str | None, ...]
    differentiable: bool = True


@dataclass(frozen=True)
class Output:
    """One result: its name, its named axes and its dtype."""

    name: str
    axes: tuple[str, ...]
    dtype: Any


class Implementation(Protocol):
    """The three functions of an implementation. `platform` is one of PLATFORMS or None."""

    def forward(self, call: Call, platform: str | None, operands: Arrays) -> Arrays: ...

    def tangent(
        self, call: Call, platform: str | None, operands: Arrays, outputs: Arrays, tangents: dict[int, Array]
    ) -> Arrays: ...

    def backward(
        self,
        call: Call,
        platform: str | None,
        operands: Arrays,
        outputs: Arrays,
        cotangents: tuple[Array | None, ...],
        wanted: tuple[int, ...],
    ) -> Arrays: ...


class Operation(Implementation, Protocol):
    """What an operation supplies. `call` is the frozen description of one call.

    `shardable` are the axis names that may be split over devices without communication. All of them belong
    to one family: an axis of it may have the full size, a divisor of that (key/value heads) or 1.
    `linear` are the operands in which the outputs are linear together, whatever the others are.

    Outputs that only backward needs are those that `recording` adds: they are computed where a call is
    differentiated, and are never differentiated themselves.
    """

    name: str
    shardable: frozenset[str]
    linear: frozenset[int]

    def recording(self, call: Call) -> Call:
        """The same call with, after its own outputs, those that backward needs besides."""
        ...

    def differentiable(self, call: Call) -> Call:
        """The same call on an implementation in plain JAX, whose three functions JAX can differentiate."""
        ...

    def portable(self, call: Call) -> Call:
        """The same call for a program that is exported: it must not need this package to run."""
        ...


@dataclass(frozen=True)
class Call:
    """One call of an operation, without its arrays: hashable, so that it keys compilation caches.

    `sizes` are those of axes that outputs have and no operand has.
    """

    operation: Operation
    operands: tuple[Operand, ...]
    outputs: tuple[Output, ...]
    spec: Any
    sizes: tuple[tuple[str, int], ...] = ()

    def batch_ndim(self, operands: Sequence[Any]) -> int:
        return operands[0].ndim - len(self.operands[0].axes)


def batch_shape(call: Call, operands: Sequence[Any]) -> tuple[int, ...]:
    """The full batch shape: the broadcast of all operands' batch axes."""
    n = call.batch_ndim(operands)
    return tuple(full_size(x.shape[i] for x in operands) for i in range(n))


def axis_sizes(call: Call, operands: Sequence[Any]) -> dict[str, int]:
    """Size of each named axis: the full one where an operand broadcasts it."""
    n = call.batch_ndim(operands)
    sizes = dict(call.sizes)
    for operand, x in zip(call.operands, operands, strict=True):
        for name, size in zip(operand.axes, x.shape[n:], strict=True):
            if name is not None and sizes.get(name, 1) == 1:
                sizes[name] = size
    return sizes


def full_size(sizes: Iterable[int]) -> int:
    """The size that others broadcast to: 0 wins over 1, anything else over both."""
    wide = set(sizes) - {1}
    return max(wide) if wide else 1
