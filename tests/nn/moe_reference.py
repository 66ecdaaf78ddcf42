"""A mixture of experts in float64 NumPy, token by token."""

import math

import numpy as np
from transformer_reference import array, silu


def moe(p, x, k, *, mask=None, capacity_factor=None):
    """x (N, D): outputs, balance loss, z loss, fractions, overflow."""
    router = array(p["router"])
    N, E = len(x), router.shape[1]
    mask = np.ones(N, bool) if mask is None else mask
    logits = np.where(mask[:, None], x, 0) @ router
    most = logits.max(-1, keepdims=True)
    total = np.exp(logits - most).sum(-1)
    chosen = np.argsort(-logits, -1, kind="stable")[:, :k]
    capacity = math.inf if capacity_factor is None else max(1, math.ceil(capacity_factor * N * k / E))
    y, taken, given, dropped = np.zeros((N, x.shape[1])), np.zeros(E, int), np.zeros(E, int), 0
    for choice in range(k):
        for n in np.flatnonzero(mask):
            e = chosen[n, choice]
            given[e] += 1
            if taken[e] >= capacity:
                dropped += 1
                continue
            taken[e] += 1
            best = logits[n, chosen[n]]
            weight = np.exp(best[choice] - best.max()) / np.exp(best - best.max()).sum()
            hidden = silu(x[n] @ array(p["gate"])[e]) * (x[n] @ array(p["up"])[e])
            y[n] += weight * (hidden @ array(p["down"])[e])
    count = max(mask.sum(), 1)
    probability = (np.exp(logits - most) / total[:, None])[mask].sum(0) / count
    fraction = given / (count * k)
    z = ((np.log(total) + most[:, 0]) ** 2)[mask].sum() / count
    return y, E * probability @ fraction, z, fraction, dropped / max(mask.sum() * k, 1)
