"""Transformer and diffusion transformer against NumPy, in every form of a stack, as reference workloads."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformer_reference as reference
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

from probjax import masks
from probjax.nn import DiffusionTransformer, MultiHeadAttention, Transformer, TransformerBlock, _stack, remat

B, L, D = 2, 9, 16
REMAT = ("none", "full", "dots_saveable", "save_attention")


def make(layers=3, seed=0, features=D, **config):
    return stirred(Transformer(features, layers, 4, **config, rngs=nnx.Rngs(seed)))


def make_diffusion(layers=2, seed=0, **config):
    return stirred(DiffusionTransformer(D, layers, 4, in_features=3, **config, rngs=nnx.Rngs(seed)))


# ----------------------------------------------------------------------------------------------------------
# The reference workloads


def workload(layers=4, features=256, **options):
    return Transformer(features, layers, 8, final_norm=False, **options, rngs=nnx.Rngs(0))


def diffusion_workload(**options):
    return DiffusionTransformer(
        256,
        4,
        8,
        in_features=8,
        condition_hidden=512,
        gate=False,
        final_norm=False,
        **options,
        rngs=nnx.Rngs(0),
    )


def test_counts():
    assert count(workload()) == (3_159_040, 64)
    assert count(workload(scan_layers=True)) == (3_159_040, 16)
    assert count(diffusion_workload()) == (5_817_896, 105)


@pytest.mark.parametrize(("layers", "want"), [(12, 37_828_608), (24, 75_657_216)])
def test_counts_of_deep_ones(layers, want):
    def build(key):
        return nnx.state(
            Transformer(512, layers, 8, final_norm=False, scan_layers=True, rngs=nnx.Rngs(params=key))
        )

    shapes = jax.tree.leaves(jax.eval_shape(build, jax.random.key(0)))
    assert (sum(int(np.prod(x.shape)) for x in shapes), len(shapes)) == (want, 16)


# Temporaries, arguments and results in MB of the reference file, 128 tokens, float32, attention of jax.nn.
SEED = {
    "transformer": ((6.515625, 12.55078125, 0.5), (64.50201797, 36.65234756, 36.15383148)),
    "diffusion": ((7.1796875, 22.20915222, 0.015625), (61.13190079, 66.59617996, 66.58296204)),
}


@pytest.mark.parametrize("name", SEED)
def test_the_programs_are_those_of_the_reference_file(name, monkeypatch):
    """XLA's account to 0.1 MB, so the work is the same; with sums that are not settled, see `_cpu.settle`."""
    from probjax.nn import diffusion, transformer

    for module in (_stack, transformer, diffusion):
        monkeypatch.setattr(module, "settle", lambda x: x)
    build = workload if name == "transformer" else diffusion_workload
    apply, state = pure(build(attention_fn=jax.nn.dot_product_attention))
    shape = (4, 128, 256) if name == "transformer" else (4, 128, 8)
    inputs = [jnp.zeros(shape)] + ([jnp.zeros(4)] if name == "diffusion" else [])
    optimizer = optax.adam(1e-3)

    def step(state, opt, *inputs):
        loss, grads = jax.value_and_grad(lambda s: jnp.mean(jnp.square(apply(s, *inputs))))(state)
        updates, opt = optimizer.update(grads, opt, state)
        return optax.apply_updates(state, updates), opt, loss

    programs = ((apply, (state, *inputs)), (step, (state, optimizer.init(state), *inputs)))
    for (function, args), want in zip(programs, SEED[name], strict=True):
        memory = jax.jit(function).lower(*args).compile().memory_analysis()
        sizes = memory.temp_size_in_bytes, memory.argument_size_in_bytes, memory.output_size_in_bytes
        # The diffusion model's train step takes half a megabyte less: the seed adds its sines elsewhere.
        slack = 0.7 if name == "diffusion" and function is step else 0.1
        assert np.abs(np.array(sizes) / 2**20 - want).max() < slack, np.array(sizes) / 2**20


# ----------------------------------------------------------------------------------------------------------
# Values

