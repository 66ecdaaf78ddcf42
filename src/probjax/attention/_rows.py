"""Some rows of the masks and biases of a whole square call, as decoding with a cache needs them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from probjax.attention import biases
from probjax.attention._mask import Mask
from probjax.attention._terms import Array, CallShape, Tile
from probjax.attention.biases import Bias, as_bias
from probjax.attention.masks import Dense


def mask_rows(mask: Any, shape: CallShape, start: Array, count: int) -> Array:
    """A mask at queries `start` to `start + count` of a whole call.

    Args:
      mask: an object of `probjax.masks`, or a bool array that broadcasts to the whole call's scores.
      shape: of the whole call.
      start: an integer, may be traced.
      count: number of queries.

    Returns:
      bool, broadcastable to (*B, N, count, S).
    """
    tile, term = _part(mask if isinstance(mask, Mask) else Dense(mask), shape, start, count, "mask")
    return _unflat(term.visible(tile), shape)


def bias_rows(bias: Any, shape: CallShape, start: Array, count: int) -> Bias:
    """A bias at queries `start` to `start + count` of a whole call; see `mask_rows`.

    What adds to the score becomes an array of these rows; the others keep their form, with the position of a
    `ScoreFunction` moved.
    """
    bias = as_bias(bias)
    if isinstance(bias, biases._Chain):
        return bias_rows(bias.first, shape, start, count) + bias_rows(bias.second, shape, start, count)
    if isinstance(bias, (biases.SoftCap, biases.HeadScale)):
        return bias
    if isinstance(bias, biases.ScoreFunction):
        return biases.ScoreFunction(_moved(bias.fn), start, *bias.arrays)
    tile, term = _part(bias, shape, start, count, "bias")
    wide = functools.reduce(jnp.promote_types, [x.dtype for x in jax.tree.leaves(term)], jnp.float32)
    entries = max((x.shape[0] for x in jax.tree.leaves(term)), default=1)
    zeros = jnp.zeros((entries, shape.heads, count, shape.key_length), wide)
    return biases.Dense(_unflat(term.apply(zeros, tile, None), shape))


@functools.lru_cache(maxsize=256)
def _moved(fn: Callable[..., Any]) -> Callable[..., Any]:
    # One function object for each of the user's: a new one would be a new program.
    def moved(score: Any, batch: Any, head: Any, query: Any, key: Any, start: Any, *arrays: Any) -> Any:
        return fn(score, batch, head, query + start.astype(query.dtype), key, *arrays)

    return moved


def _part(term: Any, shape: CallShape, start: Array, count: int, argument: str) -> tuple[Tile, Any]:
    n, entries = len(shape.batch), math.prod(shape.batch)
    arrays = []
    for x, operand in term.canonical(shape, argument):
        for axis, name in enumerate(operand.axes, n):
            if name == "T" and x.shape[axis] > 1:
                x = lax.dynamic_slice_in_dim(x, start, count, axis)
        # What all batch entries share stays one entry.
        if any(size > 1 for size in x.shape[:n]):
            x = jnp.broadcast_to(x, (*shape.batch, *x.shape[n:]))
        arrays.append(x.reshape(-1 if x.size else entries, *x.shape[n:]))
    tile = Tile(
        batch=jnp.arange(entries),
        head=jnp.arange(shape.heads),
        query=start + jnp.arange(count, dtype=jnp.int32),
        key=jnp.arange(shape.key_length),
        query_length=shape.query_length,
        key_length=shape.key_length,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
    )
    return tile, jax.tree.unflatten(jax.tree.structure(term), arrays)


def _unflat(x: Array, shape: CallShape) -> Array:
    """What broadcasts to (entries, heads, rows, keys), with the batch axes of the call."""
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    batch = shape.batch if x.shape[0] != 1 else (1,) * len(shape.batch)
    return x.reshape(*batch, *x.shape[1:])
