"""The cells of the attention suite and their inputs."""

from dataclasses import dataclass
from typing import Any

import numpy as np

VARIANTS = ("plain", "causal", "masked_bias", "documents", "window", "bias", "mask")
# Those of the reference file, measured when nothing else is asked for.
FIRST_VARIANTS = VARIANTS[:3]
MODES = ("fwd", "fwdbwd")
DTYPES = ("float32", "bfloat16", "float16")
# The relative-position table of the variant `masked_bias`: T5's bucket count and longest distance.
BUCKETS = 32
MAX_DISTANCE = 128
# Keys before its own position that a query of the variant `window` sees, and documents in a row of the
# variant `documents`.
WINDOW = 256
DOCUMENTS = 8
_SEED = 20261130


@dataclass(frozen=True)
class AttentionCell:
    """One call of attention: self-attention over `seq` tokens, layout (batch, seq, heads, head_dim).

    Attributes:
      mode: ``fwd``, or ``fwdbwd`` for the gradients of sum(output · cotangent).
      variant: ``plain``; ``causal``; ``masked_bias``, causal with a relative-position bias table;
        ``documents``, causal within documents of random lengths; ``window``, causal over the last WINDOW
        keys; ``bias``, a dense additive array (1, heads, seq, seq) with its gradient; ``mask``, a random
        boolean array (batch, 1, seq, seq).
      dtype: of query, key, value and cotangent; the bias table is float32.
      batch: number of sequences.
      seq: tokens in each, for queries and keys alike.
      heads: number of heads.
      head_dim: size of a head.
      precision: of the matrix products, ``default`` or ``highest``.
    """

    mode: str
    variant: str
    dtype: str
    batch: int
    seq: int
    heads: int
    head_dim: int
    precision: str = "default"

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
        return self.variant in ("causal", "masked_bias", "documents", "window")

    @property
    def window(self) -> int | None:
        """How many keys before its own position a query sees; None for all of them."""
        return WINDOW if self.variant == "window" else None

    @property
    def extra(self) -> tuple[str, ...]:
        """The inputs besides query, key, value and cotangent, in the order of the call."""
        return _EXTRA.get(self.variant, ())

    @property
    def learned(self) -> tuple[str, ...]:
        """The inputs that are differentiated in the mode ``fwdbwd``."""
        return ("query", "key", "value", *(name for name in self.extra if name in ("table", "bias")))

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


_EXTRA = {"masked_bias": ("table",), "documents": ("segment_ids",), "bias": ("bias",), "mask": ("mask",)}
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
      head_dim), already rounded to the cell's dtype. By the variant also `table` (heads, BUCKETS), `bias`
      (1, heads, seq, seq) rounded to the dtype, `segment_ids` int32 (batch, seq), or `mask` bool (batch, 1,
      seq, seq), half of it True and all of its diagonal.
    """
    generator = np.random.default_rng([_SEED, cell.batch, cell.seq, cell.heads, cell.head_dim])
    arrays = {}
    for name in ("query", "key", "value", "cotangent"):
        drawn = generator.standard_normal(cell.shape, np.float32)
        arrays[name] = drawn.astype(numpy_dtype(cell.dtype)).astype(np.float32)
    if cell.biased:
        arrays["table"] = generator.standard_normal((cell.heads, BUCKETS), np.float32)
    elif cell.variant == "bias":
        drawn = generator.standard_normal((1, cell.heads, cell.seq, cell.seq), np.float32)
        arrays["bias"] = drawn.astype(numpy_dtype(cell.dtype)).astype(np.float32)
    elif cell.variant == "documents":
        arrays["segment_ids"] = documents(generator, cell.batch, cell.seq)
    elif cell.variant == "mask":
        drawn = generator.integers(0, 2, (cell.batch, 1, cell.seq, cell.seq), np.uint8).astype(bool)
        arrays["mask"] = drawn | np.eye(cell.seq, dtype=bool)
    return arrays


def documents(generator: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Return segment ids int32 (batch, length): DOCUMENTS documents a row, of random lengths."""
    ids = np.zeros((batch, length), np.int32)
    for row in ids:
        count = min(DOCUMENTS, length)
        if count > 1:
            row[generator.choice(np.arange(1, length), count - 1, replace=False)] = 1
        np.cumsum(row, out=row)
    return ids


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
