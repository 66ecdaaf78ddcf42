"""Mask and bias objects: dense expansion, algebra, pytrees, and their use through jit and vmap."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probjax
from oracle import Call, Sizes, agree, biases, cases, check, masks, normal, qkv, solve

SIZES = Sizes((2,), 6, 7, 4, 2)
IDS = np.array([[0, 0, 1, 1, 2, 2, 2], [5, 5, 5, 5, 5, 0, 0]])


def documents(b, h, q, kv, ids):
    return (ids[b, q] == ids[b, kv]) & (kv <= q)


MASKS = {
    "causal": masks.Causal(),
    "causal-bottom-right": masks.Causal("bottom_right"),
    "window": masks.SlidingWindow(2, 1),
    "window-left": masks.SlidingWindow(1, None),
    "window-right": masks.SlidingWindow(None, 0),
    "window-bottom-right": masks.SlidingWindow(0, 1, "bottom_right"),
    "prefix": masks.PrefixLM([0, 4]),
    "prefix-long": masks.PrefixLM([9, 1]),
    "segments": masks.Segments(IDS[:, :6], IDS),
    "padding": masks.Padding([0, 5]),
    "keep": masks.Padding(IDS != 1),
    "blocks": masks.BlockDiagonal(3),
    "blocks-of-one": masks.BlockDiagonal(1),
    "dense": masks.Dense(normal(2, 1, 6, 7) > 0),
    "dense-per-head": masks.Dense(normal(1, 4, 1, 7) > 0),
    "dense-per-kv-head": masks.Dense(normal(1, 2, 6, 1) > 0),
    "function": masks.MaskFunction(lambda b, h, q, kv: (q * 3 + kv * 5 + h + b) % 4 > 0),
    "function-static": masks.MaskFunction(lambda b, h, q, kv: (q - kv) % 3 == 0),
    "function-array": masks.MaskFunction(documents, IDS),
    "and": masks.Causal() & masks.Padding([7, 5]),
    "or": masks.Causal() | masks.Segments(IDS[:, :6], IDS),
    "not": ~masks.SlidingWindow(1, 1),
    "nested": ~(masks.Causal() & ~masks.BlockDiagonal(2))
    & (masks.Padding([3, 7]) | ~masks.Dense(normal(1, 1, 6, 7) > 0)),
    "exclusive": (masks.Causal() & ~masks.BlockDiagonal(4)) | (~masks.Causal() & masks.BlockDiagonal(4)),
    "everything": masks.Causal() | ~masks.Causal(),
    "nothing": masks.Causal() & ~masks.Causal(),
    "not-segments": ~masks.Segments(IDS[:, :6], IDS) & masks.SlidingWindow(3, 3),
}  # fmt: skip

BIASES = {
    "dense": biases.Dense(normal(2, 1, 6, 7)),
    "dense-per-kv-head": biases.Dense(normal(1, 2, 6, 1)),
    "alibi": biases.ALiBi(abs(normal(4))),
    "clip": biases.RelativePosition(normal(4, 5)),
    "t5": biases.RelativePosition(normal(1, 8), bucketing="t5", max_distance=11),
    "t5-causal": biases.RelativePosition(normal(4, 6), bucketing="t5", max_distance=5, bidirectional=False),
    "cap": biases.SoftCap(1.5),
    "head-scale": biases.HeadScale(normal(4)),
    "function": biases.gated_score(normal(4), normal(7)),
    "pair": biases.pair_bias(normal(2, 6, 7)),
    "sum": biases.SoftCap(2.0) + biases.ALiBi(abs(normal(4))) + biases.HeadScale(normal(4)),
    "sum-of-sums": (biases.HeadScale(normal(4)) + biases.SoftCap(1.0))
    + (biases.Dense(normal(1, 1, 6, 7)) + biases.SoftCap(3.0)),
}


def dense_of(spec):
    dense = np.asarray(spec.object().dense(6, 7, batch=(2,), heads=4))
    assert dense.dtype == bool
    return np.broadcast_to(dense, (2, 4, 6, 7))


PER_KV_HEAD = ("dense-per-kv-head",)


@pytest.mark.parametrize("name", [name for name in MASKS if name not in PER_KV_HEAD])
def test_dense_mask_is_that_of_the_oracle(name):
    np.testing.assert_array_equal(dense_of(MASKS[name]), MASKS[name].visible(SIZES))


@pytest.mark.parametrize("name", MASKS)
def test_mask_in_a_call(implementation, name):
    check(implementation, Call(**qkv(N=4, K=2), mask=MASKS[name]))


@pytest.mark.parametrize("name", [name for name in BIASES if name not in PER_KV_HEAD])
def test_dense_bias_is_that_of_the_oracle(name, x64):
    score = normal(2, 4, 6, 7, seed="score")
    agree(BIASES[name].object().dense(jnp.asarray(score)), BIASES[name].apply(score, SIZES), 1e-14)


@pytest.mark.parametrize("name", cases(BIASES, "function", "pair"))
def test_bias_in_a_call(implementation, name):
    call = Call(**qkv(N=4, K=2), bias=BIASES[name], mask=masks.Padding([7, 4]))
    check(implementation, call, tolerance=4e-6)


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("name", ["causal", "prefix", "window"])
def test_large_structured_masks(implementation, name, alignment):
    """Over many tiles and with T != S, where whole tiles are skipped."""
    mask = {
        "causal": masks.Causal(alignment) & ~masks.BlockDiagonal(100),
        "prefix": masks.PrefixLM([650]) & masks.Causal(alignment) | masks.SlidingWindow(0, 0, alignment),
        "window": masks.SlidingWindow(70, 30, alignment) | masks.Padding([3]),
    }[name]
    check(implementation, Call(**qkv((1,), 550, 900, 1), mask=mask), tolerance=4e-6)


def test_algebra_identities():
    a, b, c = masks.Causal(), masks.Segments(IDS[:, :6], IDS), masks.MaskFunction(documents, IDS)
    pairs = [
        (~(a & b), ~a | ~b),
        (~(a | b), ~a & ~b),
        (~~b, b),
        (~~~c, ~c),
        (a & (b | c), (a & b) | (a & c)),
        (a | (b & c), (a | b) & (a | c)),
        (a & a, a),
        ((a & b) & c, a & (b & c)),
        (a & b, b & a),
    ]
    for left, right in pairs:
        np.testing.assert_array_equal(dense_of(left), dense_of(right))
    np.testing.assert_array_equal(dense_of(~a), ~dense_of(a))


@pytest.mark.parametrize("pair", ["de morgan", "distributive"])
def test_algebra_in_calls(implementation, pair):
    """Equal masks written differently give equal results (tile ranges are hulls, never wrong)."""
    ids = np.repeat(np.arange(6), 100)[None]
    a, b, c = masks.Causal(), masks.Segments(ids), masks.SlidingWindow(50, 20)
    left, right = {
        "de morgan": (~(a & b), ~a | ~b),
        "distributive": (a & (b | c), (a & b) | (a & c)),
    }[pair]
    arrays = qkv((1,), 600, 600, 1)
    one = check(implementation, Call(**arrays, mask=left), tolerance=4e-6)
    two = solve(implementation, Call(**arrays, mask=right))
    for name in ("out", "query", "key", "value"):
        agree(two[name], one[name], 4e-6, name=name)


@pytest.mark.parametrize("spec", [*MASKS.values(), *BIASES.values()], ids=[*MASKS, *BIASES])
def test_pytree_round_trip(spec):
    """Original A14: flatten and unflatten is the identity in structure and meaning."""
    built = spec.object()
    leaves, tree = jax.tree.flatten(built)
    again = jax.tree.unflatten(tree, leaves)
    assert type(again) is type(built)
    assert jax.tree.structure(again) == tree
    assert hash(tree) == hash(jax.tree.structure(spec.object()))
    for array, leaf in zip(spec.arrays(), leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), array.astype(np.asarray(leaf).dtype))
    if isinstance(spec, masks.MaskSpec) and spec is not MASKS["dense-per-kv-head"]:
        one, two = (x.dense(6, 7, batch=(2,), heads=4) for x in (built, again))
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("name", ["window", "function-array", "nested"])
def test_masks_through_jit(implementation, name):
    """The object is an argument of a jitted function."""
    q, k, v = (jnp.asarray(x, "float32") for x in qkv(N=4, K=2).values())

    @jax.jit
    def attend(mask):
        return probjax.dot_product_attention(q, k, v, mask=mask, implementation=implementation)

    want = solve(implementation, Call(**qkv(N=4, K=2), mask=MASKS[name]), differentiate=False)
    agree(attend(MASKS[name].object()), want["out"], 1e-6)


def test_gradient_with_respect_to_a_bias_object(implementation):
    """jax.grad of an object gives an object of the same structure."""
    q, k, v = (jnp.asarray(x, "float32") for x in qkv(N=4, K=2).values())
    spec = biases.HeadScale(normal(4)) + biases.SoftCap(2.0) + biases.RelativePosition(normal(4, 5))
    bias = jax.tree.map(lambda x: jnp.asarray(x, "float32"), spec.object())

    def loss(bias):
        return (probjax.dot_product_attention(q, k, v, bias, implementation=implementation) ** 2).sum()

    gradient = jax.jit(jax.grad(loss))(bias)
    assert jax.tree.structure(gradient) == jax.tree.structure(bias)
    step = jax.tree.map(lambda x: 1e-2 * x, gradient)
    moved = jax.jvp(loss, (bias,), (step,))[1]
    want = sum((a * b).sum() for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(step), strict=True))
    assert float(moved) == pytest.approx(float(want), rel=1e-5)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(gradient))


def test_arrays_that_jax_has_not_seen(implementation):
    """Lists and NumPy arrays are accepted inside objects."""
    q, k, v = (np.asarray(x, "float32") for x in qkv(N=2).values())
    mask = probjax.masks.Padding(np.array([3, 7])) & probjax.masks.Causal()
    bias = probjax.biases.ALiBi(np.array([0.5, 0.25], "float32"))
    got = probjax.dot_product_attention(q, k, v, bias, mask, implementation=implementation)
    call = Call(**qkv(N=2), bias=biases.ALiBi([0.5, 0.25]), mask=masks.Padding([3, 7]) & masks.Causal())
    agree(got, solve(implementation, call, differentiate=False)["out"], 1e-6)


def test_plain_arrays_join_the_algebra():
    array = normal(2, 1, 6, 7) > 0
    mask = probjax.masks.Causal() & probjax.masks.Dense(array)
    want = (masks.Causal() & masks.Dense(array)).visible(SIZES)
    np.testing.assert_array_equal(mask.dense(6, 7, batch=(2,), heads=4), want)


def test_objects_are_frozen():
    for thing, field in ((probjax.masks.Causal(), "alignment"), (probjax.biases.SoftCap(2.0), "value")):
        with pytest.raises(AttributeError):
            setattr(thing, field, "other")


def test_objects_have_a_readable_text():
    thing = probjax.masks.Causal() & ~probjax.masks.SlidingWindow(left=2, right=0)
    assert "Causal" in repr(thing)
    assert "left=2" in repr(thing)
    assert "ALiBi" in repr(probjax.biases.ALiBi(np.ones(2)))


def test_static_objects_compare_and_hash():
    assert probjax.masks.Causal() == probjax.masks.Causal()
    assert probjax.masks.SlidingWindow(left=1) != probjax.masks.SlidingWindow(left=2)
    assert hash(probjax.masks.BlockDiagonal(3)) == hash(probjax.masks.BlockDiagonal(3))


def test_objects_pickle():
    mask = probjax.masks.Causal() & probjax.masks.Padding(np.array([2, 3]))
    again = pickle.loads(pickle.dumps(mask))
    np.testing.assert_array_equal(again.dense(6, 7, batch=(2,)), mask.dense(6, 7, batch=(2,)))


def test_t5_buckets_beyond_exact_powers():
    """The default table of 32 buckets over distances up to 300, at the exact powers too, in float32."""
    table = np.arange(32.0)[None]
    for bidirectional in (True, False):
        spec = biases.RelativePosition(table, bucketing="t5", bidirectional=bidirectional)
        got = spec.object().dense(jnp.zeros((1, 1, 300, 300)))
        want = spec.apply(np.zeros((1, 1, 300, 300)), Sizes((1,), 300, 300, 1, 1))
        np.testing.assert_array_equal(np.asarray(got, np.float64), want)
