"""Masks: which (query, key) pairs attend. True means attend. They compose with `&`, `|` and `~`, in any
nesting.

Every mask is a pytree: arrays inside it may be traced, vmapped and sharded. Structure that is known when a
program is traced (causal, window, block diagonal) and structure that depends on data (lengths, segments)
both become ranges of tiles that are skipped, so that a mask costs less than no mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from probjax._op import Operand
from probjax.attention._function import on_host
from probjax.attention._mask import Grid, Mask, Range, check_alignment, offset, static_range
from probjax.attention._terms import (
    Array,
    Bounds,
    CallShape,
    Tile,
    as_array,
    batch_shaped,
    check_closure,
    free,
    over_tile,
    register,
    score_shaped,
    static,
)

__all__ = [
    "BlockDiagonal",
    "Causal",
    "Dense",
    "Mask",
    "MaskFunction",
    "Padding",
    "PrefixLM",
    "Segments",
    "SlidingWindow",
]


# ----------------------------------------------------------------------------------------------------------
# Structure known when a program is traced


@register
@dataclass(frozen=True)
class Causal(Mask):
    """Query i sees the keys up to its own position: j <= i ("top_left") or j <= i + S - T "
    "("bottom_right")."""

    alignment: str = static(default="top_left")

    def __post_init__(self) -> None:
        check_alignment(self.alignment)

    def canonical(self, shape: CallShape, argument: str) -> list[tuple[Array, Operand]]:
        return []

    def visible(self, tile: Tile) -> Array:
        return tile.distance() <= offset(self.alignment, tile.query_length, tile.key_length)

    def grid(self, bounds: Bounds) -> Grid:
        shift = offset(self.alignment, bounds.query_length, bounds.key_length)
        some = bounds.key_first[None] <= bounds.query_last[:, None] + shift
        every = bounds.key_last[None] <= bounds.query_first[:, None] + shift
        return some, every


@register
@dataclass(frozen=True)
class SlidingWindow(Mask):
    """Query i sees keys from `left` before to `right` after its own position; None or -1 is no bound on
    that side.
    """

    left: int | None = static(default=None)
    right: int | None = static(default=None)
    alignment: str = static(default="top_left")

    def __post_init__(self) -> None:
        check_alignment(self.alignment)
        for name in ("left", "right"):
            size = getattr(self, name)
            if size is not None and (
                isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < -1
            ):
                raise ValueError(
                    f"{name}: got {size!r}, want a window of 0 or more keys, or None or -1 for no bound"
                )

    def canonical(self, shape: CallShape, argument: str) -> list[tuple[Array, Operand]]:
        return []

    def _sides(self, query_length: int, key_length: int) -> tuple[int | None, int | None]:
        """Smallest and largest visible distance j - i."""
        shift = offset(self.alignment, query_length, key_length)
        low = None if self.left in (None, -1) else shift - int(self.left)
        high = None if self.right in (None, -1) else shift + int(self.right)
        return low, high

    def visible(self, tile: Tile) -> Array:
        low, high = self._sides(tile.query_length, tile.key_length)
        distance = tile.distance()
        inside = jnp.ones_like(distance, dtype=bool)
        if low is not None:
            inside &= distance >= low
        if high is not None:
            inside &= distance <= high
        return inside

    def grid(self, bounds: Bounds) -> Grid:
        low, high = self._sides(bounds.query_length, bounds.key_length)
        some, every = bounds.grid(True), bounds.grid(True)
        if low is not None:
            some &= bounds.key_last[None] - bounds.query_first[:, None] >= low
            every &= bounds.key_first[None] - bounds.query_last[:, None] >= low
        if high is not None:
            some &= bounds.key_first[None] - bounds.query_last[:, None] <= high
            every &= bounds.key_last[None] - bounds.query_first[:, None] <= high
        return some, every


