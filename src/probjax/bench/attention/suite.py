"""The attention suite: cells, rows and their errors for the loop in `runner`."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from probjax.bench.attention import jax_rows
from probjax.bench.attention.cells import AttentionCell, make_inputs
from probjax.bench.attention.config import AttentionConfig
from probjax.bench.attention.oracle import reference, relative_error
from probjax.bench.attention.torch_row import TorchPeer
from probjax.bench.measure import Failed, Prepared, Skipped

# A result further off than this is wrong, not inexact, and gets no time. Measured errors are 100 times
# smaller.
_WRONG = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}


class AttentionSuite:
    """The attention suite.

    Args:
      config: what to measure.
      torch: PyTorch's row; None when it is not wanted.
    """

    def __init__(self, config: AttentionConfig, torch: TorchPeer | None) -> None:
        self._config = config
        self._torch = torch
        self._inputs: tuple[Any, dict[str, np.ndarray]] | None = None
        self._exact: tuple[Any, dict[str, np.ndarray]] | None = None

    def cells(self) -> Sequence[AttentionCell]:
        """Return the grid, in the order of measuring."""
        return self._config.cells()

    def impls(self) -> Sequence[str]:
        """Return the row labels wanted."""
        return self._config.impls

    def inputs(self, cell: AttentionCell) -> dict[str, np.ndarray]:
        """Return the inputs of a cell; those of the last cell are kept, since all its rows share them."""
        key = (cell.shape, cell.dtype, cell.biased)
        if self._inputs is None or self._inputs[0] != key:
            self._inputs = (key, make_inputs(cell))
        return self._inputs[1]

    def exact(self, cell: AttentionCell) -> dict[str, np.ndarray]:
        """Return the float64 reference of a cell; both modes share one."""
        gradients = "fwdbwd" in self._config.modes
        key = (cell.shape, cell.dtype, cell.variant, gradients)
        if self._exact is None or self._exact[0] != key:
            self._exact = (key, reference(self.inputs(cell), causal=cell.causal, gradients=gradients))
        return self._exact[1]

    def prepare(self, impl: str, cell: AttentionCell) -> Prepared:
        """Compile and warm up one row."""
        if impl == "torch_sdpa":
            if self._torch is None:
                raise Failed("the torch process was not started")
            return self._torch.prepare(cell, self.inputs(cell))
        if impl == "mha_interpret" and cell.seq > self._config.interpret_max_seq:
            raise Skipped(f"longer than --interpret-max-seq {self._config.interpret_max_seq}")
        return jax_rows.prepare(impl, cell, self.inputs(cell))

    def check(self, cell: AttentionCell, prepared: Prepared) -> dict[str, Any]:
        """Return the error column: the output's in the mode fwd, the worst gradient's in the mode fwdbwd."""
        if self._config.no_ref:
            return {}
        error = relative_error(prepared.result(), self.exact(cell))
        if not math.isfinite(error) or error > _WRONG[cell.dtype]:
            raise Failed(f"the result is wrong: relative error {error:.1e} against float64")
        return {"rel_err": error}


def memory_work(config: AttentionConfig, torch_python: str | None) -> list[tuple[str, dict[str, Any], Any]]:
    """Return the memory measurements that a configuration asks for.

    Args:
      config: the configuration.
      torch_python: an interpreter with torch.

    Returns:
      Triples of the section of the result file, the columns that name the row, and a function that measures
      it.
    """
    from probjax.bench.attention.memory import max_fit_row, peak_row

    options: dict[str, Any] = {"timeout": config.peak_timeout, "torch_python": torch_python}
    work: list[tuple[str, dict[str, Any], Any]] = []
    if config.peaks:
        for cell in config.memory_cells(config.peak_seqs):
            for impl in config.peak_impls:
                work.append(
                    ("peaks", {"impl": impl, **cell.columns()}, partial(peak_row, impl, cell, **options))
                )
    if config.max_fit:
        groups: dict[tuple[Any, ...], list[AttentionCell]] = {}
        for cell in config.memory_cells(config.fit_seqs):
            groups.setdefault((cell.dtype, cell.head_dim, cell.variant, cell.mode), []).append(cell)
        limit = config.memory_limit_bytes
        for cells in groups.values():
            columns = {name: value for name, value in cells[0].columns().items() if name != "seq"}
            for impl in config.fit_impls:
                name = {"impl": impl, **columns, "memory_limit_mb": limit / 2**20}
                work.append(("max_fit", name, partial(max_fit_row, impl, cells, limit=limit, **options)))
    return work
