"""What backward passes share outside of their kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array

INF = float("inf")


def summed(x: Array, shape: tuple[int, ...], acc: Any) -> Array:
    """The sum over those axes that have size 1 in `shape`, in the accumulator's dtype."""
    axes = tuple(i for i, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if have != want)
    return jnp.sum(x.astype(acc), axes, keepdims=True).astype(x.dtype) if axes else x


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
