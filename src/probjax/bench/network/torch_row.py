"""The row `torch`: the reference transformer in PyTorch, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from probjax.bench.attention.torch_row import TorchPeer
from probjax.bench.child import script_path
from probjax.bench.measure import Prepared, Unavailable
from probjax.bench.network.models import HEADS
from probjax.bench.network.rows import Network


class TransformerPeer(TorchPeer):
    """PyTorch in a child process that serves `torch_child.py`; see `TorchPeer` for its life."""

    script = script_path(__file__, "torch_child.py")

    def prepare_network(self, cell: Any, network: Network) -> Prepared:
        """Load parameters and input of our model into the child and call it once.

        Raises:
          Unavailable: without torch, and for variants: it has one train step.
        """
        if cell.variant is not None:
            raise Unavailable(f"the model in PyTorch has no variant {cell.variant}")
        (x,) = network.inputs
        arrays = {"x": np.asarray(x, np.float32)}
        arrays |= dict(torch_parameters(network.tree(network.arrays)["stack"]["blocks"]))
        load = {"train": cell.op == "train_step", "dtype": cell.dtype, "layers": cell.layers, "heads": HEADS}
        ready, first = self.serve("torch", arrays, load)
        # Now: a step that is called again starts from other parameters.
        found = ready.result()
        ready.result = lambda: found
        half = cell.dtype != "float32"
        ready.columns = {
            "implementation": "sdpa, autocast" if half else "sdpa",
            "params": network.count,
            "finite": all(bool(np.isfinite(array).all()) for array in found.values()),
            "first_call_s": first,
        }
        return ready


def torch_parameters(blocks: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the parameters of our blocks under the names, and in the shapes, that PyTorch gives them."""
    for index, block in blocks.items():
        attention = block["attention"]
        for name in ("attention_norm", "mlp_norm"):
            yield f"{index}.{name}.weight", block[name]["scale"]
            yield f"{index}.{name}.bias", block[name]["bias"]
        linear = {f"attention.{name}": attention[name] for name in ("query", "key", "value", "out")}
        linear |= {"mlp_in": block["mlp"]["layers"][0], "mlp_out": block["mlp"]["layers"][1]}
        for name, layer in linear.items():
            bias = layer["bias"].ravel()
            # Heads and their channels are one axis there.
            kernel = layer["kernel"].reshape(-1, bias.size)
            yield f"{index}.{name}.weight", np.ascontiguousarray(kernel.T)
            yield f"{index}.{name}.bias", bias