CONFIGS = {
    "plain": {},
    "reference": {"final_norm": False},
    "projected": {"in_features": 5, "out_features": 3},
    "sinusoidal": {"positions": "sinusoidal"},
    "learned": {"positions": "learned", "max_length": 20},
    "rotary": {"rotary": 100.0, "num_kv_heads": 2},
    "no biases": {"use_bias": False, "mlp_features": 24},
    "odd width": {"positions": "sinusoidal", "features": 20},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_values(config):
    model, x = make(**config), normal((B, L, config.get("in_features", config.get("features", D))))
    options = {"rotary": config.get("rotary"), "visible": np.tril(np.ones((L, L), bool))}
    want = reference.transformer(
        reference.tree(model), np.float64(x), positions=config.get("positions"), **options
    )
    close(model(x, is_causal=True), want)
    close(model(x, mask=masks.Causal()), want)


@pytest.mark.parametrize("config", [{}, {"gate": True}, {"condition_hidden": 12}, {"context_features": 6}])
def test_values_of_conditioned_blocks(config):
    model = make(condition_features=5, **config)
    x, c = normal((B, L, D)), normal((B, 5), 1)
    more = {"context": normal((B, 7, 6), 2)} if "context_features" in config else {}
    want = reference.transformer(
        reference.tree(model),
        np.float64(x),
        condition=np.float64(c),
        gate=config.get("gate", False),
        **{name: np.float64(value) for name, value in more.items()},
    )
    close(model(x, condition=c, **more), want)
    # One condition per token.
    close(model(x, condition=np.broadcast_to(c[:, None], (B, L, 5)), **more), want)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"gate": False, "condition_hidden": 12, "final_norm": False},
        {"condition_features": 5, "out_features": 2},
    ],
)
def test_values_of_diffusion(config):
    model = make_diffusion(**config)
    x, t = normal((B, L, 3)), np.array([0.1, 0.8], np.float32)
    c = normal((B, 5), 1) if "condition_features" in config else None
    want = reference.diffusion(
        reference.tree(model),
        np.float64(x),
        np.float64(t),
        condition=None if c is None else np.float64(c),
        gate=config.get("gate", True),
    )
    close(model(x, t, condition=c), want)
    close(model(x[0], t[0], condition=None if c is None else c[0]), want[0])


def test_diffusion_starts_as_the_papers_say():
    model = DiffusionTransformer(D, 2, 4, in_features=3, rngs=nnx.Rngs(0))
    x, t = normal((B, L, 3)), jnp.ones(B)
    assert np.all(np.asarray(model(x, t)) == 0)
    embedded = model.transformer.embed(x)
    h = model.transformer(x, condition=jnp.ones((B, 128)))
    close(h - embedded, np.broadcast_to(reference.sinusoidal(np.arange(L), D), (B, L, D)))


def test_padding_of_the_batch():
    model, x = make(rotary=10.0), normal((B, L, D))
    valid = np.arange(L) < np.array([[4], [9]])
    y = model(x, mask=masks.Padding(valid))
    close(y[0, :4], model(x[0, :4]))


def test_no_layers_and_no_tokens():
    assert make(0)(normal((B, L, D))).shape == (B, L, D)
    assert make(2, scan_layers=True)(normal((B, 0, D))).shape == (B, 0, D)


# ----------------------------------------------------------------------------------------------------------
# Stacks


def form(**options):
    model = Transformer(D, 4, 4, rotary=10.0, **options, rngs=nnx.Rngs(0))
    return pure(model, is_causal=True)


def test_scanned_is_unrolled():
    x = normal((B, L, D))
    apply, state = form()
    want, gradient = jax.value_and_grad(lambda s: jnp.sum(jnp.sin(apply(s, x))))(state)
    for unroll in (1, 2, 4):
        scanned, stacked = form(scan_layers=True, unroll=unroll)
        got, theirs = jax.value_and_grad(lambda s: jnp.sum(jnp.sin(scanned(s, x))))(stacked)  # noqa: B023
        close(got, want)
        for i in range(4):
            trees_close(
                jax.tree.map(lambda a, i=i: a[i], theirs["stack"]["blocks"][0]),
                gradient["stack"]["blocks"][i],
            )


@pytest.mark.parametrize("scan", [False, True])
def test_remat_changes_memory_only(scan):
    x = normal((8, 64, D))
    values, temps = {}, {}
    for policy in REMAT:
        apply, state = form(scan_layers=scan, remat=policy)

        def gradient(state, x, apply=apply):
            return jax.value_and_grad(lambda s: jnp.sum(jnp.sin(apply(s, x))))(state)

        values[policy] = jax.jit(gradient)(state, x)
        temps[policy] = temp_bytes(gradient, state, x)
        close(apply(state, x), form(scan_layers=scan)[0](state, x))
    for policy in REMAT[1:]:
        trees_close(values[policy], values["none"], 1e-4)
        assert temps[policy] < temps["none"], temps
    assert temps["full"] <= min(temps.values()) * 1.05
    assert temps["full"] < 0.6 * temps["none"]


def test_save_attention_does_not_run_it_again():
    x = normal((B, L, D))
    calls = {}
    for policy in ("full", "save_attention"):
        apply, state = form(remat=policy)
        text = str(jax.make_jaxpr(jax.grad(lambda s, apply=apply: jnp.sum(jnp.sin(apply(s, x)))))(state))
        calls[policy] = text.count("probjax.attention.primitive")
    # Forward and backward of four blocks, and forward again.
    assert calls == {"full": 12, "save_attention": 8}


