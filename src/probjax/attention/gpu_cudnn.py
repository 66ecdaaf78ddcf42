"""Attention by cuDNN's fused kernels on NVIDIA GPUs, for the calls that they compute exactly.

`jax.nn` offers these kernels without the log-sum-exp in float32 and without a backward pass of its own, so
the primitive beneath it is bound here. It is private to JAX: all that is taken of it stands in
`_primitives`, which compares what it finds with what is expected. Where JAX has changed, the implementation
is unavailable, with the reason, and nothing else breaks.

What is done about the kernels' own ways (docs/gpu-attention.md):

- A weight of zero times a hidden NaN or infinity is NaN, so that garbage behind a causal mask reaches rows of
  the same tile. A small kernel of ours looks for that and computes the heads concerned anew.
- Backward adds the parts of a query's gradient in the order in which tiles of keys finish, and XLA can ask
  for an ordered one for whole programs only. So backward, and tangents, are left to the Triton kernels.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from probjax._call import full_size
from probjax._op import Arrays, Call, axis_sizes, batch_shape
from probjax.attention import _triton, gpu_triton
from probjax.attention._program import NO_BOUND, MaskOp, lower
from probjax.attention.spec import QUERY, AttentionSpec

Array = jax.Array

MIN_VERSION = 91300
"""cuDNN 9.13: the two releases before it have a known fault on Hopper (in backward, which is not used here).
These kernels were run with 9.19 only."""

EVERYTHING = (-NO_BOUND, NO_BOUND)
"""The band of a mask that hides nothing."""

MAX_BLOCKS = 2**16 - 1
"""Most pairs of batch entry and head: the extent of a CUDA grid's second axis."""

MAX_ENTRIES = 2**31 - 1
"""Most entries of one array: offsets inside cuDNN's kernels are not known to have 64 bits."""


# ----------------------------------------------------------------------------------------------------------
# What is taken of JAX's private modules

_COMMON = ("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length")
_UNUSED = ("bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k", "page_table_v")
_READS = ("query", "key", "value", *_UNUSED)
_FORWARD = (*_READS, *_COMMON, "is_training")


@dataclass(frozen=True)
class _Primitives:
    forward: Callable[..., Sequence[Array]]
    layout: int  # of (batch, length, heads, size)
    plain: Any
    causal: Any


@functools.cache
def _primitives() -> _Primitives | str:
    """The primitive of JAX, or why it cannot be used. Asks no device."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as source

        function = source._dot_product_attention_fwd_abstract
        found = _Primitives(
            source._dot_product_attention_fwd_p.bind,
            source.AttentionLayout.BTNH.value,
            source.MaskType.NO_MASK,
            source.MaskType.CAUSAL,
        )
    except (ImportError, AttributeError) as error:
        return f"JAX {jax.__version__} has no private cuDNN attention of the known form: {error}"
    have = tuple(inspect.signature(function).parameters)
    if have != _FORWARD:
        return (
            f"JAX {jax.__version__} has changed its private cuDNN attention: {function.__name__} takes "
            f"({', '.join(have)}), known is ({', '.join(_FORWARD)})"
        )
    return found


@functools.cache
def _version() -> int | str:
    """cuDNN's version as one number, or why it is not known."""
    try:
        from jax._src.lib import cuda_versions
    except ImportError as error:
        return f"JAX {jax.__version__} does not tell the version of cuDNN: {error}"
    if cuda_versions is None:
        return "JAX finds no cuDNN; it comes with JAX's CUDA plugin (pip install 'jax[cuda13]')"
    try:
        return int(cuda_versions.cudnn_get_version())
    except (AttributeError, RuntimeError) as error:
        return f"JAX finds no cuDNN: {error}"


# ----------------------------------------------------------------------------------------------------------
# Which calls it runs


def unavailable(platform: str) -> str | None:
    """Why cuDNN's attention cannot run on a platform; None if it can. Only "cuda" asks for a device."""
    if platform != "cuda":
        return "it runs on NVIDIA GPUs only"
    primitives, version = _primitives(), _version()
    if isinstance(primitives, str):
        return primitives
    if isinstance(version, str):
        return version
    if version < MIN_VERSION:
        return f"cuDNN {_dotted(version)} is older than {_dotted(MIN_VERSION)}; update JAX's CUDA plugin"
    if _triton.capability() is None:
        return "JAX sees no NVIDIA GPU whose compute capability could be asked for"
    # The same GPUs, and backward, tangents and what a mask hides are theirs.
    return gpu_triton.unavailable(platform)


