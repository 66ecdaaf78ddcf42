"""Embeddings, norms, MLP, and what XLA's CPU backend has to be told."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformer_reference as reference
from flax import nnx
from jax import lax
from nn_helpers import after_a_step, close, count, normal, pure, stirred

from probjax.nn import (
    MLP,
    AdaptiveLayerNorm,
    FourierFeatures,
    LRUCell,
    Mamba2Block,
    MambaBlock,
    MambaCell,
    MixtureOfExperts,
    RGLRUBlock,
    SequenceModel,
    SSDCell,
    Transformer,
    _cpu,
    rotary_embedding,
    sinusoidal_embedding,
)


def test_sinusoidal():
    positions = np.array([0, 1, 5, 1000])
    for features in (1, 2, 7, 16):
        got = sinusoidal_embedding(positions, features)
        close(got, reference.sinusoidal(np.float64(positions), features), 1e-4)
        half = sinusoidal_embedding(positions.astype(jnp.bfloat16), features)
        assert half.dtype == jnp.float32 and half.shape == (4, features)
    assert sinusoidal_embedding(jnp.float32(0.3), 4).shape == (4,)
    with pytest.raises(ValueError, match="features"):
        sinusoidal_embedding(positions, 0)


def test_rotary():
    x = normal((2, 9, 3, 8))
    close(
        rotary_embedding(x),
        reference.rotate(np.float64(x), np.broadcast_to(np.arange(9.0), (2, 9)), 10_000.0),
    )
    # Norms stay, and products depend on distances alone.
    close(np.linalg.norm(rotary_embedding(x), axis=-1), np.linalg.norm(x, axis=-1))
    q, k = normal((1, 1, 8), 1), normal((1, 1, 8), 2)

    def product(i, j):
        return jnp.vdot(*(rotary_embedding(v, jnp.array([n])) for v, n in ((q, i), (k, j))))

    close(product(3, 7), product(103, 107), 1e-4)
    assert rotary_embedding(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    # Positions are not rounded with the channels: bfloat16 has no 1001.
    far = rotary_embedding(jnp.ones((1, 1, 8), jnp.bfloat16), jnp.array([1001]))
    close(far, rotary_embedding(jnp.ones((1, 1, 8)), jnp.array([1001])), 1e-2)
    with pytest.raises(ValueError, match="even"):
        rotary_embedding(x[..., :3])
    with pytest.raises(ValueError, match="positions"):
        rotary_embedding(x, jnp.arange(4))
    with pytest.raises(ValueError, match="x: got shape"):
        rotary_embedding(x[0, 0])


def test_fourier_features():
    layer = FourierFeatures(2, 5, rngs=nnx.Rngs(0))
    x = normal((3, 4, 2))
    angles = np.float64(x) @ np.float64(layer.frequencies[...]).T
    close(layer(x), np.concatenate([np.cos(angles), np.sin(angles)], -1))
    assert count(layer) == (10, 1)
    assert FourierFeatures(1, 5, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))(x[..., :1]).dtype == jnp.bfloat16
    assert not after_a_step(layer, x)
    with pytest.raises(ValueError, match="x: got shape"):
        layer(x[..., :1])


def test_adaptive_norm():
    x, c = normal((2, 5, 8)), normal((2, 3), 1)
    for options in ({}, {"gate": True}, {"hidden_features": 4}, {"hidden_features": 4, "gate": True}):
        first = AdaptiveLayerNorm(8, 3, **options, rngs=nnx.Rngs(0))
        plain = reference.norm({}, np.float64(x))
        outs = first(x, c) if options.get("gate") else (first(x, c),)
        close(outs[0], plain)
        assert all(np.all(np.asarray(gate) == 0) for gate in outs[1:])
        moved = stirred(first)
        want = reference.modulated(reference.tree(moved), np.float64(x), np.float64(c), "gate" in options)
        outs = moved(x, c) if options.get("gate") else (moved(x, c),)
        for got, exact in zip(outs, want, strict=False):
            close(got, exact)
        # One condition per token.
        each = moved(x, np.broadcast_to(c[:, None], (2, 5, 3)))
        close(each[0] if options.get("gate") else each, want[0])
    for bad in (c[:1, :2], normal((3, 3)), normal((2, 4, 3)), normal((3,))):
        with pytest.raises(ValueError, match="condition"):
            first(x, bad)


def test_mlp():
    x = normal((2, 5, 4))
    assert count(MLP((16, 64, 64, 16), rngs=nnx.Rngs(0))) == (6_288, 6)
    assert count(MLP((16, 512, 512, 16), rngs=nnx.Rngs(0))) == (279_568, 6)
    model = stirred(MLP((4, 7, 3), rngs=nnx.Rngs(0)))
    close(model(x), reference.mlp(reference.tree(model), np.float64(x)))
    one = stirred(MLP((4, 2), rngs=nnx.Rngs(0)))
    close(one(x), reference.linear(reference.tree(one)["layers"][0], np.float64(x)))
    final = MLP((4, 2), activate_final=True, rngs=nnx.Rngs(0))
    close(final(x), reference.gelu(np.float64(MLP((4, 2), rngs=nnx.Rngs(0))(x))), 1e-4)
    assert MLP((4, 7, 3), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))(x).dtype == jnp.bfloat16
    assert not after_a_step(model, x)
    for bad in ((4,), (4, 0), ()):
        with pytest.raises(ValueError, match="features"):
            MLP(bad, rngs=nnx.Rngs(0))


def test_mlp_dropout():
    model, x = MLP((4, 64, 64, 64), activate_final=True, dropout_rate=0.5, rngs=nnx.Rngs(0)), normal((50, 4))
    key = jax.random.key(0)
    assert np.array_equal(model(x, dropout_key=key), model(x, dropout_key=key))
    assert 0.4 < np.mean(np.asarray(model(x, dropout_key=key)) == 0) < 0.6
    assert np.all(np.asarray(model(x)) != 0)
    # Each layer its own mask.
    drawn = [np.asarray(jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, (50, 64))) for i in range(3)]
    assert np.array_equal(np.asarray(model(x, dropout_key=key)) != 0, drawn[2])
    assert 0.4 < (drawn[0] == drawn[1]).mean() < 0.6


# ----------------------------------------------------------------------------------------------------------
# _cpu

DIMS = (((1,), (0,)), ((), ()))


def test_products_of_half_types():
    for dtype, unit in ((jnp.bfloat16, 2**-8), (jnp.float16, 2**-11)):
        x, w, v = (jnp.asarray(normal(s, i), dtype) for i, s in enumerate(((6, 300), (300, 5), (6, 5))))
        exact = [np.float64(a) for a in (x, w, v)]

        def run(x, w):
            return _cpu.dot_general(x, w, DIMS)

        out, pull = jax.vjp(run, x, w)
        got = (out, *pull(v))
        want = (exact[0] @ exact[1], exact[2] @ exact[1].T, exact[0].T @ exact[2])
        for g, e in zip(got, want, strict=True):
            assert g.dtype == dtype
            # One rounding: the sums are wider.
            assert np.abs(np.float64(g) - e).max() <= unit * np.abs(e).max() * 1.01
        tangent = jax.jvp(run, (x, w), (x, w))[1]
        assert np.abs(np.float64(tangent) - 2 * want[0]).max() <= 4 * unit * np.abs(want[0]).max()
        only = jax.grad(lambda w, x=x: jnp.sum(run(x, w).astype(jnp.float32)))(w)
        assert (
            np.abs(np.float64(only) - exact[0].sum(0)[:, None]).max()
            <= unit * np.abs(exact[0].sum(0)).max() * 1.01
        )
        many = jax.vmap(run, (None, 0))(x, jnp.stack([w, w]))
        assert np.array_equal(many[1], out)
        second = jax.jvp(jax.grad(lambda x, w=w: jnp.sum(run(x, w) ** 2)), (x,), (x,))[1]
        assert np.isfinite(np.float32(second)).all()


def test_other_products_are_left_alone():
    x, w = normal((6, 3)), normal((3, 5), 1)
    assert np.array_equal(_cpu.dot_general(x, w, DIMS), lax.dot_general(x, w, DIMS))
    wide = _cpu.dot_general(*(a.astype(jnp.bfloat16) for a in (x, w)), DIMS, None, jnp.float32)
    assert wide.dtype == jnp.float32
    jaxpr = str(jax.make_jaxpr(lambda x, w: _cpu.dot_general(x, w, DIMS))(x, w))
    assert "custom_jvp" not in jaxpr


def test_gradients_of_half_types_multiply_float32_on_cpus_only():
    model = MLP((8, 8), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    apply, state = pure(model)
    x = jnp.ones((4, 8), jnp.bfloat16)

    def gradient(state):
        return jax.grad(lambda s: jnp.sum(apply(s, x).astype(jnp.float32) ** 2))(state)

    for platform, word in (("cpu", "f32"), ("cuda", "bf16")):
        text = jax.jit(gradient).trace(state).lower(lowering_platforms=(platform,)).as_text()
        products = [line for line in text.splitlines() if "dot_general" in line]
        assert any(f"x{word}>" in line.split("->")[-1] for line in products[1:]), products


HALF = {
    "transformer": lambda **kinds: Transformer(16, 1, 2, in_features=8, out_features=8, **kinds),
    "experts": lambda **kinds: MixtureOfExperts(8, 8, 2, num_selected=1, **kinds),
    **{
        cell.__name__: functools.partial(SequenceModel, 8, 1, cell)
        for cell in (LRUCell, MambaCell, SSDCell, MambaBlock, RGLRUBlock)
    },
    "Mamba2Block": functools.partial(SequenceModel, 8, 1, functools.partial(Mamba2Block, head_size=8)),
}


@pytest.mark.parametrize("make", HALF.values(), ids=HALF)
def test_no_model_has_a_half_product_in_its_derivative_on_cpus(make):
    apply, state = pure(make(dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    x = jnp.ones((2, 4, 8), jnp.bfloat16)

    def loss(state):
        y = apply(state, x)
        return jnp.sum((y[0] if isinstance(y, tuple) else y).astype(jnp.float32) ** 2)

    def products(function):
        text = jax.jit(function).trace(state).lower(lowering_platforms=("cpu",)).as_text()
        return sum("dot_general" in line and "xbf16>" in line.split(":")[-1] for line in text.splitlines())

    assert products(loss) > 0
    assert products(jax.grad(loss)) <= products(loss)


def test_settle():
    x = normal((3, 4))
    for f in (_cpu.settle, jax.jit(_cpu.settle), jax.vmap(_cpu.settle)):
        assert np.array_equal(f(x), x)
    assert np.array_equal(jax.grad(lambda x: jnp.sum(_cpu.settle(x) ** 2))(x), 2 * x)
    text = {
        p: jax.jit(_cpu.settle).trace(x).lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda")
    }
    assert "optimization_barrier" in text["cpu"] and "optimization_barrier" not in text["cuda"]