def test_remat_of_a_whole_model():
    model, x = make(scan_layers=True), normal((8, 64, D))
    saved = remat(model, "full")
    assert (model.stack.remat, saved.stack.remat) == ("none", "full")
    close(saved(x), model(x))
    temps = []
    for each in (model, saved):
        apply, state = pure(each)
        temps.append(temp_bytes(jax.grad(lambda s, apply=apply: jnp.sum(jnp.sin(apply(s, x)))), state))
    assert temps[1] < 0.6 * temps[0]
    assert remat(make_diffusion()).transformer.stack.remat == "full"
    with pytest.raises(ValueError, match="MultiHeadAttention, which has no stack"):
        remat(MultiHeadAttention(4, D, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="remat: got 'some'"):
        remat(model, "some")


def test_a_scanned_program_does_not_grow():
    lines = [
        len(str(jax.make_jaxpr(make(layers, scan_layers=True).__call__)(normal((B, L, D)))))
        for layers in (4, 8)
    ]
    assert lines[1] < 1.1 * lines[0]


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", None])
def test_decoding(scan, positions):
    extra = {"max_length": L} if positions == "learned" else {}
    model = make(scan_layers=scan, positions=positions, rotary=10.0, in_features=3, **extra)
    x = normal((B, L, 3))
    want = model(x, is_causal=True)
    step = jax.jit(lambda x, cache: model(x, is_causal=True, cache=cache))
    for split in ((1,) * L, (4, 1, 4)):
        cache, start = model.init_cache(B, L), 0
        for size in split:
            y, cache = step(x[:, start : start + size], cache)
            close(y, want[:, start : start + size])
            start += size


# ----------------------------------------------------------------------------------------------------------
# Derivatives, training, dropout


def test_gradients(x64):
    x = normal((B, L, 3)).astype(np.float64)
    t = np.array([0.2, 0.7])
    weight = normal((B, L, 3), 2)
    for options in (
        {},
        {"gate": False, "condition_hidden": 6, "scan_layers": True, "remat": "save_attention"},
    ):
        apply, state = pure(wide(make_diffusion(num_kv_heads=2, rotary=10.0, **options)))
        check_gradient(lambda p, apply=apply: jnp.sum(weight * apply(*p)), (state, x, t))
    definition, state = nnx.split(wide(make(positions="learned", max_length=L, context_features=4)))
    point = state, *(normal(shape).astype(np.float64) for shape in ((B, L, D), (B, 5, 4)))
    check_gradient(lambda p: jnp.sum(jnp.sin(nnx.merge(definition, p[0])(p[1], context=p[2]))), point)


@pytest.mark.parametrize("scan", [False, True])
def test_a_step_changes_every_parameter(scan):
    x, t = normal((B, L, 3)), np.array([0.1, 0.8], np.float32)
    # Softmax does not see what all keys have in common.
    same = after_a_step(
        make(in_features=3, out_features=2, positions="learned", max_length=L, scan_layers=scan), x
    )
    assert all(name.endswith("key.bias") for name in same), same
    same = after_a_step(make_diffusion(scan_layers=scan), x, t)
    assert all(name.endswith("key.bias") for name in same), same


def test_no_compilation_twice():
    model, x = make(), normal((B, L, D))
    apply, state = pure(model)
    traces = []

    @jax.jit
    def run(state, x):
        traces.append(1)
        return apply(state, x)

    run(state, x)
    run(jax.tree.map(lambda a: a + 1, state), x)
    # Built again: the same definition.
    state = pure(make(seed=1))[1]
    assert nnx.graphdef(make(seed=1)) == nnx.graphdef(model)
    run(state, x)
    assert len(traces) == 1


@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True])
def test_transformations(scan):
    model = make_diffusion(scan_layers=scan, remat="full")
    x, t = normal((B, L, 3)), np.array([0.2, 0.7], np.float32)
    apply, state = pure(model)
    close(jax.vmap(apply, (None, 0, 0))(state, x, t), apply(state, x, t))

    def loss(x):
        return jnp.sum(apply(state, x, t) ** 2)

    v = normal(x.shape, 3)
    slope = jax.jit(lambda x: jax.jvp(loss, (x,), (v,))[1])
    close(slope(x), np.vdot(jax.grad(loss)(x), v), 1e-4)
    close(jax.jit(lambda x: jax.jvp(jax.grad(loss), (x,), (v,))[1])(x), jax.grad(slope)(x), 1e-4)
    # In time, as mean flow trains.
    tangent = jax.jvp(lambda t: apply(state, x, t), (t,), (np.ones_like(t),))[1]
    eps = 1e-3
    close(tangent, (apply(state, x, t + eps) - apply(state, x, t - eps)) / (2 * eps), 1e-2)


