"""The suite `unet`: its rows for the loop in `runner`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from probjax.bench.network import models
from probjax.bench.network.rows import Network
from probjax.bench.network.suite import NetworkSuite
from probjax.bench.unet.config import UnetCell
from probjax.bench.unet.oracle import reference

CHANNELS = 3


class UnetSuite(NetworkSuite):
    """The suite of the UNets; see `NetworkSuite`."""

    def build(self, impl: str, cell: UnetCell) -> Network:
        """Return the network of a row."""
        nnx = models.flax()
        from probjax.bench.unet.model import narrow_unet, unet_2d

        make = unet_2d if cell.model == "unet_2d" else narrow_unet
        remat = "full" if cell.variant == "remat" else "none"
        model = make(jnp.dtype(cell.dtype), nnx.Rngs(models.SEED), remat=remat)
        generator = np.random.default_rng([models.SEED, cell.batch, cell.resolution])
        shape = (cell.batch, cell.resolution, cell.resolution, CHANNELS)
        x = jnp.asarray(generator.standard_normal(shape, np.float32), cell.dtype)
        return models.as_network(model, (x,))

    def exact(self, impl: str, cell: UnetCell, parameters: Any, *inputs: np.ndarray) -> np.ndarray:
        """Return a row's exact output in float64."""
        return reference(parameters, *inputs, strides=(2, 2) if cell.model == "unet_2d" else (1, 2))
