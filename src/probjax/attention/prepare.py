"""Validation of the public call, and its normal form: operands in one layout, and a spec."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from probjax import _precision
from probjax._op import Array, Call, Operand
from probjax.attention import biases as _biases
from probjax.attention import dispatch, masks
from probjax.attention._mask import ALIGNMENTS, Mask
from probjax.attention._terms import CallShape, Term, as_array, free
from probjax.attention.dropout import key_words
from probjax.attention.primitive import ATTENTION, outputs_for
from probjax.attention.spec import AttentionSpec

# What jax.nn.dot_product_attention calls its plain implementation.
_ALIASES = {"xla": "tiled"}

_FLOATS = ("float64", "float32", "bfloat16", "float16")


class _Operands:
    """The operands of a call as they are collected."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.described: list[Operand] = []

    def add(self, array: Array, operand: Operand) -> int:
        self.arrays.append(array)
        self.described.append(operand)
        return len(self.arrays) - 1

    def add_term(self, term: Term | None, shape: CallShape, argument: str) -> tuple[Any, int]:
        """Adds the arrays of a mask or bias; returns its tree structure and where its arrays begin."""
        start = len(self.arrays)
        if term is None:
            return None, start
        for array, operand in term.canonical(shape, argument):
            self.add(array, operand)
        return jax.tree.structure(term), start


def prepare(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    causal_alignment: str = "top_left",
    logits_soft_cap: Any = None,
    sinks: Any = None,
    segment_ids: Any = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    precision: Any = None,
    implementation: str | None = None,
) -> tuple[Call, list[Array]]:
    """Checks the arguments of `dot_product_attention` and turns them into a call of the operation."""
    query, key, value = _check_inputs(query, key, value)
    shape = CallShape(query.shape[:-3], query.shape[-3], key.shape[-3], query.shape[-2], key.shape[-2])
    if causal_alignment not in ALIGNMENTS:
        raise ValueError(f"causal_alignment: got {causal_alignment!r}, want one of {ALIGNMENTS}")

    operands = _Operands()
    operands.add(query, Operand("query", ("T", "N", "D")))
    operands.add(key, Operand("key", ("S", "K", "D")))
    operands.add(value, Operand("value", ("S", "K", "V")))

    whole_mask, mask_at = _collect_masks(
        operands,
        shape,
        mask,
        is_causal,
        query_seq_lengths,
        key_value_seq_lengths,
        local_window_size,
        causal_alignment,
        segment_ids,
    )
    whole_bias, bias_at = _collect_biases(operands, shape, bias, logits_soft_cap)
    fixed_scale, scale_at = _check_scale(operands, shape, scale, query.shape[-1])
    sinks_at = _check_sinks(operands, shape, sinks)
    rate, dropout_at = _check_dropout(operands, shape, dropout_rate, dropout_key)

    index_at = None
    if dropout_at is not None or _looks_at_indices(whole_mask) or _looks_at_indices(whole_bias):
        entries = jnp.arange(math.prod(shape.batch), dtype=jnp.int32).reshape(shape.batch)
        index_at = operands.add(entries, Operand("batch_index", (), False))
        heads = jnp.arange(shape.heads, dtype=jnp.int32)
        operands.add(free(heads, shape), Operand("head_index", ("N",), False))

    spec = AttentionSpec(
        mask=whole_mask,
        mask_at=mask_at,
        bias=whole_bias,
        bias_at=bias_at,
        scale=fixed_scale,
        scale_at=scale_at,
        sinks_at=sinks_at,
        dropout_rate=rate,
        dropout_at=dropout_at,
        index_at=index_at,
        precision=_precision.checked(precision),
        implementation=_check_implementation(implementation),
    )
    call = Call(ATTENTION, tuple(operands.described), outputs_for(query.dtype), spec)
    return call, operands.arrays


