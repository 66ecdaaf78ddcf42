"""What mask and bias descriptions share: arrays beside static structure, built into probjax objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np


class Spec:
    """A tree whose nodes hold arrays and static values.

    A test describes a mask or a bias once; `build` makes the probjax object out of (possibly traced) arrays,
    and the NumPy methods of the subclasses say independently what it means.
    """

    static: tuple[Any, ...] = ()
    own: tuple[np.ndarray, ...] = ()
    children: tuple[Any, ...] = ()

    def arrays(self) -> list[np.ndarray]:
        """All arrays, own ones first, then the children's from left to right."""
        return [*self.own, *(array for child in self.children for array in child.arrays())]

    def signature(self) -> tuple[Any, ...]:
        """Hashable static structure: equal signatures can share one compiled function."""
        return (
            type(self).__name__,
            self.static,
            len(self.own),
            tuple(child.signature() for child in self.children),
        )

    def build(self, arrays: Iterator[Any]) -> Any:
        """The probjax object, taking its arrays from the iterator."""
        own = [next(arrays) for _ in self.own]
        return self.make(own, [child.build(arrays) for child in self.children])

    def object(self) -> Any:
        """The probjax object with this description's own arrays."""
        return self.build(iter(self.arrays()))

    def make(self, own: list[Any], children: list[Any]) -> Any:
        raise NotImplementedError

    def __repr__(self) -> str:
        parts = [
            *map(repr, self.static),
            *(f"{a.dtype}{list(a.shape)}" for a in self.own),
            *map(repr, self.children),
        ]
        return f"{type(self).__name__}({', '.join(parts)})"
