"""The Pallas kernels, run by Pallas's interpreter: values and derivatives over several tiles.

The tests that take `implementation` hold for these kernels too (PROBJAX_TEST_IMPLEMENTATIONS=interpret). Here
the tiles are made small, so that small calls have several of them in both directions.
"""

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
    compare,
    expected,
    forward,
    gradients,
    masks,
    normal,
    qkv,
    solve,
)
from oracle.check import _compiled, cast, rounded
from probjax.attention import _triton, gpu_triton, tables
from probjax.attention._program import MaskOp, ScoreOp, lower
from probjax.attention.prepare import prepare

NAMES = ("forward", "tangent", "query", "key", "bias")


def cut(rows, columns, names=NAMES):
    return {name: tables.Blocks(rows, columns, warps=1, stages=1) for name in names}


SMALL = cut(16, 16)
WIDE = cut(16, 32)
TALL = cut(32, 16)
# The key and the query kernel cut differently, as they may be.
MIXED = SMALL | {"key": tables.Blocks(32, 16), "query": tables.Blocks(16, 32), "bias": tables.Blocks(32, 32)}
ONE = cut(16, 16, ("forward", "tangent")) | cut(16, 64, ("one",))
WHOLE = cut(64, 64, ("forward", "tangent", "one", "bias"))


@pytest.fixture(autouse=True)
def forget():
    """A compiled program is of one cut, which is no part of its key."""
    _compiled.cache_clear()
    jax.clear_caches()


@pytest.fixture
def launched(monkeypatch):
    """The kernels that were run: name and number of programs."""
    found, launch = [], _triton.launch

    def record(*args, **kwargs):
        found.append((kwargs["name"].removeprefix("probjax_"), kwargs["programs"]))
        return launch(*args, **kwargs)

    monkeypatch.setattr(_triton, "launch", record)
    return found


def causal(b, h, q, k):
    return k <= q


def striped(b, h, q, k):
    return (q + k) % 3 != 0


def by_head(b, h, q, k, reach):
    return (k - q <= reach[h]) & (k - q >= -reach[h] - b)


def documents(b, h, q, k, ids):
    return (ids[b, q] == ids[b, k]) & (k <= q)


def hidden(*shape, above=0.5):
    return normal(*shape, seed="mask") < above


def ids(*shape, count=4, seed="ids"):
    return np.sort(np.random.default_rng(len(seed)).integers(0, count, shape), axis=-1)


def mixed_ids(*shape):
    return np.random.default_rng(5).integers(0, 3, shape)


SIZES = {"lead": (2,), "T": 37, "S": 45, "D": 8}


def sized(**sizes):
    return qkv(**SIZES | sizes)


