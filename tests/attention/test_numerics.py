"""Acceptance cases G and the bounds on rounding errors in every dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probjax
from oracle import (
    Call,
    agree,
    biases,
    check,
    dense_attention,
    expected,
    forward,
    gradients,
    masks,
    normal,
    qkv,
    solve,
)
from oracle.check import cast, cotangents, rounded

VARIANTS = {
    "plain": lambda S: {},
    "causal": lambda S: {"is_causal": True},
    "bias": lambda S: {"is_causal": True, "bias": normal(1, 2, S, S)},
    "table": lambda S: {"is_causal": True, "bias": biases.RelativePosition(normal(2, 32), bucketing="t5")},
    "window": lambda S: {"local_window_size": (100, 20)},
    "mask": lambda S: {"mask": normal(1, 1, S, S) > -1},
    "segments": lambda S: {"segment_ids": np.arange(S)[None] // 150},
    "cap-and-sinks": lambda S: {"logits_soft_cap": 3.0, "sinks": normal(2)},
}


def strict(implementation, variant, S):
    """2e-6 of the largest entry, with no allowance for cancelling sums, in output and every gradient."""
    call = Call(**qkv((1,), S, S, 2, D=64), **VARIANTS[variant](S))
    got, want = solve(implementation, call), expected(call)
    for name in ("out", "query", "key", "value"):
        agree(got[name], want[name], 2e-6, name=name)
    agree(got["lse"], want["lse"], 1e-6, name="lse")
    if "bias" in got:
        for one, two in zip(jax.tree.leaves(got["bias"]), jax.tree.leaves(want["bias"]), strict=True):
            agree(one, two, 2e-6, name="bias")
    if "sinks" in got:
        agree(got["sinks"], want["sinks"], 2e-6, name="sinks")


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32(implementation, variant):
    strict(implementation, variant, 512)


@pytest.mark.parametrize("variant", ["plain", "causal", "table"])
def test_float32_does_not_grow(implementation, variant):
    strict(implementation, variant, 2048)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_does_not_grow_further(implementation, variant):
    strict(implementation, variant, 4096)


@pytest.mark.parametrize("variant", ["causal", "bias", "window", "cap-and-sinks"])
def test_g10_float64(implementation, variant):
    call = Call(**qkv((1,), 300, 300, 2, D=16), **VARIANTS[variant](300))
    check(implementation, call, "float64", tolerance=2e-14)


def test_g2_float32_and_float64_at_length(implementation):
    call = Call(**qkv((1,), 1024, 1024, 1, D=16), is_causal=True)
    check(implementation, call, "float32")
    check(implementation, call, "float64", tolerance=2e-14)


def errors(got, want):
    """Largest error of each result."""
    names = ("out", "query", "key", "value")
    return {name: np.abs(got[name] - want[name]).max() for name in names}


def half_call(variant, D):
    return Call(**qkv((1,), 256, 256, 2, D=D), **VARIANTS[variant](256))


@functools.cache
def errors_of_plain_half(variant, dtype, D):
    """Errors of the dense computation of JAX, which has no cotangent of the log-sum-exp."""
    call = cast(half_call(variant, D), dtype)
    visible = call.visible()[:, :1] if call.mask is not None or call.is_causal else None
    arrays = {name: jnp.asarray(getattr(call, name), dtype) for name in ("query", "key", "value")}

    def attend(arrays):
        mask = None if visible is None else jnp.asarray(visible)
        bias = None if call.bias is None else jnp.asarray(call.bias, dtype)
        return jax.nn.dot_product_attention(**arrays, mask=mask, bias=bias)

    ct = cotangents(call, dtype)[0]
    out, pull = jax.vjp(attend, arrays)
    grads = pull(jnp.asarray(ct, out.dtype))[0]
    got = {name: np.asarray(x).astype(np.float64) for name, x in {"out": out, **grads}.items()}
    return errors(got, {"out": forward(call).out, **gradients(call, ct)})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("variant", "D"), [("plain", 64), ("plain", 256), ("causal", 64), ("bias", 64)])
def test_g9_half_types_against_a_dense_half_computation(implementation, variant, D, dtype):
    call = half_call(variant, D)
    want = expected(call, dtype)
    reference = errors_of_plain_half(variant, dtype, D)
    got = errors(solve(implementation, call, dtype), want)
    for name, error in got.items():
        rounding = float(jnp.finfo(dtype).eps) * np.abs(want[name]).max() / 2
        assert error <= 2 * max(reference[name], rounding), (
            f"{name}: {error:.3g}, dense {reference[name]:.3g}"
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_g1_half_gradients_accumulate_in_float32(implementation, dtype):
    """A sum over 4096 queries: half accumulation would stop at 256 (bf16) or 2048 (f16)."""
    T = 4096
    arrays = {
        "query": np.zeros((1, T, 1, 8)), "key": np.zeros((1, 2, 1, 8)), "value": np.ones((1, 2, 1, 8)),
    }  # fmt: skip

    def loss(value):
        q, k = (jnp.asarray(arrays[name], dtype) for name in ("query", "key"))
        return (
            probjax.dot_product_attention(q, k, value, implementation=implementation).astype("float32").sum()
        )

    gradient = jax.jit(jax.grad(loss))(jnp.asarray(arrays["value"], dtype))
    assert gradient.dtype == jnp.dtype(dtype)
    agree(gradient, np.full((1, 2, 1, 8), T / 2), 1e-2)


def test_half_keys_sum_in_float32(implementation):
    """The denominator of 4096 equal weights, and the output of equal values, are not truncated."""
    S = 4096
    call = Call(np.zeros((1, 1, 1, 8)), np.zeros((1, S, 1, 8)), np.ones((1, S, 1, 8)))
    got = solve(implementation, call, "bfloat16", differentiate=False)
    assert got["out"] == pytest.approx(1.0, abs=1e-2)
    assert got["lse"] == pytest.approx(np.log(S), rel=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_g6_log_sum_exp_dtype_and_base(implementation, dtype):
    """`solve` asserts float32 (float64); the value is a natural logarithm."""
    call = Call(**qkv(D=8))
    got = solve(implementation, call, dtype, differentiate=False)
    tolerance = {"bfloat16": 1e-5, "float16": 1e-5, "float32": 1e-6, "float64": 1e-14}[dtype]
    agree(got["lse"], expected(call, dtype, differentiate=False)["lse"], tolerance)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"logits_soft_cap": 2.0}], ids=str)
def test_g7_gradient_of_the_log_sum_exp(implementation, options, x64):
    arrays = qkv((2,), 6, 7, 4, 2)
    visible = np.tril(np.ones((6, 7), bool)) if "is_causal" in options else True

    def ours(arrays):
        _, lse = probjax.dot_product_attention(
            **arrays, **options, implementation=implementation, return_residual=True
        )
        return (lse * jnp.sin(lse)).sum()

    def dense(arrays):
        _, lse = dense_attention(**arrays, visible=visible, soft_cap=options.get("logits_soft_cap"))
        return (lse * jnp.sin(lse)).sum()

    got, want = jax.jit(jax.grad(ours))(arrays), jax.grad(dense)(arrays)
    for name in arrays:
        agree(got[name], want[name], 1e-13, name=name)
    assert (np.asarray(got["value"]) == 0).all()


def test_g7_merging_two_halves_with_the_log_sum_exp(implementation, x64):
    """Two halves of the keys, merged by their log-sum-exp, equal the whole in value and gradient."""
    arrays = {name: jnp.asarray(x) for name, x in qkv((1,), 6, 10, 2).items()}

    def attend(q, k, v):
        return probjax.dot_product_attention(q, k, v, implementation=implementation, return_residual=True)

    def merged(q, k, v):
        parts = [attend(q, k[:, s], v[:, s]) for s in (slice(0, 4), slice(4, 10))]
        outs, lses = jnp.stack([p[0] for p in parts]), jnp.stack([p[1] for p in parts])
        weights = jax.nn.softmax(lses, axis=0)
        return ((weights[..., None] * outs).sum(0) ** 2).sum()

    def whole(q, k, v):
        return (attend(q, k, v)[0] ** 2).sum()

    got = jax.value_and_grad(merged, (0, 1, 2))(*arrays.values())
    want = jax.value_and_grad(whole, (0, 1, 2))(*arrays.values())
    jax.tree.map(lambda a, b: agree(a, b, 1e-13), got, want)


def test_g4_swapped_axes_are_noticed():
    """(B, H, L, D) arrays of unequal sizes: the message names the axes of the layout."""
    x = np.zeros((1, 4, 32, 64), np.float32)
    y = np.zeros((1, 4, 30, 64), np.float32)
    with pytest.raises(ValueError, match=r"key.*\(\*B, .*heads"):
        probjax.dot_product_attention(x, y, y)


@pytest.mark.parametrize("precision", [None, "highest", "default", jax.lax.Precision.HIGHEST])
def test_precision_is_accepted(implementation, precision):
    call = Call(**qkv())
    got = solve(implementation, call, options={"precision": precision})
    tf32 = precision == "default" and implementation in ("triton", "cudnn")  # one pass on a GPU
    agree(got["out"], expected(call)["out"], 2e-3 if tf32 else 2e-6)


def test_mixed_dtypes_of_the_three_arrays(implementation):
    arrays = {name: jnp.asarray(x, "float32") for name, x in qkv().items()}
    arrays["key"] = arrays["key"].astype("bfloat16")
    with pytest.raises((TypeError, ValueError), match="key"):
        probjax.dot_product_attention(**arrays, implementation=implementation)


def test_log_sum_exp_stays_exact_with_a_large_constant(implementation):
    """A shift of all scores moves the log-sum-exp by it and nothing else."""
    call = Call(**qkv(), bias=np.full((1, 1, 1, 1), 50.0))
    base = check(implementation, Call(**qkv()))
    got = check(implementation, call, tolerance=1e-5)
    agree(got["lse"], base["lse"] + 50, 1e-6)


def test_rounded_inputs_are_the_same_for_both_sides():
    x = np.array([1.0 + 2**-9, 3.0])
    assert rounded(x, "bfloat16").tolist() == [1.0, 3.0]


def test_visible_scores_below_any_fill_value(implementation):
    """Visible scores below any finite value that could stand for "hidden": hidden keys stay out."""
    for low in (-1e9, -1e30, -3e38):
        call = Call(**qkv(), bias=np.full((1, 1, 1, 7), low), mask=masks.Padding([3, 3]))
        got = solve(implementation, call, differentiate=False)
        mean = rounded(call.value, "float32")[:, :3].mean(1)
        agree(got["out"], np.broadcast_to(mean[:, None], got["out"].shape), 1e-6)
