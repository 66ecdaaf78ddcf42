"""Mask functions as hand-written kernels need them: what they look at, their tiles, whether they are
bands.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

TILE = 64
"""Queries and keys of one tile of a table."""

MIXED_TILES = 2**12
"""Most different tiles that are neither all visible nor all hidden: 16 MiB of constants in a program."""


def on_host() -> contextlib.AbstractContextManager[object]:
    """What is known while tracing is computed by the processor, unless JAX was told to leave that out."""
    try:
        return jax.default_device(jax.devices("cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()


_PAIRS = 2**31  # more are not evaluated one by one while a program is traced


@functools.lru_cache(maxsize=256)
def looks_at(fn: Callable, arrays: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[bool, bool]:
    """Whether `fn(batch, head, q_index, kv_index, *arrays)` uses its batch and its head index."""
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    jaxpr = jax.make_jaxpr(fn)(scalar, scalar, scalar, scalar, *arrays).jaxpr
    read = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
    batch, head = (id(v) in read for v in jaxpr.invars[:2])
    return batch, head


@functools.lru_cache(maxsize=64)
def tile_table(fn: Callable, query_length: int, key_length: int) -> tuple[np.ndarray, np.ndarray] | None:
    """A function of query and key index on every pair, tile by tile.

    Returns:
      Kinds, int32 (query tiles, key tiles): 0 where all pairs of a tile are hidden, 1 where all are visible,
      2 + n where they are those of tile n. And these tiles, bool (count or 1, TILE, TILE), False beyond the
      lengths. None if there are too many pairs or tiles.
    """
    if query_length * key_length > _PAIRS:
        return None
    rows, columns = math.ceil(query_length / TILE), math.ceil(key_length / TILE)
    kinds = np.zeros((rows, columns), np.int32)
    numbers: dict[bytes, int] = {}
    for i, (seen, inside) in enumerate(_tile_rows(fn, query_length, key_length)):
        kinds[i] = (seen | ~inside).all(axis=(1, 2))
        seen &= inside
        for j in np.flatnonzero(seen.any(axis=(1, 2)) & (kinds[i] == 0)):
            kinds[i, j] = 2 + numbers.setdefault(seen[j].tobytes(), len(numbers))
        if len(numbers) > MIXED_TILES:
            return None
    tiles = np.frombuffer(b"".join(numbers) or bytes(TILE * TILE), bool).reshape(-1, TILE, TILE)
    return kinds, tiles


def _tile_rows(fn: Callable, query_length: int, key_length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each row of tiles, (key tiles, TILE, TILE): which pairs the function shows, and which exist."""
    columns = math.ceil(key_length / TILE)
    keys = np.arange(columns * TILE, dtype=np.int32)
    zero = np.int32(0)

    @jax.jit
    def of_row(queries: Array) -> Array:
        on_keys = jax.vmap(lambda q, k: fn(zero, zero, q, k), (None, 0))
        # Beyond the lengths the last index again: a function need not be defined there.
        seen = jax.vmap(on_keys, (0, None))(queries, jnp.minimum(keys, key_length - 1))
        return seen.astype(bool).reshape(TILE, columns, TILE).swapaxes(0, 1)

    for start in range(0, query_length, TILE):
        queries = np.arange(start, start + TILE, dtype=np.int32)
        with jax.ensure_compile_time_eval(), on_host():
            seen = np.array(of_row(np.minimum(queries, query_length - 1)))
        inside = (queries < query_length)[:, None, None] & (keys < key_length).reshape(1, columns, TILE)
        yield seen, inside.swapaxes(0, 1)


@functools.lru_cache(maxsize=64)
def as_band(fn: Callable, query_length: int, key_length: int) -> tuple[int, int] | None:
    """The smallest and largest distance j - i that a function of query and key index shows, if that is all it
    says: so a causal mask written as a function costs what `masks.Causal` costs.

    The function is evaluated on every pair.

    Returns:
      (low, high), with low > high where it shows nothing. None where it is no band, or has too many pairs.
    """
    if query_length * key_length > _PAIRS:
        return None
    # The first row and the first column hold every distance once: they name the only band possible.
    zero = np.int32(0)
    with jax.ensure_compile_time_eval(), on_host():
        row = jax.vmap(lambda k: fn(zero, zero, zero, k))(np.arange(key_length, dtype=np.int32))
        column = jax.vmap(lambda q: fn(zero, zero, q, zero))(np.arange(query_length, dtype=np.int32))
    seen = np.concatenate([np.asarray(column, bool)[:0:-1], np.asarray(row, bool)])
    found = np.flatnonzero(seen)
    low, high = (1, 0) if not found.size else (int(found[0]), int(found[-1]))
    if found.size != (high - low + 1 if found.size else 0):
        return None
    low, high = (low, high) if not found.size else (low - query_length + 1, high - query_length + 1)
    keys = np.arange(key_length)
    for start, (shown, inside) in zip(
        range(0, query_length, TILE), _tile_rows(fn, query_length, key_length), strict=True
    ):
        distance = keys - (start + np.arange(TILE))[:, None]
        whole = shown.swapaxes(0, 1).reshape(TILE, -1)[:, :key_length]
        real = inside.swapaxes(0, 1).reshape(TILE, -1)[:, :key_length]
        if ((whole != ((distance >= low) & (distance <= high))) & real).any():
            return None
    return low, high
