"""Axes of full size or 1: batch axes merged for a kernel, gradients summed over what was shared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp

Array = jax.Array


@dataclass(frozen=True)
class Groups:
    """The batch axes of a call merged into as few groups as possible.

    Neighbouring axes merge when every operand has both in full or both as 1. `shape` are the sizes of the
    groups.
    """

    batch: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]], batch: tuple[int, ...]) -> Self:
        """The groups for operands with batch axes of these shapes, `batch` in full."""
        return cls(batch, merged(shapes, batch))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.batch[a] for a in group) for group in self.groups)

    def merge(self, x: Array) -> Array:
        """Merges the batch axes of an operand into groups; a group is full or 1."""
        n = len(self.batch)
        lead = tuple(math.prod(x.shape[a] for a in group) for group in self.groups)
        return x.reshape(*lead, *x.shape[n:])


def merged(shapes: Sequence[tuple[int, ...]], batch: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Which neighbouring axes merge."""
    groups: list[list[int]] = []
    for axis in range(len(batch)):
        if groups and all(_alike(_wide(s, groups[-1], batch), _wide(s, [axis], batch)) for s in shapes):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return tuple(tuple(group) for group in groups)


def _wide(shape: tuple[int, ...], axes: list[int], batch: tuple[int, ...]) -> bool | None:
    """Whether an operand has these batch axes in full; None where they all have size 1 and it cannot be
    told.
    """
    sizes = [(shape[a], batch[a]) for a in axes if batch[a] != 1]
    return None if not sizes else all(s == b for s, b in sizes)


def _alike(a: bool | None, b: bool | None) -> bool:
    return a is None or b is None or a == b


def summed(x: Array, shape: tuple[int, ...], acc: Any = None) -> Array:
    """The sum over those axes that have size 1 in `shape`, in the dtype `acc`, by default that of `x`."""
    axes = tuple(i for i, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if have != want)
    acc = x.dtype if acc is None else acc
    return jnp.sum(x.astype(acc), axes, keepdims=True).astype(x.dtype) if axes else x
