"""Attention by Pallas kernels that are lowered through Triton, for NVIDIA GPUs from Ampere on; and the same
kernels in Pallas's interpreter, which runs anywhere and is slow.

Here a call is brought into the form of the kernels (`_program`, `_schedule`), cut into tiles, and gradients
with respect to what the kernels read are carried back to the operands of the call.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from probjax._axes import Groups, summed
from probjax._call import full_size
from probjax._op import Arrays, Call, axis_sizes, batch_shape
from probjax.attention import _backward, _kernels, _triton, gpu_blocks
from probjax.attention._backward import NUMBER_STEPS, PAIR_STEPS
from probjax.attention._flash import Frame, shapes_of
from probjax.attention._program import Program, ScoreOp, Unsupported, lower
from probjax.attention._reduce import sinks_gradient
from probjax.attention._schedule import Cut, Schedule, schedules
from probjax.attention._site import Plan
from probjax.attention._triton import View, ceil_power
from probjax.attention.gpu_blocks import Kernels
from probjax.attention.spec import KEY, QUERY, VALUE, AttentionSpec
from probjax.attention.tables import Blocks
from probjax.attention.xla import TILED

Array = jax.Array

MOST_WIDTH = 256
"""Largest head and value size: a tile's rows stay in registers."""

ONE_LOOP = 1024
"""Most keys for which forward walks a causal mask's tiles in one loop (docs/gpu-attention.md)."""

PAIR_BUFFER = 2**25
"""Bytes of the scratch array in which gradients of a bias by distance are gathered, some rows at a time."""

_forced: contextvars.ContextVar[Kernels | None] = contextvars.ContextVar("blocks", default=None)


@contextlib.contextmanager
def forced(kernels: Kernels) -> Iterator[None]:
    """Programs lowered inside cut their kernels in this way, by the names of `gpu_blocks`."""
    token = _forced.set(kernels)
    try:
        yield
    finally:
        _forced.reset(token)


def unavailable(platform: str) -> str | None:
    if platform != "cuda":
        return "it runs on NVIDIA GPUs only"
    found = _triton.capability()
    if found is not None and found < _triton.LEAST_CAPABILITY:
        return f"it needs compute capability 8.0 or more, and this GPU has {found[0]}.{found[1]}"
    if not _triton.target():
        return (
            "there is no NVIDIA GPU to compile for; to compile for one that is elsewhere, name it by "
            "jax.sharding.AbstractDevice (docs/gpu-attention.md)"
        )
    return _triton.missing()


def declines(call: Call, arrays: Sequence[Any]) -> str | None:
    """Why the kernels cannot run a call with operands of these shapes and dtypes; None if they can."""
    spec: AttentionSpec = call.spec
    batch, sizes = batch_shape(call, arrays), axis_sizes(call, arrays)
    if spec.portable:
        return "the program is exported, and Triton's custom calls carry no promise of compatibility"
    if not all(isinstance(n, int) for n in (*batch, *sizes.values())):
        return "a size is symbolic, and a kernel's grid is fixed when a program is compiled"
    dtype = jnp.dtype(arrays[QUERY].dtype)
    if dtype == jnp.float64:
        return "float64: the matrix units' tiles are made for float32, bfloat16 and float16"
    if max(sizes["D"], sizes["V"]) > MOST_WIDTH:
        return f"heads of size {max(sizes['D'], sizes['V'])}, more than {MOST_WIDTH}"
    if _triton.products(spec.precision, dtype) is None:
        given = spec.precision or f"None, with jax_default_matmul_precision {_triton.default_precision()!r}"
        return f"precision: got {given}, want 'default', 'high' or 'highest'"
    if _empty(call, arrays):
        return None
    try:
        program = lower(call, arrays, functions=True)
    except Unsupported as error:
        return str(error)
    for x in jax.eval_shape(lambda *a: tuple(program.arrays(a)), *_structs(arrays)):
        if x.dtype.itemsize == 1 and math.prod(x.shape) >= 2**31:
            return "a bool array of 2**31 entries or more: Triton's 32-bit offsets do not reach its end"
        if x.dtype == jnp.float64:
            return "an operand (bias, scale, sinks or an array of a function) is float64; cast it to float32"
    return None


