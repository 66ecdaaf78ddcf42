"""cuDNN: what it declines, what reaches its kernel, and what is made of what that gives.

Where there is no GPU, a stand-in computes what the kernel computes, with the leaks that it has.
"""

import functools
import os
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import probjax
from oracle import Call, agree, check, forward, qkv
from oracle.check import cast
from probjax.attention import gpu_cudnn, gpu_triton, masks
from probjax.attention.gpu_cudnn import CUDNN, declines, unavailable
from probjax.attention.prepare import prepare

PLATFORM = os.environ.get("PROBJAX_TEST_PLATFORM", "cpu")
needs_gpu = pytest.mark.skipif(
    PLATFORM != "cuda", reason="PROBJAX_TEST_PLATFORM=cuda runs cuDNN's kernels on a GPU"
)

TILE = 4
"""Queries and keys of a tile of the stand-in."""


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def why_not(T=64, S=64, N=4, K=4, D=64, V=None, lead=(2,), dtype="bfloat16", **options):
    """What `declines` says of a call."""
    found = []

    def trace(q, k, v):
        found.append(
            declines(*prepare(q, k, v, options.pop("bias", None), options.pop("mask", None), **options))
        )
        return q

    shapes = (T, N, D), (S, K, D), (S, K, V or D)
    jax.eval_shape(trace, *(struct(*lead, *shape, dtype=dtype) for shape in shapes))
    return found[0]


# ----------------------------------------------------------------------------------------------------------
# Which calls it runs

RUNS = {
    "plain": {},
    "lengths that differ": {"T": 7, "S": 33},
    "no batch": {"lead": ()},
    "half": {"dtype": "float16"},
    "grouped heads": {"K": 2},
    "causal": {"is_causal": True},
    "causal, more queries": {"is_causal": True, "T": 65},
    "causal from the bottom right, T = S": {"is_causal": True, "causal_alignment": "bottom_right"},
    "one query at the bottom right": {"is_causal": True, "causal_alignment": "bottom_right", "T": 1},
    "causal window": {"is_causal": True, "local_window_size": (16, None)},
    "window": {"local_window_size": (16, 0)},
    "a window that hides nothing": {"local_window_size": (64, 64)},
    "masks": {"mask": masks.Causal() & masks.SlidingWindow(left=5)},
    "scale": {"scale": 0.5},
}

