"""Acceptance cases L: export, imports, CPU only, and the explanation that a plan gives."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import probjax
from oracle import AVAILABLE, IMPLEMENTATIONS, agree, qkv


def arrays():
    return {name: jnp.asarray(x, "float32") for name, x in qkv((2,), 6, 6, 4, 2).items()}


def gradient(implementation):
    def loss(arrays):
        out = probjax.dot_product_attention(**arrays, is_causal=True, implementation=implementation)
        return (out**2).sum()

    return jax.value_and_grad(loss)


PLAIN = [name for name in IMPLEMENTATIONS if name not in ("native", "triton", "cudnn", "interpret")]


@pytest.mark.parametrize("platforms", [None, ("cpu", "cuda", "rocm", "tpu")], ids=str)
@pytest.mark.parametrize("name", [None, *PLAIN])
def test_l1_export(name, platforms):
    """Value and gradient as one stable program, also for platforms that this machine has not."""
    exported = jax.export.export(jax.jit(gradient(name)), platforms=platforms)(arrays())
    assert set(exported.platforms) == set(platforms or ("cpu",))
    got, want = exported.call(arrays()), gradient(name)(arrays())
    jax.tree.map(lambda a, b: agree(a, b, 2e-6), got, want)


@pytest.mark.parametrize("name", [None, *PLAIN])
def test_l1_export_with_derivatives(name):
    """An exported forward can still be differentiated."""

    def attend(arrays):
        return probjax.dot_product_attention(**arrays, implementation=name)

    exported = jax.export.export(jax.jit(attend))(arrays())
    assert exported.has_vjp()
    got = jax.grad(lambda a: (exported.call(a) ** 2).sum())(arrays())
    want = jax.grad(lambda a: (attend(a) ** 2).sum())(arrays())
    jax.tree.map(lambda a, b: agree(a, b, 2e-6), got, want)


@pytest.mark.parametrize("name", [None, *PLAIN])
def test_l1_export_with_a_symbolic_batch(name):
    """The batch size may be a symbol."""
    (batch,) = jax.export.symbolic_shape("b")
    shapes = {n: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for n, x in arrays().items()}

    def attend(arrays):
        return probjax.dot_product_attention(**arrays, is_causal=True, implementation=name)

    exported = jax.export.export(jax.jit(attend))(shapes)
    agree(exported.call(arrays()), attend(arrays()), 2e-6)


def test_one_trace_lowers_for_several_platforms():
    """The platform is chosen at lowering: one traced function lowers for CPU and CUDA."""
    traced = jax.jit(gradient(None)).trace(arrays())
    for platform in ("cpu", "cuda", "tpu"):
        assert "func.func" in traced.lower(lowering_platforms=(platform,)).as_text()


def fresh(code):
    """Runs code in a new interpreter and returns what it prints as JSON."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_is_light():
    """Importing the package and calling attention imports no optional library."""
    code = (
        "import sys, json, probjax, numpy as np\n"
        "x = np.ones((1, 3, 1, 2), np.float32)\n"
        "probjax.dot_product_attention(x, x, x, is_causal=True)\n"
        "probjax.masks, probjax.biases, probjax.attention_plan(x, x, x)\n"
        "names = ['flax', 'optax', 'rich', 'torch', 'orbax', 'equinox', 'pytest', 'triton', 'psutil']\n"
        "print(json.dumps([n for n in names if n in sys.modules]))"
    )
    assert fresh(code) == []


def test_import_does_not_start_a_backend_or_pallas():
    code = (
        "import sys, json, probjax\n"
        "from jax._src import xla_bridge\n"
        "pallas = [n for n in sys.modules if n.startswith('jax.experimental.pallas')]\n"
        "print(json.dumps([xla_bridge.backends_are_initialized(), pallas]))"
    )
    assert fresh(code) == [False, []]


def test_public_names():
    assert isinstance(probjax.__version__, str)
    for name in ("dot_product_attention", "attention_plan", "masks", "biases", "attention"):
        assert name in dir(probjax)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = probjax.no_such_name


