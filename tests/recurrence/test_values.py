"""Values, gradients and tangents against the float64 oracle, for all lengths and ways of calling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oracle import normal
from oracle.check_recurrence import Case, agree, check, parameters
from oracle.recurrence_cases import OPERATIONS, arrays, busy, options, plain, positive, said
from probjax import recurrence

ALL = parameters(*OPERATIONS)
FAST = [pair for pair in ALL if pair.values[1] != "reference"]


@pytest.mark.parametrize("length", [pytest.param(1, marks=pytest.mark.slow), 65])
@pytest.mark.parametrize(("operation", "implementation"), FAST)
def test_lengths(operation, implementation, length):
    check(plain(operation, length), implementation)


@pytest.mark.parametrize(("length", "reverse"), [pytest.param(64, False, marks=pytest.mark.slow), (70, True)])
@pytest.mark.parametrize(("operation", "implementation"), ALL)
def test_resets_segments_and_padding(operation, implementation, length, reverse):
    check(busy(operation, length, reverse), implementation, entrywise=not reverse)


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 63, 300, 1024, 4096])
@pytest.mark.parametrize(("operation", "implementation"), ALL)
def test_long(operation, implementation, length):
    check(plain(operation, length), implementation)
    check(busy(operation, length, False), implementation, derivatives=length < 4096)


@pytest.mark.parametrize(("operation", "implementation"), FAST)
def test_values_of_long_sequences(operation, implementation):
    check(busy(operation, 1024, True), implementation, derivatives=False)


@pytest.mark.parametrize(("operation", "implementation"), FAST)
def test_float64(operation, implementation):
    check(busy(operation, 64, False), implementation, "float64")


BROADCAST = {
    "scalar factor": Case("linear_scan", {**arrays("linear_scan"), "a": np.asarray(0.7)}),
    "constant factor": Case("linear_scan", {**arrays("linear_scan"), "a": normal(3)}, said((2, 5))),
    "factor without batch": Case("linear_scan", {**arrays("linear_scan"), "a": normal(5, 3)}),
    "shared state": Case("linear_scan", {**arrays("linear_scan"), "initial_state": normal(1)}, reverse=True),
    "scalar dt": Case("selective_scan", {**arrays("selective_scan"), "dt": np.asarray(0.3)}),
    "dt of channels": Case("selective_scan", {**arrays("selective_scan"), "dt": positive(6)}, said((2, 5))),
    "dt of tokens": Case("selective_scan", {**arrays("selective_scan"), "dt": positive(5, 1)}, reverse=True),
    "B and C constant": Case(
        "selective_scan",
        {**arrays("selective_scan"), "B": normal(1, 1, 3), "C": normal(1, 1, 6, 3)},
        said((2, 5)),
    ),
    "B and C without batch": Case(
        "selective_scan", {**arrays("selective_scan"), "B": normal(1, 5, 6, 3), "C": normal(1, 5, 3)}
    ),
    "shared states": Case("selective_scan", {**arrays("selective_scan"), "initial_state": normal(6, 1)}),
    "linear attention": Case("ssd", {**arrays("ssd"), "log_decay": np.asarray(0.0)}, said((2, 5))),
    "retention": Case("ssd", {**arrays("ssd"), "log_decay": -positive(4)}, reverse=True),
    "shared matrix": Case("ssd", {**arrays("ssd"), "initial_state": normal(1, 5, 1)}),
    "shared window": Case("causal_conv1d", {**arrays("causal_conv1d"), "initial_state": normal(3, 3)}),
    "one tap": Case(
        "causal_conv1d",
        {"x": normal(2, 5, 3), "weight": normal(1, 3), "initial_state": normal(2, 0, 3)},
        said((2, 5)),
    ),
}


for case in BROADCAST.values():
    case.options = options(case.operation)


@pytest.mark.parametrize("name", BROADCAST)
@pytest.mark.parametrize("implementation", [pytest.param("scan", marks=pytest.mark.slow), None])
def test_broadcast_arguments(name, implementation):
    check(BROADCAST[name], implementation)


def test_axis_of_a_linear_scan():
    for shape, axis in [((5, 2, 3), 0), ((2, 3, 5), -1), ((2, 5, 3), 1), ((2, 5, 2, 3), 1), ((5,), 0)]:
        b, a = normal(*shape, seed=axis), 0.5 * normal(*shape, seed="a")
        moved = Case(
            "linear_scan",
            {"a": np.moveaxis(a, axis, -1)[..., None], "b": np.moveaxis(b, axis, -1)[..., None]},
        )
        moved.arrays["initial_state"] = np.zeros(())
        y, last = recurrence.linear_scan(jnp.float32(a), jnp.float32(b), axis=axis)
        want_y, want_last = moved.expected()
        agree(np.moveaxis(y, axis, -1)[..., None], want_y, 1e-6)
        agree(np.asarray(last)[..., None], want_last, 1e-6)


@pytest.mark.parametrize("lead", [(5,), (2, 3, 5), (0, 5), (2, 0)], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_leading_axes_and_empty_ones(operation, lead):
    case = Case(operation, arrays(operation, lead), said(lead), options=options(operation))
    case.arrays = {name: np.real(x) for name, x in case.arrays.items()}
    if 0 not in lead:
        check(case, None)
        return
    given = case.cast("float32")
    y, last = case.call(given, None)
    assert y.shape == given[case.main].shape
    if lead[-1] == 0:  # no token: the state stays
        agree(last, np.asarray(given["initial_state"]), 0)
    gradient = jax.grad(lambda arrays: jnp.real(jnp.sum(case.call(arrays, None)[1])))(given)
    assert all(np.all(np.isfinite(x)) for x in gradient.values())


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 300])
def test_chunk_size_changes_nothing(chunk_size):
    case = busy("ssd", 64, False)
    case = Case("ssd", case.arrays, case.tokens, case.reverse, {"chunk_size": chunk_size})
    check(case, "scan", derivatives=chunk_size in (7, 300))


@pytest.mark.parametrize(
    "n", [pytest.param(1, marks=pytest.mark.slow), 37, pytest.param(300, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_odd_sizes(operation, n):
    """Sizes that are no multiple of a vector, wider and narrower than one."""
    state = normal(2, n, 3) if operation == "selective_scan" else normal(2, 1, 3, n)
    given = {
        "linear_scan": {"a": 0.5 * normal(2, 5, n), "b": normal(2, 5, n), "initial_state": normal(2, n)},
        "selective_scan": {
            **{name: normal(2, 5, n, seed=name) for name in ("x", "dt")},
            "A": -positive(n, 3),
            "B": normal(2, 5, 3),
            "C": normal(2, 5, n, 3),
            "initial_state": state,
        },
        "ssd": {
            "query": normal(2, 5, 1, 3),
            "key": normal(2, 5, 1, 3, seed=1),
            "value": normal(2, 5, 1, n),
            "log_decay": -positive(2, 5, 1),
            "initial_state": state,
        },
        "causal_conv1d": {"x": normal(2, 5, n), "weight": normal(2, n), "initial_state": normal(2, 1, n)},
    }[operation]
    check(Case(operation, given), None)