DECLINED = {
    "float32": ({"dtype": "float32"}, "float32"),
    "value size": ({"V": 32}, "V = 32"),
    "head size": ({"D": 36}, "multiple of 8"),
    "large head size": ({"D": 256}, "at most 128, not 256"),
    "larger than any": ({"D": 512}, "more than 256"),
    "bias": ({"bias": jnp.zeros((1, 1, 64, 64))}, "bias"),
    "soft cap": ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
    "sinks": ({"sinks": jnp.zeros(4)}, "sinks"),
    "dropout": ({"dropout_rate": 0.1, "dropout_key": 0}, "dropout_rate"),
    "traced scale": ({"scale": jnp.ones(())}, "scale: it is an array"),
    "negative scale": ({"scale": -1.0}, "not positive"),
    "scale of zero": ({"scale": 0.0}, "not positive"),
    "lengths": ({"key_value_seq_lengths": jnp.array([3, 4])}, "mask"),
    "segments": ({"segment_ids": jnp.zeros((2, 64), int)}, "mask"),
    "mask": ({"mask": jnp.ones((64, 64), bool)}, "mask"),
    "function": ({"mask": masks.MaskFunction(lambda b, h, q, k: q // 3 >= k // 3)}, "mask"),
    "negated": ({"mask": ~masks.Causal()}, "mask"),
    "window to both sides": ({"local_window_size": (3, 3)}, "own position"),
    "bottom right": ({"is_causal": True, "causal_alignment": "bottom_right", "T": 32}, "top left"),
    "keys beyond the queries": ({"is_causal": True, "T": 32}, "no query sees"),
    "window with T > S": ({"is_causal": True, "local_window_size": (3, None), "T": 65}, "T = S"),
    "blocks": ({"lead": (2**16,), "T": 1}, "pairs of batch entry and head"),
    "large": ({"lead": (64,), "T": 2**17}, "entries"),
}


@pytest.mark.parametrize("case", RUNS)
def test_what_it_runs(case):
    assert why_not(**dict(RUNS[case])) is None


@pytest.mark.parametrize("case", DECLINED)
def test_what_it_declines(case):
    options, reason = DECLINED[case]
    options = dict(options)
    if "dropout_key" in options:
        options["dropout_key"] = jax.random.key(options["dropout_key"])
    assert reason in why_not(**options)


def test_an_exported_program_does_without(monkeypatch):
    call, operands = prepare(*(jnp.zeros((1, 8, 1, 8), "bfloat16"),) * 3, None, None)
    assert declines(call, operands) is None
    assert "exported" in declines(call.operation.portable(call), operands)


# ----------------------------------------------------------------------------------------------------------
# Where it is available


@pytest.fixture
def fresh():
    """Answers that are asked for anew."""
    cached = gpu_cudnn._primitives, gpu_cudnn._version
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def on_hopper(monkeypatch, version=91900, capability=(9, 0)):
    monkeypatch.setattr(gpu_cudnn, "_version", lambda: version)
    monkeypatch.setattr(gpu_cudnn._triton, "capability", lambda: capability)


def test_where_it_is_available(monkeypatch):
    assert "NVIDIA" in unavailable("cpu")
    on_hopper(monkeypatch)
    assert unavailable("cuda") is None
    assert why_not(D=256) is None
    on_hopper(monkeypatch, version=90800)
    assert "cuDNN 9.8.0 is older than 9.13.0" in unavailable("cuda")
    on_hopper(monkeypatch, capability=(7, 5))
    assert "7.5" in unavailable("cuda")
    on_hopper(monkeypatch, capability=None)
    assert "no NVIDIA GPU" in unavailable("cuda")
    assert "at most 128" in why_not(D=256)
    on_hopper(monkeypatch, version="no cuDNN here")
    assert unavailable("cuda") == "no cuDNN here"


def test_no_device_is_asked_on_other_platforms(monkeypatch):
    def fail():
        raise AssertionError("asked for a device")

    monkeypatch.setattr(gpu_cudnn, "_version", fail)
    monkeypatch.setattr(gpu_cudnn._triton, "capability", fail)
    assert unavailable("cpu") and unavailable("tpu") and unavailable("rocm")


def test_a_jax_without_these_primitives_is_a_reason(monkeypatch, fresh):
    name = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["jax._src.cudnn"], "fused_attention_stablehlo", sys.modules[name])
    on_hopper(monkeypatch)
    reason = unavailable("cuda")
    assert jax.__version__ in reason and "no private cuDNN attention of the known form" in reason
    a = jnp.zeros((1, 8, 1, 8), "bfloat16")
    call, operands = prepare(a, a, a, None, None)
    with pytest.raises(NotImplementedError, match="cudnn"):
        CUDNN.forward(call, "cuda", tuple(operands))


def test_a_jax_with_other_arguments_is_a_reason(monkeypatch, fresh):
    from jax._src.cudnn import fused_attention_stablehlo as source

    def _dot_product_attention_fwd_abstract(query, key, value): ...

    monkeypatch.setattr(source, "_dot_product_attention_fwd_abstract", _dot_product_attention_fwd_abstract)
    on_hopper(monkeypatch)
    reason = unavailable("cuda")
    assert jax.__version__ in reason
    assert "_dot_product_attention_fwd_abstract takes (query, key, value), known is (query, key" in reason


# ----------------------------------------------------------------------------------------------------------
# What reaches the kernels: lowering needs neither a GPU nor cuDNN


def lowered(monkeypatch, gradient=False, T=16, S=16, K=2, **options):
    """The program of a call for an H200."""
    on_hopper(monkeypatch)

    def attend(q, k, v):
        return probjax.dot_product_attention(q, k, v, implementation="cudnn", return_residual=True, **options)

    def run(q, k, v):
        if not gradient:
            return attend(q, k, v)
        outs, pull = jax.vjp(attend, q, k, v)
        return pull(outs)

    arrays = struct(2, 3, T, 4, 64), struct(2, 3, S, K, 64), struct(2, 3, S, K, 64)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


KERNEL, TRITON = "@__cudnn$fmhaSoftmax(", "@__gpu$xla.gpu.triton("


def test_a_plain_call_is_one_kernel(monkeypatch):
    text = lowered(monkeypatch, scale=0.25)
    assert text.count(KERNEL) == 1
    assert text.count("NO_MASK") == 1
    assert "0.25" in text
    assert TRITON not in text
    assert "tensor<6x16x2x64xbf16>" in text  # one batch axis, key/value heads as they are


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_a_causal_call_is_mended(monkeypatch):
    text = lowered(monkeypatch, is_causal=True)
    assert text.count(KERNEL) == text.count(TRITON) == 1
    assert text.count("CAUSAL") == 1
    assert text.count("probjax_repair") >= 1
    text = lowered(monkeypatch, is_causal=True, local_window_size=(4, None))
    assert r"sliding_window_length\22: 5" in text
    assert text.count(TRITON) == 1


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_backward_is_that_of_triton(monkeypatch, options):
    text = lowered(monkeypatch, gradient=True, **options)
    assert text.count(KERNEL) == 1
    assert "fmhaSoftmaxBackward" not in text
    # Mending, and all gradients in one kernel.
    assert text.count(TRITON) == (2 if options else 1)


def test_a_call_that_it_declines_is_an_error(monkeypatch):
    with pytest.raises(NotImplementedError, match="'cudnn' cannot run this call: bias, logits_soft_cap"):
        lowered(monkeypatch, logits_soft_cap=3.0)
    on_hopper(monkeypatch, version=90800)
    if PLATFORM == "cpu":
        a = jnp.zeros((1, 8, 1, 8), "bfloat16")
        with pytest.raises(NotImplementedError, match="'cudnn' cannot run this call: it runs on NVIDIA GPUs"):
            probjax.dot_product_attention(a, a, a, implementation="cudnn")


# ----------------------------------------------------------------------------------------------------------
# What is made of what the kernel gives: with a stand-in on CPUs


class Leaky:
    """What the kernel computes, in float32: in a tile, hidden pairs have weight 0 and are multiplied all the
    same.
    """

    layout, plain, causal = 0, "plain", "causal"

    def forward(self, q, k, v, *unused, scale, mask_type, sliding_window_length, is_training, **rest):
        assert is_training and len(unused) == 7
        T, S, groups = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
        i, j = jnp.arange(T)[:, None], jnp.arange(S)
        seen = (j <= i) | (mask_type == self.plain)
        if sliding_window_length is not None:
            assert mask_type == self.causal
            seen &= j > i - sliding_window_length
        near = seen | (i // TILE == j // TILE)
        wide = (q, jnp.repeat(k, groups, 2), jnp.repeat(v, groups, 2))
        q32, k, v = (x.astype("float32") for x in wide)
        score = jnp.where(seen, scale * jnp.einsum("bind,bjnd->bnij", q32, k), -jnp.inf)
        lse = jax.nn.logsumexp(score, axis=-1)
        weight = jnp.exp(score - lse[..., None])[..., None]
        part = jnp.where(near[..., None], weight * jnp.moveaxis(v, 1, 2)[:, :, None], 0)
        return jnp.moveaxis(part.sum(3), 1, 2).astype(q.dtype), lse


@pytest.fixture
def leaky(monkeypatch):
    monkeypatch.setattr(gpu_cudnn, "_primitives", Leaky)
    mend = functools.partial(gpu_triton.repaired, interpret=True)
    monkeypatch.setattr(gpu_cudnn.gpu_triton, "repaired", mend)


def attend(arrays, dtype="float16", **options):
    """Output and log-sum-exp from the implementation itself."""

    @jax.jit
    def run(*arrays):
        call, operands = prepare(*arrays, None, None, **options)
        assert declines(call, operands) is None
        return CUDNN.forward(call, "cuda", tuple(operands))

    return run(*(jnp.asarray(arrays[name], dtype) for name in ("query", "key", "value")))


def against_the_oracle(arrays, dtype="float16", **options):
    """Finite exactly where the oracle is, and right there."""
    got = attend(arrays, dtype, **options)
    want = forward(cast(Call(**arrays, **options), dtype))
    assert [x.dtype for x in got] == [dtype, "float32"]
    for name, x, y in zip(("out", "lse"), got, (want.out, want.lse), strict=True):
        x = np.asarray(x, float)
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y), err_msg=name)
        agree(np.where(np.isfinite(y), x, 0), np.where(np.isfinite(y), y, 0), 2e-3, floor=1e-2, name=name)


SIZES = {
    "square": {"T": 9, "S": 9},
    "more queries": {"T": 11, "S": 6},
    "grouped": {"T": 9, "S": 9, "N": 4, "K": 2},
    "one key": {"T": 5, "S": 1},
    "one query": {"T": 1, "S": 1},
    "no batch": {"T": 6, "S": 6, "lead": ()},
    "two batch axes": {"T": 6, "S": 6, "lead": (2, 3)},
    "none": {"T": 0, "S": 0},
}
MASKS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (2, None)},
    "own key": {"is_causal": True, "local_window_size": (0, None)},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES)
