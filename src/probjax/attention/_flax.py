"""The arguments that `flax.nnx.MultiHeadAttention` hands to its `attention_fn`, in our terms."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def from_flax(
    arrays: tuple[Any, Any, Any],
    dropout_rate: float,
    dropout_key: Any,
    *,
    dropout_rng: Any = None,
    deterministic: bool = False,
    dtype: Any = None,
    broadcast_dropout: bool = True,
    module: Any = None,
) -> tuple[Any, Any, Any, float, Any]:
    """Query, key and value in the dtype of the computation, dropout rate and key.

    Raises:
      TypeError: for a name that Flax does not use either, from Python itself.
      ValueError: for two keys.
      NotImplementedError: for a module to sow weights into.
    """
    del broadcast_dropout  # a finer mask has the same expectation
    if module is not None:
        raise NotImplementedError(
            "module: got one to sow attention weights into, but they are never held whole; call "
            "flax.nnx.MultiHeadAttention without sow_weights"
        )
    if dropout_rng is not None:
        if dropout_key is not None:
            raise ValueError("dropout_rng: got it and dropout_key, want one key")
        dropout_key = dropout_rng
    if deterministic:
        dropout_rate, dropout_key = 0.0, None
    query, key, value = arrays
    if dtype is not None:
        query, key, value = (jnp.asarray(x).astype(dtype) for x in arrays)
    return query, key, value, dropout_rate, dropout_key