def _check_inputs(query: Any, key: Any, value: Any) -> tuple[Array, Array, Array]:
    layouts = {"query": "(*B, T, N, D)", "key": "(*B, S, K, D)", "value": "(*B, S, K, V)"}
    arrays = {}
    for name, x in (("query", query), ("key", key), ("value", value)):
        try:
            x = jnp.asarray(x)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name}: got {type(x).__name__}, want an array {layouts[name]}") from error
        if x.dtype.name not in _FLOATS:
            raise TypeError(f"{name}: got dtype {x.dtype}, want one of {', '.join(_FLOATS)}")
        if x.ndim < 3:
            raise ValueError(f"{name}: got shape {x.shape}, want {layouts[name]}, rank 3 or more")
        arrays[name] = x
    q, k, v = arrays.values()
    for name, x in (("key", k), ("value", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: got dtype {x.dtype}, want that of query, {q.dtype}; cast one of them")
        if x.shape[:-3] != q.shape[:-3]:
            raise ValueError(
                f"{name}: got shape {x.shape}, want {layouts[name]} with the batch axes of query, "
                f"{q.shape[:-3]} "
                f"(query has shape {q.shape})"
            )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"key: got shape {k.shape} with D = {k.shape[-1]}, want (*B, S, K, D) with D = "
            f"{q.shape[-1]} as in query {q.shape}"
        )
    if v.shape[-3:-1] != k.shape[-3:-1]:
        raise ValueError(
            f"value: got shape {v.shape}, want (*B, S, K, V) with S = {k.shape[-3]} and K = "
            f"{k.shape[-2]} as in key {k.shape}"
        )
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if (kv_heads == 0 and heads != 0) or (kv_heads and heads % kv_heads):
        raise ValueError(
            f"key: got shape {k.shape} with K = {kv_heads} heads, want a K that divides the N = "
            f"{heads} heads of query {q.shape}; "
            "the layout is (*B, length, heads, size), so swap axes -3 and -2 if heads come before length"
        )
    return q, k, v


def _collect_masks(
    operands: _Operands,
    shape: CallShape,
    mask: Any,
    is_causal: bool,
    query_lengths: Any,
    key_lengths: Any,
    window: Any,
    alignment: str,
    segment_ids: Any,
) -> tuple[Any, int]:
    """The arguments that hide pairs as one mask; errors name the argument each part came from."""
    if not isinstance(is_causal, (bool, np.bool_)):
        raise TypeError(
            f"is_causal: got {type(is_causal).__name__}, want a Python bool (a traced causal mask: use mask=)"
        )
    parts: list[tuple[str, Mask]] = []
    if mask is not None:
        if not isinstance(mask, Mask):
            mask = masks.Dense(as_array(mask, "mask", "bool"))
        parts.append(("mask", mask))
    if is_causal:
        parts.append(("is_causal", masks.Causal(alignment)))
    if window is not None:
        left, right = _check_window(window)
        if (left, right) != (None, None):
            parts.append(("local_window_size", masks.SlidingWindow(left, right, alignment)))
    if query_lengths is not None:
        parts.append(
            ("query_seq_lengths", masks.QueryPadding(as_array(query_lengths, "query_seq_lengths", "integer")))
        )
    if key_lengths is not None:
        parts.append(
            (
                "key_value_seq_lengths",
                masks.Padding(as_array(key_lengths, "key_value_seq_lengths", "integer")),
            )
        )
    if segment_ids is not None:
        parts.append(("segment_ids", _check_segments(segment_ids, shape)))
    start = len(operands.arrays)
    whole: Mask | None = None
    for argument, part in parts:
        operands.add_term(part, shape, argument)
        whole = part if whole is None else whole & part
    return (None if whole is None else jax.tree.structure(whole)), start


def _check_window(window: Any) -> tuple[int | None, int | None]:
    wanted = "want an int, or a pair (left, right) of ints of 0 or more, None or -1"
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2:
        raise ValueError(f"local_window_size: got {window!r}, {wanted}")
    out: list[int | None] = []
    for side in sides:
        if side is not None and (isinstance(side, bool) or not isinstance(side, (int, np.integer))):
            raise TypeError(f"local_window_size: got {window!r}, {wanted}")
        if side is not None and side < -1:
            raise ValueError(f"local_window_size: got {window!r}, {wanted}")
        out.append(None if side is None or side == -1 else int(side))
    return out[0], out[1]


def _check_segments(segment_ids: Any, shape: CallShape) -> Mask:
    if isinstance(segment_ids, (tuple, list)) and len(segment_ids) == 2:
        return masks.Segments(*segment_ids)
    if isinstance(segment_ids, (tuple, list)):
        raise ValueError(
            f"segment_ids: got {len(segment_ids)} arrays, want one, or a pair (query ids, key/value ids)"
        )
    if shape.query_length != shape.key_length:
        raise ValueError(
            f"segment_ids: got one array with T = {shape.query_length} and S = {shape.key_length}, "
            "want a pair "
            "(query ids, key/value ids) when T and S differ"
        )
    return masks.Segments(segment_ids, segment_ids)


def _collect_biases(operands: _Operands, shape: CallShape, bias: Any, soft_cap: Any) -> tuple[Any, int]:
    start = len(operands.arrays)
    whole: _biases.Bias | None = None
    if soft_cap is not None:
        whole = _check_soft_cap(soft_cap)
        operands.add_term(whole, shape, "logits_soft_cap")
    if bias is not None:
        if not isinstance(bias, _biases.Bias):
            bias = _biases.Dense(as_array(bias, "bias", "float"))
        operands.add_term(bias, shape, "bias")
        whole = bias if whole is None else whole + bias
    return (None if whole is None else jax.tree.structure(whole)), start


def _check_soft_cap(soft_cap: Any) -> _biases.SoftCap:
    if isinstance(soft_cap, numbers.Real) and not hasattr(soft_cap, "aval"):
        if isinstance(soft_cap, bool) or not (float(soft_cap) > 0 and math.isfinite(soft_cap)):
            raise ValueError(
                f"logits_soft_cap: got {soft_cap!r}, want a positive finite number, or None for no cap"
            )
        return _biases.SoftCap(float(soft_cap))
    cap = as_array(soft_cap, "logits_soft_cap", "float")
    if cap.shape != ():
        raise ValueError(f"logits_soft_cap: got shape {cap.shape}, want a scalar")
    return _biases.SoftCap(cap)


def _check_scale(
    operands: _Operands, shape: CallShape, scale: Any, head_size: int
) -> tuple[float, int | None]:
    """A number is part of the program, an array is an operand."""
    if scale is None:
        return 1.0 / math.sqrt(max(head_size, 1)), None
    if isinstance(scale, numbers.Real) and not isinstance(scale, bool):
        return float(scale), None
    array = as_array(scale, "scale", "float")
    if array.shape != ():
        raise ValueError(
            f"scale: got shape {array.shape}, want a number or a scalar array; for one per head, "
            "biases.HeadScale"
        )
    return 1.0, operands.add(free(array, shape), Operand("scale", ()))


def _check_sinks(operands: _Operands, shape: CallShape, sinks: Any) -> int | None:
    if sinks is None:
        return None
    sinks = as_array(sinks, "sinks", "float")
    if sinks.shape != (shape.heads,):
        raise ValueError(
            f"sinks: got shape {sinks.shape}, want (N,) = ({shape.heads},), one logit per query head"
        )
    return operands.add(free(sinks, shape), Operand("sinks", ("N",)))


def _check_dropout(operands: _Operands, shape: CallShape, rate: Any, key: Any) -> tuple[float, int | None]:
    if isinstance(rate, bool) or not isinstance(rate, numbers.Real):
        raise TypeError(
            f"dropout_rate: got {type(rate).__name__}, want a Python number in [0, 1], known when tracing"
        )
    if not 0.0 <= float(rate) <= 1.0:
        raise ValueError(f"dropout_rate: got {rate!r}, want a number in [0, 1]")
    if float(rate) == 0.0:
        return 0.0, None
    if key is None:
        raise ValueError(
            f"dropout_key: got None with dropout_rate = {rate}, want a JAX key such as jax.random.key(0)"
        )
    words = free(key_words(key), shape)
    return float(rate), operands.add(words, Operand("dropout_key", (None,), False))


def _looks_at_indices(structure: Any) -> bool:
    """Whether a mask or bias asks for batch or head indices: only functions do."""
    if structure is None:
        return False
    term = jax.tree.unflatten(structure, [0] * structure.num_leaves)
    kinds = (masks.MaskFunction, _biases.ScoreFunction)
    found = jax.tree.leaves(term, is_leaf=lambda x: isinstance(x, kinds))
    return any(isinstance(x, kinds) for x in found)


def _check_implementation(name: str | None) -> str | None:
    name = _ALIASES.get(name, name) if isinstance(name, str) else name
    if name is not None and name not in dispatch.ROWS:
        known = ", ".join(repr(n) for n in dispatch.ROWS)
        raise ValueError(f"implementation: got {name!r}, want None or one of {known}")
    return name
