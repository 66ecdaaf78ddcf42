"""The frozen description of one call, and the arrays of a call by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from probjax.attention._mask import Mask
from probjax.attention.biases import Bias

Array = jax.Array

QUERY, KEY, VALUE = 0, 1, 2  # positions of the first operands; the others follow as the spec says


@dataclass(frozen=True)
class AttentionSpec:
    """What every implementation receives besides the arrays. Fields ending in `_at` are positions of
    operands.

    `mask` and `bias` are tree structures whose leaves are the operands from `mask_at` and `bias_at` on.
    `plain` asks for an implementation that JAX can differentiate, `portable` for one that needs nothing but
    JAX to run.
    """

    mask: Any = None
    mask_at: int = 0
    bias: Any = None
    bias_at: int = 0
    scale: float = 1.0  # times the operand at `scale_at`, if there is one
    scale_at: int | None = None
    sinks_at: int | None = None
    dropout_rate: float = 0.0
    dropout_at: int | None = None
    index_at: int | None = None  # batch indices, then head indices; only where something looks at them
    precision: Any = None
    implementation: str | None = None
    plain: bool = False
    portable: bool = False

    def differentiable(self) -> AttentionSpec:
        return replace(self, plain=True)

    def leaves(self, tree: Any, start: int) -> range:
        return range(start, start + tree.num_leaves) if tree is not None else range(0)

    def mask_of(self, arrays: Any) -> Mask | None:
        """The mask, with its arrays taken from those of the call (or of a tile)."""
        if self.mask is None:
            return None
        return jax.tree.unflatten(self.mask, [arrays[i] for i in self.leaves(self.mask, self.mask_at)])

    def bias_of(self, arrays: Any) -> Bias | None:
        if self.bias is None:
            return None
        return jax.tree.unflatten(self.bias, [arrays[i] for i in self.leaves(self.bias, self.bias_at)])

    def can_hide(self) -> bool:
        """Whether some pair may be hidden, by a mask or by a bias of minus infinity."""
        return self.mask is not None or self.bias is not None


def accumulator(dtype: Any) -> Any:
    """The dtype of softmax and sums: float64 for float64, float32 for all others."""
    return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32
