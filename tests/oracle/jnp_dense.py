"""Dense attention as a plain jnp expression, for reference derivatives of any kind and order.

The visible positions come in as an array and the bias as a function of the scores, so nothing of the package
is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def dense_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    visible: Any = True,
    bias: Callable[[jax.Array], jax.Array] | jax.Array | None = None,
    scale: Any = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Output (*B, T, N, V) and log-sum-exp (*B, T, N); `visible` and array biases broadcast to (*B, N, T, S).

    Derivatives of every order are those of the function whose empty rows are the constant 0.
    """
    group = query.shape[-2] // key.shape[-2]
    key, value = (jnp.repeat(x, group, axis=-2) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    score = scale * jnp.einsum("...tnd,...snd->...nts", query, key)
    if soft_cap is not None:
        score = soft_cap * jnp.tanh(score / soft_cap)
    if bias is not None:
        score = bias(score) if callable(bias) else score + bias
    visible = jnp.broadcast_to(visible, score.shape)
    some = visible.any(-1)
    # Hidden scores become a finite constant before the exponential, so no derivative meets inf - inf.
    safe = jnp.where(visible, score, 0.0)
    top = jax.lax.stop_gradient(jnp.max(jnp.where(visible, score, -1e30), -1))
    if sinks is not None:
        top = jnp.maximum(top, jax.lax.stop_gradient(sinks)[:, None])
    top = jnp.where(some, top, 0.0)
    exps = jnp.where(visible, jnp.exp(jnp.where(visible, safe - top[..., None], 0.0)), 0.0)
    total = exps.sum(-1)
    if sinks is not None:
        total = total + jnp.exp(sinks[:, None] - top)
    total = jnp.where(some, total, 1.0)
    out = jnp.einsum("...nts,...snv->...tnv", exps / total[..., None], value)
    lse = jnp.where(some, top + jnp.log(total), -jnp.inf)
    return out, jnp.moveaxis(lse, -2, -1)
