"""Multi-layer perceptron, and dropout with a key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from probjax.nn._cpu import dot_general
from probjax.nn._module import at_least_one

Array = jax.Array


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """`x` with a share of its entries zero and the others scaled up; as it is without a key."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype)).astype(x.dtype)


def check_rate(name: str, rate: float) -> float:
    if not 0 <= rate < 1:
        raise ValueError(f"{name}: got {rate}, want a probability in [0, 1)")
    return rate


def fold(key: Array | None, number: Any) -> Array | None:
    """A key of its own for each use: layers and operations draw different masks from one key."""
    return None if key is None else jax.random.fold_in(key, number)


class MLP(nnx.Module):
    """Linear layers with an activation between them: (*B, features[0]) to (*B, features[-1]).

    Args:
      features: widths from input to output, at least two: (16, 64, 64, 16) has two hidden layers, (4, 2) is
        one linear map.
      activation: between the layers.
      activate_final: whether it follows the last layer too.
      dropout_rate: after each activation, where a call is given a key.
      use_bias: whether layers have one.
      kernel_init, final_kernel_init: initializers, None for LeCun's normal; the last layer's, None for the
        same.
      dtype: of the computation, None for what inputs and parameters are promoted to.
      param_dtype: of the parameters.
      rngs: for the initial values; it is not kept.

    Raises:
      ValueError: for fewer than two widths, widths below 1, or a rate that is none.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from probjax.nn import MLP
      >>> MLP((16, 64, 2), rngs=nnx.Rngs(0))(jnp.ones((8, 16))).shape
      (8, 2)
    """

    def __init__(
        self,
        features: Sequence[int],
        *,
        activation: Callable[[Array], Array] = jax.nn.gelu,
        activate_final: bool = False,
        dropout_rate: float = 0.0,
        use_bias: bool = True,
        kernel_init: Any = None,
        final_kernel_init: Any = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        features = tuple(features)
        if len(features) < 2:
            raise ValueError(f"features: got {features}, want at least an input and an output width")
        at_least_one(**{f"features[{i}]": width for i, width in enumerate(features)})
        self.activation, self.activate_final = activation, activate_final
        self.dropout_rate = check_rate("dropout_rate", dropout_rate)
        kernel_init = kernel_init or nnx.initializers.lecun_normal()
        inits = [kernel_init] * (len(features) - 2) + [final_kernel_init or kernel_init]
        self.layers = nnx.List(
            nnx.Linear(
                width,
                out,
                use_bias=use_bias,
                kernel_init=init,
                dtype=dtype,
                param_dtype=param_dtype,
                dot_general=dot_general,
                rngs=rngs,
            )
            for width, out, init in zip(features[:-1], features[1:], inits, strict=True)
        )

    def __call__(self, x: Array, *, dropout_key: Array | None = None) -> Array:
        """Runs the layers.

        Args:
          x: (*B, features[0]), floating.
          dropout_key: a key draws dropout; None leaves it out.

        Returns:
          (*B, features[-1]) in the dtype of the computation.
        """
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i < last or self.activate_final:
                x = dropout(self.activation(x), self.dropout_rate, fold(dropout_key, i))
        return x
