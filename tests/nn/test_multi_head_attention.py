"""MultiHeadAttention against NumPy, Flax and itself token by token; our attention inside others' modules."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformer_reference as reference
from flax import nnx
from nn_helpers import check_gradient, close, normal, pure, stirred, wide

import probjax
from probjax import biases, masks
from probjax.nn import MultiHeadAttention

B, T, D = 2, 11, 16

CONFIGS = {
    "plain": {},
    "no biases": {"use_bias": False},
    "grouped": {"num_kv_heads": 2},
    "one kv head": {"num_kv_heads": 1},
    "wider": {"qkv_features": 24, "out_features": 6},
    "normalized": {"normalize_qk": True},
    "rotary": {"rotary": 100.0},
    "relative": {"relative_positions": 5},
    "all": {"num_kv_heads": 2, "normalize_qk": True, "rotary": 100.0, "relative_positions": 7},
}


def make(seed=0, heads=4, features=D, **config):
    return stirred(MultiHeadAttention(heads, features, **config, rngs=nnx.Rngs(seed)))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("causal", [False, True])
def test_values(config, causal):
    layer, x = make(**config), normal((B, T, D))
    visible = np.tril(np.ones((T, T), bool)) if causal else True
    want = reference.attention(
        reference.tree(layer),
        np.asarray(x, np.float64),
        visible=visible,
        rotary=config.get("rotary"),
        relative="relative_positions" in config,
    )
    close(layer(x, is_causal=causal), want)


def test_leading_axes():
    layer, x = make(rotary=10.0), normal((3, B, T, D))
    close(layer(x), jnp.stack([layer(y) for y in x]))
    close(layer(x)[1, 1], layer(x[1, 1]))
    assert layer(x[:, :0]).shape == (3, 0, T, D)
    assert layer(x[:, :, :0]).shape == (3, B, 0, D)


def test_cross_attention_and_defaults():
    layer = make(in_kv_features=6)
    x, y, z = normal((B, T, D)), normal((B, 7, 6), 1), normal((B, 7, 6), 2)
    want = reference.attention(reference.tree(layer), np.float64(x), np.float64(y))
    close(layer(x, y), want)
    close(layer(x, y, y), want)
    assert np.abs(layer(x, y, z) - want).max() > 1e-3
    with pytest.raises(ValueError, match="inputs_v"):
        layer(x, None, z)


def test_a_mask_does_not_cancel_causality():
    layer, x = make(), normal((B, T, D))
    visible = np.tril(np.ones((T, T), bool)) & (np.arange(T) != 3)
    want = reference.attention(reference.tree(layer), np.float64(x), visible=visible)
    close(layer(x, is_causal=True, mask=masks.Dense(np.arange(T) != 3)), want)
    close(layer(x, is_causal=True, mask=jnp.asarray(np.arange(T) != 3)), want)
    close(layer(x, mask=masks.Causal() & masks.Dense(np.arange(T) != 3)), want)
    close(layer(x, is_causal=True, mask=None), layer(x, is_causal=True))


def test_biases():
    layer, x = make(), normal((B, T, D))
    added = normal((4, T, T), 3)
    want = reference.attention(reference.tree(layer), np.float64(x), added=np.float64(added))
    close(layer(x, bias=added), want)
    close(layer(x, bias=biases.Dense(added)), want)
    # A learned one of the layer, and the caller's.
    learned = make(relative_positions=5)
    want = reference.attention(reference.tree(learned), np.float64(x), added=np.float64(added), relative=True)
    close(learned(x, bias=added), want)


def test_half_types_are_kept():
    for dtype in (jnp.bfloat16, jnp.float16):
        layer, x = make(dtype=dtype, normalize_qk=True, rotary=10.0), normal((B, T, D))
        assert layer(x).dtype == layer(x.astype(dtype)).dtype == dtype
        exact = make(normalize_qk=True, rotary=10.0)(x)
        assert np.abs(np.float32(layer(x)) - exact).max() < 0.05 * np.abs(exact).max()


# ----------------------------------------------------------------------------------------------------------
# Others' modules


def test_the_same_as_flax():
    for options in ({}, {"normalize_qk": True}):
        theirs = stirred(nnx.MultiHeadAttention(4, D, **options, decode=False, rngs=nnx.Rngs(0)))
        ours = MultiHeadAttention(4, D, **options, rngs=nnx.Rngs(1))
        nnx.update(ours, nnx.state(theirs, nnx.Param))
        x = normal((B, T, D))
        close(ours(x), theirs(x))
        close(ours(x, is_causal=True), theirs(x, is_causal=True))


def test_inside_flax():
    x = normal((B, T, D))
    make = functools.partial(nnx.MultiHeadAttention, 4, D, decode=False)
    stock = make(rngs=nnx.Rngs(0))
    ours = make(attention_fn=probjax.dot_product_attention, rngs=nnx.Rngs(0))
    close(ours(x), stock(x))
    close(ours(x, is_causal=True), stock(x, is_causal=True))
    mask = normal((B, 1, T, T), 1) > -1.0
    close(ours(x, mask=mask), stock(x, mask=mask))
    # A mask of ours goes where Flax's own attention takes arrays only.
    close(ours(x, mask=masks.Causal()), stock(x, is_causal=True))
    half = make(attention_fn=probjax.dot_product_attention, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert half(x).dtype == jnp.bfloat16
    with pytest.raises(NotImplementedError, match="sow"):
        ours(x, sow_weights=True)
    with pytest.raises(TypeError, match="unheard_of"):
        probjax.dot_product_attention(*[normal((1, 4, 2, 8))] * 3, unheard_of=1)


def test_dropout_inside_flax():
    x = normal((B, T, D))
    layer = nnx.MultiHeadAttention(
        4, D, decode=False, dropout_rate=0.5, attention_fn=probjax.dot_product_attention, rngs=nnx.Rngs(0)
    )
    plain = layer(x, deterministic=True)
    once = layer(x, deterministic=False, rngs=nnx.Rngs(dropout=1))
    again = layer(x, deterministic=False, rngs=nnx.Rngs(dropout=1))
    other = layer(x, deterministic=False, rngs=nnx.Rngs(dropout=2))
    assert np.array_equal(once, again)
    assert np.abs(once - other).max() > 1e-2
    assert np.abs(once - plain).max() > 1e-2


class Attention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    out: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, heads, features, key):
        keys = jax.random.split(key, 4)
        self.query, self.key, self.value, self.out = (eqx.nn.Linear(features, features, key=k) for k in keys)
        self.heads = heads

    def __call__(self, x):  # (T, D): Equinox's modules take one example
        q, k, v = (jax.vmap(f)(x).reshape(len(x), self.heads, -1) for f in (self.query, self.key, self.value))
        y = probjax.dot_product_attention(q, k, v, is_causal=True)
        return jax.vmap(self.out)(y.reshape(x.shape))


def test_inside_equinox():
    model, x = Attention(4, D, jax.random.key(0)), normal((B, T, D))

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    value, gradient = loss(model, x)
    params = {
        name: {"kernel": np.asarray(getattr(model, name).weight).T, "bias": getattr(model, name).bias}
        for name in ("query", "key", "value", "out")
    }
    for name in ("query", "key", "value"):
        params[name] = {n: np.reshape(a, (*np.shape(a)[:-1], 4, -1)) for n, a in params[name].items()}
    params["out"]["kernel"] = params["out"]["kernel"].reshape(4, -1, D)
    want = reference.attention(params, np.float64(x), visible=np.tril(np.ones((T, T), bool)))
    close(value, np.mean(want**2))
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradient.value))


@pytest.mark.parametrize("other", [jax.nn.dot_product_attention, nnx.dot_product_attention])
def test_others_functions_through_the_hook(other):
    x, added = normal((B, T, D)), normal((4, T, T), 3)
    theirs, ours = make(attention_fn=other), make()
    close(theirs(x), ours(x))
    for options in (
        {"is_causal": True},
        {"mask": masks.SlidingWindow(2), "is_causal": True},
        {"bias": biases.ALiBi(np.array([0.5, 0.25, 0.1, 0.0])) + biases.Dense(added)},
        {"bias": added, "mask": np.arange(T) != 3},
        {"mask": masks.Padding(jnp.array([4, 9]))},
    ):
        close(theirs(x, **options), ours(x, **options))
    with pytest.raises(NotImplementedError, match="SoftCap"):
        theirs(x, bias=biases.SoftCap(3.0))
    dropping = make(attention_fn=other, dropout_rate=0.1)
    dropping(x)
    with pytest.raises(NotImplementedError, match="dropout"):
        dropping(x, dropout_key=jax.random.key(0))


def test_a_partial_of_ours():
    x = normal((B, T, D))
    capped = make(attention_fn=functools.partial(probjax.dot_product_attention, logits_soft_cap=2.0))
    close(capped(x), make()(x, bias=biases.SoftCap(2.0)))
    close(make(attention_fn=lambda query, key, value: value)(x), make().out(make().value(x)))


# ----------------------------------------------------------------------------------------------------------
# Decoding


def look(batch, head, query, key, ids):
    return (ids[query] == ids[key]) & (key <= query)


def tilt(score, batch, head, query, key, slope):
    return score * (1 + 0.1 * head) - slope * (query - key)


IDS = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
DECODED = {
    "causal": {"is_causal": True},
    "window": {"mask": masks.Causal() & masks.SlidingWindow(3)},
    "segments": {"is_causal": True, "mask": masks.Segments(np.stack([IDS, IDS[::-1]]))},
    "both ids": {"is_causal": True, "mask": masks.Segments(IDS, IDS)},
    "prefix": {"mask": masks.PrefixLM(np.array([2, 3]))},
    "blocks": {"mask": masks.BlockDiagonal(4) & masks.Causal()},
    "padding": {"is_causal": True, "mask": masks.Padding(normal((B, T), 5) > -0.5)},
    "lengths": {"is_causal": True, "mask": ~masks.Padding(np.array([1, 2]))},
    "dense": {"is_causal": True, "mask": normal((B, 4, T, T), 5) > -0.5},
    "per kv head": {"is_causal": True, "mask": normal((2, T, T), 5) > -0.5},
    "function": {"mask": masks.MaskFunction(look, IDS)},
    "alibi": {"is_causal": True, "bias": biases.ALiBi(np.array([0.5, 0.25, 0.1, 0.0], np.float32))},
    "relative": {"is_causal": True, "bias": biases.RelativePosition(normal((4, 5)))},
    "dense bias": {"is_causal": True, "bias": normal((4, T, T), 6)},
    "cap and scale": {
        "is_causal": True,
        "bias": biases.HeadScale(np.array([0.5, 1, 2, 1], np.float32))
        + biases.SoftCap(2.0)
        + biases.Dense(normal((T, T), 6)),
    },
    "score function": {"is_causal": True, "bias": biases.ScoreFunction(tilt, np.float32(0.3))},
}
SPLITS = [(T,), (1,) * T, (3, 1, 7), (5, 6)]


@pytest.mark.parametrize("options", DECODED.values(), ids=DECODED)
def test_decoding_equals_the_whole_call(options):
    layer, x = make(num_kv_heads=2, rotary=10.0, relative_positions=4), normal((B, T, D))
    want = layer(x, **options)
    part = jax.jit(lambda x, cache: layer(x, cache=cache, **options))
    for split in SPLITS if "mask" not in options or "prefix" not in str(options) else SPLITS[:1] + SPLITS[2:]:
        cache, parts, start = layer.init_cache(B, T), [], 0
        for size in split:
            y, cache = part(x[:, start : start + size], cache)
            parts.append(y)
            start += size
        close(jnp.concatenate(parts, 1), want)
        assert int(cache.index) == T


def test_a_cache_longer_than_the_sequence():
    layer, x = make(rotary=10.0), normal((B, T, D))
    cache = layer.init_cache(B, 2 * T)
    y, cache = layer(x[:, :4], is_causal=True, cache=cache)
    z, cache = layer(x[:, 4:], is_causal=True, cache=cache)
    close(jnp.concatenate([y, z], 1), layer(x, is_causal=True))
    # What lies beyond the tokens held does not matter.
    dirty = layer.init_cache(B, 2 * T)
    dirty = type(dirty)(dirty.key + jnp.nan, dirty.value + jnp.nan, dirty.index)
    close(layer(x, is_causal=True, cache=dirty)[0], layer(x, is_causal=True))


def test_caches_of_different_lengths_under_vmap():
    layer, x = make(rotary=10.0), normal((B, T, D))
    want = layer(x, is_causal=True)
    empty = layer.init_cache((), T)
    caches = [layer(x[i, :n], is_causal=True, cache=empty)[1] for i, n in enumerate((3, 6))]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *caches)
    step = jax.vmap(lambda x, cache: layer(x, is_causal=True, cache=cache))
    y, _ = step(jnp.stack([x[0, 3:5], x[1, 6:8]]), stacked)
    close(y, jnp.stack([want[0, 3:5], want[1, 6:8]]))


def test_one_program_for_all_steps():
    layer, x = make(), normal((B, T, D))
    traces = []

    @jax.jit
    def step(x, cache):
        traces.append(1)
        return layer(x, is_causal=True, cache=cache)

    cache = layer.init_cache(B, T)
    for i in range(T):
        _, cache = step(x[:, i : i + 1], cache)
    assert len(traces) == 1
    assert np.isnan(step(x[:, :1], cache)[0]).all()  # full
    with pytest.raises(ValueError, match="1 tokens after the 11"):
        layer(x[:, :1], is_causal=True, cache=cache)
    with pytest.raises(ValueError, match="at once"):
        layer(normal((B, T + 1, D)), cache=layer.init_cache(B, T))
    with pytest.raises(ValueError, match="init_cache"):
        layer(x, cache=layer.init_cache(B + 1, T))
    with pytest.raises(ValueError, match="cache"):
        layer(x, x, cache=cache)


def test_decoding_through_anothers_function():
    layer, x = make(attention_fn=jax.nn.dot_product_attention), normal((B, T, D))
    cache = layer.init_cache(B, T)
    y, cache = layer(x[:, :4], is_causal=True, cache=cache)
    z, _ = layer(x[:, 4:], is_causal=True, cache=cache)
    close(jnp.concatenate([y, z], 1), make()(x, is_causal=True))


# ----------------------------------------------------------------------------------------------------------
# Derivatives and dropout


def test_gradients(x64):
    layer, x = (
        wide(make(num_kv_heads=2, normalize_qk=True, rotary=10.0, relative_positions=4)),
        normal((B, T, D)),
    )
    apply, state = pure(layer, is_causal=True)
    weight = normal((B, T, D), 2)
    check_gradient(lambda p: jnp.sum(weight * apply(*p)), (state, x.astype(np.float64)))


def test_transformations():
    layer, x = make(rotary=10.0, normalize_qk=True), normal((B, T, D))
    apply, state = pure(layer, is_causal=True)
    close(jax.vmap(apply, (None, 0))(state, x), apply(state, x))
    two = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), state)
    close(jax.vmap(apply, (0, None))(two, x)[0], apply(state, x))

    def loss(x):
        return jnp.sum(jnp.sin(apply(state, x)))

    v = normal(x.shape, 3)
    slope = jax.jit(lambda x: jax.jvp(loss, (x,), (v,))[1])
    close(slope(x), np.vdot(jax.grad(loss)(x), v), 1e-4)
    twice = jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (v,))[1])(x)
    close(twice, jax.grad(slope)(x), 1e-4)


def test_dropout():
    layer, x = make(dropout_rate=0.5), normal((B, T, D))
    key = jax.random.key(0)
    assert np.array_equal(layer(x, dropout_key=key), layer(x, dropout_key=key))
    assert np.abs(layer(x, dropout_key=key) - layer(x)).max() > 1e-2
    assert np.abs(layer(x, dropout_key=key) - layer(x, dropout_key=jax.random.key(1))).max() > 1e-2
    draws = jax.vmap(lambda k: layer(x, dropout_key=k))(jax.random.split(key, 4000))
    assert np.abs(draws.mean(0) - layer(x)).max() < 0.1


def test_errors():
    rngs = nnx.Rngs(0)
    for args, options, name in (
        ((3, D), {}, "num_heads"),
        ((0, D), {}, "num_heads"),
        ((4, D), {"num_kv_heads": 3}, "num_kv_heads"),
        ((16, D), {"rotary": 10.0}, "rotary"),
        ((4, D), {"dropout_rate": 1.0}, "dropout_rate"),
        ((4, D), {"relative_positions": 0}, "relative_positions"),
    ):
        with pytest.raises(ValueError, match=name):
            MultiHeadAttention(*args, **options, rngs=rngs)
    layer = make()
    with pytest.raises(ValueError, match="inputs_q: got shape"):
        layer(normal((B, T, D + 1)))
    with pytest.raises(TypeError, match="int"):
        layer(np.zeros((B, T, D), np.int32))
    with pytest.raises(ValueError, match="positions"):
        layer(normal((B, T, D)), positions=np.arange(T))
    with pytest.raises(ValueError, match="rotary"):
        make(rotary=10.0)(normal((B, T, D)), normal((B, T, D)))
