"""The cells of the suite `recurrence` and their inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from probjax.bench.attention.cells import numpy_dtype

OPS = ("linear_scan", "linear_scan_complex", "selective_scan", "ssd")
MODES = ("fwd", "fwdbwd")
DTYPES = ("float32", "bfloat16", "float16")
CELL_COLUMNS = ("op", "mode", "dtype", "batch", "seq", "heads", "channels", "state")
_SEED = 20261202

# The arguments of each operation, in order; all of them are differentiated.
OPERANDS: dict[str, tuple[str, ...]] = {
    "linear_scan": ("a", "b"),
    "linear_scan_complex": ("a", "b"),
    "selective_scan": ("x", "dt", "A", "B", "C", "D"),
    "ssd": ("query", "key", "value", "log_decay"),
}
# Parameters of a layer, which stay float32 whatever the dtype.
_EXACT = ("A", "D")


@dataclass(frozen=True)
class RecurrenceCell:
    """One call of a recurrence over whole sequences, without an initial state.

    Attributes:
      op: ``linear_scan``: a decay for every token and channel; ``linear_scan_complex``: complex, one decay
        for every channel, as in an LRU; ``selective_scan``: with softplus and skip; ``ssd``: one group.
      mode: ``fwd``, or ``fwdbwd`` for the gradients of the real part of sum(output · cotangent) with respect
        to all operands.
      dtype: of the operands; of complex ones, that of their parts.
      batch: number of sequences.
      seq: their length.
      channels: of the output in all; of `ssd` over its heads.
      state: numbers of state per channel; 1 for the linear scans.
      heads: of `ssd`; 1 elsewhere.
    """

    op: str
    mode: str
    dtype: str
    batch: int
    seq: int
    channels: int
    state: int = 1
    heads: int = 1

    @property
    def title(self) -> str:
        """A short name for the progress bar."""
        return f"{self.op} {self.mode} {self.dtype} L {self.seq} C {self.channels} N {self.state}"

    @property
    def kind(self) -> tuple[Any, ...]:
        """What has to be equal for the duration of one cell to tell that of another."""
        return (self.op, self.mode)

    @property
    def work(self) -> float:
        """Arithmetic operations of one call by the slowest rows."""
        return 20.0 * self.states * (4 if self.mode == "fwdbwd" else 1)

    @property
    def states(self) -> int:
        """How many numbers all states together are."""
        return self.batch * self.seq * self.channels * self.state

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of the arguments, in order."""
        return OPERANDS[self.op]

    def columns(self) -> dict[str, Any]:
        """The result columns that name this cell."""
        return {"suite": "recurrence", **{name: getattr(self, name) for name in CELL_COLUMNS}}


def make_inputs(cell: RecurrenceCell) -> dict[str, np.ndarray]:
    """Return random inputs of a cell, the same on every machine.

    Args:
      cell: the cell.

    Returns:
      The operands by name, and `cotangent` of the output's shape: float32 or complex64, those that depend on
      the tokens already rounded to the cell's dtype. Decays and step sizes are those of freshly made layers.
    """
    generator = np.random.default_rng([_SEED, OPS.index(cell.op), cell.batch, cell.seq, cell.channels])
    arrays = _MAKERS[cell.op](cell, generator)
    kind = numpy_dtype(cell.dtype)
    return {
        name: array if name in _EXACT or np.iscomplexobj(array) else array.astype(kind).astype(np.float32)
        for name, array in arrays.items()
    }


def _normal(generator: np.random.Generator, *shape: int) -> np.ndarray:
    return generator.standard_normal(shape, np.float32)


def _linear(cell: RecurrenceCell, generator: np.random.Generator) -> dict[str, np.ndarray]:
    shape = (cell.batch, cell.seq, cell.channels)
    # A gated decay between 0.9 and 0.999, as in RG-LRU.
    decay = generator.uniform(0.9, 0.999, shape).astype(np.float32)
    return {
        "a": decay,
        "b": _normal(generator, *shape) * np.sqrt(1 - decay**2),
        "cotangent": _normal(generator, *shape),
    }


def _complex(cell: RecurrenceCell, generator: np.random.Generator) -> dict[str, np.ndarray]:
    shape = (cell.batch, cell.seq, cell.channels)
    # Uniform in area on the ring from 0.4 to 0.99.
    radius = np.sqrt(generator.uniform(0.4**2, 0.99**2, cell.channels))
    decay = radius * np.exp(1j * generator.uniform(0, 2 * np.pi, cell.channels))
    b, cotangent = (_normal(generator, *shape) + 1j * _normal(generator, *shape) for _ in range(2))
    return {
        "a": decay.astype(np.complex64),
        "b": (b * np.sqrt(1 - radius**2)).astype(np.complex64),
        "cotangent": cotangent.astype(np.complex64),
    }


def _selective(cell: RecurrenceCell, generator: np.random.Generator) -> dict[str, np.ndarray]:
    shape, keys = (cell.batch, cell.seq, cell.channels), (cell.batch, cell.seq, cell.state)
    # What softplus makes step sizes between 0.001 and 0.1 of.
    steps = np.exp(generator.uniform(np.log(1e-3), np.log(1e-1), shape))
    return {
        "x": _normal(generator, *shape),
        "dt": np.log(np.expm1(steps)).astype(np.float32),
        "A": np.broadcast_to(
            -np.arange(1, cell.state + 1, dtype=np.float32), (cell.channels, cell.state)
        ).copy(),
        "B": _normal(generator, *keys),
        "C": _normal(generator, *keys),
        "D": np.ones(cell.channels, np.float32),
        "cotangent": _normal(generator, *shape),
    }


def _ssd(cell: RecurrenceCell, generator: np.random.Generator) -> dict[str, np.ndarray]:
    keys = (cell.batch, cell.seq, 1, cell.state)
    values = (cell.batch, cell.seq, cell.heads, cell.channels // cell.heads)
    return {
        "query": _normal(generator, *keys) / np.sqrt(np.float32(cell.state)),
        "key": _normal(generator, *keys),
        "value": _normal(generator, *values),
        "log_decay": -np.logaddexp(np.float32(0), _normal(generator, *values[:3])),
        "cotangent": _normal(generator, *values),
    }


_MAKERS: dict[str, Callable[[RecurrenceCell, np.random.Generator], dict[str, np.ndarray]]] = {
    "linear_scan": _linear,
    "linear_scan_complex": _complex,
    "selective_scan": _selective,
    "ssd": _ssd,
}
