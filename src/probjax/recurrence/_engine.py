"""Scans over time in plain JAX that keep one state per chunk of steps, and from those the whole backward
pass.

A recurrence is a function `step(state, inputs) -> (state, output)` of the inputs of one token. Operands whose
time axis has size 1 are the same for all tokens; they, and operands without a time axis, are passed on as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from probjax._op import Array, Arrays, Call, axis_sizes, batch_shape

Tree = dict[int, Array]
Step = Callable[[Array, Tree], tuple[Array, Array]]
Chunk = Callable[[Array, Tree, Tree], tuple[Array, Array]]
Pull = Callable[[Array, Tree, Tree, Array, Array], tuple[Array, Tree]]


@dataclass(frozen=True)
class Timeline:
    """How the time axis of a call's operands is cut into chunks, in the order of processing.

    Attributes:
      axis: position of the time axis: the number of batch axes.
      length: L, at least 1.
      chunk: steps of a chunk, at most L.
      reverse: the order of processing is that of time reversed.
    """

    axis: int
    length: int
    chunk: int
    reverse: bool

    @classmethod
    def of(cls, call: Call, operands: Sequence[Array]) -> Timeline:
        length = axis_sizes(call, operands)["L"]
        return cls(call.batch_ndim(operands), length, min(call.spec.chunk, length), call.spec.reverse)

    @property
    def chunks(self) -> int:
        return -(-self.length // self.chunk)

    def cut(self, x: Array) -> Array:
        """(*B, L, ...) as (chunks, chunk, *B, ...), padded by zeros, which must leave the state as it is."""
        if self.reverse:
            x = jnp.flip(x, self.axis)
        x = jnp.moveaxis(x, self.axis, 0)
        missing = self.chunks * self.chunk - self.length
        if missing:
            x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(self.chunks, self.chunk, *x.shape[1:])

    def join(self, x: Array) -> Array:
        """The inverse of `cut`."""
        x = x.reshape(self.chunks * self.chunk, *x.shape[2:])[: self.length]
        x = jnp.moveaxis(x, 0, self.axis)
        return jnp.flip(x, self.axis) if self.reverse else x

    def split(self, call: Call, operands: Sequence[Array]) -> tuple[Tree, Tree]:
        """Operands that have a time axis, cut, and the others, without a time axis of size 1; by position."""
        moving: Tree = {}
        fixed: Tree = {}
        for i, (operand, x) in enumerate(zip(call.operands, operands, strict=True)):
            if not operand.axes or operand.axes[0] != "L":
                fixed[i] = x
            elif x.shape[self.axis] == 1 and self.length > 1:
                fixed[i] = jnp.squeeze(x, self.axis)
            else:
                moving[i] = self.cut(x)
        return moving, fixed

    def merge(self, gradients: Tree, moving: Tree, operands: Sequence[Array]) -> Tree:
        """Gradients of what `split` made, as those of the operands."""
        return {
            i: self.join(x) if i in moving else x.reshape(operands[i].shape) for i, x in gradients.items()
        }


def run(chunk: Chunk, state: Array, moving: Tree, fixed: Tree) -> tuple[Array, Array, Array]:
    """One chunk after the other: the last state, the outputs (chunks, chunk, ...), the states entering
    chunks.

    JAX's derivative of this keeps one state per chunk and, while it is in a chunk, what that keeps.
    """

    def body(state: Array, inputs: Tree) -> tuple[Array, tuple[Array, Array]]:
        end, out = chunk(state, inputs, fixed)
        return end, (out, state)

    end, (outs, states) = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), state, moving)
    return end, outs, states


def run_chunk(step: Step, state: Array, moving: Tree, fixed: Tree, unroll: int = 1) -> tuple[Array, Array]:
    """The steps of one chunk: the last state and the outputs. Its derivative keeps every step's state."""

    def body(state: Array, inputs: Tree) -> tuple[Array, Array]:
        return step(state, {**fixed, **inputs})

    return jax.lax.scan(jax.checkpoint(body, prevent_cse=False), state, moving, unroll=unroll)


def pull_chunk(
    chunk: Chunk, state: Array, moving: Tree, fixed: Tree, ct_end: Array, ct_out: Array, wanted: Sequence[int]
) -> tuple[Array, Tree]:
    """Gradients of one chunk by its first state and by the wanted inputs: JAX's own derivative."""

    def of_wanted(state: Array, some: Tree) -> tuple[Array, Array]:
        every = {**moving, **fixed, **some}
        return chunk(state, {i: every[i] for i in moving}, {i: every[i] for i in fixed})

    _, pull = jax.vjp(of_wanted, state, {i: {**moving, **fixed}[i] for i in wanted})
    return pull((ct_end, ct_out))


