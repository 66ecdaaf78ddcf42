"""Models with the batch on eight devices: the numbers of one, and no array is gathered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from nn_helpers import close, normal, pure, trees_close

from probjax.nn import (
    DiffusionTransformer,
    LRUCell,
    MambaBlock,
    MixtureOfExperts,
    SequenceModel,
    Transformer,
    UNet,
)

D = 16
MODELS = {
    "transformer": lambda r: Transformer(D, 2, 4, scan_layers=True, remat="full", rotary=10.0, rngs=r),
    "diffusion": lambda r: DiffusionTransformer(D, 2, 4, in_features=D, rngs=r),
    "unet": lambda r: UNet(D, spatial_rank=1, channels=(8, 16), attention=(False, True), num_heads=2, rngs=r),
    "mamba": lambda r: SequenceModel(D, 2, functools.partial(MambaBlock, state_size=4), glu=False, rngs=r),
    "lru": lambda r: SequenceModel(D, 2, LRUCell, direction="bidirectional", rngs=r),
}


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", MODELS)
def test_the_batch_on_eight_devices(name, axes):
    apply, state = pure(MODELS[name](nnx.Rngs(0)))
    inputs = [normal((8, 12, D))] + ([np.linspace(0, 1, 8, dtype=np.float32)] if name == "diffusion" else [])

    def loss(state, *inputs):
        return jnp.sum(jnp.sin(apply(state, *inputs) + inputs[0]))

    want = jax.jit(jax.value_and_grad(loss))(state, *inputs)
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(axes,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
        sharded = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch"))) for x in inputs]
        compiled = jax.jit(jax.value_and_grad(loss)).lower(placed, *sharded).compile()
        got = jax.device_get(compiled(placed, *sharded))
    assert "all-gather" not in compiled.as_text()
    close(got[0], want[0])
    trees_close(got[1], want[1], 1e-4)


def test_experts_on_eight_devices():
    # Tokens of all devices share the experts' capacity, so that something is gathered.
    apply, state = pure(MixtureOfExperts(D, 8, 8, capacity_factor=1.0, rngs=nnx.Rngs(0)))
    x = normal((8, 12, D))
    want = apply(state, x)[0]
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
    spread = {"gate", "up", "down"}
    with jax.set_mesh(mesh):
        placed = jax.tree_util.tree_map_with_path(
            lambda path, p: jax.device_put(
                p,
                NamedSharding(
                    mesh, PartitionSpec("batch" if str(getattr(path[0], "key", "")) in spread else None)
                ),
            ),
            state,
        )
        got = jax.jit(lambda s, x: apply(s, x)[0])(
            placed, jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch")))
        )
    close(jax.device_get(got), want)
