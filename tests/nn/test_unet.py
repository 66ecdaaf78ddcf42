"""The UNet against NumPy, in one, two and three dimensions."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import unet_reference as reference
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

from probjax.nn import UNet, remat

SHAPES = {1: (9,), 2: (5, 6), 3: (3, 4, 2)}


def make(rank=2, seed=0, channels=(4, 8), **config):
    config = {"num_heads": 2, **config}
    return stirred(UNet(3, spatial_rank=rank, channels=channels, **config, rngs=nnx.Rngs(seed)))


def divisor(channels):
    """Of the numbers up to 32 that leave two channels or more to a group, the largest that divides."""
    return next((n for n in range(32, 1, -1) if channels % n == 0 and channels // n >= 2), 1)


def test_counts():
    narrow = UNet(3, spatial_rank=2, kernel_size=(1, 3), strides=(1, 2), rngs=nnx.Rngs(0))
    assert count(narrow) == (2_803_968, 82)
    assert count(UNet(3, spatial_rank=2, rngs=nnx.Rngs(0))) == (7_940_352, 82)


@pytest.mark.parametrize(
    ("rank", "odd"),
    [(1, True), (2, False), (2, True), pytest.param(3, False, marks=pytest.mark.slow), (3, True)],
)
def test_values(rank, odd):
    model = make(rank, attention=(False, True))
    shape = SHAPES[rank] if odd else (8, 4, 2)[:rank]
    x = normal((2, *shape, 3))
    want = reference.unet(tree(model), np.float64(x), strides=(2,) * rank, groups=divisor)
    close(model(x), want)


@pytest.mark.parametrize(
    "config",
    [
        {"blocks_per_stage": 2, "attention": (True, False), "out_channels": 5},
        {"kernel_size": (1, 3), "strides": (1, 2), "channels": (4, 6, 8)},
        {"condition_features": 4},
        {"condition_features": 4, "context_features": 6, "attention": (True, True)},
        {"channels": (6,)},
    ],
)
def test_values_of_configurations(config):
    model = make(**config)
    x, c, context = normal((2, 5, 6, 3)), normal((2, 4), 1), normal((2, 7, 6), 2)
    given = {n: v for n, v in (("condition", c), ("context", context)) if f"{n}_features" in config}
    want = reference.unet(
        tree(model),
        np.float64(x),
        strides=config.get("strides", (2, 2)),
        groups=divisor,
        **{name: np.float64(value) for name, value in given.items()},
    )
    close(model(x, **given), want)


def test_leading_axes():
    model = make(condition_features=4)
    x, c = normal((2, 3, 5, 4, 3)), normal((2, 3, 4), 1)
    want = model(x, condition=c)
    close(model(x[1], condition=c[1]), want[1])
    close(model(x[1, 2], condition=c[1, 2]), want[1, 2])
    assert model(x[:0], condition=c[:0]).shape == (0, 3, 5, 4, 3)


def test_masked_context():
    model = make(context_features=6, attention=(True, True))
    x, context = normal((2, 4, 4, 3)), normal((2, 7, 6), 2)
    seen = np.arange(7) < 5
    dirty = np.where(seen[:, None], context, np.nan)
    close(model(x, context=dirty, context_mask=seen), model(x, context=context[:, :5]))


def test_an_impulse_spreads_along_every_axis():
    for rank, config in ((2, {}), (2, {"kernel_size": (1, 3), "strides": (1, 2)})):
        model, size = make(rank, **config), 16
        x = normal((1, *(size,) * rank, 3))
        moved = x.copy()
        moved[(0, *(4,) * rank)] += 1
        change = np.abs(np.asarray(model(moved) - model(x))).max((0, -1))
        for axis in range(rank):
            line = change[tuple(slice(2, 7) if i == axis else 4 for i in range(rank))]
            # Norms spread a little of it everywhere: a hundredth.
            reached = np.delete(line, 2).max() > 0.05 * change.max()
            assert reached == (not config or axis == 1)


def test_stages_have_attention_on_both_ways():
    model = make(channels=(4, 8, 12), attention=(False, True, False))
    for way in (model.down, model.up):
        assert [[step.attends for step in stage] for stage in way] == [[False], [True], [False]]
    assert [step.attends for step in model.middle] == [False, False]
    heads = make(channels=(128,), attention=(True,), num_heads=8).down[0][0].attention.attention
    assert (heads.num_heads, heads.head_size) == (8, 16)


def test_any_number_of_channels():
    model = make(channels=(48, 7))
    assert model.down[0][0].block.norm1.num_groups == 24
    assert model.down[1][0].block.norm1.num_groups == 1
    assert np.isfinite(model(normal((1, 4, 4, 3)))).all()


def test_a_single_position_is_not_normed_away():
    model, x = make(channels=(8, 16)), normal((2, 1, 1, 3))
    assert np.abs(model(x)[0] - model(x)[1]).max() > 1e-2
    step = model.middle[0].block
    assert np.abs(step.norm1(normal((1, 1, 1, 16)))).max() > 0.1


def test_half_types_are_kept():
    x, c = normal((2, 5, 6, 3)), normal((2, 4), 1)
    config = {"condition_features": 4, "attention": (False, True)}
    half, exact = make(dtype=jnp.bfloat16, **config), make(**config)
    assert half(x, condition=c).dtype == half(x.astype(jnp.bfloat16), condition=c).dtype == jnp.bfloat16
    assert (
        np.abs(np.float32(half(x, condition=c)) - exact(x, condition=c)).max()
        < 0.1 * np.abs(exact(x, condition=c)).max()
    )


def test_dropout():
    model, x = make(dropout_rate=0.5), normal((2, 5, 6, 3))
    keys = [jax.random.key(i) for i in range(2)]
    once = model(x, dropout_key=keys[0])
    assert np.array_equal(once, model(x, dropout_key=keys[0]))
    assert np.abs(once - model(x)).max() > 1e-2
    assert np.abs(once - model(x, dropout_key=keys[1])).max() > 1e-2
    close(remat(model)(x, dropout_key=keys[0]), once)


def test_gradients(x64):
    model = wide(make(condition_features=4, context_features=6, attention=(False, True)))
    definition, state = nnx.split(model)
    point = state, *(normal(s, i).astype(np.float64) for i, s in enumerate(((2, 5, 4, 3), (2, 4), (2, 7, 6))))

    def loss(p):
        return jnp.sum(jnp.sin(nnx.merge(definition, p[0])(p[1], condition=p[2], context=p[3])))

    check_gradient(loss, point)


def test_a_step_changes_every_parameter():
    same = after_a_step(make(attention=(False, True)), normal((2, 5, 6, 3)))
    assert all(name.endswith("key.bias") for name in same), same


def test_remat_changes_memory_only():
    x = normal((2, 16, 16, 3))
    values, temps = {}, {}
    for policy in ("none", "full", "dots_saveable", "save_attention"):
        apply, state = pure(make(channels=(8, 16), attention=(False, True), remat=policy))

        def gradient(state, apply=apply):
            return jax.value_and_grad(lambda s: jnp.sum(jnp.sin(apply(s, x))))(state)

        values[policy], temps[policy] = jax.jit(gradient)(state), temp_bytes(gradient, state)
    for policy, value in values.items():
        trees_close(value, values["none"], 1e-4)
        assert policy == "none" or temps[policy] < temps["none"], temps


@pytest.mark.slow
def test_transformations():
    model, x = make(attention=(False, True)), normal((2, 5, 6, 3))
    apply, state = pure(model)
    close(jax.vmap(apply, (None, 0))(state, x), apply(state, x))

    def loss(x):
        return jnp.sum(jnp.sin(apply(state, x)))

    v = normal(x.shape, 3)
    slope = jax.jit(lambda x: jax.jvp(loss, (x,), (v,))[1])
    close(slope(x), np.vdot(jax.grad(loss)(x), v), 1e-4)
    close(jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (v,))[1])(x), jax.grad(slope)(x), 1e-4)


def test_errors():
    for options, name in (
        ({"rank": 4}, "spatial_rank"),
        ({"channels": ()}, "channels"),
        ({"channels": (4, 0)}, "channels"),
        ({"attention": (True,)}, "attention"),
        ({"attention": (False, True), "num_heads": 3}, "num_heads"),
        ({"kernel_size": (3,)}, "kernel_size"),
        ({"strides": (2, 0)}, "strides"),
        ({"context_features": 4}, "context_features"),
        ({"remat": "some"}, "remat"),
    ):
        with pytest.raises(ValueError, match=name):
            make(**options)
    model, x = make(condition_features=4), normal((2, 5, 6, 3))
    with pytest.raises(ValueError, match="x: got shape"):
        model(x[..., :2], condition=normal((2, 4)))
    with pytest.raises(ValueError, match="condition: got None"):
        model(x)
    with pytest.raises(ValueError, match=r"condition: got shape \(4,\)"):
        model(x, condition=normal((4,)))
    with pytest.raises(TypeError, match="int32"):
        model(np.zeros(x.shape, np.int32), condition=normal((2, 4)))


@pytest.mark.slow
def test_with_the_flags_of_tree_mode():
    """The same tests in a process with Flax's graph mode off."""
    flags = {"NNX_GRAPH_MODE": "false", "NNX_GRAPH_UPDATES": "false"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    command += ["-k", "a_step or dropout"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, env=os.environ | flags, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
