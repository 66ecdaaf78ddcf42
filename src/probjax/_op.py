"""Operations with kernels of their own, described once.

An operation is a function of arrays whose forward, tangent and backward are computed by hand-written kernels.
It names the axes of its operands; from that one description this module derives three primitives (forward, tangent,
backward) with their shape rules, their derivatives, their batching rule and their sharding rule. An implementation of the
operation then only supplies three functions on arrays.

Layout of every operand: any number of batch axes, the same number for all operands, then the named axes of the operand.
A batch axis has the full size or 1, and so has a named axis; 1 stands for all. `jax.vmap` adds a batch axis, of size 1
for what is not mapped, so that nothing is copied.

Built on `jax.extend.core.Primitive`, not on JAX's hijax primitives: those give the same rules, but they were renamed
between 0.11.0 and 0.11.2, while this interface has been stable for years. Nothing outside this module knows of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

try:
    # Primitives that want to know the devices when they are lowered, as a partitioned call does. JAX has no public name
    # for this set; without it, XLA partitions the plain-JAX kernels by itself, and the others run replicated.
    from jax._src.dispatch import prim_requires_devices_during_lowering as _needs_devices
except ImportError:
    _needs_devices = None

Array = jax.Array
Arrays = tuple[Array, ...]

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclass(frozen=True)
class Operand:
    """One array argument: its name, its named axes, and whether derivatives flow through it.

    An axis called None belongs to this operand alone: it has no partner in other operands and is never sharded.
    """

    name: str
    axes: tuple[str | None, ...]
    differentiable: bool = True


@dataclass(frozen=True)
class Output:
    """One result: its name, its named axes and its dtype."""

    name: str
    axes: tuple[str, ...]
    dtype: Any


class Operation(Protocol):
    """What an operation supplies. `call` is the frozen description of one call; `platform` is one of PLATFORMS or None.

    `shardable` are the axis names that may be split over devices without communication. All of them belong to one
    family: an axis of that family may have the full size, a divisor of it (key/value heads) or 1.
    """

    name: str
    shardable: frozenset[str]

    def forward(self, call: Call, platform: str | None, operands: Arrays) -> Arrays: ...

    def tangent(
        self, call: Call, platform: str | None, operands: Arrays, outputs: Arrays, tangents: dict[int, Array]
    ) -> Arrays: ...

    def backward(
        self,
        call: Call,
        platform: str | None,
        operands: Arrays,
        outputs: Arrays,
        cotangents: tuple[Array | None, ...],
        wanted: tuple[int, ...],
    ) -> Arrays: ...

    def differentiable(self, call: Call) -> Call:
        """The same call on an implementation in plain JAX, whose three functions JAX can differentiate."""
        ...


@dataclass(frozen=True)
class Call:
    """One call of an operation, without its arrays: hashable, so that it keys compilation caches."""

    operation: Operation
    operands: tuple[Operand, ...]
    outputs: tuple[Output, ...]
    spec: Any

    def batch_ndim(self, operands: Sequence[Any]) -> int:
        return operands[0].ndim - len(self.operands[0].axes)


def batch_shape(call: Call, operands: Sequence[Any]) -> tuple[int, ...]:
    """The full batch shape: the broadcast of all operands' batch axes."""
    n = call.batch_ndim(operands)
    return tuple(_full(x.shape[i] for x in operands) for i in range(n))


def axis_sizes(call: Call, operands: Sequence[Any]) -> dict[str, int]:
    """Size of each named axis: the full one where an operand broadcasts it."""
    n = call.batch_ndim(operands)
    sizes: dict[str, int] = {}
    for operand, x in zip(call.operands, operands, strict=True):
        for name, size in zip(operand.axes, x.shape[n:], strict=True):
            if name is not None and sizes.get(name, 1) == 1:
                sizes[name] = size
    return sizes


def _full(sizes) -> int:
    """The size that others broadcast to: 0 wins over 1, anything else over both."""
    sizes = set(sizes) - {1}
    return max(sizes) if sizes else 1


# ---------------------------------------------------------------------------------------------------------------------
# The three primitives. Arguments of `tangent`: operands, outputs, tangents of the operands listed in `active`.
# Arguments of `backward`: operands, outputs, cotangents of the outputs listed in `present`; it returns the cotangents of
# the operands listed in `wanted`.

forward_p = Primitive("probjax_forward")
tangent_p = Primitive("probjax_tangent")
backward_p = Primitive("probjax_backward")


