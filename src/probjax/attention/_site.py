"""What all attention kernels have: the place of a program, its reads and writes, and its loops over tiles."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from probjax.attention import _triton
from probjax.attention._flash import INF, Array, Frame, Tile
from probjax.attention._schedule import Cut, Schedule, bounds

Refs = dict[str, Any]
SPREAD = 256  # heads whose keys and values stay in the second-level cache together
GUARD = True  # whether sums are looked at; only for measuring what that costs
NEGATIVE = np.float32(-INF)


@dataclass(frozen=True)
class Plan:
    """One kernel of a call, as known when it is traced."""

    frame: Frame
    groups: tuple[int, ...]  # sizes of the merged batch axes
    leads: dict[str, tuple[int, ...]]  # of each input: its batch axes, in full or 1
    cut: Cut
    along_keys: Schedule
    along_queries: Schedule
    D: int
    V: int
    products: str
    interpret: bool
    # Of a band: one loop that always evaluates the mask. It pays where few tiles are full.
    one_loop: bool = False

    @property
    def batch(self) -> int:
        return int(np.prod(self.groups, dtype=np.int64))

    @property
    def group_size(self) -> int:
        """Query heads of one key/value head."""
        return self.frame.N // self.frame.K

    @property
    def ragged(self) -> bool:
        return bool(self.frame.T % self.cut.rows or self.frame.S % self.cut.columns)


@dataclass(frozen=True)
class Rows:
    """Some rows of an array (batch, length, heads, size): `count` positions of one head, from `start` on."""

    start: Any
    count: int
    length: int
    head: Any

    @property
    def position(self) -> Array:
        return self.start + lax.iota(jnp.int32, self.count)

    @property
    def inside(self) -> Array | None:
        """Which rows exist; None if all do."""
        return None if self.length % self.count == 0 else self.position < np.int32(self.length)


class Site:
    """One program: which batch entry and head it is for, and its refs."""

    def __init__(self, plan: Plan, refs: Refs, entry: Any, head: Any):
        self.plan, self.refs, self.head = plan, refs, head
        self.frame = plan.frame
        self.entry: list[Any] = []
        for size in reversed(plan.groups):
            self.entry.append(lax.rem(entry, np.int32(size)) if size != 1 else np.int32(0))
            entry = lax.div(entry, np.int32(size))
        self.entry.reverse()

    def lead(self, name: str) -> tuple[Any, ...]:
        sizes = self.plan.leads.get(name, self.plan.groups)
        return tuple(np.int32(0) if n == 1 else i for n, i in zip(sizes, self.entry, strict=True))

    # ------------------------------------------------------------------------------------------------------
    # Reads and writes

    def _place(self, name: str, rows: Rows, width: int | None) -> tuple[tuple[Any, ...], Array | None]:
        """Index and mask of rows of an array."""
        inside = rows.inside
        index: tuple[Any, ...] = (*self.lead(name), _triton.span(rows.start, rows.count), rows.head)
        if width is None:
            return index, inside
        padded = _triton.ceil_power(width)
        shape = (rows.count, padded)
        mask = None if inside is None else jnp.broadcast_to(inside[:, None], shape)
        if width != padded:
            column = jnp.broadcast_to((lax.iota(jnp.int32, padded) < np.int32(width))[None, :], shape)
            mask = column if mask is None else mask & column
        # The interpreter wants one type of all indices.
        first: Any = np.int32(0) if self.plan.interpret else 0
        return (*index, _triton.span(first, padded)), mask

    def load(self, name: str, rows: Rows, width: int) -> Array:
        """(rows, width rounded up), zero beyond."""
        index, mask = self._place(name, rows, width)
        return _triton.load(self.refs[name], index, mask, None if mask is None else 0.0)

    def stat(self, name: str, rows: Rows, other: float) -> Array:
        """One number per row."""
        index, mask = self._place(name, rows, None)
        return _triton.load(self.refs[name], index, mask, None if mask is None else other)

    def save(self, name: str, rows: Rows, value: Array, width: int | None) -> None:
        index, mask = self._place(name, rows, width)
        ref = self.refs[name]
        _triton.store(ref, index, value.astype(ref.dtype), mask)

    def read(self, prefix: str, position: int, at: tuple[Any, ...]) -> Array:
        """Entries of a native operand, or of its tangent: see `_flash.Tile`."""
        name = f"{prefix}{position}"
        index: list[Any] = []
        mask = None
        for i, size in zip(at, self.frame.shapes[position], strict=True):
            if size == 1:
                index.append(np.int32(0))
                continue
            index.append(i)
            if self.plan.ragged and jnp.ndim(i) > 0:
                inside = (i >= 0) & (i < np.int32(size))
                mask = inside if mask is None else mask & inside
        shape = np.broadcast_shapes(*(jnp.shape(i) for i in index)) if index else ()
        # Neighbours in memory are neighbours along the last axis: a tile that is turned round is read
        # unturned.
        turn = len(shape) == 2 and min(shape) > 1 and jnp.shape(index[-1]) == (shape[0], 1)
        if turn:
            shape = shape[::-1]
            index = [jnp.swapaxes(i, 0, 1) if jnp.ndim(i) > 0 else i for i in index]
            mask = None if mask is None else jnp.swapaxes(mask, 0, 1)
        index = [jnp.broadcast_to(i, shape) if jnp.ndim(i) > 0 else i for i in index]
        at_all = (*self.lead(name), *index)
        if mask is None:
            found = _triton.load(self.refs[name], at_all)
        else:
            other = False if self.refs[name].dtype == jnp.bool_ else 0
            found = _triton.load(self.refs[name], at_all, jnp.broadcast_to(mask, shape), other)
        return jnp.swapaxes(found, 0, 1) if turn else found

    # ------------------------------------------------------------------------------------------------------
    # Tiles

    def queries(self, i: Any, head: Any = None, count: int | None = None) -> Rows:
        """Tile i of `count` queries (as the plan cuts them)."""
        count = self.plan.cut.rows if count is None else count
        return Rows(i * np.int32(count), count, self.frame.T, self.head if head is None else head)

    def keys(self, j: Any, head: Any = None, count: int | None = None) -> Rows:
        """Tile j of `count` keys, of the key/value head that belongs to a query head."""
        count = self.plan.cut.columns if count is None else count
        head = self.head if head is None else head
        if self.plan.group_size > 1:
            head = lax.div(head, np.int32(self.plan.group_size))
        return Rows(j * np.int32(count), count, self.frame.S, head)

    def tile(self, queries: Rows, keys: Rows, turned: bool = False) -> Tile:
        q, k = queries.position, keys.position
        read = functools.partial(self.read, "operand")
        if turned:
            return Tile(q[None, :], k[:, None], queries.head, read)
        return Tile(q[:, None], k[None, :], queries.head, read)

    def visible(self, tile: Tile, keys: Rows) -> Array | None:
        found = self.frame.visible(tile, bounds=keys.inside is not None)
        if found is None:
            return None
        return jnp.broadcast_to(found, np.broadcast_shapes(tile.query.shape, tile.key.shape))

    def dot(self, a: Array, b: Array, contract: tuple[int, int]) -> Array:
        return _triton.dot(a, b, contract, self.plan.products, self.plan.interpret)

    def line(self, name: str, rows: Rows, other: str, one: Rows, width: int) -> Array:
        """Products of rows with a single row of another array, (rows, 1)."""
        a, b = self.load(name, rows, width), self.load(other, one, width)
        return jnp.sum(a.astype(jnp.float32) * b.astype(jnp.float32), axis=1)[:, None]

    # ------------------------------------------------------------------------------------------------------
    # Loops

    def _walk(
        self,
        plan: Schedule,
        tile: Any,
        along: str,
        count: int,
        visit: Callable[[Any, bool, Any], Any],
        carry: Any,
    ) -> Any:
        """`visit(other tile, hides, carry)` for the tiles of a schedule; where `hides`, the mask counts."""
        always = self.frame.bias_hides  # then no tile is known to hold nothing hidden
        if count == 1:  # straight on: a loop would hide from the compiler that it runs once
            return visit(np.int32(0), self.hides, carry)
        if plan.everything and self.frame.S % self.plan.cut.columns == 0:
            return loop(np.int32(0), np.int32(count), lambda j, c: visit(j, always, c), carry)
        if plan.kind == "table":
            assert plan.array is not None
            ref = self.refs[f"along_{along}"]
            hidden, full = (_triton.load(ref, (tile, np.int32(n))) for n in (0, 1))
            at = lambda n: _triton.load(ref, (tile, n + np.int32(2)))  # noqa: E731
            carry = loop(np.int32(0), hidden, lambda n, c: visit(at(n), True, c), carry)
            return loop(hidden, hidden + full, lambda n, c: visit(at(n), always, c), carry)
        if plan.kind == "band":
            begin, full, full_stop, stop = bounds(plan, self.plan.cut, tile, along)
            if self.plan.one_loop:
                return loop(begin, stop, lambda j, c: visit(j, True, c), carry)
        else:
            ref = self.refs[f"along_{along}"]
            lead = self.lead(f"along_{along}")
            begin, full, full_stop, stop = (_triton.load(ref, (*lead, tile, np.int32(n))) for n in range(4))
        if not always:
            carry = loop(full, full_stop, lambda j, c: visit(j, False, c), carry)
            before = full - begin

            def hidden_visit(n: Any, c: Any) -> Any:
                j = begin + n
                return visit(jnp.where(n < before, j, j + (full_stop - full)), True, c)

            return loop(np.int32(0), before + (stop - full_stop), hidden_visit, carry)
        return loop(begin, stop, lambda j, c: visit(j, True, c), carry)

    def over_keys(self, i: Any, visit: Callable[[Any, bool, Any], Any], carry: Any) -> Any:
        return self._walk(self.plan.along_keys, i, "keys", self.plan.cut.column_tiles, visit, carry)

    def over_queries(self, j: Any, visit: Callable[[Any, bool, Any], Any], carry: Any) -> Any:
        return self._walk(self.plan.along_queries, j, "queries", self.plan.cut.row_tiles, visit, carry)

    @property
    def hides(self) -> bool:
        """Whether the mask counts on a tile of which nothing else is known."""
        return self.frame.can_hide or bool(self.frame.S % self.plan.cut.columns)

    @property
    def can_spoil(self) -> bool:
        """Whether something hidden could reach a result."""
        return GUARD and self.frame.can_hide


def loop(start: Any, stop: Any, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    def cast(i: Any, state: Any) -> Any:  # with 64-bit types on, JAX counts in those
        return body(lax.convert_element_type(i, jnp.int32), state)

    return lax.fori_loop(start, stop, cast, carry)


def site(plan: Plan, refs: Refs, tiles: int, heads: int, last_first: bool = False) -> tuple[Site, Any]:
    """The program's place in a grid of batch entries, heads and tiles; tiles vary fastest."""
    pid = _triton.program_id()
    tile: Any = np.int32(0)
    spread = math.gcd(heads * plan.batch, SPREAD) if last_first and plan.one_loop else 1
    if tiles > 1 and spread > 1:
        # The long ones of many heads before the short ones of any, so that the last to run are short.
        size = np.int32(spread)
        inner, rest = lax.rem(pid, size), lax.div(pid, size)
        tile = np.int32(tiles - 1) - lax.rem(rest, np.int32(tiles))
        pid = lax.div(rest, np.int32(tiles)) * size + inner
    elif tiles > 1:
        tile, pid = lax.rem(pid, np.int32(tiles)), lax.div(pid, np.int32(tiles))
        if last_first:  # the longest first, so that no processor ends alone
            tile = np.int32(tiles - 1) - tile
    head = lax.rem(pid, np.int32(heads)) if heads > 1 else jnp.int32(0)
    entry = lax.div(pid, np.int32(heads)) if heads > 1 else pid
    return Site(plan, refs, entry, head), tile


def certain_hidden(found: Array | None) -> Array:
    assert found is not None  # asked for with `hides`
    return found
