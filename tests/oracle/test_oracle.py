"""The oracle itself: against sums by hand, finite differences, and its two forms against each other."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oracle import Call, Sizes, biases, dense_attention, forward, gradients, masks, normal, qkv
from oracle.biases import t5_bucket


def lse_of(logits):
    return math.log(sum(math.exp(x) for x in logits))


def test_two_keys_by_hand():
    q, k, v = [2.0], [[1.0], [-1.0]], [[10.0], [30.0]]
    call = Call(
        np.reshape(q, (1, 1, 1)),
        np.reshape(k, (2, 1, 1)),
        np.reshape(v, (2, 1, 1)),
        bias=np.reshape([0.5, 0.0], (1, 1, 2)),
        scale=0.25,
    )
    logits = [0.25 * 2 + 0.5, -0.25 * 2]
    weights = [math.exp(x - lse_of(logits)) for x in logits]
    solution = forward(call)
    assert solution.lse.item() == pytest.approx(lse_of(logits), rel=1e-15)
    assert solution.out.item() == pytest.approx(10 * weights[0] + 30 * weights[1], rel=1e-15)
    grads = gradients(call, np.ones((1, 1, 1)))
    d_logit = weights[0] * weights[1] * (10 - 30)
    np.testing.assert_allclose(grads["bias"].ravel(), [d_logit, -d_logit], rtol=1e-14)
    assert grads["query"].item() == pytest.approx(0.25 * 2 * d_logit, rel=1e-14)
    assert grads["scale"].item() == pytest.approx(2 * 2 * d_logit, rel=1e-14)


def test_sink_by_hand():
    call = Call(
        np.ones((1, 1, 1)),
        np.ones((2, 1, 1)),
        np.reshape([3.0, 5.0], (2, 1, 1)),
        sinks=np.array([0.0]),
        scale=1.0,
    )
    solution = forward(call)
    total = 2 * math.e + 1
    assert solution.lse.item() == pytest.approx(math.log(total), rel=1e-15)
    assert solution.out.item() == pytest.approx(8 * math.e / total, rel=1e-15)
    grads = gradients(call, np.zeros((1, 1, 1)), np.ones((1, 1)))
    assert grads["sinks"].item() == pytest.approx(1 / total, rel=1e-15)


def test_order_is_scale_cap_bias_mask():
    call = Call(
        np.full((1, 1, 1), 3.0), np.reshape([1.0, 2.0, 9.0], (3, 1, 1)), np.zeros((3, 1, 1)),
        bias=np.reshape([4.0, 5.0, 6.0], (1, 1, 3)), mask=np.reshape([True, True, False], (1, 1, 3)),
        scale=0.5, logits_soft_cap=2.0,
    )  # fmt: skip
    logits = [2 * math.tanh(1.5 / 2) + 4, 2 * math.tanh(3.0 / 2) + 5]
    assert forward(call).lse.item() == pytest.approx(lse_of(logits), rel=1e-15)


def test_empty_rows_and_garbage():
    arrays = qkv((1,), T=3, S=4)
    mask = np.ones((1, 1, 3, 4), bool)
    mask[..., 1, :] = False
    mask[..., 3] = False
    clean = Call(**arrays, mask=mask, sinks=np.zeros(2))
    dirty = Call(arrays["query"], arrays["key"].copy(), arrays["value"].copy(), mask=mask, sinks=np.zeros(2))
    dirty.key[:, 3], dirty.value[:, 3] = np.nan, np.inf
    ct = normal(1, 3, 2, 4)
    one, two = forward(clean), forward(dirty)
    np.testing.assert_allclose(one.out, two.out, rtol=1e-13)
    assert (two.out[:, 1] == 0).all()
    assert np.isneginf(two.lse[:, 1]).all()
    want, got = gradients(clean, ct, ct[..., 0]), gradients(dirty, ct, ct[..., 0])
    for name in ("query", "key", "value", "sinks"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-15, atol=1e-17)
    assert (got["query"][:, 1] == 0).all()
    assert (got["key"][:, 3] == 0).all()


def test_visible_garbage_stays_in_the_rows_that_see_it():
    arrays = qkv((1,), T=4, S=4)
    arrays["value"][:, 3] = np.nan
    out = forward(Call(**arrays, is_causal=True)).out
    assert np.isfinite(out[:, :3]).all()
    assert np.isnan(out[:, 3]).all()


BIASES = {
    "dense": lambda N: biases.Dense(normal(2, N, 1, 5)),
    "dense per kv head": lambda N: biases.Dense(normal(1, N // 2, 4, 5)),
    "alibi": lambda N: biases.ALiBi(normal(N)),
    "clip": lambda N: biases.RelativePosition(normal(N, 5)),
    "t5": lambda N: biases.RelativePosition(normal(1, 8), bucketing="t5", max_distance=6),
    "cap": lambda N: biases.SoftCap(1.5),
    "head scale": lambda N: biases.HeadScale(normal(N)),
    "pair": lambda N: biases.pair_bias(normal(2, 4, 5)),
    "distance": lambda N: biases.distance_table(normal(N, 7)),
    "gated": lambda N: biases.gated_score(normal(N), normal(5)),
    "composed": lambda N: (
        biases.HeadScale(normal(N))
        + biases.SoftCap(2.0)
        + biases.Dense(normal(1, 1, 4, 5))
        + biases.gated_score(normal(N), normal(5))
    ),
}


def differences(function, x, step=1e-5):
    """Central differences of a scalar function of an array."""
    gradient = np.zeros(x.shape)
    for index in np.ndindex(*x.shape):
        original = x[index]
        x[index] = original + step
        above = function()
        x[index] = original - step
        below = function()
        x[index] = original
        gradient[index] = (above - below) / (2 * step)
    return gradient


@pytest.mark.parametrize("name", BIASES)
def test_gradients_match_finite_differences(name):
    arrays = qkv((2,), T=4, S=5, N=4, K=2, D=3, V=2)
    mask = normal(2, 1, 4, 5) > -0.7
    mask[0, 0, 2] = False
    call = Call(**arrays, bias=BIASES[name](4), mask=mask, sinks=normal(4), scale=0.7, logits_soft_cap=3.0)
    keep = normal(2, 4, 4, 5, seed="keep") > -0.5
    ct_out, ct_lse = normal(2, 4, 4, 2, seed="out"), normal(2, 4, 4, seed="lse")

    def loss(call=call):
        solution = forward(call, keep, 0.25)
        return (solution.out * ct_out).sum() + np.where(
            np.isfinite(solution.lse), solution.lse * ct_lse, 0
        ).sum()

    got = gradients(call, ct_out, ct_lse, keep, 0.25)
    for argument in ("query", "key", "value", "sinks"):
        want = differences(loss, getattr(call, argument))
        np.testing.assert_allclose(got[argument], want, atol=3e-9, rtol=1e-7)
    for array, gradient in zip(call.bias.arrays(), got["bias"], strict=True):
        np.testing.assert_allclose(gradient, differences(loss, array), atol=3e-9, rtol=1e-7)
    above, below = (loss(dataclasses.replace(call, scale=0.7 + step)) for step in (1e-5, -1e-5))
    assert got["scale"].item() == pytest.approx((above - below) / 2e-5, rel=1e-7)


@pytest.mark.parametrize("sinks", [False, True])
def test_both_forms_agree(sinks):
    arrays = qkv((2,), T=4, S=5, N=4, K=2, D=3, V=2)
    mask = normal(2, 1, 4, 5) > -0.3
    mask[1, 0, 0] = False
    sinks = normal(4) if sinks else None
    call = Call(**arrays, bias=normal(2, 4, 4, 5), mask=mask, sinks=sinks, logits_soft_cap=2.0)
    with jax.enable_x64(True):

        def attend(q, k, v, bias):
            return dense_attention(
                q,
                k,
                v,
                visible=mask,
                bias=bias,
                soft_cap=2.0,
                sinks=None if sinks is None else jnp.asarray(sinks),
            )

        (out, lse), pull = jax.vjp(attend, *map(jnp.asarray, (*arrays.values(), call.bias)))
        ct = normal(*out.shape, seed="ct"), normal(*lse.shape, seed="ct")
        grads = pull((jnp.asarray(ct[0]), jnp.asarray(ct[1])))
    solution = forward(call)
    np.testing.assert_allclose(out, solution.out, atol=1e-14)
    np.testing.assert_allclose(lse, solution.lse, atol=1e-14)
    want = gradients(call, *ct)
    for got, name in zip(grads, ("query", "key", "value", "bias"), strict=True):
        np.testing.assert_allclose(got, want[name], atol=1e-13)


def test_masks_by_hand():
    sizes = Sizes((2,), 3, 4, 2, 1)
    rows = {
        "causal": (masks.Causal(), ["1000", "1100", "1110"]),
        "bottom right": (masks.Causal("bottom_right"), ["1100", "1110", "1111"]),
        "window": (masks.SlidingWindow(1, 0), ["1000", "1100", "0110"]),
        "open left": (masks.SlidingWindow(-1, 1), ["1100", "1110", "1111"]),
        "window, bottom right": (masks.SlidingWindow(1, 0, "bottom_right"), ["1100", "0110", "0011"]),
        "blocks": (masks.BlockDiagonal(2), ["1100", "1100", "0011"]),
        "prefix": (masks.PrefixLM([2, 2]), ["1100", "1100", "1110"]),
        "padding": (masks.Padding([3, 3]), ["1110"] * 3),
        "keep": (masks.Padding([[True, False, True, True]] * 2), ["1011"] * 3),
        "segments": (masks.Segments([[0, 0, 1]] * 2, [[0, 1, 1, 2]] * 2), ["1000", "1000", "0110"]),
        "function": (masks.MaskFunction(lambda b, h, q, kv: kv == q + 1), ["0100", "0010", "0001"]),
        "algebra": (~masks.Causal() & masks.BlockDiagonal(2) | masks.Padding([1, 1]),
                    ["1100", "1000", "1001"]),
    }  # fmt: skip
    for name, (spec, want) in rows.items():
        want = np.array([[c == "1" for c in row] for row in want])
        assert (spec.visible(sizes) == want).all(), name


def test_windows_and_lengths_of_the_call_by_hand():
    arrays = qkv((1,), T=3, S=4, N=1)
    calls = [
        ({"local_window_size": 1}, ["1100", "1110", "0111"]),
        ({"local_window_size": (0, None)}, ["1111", "0111", "0011"]),
        ({"local_window_size": (1, 0), "causal_alignment": "bottom_right"}, ["1100", "0110", "0011"]),
        (
            {"query_seq_lengths": np.array([2]), "key_value_seq_lengths": np.array([3])},
            ["1110", "1110", "0000"],
        ),
        ({"segment_ids": (np.array([[5, 6, 6]]), np.array([[6, 5, 5, 6]]))}, ["0110", "1001", "1001"]),
    ]
    for arguments, want in calls:
        want = np.array([[c == "1" for c in row] for row in want])
        assert (Call(**arrays, **arguments).visible()[0, 0] == want).all(), arguments


def test_t5_buckets_of_the_paper():
    distance = np.array([-200, -128, -127, -64, -16, -15, -8, -7, -1, 0, 1, 7, 8, 15, 16, 64, 127, 128, 200])
    want = [15, 15, 15, 14, 10, 9, 8, 7, 1, 0, 17, 23, 24, 25, 26, 30, 31, 31, 31]
    assert t5_bucket(distance, 32, 128, True).tolist() == want
    causal = [31, 31, 31, 26, 16, 15, 8, 7, 1, 0, 0, 0]
    assert t5_bucket(distance[:12], 32, 128, False).tolist() == causal
