"""Attention in plain JAX: `dense`, one tile, and `tiled`, an online softmax with memory linear in the sequence.

Both run the same mathematics on a tile of scores (Dao et al., arXiv:2205.14135; Rabe and Staats, arXiv:2112.05682):
forward keeps a running maximum and sum, backward and tangent compute the weights again from the log-sum-exp.

Two ways through a tile. The quick one hides pairs by adding minus infinity, since XLA's CPU compiler fuses product, softmax
and product of a tile only while no select stands on the scores (docs/cpu-attention.md). A NaN or infinity that a mask hides
would leak through it, so where inputs are not all finite, a conditional per tile takes the exact way with selects.

The functions of a `plain` call are what JAX differentiates for derivatives of higher order: loops of static length whose
bodies are rematerialised, so that those derivatives need memory linear in the sequence too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from probjax._op import Arrays, Call, axis_sizes, batch_shape
from probjax.attention._terms import Tile
from probjax.attention.dropout import survivors
from probjax.attention.masks import Mask
from probjax.attention.spec import KEY, QUERY, VALUE, AttentionSpec, accumulator
from probjax.attention.tiles import Batching, Schedule, Starts, Tiling, add, read, schedule

Array = jax.Array
Carry = Any

INF = float("inf")
# Beyond this, products of finite numbers may overflow.
LARGE = 1e15


@dataclass(frozen=True)
class Xla:
    """The plain-JAX implementation, with the tiling it uses: `Tiling.whole` is the dense one."""

    choose: Callable[[int, int], Tiling]

    def forward(self, call: Call, platform: str | None, operands: Arrays) -> Arrays:
        if _nothing_to_see(call, operands):
            return tuple(_blank_outputs(call, operands))
        run = _Run(call, operands, self.choose, extra=())

        def step(chunk: _Chunk) -> tuple[dict[int, Array], tuple[Array, ...]]:
            return {}, chunk.forward()

        _, outputs = run.over_batch(step, {})
        return tuple(x.astype(o.dtype) for x, o in zip(outputs, call.outputs, strict=True))

    def tangent(
        self, call: Call, platform: str | None, operands: Arrays, outputs: Arrays, tangents: dict[int, Array]
    ) -> Arrays:
        if _nothing_to_see(call, operands):
            return tuple(jnp.zeros_like(x) for x in outputs)
        active = tuple(tangents)
        run = _Run(call, operands, self.choose, extra=(*outputs, *tangents.values()))

        def step(chunk: _Chunk) -> tuple[dict[int, Array], tuple[Array, ...]]:
            out, lse, *moves = chunk.extra
            return {}, chunk.tangent(out, lse, dict(zip(active, moves, strict=True)))

        _, moved = run.over_batch(step, {})
        return tuple(x.astype(o.dtype) for x, o in zip(moved, call.outputs, strict=True))

    def backward(
        self,
        call: Call,
        platform: str | None,
        operands: Arrays,
        outputs: Arrays,
        cotangents: tuple[Array | None, ...],
        wanted: tuple[int, ...],
    ) -> Arrays:
        if _nothing_to_see(call, operands):
            return tuple(jnp.zeros_like(operands[i]) for i in wanted)
        given = tuple(
            jnp.zeros_like(x) if ct is None else ct for x, ct in zip(outputs, cotangents, strict=True)
        )
        run = _Run(call, operands, self.choose, extra=(*outputs, *given))

        def step(chunk: _Chunk) -> tuple[dict[int, Array], tuple[Array, ...]]:
            return chunk.backward(*chunk.extra, wanted), ()

        grads, _ = run.over_batch(step, {i: operands[i] for i in wanted})
        return tuple(grads[i].astype(operands[i].dtype).reshape(operands[i].shape) for i in wanted)


def _nothing_to_see(call: Call, operands: Arrays) -> bool:
    """No output entry, or no key: everything is zero."""
    sizes = axis_sizes(call, operands)
    return 0 in (*batch_shape(call, operands), sizes["T"], sizes["S"], sizes["N"])


def _blank_outputs(call: Call, operands: Arrays) -> list[Array]:
    sizes, batch = axis_sizes(call, operands), batch_shape(call, operands)
    fill = (0.0, -INF)
    return [
        jnp.full(batch + tuple(sizes[a] for a in output.axes), value, output.dtype)
        for output, value in zip(call.outputs, fill, strict=True)
    ]


class _Run:
    """One call on whole arrays: merges the batch, and runs it chunk by chunk."""

    def __init__(self, call: Call, operands: Arrays, choose: Callable[[int, int], Tiling], extra: Arrays):
        self.call = call
        sizes = axis_sizes(call, operands)
        self.tiling = choose(sizes["T"], sizes["S"])
        batch = batch_shape(call, (*operands,))
        n = len(batch)
        everything = (*operands, *extra)
        if extra:
            batch = tuple(max(b, *(x.shape[i] for x in extra)) for i, b in enumerate(batch))
        scores = sizes["N"] * self.tiling.rows * self.tiling.columns
        self.batching = Batching.choose([x.shape[:n] for x in everything], batch, scores)
        self.operands = [self.batching.merge(x) for x in operands]
        self.extra = [self.batching.merge(x) for x in extra]
        self.plain = call.spec.plain

    def over_batch(
        self, step: Callable[[_Chunk], tuple[dict[int, Array], Arrays]], wanted: dict[int, Array]
    ) -> tuple[dict[int, Array], Arrays]:
        """Runs `step` on each chunk. Returns the sums of its gradients, in operand layout, and its stacked results."""
        batching = self.batching
        if batching.steps == 1:
            grads, results = step(self._chunk(0))
            return grads, tuple(x.reshape(*batching.batch, *x.shape[1:]) for x in results)
        # Gradients of operands that every chunk shares are summed; the others are stacked like results.
        acc = accumulator(self.operands[QUERY].dtype)
        shared = {i: jnp.zeros(self.operands[i].shape, acc) for i in wanted if not batching.is_full(self.operands[i])}

        def body(totals: dict[int, Array], index: Array) -> tuple[dict[int, Array], Any]:
            grads, results = step(self._chunk(index))
            totals = {i: batching.add(total, grads[i], index) for i, total in totals.items()}
            own = {i: g.astype(self.operands[i].dtype) for i, g in grads.items() if i not in totals}
            return totals, (own, results)

        shared, (own, results) = lax.scan(body, shared, jnp.arange(batching.steps, dtype=jnp.int32))
        grads = shared | {i: g.reshape(-1, *g.shape[2:]) for i, g in own.items()}
        return grads, tuple(x.reshape(*batching.batch, *x.shape[2:]) for x in results)

    def _chunk(self, index: Array | int) -> _Chunk:
        take = self.batching.take
        operands = [take(x, index) for x in self.operands]
        return _Chunk(self.call, self.tiling, operands, [take(x, index) for x in self.extra])


class _Chunk:
    """Attention of some batch entries: every array has one batch axis, of full size b or 1."""

    def __init__(self, call: Call, tiling: Tiling, operands: list[Array], extra: list[Array]):
        self.call, self.tiling, self.operands, self.extra = call, tiling, operands, extra
        self.spec: AttentionSpec = call.spec
        self.plain = self.spec.plain
        q, k, v = operands[:3]
        self.b = max(x.shape[0] for x in (*operands, *extra))
        self.T, self.N, _ = q.shape[1:]
        self.S, self.K, _ = k.shape[1:]
        self.V = v.shape[-1]
        self.acc = accumulator(q.dtype)
        bias = self.spec.bias_of(operands)
        self.select = self.spec.can_hide() and (self.plain or (bias is not None and bias.needs_select))
        self.quick = not self.spec.can_hide()  # nothing hidden, nothing can leak
        # One key has weight 1 whatever its score: its gradient is then zero exactly, not up to rounding.
        self.certain = self.S == 1 and self.spec.sinks_at is None and self.spec.dropout_rate == 0.0
        self.one_tile = tiling.row_tiles * tiling.column_tiles == 1
        mask = self.spec.mask_of(operands)
        self.schedule: Schedule = schedule(tiling, mask)
        self.keys = jnp.swapaxes(k, 1, 2)  # (b, K, S, D): each tile is then a contiguous block per head
        self.values = jnp.swapaxes(v, 1, 2)

    # ----------------------------------------------------------------------------------------------------------------
    # The three functions

    def forward(self) -> tuple[Array, Array]:
        """Output (b, T, N, V) and log-sum-exp (b, T, N)."""
        all_finite = self.all_finite(*self.operands[:3])
        sink = self._sink()

        def row(i: Array | int, carry: Carry) -> Carry:
            def visit(at: _At, state: Carry) -> Carry:
                return self.either(all_finite, lambda exact: self._forward_tile(at, state, exact))

            column = (self.b, self.N, self.tiling.rows, 1)
            blank = jnp.full(column, -INF, self.acc), jnp.zeros(column, self.acc)
            blank = (*blank, jnp.zeros((*column[:3], self.V), self.acc))
            top, total, out = self.over_keys(i, visit, None if self.one_tile else blank)
            empty = top == -INF
            if sink is not None:
                new = jnp.maximum(top, sink)
                shift = jnp.where(new == -INF, 0, new)
                fade = jnp.exp(top - shift)
                top, total, out = new, total * fade + jnp.exp(sink - shift), out * fade
            out = jnp.where(empty, 0, out / jnp.where(empty, 1, total))
            lse = jnp.where(empty, -INF, top + jnp.log(jnp.where(empty, 1, total)))
            outs, lses = carry
            outs = self.put_rows(outs, jnp.swapaxes(out, 1, 2).astype(outs.dtype), i)
            return outs, self.put_rows(lses, jnp.swapaxes(lse[..., 0], 1, 2), i)

        out_type, lse_type = (o.dtype for o in self.call.outputs)
        outs = jnp.zeros((self.b, self.T, self.N, self.V), out_type)
        return self.over_rows(row, (outs, jnp.zeros((self.b, self.T, self.N), lse_type)))

    def _forward_tile(self, at: _At, state: Carry, exact: bool) -> Carry:
        """Running maximum, sum of weights and weighted values (b, N, R, ·), after one more tile; None before the first."""
        score, hidden = self.score(at, exact)
        new = jnp.max(score, axis=-1, keepdims=True)
        if state is not None:
            new = jnp.maximum(state[0], new)
        shift = jnp.where(new == -INF, 0, new)
        weight = jnp.exp(score - shift)
        total = jnp.sum(weight, axis=-1, keepdims=True)
        part = self.weighted_values(self.drop(at, weight), at.values(self), hidden, signed=True)
        if state is None:
            return new, total, part
        fade = jnp.exp(state[0] - shift)
        return new, state[1] * fade + total, state[2] * fade + part

    def tangent(self, out: Array, lse: Array, moves: dict[int, Array]) -> tuple[Array, Array]:
        """Tangents of output and log-sum-exp, linear in `moves`, the tangents of operands."""
        all_finite = self.all_finite(*self.operands[:3], *(m for i, m in moves.items() if i <= VALUE))
        sink = self._sink()
        sink_move = moves.get(self.spec.sinks_at) if self.spec.sinks_at is not None else None
        key_move, value_move = (jnp.swapaxes(moves[i], 1, 2) if i in moves else None for i in (KEY, VALUE))
        leaf_moves = {i: moves[i] for i in self.leaves() if i in moves}

        def row(i: Array | int, carry: Carry) -> Carry:
            lse_row = self.rows_of(lse[..., None], i)

            def visit(at: _At, state: Carry) -> Carry:
                def run(exact: bool) -> Carry:
                    return self._tangent_tile(at, lse_row, moves.get(QUERY), key_move, value_move, leaf_moves, exact)

                return jax.tree.map(jnp.add, state, self.tile_part(at, lambda: self.either(all_finite, run)))

            shape = (self.b, self.N, self.tiling.rows)
            zero = jnp.zeros((*shape, self.V), self.acc), jnp.zeros((*shape, 1), self.acc)
            moved, change = self.over_keys(i, visit, zero)
            if sink is not None and sink_move is not None:
                weight = jnp.exp(sink - jnp.where(lse_row == -INF, INF, lse_row))
                change = change + weight * self._per_head(sink_move)
            out_row = self.rows_of(out, i).astype(self.acc)
            outs, lses = carry
            moved = moved - change * out_row
            outs = self.put_rows(outs, jnp.swapaxes(moved, 1, 2).astype(outs.dtype), i)
            return outs, self.put_rows(lses, jnp.swapaxes(change[..., 0], 1, 2).astype(lses.dtype), i)

        return self.over_rows(row, (jnp.zeros_like(out), jnp.zeros_like(lse)))

    def _tangent_tile(
        self,
        at: _At,
        lse: Array,
        query_move: Array | None,
        key_move: Array | None,
        value_move: Array | None,
        leaf_moves: dict[int, Array],
        exact: bool,
    ) -> tuple[Array, Array]:
        query, key = at.query(self), at.keys(self)
        raw = self.scores(query, key)
        raw_move = jnp.zeros_like(raw)
        if query_move is not None:
            raw_move = raw_move + self.scores(self.scaled(self.rows_of(query_move, at.i)), key)
        if key_move is not None:
            raw_move = raw_move + self.scores(query, self.columns_of(key_move, at.j))
        values = at.leaves(self)
        dots = {i: at.cut(self, i, leaf_moves[i]) if i in leaf_moves else jnp.zeros_like(x) for i, x in values.items()}
        score, move = jax.jvp(lambda r, leaf: self.modify(at, r, leaf, exact), (raw, values), (raw_move, dots))
        weight, hidden = self.weights(score, lse, exact)
        if hidden is not None:
            move = jnp.where(hidden, 0, move)
        change = weight * move
        part = self.weighted_values(self.drop(at, change), at.values(self), hidden)
        if value_move is not None:
            part = part + self.weighted_values(self.drop(at, weight), self.columns_of(value_move, at.j), hidden)
        return part, jnp.sum(change, axis=-1, keepdims=True)

    def backward(
        self, out: Array, lse: Array, ct_out: Array, ct_lse: Array, wanted: tuple[int, ...]
    ) -> dict[int, Array]:
        """Gradients of the wanted operands, in their layout with one batch axis."""
        all_finite = self.all_finite(*self.operands[:3], ct_out)
        empty = lse == -INF
        # Softmax and log-sum-exp together: d score = weight * (d weight - excess).
        excess = jnp.sum(ct_out.astype(self.acc) * out.astype(self.acc), axis=-1) - ct_lse.astype(self.acc)
        if self.certain:
            excess = -ct_lse.astype(self.acc)
        excess = jnp.where(empty, 0, excess)
        totals = {i: self._blank_gradient(i) for i in wanted if i != self.spec.sinks_at}

        def row(i: Array | int, totals: Carry) -> Carry:
            lse_row, excess_row = self.rows_of(lse[..., None], i), self.rows_of(excess[..., None], i)
            ct_row = self.rows_of(ct_out, i)
            if self.tiling.rows_overlap:
                # Rows that the tile before covers as well count there; this tile is done first and overwritten.
                again = jnp.arange(self.tiling.rows) + self.tiling.row_start(i) < i * self.tiling.rows
                lse_row = jnp.where(again[:, None], -INF, lse_row)

            def visit(at: _At, state: Carry) -> Carry:
                def run(exact: bool) -> dict[int, Array]:
                    return self._backward_tile(at, lse_row, excess_row, ct_row, tuple(totals), exact)

                grads = self.tile_part(at, lambda: self.either(all_finite, run))
                query_part, others = state
                if QUERY in grads:
                    query_part = query_part + grads[QUERY]
                others = {n: self._add_part(n, total, grads[n], at) for n, total in others.items()}
                return query_part, others

            others = {n: t for n, t in totals.items() if n != QUERY}
            shape = (self.operands[QUERY].shape[0], self.N, self.tiling.rows, self.operands[QUERY].shape[-1])
            blank = jnp.zeros(shape, self.acc) if QUERY in totals else jnp.zeros((), self.acc)
            query_part, others = self.over_keys(i, visit, (blank, others))
            if QUERY in totals:
                part = jnp.swapaxes(self.scaled(query_part), 1, 2).astype(totals[QUERY].dtype)
                others = others | {QUERY: self.put_rows(totals[QUERY], part, i)}
            return others

        if totals:
            totals = self.over_rows(row, totals)
        grads = {i: jnp.swapaxes(jnp.swapaxes(g, 2, 3), 1, 2) if i in (KEY, VALUE) else g for i, g in totals.items()}
        if self.spec.sinks_at in wanted:
            sink = self.operands[self.spec.sinks_at]
            weight = jnp.exp(sink.astype(self.acc)[:, None] - jnp.where(empty, INF, lse))
            grad = jnp.sum(-weight * excess, axis=1)
            grads[self.spec.sinks_at] = self._to_batch_of(sink, grad)
        return grads

    def _backward_tile(
        self, at: _At, lse: Array, excess: Array, ct: Array, wanted: tuple[int, ...], exact: bool
    ) -> dict[int, Array]:
        query, key, value = at.query(self), at.keys(self), at.values(self)
        leaves = at.leaves(self)
        score, pull = jax.vjp(lambda r, leaf: self.modify(at, r, leaf, exact), self.scores(query, key), leaves)
        weight, hidden = self.weights(score, lse, exact)
        grads: dict[int, Array] = {}
        if exact and hidden is not None:
            bad_ct = ~jnp.isfinite(ct).all(axis=-1, keepdims=True)
            bad_value = self._per_kv(~jnp.isfinite(value).all(axis=-1))[:, :, None, :]
            ct, value = _clean(ct), _clean(value)
            ct_weight = self.scores(ct, value) + jnp.where(bad_ct | bad_value, jnp.nan, 0)
            key, query = _clean(key), _clean(query)
            ct_score = jnp.where(hidden, 0, weight * (self.drop(at, ct_weight) - excess))
            value_weight = jnp.where(bad_ct & ~hidden, jnp.nan, weight)
        else:
            ct_weight = self.scores(ct, value)
            ct_score = weight * (self.drop(at, ct_weight) - excess)
            value_weight = weight
        if self.certain:
            ct_score = jnp.where(jnp.isnan(ct_score), ct_score, -weight * excess)
        ct_raw, ct_leaves = pull(ct_score)
        if QUERY in wanted:
            grads[QUERY] = self.weighted(ct_raw, key, self.operands[QUERY].shape[0])
        if KEY in wanted:
            grads[KEY] = self.gathered(ct_raw, query, self.operands[KEY].shape[0])
        if VALUE in wanted:
            grads[VALUE] = self.gathered(self.drop(at, value_weight), ct, self.operands[VALUE].shape[0])
        grads.update({i: g for i, g in ct_leaves.items() if i in wanted})
        return grads

    # ----------------------------------------------------------------------------------------------------------------
    # One tile

    def score(self, at: _At, exact: bool) -> tuple[Array, Array | None]:
        """Masked scores (b, N, R, C), and which are hidden (exact way only)."""
        score = self.modify(at, self.scores(at.query(self), at.keys(self)), at.leaves(self), exact)
        return score, (score == -INF) if exact and self.spec.can_hide() else None

    def modify(self, at: _At, raw: Array, leaves: dict[int, Array], exact: bool) -> Array:
        """Scale operand, biases and mask of one tile, as a differentiable function of scores and bias arrays."""
        spec, tile = self.spec, at.tile(self)
        visible = self.visible(at, tile)
        score = raw
        if visible is not None and exact:
            score = jnp.where(visible, score, 0)  # so that derivatives of what is hidden are zero, not NaN
        if spec.scale_at is not None:
            score = score * leaves[spec.scale_at].reshape(-1, 1, 1, 1)
        bias = spec.bias_of(leaves)
        if bias is not None:
            score = bias.apply(score, tile, visible)
        if visible is None:
            return score
        if exact:
            return jnp.where(visible, score, -INF)
        # Behind a barrier, or XLA turns the sum back into a select on the scores.
        return score + lax.optimization_barrier(jnp.where(visible, 0.0, -INF).astype(score.dtype))

    def visible(self, at: _At, tile: Tile) -> Array | None:
        parts = {i: at.cut(self, i, self.operands[i]) for i in self.spec.leaves(self.spec.mask, self.spec.mask_at)}
        mask: Mask | None = self.spec.mask_of(parts)
        visible = None if mask is None else mask.visible(tile)
        if self.tiling.columns_overlap:
            # Keys that the tile before covers as well count there.
            fresh = (tile.key >= at.j * self.tiling.columns)[None, None, None, :]
            visible = fresh if visible is None else visible & fresh
        return visible

    def weights(self, score: Array, lse: Array, exact: bool) -> tuple[Array, Array | None]:
        """Softmax weights from scores and log-sum-exp; a row without a visible key has none."""
        weight = jnp.exp(score - jnp.where(lse == -INF, INF, lse))
        if not exact or not self.spec.can_hide():
            return weight, None
        hidden = (score == -INF) | (lse == -INF)
        return jnp.where(hidden, 0, weight), hidden

    def drop(self, at: _At, weight: Array) -> Array:
        """Dropout of weights (or of their cotangents: the mask is its own transpose)."""
        rate = self.spec.dropout_rate
        if rate == 0.0:
            return weight
        tile = at.tile(self)
        words = self.operands[self.spec.dropout_at].reshape(-1, 1, 1, 1, 2)
        keep = survivors(
            words,
            rate,
            tile.batch[:, None, None, None],
            tile.head[:, None, None],
            tile.query[:, None],
            tile.key,
        )
        return jnp.where(keep, weight * (1.0 / (1.0 - rate) if rate < 1.0 else 0.0), 0)

    def leaves(self) -> list[int]:
        """Positions of the arrays that `modify` is a function of."""
        scale = [] if self.spec.scale_at is None else [self.spec.scale_at]
        return [*self.spec.leaves(self.spec.bias, self.spec.bias_at), *scale]

    # ----------------------------------------------------------------------------------------------------------------
    # Products. Scores are (b, N, R, C); keys and values (b, K, C, ·); with grouped heads the G query heads of one
    # key/value head are stacked as rows, so that keys and values are never repeated.

    def scores(self, rows: Array, columns: Array) -> Array:
        """rows (b, N, R, X) times columns (b, K, C, X) over X: (b, N, R, C)."""
        return self._ungroup(self._product("bhrx,bhcx->bhrc", self._group(rows), columns))

    def weighted(self, weight: Array, columns: Array, batch: int) -> Array:
        """weight (b, N, R, C) times columns (b, K, C, X) over C: (batch, N, R, X)."""
        return self._ungroup(self._product("bhrc,bhcx->bhrx", self._group(weight), columns, batch))

    def gathered(self, weight: Array, rows: Array, batch: int) -> Array:
        """weight (b, N, R, C) times rows (b, N, R, X) over R and the heads of a group: (batch, K, X, C)."""
        # In this order of axes the product contracts the rows of `rows` turned round, which XLA's CPU compiler runs
        # up to twice as fast as the same product contracting the first axis of the weights.
        rows = jnp.swapaxes(self._group(rows), 2, 3)
        return self._product("bhxr,bhrc->bhxc", rows, self._group(weight), batch)

    def weighted_values(self, weight: Array, values: Array, hidden: Array | None, signed: bool = False) -> Array:
        """Weighted sum of values; in the exact way, what is hidden or has no weight adds nothing even where it is NaN."""
        if hidden is None:
            return self.weighted(weight, values, self.b)
        total = self.weighted(weight, _clean(values), self.b)
        seen = jnp.where(hidden, 0.0, 1.0).astype(self.acc) * jnp.ones_like(weight)
        if not signed:
            bad = self.weighted(seen, (~jnp.isfinite(values)).astype(self.acc), self.b)
            return jnp.where(bad > 0, jnp.nan, total)
        # A visible infinity stays one.
        kinds = jnp.concatenate([jnp.isnan(values), values == INF, values == -INF], axis=-1).astype(self.acc)
        nan, up, down = jnp.split(self.weighted(seen, kinds, self.b) > 0, 3, axis=-1)
        total = total + jnp.where(up, INF, 0) + jnp.where(down, -INF, 0)
        return jnp.where(nan, jnp.nan, total)

    def _group(self, x: Array) -> Array:
        if self.N == self.K:
            return x
        return x.reshape(x.shape[0], self.K, -1, x.shape[-1])

    def _ungroup(self, x: Array) -> Array:
        if self.N == self.K:
            return x
        return x.reshape(x.shape[0], self.N, -1, x.shape[-1])

    def _product(self, subscripts: str, a: Array, b: Array, batch: int | None = None) -> Array:
        """A product per head; an operand that all batch entries share is not repeated. Sums over the batch if `batch` is 1."""
        left, rest = subscripts.split(",")
        right, result = rest.split("->")
        shared = max(a.shape[0], b.shape[0])
        if a.shape[0] != shared:
            a, left = a[0], left[1:]
        if b.shape[0] != shared:
            b, right = b[0], right[1:]
        total = batch == 1 and shared != 1
        out = jnp.einsum(
            f"{left},{right}->{result[1:] if total else result}",
            a,
            b,
            precision=self.spec.precision,
            preferred_element_type=self.acc,
        )
        return out[None] if total else out

    # ----------------------------------------------------------------------------------------------------------------
    # Loops, slices and sums

    def over_rows(self, body: Callable[[Array | int, Carry], Carry], carry: Carry) -> Carry:
        """Query tiles from the last to the first: see `backward` for why in this order."""
        count = self.tiling.row_tiles
        if count == 1:
            return body(0, carry)
        return lax.fori_loop(np.int32(0), np.int32(count), lambda n, c: body(count - 1 - n, c), carry)

    def over_keys(self, i: Array | int, visit: Callable[[_At, Carry], Carry], carry: Carry) -> Carry:
        """The key tiles that query tile i may see."""
        plan = self.schedule
        if self.one_tile:
            return visit(_At(i, 0), carry)
        if plan.complete:
            return lax.fori_loop(np.int32(0), np.int32(plan.width), lambda j, c: visit(_At(i, j), c), carry)
        table, lo, hi = (jnp.asarray(x)[i] for x in (plan.table, plan.lo, plan.hi))
        if not self.plain:
            return lax.fori_loop(lo, hi, lambda n, c: visit(_At(i, table[n]), c), carry)

        def body(n: Array, c: Carry) -> Carry:
            return visit(_At(i, table[n], live=(n >= lo) & (n < hi)), c)

        return lax.fori_loop(np.int32(0), np.int32(plan.width), body, carry)

    def tile_part(self, at: _At, fn: Callable[[], Carry]) -> Carry:
        """What one tile adds. In a plain call derivatives compute it again instead of storing it.

        The conditional is inside of what is computed again: outside, JAX would store whole keys and values per tile.
        """
        if not self.plain:
            return fn()
        if at.live is None:
            return jax.checkpoint(fn)()
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(fn))
        return jax.checkpoint(lambda: lax.cond(at.live, fn, lambda: zeros))()

    def either(self, all_finite: Array | None, run: Callable[[bool], Carry]) -> Carry:
        """`run(exact)` by the way that fits this call."""
        if all_finite is None:
            return run(self.select)
        return lax.cond(all_finite, lambda: run(False), lambda: run(True))

    def all_finite(self, *arrays: Array) -> Array | None:
        """Whether nothing can leak from hidden pairs: no NaN, no infinity and no number that overflows in a product.

        None where the way through the tiles does not depend on it.
        """
        if self.select or self.quick:
            return None
        # A maximum is NaN if anything is, and three times as fast as a conjunction of `isfinite` on CPU.
        return jnp.stack([jnp.max(jnp.abs(x)) for x in arrays]).max() < LARGE

    def rows_of(self, x: Array, i: Array | int) -> Array:
        """Rows of tile i of (b, T, N, X): (b, N, R, X)."""
        part = lax.dynamic_slice_in_dim(x, self.tiling.row_start(i), self.tiling.rows, 1)
        return jnp.swapaxes(part, 1, 2).astype(self.acc)

    def columns_of(self, x: Array, j: Array | int) -> Array:
        """Columns of tile j of (b, K, S, X): (b, K, C, X)."""
        part = lax.dynamic_slice_in_dim(x, self.tiling.column_start(j), self.tiling.columns, 2)
        return part.astype(self.acc)

    def put_rows(self, total: Array, part: Array, i: Array | int) -> Array:
        """Writes rows (b, R, ...) of tile i into (b, T, ...)."""
        return lax.dynamic_update_slice_in_dim(total, part, self.tiling.row_start(i), 1)

    def scaled(self, x: Array) -> Array:
        return x if self.spec.scale is None else x * self.spec.scale

    def _blank_gradient(self, i: int) -> Array:
        x = self.operands[i]
        if i == QUERY:
            return jnp.zeros_like(x)
        if i in (KEY, VALUE):  # kept as (b, K, X, S): a product adds whole columns
            return jnp.zeros((x.shape[0], x.shape[2], x.shape[3], x.shape[1]), self.acc)
        # What has both lengths is written tile by tile, never summed over tiles.
        axes = self.call.operands[i].axes
        written = all(n > 1 and name in axes for name, n in (("T", self._axis(i, "T")), ("S", self._axis(i, "S"))))
        return jnp.zeros(x.shape, x.dtype if written else self.acc)

    def _axis(self, i: int, name: str) -> int:
        """Size of a named axis of an operand; 1 if it has none."""
        axes = self.call.operands[i].axes
        return self.operands[i].shape[1 + axes.index(name)] if name in axes else 1

    def _add_part(self, i: int, total: Array, part: Array, at: _At) -> Array:
        """Adds the gradient of one tile to that of the whole operand."""
        starts = [0, 0, 0, self.tiling.column_start(at.j)] if i in (KEY, VALUE) else at.starts(self, i)
        return add(total, part, starts)

    def _to_batch_of(self, x: Array, grad: Array) -> Array:
        return grad if x.shape[0] == grad.shape[0] else jnp.sum(grad, axis=0, keepdims=True)

    def _sink(self) -> Array | None:
        return None if self.spec.sinks_at is None else self._per_head(self.operands[self.spec.sinks_at])

    def _per_head(self, x: Array) -> Array:
        return x.astype(self.acc)[:, :, None, None]

    def _per_kv(self, x: Array) -> Array:
        """(b, K, ·) repeated to the query heads: (b, N, ·)."""
        return x if self.N == self.K else jnp.repeat(x, self.N // self.K, axis=1)


@dataclass(frozen=True)
class _At:
    """Tile (i, j) of one chunk; `live` where it may be one that holds nothing."""

    i: Array | int
    j: Array | int
    live: Array | None = None

    def query(self, chunk: _Chunk) -> Array:
        return chunk.scaled(chunk.rows_of(chunk.operands[QUERY], self.i))

    def keys(self, chunk: _Chunk) -> Array:
        return chunk.columns_of(chunk.keys, self.j)

    def values(self, chunk: _Chunk) -> Array:
        return chunk.columns_of(chunk.values, self.j)

    def leaves(self, chunk: _Chunk) -> dict[int, Array]:
        return {i: self.cut(chunk, i, chunk.operands[i]) for i in chunk.leaves()}

    def starts(self, chunk: _Chunk, i: int) -> Starts:
        """Where the part of operand i that belongs to this tile begins."""
        begin = {"T": chunk.tiling.row_start(self.i), "S": chunk.tiling.column_start(self.j)}
        axes = chunk.call.operands[i].axes
        return [0] + [begin.get(n, 0) if chunk._axis(i, n) > 1 else 0 for n in axes]

    def cut(self, chunk: _Chunk, i: int, x: Array) -> Array:
        """The part of an array shaped like operand i that belongs to this tile; floats in the accumulator's dtype."""
        size = {"T": chunk.tiling.rows, "S": chunk.tiling.columns}
        axes = chunk.call.operands[i].axes
        sizes = [size[n] if n in size and full > 1 else full for n, full in zip(axes, x.shape[1:], strict=True)]
        part = read(x, self.starts(chunk, i), (x.shape[0], *sizes))
        return part.astype(chunk.acc) if jnp.issubdtype(x.dtype, jnp.floating) else part

    def tile(self, chunk: _Chunk) -> Tile:
        tiling, at = chunk.tiling, chunk.spec.index_at
        if at is None:
            batch, head = jnp.zeros(1, jnp.int32), jnp.arange(chunk.N, dtype=jnp.int32)
        else:
            batch, head = chunk.operands[at], chunk.operands[at + 1][0]
        return Tile(
            batch=batch,
            head=head,
            query=jnp.arange(tiling.rows, dtype=jnp.int32) + tiling.row_start(self.i),
            key=jnp.arange(tiling.columns, dtype=jnp.int32) + tiling.column_start(self.j),
            query_length=chunk.T,
            key_length=chunk.S,
            heads=chunk.N,
            kv_heads=chunk.K,
        )


def _clean(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, 0)


TILED = Xla(Tiling.choose)
DENSE = Xla(Tiling.whole)
