"""Attention and its gradients in float64 NumPy, block by block: what the error columns are measured against.

It shares no code with the implementations: explicit blocks of the score matrix, gradients by hand.
"""

import numpy as np

from probjax.bench.attention.cells import BUCKETS, distance_buckets

# Rows of the score matrix at a time: a block of 256 rows and 4096 keys is 8 MB in float64.
_BLOCK = 256


def reference(
    inputs: dict[str, np.ndarray], *, causal: bool, gradients: bool, block: int = _BLOCK
) -> dict[str, np.ndarray]:
    """Return the exact output of a cell, and its gradients.

    Args:
      inputs: `query`, `key`, `value`, `cotangent` (batch, seq, heads, head_dim), and perhaps `table`
        (heads, buckets).
      causal: whether a query sees no later key; needed with a table, whose buckets are for earlier keys only.
      gradients: whether to compute the gradients of sum(output · cotangent) too.
      block: rows of the score matrix computed at a time.

    Returns:
      float64 arrays: `output`, and with `gradients` one for each of `query`, `key`, `value` and `table`.

    Raises:
      ValueError: for a table without a causal mask.
    """
    table = inputs.get("table")
    if table is not None and not causal:
        raise ValueError("inputs: got a bias table without a causal mask, wanted causal=True")
    # Heads ahead of tokens, so that each product below is one of contiguous matrices.
    names = ("query", "key", "value", "cotangent") if gradients else ("query", "key", "value")
    wide = {name: np.ascontiguousarray(inputs[name].astype(np.float64).swapaxes(1, 2)) for name in names}
    out = {"output": np.zeros_like(wide["query"])}
    if gradients:
        out.update({name: np.zeros_like(wide[name]) for name in ("query", "key", "value")})
        if table is not None:
            out["table"] = np.zeros(table.shape)
    batch, heads = wide["query"].shape[:2]
    for b in range(batch):
        for h in range(heads):
            one = {name: array[b, h] for name, array in wide.items()}
            into = {name: array[b, h] for name, array in out.items() if name != "table"}
            if "table" in out:
                into["table"] = out["table"][h]
            bias = None if table is None else table[h].astype(np.float64)
            _one_head(one, into, bias, causal=causal, block=block)
    return {name: array if name == "table" else array.swapaxes(1, 2) for name, array in out.items()}


def _one_head(
    one: dict[str, np.ndarray],
    into: dict[str, np.ndarray],
    bias: np.ndarray | None,
    *,
    causal: bool,
    block: int,
) -> None:
    """Add one head's output and gradients to the arrays in `into`."""
    query, key, value = one["query"], one["key"], one["value"]
    length, head_dim = query.shape
    scale = 1 / np.sqrt(head_dim)
    buckets = distance_buckets(length)
    for start in range(0, length, block):
        rows = slice(start, min(start + block, length))
        end = rows.stop if causal else length
        distance = np.arange(rows.start, rows.stop)[:, None] - np.arange(end)
        bucket = buckets[np.maximum(distance, 0)] if bias is not None else None
        scores = query[rows] @ key[:end].T * scale
        if bias is not None:
            scores += bias[bucket]
        if causal:
            scores[distance < 0] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        into["output"][rows] = weights @ value[:end]
        if "query" not in into:
            continue
        cotangent = one["cotangent"][rows]
        into["value"][:end] += weights.T @ cotangent
        # Softmax: d scores = weights · (d weights - the row's mean of d weights under the weights).
        mean = np.sum(cotangent * into["output"][rows], axis=1, keepdims=True)
        d_scores = weights * (cotangent @ value[:end].T - mean)
        into["query"][rows] = d_scores @ key[:end] * scale
        into["key"][:end] += d_scores.T @ query[rows] * scale
        if bucket is not None:
            into["table"] += np.bincount(bucket.ravel(), weights=d_scores.ravel(), minlength=BUCKETS)


def relative_error(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """Return the worst of max |got - wanted| / max |wanted| over the arrays of `got`.

    Args:
      got: results by name, of any float dtype.
      wanted: exact results; it has at least the names of `got`.

    Returns:
      The relative error; NaN or infinite when a result is.
    """
    worst = 0.0
    for name, array in got.items():
        exact = wanted[name]
        off = np.abs(np.asarray(array, dtype=np.float64) - exact).max() / np.abs(exact).max()
        # max() of Python drops NaN in one of its two orders.
        worst = off if np.isnan(off) else max(worst, float(off))
        if np.isnan(worst):
            break
    return float(worst)
