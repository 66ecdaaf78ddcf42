"""The mixture of experts in float64 NumPy, expert by expert: what the error column is measured against.

It shares no code with the model; of it, it takes the parameters' names.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

type Tree = Mapping[str, Any]


def choose(router: Any, x: np.ndarray, selected: int) -> np.ndarray:
    """Return the numbers of the experts that each token goes to, best first: (tokens, selected)."""
    logits = _tokens(x) @ np.asarray(router, np.float64)
    return np.argsort(-logits, axis=1, kind="stable")[:, :selected]


def reference(
    parameters: Tree, x: np.ndarray, chosen: np.ndarray, *, capacity_factor: float | None
) -> np.ndarray:
    """Return the exact output.

    Args:
      parameters: by name, arrays of any float dtype.
      x: (..., channels).
      chosen: see `choose`. Where the best experts change, the output jumps: slopes are taken with these.
      capacity_factor: None, or what limits the tokens of an expert.

    Returns:
      float64, of x's shape.
    """
    rows = _tokens(x)
    kernels = {name: np.asarray(parameters[name], np.float64) for name in ("router", "gate", "up", "down")}
    logits = np.take_along_axis(rows @ kernels["router"], chosen, 1)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    experts = kernels["gate"].shape[0]
    most = chosen.size
    if capacity_factor is not None:
        most = max(1, math.ceil(capacity_factor * chosen.size / experts))
    y = np.zeros_like(rows)
    for expert in range(experts):
        # All first choices come before all second ones.
        choice, token = np.nonzero(np.equal(chosen.T, expert))
        choice, token = choice[:most], token[:most]
        gate, up = (rows[token] @ kernels[name][expert] for name in ("gate", "up"))
        out = (gate / (1 + np.exp(-gate)) * up) @ kernels["down"][expert]
        np.add.at(y, token, weights[token, choice][:, None] * out)
    return y.reshape(np.shape(x))


def _tokens(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64).reshape(-1, np.shape(x)[-1])
