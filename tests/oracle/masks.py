"""Mask descriptions with their meaning in NumPy: `visible(sizes)` is a (B, N, T, S) bool array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from probjax import masks

from .sizes import Sizes
from .specs import Spec


def offset(alignment: str, sizes: Sizes) -> int:
    """What to add to a query index to get its position among the keys."""
    return {"top_left": 0, "bottom_right": sizes.S - sizes.T}[alignment]


def window(sizes: Sizes, left: int | None, right: int | None, alignment: str) -> np.ndarray:
    """Keys from `left` before to `right` after the query's position; None or -1 leaves a side open."""
    _, _, q, kv = sizes.grid()
    distance = kv - (q + offset(alignment, sizes))
    seen = np.ones(distance.shape, bool)
    if left is not None and left != -1:
        seen &= distance >= -left
    if right is not None and right != -1:
        seen &= distance <= right
    return seen


class MaskSpec(Spec):
    def visible(self, sizes: Sizes) -> np.ndarray:
        """(B, N, T, S) bool, True = attend."""
        shape = (sizes.B, sizes.N, sizes.T, sizes.S)
        return np.broadcast_to(self.seen(sizes), shape)

    def seen(self, sizes: Sizes) -> np.ndarray:
        raise NotImplementedError

    def __and__(self, other: MaskSpec) -> MaskSpec:
        return Both(self, other)

    def __or__(self, other: MaskSpec) -> MaskSpec:
        return Either(self, other)

    def __invert__(self) -> MaskSpec:
        return Not(self)


class Both(MaskSpec):
    def __init__(self, left: MaskSpec, right: MaskSpec):
        self.children = (left, right)

    def make(self, own, children):
        return children[0] & children[1]

    def seen(self, sizes):
        return self.children[0].visible(sizes) & self.children[1].visible(sizes)


class Either(MaskSpec):
    def __init__(self, left: MaskSpec, right: MaskSpec):
        self.children = (left, right)

    def make(self, own, children):
        return children[0] | children[1]

    def seen(self, sizes):
        return self.children[0].visible(sizes) | self.children[1].visible(sizes)


class Not(MaskSpec):
    def __init__(self, inner: MaskSpec):
        self.children = (inner,)

    def make(self, own, children):
        return ~children[0]

    def seen(self, sizes):
        return ~self.children[0].visible(sizes)


class Causal(MaskSpec):
    def __init__(self, alignment: str = "top_left"):
        self.static = (alignment,)

    def make(self, own, children):
        return masks.Causal(alignment=self.static[0])

    def seen(self, sizes):
        return window(sizes, None, 0, self.static[0])


class SlidingWindow(MaskSpec):
    def __init__(self, left: int | None, right: int | None, alignment: str = "top_left"):
        self.static = (left, right, alignment)

    def make(self, own, children):
        left, right, alignment = self.static
        return masks.SlidingWindow(left=left, right=right, alignment=alignment)

    def seen(self, sizes):
        return window(sizes, *self.static)


class BlockDiagonal(MaskSpec):
    def __init__(self, size: int):
        self.static = (size,)

    def make(self, own, children):
        return masks.BlockDiagonal(self.static[0])

    def seen(self, sizes):
        _, _, q, kv = sizes.grid()
        return q // self.static[0] == kv // self.static[0]


class PrefixLM(MaskSpec):
    """Causal, and every query sees the prefix of its batch entry."""

    def __init__(self, prefix_lengths: Any):
        self.own = (np.asarray(prefix_lengths, np.int32),)

    def make(self, own, children):
        return masks.PrefixLM(own[0])

    def seen(self, sizes):
        _, _, q, kv = sizes.grid()
        prefix = sizes.rows(self.own[0])[:, None, None, None]
        return (kv <= q) | (kv < prefix)


class Segments(MaskSpec):
    def __init__(self, query_ids: Any, key_value_ids: Any = None):
        ids = [np.asarray(query_ids, np.int32)]
        if key_value_ids is not None:
            ids.append(np.asarray(key_value_ids, np.int32))
        self.own = tuple(ids)

    def make(self, own, children):
        return masks.Segments(*own)

    def seen(self, sizes):
        query_ids, key_value_ids = sizes.rows(self.own[0]), sizes.rows(self.own[-1])
        return query_ids[:, None, :, None] == key_value_ids[:, None, None, :]


class Padding(MaskSpec):
    """Key/value lengths (*B,), or a bool (*B, S) that is True on real keys."""

    def __init__(self, lengths_or_keep: Any):
        array = np.asarray(lengths_or_keep)
        self.own = (array if array.dtype == bool else array.astype(np.int32),)

    def make(self, own, children):
        return masks.Padding(own[0])

    def seen(self, sizes):
        array = sizes.rows(self.own[0])
        if array.dtype == bool:
            return array[:, None, None, :]
        return np.arange(sizes.S) < array[:, None, None, None]


class Dense(MaskSpec):
    def __init__(self, array: Any):
        self.own = (np.asarray(array, bool),)

    def make(self, own, children):
        return masks.Dense(own[0])

    def seen(self, sizes):
        return sizes.full(self.own[0])


class MaskFunction(MaskSpec):
    """`fn` has to work on NumPy and JAX arrays alike, so it may use operators and indexing only."""

    def __init__(self, fn: Callable[..., Any], *arrays: Any):
        self.static = (fn,)
        self.own = tuple(np.asarray(array) for array in arrays)

    def make(self, own, children):
        return masks.MaskFunction(self.static[0], *own)

    def seen(self, sizes):
        return self.static[0](*sizes.grid(), *self.own)
