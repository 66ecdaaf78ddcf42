"""Acceptance cases K: dropout that is a function of (key, batch, head, query, kv) only, and determinism."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probjax
from oracle import AVAILABLE, Call, agree, biases, cases, compare, expected, masks, normal, qkv, solve

KEY = jax.random.key(7)


def kept(implementation, *, B=2, T=6, S=7, N=2, rate=0.4, key=KEY, **options):
    """The dropout mask (B, N, T, S), read off the output with one-hot values and equal scores."""
    q, k = jnp.zeros((B, T, N, 1)), jnp.zeros((B, S, N, 1))
    value = jnp.broadcast_to(jnp.eye(S)[None, :, None, :], (B, S, N, S))
    out = probjax.dot_product_attention(
        q, k, value, dropout_rate=rate, dropout_key=key, implementation=implementation, **options
    )
    return np.moveaxis(np.asarray(out), 2, 1) > 0


def same(implementation, call, dtype="float32", rate=0.4):
    """Value and gradients with dropout against the oracle with the mask that the package uses."""
    sizes = call.sizes
    keep = kept(implementation, B=sizes.B, T=sizes.T, S=sizes.S, N=sizes.N, rate=rate)
    got = solve(implementation, call, dtype, dropout=(rate, KEY))
    compare(got, expected(call, dtype, keep=keep, rate=rate), 2e-6 if dtype == "float32" else 2e-14, call)
    return got


CALLS = {
    "plain": lambda: Call(**qkv()),
    "causal": lambda: Call(**qkv(T=7), is_causal=True),
    "grouped": lambda: Call(**qkv(N=4, K=2)),
    "two-batch-axes": lambda: Call(**qkv((2, 3))),
    "unbatched": lambda: Call(**qkv(())),
    "bias-and-sinks": lambda: Call(**qkv(), bias=normal(1, 2, 6, 7), sinks=normal(2)),
    "mask-with-empty-rows": lambda: Call(**qkv(), mask=normal(2, 1, 6, 7) > 0.8),
    "function": lambda: Call(**qkv(), bias=biases.gated_score(normal(2), normal(7)), mask=masks.Causal()),
    "several-tiles": lambda: Call(**qkv((1,), 530, 600, 2)),
}


@pytest.mark.parametrize("case", cases(CALLS, "function"))
def test_value_and_gradients(implementation, case):
    same(implementation, CALLS[case]())


def test_float64(implementation):
    same(implementation, CALLS["bias-and-sinks"](), "float64")


@pytest.mark.parametrize(
    "sizes", [{}, {"T": 530, "S": 600, "B": 1}, {"B": 3, "N": 1, "T": 1, "S": 40}], ids=str
)
def test_k2_every_implementation_draws_the_same_mask(sizes):
    first, *others = (kept(name, **sizes) for name in AVAILABLE)
    for other in others:
        np.testing.assert_array_equal(first, other)


def test_k2_outputs_agree():
    first, *others = (solve(name, Call(**qkv((2,), 3, 4, 2, D=8)), dropout=(0.4, KEY)) for name in AVAILABLE)
    for other in others:
        for name in ("out", "query", "key", "value"):
            agree(other[name], first[name], 2e-6, name=name)


def test_mask_does_not_depend_on_the_other_sizes(implementation):
    """A longer array, more heads or a larger batch only add entries, so tiles and padding cannot matter."""
    large = kept(implementation, B=3, T=9, S=12, N=4)
    np.testing.assert_array_equal(kept(implementation, B=2, T=6, S=7, N=2), large[:2, :2, :6, :7])


def test_mask_is_the_same_whatever_the_call_looks_like(implementation):
    plain = kept(implementation)
    causal = np.tril(np.ones((6, 7), bool))
    np.testing.assert_array_equal(kept(implementation, is_causal=True), plain & causal)
    window = np.asarray(probjax.masks.SlidingWindow(1, 1).dense(6, 7)).reshape(6, 7)
    np.testing.assert_array_equal(kept(implementation, local_window_size=1), plain & window)


def test_mask_looks_random(implementation):
    """Rate, and no repetition over batch, heads, queries or keys."""
    keep = kept(implementation, B=8, T=64, S=64, N=4, rate=0.3)
    count = keep.size
    assert abs(keep.mean() - 0.7) < 5 * np.sqrt(0.21 / count)
    for axis in range(4):
        halves = np.split(keep, 2, axis)
        for one, two in ((halves[0], halves[1]), (keep, np.roll(keep, 1, axis))):
            correlation = np.corrcoef(one.ravel(), two.ravel())[0, 1]
            assert abs(correlation) < 6 / np.sqrt(one.size), f"axis {axis}"
    for axes in ((0, 1, 2), (0, 1, 3), (1, 2, 3), (0, 2, 3)):
        rates = keep.mean(axes)
        assert abs(rates - 0.7).max() < 6 * np.sqrt(0.21 * rates.size / count)


def test_k8_a_new_key_gives_a_new_mask_without_a_new_trace(implementation):
    traces = []
    x = jnp.asarray(normal(2, 6, 2, 4), jnp.float32)

    @jax.jit
    def attend(key):
        traces.append(None)
        return probjax.dot_product_attention(
            x, x, x, dropout_rate=0.5, dropout_key=key, implementation=implementation
        )

    outs = [attend(key) for key in jax.random.split(KEY, 4)]
    for i, one in enumerate(outs):
        for other in outs[:i]:
            assert np.abs(one - other).max() > 1e-3
    assert len(traces) == 1
    np.testing.assert_array_equal(attend(jax.random.split(KEY, 4)[2]), outs[2])


def test_raw_and_typed_keys(implementation):
    """A key made by jax.random.PRNGKey means the same as the typed key with its data."""
    raw = jax.random.PRNGKey(7)
    np.testing.assert_array_equal(kept(implementation, key=raw), kept(implementation, key=jax.random.key(7)))


def test_every_bit_of_the_key_counts(implementation):
    base = kept(implementation)
    for seed in (8, 7 + 2**31, 2**31 - 1):
        assert (kept(implementation, key=jax.random.key(seed)) != base).any()
    data = jax.random.key_data(KEY)
    high = jax.random.wrap_key_data(data.at[0].set(data[0] ^ 1))
    assert (kept(implementation, key=high) != base).any()


def test_k4_the_mean_is_preserved(implementation):
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in qkv().items()}
    exact = probjax.dot_product_attention(**arrays, implementation=implementation)

    @jax.jit
    def mean(keys):
        def one(total, key):
            out = probjax.dot_product_attention(
                **arrays, dropout_rate=0.25, dropout_key=key, implementation=implementation
            )
            return total + out, None

        return jax.lax.scan(one, jnp.zeros_like(exact), keys)[0] / len(keys)

    got = mean(jax.random.split(KEY, 4000))
    spread = np.abs(np.asarray(arrays["value"])).max() * np.sqrt(0.25 / 0.75 / 4000)
    assert np.abs(got - exact).max() < 4 * spread


def test_log_sum_exp_is_that_without_dropout(implementation):
    one = solve(implementation, Call(**qkv()), differentiate=False, dropout=(0.9, KEY))
    two = solve(implementation, Call(**qkv()), differentiate=False)
    agree(one["lse"], two["lse"], 1e-7)


def test_k5_rates_at_the_ends(implementation):
    call = Call(**qkv())
    none = solve(implementation, call, dropout=(0.0, KEY))
    agree(none["out"], solve(implementation, call)["out"], 1e-7)
    every = solve(implementation, call, dropout=(1.0, KEY))
    for name in ("out", "value"):
        assert (every[name] == 0).all()
    assert np.isfinite(every["query"]).all()
    compare(every, expected(call, keep=np.zeros((2, 2, 6, 7)), rate=1.0), 2e-6, call)


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan"), float("inf")])
def test_k5_rates_out_of_range(implementation, rate):
    x = np.zeros((1, 2, 1, 4), np.float32)
    with pytest.raises(ValueError, match="dropout_rate"):
        probjax.dot_product_attention(
            x, x, x, dropout_rate=rate, dropout_key=KEY, implementation=implementation
        )


def test_k6_off_means_off(implementation):
    x = jnp.asarray(normal(1, 5, 1, 1), jnp.float32)
    outs = [
        probjax.dot_product_attention(x, x, x, implementation=implementation, **options)
        for options in ({}, {"dropout_rate": 0.0}, {"dropout_key": KEY}, {"dropout_key": jax.random.key(1)})
    ]
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


def test_a_rate_without_a_key_raises(implementation):
    x = np.zeros((1, 2, 1, 4), np.float32)
    with pytest.raises(ValueError, match="dropout_key"):
        probjax.dot_product_attention(x, x, x, dropout_rate=0.1, implementation=implementation)


def attend(arrays, key, implementation):
    return probjax.dot_product_attention(
        **arrays, dropout_rate=0.5, dropout_key=key, implementation=implementation
    )


@pytest.mark.parametrize("what", ["arrays", "keys", "both"])
def test_vmap_equals_the_loop(implementation, what):
    """Each call of a vmap draws as it would alone, with the shared key or its own."""
    one = {name: jnp.asarray(x, jnp.float32) for name, x in qkv().items()}
    many = {name: jnp.stack([x, x[::-1], 2 * x]) for name, x in one.items()}
    keys = jax.random.split(KEY, 3)
    arrays_axis, key_axis = {"arrays": (0, None), "keys": (None, 0), "both": (0, 0)}[what]
    arrays, key = one if arrays_axis is None else many, KEY if key_axis is None else keys

    def loss(arrays, key):
        out = attend(arrays, key, implementation)
        return (out**2).sum(), out

    run = jax.value_and_grad(loss, has_aux=True)
    (_, outs), grads = jax.jit(jax.vmap(run, (arrays_axis, key_axis)))(arrays, key)
    for i in range(3):
        own = one if arrays_axis is None else {name: x[i] for name, x in many.items()}
        (_, out), grad = run(own, KEY if key_axis is None else keys[i])
        agree(outs[i], out, 2e-6)
        for name in own:
            agree(grads[name][i], grad[name], 4e-6, name=name)


def test_remat_and_scan_keep_the_mask(implementation):
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in qkv().items()}

    def loss(arrays):
        return (attend(arrays, KEY, implementation) ** 2).sum()

    want = jax.jit(jax.grad(loss))(arrays)
    got = jax.jit(jax.grad(jax.checkpoint(loss)))(arrays)
    for name in arrays:
        agree(got[name], want[name], 1e-6, name=name)

    def layer(x, key):
        return attend({**arrays, "query": x}, key, implementation), None

    keys = jax.random.split(KEY, 2)
    scanned = jax.jit(lambda x: jax.lax.scan(jax.checkpoint(layer), x, keys)[0])(arrays["query"])
    looped = layer(layer(arrays["query"], keys[0])[0], keys[1])[0]
    agree(scanned, looped, 2e-6)


@pytest.mark.parametrize("order", ["jvp", "hvp"])
def test_forward_and_second_derivatives_use_the_mask(implementation, order, x64):
    """Against the mask applied by hand to a dense softmax."""
    arrays = {name: jnp.asarray(x) for name, x in qkv((1,), 4, 5, 1, D=3).items()}
    keep = kept(implementation, B=1, T=4, S=5, N=1, rate=0.5)

    def dense(arrays):
        score = jnp.einsum("btnd,bsnd->bnts", arrays["query"], arrays["key"]) / jnp.sqrt(3.0)
        weights = jax.nn.softmax(score) * keep * 2
        return jnp.einsum("bnts,bsnv->btnv", weights, arrays["value"])

    tangents = {name: jnp.asarray(normal(*x.shape, seed="tangent")) for name, x in arrays.items()}

    def derivative(function):
        if order == "jvp":
            return jax.jvp(function, (arrays,), (tangents,))[1]
        return jax.jvp(jax.grad(lambda a: (function(a) ** 3).sum()), (arrays,), (tangents,))[1]

    got = jax.jit(lambda: derivative(lambda a: attend(a, KEY, implementation)))()
    jax.tree.map(lambda a, b: agree(a, b, 1e-12), got, derivative(dense))


DETERMINISTIC = {
    "plain": {},
    "causal-dropout": {"is_causal": True, "dropout_rate": 0.1, "dropout_key": KEY},
    "segments": {"segment_ids": np.arange(700)[None] // 90},
}


@pytest.mark.parametrize("case", DETERMINISTIC)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_k1_two_runs_are_bitwise_equal(implementation, case, dtype):
    arrays = {name: jnp.asarray(x, dtype) for name, x in qkv((1,), 700, 700, 4, 2, D=16).items()}
    bias = jnp.asarray(normal(1, 4, 1, 700), dtype)

    @jax.jit
    def run(arrays, bias):
        def loss(arrays, bias):
            out = probjax.dot_product_attention(
                **arrays, bias=bias, implementation=implementation, **DETERMINISTIC[case]
            )
            return (out.astype("float32") ** 2).sum(), out

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(arrays, bias)

    first = run(arrays, bias)
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, run(arrays, bias), first)
