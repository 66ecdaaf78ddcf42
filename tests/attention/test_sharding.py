"""Acceptance cases I on eight CPU devices: batch and head sharding without communication."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import probjax
from oracle import agree, normal, qkv

P = PartitionSpec
B, T, S, N, K, D = 4, 6, 7, 4, 2, 3

# The mesh is (batch 4, heads 2): both axes split the batch entries and the key/value heads evenly.
LAYOUTS = {
    "heads": P(None, None, "model"),
    "batch and heads": P("data", None, "model"),
    "batch over both": P(("data", "model")),
}
MODES = ["backward", "jvp"]  # the jvp gives value and tangent


def mesh(kind, shape=(4, 2)):
    return jax.make_mesh(shape, ("data", "model"), axis_types=(kind, kind))


def arrays(batch=B):
    return {name: jnp.asarray(x, "float32") for name, x in qkv((batch,), T, S, N, K, D).items()}


def run(mode, implementation, arrays, **options):
    """Gradients of a fixed loss, or value and tangent along the arrays themselves."""

    def attend(arrays):
        return probjax.dot_product_attention(
            **arrays, **options, implementation=implementation, return_residual=True
        )

    def loss(arrays):
        out, lse = attend(arrays)
        return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum()

    if mode == "backward":
        return jax.grad(loss)(arrays)
    return jax.jvp(attend, (arrays,), (arrays,))


def same(got, want, tolerance=2e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: agree(a, b, tolerance, floor=1e-2), got, want)


COLLECTIVES = ("all-gather", "all-to-all", "collective-permute")


def collectives(text):
    return [word for word in COLLECTIVES if word in text]


def compiled(function, *arguments):
    """The result, and the text of the compiled program."""
    program = jax.jit(function).lower(*arguments).compile()
    return program(*arguments), program.as_text()


def put(tree, specs, mesh):
    return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in tree.items()}


@functools.cache
def alone(mode, batch, keys):
    """The result on one device with the reference implementation."""
    return run(mode, "reference", arrays(batch), **dict(keys))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_i1_i3_i6_sharded_equals_unsharded(implementation, kind, layout, mode):
    """No all-gather, grouped heads, and outputs sharded as the query is."""
    batch = 8 if layout == "batch over both" else B
    options = (("is_causal", True),)
    placed = put(arrays(batch), dict.fromkeys(("query", "key", "value"), LAYOUTS[layout]), mesh(kind))
    with jax.set_mesh(mesh(kind)):
        got, text = compiled(functools.partial(run, mode, implementation, **dict(options)), placed)
    assert not collectives(text)
    same(got, alone(mode, batch, options))
    leading = jax.tree.leaves(got)[0]
    assert not leading.sharding.is_fully_replicated


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_shard_map(implementation, layout, mode):
    """With check_vma on; each device calls on its own part."""
    batch = 8 if layout == "batch over both" else B
    spec = LAYOUTS[layout]
    specs = dict.fromkeys(("query", "key", "value"), spec)
    head = P(*spec, *[None] * (3 - len(spec)))
    out = {"backward": specs, "jvp": ((spec, head), (spec, head))}[mode]

    def local(arrays):
        return run(mode, implementation, arrays, is_causal=True)

    function = jax.shard_map(local, mesh=mesh(AxisType.Auto), in_specs=(specs,), out_specs=out)
    got, text = compiled(function, arrays(batch))
    assert not collectives(text)
    same(got, alone(mode, batch, (("is_causal", True),)))


BIAS_SPECS = {
    "I2": ((1, N, T, S), P(None, "model")),
    "I7": ((1, 1, T, S), P()),
    "batch": ((B, 1, T, S), P("data")),
    "both": ((B, N, 1, S), P("data", "model")),
    "kv heads": ((1, K, T, 1), P(None, "model")),
}


@pytest.mark.parametrize("case", BIAS_SPECS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_i2_i7_broadcast_bias(implementation, kind, case):
    """The gradient of a bias that is shared by shards is the sum over them."""
    shape, spec = BIAS_SPECS[case]
    inputs = {**arrays(), "bias": jnp.asarray(normal(*shape, seed="bias"), "float32")}
    specs = {**dict.fromkeys(("query", "key", "value"), P("data", None, "model")), "bias": spec}
    placed = put(inputs, specs, mesh(kind))
    with jax.set_mesh(mesh(kind)):
        got, text = compiled(functools.partial(run, "backward", implementation), placed)
    assert "all-gather" not in text
    want = run("backward", "reference", inputs)
    assert got["bias"].shape == shape
    same(got, want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_every_other_operand_sharded(implementation, kind):
    """Sinks, slopes, lengths, segments and a mask beside the arrays, forward and backward."""
    rng = np.random.default_rng(0)
    inputs = {
        **arrays(),
        "sinks": jnp.asarray(normal(N), "float32"),
        "slopes": jnp.asarray(abs(normal(N)), "float32"),
        "table": jnp.asarray(normal(1, 9), "float32"),
    }
    lengths = jnp.array([7, 3, 0, 5])
    segments = jnp.asarray(rng.integers(0, 2, (B, S)), jnp.int32)
    mask = jnp.asarray(normal(B, 1, T, S) > -1)

    def loss(inputs, lengths, segments, mask):
        arrays = {name: inputs[name] for name in ("query", "key", "value")}
        bias = probjax.biases.ALiBi(inputs["slopes"]) + probjax.biases.RelativePosition(inputs["table"])
        out = probjax.dot_product_attention(
            **arrays, bias=bias, sinks=inputs["sinks"], key_value_seq_lengths=lengths,
            mask=probjax.masks.Dense(mask) & probjax.masks.Segments(segments[:, :T], segments),
            implementation=implementation,
        )  # fmt: skip
        return (out**2).sum()

    want = jax.grad(loss)(inputs, lengths, segments, mask)
    m = mesh(kind)
    specs = dict.fromkeys(("query", "key", "value"), P("data", None, "model"))
    specs |= {"sinks": P("model"), "slopes": P("model"), "table": P()}
    other = [jax.device_put(x, NamedSharding(m, P("data"))) for x in (lengths, segments, mask)]
    with jax.set_mesh(m):
        got, text = compiled(jax.grad(loss), put(inputs, specs, m), *other)
    assert "all-gather" not in text
    same(got, want)


@pytest.mark.parametrize("style", ["auto", "explicit"])
def test_original_a18_dropout_mask_is_that_of_one_device(implementation, style):
    kind = AxisType.Auto if style == "auto" else AxisType.Explicit
    options = {"dropout_rate": 0.5, "dropout_key": jax.random.key(3)}
    want = {mode: run(mode, implementation, arrays(), **options) for mode in MODES}
    placed = put(arrays(), dict.fromkeys(("query", "key", "value"), P("data", None, "model")), mesh(kind))
    with jax.set_mesh(mesh(kind)):
        for mode in MODES:
            got, text = compiled(functools.partial(run, mode, implementation, **options), placed)
            assert "all-gather" not in text
            same(got, want[mode])


def test_batch_index_of_functions_is_global(implementation):
    """A mask and a score function that depend on batch and head see the indices of the whole array.

    The C++ kernels cannot call functions of the score: there the mask does it alone.
    """
    gain = jnp.asarray(normal(B, N), "float32")

    def loss(arrays, gain):
        bias = probjax.biases.ALiBi(gain[0])
        if implementation != "native":
            bias += probjax.biases.ScoreFunction(lambda s, b, h, q, kv, g: s + g[b, h] * kv, gain)
        mask = probjax.masks.MaskFunction(lambda b, h, q, kv: (kv + q + b + h) % 3 > 0)
        out = probjax.dot_product_attention(**arrays, bias=bias, mask=mask, implementation=implementation)
        return (out**2).sum()

    want = jax.value_and_grad(loss, (0, 1))(arrays(), gain)
    for kind in (AxisType.Auto, AxisType.Explicit):
        m = mesh(kind)
        placed = put(arrays(), dict.fromkeys(("query", "key", "value"), P("data", None, "model")), m)
        with jax.set_mesh(m):
            got = jax.jit(jax.value_and_grad(loss, (0, 1)))(
                placed, jax.device_put(gain, NamedSharding(m, P()))
            )
        same(got, want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_two_batch_axes(implementation, kind):
    """Both leading axes sharded."""
    inputs = {name: jnp.asarray(x, "float32") for name, x in qkv((4, 2), T, S, N, K, D).items()}
    placed = put(inputs, dict.fromkeys(inputs, P("data", "model")), mesh(kind))
    with jax.set_mesh(mesh(kind)):
        got, text = compiled(functools.partial(run, "backward", implementation), placed)
    assert not collectives(text)
    same(got, run("backward", "reference", inputs))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_vmap_on_sharded_arrays(implementation, kind):
    """Original A30: vmap with grad and jvp under a mesh."""
    inputs = {name: jnp.asarray(x, "float32") for name, x in qkv((2, 4), T, S, N, K, D).items()}
    placed = put(inputs, dict.fromkeys(inputs, P(None, "data", None, "model")), mesh(kind))
    for mode in ("backward", "jvp"):
        with jax.set_mesh(mesh(kind)):
            one = functools.partial(run, mode, implementation, is_causal=True)
            got, text = compiled(jax.vmap(one), placed)
        assert "all-gather" not in text
        each = [
            run(mode, "reference", {k: x[i] for k, x in inputs.items()}, is_causal=True) for i in range(2)
        ]
        same(got, jax.tree.map(lambda *x: jnp.stack(x), *each))


def test_explicit_types_carry_the_sharding(implementation):
    """I3: the type of the output says how it is sharded."""
    m = mesh(AxisType.Explicit)
    placed = put(arrays(), dict.fromkeys(("query", "key", "value"), P("data", None, "model")), m)
    with jax.set_mesh(m):

        @jax.jit
        def attend(arrays):
            out, lse = probjax.dot_product_attention(
                **arrays, implementation=implementation, return_residual=True
            )
            assert jax.typeof(out).sharding.spec == P("data", None, "model", None)
            assert jax.typeof(lse).sharding.spec == P("data", None, "model")
            return out, lse

        attend(placed)


def test_original_a29_a_sharded_sequence_is_right_or_refused(implementation):
    """Splitting T or S over devices either gives the same numbers or a clear error; never wrong values."""
    for kind, (name, spec) in itertools.product(
        (AxisType.Auto, AxisType.Explicit), (("query", P(None, "model")), ("key", P(None, "model")))
    ):
        inputs = {n: jnp.asarray(x, "float32") for n, x in qkv((2,), 8, 8, 2).items()}
        specs = {**dict.fromkeys(inputs, P()), name: spec}
        if name == "key":
            specs["value"] = spec
        m = mesh(kind)
        with jax.set_mesh(m):
            try:
                got = jax.jit(functools.partial(run, "backward", implementation))(put(inputs, specs, m))
            except (ValueError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
                assert kind == AxisType.Explicit, error
                assert name in str(error) or "shard" in str(error).lower()
                continue
        same(got, run("backward", "reference", inputs))


def test_uneven_shards_of_key_heads(implementation):
    """Two key/value heads over four devices of the head axis: correct, with or without communication."""
    inputs = {name: jnp.asarray(x, "float32") for name, x in qkv((2,), T, S, 8, 2, D).items()}
    m = mesh(AxisType.Auto, (2, 4))
    specs = {"query": P("data", None, "model"), "key": P("data"), "value": P("data")}
    for mode in MODES:
        with jax.set_mesh(m):
            got = jax.jit(functools.partial(run, mode, implementation, is_causal=True))(put(inputs, specs, m))
        same(got, run(mode, "reference", inputs, is_causal=True))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_one_query_head_per_device(implementation, kind):
    """Multi-query: one key/value head replicated while the query heads are split; no all-gather of q."""
    inputs = {name: jnp.asarray(x, "float32") for name, x in qkv((4,), T, S, 4, 1, D).items()}
    specs = {"query": P("data", None, "model"), "key": P("data"), "value": P("data")}
    m = mesh(kind)
    with jax.set_mesh(m):
        got, text = compiled(functools.partial(run, "backward", implementation), put(inputs, specs, m))
    assert "all-gather" not in text
    same(got, run("backward", "reference", inputs))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_second_order_on_a_mesh(implementation, kind):
    """jvp(grad) with sharded arrays equals the unsharded one."""
    inputs = arrays()

    def product(inputs):
        def loss(a):
            return (
                probjax.dot_product_attention(**a, is_causal=True, implementation=implementation) ** 2
            ).sum()

        return jax.jvp(jax.grad(loss), (inputs,), (inputs,))[1]

    want = product(inputs)
    m = mesh(kind)
    with jax.set_mesh(m):
        got = jax.jit(product)(put(inputs, dict.fromkeys(inputs, P("data", None, "model")), m))
    same(got, want, 4e-6)
