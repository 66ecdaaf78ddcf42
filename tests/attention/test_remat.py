"""Acceptance case J1: named residuals let a remat policy keep what the backward needs."""

import re

import jax
import jax.numpy as jnp
import pytest

import probjax
from oracle import agree, normal, qkv

NAMES = probjax.attention.RESIDUAL_NAMES
POLICIES = {
    "none": None,
    "names": jax.checkpoint_policies.save_only_these_names(*NAMES),
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
}


def layer(implementation, weights, x):
    q, k, v = jnp.split((x @ weights).reshape(*x.shape[:2], 2, 12), 3, axis=-1)
    out = probjax.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    return jnp.sin(out.reshape(x.shape)) + x


def gradient(implementation, policy):
    def loss(weights, x):
        step = jax.checkpoint(lambda w, x: layer(implementation, w, x), policy=POLICIES[policy])
        return (step(weights, x) ** 2).sum()

    return jax.grad(loss)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_do_not_change_the_gradient(implementation, policy):
    weights, x = jnp.asarray(normal(8, 24, scale=0.3), "float32"), jnp.asarray(normal(2, 6, 8), "float32")
    want = jax.grad(lambda w: (layer(implementation, w, x) ** 2).sum())(weights)
    agree(jax.jit(gradient(implementation, policy))(weights, x), want, 2e-6)


def equations(jaxpr):
    """All equations of a jaxpr, also of those inside."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                if hasattr(inner, "eqns"):
                    yield from equations(inner)
                elif hasattr(inner, "jaxpr") and hasattr(inner.jaxpr, "eqns"):
                    yield from equations(inner.jaxpr)


def products(implementation, policy):
    """The attention forwards of the traced program, and how many products (or calls of forward kernels) the
    lowered one holds.
    """
    x, weights = jnp.ones((1, 64, 8)), jnp.ones((8, 24))
    function = gradient(implementation, policy)
    traced = jax.make_jaxpr(function)(weights, x)
    names = [equation.primitive.name for equation in equations(traced.jaxpr)]
    text = jax.jit(function).lower(weights, x).as_text()
    return [name for name in names if "forward" in name], len(
        re.findall(r"dot_general|@probjax_attention_forward", text)
    )


def test_two_names():
    assert len(NAMES) == 2
    assert all(isinstance(name, str) for name in NAMES)
    assert len(set(NAMES)) == 2


def test_j1_forward_runs_once_with_the_policy(implementation):
    kept, kept_products = products(implementation, "names")
    again, again_products = products(implementation, "nothing")
    plain, plain_products = products(implementation, "everything")
    assert len(plain) == 1
    assert len(kept) == 1
    assert len(again) == 2
    assert kept_products < again_products
    assert plain_products <= kept_products


def test_names_are_in_the_jaxpr():
    x = jnp.ones((1, 4, 1, 4))
    traced = jax.make_jaxpr(jax.grad(lambda x: probjax.dot_product_attention(x, x, x).sum()))(x)
    found = {eqn.params["name"] for eqn in equations(traced.jaxpr) if eqn.primitive.name == "name"}
    assert found == set(NAMES)


def test_log_sum_exp_under_the_policy(implementation, x64):
    """The residual is returned and differentiated as well as saved."""
    arrays = {name: jnp.asarray(x) for name, x in qkv().items()}

    def loss(arrays):
        out, lse = probjax.dot_product_attention(
            **arrays, implementation=implementation, return_residual=True
        )
        return (out**2).sum() + jnp.sin(lse).sum()

    saved = jax.checkpoint(loss, policy=POLICIES["names"])
    got, want = jax.jit(jax.grad(saved))(arrays), jax.grad(loss)(arrays)
    for name in arrays:
        agree(got[name], want[name], 1e-13, name=name)


def test_policy_inside_a_scan_over_layers(implementation, x64):
    weights = jnp.asarray(normal(3, 8, 24, scale=0.3))
    x = jnp.asarray(normal(2, 6, 8))

    def loss(weights, policy):
        def body(x, w):
            return layer(implementation, w, x), None

        if policy is not None:
            body = jax.checkpoint(body, policy=POLICIES[policy])
        return (jax.lax.scan(body, x, weights)[0] ** 2).sum()

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    agree(gradient(weights, "names"), gradient(weights, None), 1e-12)
