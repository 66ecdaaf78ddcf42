"""Acceptance cases D: every transformation and their compositions equal those of a plain dense function.

All in float64, so agreement to 1e-12 shows that the derivative is the right function and not just close.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import probjax
from oracle import agree, dense_attention, normal, qkv

pytestmark = pytest.mark.usefixtures("x64")

T, S, N, K, D, V = 4, 5, 4, 2, 3, 2
MASK = normal(1, 1, T, S) > -0.8
MASK[..., 2, :] = False  # a row that sees nothing, in every derivative


def primals():
    """Every argument that can be differentiated."""
    arrays = qkv((2,), T, S, N, K, D, V)
    arrays |= {
        "bias": normal(1, N, T, S, seed="bias"),
        "gain": 1 + 0.1 * normal(N, seed="gain"),
        "table": normal(N, S, seed="table"),
        "sinks": normal(N, seed="sinks"),
        "scale": np.float64(0.6),
    }
    return {name: jnp.asarray(x) for name, x in arrays.items()}


def tangents(arrays, seed="tangent"):
    return jax.tree.map(lambda x: jnp.asarray(normal(*x.shape, seed=(seed, x.shape))), arrays)


def gated(score, batch, head, q, kv, table):
    return score + jnp.sin(score) * table[head, kv]


def by_function(implementation):
    """Whether the last bias of `ours` is a function of the score, which the C++ kernels cannot call."""
    return implementation != "native"


def ours(implementation, arrays):
    bias = probjax.biases.HeadScale(arrays["gain"]) + probjax.biases.Dense(arrays["bias"])
    if by_function(implementation):
        bias += probjax.biases.ScoreFunction(gated, arrays["table"])
    else:
        bias += probjax.biases.SoftCap(3.0) + probjax.biases.RelativePosition(arrays["table"])
    return probjax.dot_product_attention(
        arrays["query"], arrays["key"], arrays["value"], bias, MASK,
        scale=arrays["scale"], sinks=arrays["sinks"], logits_soft_cap=2.0,
        implementation=implementation, return_residual=True,
    )  # fmt: skip


def dense(function, arrays):
    def bias(score):
        score = score * arrays["gain"][:, None, None] + arrays["bias"]
        if function:
            return score + jnp.sin(score) * arrays["table"][:, None, :]
        bucket = np.clip(np.arange(S)[None] - np.arange(T)[:, None] + S // 2, 0, S - 1)
        return 3 * jnp.tanh(score / 3) + arrays["table"][:, bucket]

    return dense_attention(
        arrays["query"], arrays["key"], arrays["value"], visible=MASK, bias=bias, scale=arrays["scale"],
        soft_cap=2.0, sinks=arrays["sinks"],
    )  # fmt: skip


def loss_of(attention):
    """A scalar that uses output and log-sum-exp, not linear in either."""

    def loss(arrays):
        out, lse = attention(arrays)
        return (jnp.sin(out) * out).sum() + jnp.tanh(jnp.where(jnp.isfinite(lse), lse, 0.0)).sum()

    return loss


def same(got, want, tolerance=1e-12, floor=1e-3):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, one), two in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        agree(one, two, tolerance, floor=floor, name=jax.tree_util.keystr(path))


def along(loss, arrays, direction):
    return jax.jvp(jax.grad(loss), (arrays,), (direction,))[1]


COMPOSITIONS = {
    "value": lambda f, a, t: f(a),
    "D4 jvp": lambda f, a, t: jax.jvp(f, (a,), (t,)),
    "grad": lambda f, a, t: jax.grad(loss_of(f))(a),
    "D5 jvp of grad": lambda f, a, t: along(loss_of(f), a, t),
    "grad of jvp": lambda f, a, t: jax.grad(lambda a: jax.jvp(loss_of(f), (a,), (t,))[1])(a),
    "grad of grad": lambda f, a, t: jax.grad(lambda a: _square(jax.grad(loss_of(f))(a)))(a),
    "jvp of jvp": lambda f, a, t: jax.jvp(lambda a: jax.jvp(loss_of(f), (a,), (t,))[1], (a,), (t,)),
    "third order": lambda f, a, t: jax.grad(lambda a: _dot(along(loss_of(f), a, t), t))(a),
    "checkpoint": lambda f, a, t: jax.grad(jax.checkpoint(loss_of(f)))(a),
    "checkpoint, jvp of grad": lambda f, a, t: along(jax.checkpoint(loss_of(f)), a, t),
    "linearize": lambda f, a, t: jax.linearize(loss_of(f), a)[1](t),
    "transpose of linearize": lambda f, a, t: jax.linear_transpose(jax.linearize(loss_of(f), a)[1], a)(1.0),
}


def _square(tree):
    return sum((x**2).sum() for x in jax.tree.leaves(tree))


def _dot(one, two):
    return sum((x * y).sum() for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))


@functools.cache
def reference(name, function):
    arrays, attention = primals(), functools.partial(dense, function)
    return jax.jit(lambda a, t: COMPOSITIONS[name](attention, a, t))(arrays, tangents(arrays))


# Six to nine seconds of compiling each.
SLOW = {"grad of grad", "jvp of jvp", "third order", "checkpoint, jvp of grad"} | {
    "jacrev of jacrev",
    "jacrev of jacfwd",
}


def names(table):
    return [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in table]


@pytest.mark.parametrize("name", names(COMPOSITIONS))
def test_composition(implementation, name):
    """All arguments at once: q, k, v, bias, two bias objects, sinks, scale; with D4, D5, D6 and D8."""
    arrays = primals()

    def attention(arrays):
        return ours(implementation, arrays)

    got = jax.jit(lambda a, t: COMPOSITIONS[name](attention, a, t))(arrays, tangents(arrays))
    same(got, reference(name, by_function(implementation)), 1e-11)


@functools.cache
def reference_alone(argument, function):
    """The tangent along one argument, and its part of the full gradient."""
    arrays = primals()
    t = {name: x if name == argument else jnp.zeros_like(x) for name, x in tangents(arrays).items()}
    return reference_tangent(function)(arrays, t), reference("grad", function)[argument]


@functools.cache
def reference_tangent(function):
    return jax.jit(lambda a, t: jax.jvp(functools.partial(dense, function), (a,), (t,))[1])


@pytest.mark.parametrize("argument", ["query", "key", "value", "bias", "gain", "table", "sinks", "scale"])
def test_one_argument_at_a_time(implementation, argument):
    """Tangents and gradients of a single argument, the others constant."""
    arrays = primals()

    def restricted(attention):
        return lambda x: attention({**arrays, argument: x})

    def both(attention, x, t):
        function = restricted(attention)
        return jax.jvp(function, (x,), (t,))[1], jax.grad(loss_of(function))(x)

    x, t = arrays[argument], tangents(arrays)[argument]
    got = jax.jit(lambda x, t: both(lambda a: ours(implementation, a), x, t))(x, t)
    moved, grads = reference_alone(argument, by_function(implementation))
    same(got, (moved, grads), 1e-11)


def small():
    arrays = qkv((1,), 2, 3, 2, 1, 2)
    return {name: jnp.asarray(x) for name, x in arrays.items()}


DERIVATIVES = {
    "D1 jacrev": jax.jacrev,
    "jacfwd": jax.jacfwd,
    "D7 hessian": lambda f: jax.hessian(loss_of(f)),
    "jacrev of jacrev": lambda f: jax.jacrev(jax.jacrev(loss_of(f))),
    "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(loss_of(f))),
}


@functools.cache
def reference_derivative(name):
    visible = np.tril(np.ones((2, 3), bool))
    return jax.jit(DERIVATIVES[name](lambda arrays: dense_attention(**arrays, visible=visible)))(small())


@pytest.mark.parametrize("name", names(DERIVATIVES))
def test_d1_d7_d8_jacobians_and_hessians(implementation, name):

    def attention(arrays):
        return probjax.dot_product_attention(
            **arrays, is_causal=True, implementation=implementation, return_residual=True
        )

    got = jax.jit(DERIVATIVES[name](attention))(small())
    same(got, reference_derivative(name))


def test_d7_forward_laplacian(implementation):
    """Trace of the hessian at T = 8 by jvp of grad along each basis vector."""
    arrays = {name: jnp.asarray(x) for name, x in qkv((1,), 8, 8, 1, D=2).items()}

    def laplacian(attention):
        def loss(q):
            return (attention({**arrays, "query": q.reshape(1, 8, 1, 2)})[0] ** 2).sum()

        basis = jnp.eye(16)
        q = arrays["query"].ravel()
        return jax.vmap(lambda e: jax.jvp(jax.grad(loss), (q,), (e,))[1] @ e)(basis).sum()

    got = jax.jit(
        lambda: laplacian(
            lambda a: probjax.dot_product_attention(**a, implementation=implementation, return_residual=True)
        )
    )()
    same(got, laplacian(lambda a: dense_attention(**a)))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("length", [5, 300])
def test_adjoint_identity(implementation, dtype, length):
    """<ct, J x> = <J' ct, x> for tangents of all arguments and cotangents of both results."""
    arrays = qkv((1,), length, length, 2, 1)
    arrays |= {"bias": normal(1, 2, 1, length), "sinks": normal(2)}
    arrays = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}

    def attention(arrays):
        return probjax.dot_product_attention(
            **arrays, is_causal=True, implementation=implementation, return_residual=True
        )

    direction = tangents(arrays)
    direction = {name: x.astype(dtype) for name, x in direction.items()}

    @jax.jit
    def sides(arrays, direction):
        out, moved = jax.jvp(attention, (arrays,), (direction,))
        ct = jax.tree.map(lambda x: jnp.asarray(normal(*x.shape, seed="ct"), dtype), out)
        pulled = jax.vjp(attention, arrays)[1](ct)[0]
        size = sum(jnp.linalg.norm(x) * jnp.linalg.norm(y) for x, y in zip(ct, moved, strict=True))
        return _dot(ct, moved), _dot(pulled, direction), size

    left, right, size = (float(x) for x in sides(arrays, direction))
    assert abs(left - right) <= {"float64": 1e-13, "float32": 2e-6}[dtype] * size
    assert abs(left) > 1e-3 * size


