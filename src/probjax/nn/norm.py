"""Adaptive layer norm: scale, shift and gate from a condition."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from probjax.nn._cpu import dot_general
from probjax.nn._module import at_least_one
from probjax.nn.mlp import MLP

Array = jax.Array


class AdaptiveLayerNorm(nnx.Module):
    """Layer norm whose scale and shift come from a condition: norm(x) (1 + scale) + shift.

    Scale, shift and gate start at zero: at first it is a plain layer norm.

    Args:
      features: channels.
      condition_features: channels of the condition.
      hidden_features: None for one linear map of SiLU(condition); a width for a hidden layer of that many
        GELU units instead.
      gate: whether a gate is returned too, for what is computed from the normed x (adaLN-Zero,
        arXiv:2212.09748). Then the norm has no scale and bias of its own, else it has.
      epsilon: added to the variance.
      dtype: of the computation, None for what inputs and parameters are promoted to.
      param_dtype: of the parameters.
      rngs: for the initial values; it is not kept.

    Raises:
      ValueError: for sizes below 1, and at a call for a condition that does not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from probjax.nn import AdaptiveLayerNorm
      >>> norm = AdaptiveLayerNorm(16, 8, rngs=nnx.Rngs(0))
      >>> norm(jnp.ones((2, 5, 16)), jnp.ones((2, 8))).shape
      (2, 5, 16)
    """

    def __init__(
        self,
        features: int,
        condition_features: int,
        *,
        hidden_features: int | None = None,
        gate: bool = False,
        epsilon: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        at_least_one(features=features, condition_features=condition_features)
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.condition_features, self.gate = condition_features, gate
        self.norm = nnx.LayerNorm(features, epsilon=epsilon, use_scale=not gate, use_bias=not gate, **kinds)
        out = (3 if gate else 2) * features
        zeros = nnx.initializers.zeros_init()
        self.linear = hidden_features is None
        if hidden_features is None:
            self.modulation = nnx.Linear(
                condition_features, out, kernel_init=zeros, dot_general=dot_general, **kinds
            )
        else:
            self.modulation = MLP(
                (condition_features, hidden_features, out), final_kernel_init=zeros, **kinds
            )

    def __call__(self, x: Array, condition: Array) -> Any:
        """Norms and modulates.

        Args:
          x: (*B, L, features).
          condition: (*B, condition_features), or (*B, L, condition_features) for one per token.

        Returns:
          y: (*B, L, features); with `gate` also the gate, (*B, 1 or L, features).
        """
        condition = jnp.asarray(condition)
        wanted = (*x.shape[:-2], self.condition_features)
        if condition.ndim == x.ndim - 1:
            condition = condition[..., None, :]
        if (
            condition.ndim != x.ndim
            or condition.shape[-2] not in (1, x.shape[-2])
            or any(
                got not in (1, want)
                for got, want in zip((*condition.shape[:-2], condition.shape[-1]), wanted, strict=True)
            )
            or condition.shape[-1] != self.condition_features
        ):
            raise ValueError(
                f"condition: got shape {condition.shape}, want (*B, {self.condition_features}) or (*B, L, "
                f"{self.condition_features}) with the leading axes of x, {x.shape[:-1]}"
            )
        parts = self.modulation(jax.nn.silu(condition) if self.linear else condition)
        scale, shift, *gates = jnp.split(parts, 3 if self.gate else 2, -1)
        y = self.norm(x) * (1 + scale) + shift
        return (y, gates[0]) if self.gate else y
