"""The reference transformer in plain Flax, the row `flax`: stock layers, stock attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from probjax.bench.network.models import HEADS
from probjax.bench.network.rows import Network


class Block(nnx.Module):
    """One pre-norm block.

    Args:
      features: channels.
      dtype: of the computation; parameters are float32.
      rngs: for the initial values.
    """

    def __init__(self, features: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        kinds = {"dtype": dtype, "rngs": rngs}
        self.attention_norm = nnx.LayerNorm(features, **kinds)
        self.attention = nnx.MultiHeadAttention(HEADS, features, decode=False, **kinds)
        self.mlp_norm = nnx.LayerNorm(features, **kinds)
        self.mlp_in = nnx.Linear(features, 4 * features, **kinds)
        self.mlp_out = nnx.Linear(4 * features, features, **kinds)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Run the block."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp_out(jax.nn.gelu(self.mlp_in(self.mlp_norm(x))))


class Transformer(nnx.Module):
    """The stack; see `Block` for the arguments."""

    def __init__(self, features: int, layers: int, *, dtype: Any, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(features, dtype=dtype, rngs=rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Run the model."""
        for block in self.blocks:
            x = block(x)
        return x


def flax_network(ours: Network, *, dtype: str, features: int, layers: int) -> Network:
    """Return the Flax model as a function of the parameters of ours, which it takes under its own names.

    Args:
      ours: the reference transformer with its parameters and inputs.
      dtype: of the computation.
      features: channels.
      layers: number of blocks.
    """
    model = Transformer(features, layers, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    definition, state = nnx.split(model)

    def apply(parameters: Any, x: jax.Array) -> jax.Array:
        named = {"blocks": _renamed(nnx.to_pure_dict(parameters)["stack"]["blocks"])}
        flat = [(path, leaf.replace(_at(named, path))) for path, leaf in nnx.to_flat_state(state)]
        return nnx.merge(definition, nnx.from_flat_state(flat))(x)

    return Network(apply, ours.parameters, ours.inputs)


def _at(tree: Any, path: Iterable[Any]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _renamed(blocks: Mapping[int, Any]) -> dict[int, Any]:
    return {
        index: {
            "attention_norm": block["attention_norm"],
            "attention": block["attention"],
            "mlp_norm": block["mlp_norm"],
            "mlp_in": block["mlp"]["layers"][0],
            "mlp_out": block["mlp"]["layers"][1],
        }
        for index, block in blocks.items()
    }
