"""Recurrent cells and blocks as Flax NNX modules, built on `probjax.recurrence`.

All of them map (*B, L, features) to (*B, L, features) and have the same three methods: the call on whole
sequences, `init_state` and `step` for one token at a time. They are plain trees: no shared submodules and
no keys inside, so that `nnx.split`, `jax.jit`, `jax.vmap` and `jax.grad` take them as they are. This
package needs Flax; `probjax` does not.

Cells are bare recurrences: `LRUCell`, `MambaCell`, `SSDCell`. Blocks are what the papers stack into models,
with convolution and gate: `MambaBlock` (Mamba-1), `Mamba2Block`, `RGLRUBlock` (Griffin's recurrent block).
"""

from probjax.nn.cells import LRUCell, MambaCell, SSDCell
from probjax.nn.griffin import RGLRUBlock
from probjax.nn.mamba import Mamba2Block, MambaBlock

__all__ = ["LRUCell", "Mamba2Block", "MambaBlock", "MambaCell", "RGLRUBlock", "SSDCell"]
