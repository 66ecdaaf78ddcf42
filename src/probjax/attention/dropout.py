"""Dropout of attention weights by a counter-based hash.

Whether the weight of (batch, head, query, key) survives is a pure function of the key and of those four
numbers, in 32-bit unsigned arithmetic that every implementation repeats: so tiles, shards,
rematerialisation and `jax.vmap` do not change the mask. Definition, with `mix` the 32-bit finaliser of
MurmurHash3 (full avalanche) and all arithmetic modulo 2**32:

    row  = mix(mix(mix(word0 + batch * 0x9E3779B1) + head * 0x85EBCA77) + query * 0xC2B2AE3D)
    hash = mix(mix(row + key * 0x27D4EB2F) ^ word1 ^ row)

The weight is dropped where hash < rate * 2**32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from probjax.attention._terms import Tile

Array = jax.Array

_BATCH, _HEAD, _QUERY, _KEY = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F


def key_words(key: Array) -> Array:
    """Two uint32 words of a JAX key (typed, or an old-style uint32 array). Raises TypeError for anything
    else.
    """
    if not hasattr(key, "dtype"):
        raise TypeError(f"dropout_key: got {type(key).__name__}, want a JAX key such as jax.random.key(0)")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape != ():
            raise ValueError(
                f"dropout_key: got an array of keys of shape {key.shape}, want one key, shape ()"
            )
        words = jax.random.key_data(key)
    else:
        words = jnp.asarray(key)
        if words.dtype != jnp.uint32 or words.ndim != 1:
            raise TypeError(
                f"dropout_key: got dtype {words.dtype} and shape {words.shape}, want a JAX key such "
                "as jax.random.key(0)"
            )
    while words.shape[0] > 2:  # wider keys are folded
        half = words.shape[0] // 2
        words = words[:half] ^ words[half : 2 * half]
    return words if words.shape[0] == 2 else jnp.concatenate([words, ~words])


def _mix(x: Array) -> Array:
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))


def survivors(words: Array, rate: float, batch: Array, head: Array, query: Array, key: Array) -> Array:
    """Which weights survive: bool, broadcast of the four index arrays. `words`: (..., 2) uint32."""
    return keeps(words[..., 0], words[..., 1], rate, batch, head, query, key)


def keeps(
    word0: Array, word1: Array, rate: float, batch: Array, head: Array, query: Array, key: Array
) -> Array:
    """`survivors` with the two words apart: in steps that a kernel on a GPU has as well."""
    if rate >= 1.0:
        return jnp.zeros(jnp.broadcast_shapes(*(jnp.shape(x) for x in (batch, head, query, key))), bool)
    batch, head, query, key = (x.astype(jnp.uint32) for x in (batch, head, query, key))
    row = _mix(word0 + batch * jnp.uint32(_BATCH))
    row = _mix(row + head * jnp.uint32(_HEAD))
    row = _mix(row + query * jnp.uint32(_QUERY))
    hashed = _mix(_mix(row + key * jnp.uint32(_KEY)) ^ word1 ^ row)
    return hashed >= jnp.uint32(min(int(rate * 2.0**32), 2**32 - 1))


def drop(weight: Array, words: Array, rate: float, tile: Tile) -> Array:
    """Dropout of the weights of one tile, (b, N, R, C). `words`: (b, 2) or (1, 2) uint32."""
    keep = survivors(
        words.reshape(-1, 1, 1, 1, 2),
        rate,
        tile.batch[:, None, None, None],
        tile.head[:, None, None],
        tile.query[:, None],
        tile.key,
    )
    return jnp.where(keep, weight * (1.0 / (1.0 - rate) if rate < 1.0 else 0.0), 0)


def dropout_mask(
    key: Array, rate: float, query_length: int, key_value_length: int, *, batch: int = 1, heads: int = 1
) -> Array:
    """The mask that `dot_product_attention` uses, True where a weight survives.

    Args:
      key: the JAX key given as `dropout_key`.
      rate: the probability of dropping, in [0, 1].
      query_length: T.
      key_value_length: S.
      batch: number of batch entries: the leading batch axes flattened.
      heads: N.

    Returns:
      bool, (batch, heads, T, S).
    """
    shape = (batch, heads, query_length, key_value_length)
    index = [
        jnp.arange(size).reshape((1,) * axis + (size,) + (1,) * (3 - axis)) for axis, size in enumerate(shape)
    ]
    return jnp.broadcast_to(survivors(key_words(key), rate, *index), shape)