CASES = {
    "plain": (SMALL, lambda: Call(**sized())),
    "plain, uneven": (MIXED, lambda: Call(**sized(T=40, S=33))),
    "plain, whole": (WHOLE, lambda: Call(**sized(T=40, S=33))),
    "plain, one": (ONE, lambda: Call(**sized())),
    "one row": (SMALL, lambda: Call(**sized(T=1))),
    "one key": (SMALL, lambda: Call(**sized(S=1))),
    "causal": (SMALL, lambda: Call(**sized(S=37), is_causal=True)),
    "causal, wide": (WIDE, lambda: Call(**sized(T=48, S=48), is_causal=True)),
    "causal, tall": (TALL, lambda: Call(**sized(T=48, S=50), is_causal=True)),
    "causal, one": (ONE, lambda: Call(**sized(S=37), is_causal=True)),
    "causal, T < S": (SMALL, lambda: Call(**sized(T=20, S=50), is_causal=True)),
    "causal, T > S": (MIXED, lambda: Call(**sized(T=50, S=20), is_causal=True)),
    "bottom right, T < S": (
        SMALL,
        lambda: Call(**sized(T=20, S=50), is_causal=True, causal_alignment="bottom_right"),
    ),
    "bottom right, T > S": (
        MIXED,
        lambda: Call(**sized(T=50, S=20), is_causal=True, causal_alignment="bottom_right"),
    ),
    "window": (MIXED, lambda: Call(**sized(T=61, S=61), local_window_size=(5, 9))),
    "wide window": (SMALL, lambda: Call(**sized(T=70, S=70), local_window_size=(34, 20))),
    "causal window": (
        SMALL,
        lambda: Call(**sized(T=50, S=60), is_causal=True, local_window_size=(7, None)),
    ),
    "segments": (SMALL, lambda: Call(**sized(S=37), segment_ids=ids(2, 37))),
    "segments, one": (ONE, lambda: Call(**sized(S=37), segment_ids=ids(2, 37))),
    "segments, not sorted": (MIXED, lambda: Call(**sized(), segment_ids=(mixed_ids(2, 37), ids(2, 45)))),
    "segments, causal": (SMALL, lambda: Call(**sized(S=37), segment_ids=ids(2, 37), is_causal=True)),
    "key lengths": (
        SMALL,
        lambda: Call(**sized(lead=(4,)), key_value_seq_lengths=np.array([45, 0, 17, 32])),
    ),
    "query lengths": (SMALL, lambda: Call(**sized(lead=(3,)), query_seq_lengths=np.array([0, 32, 5]))),
    "both lengths, one": (
        ONE,
        lambda: Call(
            **sized(lead=(3,)),
            query_seq_lengths=np.array([0, 32, 5]),
            key_value_seq_lengths=np.array([45, 0, 17]),
        ),
    ),
    "prefix": (SMALL, lambda: Call(**sized(S=37), mask=masks.PrefixLM([20, 3]))),
    "block diagonal": (SMALL, lambda: Call(**sized(), mask=masks.BlockDiagonal(11))),
    "block diagonal of tiles": (SMALL, lambda: Call(**sized(T=48, S=48), mask=masks.BlockDiagonal(16))),
    "dense mask": (SMALL, lambda: Call(**sized(), mask=hidden(2, 1, 37, 45))),
    "dense mask, one": (ONE, lambda: Call(**sized(), mask=hidden(1, 2, 37, 45))),
    "dense mask of keys": (SMALL, lambda: Call(**sized(), mask=hidden(2, 1, 1, 45))),
    "dense mask, mostly nothing": (SMALL, lambda: Call(**sized(), mask=hidden(1, 1, 37, 45, above=-3.1))),
    "dense mask per kv head": (SMALL, lambda: Call(**sized(N=4, K=2), mask=hidden(2, 2, 37, 45))),
    "nested": (
        SMALL,
        lambda: Call(
            **sized(T=40, S=40),
            mask=~(masks.Segments(ids(2, 40)) & ~masks.SlidingWindow(3, 3)) | masks.BlockDiagonal(5),
        ),
    ),
    "function": (SMALL, lambda: Call(**sized(), mask=masks.MaskFunction(striped))),
    "function, a band": (SMALL, lambda: Call(**sized(), mask=masks.MaskFunction(causal))),
    "function of head": (MIXED, lambda: Call(**sized(), mask=masks.MaskFunction(by_head, np.array([3, 30])))),
    "function of documents": (
        SMALL,
        lambda: Call(**sized(S=37), mask=masks.MaskFunction(documents, ids(2, 37))),
    ),
    "bias": (SMALL, lambda: Call(**sized(), bias=normal(2, 2, 37, 45))),
    "bias, shared batch": (MIXED, lambda: Call(**sized(), bias=normal(1, 2, 37, 45), is_causal=True)),
    "bias, shared heads": (SMALL, lambda: Call(**sized(), bias=normal(2, 1, 37, 45))),
    "bias of keys": (SMALL, lambda: Call(**sized(), bias=normal(1, 2, 1, 45))),
    "bias of queries": (SMALL, lambda: Call(**sized(), bias=normal(2, 1, 37, 1), is_causal=True)),
    "bias, one number": (SMALL, lambda: Call(**sized(), bias=normal(1, 1, 1, 1), local_window_size=4)),
    "bias per kv head": (MIXED, lambda: Call(**sized(N=4, K=2), bias=normal(2, 2, 37, 45))),
    "bias that hides": (
        SMALL,
        lambda: Call(**sized(), bias=np.where(hidden(2, 1, 37, 45), normal(2, 1, 37, 45), -np.inf)),
    ),
    "alibi": (SMALL, lambda: Call(**sized(), bias=biases.ALiBi(np.array([0.3, 0.01])), is_causal=True)),
    "relative position": (MIXED, lambda: Call(**sized(), bias=biases.RelativePosition(normal(2, 20)))),
    "head scale": (SMALL, lambda: Call(**sized(N=4, K=2), bias=biases.HeadScale(normal(4)))),
    "traced scale": (SMALL, lambda: Call(**sized(), scale=0.7, is_causal=True)),
    "soft cap": (SMALL, lambda: Call(**sized(), logits_soft_cap=0.8)),
    "soft cap, causal": (MIXED, lambda: Call(**sized(), bias=biases.SoftCap(0.8), is_causal=True)),
    "sinks": (SMALL, lambda: Call(**sized(), sinks=normal(2))),
    "sinks, causal": (ONE, lambda: Call(**sized(N=4, K=2), sinks=normal(4), is_causal=True)),
    "sinks, nothing seen": (
        SMALL,
        lambda: Call(**sized(), sinks=normal(2), key_value_seq_lengths=np.array([0, 20])),
    ),
    "score function": (SMALL, lambda: Call(**sized(), bias=biases.gated_score(normal(2), normal(45)))),
    "score function, pairs": (
        MIXED,
        lambda: Call(**sized(), bias=biases.pair_bias(normal(2, 37, 45)), is_causal=True),
    ),
    "score function, table": (SMALL, lambda: Call(**sized(), bias=biases.distance_table(normal(2, 30)))),
    "everything": (
        SMALL,
        lambda: Call(
            **sized(N=4, K=2),
            bias=biases.HeadScale(1 + normal(4)) + biases.ALiBi(abs(normal(4)))
            + biases.Dense(normal(1, 2, 37, 1)),
            logits_soft_cap=5.0,
            sinks=normal(4),
            scale=0.8,
            is_causal=True,
        ),
    ),
    "grouped": (SMALL, lambda: Call(**sized(N=6, K=2))),
    "grouped, one": (ONE, lambda: Call(**sized(N=6, K=2), is_causal=True)),
    "one kv head": (MIXED, lambda: Call(**sized(N=3, K=1), is_causal=True)),
    "D 30": (SMALL, lambda: Call(**sized(D=30))),
    "D 33": (SMALL, lambda: Call(**sized(D=33), is_causal=True)),
    "D 80": (ONE, lambda: Call(**sized(D=80))),
    "V > D": (SMALL, lambda: Call(**sized(D=8, V=33), is_causal=True)),
    "V < D": (ONE, lambda: Call(**sized(D=33, V=5))),
    "no batch": (SMALL, lambda: Call(**sized(lead=()), is_causal=True)),
    "two batch axes": (
        SMALL,
        lambda: Call(**sized(lead=(2, 3)), bias=normal(2, 1, 1, 37, 45), mask=hidden(1, 3, 1, 37, 45)),
    ),
}  # fmt: skip