def test_tangent_is_linear(implementation):
    arrays = primals()
    one, two = tangents(arrays, "one"), tangents(arrays, "two")

    @jax.jit
    def push(direction):
        return jax.jvp(lambda a: loss_of(lambda a: ours(implementation, a))(a), (arrays,), (direction,))[1]

    both = jax.tree.map(lambda x, y: 3 * x - 2 * y, one, two)
    assert float(push(both)) == pytest.approx(float(3 * push(one) - 2 * push(two)), rel=1e-12)


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_layers(implementation, remat):
    """A stack of attention layers in lax.scan: gradient of the stacked weights and a jvp through it."""
    x = jnp.asarray(normal(2, T, 8))
    weights = jnp.asarray(normal(3, 8, 24, scale=0.3))

    def stack(attention, weights):
        def layer(x, w):
            q, k, v = jnp.split((x @ w).reshape(2, T, 2, 12), 3, axis=-1)
            return x + attention(q, k, v).reshape(2, T, 8), None

        layer = jax.checkpoint(layer) if remat else layer
        return (jax.lax.scan(layer, x, weights)[0] ** 2).sum()

    def both(attention):
        function = functools.partial(stack, attention)
        return jax.grad(function)(weights), jax.jvp(function, (weights,), (tangents(weights),))

    got = jax.jit(
        lambda: both(
            functools.partial(probjax.dot_product_attention, is_causal=True, implementation=implementation)
        )
    )()
    visible = np.tril(np.ones((T, T), bool))
    same(got, both(lambda q, k, v: dense_attention(q, k, v, visible=visible)[0]))


