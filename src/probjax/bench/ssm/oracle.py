"""The reference model in float64 NumPy, step by step: what the error column is measured against.

It shares no code with the model or the cells; of them it takes the parameters' names.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

type Tree = Mapping[Any, Any]


def reference(parameters: Tree, x: np.ndarray, *, cell: str) -> np.ndarray:
    """Return the model's exact output.

    Args:
      parameters: nested by name, arrays of any float dtype.
      x: (batch, length, features).
      cell: ``mamba``, ``ssd`` or ``lru``.

    Returns:
      y: float64, of x's shape.
    """
    run = {"mamba": _mamba, "ssd": _ssd, "lru": _lru}[cell]
    h = _linear(parameters["embed"], np.asarray(x, np.float64))
    halves = parameters["stack"]["blocks"]
    for index in range(len(halves) // 2):
        mixer, feed = halves[2 * index], halves[2 * index + 1]
        z = _norm(mixer["cell_norm"], _norm(mixer["norm"], h))
        y = _gelu(run(mixer["cell"], z[:, ::-1])[:, ::-1] if index % 2 else run(mixer["cell"], z))
        h = h + _linear(mixer["value"], y) / (1 + np.exp(-_linear(mixer["gate"], y)))
        layers = feed["mlp"]["layers"]
        h = h + _gelu(_linear(layers[1], _gelu(_linear(layers[0], _norm(feed["norm"], h)))))
    return _linear(parameters["head"], _norm(parameters["norm"], h))


def _array(value: Any) -> np.ndarray:
    return np.asarray(value, np.float64)


def _linear(layer: Tree, x: np.ndarray) -> np.ndarray:
    return x @ _array(layer["kernel"]) + _array(layer["bias"])


def _norm(layer: Tree, x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + 1e-6)
    return scaled * _array(layer["scale"]) + _array(layer["bias"])


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _mamba(cell: Tree, x: np.ndarray) -> np.ndarray:
    A = -np.exp(_array(cell["A_log"]))
    dt = np.logaddexp(0, _linear(cell["to_dt"], x))
    B, C = _linear(cell["to_B"], x), _linear(cell["to_C"], x)
    y = np.empty_like(x)
    h = np.zeros((x.shape[0], *A.shape))
    for t in range(x.shape[1]):
        h = np.exp(dt[:, t, :, None] * A) * h + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        y[:, t] = (h @ C[:, t, :, None])[..., 0]
    return y + _array(cell["D"]) * x


def _ssd(cell: Tree, x: np.ndarray) -> np.ndarray:
    q, k, v = (_linear(cell[name], x) for name in ("query", "key", "value"))
    decay = 1 / (1 + np.exp(_linear(cell["decay"], x)))  # exp(-softplus)
    y = np.empty_like(v)
    h = np.zeros((x.shape[0], k.shape[-1], v.shape[-1]))
    for t in range(x.shape[1]):
        h = decay[:, t, :, None] * h + k[:, t, :, None] * v[:, t, None]
        y[:, t] = (q[:, t, None] @ h)[:, 0]
    return y


def _lru(cell: Tree, x: np.ndarray) -> np.ndarray:
    a = np.exp(-np.exp(_array(cell["nu"])) + 1j * np.exp(_array(cell["theta"])))
    b = x @ (_array(cell["B_re"]) + 1j * _array(cell["B_im"])) * np.exp(_array(cell["gamma"]))
    h = np.zeros_like(b)
    state = np.zeros_like(b[:, 0])
    for t in range(x.shape[1]):
        state = a * state + b[:, t]
        h[:, t] = state
    return (h @ (_array(cell["C_re"]) + 1j * _array(cell["C_im"]))).real + x @ _array(cell["D"])
