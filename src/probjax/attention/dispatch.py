"""Which implementation runs which call, as data, with the reason.

An implementation is one row of `ROWS`. Only this module decides to use another one than the first choice,
and only when the caller named none; `attention_plan` says what was chosen and why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from probjax._op import Arrays, Call, axis_sizes, batch_shape
from probjax.attention import _triton, gpu_blocks, gpu_cudnn, gpu_triton, native
from probjax.attention.reference import REFERENCE
from probjax.attention.spec import AttentionSpec
from probjax.attention.xla import DENSE, TILED

Array = jax.Array


class Implementation(Protocol):
    """The three functions an implementation supplies; see `probjax._op.Operation`.

    It may leave `tangent` out: then the tangent of the plain-JAX implementation is used.
    """

    def forward(self, call: Call, platform: str | None, operands: Arrays) -> Arrays: ...

    def backward(
        self,
        call: Call,
        platform: str | None,
        operands: Arrays,
        outputs: Arrays,
        cotangents: tuple[Array | None, ...],
        wanted: tuple[int, ...],
    ) -> Arrays: ...


@dataclass(frozen=True)
class Problem:
    """What the choice depends on: one call, the shapes of its operands (on one device), and its sizes."""

    call: Call
    arrays: tuple[jax.ShapeDtypeStruct, ...]
    batch: int
    query_length: int
    key_length: int
    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    itemsize: int

    @classmethod
    def of(cls, call: Call, operands: Any) -> Problem:
        sizes = axis_sizes(call, operands)
        return cls(
            call=call,
            arrays=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands),
            batch=math.prod(batch_shape(call, operands)),
            query_length=sizes["T"],
            key_length=sizes["S"],
            heads=sizes["N"],
            kv_heads=sizes["K"],
            head_size=sizes["D"],
            value_size=sizes["V"],
            itemsize=operands[0].dtype.itemsize,
        )

    @property
    def spec(self) -> AttentionSpec:
        return self.call.spec

    @property
    def scores(self) -> int:
        """Entries of the whole score matrix."""
        return self.batch * self.heads * self.query_length * self.key_length


@dataclass(frozen=True)
class Row:
    """One implementation: what it is, and why it cannot run (on a platform, or a call), or None if it can."""

    name: str
    implementation: Implementation
    unavailable: Callable[[str], str | None]
    declines: Callable[[Problem], str | None]


def _never(_: Any) -> None:
    return None


def _no_pallas(platform: str) -> str | None:
    return _triton.missing()


ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        Row("reference", REFERENCE, _never, _never),
        Row("dense", DENSE, _never, _never),
        Row("tiled", TILED, _never, _never),
        Row("native", native.NATIVE, native.unavailable, lambda p: native.declines(p.call, p.arrays)),
        Row(
            "triton",
            gpu_triton.TRITON,
            gpu_triton.unavailable,
            lambda p: gpu_triton.declines(p.call, p.arrays),
        ),
        Row("cudnn", gpu_cudnn.CUDNN, gpu_cudnn.unavailable, lambda p: gpu_cudnn.declines(p.call, p.arrays)),
        Row("interpret", gpu_triton.INTERPRET, _no_pallas, lambda p: gpu_triton.declines(p.call, p.arrays)),
    )
}

# Largest score matrix (entries over batch and heads) for which a call into the native library does not pay:
# with 16 scores or fewer `dense` is faster by a microsecond, beyond that the library always is
# (docs/cpu-attention.md).
NATIVE_SCORES = 16

# Largest score matrix (entries over batch and heads) that `dense` runs faster than `tiled`; measured on 2
# cores, see docs/cpu-attention.md. Beyond it the matrix leaves the cache, and memory grows with T times S.
DENSE_SCORES = {"cpu": 2**17}
DENSE_SCORES_ELSEWHERE = 2**20


def choose(problem: Problem, platform: str | None, kind: str = "forward") -> tuple[str, str]:
    """The name of the implementation for a call on a platform, and the reason.

    Args:
      problem: the call.
      platform: one of JAX's lowering platforms; None where it is not known.
      kind: "forward", "backward" or "tangent": they share output and log-sum-exp, so that each can be
        computed by whichever is best at it.
    """
    spec = problem.spec
    if spec.plain:
        return "tiled", "derivatives of higher order are taken of the tiled plain-JAX implementation"
    if spec.implementation is not None:
        reason = why_not(spec.implementation, problem, platform)
        if reason is not None:
            raise NotImplementedError(
                f"implementation: {spec.implementation!r} cannot run this call: {reason}"
            )
        return spec.implementation, "named by the caller"
    if not isinstance(problem.scores, int):
        return "tiled", "a size is symbolic: memory must not grow with T times S"
    if problem.scores > NATIVE_SCORES and not spec.portable and why_not("native", problem, platform) is None:
        return "native", "the C++ kernels are the fastest on CPUs, with memory linear in T and S"
    if platform == "cuda" and why_not("triton", problem, platform) is None:
        return _choose_on_gpu(problem, platform, kind)
    limit = DENSE_SCORES.get(platform or "", DENSE_SCORES_ELSEWHERE)
    if problem.scores <= limit:
        return "dense", f"{problem.scores} scores, at most {limit}: one fused dense pass is fastest"
    return (
        "tiled",
        f"{problem.scores} scores, more than {limit}: tiles stay in cache and memory is linear in T and S",
    )


def _choose_on_gpu(problem: Problem, platform: str, kind: str) -> tuple[str, str]:
    """Among the fused kernels by the table measured on this GPU; without one, those that run every call."""
    entry = gpu_blocks.entry_of(kind, gpu_triton.shape_of(problem.call, problem.arrays))
    if entry is None:
        return (
            "triton",
            "the fused kernels for NVIDIA GPUs; for this GPU nothing has been measured (probjax tune)",
        )
    nearest = f"at {entry.key.queries} queries and {entry.key.keys} keys, the nearest measured on this GPU"
    if entry.implementation != "cudnn":
        return "triton", f"the fastest {nearest}"
    reason = why_not("cudnn", problem, platform)
    if reason is None:
        return "cudnn", f"faster than the Triton kernels {nearest}"
    return "triton", f"cudnn is faster {nearest}, but cannot run this call: {reason}"


def unavailable(name: str, platform: str | None) -> str | None:
    """Why an implementation cannot run on a platform; None if it can."""
    return ROWS[name].unavailable(canonical(platform or jax.default_backend()))


def canonical(platform: str) -> str:
    """JAX calls NVIDIA's and AMD's GPUs both "gpu" in some places, and programs are lowered for one of
    them.
    """
    if platform != "gpu":
        return platform
    version = getattr(jax.devices("gpu")[0].client, "platform_version", "")
    return "rocm" if "rocm" in version.lower() else "cuda"


def why_not(name: str, problem: Problem, platform: str | None) -> str | None:
    """Why an implementation cannot run a call on a platform; None if it can."""
    return unavailable(name, platform) or ROWS[name].declines(problem)


def implementations(platform: str | None = None) -> dict[str, str | None]:
    """Every implementation of attention: None where it is available, else the reason why it is not.

    Args:
      platform: "cpu", "cuda", "rocm" or "tpu"; None takes the default backend.
    """
    return {name: unavailable(name, platform) for name in ROWS}
