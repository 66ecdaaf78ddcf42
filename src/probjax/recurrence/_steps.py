"""One token of each recurrence, in plain JAX. Inputs are by position of the operand, without a time axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from probjax._op import Array
from probjax.recurrence._engine import Tree


def linear_scan(state: Array, inputs: Tree) -> tuple[Array, Array]:
    """State (*B, C); inputs a, b, each (*B, C)."""
    state = inputs[0] * state + inputs[1]
    return state, state


def selective_scan(state: Array, inputs: Tree) -> tuple[Array, Array]:
    """State (*B, N, D); inputs u, dt (*B, D), A (*B, N, D), B (*B, G, N), C (*B, K, N), maybe reset (*B)."""
    u, dt, A, B, C = (inputs[i] for i in range(5))
    channels = state.shape[-1]
    state = decay(dt, A, inputs.get(6)) * state + u[..., None, :] * by_channel(B, channels)
    return state, jnp.sum(state * by_channel(C, channels), -2)


def decay(dt: Array, A: Array, reset: Array | None) -> Array:
    """What `selective_scan` multiplies the state by, (*B, N, D)."""
    factor = jnp.exp(dt[..., None, :] * A)
    return factor if reset is None else jnp.where(reset[..., None, None], 0, factor)


def by_channel(x: Array, channels: int) -> Array:
    """(*B, G, N) as (*B, N, channels), or (*B, N, 1) where one group serves all channels."""
    groups = x.shape[-2]
    x = jnp.swapaxes(x, -1, -2)
    return x if groups in (1, channels) else jnp.repeat(x, channels // groups, -1)


def ssd(state: Array, inputs: Tree, precision: jax.lax.PrecisionLike = "highest") -> tuple[Array, Array]:
    """State (*B, H, N, P); inputs query, key (*B, G, N), value (*B, H, P), log_decay (*B, H)."""
    query, key, value, log_decay = (inputs[i] for i in range(4))
    heads = state.shape[-3]
    query, key = (_by_head(x, heads) for x in (query, key))
    state = jnp.exp(log_decay)[..., None, None] * state + key[..., None] * value[..., None, :]
    return state, jnp.einsum("...n,...np->...p", query, state, precision=precision)


def _by_head(x: Array, heads: int) -> Array:
    groups = x.shape[-2]
    return x if groups in (1, heads) else jnp.repeat(x, heads // groups, -2)
