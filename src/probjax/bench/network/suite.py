"""What the suites of whole networks have in common: networks and exact results at hand, error columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from probjax.bench.measure import Prepared, Wrong
from probjax.bench.network import rows

# NVIDIA GPUs multiply float32 with 10 bits of mantissa unless told otherwise.
_WRONG_TF32 = 5e-2
_STEP = 1e-6


class Exact:
    """The exact output of a network, and the slope of its loss along `rows.direction` when it is wanted.

    Args:
      network: the network.
      function: f(leaves), the exact output for these parameters, float64.
    """

    def __init__(self, network: rows.Network, function: Callable[[Sequence[np.ndarray]], np.ndarray]) -> None:
        self._network, self._function = network, function
        self._slope: float | None = None
        self.y = function(network.arrays)

    @property
    def loss(self) -> float:
        """The mean square of the output."""
        return float(np.mean(self.y**2))

    def slope(self) -> float:
        """The slope, by central differences."""
        if self._slope is None:
            ahead, behind = (
                float(np.mean(self._function([*self._moved(step)]) ** 2)) for step in (_STEP, -_STEP)
            )
            self._slope = (ahead - behind) / (2 * _STEP)
        return self._slope

    def _moved(self, step: float) -> Any:
        for index, leaf in enumerate(self._network.arrays):
            yield leaf.astype(np.float64) + step * rows.direction(index, leaf.shape)


class NetworkSuite:
    """A suite of whole networks; a subclass says how they are built and what their exact output is.

    Args:
      config: what to measure.
      torch: PyTorch's process, where a row of it is wanted.

    Attributes:
      has_reference: whether `exact` is there.
      wrong: by dtype, the error from where on a result is wrong, not inexact, and gets no time.
    """

    has_reference = True
    wrong: ClassVar[dict[str, float]] = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}

    def __init__(self, config: Any, torch: Any = None) -> None:
        self._config, self._torch = config, torch
        self.device = config.device
        # Of the cells that differ in operation and variant alone.
        self._shape: Any = None
        self._networks: dict[Any, rows.Network] = {}
        self._exact: dict[Any, Exact] = {}

    def build(self, impl: str, cell: Any) -> rows.Network:
        """Return the network of a row; all rows of a cell have the same parameters and inputs."""
        raise NotImplementedError

    def exact(self, impl: str, cell: Any, parameters: Any, *inputs: np.ndarray) -> np.ndarray:
        """Return a row's exact output in float64."""
        raise NotImplementedError

    def alike(self, impl: str, cell: Any) -> Any:
        """Return what rows of the same shape have to share to have the same exact output."""
        return None

    def shape(self, cell: Any) -> Any:
        """Return what cells share that have the same parameters and inputs, made by the same rows."""
        columns = cell.columns()
        return tuple(value for name, value in columns.items() if name not in ("op", "variant"))

    def policy(self, cell: Any) -> Any:
        """Return how a cell's network differs from those of the same shape: in what its backward keeps."""
        return cell.variant == "remat"

    def cells(self) -> Sequence[Any]:
        """Return the grid, in the order of measuring."""
        return self._config.grid()

    def impls(self) -> Sequence[str]:
        """Return the row labels wanted."""
        return self._config.impls

    def prepare(self, impl: str, cell: Any) -> Prepared:
        """Compile and warm up one row."""
        return rows.prepare(
            impl,
            self.network(impl, cell),
            op=cell.op,
            variant=cell.variant,
            device=self.device,
            memory_limit=self._config.memory_limit,
        )

    def network(self, impl: str, cell: Any) -> rows.Network:
        """Return the network of a row; see `build`."""
        self._enter(cell)
        key = (impl, self.policy(cell))
        if key not in self._networks:
            self._networks[key] = self.build(impl, cell)
        return self._networks[key]

    def _enter(self, cell: Any) -> None:
        if self._shape != self.shape(cell):
            self._shape = self.shape(cell)
            self._networks.clear()
            self._exact.clear()

    def check(self, cell: Any, prepared: Prepared) -> dict[str, Any]:
        """Return the error columns: of the output, or of loss and gradients of a train step.

        Raises:
          Wrong: when one is too large for the dtype, or when a result is not finite.
        """
        if not prepared.columns["finite"]:
            raise Wrong("a result is not finite")
        if self._config.no_ref or not self.has_reference:
            return {}
        exact = self._reference(prepared.impl, cell)
        found = prepared.result()
        if "y" in found:
            columns = {"rel_err": float(np.abs(found["y"] - exact.y).max() / np.abs(exact.y).max())}
        else:
            columns = {"rel_err": abs(float(found["loss"]) - exact.loss) / exact.loss}
        if "slope" in found:
            norm = float(found["norm"])
            columns["grad_err"] = abs(float(found["slope"]) - exact.slope()) / norm if norm else math.inf
        tf32 = self.device == "gpu" and cell.dtype == "float32"
        limit = _WRONG_TF32 if tf32 else self.wrong[cell.dtype]
        for name, error in columns.items():
            if not math.isfinite(error) or error > limit:
                what = "gradient" if name == "grad_err" else "result"
                known = {name: value for name, value in columns.items() if math.isfinite(value)}
                raise Wrong(f"the {what} is wrong: relative error {error:.1e} against the reference", known)
        return columns

    def _reference(self, impl: str, cell: Any) -> Exact:
        key = self.alike(impl, cell)
        if key not in self._exact:
            network = self.network(self.reference_row(impl), cell)
            inputs = [np.asarray(array, np.float64) for array in network.inputs]
            self._exact[key] = Exact(
                network, lambda leaves: self.exact(impl, cell, network.tree(leaves), *inputs)
            )
        return self._exact[key]

    def reference_row(self, impl: str) -> str:
        """Return the row whose parameters the reference takes: the same, unless it is another library's."""
        return impl
