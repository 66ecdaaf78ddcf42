"""Small cells and blocks with every parameter away from its special initial value, and inputs for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from probjax import nn

FEATURES, BATCH, LENGTH = 8, 2, 11

MAKE = {
    "lru": functools.partial(nn.LRUCell, FEATURES, 5),
    "mamba": functools.partial(nn.MambaCell, FEATURES, 5),
    "ssd": functools.partial(nn.SSDCell, FEATURES, 5),
    "mamba_block": functools.partial(nn.MambaBlock, FEATURES, state_size=3, dt_rank=2),
    "mamba2_block": functools.partial(nn.Mamba2Block, FEATURES, head_size=4, groups=2, state_size=3),
    "rglru_block": functools.partial(nn.RGLRUBlock, FEATURES, width=12, blocks=3),
}
NAMES = list(MAKE)


@functools.cache
def _builder(name):
    def build(key):
        cell = MAKE[name](rngs=nnx.Rngs(key))
        leaves, tree = jax.tree.flatten(cell)
        keys = jax.random.split(jax.random.fold_in(key, 1), len(leaves))
        return jax.tree.unflatten(
            tree,
            [x + 0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)],
        )

    return jax.jit(build)


@functools.cache
def make(name, seed=0, **options):
    """Biases and skips not 0 or 1, so that nothing that is left out goes unseen. Options leave them."""
    cell = _builder(name)(jax.random.key(seed))
    if options:
        other = jax.eval_shape(lambda: MAKE[name](rngs=nnx.Rngs(0), **options))
        cell = jax.tree.unflatten(jax.tree.structure(other), jax.tree.leaves(cell))
    return cell


def copied(cell):
    """With modules and variables of its own: those of `make` are shared by the tests."""
    return jax.tree.map(lambda leaf: leaf, cell)


# Data are NumPy's outside of compiled programs: slicing and selecting JAX arrays compiles a program each.
def inputs(length=LENGTH, batch=(BATCH,), seed=5):
    return np.random.default_rng(seed).standard_normal((*batch, length, FEATURES)).astype(np.float32)


def flags():
    """Padding left, right and between; documents that change at it; ids that come back; resets."""
    mask = np.ones((BATCH, LENGTH), bool)
    mask[0, [0, 1, 5, 10]] = False
    mask[1, [4, 6, 7]] = False
    ids = np.array([[9, 9, 3, 3, 3, 4, 3, 3, 7, 3, 3], [1, 1, 1, 1, 5, 2, 2, 2, 2, 2, 2]])
    reset = np.zeros((BATCH, LENGTH), bool)
    reset[0, [0, 7]] = reset[1, [6, 9]] = True
    return {"reset": reset, "segment_ids": ids, "mask": mask}


def arguments(cell, x, state=None, reset=None, segment_ids=None, mask=None):
    """All arguments of a call, those not given as they are by default: so there is one program per shape."""
    lead = x.shape[:-1]
    state = (
        jax.tree.map(
            lambda part: np.zeros(part.shape, part.dtype), jax.eval_shape(lambda: cell.init_state(lead[:-1]))
        )
        if state is None
        else state
    )
    return {
        "state": tuple(state),
        "reset": np.broadcast_to(False if reset is None else reset, lead),
        "segment_ids": np.broadcast_to(0 if segment_ids is None else segment_ids, lead).astype(np.int32),
        "mask": np.broadcast_to(True if mask is None else mask, lead),
    }


def call(cell, x, state=None, **options):
    """Output and state of whole sequences, as NumPy arrays."""
    y, state = _call(cell, x, arguments(cell, x, state, **options))
    return np.asarray(y), tuple(np.asarray(part) for part in state)


@jax.jit
def _call(cell, x, options):
    return cell(x, return_state=True, **options)


def gradients(cell, x, weight, **options):
    """Of sum(weight * y), with respect to the cell and x."""
    by_cell, by_x = _gradients(cell, x, weight, arguments(cell, x, **options))
    return by_cell, np.asarray(by_x)


@jax.jit
def _gradients(cell, x, weight, options):
    return jax.grad(lambda cell, x: jnp.vdot(weight, cell(x, **options)), (0, 1))(cell, x)


@jax.jit
def step(cell, x, state, reset, mask):
    y, state = cell.step(x, state, reset=reset, mask=mask)
    return y, *state


def parameters(cell):
    """Of a cell, in float64, as nested dictionaries."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(cell, nnx.Param)))


def close(got, want, tolerance=1e-5):
    """Every leaf finite and within `tolerance` of the largest entry of what is wanted."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        g, w = (np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64) for x in (g, w))
        assert g.shape == w.shape
        assert np.isfinite(g).all()
        if w.size:
            np.testing.assert_allclose(g, w, rtol=0, atol=tolerance * max(np.abs(w).max(), 1e-3))
