"""The recurrences by dumb loops over tokens, straight from their definition: the oracle of the tests.

Every function takes one row without batch axes, and returns (outputs, last state). Padded tokens are left out
of the loop, `reverse` counts tokens from the end. `xp` is NumPy, or jax.numpy for derivatives in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Tokens:
    """What a row says about its tokens: each (L,) or None."""

    reset: np.ndarray | None = None
    segment_ids: np.ndarray | None = None
    mask: np.ndarray | None = None
    reverse: bool = False

    def walk(self, length: int) -> list[tuple[int, bool]]:
        """Positions of valid tokens in the order of processing, and whether the state is cut before each."""
        found: list[tuple[int, bool]] = []
        before = None
        for t in reversed(range(length)) if self.reverse else range(length):
            if self.mask is not None and not self.mask[t]:
                continue
            cut = self.reset is not None and bool(self.reset[t])
            if self.segment_ids is not None:
                cut = cut or (before is not None and self.segment_ids[t] != before)
                before = self.segment_ids[t]
            found.append((t, cut))
        return found


def _run(step: Callable, length: int, state: Any, shape: tuple[int, ...], tokens: Tokens, xp: Any) -> tuple:
    outputs: list[Any] = [xp.zeros(shape, state.dtype)] * length
    for t, cut in tokens.walk(length):
        state, outputs[t] = step(state * 0 if cut else state, t)
    return (xp.stack(outputs) if length else xp.zeros((0, *shape), state.dtype)), state


def linear_scan(a, b, state, tokens=Tokens(), xp=np):
    """a, b (L, *C), state (*C)."""

    def step(h, t):
        h = a[t] * h + b[t]
        return h, h

    return _run(step, len(b), state, b.shape[1:], tokens, xp)


def softplus(z, xp=np):
    return xp.log1p(xp.exp(-xp.abs(z))) + xp.maximum(z, 0)


def selective_scan(x, dt, A, B, C, state, D=None, dt_bias=None, dt_softplus=False, tokens=Tokens(), xp=np):
    """x, dt (L, D), A (D, N), B, C (L, G, N), state (D, N)."""
    channels = x.shape[1]

    def step(h, t):
        z = dt[t] if dt_bias is None else dt[t] + dt_bias
        if dt_softplus:
            z = softplus(z, xp)
        b, c = (xp.repeat(y[t], channels // y.shape[1], 0) for y in (B, C))
        h = xp.exp(z[:, None] * A) * h + (z * x[t])[:, None] * b
        y = xp.sum(h * c, 1)
        return h, y if D is None else y + D * x[t]

    return _run(step, len(x), state, (channels,), tokens, xp)


def ssd(query, key, value, log_decay, state, tokens=Tokens(), xp=np):
    """query, key (L, G, N), value (L, H, P), log_decay (L, H), state (H, N, P)."""
    each = value.shape[1] // query.shape[1]

    def step(h, t):
        q, k = xp.repeat(query[t], each, 0), xp.repeat(key[t], each, 0)
        h = xp.exp(log_decay[t])[:, None, None] * h + k[:, :, None] * value[t][:, None, :]
        return h, xp.sum(h * q[:, :, None], 1)

    return _run(step, len(value), state, value.shape[1:], tokens, xp)


def causal_conv1d(x, weight, state, bias=None, tokens=Tokens(), xp=np):
    """x (L, D), weight (W, D), state (W - 1, D)."""

    def step(window, t):
        window = xp.concatenate([window, x[t][None]])
        y = xp.sum(window * weight, 0)
        return window[1:], y if bias is None else y + bias

    return _run(step, len(x), state, x.shape[1:], tokens, xp)
