"""The suite `moe`: its rows for the loop in `runner`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from probjax.bench.moe.config import MoeCell
from probjax.bench.moe.oracle import choose, reference
from probjax.bench.network import models
from probjax.bench.network.rows import Network
from probjax.bench.network.suite import NetworkSuite

CAPACITY_FACTOR = 1.25
_OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {"dispatch": "dense"},
    "dropless": {"dispatch": "sorted"},
    "capacity": {"dispatch": "sorted", "capacity_factor": CAPACITY_FACTOR},
}


class MoeSuite(NetworkSuite):
    """The suite of the mixture of experts; see `NetworkSuite`."""

    def build(self, impl: str, cell: MoeCell) -> Network:
        """Return the network of a row."""
        nnx = models.flax()
        from probjax.nn import MixtureOfExperts

        model = MixtureOfExperts(
            cell.model_dim,
            4 * cell.model_dim,
            cell.experts,
            num_selected=cell.selected,
            dtype=jnp.dtype(cell.dtype),
            rngs=nnx.Rngs(models.SEED),
            **_OPTIONS[impl],
        )
        generator = np.random.default_rng([models.SEED, cell.batch, cell.tokens])
        shape = (cell.batch, cell.tokens, cell.model_dim)
        x = jnp.asarray(generator.standard_normal(shape, np.float32), cell.dtype)
        return models.as_network(model, (x,), call=lambda model, x: model(x)[0])

    def exact(self, impl: str, cell: MoeCell, parameters: Any, *inputs: np.ndarray) -> np.ndarray:
        """Return a row's exact output in float64."""
        network = self.network(impl, cell)
        (x,) = inputs
        chosen = choose(network.tree(network.arrays)["router"], x, cell.selected)
        factor = CAPACITY_FACTOR if impl == "capacity" else None
        return reference(parameters, x, chosen, capacity_factor=factor)

    def alike(self, impl: str, cell: MoeCell) -> Any:
        """Rows that drop no token have one exact output."""
        return impl == "capacity"
