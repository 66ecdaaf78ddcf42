"""Acceptance cases B: sizes off every block grid, unequal sizes, causal alignment, broadcasting."""

import jax
import numpy as np
import pytest

import probjax
from oracle import Call, agree, biases, check, dense_attention, expected, masks, normal, qkv, solve

SHAPES = {
    "B1": ((1,), 192, 192, 1, 1, 16, 16),
    "B3": ((1,), 128, 256, 2, 2, 8, 8),
    "B3-longer-query": ((1,), 256, 128, 2, 2, 8, 8),
    "B5": ((1,), 137, 137, 1, 1, 8, 8),
    "B5-prime": ((1,), 131, 257, 1, 1, 8, 8),
    "B6": ((1,), 9, 10, 2, 1, 192, 128),
    "B7-64": ((1,), 9, 10, 2, 2, 64, 64),
    "B7-8": ((1,), 9, 10, 2, 2, 8, 8),
    "B8": ((1,), 9, 10, 2, 2, 512, 512),
    "B10": ((2,), 2, 2, 2, 2, 8, 8),
    "B10-one-query": ((2,), 1, 9, 2, 2, 8, 8),
    "B10-one-by-one": ((2,), 1, 1, 1, 1, 1, 1),
    "B12-33": ((1,), 9, 10, 2, 2, 33, 33),
    "B12-40": ((1,), 9, 10, 2, 2, 40, 40),
    "B12-80": ((1,), 9, 10, 2, 2, 80, 80),
    "B12-129": ((1,), 9, 10, 2, 2, 129, 129),
    "B16-wider": ((2,), 6, 7, 2, 2, 4, 9),
    "B16-narrower": ((2,), 6, 7, 2, 2, 4, 1),
    "edge-16": ((2,), 16, 16, 4, 4, 16, 16),
    "edge-50": ((3,), 50, 50, 8, 8, 32, 32),
    "edge-30": ((1,), 256, 256, 4, 4, 30, 30),
    "edge-100": ((1,), 512, 512, 8, 8, 100, 100),
    "no-batch": ((), 6, 7, 4, 2, 4, 3),
    "two-batch-axes": ((2, 3), 6, 7, 4, 2, 4, 3),
    "three-batch-axes": ((2, 1, 3), 6, 7, 2, 1, 4, 4),
    "past-one-tile": ((1,), 600, 1100, 2, 1, 8, 4),
}


@pytest.mark.parametrize("case", SHAPES)
def test_case(implementation, case):
    check(implementation, Call(**qkv(*SHAPES[case])))


@pytest.mark.parametrize("case", ["B1", "B3", "B3-longer-query", "B5-prime", "edge-50", "two-batch-axes"])
def test_causal_case(implementation, case):
    check(implementation, Call(**qkv(*SHAPES[case]), is_causal=True))


SLOW_SHAPES = {
    "edge-128": ((4,), 128, 128, 8, 8, 32, 32),
    "edge-256": ((1,), 256, 256, 2, 2, 8, 8),
    "edge-1024": ((1,), 1024, 1024, 16, 16, 64, 64),
    "edge-2048": ((1,), 2048, 2048, 10, 10, 64, 64),
    "edge-1333": ((1,), 1333, 1333, 12, 12, 64, 64),
}


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("case", SLOW_SHAPES)
def test_large_case(implementation, case, causal):
    check(implementation, Call(**qkv(*SLOW_SHAPES[case]), is_causal=causal))


def heads_agree(implementation, T, heads, chosen):
    """Forward where a full T x S oracle of all heads would not fit: some heads, and twice the same."""
    arrays = qkv((1,), T, T, heads, D=32)
    call = Call(**arrays)
    first = solve(implementation, call, differentiate=False)
    again = solve(implementation, call, differentiate=False)
    np.testing.assert_array_equal(first["out"], again["out"])
    for head in chosen:
        one = Call(**{name: x[:, :, head : head + 1] for name, x in arrays.items()})
        want = expected(one, differentiate=False)
        agree(first["out"][:, :, head : head + 1], want["out"], 2e-6, name=f"head {head}")


def test_b2_first_call(implementation):
    heads_agree(implementation, 1020, 6, (0, 5))


@pytest.mark.slow
def test_b2_first_call_true_size(implementation):
    heads_agree(implementation, 4092, 24, (0, 23))


def test_b8_wide_heads_long(implementation):
    check(implementation, Call(**qkv((1,), 130, 70, 1, D=512)))