def apply(call: Call, operands: Sequence[Array]) -> Arrays:
    """Runs the operation. Every operand has the layout described at the top of this module."""
    return tuple(forward_p.bind(*_same_varying(operands), call=call))


def _same_varying(operands: Sequence[Array]) -> list[Array]:
    """Inside `jax.shard_map`, marks every operand as varying over all mesh axes that any of them varies over.

    JAX transposes that mark to the sum over shards, which is what the gradient of a replicated operand needs.
    """
    varying = [_varying_axes(x) for x in operands]
    union = frozenset().union(*varying)
    if not union:
        return list(operands)
    return [
        jax.lax.pcast(x, tuple(sorted(union - have)), to="varying") if union - have else x
        for x, have in zip(operands, varying, strict=True)
    ]


def _varying_axes(x: Array) -> frozenset[str]:
    aval = jax.typeof(x)
    kinds = getattr(aval, "mat", None)
    return frozenset(kinds.varying if kinds is not None else getattr(aval, "vma", ()))


def _split(call: Call, args: Sequence[Any]) -> tuple[list, list, list]:
    """Arguments of `tangent` or `backward`: operands, outputs, the rest."""
    n, m = len(call.operands), len(call.outputs)
    return list(args[:n]), list(args[n : n + m]), list(args[n + m :])


def _forward_abstract(*operands, call):
    return _output_avals(call, operands, operands)


def _tangent_abstract(*args, call, active):
    return _output_avals(call, args[: len(call.operands)], args)


def _backward_abstract(*args, call, present, wanted):
    return [args[i] for i in wanted]


def _output_avals(call: Call, operands, everything):
    n = call.batch_ndim(operands)
    batch = tuple(_full(x.shape[i] for x in everything) for i in range(n))
    sizes = axis_sizes(call, operands)
    layout = _explicit_layout(call, operands)
    avals = []
    for output in call.outputs:
        shape = batch + tuple(sizes[name] for name in output.axes)
        aval = operands[0].update(
            shape=shape, dtype=jnp.dtype(output.dtype), weak_type=False, sharding=layout(shape, output.axes)
        )
        avals.append(aval)
    return avals


# ---------------------------------------------------------------------------------------------------------------------
# Derivatives


def _forward_jvp(primals, tangents, *, call):
    operands = list(primals)
    # The names let a rematerialisation policy keep what backward needs, so that the forward kernel does not run again.
    outputs = [
        checkpoint_name(x, residual_name(call.operation, output))
        for x, output in zip(forward_p.bind(*operands, call=call), call.outputs, strict=True)
    ]
    active = _active(call, tangents)
    if not active:
        return outputs, [ad.Zero.from_primal_value(x) for x in outputs]
    moved = tangent_p.bind(*operands, *outputs, *(tangents[i] for i in active), call=call, active=active)
    return outputs, moved


def residual_name(operation: Operation, output: Output) -> str:
    """The `checkpoint_name` of one output of an operation."""
    return f"{operation.name}_{output.name}"


def _active(call: Call, tangents) -> tuple[int, ...]:
    """Positions of the operands that carry a derivative."""
    return tuple(
        i
        for i, operand in enumerate(call.operands)
        if operand.differentiable and not isinstance(tangents[i], ad.Zero)
    )


def _tangent_jvp(primals, tangents, *, call, active):
    operands, outputs, moves = _split(call, primals)
    *fixed_dots, move_dots = _split(call, tangents)
    result = tangent_p.bind(*primals, call=call, active=active)

    # Linear in the tangents: that part runs on the same kernel.
    linear = tuple(i for i, dot in zip(active, move_dots, strict=True) if not isinstance(dot, ad.Zero))
    terms = []
    if linear:
        dots = [dot for dot in move_dots if not isinstance(dot, ad.Zero)]
        terms.append(tangent_p.bind(*operands, *outputs, *dots, call=call, active=linear))

    # In the operands it is not linear: that derivative is taken of the plain-JAX implementation.
    def of_fixed(operands, outputs):
        plain = call.operation.differentiable(call)
        return call.operation.tangent(
            plain, None, tuple(operands), tuple(outputs), dict(zip(active, moves, strict=True))
        )

    terms += _jvp_of_fixed(
        of_fixed, call, operands, outputs, [jax.typeof(x) for x in result], *fixed_dots
    )
    return result, _sum_terms(terms, result)


