"""One chunk of the batch as the plain-JAX implementation sees it: its tiles, its products and its loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from probjax._op import Call
from probjax.attention._mask import Mask
from probjax.attention._terms import Tile
from probjax.attention.dropout import drop
from probjax.attention.spec import KEY, QUERY, VALUE, AttentionSpec, accumulator
from probjax.attention.tiles import Schedule, Starts, Tiling, add, read, schedule

Array = jax.Array
Carry = Any

INF = float("inf")
# Beyond this, products of finite numbers may overflow.
LARGE = 1e15


class Chunk:
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

    # ------------------------------------------------------------------------------------------------------
    # One tile

    def score(self, at: At, exact: bool) -> tuple[Array, Array | None]:
        """Masked scores (b, N, R, C), and which are hidden (exact way only)."""
        score = self.modify(at, self.scores(at.query(self), at.keys(self)), at.leaves(self), exact)
        return score, (score == -INF) if exact and self.spec.can_hide() else None

    def modify(self, at: At, raw: Array, leaves: dict[int, Array], exact: bool) -> Array:
        """Scale operand, biases and mask of one tile, as a differentiable function of scores and bias
        arrays.
        """
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

    def visible(self, at: At, tile: Tile) -> Array | None:
        parts = {
            i: at.cut(self, i, self.operands[i]) for i in self.spec.leaves(self.spec.mask, self.spec.mask_at)
        }
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

    def drop(self, at: At, weight: Array) -> Array:
        """Dropout of weights (or of their cotangents: the mask is its own transpose)."""
        if self.spec.dropout_at is None:
            return weight
        return drop(weight, self.operands[self.spec.dropout_at], self.spec.dropout_rate, at.tile(self))

    def leaves(self) -> list[int]:
        """Positions of the arrays that `modify` is a function of."""
        scale = [] if self.spec.scale_at is None else [self.spec.scale_at]
        return [*self.spec.leaves(self.spec.bias, self.spec.bias_at), *scale]

    # ------------------------------------------------------------------------------------------------------
    # Products. Scores are (b, N, R, C); keys and values (b, K, C, ·); with grouped heads the G query heads
    # of one key/value head are stacked as rows, so that keys and values are never repeated.

    def scores(self, rows: Array, columns: Array) -> Array:
        """rows (b, N, R, X) times columns (b, K, C, X) over X: (b, N, R, C)."""
        return self._ungroup(self._product("bhrx,bhcx->bhrc", self._group(rows), columns))

    def weighted(self, weight: Array, columns: Array, batch: int) -> Array:
        """weight (b, N, R, C) times columns (b, K, C, X) over C: (batch, N, R, X)."""
        return self._ungroup(self._product("bhrc,bhcx->bhrx", self._group(weight), columns, batch))

    def gathered(self, weight: Array, rows: Array, batch: int) -> Array:
        """weight (b, N, R, C) times rows (b, N, R, X) over R and the heads of a group: (batch, K, X, C)."""
        # In this order of axes the product contracts the rows of `rows` turned round, which XLA's CPU
        # compiler runs up to twice as fast as the same product contracting the first axis of the weights.
        rows = jnp.swapaxes(self._group(rows), 2, 3)
        return self._product("bhxr,bhrc->bhxc", rows, self._group(weight), batch)

    def weighted_values(
        self, weight: Array, values: Array, hidden: Array | None, signed: bool = False
    ) -> Array:
        """Weighted sum of values; in the exact way, what is hidden or has no weight adds nothing even where
        it is NaN.
        """
        if hidden is None:
            return self.weighted(weight, values, self.b)
        total = self.weighted(weight, clean(values), self.b)
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
        """A product per head; an operand that all batch entries share is not repeated. Sums over the batch
        if `batch` is 1.
        """
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

    # ------------------------------------------------------------------------------------------------------
    # Loops, slices and sums

    def over_rows(self, body: Callable[[Array | int, Carry], Carry], carry: Carry) -> Carry:
        """Query tiles from the last to the first: see `backward` for why in this order."""
        count = self.tiling.row_tiles
        if count == 1:
            return body(0, carry)
        return lax.fori_loop(np.int32(0), np.int32(count), lambda n, c: body(count - 1 - n, c), carry)

    def over_keys(self, i: Array | int, visit: Callable[[At, Carry], Carry], carry: Carry) -> Carry:
        """The key tiles that query tile i may see."""
        plan = self.schedule
        if self.one_tile:
            return visit(At(i, 0), carry)
        if plan.complete:
            return lax.fori_loop(np.int32(0), np.int32(plan.width), lambda j, c: visit(At(i, j), c), carry)
        lo, hi, base = (jnp.asarray(x)[i] for x in (plan.lo, plan.hi, plan.base))
        row = None if plan.table is None else jnp.asarray(plan.table)[i]

        def tile(n: Array) -> Array:
            return n if row is None else row[n]

        if not self.plain:
            return lax.fori_loop(lo, hi, lambda n, c: visit(At(i, tile(n)), c), carry)

        # JAX differentiates loops of static length: those tiles that data excludes are visited and add
        # nothing.
        def body(step: Array, c: Carry) -> Carry:
            n = base + step
            return visit(At(i, tile(n), live=(n >= lo) & (n < hi)), c)

        return lax.fori_loop(np.int32(0), np.int32(plan.width), body, carry)

    def tile_part(self, at: At, fn: Callable[[], Carry]) -> Carry:
        """What one tile adds. In a plain call derivatives compute it again instead of storing it.

        The conditional is inside of what is computed again: outside, JAX would store whole keys and values
        per tile.
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
        """Whether nothing can leak from hidden pairs: no NaN, no infinity and no number that overflows in a
        product.

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
        return x * self.spec.scale

    def blank_gradient(self, i: int) -> Array:
        x = self.operands[i]
        if i == QUERY:
            return jnp.zeros_like(x)
        if i in (KEY, VALUE):  # kept as (b, K, X, S): a product adds whole columns
            return jnp.zeros((x.shape[0], x.shape[2], x.shape[3], x.shape[1]), self.acc)
        # What has both lengths is written tile by tile, never summed over tiles.
        axes = self.call.operands[i].axes
        written = all(
            n > 1 and name in axes for name, n in (("T", self.axis(i, "T")), ("S", self.axis(i, "S")))
        )
        return jnp.zeros(x.shape, x.dtype if written else self.acc)

    def axis(self, i: int, name: str) -> int:
        """Size of a named axis of an operand; 1 if it has none."""
        axes = self.call.operands[i].axes
        return self.operands[i].shape[1 + axes.index(name)] if name in axes else 1

    def add_part(self, i: int, total: Array, part: Array, at: At) -> Array:
        """Adds the gradient of one tile to that of the whole operand."""
        starts = [0, 0, 0, self.tiling.column_start(at.j)] if i in (KEY, VALUE) else at.starts(self, i)
        return add(total, part, starts)

    def to_batch_of(self, x: Array, grad: Array) -> Array:
        return grad if x.shape[0] == grad.shape[0] else jnp.sum(grad, axis=0, keepdims=True)

    def sink(self) -> Array | None:
        return None if self.spec.sinks_at is None else self.per_head(self.operands[self.spec.sinks_at])

    def per_head(self, x: Array) -> Array:
        return x.astype(self.acc)[:, :, None, None]

    def per_kv(self, x: Array) -> Array:
        """(b, K, ·) repeated to the query heads: (b, N, ·)."""
        return x if self.N == self.K else jnp.repeat(x, self.N // self.K, axis=1)


@dataclass(frozen=True)
class At:
    """Tile (i, j) of one chunk; `live` where it may be one that holds nothing."""

    i: Array | int
    j: Array | int
    live: Array | None = None

    def query(self, chunk: Chunk) -> Array:
        return chunk.scaled(chunk.rows_of(chunk.operands[QUERY], self.i))

    def keys(self, chunk: Chunk) -> Array:
        return chunk.columns_of(chunk.keys, self.j)

    def values(self, chunk: Chunk) -> Array:
        return chunk.columns_of(chunk.values, self.j)

    def leaves(self, chunk: Chunk) -> dict[int, Array]:
        return {i: self.cut(chunk, i, chunk.operands[i]) for i in chunk.leaves()}

    def starts(self, chunk: Chunk, i: int) -> Starts:
        """Where the part of operand i that belongs to this tile begins."""
        begin = {"T": chunk.tiling.row_start(self.i), "S": chunk.tiling.column_start(self.j)}
        out: Starts = [0]
        for name in chunk.call.operands[i].axes:
            out.append(begin[name] if name in begin and chunk.axis(i, name) > 1 else 0)
        return out

    def cut(self, chunk: Chunk, i: int, x: Array) -> Array:
        """The part of an array shaped like operand i that belongs to this tile; floats in the accumulator's
        dtype.
        """
        size = {"T": chunk.tiling.rows, "S": chunk.tiling.columns}
        axes = chunk.call.operands[i].axes
        sizes = [
            size[n] if n in size and full > 1 else full for n, full in zip(axes, x.shape[1:], strict=True)
        ]
        part = read(x, self.starts(chunk, i), (x.shape[0], *sizes))
        return part.astype(chunk.acc) if jnp.issubdtype(x.dtype, jnp.floating) else part

    def tile(self, chunk: Chunk) -> Tile:
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


def clean(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, 0)
