"""Kernels of backward: gradients of queries, of keys and values, of all three at once, and of biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from probjax.attention import _triton
from probjax.attention._flash import INF, Array, Tile, spoilt
from probjax.attention._program import ScoreOp
from probjax.attention._schedule import bounds
from probjax.attention._site import NEGATIVE, Plan, Refs, Rows, Site, certain_hidden, loop, site


def excess(at: Site, queries: Rows, ct: Array, lse: Array) -> Array:
    """Per row: what the gradients of softmax and log-sum-exp take off each d weight."""
    plan = at.plan
    found = jnp.zeros((queries.count,), jnp.float32)
    if not plan.frame.certain:
        out = at.load("out", queries, plan.V)
        found = jnp.sum(ct.astype(jnp.float32) * out.astype(jnp.float32), axis=1)
    if "ct_lse" in at.refs:
        found = found - at.stat("ct_lse", queries, 0.0)
    if plan.frame.can_hide:
        found = jnp.where(lse == NEGATIVE, np.float32(0), found)
    return found


@dataclass(frozen=True)
class _Gradient:
    """Gradients of a tile of scores."""

    ct_raw: Array  # of the products of queries and keys, before scaling
    ct_terms: dict[int, Array]
    weight: Array  # after dropout
    hidden: Array | None


def _score_gradient(
    at: Site, tile: Tile, keys: Rows, raw: Array, ct_weight: Array, level: Array, off: Array, hides: bool
) -> _Gradient:
    """From the products of queries and keys, and of cotangents and values; `level` and `off` broadcast."""
    frame = at.frame
    visible = at.visible(tile, keys) if hides else None
    weight, hidden = frame.weights(frame.scores(tile, raw, visible), level, hides)
    ct = weight * (frame.drop(tile, ct_weight) - off)
    if frame.certain:
        ct = jnp.where(jnp.isnan(ct), ct, -weight * off)
    if hidden is not None:
        ct = jnp.where(hidden, np.float32(0), ct)
    ct_raw, ct_terms = frame.pull(tile, raw, visible, ct)
    return _Gradient(ct_raw, ct_terms, frame.drop(tile, weight), hidden)


def query_gradient(plan: Plan, refs: Refs) -> None:
    """Gradients of queries, and of score operands that are one number per head (`partial<n>`)."""
    at, i = site(plan, refs, plan.cut.row_tiles, plan.frame.N, last_first=bool(plan.frame.mask))
    frame = plan.frame
    queries = at.queries(i)
    q, ct = at.load("q", queries, plan.D), at.load("ct", queries, plan.V)
    lse = at.stat("lse", queries, INF)
    level = at.frame.level_of(lse)[:, None]
    off = excess(at, queries, ct, lse)
    at.save("excess", queries, off, None)
    numbers = [n for n in range(len(frame.score)) if f"partial{n}" in refs]

    def visit(j: Any, hides: bool, state: Any) -> Any:
        acc, sums = state
        keys = at.keys(j)
        k = at.load("k", keys, plan.D)
        raw, ct_weight = at.dot(q, k, (1, 1)), at.dot(ct, at.load("v", keys, plan.V), (1, 1))
        found = _score_gradient(at, at.tile(queries, keys), keys, raw, ct_weight, level, off[:, None], hides)
        acc = acc + at.dot(found.ct_raw.astype(k.dtype), k, (1, 0))
        return acc, tuple(s + jnp.sum(found.ct_terms[n]) for s, n in zip(sums, numbers, strict=True))

    acc = jnp.zeros((queries.count, _triton.ceil_power(plan.D)), jnp.float32)
    state = acc, tuple(jnp.float32(0) for _ in numbers)
    acc, sums = at.over_keys(i, visit, state)
    if at.can_spoil:
        acc = lax.cond(spoilt(acc), lambda: _exact_query_gradient(at, i), lambda: acc)
    at.save("grad_q", queries, acc * np.float32(frame.scale), plan.D)
    for n, total in zip(numbers, sums, strict=True):
        _triton.store(refs[f"partial{n}"], (*at.entry, at.head, i), total)


def _exact_query_gradient(at: Site, i: Any) -> Array:
    """The gradients of queries again, key by key."""
    plan = at.plan
    queries = at.queries(i)
    lse = at.stat("lse", queries, INF)
    level, off = (
        at.frame.level_of(lse)[:, None],
        excess(at, queries, at.load("ct", queries, plan.V), lse)[:, None],
    )

    def visit(j: Any, acc: Array) -> Array:
        keys = at.keys(j, count=1)
        raw, ct_weight = at.line("q", queries, "k", keys, plan.D), at.line("ct", queries, "v", keys, plan.V)
        found = _score_gradient(at, at.tile(queries, keys), keys, raw, ct_weight, level, off, True)
        part = found.ct_raw * at.load("k", keys, plan.D).astype(jnp.float32)
        return acc + jnp.where(certain_hidden(found.hidden), np.float32(0), part)

    acc = jnp.zeros((queries.count, _triton.ceil_power(plan.D)), jnp.float32)
    return loop(np.int32(0), np.int32(plan.frame.S), visit, acc)


def key_gradient(plan: Plan, refs: Refs) -> None:
    """Gradients of keys and values: summed over queries and the heads of a group."""
    at, j = site(plan, refs, plan.cut.column_tiles, plan.frame.K)
    group = plan.group_size
    first = at.head * np.int32(group) if group > 1 else at.head
    keys = at.keys(j, first)
    k, v = at.load("k", keys, plan.D), at.load("v", keys, plan.V)

    def of_head(g: Any, state: Any) -> Any:
        head = first + g

        def visit(i: Any, hides: bool, state: Any) -> Any:
            queries = at.queries(i, head)
            q, ct = at.load("q", queries, plan.D), at.load("ct", queries, plan.V)
            level = at.frame.level_of(at.stat("lse", queries, INF))
            off = at.stat("excess", queries, 0.0)
            _, state = _columns(at, queries, keys, q, k, v, ct, level, off, hides, state)
            return state

        return at.over_queries(j, visit, state)

    state = _no_columns(plan, keys)
    one_head = group == 1
    state = of_head(np.int32(0), state) if one_head else loop(np.int32(0), np.int32(group), of_head, state)
    if at.can_spoil:
        state = lax.cond(spoilt(*state), lambda: _exact_columns(at, j, first, False), lambda: state)
    at.save("grad_k", keys, state[0] * np.float32(plan.frame.scale), plan.D)
    at.save("grad_v", keys, state[1], plan.V)


Columns = tuple[Array, Array]


def _no_columns(plan: Plan, keys: Rows) -> Columns:
    shapes = [(keys.count, _triton.ceil_power(width)) for width in (plan.D, plan.V)]
    return jnp.zeros(shapes[0], jnp.float32), jnp.zeros(shapes[1], jnp.float32)


def _columns(
    at: Site,
    queries: Rows,
    keys: Rows,
    q: Array,
    k: Array,
    v: Array,
    ct: Array,
    level: Array,
    off: Array,
    hides: bool,
    state: Columns,
) -> tuple[Array, Columns]:
    """Adds a tile of queries to the gradients of a tile of keys and values; returns d raw as well. The tile
    is turned round, (keys, queries), so that no product needs a transposed left side.
    """
    tile = at.tile(queries, keys, turned=True)
    raw, ct_weight = at.dot(k, q, (1, 1)), at.dot(v, ct, (1, 1))
    found = _score_gradient(at, tile, keys, raw, ct_weight, level[None, :], off[None, :], hides)
    acc_v = state[1] + at.dot(found.weight.astype(ct.dtype), ct, (1, 0))
    acc_k = state[0] + at.dot(found.ct_raw.astype(q.dtype), q, (1, 0))
    return found.ct_raw, (acc_k, acc_v)


def _exact_columns(at: Site, j: Any, first: Any, with_queries: bool) -> Columns:
    """The gradients of keys and values again, query by query; those of queries too if they are asked for."""
    plan, group = at.plan, at.plan.group_size
    keys = at.keys(j, first)

    def visit(n: Any, state: Columns) -> Columns:
        head, i = (
            (first, n) if group == 1 else (first + lax.rem(n, np.int32(group)), lax.div(n, np.int32(group)))
        )
        queries = at.queries(i, head, count=1)
        tile = at.tile(queries, keys, turned=True)
        raw, ct_weight = at.line("k", keys, "q", queries, plan.D), at.line("v", keys, "ct", queries, plan.V)
        ct = at.load("ct", queries, plan.V)
        lse = at.stat("lse", queries, INF)
        off = excess(at, queries, ct, lse) if with_queries else at.stat("excess", queries, 0.0)
        found = _score_gradient(
            at, tile, keys, raw, ct_weight, at.frame.level_of(lse)[None, :], off[None, :], True
        )
        zero = np.float32(0)
        part = found.ct_raw * at.load("q", queries, plan.D).astype(jnp.float32)
        acc_k = state[0] + jnp.where(certain_hidden(found.hidden), zero, part)
        part = found.weight * ct.astype(jnp.float32)
        acc_v = state[1] + jnp.where(certain_hidden(found.hidden), zero, part)
        if with_queries:
            part = found.ct_raw * at.load("k", keys, plan.D).astype(jnp.float32)
            grad = jnp.sum(jnp.where(certain_hidden(found.hidden), zero, part), axis=0, keepdims=True)
            at.save("grad_q", queries, grad * np.float32(plan.frame.scale), plan.D)
        return acc_k, acc_v

    return loop(np.int32(0), np.int32(plan.frame.T * group), visit, _no_columns(plan, keys))


def one(plan: Plan, refs: Refs) -> None:
    """All three gradients of the heads whose keys are one tile: scores are computed once."""
    at, _ = site(plan, refs, 1, plan.frame.K)
    group, tiles = plan.group_size, plan.cut.row_tiles
    first = at.head * np.int32(group) if group > 1 else at.head
    keys = at.keys(np.int32(0), first)
    k, v = at.load("k", keys, plan.D), at.load("v", keys, plan.V)

    def visit(n: Any, state: Columns) -> Columns:
        head = first + lax.div(n, np.int32(tiles)) if group > 1 else first
        i = lax.rem(n, np.int32(tiles)) if group > 1 else n
        queries = at.queries(i, head)
        q, ct = at.load("q", queries, plan.D), at.load("ct", queries, plan.V)
        lse = at.stat("lse", queries, INF)
        off = excess(at, queries, ct, lse)
        ct_raw, state = _columns(at, queries, keys, q, k, v, ct, at.frame.level_of(lse), off, at.hides, state)
        grad = at.dot(ct_raw.astype(k.dtype), k, (0, 0))
        at.save("grad_q", queries, grad * np.float32(plan.frame.scale), plan.D)
        return state

    state = _no_columns(plan, keys)
    many = group * tiles
    state = visit(np.int32(0), state) if many == 1 else loop(np.int32(0), np.int32(many), visit, state)
    if at.can_spoil:
        # What is not finite in a cotangent, a query or a value shows in the sums; in a key it may not.
        state = lax.cond(
            spoilt(*state, k), lambda: _exact_columns(at, np.int32(0), first, True), lambda: state
        )
    at.save("grad_k", keys, state[0] * np.float32(plan.frame.scale), plan.D)
    at.save("grad_v", keys, state[1], plan.V)


def bias_gradient(
    plan: Plan, refs: Refs, n: int, shape: tuple[int, ...], row_tiles: int, shifted: bool
) -> None:
    """The gradient of the operand of score step n, which is one number per pair, summed over what it is
    broadcast over.

    Args:
      plan: the plan.
      refs: with `grad` for the result.
      n: the score step.
      shape: sizes of the gradient: batch axes, then heads, queries and keys, each in full or 1.
      row_tiles: how many tiles of queries there are in this call.
      shifted: whether `refs["first"]` says which tile of queries is the first.
    """
    frame, cut = plan.frame, plan.cut
    batch = len(plan.groups)
    lead, (heads, rows, columns) = shape[:batch], shape[batch:]
    pid = _triton.program_id()

    def split(number: Any, size: int) -> tuple[Any, Any]:
        if size == 1:
            return np.int32(0), number
        return lax.rem(number, np.int32(size)), lax.div(number, np.int32(size))

    own_columns, pid = split(pid, cut.column_tiles if columns > 1 else 1)
    own_rows, pid = split(pid, row_tiles if rows > 1 else 1)
    own_head, pid = split(pid, heads)
    own: list[Any] = []
    for size in reversed(lead):
        index, pid = split(pid, size)
        own.append(index)
    own.reverse()
    # What is summed over: tiles, heads of a group, and batch entries.
    rest = (
        1 if columns > 1 else cut.column_tiles,
        1 if rows > 1 else row_tiles,
        frame.N // heads,
        *(1 if size > 1 else full for size, full in zip(reversed(lead), reversed(plan.groups), strict=True)),
    )
    first = _triton.load(refs["first"], (np.int32(0),)) if shifted else np.int32(0)
    many = int(np.prod(rest, dtype=np.int64))
    tile_shape = (cut.rows if rows > 1 else 1, cut.columns if columns > 1 else 1)

    def visit(number: Any, acc: Array) -> Array:
        j, number = split(number, rest[0])
        i, number = split(number, rest[1])
        g, number = split(number, rest[2])
        at = Site(plan, refs, np.int32(0), own_head * np.int32(frame.N // heads) + g)
        entry = []
        for size, full, index in zip(reversed(lead), rest[3:], reversed(own), strict=True):
            e, number = split(number, full)
            entry.append(index if size > 1 else e)
        at.entry = list(reversed(entry))
        queries = at.queries(first + (own_rows if rows > 1 else i))
        keys = at.keys(own_columns if columns > 1 else j)
        q, ct = at.load("q", queries, plan.D), at.load("ct", queries, plan.V)
        raw = at.dot(q, at.load("k", keys, plan.D), (1, 1))
        ct_weight = at.dot(ct, at.load("v", keys, plan.V), (1, 1))
        level = at.frame.level_of(at.stat("lse", queries, INF))[:, None]
        off = at.stat("excess", queries, 0.0)[:, None]
        found = _score_gradient(at, at.tile(queries, keys), keys, raw, ct_weight, level, off, True)
        part = found.ct_terms[n]
        if tile_shape[0] == 1:
            part = jnp.sum(part, axis=0, keepdims=True)
        if tile_shape[1] == 1:
            part = jnp.sum(part, axis=1, keepdims=True)
        return acc + part

    stop: Any = np.int32(many)
    along = plan.along_keys
    if along.kind == "band" and not along.everything and rows > 1 and columns > 1:
        begin, _, _, end = bounds(along, cut, first + own_rows, "keys")
        stop = jnp.where((own_columns >= begin) & (own_columns < end), stop, np.int32(0))
    acc = loop(np.int32(0), stop, visit, jnp.zeros(tile_shape, jnp.float32))
    row = own_rows * np.int32(cut.rows) + lax.iota(jnp.int32, tile_shape[0])[:, None]
    column = own_columns * np.int32(cut.columns) + lax.iota(jnp.int32, tile_shape[1])[None, :]
    row, column = jnp.broadcast_to(row, tile_shape), jnp.broadcast_to(column, tile_shape)
    mask = (row < np.int32(rows)) & (column < np.int32(columns))
    ref = refs["grad"]
    _triton.store(ref, (*own, own_head, row, column), acc.astype(ref.dtype), mask)


NUMBER_STEPS = (ScoreOp.MULTIPLY, ScoreOp.SOFT_CAP)
PAIR_STEPS = (ScoreOp.ADD_DENSE, ScoreOp.ADD_DIAGONAL)
