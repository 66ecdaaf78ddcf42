"""The suite `scan_remat`: its rows for the loop in `runner`."""

from __future__ import annotations

from typing import Any

from probjax.bench.transformer.suite import TransformerSuite


class ScanRematSuite(TransformerSuite):
    """The suite of deep models; see `NetworkSuite`."""

    def options(self, impl: str, cell: Any) -> dict[str, Any]:
        """Return the model's arguments for a row."""
        return {**super().options(impl, cell), "remat": cell.remat, "scan_layers": cell.scan}

    def shape(self, cell: Any) -> Any:
        """Return what cells share that have the same parameters: those of scanned layers are stacked."""
        return (cell.model, cell.dtype, cell.layers, cell.scan)

    def policy(self, cell: Any) -> Any:
        """Return what the backward pass keeps of each layer."""
        return cell.remat
