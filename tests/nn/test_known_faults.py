"""The faults M01 to M21 of the earlier system's models, each with what is right.

Tested elsewhere in full: M01 (test_unet: an impulse), M02 and M03 (test_unet: stages), M04 and M14 (half
types are kept), M06 (test_unet: any number of channels), M07 (dropout), M10 and M11 (test_layers), M17
(test_cells: the variance). M20 and M21 are faults of helpers that have no counterpart here: an optional-rng
wrapper, DeepSet.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nn_helpers import normal

from probjax.nn import MLP, LRUCell, Mamba2Block, MixtureOfExperts, SequenceModel, SSDCell, UNet, _cpu
from probjax.nn import sinusoidal_embedding as embed


def test_m01_an_int_kernel_is_square():
    model = UNet(3, spatial_rank=2, channels=(8, 16), kernel_size=3, rngs=nnx.Rngs(0))
    assert model.down[0][0].block.conv1.kernel.shape == (3, 3, 8, 8)
    with pytest.raises(TypeError, match="spatial_rank"):
        UNet(3, channels=(8, 16), rngs=nnx.Rngs(0))


def test_m05_the_preferred_type_is_honoured():
    x, w = (jnp.asarray(normal(s), jnp.bfloat16) for s in ((4, 3), (3, 5)))
    out = _cpu.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    assert out.dtype == jnp.float32


def test_m10_odd_widths_in_half_precision():
    assert embed(jnp.arange(5, dtype=jnp.bfloat16), 7).shape == (5, 7)


def test_m13_without_hidden_layers_there_is_an_output_layer():
    assert MLP((4, 2), rngs=nnx.Rngs(0))(normal((3, 4))).shape == (3, 2)
    assert SequenceModel(8, 0, LRUCell, out_features=2, rngs=nnx.Rngs(0))(normal((3, 8))).shape == (3, 2)


def test_m15_heads_do_not_narrow_the_output():
    block = Mamba2Block(128, head_size=64, state_size=16, rngs=nnx.Rngs(0))
    assert block.heads == 4
    assert block(normal((2, 9, 128))).shape == (2, 9, 128)


@pytest.mark.parametrize("cell", [SSDCell, functools.partial(Mamba2Block, state_size=16)])
def test_m16_states_of_long_sequences_stay_bounded(cell):
    y = cell(128, rngs=nnx.Rngs(0))(normal((1, 1024, 128)))
    assert np.isfinite(y).all()
    late, early = np.abs(y[:, -128:]).max(), np.abs(y[:, 128:256]).max()
    assert late < 10 * early


def test_m18_choices_are_checked_under_jit_too():
    experts = MixtureOfExperts(8, 16, 4, rngs=nnx.Rngs(0))
    x = normal((5, 8))
    np.testing.assert_allclose(jax.jit(lambda x: experts(x)[0])(x), experts(x)[0], rtol=1e-5, atol=1e-6)


def test_m19_arguments_arrive_or_are_refused():
    with pytest.raises(TypeError, match="unheard_of"):
        MLP((4, 2), unheard_of=1, rngs=nnx.Rngs(0))
    model = SequenceModel(8, 1, functools.partial(Mamba2Block, head_size=4, state_size=5), rngs=nnx.Rngs(0))
    assert model.stack.blocks[0].cell.state_size == 5
