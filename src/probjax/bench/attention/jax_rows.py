"""How the JAX rows of the attention suites are compiled, called, and made ready to be timed."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from probjax.bench import device_time
from probjax.bench.attention.cells import AttentionCell
from probjax.bench.attention.rows import ROWS, Attention, extra_shape
from probjax.bench.attention.sample import thin
from probjax.bench.attention.wanted import PLAIN, Wanted
from probjax.bench.measure import Prepared, describe

_MB = 2**20
# Calls measured for the time of the kernels; all their outputs are held at once, so large ones get fewer.
_CALLS = 10
_FEW_CALLS = 3
_LARGE_BYTES = 2**29


def step(cell: AttentionCell, attention: Attention, *, output: bool = False) -> Callable[..., Any]:
    """Return what is compiled and timed: f(query, key, value, *extra), or the same after a cotangent.

    Forward it returns the output. Otherwise it returns the gradients of sum(output · cotangent) with respect
    to all floating-point arguments, and not the sum itself. The cotangent is an argument and no constant: of
    a constant, XLA computes ahead of time whatever depends on it alone, which is work that training has to
    do.

    Args:
      cell: the cell.
      attention: f(query, key, value, *extra).
      output: return the output ahead of the gradients.
    """
    if cell.mode == "fwd":
        return attention
    learned = len(cell.learned)

    def gradients(cotangent: jax.Array, *operands: jax.Array) -> Any:
        def loss(*values: jax.Array) -> jax.Array:
            out = attention(*values, *operands[learned:])
            return jnp.sum(out.astype(jnp.float32) * cotangent.astype(jnp.float32))

        return jax.grad(loss, argnums=tuple(range(learned)))(*operands[:learned])

    def with_output(cotangent: jax.Array, *operands: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *values: attention(*values, *operands[learned:]), *operands[:learned])
        return (out, *pull(cotangent))

    return with_output if output else gradients


def chain(cell: AttentionCell, call: Callable[..., Any], length: int) -> Callable[..., Any]:
    """Return a program that makes `length` calls one after the other, each on the result of the one before.

    The next query is the output, or the gradient of the query. All results are carried through the loop and
    returned, so that none is left out as unused. A round of the loop holds two calls where it can: with one,
    XLA copies the result to where the next round looks for it.

    Args:
      cell: the cell.
      call: from `step`, with the output; jitted, so that it is traced and lowered once.
      length: number of calls.

    Returns:
      A function of the arguments of `step`.
    """
    unrolled = 2 if length % 2 == 0 else 1

    def forward(query: jax.Array, *rest: jax.Array) -> Any:
        def body(_: Any, query: jax.Array) -> jax.Array:
            for _ in range(unrolled):
                query = call(query, *rest)
            return query

        return jax.lax.fori_loop(0, length // unrolled, body, query)

    def backward(cotangent: jax.Array, query: jax.Array, *rest: jax.Array) -> Any:
        def body(_: Any, carry: Any) -> Any:
            for _ in range(unrolled):
                out, *found = call(cotangent, carry[1], *rest)
                carry = (out, *found)
            return carry

        others = [jnp.zeros_like(array) for array in rest[: len(cell.learned) - 1]]
        return jax.lax.fori_loop(0, length // unrolled, body, (jnp.zeros_like(query), query, *others))

    return forward if cell.mode == "fwd" else backward


def names(cell: AttentionCell) -> tuple[str, ...]:
    """Return the names of the arguments of `step`, in order."""
    first = ("query", "key", "value") if cell.mode == "fwd" else ("cotangent", "query", "key", "value")
    return (*first, *cell.extra)


def operands(cell: AttentionCell, inputs: dict[str, np.ndarray]) -> list[jax.Array]:
    """Return the arguments of `step` as arrays on the device, in the dtypes that they are to have."""
    return list(place(cell, inputs, names(cell)).values())


def place(cell: AttentionCell, inputs: dict[str, np.ndarray], wanted: Sequence[str]) -> dict[str, jax.Array]:
    """Return some of the inputs by name as arrays on the device."""
    return {name: jnp.asarray(inputs[name], dtype=_shape(cell, name).dtype) for name in wanted}


def shapes(cell: AttentionCell) -> list[jax.ShapeDtypeStruct]:
    """Return shapes and dtypes of the arguments of `step`."""
    return [_shape(cell, name) for name in names(cell)]


def _shape(cell: AttentionCell, name: str) -> jax.ShapeDtypeStruct:
    return extra_shape(cell, name) if name in cell.extra else jax.ShapeDtypeStruct(cell.shape, cell.dtype)


def compile_row(cell: AttentionCell, function: Any, arguments: Sequence[Any]) -> Any:
    """Return the compiled program of a jitted function, at the cell's precision."""
    highest = jax.default_matmul_precision("highest")
    with highest if cell.precision == "highest" else contextlib.nullcontext():
        return function.lower(*arguments).compile()


