"""What is said of tokens, and the state between calls: contract section 3.

Public faults these stand for (research/ssm.md 4.2): 3, 5 (splits, gradient through the state), 7 (left
padding), 10, 13, 16 (packed documents), 28 (initial state ignored).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oracle import normal
from oracle.check_recurrence import agree, parameters
from oracle.recurrence_cases import OPERATIONS, arrays, busy, options
from probjax import recurrence

PAIRS = [pair for pair in parameters(*OPERATIONS) if pair.values[1] != "reference"]
L = 66  # one chunk and a part of another
PER_TOKEN = {
    "linear_scan": ("a", "b"),
    "selective_scan": ("x", "dt", "B", "C"),
    "ssd": ("query", "key", "value", "log_decay"),
    "causal_conv1d": ("x",),
}


def part(given, operation, where):
    return {name: x[:, where] if name in PER_TOKEN[operation] else x for name, x in given.items()}


@pytest.mark.parametrize(("operation", "implementation"), PAIRS)
def test_a_call_equals_its_parts(operation, implementation):
    """Values, and gradients through the state, for splits within, at and beyond a chunk and a window."""
    case = busy(operation, L, False)
    given = case.cast("float32")
    tokens = {name: jnp.asarray(x) for name, x in case.tokens.items()}
    # Where a document starts at a split, the caller says so.
    changes = recurrence._arguments.cuts(None, tokens["segment_ids"], tokens["mask"], (2, L), False)[0]
    tokens = {"reset": tokens["reset"] | changes, "mask": tokens["mask"]}
    y_weight, last_weight = (jnp.asarray(normal(*x.shape, seed="w"), "float32") for x in case.expected())

    def run(given, splits):
        state, outs = given["initial_state"], []
        for start, stop in zip((0, *splits), (*splits, L), strict=True):
            where = slice(start, stop)
            some = {**part(given, operation, where), "initial_state": state}
            said = {name: x[:, where] for name, x in tokens.items()}
            y, state = getattr(recurrence, operation)(
                **some, **said, **case.options, implementation=implementation
            )
            outs.append(y)
        return jnp.concatenate(outs, 1), state

    def loss(given, splits):
        y, last = run(given, splits)
        return jnp.sum(jnp.real(y) * y_weight) + jnp.sum(jnp.real(last) * last_weight), (y, last)

    differentiate = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    gradient, (y, _) = differentiate(given, ())
    want_y, want_last = case.expected()
    agree(y, want_y, 1e-5)
    for splits in [(1, 2, 65), (30, 30)]:
        found, (some_y, some_last) = differentiate(given, splits)
        agree(some_y, want_y, 1e-5)
        agree(some_last, want_last, 1e-5)
        for name in gradient:
            agree(found[name], np.asarray(gradient[name]), 1e-5)


@pytest.mark.parametrize(("operation", "implementation"), PAIRS)
def test_nothing_of_padding_is_seen(operation, implementation):
    """NaN and infinities at padded tokens reach nothing; resets and ids there are ignored."""
    case = busy(operation, L, True)
    mask = np.array(case.tokens["mask"])
    clean = case.cast("float32")

    def spoil(x, name, value):
        x = np.array(x)
        if name in PER_TOKEN[operation]:
            x[~mask] = value
        return jnp.asarray(x)

    tokens = dict(case.tokens)
    spoiled_tokens = {
        "mask": mask,
        "reset": np.where(mask, tokens["reset"], True),
        "segment_ids": np.where(mask, tokens["segment_ids"], 99),
    }

    @jax.jit
    def everything(given, moves, tokens):
        def call(given):
            function = getattr(recurrence, operation)
            return function(**given, **tokens, **case.options, reverse=True, implementation=implementation)

        def loss(given):
            y, last = call(given)
            return jnp.sum(jnp.sin(jnp.real(y))) + jnp.sum(jnp.sin(jnp.real(last)))

        return call(given), jax.grad(loss)(given), jax.jvp(call, (given,), (moves,))[1]

    want = everything(clean, clean, tokens)
    got = everything(
        {name: spoil(x, name, np.nan) for name, x in clean.items()},
        {name: spoil(x, name, np.inf) for name, x in clean.items()},
        spoiled_tokens,
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)
    (y, _), gradient, (move, _) = got
    for x in (y, move, *(gradient[name] for name in PER_TOKEN[operation])):
        assert np.all(np.asarray(x)[~mask] == 0)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_padding_on_the_left_equals_none(operation):
    given = jax.tree.map(jnp.asarray, arrays(operation, (1, 6)))
    short = part(given, operation, slice(2, None))
    mask = jnp.arange(6) >= 2
    function = getattr(recurrence, operation)
    y, last = function(**given, mask=mask, **options(operation))
    want_y, want_last = function(**short, **options(operation))
    agree(y[:, 2:], np.asarray(want_y), 1e-6)
    agree(last, np.asarray(want_last), 1e-6)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_documents_do_not_see_each_other(operation):
    """Each equals its own run, a row or two of them alike, and gradients across are exactly zero."""
    given = {name: jnp.asarray(x) for name, x in arrays(operation, (2, 9)).items()}
    given.pop("initial_state")
    ids = jnp.array([5] * 4 + [2] * 5)
    function = getattr(recurrence, operation)
    y, _ = function(**given, segment_ids=ids, **options(operation))
    for where in (slice(0, 4), slice(4, 9)):
        want, _ = function(**part(given, operation, where), **options(operation))
        agree(y[:, where], np.asarray(want), 1e-6)

    def second(given):
        return jnp.sum(jnp.real(function(**given, segment_ids=ids, **options(operation))[0][:, 4:]))

    gradient = jax.grad(second)(given)
    for name in PER_TOKEN[operation]:
        assert np.all(np.asarray(gradient[name])[:, :4] == 0), name


@pytest.mark.parametrize("operation", OPERATIONS)
def test_first_token(operation):
    """It is no boundary of segments, but a reset there discards the initial state."""
    given = {name: jnp.asarray(x) for name, x in arrays(operation, (2, 3)).items()}
    function = getattr(recurrence, operation)

    def run(given, **tokens):
        return jax.tree.map(np.asarray, function(**given, **tokens, **options(operation)))

    same = jnp.zeros(3, int)
    jax.tree.map(np.testing.assert_array_equal, run(given, segment_ids=same), run(given))
    fresh = {**given, "initial_state": jnp.zeros_like(given["initial_state"])}
    cut = run(given, reset=jnp.array([True, False, False]))
    jax.tree.map(np.testing.assert_array_equal, cut, run(fresh))


@pytest.mark.parametrize(("operation", "implementation"), PAIRS)
def test_without_a_valid_token(operation, implementation):
    given = {name: jnp.asarray(x) for name, x in arrays(operation, (2, 5)).items()}
    function = getattr(recurrence, operation)
    y, last = function(
        **given, mask=jnp.zeros((2, 5), bool), **options(operation), implementation=implementation
    )
    assert np.all(np.asarray(y) == 0)
    np.testing.assert_array_equal(last, given["initial_state"])


STEP = {
    "linear_scan": recurrence.linear_scan_step,
    "selective_scan": recurrence.selective_scan_step,
    "ssd": recurrence.ssd_step,
    "causal_conv1d": recurrence.causal_conv1d_step,
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_step_is_a_call_of_one_token(operation):
    given = {name: jnp.asarray(x) for name, x in arrays(operation, (3, 1)).items()}
    tokens = {"reset": jnp.array([True, False, True]), "mask": jnp.array([True, True, False])}
    token = {name: x[:, 0] if name in PER_TOKEN[operation] else x for name, x in given.items()}
    token["state"] = token.pop("initial_state")

    def step(token, tokens):
        return STEP[operation](**token, **tokens, **options(operation))

    def loss(y, state):
        return jnp.sum(jnp.sin(jnp.real(y))) + jnp.sum(jnp.cos(jnp.real(state)))

    def whole(given):
        said = {name: x[:, None] for name, x in tokens.items()}
        y, last = getattr(recurrence, operation)(**given, **said, **options(operation))
        return loss(y, last), (y[:, 0], last)

    gradient, (want_y, want_state) = jax.grad(whole, has_aux=True)(given)
    found = jax.grad(lambda token: loss(*step(token, tokens)))(token)
    y, state = step(token, tokens)
    agree(y, np.asarray(want_y), 1e-6)
    agree(state, np.asarray(want_state), 1e-6)
    for name, x in gradient.items():
        got = found["state" if name == "initial_state" else name]
        agree(got, np.asarray(x[:, 0] if name in PER_TOKEN[operation] else x), 1e-5)
    # Token by token under vmap, over what has a batch axis.
    axes = {name: None if name in ("A", "D", "dt_bias", "weight", "bias") else 0 for name in token}
    mapped = jax.vmap(step, (axes, 0))(token, tokens)
    jax.tree.map(lambda a, b: agree(a, np.asarray(b), 1e-6), mapped, (y, state))
