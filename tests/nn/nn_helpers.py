"""What the tests of modules share."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


def normal(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def count(module):
    leaves = jax.tree.leaves(nnx.state(module))
    return sum(leaf.size for leaf in leaves), len(leaves)


def stirred(module, seed=0, scale=0.1):
    """The module with noise on all parameters: what is zero or one at first is not."""
    definition, state = nnx.split(module)
    leaves, structure = jax.tree.flatten(state)
    random = np.random.default_rng(seed)
    moved = [leaf + scale * random.standard_normal(leaf.shape).astype(leaf.dtype) for leaf in leaves]
    return nnx.merge(definition, jax.tree.unflatten(structure, moved))


def pure(module, *args, **kwargs):
    """f(state, *args), and the state: a module as a function."""
    definition, state = nnx.split(module)
    return (lambda state, *more: nnx.merge(definition, state)(*more, *args, **kwargs)), state


def close(got, want, tolerance=2e-5):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    scale = max(np.abs(want).max(initial=0), 1e-6)
    assert np.abs(got - want).max(initial=0) <= tolerance * scale, np.abs(got - want).max() / scale


def trees_close(got, want, tolerance=2e-5):
    got, want = ([np.asarray(leaf) for leaf in jax.tree.leaves(tree)] for tree in (got, want))
    largest = max(np.abs(leaf).max(initial=0) for leaf in want)
    for g, w in zip(got, want, strict=True):
        # Leaves that are sums of what cancels, such as keys' biases, are compared with the others' scale.
        scale = max(np.abs(w).max(initial=0), 1e-2 * largest)
        assert g.shape == w.shape
        assert np.isfinite(g).all()
        assert np.abs(g - w).max(initial=0) <= tolerance * scale, np.abs(g - w).max() / scale


def check_gradient(function, point, seed=1, eps=1e-6, tolerance=1e-6):
    """Gradient along a random direction against differences; in 64-bit types."""
    leaves, structure = jax.tree.flatten(point)
    random = np.random.default_rng(seed)
    direction = jax.tree.unflatten(structure, [random.standard_normal(leaf.shape) for leaf in leaves])
    function = jax.jit(function)
    gradient = jax.jit(jax.grad(function))(point)
    slope = sum(
        float(np.vdot(g, d))
        for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
    )
    ends = [function(jax.tree.map(lambda p, d, s=s: p + s * eps * d, point, direction)) for s in (1, -1)]
    difference = float(ends[0] - ends[1]) / (2 * eps)
    assert np.isfinite(slope)
    assert abs(slope - difference) <= tolerance * max(abs(difference), 1.0), (slope, difference)


def wide(module):
    """The module's parameters in float64."""
    definition, state = nnx.split(module)
    return nnx.merge(definition, jax.tree.map(lambda x: x.astype(jnp.float64), state))


def after_a_step(module, *inputs):
    """Names of the parameters that one step of Adam on mean(y²) leaves as they were."""
    apply, state = pure(module)
    optimizer = optax.adam(1e-3)

    @jax.jit
    def step(state, opt, inputs):
        loss, grads = jax.value_and_grad(lambda s: jnp.mean(jnp.square(apply(s, *inputs) - 1.0)))(state)
        updates, opt = optimizer.update(grads, opt, state)
        return optax.apply_updates(state, updates), loss

    new, loss = step(state, optimizer.init(state), inputs)
    assert np.isfinite(loss)
    old, new = (dict(nnx.to_flat_state(s)) for s in (state, new))
    return {
        ".".join(map(str, path))
        for path in old
        if np.array_equal(np.asarray(old[path][...]), np.asarray(new[path][...]))
    }


def temp_bytes(function, *args):
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes
