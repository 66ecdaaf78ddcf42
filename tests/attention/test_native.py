"""The C++ kernels: what reaches them, what they refuse, and what a call of them costs."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import probjax
from oracle import AVAILABLE, Call, agree, biases, check, masks, normal, qkv, solve
from probjax.attention import native
from probjax.attention.native import key_chunk

needs_library = pytest.mark.skipif("native" not in AVAILABLE, reason="there is no native library here")


def struct(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def arrays(*sizes, dtype="float32", **more):
    return {name: jnp.asarray(x, dtype) for name, x in qkv(*sizes, **more).items()}


def attend(*args, **options):
    return probjax.dot_product_attention(*args, implementation="native", **options)


def squared(*args, **options):
    return (attend(*args, **options) ** 2).sum()


def shifted(score, b, h, q, kv):
    return score + 0.1 * q


# ----------------------------------------------------------------------------------------------------------
# Choice and refusal


@needs_library
def test_it_is_the_default_on_a_cpu():
    x = struct(1, 512, 8, 64)
    plan = probjax.attention_plan(x, x, x, is_causal=True, platform="cpu")
    assert plan.implementation == "native"
    assert (plan.q_tile, plan.kv_tile) == (64, 64)
    longer = struct(1, 8192, 8, 64)
    memory = [probjax.attention_plan(x, x, x, implementation="native").backward_bytes for x in (x, longer)]
    assert memory[0] < memory[1] < 128 * 2**20
    assert probjax.attention_plan(x, x, x, platform="cuda").implementation != "native"


@needs_library
def test_functions_of_the_score_are_refused_by_name_and_go_elsewhere_by_default():
    a, bias = arrays(), probjax.biases.ScoreFunction(shifted)
    with pytest.raises(NotImplementedError, match=r"'native' cannot run this call.*ScoreFunction"):
        attend(**a, bias=bias)
    plan = probjax.attention_plan(**a, bias=bias, platform="cpu")
    assert plan.implementation in ("dense", "tiled")
    assert "ScoreFunction" in plan.rejected["native"]
    long = struct(1, 4096, 8, 64)
    assert probjax.attention_plan(long, long, long, bias, platform="cpu").implementation == "tiled"
    agree(
        probjax.dot_product_attention(**a, bias=bias),
        probjax.dot_product_attention(**a, bias=bias, implementation="tiled"),
        2e-6,
    )


def test_without_a_library(monkeypatch):
    """The rest works as before, and says what is missing."""
    monkeypatch.setattr("probjax._native.reason", lambda: "the library is on holiday")
    a = arrays()
    assert probjax.attention.implementations("cpu")["native"] == "the library is on holiday"
    plan = probjax.attention_plan(**a, platform="cpu")
    assert plan.implementation in ("dense", "tiled")
    assert plan.rejected["native"] == "the library is on holiday"
    with pytest.raises(NotImplementedError, match="the library is on holiday"):
        jax.jit(attend)(*a.values())


@needs_library
def test_other_platforms_refuse_the_name():
    a = arrays()
    with pytest.raises(NotImplementedError, match="CPUs only"):
        jax.jit(attend).trace(*a.values()).lower(lowering_platforms=("cuda",))
    assert "CPUs only" in probjax.attention_plan(**a, platform="tpu").rejected["native"]


@needs_library
def test_a_symbolic_size_is_refused():
    (batch,) = jax.export.symbolic_shape("b")
    shapes = [struct(batch, *x.shape[1:]) for x in arrays().values()]
    with pytest.raises(NotImplementedError, match="symbolic"):
        jax.export.export(jax.jit(attend))(*shapes)


@needs_library
def test_exported_programs_do_not_need_the_library():
    """By default; who names the kernels gets them, and has to tell JAX that they may stay in the program."""
    a = tuple(arrays().values())
    default = jax.export.export(jax.jit(probjax.dot_product_attention))(*a)
    assert "probjax_attention" not in default.mlir_module()
    check = jax.export.DisabledSafetyCheck.custom_call("probjax_attention_forward")
    named = jax.export.export(jax.jit(attend), disabled_checks=[check])(*a)
    agree(named.call(*a), default.call(*a), 2e-6)


# ----------------------------------------------------------------------------------------------------------
# What is asked of the library


def lowered(function, *args):
    return jax.jit(function).lower(*args).as_text()


@needs_library
def test_only_what_is_wanted_is_computed():
    a = tuple(arrays().values())
    text = lowered(jax.grad(squared, 1), *a)
    assert "wanted = dense<1> : tensor<1xi64>" in text
    assert "cotangents = 1 : i64" in text  # that of the log-sum-exp is not made up
    text = lowered(jax.grad(lambda *a: attend(*a, return_residual=True)[1].sum(), (0, 2)), *a)
    assert "cotangents = 2 : i64" in text
    text = lowered(lambda q, k, v: jax.jvp(lambda v: attend(q, k, v), (v,), (v,)), *a)
    assert "active = dense<2> : tensor<1xi64>" in text


@needs_library
def test_neighbouring_batch_axes_become_one():
    x = jnp.asarray(normal(1, 2, 1, 2, 1, 2, 1, 2, 1, 5, 2, 4), "float32")
    assert "batch_rank = 1 : i64" in lowered(attend, x, x, x)
    got = attend(x, x, x, is_causal=True)
    flat = x.reshape(16, 5, 2, 4)
    agree(got, attend(flat, flat, flat, is_causal=True).reshape(x.shape), 1e-6)


@needs_library
def test_more_batch_axes_than_the_kernels_have():
    """Nine axes that alternate between full and 1 cannot be merged."""
    x = jnp.asarray(normal(*(2,) * 9, 2, 1, 2), "float32")
    mask = jnp.ones((*(2, 1) * 4, 2, 1, 2, 2), bool)
    with pytest.raises(NotImplementedError, match="9 batch axes"):
        attend(x, x, x, mask=mask)
    agree(probjax.dot_product_attention(x, x, x, mask=mask), attend(x, x, x), 2e-6)


# ----------------------------------------------------------------------------------------------------------
# Paths that the common tests do not take


def holes(b, h, q, kv):
    return (abs(q - kv) < 70) | ((q // 50 + kv // 90) % 3 == 0)


@needs_library
@pytest.mark.parametrize("lengths", [(300, 333), (64, 128), (65, 1), (1, 200)], ids=str)
def test_tables_of_tiles(lengths):
    check("native", Call(**qkv((2,), *lengths, 2), mask=masks.MaskFunction(holes)), tolerance=4e-6)


@needs_library
def test_a_table_among_other_masks():
    mask = masks.MaskFunction(holes) & masks.Causal("bottom_right") | ~masks.Padding([150, 20])
    check("native", Call(**qkv((2,), 200, 260, 4, 2), mask=mask), tolerance=4e-6)


@needs_library
@pytest.mark.parametrize("kinds", ["plain", "strips"])
def test_backward_in_chunks_of_keys(kinds):
    """Few heads and many keys: query gradients per chunk of keys, added at the end."""
    T, S = 70, 1100
    assert key_chunk(T, S, 2) < S
    options = {}
    if kinds == "strips":
        options["bias"] = biases.ALiBi(0.002 * normal(4)) + biases.RelativePosition(normal(1, 40))
        options |= {"mask": masks.SlidingWindow(900, 30, "bottom_right"), "sinks": normal(4)}
    check("native", Call(**qkv((1,), T, S, 4, 2), **options), tolerance=4e-6)


@needs_library
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shared", ["key", "value", "key and value", "query"])
def test_operands_that_a_batch_shares(shared, dtype):
    """Gradients of what `vmap` does not map are sums over the batch, also where only one of key and value is
    shared.
    """
    a = arrays((3, 2), 6, 7, 4, 2, dtype=dtype)
    mapped = {name: None if name in shared else 0 for name in a}
    a = {name: x[0] if mapped[name] is None else x for name, x in a.items()}

    def loss(a, implementation):
        def one(query, key, value):
            out = probjax.dot_product_attention(
                query, key, value, is_causal=True, implementation=implementation
            )
            return out.astype(jnp.float32)

        return (jax.vmap(one, tuple(mapped.values()))(*(a[name] for name in mapped)) ** 2).sum()

    got, want = (jax.jit(jax.grad(loss), static_argnums=1)(a, name) for name in ("native", "reference"))
    for name, x in got.items():
        assert x.dtype == dtype
        agree(x, want[name], 2e-6 if dtype == "float32" else 2e-2, name=name)


@needs_library
def test_runs_are_equal_bit_by_bit():
    call = Call(**qkv((1,), 200, 1500, 4, 2), bias=normal(1, 1, 1, 1500), is_causal=True)
    one, two = (solve("native", call) for _ in range(2))
    for name in ("out", "lse", "query", "key", "value", "bias"):
        np.testing.assert_array_equal(one[name], two[name])


@needs_library
def test_decoding_sees_all_keys():
    q, k, v = arrays((2,), 1, 700, 8, 2).values()
    options = {"is_causal": True, "causal_alignment": "bottom_right"}
    text = lowered(lambda *a: attend(*a, **options), q, k, v)
    assert "mask = dense<> : tensor<0xi64>" in text
    agree(
        attend(q, k, v, **options),
        probjax.dot_product_attention(q, k, v, implementation="reference"),
        2e-6,
    )


# ----------------------------------------------------------------------------------------------------------
# Memory


def temp_megabytes(function, *args):
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes / 2**20


def bias_of(kind, S):
    if kind == "alibi":
        return probjax.biases.ALiBi(struct(8))
    return {"table": probjax.biases.RelativePosition(struct(8, 32)), "dense": struct(1, 8, S, S)}.get(kind)


@needs_library
@pytest.mark.parametrize("kind", [None, "alibi", "table", "dense"])
def test_memory_of_backward_is_linear(kind):
    """B 1, H 8, D 64: at most 64 MB at 4096, and twice as much for twice the length."""

    def run(q, k, v, bias):
        return jax.grad(lambda *a: squared(*a, is_causal=True), (0, 1, 2, 3) if kind else (0, 1, 2))(
            q, k, v, bias
        )

    def megabytes(S):
        x = struct(1, S, 8, 64)
        return temp_megabytes(run, x, x, x, bias_of(kind, S))

    short = megabytes(4096)
    assert short <= 64
    assert megabytes(8192) <= 2.1 * short


@needs_library
def test_memory_of_the_tangent_is_linear():
    def run(*a):
        return jax.jvp(lambda *a: attend(*a, is_causal=True), a[:3], a[3:])

    short, long = (temp_megabytes(run, *[struct(1, S, 8, 64)] * 6) for S in (4096, 8192))
    assert short <= 16
    assert long <= 2.1 * short + 1


def test_reasons_are_texts():
    assert native.unavailable("cuda") == "it runs on CPUs only"
    assert native.unavailable("cpu") is None or native.unavailable("cpu")


@needs_library
def test_heads_before_length_are_not_copied():
    """Arrays (B, H, S, D) with heads as a batch axis, N = 1: nothing is transposed or copied."""

    def attend(query, key, value):
        query, key, value = (x[..., None, :] for x in (query, key, value))
        return probjax.dot_product_attention(query, key, value, is_causal=True, implementation="native")[
            ..., 0, :
        ]

    q, k, v = (jnp.asarray(normal(2, 3, 40, 8, seed=name), jnp.float32) for name in "qkv")
    text = jax.jit(attend).lower(q, k, v).compile().as_text()
    assert "transpose(" not in text and "copy(" not in text
    heads_last = [x.swapaxes(1, 2) for x in (q, k, v)]
    want = probjax.dot_product_attention(*heads_last, is_causal=True, implementation="reference").swapaxes(
        1, 2
    )
    agree(attend(q, k, v), want, 2e-6)


@needs_library
@pytest.mark.parametrize("value", [-1e4, -1e9, float(jnp.finfo(jnp.float32).min), 1e7])
def test_gradients_of_rows_whose_scores_are_all_large(value):
    """Their log-sum-exp does not hold the logarithm of the sum any more: weights are normalised anew."""
    bias = jnp.zeros((1, 1, 20, 70)).at[:, :, 5].set(value)
    a = arrays((1,), 20, 70, 2, 1)

    def loss(a, implementation):
        return (probjax.dot_product_attention(**a, bias=bias, implementation=implementation) ** 2).sum()

    got, want = (jax.grad(loss)(a, name) for name in ("native", "reference"))
    for name in a:
        agree(got[name], want[name], 4e-6, name=name)
    got, want = (
        jax.jvp(lambda a, n=n: probjax.dot_product_attention(**a, bias=bias, implementation=n), (a,), (a,))[1]
        for n in ("native", "reference")
    )
    agree(got, want, 4e-6, name="tangent")


@needs_library
def test_deeply_nested_masks():
    """Nested to the right, the parts are reordered so that the stack of the kernels holds them."""
    mask = masks.Causal()
    for n in range(20):
        mask = masks.SlidingWindow(n, 1) | (~masks.BlockDiagonal(n + 1) & mask)
    check("native", Call(**qkv((1,), 33, 33, 2), mask=mask), tolerance=4e-6)
