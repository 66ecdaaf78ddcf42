"""The base of masks, their algebra, and what all masks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from probjax._op import Operand
from probjax.attention._terms import Array, Bounds, CallShape, Term, Tile, register

ALIGNMENTS = ("top_left", "bottom_right")

Grid = tuple[np.ndarray, np.ndarray]
Range = tuple[Array, Array]


class Mask(Term):
    """Base of all masks."""

    def __and__(self, other: Mask) -> Mask:
        return _And(self, _as_mask(other))

    def __or__(self, other: Mask) -> Mask:
        return _Or(self, _as_mask(other))

    def __invert__(self) -> Mask:
        return _Not(self)

    def visible(self, tile: Tile) -> Array:
        """The mask on one tile: bool, broadcastable to (b, N, R, C)."""
        raise NotImplementedError

    def grid(self, bounds: Bounds) -> Grid:
        """Per pair of tiles, what is known without data: (may hold a visible pair, holds only visible
        pairs).
        """
        return bounds.grid(True), bounds.grid(False)

    def key_range(self, bounds: Bounds) -> Range | None:
        """Per query tile, what data says: first visible key and one past the last, over the batch entries
        at hand.

        None where data says nothing. An upper bound is enough: a wider range costs time, not correctness.
        """
        return None

    def dense(
        self, query_length: int, key_value_length: int, *, batch: int | tuple[int, ...] = (), heads: int = 1
    ) -> Array:
        """The whole mask as an array, for reference and plotting.

        Args:
          query_length: T.
          key_value_length: S.
          batch: the leading batch axes *B of the call, an int for one axis.
          heads: N.

        Returns:
          bool array of shape (*B, N, T, S).
        """
        batch = (batch,) if isinstance(batch, int) else tuple(batch)
        shape = CallShape(batch, query_length, key_value_length, heads, heads)
        tile, term = whole_tile(self, shape, "mask")
        return jnp.broadcast_to(term.visible(tile), _flat(shape)).reshape(shape.full)


def _flat(shape: CallShape) -> tuple[int, ...]:
    return (int(np.prod(shape.batch, dtype=int)), *shape.full[len(shape.batch) :])


def whole_tile(term: Any, shape: CallShape, argument: str) -> tuple[Tile, Any]:
    """The whole call as one tile, and `term` with its arrays cut for it."""
    (entries, *_), n = _flat(shape), len(shape.batch)
    arrays = [
        jnp.broadcast_to(x, (*shape.batch, *x.shape[n:])).reshape(entries, *x.shape[n:])
        for x, operand in term.canonical(shape, argument)
    ]
    tile = Tile(
        batch=jnp.arange(entries),
        head=jnp.arange(shape.heads),
        query=jnp.arange(shape.query_length),
        key=jnp.arange(shape.key_length),
        query_length=shape.query_length,
        key_length=shape.key_length,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
    )
    return tile, jax.tree.unflatten(jax.tree.structure(term), arrays)


def _as_mask(x: Any) -> Mask:
    if isinstance(x, Mask):
        return x
    if hasattr(x, "dtype"):
        from probjax.attention.masks import Dense

        return Dense(x)
    raise TypeError(f"a mask combines with masks and bool arrays, got {type(x).__name__}")


def check_alignment(alignment: str) -> None:
    if alignment not in ALIGNMENTS:
        raise ValueError(f"alignment: got {alignment!r}, want one of {ALIGNMENTS}")


def offset(alignment: str, query_length: int, key_length: int) -> int:
    """Query i stands at key position i + offset."""
    return key_length - query_length if alignment == "bottom_right" else 0


# ----------------------------------------------------------------------------------------------------------
# Algebra


@register
@dataclass(frozen=True)
class _And(Mask):
    left: Mask
    right: Mask

    def canonical(self, shape: CallShape, argument: str) -> list[tuple[Array, Operand]]:
        return self.left.canonical(shape, argument) + self.right.canonical(shape, argument)

    def visible(self, tile: Tile) -> Array:
        return self.left.visible(tile) & self.right.visible(tile)

    def grid(self, bounds: Bounds) -> Grid:
        (some, every), (some2, every2) = self.left.grid(bounds), self.right.grid(bounds)
        return some & some2, every & every2

    def key_range(self, bounds: Bounds) -> Range | None:
        left, right = self.left.key_range(bounds), self.right.key_range(bounds)
        if left is None or right is None:
            return left or right
        return jnp.maximum(left[0], right[0]), jnp.minimum(left[1], right[1])


@register
@dataclass(frozen=True)
class _Or(Mask):
    left: Mask
    right: Mask

    def canonical(self, shape: CallShape, argument: str) -> list[tuple[Array, Operand]]:
        return self.left.canonical(shape, argument) + self.right.canonical(shape, argument)

    def visible(self, tile: Tile) -> Array:
        return self.left.visible(tile) | self.right.visible(tile)

    def grid(self, bounds: Bounds) -> Grid:
        (some, every), (some2, every2) = self.left.grid(bounds), self.right.grid(bounds)
        return some | some2, every | every2

    def key_range(self, bounds: Bounds) -> Range | None:
        left, right = self.left.key_range(bounds), self.right.key_range(bounds)
        if left is None and right is None:
            return None
        # The hull of both; a side of which data says nothing is bounded by its own static tiles.
        left = static_range(self.left, bounds) if left is None else left
        right = static_range(self.right, bounds) if right is None else right
        empty_left, empty_right = left[0] >= left[1], right[0] >= right[1]
        lo = jnp.minimum(jnp.where(empty_left, right[0], left[0]), jnp.where(empty_right, left[0], right[0]))
        hi = jnp.maximum(jnp.where(empty_left, right[1], left[1]), jnp.where(empty_right, left[1], right[1]))
        return lo, hi


def static_range(mask: Mask, bounds: Bounds) -> Range:
    some, _ = mask.grid(bounds)
    lo = np.where(some, bounds.key_first, bounds.key_length).min(axis=1, initial=bounds.key_length)
    hi = np.where(some, bounds.key_last + 1, 0).max(axis=1, initial=0)
    return jnp.asarray(lo, jnp.int32), jnp.asarray(hi, jnp.int32)


@register
@dataclass(frozen=True)
class _Not(Mask):
    inner: Mask

    def canonical(self, shape: CallShape, argument: str) -> list[tuple[Array, Operand]]:
        return self.inner.canonical(shape, argument)

    def visible(self, tile: Tile) -> Array:
        return ~self.inner.visible(tile)

    def grid(self, bounds: Bounds) -> Grid:
        some, every = self.inner.grid(bounds)
        return ~every, ~some
