"""Every cell and block: its mathematics against NumPy, splits, padding, documents."""

import cell_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cell_helpers import (
    BATCH,
    FEATURES,
    LENGTH,
    NAMES,
    call,
    close,
    flags,
    gradients,
    inputs,
    make,
    parameters,
    step,
)

pytestmark = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize("marked", [False, True], ids=["plain", "flags"])
def test_values_are_those_of_the_loop(name, marked):
    cell, x = make(name), inputs()
    options = flags() if marked else {}
    y = call(cell, x, **options)[0] if marked else jax.jit(cell)(x)
    close(y, cell_reference.outputs(name, cell, parameters(cell), x, **options))
    if marked:
        assert not y[~options["mask"]].any()


def test_gradients_are_those_of_the_loop(name):
    cell, x, options = make(name), inputs(), flags()
    weight = inputs(seed=6)
    by_cell, by_x = gradients(cell, x, weight, **options)
    variables = {"params": parameters(cell), "x": np.asarray(x, np.float64)}
    found = {"params": parameters(by_cell), "x": np.asarray(by_x, np.float64)}
    leaves, tree = jax.tree.flatten(variables)
    random = np.random.default_rng(0)

    def loss(leaves):
        v = jax.tree.unflatten(tree, leaves)
        return np.sum(
            np.asarray(weight, np.float64)
            * cell_reference.outputs(name, cell, v["params"], v["x"], **options)
        )

    for i, gradient in enumerate(jax.tree.leaves(found)):
        assert np.isfinite(gradient).all()
        direction = random.standard_normal(leaves[i].shape)
        shifted = [
            loss([leaf + (eps * direction if j == i else 0) for j, leaf in enumerate(leaves)])
            for eps in (1e-5, -1e-5)
        ]
        want = (shifted[0] - shifted[1]) / 2e-5
        size = np.linalg.norm(gradient) * np.linalg.norm(direction)
        assert abs(np.sum(gradient * direction) - want) <= 1e-5 * size + 1e-6, jax.tree_util.tree_structure(
            found
        )


@pytest.mark.parametrize("cuts", [(3,), (1, 2, 3)], ids=str)
def test_any_split_is_the_whole(name, cuts):
    cell, x = make(name), inputs()
    options = {key: value for key, value in flags().items() if key != "segment_ids"}
    want, state_want = call(cell, x, **options)
    parts, state = [], None
    for first, end in zip((0, *cuts), (*cuts, LENGTH), strict=True):
        part = {key: value[:, first:end] for key, value in options.items()}
        y, state = call(cell, x[:, first:end], state=state, **part)
        parts.append(y)
    close((np.concatenate(parts, 1), state), (want, state_want), 2e-6)


def test_documents_by_ids_are_split_with_a_reset(name):
    cell, x, cut = make(name), inputs(), 3
    ids = np.array([0] * cut + [1] * (LENGTH - cut))
    want, state_want = call(cell, x, segment_ids=ids)
    first, state = call(cell, x[:, :cut], segment_ids=ids[:cut])
    reset = np.arange(LENGTH - cut) == 0
    second, state = call(cell, x[:, cut:], state, reset=reset, segment_ids=ids[cut:])
    close((np.concatenate([first, second], 1), state), (want, state_want), 2e-6)
    # The first token of a call is no boundary, whatever its id.
    continued, _ = call(cell, x[:, cut:], call(cell, x[:, :cut])[1], segment_ids=ids[cut:])
    close(continued, call(cell, x)[0][:, cut:], 2e-6)


@pytest.mark.parametrize("how", ["steps", pytest.param("parts", marks=pytest.mark.slow)])
def test_what_is_split_is_the_whole_also_in_gradients(name, how):
    cell, x, weight = make(name), inputs(), inputs(seed=6)
    options = {key: value for key, value in flags().items() if key != "segment_ids"}

    def by_steps(cell, x):
        def body(state, token):
            y, state = cell.step(token[0], state, reset=token[1], mask=token[2])
            return state, y

        tokens = [jnp.moveaxis(v, 1, 0) for v in (x, options["reset"], options["mask"])]
        state, y = jax.lax.scan(body, cell.init_state(BATCH), tokens)
        return jnp.moveaxis(y, 0, 1), state

    def by_parts(cell, x):
        parts, state = [], None
        for part in (slice(0, 3), slice(3, None)):
            at = {key: value[:, part] for key, value in options.items()}
            y, state = cell(x[:, part], state=state, return_state=True, **at)
            parts.append(y)
        return jnp.concatenate(parts, 1), state

    run = {"steps": by_steps, "parts": by_parts}[how]

    @jax.jit
    def both(cell, x):
        def loss(cell, x):
            y, state = run(cell, x)
            return jnp.vdot(weight, y), (y, state)

        return jax.grad(loss, (0, 1), has_aux=True)(cell, x)

    got, values = both(cell, x)
    close(values, call(cell, x, **options), 2e-6)
    close(got, gradients(cell, x, weight, **options))