def test_values(leaky, sizes, mask):
    if mask in ("window", "own key") and SIZES[sizes]["T"] != SIZES[sizes]["S"]:
        assert why_not(**SIZES[sizes] | {"D": 8}, **MASKS[mask])
        return
    against_the_oracle(qkv(**SIZES[sizes] | {"D": 8}), **MASKS[mask])


def test_the_stand_in_leaks(leaky, monkeypatch):
    monkeypatch.setattr(gpu_cudnn.gpu_triton, "repaired", lambda call, operands, outputs, step: outputs)
    arrays = qkv(T=9, S=9, D=8)
    arrays["value"][:, 6] = np.nan
    with pytest.raises(AssertionError, match="out"):
        against_the_oracle(arrays, is_causal=True)


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("mask", ["causal", "window", "own key"])
def test_garbage_reaches_only_what_sees_it(leaky, mask, where, garbage):
    """At one entry, at places that a tile hides from some rows and shows to others."""
    for position in (1, 6, 8) if where == "value" else (6,):
        arrays = qkv(T=9, S=9, D=8)
        arrays[where][0, position] = garbage
        if garbage == np.inf:
            # Output and log-sum-exp of who sees an infinity may be infinite or NaN: only finiteness counts.
            got = attend(arrays, **MASKS[mask])
            call = Call(**arrays, **MASKS[mask])
            seen = call.visible()[0, 0][:, position] if where != "query" else np.arange(9) == position
            assert np.isfinite(np.asarray(got[0], float)[:, ~seen]).all()
        else:
            against_the_oracle(arrays, **MASKS[mask])


