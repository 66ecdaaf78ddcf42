"""Dtypes of results, and errors that name the argument: contract sections 4 and 6."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oracle.recurrence_cases import OPERATIONS, arrays, options
from probjax import recurrence

MAIN = {"linear_scan": "b", "selective_scan": "x", "ssd": "value", "causal_conv1d": "x"}


def real(operation, dtype="float32", lead=(2, 5)):
    return {name: jnp.asarray(np.real(x), dtype) for name, x in arrays(operation, lead).items()}


def call(operation, given, **more):
    return getattr(recurrence, operation)(**given, **options(operation), **more)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_half_inputs(operation, dtype):
    """The result has their dtype, rounded once; the state is as exact as from the same numbers in float32."""
    half = real(operation, dtype)
    wide = {name: x.astype("float32") for name, x in half.items()}
    y, last = call(operation, half)
    want_y, want_last = call(operation, wide)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, want_y.astype(dtype))
    if operation == "causal_conv1d":
        assert last.dtype == dtype
        np.testing.assert_array_equal(last, half["x"][:, -3:])
    else:
        assert last.dtype == "float32"
        np.testing.assert_array_equal(last, want_last)
    gradient = jax.grad(lambda given: call(operation, given)[0].astype("float32").sum())(half)
    for name, x in half.items():
        assert gradient[name].shape == x.shape and gradient[name].dtype == dtype


@pytest.mark.parametrize("operation", OPERATIONS)
def test_mixed_dtypes(operation, x64):
    given = real(operation)
    one = next(name for name in given if name not in (MAIN[operation], "initial_state"))
    mixed = {**given, one: given[one].astype("float64")}
    y, last = call(operation, mixed)
    assert y.dtype == "float32"
    assert last.dtype == ("float32" if operation == "causal_conv1d" else "float64")
    y, last = call(operation, {name: x.astype("float64") for name, x in given.items()})
    assert y.dtype == last.dtype == "float64"


@pytest.mark.parametrize(
    ("operation", "name"), [("linear_scan", "a"), ("selective_scan", "dt"), ("ssd", "log_decay")]
)
def test_python_numbers_do_not_widen(operation, name, x64):
    for number in (0.0, -0.5, np.float32(0.5)):
        y, last = call(operation, {**real(operation, "bfloat16"), name: number})
        assert y.dtype == "bfloat16" and last.dtype == "float32"


@pytest.mark.parametrize(
    ("a", "b", "out", "state"),
    [
        ("complex64", "float32", "complex64", "complex64"),
        ("complex64", "bfloat16", "complex64", "complex64"),
        ("float32", "complex64", "complex64", "complex64"),
        ("complex128", "complex64", "complex64", "complex128"),
        ("float64", "bfloat16", "bfloat16", "float64"),
    ],
)
def test_complex_numbers(a, b, out, state, x64):
    factor, drive = jnp.full(3, 0.5, a), jnp.ones((4, 3), b)
    h, last = recurrence.linear_scan(factor, drive)
    assert (h.dtype, last.dtype) == (out, state)
    gradient = jax.grad(
        lambda a, b: jnp.real(recurrence.linear_scan(a, b)[0].astype("complex128")).sum(), (0, 1)
    )(factor, drive)
    assert (gradient[0].dtype, gradient[1].dtype) == (a, b)


BAD = {
    # operation, argument that is wrong, its value, error, what the message has besides the name
    ("linear_scan", "a"): (jnp.ones((4, 3)), ValueError, "(4, 3)"),
    ("linear_scan", "b"): (jnp.ones((2, 5, 3), int), TypeError, "int32"),
    ("linear_scan", "axis"): (3, ValueError, "3"),
    ("linear_scan", "initial_state"): (jnp.ones((2, 4)), ValueError, "(2, 4)"),
    ("linear_scan", "mask"): (jnp.ones((2, 5)), TypeError, "bool"),
    ("linear_scan", "reset"): (jnp.ones(6, bool), ValueError, "(6,)"),
    ("linear_scan", "segment_ids"): (jnp.ones(5), TypeError, "integers"),
    ("selective_scan", "x"): (jnp.ones(5), ValueError, "(5,)"),
    ("selective_scan", "dt"): (jnp.ones((2, 5, 5)), ValueError, "(2, 5, 5)"),
    ("selective_scan", "A"): (jnp.ones((5, 3)), ValueError, "(5, 3)"),
    ("selective_scan", "B"): (jnp.ones((2, 5, 4, 3)), ValueError, "4 groups"),
    ("selective_scan", "C"): (jnp.ones((2, 5, 4)), ValueError, "4 states"),
    ("selective_scan", "D"): (jnp.ones((6, 1)), ValueError, "(6, 1)"),
    ("selective_scan", "dt_bias"): (jnp.ones(6, complex), TypeError, "complex64"),
    ("selective_scan", "initial_state"): (jnp.ones((6, 4)), ValueError, "(6, 4)"),
    ("ssd", "query"): (jnp.ones((2, 5, 3, 5)), ValueError, "(2, 5, 3, 5)"),
    ("ssd", "key"): (jnp.ones((2, 4, 2, 5)), ValueError, "(2, 4, 2, 5)"),
    ("ssd", "value"): (jnp.ones((2, 5, 4, 3), bool), TypeError, "bool"),
    ("ssd", "log_decay"): (jnp.ones((2, 5, 3)), ValueError, "(2, 5, 3)"),
    ("ssd", "chunk_size"): (0, ValueError, "0"),
    ("ssd", "precision"): ("sharp", ValueError, "sharp"),
    ("ssd", "initial_state"): (jnp.ones((4, 3, 5)), ValueError, "(4, 3, 5)"),
    ("ssd", "implementation"): ("native", NotImplementedError, "ssd"),
    ("causal_conv1d", "weight"): (jnp.ones((0, 3)), ValueError, "(0, 3)"),
    ("causal_conv1d", "bias"): (jnp.ones(2), ValueError, "(2,)"),
    ("causal_conv1d", "initial_state"): (jnp.ones((2, 4, 3)), ValueError, "(2, 4, 3)"),
    ("causal_conv1d", "implementation"): ("fast", ValueError, "fast"),
}


@pytest.mark.parametrize(("operation", "name"), BAD, ids="-".join)
def test_errors_name_the_argument(operation, name):
    value, error, words = BAD[operation, name]
    with pytest.raises(error) as raised:
        call(operation, {**real(operation), name: value})
    # What has to agree with something else is blamed on one of the two.
    assert name in str(raised.value) and words in str(raised.value)


@pytest.mark.parametrize(
    ("function", "given", "name"),
    [
        (recurrence.linear_scan_step, {"a": jnp.ones(3), "b": jnp.ones(3), "state": jnp.ones(4)}, "state"),
        (
            recurrence.selective_scan_step,
            {
                "x": jnp.ones(3),
                "dt": 0.1,
                "A": -jnp.ones((3, 2)),
                "B": jnp.ones(3),
                "C": jnp.ones(2),
                "state": 0.0,
            },
            "B",
        ),
        (
            recurrence.ssd_step,
            {
                "query": jnp.ones((1, 2)),
                "key": jnp.ones((1, 2)),
                "value": jnp.ones((3, 2)),
                "log_decay": jnp.ones(2),
                "state": 0.0,
            },
            "log_decay",
        ),
        (
            recurrence.causal_conv1d_step,
            {"x": jnp.ones(3), "weight": jnp.ones((4, 3)), "state": jnp.ones((4, 3))},
            "state",
        ),
    ],
    ids=["linear_scan", "selective_scan", "ssd", "causal_conv1d"],
)
def test_errors_of_steps(function, given, name):
    with pytest.raises(ValueError, match=rf"^{name}: got"):
        function(**given)


def test_mask_of_a_step():
    with pytest.raises(TypeError, match=r"^mask: got"):
        recurrence.linear_scan_step(0.5, jnp.ones((2, 3)), state=0.0, mask=jnp.ones(2))
    with pytest.raises(ValueError, match=r"^reset: got"):
        recurrence.linear_scan_step(0.5, jnp.ones((2, 3)), state=0.0, reset=jnp.ones(3, bool))


def test_named_implementation_that_is_missing(monkeypatch):
    from probjax import _native

    monkeypatch.setattr(_native, "_loaded", _native._State(reason="not today"))
    with pytest.raises(NotImplementedError, match="not today"):
        recurrence.linear_scan(0.5, jnp.ones((7, 11)), implementation="native")
    h, _ = recurrence.linear_scan(0.5, jnp.ones((7, 11)))  # nothing named: it falls to plain JAX
    assert h.shape == (7, 11)
    assert recurrence.implementations()["native"] == "not today"
