"""Bias descriptions with their meaning in NumPy: value, and gradients of the score and of the arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from probjax import biases

from .sizes import Sizes
from .specs import Spec


class BiasSpec(Spec):
    """One step from scores to scores, (B, N, T, S) float64.

    `pull(score, ct, sizes)` gives the cotangent of the incoming score and those of the arrays, in the order
    of `arrays()`. The cotangent is zero where a score is hidden.
    """

    def apply(self, score: np.ndarray, sizes: Sizes) -> np.ndarray:
        raise NotImplementedError

    def pull(self, score: np.ndarray, ct: np.ndarray, sizes: Sizes) -> tuple[np.ndarray, list[np.ndarray]]:
        raise NotImplementedError

    def cast(self, dtype: Any) -> BiasSpec:
        """The same bias with its arrays rounded to `dtype` (kept as float64)."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.own = tuple(a.astype(dtype).astype(np.float64) if a.dtype.kind == "f" else a for a in self.own)
        twin.children = tuple(child.cast(dtype) for child in self.children)
        return twin

    def __add__(self, other: BiasSpec) -> BiasSpec:
        return Then(self, other)


class Then(BiasSpec):
    def __init__(self, first: BiasSpec, second: BiasSpec):
        self.children = (first, second)

    def make(self, own, children):
        return children[0] + children[1]

    def apply(self, score, sizes):
        return self.children[1].apply(self.children[0].apply(score, sizes), sizes)

    def pull(self, score, ct, sizes):
        first, second = self.children
        ct, second_arrays = second.pull(first.apply(score, sizes), ct, sizes)
        ct, first_arrays = first.pull(score, ct, sizes)
        return ct, first_arrays + second_arrays


class Dense(BiasSpec):
    def __init__(self, array: Any):
        self.own = (np.asarray(array, np.float64),)

    def make(self, own, children):
        return biases.Dense(own[0])

    def apply(self, score, sizes):
        return score + sizes.full(self.own[0])

    def pull(self, score, ct, sizes):
        return ct, [sizes.reduced(ct, self.own[0].shape)]


class ALiBi(BiasSpec):
    def __init__(self, slopes: Any):
        self.own = (np.asarray(slopes, np.float64),)

    def make(self, own, children):
        return biases.ALiBi(own[0])

    def apply(self, score, sizes):
        _, _, q, kv = sizes.grid()
        return score - self.own[0][None, :, None, None] * abs(q - kv)

    def pull(self, score, ct, sizes):
        _, _, q, kv = sizes.grid()
        return ct, [-(ct * abs(q - kv)).sum((0, 2, 3))]


def t5_bucket(distance: np.ndarray, count: int, max_distance: int, bidirectional: bool) -> np.ndarray:
    """Bucket of kv - q: exact for near keys, logarithmic up to `max_distance`; one half per direction."""
    base = np.zeros_like(distance)
    if bidirectional:
        count //= 2
        base = (distance > 0) * count
        distance = abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = count // 2
    ratio = np.log(np.maximum(distance, 1) / exact) / np.log(max_distance / exact)
    # The nudge keeps exact powers on their own side of the boundary.
    far = exact + np.floor(ratio * (count - exact) + 1e-9).astype(int)
    return base + np.where(distance < exact, distance, np.minimum(far, count - 1))


