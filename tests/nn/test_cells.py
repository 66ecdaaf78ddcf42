"""Parameters and their initial values, and what is said about bad input."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cell_helpers import BATCH, FEATURES, MAKE, NAMES, call, copied, inputs, make
from flax import nnx

from probjax import nn
from probjax.nn.griffin import bounded_sqrt

RNGS = nnx.Rngs


def count(cell):
    leaves = jax.tree.leaves(cell)
    return sum(leaf.size for leaf in leaves), len(leaves)


@pytest.mark.parametrize(
    ("kind", "wanted"), [("LRUCell", (82_304, 8)), ("MambaCell", (66_048, 8)), ("SSDCell", (49_665, 8))]
)
def test_cells_have_the_parameters_of_the_reference_models(kind, wanted):
    shapes = jax.eval_shape(lambda: getattr(nn, kind)(128, rngs=RNGS(0)))
    assert count(shapes) == wanted
    # With 3 layer norms, 4 linear layers per layer; two and a norm around 4 layers: 94 leaves in all.
    assert 6 + 4 * (3 * 2 + 4 * 2 + wanted[1]) == 94


def test_blocks_have_the_parameters_of_the_papers():
    D, E, N, W, R = 128, 256, 16, 4, 8
    block = jax.eval_shape(lambda: nn.MambaBlock(D, rngs=RNGS(0)))
    wanted = D * 2 * E + (W + 1) * E + E * (R + 2 * N) + (R + 1) * E + E * N + E + E * D
    assert count(block) == (wanted, 9)
    H, G, N = 4, 2, 128
    block = jax.eval_shape(lambda: nn.Mamba2Block(D, groups=G, rngs=RNGS(0)))
    wanted = D * (2 * E + 2 * G * N + H) + (W + 1) * (E + 2 * G * N) + 3 * H + E + E * D
    assert count(block) == (wanted, 8)
    E, K = 160, 8
    block = jax.eval_shape(lambda: nn.RGLRUBlock(D, width=E, rngs=RNGS(0)))
    wanted = 2 * (D + 1) * E + (W + 1) * E + 2 * (E * E // K + E) + E + (E + 1) * D
    assert count(block) == (wanted, 13)


def test_state_shapes_and_dtypes():
    complex64, float32, bfloat16 = (jnp.dtype(d) for d in (jnp.complex64, jnp.float32, jnp.bfloat16))
    for name, wanted in {
        "lru": [((5,), complex64)],
        "mamba": [((8, 5), float32)],
        "ssd": [((1, 5, 8), float32)],
        "mamba_block": [((3, 16), bfloat16), ((16, 3), float32)],
        "mamba2_block": [((3, 28), bfloat16), ((4, 3, 4), float32)],
        "rglru_block": [((3, 12), bfloat16), ((12,), float32), ((), float32)],
    }.items():
        cell = jax.eval_shape(lambda name=name: MAKE[name](rngs=RNGS(0), dtype=jnp.bfloat16))
        for given, batch in (((), ()), (3, (3,)), ((2, 3), (2, 3))):
            state = cell.init_state(given)
            assert isinstance(state, tuple)
            assert [(part.shape, part.dtype) for part in state] == [((*batch, *s), d) for s, d in wanted]
            assert not any(np.asarray(part, np.complex64).any() for part in state)


def quantiles(sample):
    """The largest distance of a sample on [0, 1] from the uniform distribution."""
    sample = np.sort(np.asarray(sample, np.float64).ravel())
    assert sample[0] >= -1e-5
    assert sample[-1] <= 1 + 1e-5
    return np.abs(sample - (np.arange(sample.size) + 0.5) / sample.size).max()


@pytest.mark.parametrize(
    ("r_min", "r_max"), [(0.0, 1.0), (0.4, 0.9), (0.9, 0.999), (0.99999, 1.0), (0.999999, 0.9999999)]
)
def test_lru_starts_on_the_ring(r_min, r_max):
    cell = nn.LRUCell(1, 4096, r_min=r_min, r_max=r_max, max_phase=0.5, rngs=RNGS(3))
    rate, phase = (np.exp(np.asarray(p[...], np.float64)) for p in (cell.nu, cell.theta))
    assert (rate > 0).all()
    # |λ|² = exp(-2 rate) is uniform; 1 - |λ|² keeps digits where |λ| is next to 1.
    low, high = ((1 - r) * (1 + r) for r in (r_max, r_min))
    assert quantiles((-np.expm1(-2 * rate) - low) / (high - low)) < 0.03
    assert quantiles(phase / 0.5) < 0.03
    assert (phase > 0).all()
    gamma = 0.5 * np.log(-np.expm1(-2 * rate))
    np.testing.assert_allclose(cell.gamma[...], gamma, rtol=1e-5, atol=1e-5)


def test_lru_keeps_the_variance():
    cell = nn.LRUCell(128, r_max=0.95, rngs=RNGS(0))
    x = jax.random.normal(jax.random.key(0), (4, 256, 128))
    y = np.asarray(jax.jit(cell)(x))[:, 64:]
    assert 1 < y.var() < 4  # of D x alone: 1
    assert 0.8 < float(jnp.var(x @ cell.D[...])) < 1.2


def softplus(x):
    return np.logaddexp(0, np.asarray(x, np.float64))


@pytest.mark.parametrize(
    "bias",
    [
        lambda: nn.MambaCell(2048, 2, rngs=RNGS(0)).to_dt.bias,
        lambda: nn.MambaBlock(1024, rngs=RNGS(0), state_size=1).dt_proj.bias,
        lambda: nn.Mamba2Block(1024, head_size=1, state_size=1, rngs=RNGS(0)).dt_bias,
    ],
    ids=["MambaCell", "MambaBlock", "Mamba2Block"],
)
def test_step_sizes_start_log_uniform(bias):
    steps = softplus(bias()[...])
    assert quantiles((np.log(steps) - np.log(1e-3)) / (np.log(1e-1) - np.log(1e-3))) < 0.04


def test_decays_start_as_in_the_papers():
    A = np.exp(np.asarray(nn.MambaCell(3, 16, rngs=RNGS(0)).A_log[...]))
    np.testing.assert_allclose(A, np.tile(np.arange(1, 17), (3, 1)), rtol=1e-6)
    assert not np.any(np.asarray(nn.MambaCell(3, rngs=RNGS(0)).D[...]) != 1)
    A = np.exp(np.asarray(nn.Mamba2Block(1024, head_size=1, state_size=1, rngs=RNGS(0)).A_log[...]))
    assert quantiles((A - 1) / 15) < 0.04
    radius = np.exp(-softplus(nn.RGLRUBlock(2048, rngs=RNGS(0)).Lambda[...]))
    assert quantiles((radius**2 - 0.9**2) / (0.999**2 - 0.9**2)) < 0.04


def test_ssd_stays_bounded():
    cell = nn.SSDCell(16, rngs=RNGS(0))
    cell.decay.bias = nnx.Param(jnp.array([-100.0]))  # a logit that would let a bare log-decay be +100
    y, (state,) = jax.jit(lambda x: cell(x, return_state=True))(inputs_of(16, 2000))
    assert np.isfinite(np.asarray(y)).all()
    assert np.abs(np.asarray(state)).max() < 2000


def inputs_of(features, length):
    return jax.random.normal(jax.random.key(0), (length, features))


def test_bounded_sqrt():
    x = jnp.array([0.0, 1e-8, 2.5e-7, 1e-4, 1.0, 4.0])
    np.testing.assert_allclose(bounded_sqrt(x), np.sqrt(x), rtol=1e-6)
    slope = jax.vmap(jax.grad(bounded_sqrt))(x)
    np.testing.assert_allclose(slope, [1000, 1000, 1000, 50, 0.5, 0.25], rtol=1e-5)
    np.testing.assert_allclose(jax.jvp(bounded_sqrt, (x,), (jnp.ones(6),))[1], slope, rtol=1e-6)
    second = jax.vmap(jax.grad(jax.grad(bounded_sqrt)))(x)
    np.testing.assert_allclose(second[3:], -0.25 * np.asarray(x[3:]) ** -1.5, rtol=1e-5)
    assert np.isfinite(second).all()
    assert np.isfinite(jax.vmap(jax.hessian(jax.grad(bounded_sqrt)))(x)).all()


@pytest.mark.parametrize("how", ["gate", "Lambda"])
def test_rglru_has_bounded_gradients_where_the_decay_is_one(how):
    block = copied(make("rglru_block"))
    if how == "gate":
        block.recurrence_gate.bias = nnx.Param(jnp.full((12,), -200.0))
    else:
        block.Lambda = nnx.Param(jnp.full((12,), -200.0))
    x = inputs()

    def loss(block, x):
        return jnp.mean(block(x) ** 2)

    @jax.jit
    def both(block, x):
        tangent = jax.tree.map(jnp.ones_like, (block, x))
        return jax.jvp(jax.grad(loss, (0, 1)), (block, x), tangent)

    first, second = both(block, x)
    for leaf in jax.tree.leaves((first, second)):
        assert np.isfinite(np.asarray(leaf)).all()
    assert max(np.abs(np.asarray(leaf)).max() for leaf in jax.tree.leaves(first)) < 1e4


def test_first_tokens_of_rglru_count_in_full():
    # Inputs that hardly decay: the multiplier of all but the first token of a document is next to 0.
    block = nn.RGLRUBlock(8, blocks=1, rngs=RNGS(0))
    block.Lambda = nnx.Param(jnp.full((8,), -20.0))
    x = jnp.ones((6, 8))
    mask = jnp.array([False, True, True, True, False, True])
    reset = jnp.array([True, False, False, True, False, False])
    _, state = call(block, x, mask=mask, reset=reset)
    first = jax.jit(block.step)(x[0], block.init_state())[1][1]
    assert float(jnp.abs(first).max()) > 0.1
    np.testing.assert_allclose(state[1], first, rtol=1e-2)
    assert float(state[2]) == 1
    padded = call(block, x, mask=jnp.zeros(6, bool))[1]
    assert float(padded[2]) == 0


@pytest.mark.parametrize("name", NAMES)
def test_bad_input_is_named(name):
    cell, x = make(name), inputs(3)
    state = cell.init_state(BATCH)
    for error, says, bad in [
        (ValueError, r"x: got shape \(2, 3, 7\), want .* 8 features", lambda: cell(x[..., :7])),
        (ValueError, r"x: got shape \(8,\)", lambda: cell(x[0, 0])),
        (ValueError, r"x: got shape \(\)", lambda: cell.step(jnp.float32(1), state)),
        (TypeError, "x: got dtype int32", lambda: cell(x.astype(int))),
        (TypeError, "x: got dtype complex64", lambda: cell(x.astype(complex))),
        (TypeError, "state: got 9 of them, want a tuple of", lambda: cell(x, state=(x,) * 9)),
        (TypeError, "state: got ", lambda: cell.step(x[:, 0], state[0])),
        (ValueError, r"state\[0\]: got shape", lambda: cell(x, state=cell.init_state(3))),
        (ValueError, r"state\[0\]: got shape", lambda: cell.step(x[:, 0], cell.init_state())),
        (TypeError, "mask: got dtype int32, want bool", lambda: cell(x, mask=jnp.ones((2, 3), int))),
        (TypeError, "reset: got dtype float32, want bool", lambda: cell(x, reset=jnp.ones((2, 3)))),
        (TypeError, "segment_ids: got dtype bool", lambda: cell(x, segment_ids=jnp.ones((2, 3), bool))),
        (ValueError, r"mask: got shape \(4,\), want", lambda: cell(x, mask=jnp.ones(4, bool))),
        (
            ValueError,
            r"reset: got shape \(2, 2\)",
            lambda: cell.step(x[:, 0], state, reset=jnp.ones((2, 2), bool)),
        ),
    ]:
        with pytest.raises(error, match=says):
            bad()


@pytest.mark.parametrize(
    ("says", "bad"),
    [
        ("features: got 0", lambda: nn.LRUCell(0, rngs=RNGS(0))),
        ("state_size: got 0", lambda: nn.MambaCell(4, 0, rngs=RNGS(0))),
        ("r_min, r_max: got 0.9, 0.5", lambda: nn.LRUCell(4, r_min=0.9, r_max=0.5, rngs=RNGS(0))),
        ("conv_width: got 0", lambda: nn.MambaBlock(4, conv_width=0, rngs=RNGS(0))),
        ("dt_rank: got 0", lambda: nn.MambaBlock(4, dt_rank=0, rngs=RNGS(0))),
        ("head_size: got 5, want a divisor", lambda: nn.Mamba2Block(8, head_size=5, rngs=RNGS(0))),
        (
            "groups: got 3, want a divisor of the 4",
            lambda: nn.Mamba2Block(8, head_size=4, groups=3, rngs=RNGS(0)),
        ),
        ("blocks: got 8, want a divisor", lambda: nn.RGLRUBlock(12, rngs=RNGS(0))),
    ],
)
def test_bad_sizes_are_named(says, bad):
    with pytest.raises(ValueError, match=says):
        bad()


def test_a_convolution_of_width_one_has_no_window():
    block = jax.jit(lambda: nn.MambaBlock(FEATURES, conv_width=1, state_size=2, rngs=RNGS(0)))()
    x = inputs(3)
    y, state = call(block, x)
    assert state[0].shape == (BATCH, 0, 2 * FEATURES)
    first, state = jax.jit(block.step)(x[:, 0], block.init_state(BATCH))
    np.testing.assert_allclose(first, y[:, 0], rtol=1e-4, atol=1e-6)


def test_probjax_itself_does_not_need_flax():
    code = "import sys, probjax; from probjax import recurrence; assert 'flax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
