"""The sizes of one attention call and how arrays broadcast over them."""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Leading batch axes, query length T, key length S, query heads N, key/value heads K."""

    lead: tuple[int, ...]
    T: int
    S: int
    N: int
    K: int

    @property
    def B(self) -> int:
        return math.prod(self.lead)

    @property
    def group(self) -> int:
        return self.N // self.K

    def full(self, array: np.ndarray) -> np.ndarray:
        """Broadcast a (…, 1|K|N, 1|T, 1|S) array to (B, N, T, S)."""
        array = self._ranked(array)
        if array.shape[-3] == self.K != self.N:
            array = np.repeat(array, self.group, axis=-3)
        return np.broadcast_to(array, (*self.lead, self.N, self.T, self.S)).reshape(
            self.B, self.N, self.T, self.S
        )

    def reduced(self, full: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Transpose of `full`: sum a (B, N, T, S) array to the caller's `shape`."""
        ranked = shape[1:] if len(shape) > len(self.lead) + 3 else shape
        full = full.reshape(*self.lead, self.N, self.T, self.S)
        if ranked[-3] == self.K != self.N:
            full = full.reshape(*self.lead, self.K, self.group, self.T, self.S).sum(-3)
        axes = tuple(axis for axis, size in enumerate(ranked) if size == 1 and full.shape[axis] != 1)
        return full.sum(axes, keepdims=True).reshape(shape)

    def rows(self, array: np.ndarray) -> np.ndarray:
        """Flatten the leading axes of a (*B, …) array, broadcasting leading axes of size 1."""
        rest = array.shape[len(self.lead) :]
        return np.broadcast_to(array, (*self.lead, *rest)).reshape(self.B, *rest)

    def grid(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Batch, head, query and key/value indices, broadcastable to (B, N, T, S)."""
        return np.ix_(np.arange(self.B), np.arange(self.N), np.arange(self.T), np.arange(self.S))

    def _ranked(self, array: np.ndarray) -> np.ndarray:
        if array.ndim == len(self.lead) + 4 and array.shape[0] == 1:
            return array[0]
        return array
