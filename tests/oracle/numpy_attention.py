"""Attention in float64 NumPy, straight from its definition: full matrices, one head at a time.

Written for clarity, not speed, and from the documented semantics only; it shares no code with the package.
Every operation on values at hidden positions is elementwise and selected, so NaN or inf there cannot reach a
visible result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from .biases import BiasSpec, Dense
from .masks import Dense as DenseMask
from .masks import MaskSpec, Padding, Segments, window
from .sizes import Sizes


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of attention: NumPy arrays; bias and mask are arrays or descriptions."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray | BiasSpec | None = None
    mask: np.ndarray | MaskSpec | None = None
    scale: float | None = None
    is_causal: bool = False
    query_seq_lengths: np.ndarray | None = None
    key_value_seq_lengths: np.ndarray | None = None
    local_window_size: Any = None
    causal_alignment: str = "top_left"
    logits_soft_cap: float | None = None
    sinks: np.ndarray | None = None
    segment_ids: Any = None

    @property
    def sizes(self) -> Sizes:
        *lead, T, N, _ = self.query.shape
        return Sizes(tuple(lead), T, self.key.shape[-3], N, self.key.shape[-2])

    @property
    def scale_value(self) -> float:
        return float(self.query.shape[-1]) ** -0.5 if self.scale is None else float(self.scale)

    @property
    def bias_spec(self) -> BiasSpec | None:
        return Dense(self.bias) if isinstance(self.bias, np.ndarray) else self.bias

    def visible(self) -> np.ndarray:
        """(B, N, T, S) bool: what the mask arguments together leave visible."""
        sizes = self.sizes
        seen = np.ones((sizes.B, sizes.N, sizes.T, sizes.S), bool)
        if self.mask is not None:
            seen &= (DenseMask(self.mask) if isinstance(self.mask, np.ndarray) else self.mask).visible(sizes)
        if self.is_causal:
            seen &= window(sizes, None, 0, self.causal_alignment)
        if self.local_window_size is not None:
            sides = self.local_window_size
            left, right = (sides, sides) if isinstance(sides, int) else sides
            seen &= window(sizes, left, right, self.causal_alignment)
        if self.query_seq_lengths is not None:
            lengths = sizes.rows(np.asarray(self.query_seq_lengths))[:, None, None, None]
            seen &= np.arange(sizes.T)[:, None] < lengths
        if self.key_value_seq_lengths is not None:
            seen &= Padding(self.key_value_seq_lengths).visible(sizes)
        if self.segment_ids is not None:
            ids = self.segment_ids if isinstance(self.segment_ids, tuple) else (self.segment_ids,)
            seen &= Segments(*ids).visible(sizes)
        return seen


@dataclasses.dataclass
class Solution:
    """Output (*B, T, N, V), log-sum-exp (*B, T, N), and what the backward needs."""

    out: np.ndarray
    lse: np.ndarray
    weights: np.ndarray
    sink_weights: np.ndarray
    shown: np.ndarray
    products: np.ndarray
    capped: np.ndarray


def _product(left: np.ndarray, right: np.ndarray, shown: np.ndarray | None = None) -> np.ndarray:
    """left @ right; with `shown` only over the shown entries of `left`, where values are not finite."""
    if shown is None or (np.isfinite(left).all() and np.isfinite(right).all()):
        return left @ right
    terms = np.where(shown[:, :, None], left[:, :, None] * right[None, :, :], 0)
    return terms.sum(1)


def _pairs(call: Call) -> Iterator[tuple[int, int, int]]:
    sizes = call.sizes
    for b in range(sizes.B):
        for h in range(sizes.N):
            yield b, h, h // sizes.group


def _flat(array: np.ndarray, sizes: Sizes) -> np.ndarray:
    """(*B, L, H, X) to (B, H, L, X)."""
    return np.moveaxis(array.reshape(sizes.B, *array.shape[-3:]), 2, 1)


def _unflat(array: np.ndarray, sizes: Sizes) -> np.ndarray:
    array = np.moveaxis(array, 1, 2)
    return array.reshape(*sizes.lead, *array.shape[1:])


def _hide(array: np.ndarray, shown: np.ndarray) -> np.ndarray:
    return np.where(shown, array, 0)


def forward(call: Call, keep: np.ndarray | None = None, rate: float = 0.0) -> Solution:
    """Value of the call. `keep` (B, N, T, S) is the dropout mask, `rate` its rate."""
    with np.errstate(all="ignore"):
        return _forward(call, keep, rate)


def _forward(call: Call, keep: np.ndarray | None, rate: float) -> Solution:
    sizes = call.sizes
    q, k, v = (_flat(x, sizes) for x in (call.query, call.key, call.value))
    visible = call.visible()
    products = np.zeros(visible.shape)
    for b, h, g in _pairs(call):
        products[b, h] = _product(q[b, h], k[b, g].T)
    products = _hide(products, visible)
    capped = score = call.scale_value * products
    if call.logits_soft_cap is not None:
        capped = score = call.logits_soft_cap * np.tanh(score / call.logits_soft_cap)
    if call.bias_spec is not None:
        score = call.bias_spec.apply(score, sizes)
    score = np.where(visible, score, -np.inf)
    shown = visible & ~np.isneginf(score)

    weights = np.zeros(score.shape)
    sink_weights = np.zeros(score.shape[:-1])
    lse = np.full(score.shape[:-1], -np.inf)
    out = np.zeros((*score.shape[:-1], v.shape[-1]))
    sinks = np.full(sizes.N, -np.inf) if call.sinks is None else call.sinks
    dropped = 1.0 if keep is None else _kept(keep, rate)
    for b, h, _ in _pairs(call):
        some = shown[b, h].any(-1)  # rows without a visible key stay at 0 and -inf
        rows = score[b, h][some]
        if not rows.size:
            continue
        top = np.maximum(rows.max(-1), sinks[h])
        exps = np.exp(rows - top[:, None])
        sink = np.exp(sinks[h] - top)
        total = exps.sum(-1) + sink
        weights[b, h, some] = exps / total[:, None]
        sink_weights[b, h, some] = sink / total
        lse[b, h, some] = top + np.log(total)
    used = weights * dropped
    for b, h, g in _pairs(call):
        out[b, h] = _product(used[b, h], v[b, g], shown[b, h])
    return Solution(
        _unflat(out, sizes), np.moveaxis(lse, 1, 2).reshape(*sizes.lead, sizes.T, sizes.N),
        weights, sink_weights, shown, products, capped,
    )  # fmt: skip


def _kept(keep: np.ndarray, rate: float) -> np.ndarray:
    return np.zeros(keep.shape) if rate >= 1 else keep / (1 - rate)


def gradients(
    call: Call,
    ct_out: np.ndarray,
    ct_lse: np.ndarray | None = None,
    keep: np.ndarray | None = None,
    rate: float = 0.0,
) -> dict[str, Any]:
    """Gradients of sum(out * ct_out) + sum(lse * ct_lse over rows that see a key).

    Keys: query, key, value, scale, sinks (if given), bias (the array, or a list in the order of the
    description's arrays), and score_norm and scale_norm, the Euclidean norms of the terms of the last sums.
    """
    with np.errstate(all="ignore"):
        return _gradients(call, ct_out, ct_lse, keep, rate)


def _gradients(call, ct_out, ct_lse, keep, rate):
    sizes = call.sizes
    at = _forward(call, keep, rate)
    q, k, v = (_flat(x, sizes) for x in (call.query, call.key, call.value))
    d_out = _flat(ct_out, sizes)
    d_lse = np.zeros(at.weights.shape[:-1])
    if ct_lse is not None:
        d_lse = np.moveaxis(ct_lse.reshape(sizes.B, sizes.T, sizes.N), 2, 1)
    dropped = np.ones(at.weights.shape) if keep is None else _kept(keep, rate)

    d_score = np.zeros(at.weights.shape)
    d_sinks = np.zeros(sizes.N)
    d_value = np.zeros(v.shape)
    for b, h, g in _pairs(call):
        shown = at.shown[b, h]
        d_weights = _hide(_product(d_out[b, h], v[b, g].T) * dropped[b, h], shown)
        mean = (at.weights[b, h] * d_weights).sum(-1)
        d_score[b, h] = at.weights[b, h] * (d_weights - mean[:, None] + d_lse[b, h][:, None])
        d_sinks[h] += (at.sink_weights[b, h] * (d_lse[b, h] - mean)).sum()
        d_value[b, g] += _product((at.weights * dropped)[b, h].T, d_out[b, h], shown.T)
    d_score = _hide(d_score, at.shown)

    result: dict[str, Any] = {"score_norm": np.linalg.norm(d_score)}
    if call.bias_spec is not None:
        d_score, arrays = call.bias_spec.pull(at.capped, d_score, sizes)
        d_score = _hide(d_score, at.shown)
        result["bias"] = arrays[0] if isinstance(call.bias, np.ndarray) else arrays
    if call.logits_soft_cap is not None:
        d_score = _hide(d_score * (1 - (at.capped / call.logits_soft_cap) ** 2), at.shown)

    d_query, d_key = np.zeros(q.shape), np.zeros(k.shape)
    for b, h, g in _pairs(call):
        shown = at.shown[b, h]
        d_query[b, h] = call.scale_value * _product(d_score[b, h], k[b, g], shown)
        d_key[b, g] += call.scale_value * _product(d_score[b, h].T, q[b, h], shown.T)
    result |= {
        name: _unflat(x, sizes) for name, x in (("query", d_query), ("key", d_key), ("value", d_value))
    }
    terms = _hide(d_score * at.products, at.shown)
    result |= {"scale": terms.sum(), "scale_norm": np.linalg.norm(terms)}
    if call.sinks is not None:
        result["sinks"] = d_sinks
    return result
