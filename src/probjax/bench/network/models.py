"""The reference workloads, exactly as the reference file measured them: models, attention by label, inputs.

A transformer of 4 pre-norm blocks with 256 channels and 8 heads has 3,159,040 parameters in 64 arrays; the
diffusion transformer around it, whose modulators have a hidden layer of 512 units, 5,817,896 in 105.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from probjax.bench.measure import Unavailable
from probjax.bench.network.rows import Network

SEED = 20261201
HEADS = 8
CONDITION_HIDDEN = 512
CHANNELS = 8
"""Of the inputs and outputs of the diffusion transformer."""


def attention_function(label: str) -> Callable[..., Any]:
    """Return what a row takes for its attention: f(query, key, value), each (batch, tokens, heads, size).

    Args:
      label: ``probjax_default``; ``jax_xla``; ``probjax_flax``, Flax's dense attention through our module;
        ``no_attention``, the values as they are.
    """
    if label == "probjax_default":
        from probjax import dot_product_attention

        return dot_product_attention
    if label == "jax_xla":
        return functools.partial(jax.nn.dot_product_attention, implementation="xla")
    if label == "probjax_flax":
        return flax().dot_product_attention
    assert label == "no_attention", label
    return _values


def _values(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return value


def flax() -> Any:
    """Return `flax.nnx`.

    Raises:
      Unavailable: without Flax.
    """
    try:
        from flax import nnx
    except ImportError as error:
        raise Unavailable(f"flax.nnx cannot be imported ({error}): install flax") from None
    return nnx


def model_of(
    model: str,
    *,
    attention: str,
    dtype: str,
    features: int = 256,
    layers: int = 4,
    **options: Any,
) -> Any:
    """Return a reference model, with the same parameters whatever its attention.

    Args:
      model: ``transformer`` or ``diffusion``.
      attention: see `attention_function`.
      dtype: of the computation; parameters are float32.
      features: channels of the blocks.
      layers: their number.
      **options: `scan_layers` and `remat` of the model.

    Raises:
      Unavailable: without Flax.
    """
    nnx = flax()
    from probjax.nn import DiffusionTransformer, Transformer

    options |= {
        "final_norm": False,
        "attention_fn": attention_function(attention),
        "dtype": jnp.dtype(dtype),
        "rngs": nnx.Rngs(SEED),
    }
    if model == "transformer":
        return Transformer(features, layers, HEADS, **options)
    assert model == "diffusion", model
    return DiffusionTransformer(
        features,
        layers,
        HEADS,
        in_features=CHANNELS,
        condition_hidden=CONDITION_HIDDEN,
        gate=False,
        **options,
    )


def inputs_of(model: str, *, dtype: str, batch: int, tokens: int, features: int) -> tuple[jax.Array, ...]:
    """Return a reference model's inputs: x, and the times of ``diffusion``; in the dtype of computation."""
    generator = np.random.default_rng([SEED, batch, tokens])
    channels = CHANNELS if model == "diffusion" else features
    x = generator.standard_normal((batch, tokens, channels), np.float32)
    arrays = (x, generator.random(batch, np.float32)) if model == "diffusion" else (x,)
    return tuple(jnp.asarray(array, dtype) for array in arrays)


def as_network(
    model: Any,
    inputs: tuple[jax.Array, ...],
    *,
    call: Callable[..., jax.Array] = lambda model, *inputs: model(*inputs),
) -> Network:
    """Return a Flax model as a function of its parameters.

    Kernels that start at zero get small numbers: on zeros, what is behind them could be wrong unnoticed.

    Args:
      model: the model.
      inputs: arrays.
      call: f(model, *inputs), the output.
    """
    nnx = flax()
    definition, parameters = nnx.split(model)
    leaves, tree = jax.tree.flatten(parameters)
    generator = np.random.default_rng(SEED)
    leaves = [
        jnp.asarray(0.02 * generator.standard_normal(leaf.shape, np.float32), leaf.dtype)
        if leaf.ndim > 1 and not leaf.any()
        else leaf
        for leaf in leaves
    ]

    def apply(parameters: Any, *inputs: jax.Array) -> jax.Array:
        return call(nnx.merge(definition, parameters), *inputs)

    return Network(apply, jax.tree.unflatten(tree, leaves), inputs)
