"""What every cell and block shares: its methods, checks, one body for whole sequences and single tokens."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from probjax import recurrence
from probjax.nn import _init
from probjax.nn._cpu import dot_general

Array = jax.Array
State = tuple[Array, ...]

_STEP: dict[Callable, Callable] = {
    recurrence.linear_scan: recurrence.linear_scan_step,
    recurrence.selective_scan: recurrence.selective_scan_step,
    recurrence.ssd: recurrence.ssd_step,
    recurrence.causal_conv1d: recurrence.causal_conv1d_step,
}


@dataclass(frozen=True)
class Tokens:
    """The tokens of one call: whole sequences, or one token of each.

    Attributes:
      lead: (*B, L), or (*B,) for single tokens.
      single: whether these are single tokens, without a time axis.
      reset, segment_ids, mask: as the caller gave them, checked; `segment_ids` is None for single tokens.
    """

    lead: tuple[int, ...]
    single: bool
    reset: Array | None = None
    segment_ids: Array | None = None
    mask: Array | None = None

    def run(self, operation: Callable, *operands: Any, state: Array, **options: Any) -> tuple[Array, Array]:
        """A recurrence of `probjax.recurrence`, or its one-token form: result and next state."""
        options |= {"reset": self.reset, "mask": self.mask}
        if self.single:
            return _STEP[operation](*operands, state=state, **options)
        return operation(*operands, initial_state=state, segment_ids=self.segment_ids, **options)

    def hide(self, x: Array) -> Array:
        """`x` (*B, L, D) with zeros at padded tokens, whatever was there."""
        return x if self.mask is None else jnp.where(self.mask[..., None], x, jnp.zeros((), x.dtype))

    def starts(self, begun: Array) -> tuple[Array, Array]:
        """Where documents start, and whether one has begun after these tokens.

        Args:
          begun: (*B,) bool, whether one has before them: else the first valid token starts one.

        Returns:
          starts: (*B, L) bool; at padded tokens it means nothing.
          begun: (*B,) bool.
        """
        fresh = ~begun
        if self.single:
            starts = fresh if self.reset is None else fresh | self.reset
            return starts, begun | (True if self.mask is None else self.mask)
        *batch, length = self.lead
        index = jnp.arange(length)
        if self.mask is None:
            before = jnp.broadcast_to(index - 1, self.lead)
            after = begun | (length > 0)
        else:
            # The last valid token before each, -1 where there is none.
            valid = jnp.broadcast_to(jnp.where(self.mask, index, -1), self.lead)
            until = jax.lax.cummax(valid, len(batch))
            before = jnp.concatenate([jnp.full((*batch, 1), -1, until.dtype), until[..., :-1]], -1)[
                ..., :length
            ]
            after = begun | jnp.any(jnp.broadcast_to(self.mask, self.lead), -1)
        starts = fresh[..., None] & (before < 0)
        if self.reset is not None:
            starts = starts | self.reset
        if self.segment_ids is not None and length > 0:
            ids = jnp.broadcast_to(self.segment_ids, self.lead)
            starts = starts | ((before >= 0) & (ids != jnp.take_along_axis(ids, jnp.maximum(before, 0), -1)))
        return starts, after


class RecurrentModule(nnx.Module):
    """Base of cells and blocks: (*B, L, features) to (*B, L, features), with a state.

    A subclass says what its state is (`_state_parts`) and does its mathematics once, for tokens with or
    without a time axis (`_run`). Parameters are read at each call; nothing derived from them is kept.
    """

    features: int
    dtype: Any
    param_dtype: Any

    def __call__(
        self,
        x: Array,
        *,
        state: State | None = None,
        reset: Any = None,
        segment_ids: Any = None,
        mask: Any = None,
        return_state: bool = False,
    ) -> Any:
        """Runs whole sequences, or the next part of them.

        One call equals any split into parts, with the state carried, in values and in gradients through the
        state.

        Args:
          x: (*B, L, features), floating; *B any leading axes, also none, and any L, also 0.
          state: what the previous part returned; None starts afresh, as `init_state` does.
          reset: bool, broadcasts to (*B, L): a document starts at the token, nothing from before is seen.
          segment_ids: integers, broadcast to (*B, L): a document starts where the id differs from that of
            the valid token before. The first token of a call is no such place: where a sequence is split at
            the start of a document, set `reset` there.
          mask: bool, broadcasts to (*B, L): a token that is False is padding. It is skipped: the state
            passes it, its output is zero, and nothing of it, not even a NaN, reaches an output or a
            gradient.
          return_state: whether the state after the last token is returned too.

        Returns:
          y: (*B, L, features) in the compute dtype: `dtype`, or else what `x` and the parameters are
            promoted to.
          state: only with `return_state`.

        Raises:
          ValueError: for shapes that do not fit.
          TypeError: for an `x` that is not floating, a `state` that is no tuple, `reset` or `mask` that are
            not bool, or `segment_ids` that are not integers.
        """
        x = self._checked(x, 2, "(*B, L, features)")
        lead = x.shape[:-1]
        tokens = Tokens(
            lead,
            False,
            _flag("reset", reset, jnp.bool_, lead, "(*B, L)"),
            _flag("segment_ids", segment_ids, jnp.integer, lead, "(*B, L)"),
            _flag("mask", mask, jnp.bool_, lead, "(*B, L)"),
        )
        y, state = self._apply(x, state, tokens, lead[:-1])
        return (y, state) if return_state else y

    def step(self, x: Array, state: State, *, reset: Any = None, mask: Any = None) -> tuple[Array, State]:
        """Runs one token: equal to a call with L = 1.

        Args:
          x: (*B, features), floating.
          state: from `init_state`, a call with `return_state`, or the step before.
          reset, mask: bool, broadcast to (*B,), as in a call.

        Returns:
          y: (*B, features) in the compute dtype; zero where `mask` is False.
          state: the next state.

        Raises:
          ValueError, TypeError: as a call does.
        """
        x = self._checked(x, 1, "(*B, features)")
        lead = x.shape[:-1]
        tokens = Tokens(
            lead,
            True,
            _flag("reset", reset, jnp.bool_, lead, "(*B,)"),
            None,
            _flag("mask", mask, jnp.bool_, lead, "(*B,)"),
        )
        return self._apply(x, state, tokens, lead)

    def init_state(self, batch_shape: int | Sequence[int] = ()) -> State:
        """The state before the first token: zeros.

        Args:
          batch_shape: *B, the leading axes of the inputs to come; an integer is a single axis.

        Returns:
          A tuple of arrays that start with *B: windows of convolutions in the compute dtype (`dtype`, or else
          `param_dtype`), everything else in float32 (float64 if the compute dtype is).
        """
        batch = batch_shape if isinstance(batch_shape, Sequence) else (operator.index(batch_shape),)
        compute = jnp.dtype(self.param_dtype if self.dtype is None else self.dtype)
        return self._zeros(tuple(batch), compute)

    def _zeros(self, batch: tuple[int, ...], compute: Any) -> State:
        return tuple(jnp.zeros((*batch, *shape), dtype) for shape, dtype in self._state_parts(compute))

    def _apply(
        self, x: Array, state: State | None, tokens: Tokens, batch: tuple[int, ...]
    ) -> tuple[Array, State]:
        if state is None:
            # Like x: in a mesh with explicit axes zeros of their own would not be sharded as the batch is.
            like = jnp.zeros_like(jnp.sum(x, tuple(range(len(batch), x.ndim))))
            state = tuple(
                jnp.broadcast_to(
                    jnp.zeros_like(like, dtype).reshape(*batch, *(1,) * len(shape)), (*batch, *shape)
                )
                for shape, dtype in self._state_parts(x.dtype)
            )
        else:
            self._check_state(state, batch)
        # Before any product: a product's gradient would multiply a NaN of padding by zero.
        y, state = self._run(tokens.hide(x), tuple(state), tokens)
        return tokens.hide(y), state

    def _checked(self, x: Any, axes: int, wanted: str) -> Array:
        """`x` in the compute dtype."""
        x = jnp.asarray(x)
        if x.ndim < axes or x.shape[-1] != self.features:
            raise ValueError(f"x: got shape {x.shape}, want {wanted} with {self.features} features")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"x: got dtype {x.dtype}, want a floating one")
        return x.astype(jnp.promote_types(x.dtype, self.param_dtype) if self.dtype is None else self.dtype)

    def _check_state(self, state: Any, batch: tuple[int, ...]) -> None:
        parts = self._state_parts(jnp.dtype(self.param_dtype))
        if not isinstance(state, tuple | list) or len(state) != len(parts):
            got = f"{len(state)} of them" if isinstance(state, tuple | list) else type(state).__name__
            raise TypeError(f"state: got {got}, want a tuple of {len(parts)} arrays, as init_state makes")
        for i, (array, (shape, _)) in enumerate(zip(state, parts, strict=True)):
            if jnp.shape(array) != (*batch, *shape):
                raise ValueError(
                    f"state[{i}]: got shape {jnp.shape(array)}, want {(*batch, *shape)}: the leading axes of "
                    "x, then those of one sequence, as init_state makes"
                )

    def _state_parts(self, compute: Any) -> list[tuple[tuple[int, ...], Any]]:
        """Shape without *B, and dtype, of each array of the state, for a compute dtype."""
        raise NotImplementedError

    def _run(self, x: Array, state: State, tokens: Tokens) -> tuple[Array, State]:
        """Output and next state for `x` in the compute dtype, with zeros at padded tokens."""
        raise NotImplementedError


def _flag(name: str, x: Any, kind: Any, lead: tuple[int, ...], wanted: str) -> Array | None:
    if x is None:
        return None
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, kind):
        raise TypeError(f"{name}: got dtype {x.dtype}, want {'bool' if kind is jnp.bool_ else 'integers'}")
    try:
        fits = jnp.broadcast_shapes(x.shape, lead) == lead
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{name}: got shape {x.shape}, want what broadcasts to {wanted} = {lead}")
    return x


def wide(dtype: Any) -> Any:
    """The dtype of states and decays: float32, or float64 if `dtype` is that."""
    return jnp.promote_types(jnp.float32, dtype)


def read(parameter: Any) -> Array:
    """A parameter in the dtype of states, for what has to stay exact: decays, step sizes, their biases."""
    value = parameter[...]
    return value.astype(wide(value.dtype))


def product(x: Array, kernel: Array, out: Any = None) -> Array:
    """`x @ kernel`: the kernel is rounded to the dtype of `x`, then both are widened to `out`, if given.

    Widening is exact. Asking the product for a wider result instead is what XLA's CPU backend cannot do for
    half types with a batch axis, such as `vmap` over parameters makes.
    """
    kernel = kernel.astype(x.dtype)
    if out is not None:
        x, kernel = x.astype(out), kernel.astype(out)
    return dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


def exact_linear(layer: nnx.Linear, x: Array) -> Array:
    """An `nnx.Linear` whose factors are in the compute dtype, but its bias and result in the dtype of states.

    For step sizes and log-decays: rounding these to bfloat16 shifts every later token.
    """
    y = product(x, layer.kernel[...], wide(x.dtype))
    return y if layer.bias is None else y + read(layer.bias)


def conv_parameters(
    width: int, channels: int, param_dtype: Any, rngs: nnx.Rngs
) -> tuple[nnx.Param, nnx.Param]:
    """Weight (W, D), uniform within W**-0.5, and bias (D,), zeros, of a causal depthwise convolution."""
    weight = _init.uniform(width**-0.5)(rngs.params(), (width, channels), param_dtype)
    return nnx.Param(weight), nnx.Param(jnp.zeros((channels,), param_dtype))


def at_least_one(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: got {size}, want at least 1")
