"""vmap of any subset of the arguments, nested or composed with derivatives, equals the loop."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probjax
from oracle import agree, dense_attention, normal, qkv
from probjax import biases, masks

pytestmark = pytest.mark.usefixtures("x64")

T, S, N, K, D = 4, 5, 4, 2, 3


def same(got, want, tolerance=1e-12, floor=1e-3):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        agree(one, two, tolerance, floor=floor)


ARGUMENTS = ("query", "key", "value", "bias", "mask", "sinks", "lengths", "scale")


def batched_arguments(count=3):
    """Each argument with a leading axis to map."""
    base = qkv((2,), T, S, N, K, D)
    return {
        **{name: jnp.asarray(normal(count, *x.shape, seed=name)) for name, x in base.items()},
        "bias": jnp.asarray(normal(count, 1, N, T, S, seed="bias")),
        "mask": jnp.asarray(normal(count, 1, 1, T, S, seed="mask") > -0.8),
        "sinks": jnp.asarray(normal(count, N, seed="sinks")),
        "lengths": jnp.asarray(np.arange(2 * count).reshape(count, 2) % (S + 1), jnp.int32),
        "scale": jnp.asarray(0.5 + 0.1 * np.arange(count)),
    }


def mapped_loss(implementation):
    def loss(query, key, value, bias, mask, sinks, lengths, scale):
        out, lse = probjax.dot_product_attention(
            query, key, value, bias, mask, sinks=sinks, key_value_seq_lengths=lengths, scale=scale,
            implementation=implementation, return_residual=True,
        )  # fmt: skip
        return jnp.sin(out).sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum()

    return loss


FLOATS = (0, 1, 2, 3, 5, 7)


@functools.cache
def alone(implementation):
    return jax.jit(jax.value_and_grad(mapped_loss(implementation), FLOATS))


SUBSETS = [("query",), ("lengths",), ("bias",), ("value", "mask", "scale"), ("sinks", "lengths"), ARGUMENTS]
SLOW_SUBSETS = [
    *[(name,) for name in ARGUMENTS if (name,) not in SUBSETS],
    ("query", "bias"),
    ("key", "value"),
]


@pytest.mark.parametrize(
    "subset", [*SUBSETS, *(pytest.param(x, marks=pytest.mark.slow) for x in SLOW_SUBSETS)], ids="+".join
)
def test_d12_vmap_of_any_subset(implementation, subset):
    """vmap(value_and_grad) over some arguments equals the loop; the others are shared."""
    mapped = batched_arguments()
    run = jax.value_and_grad(mapped_loss(implementation), FLOATS)
    axes = tuple(0 if name in subset else None for name in ARGUMENTS)
    arguments = [mapped[name] if name in subset else mapped[name][1] for name in ARGUMENTS]
    got = jax.jit(jax.vmap(run, axes))(*arguments)
    one = alone(implementation)
    for i in range(3):
        own = [mapped[name][i if name in subset else 1] for name in ARGUMENTS]
        same(jax.tree.map(lambda x, i=i: x[i], got), one(*own))


@pytest.mark.parametrize("inner", [1, -1])
def test_nested_vmap_with_other_axes(implementation, inner):
    """Two nested maps over different axes of different arguments, forward and gradient."""
    base = {name: jnp.asarray(x) for name, x in qkv((2,), T, S, N, K, D).items()}
    query = jnp.asarray(normal(3, *base["query"].shape, seed="nested"))
    value = jnp.moveaxis(jnp.asarray(normal(2, *base["value"].shape, seed="nested")), 0, inner)

    def loss(q, v):
        out = probjax.dot_product_attention(q, base["key"], v, is_causal=True, implementation=implementation)
        return jnp.sin(out).sum()

    run = jax.value_and_grad(loss, (0, 1))
    got = jax.jit(jax.vmap(jax.vmap(run, (None, inner)), (0, None)))(query, value)
    one = jax.jit(run)
    for i, j in itertools.product(range(3), range(2)):
        want = one(query[i], jnp.moveaxis(value, inner, 0)[j])
        same(jax.tree.map(lambda x, i=i, j=j: x[i, j], got), want)


def test_vmap_of_objects(implementation):
    """Arrays inside mask and bias objects are mapped too."""
    q, k, v = (jnp.asarray(x) for x in qkv((2,), T, S, N, K, D).values())
    slopes = jnp.asarray(abs(normal(3, N)))
    segments = jnp.asarray(np.random.default_rng(0).integers(0, 2, (3, 2, S)), jnp.int32)

    def loss(slopes, segments):
        mask = masks.Segments(segments[:, :T], segments) | masks.Causal()
        out = probjax.dot_product_attention(
            q, k, v, biases.ALiBi(slopes), mask, implementation=implementation
        )
        return (out**2).sum()

    run = jax.value_and_grad(loss)
    for axes in ((0, 0), (0, None), (None, 0)):
        arguments = [x if axis == 0 else x[1] for x, axis in zip((slopes, segments), axes, strict=True)]
        got = jax.jit(jax.vmap(run, axes))(*arguments)
        for i in range(3):
            own = [x[i if axis == 0 else 1] for x, axis in zip((slopes, segments), axes, strict=True)]
            same(jax.tree.map(lambda x, i=i: x[i], got), run(*own))


def test_vmap_over_object_pytrees(implementation):
    """A bias object with stacked arrays is itself an argument of vmap."""
    q, k, v = (jnp.asarray(x) for x in qkv((2,), T, S, N, K, D).values())
    bias = biases.ALiBi(jnp.asarray(abs(normal(3, N)))) + biases.Dense(jnp.asarray(normal(3, 1, 1, T, S)))

    def attend(bias):
        return probjax.dot_product_attention(q, k, v, bias, implementation=implementation)

    got = jax.jit(jax.vmap(attend))(bias)
    for i in range(3):
        same(got[i], attend(jax.tree.map(lambda x, i=i: x[i], bias)))


@pytest.mark.parametrize(
    "composition", ["jvp of vmap", "vmap of jvp", "vmap of hvp", "grad of vmap", "hvp of vmap"]
)
def test_vmap_composed(implementation, composition):
    """D3, D10 and original A30: vmap with the derivatives, in either order, with grouped heads."""
    stacked = {
        name: jnp.asarray(normal(3, *x.shape, seed=name)) for name, x in qkv((1,), T, S, 8, 2, D).items()
    }
    direction = {name: jnp.asarray(normal(*x.shape, seed="t")) for name, x in stacked.items()}

    def product(loss, arrays, direction):
        return jax.jvp(jax.grad(loss), (arrays,), (direction,))[1]

    def run(attention):
        def loss(arrays):
            return (attention(**arrays) ** 2).sum()

        total = lambda a: jax.vmap(loss)(a).sum()  # noqa: E731
        return {
            "jvp of vmap": lambda: jax.jvp(jax.vmap(loss), (stacked,), (direction,)),
            "vmap of jvp": lambda: jax.vmap(lambda a, t: jax.jvp(loss, (a,), (t,)))(stacked, direction),
            "vmap of hvp": lambda: jax.vmap(lambda a, t: product(loss, a, t))(stacked, direction),
            "grad of vmap": lambda: jax.grad(total)(stacked),
            "hvp of vmap": lambda: product(total, stacked, direction),
        }[composition]()

    got = jax.jit(
        lambda: run(functools.partial(probjax.dot_product_attention, implementation=implementation))
    )()
    same(got, run(lambda **arrays: dense_attention(**arrays)[0]))


def test_d3_vmap_at_size(implementation):
    """T = 128, N = 16, D = 48 over an extra axis."""
    arrays = {name: jnp.asarray(normal(2, 1, 128, 16, 48, seed=name), "float32") for name in ("q", "k", "v")}

    def attend(q, k, v):
        return probjax.dot_product_attention(q, k, v, implementation=implementation)

    got = jax.jit(jax.vmap(attend))(*arrays.values())
    same(got, attend(*(x[:, 0] for x in arrays.values()))[:, None], 2e-6)


def test_vmap_with_an_axis_of_size_zero_and_one(implementation):
    arrays = {name: jnp.asarray(x) for name, x in qkv((1,), 2, 3, 2, 1, 2).items()}

    def attend(arrays):
        return probjax.dot_product_attention(**arrays, implementation=implementation)

    for count in (0, 1):
        stacked = {name: jnp.repeat(x[None], count, 0) for name, x in arrays.items()}
        got = jax.jit(jax.vmap(attend))(stacked)
        assert got.shape == (count, 1, 2, 2, 2)
        same(got, jnp.repeat(attend(arrays)[None], count, 0))