def test_the_state_has_a_gradient(name):
    cell, x = make(name), inputs(3)
    _, state = call(cell, inputs(seed=8))

    def loss(state):
        return jnp.sum(cell(x, state=state) ** 2)

    found = jax.jit(jax.grad(loss))(state)
    assert [g.shape for g in found] == [s.shape for s in state]
    close(found, found)
    # A step along the gradient (conjugate, for complex states) changes the loss by its square.
    size = sum(float(jnp.sum(jnp.abs(g) ** 2)) for g in found)
    eps = 1e-2 / np.sqrt(size)
    moved = [
        float(jax.jit(loss)(tuple(s + sign * eps * jnp.conj(g) for s, g in zip(state, found, strict=True))))
        for sign in (1, -1)
    ]
    assert size > 0
    np.testing.assert_allclose((moved[0] - moved[1]) / (2 * eps), size, rtol=2e-2)


@pytest.mark.parametrize("where", ["left", "right", "anywhere", "all"])
def test_padding_is_as_if_it_were_not_there(name, where):
    cell, count = make(name), 8
    order = np.random.default_rng(1).permutation(LENGTH)
    padded = {
        "left": np.arange(LENGTH) < LENGTH - count,
        "right": np.arange(LENGTH) >= count,
        "anywhere": np.isin(np.arange(LENGTH), order[count:]),
        "all": np.ones(LENGTH, bool),
    }[where]
    clean = inputs()
    x = np.where(padded[:, None], np.float32(np.nan), clean)
    mask = ~padded
    y, state = call(cell, x, mask=mask)
    assert not y[:, padded].any()
    want, state_want = call(cell, clean[:, ~padded])
    close((y[:, ~padded], state), (want, state_want), 2e-6)
    # What follows padding knows nothing of it, nor of a reset or an id there.
    marks = {"reset": padded, "segment_ids": padded}
    close(call(cell, x, mask=mask, **marks), (y, state), 2e-6)

    weight = inputs(seed=6)
    by_cell, by_x = gradients(cell, x, weight, mask=mask)
    assert not by_x[:, padded].any()
    if where == "all":
        assert not any(np.asarray(g).any() for g in jax.tree.leaves(by_cell))
    else:
        close(by_cell, gradients(cell, clean[:, ~padded], weight[:, ~padded])[0])


def test_padding_of_a_step_is_no_step(name):
    cell = make(name)
    _, state = call(cell, inputs())
    x = inputs(1)[:, 0]
    mask = np.array([True, False])
    got = step(cell, np.where(mask[:, None], x, np.float32(np.nan)), state, ~mask, mask)
    want = step(cell, x, state, mask & ~mask, mask | ~mask)
    close([part[0] for part in got], [part[0] for part in want], 1e-6)
    close([part[1] for part in got], [np.zeros(FEATURES), *(part[1] for part in state)], 0)


def test_documents_do_not_see_each_other(name):
    cell, x, cut = make(name), inputs(), 3
    ids = np.array([2] * cut + [0] * (LENGTH - cut))
    y, state = call(cell, x, segment_ids=ids)
    alone = [call(cell, part) for part in (x[:, :cut], x[:, cut:])]
    close(y, np.concatenate([part[0] for part in alone], 1), 2e-6)
    close(state, alone[1][1], 2e-6)
    for mine, other in (
        (jnp.arange(LENGTH) < cut, slice(cut, None)),
        (jnp.arange(LENGTH) >= cut, slice(0, cut)),
    ):
        weight = inputs(seed=6) * mine[:, None]
        assert not np.asarray(gradients(cell, x, weight, segment_ids=ids)[1][:, other]).any()


def test_leading_axes_and_short_sequences(name):
    cell = make(name)
    x = inputs(3, batch=(2, 3))
    y, state = call(cell, x)
    for i in range(2):
        close((y[i, 1:], [part[i, 1:] for part in state]), call(cell, x[i, 1:]), 2e-6)
    alone, alone_state = call(cell, x[1, 2])
    close((alone, alone_state), (y[1, 2], [part[1, 2] for part in state]), 2e-6)
    close(jax.jit(cell.step)(x[1, 2, 0], cell.init_state())[0], alone[0], 2e-6)
    # No token at all, and no sequence at all.
    empty, after = call(cell, x[:, :, :0], state)
    assert empty.shape == (2, 3, 0, FEATURES)
    close(after, state, 0)
    assert jax.jit(cell)(x[:0]).shape == (0, 3, 3, FEATURES)