def _backward_jvp(primals, tangents, *, call, present, wanted):
    operands, outputs, cotangents = _split(call, primals)
    *fixed_dots, cotangent_dots = _split(call, tangents)
    result = backward_p.bind(*primals, call=call, present=present, wanted=wanted)

    linear = tuple(i for i, dot in zip(present, cotangent_dots, strict=True) if not isinstance(dot, ad.Zero))
    terms = []
    if linear:
        dots = [dot for dot in cotangent_dots if not isinstance(dot, ad.Zero)]
        terms.append(backward_p.bind(*operands, *outputs, *dots, call=call, present=linear, wanted=wanted))

    def of_fixed(operands, outputs):
        plain = call.operation.differentiable(call)
        given = _spread(cotangents, present, len(call.outputs))
        return call.operation.backward(plain, None, tuple(operands), tuple(outputs), given, wanted)

    terms += _jvp_of_fixed(
        of_fixed, call, operands, outputs, [jax.typeof(x) for x in result], *fixed_dots
    )
    return result, _sum_terms(terms, result)


def _jvp_of_fixed(fn, call, operands, outputs, results, operand_dots, output_dots) -> list:
    """Derivative of `fn(operands, outputs)` along those tangents that are not zero; a list of no or one term."""
    values = operands + outputs
    dots = [
        None if isinstance(dot, ad.Zero) or (i < len(operands) and not call.operands[i].differentiable) else dot
        for i, dot in enumerate(operand_dots + output_dots)
    ]
    moving = [i for i, dot in enumerate(dots) if dot is not None]
    if not moving:
        return []

    def of_moving(*moved):
        filled = list(values)
        for i, x in zip(moving, moved, strict=True):
            filled[i] = x
        return tuple(fn(filled[: len(operands)], filled[len(operands) :]))

    mesh = jax.typeof(operands[0]).sharding.mesh
    if mesh.explicit_axes:  # the plain-JAX code is written for arrays whose sharding is XLA's business
        specs = [_spec(x) for x in results]
        of_moving = jax.sharding.auto_axes(of_moving, axes=mesh.explicit_axes, out_sharding=tuple(specs))

    _, derivative = jax.jvp(of_moving, tuple(values[i] for i in moving), tuple(dots[i] for i in moving))
    return [derivative]


def _sum_terms(terms, result):
    if not terms:
        return [ad.Zero.from_primal_value(x) for x in result]
    return [functools.reduce(jnp.add, parts) for parts in zip(*terms, strict=True)]


def _spread(values, positions, length) -> tuple:
    """A tuple of `length` with the values at their positions and None elsewhere."""
    out = [None] * length
    for i, x in zip(positions, values, strict=True):
        out[i] = x
    return tuple(out)


def _tangent_transpose(cotangents, *args, call, active):
    operands, outputs, moves = _split(call, args)
    unknown = tuple(i for i, x in zip(active, moves, strict=True) if ad.is_undefined_primal(x))
    present = tuple(i for i, ct in enumerate(cotangents) if not isinstance(ct, ad.Zero))
    fixed = [None] * (len(operands) + len(outputs))
    if not present or not unknown:
        return fixed + [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in moves]
    grads = backward_p.bind(
        *operands, *outputs, *(cotangents[i] for i in present), call=call, present=present, wanted=unknown
    )
    found = dict(zip(unknown, grads, strict=True))
    return fixed + [found.get(i) for i in active]


def _backward_transpose(gradients, *args, call, present, wanted):
    operands, outputs, cotangents = _split(call, args)
    unknown = [i for i, x in zip(present, cotangents, strict=True) if ad.is_undefined_primal(x)]
    active = tuple(i for i, g in zip(wanted, gradients, strict=True) if not isinstance(g, ad.Zero))
    fixed = [None] * (len(operands) + len(outputs))
    if not active or not unknown:
        return fixed + [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in cotangents]
    moves = [g for g in gradients if not isinstance(g, ad.Zero)]
    moved = tangent_p.bind(*operands, *outputs, *moves, call=call, active=active)
    return fixed + [moved[i] if i in unknown else None for i in present]


# ---------------------------------------------------------------------------------------------------------------------
# Batching: the mapped axis becomes the first batch axis, of size 1 where it is not mapped.


def _to_front(args, dims) -> list:
    return [
        jnp.expand_dims(x, 0) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(args, dims, strict=True)
    ]


def _mapped_size(args, dims) -> int:
    return next(
        x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None
    )


