"""A user's function on whole tiles, as the GPU kernels evaluate it, against `jax.vmap`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import probjax
from oracle import agree
from probjax.attention._scalar import NotElementwise, evaluate, looks_at, trace
from probjax.attention.biases import ScoreFunction
from probjax.attention.masks import MaskFunction

ROWS, COLUMNS = 6, 9


def tile(fn, arrays=(), score=True, batch=1, head=2, first=(3, 0)):
    """`fn` on a tile, and the entries of the arrays that were read."""
    structs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    closed = trace(fn, score, structs)
    reads = []

    def read(position, index):
        assert len(index) == arrays[position].ndim
        for i, size in zip(index, arrays[position].shape, strict=True):
            assert i is not None and (np.asarray(i) >= 0).all() and (np.asarray(i) < size).all()
        reads.append((position, tuple(np.shape(i) for i in index)))
        return jnp.asarray(arrays[position])[index]

    q, k = (
        (first[0] + np.arange(ROWS, dtype=np.int32))[:, None],
        (first[1] + np.arange(COLUMNS, dtype=np.int32))[None],
    )
    scalars = [np.int32(batch), np.int32(head), jnp.asarray(q), jnp.asarray(k)]
    scores = [SCORES] if score else []
    got = evaluate(closed, [*scores, *scalars], structs, read)
    return np.broadcast_to(got, (ROWS, COLUMNS)), reads


SCORES = jnp.asarray(np.random.default_rng(0).standard_normal((ROWS, COLUMNS)), "float32") * 3


def by_vmap(fn, arrays=(), score=True, batch=1, head=2, first=(3, 0)):
    q, k = first[0] + jnp.arange(ROWS), first[1] + jnp.arange(COLUMNS)

    def one(s, i, j):
        return fn(
            *((s,) if score else ()), jnp.int32(batch), jnp.int32(head), i, j, *map(jnp.asarray, arrays)
        )

    return jax.vmap(jax.vmap(one, (0, None, 0)), (0, 0, None))(SCORES, q, k)


TABLE = np.random.default_rng(1).standard_normal((4, 20)).astype("float32")
CUBE = np.random.default_rng(2).standard_normal((3, 4, 20)).astype("float32")
VECTOR = np.random.default_rng(3).standard_normal(20).astype("float32")
ONE = np.random.default_rng(4).standard_normal((1, 20)).astype("float32")
NUMBER = np.float32(1.7)
IDS = np.random.default_rng(5).integers(0, 20, 20).astype("int32")


@jax.custom_jvp
def clipped(x):
    return jnp.clip(x, -1.0, 1.0)


clipped.defjvp(lambda primals, tangents: (clipped(*primals), tangents[0]))

FUNCTIONS = {
    "arithmetic": (lambda s, b, h, q, k: s * 2 + q - k / (h + 1) - b, ()),
    "constant": (lambda s, b, h, q, k: 3.0, ()),
    "where": (lambda s, b, h, q, k: jnp.where(q > k, s, -s), ()),
    "nested where": (lambda s, b, h, q, k: jnp.where((q - k) % 3 == 0, jnp.where(s > 0, s, 0.0), 1.0), ()),
    "abs": (lambda s, b, h, q, k: s - jnp.abs(q - k) * 0.1, ()),
    "builtin abs": (lambda s, b, h, q, k: s - abs(q - k) * 0.1, ()),
    "remainder": (lambda s, b, h, q, k: s + jnp.remainder(k - q, 4), ()),
    "floor division": (lambda s, b, h, q, k: s + (k - q) // 4, ()),
    "logic": (lambda s, b, h, q, k: s * ((q > k) | (~(q < 4) & (k == 2)) ^ (h > 0)), ()),
    "powers and roots": (lambda s, b, h, q, k: jnp.sqrt(jnp.abs(s)) + s**2 + s**3, ()),
    "exponentials": (lambda s, b, h, q, k: jnp.exp(-s) + jnp.log1p(k) + jnp.exp2(q * 0.1), ()),
    "logarithm": (lambda s, b, h, q, k: jnp.log(q + 1.0) * s, ()),
    "hyperbolic": (lambda s, b, h, q, k: 20 * jnp.tanh(s / 20) + jax.nn.sigmoid(s), ()),
    "min and max": (lambda s, b, h, q, k: jnp.maximum(s, jnp.minimum(q, k) * 0.1), ()),
    "clip": (lambda s, b, h, q, k: jnp.clip(s, -1, 1) + jnp.clip(q - k, -2, 2), ()),
    "sign": (lambda s, b, h, q, k: jnp.sign(s) * jnp.floor(s) + jnp.ceil(s), ()),
    "relu": (lambda s, b, h, q, k: jax.nn.relu(s) + jax.nn.silu(s), ()),
    "softplus": (lambda s, b, h, q, k: jax.nn.softplus(s), ()),
    "gelu": (lambda s, b, h, q, k: jax.nn.gelu(s), ()),
    "custom jvp": (lambda s, b, h, q, k: clipped(s), ()),
    "jit inside": (lambda s, b, h, q, k: jax.jit(lambda x: x * 2)(s), ()),
    "casts": (lambda s, b, h, q, k: s.astype(jnp.bfloat16).astype(jnp.float32) + (q == k).astype(int), ()),
    "number": (lambda s, b, h, q, k, x: s * x, (NUMBER,)),
    "x[q]": (lambda s, b, h, q, k, x: s + x[q], (VECTOR,)),
    "x[k] of integers": (lambda s, b, h, q, k, x: s + x[k], (IDS,)),
    "x[q] twice": (lambda s, b, h, q, k, x: s + x[q] - x[k], (VECTOR,)),
    "x[h]": (lambda s, b, h, q, k, x: s * x[h, 0], (TABLE,)),
    "x[h, q]": (lambda s, b, h, q, k, x: s + x[h, q], (TABLE,)),
    "x[h][q]": (lambda s, b, h, q, k, x: s + x[h][q], (TABLE,)),
    "x[b, h, k]": (lambda s, b, h, q, k, x: s + x[b, h, k], (CUBE,)),
    "x[b][h][k]": (lambda s, b, h, q, k, x: s + x[b][h][k], (CUBE,)),
    "x[b, h][k]": (lambda s, b, h, q, k, x: s + x[b, h][k], (CUBE,)),
    "x[0, q]": (lambda s, b, h, q, k, x: s + x[0, q], (ONE,)),
    "x[1, k]": (lambda s, b, h, q, k, x: s + x[1, k], (TABLE,)),
    "x[-1, k]": (lambda s, b, h, q, k, x: s + x[-1, k], (TABLE,)),
    "x[k - q]": (lambda s, b, h, q, k, x: s + x[k - q], (VECTOR,)),
    "x[clip]": (lambda s, b, h, q, k, x: s + x[jnp.clip(k - q + 10, 0, 19)], (VECTOR,)),
    "beyond the end": (lambda s, b, h, q, k, x: s + x[q + k * 3], (VECTOR,)),
    "x[ids[q]]": (lambda s, b, h, q, k, x, ids: s + x[ids[q]], (VECTOR, IDS)),
    "ids[q] == ids[k]": (lambda s, b, h, q, k, ids: jnp.where(ids[q] == ids[k], s, 0.0), (IDS,)),
    "take": (lambda s, b, h, q, k, x: s + jnp.take(x, q), (VECTOR,)),
    "take, clipped": (lambda s, b, h, q, k, x: s + jnp.take(x, k * 4, mode="clip"), (VECTOR,)),
    "take, filled": (
        lambda s, b, h, q, k, x: jnp.nan_to_num(s + jnp.take(x, k * 4, mode="fill", fill_value=5.0)),
        (VECTOR,),
    ),
    "filled with zero": (lambda s, b, h, q, k, x: s + x.at[k * 4].get(mode="fill", fill_value=0), (VECTOR,)),
    "filled by default": (lambda s, b, h, q, k, x: s + x.at[k * 4].get(mode="fill"), (VECTOR,)),
    "filled, two axes": (
        lambda s, b, h, q, k, x: s + x.at[h, k * 4].get(mode="fill", fill_value=-1.0),
        (TABLE,),
    ),
    "clipped": (lambda s, b, h, q, k, x: s + x.at[k * 4 - 5].get(mode="clip"), (VECTOR,)),
    "promised": (lambda s, b, h, q, k, x: s + x.at[q].get(mode="promise_in_bounds"), (VECTOR,)),
    "dynamic_index_in_dim": (
        lambda s, b, h, q, k, x: s + lax.dynamic_index_in_dim(x, q, keepdims=False),
        (VECTOR,),
    ),
    "dynamic_slice": (lambda s, b, h, q, k, x: s + lax.dynamic_slice(x, (h, k), (1, 1))[0, 0], (TABLE,)),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_against_vmap(name):
    fn, arrays = FUNCTIONS[name]
    got, _ = tile(fn, arrays)
    want = by_vmap(fn, arrays)
    assert got.dtype == want.dtype
    # The same operations in the same order; only fused ones round differently.
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


MASKS = {
    "causal": (lambda b, h, q, k: q >= k, ()),
    "python and": (lambda b, h, q, k: jnp.logical_and(q >= k, q - k < 4), ()),
    "documents": (lambda b, h, q, k, ids: (ids[q] == ids[k]) & (q >= k), (IDS,)),
    "bool array": (lambda b, h, q, k, keep: keep[h, k], (TABLE > 0,)),
    "filled with False": (
        lambda b, h, q, k, keep: keep.at[h, k * 4].get(mode="fill", fill_value=False),
        (TABLE > 0,),
    ),
    "everything": (lambda b, h, q, k: True, ()),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_against_vmap(name):
    fn, arrays = MASKS[name]
    got, _ = tile(fn, arrays, score=False)
    np.testing.assert_array_equal(got, by_vmap(fn, arrays, score=False))


def test_only_the_entries_that_a_tile_needs_are_read():
    """An index that is the same for the tile is read once; one per row, once per row."""
    _, reads = tile(lambda s, b, h, q, k, x: s + x[b, h, q], (CUBE,))
    assert reads == [(0, ((), (), (ROWS, 1)))]
    _, reads = tile(lambda s, b, h, q, k, x, y: s + x[h, 3] + y[k], (TABLE, VECTOR))
    assert reads == [(0, ((), ())), (1, ((1, COLUMNS),))]


def test_looks_at():
    closed = trace(lambda b, h, q, k: (h < 3) & (q > k), False, ())
    assert [looks_at(closed, i) for i in range(4)] == [False, True, True, True]
    assert looks_at(trace(lambda b, h, q, k: b == 0, False, ()), 0)
    assert not looks_at(trace(lambda s, b, h, q, k: 1.0 * q, True, ()), 0)


# ----------------------------------------------------------------------------------------------------------
# What kernels cannot take


def loops(b, h, q, k):
    return lax.fori_loop(0, 3, lambda i, x: x + i, q) > k


def rounds(b, h, q, k):
    return jnp.round(q / 3) > k


def fixed_row(b, h, q, k, x):
    return x[1][k] > 0


def waits(b, h, q, k):
    return lax.while_loop(lambda x: x < 9, lambda x: x + q + 1, k) > 9


def branches(b, h, q, k):
    return lax.cond(q > 3, lambda: k > 2, lambda: k > 1)


def reduces(b, h, q, k, x):
    return x.sum() + q > k


def sorts(b, h, q, k, x):
    return jnp.sort(x)[q] > k


def whole(b, h, q, k, x):
    return (x + 1)[q] > k


def row(b, h, q, k, x):
    return jnp.any(x[q, :] > 0)


CONSTANTS = np.arange(20)


def closes(b, h, q, k):
    return jnp.asarray(CONSTANTS)[q] > k


UNSUPPORTED = {
    "fori_loop": (loops, (), "the operation (scan|while)"),
    "while_loop": (waits, (), "the operation while"),
    "cond": (branches, (), "the operation cond"),
    "round": (rounds, (), "the operation round"),
    "a row of a fixed number": (fixed_row, (TABLE,), "the operation slice"),
    "sum": (reduces, (VECTOR,), "the operation reduce_sum"),
    "sort": (sorts, (VECTOR,), "the operation sort"),
    "arithmetic on an array": (whole, (VECTOR,), "the operation add on a whole array"),
    "a row": (row, (TABLE,), "the operation gt on a whole array|more than one entry"),
    "a closed-over array": (closes, (), "an array that it closes over; pass it through \\*arrays"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_kernels_cannot_take(name):
    fn, arrays, message = UNSUPPORTED[name]
    structs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    with pytest.raises(NotElementwise, match=message):
        trace(fn, False, structs)


def inputs(T=20):
    rng = np.random.default_rng(9)
    return [jnp.asarray(rng.standard_normal((2, T, 2, 8)), "float32") for _ in range(3)]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_as_a_mask_it_is_computed_as_an_array(name):
    fn, arrays, _ = UNSUPPORTED[name]
    mask = MaskFunction(fn, *arrays)
    q, k, v = inputs()
    got = jax.jit(lambda: probjax.dot_product_attention(q, k, v, mask=mask, implementation="interpret"))()
    want = probjax.dot_product_attention(q, k, v, mask=mask, implementation="reference")
    assert np.isfinite(got).all()
    agree(got, want, 4e-6)


@pytest.mark.parametrize("name", ["cond", "sum", "arithmetic on an array"])
def test_as_a_score_function_it_is_declined(name):
    fn, arrays, message = UNSUPPORTED[name]
    bias = ScoreFunction(lambda s, *rest: jnp.where(fn(*rest), s, 0.0), *arrays)
    q, k, v = inputs()
    with pytest.raises(
        NotImplementedError, match=f"'interpret' cannot run this call: biases.ScoreFunction with {message}"
    ):
        probjax.dot_product_attention(q, k, v, bias, implementation="interpret")
    # Where nothing is named another implementation runs it.
    probjax.dot_product_attention(q, k, v, bias)


def test_a_function_that_vmap_turns_into_a_gather_is_read_in_the_kernel():
    """Relative to the reference: a score function with an array for each batch entry."""
    q, k, v = inputs()
    array = jnp.asarray(np.random.default_rng(1).standard_normal((2, 20)), "float32")
    bias = ScoreFunction(lambda s, b, h, i, j, x: s + x[b, j] * x[b][i], array)
    got = jax.jit(lambda: probjax.dot_product_attention(q, k, v, bias, implementation="interpret"))()
    agree(got, probjax.dot_product_attention(q, k, v, bias, implementation="reference"), 4e-6)


UNIT_AXES = {
    "none in front": lambda q, k, t, g: g[None, :][0, k],
    "reshape": lambda q, k, t, g: g.reshape(1, -1)[0, k],
    "none in front of two": lambda q, k, t, g: t[None][0, q, k],
    "none between": lambda q, k, t, g: t[:, None][q, 0, k],
    "slice keeps the axis": lambda q, k, t, g: jax.lax.dynamic_slice_in_dim(t, q, 1, 0)[0, k],
    "index keeps the axis": lambda q, k, t, g: jax.lax.dynamic_index_in_dim(t, q, 0)[0, k],
    "whole slice": lambda q, k, t, g: jax.lax.dynamic_slice(t, (q, 0), (1, 7))[0, k],
    "none behind": lambda q, k, t, g: g[:, None][k, 0],
    "twice": lambda q, k, t, g: t[q][None][0, k],
}


@pytest.mark.parametrize("case", UNIT_AXES)
def test_axes_of_size_one_stay_in_their_place(case):
    import probjax

    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 7, 1, 4)), jnp.float32) for _ in range(3))
    t, g = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((7, 7), (7,)))
    at = UNIT_AXES[case]
    bias = probjax.biases.ScoreFunction(lambda s, b, h, i, j, t, g: s + at(i, j, t, g), t, g)
    got, want = (
        probjax.dot_product_attention(q, k, v, bias, implementation=name)
        for name in ("interpret", "reference")
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_derivative_of_its_own_is_left_to_plain_jax():
    import probjax

    @jax.custom_vjp
    def steps(x):
        return jnp.floor(x * 4) / 4

    steps.defvjp(lambda x: (steps(x), None), lambda _, ct: (ct,))
    x = jnp.ones((1, 4, 1, 4))
    bias = probjax.biases.ScoreFunction(lambda s, b, h, i, j: steps(s))
    with pytest.raises(NotImplementedError, match="custom_vjp"):
        probjax.dot_product_attention(x, x, x, bias, implementation="interpret")


@pytest.mark.parametrize("sink", [-np.inf, np.inf, 0.5])
def test_extreme_sinks(sink):
    import probjax

    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 7, 1, 4)), jnp.float32) for _ in range(3))

    def of(name):
        def f(s):
            return probjax.dot_product_attention(q, k, v, sinks=s, implementation=name, return_residual=True)

        return jax.jvp(f, (jnp.full((1,), sink, jnp.float32),), (jnp.ones(1),))

    for got, want in zip(*(jax.tree.leaves(of(name)) for name in ("interpret", "reference")), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