# Whose parts other cases have.
SLOW = (
    "plain, uneven",
    "causal, tall",
    "one row",
    "causal, T < S",
    "wide window",
    "segments, one",
    "segments, causal",
    "query lengths",
    "dense mask, one",
    "dense mask, mostly nothing",
    "dense mask per kv head",
    "block diagonal of tiles",
    "bias, shared heads",
    "bias, one number",
    "soft cap, causal",
    "sinks, nothing seen",
    "score function, table",
    "one kv head",
    "V < D",
    "D 80",
    "bias of queries",
    "function of documents",
    "block diagonal",
    "dense mask of keys",
    "function of head",
    "causal, wide",
    "alibi",
    "bias, shared batch",
    "score function, pairs",
    "D 30",
    "window",
    "bias per kv head",
    "no batch",
    "causal window",
    "function, a band",
    "segments",
    "causal, T > S",
    "both lengths, one",
    "soft cap",
    "traced scale",
    "relative position",
    "causal, one",
    "bottom right, T > S",
    "sinks",
    "bias",
    "grouped, one",
    "plain",
)


def cases():
    assert set(SLOW) <= set(CASES)
    return [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CASES]


@pytest.mark.parametrize("case", cases())
def test_value_and_gradients(case):
    """Gradients under cotangents of both the output and the log-sum-exp."""
    blocks, call = CASES[case]
    with gpu_triton.forced(blocks):
        check("interpret", call(), tolerance=4e-6)


def test_which_kernels_run(launched):
    with gpu_triton.forced(SMALL):
        check("interpret", Call(**sized(N=4, K=2), bias=normal(1, 1, 37, 45)), tolerance=4e-6)
    # Three tiles each way: per query head, per key/value head, and for the bias all pairs of tiles.
    assert launched == [("forward", 24), ("query", 24), ("key", 12), ("bias", 9)]
    launched.clear()
    with gpu_triton.forced(ONE):
        check("interpret", Call(**sized(N=4, K=2)), tolerance=4e-6)
    assert launched == [("forward", 24), ("one", 4)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ["causal", pytest.param("everything", marks=pytest.mark.slow)])
