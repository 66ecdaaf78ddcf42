"""Every kernel of `triton` compiles to Triton's language for NVIDIA GPUs that this machine does not have."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import probjax
from probjax.attention import _scalar, _triton, biases, gpu_triton, masks
from probjax.attention.prepare import prepare

pytestmark = [
    pytest.mark.skipif(_triton.missing() is not None, reason=f"triton: {_triton.missing()}"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]

# Device kinds that JAX knows, with their compute capabilities.
DEVICES = {
    80: "NVIDIA A100-SXM4-80GB",
    86: "NVIDIA A10",
    89: "NVIDIA L4",
    90: "NVIDIA H200",
}
DTYPES = (
    ("float32", "default"),
    ("float32", "high"),
    ("float32", "highest"),
    ("bfloat16", None),
    ("float16", None),
)


def on(capability):
    """A context in which programs are for a GPU of this compute capability."""
    device = AbstractDevice(device_kind=DEVICES[capability], num_cores=None, platform="cuda")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


@pytest.fixture
def modules(monkeypatch):
    """The kernels that are lowered: pairs of a name and the text of the module."""
    from jax._src.pallas.triton import lowering

    found, lower = [], lowering.lower_jaxpr_to_triton_module

    @functools.wraps(lower)
    def record(jaxpr, *args, **kwargs):
        result = lower(jaxpr, *args, **kwargs)
        text = result.module.operation.get_asm()
        found.append((re.search(r"tt\.func[^@]*@(?:probjax_)?(\w+)\(", text).group(1), text))
        return result

    monkeypatch.setattr(lowering, "lower_jaxpr_to_triton_module", record)
    return found


# ----------------------------------------------------------------------------------------------------------
# Calls

B, N = 2, 2
f32, i32 = jnp.float32, jnp.int32


def struct(*shape, dtype=f32):
    return jax.ShapeDtypeStruct(shape, dtype)


def documents(b, h, q, k, ids):
    return (ids[b, q] == ids[b, k]) & (k <= q)


def striped(b, h, q, k):
    return (k // 64 + q // 64) % 3 != 1


def gated(score, b, h, q, k, gain):
    return jnp.tanh(score) * gain[h] + jnp.where(q > k, 1.0, 0.0)


def function_of_score(score, b, h, q, k):
    return jnp.where(q - k < 100, score, score * 0.5)


# Name: sizes, further arrays, and the options made of these.
CASES = {
    "plain": ({}, (), dict),
    "causal": ({}, (), lambda: {"is_causal": True}),
    "bottom right": ({"S": 300}, (), lambda: {"is_causal": True, "causal_alignment": "bottom_right"}),
    "window": ({}, (), lambda: {"local_window_size": (70, 9)}),
    "ranges by data": ({}, (struct(B, 256, dtype=i32),), lambda ids: {"segment_ids": ids}),
    "lengths": (
        {},
        (struct(B, dtype=i32), struct(B, dtype=i32)),
        lambda a, b: {"query_seq_lengths": a, "key_value_seq_lengths": b},
    ),
    "prefix": ({}, (struct(B, dtype=i32),), lambda n: {"mask": masks.PrefixLM(n)}),
    "block diagonal": ({}, (), lambda: {"mask": masks.BlockDiagonal(100)}),
    "table": ({}, (), lambda: {"mask": masks.MaskFunction(striped)}),
    "dense mask": ({}, (struct(B, 1, 256, 256, dtype=bool),), lambda m: {"mask": m}),
    "nested": (
        {},
        (struct(B, 256, dtype=i32),),
        lambda ids: {"mask": ~masks.Segments(ids) | masks.SlidingWindow(3, 3) & ~masks.Causal()},
    ),
    "mask function": (
        {},
        (struct(B, 256, dtype=i32),),
        lambda ids: {"mask": masks.MaskFunction(documents, ids)},
    ),
    "score function": ({}, (struct(N),), lambda gain: {"bias": biases.ScoreFunction(gated, gain)}),
    "score function alone": ({}, (), lambda: {"bias": biases.ScoreFunction(function_of_score)}),
    "bias": ({}, (struct(1, N, 256, 256),), lambda x: {"bias": x, "is_causal": True}),
    "bias of keys": ({}, (struct(B, 1, 1, 256),), lambda x: {"bias": x}),
    "bias of queries": ({}, (struct(1, 1, 256, 1),), lambda x: {"bias": x}),
    "alibi": ({}, (struct(N),), lambda x: {"bias": biases.ALiBi(x)}),
    "relative position": ({}, (struct(N, 32),), lambda x: {"bias": biases.RelativePosition(x)}),
    "head scale": ({}, (struct(N),), lambda x: {"bias": biases.HeadScale(x)}),
    "traced cap": ({}, (struct(),), lambda x: {"bias": biases.SoftCap(x)}),
    "soft cap": ({}, (), lambda: {"logits_soft_cap": 30.0}),
    "traced scale": ({}, (struct(),), lambda x: {"scale": x}),
    "sinks": ({}, (struct(N),), lambda x: {"sinks": x, "is_causal": True}),
    "dropout": (
        {},
        (struct(2, dtype=jnp.uint32),),
        lambda k: {"dropout_rate": 0.1, "dropout_key": jax.random.wrap_key_data(k)},
    ),
    "grouped": ({"N": 6, "K": 2}, (), lambda: {"is_causal": True}),
    "odd": ({"T": 137, "S": 201, "D": 33, "V": 80}, (), lambda: {"is_causal": True}),
    "wide": ({"D": 256}, (), lambda: {"is_causal": True}),
    "long": ({"T": 16384, "S": 16384}, (), lambda: {"is_causal": True}),
    "short": ({"T": 16, "S": 16}, (), lambda: {"is_causal": True}),
    "short, not masked": ({"T": 64, "S": 64}, (), dict),
    "short, grouped": ({"T": 32, "S": 30, "N": 6, "K": 2}, (), lambda: {"is_causal": True}),
    "one query": ({"T": 1}, (), dict),
    "one key": ({"S": 1}, (), dict),
    "no batch": ({"lead": ()}, (), dict),
    "65,537 heads": ({"lead": (65_537,), "T": 16, "S": 16, "N": 1}, (), lambda: {"is_causal": True}),
}

# Whose gradients are one number per pair, so that they need the kernel for these.
PAIRS = ("bias", "bias of keys", "bias of queries", "alibi", "relative position")
ONES = ("short", "short, not masked", "short, grouped", "one key", "65,537 heads")


def lower(case, kind, dtype="float32", precision=None, capability=90):
    """Lowers a call, or its derivative in all its floating arrays, for a GPU that is not here."""
    sizes, extra, options = CASES[case]
    sizes = {"lead": (B,), "T": 256, "S": 256, "N": N, "D": 64} | sizes
    K, V = sizes.get("K", sizes["N"]), sizes.get("V", sizes["D"])
    shapes = (
        (sizes["T"], sizes["N"], sizes["D"]),
        (sizes["S"], K, sizes["D"]),
        (sizes["S"], K, V),
    )
    arrays = (*(struct(*sizes["lead"], *s, dtype=jnp.dtype(dtype)) for s in shapes), *extra)
    moving = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

    def attend(arrays):
        return probjax.dot_product_attention(
            *arrays[:3],
            **options(*arrays[3:]),
            precision=precision,
            implementation="triton",
            return_residual=True,
        )

    def run(*arrays):
        def of(part):
            whole = list(arrays)
            for i, x in zip(moving, part, strict=True):
                whole[i] = x
            return attend(whole)

        part = tuple(arrays[i] for i in moving)
        if kind == "forward":
            return of(part)
        if kind == "tangent":
            return jax.jvp(of, (part,), (part,))
        outs, pull = jax.vjp(of, part)
        return pull(outs)

    with on(capability):
        return jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",))


def wanted(case, kind, precision):
    """The kernels of a call by name."""
    if kind == "forward":
        return {"forward"}
    if kind == "tangent":
        return {"forward"} if case == "score function" else {"forward", "tangent"}
    # In six parts, the operands of more than 16 keys do not fit beside all three gradients.
    apart = precision == "highest" and case in ("short, not masked", "short, grouped")
    if case in ONES and not apart:
        return {"forward", "one"}
    return {"forward", "query", "key"} | ({"bias"} if case in PAIRS else set())


def check(modules, case, kind, dtype="float32", precision=None, capability=90):
    modules.clear()
    text = lower(case, kind, dtype, precision, capability).as_text()
    assert {name for name, _ in modules} == wanted(case, kind, precision)
    assert "__gpu$xla.gpu.triton" in text


KINDS = ("forward", "backward", "tangent")


# ----------------------------------------------------------------------------------------------------------
# Tests


@pytest.mark.parametrize("capability", DEVICES)
def test_the_devices_are_what_they_stand_for(capability):
    from jax._src.pallas.triton import gpu_info

    with on(capability):
        assert _triton.target()
        assert gpu_info.get_gpu_info().compute_capability == capability


def test_without_a_gpu_to_compile_for():
    if _triton.capability() is not None:
        pytest.skip("there is a GPU here")
    with pytest.raises(NotImplementedError, match="no NVIDIA GPU to compile for"):
        jax.jit(lambda q: probjax.dot_product_attention(q, q, q, implementation="triton")).trace(
            struct(1, 8, 1, 8)
        ).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_every_call(modules, case, kind):
    check(modules, case, kind, "bfloat16")


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize(("dtype", "precision"), DTYPES)
def test_every_dtype_on_every_device(modules, dtype, precision, capability):
    for case, kind in (("causal", "backward"), ("short", "backward"), ("causal", "tangent")):
        check(modules, case, kind, dtype, precision, capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_everything(modules, case, capability):
    for kind, (dtype, precision) in itertools.product(("backward", "tangent"), DTYPES):
        check(modules, case, kind, dtype, precision, capability)


TWO = ("add", "atan2", "div", "max", "min", "mul", "pow", "rem", "sub")
BITS = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}
OF_INTEGERS = ("and", "or", "xor", "eq", "ne", "lt", "le", "gt", "ge")
SHIFTS = ("shift_left", "shift_right_arithmetic", "shift_right_logical")
ON_SCORE = {
    "clamp": lambda x: jax.lax.clamp(jnp.float32(-1), x, jnp.float32(1)),
    "integer_pow": lambda x: jax.lax.integer_pow(x, 3),
    "is_finite": lambda x: jax.lax.is_finite(x).astype(f32),
    "convert_element_type": lambda x: x.astype(jnp.bfloat16).astype(f32),
    "select_n": lambda x: jax.lax.select(x > 0, x, -x),
}


def with_operation(name):
    """A score function that holds an operation."""
    if name == "not":
        return lambda score, b, h, q, k: score + (~(q - k)).astype(f32)
    if name in (*OF_INTEGERS, *SHIFTS):
        on_int = getattr(jax.lax, BITS.get(name, name))
        return lambda score, b, h, q, k: score + on_int(q - k, jnp.int32(3)).astype(f32)
    on_float = ON_SCORE.get(name) or getattr(jax.lax, name)
    if name in TWO:
        return lambda score, b, h, q, k: on_float(score, jnp.float32(1.5))
    return lambda score, b, h, q, k: score + on_float(score)


@pytest.mark.parametrize("name", sorted(_scalar._ELEMENTWISE))
def test_what_functions_may_hold(modules, name, monkeypatch):
    """Every operation that `_scalar` takes is one that the kernels can take."""
    fn = with_operation(name)
    index = jnp.int32(0)
    assert name in [e.primitive.name for e in jax.make_jaxpr(fn)(f32(1), index, index, index, index).eqns]
    monkeypatch.setitem(CASES, "function", ({}, (), lambda: {"bias": biases.ScoreFunction(fn)}))
    check(modules, "function", "backward")


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("window", [None, (31, None)])
def test_repair(modules, window, dtype, capability):
    """The kernel that mends cuDNN's forward."""

    def run(q, k, v, out, lse):
        call, operands = prepare(q, k, v, None, None, is_causal=True, local_window_size=window)
        return gpu_triton.repaired(call, tuple(operands), (out, lse), 32 if window else 200)

    half = functools.partial(struct, dtype=jnp.dtype(dtype))
    arrays = (
        half(2, 200, 4, 64),
        half(2, 200, 2, 64),
        half(2, 200, 2, 64),
        half(2, 200, 4, 64),
        struct(2, 200, 4),
    )
    with on(capability):
        jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",))
    assert [name for name, _ in modules] == ["repair"]


