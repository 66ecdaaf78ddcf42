"""Attention by the C++ kernels for CPUs, through XLA's foreign function interface.

Here a call is brought into the form of csrc/attention/problem.h (`_program.lower`), and derivatives with
respect to native operands are carried back to the operands of the call, by JAX's own derivative of the few
lines that made one from the other. The gradient of sinks needs no scores, so it is computed here as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from probjax import _native
from probjax._axes import Groups, summed
from probjax._call import full_size
from probjax._op import Arrays, Call, axis_sizes, batch_shape
from probjax.attention._program import Program, Unsupported, lower
from probjax.attention._reduce import sinks_gradient
from probjax.attention.spec import KEY, QUERY, VALUE, AttentionSpec, accumulator
from probjax.attention.xla import TILED

Array = jax.Array

QUERY_BLOCK, KEY_TILE = 64, 64
"""Queries of one work item, and keys of one step of it."""

BATCH_AXES = 8
"""Most batch axes of the kernels, after neighbours that broadcast alike have been merged."""


def key_chunk(query_length: int, key_length: int, pairs: int) -> int:
    """Keys that one work item of backward covers, for `pairs` of batch entry and key/value head.

    It fixes the order of sums, so it must not depend on the number of threads. Where there are few pairs, the
    keys are split to give the threads enough items; each chunk then has query gradients of its own, which
    are added up at the end.
    """
    if pairs >= 32 or key_length <= 256:
        return key_length
    wanted = math.ceil(key_length / math.ceil(32 / max(pairs, 1)))
    return min(key_length, max(256, math.ceil(wanted / 64) * 64))


def unavailable(platform: str) -> str | None:
    return "it runs on CPUs only" if platform != "cpu" else _native.reason()


def declines(call: Call, arrays: Sequence[Any]) -> str | None:
    """Why the kernels cannot run a call with operands of these shapes and dtypes; None if they can."""
    batch, sizes = batch_shape(call, arrays), axis_sizes(call, arrays)
    if not all(isinstance(n, int) for n in (*batch, *sizes.values())):
        return "a size is symbolic, and the C++ kernels are told all sizes when a program is compiled"
    try:
        lower(call, arrays)
    except Unsupported as error:
        return str(error)
    if _empty(call, arrays):
        return None
    groups = len(Groups.of([x.shape[: len(batch)] for x in arrays], batch).groups)
    if groups > BATCH_AXES:
        return f"{groups} batch axes that broadcast differently, more than {BATCH_AXES}"
    return None


class Native:
    """The C++ kernels. Calls with an axis of size 0 leave them nothing to do, and go to plain JAX."""

    def forward(self, call: Call, platform: str | None, operands: Arrays) -> Arrays:
        if _empty(call, operands):
            return TILED.forward(call, platform, operands)
        return _Run(call, operands, ()).outputs("forward")

    def tangent(
        self, call: Call, platform: str | None, operands: Arrays, outputs: Arrays, tangents: dict[int, Array]
    ) -> Arrays:
        if _empty(call, operands):
            return TILED.tangent(call, platform, operands, outputs, tangents)
        run = _Run(call, operands, (*outputs, *tangents.values()))
        out, lse, *moves = run.extra
        moved = {}
        for i, move in zip(tangents, moves, strict=True):
            at = run.program.owner[i]
            _, moved[at] = jax.jvp(run.program.sources[at].make, (run.operands[i],), (move,))
        return run.outputs("tangent", out, lse, *moved.values(), active=_integers(moved))

    def backward(
        self,
        call: Call,
        platform: str | None,
        operands: Arrays,
        outputs: Arrays,
        cotangents: tuple[Array | None, ...],
        wanted: tuple[int, ...],
    ) -> Arrays:
        if _empty(call, operands):
            return TILED.backward(call, platform, operands, outputs, cotangents, wanted)
        run = _Run(call, operands, (*outputs, *(ct for ct in cotangents if ct is not None)))
        out, lse, *given = run.extra
        rest = iter(given)
        ct_out, ct_lse = (None if ct is None else next(rest) for ct in cotangents)
        sinks = call.spec.sinks_at
        grads = run.gradients(out, lse, ct_out, ct_lse, tuple(i for i in wanted if i != sinks))
        if sinks in wanted:
            grads[sinks] = sinks_gradient(run.operands[sinks], out, lse, ct_out, ct_lse)
        return tuple(grads[i].reshape(operands[i].shape) for i in wanted)


class _Run:
    """One call of the library on whole arrays, whose batch axes are merged as far as can be."""

    def __init__(self, call: Call, operands: Arrays, extra: Arrays):
        self.call = call
        self.spec: AttentionSpec = call.spec
        everything = (*operands, *extra)
        n = call.batch_ndim(operands)
        self.full = tuple(full_size(x.shape[i] for x in everything) for i in range(n))
        groups = Groups.of([x.shape[:n] for x in everything], self.full)
        self.batch = groups.shape
        self.operands = [groups.merge(x) for x in operands]
        self.extra = [groups.merge(x) for x in extra]
        self.sizes = axis_sizes(call, operands)
        self.acc = accumulator(operands[QUERY].dtype)
        self.program: Program = lower(call, self.operands)
        self.native = self.program.arrays(self.operands)

    def library(self, kind: str, results: list[Any], *more: Array, **attributes: Any) -> list[Array]:
        """Runs one of the three functions of the library."""
        program, dropout = self.program, self.program.dropout
        mask = [n for s in program.mask for n in (s.op, s.a, s.b, s.c, s.d)]
        score = [n for s in program.score for n in (s.op, s.operand, _bits(s.constant))]
        words: list[int] = []
        if dropout is not None:
            words += (dropout.words, dropout.batch_index, dropout.head_index)
            words += (dropout.threshold, dropout.everything)
        function = jax.ffi.ffi_call(f"probjax_attention_{kind}", results)
        found = function(
            *self.native,
            *more,
            batch_rank=np.int64(len(self.batch)),
            operand_count=np.int64(len(self.native)),
            scale=np.float64(self.spec.scale),
            mask=_integers(mask),
            score=_integers(score),
            sinks=np.int64(program.sinks),
            dropout=_integers(words),
            dropout_scale=np.float64(1.0 if dropout is None else dropout.scale),
            **attributes,
        )
        return list(found)

    def outputs(self, kind: str, *more: Array, **attributes: Any) -> Arrays:
        tails = [tuple(self.sizes[name] for name in output.axes) for output in self.call.outputs]
        results = [
            jax.ShapeDtypeStruct(self.batch + tail, output.dtype)
            for tail, output in zip(tails, self.call.outputs, strict=True)
        ]
        found = self.library(kind, results, *more, **attributes)
        return tuple(x.reshape(self.full + tail) for x, tail in zip(found, tails, strict=True))

    def gradients(
        self, out: Array, lse: Array, ct_out: Array | None, ct_lse: Array | None, wanted: tuple[int, ...]
    ) -> dict[int, Array]:
        """Gradients of operands of the call, in the merged layout, from those of native operands."""
        present = [ct for ct in (ct_out, ct_lse) if ct is not None]
        if not wanted or not present:
            return {i: jnp.zeros_like(self.operands[i]) for i in wanted}
        owners = [self.program.owner[i] for i in wanted]
        results = [jax.ShapeDtypeStruct(self.gradient_shape(i), self.native[i].dtype) for i in owners]
        T, S, N, K, D = (self.sizes[name] for name in "TSNKD")
        chunk = key_chunk(T, S, math.prod(self.batch) * K)
        if chunk < S or self.native[QUERY].dtype != self.acc:  # query gradients of each chunk of keys
            results.append(jax.ShapeDtypeStruct((math.ceil(S / chunk), *self.batch, T, N, D), self.acc))
        found = self.library(
            "backward",
            results,
            out,
            lse,
            *present,
            cotangents=np.int64((ct_out is not None) + 2 * (ct_lse is not None)),
            wanted=_integers(owners),
            key_chunk=np.int64(chunk),
        )
        grads = {}
        for i, at, grad in zip(wanted, owners, found, strict=False):
            _, pull = jax.vjp(self.program.sources[at].make, self.operands[i])
            (grads[i],) = pull(summed(grad, self.native[at].shape, self.acc))
        return grads

    def gradient_shape(self, native: int) -> tuple[int, ...]:
        """The shape in which the library gives a gradient; what `summed` takes to that of the operand.

        The query's is full. Keys and values are summed over batch axes inside where both have size 1.
        """
        shape, n = self.native[native].shape, len(self.batch)
        if native == QUERY:
            return (*self.batch, *shape[n:])
        if native in (KEY, VALUE):
            key, value = self.native[KEY].shape[:n], self.native[VALUE].shape[:n]
            lead = tuple(
                1 if k == v == 1 else full for k, v, full in zip(key, value, self.batch, strict=True)
            )
            return (*lead, *shape[n:])
        return shape


def _empty(call: Call, operands: Sequence[Any]) -> bool:
    return 0 in (*batch_shape(call, operands), *axis_sizes(call, operands).values())


def _bits(x: float) -> int:
    return int(np.float64(x).view(np.int64))


def _integers(values: Any) -> np.ndarray:
    return np.array(list(values), np.int64)


NATIVE = Native()
