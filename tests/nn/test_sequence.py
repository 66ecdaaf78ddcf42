"""SequenceModel: against NumPy, in parts, in both directions, over every cell and block."""

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nn_helpers import (
    after_a_step,
    check_gradient,
    close,
    count,
    normal,
    pure,
    stirred,
    temp_bytes,
    trees_close,
    wide,
)
from transformer_reference import tree

from probjax.bench.ssm.model import make as workload
from probjax.bench.ssm.oracle import reference
from probjax.nn import LRUCell, Mamba2Block, MambaBlock, MambaCell, RGLRUBlock, SequenceModel, SSDCell, remat

B, L, D = 2, 13, 8
CELLS = {
    "lru": LRUCell,
    "mamba": functools.partial(MambaCell, state_size=4),
    "ssd": SSDCell,
    "mamba block": functools.partial(MambaBlock, state_size=4),
    "mamba2 block": functools.partial(Mamba2Block, state_size=4, head_size=4),
    "rglru block": RGLRUBlock,
}


QUICK = ("lru", "mamba block")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CELLS if name not in QUICK]


def make(cell="lru", layers=3, seed=0, **config):
    config = {"glu": "block" not in cell, **config}
    return stirred(SequenceModel(D, layers, CELLS[cell], **config, rngs=nnx.Rngs(seed)))


@pytest.mark.parametrize(
    ("cell", "want"), [(MambaCell, (930_704, 94)), (SSDCell, (865_172, 94)), (LRUCell, (995_728, 94))]
)
def test_counts(cell, want):
    assert count(workload(128, 4, cell, dtype=jnp.float32, rngs=nnx.Rngs(0))) == want


@pytest.mark.parametrize("cell", ["mamba", "ssd", "lru"])
def test_values(cell):
    model = stirred(workload(D, 3, CELLS[cell], dtype=jnp.float32, rngs=nnx.Rngs(0)))
    x = normal((B, L, 16))
    close(model(x), reference(tree(model), x, cell=cell))


@pytest.mark.parametrize("cell", [*QUICK, *SLOW])
def test_parts_and_tokens(cell):
    model, x = make(cell, in_features=3, out_features=5), normal((B, L, 3))
    ids = np.cumsum(np.arange(L) % 5 == 4)
    mask = (np.arange(L) != 2) & np.ones((B, 1), bool)
    for options in ({}, {"reset": np.arange(L) % 4 == 3, "mask": mask}):
        want = model(x, **options)
        for split in ((5, L), (1, 4, L)):
            state, start = None, 0
            for stop in split:
                part = {name: flag[..., start:stop] for name, flag in options.items()}
                y, state = model(x[:, start:stop], state=state, return_state=True, **part)
                close(y, want[:, start:stop])
                start = stop
        state = model.init_state(B)
        step = jax.jit(model.step)
        for t in range(L):
            y, state = step(x[:, t], state, **{name: flag[..., t] for name, flag in options.items()})
            close(y, want[:, t])
    starts = np.concatenate([[False], ids[1:] != ids[:-1]])
    close(model(x, segment_ids=ids), model(x, reset=starts))


@pytest.mark.parametrize("scan", [False, True])
def test_scanned_models_carry_states(scan):
    model, x = make(scan_layers=scan), normal((B, L, D))
    y, state = model(x[:, :6], return_state=True)
    z, state = model(x[:, 6:-1], state=state, return_state=True)
    last, _ = model.step(x[:, -1], state)
    close(jnp.concatenate([y, z, last[:, None]], 1), model(x))


