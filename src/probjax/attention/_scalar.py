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
    "remat2": "jaxpr",
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
    """An array in memory of which some axes are fixed: entries are read when they are asked for.

    `index` has an index for each axis of the array, or None for one that is still there. `axes` says which
    axis of the array each axis of the view is, None for one of size 1 that stands for nothing.
    """

    position: int
    sizes: tuple[int, ...]
    index: tuple[Any, ...]
    axes: tuple[int | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(1 if a is None else self.sizes[a] for a in self.axes)

    def fix(self, axis: int, at: Any) -> _View:
        """The view at one place of one of its axes, which stays as an axis of size 1."""
        own = self.axes[axis]
        if own is None:
            return self
        index = (*self.index[:own], at, *self.index[own + 1 :])
        return replace(self, index=index, axes=(*self.axes[:axis], None, *self.axes[axis + 1 :]))

    def reshaped(self, shape: tuple[int, ...]) -> _View | None:
        """The view with axes of size 1 taken away or added; None if that does not give the shape."""
        if tuple(n for n in shape if n != 1) != tuple(n for n in self.shape if n != 1):
            return None
        view = self
        for axis, size in enumerate(self.shape):
            if size == 1:
                view = view.fix(axis, np.int32(0))
        rest = iter([a for a in view.axes if a is not None])
        return replace(view, axes=tuple(None if n == 1 else next(rest) for n in shape))

    def read(self, read: Read) -> Array:
        return read(self.position, tuple(np.int32(0) if i is None else i for i in self.index))


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


def own_derivative(jaxpr: Any) -> str | None:
    """The first call inside whose derivative is not that of its steps."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith(("custom_jvp", "custom_vjp")):
            return str(eqn.primitive.name)
        inner = eqn.params.get(_CALLS.get(eqn.primitive.name, ""))
        if inner is not None and (found := own_derivative(getattr(inner, "jaxpr", inner))):
            return found
    return None


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
    views = [
        _View(i, tuple(x.shape), (None,) * len(x.shape), tuple(range(len(x.shape))))
        for i, x in enumerate(arrays)
    ]
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
                x = x.read(read)
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
        found = x.reshaped(tuple(out))
        if found is None:
            raise NotElementwise(f"the operation {eqn.primitive.name} on a whole array")
        return found
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
    for axis, (full, size, start) in enumerate(zip(view.shape, sizes, starts, strict=True)):
        if size == full:
            continue
        if size != 1:
            raise NotElementwise("a slice of more than one entry")
        view = view.fix(axis, _clip(start, full))
    return view


def _gather(eqn: Any, inputs: list[Any], read: Read) -> Any:
    view, index = inputs
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    if not isinstance(view, _View) or not isinstance(index, list):
        raise NotElementwise("a gather of computed arrays")
    axes = view.shape
    single = eqn.params["slice_sizes"] == (1,) * len(axes)
    every = tuple(range(len(axes)))
    if not single or numbers.collapsed_slice_dims != every or sorted(numbers.start_index_map) != list(every):
        raise NotElementwise("a gather of more than one entry")
    at = [index[numbers.start_index_map.index(a)] for a in every]
    inside: Any = np.bool_(True)
    for a in reversed(every):
        inside = inside & (at[a] >= 0) & (at[a] < axes[a])
        view = view.fix(a, _clip(at[a], axes[a]))
    found = view.read(read)
    if mode != lax.GatherScatterMode.FILL_OR_DROP:
        return found
    fill = eqn.params["fill_value"]
    if fill is None:
        fill = jnp.nan if jnp.issubdtype(found.dtype, jnp.inexact) else jnp.iinfo(found.dtype).min
    return jnp.where(inside, found, jnp.asarray(fill, found.dtype))


def _clip(index: Any, size: int) -> Any:
    return jnp.clip(jnp.asarray(index).astype(jnp.int32), 0, size - 1)