def test_half_types(case, dtype):
    blocks, call = CASES[case]
    with gpu_triton.forced(blocks):
        check("interpret", call(), dtype)


def test_a_causal_mask_as_a_function_is_a_band():
    call = Call(**sized(), mask=masks.MaskFunction(causal))
    arrays = [jnp.asarray(x, "float32") for x in (call.query, call.key, call.value)]
    (step,) = lower(*prepare(*arrays, None, call.mask.object()), functions=True).mask
    assert (step.op, step.b) == (MaskOp.BAND, 0)
    with gpu_triton.forced(SMALL):
        one = solve("interpret", call)
        two = solve("interpret", Call(**sized(), is_causal=True))
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_a_soft_cap_that_is_an_array():
    """Its gradient is a number per head: summed from tiles of both kinds."""
    q, k, v = (jnp.asarray(x, "float32") for x in sized().values())

    def value(cap, implementation):
        bias = probjax.biases.SoftCap(cap)
        return (
            probjax.dot_product_attention(q, k, v, bias, is_causal=True, implementation=implementation) ** 2
        ).sum()

    with gpu_triton.forced(SMALL):
        got = jax.jit(jax.value_and_grad(lambda c: value(c, "interpret")))(jnp.float32(0.7))
    want = jax.value_and_grad(lambda c: value(c, "reference"))(jnp.float32(0.7))
    agree(got[0], want[0], 1e-5)
    agree(got[1], want[1], 1e-4)


# ----------------------------------------------------------------------------------------------------------
# Dropout


def kept(implementation, call, rate, key):
    """The dropout mask (B, N, T, S), read off the output with one-hot values and equal scores."""
    z = call.sizes
    q, k = jnp.zeros((z.B, z.T, z.N, 1)), jnp.zeros((z.B, z.S, z.N, 1))
    value = jnp.broadcast_to(jnp.eye(z.S)[None, :, None, :], (z.B, z.S, z.N, z.S))
    out = probjax.dot_product_attention(
        q, k, value, dropout_rate=rate, dropout_key=key, implementation=implementation
    )
    return np.moveaxis(np.asarray(out), 2, 1) > 0


@pytest.mark.parametrize("blocks", [pytest.param(MIXED, marks=pytest.mark.slow), ONE], ids=["two", "one"])
def test_dropout(blocks):
    call, key = Call(**sized(N=4, K=2), is_causal=True), jax.random.key(3)
    keep = kept("reference", call, 0.4, key)
    with gpu_triton.forced(blocks):
        got = solve("interpret", call, dropout=(0.4, key))
    compare(got, expected(call, keep=keep, rate=0.4), 4e-6, call)


# ----------------------------------------------------------------------------------------------------------
# NaN and infinity behind a mask


def placed(call_arrays, where, position, garbage):
    arrays = {name: x.copy() for name, x in call_arrays.items()}
    arrays[where][:, position] = garbage
    return arrays


HIDING = {
    "lengths": {"key_value_seq_lengths": np.array([45, 20])},
    "segments": {
        "segment_ids": (
            np.repeat([[0, 1, 2, 0]], 2, 0).repeat(12, 1)[:, :37],
            np.repeat([[0, 1, 3, 1]], 2, 0).repeat(12, 1)[:, :45],
        )
    },
    "causal": {"is_causal": True},
}


