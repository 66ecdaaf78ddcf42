"""Property tests: drawn shapes, dtypes, masks, biases and options against the oracle, forward and gradients.

Sizes come from small sets, so that examples share compiled programs.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from oracle import Call, biases, can_run, check, masks, normal, qkv

LEADS = [(), (1,), (2,), (2, 2), (0,)]
LENGTHS = [(5, 5), (1, 7), (7, 4), (4, 9), (0, 3), (3, 0)]
HEADS = [(1, 1), (4, 2), (2, 1)]
WIDTHS = [(4, 4), (3, 5)]
SEEDS = st.integers(0, 5)


def pick(draw, values):
    return draw(st.sampled_from(values))


@st.composite
def geometries(draw):
    """lead, T, S, N, K."""
    return pick(draw, LEADS), *pick(draw, LENGTHS), *pick(draw, HEADS)


def broadcast_shape(draw, lead, T, S, N, K):
    """A shape that broadcasts to (*lead, N or K or 1, T, S)."""
    batch = [pick(draw, [1, size]) for size in lead]
    return (*batch, pick(draw, [1, K, N]), pick(draw, [1, T]), pick(draw, [1, S]))


def integers(draw, shape, low, high):
    return np.random.default_rng(draw(SEEDS)).integers(low, high + 1, shape)


def leaf_mask(draw, lead, T, S, N, K):
    kind = pick(
        draw, ["causal", "window", "prefix", "segments", "padding", "keep", "blocks", "dense", "function"]
    )
    alignment = pick(draw, ["top_left", "bottom_right"])
    return {
        "causal": lambda: masks.Causal(alignment),
        "window": lambda: masks.SlidingWindow(
            pick(draw, [None, -1, 0, 2]), pick(draw, [None, 0, 1]), alignment
        ),
        "prefix": lambda: masks.PrefixLM(integers(draw, lead, 0, S)),
        "segments": lambda: masks.Segments(
            integers(draw, (*lead, T), 0, 2), integers(draw, (*lead, S), 0, 2)
        ),
        "padding": lambda: masks.Padding(integers(draw, lead, 0, S + 1)),
        "keep": lambda: masks.Padding(integers(draw, (*lead, S), 0, 3) > 0),
        "blocks": lambda: masks.BlockDiagonal(pick(draw, [1, 2, 3])),
        "dense": lambda: masks.Dense(
            normal(*broadcast_shape(draw, lead, T, S, N, K), seed=draw(SEEDS)) > -0.5
        ),
        "function": lambda: masks.MaskFunction(_stripes, np.array([2, 3, 4]) + draw(SEEDS)),
    }[kind]()


def _stripes(batch, head, q, kv, modulus):
    return (q + 2 * kv + head + batch) % modulus[1] > 0


def mask_tree(draw, depth, *sizes):
    kind = pick(draw, ["leaf", "leaf", "not", "and", "or"]) if depth else "leaf"
    if kind == "leaf":
        return leaf_mask(draw, *sizes)
    if kind == "not":
        return ~mask_tree(draw, depth - 1, *sizes)
    left, right = mask_tree(draw, depth - 1, *sizes), mask_tree(draw, depth - 1, *sizes)
    return left & right if kind == "and" else left | right


def leaf_bias(draw, lead, T, S, N, K):
    seed = draw(SEEDS)
    kind = pick(draw, ["dense", "alibi", "clip", "t5", "cap", "head", "gated"])
    return {
        "dense": lambda: biases.Dense(normal(*broadcast_shape(draw, lead, T, S, N, K), seed=seed)),
        "alibi": lambda: biases.ALiBi(normal(N, seed=seed)),
        "clip": lambda: biases.RelativePosition(normal(pick(draw, [1, N]), pick(draw, [3, 6]), seed=seed)),
        "t5": lambda: biases.RelativePosition(
            normal(N, 6, seed=seed), bucketing="t5", max_distance=7, bidirectional=pick(draw, [True, False])
        ),
        "cap": lambda: biases.SoftCap(pick(draw, [0.5, 3.0])),
        "head": lambda: biases.HeadScale(normal(N, seed=seed)),
        "gated": lambda: biases.gated_score(normal(N, seed=seed), normal(max(S, 1), seed=seed)),
    }[kind]()


@st.composite
def calls(draw, masked=True, biased=True, optional=True):
    sizes = lead, T, S, N, K = draw(geometries())
    call = Call(**qkv(lead, T, S, N, K, *pick(draw, WIDTHS), seed=draw(SEEDS)))
    if masked and draw(st.booleans()):
        call = dataclasses.replace(call, mask=mask_tree(draw, 2, *sizes))
    if biased and draw(st.booleans()):
        bias = leaf_bias(draw, *sizes)
        for _ in range(draw(st.integers(0, 2))):
            bias = bias + leaf_bias(draw, *sizes)
        call = dataclasses.replace(call, bias=bias)
    return dataclasses.replace(call, **options(draw, *sizes)) if optional else call


def options(draw, lead, T, S, N, K):
    """Any of the other arguments, each with probability about a third."""
    made = {
        "scale": lambda: pick(draw, [0.3, -1.0, 0.0]),
        "is_causal": lambda: True,
        "causal_alignment": lambda: "bottom_right",
        "local_window_size": lambda: pick(draw, [1, (2, 0), (None, 1), (0, -1)]),
        "logits_soft_cap": lambda: 1.5,
        "sinks": lambda: normal(N, seed=draw(SEEDS)),
        "query_seq_lengths": lambda: integers(draw, lead, 0, T + 1),
        "key_value_seq_lengths": lambda: integers(draw, lead, 0, S + 1),
        "segment_ids": lambda: (integers(draw, (*lead, T), 0, 1), integers(draw, (*lead, S), 0, 1)),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(made)), max_size=4))
    return {name: made[name]() for name in sorted(chosen)}


@settings(max_examples=8)
@given(call=calls(biased=False, optional=False))
def test_masks(implementation, call):
    check(implementation, call)


@settings(max_examples=8)
@given(call=calls(masked=False, optional=False))
def test_biases(implementation, call):
    assume(can_run(implementation, call))
    check(implementation, call)


@settings(max_examples=12)
@given(call=calls())
@example(call=Call(**qkv((), 1, 1, 1)))
def test_everything_together(implementation, call):
    assume(can_run(implementation, call))
    check(implementation, call, tolerance=4e-6)


@settings(max_examples=5)
@given(call=calls())
def test_everything_in_float64(implementation, call):
    assume(can_run(implementation, call))
    check(implementation, call, "float64")


@settings(max_examples=5)
@given(call=calls(), dtype=st.sampled_from(["bfloat16", "float16"]))
def test_everything_in_half(implementation, call, dtype):
    assume(can_run(implementation, call))
    check(implementation, call, dtype)


@pytest.mark.slow
@settings(max_examples=60)
@given(call=calls())
def test_many_examples(implementation, call):
    assume(can_run(implementation, call))
    check(implementation, call, tolerance=4e-6)
