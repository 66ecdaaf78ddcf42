"""The reference model of the suite `ssm`: a recurrent cell and an MLP per block, every other from the end.

With 4 blocks of 128 channels it has as many parameters as the model of the reference file: 930,704 with
mamba, 865,172 with ssd, 995,728 with lru; and, like that, two norms before the cell and GELU after both
layers of the MLP.
"""

from collections.abc import Callable
from typing import Any

from flax import nnx

from probjax.nn import SequenceModel

FEATURES = 16
"""Channels of the model's inputs and outputs."""


def make(
    features: int, layers: int, cell: Callable[..., Any], *, remat: str = "none", dtype: Any, rngs: nnx.Rngs
) -> SequenceModel:
    """Return the model, (batch, length, FEATURES) to the same.

    Args:
      features: channels between the blocks.
      layers: number of blocks.
      cell: makes the cell.
      remat: what the backward pass keeps, see `SequenceModel`.
      dtype: of the computation; parameters are float32.
      rngs: for the initial values.
    """
    return SequenceModel(
        features,
        layers,
        cell,
        in_features=FEATURES,
        out_features=FEATURES,
        direction="alternating",
        cell_norm=True,
        activate_final=True,
        remat=remat,
        dtype=dtype,
        rngs=rngs,
    )
