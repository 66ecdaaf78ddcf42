"""The attention suite: cells, rows and their errors for the loop in `runner`."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from probjax.bench.attention import device_oracle, jax_rows
from probjax.bench.attention.cells import AttentionCell, make_inputs
from probjax.bench.attention.config import AttentionConfig
from probjax.bench.attention.oracle import reference, relative_error
from probjax.bench.attention.sample import exact_is_cheap, steps, thin
from probjax.bench.attention.torch_row import TorchPeer
from probjax.bench.attention.wanted import Wanted
from probjax.bench.measure import Failed, Prepared, Skipped, Wrong

# A result further off than this is wrong, not inexact, and gets no time. Measured errors are far smaller.
_WRONG = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 5e-2}
# NVIDIA GPUs multiply float32 with 10 bits of mantissa unless told otherwise.
_WRONG_TF32 = 2e-2
# Arithmetic operations that a program of chained operations should not exceed: some 10 ms on a large GPU.
_PROGRAM_WORK = 5e11


class AttentionSuite:
    """The attention suite.

    Args:
      config: what to measure.
      torch: PyTorch's rows; None when none is wanted.
    """

    def __init__(self, config: AttentionConfig, torch: TorchPeer | None) -> None:
        self._config = config
        self.device = config.device
        self._bench = AttentionBench(torch, config.device)

    def cells(self) -> Sequence[AttentionCell]:
        """Return the grid, in the order of measuring."""
        return self._config.cells()

    def impls(self) -> Sequence[str]:
        """Return the row labels wanted."""
        return self._config.impls

    def prepare(self, impl: str, cell: AttentionCell) -> Prepared:
        """Compile and warm up one row."""
        if impl == "mha_interpret" and cell.seq > self._config.interpret_max_seq:
            raise Skipped(f"longer than --interpret-max-seq {self._config.interpret_max_seq}")
        return self._bench.prepare(impl, cell, self._wanted(cell))

    def _wanted(self, cell: AttentionCell) -> Wanted:
        gpu = self.device == "gpu"
        return Wanted(
            times=self._config.times,
            asynchronous=gpu,
            program_length=program_length(cell),
            step=steps(cell) if gpu else None,
        )

    def check(self, cell: AttentionCell, prepared: Prepared) -> dict[str, Any]:
        """Return the error column: the output's in the mode fwd, the worst gradient's in the mode fwdbwd."""
        if self._config.no_ref:
            return {}
        step = steps(cell) if self.device == "gpu" else None
        return self._bench.check(cell, prepared, gradients="fwdbwd" in self._config.modes, step=step)


def program_length(cell: AttentionCell) -> int:
    """Return how many operations a program chains: 32, and fewer where they take long."""
    length = 32
    while length > 4 and length * cell.work > _PROGRAM_WORK:
        length //= 2
    return length


class AttentionBench:
    """Inputs, references and rows of attention cells, for the suites that measure attention.

    Args:
      torch: PyTorch's rows; None when none is wanted.
      device: ``cpu`` or ``gpu``.
    """

    def __init__(self, torch: TorchPeer | None, device: str) -> None:
        self._torch = torch
        self._device = device
        self._inputs: tuple[Any, dict[str, np.ndarray]] | None = None
        self._placed: tuple[Any, dict[str, Any]] | None = None
        self._exact: tuple[Any, dict[str, np.ndarray]] | None = None

    def inputs(self, cell: AttentionCell) -> dict[str, np.ndarray]:
        """Return the inputs of a cell; those of the last cell are kept, since all its rows share them."""
        key = (cell.shape, cell.dtype, cell.extra)
        if self._inputs is None or self._inputs[0] != key:
            self._inputs = (key, make_inputs(cell))
        return self._inputs[1]

    def placed(self, cell: AttentionCell) -> list[Any]:
        """Return the arguments of a cell's programs on the device; those of the last inputs are kept."""
        inputs = self.inputs(cell)
        if self._placed is None or self._placed[0] is not inputs:
            self._placed = (inputs, {})
        kept = self._placed[1]
        kept |= jax_rows.place(cell, inputs, [name for name in jax_rows.names(cell) if name not in kept])
        return [kept[name] for name in jax_rows.names(cell)]

    def exact(
        self, cell: AttentionCell, *, gradients: bool, step: tuple[int, int] | None
    ) -> dict[str, np.ndarray]:
        """Return the reference of a cell, or of the part that `step` takes; both modes share one."""
        key = (cell.shape, cell.dtype, cell.variant, gradients, step)
        if self._exact is None or self._exact[0] != key:
            inputs = self.inputs(cell)
            oracle: Any = reference
            if step is not None:
                inputs = thin(inputs, step)
                oracle = reference if exact_is_cheap(cell, step) else device_oracle.reference
            found = oracle(inputs, causal=cell.causal, gradients=gradients, window=cell.window)
            self._exact = (key, found)
        return self._exact[1]

    def prepare(self, impl: str, cell: AttentionCell, wanted: Wanted) -> Prepared:
        """Compile and warm up one row."""
        if impl.startswith("torch_"):
            if self._torch is None:
                raise Failed("the torch process was not started")
            return self._torch.prepare(cell, self.inputs(cell), impl=impl, wanted=wanted)
        return jax_rows.prepare(impl, cell, self.inputs(cell), wanted=wanted, placed=self.placed(cell))

    def check(
        self, cell: AttentionCell, prepared: Prepared, *, gradients: bool, step: tuple[int, int] | None
    ) -> dict[str, Any]:
        """Return the error column of a row.

        Raises:
          Wrong: when it is too large for the dtype.
        """
        error = relative_error(prepared.result(), self.exact(cell, gradients=gradients, step=step))
        if not math.isfinite(error) or error > self._limit(cell):
            columns = {"rel_err": error} if math.isfinite(error) else {}
            raise Wrong(f"the result is wrong: relative error {error:.1e} against the reference", columns)
        return {"rel_err": error}

    def _limit(self, cell: AttentionCell) -> float:
        if cell.dtype == "float32" and self._device == "gpu" and cell.precision == "default":
            return _WRONG_TF32
        return _WRONG[cell.dtype]


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
