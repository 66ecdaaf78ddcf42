"""Stacks of blocks: unrolled or scanned, each block computed again in backward or not."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from probjax import recurrence
from probjax.attention.api import RESIDUAL_NAMES
from probjax.nn._cpu import settle

Array = jax.Array

REMAT = ("none", "full", "dots_saveable", "save_attention")


def check_remat(remat: str) -> str:
    if remat not in REMAT:
        raise ValueError(f"remat: got {remat!r}, want one of {', '.join(map(repr, REMAT))}")
    return remat


def rematerialised(function: Callable[..., Any], remat: str, *, scanned: bool = False) -> Callable[..., Any]:
    """`function` under a policy of what its backward pass keeps.

    Args:
      function: of arrays; it may close over traced ones.
      remat: "none": everything; "full": the arguments only; "dots_saveable": results of matrix products too;
        "save_attention": outputs and residuals of attention and recurrences, so that these do not run again.
      scanned: whether it is the body of a scan, which no elimination of common subexpressions reaches.
    """
    if remat == "none":
        return function
    policies = jax.checkpoint_policies
    policy = {
        "full": None,
        "dots_saveable": policies.dots_saveable,
        "save_attention": policies.save_only_these_names(*RESIDUAL_NAMES, *recurrence.RESIDUAL_NAMES),
    }[remat]
    return jax.checkpoint(function, policy=policy, prevent_cse=not scanned)


class Stack(nnx.Module):
    """Blocks one after the other.

    Block i is the same in both forms: its parameters are drawn from the i-th key.

    Args:
      make: makes a block: f(position, rngs), with the position within the period.
      num_layers: number of blocks.
      scan_layers: hold the parameters of all blocks in one array each, with a leading axis, and run the
        blocks by `jax.lax.scan`: a program that does not grow with their number.
      remat: see `rematerialised`.
      unroll: blocks (of a period) in one turn of the scan's loop.
      period: blocks differ by their index modulo this alone; it divides `num_layers` where they are scanned.
      rngs: one key of it is taken.

    Raises:
      ValueError: for an unknown policy, or counts that do not fit.
    """

    def __init__(
        self,
        make: Callable[[int, nnx.Rngs], nnx.Module],
        num_layers: int,
        *,
        scan_layers: bool = False,
        remat: str = "none",
        unroll: int = 1,
        period: int = 1,
        rngs: nnx.Rngs,
    ):
        num_layers, unroll = operator.index(num_layers), operator.index(unroll)
        if num_layers < 0:
            raise ValueError(f"num_layers: got {num_layers}, want 0 or more")
        if unroll < 1:
            raise ValueError(f"unroll: got {unroll}, want at least 1")
        if scan_layers and num_layers % period:
            raise ValueError(
                f"num_layers: got {num_layers}, want a multiple of {period} with scan_layers: one turn of "
                f"the loop runs {period} different blocks; or take scan_layers=False"
            )
        self.num_layers, self.period, self.unroll = num_layers, period, unroll
        self.scan_layers = scan_layers = bool(scan_layers) and num_layers > 0
        self.remat = check_remat(remat)
        keys = jax.random.split(rngs.params(), num_layers)
        if scan_layers:
            turns = keys.reshape(num_layers // period, period)
            self.blocks = nnx.List([_stacked(make, i, turns[:, i]) for i in range(period)])
        else:
            self.blocks = nnx.List([make(i % period, nnx.Rngs(params=key)) for i, key in enumerate(keys)])

    def __call__(
        self, body: Callable[[Any, Any, Any, Any], tuple[Any, Any]], x: Any, each: Any = None
    ) -> tuple[Any, Any]:
        """Runs the blocks.

        Args:
          body: f(block, x, index, part) -> (x, output): one block. `index` is its number, an integer or,
            where blocks are scanned, a traced one; it may close over arrays that all blocks use.
          x: what the blocks hand on, a pytree of arrays.
          each: None, or the blocks' own inputs in the form that `gather` gives.

        Returns:
          x after the last block, and the blocks' outputs in the same form as `each`.
        """
        if not self.scan_layers:
            outputs = []
            for index, block in enumerate(self.blocks):
                run = self._runner(block, body)
                part = None if each is None else each[index]
                x, out = run(nnx.split(block)[1], jax.tree.map(settle, x), index, part)
                outputs.append(out)
            return x, outputs
        runs = [self._runner(block, body) for block in self.blocks]

        def turn(x: Any, at: Any) -> tuple[Any, Any]:
            step, states, parts = at
            outs = []
            for i, run in enumerate(runs):
                part = None if parts is None else parts[i]
                x, out = run(states[i], x, step * self.period + i, part)
                outs.append(out)
            return x, outs

        states = [nnx.split(block)[1] for block in self.blocks]
        steps = jnp.arange(self.num_layers // self.period)
        return lax.scan(turn, x, (steps, states, each), unroll=self.unroll)

    def _runner(self, block: nnx.Module, body: Callable[..., Any]) -> Callable[..., Any]:
        definition = nnx.graphdef(block)

        def run(state: Any, x: Any, index: Any, part: Any) -> Any:
            return body(nnx.merge(definition, state), x, index, part)

        return rematerialised(run, self.remat, scanned=self.scan_layers)

    def gather(self, parts: Sequence[Any]) -> Any:
        """What each block has of its own, one pytree per block, in the form that a call wants."""
        if not self.scan_layers:
            return list(parts)
        return [jax.tree.map(lambda *x: jnp.stack(x), *parts[i :: self.period]) for i in range(self.period)]

    def scatter(self, each: Any) -> list[Any]:
        """The other way: one pytree per block, in order."""
        if not self.scan_layers:
            return list(each)
        return [
            jax.tree.map(lambda x, turn=turn: x[turn], each[i])
            for turn in range(self.num_layers // self.period)
            for i in range(self.period)
        ]


def _stacked(make: Callable[[int, nnx.Rngs], nnx.Module], position: int, keys: Array) -> nnx.Module:
    definitions = []

    def build(key: Array) -> Any:
        definition, state = nnx.split(make(position, nnx.Rngs(params=key)))
        definitions.append(definition)
        return state

    state = jax.vmap(build)(keys)
    return nnx.merge(definitions[0], state)


def remat[M: nnx.Module](model: M, policy: str = "full") -> M:
    """The model with its blocks computed again in the backward pass: less memory for more work.

    A checkpoint around a whole model saves nothing: its backward pass starts by computing all of the forward
    pass again, and then holds everything at once. So this sets the policy of every stack of blocks inside,
    and refuses a model that has none.

    Args:
      model: a module with stacks of blocks, such as `Transformer`, `DiffusionTransformer`, `SequenceModel`
        or `UNet`.
      policy: "full", "dots_saveable", "save_attention", or "none" to take it back; see `Transformer`.

    Returns:
      A copy; parameters are shared with `model`.

    Raises:
      ValueError: for an unknown policy, or a model without blocks.

    Example:
      >>> from flax import nnx
      >>> from probjax.nn import Transformer, remat
      >>> model = remat(Transformer(32, num_layers=2, num_heads=4, rngs=nnx.Rngs(0)))
      >>> model.stack.remat
      'full'
    """
    check_remat(policy)
    copy = nnx.merge(*nnx.split(model))
    found = [module for _, module in nnx.iter_modules(copy) if "remat" in vars(module)]
    if not found:
        raise ValueError(
            f"model: got {type(model).__name__}, which has no stack of blocks. A checkpoint around all of it "
            "would save no memory: backward would compute everything again and hold it at once. Put it in a "
            "stack, or checkpoint parts of what it is used in"
        )
    for module in found:
        module.remat = policy
    return copy
