"""Every cell and block under JAX's transformations, in half precision, and as a tree for NNX."""

import warnings

import cell_helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cell_helpers import BATCH, MAKE, NAMES, arguments, call, close, copied, inputs, make, parameters
from flax import nnx

pytestmark = pytest.mark.parametrize("name", NAMES)
SHORT = 4


def random_like(tree, seed):
    leaves, structure = jax.tree.flatten(tree)
    random = np.random.default_rng(seed)
    return jax.tree.unflatten(structure, [random.standard_normal(x.shape).astype(np.float32) for x in leaves])


def dot(a, b):
    return sum(float(np.vdot(x, y).real) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def run(cell, x):
    return cell(x, reset=np.arange(SHORT) == 2)


def test_derivatives_of_both_modes(name):
    point, weight = (make(name), inputs(SHORT)), inputs(SHORT, seed=6)
    direction = random_like(point, 1)

    @jax.jit
    def both(point, direction):
        return jax.jvp(run, point, direction), jax.vjp(run, *point)[1](weight)

    (_, tangent), pulled = both(point, direction)
    np.testing.assert_allclose(dot(tangent, weight), dot(direction, pulled), rtol=2e-4, atol=1e-4)
    # Along the direction, from differences.
    eps = 1e-2
    moved = [jax.tree.map(lambda p, d, s=s: p + s * eps * d, point, direction) for s in (1, -1)]
    plus, minus = (np.asarray(jax.jit(run)(*at)) for at in moved)
    close((plus - minus) / (2 * eps), tangent, 2e-2)


@pytest.mark.slow
def test_second_derivatives(name):
    point = (make(name), inputs(SHORT))
    direction = random_like(point, 1)

    def loss(point):
        return jnp.sum(run(*point) ** 2)

    def slope(point):
        return jax.jvp(loss, (point,), (direction,))[1]

    forward_over_reverse = jax.jit(lambda point: jax.jvp(jax.grad(loss), (point,), (direction,))[1])(point)
    close(forward_over_reverse, jax.jit(jax.grad(slope))(point), 2e-5)
    eps = 1e-2
    moved = [jax.tree.map(lambda p, d, s=s: p + s * eps * d, point, direction) for s in (1, -1)]
    plus, minus = (dot(jax.jit(jax.grad(loss))(at), direction) for at in moved)
    np.testing.assert_allclose(dot(forward_over_reverse, direction), (plus - minus) / (2 * eps), rtol=5e-2)


def test_vmap_over_parameters_inputs_and_flags(name):
    cells = [make(name, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *cells)
    x = np.stack([inputs(SHORT, seed=seed) for seed in range(3)], 1)
    mask = np.array([[True, True, True, False], [False, True, True, True], [True, False, True, True]])
    state = cells[0].init_state(BATCH)

    def run(cell, x, mask, state):
        return cell(x, mask=mask, state=state, return_state=True)

    y, after = jax.jit(jax.vmap(run, (0, 1, 0, None), (1, 0)))(stacked, x, mask, state)
    y, after = np.asarray(y), [np.asarray(part) for part in after]
    for i, cell in enumerate(cells):
        close((y[:, i], [part[i] for part in after]), call(cell, x[:, i], mask=mask[i]), 2e-6)


def test_vmap_over_parameters_in_half_precision(name):
    # XLA's CPU backend lacks some products of half types with a batch axis.
    cells = [make(name, seed, dtype=jnp.bfloat16) for seed in range(2)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *cells)
    x = inputs(SHORT)
    y = jax.jit(jax.vmap(lambda cell: cell(x)))(stacked)
    for i in range(2):
        close(y[i], call(make(name, i), x)[0], 4e-2)


def test_half_precision_keeps_decays_and_states(name):
    half, full = make(name, dtype=jnp.bfloat16), make(name)
    x = jnp.asarray(inputs(), jnp.bfloat16)
    y, state = call(half, x)
    want, state_want = call(full, np.asarray(x, np.float32))
    assert y.dtype == jnp.bfloat16
    assert [part.dtype for part in state] == [part.dtype for part in half.init_state(BATCH)]
    window = [part.dtype == jnp.bfloat16 for part in state]
    assert window == ([True] + [False] * (len(state) - 1) if "block" in name else [False])
    assert all(part.dtype in (jnp.float32, jnp.complex64) for part in state[sum(window) :])
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype(jnp.float32)}
    close(y, want, 4e-2)
    close(state, state_want, 4e-2)

    # Without inputs a state only decays, by what parameters say; rounding a decay or a step size to bfloat16
    # just once shifts it by some percent over so many tokens.
    quiet = [jax.tree.map(jnp.zeros_like, cell) for cell in (half, full)]
    rates = {
        "lru": ("nu", "theta"),
        "mamba": ("A_log", "to_dt"),
        "ssd": ("decay",),
        "mamba_block": ("A_log", "dt_proj"),
        "mamba2_block": ("A_log", "dt_bias"),
        "rglru_block": ("Lambda", "recurrence_gate"),
    }[name]
    for cell, source in zip(quiet, (copied(half), copied(full)), strict=True):
        for rate in rates:
            setattr(cell, rate, getattr(source, rate))
        if name == "ssd":  # otherwise all is gone by the last token
            cell.decay.bias = nnx.Param(cell.decay.bias[...] - 5)
    begun = tuple(jnp.ones_like(part) for part in full.init_state(BATCH))
    after = [
        call(cell, jnp.zeros(x.shape, dtype), begun)[1]
        for cell, dtype in zip(quiet, (jnp.bfloat16, jnp.float32), strict=True)
    ]
    close(after[0], after[1], 1e-6)
    assert np.abs(np.asarray(after[1][-1 if name != "rglru_block" else 1])).max() > 1e-3


def test_results_are_of_the_promoted_dtype(name, x64):
    cell = make(name)
    for given, wanted in ((jnp.bfloat16, jnp.float32), (jnp.float64, jnp.float64)):
        y, state = jax.eval_shape(lambda x: cell(x, return_state=True), jnp.asarray(inputs(2), given))
        assert y.dtype == wanted
        assert all(jnp.finfo(part.dtype).bits == jnp.finfo(wanted).bits for part in state)


def test_float64_is_exact_to_float64(name, x64):
    import cell_reference

    cell = jax.tree.map(lambda p: p.astype(jnp.float64), make(name))
    x = inputs(SHORT).astype(jnp.float64)
    close(jax.jit(cell)(x), cell_reference.outputs(name, cell, parameters(cell), x), 1e-12)


def test_it_is_a_tree_of_parameters(name):
    cell = make(name)
    graph, state = nnx.split(cell)
    variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert variables and all(type(variable) is nnx.Param for variable in variables)
    assert len({id(leaf) for leaf in jax.tree.leaves(cell)}) == len(variables)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(cell))
    x = inputs()
    close(call(nnx.merge(graph, state), x), call(cell, x), 0)
    # Also with NNX's graphs switched off.
    with nnx.set_graph_mode(False):
        fresh = MAKE[name](rngs=nnx.Rngs(0))
        graph, state = nnx.split(fresh)
        again = nnx.merge(graph, state)
    close(call(again, x), call(fresh, x), 0)
    # The same key gives the same cell, others another.
    other = MAKE[name](rngs=nnx.Rngs(1))
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(fresh), jax.tree.leaves(other), strict=True))


