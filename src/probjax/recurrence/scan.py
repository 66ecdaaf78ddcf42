"""The recurrences in plain JAX, in the forms measured to be best (docs/recurrence.md).

On CPUs, time is walked through in nested loops, whose state stays in cache. On accelerators, chunks of time
run side by side. Memory never grows with sequence length times state size: a state is kept per chunk, and
backward starts from those.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from probjax._axes import summed
from probjax._op import Array, Arrays, Call
from probjax.recurrence import _steps
from probjax.recurrence._engine import (
    Timeline,
    Tree,
    by_jvp,
    carried,
    join,
    previous,
    pull_back,
    pull_back_at_once,
    pull_chunk,
    records,
    run,
    run_at_once,
    run_chunk,
    state_shape,
)

_WIDE = ("cuda", "rocm", "tpu")

BLOCK = 512
"""Steps of `linear_scan` that share powers of a constant factor on an accelerator."""

UNROLL = 8
"""Steps of a loop that are compiled as one on an accelerator, where starting one takes longer."""

STORED = 2**27
"""Most numbers that the backward pass of `selective_scan` keeps at a time on an accelerator."""


class LinearScan:
    """`h_t = a_t h_{t-1} + b_t`; tangent and adjoint of it are recurrences of the same form."""

    def forward(self, call: Call, platform: str | None, operands: Arrays) -> Arrays:
        a, b, initial = operands
        n = call.batch_ndim(operands)
        shape = state_shape(call, operands, ("L", "C"))
        b = jnp.broadcast_to(b, shape)
        initial = jnp.broadcast_to(initial, shape[:n] + shape[n + 1 :])
        return (_walk(a, b, initial, n, call.spec.reverse, platform),)

    def tangent(
        self, call: Call, platform: str | None, operands: Arrays, outputs: Arrays, tangents: dict[int, Array]
    ) -> Arrays:
        a, _, initial = operands
        n = call.batch_ndim(operands)
        (out,) = outputs
        drive = jnp.zeros_like(out)
        if 0 in tangents:
            drive += tangents[0] * previous(out, initial, n, call.spec.reverse)
        if 1 in tangents:
            drive += tangents[1]
        first = tangents.get(2, jnp.zeros_like(initial))
        first = jnp.broadcast_to(first, out.shape[:n] + out.shape[n + 1 :])
        return (_walk(a, drive, first, n, call.spec.reverse, platform),)

    def backward(
        self,
        call: Call,
        platform: str | None,
        operands: Arrays,
        outputs: Arrays,
        cotangents: tuple[Array | None, ...],
        wanted: tuple[int, ...],
    ) -> Arrays:
        a, b, initial = operands
        n, reverse = call.batch_ndim(operands), call.spec.reverse
        (out,), (ct,) = outputs, cotangents
        if ct is None:
            return tuple(jnp.zeros_like(operands[i]) for i in wanted)
        # The adjoint of a step multiplies by the factor of the step that follows it.
        following = a if a.shape[n] == 1 else previous(a, jnp.zeros_like(_at(a, n, 0)), n, not reverse)
        g = _walk(following, ct, jnp.zeros_like(_at(out, n, 0)), n, not reverse, platform)
        start = -1 if reverse else 0
        gradients = {
            0: lambda: summed(g * previous(out, initial, n, reverse), a.shape),
            1: lambda: summed(g, b.shape),
            2: lambda: summed(_at(a, n, start) * _at(g, n, start), initial.shape),
        }
        return tuple(gradients[i]() for i in wanted)


def _at(x: Array, axis: int, index: int) -> Array:
    return jax.lax.index_in_dim(x, index, axis, keepdims=False)


def _walk(a: Array, b: Array, initial: Array, axis: int, reverse: bool, platform: str | None) -> Array:
    """The recurrence along an axis; `b` and `initial` have full shapes."""
    if platform in _WIDE:
        if reverse:
            a, b = jnp.flip(a, axis), jnp.flip(b, axis)
        out = _joined(a, b, initial, axis)
        return jnp.flip(out, axis) if reverse else out
    b = jnp.moveaxis(b, axis, 0)
    if a.shape[axis] == 1:
        _, out = jax.lax.scan(lambda h, x: (_at(a, axis, 0) * h + x,) * 2, initial, b, reverse=reverse)
    else:
        a = jnp.moveaxis(a, axis, 0)
        _, out = jax.lax.scan(lambda h, x: (x[0] * h + x[1],) * 2, initial, (a, b), reverse=reverse)
    return jnp.moveaxis(out, 0, axis)


def _joined(a: Array, b: Array, initial: Array, axis: int) -> Array:
    """The recurrence in a logarithmic number of rounds."""
    length = b.shape[axis]
    a, b = jnp.moveaxis(a, axis, 0), jnp.moveaxis(b, axis, 0)
    if a.shape[0] == length:
        return jnp.moveaxis(carried(a, b, initial), 0, axis)
    # A constant factor needs its powers once, for all blocks.
    block = min(BLOCK, length)
    b = jnp.pad(b, [(0, -length % block)] + [(0, 0)] * (b.ndim - 1)).reshape(-1, block, *b.shape[1:])
    a = jnp.broadcast_to(a, (block, *a.shape[1:]))[None]
    factor, total = jax.lax.associative_scan(join, (a, b), axis=1)
    added = total[:, -1]
    ends = carried(jnp.broadcast_to(factor[:, -1], added.shape), added, initial)
    starts = jnp.concatenate([initial[None], ends[:-1]])
    out = total + factor * starts[:, None]
    return jnp.moveaxis(out.reshape(-1, *out.shape[2:])[:length], 0, axis)


def _unroll(platform: str | None) -> int:
    return UNROLL if platform in _WIDE else 1


class _Chunked:
    """What `SelectiveScan` and `Ssd` share: a state per chunk is an output, from which backward starts.

    That output is no result of the operation, so its tangent is zero and its cotangent is not looked at: for
    derivatives of higher order (`spec.plain`) backward takes the states from the operands instead.
    """

    state_axes: tuple[str, ...]
    initial_at: int
    # Operands without a time axis that `turned` brings into the layout of `chunk`, like the state.
    like_state: tuple[int, ...] = ()

    def chunk(self, call: Call, unroll: int, state: Array, moving: Tree, fixed: Tree) -> tuple[Array, Array]:
        """One chunk of steps: (state, outputs). `unroll` steps of a loop are compiled as one."""
        raise NotImplementedError

    def pull(
        self,
        call: Call,
        unroll: int,
        state: Array,
        moving: Tree,
        fixed: Tree,
        ct_end: Array,
        ct_out: Array,
        wanted: Sequence[int],
    ) -> tuple[Array, Tree]:
        """Gradients of one chunk with respect to its first state and to the wanted inputs."""
        chunk = functools.partial(self.chunk, call, unroll)
        return pull_chunk(chunk, state, moving, fixed, ct_end, ct_out, wanted)

    def decay(self, call: Call, moving: Tree, fixed: Tree) -> Array:
        """What a chunk multiplies its first state by, for all chunks."""
        raise NotImplementedError

    def together(self, time: Timeline, state: Array) -> int:
        """Chunks that may run side by side in backward."""
        return time.chunks

    def turned(self, state: Array) -> Array:
        """A state between the layout of the operands and that of `chunk`; its own inverse."""
        return state

    def _prepare(self, call: Call, operands: Arrays) -> tuple[Timeline, Array, Tree, Tree]:
        time = Timeline.of(call, operands)
        initial = jnp.broadcast_to(operands[self.initial_at], state_shape(call, operands, self.state_axes))
        moving, fixed = time.split(call, operands)
        fixed.pop(self.initial_at)
        fixed |= {i: self.turned(fixed[i]) for i in self.like_state}
        return time, self.turned(initial), moving, fixed

    def _run(self, call: Call, platform: str | None, prepared: tuple) -> tuple[Array, Array, Array]:
        _, initial, moving, fixed = prepared
        chunk = functools.partial(self.chunk, call, _unroll(platform))
        if platform in _WIDE:
            return run_at_once(chunk, self.decay(call, moving, fixed), initial, moving, fixed)
        return run(chunk, initial, moving, fixed)

    def forward(self, call: Call, platform: str | None, operands: Arrays) -> Arrays:
        prepared = self._prepare(call, operands)
        time = prepared[0]
        end, outs, states = self._run(call, platform, prepared)
        results = time.join(outs), self.turned(end)
        return (*results, jnp.moveaxis(self.turned(states), 0, time.axis)) if records(call) else results

    def tangent(
        self, call: Call, platform: str | None, operands: Arrays, outputs: Arrays, tangents: dict[int, Array]
    ) -> Arrays:
        def results(operands: Arrays) -> Arrays:
            return self.forward(call, platform, operands)[:2]

        return (*by_jvp(results, operands, tangents), *(jnp.zeros_like(x) for x in outputs[2:]))

    def backward(
        self,
        call: Call,
        platform: str | None,
        operands: Arrays,
        outputs: Arrays,
        cotangents: tuple[Array | None, ...],
        wanted: tuple[int, ...],
    ) -> Arrays:
        prepared = time, initial, moving, fixed = self._prepare(call, operands)
        if call.spec.plain:
            _, _, states = self._run(call, platform, prepared)
        else:
            states = self.turned(jnp.moveaxis(outputs[2], time.axis, 0))
        ct_out, ct_last = cotangents[:2]
        ct_outs = time.cut(jnp.zeros_like(outputs[0]) if ct_out is None else ct_out)
        ct_end = jnp.zeros_like(initial) if ct_last is None else self.turned(ct_last)

        inputs = [i for i in wanted if i != self.initial_at]
        unroll = _unroll(platform)

        def pull(state: Array, moving: Tree, fixed: Tree, ct_end: Array, ct_out: Array) -> tuple[Array, Tree]:
            return self.pull(call, unroll, state, moving, fixed, ct_end, ct_out, inputs)

        if platform in _WIDE:
            chunk = functools.partial(self.chunk, call, unroll)
            decay = self.decay(call, moving, fixed)
            batch = self.together(time, initial)
            ct_first, found = pull_back_at_once(
                chunk, pull, decay, states, moving, fixed, ct_end, ct_outs, batch
            )
        else:
            ct_first, found = pull_back(pull, states, moving, fixed, ct_end, ct_outs, inputs)
        found |= {i: self.turned(found[i]) for i in self.like_state if i in found}
        gradients = time.merge(found, moving, operands)
        if self.initial_at in wanted:
            gradients[self.initial_at] = summed(self.turned(ct_first), operands[self.initial_at].shape)
        return tuple(gradients[i] for i in wanted)


class SelectiveScan(_Chunked):
    """Step by step; the state is (*B, N, D), channels last, since those are what is many."""

    state_axes = ("D", "N")
    initial_at = 5
    like_state = (2,)

    def turned(self, state: Array) -> Array:
        return jnp.swapaxes(state, -1, -2)

    def chunk(self, call: Call, unroll: int, state: Array, moving: Tree, fixed: Tree) -> tuple[Array, Array]:
        return run_chunk(_steps.selective_scan, state, moving, fixed, unroll)

    def pull(
        self,
        call: Call,
        unroll: int,
        state: Array,
        moving: Tree,
        fixed: Tree,
        ct_end: Array,
        ct_out: Array,
        wanted: Sequence[int],
    ) -> tuple[Array, Tree]:
        """Written out: JAX's own derivative took 1.6 times as long (docs/recurrence.md)."""
        channels = state.shape[-1]

        def forth(state: Array, inputs: Tree) -> tuple[Array, Array]:
            return _steps.selective_scan(state, {**fixed, **inputs})[0], state

        end, states = jax.lax.scan(forth, state, moving, unroll=unroll)
        sums = {i: jnp.zeros_like(state) for i in wanted if i == 2}
        sums |= {i: jnp.zeros_like(fixed[i]) for i in wanted if i in (3, 4) and i in fixed}

        def back(carry: tuple[Array, Array, Tree], inputs: tuple) -> tuple[tuple[Array, Array, Tree], Tree]:
            g, after, sums = carry
            some, before, ct_out = inputs
            every = {**fixed, **some}
            u, dt, A, B, C = (every[i] for i in range(5))
            g = g + ct_out[..., None, :] * _steps.by_channel(C, channels)
            through = g * _steps.decay(dt, A, every.get(6))
            moved = through * before  # the cotangent of dt A
            found = {}
            if 0 in wanted:
                found[0] = summed(jnp.sum(g * _steps.by_channel(B, channels), -2), u.shape)
            if 1 in wanted:
                found[1] = summed(jnp.sum(moved * A, -2), dt.shape)
            if 2 in wanted:
                found[2] = moved * dt[..., None, :]
            if 3 in wanted:
                found[3] = _by_group(g, u, B.shape)
            if 4 in wanted:
                found[4] = _by_group(after, ct_out, C.shape)
            sums = {i: x + found.pop(i) for i, x in sums.items()}
            return (through, before, sums), found

        carry = (ct_end, end, sums)
        inputs = (moving, states, ct_out)
        (ct_state, _, sums), found = jax.lax.scan(back, carry, inputs, reverse=True, unroll=unroll)
        if 2 in sums:
            sums[2] = summed(sums[2], fixed[2].shape)
        return ct_state, {**found, **sums}

    def decay(self, call: Call, moving: Tree, fixed: Tree) -> Array:
        dt = jnp.sum(moving[1], 1)
        decay = jnp.exp(dt[..., None, :] * fixed[2])
        if 6 in moving:
            decay = jnp.where(jnp.any(moving[6], 1)[..., None, None], 0, decay)
        return decay

    def together(self, time: Timeline, state: Array) -> int:
        return max(1, min(time.chunks, STORED // (time.chunk * max(state.size, 1))))


def _by_group(state: Array, x: Array, shape: tuple[int, ...]) -> Array:
    """Sums over the channels of each group of (*B, N, D) times (*B, D), and over batch axes of size 1 in
    `shape`.

    `shape` is (*B, G, N).
    """
    *batch, size, channels = state.shape
    groups = shape[-2]
    state = state.reshape(*batch, size, groups, channels // groups)
    x = jnp.broadcast_to(x, (*batch, channels)).reshape(*batch, groups, channels // groups)
    # As matrix products: XLA:CPU is slow at sums over the last axis.
    return summed(jnp.einsum("...ngd,...gd->...gn", state, x, precision="highest"), shape)


class Ssd(_Chunked):
    """Matrix products within chunks (the dual form of Mamba-2, arXiv:2405.21060), a recurrence between them.

    The decay from token s to token t is exp of the sum of the log-decays after s up to t. The sum is formed
    directly, as a product with matrices of zeros and ones: differences of cumulative sums lose digits in
    proportion to their size. It is halved before exp and multiplied twice, so that a factor beyond the range
    of the dtype does no harm where what it multiplies is small.
    """

    state_axes = ("H", "N", "P")
    initial_at = 4

    def turned(self, state: Array) -> Array:
        return jnp.swapaxes(state, -2, -3)

    def chunk(self, call: Call, unroll: int, state: Array, moving: Tree, fixed: Tree) -> tuple[Array, Array]:
        precision = call.spec.precision
        heads, values = state.shape[-2:]
        query, key = (jnp.moveaxis(moving[i], 0, -2) for i in (0, 1))  # (*B, G, chunk, N)
        groups, length = query.shape[-3:-1]
        each = heads // groups  # heads that share a group
        value = jnp.moveaxis(moving[2], 0, -3)
        value = value.reshape(*value.shape[:-3], length, groups, each, values)
        value = jnp.moveaxis(value, -3, -4)  # (*B, G, chunk, R, P)
        decay = _decays(moving[3], heads, groups, length)  # (*B, G, R, t, 1 + s)

        scores = jnp.matmul(query, jnp.swapaxes(key, -1, -2), precision=precision)[..., None, :, :]
        within = decay[..., 1:]
        out = jnp.matmul(scores * within * within, jnp.moveaxis(value, -2, -3), precision=precision)
        out = jnp.moveaxis(out, -3, -2)

        # Products with all heads of a group at once.
        before = state.reshape(*state.shape[:-2], groups, each, values)
        before = jnp.moveaxis(before, -3, -4)  # (*B, G, N, R, P)
        rows = before.reshape(*before.shape[:-2], each * values)
        seen = jnp.matmul(query, rows, precision=precision)
        since = jnp.swapaxes(decay[..., 0], -1, -2)[..., None]
        out = out + seen.reshape(*seen.shape[:-1], each, values) * since * since

        left = jnp.swapaxes(decay[..., -1, 1:], -1, -2)[..., None]
        kept = value * left * left
        kept = kept.reshape(*kept.shape[:-2], each * values)
        added = jnp.matmul(jnp.swapaxes(key, -1, -2), kept, precision=precision)
        whole = decay[..., None, :, -1, :1]
        end = before * whole * whole + added.reshape(*added.shape[:-1], each, values)

        end = jnp.moveaxis(end, -4, -3)
        end = end.reshape(*end.shape[:-3], heads, values)
        out = jnp.moveaxis(out, -4, -3)
        out = out.reshape(*out.shape[:-3], heads, values)
        return end, jnp.moveaxis(out, -3, 0)

    def decay(self, call: Call, moving: Tree, fixed: Tree) -> Array:
        heads = moving[2].shape[-2]
        log_decay = jnp.sum(_bounded(moving[3]), 1)
        log_decay = jnp.broadcast_to(log_decay, (*log_decay.shape[:-1], heads))
        return jnp.exp(jnp.minimum(log_decay, _largest(log_decay.dtype)))[..., None, :, None]


def _bounded(log_decay: Array) -> Array:
    """Log-decays with finite sums. exp of the bound is exactly zero, and so is the gradient beyond it."""
    return jnp.maximum(log_decay, -1e30)


def _largest(dtype: Any) -> int:
    """The largest integer whose exp is finite."""
    return math.floor(math.log(jnp.finfo(dtype).max))


def _decays(log_decay: Array, heads: int, groups: int, length: int) -> Array:
    """Square roots of the decays, (*B, G, R, t, 1 + s), from log-decays (chunk, *B, H).

    Column 0 is the decay of the first state up to and with token t, column 1 + s that of token s.
    """
    log_decay = _bounded(jnp.moveaxis(log_decay, 0, -1))
    log_decay = jnp.broadcast_to(log_decay, (*log_decay.shape[:-2], heads, length))
    log_decay = log_decay.reshape(*log_decay.shape[:-2], groups, heads // groups, 1, length)
    t, s = jnp.arange(length)[:, None], jnp.arange(-1, length)
    until = (jnp.arange(length) <= t).astype(log_decay.dtype)
    after = (jnp.arange(length)[:, None] > s).astype(log_decay.dtype)
    total = jnp.matmul(until * log_decay, after, precision="highest")
    # Beyond the bound only what is zero has a finite product: it shall not meet an infinity.
    half = jnp.minimum(total / 2, _largest(total.dtype))
    return jnp.exp(jnp.where(s <= t, half, -math.inf))


LINEAR_SCAN = LinearScan()
SELECTIVE_SCAN = SelectiveScan()
SSD = Ssd()
