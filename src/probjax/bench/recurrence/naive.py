"""The recurrences as they are usually written in plain JAX: the peers of the suites `ssm` and `recurrence`.

Associative: one `jax.lax.associative_scan` over whole arrays of states, (batch, length, channels, state).
Sequential: one `jax.lax.scan` over time that keeps the current state only, with JAX's own derivative, which
keeps them all. Shapes are those of `probjax.recurrence`; states are float32 for half inputs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def associative(a: Array, b: Array) -> Array:
    """All states of h_t = a_t h_{t-1} + b_t over axis 1 by recursive doubling; other axes of `a` may be 1."""

    def combine(early: tuple[Array, Array], late: tuple[Array, Array]) -> tuple[Array, Array]:
        return late[0] * early[0], late[0] * early[1] + late[1]

    return jax.lax.associative_scan(combine, (a, b), axis=1)[1]


def associative_linear_scan(a: Array, b: Array) -> Array:
    """h (B, L, C) of `a` (B, L, C), or (C,) for one decay at all times, and `b` (B, L, C)."""
    a, b = _wide(a, b)
    return associative(jnp.broadcast_to(a, b.shape), b)


def associative_selective_scan(x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array) -> Array:
    """y (B, L, D) of x, dt (B, L, D) ahead of softplus, A (D, N), B and C (B, L, N), D (D,)."""
    u, dt, A, B, C, D = _wide(x, dt, A, B, C, D)
    dt = jax.nn.softplus(dt)
    h = associative(jnp.exp(dt[..., None] * A), (dt * u)[..., None] * B[:, :, None])
    return (jnp.einsum("bldn,bln->bld", h, C) + D * u).astype(x.dtype)


def associative_ssd(query: Array, key: Array, value: Array, log_decay: Array) -> Array:
    """y (B, L, H, P) of query, key (B, L, 1, N), value (B, L, H, P), log_decay (B, L, H)."""
    q, k, v, decay = _wide(query, key, value, log_decay)
    h = associative(jnp.exp(decay)[..., None, None], k[..., None] * v[..., None, :])
    return jnp.einsum("blhnp,bln->blhp", h, q[:, :, 0]).astype(value.dtype)


def sequential_linear_scan(a: Array, b: Array) -> Array:
    """As `associative_linear_scan`."""
    a, b = _wide(a, b)
    if a.ndim < b.ndim:
        return _over_time(lambda h, now: ((h := a * h + now[0]), h), jnp.zeros_like(b[:, 0]), (b,))
    return _over_time(lambda h, now: ((h := now[0] * h + now[1]), h), jnp.zeros_like(b[:, 0]), (a, b))


def sequential_selective_scan(x: Array, dt: Array, A: Array, B: Array, C: Array, D: Array) -> Array:
    """As `associative_selective_scan`."""
    u, dt, A, B, C, D = _wide(x, dt, A, B, C, D)
    dt = jax.nn.softplus(dt)

    def step(h: Array, now: Sequence[Array]) -> tuple[Array, Array]:
        u, dt, B, C = now
        h = jnp.exp(dt[..., None] * A) * h + (dt * u)[..., None] * B[:, None]
        return h, jnp.einsum("bdn,bn->bd", h, C)

    y = _over_time(step, jnp.zeros((x.shape[0], *A.shape), A.dtype), (u, dt, B, C))
    return (y + D * u).astype(x.dtype)


def sequential_ssd(query: Array, key: Array, value: Array, log_decay: Array) -> Array:
    """As `associative_ssd`."""
    q, k, v, decay = _wide(query, key, value, log_decay)

    def step(h: Array, now: Sequence[Array]) -> tuple[Array, Array]:
        q, k, v, decay = now
        h = jnp.exp(decay)[..., None, None] * h + k[..., None] * v[..., None, :]
        return h, jnp.einsum("bhnp,bn->bhp", h, q[:, 0])

    batch, _, heads, width = value.shape
    state = jnp.zeros((batch, heads, key.shape[-1], width), v.dtype)
    return _over_time(step, state, (q, k, v, decay)).astype(value.dtype)


def _wide(*arrays: Array) -> list[Array]:
    return [array.astype(jnp.promote_types(array.dtype, jnp.float32)) for array in arrays]


def _over_time(step: Callable[[Any, Any], Any], state: Array, arrays: Sequence[Array]) -> Array:
    _, y = jax.lax.scan(step, state, tuple(jnp.moveaxis(array, 1, 0) for array in arrays))
    return jnp.moveaxis(y, 0, 1)