def _widen(x: Array, size: int) -> Array:
    return x if x.shape[0] == size else jnp.broadcast_to(x, (size, *x.shape[1:]))


def _forward_batch(args, dims, *, call):
    outputs = forward_p.bind(*_same_varying(_to_front(args, dims)), call=call)
    return outputs, (0,) * len(outputs)


def _tangent_batch(args, dims, *, call, active):
    size = _mapped_size(args, dims)
    operands, outputs, moves = _split(call, _to_front(args, dims))
    # A tangent has its operand's shape, so the two are mapped together; the outputs are per instance in any case.
    for position, i in enumerate(active):
        if operands[i].shape[0] != moves[position].shape[0]:
            operands[i], moves[position] = _widen(operands[i], size), _widen(moves[position], size)
    outputs = [_widen(x, size) for x in outputs]
    moved = tangent_p.bind(*_same_varying([*operands, *outputs, *moves]), call=call, active=active)
    return moved, (0,) * len(moved)


def _backward_batch(args, dims, *, call, present, wanted):
    size = _mapped_size(args, dims)
    operands, outputs, cotangents = _split(call, _to_front(args, dims))
    # A gradient is wanted per instance, so an operand that is shared by the instances is widened here; where it is
    # not mapped in a forward pass under grad, JAX maps nothing and its gradient is summed inside the kernel.
    for i in wanted:
        operands[i] = _widen(operands[i], size)
    outputs = [_widen(x, size) for x in outputs]
    cotangents = [_widen(x, size) for x in cotangents]
    grads = backward_p.bind(
        *_same_varying([*operands, *outputs, *cotangents]), call=call, present=present, wanted=wanted
    )
    return grads, (0,) * len(grads)


# ---------------------------------------------------------------------------------------------------------------------
# Sharding: batch axes and one family of shardable axes (heads) are split without communication.

Entry = Any  # one entry of a PartitionSpec: None, a mesh axis name, or a tuple of them
Layout = Callable[[tuple[int, ...], tuple[str | None, ...]], PartitionSpec]


