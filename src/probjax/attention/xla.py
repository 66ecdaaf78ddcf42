"""Attention in plain JAX: `dense`, one tile, and `tiled`, an online softmax with memory linear in the
sequence.

Both run the same mathematics on a tile of scores (Dao et al., arXiv:2205.14135; Rabe and Staats,
arXiv:2112.05682): forward keeps a running maximum and sum, backward and tangent compute the weights again
from the log-sum-exp.

Two ways through a tile. The quick one hides pairs by adding minus infinity, since XLA's CPU compiler fuses
product, softmax and product of a tile only while no select stands on the scores (docs/cpu-attention.md). A
NaN or infinity that a mask hides would leak through it, so where inputs are not all finite, a conditional
per tile takes the exact way with selects.

The functions of a `plain` call are what JAX differentiates for derivatives of higher order: loops of static
length whose bodies are rematerialised, so that those derivatives need memory linear in the sequence too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from probjax._op import Arrays, Call, axis_sizes, batch_shape
from probjax.attention._chunk import INF, At, Carry, Chunk, clean
from probjax.attention.spec import KEY, QUERY, VALUE, accumulator
from probjax.attention.tiles import Batching, Tiling

Array = jax.Array


@dataclass(frozen=True)
class Xla:
    """The plain-JAX implementation, with the tiling it uses: `Tiling.whole` is the dense one."""

    choose: Callable[[int, int], Tiling]

    def forward(self, call: Call, platform: str | None, operands: Arrays) -> Arrays:
        if _nothing_to_see(call, operands):
            return tuple(_blank_outputs(call, operands))
        run = _Run(call, operands, self.choose, extra=())

        def step(chunk: _Passes) -> tuple[dict[int, Array], tuple[Array, ...]]:
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

        def step(chunk: _Passes) -> tuple[dict[int, Array], tuple[Array, ...]]:
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

        def step(chunk: _Passes) -> tuple[dict[int, Array], tuple[Array, ...]]:
            out, lse, ct_out, ct_lse = chunk.extra
            return chunk.backward(out, lse, ct_out, ct_lse, wanted), ()

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
        self, step: Callable[[_Passes], tuple[dict[int, Array], Arrays]], wanted: dict[int, Array]
    ) -> tuple[dict[int, Array], Arrays]:
        """Runs `step` on each chunk. Returns the sums of its gradients, in operand layout, and its stacked
        results.
        """
        batching = self.batching
        if batching.steps == 1:
            grads, results = step(self._chunk(0))
            return grads, tuple(x.reshape(*batching.batch, *x.shape[1:]) for x in results)
        # Gradients of operands that every chunk shares are summed; the others are stacked like results.
        acc = accumulator(self.operands[QUERY].dtype)
        shared = {
            i: jnp.zeros(self.operands[i].shape, acc)
            for i in wanted
            if not batching.is_full(self.operands[i])
        }

        def body(totals: dict[int, Array], index: Array) -> tuple[dict[int, Array], Any]:
            grads, results = step(self._chunk(index))
            totals = {i: batching.add(total, grads[i], index) for i, total in totals.items()}
            own = {i: g.astype(self.operands[i].dtype) for i, g in grads.items() if i not in totals}
            return totals, (own, results)

        shared, (own, results) = lax.scan(body, shared, jnp.arange(batching.steps, dtype=jnp.int32))
        grads = shared | {i: g.reshape(-1, *g.shape[2:]) for i, g in own.items()}
        return grads, tuple(x.reshape(*batching.batch, *x.shape[2:]) for x in results)

    def _chunk(self, index: Array | int) -> _Passes:
        take = self.batching.take
        operands = [take(x, index) for x in self.operands]
        return _Passes(self.call, self.tiling, operands, [take(x, index) for x in self.extra])


class _Passes(Chunk):
    """The three functions on one chunk."""

    def forward(self) -> tuple[Array, Array]:
        """Output (b, T, N, V) and log-sum-exp (b, T, N)."""
        all_finite = self.all_finite(*self.operands[:3])
        sink = self.sink()

        def row(i: Array | int, carry: Carry) -> Carry:
            def visit(at: At, state: Carry) -> Carry:
                return self.either(all_finite, lambda exact: self._forward_tile(at, state, exact))

            column = (self.b, self.N, self.tiling.rows, 1)
            blank = (
                jnp.full(column, -INF, self.acc),
                jnp.zeros(column, self.acc),
                jnp.zeros((*column[:3], self.V), self.acc),
            )
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

    def _forward_tile(self, at: At, state: Carry, exact: bool) -> Carry:
        """Running maximum, sum of weights and weighted values (b, N, R, ·), after one more tile; None
        before the first.
        """
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
        sink = self.sink()
        sink_move = moves.get(self.spec.sinks_at) if self.spec.sinks_at is not None else None
        key_move, value_move = (jnp.swapaxes(moves[i], 1, 2) if i in moves else None for i in (KEY, VALUE))
        leaf_moves = {i: moves[i] for i in self.leaves() if i in moves}

        def row(i: Array | int, carry: Carry) -> Carry:
            lse_row = self.rows_of(lse[..., None], i)

            def visit(at: At, state: Carry) -> Carry:
                def run(exact: bool) -> Carry:
                    return self._tangent_tile(
                        at, lse_row, moves.get(QUERY), key_move, value_move, leaf_moves, exact
                    )

                return jax.tree.map(jnp.add, state, self.tile_part(at, lambda: self.either(all_finite, run)))

            shape = (self.b, self.N, self.tiling.rows)
            zero = jnp.zeros((*shape, self.V), self.acc), jnp.zeros((*shape, 1), self.acc)
            moved, change = self.over_keys(i, visit, zero)
            if sink is not None and sink_move is not None:
                weight = jnp.exp(sink - jnp.where(lse_row == -INF, INF, lse_row))
                change = change + weight * self.per_head(sink_move)
            out_row = self.rows_of(out, i).astype(self.acc)
            outs, lses = carry
            moved = moved - change * out_row
            outs = self.put_rows(outs, jnp.swapaxes(moved, 1, 2).astype(outs.dtype), i)
            return outs, self.put_rows(lses, jnp.swapaxes(change[..., 0], 1, 2).astype(lses.dtype), i)

        return self.over_rows(row, (jnp.zeros_like(out), jnp.zeros_like(lse)))

    def _tangent_tile(
        self,
        at: At,
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
        dots = {
            i: at.cut(self, i, leaf_moves[i]) if i in leaf_moves else jnp.zeros_like(x)
            for i, x in values.items()
        }
        score, move = jax.jvp(
            lambda r, leaf: self.modify(at, r, leaf, exact), (raw, values), (raw_move, dots)
        )
        weight, hidden = self.weights(score, lse, exact)
        if hidden is not None:
            move = jnp.where(hidden, 0, move)
        change = weight * move
        part = self.weighted_values(self.drop(at, change), at.values(self), hidden)
        if value_move is not None:
            part = part + self.weighted_values(
                self.drop(at, weight), self.columns_of(value_move, at.j), hidden
            )
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
        totals = {i: self.blank_gradient(i) for i in wanted if i != self.spec.sinks_at}

        def row(i: Array | int, totals: Carry) -> Carry:
            lse_row, excess_row = self.rows_of(lse[..., None], i), self.rows_of(excess[..., None], i)
            ct_row = self.rows_of(ct_out, i)
            if self.tiling.rows_overlap:
                # Rows that the tile before covers as well count there; this tile is done first and
                # overwritten.
                again = jnp.arange(self.tiling.rows) + self.tiling.row_start(i) < i * self.tiling.rows
                lse_row = jnp.where(again[:, None], -INF, lse_row)

            def visit(at: At, state: Carry) -> Carry:
                def run(exact: bool) -> dict[int, Array]:
                    return self._backward_tile(at, lse_row, excess_row, ct_row, tuple(totals), exact)

                grads = self.tile_part(at, lambda: self.either(all_finite, run))
                query_part, others = state
                if QUERY in grads:
                    query_part = query_part + grads[QUERY]
                others = {n: self.add_part(n, total, grads[n], at) for n, total in others.items()}
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
        grads = {
            i: jnp.swapaxes(jnp.swapaxes(g, 2, 3), 1, 2) if i in (KEY, VALUE) else g
            for i, g in totals.items()
        }
        if self.spec.sinks_at in wanted:
            sink = self.operands[self.spec.sinks_at]
            weight = jnp.exp(sink.astype(self.acc)[:, None] - jnp.where(empty, INF, lse))
            grad = jnp.sum(-weight * excess, axis=1)
            grads[self.spec.sinks_at] = self.to_batch_of(sink, grad)
        return grads

    def _backward_tile(
        self, at: At, lse: Array, excess: Array, ct: Array, wanted: tuple[int, ...], exact: bool
    ) -> dict[int, Array]:
        query, key, value = at.query(self), at.keys(self), at.values(self)
        leaves = at.leaves(self)
        score, pull = jax.vjp(
            lambda r, leaf: self.modify(at, r, leaf, exact), self.scores(query, key), leaves
        )
        weight, hidden = self.weights(score, lse, exact)
        grads: dict[int, Array] = {}
        if exact and hidden is not None:
            bad_ct = ~jnp.isfinite(ct).all(axis=-1, keepdims=True)
            bad_value = self.per_kv(~jnp.isfinite(value).all(axis=-1))[:, :, None, :]
            ct, value = clean(ct), clean(value)
            ct_weight = self.scores(ct, value) + jnp.where(bad_ct | bad_value, jnp.nan, 0)
            key, query = clean(key), clean(query)
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


TILED = Xla(Tiling.choose)
DENSE = Xla(Tiling.whole)
