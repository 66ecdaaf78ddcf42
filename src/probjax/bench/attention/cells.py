"""The cells of the attention suite and their inputs."""

from dataclasses import dataclass
from typing import Any

import numpy as np

VARIANTS = ("plain", "causal", "masked_bias")
MODES = ("fwd", "fwdbwd")
DTYPES = ("float32", "bfloat16", "float16")
# The relative-position table of the variant `masked_bias`: T5's bucket count and longest distance.
BUCKETS = 32
MAX_DISTANCE = 128
_SEED = 20261130


@dataclass(frozen=True)
class AttentionCell:
    """One call of attention: self-attention over `seq` tokens, layout (batch, seq, heads, head_dim).

    Attributes:
      mode: ``fwd``, or ``fwdbwd`` for the gradients of sum(output · cotangent).
      variant: ``plain``, ``causal``, or ``masked_bias`` (causal with a relative-position bias table).
      dtype: of query, key, value and cotangent; the bias table is float32.
      batch: number of sequences.
      seq: tokens in each, for queries and keys alike.
      heads: number of heads.
      head_dim: size of a head.
    """

    mode: str
    variant: str
    dtype: str
    batch: int
    seq: int
    heads: int
    head_dim: int

    @property
    def title(self) -> str:
        """A short name for the progress bar."""
        return f"{self.variant} {self.mode} {self.dtype} S {self.seq} D {self.head_dim}"

    @property
    def kind(self) -> tuple[Any, ...]:
        """What has to be equal for the duration of one cell to tell that of another."""
        return (self.mode, self.variant, self.dtype)

    @property
    def work(self) -> float:
        """Arithmetic operations of one call without a mask."""
        products = 3.5 if self.mode == "fwdbwd" else 1.0
        return 4.0 * products * self.batch * self.heads * self.seq**2 * self.head_dim

    @property
    def causal(self) -> bool:
        """Whether a query sees no later key."""
        return self.variant != "plain"

    @property
    def biased(self) -> bool:
        """Whether a bias table is added to the scores."""
        return self.variant == "masked_bias"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of query, key, value and output."""
        return (self.batch, self.seq, self.heads, self.head_dim)

    def columns(self) -> dict[str, Any]:
        """The result columns that name this cell."""
        return {
            "mode": self.mode,
            "variant": self.variant,
            "dtype": self.dtype,
            "batch": self.batch,
            "seq": self.seq,
            "heads": self.heads,
            "head_dim": self.head_dim,
        }


CELL_COLUMNS = ("mode", "variant", "dtype", "batch", "seq", "heads", "head_dim")


def numpy_dtype(name: str) -> Any:
    """Return the NumPy dtype of a name; bfloat16 is the one that JAX brings along."""
    import ml_dtypes

    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def make_inputs(cell: AttentionCell) -> dict[str, np.ndarray]:
    """Return random inputs of a cell, the same on every machine.

    Args:
      cell: the cell.

    Returns:
      float32 arrays, standard normal: `query`, `key`, `value`, `cotangent` of shape (batch, seq, heads,
      head_dim), already rounded to the cell's dtype, and for a biased cell `table` (heads, BUCKETS).
    """
    generator = np.random.default_rng([_SEED, cell.batch, cell.seq, cell.heads, cell.head_dim])
    arrays = {}
    for name in ("query", "key", "value", "cotangent"):
        drawn = generator.standard_normal(cell.shape, np.float32)
        arrays[name] = drawn.astype(numpy_dtype(cell.dtype)).astype(np.float32)
    if cell.biased:
        arrays["table"] = generator.standard_normal((cell.heads, BUCKETS), np.float32)
    return arrays


def distance_buckets(length: int) -> np.ndarray:
    """Return T5's bucket of each distance query - key, for keys at or before the query.

    The first half of the buckets holds one distance each, the others grow logarithmically up to MAX_DISTANCE
    (Raffel et al. 2020, "Exploring the limits of transfer learning with a unified text-to-text transformer").

    Args:
      length: number of distances: 0, 1, ... length - 1.

    Returns:
      int32 array (length,).
    """
    exact = BUCKETS // 2
    distance = np.arange(length)
    far = np.log(np.maximum(distance, 1) / exact) / np.log(MAX_DISTANCE / exact) * (BUCKETS - exact)
    # Truncation, as in the paper's code; both logarithms are exact at the two ends of the range.
    far_bucket = np.minimum(exact + far.astype(np.int64), BUCKETS - 1)
    return np.where(distance < exact, distance, far_bucket).astype(np.int32)
