"""What runs for a call, and why: the answer of `attention_plan`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from probjax._op import Call
from probjax.attention import dispatch, gpu_blocks, gpu_triton, native
from probjax.attention.spec import accumulator
from probjax.attention.tiles import Batching, Tiling


@dataclass(frozen=True)
class AttentionPlan:
    """The implementation of one call.

    Attributes:
      implementation: its name.
      platform: the platform it was planned for.
      q_tile, kv_tile: queries and keys per tile; T and S where the scores are one tile.
      batch_tile: batch entries that run at a time.
      forward_bytes, backward_bytes: estimate of temporary memory, without arguments and results.
      reason: why this implementation.
      rejected: why not the others, by name.
    """

    implementation: str
    platform: str
    q_tile: int
    kv_tile: int
    batch_tile: int
    forward_bytes: int
    backward_bytes: int
    reason: str
    rejected: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f"{self.implementation} on {self.platform}: {self.reason}",
            f"  tiles: {self.q_tile} queries x {self.kv_tile} keys, {self.batch_tile} batch entries "
            "at a time",
            f"  temporary memory, about: forward {_megabytes(self.forward_bytes)}, backward "
            f"{_megabytes(self.backward_bytes)}",
        ]
        lines += [f"  not {name}: {reason}" for name, reason in self.rejected.items()]
        return "\n".join(lines)


def _megabytes(count: int) -> str:
    return f"{count / 2**20:.1f} MB"


def plan_of(call: Call, operands: Sequence[Any], platform: str) -> AttentionPlan:
    """The plan for prepared operands (shapes and dtypes suffice)."""
    platform = dispatch.canonical(platform)
    problem = dispatch.Problem.of(call, operands)
    name, reason = dispatch.choose(problem, platform)
    rejected = {}
    for other in dispatch.ROWS:
        if other != name:
            why = dispatch.why_not(other, problem, platform)
            rejected[other] = why or ("another was named" if call.spec.implementation else _slower(other))
    wide = accumulator(operands[0].dtype)(0).itemsize
    if name == "native":
        memory = _native_memory(problem, wide)
        return AttentionPlan(
            name, platform, native.QUERY_BLOCK, native.KEY_TILE, 1, *memory, reason, rejected
        )
    if name in ("triton", "cudnn", "interpret"):
        block = gpu_blocks.chosen("forward", gpu_triton.shape_of(call, operands))["forward"]
        rows = problem.batch * problem.query_length * problem.heads
        return AttentionPlan(
            name,
            platform,
            block.queries,
            block.keys,
            1,
            0,
            rows * wide,
            _with_backward(problem, platform, name, reason),
            rejected,
        )
    lengths = problem.query_length, problem.key_length
    whole = name != "tiled"
    tiling = Tiling.whole(*lengths) if whole or 0 in lengths else Tiling.choose(*lengths)
    n = call.batch_ndim(operands)
    batch = tuple(max((x.shape[i] for x in operands), default=1) for i in range(n))
    size = problem.batch
    if not whole and problem.scores:
        scores = problem.heads * tiling.rows * tiling.columns
        size = Batching.choose([x.shape[:n] for x in operands], batch, scores).size
    forward, backward = _memory(problem, tiling, size, wide)
    return AttentionPlan(
        name, platform, tiling.rows, tiling.columns, size, forward, backward, reason, rejected
    )


def _with_backward(problem: dispatch.Problem, platform: str, name: str, reason: str) -> str:
    """The reason, and who computes backward where that is another implementation."""
    backward, _ = dispatch.choose(problem, platform, "backward")
    if name == "cudnn":
        backward = "triton"  # cuDNN's own adds in no fixed order
    if backward != name:
        reason += f"; backward: {backward}"
    if gpu_triton.left_to_tiled(problem.call, problem.arrays):
        reason += "; gradients of a ScoreFunction's arrays, and every tangent along them: tiled"
    return reason


def _slower(name: str) -> str:
    return "slow, for tests" if name == "reference" else "the measured rule of dispatch.py chose another"


def _memory(problem: dispatch.Problem, tiling: Tiling, batch: int, wide: int) -> tuple[int, int]:
    """Bytes of temporaries: tiles of scores, keys and values by head, and in backward their gradients.

    The factors are those of XLA's own analysis on CPU (docs/cpu-attention.md); other platforms schedule
    otherwise.
    """
    tile = batch * problem.heads * tiling.rows * tiling.columns * wide
    one = tiling.row_tiles * tiling.column_tiles == 1
    sizes = problem.head_size + problem.value_size
    keys = batch * problem.kv_heads * problem.key_length * sizes
    out = problem.batch * problem.query_length * problem.heads * problem.value_size * problem.itemsize
    forward = (2 if one else 3) * tile + keys * problem.itemsize
    backward = (4 if one else 5) * tile + keys * (problem.itemsize + wide) + out
    return forward, backward


def _native_memory(problem: dispatch.Problem, wide: int) -> tuple[int, int]:
    """Bytes of temporaries of the C++ kernels: a block of rows and a tile of keys for each thread, and in
    backward the query gradients of each chunk of keys.
    """
    sizes = problem.head_size + problem.value_size
    block = native.QUERY_BLOCK * (sizes + native.KEY_TILE) + native.KEY_TILE * sizes
    forward = (os.cpu_count() or 1) * block * wide
    chunk = native.key_chunk(problem.query_length, problem.key_length, problem.batch * problem.kv_heads)
    chunks = math.ceil(problem.key_length / max(chunk, 1))
    rows = problem.batch * problem.query_length * problem.heads
    partial = rows * problem.head_size * wide * chunks if chunks > 1 else 0
    return forward, 2 * forward + partial
