"""The one module that knows the Pallas language and its lowering through Triton.

JAX has deprecated that lowering (0.11.0) without a date for its end. Everything that depends on it is here,
so that the package works without it, and another lowering can take its place. Imports are lazy for that
reason.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

LEAST_CAPABILITY = (8, 0)  # Ampere: the first with bfloat16 matrix units and asynchronous copies


@functools.cache
def _modules() -> tuple[ModuleType, ModuleType]:
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    # Said at every compilation, and of no use to the users of this package.
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
    return pallas, triton


@functools.cache
def missing() -> str | None:
    """Why this JAX has no Pallas lowering through Triton; None if it has."""
    try:
        _, triton = _modules()
    except ImportError as error:
        return f"this JAX has no Pallas lowering through Triton ({error})"
    absent = [name for name in ("CompilerParams", "load", "store") if not hasattr(triton, name)]
    return f"this JAX's Pallas lowering through Triton lacks {', '.join(absent)}" if absent else None


@functools.cache
def capability() -> tuple[int, int] | None:
    """Compute capability of the first NVIDIA GPU; None where there is none, as when compiling for one."""
    try:
        text = jax.devices("cuda")[0].compute_capability
        major, minor = str(text).split(".")[:2]
    except (RuntimeError, AttributeError, ValueError, IndexError):
        return None
    return int(major), int(minor)


def target() -> bool:
    """Whether there is a GPU to compile for: one at hand, or one named by an abstract device."""
    mesh = jax.sharding.get_abstract_mesh()
    return getattr(mesh, "abstract_device", None) is not None or capability() is not None


@functools.cache
def device_kind() -> str | None:
    """The name of the first NVIDIA GPU; None where there is none."""
    try:
        return str(jax.devices("cuda")[0].device_kind)
    except RuntimeError:
        return None


@dataclass(frozen=True)
class View:
    """An array of a kernel: its shape in memory, and that shape rounded up to whole tiles, which is how the
    kernel sees it (it masks what is beyond).
    """

    shape: tuple[int, ...]
    dtype: Any
    padded: tuple[int, ...]


def launch(
    kernel: Callable[..., None],
    *,
    name: str,
    programs: int,
    inputs: Sequence[tuple[Array, View]],
    outputs: Sequence[View],
    warps: int,
    stages: int,
    interpret: bool,
    aliases: dict[int, int] | None = None,
) -> list[Array]:
    """Runs `kernel(*input refs, *output refs)` in a one-dimensional grid of programs. `aliases` says which
    inputs share their memory with which outputs.
    """
    pallas, triton = _modules()

    kernel.__name__ = name  # profilers show it

    def spec(view: View) -> Any:
        zeros = (0,) * len(view.shape)
        return pallas.BlockSpec(view.padded, lambda _: zeros)

    call = pallas.pallas_call(
        kernel,
        grid=(programs,),
        in_specs=[spec(view) for _, view in inputs],
        out_specs=[spec(view) for view in outputs],
        out_shape=[jax.ShapeDtypeStruct(view.shape, view.dtype) for view in outputs],
        interpret=interpret,
        name=name,
        input_output_aliases=aliases or {},
        compiler_params=None if interpret else triton.CompilerParams(num_warps=warps, num_stages=stages),
    )
    return list(call(*(x for x, _ in inputs)))


def program_id() -> Array:
    return _modules()[0].program_id(0)


def span(start: Any, size: int) -> Any:
    """The positions start ... start + size - 1 of an axis, as an index."""
    return _modules()[0].ds(start, size)


def load(ref: Any, index: tuple[Any, ...], mask: Array | None = None, other: Any = None) -> Array:
    where = ref.at[index]
    if mask is None:
        return _modules()[1].load(where)
    return _modules()[1].load(where, mask=mask, other=other)


def store(ref: Any, index: tuple[Any, ...], value: Array, mask: Array | None = None) -> None:
    _modules()[1].store(ref.at[index], value, mask=mask)


# How the products of float32 operands are formed. Of one-pass TF32 and splits into bfloat16 parts, the
# latter with all six products that matter gives float32's accuracy on the matrix units.
TF32, THREE, SIX, HALF = "tf32", "three", "six", "half"

_PRESETS = {
    TF32: lax.DotAlgorithmPreset.TF32_TF32_F32,
    THREE: lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    SIX: lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
}


def dot(a: Array, b: Array, contract: tuple[int, int], products: str, interpret: bool) -> Array:
    """The product of two matrices over one axis of each, summed in float32."""
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    if products == HALF:
        return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
    precision = lax.Precision.HIGHEST if interpret else _PRESETS[products]
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def default_precision() -> Any:
    """What a precision of None means where a program is traced."""
    return jax.config.jax_default_matmul_precision


def products(precision: Any, dtype: Any) -> str | None:
    """How products are formed for the precision of a call; None if kernels do not have it."""
    if jnp.dtype(dtype) != jnp.float32:
        return HALF
    if precision is None:
        precision = default_precision()
    both = precision if isinstance(precision, tuple) else (precision, precision)
    names = {str(getattr(p, "name", p)).lower() for p in both}
    if names & {"highest", "float32", "fp32"}:
        return SIX
    if names & {"high", "bfloat16_3x", "tf32_tf32_f32_x3", "bf16_bf16_f32_x3"}:
        return THREE
    if names <= {"none", "default", "tensorfloat32", "fastest", "bfloat16", "tf32_tf32_f32"}:
        return TF32
    return None


def ceil_power(n: int, least: int = 16) -> int:
    """The next power of two: what a tile's sizes have to be."""
    return max(least, 1 << max(0, math.ceil(math.log2(max(n, 1)))))
