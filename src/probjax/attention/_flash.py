"""The mathematics of attention on one tile of scores, for kernels that keep tiles on chip.

Nothing here knows a kernel language: a `Frame` says what a call is, a `Tile` where a tile lies and how its
entries of other arrays are read, and the functions work on arrays of the tile. A tile may be turned round
(keys as rows), since all of it is broadcasting: `query` and `key` are positions of shape (R, 1) and (1, C),
or (1, R) and (C, 1).

Exponentials are of base 2, as the processors have that one. (Dao et al., arXiv:2205.14135;
Dao, arXiv:2307.08691.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from probjax.attention import _scalar
from probjax.attention._program import NO_BOUND, Dropout, MaskOp, MaskStep, ScoreOp, ScoreStep
from probjax.attention.dropout import keeps

Array = jax.Array
Terms = dict[int, Array]  # per score step with an operand that moves: its entries on the tile

LOG2E, LN2 = math.log2(math.e), math.log(2.0)
INF = float("inf")


@dataclass(frozen=True)
class Tile:
    """Where a tile lies. `read(position, indices)` reads entries of a native operand at indices of its own
    axes, which broadcast to the tile; batch axes are understood.
    """

    query: Array
    key: Array
    head: Any  # of queries: a scalar, or one per row of the tile
    read: Callable[[int, tuple[Any, ...]], Array]


@dataclass(frozen=True)
class Frame:
    """What the tiles of a call have in common. `shapes` are those of the native operands without batch
    axes.
    """

    T: int
    S: int
    N: int
    K: int
    scale: float
    mask: tuple[MaskStep, ...]
    score: tuple[ScoreStep, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    dropout: Dropout | None
    sinks: int
    certain: bool  # one key, whose weight is 1 whatever its score

    @property
    def bias_hides(self) -> bool:
        """Whether a score may be minus infinity by itself."""
        hiding = (ScoreOp.ADD_DENSE, ScoreOp.ADD_DIAGONAL, ScoreOp.FUNCTION)
        return any(step.op in hiding for step in self.score)

    @property
    def can_hide(self) -> bool:
        return bool(self.mask) or self.bias_hides

    # ------------------------------------------------------------------------------------------------------
    # Masks

    def visible(self, tile: Tile, bounds: bool) -> Array | None:
        """Which pairs of a tile are visible; `bounds` where the tile reaches beyond the keys."""
        stack: list[Array] = []
        for step in self.mask:
            if step.op == MaskOp.NONE_OF:
                stack.append(~stack.pop())
            elif step.op in (MaskOp.ALL_OF, MaskOp.ANY_OF):
                b, a = stack.pop(), stack.pop()
                stack.append(a & b if step.op == MaskOp.ALL_OF else a | b)
            else:
                stack.append(self._mask_leaf(tile, step))
        found = stack[0] if stack else None
        if bounds:
            inside = tile.key < np.int32(self.S)
            found = inside if found is None else found & inside
        return found

    def _mask_leaf(self, tile: Tile, step: MaskStep) -> Array:
        query, key = tile.query, tile.key
        match step.op:
            case MaskOp.BAND:
                low = None if step.a == -NO_BOUND else key - query >= np.int32(step.a)
                high = None if step.b == NO_BOUND else key - query <= np.int32(step.b)
                if low is None or high is None:
                    found = high if low is None else low
                    assert found is not None  # a band without any bound is no step
                    return found
                return low & high
            case MaskOp.BLOCK:
                return lax.div(query, np.int32(step.a)) == lax.div(key, np.int32(step.a))
            case MaskOp.PREFIX:
                return (key - query <= np.int32(step.b)) | (key < tile.read(step.a, ()))
            case MaskOp.SEGMENTS:
                return tile.read(step.a, (query,)) == tile.read(step.b, (key,))
            case MaskOp.KEY_LENGTHS:
                return key < tile.read(step.a, ())
            case MaskOp.QUERY_LENGTHS:
                return query < tile.read(step.a, ())
            case MaskOp.DENSE:
                return tile.read(step.a, self.entry(step.a, tile))
            case MaskOp.FUNCTION:
                return self._function(tile, step.function, None) != 0
        raise AssertionError(step.op)

    def entry(self, position: int, tile: Tile) -> tuple[Any, Any, Any]:
        """Indices of a tile's entries in an operand with the axes head, T and S, each full, or 1 (or K)."""
        return (self.head_of(self.shapes[position][0], tile), tile.query, tile.key)

    def head_of(self, size: int, tile: Tile) -> Any:
        if size == self.N or size == 1:
            return tile.head
        return lax.div(jnp.asarray(tile.head, jnp.int32), np.int32(self.N // self.K))

    def _function(self, tile: Tile, function: Any, score: Array | None) -> Array:
        structs = tuple(jax.ShapeDtypeStruct(self.shapes[i], self.dtypes[i]) for i in function.arrays)
        closed = _scalar.trace(function.fn, score is not None, structs)
        lead = 0 if score is None else 1

        def index(at: int, position: int, own: tuple[Any, ...]) -> Any:
            return tile.read(position, own) if _scalar.looks_at(closed, lead + at) else np.int32(0)

        batch = index(0, function.batch_index, ())
        head = index(1, function.head_index, (tile.head,))
        scalars = [*(() if score is None else (score,)), batch, head, tile.query, tile.key]
        return _scalar.evaluate(closed, scalars, structs, lambda i, at: tile.read(function.arrays[i], at))

    # ------------------------------------------------------------------------------------------------------
    # Scores

    def terms(self, tile: Tile) -> Terms:
        """What the score steps read on this tile."""
        found: Terms = {}
        for n, step in enumerate(self.score):
            if step.operand < 0:
                continue
            found[n] = self.term(n, tile, tile.read).astype(jnp.float32)
        return found

    def term(self, n: int, tile: Tile, read: Callable[[int, tuple[Any, ...]], Array]) -> Array:
        """Entries of the operand of step n (or, by another `read`, of an array shaped like it)."""
        step = self.score[n]
        at = step.operand
        if step.op == ScoreOp.ADD_DENSE:
            return read(at, self.entry(at, tile))
        head = self.head_of(self.shapes[at][0], tile) if self.shapes[at] else None
        if step.op == ScoreOp.ADD_DIAGONAL:
            return read(at, (head, np.int32(self.S - 1) - tile.key + tile.query))
        return read(at, () if head is None else (head,))

    def steps(self, tile: Tile, raw: Array, terms: Terms) -> Array:
        """The score from the scaled product of query and key: a differentiable function of both arguments."""
        score = raw
        for n, step in enumerate(self.score):
            if step.op == ScoreOp.FUNCTION:
                score = self._function(tile, step.function, score).astype(jnp.float32)
                score = jnp.broadcast_to(score, raw.shape)
            elif step.op == ScoreOp.MULTIPLY:
                score = score * terms[n]
            elif step.op == ScoreOp.SOFT_CAP:
                cap = terms[n] if n in terms else np.float32(step.constant)
                score = cap * jnp.tanh(score / cap)
            else:
                score = score + terms[n]
        return score

    # Exponents: where nothing acts on the products, their factor and that from e to 2 are one, and an
    # exponent is one multiply-add. A bias may be the most negative number there is, which a factor would make
    # infinite: then the difference is formed first.

    @property
    def plain(self) -> bool:
        return not self.score and self.scale > 0

    def level(self, top: Array) -> Array:
        """The level (largest score, or log-sum-exp in its own unit) that stands for the largest entry of a
        row.
        """
        return top * np.float32(self.scale * LOG2E) if self.plain else top

    def power(self, score: Array, level: Array) -> Array:
        """exp(score - level)."""
        if self.plain:
            return jnp.exp2(score * np.float32(self.scale * LOG2E) - level)
        return jnp.exp2((score - level) * np.float32(LOG2E))

    def between(self, level: Array, other: Array) -> Array:
        """exp(level - other) of two levels."""
        return jnp.exp2(level - other) if self.plain else jnp.exp2((level - other) * np.float32(LOG2E))

    def level_of(self, lse: Array) -> Array:
        """The level of a log-sum-exp; plus infinity where a row sees nothing."""
        own = lse * np.float32(LOG2E) if self.plain else lse
        return jnp.where(lse == np.float32(-INF), np.float32(INF), own)

    def level_of_sink(self, sink: Array) -> Array:
        return sink * np.float32(LOG2E) if self.plain else sink

    def lse_of(self, level: Array, total: Array) -> Array:
        return (level * np.float32(LN2) if self.plain else level) + jnp.log(total)

    def scores(self, tile: Tile, raw: Array, visible: Array | None) -> Array:
        """Masked scores from the product of query and key, without the scale where nothing acts on them."""
        score = raw
        if self.score:
            score = raw * np.float32(self.scale)
            if visible is not None:  # a derivative of what is hidden must be zero, not NaN
                score = jnp.where(visible, score, np.float32(0))
            score = self.steps(tile, score, self.terms(tile))
        elif self.scale <= 0:
            score = raw * np.float32(self.scale)
        return score if visible is None else jnp.where(visible, score, np.float32(-INF))

    def pull(self, tile: Tile, raw: Array, visible: Array | None, ct: Array) -> tuple[Array, Terms]:
        """From d score to d raw (as raw is before scaling: times scale is left to the end), and d terms."""
        if not self.score:
            return ct, {}
        scaled = raw * np.float32(self.scale)
        if visible is not None:
            scaled = jnp.where(visible, scaled, np.float32(0))
        terms = self.terms(tile)
        wide = {n: jnp.broadcast_to(x, raw.shape) for n, x in terms.items()}
        tile = self._replayed(tile, scaled, terms)
        _, back = jax.vjp(lambda r, t: self.steps(tile, r, t), scaled, wide)
        ct_raw, ct_terms = back(ct)
        if visible is not None:
            ct_raw = jnp.where(visible, ct_raw, np.float32(0))
            ct_terms = {n: jnp.where(visible, x, np.float32(0)) for n, x in ct_terms.items()}
        return ct_raw, ct_terms

    def push(self, tile: Tile, raw: Array, visible: Array | None, move: Array, moves: Terms) -> Array:
        """From the tangents of raw (unscaled) and of terms to that of the score."""
        move = move * np.float32(self.scale)
        if not self.score:
            return move
        scaled = raw * np.float32(self.scale)
        if visible is not None:
            scaled = jnp.where(visible, scaled, np.float32(0))
            move = jnp.where(visible, move, np.float32(0))
        terms = {n: jnp.broadcast_to(x, raw.shape) for n, x in self.terms(tile).items()}
        dots = {
            n: jnp.broadcast_to(moves[n], raw.shape) if n in moves else jnp.zeros_like(raw) for n in terms
        }
        tile = self._replayed(tile, scaled, terms)
        _, out = jax.jvp(lambda r, t: self.steps(tile, r, t), (scaled, terms), (move, dots))
        return out

    def _replayed(self, tile: Tile, scaled: Array, terms: Terms) -> Tile:
        """The tile with what its score functions read already read: reads cannot be differentiated."""
        if not any(step.op == ScoreOp.FUNCTION for step in self.score):
            return tile
        found: list[Array] = []

        def record(position: int, at: tuple[Any, ...]) -> Array:
            found.append(tile.read(position, at))
            return found[-1]

        self.steps(replace(tile, read=record), scaled, terms)

        def replay(position: int, at: tuple[Any, ...]) -> Array:
            return next(rest)

        rest = iter(found)
        return replace(tile, read=replay)

    # ------------------------------------------------------------------------------------------------------
    # Weights

    def weights(self, score: Array, level: Array, guarded: bool) -> tuple[Array, Array | None]:
        """Weights from scores and levels of rows, and which pairs are hidden (None: none)."""
        weight = self.power(score, level)
        if not guarded:
            return weight, None
        hidden = (score == np.float32(-INF)) | (level == np.float32(INF))
        return jnp.where(hidden, np.float32(0), weight), hidden

    def drop(self, tile: Tile, weight: Array) -> Array:
        """Dropout of weights, or of their cotangents."""
        if self.dropout is None:
            return weight
        if self.dropout.everything:
            return jnp.zeros_like(weight)
        words = [
            lax.bitcast_convert_type(tile.read(self.dropout.words, (np.int32(i),)), jnp.uint32)
            for i in (0, 1)
        ]
        batch = tile.read(self.dropout.batch_index, ())
        head = tile.read(self.dropout.head_index, (tile.head,))
        rate = self.dropout.threshold / 2.0**32
        keep = keeps(words[0], words[1], rate, batch, head, tile.query, tile.key)
        return jnp.where(keep, weight * np.float32(self.dropout.scale), np.float32(0))


def finite(x: Array) -> Array:
    return jnp.abs(x.astype(jnp.float32)) < np.float32(INF)


def clean(x: Array) -> Array:
    return jnp.where(finite(x), x, jnp.zeros_like(x))


def spoilt(*arrays: Array) -> Array:
    """Whether something in them is not finite."""
    found = [jnp.max(jnp.where(finite(x), np.int32(0), np.int32(1))) for x in arrays]
    out = found[0]
    for x in found[1:]:
        out = jnp.maximum(out, x)
    return out > 0


def shapes_of(arrays: Sequence[Any], batch: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(x.shape[batch:]) for x in arrays)