@pytest.mark.parametrize("direction", ["forward", "alternating", "bidirectional"])
@pytest.mark.parametrize(
    "cell", ["lru", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mamba block", "rglru block"))]
)
def test_documents_do_not_see_each_other(cell, direction):
    model = make(cell, layers=2, direction=direction)
    x = normal((L, D))
    ends = [0, 4, 5, L]
    mask = np.ones(L, bool)
    mask[[2, 5, 6, 12]] = False
    dirty = np.where(mask[:, None], x, np.nan)
    ids = np.repeat([7, 3, 7], np.diff(ends))
    reset = np.isin(np.arange(L), [4, 5])
    # Document 3 starts with padding: where its first valid token resets, and where the ids change.
    reset[[5, 7]] = [False, True]
    want = np.zeros((L, D), np.float32)
    for start, stop in itertools.pairwise(ends):
        valid = np.flatnonzero(mask[start:stop]) + start
        want[valid] = model(x[valid])
    close(model(dirty, segment_ids=ids, mask=mask), want)
    close(model(dirty, reset=reset, mask=mask), want)
    close(model(np.stack([dirty, dirty]), segment_ids=ids, mask=mask)[1], want)
    gradient = jax.grad(lambda x: jnp.sum(model(x, segment_ids=ids, mask=mask) ** 2))(dirty)
    assert np.isfinite(gradient).all() and np.all(np.asarray(gradient)[~mask] == 0)


def test_directions():
    x = normal((B, L, D))
    moved = x.copy()
    moved[:, 6] += 1
    for direction, before in (("forward", False), ("alternating", True), ("bidirectional", True)):
        model = make(layers=2, direction=direction)
        change = np.abs(model(moved) - model(x)).max((0, 2))
        assert change[7:].min() > 0 and (change[:6].min() > 0) == before
    both = make(layers=2, direction="bidirectional", glu=False)
    assert both(x).shape == x.shape


@pytest.mark.parametrize("direction", ["forward", "alternating", "bidirectional"])
def test_scanned_is_unrolled(direction):
    x = normal((B, L, D))
    forms = [
        pure(SequenceModel(D, 4, LRUCell, direction=direction, scan_layers=scan, rngs=nnx.Rngs(0)))
        for scan in (False, True)
    ]
    results = [
        jax.jit(jax.value_and_grad(lambda s, x, f=f: jnp.sum(jnp.sin(f(s, x))), 1))(s, x) for f, s in forms
    ]
    close(forms[1][0](forms[1][1], x), forms[0][0](forms[0][1], x))
    trees_close(results[1], results[0])
    with pytest.raises(ValueError, match="want a multiple of 4"):
        SequenceModel(D, 3, LRUCell, direction="alternating", scan_layers=True, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("cell", ["lru", pytest.param("mamba", marks=pytest.mark.slow)])
def test_remat_changes_memory_only(cell):
    x = normal((4, 128, D))
    values, temps = {}, {}
    for policy in ("none", "full", "dots_saveable", "save_attention"):
        apply, state = pure(make(cell, layers=4, remat=policy))

        def gradient(state, apply=apply):
            return jax.value_and_grad(lambda s: jnp.sum(jnp.sin(apply(s, x))))(state)

        values[policy], temps[policy] = jax.jit(gradient)(state), temp_bytes(gradient, state)
    for policy, value in values.items():
        trees_close(value, values["none"], 1e-4)
        assert policy == "none" or temps[policy] < temps["none"], temps


def test_gradients(x64):
    model = wide(make("mamba", layers=2, direction="alternating"))
    apply, state = pure(model)
    check_gradient(lambda p: jnp.sum(jnp.sin(apply(*p))), (state, normal((B, L, D)).astype(np.float64)))


@pytest.mark.parametrize("cell", [*QUICK, *SLOW])
def test_a_step_changes_every_parameter(cell):
    assert not after_a_step(
        make(cell, in_features=3, out_features=2, direction="bidirectional"), normal((B, L, 3))
    )


@pytest.mark.slow
def test_transformations():
    model, x = make("mamba", layers=2, scan_layers=True), normal((B, L, D))
    apply, state = pure(model)
    close(jax.vmap(apply, (None, 0))(state, x), apply(state, x))

    def loss(x):
        return jnp.sum(jnp.sin(apply(state, x)))

    v = normal(x.shape, 3)
    slope = jax.jit(lambda x: jax.jvp(loss, (x,), (v,))[1])
    close(slope(x), np.vdot(jax.grad(loss)(x), v), 1e-4)
    close(jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (v,))[1])(x), jax.grad(slope)(x), 1e-4)


def test_dropout():
    model, x = make(dropout_rate=0.5), normal((B, L, D))
    keys = [jax.random.key(i) for i in range(2)]
    once = model(x, dropout_key=keys[0])
    assert np.array_equal(once, model(x, dropout_key=keys[0]))
    assert np.abs(once - model(x)).max() > 1e-2
    assert np.abs(once - model(x, dropout_key=keys[1])).max() > 1e-2
    close(remat(model)(x, dropout_key=keys[0]), once)


@pytest.mark.parametrize("cell", [*QUICK, *SLOW])
def test_half_types_are_kept(cell):
    x = normal((B, L, D))
    half, exact = make(cell, dtype=jnp.bfloat16), make(cell)
    assert half.stack.blocks[0].cell.dtype == jnp.bfloat16
    assert half(x).dtype == half(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert np.abs(np.float32(half(x)) - exact(x)).max() < 0.1 * np.abs(exact(x)).max()


def test_no_compilation_twice():
    x = normal((B, L, D))
    traces = []
    model = make()
    definition = nnx.graphdef(model)

    @functools.partial(jax.jit, static_argnums=0)
    def run(definition, state, x):
        traces.append(1)
        return nnx.merge(definition, state)(x)

    run(definition, nnx.state(model), x)
    run(nnx.graphdef(make(seed=1)), nnx.state(make(seed=1)), x)
    assert len(traces) == 1


def test_a_cell_of_ones_own():
    class Sum(nnx.Module):
        def __init__(self, features, *, dtype, param_dtype, rngs):
            self.scale = nnx.Param(jnp.ones(features))

        def __call__(self, x):
            return jnp.cumsum(x, -2) * self.scale[...]

    model = SequenceModel(D, 2, Sum, direction="alternating", rngs=nnx.Rngs(0))
    assert np.isfinite(model(normal((B, L, D)))).all()


def test_errors():
    for options, name in (
        ({"direction": "sideways"}, "direction"),
        ({"remat": "some"}, "remat"),
        ({"dropout_rate": -1}, "dropout_rate"),
        ({"layers": -1}, "num_layers"),
    ):
        with pytest.raises(ValueError, match=name):
            make(**options)
    x = normal((B, L, D))
    with pytest.raises(ValueError, match="x: got shape"):
        make()(x[..., :3])
    with pytest.raises(TypeError, match="int32"):
        make()(np.zeros((B, L, D), np.int32))
    with pytest.raises(TypeError, match="mask"):
        make()(x, mask=np.ones(L))
    for state, name in (((), "state: got"), (make().init_state(B + 1), "state")):
        with pytest.raises(ValueError, match=name):
            make()(x, state=state)
    both = make(direction="bidirectional")
    for call in (
        lambda: both.init_state(B),
        lambda: both(x, return_state=True),
        lambda: both.step(x[:, 0], None),
    ):
        with pytest.raises(ValueError, match='want direction="forward"'):
            call()
    assert make(layers=0)(x).shape == x.shape
    assert make()(x[:, :0]).shape == (B, 0, D)


@pytest.mark.slow
def test_with_the_flags_of_tree_mode():
    """The same tests in a process with Flax's graph mode off."""
    flags = {"NNX_GRAPH_MODE": "false", "NNX_GRAPH_UPDATES": "false"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    command += ["-k", "unrolled or dropout or carry"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, env=os.environ | flags, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
