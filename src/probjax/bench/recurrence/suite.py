"""The suite `recurrence`: cells, rows and their errors for the loop in `runner`."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from probjax.bench.measure import Failed, Prepared, Skipped, Wrong
from probjax.bench.recurrence import rows
from probjax.bench.recurrence.cells import RecurrenceCell, make_inputs
from probjax.bench.recurrence.config import SLOW, RecurrenceConfig
from probjax.bench.recurrence.oracle import reference

# A result further off than this is wrong, not inexact, and gets no time.
_WRONG = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 5e-2}
# NVIDIA GPUs multiply float32 with 10 bits of mantissa unless told otherwise.
_WRONG_TF32 = 2e-2
# Rows whose time goes with the number of steps whatever the size of a state.
_STEPS_FROM_PYTHON = ("torch_reference", "probjax_reference")


class RecurrenceSuite:
    """The suite `recurrence`.

    Args:
      config: what to measure.
      torch: PyTorch's row, a `torch_row.ReferencePeer`; None when none is wanted.
    """

    def __init__(self, config: RecurrenceConfig, torch: Any = None) -> None:
        self._config = config
        self._torch = torch
        self.device = config.device
        self._inputs: tuple[Any, dict[str, np.ndarray]] | None = None
        self._exact: tuple[Any, dict[str, np.ndarray]] | None = None

    def cells(self) -> Sequence[RecurrenceCell]:
        """Return the grid, in the order of measuring."""
        return self._config.grid()

    def impls(self) -> Sequence[str]:
        """Return the row labels wanted."""
        return self._config.impls

    def prepare(self, impl: str, cell: RecurrenceCell) -> Prepared:
        """Compile and warm up one row."""
        keeps_states = impl in SLOW and cell.state > 1
        longest = self._config.slow_max_seq
        if cell.seq > longest and (keeps_states or impl in _STEPS_FROM_PYTHON):
            raise Skipped(f"longer than --slow-max-seq {longest}")
        if impl == "torch_reference":
            if self._torch is None:
                raise Failed("the torch process was not started")
            return self._torch.prepare(cell, self.inputs(cell))
        return rows.prepare(
            impl,
            cell,
            self.inputs(cell),
            device=self.device,
            memory_limit=self._config.memory_limit,
            times=self._config.times,
        )

    def inputs(self, cell: RecurrenceCell) -> dict[str, np.ndarray]:
        """Return the inputs of a cell; those of the last cell are kept, since all its rows share them."""
        key = _shape(cell)
        if self._inputs is None or self._inputs[0] != key:
            self._inputs = (key, make_inputs(cell))
        return self._inputs[1]

    def check(self, cell: RecurrenceCell, prepared: Prepared) -> dict[str, Any]:
        """Return the error column: the output's in the mode fwd, the worst gradient's in the mode fwdbwd.

        Raises:
          Wrong: when it is too large for the dtype.
        """
        if self._config.no_ref:
            return {}
        key = _shape(cell)
        if self._exact is None or self._exact[0] != key:
            gradients = "fwdbwd" in self._config.modes
            self._exact = (key, reference(cell.op, self.inputs(cell), gradients=gradients))
        error = relative_error(prepared.result(), self._exact[1])
        tf32 = self.device == "gpu" and cell.dtype == "float32"
        if not math.isfinite(error) or error > (_WRONG_TF32 if tf32 else _WRONG[cell.dtype]):
            columns = {"rel_err": error} if math.isfinite(error) else {}
            raise Wrong(f"the result is wrong: relative error {error:.1e} against the reference", columns)
        return {"rel_err": error}


def relative_error(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """Return the worst of max |got - wanted| / max |wanted| over the arrays of `got`, NaN if any has."""
    errors = [float(np.abs(got[name] - wanted[name]).max() / np.abs(wanted[name]).max()) for name in got]
    return float(np.max(errors))


def _shape(cell: RecurrenceCell) -> tuple[Any, ...]:
    return (cell.op, cell.dtype, cell.batch, cell.seq, cell.channels, cell.state, cell.heads)
