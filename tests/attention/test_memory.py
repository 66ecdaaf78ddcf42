"""Memory by XLA's own analysis: linear in the sequence, for forward, backward and tangent; and case J4."""

import functools

import jax
import jax.numpy as jnp
import pytest

import probjax
from probjax import masks


def struct(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def temp_megabytes(function, *arguments):
    compiled = jax.jit(function).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


def attend(q, k, v, bias=None, **options):
    return probjax.dot_product_attention(q, k, v, bias, implementation="tiled", **options)


def gradients(count, **options):
    """Value and gradients of sum(out * ct) with respect to q, k, v (and the bias)."""

    def loss(*arguments):
        *arrays, ct = arguments
        return (attend(*arrays, **options) * ct).sum()

    return jax.value_and_grad(loss, tuple(range(count)))


@functools.cache
def backward_megabytes(S, variant):
    x = struct(1, S, 8, 64)
    options = {
        "plain": {},
        "causal": {"is_causal": True},
        "bias": {},
        "window": {"local_window_size": 256},
        "segments": {"segment_ids": jnp.zeros((1, S), jnp.int32)},
        "dropout": {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
        "cap-and-sinks": {"logits_soft_cap": 5.0, "sinks": jnp.zeros(8)},
    }[variant]
    bias = [struct(1, 8, S, S)] if variant == "bias" else []
    megabytes = temp_megabytes(gradients(3 + len(bias), **options), x, x, x, *bias, x)
    return megabytes


VARIANTS = ["plain", "causal", "window", "segments", "dropout", "cap-and-sinks"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_and_backward(variant):
    """B 1, H 8, D 64, S 4096, float32: at most 64 MB. JAX's own function takes 1544."""
    assert backward_megabytes(4096, variant) <= 64


def test_forward_and_backward_with_a_dense_bias():
    """Beside the bias and its gradient, which are argument and result, no second buffer of their size."""
    assert backward_megabytes(4096, "bias") <= 64


@pytest.mark.parametrize("variant", ["plain", "causal", "bias"])
def test_twice_the_length_needs_twice_the_memory(variant):
    assert backward_megabytes(8192, variant) <= 2.1 * backward_megabytes(4096, variant)


@pytest.mark.parametrize("variant", ["plain", "causal"])
def test_tangent(variant):
    def push(q, k, v, dq, dk, dv):
        function = functools.partial(attend, is_causal=variant == "causal")
        return jax.jvp(function, (q, k, v), (dq, dk, dv))

    short, long = (temp_megabytes(push, *[struct(1, S, 8, 64)] * 6) for S in (4096, 8192))
    assert short <= 64
    assert long <= 2.1 * short


def test_second_order():
    """A Hessian-vector product: far below a square buffer (512 MB for 8 heads), and linear."""

    def product(q, k, v, dq, dk, dv):
        def loss(q, k, v):
            return (attend(q, k, v, is_causal=True) ** 2).sum()

        return jax.jvp(jax.grad(loss, (0, 1, 2)), (q, k, v), (dq, dk, dv))

    short, long = (temp_megabytes(product, *[struct(1, S, 8, 64)] * 6) for S in (2048, 4096))
    assert long <= 256
    assert long <= 2.2 * short


def test_vmap_shares_what_is_not_mapped():
    """D12: mapping the query only makes no copy of key and value per entry."""
    S, count = 4096, 16

    def run(q, k, v):
        return jax.vmap(attend, (0, None, None))(q, k, v)

    megabytes = temp_megabytes(run, struct(count, 1, 64, 8, 64), struct(1, S, 8, 64), struct(1, S, 8, 64))
    copies = 2 * count * S * 8 * 64 * 4 / 2**20
    assert megabytes < copies / 4


def test_groups_share_keys():
    """32 query heads on one key/value head: no repeat of the keys to 32 heads."""
    S = 8192
    megabytes = temp_megabytes(attend, struct(1, 64, 32, 64), struct(1, S, 1, 64), struct(1, S, 1, 64))
    assert megabytes < 2 * 32 * S * 64 * 4 / 2**20 / 4


@pytest.mark.parametrize("kind", ["lengths", "padding", "segments", "algebra", "function"])
def test_j4_no_square_mask_inside(kind):
    """Causal with padding or documents at 32768: a bool T x S mask alone would be 1 GiB."""
    S = 32768
    x, ids = struct(1, S, 1, 16), struct(1, S, dtype="int32")

    def loss(q, k, v, ids):
        lengths = ids[:, 0]
        mask = {
            "padding": lambda: masks.Padding(lengths),
            "segments": lambda: masks.Segments(ids),
            "algebra": lambda: masks.Padding(lengths) & (masks.Segments(ids) | masks.BlockDiagonal(64)),
            "function": lambda: masks.MaskFunction(lambda b, h, i, j, ids: ids[b, i] == ids[b, j], ids),
            "lengths": lambda: None,
        }[kind]()
        options = {"key_value_seq_lengths": lengths} if kind == "lengths" else {}
        return attend(q, k, v, mask=mask, is_causal=True, **options).sum()

    assert temp_megabytes(jax.value_and_grad(loss, (0, 1, 2)), x, x, x, ids) < 160


def test_bfloat16_needs_no_more_than_float32():
    def megabytes(dtype):
        x = struct(1, 4096, 8, 64, dtype=dtype)
        return temp_megabytes(gradients(3), x, x, x, x)

    assert megabytes("bfloat16") <= 1.1 * megabytes("float32") + 8