@dataclass
class _Built:
    """A compiled row: the call, and the program of many calls where one is wanted."""

    compiled: Any
    program: Any
    columns: dict[str, Any]


def _build(impl: str, cell: AttentionCell, wanted: Wanted) -> _Built:
    """Compile one row."""
    attention, implementation = ROWS[impl](cell)
    begin = time.perf_counter()
    call = jax.jit(step(cell, attention, output=wanted.output))
    compiled = compile_row(cell, call, shapes(cell))
    columns: dict[str, Any] = {"lower_compile_s": time.perf_counter() - begin}
    columns |= _memory(compiled, cell, wanted)
    columns |= {"implementation": implementation, "precision": cell.precision}
    program = None
    if "program" in wanted.times:
        if not wanted.output:
            call = jax.jit(step(cell, attention, output=True))
        try:
            program = compile_row(cell, jax.jit(chain(cell, call, wanted.program_length)), shapes(cell))
        # A row of which no program can be made has its other times still.
        except (MemoryError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            columns["program_reason"] = describe(error)
    return _Built(compiled, program, columns)


def prepare(
    impl: str,
    cell: AttentionCell,
    inputs: dict[str, np.ndarray],
    *,
    wanted: Wanted = PLAIN,
    placed: Sequence[jax.Array] | None = None,
) -> Prepared:
    """Compile one row and call it once.

    Args:
      impl: a label of ROWS.
      cell: the cell.
      inputs: from `cells.make_inputs`.
      wanted: what is to be measured.
      placed: the inputs on the device, from `operands`, where they are there already.

    Returns:
      The row, ready to be timed.

    Raises:
      Unavailable: when what the row calls is not there.
    """
    built = _build(impl, cell, wanted)
    arguments = operands(cell, inputs) if placed is None else list(placed)
    begin = time.perf_counter()
    outputs = jax.block_until_ready(built.compiled(*arguments))
    columns = {**built.columns, "compile_s": time.perf_counter() - begin}
    held = _results(cell, outputs, wanted)
    ready = Prepared(
        impl,
        _caller(built.compiled, arguments, asynchronous=wanted.asynchronous),
        columns,
        result=lambda: held,
        release=held.clear,
        wall="wall" in wanted.times,
    )
    if built.program is not None:
        try:
            jax.block_until_ready(built.program(*arguments))
        except (MemoryError, RuntimeError, ValueError) as error:
            ready.columns["program_reason"] = describe(error)
        else:
            ready.program = _caller(built.program, arguments, asynchronous=wanted.asynchronous)
            ready.program_length = wanted.program_length
    if "device" in wanted.times:
        size = sum(array.nbytes for array in jax.tree.leaves(outputs))
        calls = _CALLS if size < _LARGE_BYTES else _FEW_CALLS
        ready.device = functools.partial(device_time.columns, built.compiled, arguments, calls=calls)
    return ready


def _caller(
    compiled: Callable[..., Any], arguments: list[jax.Array], *, asynchronous: bool
) -> Callable[[int], float]:
    """Return the function that makes a number of calls and returns their seconds."""

    def run(repetitions: int) -> float:
        start = time.perf_counter()
        for _ in range(repetitions):
            outputs = compiled(*arguments)
            if not asynchronous:
                jax.block_until_ready(outputs)
        jax.block_until_ready(outputs)
        return time.perf_counter() - start

    return run


def _results(cell: AttentionCell, outputs: Any, wanted: Wanted) -> dict[str, np.ndarray]:
    """Return the outputs by name on the host, or that part of them that is compared."""
    leaves = [outputs] if cell.mode == "fwd" else list(outputs)
    named = ("output",) if cell.mode == "fwd" else cell.learned
    if wanted.output and cell.mode != "fwd":
        named = ("output", *named)
    found = dict(zip(named, leaves, strict=True))
    if wanted.step is not None:
        found = _thin(found, wanted.step)
    return {name: np.asarray(leaf, np.float64) for name, leaf in found.items()}


@functools.partial(jax.jit, static_argnums=1)
def _thin(found: dict[str, jax.Array], step: tuple[int, int]) -> dict[str, Any]:
    return thin(found, step)


def _memory(compiled: Any, cell: AttentionCell, wanted: Wanted) -> dict[str, float]:
    """Return XLA's own account of the program's memory in units of 2**20 bytes, where it gives one.

    The argument bytes are those of the call that is measured; the cotangent is not among them where the
    output is not returned either, as in the reference file.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {}
    counted = cell.mode == "fwd" or wanted.output
    cotangent = 0 if counted else math.prod(cell.shape) * jnp.dtype(cell.dtype).itemsize
    return {
        "xla_temp_mb": analysis.temp_size_in_bytes / _MB,
        "xla_arg_mb": (analysis.argument_size_in_bytes - cotangent) / _MB,
        "xla_out_mb": analysis.output_size_in_bytes / _MB,
    }
