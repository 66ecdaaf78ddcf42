"""Embeddings of positions and of times."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from probjax.nn._module import at_least_one, wide

Array = jax.Array


def rotary_embedding(x: Array, positions: Array | None = None, *, theta: float = 10_000.0) -> Array:
    """Rotates queries or keys by their positions, so that scores depend on distances alone.

    Channels i and i + D/2 of a head are one pair, turned by position · theta^(-2 i / D). Angles and products
    are float32 (float64 for float64).

    Args:
      x: (*B, L, N, D), floating, D even.
      positions: numbers that broadcast to (*B, L); None is 0, 1, ..., L - 1.
      theta: the base of the wavelengths.

    Returns:
      (*B, L, N, D) in the dtype of `x`.

    Raises:
      ValueError: for an odd D, or positions that do not fit.

    Source: Su et al., arXiv:2104.09864; pairs as in GPT-NeoX.

    Example:
      >>> import jax.numpy as jnp
      >>> from probjax.nn import rotary_embedding
      >>> rotary_embedding(jnp.ones((2, 5, 4, 8))).shape
      (2, 5, 4, 8)
    """
    x = jnp.asarray(x)
    if x.ndim < 3:
        raise ValueError(f"x: got shape {x.shape}, want (*B, L, N, D)")
    *batch, length, _, size = x.shape
    if size % 2:
        raise ValueError(f"x: got {size} channels per head, want an even number: they are rotated in pairs")
    exact = wide(x.dtype)
    positions = jnp.arange(length) if positions is None else jnp.asarray(positions)
    try:
        fits = jnp.broadcast_shapes(positions.shape, (*batch, length)) == (*batch, length)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"positions: got shape {positions.shape}, want what broadcasts to (*B, L) = {(*batch, length)}"
        )
    angles = positions[..., None, None].astype(exact) * _frequencies(size // 2, theta, exact)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(exact), 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def sinusoidal_embedding(positions: Any, features: int, *, max_period: float = 10_000.0) -> Array:
    """Sines and cosines of numbers at geometric frequencies, for positions or times.

    The first half of the channels are sines of position · max_period^(-i / n), n = ceil(features / 2), the
    second half cosines; of an odd number of channels the last cosine is left out.

    Args:
      positions: (*B,) numbers.
      features: number of channels, C.
      max_period: the longest wavelength is 2π times nearly this.

    Returns:
      (*B, C), float32 (float64 for float64 positions).

    Raises:
      ValueError: for less than one channel.

    Source: Vaswani et al., arXiv:1706.03762.

    Example:
      >>> import jax.numpy as jnp
      >>> from probjax.nn import sinusoidal_embedding
      >>> sinusoidal_embedding(jnp.arange(5), 16).shape
      (5, 16)
    """
    at_least_one(features=features)
    positions = jnp.asarray(positions)
    exact = wide(positions.dtype if jnp.issubdtype(positions.dtype, jnp.floating) else jnp.float32)
    count = -(-features // 2)
    angles = positions.astype(exact)[..., None] * _frequencies(count, max_period, exact)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)[..., :features]


def _frequencies(count: int, base: float, dtype: Any) -> Array:
    return jnp.exp(jnp.arange(count, dtype=dtype) * (-math.log(base) / count))


class FourierFeatures(nnx.Module):
    """Cosines and sines of learned projections: (*B, in_features) to (*B, 2 num_frequencies).

    Args:
      in_features: numbers per entry, such as 1 for a time.
      num_frequencies: rows of the frequency matrix.
      scale: standard deviation of the frequencies at first; they are in radians per unit of the input.
      dtype: of the result, None for what inputs and parameters are promoted to; angles are float32 at least.
      param_dtype: of the frequencies.
      rngs: for the initial values; it is not kept.

    Raises:
      ValueError: for sizes below 1, and at a call for inputs of another size.

    Source: Tancik et al., arXiv:2006.10739.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from probjax.nn import FourierFeatures
      >>> FourierFeatures(1, 32, rngs=nnx.Rngs(0))(jnp.ones((4, 1))).shape
      (4, 64)
    """

    def __init__(
        self,
        in_features: int,
        num_frequencies: int,
        *,
        scale: float = 2 * math.pi,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        at_least_one(in_features=in_features, num_frequencies=num_frequencies)
        self.in_features, self.dtype = in_features, dtype
        shape = (num_frequencies, in_features)
        self.frequencies = nnx.Param(scale * jax.random.normal(rngs.params(), shape, param_dtype))

    def __call__(self, x: Array) -> Array:
        x = jnp.asarray(x)
        if x.ndim < 1 or x.shape[-1] != self.in_features:
            raise ValueError(f"x: got shape {x.shape}, want (*B, {self.in_features})")
        frequencies = self.frequencies[...]
        dtype = jnp.promote_types(x.dtype, frequencies.dtype) if self.dtype is None else self.dtype
        exact = wide(jnp.promote_types(x.dtype, frequencies.dtype))
        # One product per number, not a matrix product: that is rounded to 10 bits on NVIDIA GPUs.
        angles = jnp.sum(x.astype(exact)[..., None, :] * frequencies.astype(exact), -1)
        return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1).astype(dtype)
