"""Programs: their size, memory, repeatability, export, and what a remat policy keeps.

Public faults: 24 (compile time grows with L), 25 (no CPU), original K01, K02 (memory).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oracle import normal
from oracle.check_recurrence import among
from oracle.recurrence_cases import OPERATIONS, arrays, options
from probjax import recurrence


def real(operation, lead=(1, 5)):
    return {name: jnp.asarray(np.real(x), "float32") for name, x in arrays(operation, lead).items()}


def call(operation, given, **more):
    return getattr(recurrence, operation)(**given, **options(operation), **more)


def loss(operation, given, **more):
    y, last = call(operation, given, **more)
    return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(last))


@pytest.mark.parametrize("implementation", ["scan", None])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_size_does_not_depend_on_the_length(operation, implementation):
    if operation == "causal_conv1d" and implementation is None:
        implementation = "scan"

    def instructions(length):
        given = real(operation, (1, length))
        differentiate = jax.grad(lambda given: loss(operation, given, implementation=implementation))
        text = jax.jit(differentiate).lower(given).as_text()
        return text.count(" = ")

    # Not a step more; XLA's helper functions for other shapes count too.
    assert abs(instructions(256) - instructions(4096)) < 20


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_trace(operation):
    traces = []

    @jax.jit
    def run(given):
        traces.append(1)
        return call(operation, given)

    given = real(operation)
    run(given)
    run(jax.tree.map(lambda x: x + 1, given))
    assert len(traces) == 1


@pytest.mark.parametrize("implementation", among("scan", "native"))
@pytest.mark.parametrize("operation", ["selective_scan", "ssd"])
def test_no_buffer_of_all_states(operation, implementation):
    """Gradients, tangents, second derivatives: far below L x channels x state, and linear in L."""
    if operation == "ssd" and implementation == "native":
        implementation = None
    D, N = 48, 40

    def shapes(length):
        float32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
        if operation == "ssd":
            return {
                "query": float32(1, length, 1, N),
                "key": float32(1, length, 1, N),
                "value": float32(1, length, 1, D),
                "log_decay": float32(1, length, 1),
            }
        return {
            "x": float32(1, length, D),
            "dt": float32(1, length, D),
            "A": float32(D, N),
            "B": float32(1, length, N),
            "C": float32(1, length, N),
        }

    function = getattr(recurrence, operation)

    def gradient(given):
        return jax.grad(lambda given: jnp.sum(function(**given, implementation=implementation)[0] ** 2))(
            given
        )

    def along(given):
        return jax.jvp(lambda given: function(**given, implementation=implementation), (given,), (given,))[1]

    def second(given):
        return jax.jvp(gradient, (given,), (given,))[1]

    def temporary(f, length):
        return jax.jit(f).lower(shapes(length)).compile().memory_analysis().temp_size_in_bytes

    states = 4096 * D * N * 4
    for f, part in ((gradient, 4), (along, 4), (second, 2)):
        assert temporary(f, 4096) < states / part
    assert temporary(gradient, 4096) <= 2.2 * temporary(gradient, 2048)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_runs_are_bitwise_equal(operation):
    given = real(operation, (3, 130))
    run = jax.jit(jax.value_and_grad(lambda given: loss(operation, given)))
    jax.tree.map(np.testing.assert_array_equal, run(given), run(given))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_export(operation):
    """An exported program has none of our kernels in it, and gives the same numbers."""
    given = real(operation, (2, 5))

    def run(given):
        return jax.value_and_grad(lambda given: loss(operation, given))(given)

    exported = jax.export.export(jax.jit(run))(given)
    assert "custom_call @probjax" not in exported.mlir_module()
    wanted = jax.tree.leaves(jax.jit(run)(given))
    for got, want in zip(jax.tree.leaves(exported.call(given)), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("operation", ["linear_scan", "selective_scan", "ssd"])
def test_a_policy_keeps_what_backward_needs(operation):
    """With it, the gradient of a checkpointed call runs forward once; without, twice."""
    given = real(operation)

    def forwards(policy):
        run = jax.checkpoint(lambda given: loss(operation, given), policy=policy)
        return str(jax.make_jaxpr(jax.grad(run))(given)).count("probjax_forward")

    names = jax.checkpoint_policies.save_only_these_names(*recurrence.RESIDUAL_NAMES)
    assert forwards(names) == 1
    assert forwards(jax.checkpoint_policies.nothing_saveable) == 2


@pytest.mark.parametrize("operation", OPERATIONS)
def test_without_jit(operation):
    given = real(operation)
    want = call(operation, given)
    with jax.disable_jit():
        got = call(operation, given)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_long_sequence_compiles_at_once():
    """Case 24: 50,000 tokens."""
    b = jnp.asarray(normal(50_000, 2), jnp.complex64)
    h, _ = recurrence.linear_scan(jnp.asarray([0.9j, 0.5 + 0.5j]), b)
    assert np.all(np.isfinite(h))
