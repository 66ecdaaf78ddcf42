"""Griffin's recurrent block, around the real-gated linear recurrent unit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from probjax import recurrence
from probjax.nn import _init
from probjax.nn._cpu import dot_general
from probjax.nn._module import (
    Array,
    RecurrentModule,
    State,
    Tokens,
    at_least_one,
    conv_parameters,
    read,
    wide,
)

GATE_POWER = 8.0
"""c of the paper: the decay is exp(-softplus(Lambda)) to the power c times the recurrence gate."""
STEEPEST = 1000.0
"""Bound of the derivative of the square root in the multiplier sqrt(1 - a²), as RecurrentGemma has it."""


class RGLRUBlock(RecurrentModule):
    """Griffin's recurrent block with the RG-LRU (arXiv:2402.19427), without norm and skip.

    `gate = gelu(linear_gate(input))`; `x = conv(linear_x(input))`; then the RG-LRU, per channel
    `log a_t = -8 sigmoid(recurrence_gate(x_t)) softplus(Lambda)` and
    `h_t = a_t h_{t-1} + sqrt(1 - a_t²) sigmoid(input_gate(x_t)) x_t`; `output = linear_out(h gate)`. The two
    inner gates are block-diagonal, GELU is its tanh form. exp(-softplus(Lambda)) starts uniform in area on
    the ring [0.9, 0.999].

    At the first token of a document the multiplier sqrt(1 - a²) is 1, as nothing was there to be mixed
    with. Documents start where `reset` or `segment_ids` say so, and at the first valid token after
    `init_state` or without a state; the last entry of the state says whether one has begun, so that any
    split of a call equals the whole. Padding starts none: after left padding, the first valid token has the
    multiplier 1.

    The square root's slope grows without bound where a goes to 1: its derivative is held to 1000, which keeps
    those of higher order finite too.

    Args:
      features: channels of input and output.
      width: inner channels, E; `features` by default.
      blocks: of the block-diagonal gates, K; they divide the width.
      conv_width: taps of the causal depthwise convolution, W.
      dtype: of the computation, None for what inputs and parameters are promoted to. Gates of the recurrence,
        decays, multiplier and the state are float32 at least.
      param_dtype: of the parameters.
      rngs: for the initial values; it is not kept.

    State: (window, h, begun): window (*B, W - 1, E), the last inputs of the convolution, in the compute
      dtype; h (*B, E); begun (*B), 1 where the document has a token already, else 0. The last two are
      float32 (float64 for float64); `begun` too, so that the whole state can be differentiated.

    Raises:
      ValueError: for sizes below 1, or blocks that do not divide the width.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from probjax.nn import RGLRUBlock
      >>> block = RGLRUBlock(16, rngs=nnx.Rngs(0))
      >>> y, state = block.step(jnp.ones((2, 16)), block.init_state(2))
      >>> y.shape, [part.shape for part in state]
      ((2, 16), [(2, 3, 16), (2, 16), (2,)])
    """

    def __init__(
        self,
        features: int,
        *,
        width: int | None = None,
        blocks: int = 8,
        conv_width: int = 4,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.width = width = features if width is None else width
        at_least_one(features=features, width=width, blocks=blocks, conv_width=conv_width)
        if width % blocks:
            raise ValueError(f"blocks: got {blocks}, want a divisor of the width {width}")
        self.features, self.conv_width = features, conv_width
        self.dtype, self.param_dtype = dtype, param_dtype
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "dot_general": dot_general, "rngs": rngs}
        self.linear_x = nnx.Linear(features, width, **kinds)
        self.linear_gate = nnx.Linear(features, width, **kinds)
        self.conv_weight, self.conv_bias = conv_parameters(conv_width, width, param_dtype, rngs)
        self.input_gate = _BlockDiagonal(width, blocks, param_dtype=param_dtype, rngs=rngs)
        self.recurrence_gate = _BlockDiagonal(width, blocks, param_dtype=param_dtype, rngs=rngs)
        decay = _init.ring(rngs.params(), (width,), 0.9, 0.999)
        self.Lambda = nnx.Param(_init.inverse_softplus(decay).astype(param_dtype))
        self.linear_out = nnx.Linear(width, features, **kinds)

    def _state_parts(self, compute: Any) -> list[tuple[tuple[int, ...], Any]]:
        exact = wide(compute)
        return [((self.conv_width - 1, self.width), compute), ((self.width,), exact), ((), exact)]

    def _run(self, x: Array, state: State, tokens: Tokens) -> tuple[Array, State]:
        gate = jax.nn.gelu(self.linear_gate(x), approximate=True)
        x, window = tokens.run(
            recurrence.causal_conv1d,
            self.linear_x(x),
            self.conv_weight[...],
            self.conv_bias[...],
            state=state[0],
        )
        log_a = -GATE_POWER * jax.nn.sigmoid(self.recurrence_gate(x)) * jax.nn.softplus(read(self.Lambda))
        multiplier = bounded_sqrt(-jnp.expm1(2 * log_a))
        start, begun = tokens.starts(state[2] > 0)
        multiplier = jnp.where(start[..., None], 1, multiplier)
        h, last = tokens.run(
            recurrence.linear_scan,
            jnp.exp(log_a),
            multiplier * jax.nn.sigmoid(self.input_gate(x)) * x,
            state=state[1],
        )
        y = self.linear_out(h.astype(x.dtype) * gate)
        return y, (window, last, begun.astype(last.dtype))


class _BlockDiagonal(nnx.Module):
    """A linear layer with a block-diagonal kernel; its result is in the dtype of states."""

    def __init__(self, width: int, blocks: int, *, param_dtype: Any, rngs: nnx.Rngs):
        size = width // blocks
        kernel = jax.random.normal(rngs.params(), (blocks, size, size), param_dtype)
        self.kernel = nnx.Param(kernel * size**-0.5)
        self.bias = nnx.Param(jnp.zeros((width,), param_dtype))

    def __call__(self, x: Array) -> Array:
        kernel, exact = self.kernel[...].astype(x.dtype), wide(x.dtype)
        parts = x.reshape(*x.shape[:-1], *kernel.shape[:2])
        y = jnp.einsum("...ki,kij->...kj", parts.astype(exact), kernel.astype(exact))
        return y.reshape(x.shape) + read(self.bias)


@jax.custom_jvp
def bounded_sqrt(x: Array) -> Array:
    """sqrt(x) for x >= 0 with a derivative of at most `STEEPEST`, also at 0, where it is infinite."""
    return jnp.sqrt(x)


@bounded_sqrt.defjvp
def _bounded_sqrt_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    # 1 / (2 sqrt x) with the argument of the root held away from 0: every higher derivative is finite too.
    return bounded_sqrt(x), tangent * jax.lax.rsqrt(jnp.maximum(4 * x, STEEPEST**-2))
