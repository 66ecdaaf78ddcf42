"""A user's function of scalars and arrays, evaluated on whole tiles inside a kernel.

`jax.vmap` cannot be used there: it turns the reads of arrays into gathers, which kernels do not have. So the
function is traced on scalars, and each of its steps is then applied to arrays that broadcast to the tile; an
array stays where it is in memory, and only the entries asked for are read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

Array = jax.Array

# Steps that act on each entry alone and that every kernel language has.
_ELEMENTWISE = frozenset(
    """abs add and atan2 cbrt ceil clamp convert_element_type cos cosh div eq exp exp2 expm1 floor ge gt
    integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow rem rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh
    xor""".split()  # noqa: SIM905
)
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat": "jaxpr",
    "checkpoint": "jaxpr",
}
_SHAPES = frozenset(("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "concatenate", "copy"))

# How a kernel reads one array: read(position, indices) with one index per axis, each broadcastable to the
# tile.
Read = Callable[[int, tuple[Any, ...]], Array]


class NotElementwise(Exception):
    """A function has a step that no kernel can take; the text names it."""


@dataclass(frozen=True)
class _View:
    """An array in memory with some of its leading axes fixed: entries are read when they are asked for."""

    position: int
    shape: tuple[int, ...]
    index: tuple[Any, ...]  # per axis of the array: an index, or None for an axis that is still there

    def fix(self, axis: int, at: Any) -> _View:
        free = [i for i, x in enumerate(self.index) if x is None][axis]
        return replace(self, index=(*self.index[:free], at, *self.index[free + 1 :]))


@functools.lru_cache(maxsize=256)
def trace(fn: Callable, score: bool, arrays: tuple[jax.ShapeDtypeStruct, ...]) -> ClosedJaxpr:
    """The steps of `fn([score,] batch, head, query, key, *arrays)`.

    Raises:
      NotElementwise: a kernel cannot take one of them.
    """
    index = jax.ShapeDtypeStruct((), jnp.int32)
    scores = (jax.ShapeDtypeStruct((), jnp.float32),) if score else ()
    closed = jax.make_jaxpr(fn)(*scores, index, index, index, index, *arrays)
    marks: list[Any] = [np.zeros((), x.dtype) for x in (*scores, index, index, index, index)]

    def read(position: int, indices: tuple[Any, ...]) -> Array:
        return np.zeros((), arrays[position].dtype)  # type: ignore[return-value]

    # A rehearsal on scalars: it meets the steps that an evaluation meets.
    jax.eval_shape(lambda: evaluate(closed, marks, arrays, read))
    return closed


def looks_at(closed: ClosedJaxpr, position: int) -> bool:
    """Whether the function uses its argument at `position`."""
    var = closed.jaxpr.invars[position]
    used = [v for eqn in closed.jaxpr.eqns for v in eqn.invars] + list(closed.jaxpr.outvars)
    return any(v is var for v in used)


def evaluate(closed: ClosedJaxpr, scalars: Sequence[Any], arrays: Sequence[Any], read: Read) -> Array:
    """The function on a tile.

    Args:
      closed: from `trace`.
      scalars: score (where there is one), batch, head, query and key, broadcastable against each other.
      arrays: shapes and dtypes of the arrays.
      read: reads entries of them.
    """
    views = [_View(i, tuple(x.shape), (None,) * len(x.shape)) for i, x in enumerate(arrays)]
    given = [read(v.position, ()) if not v.shape else v for v in views]
    (out,) = _run(closed.jaxpr, closed.consts, [*scalars, *given], read)
    return out


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], read: Read) -> list[Any]:
    env: dict[Any, Any] = {}
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        if np.ndim(const) != 0:
            raise NotElementwise("an array that it closes over; pass it through *arrays")
        env[var] = const
    env.update(zip(jaxpr.invars, args, strict=True))

    def value_of(atom: Any) -> Any:
        # A literal keeps its dtype: a bare Python number would be weakly typed.
        aval: Any = atom.aval
        return np.asarray(atom.val, aval.dtype) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        name, inputs = eqn.primitive.name, [value_of(x) for x in eqn.invars]
        if name in _CALLS:
            inner = eqn.params[_CALLS[name]]
            closed = inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ())
            found = _run(closed.jaxpr, closed.consts, inputs, read)
        elif name in _ELEMENTWISE:
            found = [_elementwise(eqn, inputs)]
        elif name in _SHAPES:
            found = [_shape(eqn, inputs)]
        elif name == "dynamic_slice":
            found = [_slice(eqn, inputs)]
        elif name == "gather":
            found = [_gather(eqn, inputs, read)]
        else:
            raise NotElementwise(f"the operation {name}")
        for var, x in zip(eqn.outvars, found, strict=True):
            if isinstance(x, _View) and var.aval.shape == ():
                x = read(x.position, x.index)
            env[var] = x
    return [value_of(x) for x in jaxpr.outvars]


def _elementwise(eqn: Any, inputs: list[Any]) -> Any:
    if any(isinstance(x, _View | list) for x in inputs):
        raise NotElementwise(f"the operation {eqn.primitive.name} on a whole array")
    if eqn.primitive.name == "convert_element_type" and isinstance(inputs[0], np.ndarray):
        return inputs[0].astype(eqn.params["new_dtype"])
    shape = np.broadcast_shapes(*(np.shape(x) for x in inputs))
    # Numbers known while tracing stay scalars, and XLA and Triton fold them.
    wide = [jnp.broadcast_to(x, shape) if np.shape(x) != shape else x for x in inputs]
    return eqn.primitive.bind(*wide, **eqn.params)


def _shape(eqn: Any, inputs: list[Any]) -> Any:
    """Vectors of indices are lists of scalars; a view only loses axes of size 1, which are fixed already."""
    x = inputs[0]
    out = eqn.outvars[0].aval.shape
    if eqn.primitive.name == "concatenate":
        parts = [p if isinstance(p, list) else None for p in inputs]
        if None in parts or len(out) != 1:
            raise NotElementwise("the operation concatenate")
        return [item for part in parts for item in part]  # type: ignore[union-attr]
    if isinstance(x, _View):
        kept = tuple(n for n, i in zip(x.shape, x.index, strict=True) if i is None)
        if tuple(n for n in out if n != 1) != tuple(n for n in kept if n != 1):
            raise NotElementwise(f"the operation {eqn.primitive.name} on a whole array")
        for axis in reversed([a for a, n in enumerate(kept) if n == 1][: len(kept) - len(out)]):
            x = x.fix(axis, 0)
        return x
    if isinstance(x, list):
        if out == () and len(x) == 1:
            return x[0]
        if out == (len(x),):
            return x
    elif out == ():
        return x
    elif out == (1,):
        return [x]
    raise NotElementwise(f"the operation {eqn.primitive.name} to shape {out}")


def _slice(eqn: Any, inputs: list[Any]) -> Any:
    view, *starts = inputs
    sizes = eqn.params["slice_sizes"]
    if not isinstance(view, _View):
        raise NotElementwise("a slice of a computed array")
    axes = [n for n, i in zip(view.shape, view.index, strict=True) if i is None]
    for axis in reversed(range(len(axes))):
        if sizes[axis] == axes[axis]:
            if axes[axis] == 1:
                view = view.fix(axis, 0)
            continue
        if sizes[axis] != 1:
            raise NotElementwise("a slice of more than one entry")
        view = view.fix(axis, _clip(starts[axis], axes[axis]))
    return view


def _gather(eqn: Any, inputs: list[Any], read: Read) -> Any:
    view, index = inputs
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    if not isinstance(view, _View) or not isinstance(index, list):
        raise NotElementwise("a gather of computed arrays")
    axes = [n for n, i in zip(view.shape, view.index, strict=True) if i is None]
    single = eqn.params["slice_sizes"] == (1,) * len(axes)
    every = tuple(range(len(axes)))
    if not single or numbers.collapsed_slice_dims != every or sorted(numbers.start_index_map) != list(every):
        raise NotElementwise("a gather of more than one entry")
    at = [index[numbers.start_index_map.index(a)] for a in every]
    inside: Any = np.bool_(True)
    for a in reversed(every):
        inside = inside & (at[a] >= 0) & (at[a] < axes[a])
        view = view.fix(a, _clip(at[a], axes[a]))
    found = read(view.position, view.index)
    if mode != lax.GatherScatterMode.FILL_OR_DROP:
        return found
    fill = eqn.params["fill_value"]
    if fill is None:
        fill = jnp.nan if jnp.issubdtype(found.dtype, jnp.inexact) else jnp.iinfo(found.dtype).min
    return jnp.where(inside, found, jnp.asarray(fill, found.dtype))


def _clip(index: Any, size: int) -> Any:
    return jnp.clip(jnp.asarray(index).astype(jnp.int32), 0, size - 1)
