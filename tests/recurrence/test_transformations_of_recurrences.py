"""vmap over anything, second derivatives in every order, and the adjoint identity.

Public faults: 12 (broadcast cotangents), 31 (jvp and hessian of kernels), original K07 (adjoint test).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oracle import normal
from oracle.check_recurrence import Case, agree, among, parameters
from oracle.recurrence_cases import OPERATIONS, arrays, options, said
from probjax import recurrence

PAIRS = [pair for pair in parameters(*OPERATIONS) if pair.values[1] != "reference"]
L = 6


def real(operation, lead=(2, L)):
    return {name: np.real(x) for name, x in arrays(operation, lead).items()}


@pytest.mark.parametrize(("operation", "implementation"), PAIRS)
def test_vmap_over_any_subset_equals_the_loop(operation, implementation):
    """Each argument mapped alone at an axis of its own, then all at once: values and gradients."""
    lead, size = (2, L), 3
    given = {name: jnp.asarray(x, "float32") for name, x in real(operation).items()}
    tokens = {name: jnp.asarray(x) for name, x in said(lead).items()}
    every = {**given, **tokens}

    def call(every):
        function = getattr(recurrence, operation)
        y, last = function(**every, **options(operation), implementation=implementation)
        return y, last

    def loss(numbers, tokens):
        y, last = call({**numbers, **tokens})
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(last))

    def both(every):
        numbers = {name: x for name, x in every.items() if name in given}
        said = {name: x for name, x in every.items() if name in tokens}
        return call(every), jax.grad(loss)(numbers, said)

    single = jax.jit(both)
    alone = operation in ("selective_scan", "causal_conv1d") and implementation != "reference"
    alone = alone and (operation, implementation) != ("selective_scan", "scan")
    for subset in [*([(name,) for name in every] if alone else []), tuple(every), ("initial_state", "mask")]:
        stacks, axes = dict(every), dict.fromkeys(every)
        for i, name in enumerate(subset):
            x = every[name]
            axes[name] = (i * 2 + 1) % (x.ndim + 1)
            if x.dtype == bool:
                more = [x, ~x, x ^ (jnp.arange(x.shape[-1]) % 2 == 0)]
            else:
                more = (
                    [x, x * 2, x - x // 2] if jnp.issubdtype(x.dtype, jnp.integer) else [x, x * 0.5, x * 0.7]
                )
            stacks[name] = jnp.stack(more, axes[name])
        got = jax.jit(jax.vmap(both, (axes,)))(stacks)
        loop = [
            single(
                {name: x if axes[name] is None else jnp.take(x, i, axes[name]) for name, x in stacks.items()}
            )
            for i in range(size)
        ]
        want = jax.tree.map(lambda *xs: jnp.stack(xs), *loop)
        jax.tree.map(lambda a, b: agree(a, np.asarray(b), 1e-5), got, want)


def test_vmap_of_vmap():
    given = {name: jnp.asarray(x, "float32") for name, x in real("selective_scan", (2, 3, L)).items()}
    mapped = ("x", "dt", "B", "C", "initial_state")
    axes = {name: 0 if name in mapped else None for name in given}

    def call(given):
        return recurrence.selective_scan(**given, dt_softplus=True)[0]

    got = jax.vmap(jax.vmap(call, (axes,)), (axes,))(given)
    agree(got, np.asarray(call(given)), 1e-6)


@pytest.mark.parametrize(("operation", "implementation"), PAIRS)
def test_second_derivatives(operation, implementation):
    """jvp(grad), grad(jvp) and grad(grad . v) agree with float64 differentiation of the oracle's loop."""
    case = Case(operation, real(operation, (1, 5)), said((1, 5)), False, options(operation))
    moves = {name: normal(*x.shape, seed=name) for name, x in case.arrays.items()}

    def loss(results):
        y, last = results
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(last))

    def hvps(call, given, moves):
        def of(given):
            return loss(call(given))

        def along(given):
            return jax.jvp(of, (given,), (moves,))[1]

        def through(given):
            return sum(jnp.sum(g * moves[name]) for name, g in jax.grad(of)(given).items())

        forward_of_reverse = jax.jvp(jax.grad(of), (given,), (moves,))[1]
        return forward_of_reverse, jax.grad(along)(given), jax.grad(through)(given)

    with jax.enable_x64(True):
        exact = {name: jnp.asarray(x) for name, x in case.arrays.items()}
        want = jax.jit(functools.partial(hvps, lambda given: case.expected(given, jnp)))(exact, moves)[0]
    got = jax.jit(functools.partial(hvps, lambda given: case.call(given, implementation)))(
        case.cast("float32"), {name: jnp.asarray(x, "float32") for name, x in moves.items()}
    )
    for some in got:
        for name, x in want.items():
            agree(some[name], np.asarray(x), 1e-5)


@pytest.mark.parametrize(("operation", "implementation"), PAIRS)
def test_adjoint_identity(operation, implementation):
    """<ct, J x> = <J^T ct, x>, in float64, with a broadcast cotangent."""
    case = Case(operation, real(operation, (2, 67)), said((2, 67)), True, options(operation))
    with jax.enable_x64(True):
        given = case.cast("float64")
        moves = {name: jnp.asarray(normal(*x.shape, seed=name)) for name, x in given.items()}

        @jax.jit
        def sides(given, moves):
            def call(given):
                return case.call(given, implementation)

            results, moved = jax.jvp(call, (given,), (moves,))
            ones = jax.tree.map(jnp.ones_like, results)
            pulled = jax.vjp(call, given)[1](ones)[0]
            return sum(jnp.sum(x) for x in moved), sum(jnp.sum(pulled[name] * moves[name]) for name in given)

        left, right = sides(given, moves)
        assert np.isfinite(left) and abs(left - right) <= 1e-11 * max(abs(left), 1)


@pytest.mark.parametrize("implementation", among("scan", "native"))
def test_hessian(implementation):
    a, b = jnp.asarray(normal(4, 2)) * 0.5, jnp.asarray(normal(4, 2, seed=1))

    def loss(a):
        return jnp.sum(recurrence.linear_scan(a, b, implementation=implementation)[0] ** 2)

    def plain(a):
        h, total = jnp.zeros(2), 0.0
        for t in range(4):
            h = a[t] * h + b[t]
            total += jnp.sum(h**2)
        return total

    agree(jax.hessian(loss)(a), np.asarray(jax.hessian(plain)(a)), 1e-5)


def test_linear_transpose():
    """In b and the initial state together the scan is linear; so it is in x, and in value."""
    a, b = jnp.asarray(normal(5, 3)) * 0.5, jnp.asarray(normal(5, 3, seed=1))
    state = jnp.asarray(normal(3))

    def run(b, state):
        return recurrence.linear_scan(a, b, initial_state=state)[0]

    ct = jnp.asarray(normal(5, 3, seed=2))
    got = jax.linear_transpose(run, b, state)(ct)
    want = jax.vjp(run, b, state)[1](ct)
    jax.tree.map(lambda x, y: agree(x, np.asarray(y), 1e-6), got, want)
