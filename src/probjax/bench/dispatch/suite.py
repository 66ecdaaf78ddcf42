"""The suite `dispatch`: cells, rows and their errors for the loop in `runner`."""

from collections.abc import Sequence
from typing import Any

from probjax.bench.attention.sample import steps
from probjax.bench.attention.suite import AttentionBench, program_length
from probjax.bench.attention.torch_row import TorchPeer
from probjax.bench.attention.wanted import Wanted
from probjax.bench.dispatch.cells import DispatchCell
from probjax.bench.dispatch.config import DispatchConfig
from probjax.bench.measure import Prepared, Skipped


class DispatchSuite:
    """The suite.

    Args:
      config: what to measure; its device is given.
      torch: PyTorch's rows; None when none is wanted.
    """

    def __init__(self, config: DispatchConfig, torch: TorchPeer | None) -> None:
        self._config = config
        self.device = config.device or "cpu"
        self._bench = AttentionBench(torch, self.device)

    def cells(self) -> Sequence[DispatchCell]:
        """Return the grid, in the order of measuring."""
        return self._config.cells()

    def impls(self) -> Sequence[str]:
        """Return the row labels wanted."""
        return self._config.impls

    def prepare(self, impl: str, cell: DispatchCell) -> Prepared:
        """Compile and warm up one row."""
        if impl == "mha_interpret" and cell.seq > self._config.interpret_max_seq:
            raise Skipped(f"longer than --interpret-max-seq {self._config.interpret_max_seq}")
        ready = self._bench.prepare(impl, cell.attention, self._wanted(cell))
        # It names the cell here; torch's own word for it is another one on a CPU.
        ready.columns["precision"] = cell.precision
        # One column in the reference file, for all that happens before the second call.
        ready.columns["compile_s"] += ready.columns.pop("lower_compile_s", 0.0)
        return ready

    def _wanted(self, cell: DispatchCell) -> Wanted:
        left_out = set() if cell.seq <= self._config.program_max_seq else {"program"}
        if self.device == "cpu":
            left_out.add("device")
        return Wanted(
            times=tuple(name for name in self._config.times if name not in left_out),
            asynchronous=True,
            output=True,
            program_length=program_length(cell.attention),
            step=steps(cell.attention),
        )

    def check(self, cell: DispatchCell, prepared: Prepared) -> dict[str, Any]:
        """Return the error column: the worst of the output and all gradients."""
        if self._config.no_ref:
            return {}
        gradients = "fwd_bwd" in self._config.modes
        part = steps(cell.attention)
        return self._bench.check(cell.attention, prepared, gradients=gradients, step=part)

    def once(self, cell: dict[str, Any], impl: str) -> None:
        """Compile one row of a cell given by its fields, and call it on random numbers made on the device."""
        import jax

        from probjax.bench.attention import jax_rows
        from probjax.bench.attention.rows import ROWS

        problem = DispatchCell(**cell).attention
        attention, _ = ROWS[impl](problem)
        shapes = jax_rows.shapes(problem)
        call = jax.jit(jax_rows.step(problem, attention, output=True))
        compiled = jax_rows.compile_row(problem, call, shapes)
        keys = jax.random.split(jax.random.key(0), len(shapes))
        arguments = [
            jax.random.normal(key, shape.shape, shape.dtype) for key, shape in zip(keys, shapes, strict=True)
        ]
        jax.block_until_ready(compiled(*arguments))