@pytest.mark.parametrize("blocks", [MIXED, ONE], ids=["two", "one"])
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize(
    "hiding", ["segments", *(pytest.param(x, marks=pytest.mark.slow) for x in ("lengths", "causal"))]
)
@pytest.mark.parametrize("garbage", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
def test_garbage_that_is_hidden(garbage, hiding, where, blocks):
    """In keys 30 ... 33, which is inside a tile, and which nothing or only some of the queries see."""
    arrays = placed(sized(), where, slice(30, 34), garbage)
    with gpu_triton.forced(blocks):
        check("interpret", Call(**arrays, **HIDING[hiding]), tolerance=4e-6)


@pytest.mark.parametrize("blocks", [SMALL, ONE], ids=["two", "one"])
def test_garbage_in_queries_that_see_nothing(blocks):
    arrays = placed(sized(), "query", slice(30, 33), np.nan)
    lengths = {"query_seq_lengths": np.array([30, 12])}
    with gpu_triton.forced(blocks):
        got = check("interpret", Call(**arrays, **lengths), tolerance=4e-6)
    assert all(np.isfinite(got[name]).all() for name in ("out", "query", "key", "value"))


@pytest.mark.parametrize("blocks", [SMALL, ONE], ids=["two", "one"])
@pytest.mark.parametrize("where", ["query", "key", pytest.param("value", marks=pytest.mark.slow), "ct"])
def test_garbage_reaches_only_what_sees_it(where, blocks):
    """Causal, at an entry inside a tile; what does see it is NaN."""
    arrays, ct, ct_lse = sized(S=37), normal(2, 37, 2, 8, seed="ct"), np.zeros((2, 37, 2))
    (ct if where == "ct" else arrays[where])[0, 20] = np.nan
    call = Call(**arrays, is_causal=True)

    @jax.jit
    def run(arrays, ct):
        def attend(q, k, v):
            return probjax.dot_product_attention(q, k, v, is_causal=True, implementation="interpret")

        out, pull = jax.vjp(attend, *arrays)
        return out, *pull(ct)

    with gpu_triton.forced(blocks):
        got = run(tuple(jnp.asarray(x, "float32") for x in arrays.values()), jnp.asarray(ct, "float32"))
    call, ct = cast(call, "float32"), rounded(ct, "float32")
    want = {"out": forward(call).out, **gradients(call, ct, ct_lse)}
    for name, x in zip(("out", "query", "key", "value"), got, strict=True):
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(want[name]), err_msg=name)
        agree(x, want[name], 4e-6, name=name)
        assert np.isfinite(x[1]).all()  # the other batch entry


@pytest.mark.parametrize("where", ["key", "value"])
def test_garbage_in_tangents(where):
    """Forward mode: a hidden NaN stays hidden, in a tile that other queries see."""
    call = Call(**placed(sized(S=37), where, slice(20, 21), np.nan), is_causal=True)
    got, want = both_tangents(call, ("query", "key", "value"))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y))
        agree(np.nan_to_num(x), np.nan_to_num(y), 4e-6)
    assert np.isfinite(got[0][:, :20]).all()


def test_garbage_in_a_bias_array():
    bias = normal(1, 2, 37, 45)
    bias[..., 30:] = np.nan
    with gpu_triton.forced(SMALL):
        got = check(
            "interpret", Call(**sized(), bias=bias, key_value_seq_lengths=np.array([30, 12])), tolerance=4e-6
        )
    assert np.isfinite(got["bias"]).all()


# ----------------------------------------------------------------------------------------------------------
# Transformations


def both_tangents(call, moving, names=("interpret", "tiled"), **options):
    """Tangents of output and log-sum-exp by two implementations."""
    arrays = {name: jnp.asarray(getattr(call, name), "float32") for name in ("query", "key", "value")}
    if call.sinks is not None:
        arrays["sinks"] = jnp.asarray(call.sinks, "float32")
    if call.bias is not None:
        arrays["bias"] = jnp.asarray(call.bias, "float32")
    mask = None if call.mask is None else call.mask.object()
    moves = {name: jnp.asarray(normal(*arrays[name].shape, seed="move"), "float32") for name in moving}
    found = []
    for name in names:

        def attend(part, name=name):
            return probjax.dot_product_attention(
                **{**arrays, **part},
                mask=mask,
                is_causal=call.is_causal,
                implementation=name,
                return_residual=True,
                **options,
            )

        with gpu_triton.forced(SMALL):
            run = jax.jit(lambda p, m, attend=attend: jax.jvp(attend, (p,), (m,))[1])
            found.append(run({name: arrays[name] for name in moving}, moves))
    return found


TANGENTS = {
    "all, causal": (lambda: Call(**sized(), is_causal=True), ("query", "key", "value"), {}),
    "query": (lambda: Call(**sized()), ("query",), {}),
    "key": (lambda: Call(**sized()), ("key",), {}),
    "value": (lambda: Call(**sized(), mask=masks.BlockDiagonal(11)), ("value",), {}),
    "bias and sinks": (
        lambda: Call(**sized(N=4, K=2), bias=normal(1, 2, 37, 45), sinks=normal(4)),
        ("query", "bias", "sinks"),
        {"logits_soft_cap": 2.0},
    ),
    "dropout": (
        lambda: Call(**sized()),
        ("query", "key", "value"),
        {"dropout_rate": 0.3, "dropout_key": jax.random.key(1)},
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] if c in ("query", "key") else []) for c in TANGENTS]
)
def test_tangents(case, launched):
    call, moving, options = TANGENTS[case]
    got, want = both_tangents(call(), moving, **options)
    assert ("tangent", 2 * call().sizes.N * 3) in launched
    for x, y in zip(got, want, strict=True):
        assert np.isfinite(x).all()
        agree(x, y, 1e-5)


