"""The form for accelerators, chunks side by side, run on the CPU: it must equal the one that walks through
time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from probjax.recurrence import primitive, scan
from probjax.recurrence.spec import RecurrenceSpec


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def selective(length, reverse):
    spec = RecurrenceSpec(reverse=reverse)
    call = primitive.selective_scan_call(jnp.float32, length, True, spec)
    reset = jax.random.bernoulli(jax.random.key(9), 0.05, (2, length))
    dt, A = jnp.abs(normal(1, 2, length, 6)), -jnp.abs(normal(2, 1, 6, 5))
    B, C = normal(3, 2, length, 2, 5), normal(4, 1, 1, 1, 5)
    return call, scan.SELECTIVE_SCAN, (normal(0, 2, length, 6), dt, A, B, C, normal(5, 2, 6, 5), reset)


def empty(length, reverse):
    call, operation, operands = selective(length, reverse)
    return (
        call,
        operation,
        tuple(x if i == 2 else x[:0] if x.shape[0] == 2 else x for i, x in enumerate(operands)),
    )


def ssd(length, reverse):
    call = primitive.ssd_call(jnp.float32, length, RecurrenceSpec(reverse=reverse, chunk=16))
    log_decay = jnp.where(normal(5, 2, length, 4) > 1.5, -jnp.inf, -jnp.abs(normal(3, 2, length, 4)))
    query, key, value = normal(0, 2, length, 2, 5), normal(1, 2, length, 2, 5), normal(2, 2, length, 4, 3)
    return call, scan.SSD, (query, key, value, log_decay, normal(4, 2, 4, 5, 3))


def linear(length, reverse, constant):
    call = primitive.linear_scan_call(jnp.complex64, RecurrenceSpec(reverse=reverse))
    b = normal(0, 2, length, 6, dtype=jnp.complex64)
    a = normal(1, 1, 1, 6, dtype=jnp.complex64) if constant else normal(1, 2, length, 6, dtype=jnp.complex64)
    return call, scan.LINEAR_SCAN, (0.9 * a / jnp.abs(a), b, normal(2, 2, 6, dtype=jnp.complex64))


CASES = {
    "selective": selective,
    "empty batch": empty,
    "ssd": ssd,
    "linear": lambda length, reverse: linear(length, reverse, False),
    "constant": lambda length, reverse: linear(length, reverse, True),
}


@pytest.mark.parametrize(("length", "reverse"), [(65, False), (200, True)])
@pytest.mark.parametrize("case", CASES)
def test_equal(case, length, reverse, monkeypatch):
    monkeypatch.setattr(scan, "BLOCK", 32)
    monkeypatch.setattr(scan, "STORED", 64 * 2 * 30 * 2)  # two chunks at a time
    call, operation, operands = CASES[case](length, reverse)
    call = call.operation.recording(call)
    differentiable = tuple(i for i, operand in enumerate(call.operands) if operand.differentiable)

    def everything(platform, operands):
        outputs = operation.forward(call, platform, operands)
        cotangents = tuple(jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape) for x in outputs)
        cotangents = tuple(ct.astype(x.dtype) for ct, x in zip(cotangents, outputs, strict=True))
        gradients = operation.backward(call, platform, operands, outputs, cotangents, differentiable)
        moves = {i: jnp.cos(operands[i]) for i in differentiable}
        moves = {i: jnp.where(jnp.isfinite(x), x, 0) for i, x in moves.items()}
        return outputs, gradients, operation.tangent(call, platform, operands, outputs, moves)

    wide = jax.jit(lambda operands: everything("cuda", operands))(operands)
    narrow = jax.jit(lambda operands: everything("cpu", operands))(operands)
    for got, want in zip(jax.tree.leaves(wide), jax.tree.leaves(narrow), strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        assert np.all(np.isfinite(got))
        largest = np.max(np.abs(want), initial=1e-3)
        assert np.max(np.abs(got - want), initial=0.0) <= 2e-5 * largest
