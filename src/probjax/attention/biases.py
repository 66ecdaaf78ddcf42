"""Biases: functions of the score. They compose with `+` and are applied left to right, each to the result
of the last.

Every bias is a pytree: arrays inside it get exact gradients and tangents, and may be traced, vmapped and
sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from probjax._op import Operand
from probjax.attention._mask import whole_tile
from probjax.attention._terms import (
    Array,
    CallShape,
    Term,
    Tile,
    as_array,
    check_closure,
    free,
    head_shaped,
    is_array,
    over_tile,
    register,
    score_shaped,
    static,
)

__all__ = ["ALiBi", "Bias", "Dense", "HeadScale", "RelativePosition", "ScoreFunction", "SoftCap"]


class Bias(Term):
    """Base of all biases."""

    #: Whether the result can be NaN for a finite score: then hidden pairs need a select, not a sum with -inf.
    needs_select: bool = False

    def __add__(self, other: Bias) -> Bias:
        return _Chain(self, as_bias(other))

    def apply(self, score: Array, tile: Tile, visible: Array | None) -> Array:
        """The score of one tile after this bias: (b, N, R, C). What it adds where `visible` is False never
        matters.
        """
        raise NotImplementedError

    def dense(
        self, score: Any, query_length: int | None = None, key_value_length: int | None = None
    ) -> Array:
        """Applies the bias to a whole score matrix, for reference and plotting.

        Args:
          score: (*B, N, T, S); or a number, which stands for that score everywhere (0.0 shows an additive
            bias).
          query_length: T, needed with a number.
          key_value_length: S, needed with a number.

        Returns:
          The score after the bias, (*B, N, T, S), in the dtype of `score`.
        """
        score = jnp.asarray(score, None if is_array(score) else jnp.result_type(float))
        if score.ndim < 3:
            if query_length is None or key_value_length is None:
                raise ValueError(
                    f"score: got shape {score.shape} and no lengths, want (*B, N, T, S), or "
                    "query_length and key_value_length"
                )
            sizes = [x.shape[0] for x in jax.tree.leaves(self) if is_array(x) and x.ndim in (1, 2)]
            score = jnp.broadcast_to(score, (sizes[0] if sizes else 1, query_length, key_value_length))
        *batch, heads, length, width = score.shape
        shape = CallShape(tuple(batch), length, width, heads, heads)
        tile, term = whole_tile(self, shape, "bias")
        out = term.apply(score.reshape(-1, heads, length, width), tile, None)
        return out.reshape(shape.full)


def as_bias(x: Any) -> Bias:
    if isinstance(x, Bias):
        return x
    if hasattr(x, "dtype"):
        return Dense(x)
    raise TypeError(f"a bias combines with biases and float arrays, got {type(x).__name__}")


@register
@dataclass(frozen=True)
class _Chain(Bias):
    first: Bias
    second: Bias

    @property
    def needs_select(self) -> bool:  # type: ignore[override]
        return self.first.needs_select or self.second.needs_select

    def canonical(self, shape: CallShape, argument: str) -> list[tuple[Array, Operand]]:
        return self.first.canonical(shape, argument) + self.second.canonical(shape, argument)

    def apply(self, score: Array, tile: Tile, visible: Array | None) -> Array:
        return self.second.apply(self.first.apply(score, tile, visible), tile, visible)


def _add(score: Array, term: Array, visible: Array | None) -> Array:
    # What a hidden pair would add may be NaN. The select is on the term, not on the score: XLA's CPU
    # compiler fuses product, sum and softmax of a score only while no select stands between them.
    term = term.astype(score.dtype)
    return score + (term if visible is None else jnp.where(visible, term, 0))


@register
@dataclass(frozen=True)
class Dense(Bias):
    """Adds an array that broadcasts to (*B, N, T, S); its head axis may be 1, K or N. −inf hides a pair."""

    array: Any

    def canonical(self, shape: CallShape, argument: str) -> list[tuple[Array, Operand]]:
        array = score_shaped(as_array(self.array, argument, "float"), shape, argument)
        return [(array, Operand("bias", ("H", "T", "S")))]

    def apply(self, score: Array, tile: Tile, visible: Array | None) -> Array:
        return _add(score, tile.per_head(self.array), visible)


@register
@dataclass(frozen=True)
class ALiBi(Bias):
    """Adds −slope · |i − j|. `slopes`: (N,). With a causal mask this is the bias of Press et al.,
    arXiv:2108.12409.
    """

    slopes: Any

    def canonical(self, shape: CallShape, argument: str) -> list[tuple[Array, Operand]]:
        where = f"{argument}.slopes"
        return [(head_shaped(as_array(self.slopes, where, "float"), shape, where), Operand("slopes", ("H",)))]

    def apply(self, score: Array, tile: Tile, visible: Array | None) -> Array:
        slopes = tile.per_head(self.slopes)[:, :, None, None].astype(score.dtype)
        return _add(score, -slopes * jnp.abs(tile.distance()).astype(score.dtype), visible)


@register
@dataclass(frozen=True)
class RelativePosition(Bias):
    """Adds a learned number per relative position.

    Args:
      table: (N, R) or (1, R): one row per head, one column per bucket.
      bucketing: "clip": bucket clip(j − i + R // 2, 0, R − 1), one per distance, the farthest shared (Shaw
        et al., arXiv:1803.02155). "t5": half the buckets for small distances, the others logarithmic up to
        `max_distance` (Raffel et al., arXiv:1910.10683).
      max_distance: distance from which on all share the last bucket; "t5" only.
      bidirectional: whether keys after the query have buckets of their own; "t5" only.
    """

    table: Any
    bucketing: str = static(default="clip")
    max_distance: int = static(default=128)
    bidirectional: bool = static(default=True)

    def __post_init__(self) -> None:
        if self.bucketing not in ("clip", "t5"):
            raise ValueError(f'bucketing: got {self.bucketing!r}, want "clip" or "t5"')

    def canonical(self, shape: CallShape, argument: str) -> list[tuple[Array, Operand]]:
        where = f"{argument}.table"
        table = as_array(self.table, where, "float")
        if table.ndim != 2 or table.shape[0] not in (1, shape.kv_heads, shape.heads) or table.shape[1] == 0:
            raise ValueError(f"{where}: got shape {table.shape}, want (N, R) = ({shape.heads}, R) or (1, R)")
        return [(table.reshape((1,) * len(shape.batch) + table.shape), Operand("table", ("H", None)))]

    def _bucket(self, distance: Array, count: int) -> Array:
        if self.bucketing == "clip":
            return jnp.clip(distance + count // 2, 0, count - 1)
        bucket = jnp.zeros_like(distance)
        if self.bidirectional:
            count //= 2
            bucket = jnp.where(distance > 0, count, 0)
            distance = jnp.abs(distance)
        else:
            distance = jnp.maximum(-distance, 0)
        exact = max(count // 2, 1)
        ratio = jnp.maximum(distance, 1).astype(jnp.float32) / exact
        steps = jnp.log(ratio) / np.log(max(self.max_distance / exact, 1.0 + 1e-6)) * (count - exact)
        far = jnp.minimum(exact + steps.astype(jnp.int32), count - 1)
        return bucket + jnp.where(distance < exact, jnp.minimum(distance, count - 1), far)

    def apply(self, score: Array, tile: Tile, visible: Array | None) -> Array:
        rows, columns = score.shape[-2:]
        # Positions of a tile run on, so it holds one number per distance: look up a strip and lay it out as
        # diagonals. Row r of the layout is the strip moved r to the right, which a reshape to one column
        # less does.
        width = rows + columns
        step = jnp.arange(width)
        distance = tile.key[0] - tile.query[0] + jnp.where(step < columns, step, step - width)
        strip = self.table[:, :, self._bucket(distance, self.table.shape[-1])]
        strip = tile.per_head(strip)
        lead = strip.shape[:2]
        moved = jnp.broadcast_to(strip[:, :, None, :], (*lead, rows, width)).reshape(*lead, rows * width)
        diagonals = moved[:, :, : rows * (width - 1)].reshape(*lead, rows, width - 1)[..., :columns]
        return _add(score, diagonals, visible)


@register
@dataclass(frozen=True)
class HeadScale(Bias):
    """Multiplies the score by a number per head. `scale`: (N,)."""

    scale: Any

    def canonical(self, shape: CallShape, argument: str) -> list[tuple[Array, Operand]]:
        where = f"{argument}.scale"
        return [
            (head_shaped(as_array(self.scale, where, "float"), shape, where), Operand("head_scale", ("H",)))
        ]

    def apply(self, score: Array, tile: Tile, visible: Array | None) -> Array:
        return score * tile.per_head(self.scale)[:, :, None, None].astype(score.dtype)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class SoftCap(Bias):
    """Replaces the score s by value · tanh(s / value). `value`: a positive number, or a scalar array
    (differentiable).
    """

    value: Any

    def __post_init__(self) -> None:
        if isinstance(self.value, (int, float)) and not (self.value > 0 and np.isfinite(self.value)):
            raise ValueError(f"value: got {self.value!r}, want a positive finite cap")

    # A Python number is structure, an array is a child.
    def tree_flatten(self) -> tuple[tuple[Any, ...], float | None]:
        return ((), float(self.value)) if isinstance(self.value, (int, float)) else ((self.value,), None)

    @classmethod
    def tree_unflatten(cls, value: float | None, children: tuple[Any, ...]) -> SoftCap:
        out = object.__new__(cls)
        object.__setattr__(out, "value", children[0] if value is None else value)
        return out

    def canonical(self, shape: CallShape, argument: str) -> list[tuple[Array, Operand]]:
        if isinstance(self.value, (int, float)):
            return []
        where = f"{argument}.value"
        value = as_array(self.value, where, "float")
        if value.shape != ():
            raise ValueError(f"{where}: got shape {value.shape}, want a scalar")
        return [(free(value, shape), Operand("soft_cap", ()))]

    def apply(self, score: Array, tile: Tile, visible: Array | None) -> Array:
        value = self.value
        if not isinstance(value, (int, float)):
            value = value.reshape(-1, 1, 1, 1).astype(score.dtype)
        return value * jnp.tanh(score / value)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, init=False)
class ScoreFunction(Bias):
    """Replaces the score by `fn(score, batch, head, q_index, kv_index, *arrays)`, a function of scalars.

    `batch` is the index over all leading batch axes flattened. `arrays` are passed whole; they may be
    traced and are differentiated. Keep one function object over calls, since a new one is a new program.
    """

    fn: Callable
    arrays: tuple[Any, ...]

    needs_select = True

    def __init__(self, fn: Callable, *arrays: Any):
        if not callable(fn):
            raise TypeError(
                f"fn: got {type(fn).__name__}, want a function (score, batch, head, q_index, "
                "kv_index, *arrays) -> score"
            )
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "arrays", arrays)

    def tree_flatten(self) -> tuple[tuple[Any, ...], Callable]:
        return self.arrays, self.fn

    @classmethod
    def tree_unflatten(cls, fn: Callable, arrays: tuple[Any, ...]) -> ScoreFunction:
        return cls(fn, *arrays)

    def canonical(self, shape: CallShape, argument: str) -> list[tuple[Array, Operand]]:
        axes = len(shape.batch)
        given = tuple(jnp.asarray(x) for x in self.arrays)
        check_closure(self.fn, 5, given, argument)
        out = []
        for array in given:
            x = free(array, shape)
            smooth = bool(jnp.issubdtype(x.dtype, jnp.floating))
            out.append((x, Operand("score_array", (None,) * (x.ndim - axes), smooth)))
        return out

    def apply(self, score: Array, tile: Tile, visible: Array | None) -> Array:
        return over_tile(self.fn, tile, self.arrays, score).astype(score.dtype)
