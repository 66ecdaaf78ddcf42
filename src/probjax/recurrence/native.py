"""Recurrences by the C++ kernels for CPUs (csrc/recurrence), through XLA's foreign function interface.

The kernels read operands whose axes have size 1 as they are. Their results have all batch axes; gradients of
operands without those are summed here. What would be as large as all states together is summed in them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from probjax import _native
from probjax._axes import Groups, summed
from probjax._call import full_size
from probjax._op import Array, Arrays, Call, axis_sizes, batch_shape
from probjax.recurrence._engine import previous, records
from probjax.recurrence.spec import CHUNK

BATCH_AXES = 8
"""Most batch axes of the kernels, after neighbours that broadcast alike have been merged."""

LANES = 16
"""Channels that blocks are multiples of: the widest vector."""

MOST_CHANNELS = 64
"""Most channels of a block: their states are to stay in the cache of one core."""

FORWARD_ITEMS, BACKWARD_ITEMS = 32, 16
"""Items of work that are aimed for: few in backward, where each block has gradients of B and C of its own."""


def unavailable(platform: str) -> str | None:
    return "it runs on CPUs only" if platform != "cpu" else _native.reason()


def _declines(call: Call, arrays: Sequence[Any], dtypes: tuple[str, ...]) -> str | None:
    batch, sizes = batch_shape(call, arrays), axis_sizes(call, arrays)
    if not all(isinstance(n, int) for n in (*batch, *sizes.values())):
        return "a size is symbolic, and the C++ kernels are told all sizes when a program is compiled"
    if 0 in (*batch, *sizes.values()):
        return "an array is empty"
    numbers = [x for x, operand in zip(arrays, call.operands, strict=True) if operand.differentiable]
    if len({x.dtype for x in numbers}) > 1 or str(numbers[0].dtype) not in dtypes:
        found = ", ".join(sorted({str(x.dtype) for x in numbers}))
        return f"operands are {found}, and the C++ kernels take one of {', '.join(dtypes)} for all"
    groups = len(Groups.of([x.shape[: len(batch)] for x in arrays], batch).groups)
    if groups > BATCH_AXES:
        return f"{groups} batch axes that broadcast differently, more than {BATCH_AXES}"
    return None


class _Run:
    """One call of the library on arrays whose batch axes are merged as far as can be."""

    def __init__(self, call: Call, operands: Arrays, extra: Arrays = ()):
        everything = (*operands, *extra)
        n = call.batch_ndim(operands)
        self.full = tuple(full_size(x.shape[i] for x in everything) for i in range(n))
        self._groups = Groups.of([x.shape[:n] for x in everything], self.full)
        self.batch = self._groups.shape
        self.rank = len(self.batch)
        self.operands = [self.merge(x) for x in operands]
        self.extra = [self.merge(x) for x in extra]
        self.sizes = axis_sizes(call, operands)
        self.dtype = operands[0].dtype
        self.reverse: bool = call.spec.reverse

    def merge(self, x: Array) -> Array:
        return self._groups.merge(x)

    def library(
        self,
        target: str,
        shapes: Sequence[tuple[int, ...]],
        *arrays: Array,
        sizes: Sequence[int] = (),
        wanted: Sequence[int] = (),
    ) -> list[Array]:
        results = [jax.ShapeDtypeStruct(shape, self.dtype) for shape in shapes]
        function = jax.ffi.ffi_call(f"probjax_{target}", results)
        found = function(
            *arrays,
            batch_rank=np.int64(self.rank),
            reverse=self.reverse,
            sizes=np.array(sizes, np.int64),
            wanted=np.array(wanted, np.int64),
        )
        return list(found)

    def unmerge(self, x: Array) -> Array:
        return x.reshape(self.full + x.shape[self.rank :])

    def zeros(self, axes: int) -> Array:
        """Zeros that broadcast to an array with so many named axes."""
        return jnp.zeros((1,) * (self.rank + axes), self.dtype)


class LinearScan:
    """`h_t = a_t h_{t-1} + b_t`."""

    def declines(self, call: Call, arrays: Sequence[Any]) -> str | None:
        """Why the kernels cannot run a call with operands of these shapes and dtypes; None if they can."""
        return _declines(call, arrays, ("float32", "float64", "complex64", "complex128"))

    def forward(self, call: Call, platform: str | None, operands: Arrays) -> Arrays:
        run = _Run(call, operands)
        return (self._forward(run, *run.operands),)

    def _forward(self, run: _Run, a: Array, b: Array, initial: Array) -> Array:
        shape = (*run.batch, run.sizes["L"], run.sizes["C"])
        (out,) = run.library("linear_scan_forward", [shape], a, b, initial)
        return run.unmerge(out)

    def tangent(
        self, call: Call, platform: str | None, operands: Arrays, outputs: Arrays, tangents: dict[int, Array]
    ) -> Arrays:
        run = _Run(call, operands, (*outputs, *tangents.values()))
        a, _, initial = run.operands
        out, *given = run.extra
        moves = dict(zip(tangents, given, strict=True))
        drive = moves.get(1, run.zeros(2))
        if 0 in moves:
            drive = drive + moves[0] * previous(out, initial, run.rank, call.spec.reverse)
        return (self._forward(run, a, drive, moves.get(2, run.zeros(1))),)

    def backward(
        self,
        call: Call,
        platform: str | None,
        operands: Arrays,
        outputs: Arrays,
        cotangents: tuple[Array | None, ...],
        wanted: tuple[int, ...],
    ) -> Arrays:
        (ct,) = cotangents
        if ct is None or not wanted:
            return tuple(jnp.zeros_like(operands[i]) for i in wanted)
        run = _Run(call, operands, (*outputs, ct))
        a, _, initial = run.operands
        L, C = run.sizes["L"], run.sizes["C"]
        tails = {0: (a.shape[run.rank], C), 1: (L, C), 2: (C,)}
        found = run.library(
            "linear_scan_backward",
            [(*run.batch, *tails[i]) for i in wanted],
            a,
            initial,
            *run.extra,
            wanted=wanted,
        )
        return tuple(
            summed(x, run.operands[i].shape).reshape(operands[i].shape)
            for i, x in zip(wanted, found, strict=True)
        )


class SelectiveScan:
    """`h_t = exp(dt_t A) h_{t-1} + u_t B_t`, `y_t = sum_n C_t h_t`; resets if there is a seventh operand."""

    def declines(self, call: Call, arrays: Sequence[Any]) -> str | None:
        """Why the kernels cannot run a call with operands of these shapes and dtypes; None if they can."""
        if call.spec.chunk != CHUNK:
            return (
                f"states are kept every {call.spec.chunk} steps, and the C++ kernels keep one every {CHUNK}"
            )
        return _declines(call, arrays, ("float32", "float64"))

    def forward(self, call: Call, platform: str | None, operands: Arrays) -> Arrays:
        run = _Run(call, operands)
        L, D, N = (run.sizes[name] for name in "LDN")
        shapes = [(*run.batch, L, D), (*run.batch, D, N)]
        if records(call):
            shapes.append((*run.batch, -(-L // CHUNK), D, N))
        blocks = _Blocks(run, FORWARD_ITEMS)
        found = run.library("selective_scan_forward", shapes, *run.operands, sizes=blocks.sizes)
        return tuple(run.unmerge(x) for x in found)

    def tangent(
        self, call: Call, platform: str | None, operands: Arrays, outputs: Arrays, tangents: dict[int, Array]
    ) -> Arrays:
        run = _Run(call, operands, (outputs[0], *tangents.values()))
        L, D, N = (run.sizes[name] for name in "LDN")
        moves = dict(zip(tangents, run.extra[1:], strict=True))
        every = [moves.get(i, run.zeros(len(call.operands[i].axes))) for i in range(6)]
        out, last = run.library(
            "selective_scan_tangent",
            [(*run.batch, L, D), (*run.batch, D, N)],
            *run.operands,
            *every,
            sizes=_Blocks(run, FORWARD_ITEMS).sizes,
        )
        # The states entering chunks are there for backward only: they have no tangents.
        return run.unmerge(out), run.unmerge(last), *(jnp.zeros_like(x) for x in outputs[2:])

    def backward(
        self,
        call: Call,
        platform: str | None,
        operands: Arrays,
        outputs: Arrays,
        cotangents: tuple[Array | None, ...],
        wanted: tuple[int, ...],
    ) -> Arrays:
        given = [ct for ct in cotangents[:2] if ct is not None]
        if not given or not wanted:
            return tuple(jnp.zeros_like(operands[i]) for i in wanted)
        run = _Run(call, operands, (outputs[2], *given))
        starts, *rest = run.extra
        ct_out, ct_last = (run.zeros(2) if ct is None else rest.pop(0) for ct in cotangents[:2])
        L, D, N = (run.sizes[name] for name in "LDN")
        blocks = _Blocks(run, BACKWARD_ITEMS)
        rows, states = (*run.batch, L, D), (*run.batch, D, N)
        shapes = {0: rows, 1: rows, 2: states, 5: states}
        for i in (3, 4):
            # Time and state axes of size 1 are summed over in the kernel.
            tail = run.operands[i].shape[run.rank :]
            shapes[i] = (blocks.slots(tail[1]), *run.batch, *tail)
        found = run.library(
            "selective_scan_backward",
            [shapes[i] for i in wanted],
            *run.operands,
            starts,
            ct_out,
            ct_last,
            wanted=wanted,
            sizes=blocks.sizes,
        )
        gradients = []
        for i, x in zip(wanted, found, strict=True):
            if i in (3, 4):
                x = summed(x, (1, *run.operands[i].shape))[0]
            gradients.append(summed(x, run.operands[i].shape).reshape(operands[i].shape))
        return tuple(gradients)


class _Blocks:
    """How channels are cut into items of work. Sums depend on it, so it depends on sizes alone.

    Channels are cut into runs, and each run into blocks. Where groups of B and C are wide, a run lies in one
    group of each; else all channels are one run, and the kernels look up the group of each channel.
    """

    def __init__(self, run: _Run, items: int):
        self.channels = run.sizes["D"]
        common = math.gcd(*(self.channels // run.operands[i].shape[-2] for i in (3, 4)))
        self.run = common if 2 * common >= LANES else self.channels
        runs = self.channels // self.run
        wanted = -(-items // (math.prod(run.batch) * runs))
        block = -(-self.run // wanted)
        self.block = min(MOST_CHANNELS, -(-block // LANES) * LANES)
        self.sizes = (run.sizes["L"], self.run, self.block)

    def slots(self, groups: int) -> int:
        """Most blocks that share a group."""
        first = np.arange(groups) * (self.channels // groups)
        last = first + self.channels // groups - 1
        return int(np.max(self._block_of(last) - self._block_of(first))) + 1

    def _block_of(self, channel: np.ndarray) -> np.ndarray:
        return channel // self.run * -(-self.run // self.block) + channel % self.run // self.block


LINEAR_SCAN_NATIVE = LinearScan()
SELECTIVE_SCAN_NATIVE = SelectiveScan()
