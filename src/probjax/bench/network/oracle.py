"""The reference transformers in float64 NumPy: what the error column is measured against.

It shares no code with the models; of them it takes the parameters' names. Stacked parameters of a scanned
model are taken apart first.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

type Tree = Mapping[Any, Any]


def transformer(parameters: Tree, x: np.ndarray, *, layers: int, heads: int, attend: bool) -> np.ndarray:
    """Return the exact output of the reference transformer.

    Args:
      parameters: nested by name, arrays of any float dtype.
      x: (batch, tokens, channels).
      layers: number of blocks.
      heads: of each attention.
      attend: whether there is attention; else values go through as they are.

    Returns:
      float64, of x's shape.
    """
    h = np.asarray(x, np.float64)
    return _blocks(parameters["stack"], h, None, layers, heads, attend)


def diffusion(
    parameters: Tree, x: np.ndarray, t: np.ndarray, *, layers: int, heads: int, attend: bool
) -> np.ndarray:
    """Return the exact output of the reference diffusion transformer; see `transformer`.

    Args:
      x: (batch, tokens, channels of the data).
      t: (batch,), times.
    """
    angles = np.asarray(t, np.float64)[:, None] * _array(parameters["frequencies"]["frequencies"])[:, 0]
    time = np.concatenate([np.cos(angles), np.sin(angles)], 1)
    time = _mlp(parameters["time_mlp"], time, _silu)
    inner = parameters["transformer"]
    h = _linear(inner["embed"], np.asarray(x, np.float64))
    half = h.shape[-1] // 2
    wave = np.arange(h.shape[1])[:, None] * 10_000.0 ** (-np.arange(half) / half)
    h = h + np.concatenate([np.sin(wave), np.cos(wave)], 1)
    return _linear(parameters["head"], _blocks(inner["stack"], h, time, layers, heads, attend))


def _blocks(
    stack: Tree, h: np.ndarray, time: np.ndarray | None, layers: int, heads: int, attend: bool
) -> np.ndarray:
    blocks = stack["blocks"]
    for index in range(layers):
        block = blocks[index] if len(blocks) == layers else _part(blocks[0], index)
        z = _modulated(block["attention_norm"], h, time)
        h = h + _attention(block["attention"], z, heads, attend)
        h = h + _mlp(block["mlp"], _modulated(block["mlp_norm"], h, time), _gelu)
    return h


def _part(tree: Any, index: int) -> Any:
    """Return the parameters of one block of those stacked in one array each."""
    if isinstance(tree, Mapping):
        return {name: _part(value, index) for name, value in tree.items()}
    return np.asarray(tree)[index]


def _array(value: Any) -> np.ndarray:
    return np.asarray(value, np.float64)


def _linear(layer: Tree, x: np.ndarray) -> np.ndarray:
    return x @ _array(layer["kernel"]) + _array(layer["bias"])


def _norm(layer: Tree, x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + 1e-6)
    return scaled * _array(layer["scale"]) + _array(layer["bias"])


def _modulated(layer: Tree, x: np.ndarray, time: np.ndarray | None) -> np.ndarray:
    if time is None:
        return _norm(layer, x)
    scale, shift = np.split(_mlp(layer["modulation"], time, _gelu)[:, None], 2, -1)
    return _norm(layer["norm"], x) * (1 + scale) + shift


def _mlp(layer: Tree, x: np.ndarray, activation: Any) -> np.ndarray:
    first, second = layer["layers"][0], layer["layers"][1]
    return _linear(second, activation(_linear(first, x)))


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * (x * x * x))))


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _attention(layer: Tree, x: np.ndarray, heads: int, attend: bool) -> np.ndarray:
    features = x.shape[-1]
    flat = {name: _flat(layer[name], features) for name in ("query", "key", "value", "out")}
    value = _linear(flat["value"], x)
    if not attend:
        return _linear(flat["out"], value)
    query, key = _linear(flat["query"], x), _linear(flat["key"], x)
    out = np.empty_like(value)
    size = features // heads
    # One head at a time: all scores of a long batch at once would be gigabytes.
    for b in range(x.shape[0]):
        for head in range(heads):
            at = slice(head * size, (head + 1) * size)
            score = query[b, :, at] @ key[b, :, at].T / np.sqrt(size)
            weight = np.exp(score - score.max(-1, keepdims=True))
            out[b, :, at] = weight @ value[b, :, at] / weight.sum(-1, keepdims=True)
    return _linear(flat["out"], out)


def _flat(layer: Tree, features: int) -> dict[str, np.ndarray]:
    """Return a projection as a matrix and a vector: heads stand one after the other."""
    return {
        "kernel": _array(layer["kernel"]).reshape(features, features),
        "bias": _array(layer["bias"]).ravel(),
    }