def test_layers_are_stacked_and_scanned(name):
    keys = jax.random.split(jax.random.key(0), 2)
    shapes = jax.eval_shape(jax.vmap(lambda key: MAKE[name](rngs=nnx.Rngs(key))), keys)
    layers = jax.tree.map(lambda *leaves: np.stack(leaves), make(name), make(name, 1))
    assert jax.tree.structure(layers) == jax.tree.structure(shapes)
    assert [leaf.shape for leaf in jax.tree.leaves(layers)] == [
        leaf.shape for leaf in jax.tree.leaves(shapes)
    ]
    x = inputs(SHORT)

    @jax.jit
    def run(layers, x):
        return jax.lax.scan(lambda x, layer: (x + layer(x), None), x, layers)[0]

    want = x
    for i in range(2):
        want = want + call(make(name, i), want)[0]
    close(run(layers, x), want, 2e-6)


def test_parameters_are_read_at_each_call(name):
    cell, x = copied(make(name)), inputs()
    other = make(name, 1)
    before, _ = call(cell, x)
    nnx.update(cell, nnx.state(other))
    assert np.any(before != call(other, x)[0])
    close(call(cell, x), call(other, x), 0)


def test_a_donated_state_is_used(name):
    cell = make(name)
    graph, parameters = nnx.split(cell)

    def run(parameters, x, state):
        return nnx.merge(graph, parameters).step(x, state)

    x = inputs(2)
    want, state_want = call(cell, x)
    state = cell.init_state(BATCH)
    donated = jax.jit(run, donate_argnums=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in range(2):
            before = state
            y, state = donated(parameters, x[:, t], state)
            assert all(part.is_deleted() for part in before)
    close((y, state), (want[:, 1], state_want), 2e-6)


def test_a_call_is_compiled_once_for_all_patterns_of_flags(name):
    cell, x = make(name), inputs()
    call(cell, x)
    compiled = cell_helpers._call._cache_size()
    call(make(name, 1), x + 1, **cell_helpers.flags())
    assert cell_helpers._call._cache_size() == compiled
    assert set(arguments(cell, x)) == {"state", "reset", "segment_ids", "mask"}
