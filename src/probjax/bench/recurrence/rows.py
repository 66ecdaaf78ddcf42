"""What each JAX label of the suite `recurrence` calls, compiled and made ready to be timed."""

import functools
import importlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from probjax import recurrence
from probjax.bench import device_time
from probjax.bench.measure import Prepared, Unavailable
from probjax.bench.network.program import caller, compile_program
from probjax.bench.recurrence import naive
from probjax.bench.recurrence.cells import RecurrenceCell

# f(*operands), the output.
type Function = Callable[..., jax.Array]


def _ours(implementation: str | None, cell: RecurrenceCell) -> Function:
    options: dict[str, Any] = {"implementation": implementation}

    def linear(a: jax.Array, b: jax.Array) -> jax.Array:
        return recurrence.linear_scan(a, b, **options)[0]

    def selective(*operands: jax.Array) -> jax.Array:
        return recurrence.selective_scan(*operands, dt_softplus=True, **options)[0]

    def ssd(*operands: jax.Array) -> jax.Array:
        return recurrence.ssd(*operands, **options)[0]

    return {"selective_scan": selective, "ssd": ssd}.get(cell.op, linear)


def _naive(form: str, cell: RecurrenceCell) -> Function:
    return getattr(naive, f"{form}_{cell.op.removesuffix('_complex')}")


def _jax_linear_attention(cell: RecurrenceCell) -> Function:
    try:
        package = importlib.import_module("jla.ops")
    # A package of this size breaks in many ways, none of which is ours to name.
    except Exception as error:
        raise Unavailable(
            f"jax-linear-attention cannot be imported ({type(error).__name__}: {error}):"
            " install jax-linear-attention"
        ) from None

    def selective(x: jax.Array, dt: jax.Array, *rest: jax.Array) -> jax.Array:
        A, B, C, D = rest
        return package.linear_attention("mamba1", C, B, x, dt=dt, a=A, d=D, dt_softplus=True)[0]

    def ssd(query: jax.Array, key: jax.Array, value: jax.Array, log_decay: jax.Array) -> jax.Array:
        # It has no groups: the one of ours is for all heads.
        query, key = (jnp.broadcast_to(x, (*value.shape[:3], x.shape[-1])) for x in (query, key))
        return package.linear_attention("simple_gla", query, key, value, g=log_decay, scale=1.0)[0]

    if cell.op not in ("selective_scan", "ssd"):
        raise Unavailable("jax-linear-attention has no elementwise recurrence")
    return selective if cell.op == "selective_scan" else ssd


ROWS: dict[str, Callable[[RecurrenceCell], Function]] = {
    "probjax_default": partial(_ours, None),
    "probjax_scan": partial(_ours, "scan"),
    "probjax_native": partial(_ours, "native"),
    "probjax_reference": partial(_ours, "reference"),
    "xla_associative": partial(_naive, "associative"),
    "xla_sequential": partial(_naive, "sequential"),
    "jax_linear_attention": _jax_linear_attention,
}


def step(cell: RecurrenceCell, function: Function) -> Callable[..., Any]:
    """Return what is compiled and timed: f(*operands), or f(cotangent, *operands).

    Forward it returns the output, otherwise the gradients of the real part of sum(output · cotangent) with
    respect to all operands. The cotangent is an argument and no constant, of which XLA could compute ahead of
    time what depends on it alone.
    """
    if cell.mode == "fwd":
        return function

    def gradients(cotangent: jax.Array, *operands: jax.Array) -> Any:
        output, pull = jax.vjp(function, *operands)
        return pull(cotangent.astype(output.dtype))

    return gradients


def prepare(
    impl: str,
    cell: RecurrenceCell,
    inputs: dict[str, np.ndarray],
    *,
    device: str,
    memory_limit: str | None,
    times: Sequence[str],
) -> Prepared:
    """Compile one row and call it once.

    Args:
      impl: a label of ROWS.
      cell: the cell.
      inputs: from `cells.make_inputs`.
      device: ``cpu`` or ``gpu``.
      memory_limit: see `Program.require`.
      times: out of ``wall`` and ``device``.

    Returns:
      The row, ready to be timed.

    Raises:
      Unavailable: when what the row calls is not there.
      Skipped: when it needs more memory than the limit.
      NotImplementedError: when an implementation of ours cannot run the cell.
    """
    function = ROWS[impl](cell)
    names = cell.operands if cell.mode == "fwd" else ("cotangent", *cell.operands)
    arguments = [_place(cell, name, inputs[name]) for name in names]
    program = compile_program(step(cell, function), arguments)
    program.require(memory_limit, device)
    begin = time.perf_counter()
    outputs = jax.block_until_ready(program.call(*arguments))
    columns = {
        "lower_compile_s": program.trace_s + program.compile_s,
        **{name: value for name, value in program.memory.items() if name != "xla_alias_mb"},
        "compile_s": time.perf_counter() - begin,
        "implementation": _implementation(impl, native=program.native),
        "precision": "default",
    }
    leaves = [outputs] if cell.mode == "fwd" else list(outputs)
    named = ("output",) if cell.mode == "fwd" else cell.operands
    held = {name: np.asarray(_exactly(leaf)) for name, leaf in zip(named, leaves, strict=True)}
    ready = Prepared(
        impl,
        caller(program.call, arguments, wait=device == "cpu"),
        columns,
        result=lambda: held,
        release=held.clear,
        wall="wall" in times,
    )
    if "device" in times and device == "gpu":
        ready.device = functools.partial(device_time.columns, program.call, arguments, calls=3)
    return ready


def _place(cell: RecurrenceCell, name: str, array: np.ndarray) -> jax.Array:
    exact = np.iscomplexobj(array) or name in ("A", "D")
    return jnp.asarray(array, None if exact else cell.dtype)


def _exactly(array: jax.Array) -> jax.Array:
    return array if jnp.iscomplexobj(array) else array.astype(jnp.float32)


def _implementation(impl: str, *, native: bool) -> str:
    if impl == "probjax_default":
        return "native" if native else "scan"
    return impl.removeprefix("probjax_").removeprefix("xla_")
