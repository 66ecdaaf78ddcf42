"""The reference model of the suite `ssm`: a stack of blocks, each a recurrent cell and an MLP.

Per block: norm, norm, cell (backwards in time in every other block), GELU, gated linear unit, skip; norm, MLP
with GELU after both of its layers, skip. That two norms follow each other, and the last GELU, are as in the
model of the reference file. With 4 blocks of 128 channels it has as many parameters as that: 930,704 with
mamba, 865,172 with ssd, 995,728 with lru.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

MLP_FACTOR = 4
FEATURES = 16
"""Channels of the model's inputs and outputs."""


class Block(nnx.Module):
    """One block, (batch, length, features) to the same.

    Args:
      features: channels.
      cell: makes the cell; takes features, dtype and rngs.
      backwards: whether the cell sees the sequence from its end.
      dtype: of the computation; parameters are float32.
      rngs: for the initial values.
    """

    def __init__(
        self, features: int, cell: Callable[..., Any], *, backwards: bool, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        kinds = {"dtype": dtype, "rngs": rngs}
        self.backwards = backwards
        self.norm = nnx.LayerNorm(features, **kinds)
        self.cell_norm = nnx.LayerNorm(features, **kinds)
        self.cell = cell(features, **kinds)
        self.value = nnx.Linear(features, features, **kinds)
        self.gate = nnx.Linear(features, features, **kinds)
        self.mlp_norm = nnx.LayerNorm(features, **kinds)
        self.mlp_in = nnx.Linear(features, MLP_FACTOR * features, **kinds)
        self.mlp_out = nnx.Linear(MLP_FACTOR * features, features, **kinds)

    def mix(self, h: jax.Array) -> jax.Array:
        """Run the recurrent half, with its skip."""
        x = self.cell_norm(self.norm(h))
        y = jnp.flip(self.cell(jnp.flip(x, 1)), 1) if self.backwards else self.cell(x)
        y = jax.nn.gelu(y)
        return h + self.value(y) * jax.nn.sigmoid(self.gate(y))

    def feed(self, h: jax.Array) -> jax.Array:
        """Run the MLP, with its skip."""
        return h + jax.nn.gelu(self.mlp_out(jax.nn.gelu(self.mlp_in(self.mlp_norm(h)))))


class Model(nnx.Module):
    """The stack, (batch, length, FEATURES) to the same.

    Args:
      features: channels between the blocks.
      layers: number of blocks.
      cell: see `Block`.
      remat: compute the two halves of every block again in the backward pass, instead of keeping what is
        inside them. (A block as a whole needs more memory: 134 MB instead of 111 with ssd at 1024 tokens.)
      dtype: of the computation; parameters are float32.
      rngs: for the initial values.
    """

    def __init__(
        self,
        features: int,
        layers: int,
        cell: Callable[..., Any],
        *,
        remat: bool = False,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        self.remat = remat
        self.embed = nnx.Linear(FEATURES, features, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(
            Block(features, cell, backwards=index % 2 == 1, dtype=dtype, rngs=rngs) for index in range(layers)
        )
        self.norm = nnx.LayerNorm(features, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(features, FEATURES, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Run the model."""
        h = self.embed(x)
        for block in self.blocks:
            definition, parameters = nnx.split(block)
            for half in (Block.mix, Block.feed):

                def run(parameters: Any, h: jax.Array, definition: Any = definition, half: Any = half) -> Any:
                    return half(nnx.merge(definition, parameters), h)

                h = (jax.checkpoint(run) if self.remat else run)(parameters, h)
        return self.head(self.norm(h))
