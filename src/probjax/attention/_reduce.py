"""What backward passes share outside of their kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from probjax._axes import summed

Array = jax.Array

INF = float("inf")


def sinks_gradient(sinks: Array, out: Array, lse: Array, ct_out: Array | None, ct_lse: Array | None) -> Array:
    """A sink's logit draws weight from all keys: what they lose, summed over queries."""
    acc = lse.dtype
    excess = jnp.zeros_like(lse)
    if ct_out is not None:
        excess = jnp.sum(ct_out.astype(acc) * out.astype(acc), axis=-1)
    if ct_lse is not None:
        excess = excess - ct_lse
    empty = lse == -INF
    weight = jnp.exp(sinks.astype(acc)[..., None, :] - jnp.where(empty, INF, lse))
    grad = jnp.sum(-weight * jnp.where(empty, 0, excess), axis=-2)
    return summed(grad, sinks.shape, acc).astype(sinks.dtype)
