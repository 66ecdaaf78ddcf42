"""Which tiles a kernel visits: those that hold something, and of those the ones that hold nothing hidden.

A kernel walks along one axis (key tiles for a tile of queries, or the other way round) and runs two loops:
one over tiles with something hidden, which evaluates the mask, and one over full tiles, which does not. The
mask of a call is the postfix program of `_program`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from probjax.attention import masks
from probjax.attention._program import NO_BOUND, MaskOp, MaskStep
from probjax.attention._terms import Bounds

Array = jax.Array
Flags = tuple[Any, Any]  # per tile: holds a visible pair (or may), holds nothing else


@dataclass(frozen=True)
class Cut:
    """Tiles of a call: `rows` queries by `columns` keys."""

    T: int
    S: int
    rows: int
    columns: int

    @property
    def row_tiles(self) -> int:
        return math.ceil(self.T / self.rows)

    @property
    def column_tiles(self) -> int:
        return math.ceil(self.S / self.columns)


@dataclass(frozen=True)
class Schedule:
    """Tiles to visit, of one of three kinds.

    band: the mask shows distances from `low` to `high` (None: no bound): bounds are computed in the kernel.
    ranges: `array` (*batch or 1, tiles, 4): first, first full, one past the last full, one past the last.
    table: `array` (tiles, 2 + width): how many tiles with something hidden, how many full, and their
    numbers in this order.
    """

    kind: str
    low: int | None = None
    high: int | None = None
    array: Array | None = None

    @property
    def everything(self) -> bool:
        return self.kind == "band" and self.low is None and self.high is None


def schedules(
    steps: Sequence[MaskStep], cut: Cut, operands: Sequence[Array], batch: int
) -> tuple[Schedule, Schedule]:
    """Along the keys for each tile of queries, and along the queries for each tile of keys."""
    if not steps:
        plain = Schedule("band")
        return plain, plain
    if len(steps) == 1 and steps[0].op == MaskOp.BAND:
        low, high = (None if abs(x) == NO_BOUND else x for x in (steps[0].a, steps[0].b))
        band = Schedule("band", low, high)
        return band, band
    some: Any
    every: Any
    some, every = _flags(steps, cut, operands, batch)
    if cut.S % cut.columns:  # the last tile reaches beyond the keys
        ragged = np.arange(cut.column_tiles) == cut.column_tiles - 1
        every = every & ~ragged
    every = every & some
    shape = (cut.row_tiles, cut.column_tiles)
    if isinstance(some, np.ndarray) and isinstance(every, np.ndarray):
        some, every = np.broadcast_to(some, shape), np.broadcast_to(every, shape)
        return _static(some, every), _static(some.T, every.T)
    lead = np.broadcast_shapes(some.shape[:-2], every.shape[:-2], (1,) * batch)
    some, every = (jnp.broadcast_to(x, (*lead, *shape)) for x in (some, every))
    turned = (jnp.swapaxes(x, -1, -2) for x in (some, every))
    return Schedule("ranges", array=_ranges(jnp, some, every)), Schedule(
        "ranges", array=_ranges(jnp, *turned)
    )


def _static(some: np.ndarray, every: np.ndarray) -> Schedule:
    ranges = _ranges(np, some, every)
    tiles = np.arange(some.shape[1])
    inside = (tiles >= ranges[:, :1]) & (tiles < ranges[:, 3:])
    full = (tiles >= ranges[:, 1:2]) & (tiles < ranges[:, 2:3])
    if (inside == some).all() and (full == every).all():
        return Schedule("ranges", array=jnp.asarray(ranges))
    hidden = some & ~every
    counts = np.stack([hidden.sum(1), every.sum(1)], axis=1)
    width = max(int(counts.sum(1).max(initial=0)), 1)
    # Sorted by kind, then by number: a stable sort keeps the latter.
    order = np.argsort(np.where(hidden, 0, np.where(every, 1, 2)), axis=1, kind="stable")[:, :width]
    return Schedule("table", array=jnp.asarray(np.concatenate([counts, order], axis=1), jnp.int32))


def _ranges(xp: Any, some: Any, every: Any) -> Any:
    """Hull of the tiles that hold something, and the first run of full ones inside; last axis first."""
    count = some.shape[-1]
    tiles = xp.arange(count)
    first = xp.where(some, tiles, count).min(-1, initial=count)
    last = xp.where(some, tiles + 1, 0).max(-1, initial=0)
    full = xp.where(every, tiles, count).min(-1, initial=count)
    stop = xp.where(~every & (tiles > full[..., None]), tiles, count).min(-1, initial=count)
    full, stop = xp.minimum(full, last), xp.minimum(stop, last)
    return xp.stack([xp.minimum(first, last), full, xp.maximum(stop, full), last], axis=-1).astype(np.int32)


def _flags(steps: Sequence[MaskStep], cut: Cut, operands: Sequence[Array], batch: int) -> Flags:
    stack: list[Flags] = []
    for step in steps:
        if step.op == MaskOp.NONE_OF:
            some, every = stack.pop()
            stack.append((~every, ~some))
        elif step.op in (MaskOp.ALL_OF, MaskOp.ANY_OF):
            (some2, every2), (some, every) = stack.pop(), stack.pop()
            if step.op == MaskOp.ALL_OF:
                stack.append((some & some2, every & every2))
            else:
                stack.append((some | some2, every | every2))
        else:
            stack.append(_leaf(step, cut, operands, batch))
    return stack[0]


def _leaf(step: MaskStep, cut: Cut, operands: Sequence[Array], batch: int) -> Flags:
    i, j = np.arange(cut.row_tiles)[:, None], np.arange(cut.column_tiles)[None]
    q0, k0 = i * cut.rows, j * cut.columns
    q1, k1 = np.minimum(q0 + cut.rows, cut.T) - 1, np.minimum(k0 + cut.columns, cut.S) - 1
    shape = (cut.row_tiles, cut.column_tiles)

    def of(position: int) -> Array:  # batch axes, then two for the tiles
        x = operands[position]
        return x.reshape(*x.shape[:batch], 1, 1)

    match step.op:
        case MaskOp.BAND:
            some = (k1 - q0 >= step.a) & (k0 - q1 <= step.b)
            return some, (k0 - q1 >= step.a) & (k1 - q0 <= step.b)
        case MaskOp.BLOCK:
            a0, a1, b0, b1 = (x // step.a for x in (q0, q1, k0, k1))
            return (a0 <= b1) & (b0 <= a1), (a0 == a1) & (b0 == b1) & (a0 == b0)
        case MaskOp.PREFIX:
            prefix = of(step.a)
            return (k0 - q1 <= step.b) | (k0 < prefix), (k1 - q0 <= step.b) | (k1 < prefix)
        case MaskOp.KEY_LENGTHS:
            return jnp.broadcast_to(k0, shape) < of(step.a), jnp.broadcast_to(k1, shape) < of(step.a)
        case MaskOp.QUERY_LENGTHS:
            return jnp.broadcast_to(q0, shape) < of(step.a), jnp.broadcast_to(q1, shape) < of(step.a)
        case MaskOp.SEGMENTS:
            low, high = (x[..., :, None] for x in _extremes(operands[step.a], cut.rows, cut.row_tiles))
            least, most = (
                x[..., None, :] for x in _extremes(operands[step.b], cut.columns, cut.column_tiles)
            )
            return (low <= most) & (least <= high), (low == high) & (least == most) & (low == least)
        case MaskOp.DENSE:
            return _dense(operands[step.a], cut, batch)
        case MaskOp.FUNCTION:
            function = step.function
            assert function is not None
            if function.arrays:
                return np.ones(shape, bool), np.zeros(shape, bool)
            flat = (q0[:, 0], q1[:, 0], k0[0], k1[0])
            return masks.MaskFunction(function.fn).grid(Bounds(*flat, cut.T, cut.S))
    raise AssertionError(step.op)


def _extremes(ids: Array, size: int, tiles: int) -> tuple[Array, Array]:
    """Smallest and largest id of each tile of the last axis."""
    pad = [(0, 0)] * (ids.ndim - 1) + [(0, tiles * size - ids.shape[-1])]
    split = jnp.pad(ids, pad, mode="edge").reshape(*ids.shape[:-1], tiles, size)
    return split.min(-1), split.max(-1)


def _dense(mask: Array, cut: Cut, batch: int) -> Flags:
    """A whole array is read once to find the tiles that hold nothing."""
    sizes = [cut.rows if mask.shape[-2] > 1 else 1, cut.columns if mask.shape[-1] > 1 else 1]
    counts = [math.ceil(n / size) for n, size in zip(mask.shape[-2:], sizes, strict=True)]
    pad = [(0, 0)] * (mask.ndim - 2) + [
        (0, c * size - n) for c, size, n in zip(counts, sizes, mask.shape[-2:], strict=True)
    ]

    def tiles(fill: bool, reduce: Any) -> Array:
        x = jnp.pad(mask, pad, constant_values=fill)
        x = x.reshape(*mask.shape[:-2], counts[0], sizes[0], counts[1], sizes[1])
        return reduce(x, axis=(batch, batch + 2, batch + 4))

    return tiles(False, jnp.any), tiles(True, jnp.all)


# ----------------------------------------------------------------------------------------------------------
# Inside a kernel


def bounds(plan: Schedule, cut: Cut, tile: Array, along: str) -> tuple[Any, Any, Any, Any]:
    """The four bounds of a band for one tile; `along` "keys" for a tile of queries, "queries" for one of
    keys.
    """
    keys = along == "keys"
    size, length, step = (cut.rows, cut.T, cut.columns) if keys else (cut.columns, cut.S, cut.rows)
    count = cut.column_tiles if keys else cut.row_tiles
    # Visible positions of the other axis, for position p of this one: p + low ... p + high.
    low, high = plan.low, plan.high
    if not keys:
        low, high = (None if plan.high is None else -plan.high), (None if plan.low is None else -plan.low)
    first = tile * np.int32(size)
    last = jnp.minimum(first + np.int32(size), np.int32(length)) - np.int32(1)
    zero, end = np.int32(0), np.int32(count)
    # Only whole tiles are full. Where queries are walked, one that reaches beyond them is as good: what is
    # beyond has no weight.
    whole = np.int32(cut.S // cut.columns) if keys else end

    def down(x: Any) -> Any:
        return lax.div(jnp.maximum(x, zero), np.int32(step))

    def up(x: Any) -> Any:
        return lax.div(jnp.maximum(x, zero) + np.int32(step - 1), np.int32(step))

    begin = zero if low is None else jnp.minimum(down(first + np.int32(low)), end)
    stop = end if high is None else jnp.minimum(up(last + np.int32(high + 1)), end)
    full = begin if low is None else up(last + np.int32(low))
    full_stop = whole if high is None else down(first + np.int32(high + 1))
    if not keys and high is not None:  # the last tile of queries is shorter than the others
        reaches = first + np.int32(high + 1) >= np.int32(cut.T)
        full_stop = jnp.where(reaches, end, full_stop)
    full_stop = jnp.minimum(full_stop, whole)
    if not keys and cut.S % cut.columns:
        ragged = tile == np.int32(cut.column_tiles - 1)
        full_stop = jnp.where(ragged, zero, full_stop)
    stop = jnp.maximum(stop, begin)
    full = jnp.clip(full, begin, stop)
    full_stop = jnp.clip(full_stop, full, stop)
    return begin, full, full_stop, stop
