"""The oracle of the tests: dense attention at highest precision, written as directly as it can be.

It shares the masks and biases with the other implementations but none of their tile mathematics; its
tangent and backward are JAX's own derivatives of its forward. Memory grows with T times S.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from probjax._op import Arrays, Call, batch_shape
from probjax.attention._terms import Tile
from probjax.attention.dropout import drop
from probjax.attention.spec import AttentionSpec, accumulator

Array = jax.Array

INF = float("inf")
HIGHEST = jax.lax.Precision.HIGHEST


class Reference:
    """Dense attention; see the module."""

    def forward(self, call: Call, platform: str | None, operands: Arrays) -> Arrays:
        return _attend(call, operands)

    def tangent(
        self, call: Call, platform: str | None, operands: Arrays, outputs: Arrays, tangents: dict[int, Array]
    ) -> Arrays:
        active = tuple(tangents)

        def of_active(*moved: Array) -> Arrays:
            return _attend(call, _replaced(operands, active, moved))

        _, moved = jax.jvp(of_active, tuple(operands[i] for i in active), tuple(tangents.values()))
        return tuple(jnp.broadcast_to(x, y.shape) for x, y in zip(moved, outputs, strict=True))

    def backward(
        self,
        call: Call,
        platform: str | None,
        operands: Arrays,
        outputs: Arrays,
        cotangents: tuple[Array | None, ...],
        wanted: tuple[int, ...],
    ) -> Arrays:
        def of_wanted(*moved: Array) -> Arrays:
            found = _attend(call, _replaced(operands, wanted, moved))
            return tuple(jnp.broadcast_to(x, y.shape) for x, y in zip(found, outputs, strict=True))

        given = tuple(
            jnp.zeros_like(x) if ct is None else ct for x, ct in zip(outputs, cotangents, strict=True)
        )
        _, pull = jax.vjp(of_wanted, *(operands[i] for i in wanted))
        # Where nothing is visible, a cotangent of NaN must not reach anything.
        empty = outputs[1] == -INF
        return pull((jnp.where(empty[..., None], 0, given[0]), jnp.where(empty, 0, given[1])))


def _replaced(operands: Arrays, positions: tuple[int, ...], values: tuple[Array, ...]) -> Arrays:
    out = list(operands)
    for i, x in zip(positions, values, strict=True):
        out[i] = x
    return tuple(out)


def _clean(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, 0)


def _attend(call: Call, operands: Arrays) -> Arrays:
    spec: AttentionSpec = call.spec
    n, batch = call.batch_ndim(operands), batch_shape(call, operands)
    # One batch axis, everything in full.
    entries = math.prod(batch)
    flat = [jnp.broadcast_to(x, (*batch, *x.shape[n:])).reshape(entries, *x.shape[n:]) for x in operands]
    query, key, value = (x.astype(accumulator(x.dtype)) for x in flat[:3])
    _, length, heads, _ = query.shape
    _, width, kv_heads, _ = key.shape
    key, value = (jnp.repeat(x, heads // max(kv_heads, 1), axis=2) for x in (key, value))
    index = spec.index_at
    tile = Tile(
        batch=jnp.arange(entries) if index is None else flat[index],
        head=jnp.arange(heads) if index is None else operands[index + 1].reshape(-1),
        query=jnp.arange(length),
        key=jnp.arange(width),
        query_length=length,
        key_length=width,
        heads=heads,
        kv_heads=kv_heads,
    )
    floats = [x.astype(query.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in flat]

    score = jnp.einsum("btnd,bsnd->bnts", _clean(query), _clean(key), precision=HIGHEST)
    mask = spec.mask_of(flat)
    visible = jnp.ones((1, 1, length, width), bool) if mask is None else mask.visible(tile)
    score = jnp.where(visible, score, 0)
    score = score * spec.scale
    if spec.scale_at is not None:
        score = score * floats[spec.scale_at].reshape(-1, 1, 1, 1)
    bias = spec.bias_of(floats)
    if bias is not None and 0 not in score.shape:
        score = bias.apply(score, tile, visible)
    score = jnp.where(visible, score, -INF)
    hidden = score == -INF
    bad_query = jnp.swapaxes(~jnp.isfinite(query).all(-1), 1, 2)[..., :, None]
    bad_key = jnp.swapaxes(~jnp.isfinite(key).all(-1), 1, 2)[..., None, :]
    score = jnp.where((bad_query | bad_key) & ~hidden, jnp.nan, score)

    top = jnp.max(score, axis=-1, keepdims=True, initial=-INF)
    empty = top == -INF
    sink = None if spec.sinks_at is None else floats[spec.sinks_at][:, :, None, None]
    if sink is not None:
        top = jnp.maximum(top, sink)
    top = jax.lax.stop_gradient(jnp.where(top == -INF, 0, top))
    weight = jnp.where(hidden, 0, jnp.exp(jnp.where(hidden, 0, score - top)))
    total = jnp.sum(weight, axis=-1, keepdims=True) + (0 if sink is None else jnp.exp(sink - top))
    total = jnp.where(empty, 1, total)
    lse = jnp.where(empty, -INF, top + jnp.log(total))
    weight = jnp.where(hidden, 0, weight / total)
    if spec.dropout_at is not None:
        weight = drop(weight, flat[spec.dropout_at], spec.dropout_rate, tile)
    out = jnp.einsum("bnts,bsnv->btnv", weight, _clean(value), precision=HIGHEST)
    seen = jnp.where(hidden, 0.0, 1.0).astype(out.dtype) * jnp.ones_like(weight)
    for kind, mark in ((value == INF, INF), (value == -INF, -INF), (jnp.isnan(value), jnp.nan)):
        met = jnp.einsum("bnts,bsnv->btnv", seen, kind.astype(out.dtype), precision=HIGHEST) > 0
        out = jnp.where(met, out + mark, out)
    out = jnp.where(jnp.swapaxes(empty, 1, 2), 0, out)
    lse = jnp.swapaxes(lse[..., 0], 1, 2)
    return tuple(
        x.reshape(*batch, *x.shape[1:]).astype(o.dtype) for x, o in zip((out, lse), call.outputs, strict=True)
    )


REFERENCE = Reference()
