"""What masks and biases have in common: pytrees whose arrays are brought to one layout and evaluated tile
by tile.

A mask or bias is a frozen dataclass and a pytree. `canonical` checks its arrays against the shape of the
call and gives them the layout of an operand (`probjax._op`): batch axes, then named axes, each of full size
or 1. The same object, rebuilt with the parts of those arrays that belong to one tile, is then evaluated on
that tile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from probjax._op import Operand

Array = jax.Array


@dataclass(frozen=True)
class CallShape:
    """Sizes of one call, as the user gave them: batch axes and T, S, N, K of design letters."""

    batch: tuple[int, ...]
    query_length: int
    key_length: int
    heads: int
    kv_heads: int

    @property
    def full(self) -> tuple[int, ...]:
        """Shape of the scores: (*B, N, T, S)."""
        return (*self.batch, self.heads, self.query_length, self.key_length)


@dataclass(frozen=True)
class Tile:
    """Where a tile of scores lies: shape (b, N, R, C) with b batch entries, R queries, C keys.

    `batch` (b,) and `head` (N,) are the indices in the user's whole call, `query` (R,) and `key` (C,)
    positions. `query_length` and `key_length` are T and S of the whole call.
    """

    batch: Array
    head: Array
    query: Array
    key: Array
    query_length: int
    key_length: int
    heads: int
    kv_heads: int

    def per_head(self, x: Array) -> Array:
        """Repeats axis 1 of `x` from key/value heads to query heads where needed."""
        if x.shape[1] == self.kv_heads and x.shape[1] not in (1, self.heads):
            return jnp.repeat(x, self.heads // self.kv_heads, axis=1)
        return x

    def distance(self) -> Array:
        """Key position minus query position, shape (R, C)."""
        return self.key[None, :] - self.query[:, None]


@dataclass(frozen=True)
class Bounds:
    """Where the tiles of a mask lie: first and last query of each query tile, first and last key of each
    key tile.
    """

    query_first: np.ndarray
    query_last: np.ndarray
    key_first: np.ndarray
    key_last: np.ndarray
    query_length: int
    key_length: int

    def grid(self, value: bool) -> np.ndarray:
        return np.full((len(self.query_first), len(self.key_first)), value)


class Term:
    """Base of masks and biases."""

    def canonical(self, shape: CallShape, argument: str) -> list[tuple[Array, Operand]]:
        """The arrays of this object, in leaf order and operand layout. Errors name `argument`."""
        raise NotImplementedError


def register[T](cls: type[T]) -> type[T]:
    """Makes a frozen dataclass a pytree: fields marked with `static()` are structure, the others are
    children.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    meta = [f.name for f in fields if f.metadata.get("static")]
    data = [f.name for f in fields if not f.metadata.get("static")]
    return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=meta)


