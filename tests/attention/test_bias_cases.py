"""Acceptance cases C: biases of every kind, gradients in the caller's shape, and no buffer beside them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probjax
from oracle import Call, agree, biases, cases, check, dense_attention, masks, normal, qkv, solve

CASES = {
    "C1": lambda: Call(**qkv((4,)), bias=normal(4, 2, 6, 7)),
    "C1-batch-1": lambda: Call(**qkv((4,)), bias=normal(1, 2, 6, 7)),
    "C2": lambda: Call(**qkv((4,), T=7), bias=normal(1, 2, 7, 7), is_causal=True),
    "C2-head-1": lambda: Call(**qkv((4,)), bias=normal(4, 1, 6, 7)),
    "C2-keys-only": lambda: Call(**qkv((4,)), bias=normal(1, 1, 1, 7)),
    "C2-queries-only": lambda: Call(**qkv((4,)), bias=normal(1, 2, 6, 1)),
    "C2-scalar": lambda: Call(**qkv((4,)), bias=normal(1, 1, 1, 1)),
    "C2-kv-heads": lambda: Call(**qkv((4,), N=6, K=3), bias=normal(1, 3, 6, 7)),
    "C4": lambda: Call(**qkv((2,), N=28, K=4), mask=normal(2, 1, 6, 7) > -1),
    "C6-table": lambda: Call(**qkv((2,)), bias=biases.distance_table(normal(2, 9))),
    "C6-clip": lambda: Call(**qkv((2,)), bias=biases.RelativePosition(normal(2, 9))),
    "C6-clip-even": lambda: Call(**qkv((2,)), bias=biases.RelativePosition(normal(2, 4))),
    "C6-clip-shared": lambda: Call(**qkv((2,)), bias=biases.RelativePosition(normal(1, 33)), is_causal=True),
    "C6-t5": lambda: Call(
        **qkv((1,), T=40, S=50), bias=biases.RelativePosition(normal(2, 12), bucketing="t5", max_distance=37)
    ),
    "C6-t5-causal": lambda: Call(
        **qkv((1,), T=40, S=40), is_causal=True,
        bias=biases.RelativePosition(normal(1, 10), bucketing="t5", max_distance=30, bidirectional=False),
    ),
    "C6-pair": lambda: Call(
        **qkv((2,)), bias=biases.pair_bias(normal(2, 6, 7)), mask=normal(2, 1, 1, 7) > -1,
    ),
    "C6-alibi": lambda: Call(**qkv((2,), N=4, K=2), bias=biases.ALiBi(2.0 ** -np.arange(1, 5))),
    "C6-alibi-negative-slope": lambda: Call(**qkv((2,)), bias=biases.ALiBi(np.array([-0.5, 0.5]))),
    "C9": lambda: Call(**qkv((1,)), bias=normal(1, 2, 6, 7)),
    "C11": lambda: Call(**qkv((32,)), bias=normal(1, 1, 6, 7)),
    "cap": lambda: Call(**qkv((2,)), logits_soft_cap=1.0, scale=3.0),
    "cap-object": lambda: Call(**qkv((2,)), bias=biases.SoftCap(1.0), scale=3.0),
    "head-scale": lambda: Call(**qkv((2,), N=4, K=2), bias=biases.HeadScale(normal(4))),
    "function": lambda: Call(**qkv((2,)), bias=biases.gated_score(normal(2), normal(7))),
    "function-grouped": lambda: Call(**qkv((2,), N=4, K=2), bias=biases.gated_score(normal(4), normal(7))),
    "composed": lambda: Call(
        **qkv((2,), N=4, K=2), logits_soft_cap=5.0, sinks=normal(4), scale=0.8, is_causal=True,
        bias=biases.HeadScale(1 + normal(4)) + biases.SoftCap(2.0) + biases.ALiBi(abs(normal(4)))
        + biases.Dense(normal(1, 2, 6, 1)) + biases.gated_score(normal(4), normal(7)),
    ),
    "composed-without-functions": lambda: Call(
        **qkv((2,), N=4, K=2), logits_soft_cap=5.0, sinks=normal(4), scale=0.8, is_causal=True,
        bias=biases.HeadScale(1 + normal(4)) + biases.SoftCap(2.0) + biases.ALiBi(abs(normal(4)))
        + biases.Dense(normal(1, 2, 6, 1)) + biases.RelativePosition(normal(4, 5)),
    ),
    "composed-other-order": lambda: Call(
        **qkv((2,)),
        bias=biases.Dense(normal(1, 1, 6, 7)) + biases.SoftCap(0.7) + biases.HeadScale(normal(2)),
    ),
    "composed-two-batch-axes": lambda: Call(
        **qkv((2, 3)), bias=biases.Dense(normal(2, 1, 1, 6, 7)) + biases.pair_bias(normal(6, 6, 7)),
    ),
}  # fmt: skip


WITH_FUNCTIONS = (
    "C6-table",
    "C6-pair",
    "function",
    "function-grouped",
    "composed",
    "composed-two-batch-axes",
)


@pytest.mark.parametrize("case", cases(CASES, *WITH_FUNCTIONS))
def test_case(implementation, case):
    check(implementation, CASES[case]())


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("case", cases(["C1-batch-1", "composed", "composed-without-functions"], "composed"))
def test_case_in_other_dtypes(implementation, case, dtype):
    check(implementation, CASES[case](), dtype)


MULTI_TILE = {
    "dense": lambda T: biases.Dense(normal(1, 2, T, T)),
    "keys": lambda T: biases.Dense(normal(1, 2, 1, T)),
    "queries": lambda T: biases.Dense(normal(2, 1, T, 1)),
    "table": lambda T: biases.RelativePosition(normal(2, 64), bucketing="t5"),
    "alibi": lambda T: biases.ALiBi(np.array([0.1, 0.01])),
    "function": lambda T: biases.gated_score(normal(2), normal(T)),
}


@pytest.mark.parametrize("case", cases(MULTI_TILE, "function"))
def test_over_several_tiles(implementation, case):
    call = Call(**qkv((2,), 560, 560, 2), bias=MULTI_TILE[case](560), is_causal=True)
    check(implementation, call, tolerance=4e-6)


def test_c7_bias_from_a_layer_around(implementation, x64):
    """The gradient is right whatever makes the bias and whatever uses the output."""
    x, weights = normal(2, 16, 8), {"qkv": normal(8, 24), "bias": normal(8, 2 * 16), "out": normal(8, 8)}

    def model(attention, weights):
        q, k, v = jnp.split((x @ weights["qkv"]).reshape(2, 16, 2, 12), 3, axis=-1)
        bias = jnp.moveaxis((x @ weights["bias"]).reshape(2, 16, 2, 16), 2, 1)
        out = attention(q, k, v, bias=jnp.tanh(bias) * 2)
        return ((out.reshape(2, 16, 8) @ weights["out"] + x) ** 2).sum()

    def ours(q, k, v, bias):
        return probjax.dot_product_attention(q, k, v, bias, implementation=implementation)

    def dense(q, k, v, bias):
        return dense_attention(q, k, v, bias=bias)[0]

    got = jax.jit(jax.value_and_grad(lambda w: model(ours, w)))(weights)
    want = jax.value_and_grad(lambda w: model(dense, w))(weights)
    jax.tree.map(lambda a, b: agree(a, b, 1e-12), got, want)


def test_c14_full_learned_bias_in_small(implementation):
    check(implementation, Call(**qkv((4,), 96, 96, 4, D=8), bias=normal(4, 4, 96, 96)))


def temp_megabytes(function, *arguments):
    compiled = jax.jit(function).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


def struct(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def gradient_of(name="tiled", **options):
    def loss(q, k, v, bias, ct):
        out = probjax.dot_product_attention(q, k, v, bias, implementation=name, **options)
        return (out * ct).sum()

    return jax.value_and_grad(loss, (0, 1, 2, 3))


def test_c11_broadcast_bias_is_not_expanded():
    """B = 32, bias (1, 1, T, S): no temporary of B * N * T * S (1 GiB here)."""
    x = struct(32, 1024, 8, 16)
    assert temp_megabytes(gradient_of(), x, x, x, struct(1, 1, 1024, 1024), x) < 192


def test_c12_long_sequence_with_bias_compiles():
    x = struct(1, 16384, 1, 16)
    assert temp_megabytes(gradient_of(is_causal=True), x, x, x, struct(1, 1, 1, 16384), x) < 128


@pytest.mark.parametrize("shape", [(1, 4, 1, 8192), (1, 4, 8192, 1), (1, 1, 1, 8192)], ids=str)
def test_c13_broadcast_bias_gradient_without_a_square_buffer(shape):
    """T = S = 8192: a (N, T, S) temporary would be 1 GiB."""
    x = struct(1, 8192, 4, 16)
    assert temp_megabytes(gradient_of(), x, x, x, struct(*shape), x) < 96


@pytest.mark.parametrize("kind", ["alibi", "table", "function"])
def test_c13_position_bias_gradient_without_a_square_buffer(kind):
    def bias(array):
        if kind == "alibi":
            return probjax.biases.ALiBi(array)
        if kind == "table":
            return probjax.biases.RelativePosition(array)
        return probjax.biases.ScoreFunction(lambda s, b, h, q, kv, a: s + a[h] * (q - kv) ** 2, array)

    def loss(q, k, v, array, ct):
        out = probjax.dot_product_attention(q, k, v, bias(array), is_causal=True, implementation="tiled")
        return (out * ct).sum()

    x = struct(1, 8192, 4, 16)
    array = struct(4, 64) if kind == "table" else struct(4)
    assert temp_megabytes(jax.value_and_grad(loss, (0, 1, 2, 3)), x, x, x, array, x) < 96


def test_c14_index_range():
    """B * N * T * S = 8.6e9: by shape, with the gradient of a bias of that size as the result."""
    x, bias = struct(16, 4096, 32, 64, dtype="bfloat16"), struct(16, 32, 4096, 4096, dtype="bfloat16")
    grads = jax.eval_shape(gradient_of(), x, x, x, bias, x)[1]
    assert grads[3].shape == bias.shape
    assert grads[3].dtype == bias.dtype


def test_gradient_of_a_bias_that_is_not_differentiated_costs_nothing():
    """A mask-like bias of (1, 1, S, S): without its gradient no buffer of its size appears."""
    x, bias = struct(1, 2048, 4, 16), struct(1, 4, 2048, 2048)

    def loss(q, k, v, bias, ct):
        return (probjax.dot_product_attention(q, k, v, bias, implementation="tiled") * ct).sum()

    assert temp_megabytes(jax.grad(loss, (0, 1, 2)), x, x, x, bias, x) < 48


def test_bias_array_and_object_agree(implementation):
    array = normal(1, 2, 6, 7)
    one = solve(implementation, Call(**qkv(), bias=array))
    two = solve(implementation, Call(**qkv(), bias=biases.Dense(array)))
    agree(one["out"], two["out"], 1e-6)
    agree(one["bias"], two["bias"][0], 1e-6)


def test_bias_changes_with_its_position_in_the_sum(implementation):
    cap, shift = biases.SoftCap(0.5), biases.Dense(normal(1, 1, 6, 7, scale=3.0))
    one = check(implementation, Call(**qkv(), bias=cap + shift))
    two = check(implementation, Call(**qkv(), bias=shift + cap))
    assert np.abs(one["out"] - two["out"]).max() > 1e-2


@pytest.mark.score_function
def test_integer_arrays_in_a_score_function(implementation):
    """Integer arrays beside float ones: used, and the float ones still get their gradient."""
    ids, table = jnp.array([0, 2, 1, 2, 0, 1, 1]), jnp.asarray(normal(2, 3), jnp.float32)
    call = Call(**qkv())
    arrays = {name: jnp.asarray(getattr(call, name), jnp.float32) for name in ("query", "key", "value")}
    ct = jnp.asarray(normal(2, 6, 2, 4), jnp.float32)

    @jax.jit
    @jax.grad
    def gradient(table):
        bias = probjax.biases.ScoreFunction(lambda s, b, h, q, kv, ids, t: s + t[h, ids[kv]], ids, table)
        out = probjax.dot_product_attention(**arrays, bias=bias, implementation=implementation)
        return (out * ct).sum()

    @jax.grad
    def reference(table):
        return (dense_attention(**arrays, bias=table[:, None, ids])[0] * ct).sum()

    agree(gradient(table), reference(table), 1e-5)


def test_masks_and_biases_together(implementation):
    call = Call(**qkv((2,), T=7), mask=masks.Segments(np.array([[0, 0, 0, 1, 1, 1, 1]] * 2)), is_causal=True)
    for bias in (normal(2, 1, 7, 7), biases.ALiBi(abs(normal(2))) + biases.SoftCap(2.0)):
        check(implementation, dataclasses.replace(call, bias=bias))
