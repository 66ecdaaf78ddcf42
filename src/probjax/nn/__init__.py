"""Models as Flax NNX modules, built on `probjax.dot_product_attention` and `probjax.recurrence`.

Layers: `MultiHeadAttention`, `MLP`, `MixtureOfExperts`, embeddings and adaptive norms. Models:
`Transformer`, `DiffusionTransformer`, `UNet`, and `SequenceModel`, a stack over any of the recurrent cells
(`LRUCell`, `MambaCell`, `SSDCell`: bare recurrences) and blocks (`MambaBlock`, `Mamba2Block`, `RGLRUBlock`:
with convolution and gate, as the papers stack them).

All are plain trees: no shared submodules and no keys inside, so that `nnx.split`, `jax.jit`, `jax.vmap` and
`jax.grad` take them as they are; dropout draws from a key that a call is given. Stacks of blocks may be
scanned (`scan_layers`), and computed again in backward (`remat`). This package needs Flax; `probjax` does
not.
"""

from probjax.nn._stack import remat
from probjax.nn.attention import Cache, MultiHeadAttention
from probjax.nn.cells import LRUCell, MambaCell, SSDCell
from probjax.nn.diffusion import DiffusionTransformer
from probjax.nn.embedding import FourierFeatures, rotary_embedding, sinusoidal_embedding
from probjax.nn.griffin import RGLRUBlock
from probjax.nn.mamba import Mamba2Block, MambaBlock
from probjax.nn.mlp import MLP
from probjax.nn.moe import MixtureOfExperts, MoEAux
from probjax.nn.norm import AdaptiveLayerNorm
from probjax.nn.sequence import SequenceModel
from probjax.nn.transformer import Transformer, TransformerBlock
from probjax.nn.unet import UNet

__all__ = [
    "MLP",
    "AdaptiveLayerNorm",
    "Cache",
    "DiffusionTransformer",
    "FourierFeatures",
    "LRUCell",
    "Mamba2Block",
    "MambaBlock",
    "MambaCell",
    "MixtureOfExperts",
    "MoEAux",
    "MultiHeadAttention",
    "RGLRUBlock",
    "SSDCell",
    "SequenceModel",
    "Transformer",
    "TransformerBlock",
    "UNet",
    "remat",
    "rotary_embedding",
    "sinusoidal_embedding",
]
