"""Acceptance cases E: sliding windows, alone and with other masks, and decoding with a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probjax
from oracle import Call, agree, check, masks, normal, qkv, solve

WINDOWS = [2, 0, (1, 2), (3, None), (None, 1), (-1, 0), (2, -1), (None, None), -1, (0, 0), 100]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_window_is_obeyed(implementation, window):
    check(implementation, Call(**qkv(), local_window_size=window))


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("T", "S"), [(4, 9), (9, 4)])
def test_window_follows_the_alignment(implementation, T, S, causal, alignment):
    call = Call(**qkv((2,), T, S), local_window_size=(2, 1), is_causal=causal, causal_alignment=alignment)
    check(implementation, call)


def test_window_with_everything(implementation):
    call = Call(
        **qkv((2,), 9, 9, 4, 2),
        local_window_size=(3, 1),
        is_causal=True,
        key_value_seq_lengths=np.array([7, 9]),
        query_seq_lengths=np.array([9, 8]),
        segment_ids=np.array([[0, 0, 0, 0, 1, 1, 1, 1, 1]] * 2),
        bias=normal(1, 1, 9, 9),
        sinks=normal(4),
        logits_soft_cap=3.0,
    )
    check(implementation, call)


def test_bottom_right_uses_the_shapes_also_with_lengths(implementation):
    call = Call(
        **qkv((2,), 4, 9),
        is_causal=True,
        causal_alignment="bottom_right",
        key_value_seq_lengths=np.array([6, 9]),
    )
    check(implementation, call)


@pytest.mark.parametrize("window", [(300, 0), (40, 40), 2000])
def test_e1_window_over_many_tiles(implementation, window):
    call = Call(**qkv((1,), 2048, 2080, 1, D=8), local_window_size=window)
    check(implementation, call, tolerance=4e-6)


@pytest.mark.parametrize("kind", ["array", "object", "function"])
def test_window_argument_and_mask_agree(implementation, kind):
    distance = np.arange(7)[None, :] - np.arange(6)[:, None]
    mask = {
        "array": ((distance >= -2) & (distance <= 1))[None, None],
        "object": masks.SlidingWindow(2, 1),
        "function": masks.MaskFunction(lambda b, h, q, kv: (kv - q >= -2) & (kv - q <= 1)),
    }[kind]
    one = check(implementation, Call(**qkv(), mask=mask))
    two = check(implementation, Call(**qkv(), local_window_size=(2, 1)))
    agree(one["out"], two["out"], 1e-6)


def test_e2_decode_with_a_ring_cache(implementation):
    """One token at a time against a ring of the last W keys equals the whole sequence with a window."""
    T, W = 13, 4
    arrays = qkv((2,), T, T, 4, 2)
    whole = check(implementation, Call(**arrays, is_causal=True, local_window_size=(W - 1, 0)))
    ring = {name: np.zeros((2, W, 2, 4)) for name in ("key", "value")}
    held = np.full(W, -1)
    for t in range(T):
        for name in ring:
            ring[name][:, t % W] = arrays[name][:, t]
        held[t % W] = t
        call = Call(
            arrays["query"][:, t : t + 1], ring["key"], ring["value"], mask=masks.Padding([held >= 0] * 2)
        )
        got = solve(implementation, call, differentiate=False)
        agree(got["out"][:, 0], whole["out"][:, t], 3e-6, name=f"token {t}")


def test_decode_with_a_growing_cache(implementation):
    """A cache longer than what is filled: NaN in the unused part, one compiled function for all steps."""
    T = 9
    arrays = qkv((2,), T, T)
    whole = check(implementation, Call(**arrays, is_causal=True))
    cache = {name: np.full((2, 16, 2, 4), np.nan) for name in ("key", "value")}
    for t in range(T):
        for name in cache:
            cache[name][:, t] = arrays[name][:, t]
        call = Call(arrays["query"][:, t : t + 1], **cache, key_value_seq_lengths=np.array([t + 1] * 2))
        got = solve(implementation, call, differentiate=False)
        agree(got["out"][:, 0], whole["out"][:, t], 3e-6, name=f"token {t}")


def test_original_a06_later_tokens_never_matter(implementation):
    arrays = qkv((1,), 7, 7)
    call = Call(**arrays, is_causal=True, mask=np.ones((1, 1, 1, 7), bool))
    want = check(implementation, call, differentiate=False)
    for t in range(1, 7):
        other = {name: x.copy() for name, x in arrays.items()}
        for x in other.values():
            x[:, t:] += 5
        got = solve(implementation, dataclasses.replace(call, **other), differentiate=False)
        np.testing.assert_array_equal(got["out"][:, :t], want["out"][:, :t])


def cost(window, T=4096, **options):
    """Floating point operations that XLA counts in the compiled forward, or None where loops hide them."""
    x = jax.ShapeDtypeStruct((1, T, 1, 32), "float32")

    def attend(q, k, v):
        return probjax.dot_product_attention(
            q, k, v, local_window_size=window, implementation="tiled", **options
        )

    return jax.jit(attend).lower(x, x, x).compile()


def test_e5_narrow_window_needs_less_memory_than_a_square():
    for options in ({}, {"is_causal": True}):
        assert cost((256, 0), 16384, **options).memory_analysis().temp_size_in_bytes < 64 * 2**20


@pytest.mark.parametrize("T", [5, 700])
def test_traced_lengths_and_windows_under_scan(implementation, T):
    """A loop over lengths inside one program."""
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in qkv((1,), T, T, 1).items()}

    @jax.jit
    def run(lengths):
        def step(_, length):
            out = probjax.dot_product_attention(
                **arrays,
                key_value_seq_lengths=length[None],
                local_window_size=3,
                implementation=implementation,
            )
            return None, out

        return jax.lax.scan(step, None, lengths)[1]

    lengths = np.array([0, 2, T])
    for length, out in zip(lengths, run(lengths), strict=True):
        call = Call(**qkv((1,), T, T, 1), key_value_seq_lengths=np.array([length]), local_window_size=3)
        agree(out, solve(implementation, call, differentiate=False)["out"], 2e-6)
