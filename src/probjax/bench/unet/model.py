"""The two models of the suite `unet`."""

from typing import Any

from flax import nnx

from probjax.nn import UNet


def narrow_unet(dtype: Any, rngs: nnx.Rngs, *, remat: str = "none") -> UNet:
    """The workload of the reference file, 2,803,968 parameters: it convolves along the width only.

    That is a fault of the model measured there; it is here for the comparison with that file alone.
    """
    return UNet(3, spatial_rank=2, kernel_size=(1, 3), strides=(1, 2), remat=remat, dtype=dtype, rngs=rngs)


def unet_2d(dtype: Any, rngs: nnx.Rngs, *, remat: str = "none") -> UNet:
    """The UNet with the same stages that convolves along both axes: 7,940,352 parameters."""
    return UNet(3, spatial_rank=2, remat=remat, dtype=dtype, rngs=rngs)