def test_while_and_cond(implementation):
    arrays = small()

    def attend(q):
        return probjax.dot_product_attention(q, arrays["key"], arrays["value"], implementation=implementation)

    @jax.jit
    def run(q, flag):
        q = jax.lax.fori_loop(0, 3, lambda _, q: attend(q), q)
        return jax.lax.cond(flag, attend, lambda q: q, q)

    want = attend(attend(attend(arrays["query"])))
    same(run(arrays["query"], False), want)
    same(run(arrays["query"], True), attend(want))


def test_without_jit(implementation):
    """Eager calls, gradients and jvps equal the jitted ones."""
    arrays = small()

    def loss(arrays):
        return (
            probjax.dot_product_attention(**arrays, is_causal=True, implementation=implementation) ** 2
        ).sum()

    direction = tangents(arrays)
    for run in (
        loss,
        jax.grad(loss),
        lambda a: jax.jvp(loss, (a,), (direction,)),
        lambda a: along(loss, a, direction),
    ):
        same(run(arrays), jax.jit(run)(arrays))


def test_more_than_one_tile_to_second_order(implementation):
    """Original A01 and A02: derivatives sum over all key tiles."""
    arrays = {name: jnp.asarray(x) for name, x in qkv((1,), 300, 560, 1, D=2).items()}
    bias = jnp.asarray(normal(1, 1, 300, 560))
    visible = np.tril(np.ones((300, 560), bool), 260)
    direction = tangents(arrays)

    def run(attention):
        def loss(arrays):
            return (attention(arrays) ** 2).sum()

        return jax.jvp(attention, (arrays,), (direction,)), along(loss, arrays, direction)

    def attention(arrays):
        return probjax.dot_product_attention(
            **arrays,
            bias=bias,
            is_causal=True,
            causal_alignment="bottom_right",
            implementation=implementation,
        )

    got = jax.jit(lambda: run(attention))()
    same(got, jax.jit(lambda: run(lambda a: dense_attention(**a, visible=visible, bias=bias)[0]))(), 1e-10)