@pytest.mark.parametrize("S", [43, 77])
def test_b11_bias_that_is_a_slice(implementation, S):
    wide = normal(1, 2, S, S + 11)
    call = Call(**qkv((2,), S, S, 2, D=4), bias=wide[..., 3 : S + 3])
    got = check(implementation, call)

    def loss(wide):
        arrays = {name: getattr(call, name).astype(np.float32) for name in ("query", "key", "value")}
        out = probjax.dot_product_attention(
            **arrays, bias=wide[..., 3 : S + 3], implementation=implementation
        )
        return (out * got["out"].astype(np.float32)).sum()

    gradient = np.asarray(jax.jit(jax.grad(loss))(wide.astype(np.float32)))
    assert (gradient[..., :3] == 0).all()
    assert (gradient[..., S + 3 :] == 0).all()
    assert np.abs(gradient).max() > 1e-3


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("T", "S"), [(4, 7), (7, 4), (5, 5), (1, 6), (6, 1)])
def test_b14_causal_alignment(implementation, T, S, alignment):
    arrays = qkv((2,), T, S)
    flag = check(implementation, Call(**arrays, is_causal=True, causal_alignment=alignment))
    mask = check(implementation, Call(**arrays, mask=masks.Causal(alignment)))
    agree(mask["out"], flag["out"], 1e-6)
    if alignment == "bottom_right" and T > S:
        assert (flag["out"][:, : T - S] == 0).all()


def test_b14_large_and_unequal(implementation):
    for T, S in ((300, 700), (700, 300)):
        check(implementation, Call(**qkv((1,), T, S, 1), is_causal=True, causal_alignment="bottom_right"))


def test_b16_gradients_of_wide_values(implementation, x64):
    arrays = qkv((2,), 6, 7, 4, 2, 5, 11)

    def loss(attention):
        return lambda arrays: (attention(**arrays)[0] ** 2).sum()

    def ours(**arrays):
        return probjax.dot_product_attention(**arrays, implementation=implementation, return_residual=True)

    got = jax.jit(jax.grad(loss(ours)))(arrays)
    want = jax.grad(loss(dense_attention))(arrays)
    for name in arrays:
        agree(got[name], want[name], 1e-13, name=name)


def test_padding_inside_a_kernel_never_shows(implementation):
    """R4: a head size off the grid scales by the caller's D, and extra hidden keys change nothing."""
    arrays = qkv((1,), 5, 9, 1, D=3)
    short = check(implementation, Call(**arrays))
    arrays["key"] = np.concatenate([arrays["key"], normal(1, 40, 1, 3)], 1)
    arrays["value"] = np.concatenate([arrays["value"], normal(1, 40, 1, 3)], 1)
    long = check(implementation, Call(**arrays, key_value_seq_lengths=np.array([9])))
    agree(long["out"], short["out"], 1e-6)


MASK_SHAPES = [
    (1, 1, 1, 7),
    (1, 1, 6, 1),
    (2, 1, 6, 7),
    (1, 4, 1, 1),
    (2, 2, 1, 7),
    (1, 2, 6, 7),
    (2, 4, 6, 7),
]


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_broadcast_masks_and_biases(implementation, shape):
    """Every broadcast of a mask and a bias, the head axis 1, per key/value head (2) or per query head (4)."""
    mask = normal(*shape, seed="mask") > -1
    check(implementation, Call(**qkv((2,), 6, 7, 4, 2), mask=mask, bias=normal(*shape, seed="bias")))


def test_broadcast_over_two_batch_axes(implementation):
    arrays = qkv((2, 3), 6, 7, 4, 2)
    for mask, bias in (((2, 1, 1, 6, 7), (1, 3, 4, 6, 1)), ((1, 3, 2, 1, 7), (2, 3, 1, 1, 7))):
        check(implementation, Call(**arrays, mask=normal(*mask) > -1, bias=normal(*bias)))


def test_unbatched_ranks(implementation):
    arrays = qkv((), 6, 7, 4, 2)
    for lead in ((), (1,)):
        call = Call(**arrays, mask=normal(*lead, 1, 6, 7) > -1, bias=normal(*lead, 2, 6, 7))
        check(implementation, call)
    lengths = {"query_seq_lengths": np.array(4), "key_value_seq_lengths": np.array(5)}
    check(implementation, Call(**arrays, **lengths, segment_ids=(np.zeros(6, int), np.arange(7) % 2)))


def test_many_batch_entries_and_heads(implementation):
    """H5 in small: more (batch, head) pairs than any grid of a few thousand."""
    check(implementation, Call(**qkv((700,), 2, 3, 8, 4, D=2), bias=biases.ALiBi(abs(normal(8)))))


def test_more_than_two_to_the_31_elements():
    """H1 by shape only: B * N * T * D and B * N * T * S beyond 32-bit indices trace and give a shape."""
    for T, S, D in ((2**20, 8, 128), (2**17, 2**17, 8)):
        arrays = [jax.ShapeDtypeStruct((8, T if i == 0 else S, 16, D), "bfloat16") for i in range(3)]
        for name in ("dense", "tiled"):

            def attend(query, key, value, name=name):
                return probjax.dot_product_attention(query, key, value, is_causal=True, implementation=name)

            assert jax.eval_shape(attend, *arrays).shape == (8, T, 16, D)
