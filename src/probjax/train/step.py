"""One step of training: gradient of a loss, update of parameters and optimizer state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Loss = Callable[[Any, Any, Any], Any]


def train_step(loss: Loss, optimizer: Any, *, donate: bool = True) -> Callable[..., Any]:
    """A compiled step of training: step(params, opt_state, batch, key=None).

    It compiles once for each set of shapes, and computes the same for the same arguments: keys are arguments,
    nothing is kept between calls.

    Args:
      loss: f(params, batch, key), a scalar, or (scalar, metrics) with any pytree of arrays for metrics. `key`
        is what the step was given.
      optimizer: has optax's two functions: init(params), the first `opt_state`, and update(gradients,
        opt_state, params), the updates to be added and the next state.
      donate: let the new parameters and state take the memory of the old: those given to a step are gone
        after it, and a training loop holds one copy instead of two. `jax_debug_nans` turns this off, since
        it runs a failed step again.

    Returns:
      The step, made by `jax.jit`. It returns (params, opt_state, loss, metrics); loss and metrics are those
      before the update, metrics an empty dict where the loss has none.

    Raises:
      TypeError: for an optimizer without these functions; at a call for parameters that are not floating, and
        for a loss that is no scalar or not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from probjax.train import train_step
      >>> optimizer = optax.sgd(0.1)
      >>> step = train_step(lambda params, batch, key: jnp.mean((params["w"] * batch - 1) ** 2), optimizer)
      >>> params = {"w": jnp.zeros(())}
      >>> params, state, loss, metrics = step(params, optimizer.init(params), jnp.ones(4))
      >>> float(loss), round(float(params["w"]), 3)
      (1.0, 0.2)
    """
    for name in ("init", "update"):
        if not callable(getattr(optimizer, name, None)):
            raise TypeError(
                f"optimizer: got {type(optimizer).__name__} without a function {name}, want optax's two"
                " functions, such as optax.adam(1e-3)"
            )
    return jax.jit(plain_step(loss, optimizer), donate_argnums=(0, 1) if donate else ())


def plain_step(loss: Loss, optimizer: Any) -> Callable[..., Any]:
    """The step of `train_step`, to be compiled as part of another program."""

    def measured(params: Any, batch: Any, key: Any) -> tuple[Array, Any]:
        found = loss(params, batch, key)
        value, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        return _scalar(value), metrics

    def step(params: Any, opt_state: Any, batch: Any, key: Any = None) -> tuple[Any, Any, Array, Any]:
        _require_floating(params)
        (value, metrics), gradients = jax.value_and_grad(measured, has_aux=True)(params, batch, key)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        # Cast back: a learning rate in float32 must not turn half-precision parameters into float32 ones.
        params = jax.tree.map(lambda p, u: jnp.asarray(p + u).astype(p.dtype), params, updates)
        return params, opt_state, value, metrics

    return step


def _require_floating(params: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"params{jax.tree_util.keystr(path)}: got dtype {dtype}, want a floating one: keep what"
                " is not trained outside of params"
            )


def _scalar(value: Any) -> Array:
    try:
        value = jnp.asarray(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"loss: got {type(value).__name__}, want a scalar array or (scalar, metrics)"
        ) from None
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"loss: got shape {value.shape} and dtype {value.dtype}, want a floating scalar: reduce it, by"
            " jnp.mean for example"
        )
    return value
