"""Checks of the arguments of the recurrences, and their normal form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from probjax._op import Array

IMPLEMENTATIONS = ("reference", "scan", "native")


def array(name: str, x: Any, *, complex_allowed: bool = False) -> Array:
    """An argument as an array of floating numbers; a Python number stays weak.

    Raises:
      TypeError: for other data.
    """
    if isinstance(x, int) and not isinstance(x, bool):
        x = float(x)
    x = _as_array(name, x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x
    wanted = "floating or complex numbers" if complex_allowed else "floating numbers"
    if complex_allowed and jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x
    raise TypeError(f"{name}: got dtype {x.dtype}, want {wanted}")


def _as_array(name: str, x: Any) -> Array:
    try:
        return jnp.asarray(x)
    except TypeError as error:
        raise TypeError(f"{name}: got {type(x).__name__}, want an array ({error})") from None


def state_dtype(main: Array, *others: Array | None) -> Any:
    """The dtype of states: float32 promoted with every argument that is no Python number."""
    dtype = jnp.promote_types(jnp.float32, main.dtype)
    for x in others:
        if x is None:
            continue
        if not jax.typeof(x).weak_type:
            dtype = jnp.promote_types(dtype, x.dtype)
        elif jnp.issubdtype(x.dtype, jnp.complexfloating):
            dtype = jnp.promote_types(dtype, jnp.complex64)
    return dtype


def at_least(name: str, x: Array, ndim: int, axes: str) -> None:
    if x.ndim < ndim:
        raise ValueError(f"{name}: got shape {x.shape}, want at least {ndim} axes, {axes}")


def exactly(name: str, x: Array, shape: tuple[int, ...], axes: str) -> None:
    if x.shape != shape:
        raise ValueError(f"{name}: got shape {x.shape}, want {shape}, {axes}")


def widened(name: str, x: Array, shape: tuple[int, ...], axes: str) -> Array:
    """`x` with axes of size 1 put in front, so that it has as many as `shape`, which it must broadcast to."""
    fits = x.ndim <= len(shape)
    if fits:
        tail = shape[len(shape) - x.ndim :]
        fits = all(have in (1, want) for have, want in zip(x.shape, tail, strict=True))
    if not fits:
        raise ValueError(f"{name}: got shape {x.shape}, want one that broadcasts to {shape}, {axes}")
    return x.reshape((1,) * (len(shape) - x.ndim) + x.shape)


def along(x: Array, axis: int, size: int) -> Array:
    """`x` with the full size of one axis."""
    axis %= x.ndim
    return x if x.shape[axis] == size else jnp.broadcast_to(x, (*x.shape[:axis], size, *x.shape[axis + 1 :]))


def implementation(name: str | None, operation: str, have: Sequence[str] = IMPLEMENTATIONS) -> str | None:
    """The checked choice of an implementation.

    Raises:
      ValueError: for a name that no operation knows.
      NotImplementedError: for one that this operation lacks.
    """
    if name is None or name in have:
        return name
    if name in IMPLEMENTATIONS:
        raise NotImplementedError(
            f"implementation: {operation} has no {name!r}, only {', '.join(map(repr, have))}"
        )
    raise ValueError(f"implementation: got {name!r}, want None or one of {', '.join(map(repr, have))}")


def per_token(name: str, x: Any, shape: tuple[int, ...], kind: Any, *, step: bool = False) -> Array | None:
    """`reset`, `mask` (kind bool) or `segment_ids` (kind integer), widened to (*B, L), the time axis in full.

    With `step`, the argument has no time axis, and gets one.
    """
    if x is None:
        return None
    x = _as_array(name, x)
    if not jnp.issubdtype(x.dtype, kind):
        wanted = "bool" if kind is jnp.bool_ else "integers"
        raise TypeError(f"{name}: got dtype {x.dtype}, want {wanted}")
    if step:
        return jnp.expand_dims(widened(name, x, shape[:-1], "(*B,)"), -1)
    return along(widened(name, x, shape, "(*B, L)"), -1, shape[-1])


def cuts(
    reset: Any, segment_ids: Any, mask: Any, shape: tuple[int, ...], reverse: bool
) -> tuple[Array | None, Array | None]:
    """Where the state is cut before a token, and which tokens count; each (*B, L) or, with batch axes of size
    1.

    Args:
      reset, segment_ids, mask: the arguments of the call.
      shape: (*B, L).
      reverse: time is processed from its end.
    """
    reset = per_token("reset", reset, shape, jnp.bool_)
    ids = per_token("segment_ids", segment_ids, shape, jnp.integer)
    mask = per_token("mask", mask, shape, jnp.bool_)
    if ids is not None and shape[-1] > 0:
        ids, valid = (x if x is None or not reverse else jnp.flip(x, -1) for x in (ids, mask))
        change = _changes(ids, valid)
        change = jnp.flip(change, -1) if reverse else change
        reset = change if reset is None else reset | change
    if reset is not None and mask is not None:
        reset = reset & mask
    return reset, mask


def _changes(ids: Array, mask: Array | None) -> Array:
    """Whether a token's id differs from that of the valid token before it; False at the first."""
    if mask is None:
        first = jnp.zeros((*ids.shape[:-1], 1), bool)
        return jnp.concatenate([first, ids[..., 1:] != ids[..., :-1]], -1)
    shape = jnp.broadcast_shapes(ids.shape, mask.shape)
    ids, mask = jnp.broadcast_to(ids, shape), jnp.broadcast_to(mask, shape)
    index = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    last = jax.lax.cummax(jnp.where(mask, index, -1), len(shape) - 1)
    before = jnp.concatenate([jnp.full((*shape[:-1], 1), -1, jnp.int32), last[..., :-1]], -1)
    return (before >= 0) & (ids != jnp.take_along_axis(ids, jnp.maximum(before, 0), -1))


def select(mask: Array | None, x: Array, other: Any, trailing: int) -> Array:
    """`x` where tokens count; `trailing` is the number of its axes after time."""
    if mask is None:
        return x
    return jnp.where(mask.reshape(*mask.shape, *(1,) * trailing), x, jnp.asarray(other, x.dtype))
