"""Extreme numbers: strong, infinite and positive decays, underflow, long memories. research/ssm.md 2.5.

Public faults: 1 (lengths that are no multiple of the chunk), 14, 18, 19 (products of decays), 20, 22, 26
(sizes), case 15.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oracle import normal
from oracle.check_recurrence import Case, agree, among, check
from oracle.recurrence_cases import arrays
from probjax import recurrence


def decays(kind, lead):
    draw = np.random.default_rng(0)
    shape = (*lead, 4)
    rare = draw.random(shape)
    return {
        "mild": -np.log1p(np.exp(draw.standard_normal(shape))),
        "strong": np.where(rare < 0.2, -60.0, -1e-3),
        "very strong": np.where(rare < 0.05, -1e4, -1e-2),
        "weak": np.full(shape, -1e-6),
        "infinite": np.where(rare < 0.05, -np.inf, -1e-2),
        "alternating": np.where(np.arange(lead[-1]) % 2 == 0, 30.0, -31.0)[:, None] + np.zeros(shape),
    }[kind]


@pytest.mark.parametrize("kind", ["strong", "very strong", "weak", "infinite", "alternating"])
def test_decays_of_ssd(kind):
    """Errors stay at rounding, however the decays lie: no differences of cumulative sums."""
    lead = (1, 130)
    case = Case("ssd", {**arrays("ssd", lead), "log_decay": decays(kind, lead)})
    check(case, "scan")
    if kind == "infinite":
        gradient = jax.grad(lambda d: case.call({**case.cast("float32"), "log_decay": d}, None)[0].sum())(
            jnp.float32(case.arrays["log_decay"])
        )
        assert np.all(np.asarray(gradient)[np.isneginf(case.arrays["log_decay"])] == 0)


def test_positive_log_decay_is_finite_where_the_result_is():
    """The product over a chunk overflows, what it multiplies is zero; and again where it is tiny."""
    given = {name: np.zeros_like(x) for name, x in arrays("ssd", (1, 64)).items()}
    given["log_decay"][:] = 5.0  # exp(5 * 64) is no float32
    given["query"][:] = 1
    given["key"][:, -1] = given["value"][:, -1] = 1.0
    check(Case("ssd", given), "scan", derivatives=False)
    given["key"][:, 40] = given["value"][:, 40] = 1e-19  # exp(5 * 23) * 1e-38
    check(Case("ssd", given), "scan", derivatives=False)


def test_checks_refuse_a_positive_log_decay():
    given = Case("ssd", arrays("ssd")).cast("float32")
    given["log_decay"] = jnp.full_like(given["log_decay"], 0.5)
    with jax.enable_checks(True), pytest.raises(ValueError, match="log_decay"):
        recurrence.ssd(**given)


@pytest.mark.parametrize("length", [*range(1, 6), 15, 16, 17, 31, 33])
def test_every_length_about_the_chunk(length):
    check(
        Case("ssd", arrays("ssd", (1, length)), options={"chunk_size": 16}), "scan", derivatives=length > 30
    )


@pytest.mark.parametrize("implementation", among("scan", "native"))
def test_decays_that_underflow(implementation):
    """dt A down to -1000 and above zero: no product of decays is divided by."""
    given = arrays("selective_scan", (1, 66))
    given["dt"] = 40 * np.abs(given["dt"])
    given["A"][0], given["A"][1] = -30.0, 0.004
    case = Case("selective_scan", {name: x for name, x in given.items() if name not in ("D", "dt_bias")})
    check(case, implementation)


def test_softplus_is_exact_at_both_ends():
    given = arrays("selective_scan", (1, 4))
    given["dt"][..., :3], given["dt"][..., 3:] = -15.0, 100.0
    given["A"] /= 100
    given["dt_bias"][:] = 0
    x = Case("selective_scan", given, options={"dt_softplus": True})
    got, _ = x.call(x.cast("float32"), None)
    want, _ = x.expected()
    for channel in range(6):  # each by itself: the small ones are not to hide behind the large
        agree(got[..., channel], want[..., channel], 1e-6, floor=0)


@pytest.mark.parametrize("implementation", among("scan", "native"))
def test_long_memory_and_growth(implementation):
    angle = normal(4, seed="angle")
    for radius, length in ((0.9999, 300), (1.02, 300)):
        given = {
            "a": radius * np.exp(1j * angle),
            "b": normal(1, length, 4) + 0j,
            "initial_state": np.ones(4) + 0j,
        }
        check(Case("linear_scan", given), implementation)


def test_half_inputs_have_states_in_float32():
    """exp(dt A) of bfloat16 numbers shifts everything: they are widened first."""
    given = arrays("selective_scan", (1, 130))
    case = Case("selective_scan", given, options={"dt_softplus": True})
    half = {name: jnp.asarray(x, jnp.bfloat16) for name, x in given.items()}
    rounded = Case(
        "selective_scan", {name: np.asarray(x, np.float64) for name, x in half.items()}, options=case.options
    )
    y, last = case.call(half, None)
    want = rounded.expected()
    assert y.dtype == jnp.bfloat16 and last.dtype == jnp.float32
    agree(last, want[1], 1e-5)
    agree(np.asarray(y, np.float64), want[0], 2**-8)