def static(**kwargs: Any) -> Any:
    """A dataclass field that is structure, not an array."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


def is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic))


def as_array(x: Any, argument: str, kind: str) -> Array:
    """`x` as an array of the wanted kind ("bool", "integer", "float"), or a TypeError that names the
    argument.
    """
    hint = {
        ("bool", True): "; for a function of indices use masks.MaskFunction",
        ("float", True): "; for a function of the score use biases.ScoreFunction",
    }.get((kind, callable(x)), "")
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{argument}: got {type(x).__name__}, want an array of {kind} dtype{hint}") from error
    accepted = {
        "bool": array.dtype == bool,
        "integer": jnp.issubdtype(array.dtype, jnp.integer),
        "float": jnp.issubdtype(array.dtype, jnp.floating),
    }
    if not accepted[kind]:
        if kind == "bool":
            hint = "; True means attend; numbers to add to the scores are a bias"
        elif array.dtype == bool:
            hint = "; a bool array of which pairs attend is a mask"
        raise TypeError(f"{argument}: got dtype {array.dtype}, want {kind}{hint}")
    return array


def broadcast_error(
    argument: str, got: tuple[int, ...], wanted: str, shape: tuple[int, ...], hint: str = ""
) -> ValueError:
    text = f"{argument}: got shape {got}, want a shape that broadcasts to {wanted} = {shape}"
    return ValueError(text + (f" ({hint})" if hint else ""))


def score_shaped(x: Array, shape: CallShape, argument: str) -> Array:
    """Brings an array that broadcasts to (*B, N, T, S) to full rank. The head axis may be 1, K or N."""
    full = shape.full
    wanted = "(*B, N or K or 1, T, S)"
    got = x.shape
    while x.ndim > len(full) and x.shape[0] == 1:
        x = x[0]
    if x.ndim > len(full):
        raise broadcast_error(argument, got, wanted, full)
    x = x.reshape((1,) * (len(full) - x.ndim) + x.shape)
    head = len(shape.batch)
    for axis, (size, want) in enumerate(zip(x.shape, full, strict=True)):
        allowed = {1, want} | ({shape.kv_heads} if axis == head else set())
        if size not in allowed:
            raise broadcast_error(
                argument, got, wanted, full, f"axis {axis} of the full shape has size {size}"
            )
    return x


def batch_shaped(x: Array, shape: CallShape, argument: str, wanted: str, tail: tuple[int, ...]) -> Array:
    """Brings an array that broadcasts to (*B, *tail) to full rank; the tail must match exactly."""
    n, k = len(shape.batch), len(tail)
    want = (*shape.batch, *tail)
    got = x.shape
    if x.ndim < k or x.shape[x.ndim - k :] != tail or x.ndim > n + k:
        raise ValueError(f"{argument}: got shape {got}, want {wanted} = {want}")
    x = x.reshape((1,) * (n + k - x.ndim) + x.shape)
    for size, full in zip(x.shape[:n], shape.batch, strict=True):
        if size not in (1, full):
            raise ValueError(f"{argument}: got shape {got}, want {wanted} = {want}")
    return x


def head_shaped(x: Array, shape: CallShape, argument: str) -> Array:
    """Brings a scalar or an array of one value per head to (1, ..., 1, heads)."""
    if x.ndim > 1 or (x.ndim == 1 and x.shape[0] not in (1, shape.kv_heads, shape.heads)):
        raise ValueError(
            f"{argument}: got shape {x.shape}, want (N,) = ({shape.heads},), one value per query head"
        )
    return x.reshape((1,) * len(shape.batch) + (-1,))


def free(x: Array, shape: CallShape) -> Array:
    """An array that a user's function indexes as it likes: batch axes of size 1 in front."""
    return x.reshape((1,) * len(shape.batch) + x.shape)


def check_closure(fn: Callable, leading: int, arrays: tuple[Array, ...], argument: str) -> None:
    """Raises TypeError if a user's function of `leading` scalars and arrays closes over a traced value.

    Such a value would not reach the kernel, which is traced on its own.
    """
    index = jax.ShapeDtypeStruct((), jnp.int32)
    score = jax.ShapeDtypeStruct((), jnp.float32)
    scalars = (score, index, index, index, index)[5 - leading :]
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    closed = jax.make_jaxpr(fn)(*scalars, *structs)
    if any(isinstance(c, jax.core.Tracer) for c in closed.consts):
        raise TypeError(
            f"{argument}.fn: got a function that closes over a traced value, want it passed through *arrays: "
            "MaskFunction(fn, array) calls fn(batch, head, q_index, kv_index, array), ScoreFunction likewise"
        )


def over_tile(fn: Callable, tile: Tile, arrays: tuple[Array, ...], score: Array | None = None) -> Array:
    """Maps `fn([score,] batch, head, query, key, *arrays)` over a tile: result (b, N, R, C).

    `arrays` have the layout of `free`: their first axis is that of `jax.vmap` over the whole call, or 1.
    """
    lead = 0 if score is None else 1

    def axes(mapped: int, score_axis: int | None, arrays_axes: tuple[int | None, ...]) -> tuple:
        index = tuple(0 if i == mapped else None for i in range(4))
        return (*((score_axis,) * lead), *index, *arrays_axes)

    none = (None,) * len(arrays)
    mapped = fn
    for which in (3, 2, 1):
        mapped = jax.vmap(mapped, axes(which, 0, none))
    # The batch axis last: what all entries share is not repeated.
    scores = () if score is None else (score,)
    args = (*scores, tile.batch, tile.head, tile.query, tile.key, *arrays)
    batched = [i for i in range(len(args)) if i <= lead or i >= lead + 4]
    shared = [i for i in batched if args[i].shape[0] == 1]
    args = tuple(x[0] if i in shared else x for i, x in enumerate(args))
    in_axes = tuple(0 if i in batched and i not in shared else None for i in range(len(args)))
    if all(axis is None for axis in in_axes):
        return mapped(*args)[None]
    return jax.vmap(mapped, in_axes)(*args)