def test_shared_operands(leaky):
    """Batch axes of size 1 are widened: cuDNN broadcasts none."""
    arrays = qkv(T=6, S=6, D=8, lead=(3,))
    shared = [
        jnp.asarray(arrays[n], "float16")[: 3 if n == "query" else 1] for n in ("query", "key", "value")
    ]

    @jax.jit
    def run(q, k, v):
        call, _ = prepare(q, jnp.repeat(k, 3, 0), jnp.repeat(v, 3, 0), None, None)
        return CUDNN.forward(call, "cuda", (q, k, v))

    want = attend(arrays | {n: arrays[n][:1].repeat(3, 0) for n in ("key", "value")})
    for x, y in zip(run(*shared), want, strict=True):
        np.testing.assert_array_equal(x, y)


def test_backward_and_tangent_are_those_of_triton(monkeypatch):
    """They get what the caller gave, unchanged."""
    seen = []

    class Other:
        def backward(self, *args):
            seen.append(("backward", args))
            return "gradients"

        def tangent(self, *args):
            seen.append(("tangent", args))
            return "tangents"

    monkeypatch.setattr(gpu_cudnn.gpu_triton, "TRITON", Other())
    assert CUDNN.backward("call", "cuda", (1,), (2,), (3,), (0,)) == "gradients"
    assert CUDNN.tangent("call", "cuda", (1,), (2,), {0: 3}) == "tangents"
    assert seen == [
        ("backward", ("call", "cuda", (1,), (2,), (3,), (0,))),
        ("tangent", ("call", "cuda", (1,), (2,), {0: 3})),
    ]


# ----------------------------------------------------------------------------------------------------------
# The kernels themselves


@needs_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("length", [1, 2, 7, 16, 33, 64, 127, 128, 137, 512])
def test_gpu_values(length, mask, dtype):
    """Output, log-sum-exp, and gradients under cotangents of both."""
    assert unavailable("cuda") is None
    for sizes in ({"D": 64}, {"D": 128, "N": 4, "K": 2}):
        check("cudnn", Call(**qkv(T=length, S=length, **sizes), **MASKS[mask]), dtype)


@needs_gpu
@pytest.mark.parametrize("sizes", [{"T": 7, "S": 130}, {"T": 130, "S": 7}, {"T": 33, "S": 1}], ids=str)
def test_gpu_other_lengths(sizes):
    check("cudnn", Call(**qkv(D=64, **sizes)), "bfloat16")


@needs_gpu
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("mask", ["causal", "window", "own key"])
@pytest.mark.parametrize("length", [66, 200])
def test_gpu_garbage(length, mask, where):
    for position in (1, 40, 65):
        arrays = qkv(T=length, S=length, D=64)
        arrays[where][0, position] = np.nan
        against_the_oracle(arrays, **MASKS[mask])
        check("cudnn", Call(**arrays, **MASKS[mask]), "float16")


@needs_gpu
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_gpu_is_the_same_each_time(options):
    arrays = [jnp.asarray(x, "bfloat16") for x in qkv(T=512, S=512, D=64, N=8, K=2, lead=(16,)).values()]

    @jax.jit
    def run(*arrays):
        def attend(*arrays):
            return probjax.dot_product_attention(*arrays, implementation="cudnn", **options)

        out, pull = jax.vjp(attend, *arrays)
        return out, *pull(out)

    first = run(*arrays)
    for _ in range(10):
        for x, y in zip(run(*arrays), first, strict=True):
            np.testing.assert_array_equal(x, y)
