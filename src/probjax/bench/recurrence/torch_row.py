"""The row `torch_reference`: the selective scan as a plain loop in PyTorch, in a process of its own."""

from typing import Any

import numpy as np

from probjax.bench.attention.torch_row import TorchPeer
from probjax.bench.child import script_path
from probjax.bench.measure import Prepared, Unavailable
from probjax.bench.recurrence.cells import RecurrenceCell

# Arrays over tokens, which the loop takes with time last.
_OVER_TOKENS = ("x", "dt", "B", "C", "cotangent", "output")


class ReferencePeer(TorchPeer):
    """PyTorch in a child process that serves `torch_child.py`; see `TorchPeer` for its life."""

    script = script_path(__file__, "torch_child.py")

    def prepare(self, cell: Any, inputs: dict[str, np.ndarray], **_: Any) -> Prepared:
        """Load a cell into the child and call it once.

        Raises:
          Unavailable: without torch, and for operations that mamba_ssm has no such reference of.
        """
        assert isinstance(cell, RecurrenceCell)
        if cell.op != "selective_scan":
            raise Unavailable("mamba_ssm's loop in PyTorch is of the selective scan only")
        load = {"mode": cell.mode, "dtype": cell.dtype}
        ready, first = self.serve("torch_reference", _arranged(inputs), load, arrange=_arranged)
        assert self.hello is not None
        ready.columns = {
            "compile_s": first,
            "implementation": "loop",
            "precision": self.hello["precision"],
        }
        return ready


def _arranged(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Exchange the two layouts, time last (torch) and time after the batch (ours)."""
    return {
        name: np.ascontiguousarray(array.swapaxes(1, 2)) if name in _OVER_TOKENS else array
        for name, array in arrays.items()
    }
