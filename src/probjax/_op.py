"""Operations with kernels of their own, described once.

An operation is a function of arrays whose forward, tangent and backward are computed by hand-written kernels.
It names the axes of its operands; from that one description this module derives three primitives (forward,
tangent, backward) with their shape rules, their derivatives, their batching rule and their sharding rule.
An implementation of the operation then only supplies three functions on arrays.

Layout of every operand: any number of batch axes, the same number for all operands, then the named axes of
the operand. A batch axis has the full size or 1, and so has a named axis; 1 stands for all. `jax.vmap` adds
a batch axis, of size 1 for what is not mapped, so that nothing is copied.

Built on `jax.extend.core.Primitive`, not on JAX's hijax primitives: those give the same rules, but they
were renamed between 0.11.0 and 0.11.2, while this interface has been stable for years. Nothing outside this
module knows of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from probjax._call import (
    Array,
    Arrays,
    Call,
    Operand,
    Operation,
    Output,
    axis_sizes,
    batch_shape,
    full_size,
)
from probjax._sharding import explicit_layout, mapped_over_devices, partitioned, spec_of

__all__ = [
    "Array",
    "Arrays",
    "Call",
    "Operand",
    "Operation",
    "Output",
    "apply",
    "axis_sizes",
    "batch_shape",
    "residual_name",
]

try:
    # Primitives that want to know the devices when they are lowered, as a partitioned call does. JAX has no
    # public name for this set; without it, XLA partitions the plain-JAX kernels by itself, and the others
    # run replicated.
    from jax._src.dispatch import prim_requires_devices_during_lowering as _needs_devices
except ImportError:
    _needs_devices = set()

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


# ----------------------------------------------------------------------------------------------------------
# The three primitives. Arguments of `tangent`: operands, outputs, tangents of the operands listed in
# `active`. Arguments of `backward`: operands, outputs, cotangents of the outputs listed in `present`; it
# returns the cotangents of the operands listed in `wanted`.

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
    batch = tuple(full_size(x.shape[i] for x in everything) for i in range(n))
    sizes = axis_sizes(call, operands)
    layout = explicit_layout(call, operands)
    avals = []
    for output in call.outputs:
        shape = batch + tuple(sizes[name] for name in output.axes)
        aval = operands[0].update(
            shape=shape, dtype=jnp.dtype(output.dtype), weak_type=False, sharding=layout(shape, output.axes)
        )
        avals.append(aval)
    return avals


# ----------------------------------------------------------------------------------------------------------
# Derivatives


def _forward_jvp(primals, tangents, *, call):
    operands, active, n = list(primals), _active(call, tangents), len(call.outputs)
    if active:
        call = call.operation.recording(call)
    # The names let a rematerialisation policy keep what backward needs, so that the forward kernel does not
    # run again.
    outputs = [
        _named(x, residual_name(call.operation, output))
        for x, output in zip(forward_p.bind(*operands, call=call), call.outputs, strict=True)
    ]
    if not active:
        return outputs, [_zero_tangent(x) for x in outputs]
    moved = tangent_p.bind(*operands, *outputs, *(tangents[i] for i in active), call=call, active=active)
    return outputs[:n], moved[:n]


def _named(x: Array, name: str) -> Array:
    # What a policy keeps, JAX marks by reduce_precision, which takes no complex numbers.
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jax.lax.complex(checkpoint_name(x.real, name), checkpoint_name(x.imag, name))
    return checkpoint_name(x, name)


def _zero_tangent(x: Array):
    return ad.Zero(jax.typeof(x).to_tangent_aval())


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
    plain = call.operation.differentiable(call)

    def plain_tangent(operands, outputs, moves):
        return call.operation.tangent(plain, None, operands, outputs, dict(zip(active, moves, strict=True)))

    terms += _jvp_of_fixed(plain_tangent, call, (operands, outputs, moves), fixed_dots, result)
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

    plain = call.operation.differentiable(call)

    def plain_backward(operands, outputs, cotangents):
        given = _spread(cotangents, present, len(call.outputs))
        return call.operation.backward(plain, None, operands, outputs, given, wanted)

    terms += _jvp_of_fixed(plain_backward, call, (operands, outputs, cotangents), fixed_dots, result)
    return result, _sum_terms(terms, result)


def _jvp_of_fixed(fn, call, arguments, fixed_dots, result) -> list:
    """Derivative of `fn(operands, outputs, others)` along the nonzero tangents of operands and outputs.

    Returns a list of one term or none.
    """
    operands, outputs, others = arguments
    n, m = len(operands), len(outputs)
    values = [*operands, *outputs, *others]
    dots = [dot for part in fixed_dots for dot in part]
    moving = [
        i
        for i, dot in enumerate(dots)
        if not isinstance(dot, ad.Zero) and (i >= n or call.operands[i].differentiable)
    ]
    if not moving:
        return []

    def of_all(*values):
        return tuple(fn(tuple(values[:n]), tuple(values[n : n + m]), values[n + m :]))

    mesh = jax.typeof(operands[0]).sharding.mesh
    if mesh.explicit_axes:  # the plain-JAX code is written for arrays whose sharding is XLA's business
        specs = tuple(spec_of(jax.typeof(x)) for x in result)
        of_all = jax.sharding.auto_axes(of_all, axes=mesh.explicit_axes, out_sharding=specs)

    def of_moving(*moved):
        filled = list(values)
        for i, x in zip(moving, moved, strict=True):
            filled[i] = x
        return of_all(*filled)

    _, derivative = jax.jvp(of_moving, tuple(values[i] for i in moving), tuple(dots[i] for i in moving))
    return [derivative]


def _sum_terms(terms, result):
    if not terms:
        return [_zero_tangent(x) for x in result]
    return [functools.reduce(jnp.add, parts) for parts in zip(*terms, strict=True)]


def _spread(values, positions, length) -> tuple:
    """A tuple of `length` with the values at their positions and None elsewhere."""
    out = [None] * length
    for i, x in zip(positions, values, strict=True):
        out[i] = x
    return tuple(out)


def _forward_transpose(cotangents, *args, call):
    unknown = tuple(i for i, x in enumerate(args) if ad.is_undefined_primal(x))
    present = tuple(i for i, ct in enumerate(cotangents) if not isinstance(ct, ad.Zero))
    if not call.operation.linear.issuperset(unknown):
        names = ", ".join(call.operands[i].name for i in unknown if i not in call.operation.linear)
        raise NotImplementedError(f"{call.operation.name} is not linear in {names}: it has no transpose")
    if not present:
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in args]
    operands = [jnp.zeros(x.aval.shape, x.aval.dtype) if i in unknown else x for i, x in enumerate(args)]
    call = call.operation.recording(call)
    outputs = forward_p.bind(*_same_varying(operands), call=call)
    found = backward_p.bind(
        *_same_varying([*operands, *outputs, *(cotangents[i] for i in present)]),
        call=call,
        present=present,
        wanted=unknown,
    )
    grads = dict(zip(unknown, found, strict=True))
    return [grads.get(i) for i in range(len(args))]


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


# ----------------------------------------------------------------------------------------------------------
# Batching: the mapped axis becomes the first batch axis, of size 1 where it is not mapped.


def _to_front(args, dims) -> list:
    return [
        jnp.expand_dims(x, 0) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(args, dims, strict=True)
    ]


def _mapped_size(args, dims) -> int:
    return next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)


def _widen(x: Array, size: int) -> Array:
    return x if x.shape[0] == size else jnp.broadcast_to(x, (size, *x.shape[1:]))


def _forward_batch(args, dims, *, call):
    outputs = forward_p.bind(*_same_varying(_to_front(args, dims)), call=call)
    return outputs, (0,) * len(outputs)


def _tangent_batch(args, dims, *, call, active):
    size = _mapped_size(args, dims)
    operands, outputs, moves = _split(call, _to_front(args, dims))
    # A tangent has its operand's shape, so the two are mapped together; the outputs are per instance in any
    # case.
    for position, i in enumerate(active):
        if operands[i].shape[0] != moves[position].shape[0]:
            operands[i], moves[position] = _widen(operands[i], size), _widen(moves[position], size)
    outputs = [_widen(x, size) for x in outputs]
    moved = tangent_p.bind(*_same_varying([*operands, *outputs, *moves]), call=call, active=active)
    return moved, (0,) * len(moved)


def _backward_batch(args, dims, *, call, present, wanted):
    size = _mapped_size(args, dims)
    operands, outputs, cotangents = _split(call, _to_front(args, dims))
    # A gradient is wanted per instance, so an operand that is shared by the instances is widened here;
    # where it is not mapped in a forward pass under grad, JAX maps nothing and its gradient is summed
    # inside the kernel.
    for i in wanted:
        operands[i] = _widen(operands[i], size)
    outputs = [_widen(x, size) for x in outputs]
    cotangents = [_widen(x, size) for x in cotangents]
    grads = backward_p.bind(
        *_same_varying([*operands, *outputs, *cotangents]), call=call, present=present, wanted=wanted
    )
    return grads, (0,) * len(grads)


# ----------------------------------------------------------------------------------------------------------
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
    return operands + outputs + [outputs[i] for i in params["present"]], [
        operands[i] for i in params["wanted"]
    ]


def _lower(ctx, *args, kind: str, platform: str | None, **params):
    if ctx.module_context.lowering_parameters.for_export:
        params["call"] = params["call"].operation.portable(params["call"])
    run = _runner(kind, platform, params)
    call: Call = params["call"]
    context = ctx.module_context.axis_context
    axes, result_axes = _argument_axes(kind, params)
    several = isinstance(context, mlir.ShardingContext) and len(context.device_assignment or ()) > 1
    mesh = ctx.avals_in[0].sharding.mesh if ctx.avals_in else jax.sharding.AbstractMesh((), ())
    if several and mesh.explicit_axes:
        run = mapped_over_devices(
            run, call, ctx.avals_in, axes, result_axes, ctx.avals_out, reduce_missing=kind == "backward"
        )
        with jax.sharding.use_abstract_mesh(mesh):
            return mlir.lower_fun(run, multiple_results=True)(ctx, *args)
    # Inside, arrays are plain: mesh axes are not the kernels' business.
    avals = [ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
    # Under an Explicit mesh an array without a sharding is replicated: nothing to partition.
    if several and not jax.sharding.get_abstract_mesh().explicit_axes:
        run = partitioned(
            run, call, avals, axes, result_axes, ctx.avals_out, reduce_missing=kind == "backward"
        )
    with jax.sharding.use_abstract_mesh(_without_axes()):
        return mlir.lower_fun(run, multiple_results=True)(ctx.replace(avals_in=avals), *args)


def _without_axes() -> jax.sharding.AbstractMesh:
    """A mesh without axes, for the device that is compiled for where that is not one at hand."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return (
        jax.sharding.AbstractMesh((), ())
        if device is None
        else jax.sharding.AbstractMesh((), (), abstract_device=device)
    )


@functools.lru_cache(maxsize=4096)
def _compiled(primitive, params):
    return jax.jit(lambda *args: primitive.bind(*args, **dict(params)))


def _register(primitive, kind, abstract, jvp, transpose, batch):
    def run_now(*args, **params):
        with jax.disable_jit(False):  # the kernels are compiled even where the user's own code is not
            return _compiled(primitive, tuple(sorted(params.items())))(*args)

    primitive.multiple_results = True
    _needs_devices.add(primitive)
    primitive.def_impl(run_now)
    primitive.def_abstract_eval(abstract)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, functools.partial(_lower, kind=kind, platform=None))
    for platform in PLATFORMS:
        rule = functools.partial(_lower, kind=kind, platform=platform)
        mlir.register_lowering(primitive, rule, platform=platform)


_register(forward_p, "forward", _forward_abstract, _forward_jvp, _forward_transpose, _forward_batch)
_register(tangent_p, "tangent", _tangent_abstract, _tangent_jvp, _tangent_transpose, _tangent_batch)
_register(backward_p, "backward", _backward_abstract, _backward_jvp, _backward_transpose, _backward_batch)