@pytest.mark.parametrize("argument", ["bias", "table"])
def test_original_a05_no_silent_zero(implementation, argument):
    """grad and jvp of sum(attn²) with respect to a full bias and to a T5 table."""
    q, k, v = (jnp.asarray(x) for x in qkv((2,), 6, 6, 2).values())
    array = jnp.asarray(normal(1, 2, 6, 6) if argument == "bias" else normal(2, 8))

    def loss(array):
        bias = (
            array
            if argument == "bias"
            else probjax.biases.RelativePosition(array, bucketing="t5", max_distance=9)
        )
        return (probjax.dot_product_attention(q, k, v, bias, implementation=implementation) ** 2).sum()

    gradient = jax.grad(loss)(array)
    tangent = jnp.asarray(normal(*array.shape, seed="t"))
    moved = jax.jvp(loss, (array,), (tangent,))[1]
    numeric = (loss(array + 1e-6 * tangent) - loss(array - 1e-6 * tangent)) / 2e-6
    assert float(moved) == pytest.approx(float((gradient * tangent).sum()), rel=1e-11)
    assert float(moved) == pytest.approx(float(numeric), rel=1e-6)


def test_float0_and_integer_arguments(implementation):
    """allow_int gradients of integer arguments do not disturb the others."""
    arrays = small()

    def loss(arrays, lengths):
        out = probjax.dot_product_attention(
            **arrays, key_value_seq_lengths=lengths, implementation=implementation
        )
        return (out**2).sum()

    lengths = jnp.array([2])
    grads, nothing = jax.grad(loss, (0, 1), allow_int=True)(arrays, lengths)
    assert nothing.dtype == jax.dtypes.float0
    same(grads, jax.grad(loss)(arrays, lengths))


def test_forward_transposes_in_value(implementation):
    """Attention is linear in the value, so `jax.linear_transpose` works there, and says where it cannot."""
    arrays = {name: jnp.asarray(x, "float32") for name, x in qkv(N=4, K=2).items()}
    value = arrays.pop("value")

    def attend(value):
        return probjax.dot_product_attention(
            **arrays, value=value, is_causal=True, implementation=implementation
        )

    ct = jnp.ones_like(attend(value))
    (got,) = jax.linear_transpose(attend, value)(ct)
    (want,) = jax.vjp(attend, value)[1](ct)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)

    with pytest.raises(NotImplementedError, match="not linear in query"):
        jax.linear_transpose(
            lambda q: probjax.dot_product_attention(q, arrays["key"], value, implementation=implementation),
            arrays["query"],
        )(ct)
