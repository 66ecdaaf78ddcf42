"""Calls of the recurrences that the tests share."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .check_recurrence import Case
from .draw import normal

OPERATIONS = ("linear_scan", "selective_scan", "ssd", "causal_conv1d")


def positive(*shape: int, seed: Any = 0) -> np.ndarray:
    return np.abs(normal(*shape, seed=seed))


def arrays(operation: str, lead: tuple[int, ...] = (2, 5), seed: Any = 0) -> dict[str, np.ndarray]:
    """Arrays of a call with leading axes (*B, L), none of them broadcast, and an initial state."""
    batch = lead[:-1]
    if operation == "linear_scan":
        a, b, h = (
            normal(*shape, seed=(name, seed)) + 1j * normal(*shape, seed=(name, seed, "i"))
            for name, shape in (("a", (*lead, 3)), ("b", (*lead, 3)), ("h", (*batch, 3)))
        )
        return {"a": 0.6 * a, "b": b, "initial_state": h}
    if operation == "selective_scan":
        return {
            "x": normal(*lead, 6, seed=("x", seed)),
            "dt": normal(*lead, 6, seed=("dt", seed)),
            "A": -positive(6, 3, seed=("A", seed)),
            "B": normal(*lead, 2, 3, seed=("B", seed)),
            "C": normal(*lead, 3, seed=("C", seed)),
            "D": normal(6, seed=("D", seed)),
            "dt_bias": normal(6, seed=("bias", seed)),
            "initial_state": normal(*batch, 6, 3, seed=("h", seed)),
        }
    if operation == "ssd":
        return {
            "query": normal(*lead, 2, 5, seed=("q", seed)),
            "key": normal(*lead, 2, 5, seed=("k", seed)),
            "value": normal(*lead, 4, 3, seed=("v", seed)),
            "log_decay": -positive(*lead, 4, seed=("d", seed)),
            "initial_state": normal(*batch, 4, 5, 3, seed=("h", seed)),
        }
    return {
        "x": normal(*lead, 3, seed=("x", seed)),
        "weight": normal(4, 3, seed=("w", seed)),
        "bias": normal(3, seed=("b", seed)),
        "initial_state": normal(*batch, 3, 3, seed=("h", seed)),
    }


def options(operation: str) -> dict[str, Any]:
    return {"dt_softplus": True} if operation == "selective_scan" else {}


def said(lead: tuple[int, ...], seed: Any = 0) -> dict[str, np.ndarray]:
    """Resets, segment ids and padding in a random pattern."""
    draw = normal(*lead, seed=("tokens", seed))
    ids = np.cumsum(normal(*lead, seed=("ids", seed)) > 1.2, -1) % 3
    return {"reset": draw > 1.6, "segment_ids": ids, "mask": normal(*lead, seed=("mask", seed)) > -0.7}


@functools.cache
def plain(operation: str, length: int) -> Case:
    """A call with an initial state and nothing else."""
    return Case(operation, arrays(operation, (2, length)), options=options(operation))


@functools.cache
def busy(operation: str, length: int, reverse: bool) -> Case:
    """A call with resets, segment ids and padding."""
    lead = (2, length)
    return Case(operation, arrays(operation, lead, "busy"), said(lead), reverse, options(operation))
