"""Attention and its gradients in float64 NumPy, block by block: what the error columns are measured against.

It shares no code with the implementations: explicit blocks of the score matrix, gradients by hand.
"""

import numpy as np

from probjax.bench.attention.cells import BUCKETS, distance_buckets

# Rows of the score matrix at a time: a block of 256 rows and 4096 keys is 8 MB in float64.
_BLOCK = 256


def reference(
    inputs: dict[str, np.ndarray],
    *,
    causal: bool,
    gradients: bool,
    window: int | None = None,
    block: int = _BLOCK,
) -> dict[str, np.ndarray]:
    """Return the exact output of a cell, and its gradients.

    Args:
      inputs: `query`, `key`, `value`, `cotangent` (batch, seq, heads, head_dim), and perhaps `table`
        (heads, buckets), `bias` (1, heads, seq, seq), `segment_ids` (batch, seq), `mask` (batch, 1, seq,
        seq).
      causal: whether a query sees no later key; needed with a table, whose buckets are for earlier keys only.
      gradients: whether to compute the gradients of sum(output · cotangent) too.
      window: how many keys before its own position a query sees; None for all.
      block: rows of the score matrix computed at a time.

    Returns:
      float64 arrays: `output`, and with `gradients` one for each of `query`, `key`, `value`, `table` and
      `bias`.

    Raises:
      ValueError: for a table without a causal mask.
    """
    if "table" in inputs and not causal:
        raise ValueError("inputs: got a bias table without a causal mask, wanted causal=True")
    # Heads ahead of tokens, so that each product below is one of contiguous matrices.
    names = ("query", "key", "value", "cotangent") if gradients else ("query", "key", "value")
    wide = {name: np.ascontiguousarray(inputs[name].astype(np.float64).swapaxes(1, 2)) for name in names}
    biases = {name: inputs[name] for name in ("table", "bias") if name in inputs}
    out = {"output": np.zeros_like(wide["query"])}
    if gradients:
        out.update({name: np.zeros_like(wide[name]) for name in ("query", "key", "value")})
        out.update({name: np.zeros(array.shape) for name, array in biases.items()})
    batch, heads = wide["query"].shape[:2]
    for b in range(batch):
        for h in range(heads):
            one = {name: array[b, h] for name, array in wide.items()}
            one |= {name: _of_head(name, array, h) for name, array in biases.items()}
            if "segment_ids" in inputs:
                one["segment_ids"] = inputs["segment_ids"][b]
            if "mask" in inputs:
                one["mask"] = inputs["mask"][b, 0]
            into = {name: array[b, h] for name, array in out.items() if name not in biases}
            into |= {name: _of_head(name, out[name], h) for name in biases if name in out}
            _one_head(one, into, causal=causal, window=window, block=block)
    return {name: array if name in biases else array.swapaxes(1, 2) for name, array in out.items()}


def _of_head(name: str, array: np.ndarray, head: int) -> np.ndarray:
    """Return the part of a bias that belongs to one head, as a view."""
    return array[head] if name == "table" else array[0, head]


def _one_head(
    one: dict[str, np.ndarray],
    into: dict[str, np.ndarray],
    *,
    causal: bool,
    window: int | None,
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
        bucket = buckets[np.maximum(distance, 0)] if "table" in one else None
        scores = query[rows] @ key[:end].T * scale
        if bucket is not None:
            scores += one["table"].astype(np.float64)[bucket]
        if "bias" in one:
            scores += one["bias"][rows, :end]
        scores[_hidden(one, rows, distance, causal=causal, window=window)] = -np.inf
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
        if "bias" in into:
            into["bias"][rows, :end] += d_scores


def _hidden(
    one: dict[str, np.ndarray], rows: slice, distance: np.ndarray, *, causal: bool, window: int | None
) -> np.ndarray:
    """Return which entries of a block of the score matrix are hidden; `distance` is query less key."""
    hidden = np.zeros(distance.shape, bool)
    end = distance.shape[1]
    if causal:
        hidden |= distance < 0
    if window is not None:
        hidden |= distance > window
    if "segment_ids" in one:
        hidden |= one["segment_ids"][rows, None] != one["segment_ids"][None, :end]
    if "mask" in one:
        hidden |= ~one["mask"][rows, :end]
    return hidden


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
