"""How a call is cut: tiles of queries and keys, which of them can be skipped, and chunks of the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from probjax._axes import Groups, merged
from probjax.attention._mask import Mask
from probjax.attention._terms import Bounds

Array = jax.Array

# Measured on 2 cores, S 1024 and 4096, H 8, D 64 (docs/cpu-attention.md): 256 x 256 is the fastest or
# within 5 % of it for forward and backward, plain and causal, and leaves the scores of a tile in cache.
ROWS = 256
SCORES = ROWS * 256
# Scores of one tile over all heads and batch entries at hand: more than this many leave the cache.
CHUNK_SCORES = 2**21


def _even(length: int, wanted: int) -> int:
    """A tile size near `wanted` that cuts `length` into tiles that overlap as little as possible, a
    multiple of 8.
    """
    if length <= wanted:
        return length
    count = math.ceil(length / wanted)
    return min(length, math.ceil(math.ceil(length / count) / 8) * 8)


@dataclass(frozen=True)
class Tiling:
    """Tiles of one call. Tile i of the queries starts at min(i * rows, T - rows): the last one overlaps its
    neighbour.
    """

    query_length: int
    key_length: int
    rows: int
    columns: int

    @classmethod
    def choose(cls, query_length: int, key_length: int) -> Tiling:
        rows = _even(query_length, ROWS)
        columns = _even(key_length, max(256, min(4096, SCORES // max(rows, 1))))
        return cls(query_length, key_length, rows, columns)

    @classmethod
    def whole(cls, query_length: int, key_length: int) -> Tiling:
        return cls(query_length, key_length, query_length, key_length)

    @property
    def row_tiles(self) -> int:
        return math.ceil(self.query_length / self.rows)

    @property
    def column_tiles(self) -> int:
        return math.ceil(self.key_length / self.columns)

    @property
    def columns_overlap(self) -> bool:
        return self.key_length % self.columns != 0

    @property
    def rows_overlap(self) -> bool:
        return self.query_length % self.rows != 0

    def row_start(self, i: Array | int) -> Array | int:
        return _start(i, self.rows, self.query_length)

    def column_start(self, j: Array | int) -> Array | int:
        return _start(j, self.columns, self.key_length)

    def bounds(self) -> Bounds:
        i, j = np.arange(self.row_tiles), np.arange(self.column_tiles)
        first = np.minimum(i * self.rows, self.query_length - self.rows)
        return Bounds(
            query_first=first,
            query_last=first + self.rows - 1,
            key_first=j * self.columns,
            key_last=np.minimum((j + 1) * self.columns, self.key_length) - 1,
            query_length=self.query_length,
            key_length=self.key_length,
        )


def _start(i: Array | int, size: int, length: int) -> Array | int:
    if isinstance(i, int):
        return min(i * size, length - size)
    return jnp.minimum(i * size, length - size)


@dataclass(frozen=True)
class Schedule:
    """Which key tiles query tile i visits: those from `lo[i]` to `hi[i]`, of `table[i]` if there is a table.

    A table is needed where the tiles of a row do not run on; without it, lo and hi are tile numbers.
    """

    lo: Array | np.ndarray  # (row tiles,)
    hi: Array | np.ndarray
    base: np.ndarray  # (row tiles,): `lo` as far as it is known without data
    width: int  # the most tiles that a row visits
    table: np.ndarray | None = None  # (row tiles, width)
    complete: bool = False  # every query tile visits every key tile


def static_live(tiling: Tiling, mask: Mask | None) -> np.ndarray:
    """Which tiles may hold a visible pair, as far as known without data: bool (row tiles, column tiles)."""
    bounds = tiling.bounds()
    return bounds.grid(True) if mask is None else mask.grid(bounds)[0]


def schedule(tiling: Tiling, mask: Mask | None) -> Schedule:
    """The tiles to visit. `mask` holds its arrays for the batch entries at hand: data narrows the list."""
    live = static_live(tiling, mask)
    counts = live.sum(axis=1)
    width = max(int(counts.max(initial=0)), 1)
    start = live.argmax(axis=1)
    end = start + counts
    together = np.arange(live.shape[1])
    table = None
    if not (live == ((together >= start[:, None]) & (together < end[:, None]))).all():
        # A stable sort puts the live tiles first, in order; the rest of a row is never visited.
        table = np.argsort(~live, axis=1, kind="stable")[:, :width].astype(np.int32)
        start, end = np.zeros_like(counts), counts
    lo, hi = start.astype(np.int32), end.astype(np.int32)
    found = None if mask is None else mask.key_range(tiling.bounds())
    if found is None:
        return Schedule(lo, hi, lo, width, table, complete=bool(live.all()))
    first = (found[0] // tiling.columns).astype(jnp.int32)
    last = (-(-found[1] // tiling.columns)).astype(jnp.int32)
    if table is None:
        return Schedule(jnp.maximum(lo, first), jnp.minimum(hi, last), lo, width)
    visited = np.arange(width) < counts[:, None]
    before = jnp.sum(visited & (table < first[:, None]), axis=1, dtype=jnp.int32)
    upto = jnp.sum(visited & (table < last[:, None]), axis=1, dtype=jnp.int32)
    return Schedule(before, upto, lo, width, table)


# ----------------------------------------------------------------------------------------------------------
# Slices. Start indices are int32 whatever the flags of JAX: no axis is longer.

Starts = list[Array | int]


def read(x: Array, starts: Starts, sizes: tuple[int, ...]) -> Array:
    return jax.lax.dynamic_slice(x, [jnp.asarray(s, jnp.int32) for s in starts], sizes)


def add(total: Array, part: Array, starts: Starts) -> Array:
    """Adds `part` into `total` at `starts`."""
    index = [jnp.asarray(s, jnp.int32) for s in starts]
    old = jax.lax.dynamic_slice(total, index, part.shape)
    return jax.lax.dynamic_update_slice(total, old + part.astype(total.dtype), index)


# ----------------------------------------------------------------------------------------------------------
# Chunks of the batch


@dataclass(frozen=True)
class Batching(Groups):
    """Merged batch axes, and how many entries run at a time.

    A chunk is `size` entries of the last group and one of each other.
    """

    size: int
    steps: int

    @classmethod
    def choose(cls, shapes: list[tuple[int, ...]], batch: tuple[int, ...], scores_per_entry: int) -> Batching:
        groups = merged(shapes, batch)
        last = math.prod(batch[a] for a in groups[-1]) if groups else 1
        if not all(isinstance(b, int) for b in batch):  # a symbolic size of jax.export: it cannot be cut
            return cls(batch, groups, last, 1)
        wanted = max(1, CHUNK_SCORES // max(scores_per_entry, 1))
        size = max(d for d in range(1, min(last, wanted) + 1) if last % d == 0)
        return cls(batch, groups, size, math.prod(batch) // size)

    def take(self, x: Array, step: Array | int) -> Array:
        """The part of a merged operand for one step: one batch axis, of `size` or 1."""
        n = len(self.groups)
        if n == 0:
            return x[None]
        if self.steps == 1:
            return x.reshape(math.prod(x.shape[:n]), *x.shape[n:])
        starts, sizes = self._window(x, step)
        part = read(x, starts, sizes)
        return part.reshape(-1, *x.shape[n:])

    def add(self, total: Array, part: Array, step: Array | int) -> Array:
        """Adds the part of one step into a merged operand."""
        starts, sizes = self._window(total, step)
        return add(total, part.reshape(sizes), starts)

    def is_full(self, x: Array) -> bool:
        return x.shape[: len(self.groups)] == self.shape

    def _window(self, x: Array, step: Array | int) -> tuple[Starts, tuple[int, ...]]:
        n = len(self.groups)
        counts = (*self.shape[:-1], self.shape[-1] // self.size)
        index = []
        for count in reversed(counts):
            index.append(step % count)
            step = step // count
        index.reverse()
        starts: Starts = [0] * x.ndim
        sizes = list(x.shape)
        for axis in range(n):
            if x.shape[axis] != 1:
                sizes[axis] = self.size if axis == n - 1 else 1
                starts[axis] = index[axis] * sizes[axis]
        return starts, tuple(sizes)