@pytest.mark.parametrize("scan", [False, True])
def test_dropout(scan):
    model, x = make(dropout_rate=0.3, scan_layers=scan), normal((B, L, D))
    key = jax.random.key(0)
    once = model(x, dropout_key=key)
    assert np.array_equal(once, model(x, dropout_key=key))
    assert np.abs(once - model(x)).max() > 1e-2
    assert np.abs(once - model(x, dropout_key=jax.random.key(1))).max() > 1e-2
    # Under remat the same masks.
    close(remat(model)(x, dropout_key=key), once)


def test_dropout_differs_between_layers_and_operations():
    block = TransformerBlock(D, 4, dropout_rate=0.5, rngs=nnx.Rngs(0))
    # All of value 1 after attention and MLP: what is left are the masks.
    zero = jax.tree.map(jnp.zeros_like, nnx.state(block))
    zero["attention"]["out"]["bias"][...] = jnp.ones(D)
    zero["mlp"]["layers"][1]["bias"][...] = 100 * jnp.ones(D)
    nnx.update(block, zero)
    x = jnp.zeros((B, L, D))
    masks_of = []
    for i in range(2):
        y = np.asarray(block(x, dropout_key=jax.random.fold_in(jax.random.key(0), i)))
        masks_of += [np.round(y % 100).astype(int) == 2, y > 50]
    for i in range(4):
        for j in range(i):
            assert (masks_of[i] == masks_of[j]).mean() < 0.7
    assert all(0.35 < m.mean() < 0.65 for m in masks_of)


def test_half_types_are_kept():
    x, t = normal((B, L, 3)), np.array([0.2, 0.7], np.float32)
    exact, half = (make_diffusion(scan_layers=True, dtype=d) for d in (None, jnp.bfloat16))
    assert half(x, t).dtype == half(x.astype(jnp.bfloat16), t.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert np.abs(np.float32(half(x, t)) - exact(x, t)).max() < 0.05 * np.abs(exact(x, t)).max()
    functions = [pure(model)[0] for model in (half, exact)]
    grads = [
        jax.grad(lambda s, f=f: jnp.sum(f(s, x, t).astype(jnp.float32) ** 2))(nnx.state(half))
        for f in functions
    ]
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads[0]))
    for g, w in zip(*map(jax.tree.leaves, grads), strict=True):
        assert np.abs(g - w).max() < 0.1 * np.abs(w).max() + 0.02


def test_further_arguments_arrive():
    model = make(normalize_qk=True, num_kv_heads=2, relative_positions=5)
    assert all(b.attention.num_kv_heads == 2 and b.attention.normalize_qk for b in model.stack.blocks)
    with pytest.raises(TypeError, match="unheard_of"):
        make(unheard_of=1)


def test_errors():
    for options, name in (
        ({"positions": "some"}, "positions"),
        ({"positions": "learned"}, "max_length"),
        ({"max_length": 4}, "max_length"),
        ({"remat": "half"}, "remat"),
        ({"gate": True}, "gate"),
        ({"unroll": 0}, "unroll"),
        ({"layers": -1}, "num_layers"),
        ({"dropout_rate": 1.5}, "dropout_rate"),
    ):
        with pytest.raises(ValueError, match=name):
            make(**options)
    x = normal((B, L, D))
    with pytest.raises(ValueError, match="x: got shape"):
        make()(x[..., :3])
    with pytest.raises(TypeError, match="int32"):
        make()(np.ones(x.shape, np.int32))
    with pytest.raises(ValueError, match="no blocks"):
        make(0).init_cache(B, L)
    with pytest.raises(ValueError, match="condition: got an array, want None"):
        make()(x, condition=x[:, 0])
    with pytest.raises(ValueError, match="condition: got None"):
        make(condition_features=4)(x)
    with pytest.raises(ValueError, match="condition: got shape"):
        make(condition_features=4)(x, condition=normal((B + 1, 4)))
    with pytest.raises(ValueError, match="at most max_length = 4"):
        make(positions="learned", max_length=4)(x)
    with pytest.raises(ValueError, match="t: got shape"):
        make_diffusion()(x[..., :3], normal((3,)))
    with pytest.raises(TypeError, match="t: got dtype"):
        make_diffusion()(x[..., :3], np.arange(B))


def test_with_the_flags_of_tree_mode():
    """The same tests in a process with Flax's graph mode off."""
    flags = {"NNX_GRAPH_MODE": "false", "NNX_GRAPH_UPDATES": "false"}
    wanted = (
        "test_scanned_is_unrolled or test_remat_of or test_transformations or test_a_step or test_dropout"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    command += ["-k", f"({wanted}) and not flags"]
    done = subprocess.run(
        command,
        env=os.environ | flags,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