@register
@dataclass(frozen=True)
class BlockDiagonal(Mask):
    """Query and key see each other when both lie in the same block of `size` positions."""

    size: int = static()

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, (int, np.integer)) or self.size < 1:
            raise ValueError(f"size: got {self.size!r}, want a block size of 1 or more")

    def canonical(self, shape: CallShape, argument: str) -> list[tuple[Array, Operand]]:
        return []

    def visible(self, tile: Tile) -> Array:
        return tile.query[:, None] // self.size == tile.key[None, :] // self.size

    def grid(self, bounds: Bounds) -> Grid:
        q0, q1 = bounds.query_first[:, None] // self.size, bounds.query_last[:, None] // self.size
        k0, k1 = bounds.key_first[None] // self.size, bounds.key_last[None] // self.size
        return (q0 <= k1) & (k0 <= q1), (q0 == q1) & (k0 == k1) & (q0 == k0)


# ----------------------------------------------------------------------------------------------------------
# Structure that depends on data


@register
@dataclass(frozen=True)
class PrefixLM(Mask):
    """Causal, and every query sees the first `prefix_lengths` keys. `prefix_lengths`: integers, shape (*B,)
    or ().
    """

    prefix_lengths: Any
    alignment: str = static(default="top_left")

    def __post_init__(self) -> None:
        check_alignment(self.alignment)

    def canonical(self, shape: CallShape, argument: str) -> list[tuple[Array, Operand]]:
        lengths = as_array(self.prefix_lengths, f"{argument}.prefix_lengths", "integer")
        lengths = batch_shaped(lengths, shape, f"{argument}.prefix_lengths", "(*B,)", ())
        return [(lengths, Operand("prefix_lengths", (), False))]

    def visible(self, tile: Tile) -> Array:
        prefix = tile.key[None, :] < self.prefix_lengths[:, None]
        return Causal(self.alignment).visible(tile) | prefix[:, None, None, :]

    def grid(self, bounds: Bounds) -> Grid:
        _, every = Causal(self.alignment).grid(bounds)
        return bounds.grid(True), every

    def key_range(self, bounds: Bounds) -> Range:
        _, causal_end = static_range(Causal(self.alignment), bounds)
        longest = jnp.max(self.prefix_lengths, initial=0).astype(jnp.int32)
        return jnp.zeros_like(causal_end), jnp.maximum(causal_end, longest)


@register
@dataclass(frozen=True)
class Segments(Mask):
    """Query and key see each other when their ids are equal.

    Args:
      query_ids: integers, shape (*B, T) or (T,).
      key_value_ids: integers, shape (*B, S) or (S,); None takes `query_ids` (then T = S).
    """

    query_ids: Any
    key_value_ids: Any = None

    def canonical(self, shape: CallShape, argument: str) -> list[tuple[Array, Operand]]:
        both = [("query_ids", self.query_ids, "T", shape.query_length)]
        if self.key_value_ids is not None:
            both.append(("key_value_ids", self.key_value_ids, "S", shape.key_length))
        elif shape.query_length != shape.key_length:
            raise ValueError(
                f"{argument}: got one array of ids with T = {shape.query_length} and S = {shape.key_length}, "
                "want a pair (query ids, key/value ids) when T and S differ"
            )
        out = []
        for name, ids, letter, size in both:
            where = f"{argument}.{name}"
            ids = batch_shaped(as_array(ids, where, "integer"), shape, where, f"(*B, {letter})", (size,))
            # Alone, the query ids serve as key ids too, so no tile may cut them.
            axis = letter if self.key_value_ids is not None else None
            out.append((ids, Operand(name, (axis,), False)))
        return out

    def _ids(self, tile: Tile) -> tuple[Array, Array]:
        if self.key_value_ids is not None:
            return self.query_ids, self.key_value_ids
        return self.query_ids[:, tile.query], self.query_ids[:, tile.key]

    def visible(self, tile: Tile) -> Array:
        query_ids, key_ids = self._ids(tile)
        return query_ids[:, None, :, None] == key_ids[:, None, None, :]

    def key_range(self, bounds: Bounds) -> Range:
        key_ids = self.query_ids if self.key_value_ids is None else self.key_value_ids
        q_low, q_high = _tile_extremes(self.query_ids, bounds.query_first, bounds.query_last)
        k_low, k_high = _tile_extremes(key_ids, bounds.key_first, bounds.key_last)
        meet = (q_low[:, :, None] <= k_high[:, None]) & (k_low[:, None] <= q_high[:, :, None])
        lo = jnp.min(jnp.where(meet, bounds.key_first, bounds.key_length), axis=(0, 2))
        hi = jnp.max(jnp.where(meet, bounds.key_last + 1, 0), axis=(0, 2))
        return lo.astype(jnp.int32), hi.astype(jnp.int32)


