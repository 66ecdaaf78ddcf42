"""The two UNets in float64 NumPy, tap by tap: what the error column is measured against.

It shares no code with the model; of it, it takes the parameters' names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

type Tree = Mapping[Any, Any]
_GROUPS = 32


def reference(parameters: Tree, x: np.ndarray, *, strides: tuple[int, int]) -> np.ndarray:
    """Return the network's exact output.

    Args:
      parameters: nested by name, arrays of any float dtype.
      x: (batch, height, width, channels).
      strides: by what height and width shrink between stages.

    Returns:
      float64, of x's shape.
    """
    h = first = np.asarray(x, np.float64) @ _array(parameters["embed"]["kernel"])
    depth = len(parameters["down"])
    kept = []
    for stage in range(depth):
        h = _steps(parameters["down"][stage], h)
        kept.append(h)
        if stage < depth - 1:
            h = _convolution(parameters["shrink"][stage], h, strides)
    h = _steps(parameters["middle"], h)
    for stage in reversed(range(depth)):
        h = _steps(parameters["up"][stage], np.concatenate([h, kept[stage]], -1))
        if stage:
            h = _growing(parameters["grow"][stage - 1], h, strides)
    return np.concatenate([h, first], -1) @ _array(parameters["head"]["kernel"])


def _array(value: Any) -> np.ndarray:
    return np.asarray(value, np.float64)


def _steps(steps: Tree, h: np.ndarray) -> np.ndarray:
    for index in range(len(steps)):
        block = steps[index]["block"]
        z = _convolution(block["conv1"], _silu(_norm(block["norm1"], h)), (1, 1))
        z = _convolution(block["conv2"], _silu(_norm(block["norm2"], z)), (1, 1))
        h = z + h @ _array(block["skip"]["kernel"])
    return h


def _norm(layer: Tree, x: np.ndarray) -> np.ndarray:
    """Group norm; every stage of the reference networks has a multiple of 32 channels."""
    grouped = x.reshape(x.shape[0], -1, _GROUPS, x.shape[-1] // _GROUPS)
    centred = grouped - grouped.mean((1, 3), keepdims=True)
    scaled = centred / np.sqrt(np.mean(centred**2, (1, 3), keepdims=True) + 1e-6)
    return scaled.reshape(x.shape) * _array(layer["scale"]) + _array(layer["bias"])


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _convolution(layer: Tree, x: np.ndarray, strides: Sequence[int]) -> np.ndarray:
    """A convolution to ceil(size / stride) positions: padding is even, or one more at the end."""
    kernel = _array(layer["kernel"])
    pads = []
    for size, taps, stride in zip(x.shape[1:3], kernel.shape[:2], strides, strict=True):
        total = max(0, (-(-size // stride) - 1) * stride + taps - size)
        pads.append((total // 2, total - total // 2))
    return _correlate(x, kernel, pads, strides) + _array(layer["bias"])


def _growing(layer: Tree, x: np.ndarray, strides: Sequence[int]) -> np.ndarray:
    """A transposed convolution to size times stride positions: zeros between those there are, then taps."""
    kernel = _array(layer["kernel"])
    sizes = [(size - 1) * stride + 1 for size, stride in zip(x.shape[1:3], strides, strict=True)]
    spread = np.zeros((x.shape[0], *sizes, x.shape[3]))
    spread[:, :: strides[0], :: strides[1]] = x
    pads = []
    for taps, stride in zip(kernel.shape[:2], strides, strict=True):
        total = taps + stride - 2
        pads.append((-(-total // 2), total // 2))
    return _correlate(spread, kernel, pads, (1, 1)) + _array(layer["bias"])


def _correlate(
    x: np.ndarray, kernel: np.ndarray, pads: Sequence[tuple[int, int]], strides: Sequence[int]
) -> np.ndarray:
    x = np.pad(x, ((0, 0), *pads, (0, 0)))
    sizes = [
        (size - taps) // stride + 1
        for size, taps, stride in zip(x.shape[1:3], kernel.shape[:2], strides, strict=True)
    ]
    y = np.zeros((x.shape[0], *sizes, kernel.shape[3]))
    for i in range(kernel.shape[0]):
        for j in range(kernel.shape[1]):
            rows = slice(i, i + (sizes[0] - 1) * strides[0] + 1, strides[0])
            columns = slice(j, j + (sizes[1] - 1) * strides[1] + 1, strides[1])
            y += x[:, rows, columns] @ kernel[i, j]
    return y
