"""Initial values of decays and step sizes, as the papers draw them, without the cancellations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Initializer = Callable[[Array, Any, Any], Array]


def uniform(bound: float) -> Initializer:
    """Uniform on [-bound, bound)."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


def s4d_log(channels: int, states: int, dtype: Any) -> Array:
    """log 1, ..., log N for every channel: A = -1, ..., -N (S4D-real, arXiv:2206.11893)."""
    logs = jnp.log(jnp.arange(1, states + 1, dtype=jnp.float32))
    return jnp.broadcast_to(logs, (channels, states)).astype(dtype)


def inverse_softplus(y: Array) -> Array:
    """The x with softplus(x) = y > 0, written so that small y keep their digits: y + log(1 - e^-y)."""
    return y + jnp.log(-jnp.expm1(-y))


def step_bias(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Biases whose softplus is log-uniform on [0.001, 0.1], and at least 1e-4 (Mamba, arXiv:2312.00752)."""
    steps = jnp.exp(jax.random.uniform(key, shape, jnp.float32, math.log(1e-3), math.log(1e-1)))
    return inverse_softplus(jnp.maximum(steps, 1e-4)).astype(dtype)


def ring(key: Array, shape: tuple[int, ...], r_min: float, r_max: float) -> Array:
    """-log r for radii r that are uniform in area on the ring r_min <= r <= r_max <= 1; positive and finite.

    r² = 1 - t is never formed where it is close to 1: float32 would lose the digits of t, and log 1 = 0 has
    no log.
    """
    # Away from 0, where r = r_max could be 1.
    v = jax.random.uniform(key, shape, jnp.float32, float(jnp.finfo(jnp.float32).eps), 1.0)
    t = (1 - r_max) * (1 + r_max) + v * ((r_max - r_min) * (r_max + r_min))
    # The other end, r = 0, has no log either.
    square = jnp.maximum(1 - t, jnp.finfo(jnp.float32).eps ** 2)
    return 0.5 * jnp.where(t < 0.5, -jnp.log1p(-jnp.minimum(t, 0.5)), -jnp.log(square))
