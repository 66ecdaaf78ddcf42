"""Kernels of forward and tangent, one program per tile of queries; and one that mends another library's
forward.

What a NaN or an infinity behind a mask would do: a weight of zero times it is NaN, and a matrix product
hands that to every row of a tile. Selects on every tile would cost all calls for the few that need it, so
each program computes its sums plainly, looks once whether they are finite, and if not computes them again,
one key (or query) after the other and without matrix products, where a select takes out what is hidden.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from probjax.attention import _triton
from probjax.attention._flash import INF, Array, Tile, clean, finite, spoilt
from probjax.attention._site import NEGATIVE, Plan, Refs, Rows, Site, certain_hidden, loop, site


def forward(plan: Plan, refs: Refs) -> None:
    at, i = site(plan, refs, plan.cut.row_tiles, plan.frame.N, last_first=bool(plan.frame.mask))
    frame = plan.frame
    queries = at.queries(i)
    q = at.load("q", queries, plan.D)
    width = _triton.ceil_power(plan.V)
    state = (
        jnp.full((queries.count,), NEGATIVE, jnp.float32),
        jnp.zeros((queries.count,), jnp.float32),
        jnp.zeros((queries.count, width), jnp.float32),
    )

    def visit(j: Any, hides: bool, state: Any) -> Any:
        keys = at.keys(j)
        tile = at.tile(queries, keys)
        visible = at.visible(tile, keys) if hides else None
        score = frame.scores(tile, at.dot(q, at.load("k", keys, plan.D), (1, 1)), visible)
        top = jnp.maximum(state[0], frame.level(jnp.max(score, axis=1)))
        shift = jnp.where(top == NEGATIVE, np.float32(0), top) if hides else top
        weight = frame.power(score, shift[:, None])
        fade = frame.between(state[0], shift)
        total = state[1] * fade + jnp.sum(weight, axis=1)
        v = at.load("v", keys, plan.V)
        part = at.dot(frame.drop(tile, weight).astype(v.dtype), v, (1, 0))
        return top, total, state[2] * fade[:, None] + part

    top, total, acc = at.over_keys(i, visit, state)
    if at.can_spoil:
        acc = lax.cond(spoilt(acc), lambda: _exact_values(at, i, top), lambda: acc)
    empty = top == NEGATIVE
    if frame.sinks >= 0:
        sink = frame.level_of_sink(at.read("operand", frame.sinks, (at.head,)).astype(jnp.float32))
        sink = jnp.broadcast_to(sink, top.shape)
        new = jnp.maximum(top, sink)
        fade = frame.between(top, new)
        total = total * fade + frame.between(sink, new)
        acc = acc * fade[:, None]
        top = new
    some = jnp.where(empty, np.float32(1), total) if frame.can_hide else total
    out = acc * (np.float32(1) / some)[:, None]
    lse = frame.lse_of(top, some)
    if frame.can_hide:
        out = jnp.where(empty[:, None], np.float32(0), out)
        lse = jnp.where(empty, NEGATIVE, lse)
    at.save("out", queries, out, plan.V)
    at.save("lse", queries, lse, None)


def _exact_values(at: Site, i: Any, top: Array) -> Array:
    """The weighted sum of values again, key by key: what is hidden adds nothing, what is seen adds what it
    is.
    """
    plan, frame = at.plan, at.frame
    queries = at.queries(i)
    shift = jnp.where(top == NEGATIVE, np.float32(0), top)[:, None]

    def visit(j: Any, acc: Array) -> Array:
        keys = at.keys(j, count=1)
        tile = at.tile(queries, keys)
        score = frame.scores(tile, at.line("q", queries, "k", keys, plan.D), at.visible(tile, keys))
        weight = frame.drop(tile, frame.power(score, shift))
        v = at.load("v", keys, plan.V).astype(jnp.float32)
        part = jnp.where(finite(v), weight * clean(v), v)
        return acc + jnp.where(score == NEGATIVE, np.float32(0), part)

    acc = jnp.zeros((queries.count, _triton.ceil_power(plan.V)), jnp.float32)
    return loop(np.int32(0), np.int32(plan.frame.S), visit, acc)


def repair(plan: Plan, refs: Refs, step: int) -> None:
    """Output and log-sum-exp of another kernel (`out_before`, `lse_before`: the same memory as `out` and
    `lse`) made right where something hidden got into them. One program per head.

    What is hidden from one query is seen by another, whose output it makes non-finite: queries `step` - 1,
    2 `step` - 1, ... and the last see between them all keys that any query sees, so only those are looked at.
    """
    at, _ = site(plan, refs, 1, plan.frame.N)

    def look(n: Any, found: Array) -> Array:
        i = jnp.minimum((n + np.int32(1)) * np.int32(step), np.int32(plan.frame.T)) - np.int32(1)
        bad = spoilt(at.load("out_before", at.queries(i, count=1), plan.V))
        return jnp.maximum(found, jnp.where(bad, np.int32(1), np.int32(0)))

    def redo() -> Array:
        def tile(i: Any, done: Array) -> Array:
            _exact_forward(at, i)
            return done

        return loop(np.int32(0), np.int32(plan.cut.row_tiles), tile, jnp.int32(0))

    bad = loop(np.int32(0), np.int32(-(-plan.frame.T // step)), look, jnp.int32(0))
    lax.cond(bad > 0, redo, lambda: jnp.int32(0))


def _exact_forward(at: Site, i: Any) -> None:
    """Forward for a tile of queries, key by key."""
    plan, frame = at.plan, at.frame
    queries = at.queries(i)

    def score_of(j: Any) -> Array:
        keys = at.keys(j, count=1)
        tile = at.tile(queries, keys)
        return frame.scores(tile, at.line("q", queries, "k", keys, plan.D), at.visible(tile, keys))

    def statistics(j: Any, state: Any) -> Any:
        score = score_of(j)[:, 0]
        top = jnp.maximum(state[0], frame.level(score))
        shift = jnp.where(top == NEGATIVE, np.float32(0), top)
        return top, state[1] * frame.between(state[0], shift) + frame.power(score, shift)

    state = jnp.full((queries.count,), NEGATIVE, jnp.float32), jnp.zeros((queries.count,), jnp.float32)
    top, total = loop(np.int32(0), np.int32(frame.S), statistics, state)
    acc = _exact_values(at, i, top)
    empty = top == NEGATIVE
    some = jnp.where(empty, np.float32(1), total)
    out = jnp.where(empty[:, None], np.float32(0), acc * (np.float32(1) / some)[:, None])
    at.save("out", queries, out, plan.V)
    at.save("lse", queries, jnp.where(empty, NEGATIVE, frame.lse_of(top, some)), None)


# ----------------------------------------------------------------------------------------------------------
# Tangent


def tangent(plan: Plan, refs: Refs) -> None:
    """Tangents of output and log-sum-exp. Refs of tangents: dq, dk, dv, and `move<n>` of native operands."""
    at, i = site(plan, refs, plan.cut.row_tiles, plan.frame.N, last_first=bool(plan.frame.mask))
    frame = plan.frame
    queries = at.queries(i)
    q = at.load("q", queries, plan.D)
    dq = at.load("dq", queries, plan.D) if "dq" in refs else None
    level = at.frame.level_of(at.stat("lse", queries, INF))

    def visit(j: Any, hides: bool, state: Any) -> Any:
        keys = at.keys(j)
        tile = at.tile(queries, keys)
        k = at.load("k", keys, plan.D)
        raw = at.dot(q, k, (1, 1))
        move = jnp.zeros_like(raw)
        if dq is not None:
            move = move + at.dot(dq, k, (1, 1))
        if "dk" in refs:
            move = move + at.dot(q, at.load("dk", keys, plan.D), (1, 1))
        weight, moved, _ = _moved(at, tile, keys, raw, move, level, hides)
        v = at.load("v", keys, plan.V)
        acc = state[0] + at.dot(frame.drop(tile, moved).astype(v.dtype), v, (1, 0))
        if "dv" in refs:
            acc = acc + at.dot(frame.drop(tile, weight).astype(v.dtype), at.load("dv", keys, plan.V), (1, 0))
        return acc, state[1] + jnp.sum(moved, axis=1)

    shape = (queries.count, _triton.ceil_power(plan.V))
    state = jnp.zeros(shape, jnp.float32), jnp.zeros((queries.count,), jnp.float32)
    acc, change = at.over_keys(i, visit, state)
    if at.can_spoil:
        acc = lax.cond(spoilt(acc), lambda: _exact_tangent(at, i), lambda: acc)
    if f"move{frame.sinks}" in refs:
        sink = at.read("operand", frame.sinks, (at.head,)).astype(jnp.float32)
        move = at.read("move", frame.sinks, (at.head,)).astype(jnp.float32)
        change = change + frame.between(frame.level_of_sink(sink), level) * move
    out = at.load("out", queries, plan.V).astype(jnp.float32)
    at.save("out_move", queries, acc - change[:, None] * out, plan.V)
    at.save("lse_move", queries, change, None)


def _moved(
    at: Site, tile: Tile, keys: Rows, raw: Array, move: Array, level: Array, hides: bool
) -> tuple[Array, Array, Array | None]:
    """Weights of a tile, their tangents (before what the change of the log-sum-exp takes off), what is
    hidden.
    """
    frame = at.frame
    visible = at.visible(tile, keys) if hides else None
    weight, hidden = frame.weights(frame.scores(tile, raw, visible), level[:, None], hides)
    moves = {
        n: frame.term(n, tile, functools.partial(at.read, "move")).astype(jnp.float32)
        for n, step in enumerate(frame.score)
        if f"move{step.operand}" in at.refs
    }
    moved = weight * frame.push(tile, raw, visible, move, moves)
    if hidden is not None:
        moved = jnp.where(hidden, np.float32(0), moved)
    return weight, moved, hidden


def _exact_tangent(at: Site, i: Any) -> Array:
    """The tangent's sum again, key by key."""
    plan, frame = at.plan, at.frame
    queries = at.queries(i)
    level = at.frame.level_of(at.stat("lse", queries, INF))

    def visit(j: Any, acc: Array) -> Array:
        keys = at.keys(j, count=1)
        tile = at.tile(queries, keys)
        raw = at.line("q", queries, "k", keys, plan.D)
        move = jnp.zeros_like(raw)
        if "dq" in at.refs:
            move = move + at.line("dq", queries, "k", keys, plan.D)
        if "dk" in at.refs:
            move = move + at.line("q", queries, "dk", keys, plan.D)
        weight, moved, hidden = _moved(at, tile, keys, raw, move, level, True)
        part = frame.drop(tile, moved) * at.load("v", keys, plan.V).astype(jnp.float32)
        if "dv" in at.refs:
            part = part + frame.drop(tile, weight) * at.load("dv", keys, plan.V).astype(jnp.float32)
        return acc + jnp.where(certain_hidden(hidden), np.float32(0), part)

    acc = jnp.zeros((queries.count, _triton.ceil_power(plan.V)), jnp.float32)
    return loop(np.int32(0), np.int32(plan.frame.S), visit, acc)