def _dotted(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def declines(call: Call, arrays: Sequence[Any]) -> str | None:
    """Why the kernels do not run a call with operands of these shapes and dtypes; None if they do."""
    found = gpu_triton.declines(call, arrays) or _declines_spec(call.spec)
    if found is not None:
        return found
    sizes = axis_sizes(call, arrays)
    return _declines_sizes(math.prod(batch_shape(call, arrays)), sizes, arrays) or _declines_mask(
        _band(call, arrays), sizes["T"], sizes["S"]
    )


def _declines_spec(spec: AttentionSpec) -> str | None:
    if spec.bias is not None:
        return "bias, logits_soft_cap: cuDNN caps nothing, and a bias's gradient takes memory of T times S"
    if spec.sinks_at is not None:
        return "sinks: JAX hands none to cuDNN"
    if spec.dropout_at is not None:
        return "dropout_rate: cuDNN draws other random numbers than the other implementations"
    if spec.scale_at is not None:
        return "scale: it is an array, and cuDNN takes a constant of the program"
    if not 0 < spec.scale < float("inf"):
        return f"scale: cuDNN looks for the largest score before it scales, and {spec.scale} is not positive"
    return None


def _declines_sizes(batch: int, sizes: dict[str, int], arrays: Sequence[Any]) -> str | None:
    dtype = jnp.dtype(arrays[QUERY].dtype).name
    if dtype not in ("bfloat16", "float16"):
        return f"query: cuDNN's kernels take bfloat16 and float16, not {dtype}"
    head, value = sizes["D"], sizes["V"]
    if head != value:
        return f"value: cuDNN wants the size of query and key, D = {head}, not V = {value}"
    largest = 256 if (_triton.capability() or (0, 0))[0] == 9 else 128
    if head % 8 or head > largest:
        return f"query: cuDNN wants a head size D that is a multiple of 8 and at most {largest}, not {head}"
    if batch * sizes["N"] > MAX_BLOCKS:
        return f"query: {batch * sizes['N']} pairs of batch entry and head, more than {MAX_BLOCKS}"
    entries = batch * head * max(sizes["T"] * sizes["N"], sizes["S"] * sizes["K"])
    if entries > MAX_ENTRIES:
        return f"query or key: an array of {entries} entries, more than {MAX_ENTRIES}"
    return None


def _declines_mask(band: tuple[int, int] | None, query_length: int, key_length: int) -> str | None:
    if band is None:
        return "mask: cuDNN hides exactly only by Causal, and by Causal with a window to the left"
    low, high = band
    if band == EVERYTHING:
        return None
    if high != 0:
        return "mask: cuDNN wants a query to see keys up to its own position, causal from the top left"
    if low > 0:
        return "mask: it hides every pair"
    if low != -NO_BOUND and query_length != key_length:
        return f"local_window_size: cuDNN wants T = S for a window, not {query_length} and {key_length}"
    if query_length < key_length:
        return f"is_causal: no query sees the keys from T = {query_length} to S = {key_length}"
    return None


def _band(call: Call, arrays: Sequence[Any]) -> tuple[int, int] | None:
    """Smallest and largest visible j - i, as `_program` has them; None for masks that are no band."""
    if 0 in (*batch_shape(call, arrays), *axis_sizes(call, arrays).values()):
        return EVERYTHING
    steps = lower(call, arrays, functions=True).mask
    if len(steps) > 1 or (steps and steps[0].op != MaskOp.BAND):
        return None
    return (steps[0].a, steps[0].b) if steps else EVERYTHING


# ----------------------------------------------------------------------------------------------------------
# The implementation


class Cudnn:
    """cuDNN's forward kernel. Backward and tangent are those of the Triton kernels, which share output and
    log-sum-exp with it.
    """

    def forward(self, call: Call, platform: str | None, operands: Arrays) -> Arrays:
        run = _Run(call, operands)
        if run.empty:
            return gpu_triton.TRITON.forward(call, platform, operands)
        results = run.forward()
        if not run.causal:
            return results
        return gpu_triton.repaired(call, operands, results, run.window or run.queries)

    def tangent(
        self, call: Call, platform: str | None, operands: Arrays, outputs: Arrays, tangents: dict[int, Array]
    ) -> Arrays:
        return gpu_triton.TRITON.tangent(call, platform, operands, outputs, tangents)

    def backward(
        self,
        call: Call,
        platform: str | None,
        operands: Arrays,
        outputs: Arrays,
        cotangents: tuple[Array | None, ...],
        wanted: tuple[int, ...],
    ) -> Arrays:
        return gpu_triton.TRITON.backward(call, platform, operands, outputs, cotangents, wanted)


class _Run:
    """One call on whole arrays, whose batch axes are made one of full size: cuDNN broadcasts none."""

    def __init__(self, call: Call, operands: Arrays):
        self.spec: AttentionSpec = call.spec
        n = call.batch_ndim(operands)
        self.full = tuple(full_size(x.shape[i] for x in operands) for i in range(n))
        sizes = axis_sizes(call, operands)
        self.empty = 0 in (*self.full, *sizes.values())
        self.queries, self.keys = sizes["T"], sizes["S"]
        self.operands = operands
        band = _band(call, operands)
        assert band is not None  # `declines` has seen to it
        self.causal = band[1] == 0
        self.window = None if band[0] == -NO_BOUND else 1 - band[0]  # keys, the own one included

    def forward(self) -> Arrays:
        query, key, value = self.operands[:3]
        primitives, rest = self._settings(query)
        out, lse = primitives.forward(
            *(self._flat(x) for x in (query, key, value)), *self._unused(query), **rest, is_training=True
        )
        lse = jnp.swapaxes(lse, 1, 2)  # cuDNN has heads first
        return out.reshape(*self.full, *out.shape[1:]), lse.reshape(*self.full, *lse.shape[1:])

    def _flat(self, x: Array, tail: int = 3) -> Array:
        own = x.shape[x.ndim - tail :]
        return jnp.broadcast_to(x, (*self.full, *own)).reshape(-1, *own)

    def _unused(self, query: Array) -> list[Array]:
        """Bias, lengths, offsets and page tables."""
        return [jnp.zeros(0, query.dtype)] * len(_UNUSED)

    def _settings(self, query: Array) -> tuple[_Primitives, dict[str, Any]]:
        primitives = _primitives()
        if isinstance(primitives, str):
            raise NotImplementedError(f"implementation: 'cudnn' cannot run this call: {primitives}")
        return primitives, {
            "scale": self.spec.scale,
            "seed": 0,  # of dropout, which is off
            "dropout_rate": 0.0,
            "variadic_args": (False, False),  # no bias, no gradient of one
            "mask_type": primitives.causal if self.causal else primitives.plain,
            "layout": primitives.layout,
            "sliding_window_length": self.window,
        }


CUDNN = Cudnn()
