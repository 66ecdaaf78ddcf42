"""Acceptance cases A: rows that see nothing, and garbage at hidden positions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probjax
from oracle import Call, agree, biases, cases, check, expected, masks, normal, qkv, solve


def holes(*shape, rows=(), columns=()):
    """A bool array of ones with some rows and columns False."""
    mask = np.ones(shape, bool)
    mask[..., list(rows), :] = False
    mask[..., list(columns)] = False
    return mask


def empty_row(shape, *index):
    """A zero bias with -inf over the last axis at `index`."""
    bias = normal(*shape, seed="bias")
    bias[index] = -np.inf
    return bias


def per_head_mask():
    mask = holes(1, 2, 6, 7)
    mask[0, 1, 2] = False
    mask[0, 0, 5] = False
    return mask


def padded_rows():
    mask = holes(3, 1, 8, 16)
    mask[1] = False
    mask[2, ..., 9:] = False
    return mask


PACKED = np.array([[0, 0, 1, 1, 1, 2, -1, -1], [4, 4, 4, 4, -1, -1, -1, -1]])

CASES = {
    "A1": lambda: Call(**qkv((1,), 8, 8, 1), mask=holes(1, 1, 8, 8, rows=[3])),
    "A1-first-and-last": lambda: Call(**qkv((1,), 8, 8, 1), mask=holes(1, 1, 8, 8, rows=[0, 7])),
    "A1-all-rows": lambda: Call(**qkv(), mask=np.zeros((1, 1, 6, 7), bool)),
    "A1-per-head": lambda: Call(**qkv(), mask=per_head_mask()),
    "A1-with-sinks": lambda: Call(**qkv(), mask=per_head_mask(), sinks=normal(2)),
    "A1-unbatched": lambda: Call(**qkv(()), mask=per_head_mask()[0]),
    "A2": lambda: Call(**qkv((1,), 6, 10), mask=holes(1, 1, 6, 10, rows=[1, 4], columns=[2])),
    "A2-tall": lambda: Call(**qkv((1,), 10, 6), mask=holes(1, 1, 10, 6, rows=[0, 9], columns=[5])),
    "A4": lambda: Call(**qkv((1,), 4, 4, 1), mask=holes(1, 1, 4, 4, rows=[0])),
    "A5": lambda: Call(**qkv(), bias=empty_row((1, 1, 6, 7), 0, 0, 2)),
    "A5-per-batch-and-head": lambda: Call(**qkv(), bias=empty_row((2, 2, 6, 7), 1, 0, 4)),
    "A5-all": lambda: Call(**qkv(), bias=np.full((2, 2, 6, 7), -np.inf)),
    "A5-some-keys": lambda: Call(**qkv(), bias=empty_row((1, 2, 1, 7), 0, 1, 0, [0, 6])),
    "A5-broadcast-keys": lambda: Call(**qkv(), bias=empty_row((1, 1, 6, 1), 0, 0, 3)),
    "A5-object": lambda: Call(**qkv(), bias=biases.Dense(empty_row((1, 1, 6, 7), 0, 0, 2))),
    "A5-function": lambda: Call(**qkv(), bias=biases.pair_bias(empty_row((2, 6, 7), 1, 2))),
    "A5-with-sinks": lambda: Call(**qkv(), bias=empty_row((1, 2, 6, 7), 0, 0, 2), sinks=normal(2)),
    "A5-with-cap": lambda: Call(**qkv(), bias=empty_row((1, 2, 6, 7), 0, 0, 2), logits_soft_cap=2.0),
    "A5-with-mask": lambda: Call(
        **qkv(), bias=empty_row((1, 1, 6, 7), 0, 0, 2, slice(0, 4)),
        mask=holes(1, 1, 6, 7, columns=[4, 5, 6]),
    ),
    "A9": lambda: Call(**qkv((3,), 8, 16), mask=padded_rows()),
    "A9-object": lambda: Call(**qkv((3,), 8, 16), mask=masks.Padding([16, 0, 9])),
    "A9-keep": lambda: Call(**qkv((3,), 8, 16), mask=masks.Padding(padded_rows()[:, 0, 0])),
    "A14": lambda: Call(**qkv((2,), 5, 1, 2, D=16)),
    "A14-causal": lambda: Call(**qkv((2,), 5, 1, 2, D=16), is_causal=True),
    "A14-one-visible": lambda: Call(
        **qkv((2,), 5, 6, 2, D=16), mask=holes(1, 1, 5, 6, columns=[0, 1, 2, 4, 5]),
    ),
    "A16": lambda: Call(**qkv((2,), 8, 8), segment_ids=(PACKED, np.where(PACKED < 0, -2, PACKED))),
    "A16-object": lambda: Call(
        **qkv((2,), 8, 8), mask=masks.Segments(PACKED, np.where(PACKED < 0, -2, PACKED)), is_causal=True,
    ),
    "A19": lambda: Call(**qkv((3,)), key_value_seq_lengths=np.array([0, 7, 3])),
    "A19-all-zero": lambda: Call(**qkv((3,)), key_value_seq_lengths=np.array([0, 0, 0])),
    "A19-query": lambda: Call(**qkv((3,)), query_seq_lengths=np.array([0, 6, 2])),
    "A19-both": lambda: Call(
        **qkv((3,)), query_seq_lengths=np.array([4, 6, 0]), key_value_seq_lengths=np.array([5, 0, 7]),
        is_causal=True, causal_alignment="bottom_right",
    ),
    "A19-longer-than-the-array": lambda: Call(**qkv((3,)), key_value_seq_lengths=np.array([9, 7, 3])),
    "A20-T": lambda: Call(**qkv((2,), T=0)),
    "A20-S": lambda: Call(**qkv((2,), S=0), sinks=normal(2)),
    "A20-S-causal": lambda: Call(**qkv((2,), S=0), is_causal=True, bias=normal(1, 2, 6, 1)),
    "A20-B": lambda: Call(**qkv((0,)), mask=np.ones((1, 1, 6, 7), bool), bias=normal(1, 2, 6, 7)),
    "A20-B-two-axes": lambda: Call(**qkv((3, 0)), is_causal=True),
    "A20-T-and-S": lambda: Call(**qkv((2,), T=0, S=0), is_causal=True, local_window_size=2),
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES, "A5-function"))
def test_case(implementation, case):
    check(implementation, CASES[case]())


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("case", ["A5-per-batch-and-head", "A19-both"])
def test_case_in_other_dtypes(implementation, case, dtype):
    check(implementation, CASES[case](), dtype)


def test_a14_single_key_gradients_are_exact(implementation):
    arrays = {name: jnp.asarray(x, "float32") for name, x in qkv((2,), 5, 1, 2, D=16).items()}
    ct = jnp.asarray(normal(2, 5, 2, 16), "float32")

    @jax.jit
    def pull(arrays):
        def attend(arrays):
            return probjax.dot_product_attention(**arrays, implementation=implementation)

        return jax.vjp(attend, arrays)[1](ct)[0]

    got = pull(arrays)
    assert (got["query"] == 0).all()
    assert (got["key"] == 0).all()
    agree(got["value"], ct.sum(1, keepdims=True), 1e-6)


def band(T, reach):
    rows, columns = np.arange(T)[:, None], np.arange(T)[None, :]
    return ((columns <= rows) & (columns > rows - reach))[None, None]


LATE = {
    "A6": {"mask": band(640, 3)},
    "A6-window": {"is_causal": True, "local_window_size": (2, 0)},
    "A6-object": {"mask": masks.SlidingWindow(2, 0)},
    "A6-function": {"mask": masks.MaskFunction(lambda b, h, q, kv: (kv <= q) & (kv > q - 3))},
    "A6-last-key-only": {"mask": holes(1, 1, 1, 640, columns=range(639))},
    "A6-low-bias": {"mask": band(640, 3), "bias": np.full((1, 1, 640, 640), -10.0)},
    "A6-very-low-bias": {"mask": band(640, 3), "bias": np.full((1, 1, 640, 1), -1e4)},
    "A6-late-rows-empty": {"mask": band(640, 3) & holes(1, 1, 640, 640, rows=range(300, 640))},
    "A6-segments": {"segment_ids": np.repeat(np.arange(10), 64)[None]},
    "A6-infinite-bias": {"bias": np.where(band(640, 3), 0.5, -np.inf)},
}


@pytest.mark.parametrize("case", LATE)
def test_first_visible_key_comes_late(implementation, case):
    # At -1e4 a float32 score resolves 1e-3, so that case needs a wider bound.
    tolerance = 2e-3 if case == "A6-very-low-bias" else None
    check(implementation, Call(**qkv((1,), 640, 640, 1, D=4), **LATE[case]), tolerance=tolerance)


GARBAGE = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "huge": 1e38}

# Each hides the last two keys from every query.
HIDERS = {
    "mask": {"mask": holes(1, 1, 6, 7, columns=[5, 6])},
    "mask-per-batch": {"mask": holes(2, 1, 1, 7, columns=[5, 6])},
    "padding": {"mask": masks.Padding([5, 4])},
    "lengths": {"key_value_seq_lengths": np.array([5, 4])},
    "segments": {"segment_ids": (np.zeros((2, 6), int), np.array([[0, 0, 0, 1, 0, 7, 7]] * 2))},
    "causal": {"is_causal": True, "query_seq_lengths": np.array([5, 3])},
    "window": {"local_window_size": (1, 1), "query_seq_lengths": np.array([4, 4])},
    "function": {"mask": masks.MaskFunction(lambda b, h, q, kv: kv < 5)},
    "nothing-visible": {"mask": np.zeros((1, 1, 1, 1), bool)},
    "algebra": {"mask": masks.Causal() & ~masks.Dense(~holes(1, 1, 6, 7, columns=[5, 6]))},
}


@pytest.mark.parametrize("hider", HIDERS)
def test_a8_garbage_in_hidden_keys_and_values(implementation, hider):
    for garbage in GARBAGE.values():
        arrays = qkv()
        arrays["key"][:, 5:] = garbage
        arrays["value"][:, 5:] = -garbage
        check(implementation, Call(**arrays, **HIDERS[hider]))


@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_a8_garbage_in_other_dtypes(implementation, where, dtype):
    arrays = qkv()
    arrays[where][:, 5:] = np.nan
    check(implementation, Call(**arrays, **HIDERS["mask"]), dtype)


def test_a8_grouped_heads(implementation):
    arrays = qkv((1,), N=4, K=2)
    mask = holes(1, 4, 6, 7)
    mask[:, 2:, :, 3] = False
    arrays["key"][:, 3, 1] = np.nan
    arrays["value"][:, 3, 1] = np.inf
    check(implementation, Call(**arrays, mask=mask))


def test_a8_garbage_that_only_later_rows_see(implementation):
    """Causal: the last key and value are garbage; the rows before it neither see nor feel them."""
    for where in ("key", "value"):
        arrays = qkv(T=7)
        clean = check(implementation, Call(**arrays, is_causal=True), differentiate=False)
        arrays[where][:, 6] = np.nan
        dirty = solve(implementation, Call(**arrays, is_causal=True), differentiate=False)
        agree(dirty["out"][:, :6], clean["out"][:, :6], 2e-6, name="out of the earlier rows")
        assert np.isnan(dirty["out"][:, 6]).all()


def test_a8_garbage_in_one_document_stays_there(implementation):
    arrays = qkv(T=7)
    ids = np.array([[0, 0, 0, 1, 1, 1, 1]] * 2)
    clean = check(implementation, Call(**arrays, segment_ids=ids))
    for name in ("key", "value"):
        arrays[name][:, 3:] = np.nan
    dirty = solve(implementation, Call(**arrays, segment_ids=ids))
    for name in ("out", "query", "key", "value"):
        agree(dirty[name][:, :3], clean[name][:, :3], 2e-6, name=name)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a8_garbage_in_hidden_bias(implementation, garbage):
    mask = holes(1, 1, 6, 7, rows=[1], columns=[5, 6])
    bias = np.where(mask, normal(1, 2, 6, 7), GARBAGE[garbage])
    check(implementation, Call(**qkv(), bias=bias, mask=mask))
    check(implementation, Call(**qkv(), bias=biases.SoftCap(3.0) + biases.Dense(bias), mask=mask))


def test_a8_garbage_in_hidden_query_rows(implementation):
    arrays = qkv()
    arrays["query"][:, 4:] = np.nan
    check(implementation, Call(**arrays, query_seq_lengths=np.array([4, 3])))


def test_a8_garbage_cotangent_of_an_empty_row(implementation):
    """A row that sees nothing is a constant, so not even a NaN cotangent gets through it."""
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in qkv().items()}
    mask = jnp.asarray(holes(1, 1, 6, 7, rows=[2]))

    @jax.jit
    def grads(arrays, ct):
        def attend(arrays):
            return probjax.dot_product_attention(**arrays, mask=mask, implementation=implementation)

        return jax.vjp(attend, arrays)[1](ct)[0]

    ct = jnp.asarray(normal(2, 6, 2, 4), jnp.float32).at[:, 2].set(0)
    clean, dirty = grads(arrays, ct), grads(arrays, ct.at[:, 2].set(jnp.nan))
    for name in arrays:
        agree(dirty[name], clean[name], 1e-6, name=name)


def test_a11_wide_bias_with_half_arrays(implementation):
    for bias in (normal(1, 4, 128, 128), empty_row((4, 4, 128, 1), 0, 0, 5)):
        call = Call(**qkv((4,), 128, 128, 4, D=32), bias=bias)
        check(implementation, call, "bfloat16", bias_dtype="float32")


@pytest.mark.parametrize("bias_dtype", ["float32", "float16"])
def test_a11_object_with_other_dtype(implementation, bias_dtype):
    bias = biases.ALiBi(abs(normal(2))) + biases.Dense(normal(1, 1, 6, 7))
    check(implementation, Call(**qkv(), bias=bias), "float16", bias_dtype=bias_dtype)


@pytest.mark.parametrize("causal", [False, True])
def test_a12_no_spurious_infinities(implementation, causal, x64):
    arrays = {name: jnp.asarray(x) for name, x in qkv((2,), 5, 7, 6, 3, D=11).items()}

    def loss(arrays):
        out = probjax.dot_product_attention(**arrays, is_causal=causal, implementation=implementation)
        return (out**2).sum()

    with jax.debug_infs(True), jax.debug_nans(True):
        grads = jax.grad(loss)(arrays)
        grads_of_jitted = jax.jit(jax.grad(loss))(arrays)
    for name in arrays:
        assert np.isfinite(grads[name]).all()
        agree(grads_of_jitted[name], grads[name], 1e-13)


def test_a15_large_logits(implementation):
    arrays = {name: 3 * x for name, x in qkv((1,), 1024, 1024, 1, D=128).items()}
    call = Call(**arrays, scale=0.2)
    check(implementation, call, "bfloat16", tolerance=2e-2)


def test_a15_huge_logits(implementation):
    """Scores of some thousands: the maximum has to be taken out before the exponential."""
    for scale in (300.0, -300.0):
        got = solve(implementation, Call(**qkv(), scale=scale), "float64")
        want = expected(Call(**qkv(), scale=scale), "float64")
        agree(got["out"], want["out"], 1e-10, name="out")
        agree(got["query"], want["query"], 1e-9, name="query", floor=1e-2)


def test_a16_changing_the_tail_changes_nothing(implementation):
    ids = (PACKED, np.where(PACKED < 0, -2, PACKED))
    call = Call(**qkv((2,), 8, 8), segment_ids=ids)
    dirty = dataclasses.replace(call, key=call.key.copy(), value=call.value.copy(), query=call.query.copy())
    for array in (dirty.key, dirty.value, dirty.query):
        array[PACKED < 0] = np.nan
    got, want = solve(implementation, dirty), solve(implementation, call)
    for name in ("out", "query", "key", "value"):
        agree(got[name], want[name], 1e-6, name=name)
        assert (got[name][PACKED < 0] == 0).all()