class RelativePosition(BiasSpec):
    def __init__(
        self, table: Any, bucketing: str = "clip", max_distance: int = 128, bidirectional: bool = True
    ):
        self.own = (np.asarray(table, np.float64),)
        self.static = (bucketing, max_distance, bidirectional)

    def make(self, own, children):
        bucketing, max_distance, bidirectional = self.static
        return biases.RelativePosition(
            own[0], bucketing=bucketing, max_distance=max_distance, bidirectional=bidirectional
        )

    def buckets(self, sizes: Sizes) -> np.ndarray:
        bucketing, max_distance, bidirectional = self.static
        count = self.own[0].shape[-1]
        distance = np.arange(sizes.S)[None, :] - np.arange(sizes.T)[:, None]
        if bucketing == "clip":
            return np.clip(distance + count // 2, 0, count - 1)
        return t5_bucket(distance, count, max_distance, bidirectional)

    def apply(self, score, sizes):
        return score + self.own[0][:, self.buckets(sizes)][None]

    def pull(self, score, ct, sizes):
        table = self.own[0]
        per_head = ct.sum(0) if table.shape[0] > 1 else ct.sum((0, 1))[None]
        gradient = np.zeros(table.shape)
        for head in range(table.shape[0]):
            np.add.at(gradient[head], self.buckets(sizes).ravel(), per_head[head].ravel())
        return ct, [gradient]


class SoftCap(BiasSpec):
    def __init__(self, value: float):
        self.static = (value,)

    def make(self, own, children):
        return biases.SoftCap(self.static[0])

    def apply(self, score, sizes):
        return self.static[0] * np.tanh(score / self.static[0])

    def pull(self, score, ct, sizes):
        return np.where(ct == 0, 0, ct * (1 - np.tanh(score / self.static[0]) ** 2)), []


class HeadScale(BiasSpec):
    def __init__(self, scale: Any):
        self.own = (np.asarray(scale, np.float64),)

    def make(self, own, children):
        return biases.HeadScale(own[0])

    def apply(self, score, sizes):
        return score * self.own[0][None, :, None, None]

    def pull(self, score, ct, sizes):
        gradient = np.where(ct == 0, 0, ct * score).sum((0, 2, 3))
        return ct * self.own[0][None, :, None, None], [gradient]


class ScoreFunction(BiasSpec):
    """`fn` works on NumPy and JAX arrays alike; its derivative is written by hand.

    `derivative(score, ct, batch, head, q, kv, *arrays)` gives the cotangents of the score and of the arrays.
    """

    def __init__(self, fn: Callable[..., Any], derivative: Callable[..., Any], *arrays: Any):
        self.static = (fn, derivative)
        self.own = tuple(np.asarray(array) for array in arrays)

    def make(self, own, children):
        return biases.ScoreFunction(self.static[0], *own)

    def apply(self, score, sizes):
        return self.static[0](score, *sizes.grid(), *self.own)

    def pull(self, score, ct, sizes):
        ct_score, ct_arrays = self.static[1](score, ct, *sizes.grid(), *self.own)
        return ct_score, list(ct_arrays)


def pair_bias(array: Any) -> ScoreFunction:
    """A pair bias (B, T, S) shared by the heads, as structure models use it."""
    return ScoreFunction(_pair, _pair_derivative, array)


def _pair(score, batch, head, q, kv, array):
    return score + array[batch, q, kv]


def _pair_derivative(score, ct, batch, head, q, kv, array):
    return ct, [ct.sum(1)]


def distance_table(table: Any) -> ScoreFunction:
    """A table (N, R) indexed by kv - q, clipped."""
    return ScoreFunction(_distance, _distance_derivative, table)


def _distance_index(q, kv, count):
    index = kv - q + count // 2
    index = index * (index > 0)
    return index - (index - (count - 1)) * (index > count - 1)


def _distance(score, batch, head, q, kv, table):
    return score + table[head, _distance_index(q, kv, table.shape[1])]


def _distance_derivative(score, ct, batch, head, q, kv, table):
    gradient = np.zeros(table.shape)
    index = _distance_index(q, kv, table.shape[1])
    np.add.at(gradient, tuple(np.broadcast_arrays(head, index)), ct.sum(0, keepdims=True))
    return ct, [gradient]


def gated_score(gain: Any, shift: Any) -> ScoreFunction:
    """gain[head] * score² / (1 + score²) + shift[kv]: not linear in the score, with two arrays."""
    return ScoreFunction(_gated, _gated_derivative, gain, shift)


def _gated(score, batch, head, q, kv, gain, shift):
    return gain[head] * score * score / (1 + score * score) + shift[kv]


def _gated_derivative(score, ct, batch, head, q, kv, gain, shift):
    score = np.where(ct == 0, 0, score)  # a hidden score may be NaN
    saturation = score**2 / (1 + score**2)
    ct_score = ct * gain[head] * 2 * score / (1 + score**2) ** 2
    d_shift = np.zeros(shift.shape)
    d_shift[: ct.shape[-1]] = ct.sum((0, 1, 2))
    return ct_score, [(ct * saturation).sum((0, 2, 3)), d_shift]