def _names(entry: Entry) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def _choose_layout(call: Call, operands, specs: Sequence[Sequence[Entry]], mesh_shape) -> Layout:
    """Settles how the batch axes and the shardable family are split: the first operand that splits them decides."""
    n = call.batch_ndim(operands)
    batch = batch_shape(call, operands)
    sizes = axis_sizes(call, operands)
    family = {sizes[name] for name in call.operation.shardable if name in sizes}
    full = _family_size(call, operands)

    def devices(entry: Entry) -> int:
        return math.prod(mesh_shape[name] for name in _names(entry))

    def first(candidates) -> Entry:
        return next((entry for entry in candidates if _names(entry)), None)

    def entries(i: int):
        return (s[i] for x, s in zip(operands, specs, strict=True) if x.shape[i] == batch[i])

    def family_entries():
        for operand, x, s in zip(call.operands, operands, specs, strict=True):
            for name, size, entry in zip(operand.axes, x.shape[n:], s[n:], strict=True):
                if name in call.operation.shardable and size == full:
                    yield entry

    batch_entries = [first(entries(i)) for i in range(n)]
    batch_entries = [e if batch[i] % devices(e) == 0 else None for i, e in enumerate(batch_entries)]
    heads = first(family_entries())
    # Each device must hold whole groups of the family, or a member that all share.
    if heads is not None and any(size != 1 and size % devices(heads) for size in family):
        heads = None
    taken = {name for entry in batch_entries for name in _names(entry)}
    if heads is not None and taken & set(_names(heads)):
        heads = None

    def layout(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> PartitionSpec:
        lead = [batch_entries[i] if shape[i] == batch[i] else None for i in range(n)]
        tail = [
            heads if name in call.operation.shardable and size != 1 else None
            for name, size in zip(axes, shape[n:], strict=True)
        ]
        return PartitionSpec(*lead, *tail)

    return layout


def _family_size(call: Call, operands) -> int:
    sizes = axis_sizes(call, operands)
    return max((sizes[name] for name in call.operation.shardable if name in sizes), default=1)


def _explicit_layout(call: Call, operands):
    """For mesh axes of the Explicit kind: a function from (shape, axes) to the sharding of a result."""
    mesh = operands[0].sharding.mesh
    if mesh.empty:
        return lambda shape, axes: None
    specs = [tuple(x.sharding.spec) + (None,) * (x.ndim - len(x.sharding.spec)) for x in operands]
    layout = _choose_layout(call, operands, specs, dict(mesh.shape))
    return lambda shape, axes: NamedSharding(mesh, layout(shape, axes))


def _sharding_rule(call: Call, arrays, axes, results, result_axes) -> tuple[str, dict]:
    """The rule in Shardy's einsum notation: which axes of arguments and results are split together."""
    n = call.batch_ndim(arrays)
    batch = tuple(_full(x.shape[i] for x in arrays) for i in range(n))
    operands = arrays[: len(call.operands)]
    full = _family_size(call, operands)
    fresh = iter(range(10**6))
    kept: list[str] = []  # factors that must not be split

    def alone() -> str:
        kept.append(f"u{next(fresh)}")
        return kept[-1]

    def letters(shape, names) -> str:
        out = [f"b{i}" if shape[i] == batch[i] and batch[i] != 1 else alone() for i in range(n)]
        for name, size in zip(names, shape[n:], strict=True):
            if name not in call.operation.shardable or size == 1:
                out.append(alone())
            else:
                # Axes of a smaller size (key/value heads) are a factor of their own: only `partition` knows whether
                # they can be split along with the full ones.
                out.append("h" if size == full else f"k{size}")
        return " ".join(out)

    left = ", ".join(letters(x.shape, a) for x, a in zip(arrays, axes, strict=True))
    right = ", ".join(letters(x.shape, a) for x, a in zip(results, result_axes, strict=True))
    return f"{left} -> {right}", {"need_replication_factors": tuple(kept)}


def _partitioned(run, call: Call, arrays, axes, result_axes, results, *, reduce_missing: bool):
    """`run` as a function that XLA's partitioner splits over devices by the rule above.

    With `reduce_missing`, a result that lacks a split axis is a sum over it, and is summed over its shards.
    """

    def partition(mesh, argument_shapes, result_shapes):
        args = argument_shapes
        specs = [_spec_of(x) for x in args]
        operands = args[: len(call.operands)]
        layout = _choose_layout(call, operands, specs[: len(call.operands)], dict(mesh.shape))
        # An operand may be shared where a cotangent is split; then the other arguments decide.
        for position in range(len(call.operands), len(args)):
            if any(_names(e) for x, a in zip(args, axes, strict=True) for e in layout(x.shape, a)):
                break
            stand_in = Call(call.operation, (Operand("", axes[position]), *call.operands), call.outputs, None)
            layout = _choose_layout(
                stand_in, (args[position], *operands), (specs[position], *specs[: len(operands)]), dict(mesh.shape)
            )
        shardings = tuple(NamedSharding(mesh, layout(x.shape, a)) for x, a in zip(args, axes, strict=True))
        result_shardings = [layout(x.shape, a) for x, a in zip(results, result_axes, strict=True)]
        local = _summing(run, [s.spec for s in shardings], result_shardings) if reduce_missing else run
        return mesh, local, tuple(NamedSharding(mesh, s) for s in result_shardings), shardings

    # What stands here is never run, it only says what the results look like: this function is used for several devices,
    # and for them `partition` supplies the code.
    function = custom_partitioning(lambda *args: tuple(jnp.zeros(x.shape, x.dtype) for x in results))

    def rule(mesh, argument_types, result_types):
        return _sharding_rule(call, arrays, axes, results, result_axes)

    function.def_partition(partition=partition, sharding_rule=rule)
    return function


def _mapped(run, call: Call, avals, axes, result_axes, results, *, reduce_missing: bool):
    """`run` per device where the mesh axes are Explicit: there every type carries its sharding, so nothing is asked."""
    mesh = avals[0].sharding.mesh
    operands = avals[: len(call.operands)]
    layout = _choose_layout(call, operands, [_spec_of(x) for x in operands], dict(mesh.shape))
    specs = [layout(x.shape, a) for x, a in zip(avals, axes, strict=True)]
    result_specs = [layout(x.shape, a) for x, a in zip(results, result_axes, strict=True)]
    local = _summing(run, specs, result_specs) if reduce_missing else run

    def mapped(*args):
        args = [jax.sharding.reshard(x, s) for x, s in zip(args, specs, strict=True)]
        function = jax.shard_map(local, in_specs=tuple(specs), out_specs=tuple(result_specs), check_vma=False)
        return tuple(
            jax.sharding.reshard(x, _spec(aval)) for x, aval in zip(function(*args), results, strict=True)
        )

    return mapped


def _spec(aval) -> PartitionSpec:
    return PartitionSpec(*_spec_of(aval))


def _summing(run, specs, result_specs):
    """`run` on the shards of one device, with those results summed over devices that lack a split axis."""
    split = {name for spec in specs for entry in spec for name in _names(entry)}

    def local(*args):
        summed = []
        for x, spec in zip(run(*args), result_specs, strict=True):
            missing = split - {name for entry in spec for name in _names(entry)}
            summed.append(jax.lax.psum(x, tuple(sorted(missing))) if missing else x)
        return tuple(summed)

    return local


def _spec_of(x) -> tuple[Entry, ...]:
    spec = tuple(getattr(x.sharding, "spec", ()))
    return spec + (None,) * (len(x.shape) - len(spec))


# ---------------------------------------------------------------------------------------------------------------------
# Lowering: the platform is known here, so here the implementation is chosen.


def _runner(kind: str, platform: str | None, params):
    """The function on arrays that one primitive stands for."""
    call: Call = params["call"]
    operation = call.operation

    def run(*args):
        operands, outputs, rest = _split(call, args)
        if kind == "forward":
            return tuple(operation.forward(call, platform, tuple(operands)))
        if kind == "tangent":
            moves = dict(zip(params["active"], rest, strict=True))
            return tuple(operation.tangent(call, platform, tuple(operands), tuple(outputs), moves))
        given = _spread(rest, params["present"], len(call.outputs))
        return tuple(
            operation.backward(call, platform, tuple(operands), tuple(outputs), given, params["wanted"])
        )

    return run


def _argument_axes(kind: str, params) -> tuple[list, list]:
    """Named axes of the primitive's arguments and of its results."""
    call: Call = params["call"]
    operands, outputs = [o.axes for o in call.operands], [o.axes for o in call.outputs]
    if kind == "forward":
        return operands, outputs
    if kind == "tangent":
        return operands + outputs + [operands[i] for i in params["active"]], outputs
    return operands + outputs + [outputs[i] for i in params["present"]], [operands[i] for i in params["wanted"]]


def _lower(ctx, *args, kind: str, platform: str | None, **params):
    run = _runner(kind, platform, params)
    call: Call = params["call"]
    context = ctx.module_context.axis_context
    axes, result_axes = _argument_axes(kind, params)
    several = isinstance(context, mlir.ShardingContext) and len(context.device_assignment or ()) > 1
    mesh = ctx.avals_in[0].sharding.mesh if ctx.avals_in else jax.sharding.AbstractMesh((), ())
    if several and mesh.explicit_axes:
        run = _mapped(
            run, call, ctx.avals_in, axes, result_axes, ctx.avals_out, reduce_missing=kind == "backward"
        )
        with jax.sharding.use_abstract_mesh(mesh):
            return mlir.lower_fun(run, multiple_results=True)(ctx, *args)
    # Inside, arrays are plain: mesh axes are not the kernels' business.
    avals = [ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
    # Under an Explicit mesh an array without a sharding is replicated: nothing to partition.
    if several and not jax.sharding.get_abstract_mesh().explicit_axes:
        run = _partitioned(
            run, call, avals, axes, result_axes, ctx.avals_out, reduce_missing=kind == "backward"
        )
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return mlir.lower_fun(run, multiple_results=True)(ctx.replace(avals_in=avals), *args)


@functools.lru_cache(maxsize=4096)
def _compiled(primitive, params):
    return jax.jit(lambda *args: primitive.bind(*args, **dict(params)))


def _register(primitive, kind, abstract, jvp, transpose, batch):
    def run_now(*args, **params):
        with jax.disable_jit(False):  # the kernels are compiled even where the user's own code is not
            return _compiled(primitive, tuple(sorted(params.items())))(*args)

    primitive.multiple_results = True
    if _needs_devices is not None:
        _needs_devices.add(primitive)
    primitive.def_impl(run_now)
    primitive.def_abstract_eval(abstract)
    ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, functools.partial(_lower, kind=kind, platform=None))
    for platform in PLATFORMS:
        rule = functools.partial(_lower, kind=kind, platform=platform)
        mlir.register_lowering(primitive, rule, platform=platform)


_register(forward_p, "forward", _forward_abstract, _forward_jvp, None, _forward_batch)
_register(tangent_p, "tangent", _tangent_abstract, _tangent_jvp, _tangent_transpose, _tangent_batch)
_register(backward_p, "backward", _backward_abstract, _backward_jvp, _backward_transpose, _backward_batch)
