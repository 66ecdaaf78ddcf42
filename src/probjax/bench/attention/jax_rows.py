"""The JAX rows of the attention suite: what each label calls, and how it is compiled and timed."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import probjax
from probjax.attention import implementations
from probjax.bench.attention.cells import BUCKETS, MAX_DISTANCE, AttentionCell, distance_buckets
from probjax.bench.measure import Prepared, Unavailable

type Attention = Callable[..., Any]
_MB = 2**20
# The fused kernels of each platform, best first: the row probjax_mha calls the first that is available.
_FUSED = {"cpu": ("native", "tiled")}


def dense_bias(table: jax.Array, length: int) -> jax.Array:
    """Return the bias (1, heads, length, length) of a table, for callers that take only arrays.

    Of four forms tried (index of buckets, index of distances, skewed copies, one-hot product) the index of
    distances is the fastest on XLA:CPU, forward and backward, so that the peers are not held back by it.

    Args:
      table: (heads, buckets) bias of each bucket.
      length: number of queries and keys.
    """
    by_distance = table[:, distance_buckets(length)]
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    return by_distance[:, jnp.maximum(distance, 0)][None]


def _jax_xla(cell: AttentionCell) -> tuple[Attention, str]:
    def attention(query: jax.Array, key: jax.Array, value: jax.Array, table: Any = None) -> jax.Array:
        bias = None if table is None else dense_bias(table, cell.seq)
        return jax.nn.dot_product_attention(
            query, key, value, bias=bias, is_causal=cell.causal, implementation="xla"
        )

    return attention, "xla"


def _flax(cell: AttentionCell) -> tuple[Attention, str]:
    try:
        from flax import nnx
    except ImportError as error:
        raise Unavailable(f"flax.nnx cannot be imported ({error}): install flax") from None

    def attention(query: jax.Array, key: jax.Array, value: jax.Array, table: Any = None) -> jax.Array:
        bias = None if table is None else dense_bias(table, cell.seq)
        mask = jnp.tril(jnp.ones((1, 1, cell.seq, cell.seq), bool)) if cell.causal else None
        return nnx.dot_product_attention(query, key, value, bias=bias, mask=mask)

    return attention, "flax"


def _sees_past(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= query


def _sees_all(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return jnp.logical_and(query >= 0, key >= 0)


def _available(implementation: str) -> str | None:
    """Return why an implementation is not available, or None when it is."""
    found = implementations("cpu")
    return found.get(implementation, f"probjax has no implementation named {implementation} yet")


def _fused() -> str:
    for name in _FUSED["cpu"]:
        if _available(name) is None:
            return name
    raise Unavailable(f"no fused kernel is available: {_available(_FUSED['cpu'][-1])}")


def _probjax(
    cell: AttentionCell, implementation: str | None, *, function_mask: bool = False
) -> tuple[Attention, str]:
    """Return our own attention with the given implementation, and the name of the one that runs."""
    if implementation is not None and (reason := _available(implementation)) is not None:
        raise Unavailable(reason)
    options: dict[str, Any] = {"is_causal": cell.causal}
    if function_mask:
        options = {"mask": probjax.masks.MaskFunction(_sees_past if cell.causal else _sees_all)}

    def bias(table: Any) -> Any:
        if table is None:
            return None
        return probjax.biases.RelativePosition(
            table, bucketing="t5", max_distance=MAX_DISTANCE, bidirectional=False
        )

    def attention(query: Any, key: Any, value: Any, table: Any = None) -> Any:
        return probjax.dot_product_attention(
            query, key, value, bias(table), implementation=implementation, **options
        )

    if implementation is not None:
        return attention, implementation
    shape = jax.ShapeDtypeStruct(cell.shape, cell.dtype)
    table = jax.ShapeDtypeStruct((cell.heads, BUCKETS), "float32") if cell.biased else None
    plan = probjax.attention_plan(shape, shape, shape, bias(table), platform="cpu", **options)
    return attention, plan.implementation


ROWS: dict[str, Callable[[AttentionCell], tuple[Attention, str]]] = {
    "probjax_default": lambda cell: _probjax(cell, None),
    "probjax_mha": lambda cell: _probjax(cell, _fused()),
    "probjax_flex": lambda cell: _probjax(cell, None, function_mask=True),
    "probjax_flax": _flax,
    "xla_dense": lambda cell: _probjax(cell, "dense"),
    "xla_tiled": lambda cell: _probjax(cell, "tiled"),
    "mha_interpret": lambda cell: _probjax(cell, "interpret"),
    "jax_xla": _jax_xla,
}


def step(cell: AttentionCell, attention: Attention) -> Callable[..., Any]:
    """Return what is compiled and timed: f(query, key, value[, table]), or the same after a cotangent.

    Forward it returns the output. Otherwise it returns the gradients of sum(output · cotangent) with respect
    to all other arguments, and not the sum itself. The cotangent is an argument and no constant: of a
    constant, XLA computes ahead of time whatever depends on it alone, which is work that training has to do.
    """
    if cell.mode == "fwd":
        return attention

    def gradients(cotangent: jax.Array, *operands: jax.Array) -> Any:
        def loss(*operands: jax.Array) -> jax.Array:
            return jnp.sum(attention(*operands).astype(jnp.float32) * cotangent.astype(jnp.float32))

        return jax.grad(loss, argnums=tuple(range(len(operands))))(*operands)

    return gradients


def operands(cell: AttentionCell, inputs: dict[str, np.ndarray]) -> list[jax.Array]:
    """Return the arguments of `step` as arrays on the device; the table is float32."""
    names = ("query", "key", "value") if cell.mode == "fwd" else ("cotangent", "query", "key", "value")
    placed = [jnp.asarray(inputs[name], dtype=cell.dtype) for name in names]
    return [*placed, jnp.asarray(inputs["table"])] if cell.biased else placed


def prepare(impl: str, cell: AttentionCell, inputs: dict[str, np.ndarray]) -> Prepared:
    """Compile one row and call it once.

    Args:
      impl: a label of ROWS.
      cell: the cell.
      inputs: from `cells.make_inputs`.

    Returns:
      The row, ready to be timed.

    Raises:
      Unavailable: when what the row calls is not there.
    """
    attention, implementation = ROWS[impl](cell)
    arguments = operands(cell, inputs)
    begin = time.perf_counter()
    compiled = jax.jit(step(cell, attention)).lower(*arguments).compile()
    built = time.perf_counter()
    outputs = jax.block_until_ready(compiled(*arguments))
    called = time.perf_counter()
    columns: dict[str, Any] = {"lower_compile_s": built - begin, **_memory(compiled, cell)}
    columns |= {"compile_s": called - built, "implementation": implementation, "precision": "default"}

    def run(repetitions: int) -> float:
        start = time.perf_counter()
        for _ in range(repetitions):
            jax.block_until_ready(compiled(*arguments))
        return time.perf_counter() - start

    names = ["output"] if cell.mode == "fwd" else ["query", "key", "value", "table"]
    leaves = [outputs] if cell.mode == "fwd" else list(outputs)
    held = {name: np.asarray(leaf, np.float64) for name, leaf in zip(names, leaves, strict=False)}
    return Prepared(impl, run, columns, result=lambda: held, release=held.clear)


def _memory(compiled: Any, cell: AttentionCell) -> dict[str, float]:
    """Return XLA's own account of the program's memory in units of 2**20 bytes, where it gives one.

    The argument bytes are those of the call that is measured; the cotangent is not among them, as in the
    reference file.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {}
    cotangent = 0 if cell.mode == "fwd" else math.prod(cell.shape) * jnp.dtype(cell.dtype).itemsize
    return {
        "xla_temp_mb": analysis.temp_size_in_bytes / _MB,
        "xla_arg_mb": (analysis.argument_size_in_bytes - cotangent) / _MB,
        "xla_out_mb": analysis.output_size_in_bytes / _MB,
    }