def test_products_of_float32(modules):
    """One pass of TF32 by default; what is asked for more exactly is a sum of products of bfloat16 parts."""

    def dots(precision):
        check(modules, "causal", "backward", "float32", precision)
        return {name: re.findall(r"tt\.dot .*", text) for name, text in modules}

    default, high, highest = (dots(precision) for precision in ("default", "high", "highest"))
    for name, plain in default.items():
        assert plain and all("tf32" in dot for dot in plain), name
        for found, parts in ((high, 3), (highest, 6)):
            assert len(found[name]) == parts * len(plain), name
            assert all(dot.count("xbf16>") == 2 for dot in found[name]), name


def test_scores_are_float32_whatever_the_operands(modules):
    check(modules, "causal", "backward", "bfloat16")
    for _, text in modules:
        for dot in re.findall(r"tt\.dot .*", text):
            assert re.search(r"-> tensor<\d+x\d+xf32>", dot), dot


def offsets(text):
    """Integer widths of what is added to pointers."""
    return {
        int(n)
        for n in re.findall(r"tt\.addptr [^\n]*, (?:tensor<[\dx]*x?)?i(\d+)>?\s*(?:loc|\n)", text + "\n")
    }


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_of_more_than_two_to_the_31_entries(modules, kind, monkeypatch):
    """2**32 entries: offsets have 64 bits."""
    monkeypatch.setitem(CASES, "huge", ({"lead": (2**13,), "T": 1024, "S": 1024, "N": 8}, (), dict))
    check(modules, "huge", kind, "bfloat16")
    for name, text in modules:
        assert 64 in offsets(text), name
    modules.clear()
    lower("plain", kind, "bfloat16")
    assert modules
    for name, text in modules:
        assert offsets(text), name


def test_a_bool_array_of_more_than_two_to_the_31_entries_is_declined():
    sizes = struct(2**13, 1024, 1, 16, dtype=jnp.bfloat16)

    def run(q, mask):
        return probjax.dot_product_attention(q, q, q, mask=mask, implementation="triton")

    with on(90), pytest.raises(NotImplementedError, match="a bool array of 2\\*\\*31 entries"):
        jax.jit(run).trace(sizes, struct(2**13, 1, 1024, 1024, dtype=bool)).lower(
            lowering_platforms=("cuda",)
        )


def test_64_bit_types(modules, x64):
    """With them on, indices stay 32-bit numbers and the kernels are the same."""
    check(modules, "causal", "backward", "bfloat16")
    assert np.all([len(text) for _, text in modules])