def test_implementations_are_listed():
    found = probjax.attention.implementations()
    for name in PLAIN:
        assert found[name] is None
    for name, reason in found.items():
        assert reason is None or (isinstance(reason, str) and reason), name
    assert set(IMPLEMENTATIONS) <= set(found)
    assert set(probjax.attention.implementations("cuda")) == set(found)


def test_l6_cpu_only():
    """The default runs on a machine without an accelerator and equals the reference."""
    jax.tree.map(lambda a, b: agree(a, b, 2e-6), gradient(None)(arrays()), gradient("reference")(arrays()))


def test_works_like_the_function_of_jax():
    """A superset of jax.nn.dot_product_attention: same call, same result, same defaults."""
    a = {name: jnp.asarray(x, "float32") for name, x in qkv((2,), 6, 7, 4, 2).items()}
    bias, mask = jnp.ones((1, 4, 6, 7)) * 0.3, jnp.ones((1, 1, 6, 7), bool).at[..., 3].set(False)
    calls = [
        {},
        {"bias": bias, "mask": mask},
        {"scale": 0.3, "is_causal": True},
        {"key_value_seq_lengths": jnp.array([3, 7])},
        {"local_window_size": (2, 1)},
        {"local_window_size": 2},
        {"is_causal": True, "local_window_size": (1, 0)},
        {"return_residual": True},
    ]
    for options in calls:
        got = probjax.dot_product_attention(**a, **options)
        want = jax.nn.dot_product_attention(**a, **options)
        jax.tree.map(lambda x, y: agree(x, y, 2e-6), got, want)
    one = {name: x[0] for name, x in a.items()}
    agree(probjax.dot_product_attention(**one), jax.nn.dot_product_attention(**one), 2e-6)


def test_plan_of_shapes_and_of_arrays():
    structs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays().items()}
    one = probjax.attention_plan(**structs, is_causal=True)
    two = probjax.attention_plan(**arrays(), is_causal=True)
    assert one == two
    assert one.implementation in probjax.attention.implementations()
    assert one.platform == "cpu"
    assert one.reason
    assert one.implementation not in one.rejected
    assert all(isinstance(reason, str) and reason for reason in one.rejected.values())
    assert one.implementation in str(one)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.implementation = "other"


@pytest.mark.parametrize("name", AVAILABLE)
def test_plan_of_a_named_implementation(name):
    plan = probjax.attention_plan(**arrays(), implementation=name)
    assert plan.implementation == name


def test_plan_estimates_memory():
    """Linear for tiled, quadratic for dense; no arrays are made."""

    def plan(S, name):
        x = jax.ShapeDtypeStruct((1, S, 8, 64), "float32")
        return probjax.attention_plan(x, x, x, implementation=name)

    tiled, longer = plan(4096, "tiled"), plan(8192, "tiled")
    assert 0 < tiled.forward_bytes <= 64 * 2**20
    assert 0 < tiled.backward_bytes <= 64 * 2**20
    assert longer.backward_bytes <= 2.1 * tiled.backward_bytes
    assert plan(4096, "dense").forward_bytes >= 8 * 4096**2 * 4
    assert tiled.q_tile <= 4096
    assert tiled.kv_tile <= 4096


def test_plan_of_another_platform():
    plan = probjax.attention_plan(**arrays(), platform="cuda")
    assert plan.platform == "cuda"
    assert plan.implementation in probjax.attention.implementations("cuda")


def test_plan_refuses_what_the_call_refuses():
    bad = {**arrays(), "key": jnp.zeros((2, 6, 3, 4))}
    with pytest.raises(ValueError, match="key"):
        probjax.attention_plan(**bad)


def test_plan_runs_what_it_says():
    """The default equals the implementation that the plan names, bit for bit."""
    for S in (4, 200, 700):
        a = {name: jnp.asarray(x, "float32") for name, x in qkv((1,), S, S, 2).items()}
        name = probjax.attention_plan(**a).implementation
        default, named = (
            jax.jit(lambda a, n=n: probjax.dot_product_attention(**a, implementation=n))(a)
            for n in (None, name)
        )
        np.testing.assert_array_equal(default, named)
