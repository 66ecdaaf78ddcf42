"""How an operation is split over devices: batch axes and one family of axes (heads), no communication."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from probjax._call import Call, Operand, axis_sizes, batch_shape, full_size

Entry = Any  # one entry of a PartitionSpec: None, a mesh axis name, or a tuple of them
Layout = Callable[[tuple[int, ...], tuple[str | None, ...]], PartitionSpec]


def _names(entry: Entry) -> tuple[str, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def choose_layout(call: Call, operands, specs: Sequence[Sequence[Entry]], mesh_shape) -> Layout:
    """Settles how the batch axes and the shardable family are split: the first operand that splits them
    decides.
    """
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


def explicit_layout(call: Call, operands):
    """For mesh axes of the Explicit kind: a function from (shape, axes) to the sharding of a result."""
    mesh = operands[0].sharding.mesh
    if mesh.empty:
        return lambda shape, axes: None
    specs = [tuple(x.sharding.spec) + (None,) * (x.ndim - len(x.sharding.spec)) for x in operands]
    layout = choose_layout(call, operands, specs, dict(mesh.shape))
    return lambda shape, axes: NamedSharding(mesh, layout(shape, axes))


def _sharding_rule(call: Call, arrays, axes, results, result_axes) -> tuple[str, dict]:
    """The rule in Shardy's einsum notation: which axes of arguments and results are split together."""
    n = call.batch_ndim(arrays)
    batch = tuple(full_size(x.shape[i] for x in arrays) for i in range(n))
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
                # Axes of a smaller size (key/value heads) are a factor of their own: only `partition` knows
                # whether they can be split along with the full ones.
                out.append("h" if size == full else f"k{size}")
        return " ".join(out)

    left = ", ".join(letters(x.shape, a) for x, a in zip(arrays, axes, strict=True))
    right = ", ".join(letters(x.shape, a) for x, a in zip(results, result_axes, strict=True))
    return f"{left} -> {right}", {"need_replication_factors": tuple(kept)}


def partitioned(run, call: Call, arrays, axes, result_axes, results, *, reduce_missing: bool):
    """`run` as a function that XLA's partitioner splits over devices by the rule above.

    With `reduce_missing`, a result that lacks a split axis is a sum over it, and is summed over its shards.
    """

    def partition(mesh, argument_shapes, result_shapes):
        args = argument_shapes
        specs = [_entries(x) for x in args]
        operands = args[: len(call.operands)]
        layout = choose_layout(call, operands, specs[: len(call.operands)], dict(mesh.shape))
        # An operand may be shared where a cotangent is split; then the other arguments decide.
        for position in range(len(call.operands), len(args)):
            if any(_names(e) for x, a in zip(args, axes, strict=True) for e in layout(x.shape, a)):
                break
            stand_in = Call(call.operation, (Operand("", axes[position]), *call.operands), call.outputs, None)
            layout = choose_layout(
                stand_in,
                (args[position], *operands),
                (specs[position], *specs[: len(operands)]),
                dict(mesh.shape),
            )
        shardings = tuple(NamedSharding(mesh, layout(x.shape, a)) for x, a in zip(args, axes, strict=True))
        result_shardings = [layout(x.shape, a) for x, a in zip(results, result_axes, strict=True)]
        local = _summing(run, [s.spec for s in shardings], result_shardings) if reduce_missing else run
        return mesh, local, tuple(NamedSharding(mesh, s) for s in result_shardings), shardings

    # What stands here is never run, it only says what the results look like: this function is used for
    # several devices, and for them `partition` supplies the code.
    function = custom_partitioning(lambda *args: tuple(jnp.zeros(x.shape, x.dtype) for x in results))

    def rule(mesh, argument_types, result_types):
        return _sharding_rule(call, arrays, axes, results, result_axes)

    function.def_partition(partition=partition, sharding_rule=rule)
    return function


def mapped_over_devices(run, call: Call, avals, axes, result_axes, results, *, reduce_missing: bool):
    """`run` per device where the mesh axes are Explicit: there every type carries its sharding, so nothing
    is asked.
    """
    mesh = avals[0].sharding.mesh
    operands = avals[: len(call.operands)]
    layout = choose_layout(call, operands, [_entries(x) for x in operands], dict(mesh.shape))
    specs = [layout(x.shape, a) for x, a in zip(avals, axes, strict=True)]
    result_specs = [layout(x.shape, a) for x, a in zip(results, result_axes, strict=True)]
    local = _summing(run, specs, result_specs) if reduce_missing else run

    def mapped(*args):
        placed = [jax.sharding.reshard(x, s) for x, s in zip(args, specs, strict=True)]
        function = jax.shard_map(local, in_specs=tuple(specs), out_specs=tuple(result_specs), check_vma=False)
        return tuple(
            jax.sharding.reshard(x, spec_of(aval)) for x, aval in zip(function(*placed), results, strict=True)
        )

    return mapped


def spec_of(aval) -> PartitionSpec:
    return PartitionSpec(*_entries(aval))


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


def _entries(x) -> tuple[Entry, ...]:
    spec = tuple(getattr(x.sharding, "spec", ()))
    return spec + (None,) * (len(x.shape) - len(spec))