def test_tangent_of_the_gradient():
    arrays = tuple(jnp.asarray(x, "float32") for x in sized(S=37).values())
    moves = tuple(jnp.asarray(normal(*x.shape, seed="move"), "float32") for x in arrays)

    def second(name):
        def value(*arrays):
            out = probjax.dot_product_attention(*arrays, is_causal=True, implementation=name)
            return (out**2).sum()

        return jax.jit(lambda: jax.jvp(jax.grad(value, (0, 1, 2)), arrays, moves))()

    with gpu_triton.forced(SMALL):
        got = second("interpret")
    want = second("reference")
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.isfinite(x).all()
        agree(x, y, 2e-5)


def test_vmap():
    """Over queries and masks, with shared keys: the shared arrays are read with a batch axis of size 1."""
    a = sized(lead=(3, 2))
    mask = jnp.asarray(hidden(3, 37, 45))
    shared = {name: jnp.asarray(a[name][0], "float32") for name in ("key", "value")}

    def attend(name, q, k, v, mask):
        return probjax.dot_product_attention(q, k, v, mask=mask, implementation=name)

    def value(name, q, k, v):
        run = jax.vmap(functools.partial(attend, name), (0, None, None, 0))
        out = run(q, k, v, mask)
        return (out**2).sum(), out

    q = jnp.asarray(a["query"], "float32")
    grads = [
        jax.jit(jax.grad(functools.partial(value, n), (0, 1, 2), has_aux=True))
        for n in ("interpret", "reference")
    ]
    with gpu_triton.forced(SMALL):
        got = grads[0](q, shared["key"], shared["value"])
    want = grads[1](q, shared["key"], shared["value"])
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        agree(x, y, 1e-5)


@pytest.mark.parametrize("bias", [biases.RelativePosition(normal(2, 20)), biases.ALiBi(np.array([0.3, 0.1]))])
def test_a_bias_by_distance_some_rows_at_a_time(bias, monkeypatch, launched):
    """Its gradient goes through a scratch array of some rows, here one tile at a time."""
    call = Call(**sized(), bias=bias, is_causal=True)
    program = lower(
        *prepare(*(jnp.asarray(x, "float32") for x in sized().values()), bias.object(), None, is_causal=True),
        functions=True,
    )
    assert [step.op for step in program.score] == [ScoreOp.ADD_DIAGONAL]
    monkeypatch.setattr(gpu_triton, "PAIR_BUFFER", 1)
    with gpu_triton.forced(SMALL):
        check("interpret", call, tolerance=4e-6)
    heads = 2
    assert [n for name, n in launched if name == "bias"] == [heads * 3]  # of one row of tiles, in a loop


# ----------------------------------------------------------------------------------------------------------
# What they decline, and plans


def attend(implementation="interpret", dtype="float32", D=8, **options):
    arrays = (jnp.asarray(x, dtype) for x in qkv((1,), 4, 4, 1, D=D).values())
    return probjax.dot_product_attention(*arrays, implementation=implementation, **options)


def test_float64_is_declined(x64):
    with pytest.raises(NotImplementedError, match="'interpret' cannot run this call: float64"):
        attend(dtype="float64")


def test_large_heads_are_declined():
    with pytest.raises(NotImplementedError, match="heads of size 512, more than 256"):
        attend(D=512)


def test_the_kernels_for_a_gpu_are_not_there_without_one():
    if jax.default_backend() != "gpu":
        with pytest.raises(
            NotImplementedError, match="'triton' cannot run this call: it runs on NVIDIA GPUs"
        ):
            attend("triton")


def test_a_precision_that_they_do_not_have():
    with pytest.raises(NotImplementedError, match="want 'default', 'high' or 'highest'"):
        attend(precision=jax.lax.DotAlgorithmPreset.F64_F64_F64)


