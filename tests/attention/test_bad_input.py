"""Every wrong argument raises an error that names it, says what was got and what is wanted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probjax
from probjax import biases, masks

B, T, S, N, K, D = 2, 6, 7, 4, 2, 3


def zeros(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


def ints(*shape):
    return jnp.zeros(shape, "int32")


def good():
    return {"query": zeros(B, T, N, D), "key": zeros(B, S, K, D), "value": zeros(B, S, K, D)}


KEY = jax.random.key(0)
EITHER = (TypeError, ValueError)

# name: (changed arguments, error type, what the message must hold, parts apart by |)
BAD = {
    "query of rank 2": ({"query": zeros(T, D)}, ValueError, "query|(6, 3)|T, N, D"),
    "query of rank 5": ({"query": zeros(1, B, T, N, D)}, ValueError, "(1, 2, 6, 4, 3)"),
    "query of integers": ({"query": ints(B, T, N, D)}, TypeError, "query|int32"),
    "complex query": ({"query": zeros(B, T, N, D, dtype="complex64")}, TypeError, "query|complex64"),
    "query that is None": ({"query": None}, TypeError, "query|None"),
    "query that is text": ({"query": "q"}, TypeError, "query|str"),
    "key of another batch": ({"key": zeros(3, S, K, D)}, ValueError, "key|(3, 7, 2, 3)"),
    "key of another head size": ({"key": zeros(B, S, K, 5)}, ValueError, "key|(2, 7, 2, 5)|D"),
    "key of another dtype": ({"key": zeros(B, S, K, D, dtype="float16")}, EITHER, "key|float16|float32"),
    "key heads that do not divide": (
        {"key": zeros(B, S, 3, D), "value": zeros(B, S, 3, D)},
        ValueError,
        "3|4|key",
    ),
    "more key heads than query heads": (
        {"key": zeros(B, S, 8, D), "value": zeros(B, S, 8, D)},
        ValueError,
        "8|4|key",
    ),
    "value of another length": ({"value": zeros(B, 9, K, D)}, ValueError, "value|(2, 9, 2, 3)"),
    "value of other heads": ({"value": zeros(B, S, 4, D)}, ValueError, "value|(2, 7, 4, 3)"),
    "value of another batch": ({"value": zeros(1, S, K, D)}, ValueError, "value|(1, 7, 2, 3)"),
    "value of another dtype": ({"value": zeros(B, S, K, D, dtype="bfloat16")}, EITHER, "value|bfloat16"),
    "bias of another length": ({"bias": zeros(1, N, T, S + 1)}, ValueError, "bias|(1, 4, 6, 8)|(2, 4, 6, 7)"),
    "bias of other heads": ({"bias": zeros(1, 3, T, S)}, ValueError, "bias|(1, 3, 6, 7)"),
    "bias of another batch": ({"bias": zeros(3, N, T, S)}, ValueError, "bias|(3, 4, 6, 7)"),
    "bias of bools": ({"bias": zeros(1, N, T, S, dtype=bool)}, TypeError, "bias|bool|mask"),
    "bias of integers": ({"bias": ints(1, N, T, S)}, TypeError, "bias|int32"),
    "bias that is a mask object": ({"bias": masks.Causal()}, TypeError, "bias|Causal"),
    "bias that is text": ({"bias": "alibi"}, TypeError, "bias|str"),
    "bias of rank 6": ({"bias": zeros(2, 1, 1, N, T, S)}, ValueError, "bias|(2, 1, 1, 4, 6, 7)"),
    "mask of another length": (
        {"mask": zeros(B, 1, T + 1, S, dtype=bool)},
        ValueError,
        "mask|(2, 1, 7, 7)|(2, 4, 6, 7)",
    ),
    "mask of floats": ({"mask": zeros(1, 1, T, S)}, TypeError, "mask|float32|bool"),
    "mask of integers": ({"mask": ints(1, 1, T, S)}, TypeError, "mask|int32"),
    "mask that is a bias object": ({"mask": biases.SoftCap(2.0)}, TypeError, "mask|SoftCap"),
    "mask that is a function": ({"mask": lambda b, h, q, kv: q >= kv}, TypeError, "mask|MaskFunction"),
    "bias that is a function": ({"bias": lambda s, b, h, q, kv: s}, TypeError, "bias|ScoreFunction"),
    "scale that is an array": ({"scale": zeros(N)}, ValueError, "scale|(4,)"),
    "scale that is text": ({"scale": "1"}, TypeError, "scale|str"),
    "is_causal that is an array": ({"is_causal": zeros(1, dtype=bool)}, TypeError, "is_causal"),
    "query lengths of another batch": (
        {"query_seq_lengths": ints(3)},
        ValueError,
        "query_seq_lengths|(3,)|(2,)",
    ),
    "key lengths of another batch": (
        {"key_value_seq_lengths": ints(3)},
        ValueError,
        "key_value_seq_lengths|(3,)|(2,)",
    ),
    "key lengths of floats": (
        {"key_value_seq_lengths": zeros(B)},
        TypeError,
        "key_value_seq_lengths|float32",
    ),
    "key lengths of rank 2": (
        {"key_value_seq_lengths": ints(B, 1)},
        ValueError,
        "key_value_seq_lengths|(2, 1)",
    ),
    "window of three": ({"local_window_size": (1, 2, 3)}, ValueError, "local_window_size|(1, 2, 3)"),
    "negative window": ({"local_window_size": (-2, 0)}, ValueError, "local_window_size|-2"),
    "fractional window": ({"local_window_size": 1.5}, EITHER, "local_window_size|1.5"),
    "unknown alignment": ({"causal_alignment": "center"}, ValueError, "causal_alignment|center|bottom_right"),
    "zero soft cap": ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap|0.0"),
    "negative soft cap": ({"logits_soft_cap": -1.0}, ValueError, "logits_soft_cap|-1.0"),
    "sinks of key heads": ({"sinks": zeros(K)}, ValueError, "sinks|(2,)|(4,)"),
    "sinks of integers": ({"sinks": ints(N)}, TypeError, "sinks|int32"),
    "one segment array, T != S": ({"segment_ids": ints(B, T)}, ValueError, "segment_ids|pair"),
    "segments of another length": (
        {"segment_ids": (ints(B, T), ints(B, 9))},
        ValueError,
        "segment_ids|(2, 9)|7",
    ),
    "segments of floats": ({"segment_ids": (zeros(B, T), zeros(B, S))}, TypeError, "segment_ids|float32"),
    "three segment arrays": ({"segment_ids": (ints(B, T),) * 3}, ValueError, "segment_ids|3"),
    "rate without key": ({"dropout_rate": 0.1}, ValueError, "dropout_key"),
    "rate out of range": ({"dropout_rate": 1.5, "dropout_key": KEY}, ValueError, "dropout_rate|1.5"),
    "rate that is text": ({"dropout_rate": "0.1", "dropout_key": KEY}, TypeError, "dropout_rate|str"),
    "key that is a number": ({"dropout_rate": 0.1, "dropout_key": 3}, TypeError, "dropout_key|int"),
    "several keys": (
        {"dropout_rate": 0.1, "dropout_key": jax.random.split(KEY, 3)},
        ValueError,
        "dropout_key|(3,)",
    ),
    "unknown precision": ({"precision": "exact"}, ValueError, "precision|exact"),
    "unknown implementation": ({"implementation": "flash"}, ValueError, "implementation|flash|tiled"),
    "implementation that is a number": ({"implementation": 3}, EITHER, "implementation|3"),
    "slopes of key heads": ({"bias": biases.ALiBi(zeros(3))}, ValueError, "slopes|(3,)|4"),
    "table of rank 1": ({"bias": biases.RelativePosition(zeros(9))}, ValueError, "table|(9,)"),
    "table of other heads": ({"bias": biases.RelativePosition(zeros(3, 9))}, ValueError, "table|(3, 9)"),
    "head scale of another size": ({"bias": biases.HeadScale(zeros(5))}, ValueError, "scale|(5,)"),
    "dense bias of another shape": (
        {"bias": biases.Dense(zeros(1, 1, T, 9))},
        ValueError,
        "bias|(1, 1, 6, 9)",
    ),
    "dense mask of floats": ({"mask": masks.Dense(zeros(1, 1, T, S))}, TypeError, "mask|float32"),
    "prefix of another batch": ({"mask": masks.PrefixLM(ints(3))}, ValueError, "prefix_lengths|(3,)"),
    "padding of another length": (
        {"mask": masks.Padding(zeros(B, 9, dtype=bool))},
        ValueError,
        "mask|(2, 9)",
    ),
    "segments of another batch": (
        {"mask": masks.Segments(ints(3, T), ints(3, S))},
        ValueError,
        "query_ids|(3, 6)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_message(case):
    change, error, words = BAD[case]
    with pytest.raises(error) as caught:
        probjax.dot_product_attention(**{**good(), **change})
    message = str(caught.value)
    for word in words.split("|"):
        assert word in message, f"{word!r} is not in: {message}"


@pytest.mark.parametrize(
    "case",
    ["key of another head size", "mask of another length", "rate without key", "unknown implementation"],
)
def test_message_is_the_same_under_jit_and_grad(case):
    change, error, words = BAD[case]
    static = {"dropout_rate", "implementation"}

    def loss(arrays):
        options = {name: value for name, value in change.items() if name in static}
        return probjax.dot_product_attention(**arrays, **options).sum()

    arrays = {**good(), **{name: value for name, value in change.items() if name not in static}}
    for function in (jax.jit(loss), lambda a: jax.eval_shape(loss, a)):
        with pytest.raises(error) as caught:
            function(arrays)
        assert all(word in str(caught.value) for word in words.split("|"))


OBJECTS = {
    "unknown alignment": (lambda: masks.Causal("middle"), ValueError, "alignment|middle|top_left"),
    "negative window": (lambda: masks.SlidingWindow(left=-3), ValueError, "left|-3"),
    "fractional window": (lambda: masks.SlidingWindow(right=0.5), EITHER, "right|0.5"),
    "block of zero": (lambda: masks.BlockDiagonal(0), ValueError, "size|0"),
    "mask and number": (lambda: masks.Causal() & 3, TypeError, "int"),
    "mask or bias": (lambda: masks.Causal() | biases.SoftCap(1.0), TypeError, "SoftCap"),
    "bias plus mask": (lambda: biases.SoftCap(1.0) + masks.Causal(), TypeError, "Causal"),
    "bias plus text": (lambda: biases.SoftCap(1.0) + "x", TypeError, "str"),
    "cap of zero": (lambda: biases.SoftCap(0.0), ValueError, "value|0.0"),
    "unknown buckets": (
        lambda: biases.RelativePosition(np.ones((1, 4)), bucketing="log"),
        ValueError,
        "bucketing|log|t5",
    ),
    "function that is none": (lambda: masks.MaskFunction(3), TypeError, "fn|int"),
    "score function that is none": (lambda: biases.ScoreFunction(None), TypeError, "fn|NoneType"),
}


@pytest.mark.parametrize("case", OBJECTS)
def test_message_of_objects(case):
    make, error, words = OBJECTS[case]
    with pytest.raises(error) as caught:
        make()
    for word in words.split("|"):
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def test_unknown_keyword():
    with pytest.raises(TypeError, match="causal"):
        probjax.dot_product_attention(**good(), causal=True)


def test_options_are_keyword_only():
    with pytest.raises(TypeError):
        probjax.dot_product_attention(*good().values(), None, None, 0.5)


def test_good_call_is_good():
    assert probjax.dot_product_attention(**good()).shape == (B, T, N, D)
