"""The suites `transformer` and `diffusion`: their rows for the loop in `runner`."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from probjax.bench.measure import Prepared, Unavailable
from probjax.bench.network import models, oracle
from probjax.bench.network.rows import Network
from probjax.bench.network.suite import NetworkSuite
from probjax.bench.transformer.config import PEERS, TransformerCell


class TransformerSuite(NetworkSuite):
    """The suites of the transformer and the diffusion transformer; see `NetworkSuite`."""

    wrong: ClassVar[dict[str, float]] = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}

    def prepare(self, impl: str, cell: TransformerCell) -> Prepared:
        """Compile and warm up one row."""
        if impl == "torch":
            if self._torch is None:
                raise Unavailable("this run has no PyTorch process")
            ready = self._torch.prepare_network(cell, self.network(self.reference_row(impl), cell))
        else:
            ready = super().prepare(impl, cell)
        ready.columns = {"attention": impl, **ready.columns}
        return ready

    def build(self, impl: str, cell: TransformerCell) -> Network:
        """Return the network of a row."""
        if impl == "flax":
            models.flax()
            from probjax.bench.network.peers import flax_network

            ours = self.network(self.reference_row(impl), cell)
            return flax_network(ours, dtype=cell.dtype, features=cell.model_dim, layers=cell.layers)
        inputs = models.inputs_of(
            cell.model, dtype=cell.dtype, batch=cell.batch, tokens=cell.tokens, features=cell.model_dim
        )
        return models.as_network(models.model_of(cell.model, **self.options(impl, cell)), inputs)

    def options(self, impl: str, cell: Any) -> dict[str, Any]:
        """Return the model's arguments for a row."""
        remat = "full" if cell.variant == "remat" else "none"
        sizes = {"features": cell.model_dim, "layers": cell.layers}
        return {"attention": impl, "dtype": cell.dtype, "remat": remat, **sizes}

    def exact(self, impl: str, cell: TransformerCell, parameters: Any, *inputs: np.ndarray) -> np.ndarray:
        """Return a row's exact output in float64."""
        function = oracle.transformer if cell.model == "transformer" else oracle.diffusion
        attend = impl != "no_attention"
        return function(parameters, *inputs, layers=cell.layers, heads=models.HEADS, attend=attend)

    def alike(self, impl: str, cell: TransformerCell) -> Any:
        """Rows with an attention, whichever, have one exact output."""
        return impl != "no_attention"

    def reference_row(self, impl: str) -> str:
        """Return the row whose parameters the reference takes."""
        return "probjax_default" if impl in PEERS else impl