def test_plan():
    arrays = (jnp.zeros((2, 40, 2, 8)), jnp.zeros((2, 50, 2, 8)), jnp.zeros((2, 50, 2, 8)))
    plan = probjax.attention_plan(*arrays, is_causal=True, implementation="interpret")
    assert plan.implementation == "interpret"
    assert "named by the caller" in plan.reason
    assert (plan.q_tile, plan.kv_tile) == (64, 64)
    plan = probjax.attention_plan(*arrays)
    assert plan.implementation != "interpret"


@pytest.mark.parametrize("sizes", [{"T": 0}, {"S": 0}, {"lead": (0,)}], ids=str)
def test_nothing_to_do(sizes):
    check("interpret", Call(**sized(**sizes)))


# ----------------------------------------------------------------------------------------------------------
# Mending another library's forward


def exact(arrays, dtype="float16", **options):
    """The right output and log-sum-exp in float64 from operands of this dtype."""
    rounded = {n: np.asarray(jnp.asarray(x, dtype)).astype(float) for n, x in arrays.items()}
    return forward(Call(**rounded, **options))


def mended(arrays, outputs, step, dtype="float16", **options):
    operands = tuple(jnp.asarray(arrays[n], dtype) for n in ("query", "key", "value"))
    given = jnp.asarray(outputs[0], dtype), jnp.asarray(outputs[1], "float32")

    @jax.jit
    def run(operands, given):
        call, _ = prepare(*operands, None, None, **options)
        return gpu_triton.repaired(call, operands, given, step, interpret=True)

    return run(operands, given)


CAUSAL = {
    "causal": ({"is_causal": True}, None),
    "window": ({"is_causal": True, "local_window_size": (9, None)}, 10),
    "own key": ({"is_causal": True, "local_window_size": (0, None)}, 1),
}


@pytest.mark.parametrize("garbage", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("mask", CAUSAL)
def test_repaired(mask, where, garbage):
    """What leaked into rows before and after those that see the garbage is taken out."""
    options, step = CAUSAL[mask]
    T = 75
    for position in (3, 40, 74) if where == "value" else (40,):
        arrays = qkv((2,), T, T, 2, D=8)
        arrays[where][1, position] = garbage
        want = exact(arrays, **options)
        out, lse = want.out.copy(), want.lse.copy()
        if where != "query":
            # As from tiles of 64 queries and keys: all rows of the tiles with some row that sees the garbage.
            seen = Call(**arrays, **options).visible()[0, 0][:, position].nonzero()[0]
            first, stop = seen.min() // 64 * 64, (seen.max() // 64 + 1) * 64
            spoilt = [i for i in range(first, min(stop, T)) if i not in seen]
            out[1, spoilt] = np.nan
            if where == "key":
                lse[1, spoilt] = np.nan
        got = mended(arrays, (out, lse), T if step is None else step, **options)
        for x, y, tolerance in zip(got, (want.out, want.lse), (2e-3, 2e-5), strict=True):
            x = np.asarray(x, float)
            np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y))
            agree(np.nan_to_num(x, posinf=0, neginf=0), np.nan_to_num(y, posinf=0, neginf=0), tolerance)


@pytest.mark.parametrize("mask", CAUSAL)
def test_repaired_leaves_alone_what_is_finite(mask):
    options, step = CAUSAL[mask]
    arrays = qkv((2,), 75, 75, 2, D=8)
    out, lse = normal(2, 75, 2, 8), normal(2, 75, 2)
    got = mended(arrays, (out, lse), 75 if step is None else step, **options)
    np.testing.assert_array_equal(got[0], jnp.asarray(out, "float16"))
    np.testing.assert_array_equal(got[1], jnp.asarray(lse, "float32"))


@pytest.mark.parametrize("sizes", [{"T": 70, "S": 40}, {"T": 9, "S": 9, "N": 4, "K": 2}], ids=str)
def test_repaired_at_other_sizes(sizes):
    arrays = qkv((1,), D=8, **sizes)
    arrays["value"][:, 7] = np.nan
    want = exact(arrays, is_causal=True)
    out = want.out.copy()
    out[:, :7] = np.nan
    got = mended(arrays, (out, want.lse), sizes["T"], is_causal=True)
    np.testing.assert_array_equal(np.isfinite(got[0]), np.isfinite(want.out))
    agree(np.nan_to_num(got[0].astype(float)), np.nan_to_num(want.out), 2e-3)
    agree(got[1], want.lse, 2e-5)