def pull_back(
    pull: Pull,
    states: Array,
    moving: Tree,
    fixed: Tree,
    ct_last: Array,
    ct_outs: Array,
    wanted: Sequence[int],
) -> tuple[Array, Tree]:
    """Gradients with respect to the first state and to the wanted inputs, from the states entering chunks.

    Args:
      pull: the gradients of one chunk: as `pull_chunk`, without `chunk` and `wanted`.
      states: (chunks, ...).
      moving, fixed: all inputs, the moving ones by chunk.
      ct_last: cotangent of the last state.
      ct_outs: cotangents of the outputs, by chunk.
      wanted: positions of the inputs.
    """
    sums = {i: jnp.zeros_like(fixed[i]) for i in wanted if i in fixed}

    def body(carry: tuple[Array, Tree], inputs: tuple) -> tuple[tuple[Array, Tree], Tree]:
        ct_state, sums = carry
        state, moving, ct_out = inputs
        ct_state, found = pull(state, moving, fixed, ct_state, ct_out)
        sums = {i: x + found.pop(i) for i, x in sums.items()}
        return (ct_state, sums), found

    # Checkpointed for derivatives of this; without one it changes nothing.
    body = jax.checkpoint(body, prevent_cse=False)
    (ct_first, sums), found = jax.lax.scan(body, (ct_last, sums), (states, moving, ct_outs), reverse=True)
    return ct_first, {**found, **sums}


def run_at_once(
    chunk: Chunk, decay: Array, state: Array, moving: Tree, fixed: Tree
) -> tuple[Array, Array, Array]:
    """As `run`, but all chunks side by side, for devices that are wide and slow to start a step.

    A chunk takes its first state to `decay` times that, plus what it adds; so the states between chunks
    follow from what each adds by itself.

    Args:
      chunk: (state, moving, fixed) -> (state, outputs) for one chunk.
      decay: (chunks, ...), broadcasts to the states.
      state: the first state.
      moving, fixed: all inputs, the moving ones by chunk.
    """
    each = jax.vmap(chunk, (0, 0, None))
    decay = jnp.broadcast_to(decay, (decay.shape[0], *state.shape))
    added, _ = each(jnp.zeros_like(decay), moving, fixed)
    ends = carried(decay, added, state)
    states = jnp.concatenate([state[None], ends[:-1]])
    _, outs = each(states, moving, fixed)
    return ends[-1], outs, states


def pull_back_at_once(
    chunk: Chunk,
    pull: Pull,
    decay: Array,
    states: Array,
    moving: Tree,
    fixed: Tree,
    ct_last: Array,
    ct_outs: Array,
    batch: int,
) -> tuple[Array, Tree]:
    """As `pull_back`, but with chunks side by side, `batch` of them at a time where inputs get gradients."""

    def back(state: Array, moving: Tree, ct_end: Array, ct_out: Array) -> Array:
        return pull_chunk(chunk, state, moving, fixed, ct_end, ct_out, ())[0]

    zeros = jnp.zeros_like(states)
    added = jax.vmap(back)(zeros, moving, zeros, ct_outs)
    decay = jnp.broadcast_to(decay, states.shape)
    # Of the states entering chunks; the state leaving chunk m enters chunk m + 1.
    ct_states = jnp.flip(carried(jnp.flip(decay, 0), jnp.flip(added, 0), ct_last), 0)
    ct_ends = jnp.concatenate([ct_states[1:], ct_last[None]])

    def gradients(inputs: tuple) -> Tree:
        state, moving, ct_end, ct_out = inputs
        return pull(state, moving, fixed, ct_end, ct_out)[1]

    inputs = (states, moving, ct_ends, ct_outs)
    every = batch >= states.shape[0]
    found = jax.vmap(gradients)(inputs) if every else jax.lax.map(gradients, inputs, batch_size=batch)
    return ct_states[0], {i: jnp.sum(x, 0) if i in fixed else x for i, x in found.items()}


def join(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Two steps of `h_t = a_t h_{t-1} + b_t`, each (a, b), as one."""
    return first[0] * second[0], second[0] * first[1] + second[1]


def carried(a: Array, b: Array, state: Array) -> Array:
    """All states of `h_t = a_t h_{t-1} + b_t` along the first axis, in a logarithmic number of rounds."""
    b = jnp.concatenate([b[:1] + a[:1] * state, b[1:]])
    return jax.lax.associative_scan(join, (a, b))[1]


def records(call: Call) -> bool:
    """Whether the states that enter chunks are an output."""
    return call.outputs[-1].name == "states"


def state_shape(call: Call, operands: Sequence[Array], axes: Sequence[str]) -> tuple[int, ...]:
    """Full batch shape, then the sizes of the named axes."""
    sizes = axis_sizes(call, operands)
    return batch_shape(call, operands) + tuple(sizes[name] for name in axes)


def previous(x: Array, first: Array, axis: int, reverse: bool) -> Array:
    """Each entry's predecessor in the order of processing along the axis; that of the first is `first`."""
    first = jnp.expand_dims(jnp.broadcast_to(first, x.shape[:axis] + x.shape[axis + 1 :]), axis)
    if reverse:
        return jnp.concatenate([jax.lax.slice_in_dim(x, 1, None, axis=axis), first], axis)
    return jnp.concatenate([first, jax.lax.slice_in_dim(x, 0, x.shape[axis] - 1, axis=axis)], axis)


def by_jvp(
    forward: Callable[[Arrays], Arrays], operands: Arrays, tangents: dict[int, Array]
) -> tuple[Array, ...]:
    """The tangent of `forward` by JAX's own derivative."""

    def of_moving(*moved: Array) -> Arrays:
        filled = list(operands)
        for i, x in zip(tangents, moved, strict=True):
            filled[i] = x
        return forward(tuple(filled))

    _, moved = jax.jvp(of_moving, tuple(operands[i] for i in tangents), tuple(tangents.values()))
    return moved
