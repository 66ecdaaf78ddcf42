"""The argument `precision` of matrix products, checked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def checked(precision: Any) -> Any:
    """`precision` as a hashable value.

    Raises:
      ValueError: for what jax.numpy.dot does not take.
    """
    if precision is None:
        return None
    if isinstance(precision, list):
        precision = tuple(precision)
    try:
        jax.eval_shape(lambda x: jnp.dot(x, x, precision=precision), jax.ShapeDtypeStruct((1,), jnp.float32))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"precision: got {precision!r}, want what jax.numpy.dot takes, such as None or 'highest'"
        ) from error
    return precision