def _tile_extremes(ids: Array, first: np.ndarray, last: np.ndarray) -> Range:
    """Smallest and largest id in each tile: (b, tiles). Tiles overlap at most at the end, so they are
    gathered.
    """
    width = int((last - first).max()) + 1
    index = np.minimum(first[:, None] + np.arange(width), last[:, None])
    tiles = ids[:, index]
    return tiles.min(axis=-1), tiles.max(axis=-1)


@register
@dataclass(frozen=True)
class Padding(Mask):
    """Hides keys that are padding. `valid`: lengths, integers of shape (*B,) or (), or bool of shape (*B,
    S).
    """

    valid: Any

    def _by_length(self) -> bool:
        return not jnp.issubdtype(jnp.result_type(self.valid), jnp.bool_)

    def canonical(self, shape: CallShape, argument: str) -> list[tuple[Array, Operand]]:
        if self._by_length():
            where = f"{argument}.valid"
            lengths = as_array(self.valid, where, "integer")
            return [(batch_shaped(lengths, shape, where, "(*B,)", ()), Operand("lengths", (), False))]
        valid = batch_shaped(jnp.asarray(self.valid), shape, argument, "(*B, S)", (shape.key_length,))
        return [(valid, Operand("valid", ("S",), False))]

    def visible(self, tile: Tile) -> Array:
        valid = tile.key[None, :] < self.valid[:, None] if self._by_length() else self.valid
        return valid[:, None, None, :]

    def key_range(self, bounds: Bounds) -> Range:
        count = len(bounds.query_first)
        if self._by_length():
            lo, hi = jnp.int32(0), jnp.max(self.valid, initial=0).astype(jnp.int32)
        else:
            some = jnp.any(self.valid, axis=0)
            position = jnp.arange(bounds.key_length, dtype=jnp.int32)
            lo = jnp.min(jnp.where(some, position, bounds.key_length), initial=bounds.key_length)
            hi = jnp.max(jnp.where(some, position + 1, 0), initial=0)
        return jnp.broadcast_to(lo, (count,)), jnp.broadcast_to(hi, (count,))


@register
@dataclass(frozen=True)
class QueryPadding(Mask):
    """Empties the rows of queries at or beyond `lengths`: integers, shape (*B,)."""

    lengths: Any

    def canonical(self, shape: CallShape, argument: str) -> list[tuple[Array, Operand]]:
        lengths = batch_shaped(as_array(self.lengths, argument, "integer"), shape, argument, "(*B,)", ())
        return [(lengths, Operand("query_lengths", (), False))]

    def visible(self, tile: Tile) -> Array:
        return (tile.query[None, :] < self.lengths[:, None])[:, None, :, None]

    def key_range(self, bounds: Bounds) -> Range:
        alive = jnp.asarray(bounds.query_first) < jnp.max(self.lengths, initial=0)
        hi = jnp.where(alive, bounds.key_length, 0).astype(jnp.int32)
        return jnp.zeros_like(hi), hi


