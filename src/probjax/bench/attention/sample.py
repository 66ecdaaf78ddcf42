"""Which part of a large result is compared with the reference: two batch rows and two heads.

Attention of one batch row and head depends on no other, so that the reference of a part is a part of the
reference. A bias that all batch rows share is the exception: its gradient needs all of them.
"""

from collections.abc import Mapping
from typing import Any

from probjax.bench.attention.cells import AttentionCell

# Entries of the score matrices that the float64 reference takes in some seconds on a processor.
_FLOAT64_SCORES = 2**24


def steps(cell: AttentionCell) -> tuple[int, int]:
    """Return the steps over batch rows and heads that leave the first and the last of each."""
    shared = any(name in cell.extra for name in ("table", "bias"))
    return 1 if shared else max(1, cell.batch - 1), max(1, cell.heads - 1)


def thin(arrays: Mapping[str, Any], step: tuple[int, int]) -> dict[str, Any]:
    """Return the sampled part of inputs or results, by name.

    Args:
      arrays: arrays in the layouts of `cells.make_inputs`; `output` is as `query`.
      step: from `steps`.
    """
    batch, heads = step
    parts = {
        "table": (slice(None, None, heads),),
        "bias": (slice(None), slice(None, None, heads)),
        "segment_ids": (slice(None, None, batch),),
        "mask": (slice(None, None, batch),),
    }
    tokens = (slice(None, None, batch), slice(None), slice(None, None, heads))
    return {name: array[parts.get(name, tokens)] for name, array in arrays.items()}


def exact_is_cheap(cell: AttentionCell, step: tuple[int, int]) -> bool:
    """Return whether the float64 reference of a part takes only seconds."""
    pairs = len(range(0, cell.batch, step[0])) * len(range(0, cell.heads, step[1]))
    return pairs * cell.seq**2 <= _FLOAT64_SCORES