def shape_of(call: Call, arrays: Sequence[Any]) -> gpu_blocks.Shape:
    """What the cut of a call's kernels depends on; a mask that shows every pair counts as none."""
    masked = call.spec.mask is not None
    with contextlib.suppress(Unsupported):
        masked = masked and bool(lower(call, arrays, functions=True).mask)
    return _shape(call, arrays, masked)


def _shape(call: Call, arrays: Sequence[Any], masked: bool) -> gpu_blocks.Shape:
    sizes = axis_sizes(call, arrays)
    dtype = jnp.dtype(arrays[QUERY].dtype)
    return gpu_blocks.Shape(
        dtype=dtype.name,
        products=_triton.products(call.spec.precision, dtype) or _triton.HALF,
        T=sizes["T"],
        S=sizes["S"],
        N=sizes["N"],
        D=sizes["D"],
        V=sizes["V"],
        batch=math.prod(batch_shape(call, arrays)),
        masked=masked,
        biased=call.spec.bias is not None,
    )


def _structs(arrays: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


@dataclass(frozen=True)
class Triton:
    """The Pallas kernels. Calls with an axis of size 0 leave them nothing to do, and go to plain JAX."""

    interpret: bool = False

    def forward(self, call: Call, platform: str | None, operands: Arrays) -> Arrays:
        if _empty(call, operands):
            return TILED.forward(call, platform, operands)
        run = _Run(call, operands, {}, self.interpret)
        outs = {output.name: (output.axes, output.dtype) for output in call.outputs}
        found = run.kernel("forward", "forward", ["q", "k", "v"], outs)
        return tuple(run.whole(found[output.name], output.axes) for output in call.outputs)

    def tangent(
        self, call: Call, platform: str | None, operands: Arrays, outputs: Arrays, tangents: dict[int, Array]
    ) -> Arrays:
        if _empty(call, operands) or _through_functions(call, operands, tangents):
            return TILED.tangent(call, platform, operands, outputs, tangents)
        extra = {"out": outputs[0], "lse": outputs[1]}
        extra |= {f"tangent{i}": x for i, x in tangents.items()}
        run = _Run(call, operands, extra, self.interpret)
        names = ["q", "k", "v", "out", "lse"]
        for i in tangents:
            at = run.program.owner[i]
            move = run.arrays[f"tangent{i}"]
            _, moved = jax.jvp(run.program.sources[at].make, (run.operands[i],), (move,))
            name = {QUERY: "dq", KEY: "dk", VALUE: "dv"}.get(i, f"move{at}")
            run.arrays[name] = moved
            names.append(name)
        outs = {f"{output.name}_move": (output.axes, output.dtype) for output in call.outputs}
        found = run.kernel("tangent", "tangent", names, outs)
        return tuple(run.whole(found[f"{output.name}_move"], output.axes) for output in call.outputs)

    def backward(
        self,
        call: Call,
        platform: str | None,
        operands: Arrays,
        outputs: Arrays,
        cotangents: tuple[Array | None, ...],
        wanted: tuple[int, ...],
    ) -> Arrays:
        if _empty(call, operands) or all(ct is None for ct in cotangents):
            return TILED.backward(call, platform, operands, outputs, cotangents, wanted)
        others = _through_functions(call, operands, wanted)
        grads: dict[int, Array] = {}
        if others:  # sums over tiles that no tile of a kernel owns
            found = TILED.backward(call, platform, operands, outputs, cotangents, tuple(others))
            grads.update(zip(others, found, strict=True))
        mine = tuple(i for i in wanted if i not in grads)
        if mine:
            ct_out, ct_lse = cotangents
            extra = {"out": outputs[0], "lse": outputs[1]}
            extra["ct"] = jnp.zeros_like(outputs[0]) if ct_out is None else ct_out
            if ct_lse is not None:
                extra["ct_lse"] = ct_lse
            grads.update(_Run(call, operands, extra, self.interpret).gradients(mine))
        return tuple(grads[i].reshape(operands[i].shape) for i in wanted)


def repaired(call: Call, operands: Arrays, outputs: Arrays, step: int, interpret: bool = False) -> Arrays:
    """Outputs of another kernel for a causal call, with what leaked into them from hidden places taken out.

    Args:
      call: the call: causal, perhaps with a window to the left.
      operands: its operands.
      outputs: output and log-sum-exp, right except for what a hidden NaN or infinity has spoilt.
      step: keys that a query sees at most.
      interpret: runs the kernel in Pallas's interpreter.
    """
    extra = {"out_before": outputs[0], "lse_before": outputs[1]}
    return _Run(call, operands, extra, interpret).repaired(step)


def _empty(call: Call, operands: Sequence[Any]) -> bool:
    return 0 in (*batch_shape(call, operands), *axis_sizes(call, operands).values())


def left_to_tiled(call: Call, operands: Sequence[Any]) -> bool:
    """Whether a call has operands whose gradients and tangents the kernels do not compute."""
    if _empty(call, operands):
        return False
    floats = [i for i, operand in enumerate(call.operands) if operand.differentiable]
    return bool(_through_functions(call, operands, floats))


def _through_functions(call: Call, operands: Sequence[Any], positions: Any) -> list[int]:
    """Those operands among `positions` that are arrays of a score function."""
    program = lower(call, operands, functions=True)
    inside = {n for step in program.score if step.function is not None for n in step.function.arrays}
    return [i for i in positions if program.owner.get(i) in inside]


class _Run:
    """One call on whole arrays, whose batch axes are merged as far as can be."""

    def __init__(self, call: Call, operands: Arrays, extra: dict[str, Array], interpret: bool):
        self.call, self.interpret = call, interpret
        self.spec: AttentionSpec = call.spec
        everything = (*operands, *extra.values())
        n = call.batch_ndim(operands)
        self.full = tuple(full_size(x.shape[i] for x in everything) for i in range(n))
        groups = Groups.of([x.shape[:n] for x in everything], self.full)
        self.groups = groups.shape
        self.operands = [groups.merge(x) for x in operands]
        self.arrays = {name: groups.merge(x) for name, x in extra.items()}
        self.sizes = axis_sizes(call, operands)
        self.program: Program = lower(call, self.operands, functions=True)
        self.native = self.program.arrays(self.operands)
        self.arrays |= dict(zip("qkv", self.native, strict=False))
        self.arrays |= {f"operand{i}": x for i, x in enumerate(self.native) if i > VALUE}
        products = _triton.products(self.spec.precision, operands[QUERY].dtype)
        assert products is not None  # `declines` has seen to it
        self.products: str = products
        sizes, spec, program = self.sizes, self.spec, self.program
        self.frame = Frame(
            T=sizes["T"],
            S=sizes["S"],
            N=sizes["N"],
            K=sizes["K"],
            scale=spec.scale,
            mask=program.mask,
            score=tuple(program.score),
            shapes=shapes_of(self.native, len(self.groups)),
            dtypes=tuple(x.dtype for x in self.native),
            dropout=program.dropout,
            sinks=program.sinks,
            certain=sizes["S"] == 1 and spec.sinks_at is None and spec.dropout_rate == 0.0,
        )

    # ------------------------------------------------------------------------------------------------------
    # Kernels

    @functools.cached_property
    def shape(self) -> gpu_blocks.Shape:
        return _shape(self.call, self.operands, bool(self.program.mask))

    def blocks(self, kind: str) -> Kernels:
        given = _forced.get()
        if given is None:
            return gpu_blocks.chosen(kind, self.shape)
        rules = gpu_blocks.rules(kind, self.shape)
        if "query" in given:
            rules.pop("one", None)
        return {**rules, **given}

    def plan(self, cut: Cut, along: tuple[Schedule, Schedule]) -> Plan:
        n = len(self.groups)
        leads = {name: x.shape[:n] for name, x in self.arrays.items()}
        for name, schedule in zip(("along_keys", "along_queries"), along, strict=True):
            if schedule.array is not None and schedule.kind == "ranges":
                leads[name] = schedule.array.shape[:-2] or (1,) * n
        return Plan(
            frame=self.frame,
            groups=self.groups,
            leads=leads,
            cut=cut,
            along_keys=along[0],
            along_queries=along[1],
            D=self.sizes["D"],
            V=self.sizes["V"],
            products=self.products,
            interpret=self.interpret,
        )

    def prepared(self, block: Blocks) -> tuple[Plan, dict[str, Array]]:
        """The plan of a kernel cut in this way, and the arrays of its schedules."""
        cut = Cut(self.sizes["T"], self.sizes["S"], block.queries, block.keys)
        n = len(self.groups)
        if cut.row_tiles * cut.column_tiles == 1:
            along = (Schedule("band"), Schedule("band"))
        else:
            along = schedules(self.program.mask, cut, self.native, n)
        arrays = {}
        fixed = []
        for name, schedule in zip(("along_keys", "along_queries"), along, strict=True):
            if schedule.array is not None:
                array = schedule.array
                if schedule.kind == "ranges" and array.ndim == 2:
                    array = array.reshape((1,) * n + array.shape)
                    schedule = replace(schedule, array=array)
                arrays[name] = array
            fixed.append(schedule)
        return self.plan(cut, (fixed[0], fixed[1])), arrays

    def view(self, shape: tuple[int, ...], dtype: Any, cut: Cut, axes: Sequence[str | None]) -> View:
        """How a kernel sees an array: lengths in whole tiles, sizes as powers of two."""
        n = len(self.groups)
        tile = {"T": cut.rows, "S": cut.columns}
        padded = list(shape)
        for axis, letter in enumerate(axes, n):
            if letter in tile:
                padded[axis] = math.ceil(shape[axis] / tile[letter]) * tile[letter]
            elif letter in ("D", "V"):
                padded[axis] = ceil_power(shape[axis])
        return View(shape, dtype, tuple(padded))

    def launch(
        self,
        name: str,
        kernel: Any,
        block: Blocks,
        programs: int,
        cut: Cut,
        inputs: dict[str, Array],
        outputs: dict[str, tuple[tuple[int, ...], Any, tuple[str | None, ...]]],
        aliases: dict[int, int] | None = None,
    ) -> dict[str, Array]:
        names = [*inputs, *outputs]
        ins = [(x, self.view(x.shape, x.dtype, cut, _AXES.get(k, ()))) for k, x in inputs.items()]
        outs = [self.view(shape, dtype, cut, axes) for shape, dtype, axes in outputs.values()]

        def body(*refs: Any) -> None:
            kernel(dict(zip(names, refs, strict=True)))

        if programs >= 2**31:
            raise NotImplementedError(f"implementation: a grid of {programs} programs, want fewer than 2**31")
        found = _triton.launch(
            body,
            name=f"probjax_{name}",
            programs=programs,
            inputs=ins,
            outputs=outs,
            warps=block.warps,
            stages=block.stages,
            interpret=self.interpret,
            aliases=aliases,
        )
        return dict(zip(outputs, found, strict=True))

    def reads(self) -> list[str]:
        """Native operands that tiles read: those of masks, scores, sinks and dropout."""
        return [f"operand{i}" for i in range(VALUE + 1, len(self.native))]

    def kernel(
        self,
        kind: str,
        name: str,
        inputs: Sequence[str],
        outputs: dict[str, tuple[tuple[str, ...], Any]],
        partial: Sequence[str] = (),
    ) -> dict[str, Array]:
        """Runs a kernel of `_KERNELS`, whose results have the axes of the call; those in `partial` have a
        number per head and tile of queries.
        """
        block = self.blocks(kind)[name]
        plan, arrays = self.prepared(block)
        if name == "forward" and self.sizes["S"] <= ONE_LOOP:
            plan = replace(plan, one_loop=True)
        given = {n: self.arrays[n] for n in (*inputs, *self.reads())} | arrays
        results: dict[str, Any] = {
            n: (self.groups + tuple(self.sizes[a] for a in axes), dtype, axes)
            for n, (axes, dtype) in outputs.items()
        }
        for n in partial:
            results[n] = ((*self.groups, self.sizes["N"], plan.cut.row_tiles), jnp.float32, ())
        function, heads, tiles = _KERNELS[name]
        programs = plan.batch * self.sizes[heads] * tiles(plan.cut)
        return self.launch(name, functools.partial(function, plan), block, programs, plan.cut, given, results)

    def repaired(self, step: int) -> Arrays:
        """`out_before` and `lse_before` in place, see `_kernels.repair`."""
        block = Blocks(min(64, ceil_power(self.sizes["T"])), 16, warps=4, stages=1)
        plan, _ = self.prepared(block)
        given = {n: self.arrays[n] for n in ("q", "k", "v", "out_before", "lse_before")}
        results: dict[str, Any] = {
            o.name: (self.groups + tuple(self.sizes[a] for a in o.axes), o.dtype, o.axes)
            for o in self.call.outputs
        }
        body = functools.partial(_kernels.repair, plan, step=step)
        programs = plan.batch * self.sizes["N"]
        found = self.launch("repair", body, block, programs, plan.cut, given, results, {3: 0, 4: 1})
        return tuple(self.whole(found[o.name], o.axes) for o in self.call.outputs)

    def whole(self, x: Array, axes: tuple[str, ...]) -> Array:
        return x.reshape(self.full + tuple(self.sizes[a] for a in axes))

    # ------------------------------------------------------------------------------------------------------
    # Gradients

    def gradients(self, wanted: tuple[int, ...]) -> dict[int, Array]:
        """Gradients of operands of the call, in the merged layout."""
        program, arrays = self.program, self.arrays
        grads: dict[int, Array] = {}
        sinks = self.spec.sinks_at
        if sinks in wanted:
            grads[sinks] = sinks_gradient(
                self.operands[sinks], arrays["out"], arrays["lse"], arrays["ct"], arrays.get("ct_lse")
            )
        owners = {i: program.owner[i] for i in wanted if i != sinks}
        steps = {step.operand: n for n, step in enumerate(program.score) if step.operand >= 0}
        numbers = [steps[at] for at in owners.values() if at in steps and self._is_number(steps[at])]
        pairs = [steps[at] for at in owners.values() if at in steps and not self._is_number(steps[at])]
        native = self._main_gradients(set(owners.values()), numbers, bool(pairs))
        for n in pairs:
            native[program.score[n].operand] = self._pair_gradient(n)
        for i, at in owners.items():
            _, pull = jax.vjp(program.sources[at].make, self.operands[i])
            (grads[i],) = pull(
                summed(native[at], self.native[at].shape, jnp.float32).astype(self.native[at].dtype)
            )
        return grads

    def _is_number(self, n: int) -> bool:
        assert self.program.score[n].op in (*NUMBER_STEPS, *PAIR_STEPS)
        return self.program.score[n].op in NUMBER_STEPS

    def _main_gradients(self, wanted: set[int], numbers: list[int], pairs: bool) -> dict[int, Array]:
        """Gradients of query, key and value, and of score operands that are one number per head."""
        arrays, sizes = self.arrays, self.sizes
        inputs = ["q", "k", "v", "out", "lse", "ct", *(["ct_lse"] if "ct_lse" in arrays else [])]
        axes = {"grad_q": ("T", "N", "D"), "grad_k": ("S", "K", "D"), "grad_v": ("S", "K", "V")}

        def result(name: str) -> tuple[tuple[str, ...], Any]:
            operand = self.native[("grad_q", "grad_k", "grad_v").index(name)]
            # What is still to be summed over the batch is not rounded before.
            exact = operand.shape[: len(self.groups)] == self.groups
            return axes[name], operand.dtype if exact else jnp.float32

        kernels = self.blocks("backward")
        found: dict[str, Array] = {}
        if "one" in kernels and not (numbers or pairs):
            found = self.kernel("backward", "one", inputs, {name: result(name) for name in axes})
        else:
            partial = [f"partial{n}" for n in numbers]
            outs: dict[str, Any] = {"grad_q": result("grad_q"), "excess": (("T", "N"), jnp.float32)}
            found = self.kernel("backward", "query", inputs, outs, partial)
            arrays["excess"] = found["excess"]
            if wanted & {KEY, VALUE}:
                names = [n for n in inputs if n not in ("out", "ct_lse")] + ["excess"]
                found |= self.kernel("backward", "key", names, {n: result(n) for n in ("grad_k", "grad_v")})
        grads = {QUERY: found["grad_q"], KEY: found.get("grad_k"), VALUE: found.get("grad_v")}
        for n in numbers:
            at = self.program.score[n].operand
            total = jnp.sum(found[f"partial{n}"], axis=-1)  # (*groups, N)
            if self.frame.shapes[at] == ():
                total = jnp.sum(total, axis=-1)
            elif self.frame.shapes[at] == (sizes["K"],) != (sizes["N"],):
                total = jnp.sum(total.reshape(*total.shape[:-1], sizes["K"], -1), axis=-1)
            grads[at] = total
        return {i: g for i, g in grads.items() if g is not None}

    def _pair_gradient(self, n: int) -> Array:
        """The gradient of an operand with numbers per pair (a bias array), or per distance."""
        step = self.program.score[n]
        operand = self.native[step.operand]
        batch = len(self.groups)
        block = self.blocks("backward")["bias"]
        plan, arrays = self.prepared(block)
        names = ["q", "k", "v", "lse", "ct", "excess", *self.reads()]
        given = {name: self.arrays[name] for name in names} | arrays

        def run(shape: tuple[int, ...], dtype: Any, row_tiles: int, first: Array | None) -> Array:
            inputs = given if first is None else given | {"first": first}
            tiles = (row_tiles if shape[-2] > 1 else 1) * (plan.cut.column_tiles if shape[-1] > 1 else 1)
            programs = math.prod(shape[:-2]) * tiles
            body = functools.partial(
                _backward.bias_gradient,
                plan,
                n=n,
                shape=shape,
                row_tiles=row_tiles,
                shifted=first is not None,
            )
            outs: dict[str, Any] = {
                "grad": (shape, dtype, (None, "T" if shape[-2] > 1 else None, "S" if shape[-1] > 1 else None))
            }
            return self.launch("bias", body, block, programs, plan.cut, inputs, outs)["grad"]

        if step.op == ScoreOp.ADD_DENSE:
            return run(operand.shape, operand.dtype, plan.cut.row_tiles, None)
        # One number per distance: some rows at a time into a scratch array, whose diagonals are summed.
        T, S = self.sizes["T"], self.sizes["S"]
        lead = operand.shape[: batch + 1]
        row = math.prod(lead) * S * 4
        tiles = max(1, min(plan.cut.row_tiles, PAIR_BUFFER // max(row * plan.cut.rows, 1)))
        height = tiles * plan.cut.rows
        chunks = math.ceil(plan.cut.row_tiles / tiles)
        width = S + height - 1

        def add(c: Any, strip: Array) -> Array:
            first = jnp.asarray(c * tiles, jnp.int32).reshape(1)
            part = run((*lead, height, S), jnp.float32, tiles, first)
            # Entry S - 1 - j + i of the strip is that of distance j - i: with keys turned round and each row
            # moved by its number, what belongs together stands in one column.
            part = jnp.pad(part[..., ::-1], [(0, 0)] * (batch + 2) + [(0, height)])
            part = part.reshape(*lead, height * (S + height))[..., : height * width]
            diagonals = part.reshape(*lead, height, width).sum(axis=-2)
            start = (0,) * (batch + 1) + (c * height,)
            old = jax.lax.dynamic_slice(strip, start, (*lead, width))
            return jax.lax.dynamic_update_slice(strip, old + diagonals, start)

        strip = jnp.zeros((*lead, (chunks * height) + S - 1), jnp.float32)
        strip = add(0, strip) if chunks == 1 else jax.lax.fori_loop(np.int32(0), np.int32(chunks), add, strip)
        return strip[..., : T + S - 1]


# Kernels with one program per batch entry, head of a kind, and tile.
_KERNELS: dict[str, tuple[Callable[[Plan, Any], None], str, Callable[[Cut], int]]] = {
    "forward": (_kernels.forward, "N", lambda cut: cut.row_tiles),
    "tangent": (_kernels.tangent, "N", lambda cut: cut.row_tiles),
    "query": (_backward.query_gradient, "N", lambda cut: cut.row_tiles),
    "key": (_backward.key_gradient, "K", lambda cut: cut.column_tiles),
    "one": (_backward.one, "K", lambda cut: 1),
}

# Named axes of the arrays that kernels read in whole rows.
_AXES: dict[str, tuple[str | None, ...]] = {
    "q": ("T", None, "D"),
    "k": ("S", None, "D"),
    "v": ("S", None, "V"),
    "dq": ("T", None, "D"),
    "dk": ("S", None, "D"),
    "dv": ("S", None, "V"),
    "out": ("T", None, "V"),
    "out_before": ("T", None, "V"),
    "lse_before": ("T", None),
    "ct": ("T", None, "V"),
    "lse": ("T", None),
    "ct_lse": ("T", None),
    "excess": ("T", None),
}

TRITON = Triton()
INTERPRET = Triton(interpret=True)