@register
@dataclass(frozen=True)
class Dense(Mask):
    """A bool array that broadcasts to (*B, N, T, S); its head axis may be 1, K or N."""

    array: Any

    def canonical(self, shape: CallShape, argument: str) -> list[tuple[Array, Operand]]:
        array = score_shaped(as_array(self.array, argument, "bool"), shape, argument)
        return [(array, Operand("mask", ("H", "T", "S"), False))]

    def visible(self, tile: Tile) -> Array:
        return tile.per_head(self.array)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, init=False)
class MaskFunction(Mask):
    """A mask by a function of indices: `fn(batch, head, q_index, kv_index, *arrays) -> bool`, on scalars.

    `batch` is the index over all leading batch axes flattened. `arrays` are passed whole; they may be
    traced. A function without arrays is evaluated when the program is traced, so that tiles it leaves empty
    are skipped; keep one function object over calls, since a new one is a new program.
    """

    fn: Callable
    arrays: tuple[Any, ...]

    def tree_flatten(self) -> tuple[tuple[Any, ...], Callable]:
        return self.arrays, self.fn

    @classmethod
    def tree_unflatten(cls, fn: Callable, arrays: tuple[Any, ...]) -> MaskFunction:
        return cls(fn, *arrays)

    def __init__(self, fn: Callable, *arrays: Any):
        if not callable(fn):
            raise TypeError(
                f"fn: got {type(fn).__name__}, want a function (batch, head, q_index, kv_index, "
                "*arrays) -> bool"
            )
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "arrays", arrays)

    def canonical(self, shape: CallShape, argument: str) -> list[tuple[Array, Operand]]:
        given = tuple(jnp.asarray(x) for x in self.arrays)
        check_closure(self.fn, 4, given, argument)
        arrays = [free(x, shape) for x in given]
        axes = len(shape.batch)
        return [(x, Operand("mask_array", (None,) * (x.ndim - axes), False)) for x in arrays]

    def visible(self, tile: Tile) -> Array:
        return over_tile(self.fn, tile, self.arrays).astype(bool)

    def grid(self, bounds: Bounds) -> Grid:
        if self.arrays or bounds.query_length * bounds.key_length > 2**31:
            return bounds.grid(True), bounds.grid(False)
        key = tuple(
            tuple(int(i) for i in x)
            for x in (bounds.query_first, bounds.query_last, bounds.key_first, bounds.key_last)
        )
        return _evaluate(self.fn, *key)


@functools.lru_cache(maxsize=256)
def _evaluate(fn: Callable, q_first: tuple, q_last: tuple, k_first: tuple, k_last: tuple) -> Grid:
    """Evaluates a function of indices on every pair of a grid of tiles, if it does not look at batch or
    head.
    """
    rows, columns = np.asarray(q_first), np.asarray(k_first)
    shape = (len(rows), len(columns))
    unknown = np.ones(shape, bool), np.zeros(shape, bool)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    jaxpr = jax.make_jaxpr(fn)(scalar, scalar, scalar, scalar).jaxpr
    read = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
    if any(id(v) in read for v in jaxpr.invars[:2]):
        return unknown
    q_width = max(b - a for a, b in zip(q_first, q_last, strict=True)) + 1
    k_width = max(b - a for a, b in zip(k_first, k_last, strict=True)) + 1
    keys = np.minimum(columns[:, None] + np.arange(k_width), np.asarray(k_last)[:, None])

    def row(queries: Array) -> tuple[Array, Array]:
        on_keys = jax.vmap(lambda q, k: fn(jnp.int32(0), jnp.int32(0), q, k), (None, 0))
        seen = jax.vmap(on_keys, (0, None))(queries, jnp.asarray(keys.reshape(-1), jnp.int32))
        seen = seen.astype(bool).reshape(q_width, *keys.shape)
        return seen.any(axis=(0, 2)), seen.all(axis=(0, 2))

    queries = np.minimum(rows[:, None] + np.arange(q_width), np.asarray(q_last)[:, None]).astype(np.int32)
    with jax.ensure_compile_time_eval(), on_host():
        some, every = jax.jit(lambda q: jax.lax.map(row, q))(queries)
    return np.asarray(some), np.asarray(every)
