"""The suite `remat`: rows of the suites of the models, one train step of each in several variants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from probjax.bench.measure import Prepared, Skipped
from probjax.bench.remat.config import RematConfig
from probjax.bench.ssm.config import SsmCell
from probjax.bench.ssm.suite import SsmSuite
from probjax.bench.transformer.config import TransformerCell
from probjax.bench.transformer.suite import TransformerSuite
from probjax.bench.unet.config import UnetCell
from probjax.bench.unet.suite import UnetSuite


class RematSuite:
    """The suite `remat`.

    Args:
      config: what to measure.
      torch: None; no row is PyTorch's.
    """

    def __init__(self, config: RematConfig, torch: None = None) -> None:
        self._config = config
        self.device = config.device
        # They take of a configuration what all have.
        self._suites: dict[type, Any] = {
            TransformerCell: TransformerSuite(config),
            UnetCell: UnetSuite(config),
            SsmCell: SsmSuite(config),
        }

    def cells(self) -> Sequence[Any]:
        """Return the grid, in the order of measuring."""
        return self._config.grid()

    def impls(self) -> Sequence[str]:
        """Return the row labels wanted."""
        return self._config.impls

    def prepare(self, impl: str, cell: Any) -> Prepared:
        """Compile and warm up one row."""
        if impl != "probjax_default" and not isinstance(cell, TransformerCell):
            raise Skipped("the model has no attention")
        return self._suites[type(cell)].prepare(impl, cell)

    def check(self, cell: Any, prepared: Prepared) -> dict[str, Any]:
        """Return the error columns of one row."""
        return self._suites[type(cell)].check(cell, prepared)
