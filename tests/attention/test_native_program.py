"""The form in which calls reach the C++ kernels, without the library: a NumPy reading of the programs that
csrc/attention/problem.h defines gives the masks and scores of the oracle.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probjax
from oracle import Sizes, agree, biases, masks, normal, qkv
from probjax.attention import _program
from probjax.attention._function import MIXED_TILES, looks_at, tile_table
from probjax.attention._program import NO_BOUND, MaskOp, ScoreOp, Unsupported, lower
from probjax.attention.native import key_chunk
from probjax.attention.prepare import prepare

LENGTHS = [(6, 7), (9, 4), (1, 7), (5, 1), (130, 150)]


def sizes_of(T, S, lead=(2,), N=4, K=2):
    return Sizes(lead, T, S, N, K)


def lowered(sizes, **arguments):
    """Program and native operands of a call, as NumPy arrays."""
    arrays = [jnp.asarray(x, "float32") for x in qkv(sizes.lead, sizes.T, sizes.S, sizes.N, sizes.K).values()]
    call, operands = prepare(*arrays, arguments.pop("bias", None), arguments.pop("mask", None), **arguments)
    program = lower(call, operands)
    return program, [np.asarray(x) for x in program.arrays(operands)]


def widened(array, sizes, own):
    """A native operand with its batch axes as one, in full."""
    lead = array.shape[: array.ndim - own]
    assert len(lead) == len(sizes.lead)
    assert all(a in (1, b) for a, b in zip(lead, sizes.lead, strict=True))
    tail = array.shape[array.ndim - own :]
    return np.broadcast_to(array, (*sizes.lead, *tail)).reshape(sizes.B, *tail)


def over_heads(array, sizes):
    """(B, H, ...) with H of 1, K or N to (B, N, ...)."""
    assert array.shape[1] in (1, sizes.K, sizes.N)
    return np.repeat(array, sizes.N // array.shape[1], axis=1)


def read_mask(program, arrays, sizes):
    """What csrc/attention/problem.h says of a mask program: bool (B, N, T, S)."""
    i, j = np.arange(sizes.T)[:, None], np.arange(sizes.S)[None]

    def numbers(at):
        assert arrays[at].dtype == np.int32
        return widened(arrays[at], sizes, 0)[:, None, None, None]

    def step(op, a, b, c, d):
        if op == MaskOp.BAND:
            return (a <= j - i) & (j - i <= b)
        if op == MaskOp.BLOCK:
            return i // a == j // a
        if op == MaskOp.PREFIX:
            return (j < numbers(a)) | (j - i <= b)
        if op == MaskOp.SEGMENTS:
            assert arrays[a].dtype == arrays[b].dtype
            assert arrays[a].dtype in (np.int32, np.int64)
            query_ids, key_ids = (widened(arrays[at], sizes, 1)[:, None] for at in (a, b))
            return query_ids[..., :, None] == key_ids[..., None, :]
        if op == MaskOp.KEY_LENGTHS:
            return j < numbers(a)
        if op == MaskOp.QUERY_LENGTHS:
            return i < numbers(a)
        if op == MaskOp.DENSE:
            assert arrays[a].dtype == bool
            return over_heads(widened(arrays[a], sizes, 3), sizes)
        assert op == MaskOp.TABLE
        kinds, tiles = arrays[a], arrays[b]
        assert kinds.shape == (-(-sizes.T // c), -(-sizes.S // d))
        assert tiles.shape[1:] == (c, d)
        every = np.concatenate([np.zeros((1, c, d), bool), np.ones((1, c, d), bool), tiles])
        return every[kinds].swapaxes(1, 2).reshape(kinds.shape[0] * c, -1)[: sizes.T, : sizes.S]

    stack = []
    for s in program.mask:
        if s.op == MaskOp.NONE_OF:
            stack.append(~stack.pop())
        elif s.op in (MaskOp.ALL_OF, MaskOp.ANY_OF):
            right, left = stack.pop(), stack.pop()
            stack.append(left & right if s.op == MaskOp.ALL_OF else left | right)
        else:
            stack.append(step(s.op, s.a, s.b, s.c, s.d))
    assert len(stack) == (1 if program.mask else 0)
    return np.broadcast_to(stack[0] if stack else True, (sizes.B, sizes.N, sizes.T, sizes.S))


def read_score(program, arrays, score, sizes):
    """What csrc/attention/problem.h says of a score program, on scores (B, N, T, S)."""
    for s in program.score:
        at = s.operand
        if s.op == ScoreOp.ADD_DENSE:
            score = score + over_heads(widened(arrays[at], sizes, 3), sizes)
        elif s.op == ScoreOp.ADD_DIAGONAL:
            strip = over_heads(widened(arrays[at], sizes, 2), sizes)
            assert strip.shape[-1] == sizes.T + sizes.S - 1
            i, j = np.arange(sizes.T)[:, None], np.arange(sizes.S)[None]
            score = score + strip[..., sizes.S - 1 - j + i]
        elif s.op == ScoreOp.MULTIPLY:
            score = score * over_heads(widened(arrays[at], sizes, 1), sizes)[..., None, None]
        else:
            cap = s.constant if at < 0 else widened(arrays[at], sizes, 0)[:, None, None, None]
            score = cap * np.tanh(score / cap)
    return score


def ids(sizes, length, seed):
    return np.random.default_rng(seed).integers(0, 3, (*sizes.lead, length))


LEAVES = {
    "causal": lambda z: masks.Causal(),
    "causal-bottom-right": lambda z: masks.Causal("bottom_right"),
    "window": lambda z: masks.SlidingWindow(2, 1),
    "window-left": lambda z: masks.SlidingWindow(1, None),
    "window-right": lambda z: masks.SlidingWindow(None, 0, "bottom_right"),
    "window-none": lambda z: masks.SlidingWindow(None, -1),
    "window-wide": lambda z: masks.SlidingWindow(500, 3),
    "prefix": lambda z: masks.PrefixLM([0, 4]),
    "segments": lambda z: masks.Segments(ids(z, z.T, 0), ids(z, z.S, 1)),
    "padding": lambda z: masks.Padding([-3, z.S + 5]),
    "keep": lambda z: masks.Padding(ids(z, z.S, 2) > 0),
    "blocks": lambda z: masks.BlockDiagonal(3),
    "blocks-wide": lambda z: masks.BlockDiagonal(1000),
    "dense": lambda z: masks.Dense(normal(2, 1, z.T, z.S) > 0),
    "dense-per-kv-head": lambda z: masks.Dense(normal(1, 2, 1, z.S) > 0),
    "dense-shared": lambda z: masks.Dense(normal(1, 4, z.T, 1) > 0),
    "stripes": lambda z: masks.MaskFunction(lambda b, h, q, kv: (q * 3 + kv) % 4 > 0),
    "triangle": lambda z: masks.MaskFunction(lambda b, h, q, kv: kv <= q),
    "constant-true": lambda z: masks.MaskFunction(lambda b, h, q, kv: kv >= 0),
    "constant-false": lambda z: masks.MaskFunction(lambda b, h, q, kv: kv < 0),
    "of-head": lambda z: masks.MaskFunction(lambda b, h, q, kv: (q + kv + h) % 3 > 0),
    "of-batch": lambda z: masks.MaskFunction(lambda b, h, q, kv: (q + kv + b) % 3 > 0),
    "of-both": lambda z: masks.MaskFunction(lambda b, h, q, kv: (q + kv + b * 2 + h) % 4 > 0),
    "of-array": lambda z: masks.MaskFunction(_same, ids(z, z.T, 3), ids(z, z.S, 4)),
}  # fmt: skip


def _same(b, h, q, kv, query_ids, key_ids):
    return query_ids[b, q] == key_ids[b, kv]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", LEAVES)
def test_mask(name, lengths):
    sizes = sizes_of(*lengths)
    spec = LEAVES[name](sizes)
    for mask in (spec, ~spec, ~~spec):
        got = read_mask(*lowered(sizes, mask=mask.object()), sizes)
        np.testing.assert_array_equal(got, mask.visible(sizes))


def random_tree(rng, depth, sizes):
    kind = rng.choice(["leaf", "not", "and", "or"]) if depth else "leaf"
    if kind == "leaf":
        return LEAVES[rng.choice(list(LEAVES))](sizes)
    if kind == "not":
        return ~random_tree(rng, depth - 1, sizes)
    left, right = random_tree(rng, depth - 1, sizes), random_tree(rng, depth - 1, sizes)
    return left & right if kind == "and" else left | right


@pytest.mark.parametrize("seed", range(60))
def test_algebra(seed):
    rng = np.random.default_rng(seed)
    sizes = sizes_of(*LENGTHS[seed % 4])
    mask = random_tree(rng, 4, sizes)
    got = read_mask(*lowered(sizes, mask=mask.object()), sizes)
    np.testing.assert_array_equal(got, mask.visible(sizes))


def ops(program):
    return [s.op for s in program.mask]


def test_conjunctions_of_bands_are_one_band():
    sizes = sizes_of(20, 20)
    window = probjax.masks.SlidingWindow(5, None)
    program, _ = lowered(sizes, mask=window, is_causal=True, local_window_size=(3, 4))
    assert [(s.op, s.a, s.b) for s in program.mask] == [(MaskOp.BAND, -3, 0)]
    nested = probjax.masks.Causal() & (probjax.masks.Padding(jnp.array([3, 20])) & window)
    program, _ = lowered(sizes, mask=nested)
    assert ops(program) == [MaskOp.BAND, MaskOp.KEY_LENGTHS, MaskOp.ALL_OF]
    program, _ = lowered(sizes, mask=~(~probjax.masks.Causal() | ~nested))
    assert ops(program) == [MaskOp.BAND, MaskOp.KEY_LENGTHS, MaskOp.ALL_OF]
    program, _ = lowered(sizes, mask=~probjax.masks.Causal())
    assert [(s.op, s.a, s.b) for s in program.mask] == [(MaskOp.BAND, 1, NO_BOUND)]


def test_masks_that_hide_nothing_are_left_out():
    """Decoding: one query at the end sees all keys."""
    assert lowered(sizes_of(1, 50), is_causal=True, causal_alignment="bottom_right")[0].mask == ()
    assert lowered(sizes_of(8, 8), mask=probjax.masks.SlidingWindow(7, 7))[0].mask == ()
    everything = probjax.masks.BlockDiagonal(8) | probjax.masks.Padding(jnp.array([1, 2]))
    assert lowered(sizes_of(8, 8), mask=everything)[0].mask == ()
    nothing = probjax.masks.Causal() & ~probjax.masks.Causal() & probjax.masks.Padding(jnp.array([1, 2]))
    (step,) = lowered(sizes_of(8, 8), mask=nothing)[0].mask
    assert step.op == MaskOp.BAND
    assert step.a > step.b


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_integers_of_any_type(dtype):
    """Lengths are clipped before they are cast; ids keep their differences."""
    sizes = sizes_of(5, 6)
    top = int(np.iinfo(dtype).max)
    lengths = np.array([3, top], dtype)
    program, arrays = lowered(sizes, mask=probjax.masks.Padding(lengths))
    np.testing.assert_array_equal(arrays[program.mask[0].a], np.minimum([3, top], 2**31 - 1))
    query_ids = np.array([[0, 1, top, 1, 0], [top] * 5], dtype)
    key_ids = np.array([[0, 0, 1, 1, top, top], [1] * 6], dtype)
    got = read_mask(*lowered(sizes, segment_ids=(query_ids, key_ids)), sizes)
    np.testing.assert_array_equal(got[:, 0], query_ids[:, :, None] == key_ids[:, None])


def test_64_bit_integers(x64):
    sizes = sizes_of(3, 3)
    program, arrays = lowered(sizes, mask=probjax.masks.Padding(np.array([-(2**40), 2**40])))
    np.testing.assert_array_equal(arrays[program.mask[0].a], [0, 2**31 - 1])
    wide = np.array([[0, 2**32, 2**33], [-1, 2**62, 2**32 - 1]])
    for ids in (wide, wide.astype("uint64")):
        got = read_mask(*lowered(sizes, segment_ids=ids), sizes)
        np.testing.assert_array_equal(got[:, 0], ids[:, :, None] == ids[:, None])
    mixed = (wide, wide.astype("uint64"))
    with pytest.raises(Unsupported, match="uint64"):
        lowered(sizes, segment_ids=mixed)


BIASES = {
    "dense": lambda z: biases.Dense(normal(2, 1, z.T, z.S)),
    "dense-per-kv-head": lambda z: biases.Dense(normal(1, 2, z.T, 1)),
    "alibi": lambda z: biases.ALiBi(abs(normal(4))),
    "clip": lambda z: biases.RelativePosition(normal(4, 5)),
    "t5": lambda z: biases.RelativePosition(normal(1, 8), bucketing="t5", max_distance=11),
    "cap": lambda z: biases.SoftCap(1.5),
    "head-scale": lambda z: biases.HeadScale(normal(4)),
    "sum": lambda z: (
        (biases.HeadScale(normal(4)) + biases.SoftCap(1.0))
        + (biases.Dense(normal(1, 1, z.T, z.S)) + biases.ALiBi(normal(4)))
    ),
}


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", BIASES)
def test_bias(name, lengths):
    sizes = sizes_of(*lengths)
    spec = BIASES[name](sizes)
    score = normal(2, 4, *lengths, seed="score")
    program, arrays = lowered(sizes, bias=jax.tree.map(jnp.float32, spec.object()))
    agree(read_score(program, arrays, score, sizes), spec.apply(score, sizes), 1e-6)


def test_order_of_scale_cap_and_bias():
    sizes = sizes_of(5, 6)
    bias, score = normal(1, 1, 5, 6), normal(2, 4, 5, 6)
    program, arrays = lowered(
        sizes, bias=jnp.float32(bias), logits_soft_cap=jnp.float32(2.0), scale=jnp.float32(0.7)
    )
    assert [s.op for s in program.score] == [ScoreOp.MULTIPLY, ScoreOp.SOFT_CAP, ScoreOp.ADD_DENSE]
    agree(read_score(program, arrays, score, sizes), 2 * np.tanh(0.7 * score / 2) + bias, 1e-6)


def test_dense_biases_keep_their_type():
    program, arrays = lowered(sizes_of(5, 6), bias=jnp.ones((1, 1, 1, 6), "bfloat16"))
    assert arrays[program.score[0].operand].dtype == jnp.bfloat16


def test_dropout_and_sinks():
    key = jax.random.key(3)
    program, arrays = lowered(sizes_of(5, 6), dropout_rate=0.25, dropout_key=key, sinks=jnp.arange(4.0))
    dropout = program.dropout
    np.testing.assert_array_equal(
        arrays[dropout.words].view(np.uint32).ravel(), np.asarray(jax.random.key_data(key))
    )
    np.testing.assert_array_equal(arrays[dropout.batch_index], [0, 1])
    np.testing.assert_array_equal(arrays[dropout.head_index], [[0, 1, 2, 3]])
    assert (dropout.threshold, dropout.everything, dropout.scale) == (2**30, False, 4 / 3)
    np.testing.assert_array_equal(arrays[program.sinks], [[0, 1, 2, 3]])
    assert lowered(sizes_of(5, 6), dropout_rate=1.0, dropout_key=key)[0].dropout.everything


def test_table_of_tiles():
    """Equal mixed tiles are kept once, whatever the length."""

    def near(b, h, q, kv):
        return abs(q - kv) < 10

    kinds, tiles = tile_table(near, 1000, 900)
    assert kinds.shape == (16, 15)
    assert set(np.unique(kinds)) == {0, *range(2, 2 + len(tiles))}
    assert len(tiles) <= 5  # three diagonals, and what the ends cut off
    assert (kinds == tile_table(near, 1000, 900)[0]).all()
    seen = np.concatenate([np.zeros((1, 64, 64), bool), np.ones((1, 64, 64), bool), tiles])[kinds]
    q, kv = np.ix_(np.arange(1000), np.arange(900))
    np.testing.assert_array_equal(seen.swapaxes(1, 2).reshape(1024, 960)[:1000, :900], abs(q - kv) < 10)


def test_table_with_too_many_tiles(monkeypatch):
    monkeypatch.setattr("probjax.attention._function.MIXED_TILES", 3)
    assert tile_table(lambda b, h, q, kv: (q * kv) % 7 > 2, 300, 300) is None
    assert MIXED_TILES * 64 * 64 <= 2**24


def test_what_a_function_looks_at():
    array = jax.ShapeDtypeStruct((5,), jnp.int32)
    assert looks_at(lambda b, h, q, kv: q > kv, ()) == (False, False)
    assert looks_at(lambda b, h, q, kv: q > kv + h, ()) == (False, True)
    assert looks_at(lambda b, h, q, kv, a: a[b] > q, (array,)) == (True, False)


def test_functions_of_head_or_arrays_do_not_become_huge(monkeypatch):
    monkeypatch.setattr(_program, "MASK_ENTRIES", 2 * 6 * 7)
    sizes = sizes_of(6, 7)
    lowered(sizes, mask=LEAVES["of-batch"](sizes).object())
    with pytest.raises(Unsupported, match="MaskFunction"):
        lowered(sizes, mask=LEAVES["of-head"](sizes).object())


def test_functions_are_not_repeated_over_axes_they_ignore():
    sizes = sizes_of(6, 7)
    for name, shape in {"of-head": (1, 4), "of-batch": (2, 1), "of-both": (2, 4), "of-array": (2, 1)}.items():
        program, arrays = lowered(sizes, mask=LEAVES[name](sizes).object())
        assert arrays[program.mask[0].a].shape == (*shape, 6, 7)


def test_two_batch_axes():
    sizes = sizes_of(6, 7, (2, 3))
    array = normal(1, 3, 1, 6, 7) > 0
    mask = masks.Dense(array) | masks.Segments(ids(sizes, 6, 0), ids(sizes, 7, 1)) & LEAVES["of-both"](sizes)
    program, arrays = lowered(sizes, mask=mask.object())
    np.testing.assert_array_equal(read_mask(program, arrays, sizes), mask.visible(sizes))


def test_score_functions_have_no_form():
    with pytest.raises(Unsupported, match="ScoreFunction"):
        lowered(sizes_of(6, 7), bias=biases.pair_bias(normal(2, 6, 7)).object())


def test_key_chunks():
    """Few pairs of batch entry and head: the keys are split; the rest of the numbers do not matter."""
    assert key_chunk(4096, 4096, 32) == 4096
    assert key_chunk(64, 256, 1) == 256
    assert key_chunk(64, 512, 1) == 256
    assert key_chunk(4096, 4096, 8) == 1024
    assert key_chunk(4096, 4096, 1) == 256
    for S in (513, 777, 5000, 40000):
        for pairs in (1, 3, 8, 31, 64):
            chunk = key_chunk(128, S, pairs)
            assert chunk == S or (chunk % 64 == 0 and 256 <= chunk < S)
