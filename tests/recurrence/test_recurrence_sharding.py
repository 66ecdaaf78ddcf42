"""Batch and channels (or heads) over eight CPU devices, without communication but for sums of gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from oracle import normal
from oracle.check_recurrence import agree
from probjax import recurrence

P = PartitionSpec
L = 70
COLLECTIVES = ("all-gather", "all-to-all", "collective-permute")


def array(*shape, seed=0):
    return jnp.asarray(normal(*shape, seed=seed), "float32")


CASES = {
    "linear_scan": (
        lambda a, b, h: recurrence.linear_scan(a, b, initial_state=h),
        (0.5 * array(8), array(4, L, 8), array(4, 8)),
        (P("heads"), P("data", None, "heads"), P("data", "heads")),
    ),
    "selective_scan": (
        lambda x, dt, A, B, C, h: recurrence.selective_scan(x, dt, A, B, C, initial_state=h),
        (
            array(4, L, 8),
            jnp.abs(array(4, L, 8, seed=1)),
            -jnp.abs(array(8, 3)),
            array(4, L, 2, 3),
            array(4, L, 3),
            array(4, 8, 3),
        ),
        (
            P("data", None, "heads"),
            P("data", None, "heads"),
            P("heads"),
            P("data", None, "heads"),
            P("data"),
            P("data", "heads"),
        ),
    ),
    "ssd": (
        lambda q, k, v, d, h: recurrence.ssd(q, k, v, d, initial_state=h),
        (
            array(4, L, 2, 3),
            array(4, L, 2, 3, seed=1),
            array(4, L, 4, 5),
            -jnp.abs(array(4, L, 4)),
            array(4, 4, 3, 5),
        ),
        (*(P("data", None, "heads"),) * 4, P("data", "heads")),
    ),
    "causal_conv1d": (
        lambda x, w, h: recurrence.causal_conv1d(x, w, initial_state=h, segment_ids=jnp.arange(L) // 9),
        (array(4, L, 8), array(3, 8), array(4, 2, 8)),
        (P("data", None, "heads"), P(None, "heads"), P("data", None, "heads")),
    ),
}


def functions(name):
    """The call, and its gradients of a fixed loss."""
    run, given, specs = CASES[name]

    def loss(*given):
        y, last = run(*given)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(last))

    return run, jax.grad(loss, tuple(range(len(given)))), given, specs


def same(got, want):
    jax.tree.map(lambda a, b: agree(a, np.asarray(b), 1e-5), got, want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_sharded_equals_whole(name, kind):
    run, gradient, given, specs = functions(name)
    mesh = jax.make_mesh((4, 2), ("data", "heads"), axis_types=(kind, kind))
    want = [jax.jit(f)(*given) for f in (run, gradient)]
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(given, specs, strict=True)]
        compiled = [jax.jit(f).lower(*placed).compile() for f in (run, gradient)]
        got = [f(*placed) for f in compiled]
    same(got, want)
    for f in compiled:
        assert not [word for word in COLLECTIVES if word in f.as_text()]
    assert "all-reduce" not in compiled[0].as_text()


@pytest.mark.parametrize("name", CASES)
def test_inside_shard_map(name):
    """Per device, with the gradient of what is replicated summed over shards."""
    _, gradient, given, specs = functions(name)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    specs = tuple(P("data") if spec and spec[0] == "data" else P() for spec in specs)

    def sharded(*given):
        return jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=specs)(*given)

    same(jax.jit(sharded)(*given), jax.jit(gradient)(*given))
