"""The blocks of Mamba-1 and Mamba-2."""

from __future__ import annotations

import math
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
    exact_linear,
    product,
    read,
    wide,
)


class MambaBlock(RecurrentModule):
    """The block of Mamba-1 (arXiv:2312.00752), from input to output projection, without norm and skip.

    `(x, z) = in_proj(input)`; `x = silu(conv(x))`; `(dt, B, C) = x_proj(x)`, dt of low rank;
    `y = selective_scan(x, softplus(dt_proj(dt)), -exp(A_log), B, C, D)`; `output = out_proj(y silu(z))`.

    Args:
      features: channels of input and output.
      expand: the inner width E is expand * features.
      state_size: states per channel, N.
      conv_width: taps of the causal depthwise convolution, W.
      dt_rank: rank R of the step sizes; None is ceil(features / 16).
      dtype: of the computation, None for what inputs and parameters are promoted to. A, the step sizes,
        decays and the state are float32 at least.
      param_dtype: of the parameters.
      rngs: for the initial values; it is not kept.

    State: (window, h): window (*B, W - 1, E), the last inputs of the convolution, in the compute dtype; h
      (*B, E, N) float32 (float64 for float64).

    Raises:
      ValueError: for sizes below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from probjax.nn import MambaBlock
      >>> block = MambaBlock(16, rngs=nnx.Rngs(0))
      >>> y, state = block(jnp.ones((2, 5, 16)), return_state=True)
      >>> y.shape, [part.shape for part in state]
      ((2, 5, 16), [(2, 3, 32), (2, 32, 16)])
    """

    def __init__(
        self,
        features: int,
        *,
        expand: int = 2,
        state_size: int = 16,
        conv_width: int = 4,
        dt_rank: int | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        at_least_one(features=features, expand=expand, state_size=state_size, conv_width=conv_width)
        self.features, self.state_size, self.conv_width = features, state_size, conv_width
        self.inner = inner = expand * features
        self.dt_rank = rank = math.ceil(features / 16) if dt_rank is None else dt_rank
        at_least_one(dt_rank=rank)
        self.dtype, self.param_dtype = dtype, param_dtype
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "dot_general": dot_general, "rngs": rngs}
        self.in_proj = nnx.Linear(features, 2 * inner, use_bias=False, **kinds)
        self.conv_weight, self.conv_bias = conv_parameters(conv_width, inner, param_dtype, rngs)
        self.x_proj = nnx.Linear(inner, rank + 2 * state_size, use_bias=False, **kinds)
        self.dt_proj = nnx.Linear(
            rank,
            inner,
            kernel_init=_init.uniform(rank**-0.5),
            bias_init=_init.step_bias,
            **kinds,
        )
        self.A_log = nnx.Param(_init.s4d_log(inner, state_size, param_dtype))
        self.D = nnx.Param(jnp.ones((inner,), param_dtype))
        self.out_proj = nnx.Linear(inner, features, use_bias=False, **kinds)

    def _state_parts(self, compute: Any) -> list[tuple[tuple[int, ...], Any]]:
        return [
            ((self.conv_width - 1, self.inner), compute),
            ((self.inner, self.state_size), wide(compute)),
        ]

    def _run(self, x: Array, state: State, tokens: Tokens) -> tuple[Array, State]:
        x, z = jnp.split(self.in_proj(x), 2, -1)
        x, window = tokens.run(
            recurrence.causal_conv1d, x, self.conv_weight[...], self.conv_bias[...], state=state[0]
        )
        x = jax.nn.silu(x)
        dt, B, C = jnp.split(self.x_proj(x), (self.dt_rank, self.dt_rank + self.state_size), -1)
        y, last = tokens.run(
            recurrence.selective_scan,
            x,
            exact_linear(self.dt_proj, dt),
            -jnp.exp(read(self.A_log)),
            B,
            C,
            self.D[...],
            dt_softplus=True,
            state=state[1],
        )
        return self.out_proj(y * jax.nn.silu(z)), (window, last)


class Mamba2Block(RecurrentModule):
    """The block of Mamba-2 (arXiv:2405.21060), from input to output projection, without norm and skip.

    `(z, x, B, C, dt) = in_proj(input)`; `(x, B, C) = silu(conv(x, B, C))`; `dt = softplus(dt + dt_bias)`,
    one per head; per head `h_t = exp(dt_t A) h_{t-1} + B_t (dt_t x_t)ᵀ` and `y_t = h_tᵀ C_t + D x_t`, with
    `A = -exp(A_log)`; `output = out_proj(norm_scale rms_norm(y silu(z)))`, the norm taken over each group.
    A starts uniform on [-16, -1], step sizes log-uniform on [0.001, 0.1].

    Args:
      features: channels of input and output.
      expand: the inner width E is expand * features.
      head_size: channels per head, P; H = E / P heads.
      groups: G, of heads that share B and C.
      state_size: states per channel, N.
      conv_width: taps of the causal depthwise convolution, W.
      norm_epsilon: added to the mean square.
      dtype: of the computation, None for what inputs and parameters are promoted to. A, the step sizes,
        decays, the norm and the state are float32 at least.
      param_dtype: of the parameters.
      rngs: for the initial values; it is not kept.

    State: (window, h): window (*B, W - 1, E + 2 G N), the last inputs of the convolution, in the compute
      dtype; h (*B, H, N, P) float32 (float64 for float64).

    Raises:
      ValueError: for sizes below 1, a head size that does not divide E, or groups that do not divide H.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from probjax.nn import Mamba2Block
      >>> block = Mamba2Block(16, head_size=8, state_size=4, rngs=nnx.Rngs(0))
      >>> y, state = block(jnp.ones((2, 5, 16)), return_state=True)
      >>> y.shape, [part.shape for part in state]
      ((2, 5, 16), [(2, 3, 40), (2, 4, 4, 8)])
    """

    def __init__(
        self,
        features: int,
        *,
        expand: int = 2,
        head_size: int = 64,
        groups: int = 1,
        state_size: int = 128,
        conv_width: int = 4,
        norm_epsilon: float = 1e-5,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        at_least_one(features=features, expand=expand, head_size=head_size, groups=groups)
        at_least_one(state_size=state_size, conv_width=conv_width)
        inner = expand * features
        if inner % head_size:
            raise ValueError(
                f"head_size: got {head_size}, want a divisor of the inner width {expand} * {features}"
            )
        heads = inner // head_size
        if heads % groups:
            raise ValueError(f"groups: got {groups}, want a divisor of the {heads} heads")
        self.features, self.inner, self.heads, self.groups = features, inner, heads, groups
        self.head_size, self.state_size, self.conv_width = head_size, state_size, conv_width
        self.norm_epsilon = norm_epsilon
        self.dtype, self.param_dtype = dtype, param_dtype
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "dot_general": dot_general, "rngs": rngs}
        convolved = inner + 2 * groups * state_size
        self.in_proj = nnx.Linear(features, inner + convolved + heads, use_bias=False, **kinds)
        self.conv_weight, self.conv_bias = conv_parameters(conv_width, convolved, param_dtype, rngs)
        self.dt_bias = nnx.Param(_init.step_bias(rngs.params(), (heads,), param_dtype))
        A = jax.random.uniform(rngs.params(), (heads,), jnp.float32, 1, 16)
        self.A_log = nnx.Param(jnp.log(A).astype(param_dtype))
        self.D = nnx.Param(jnp.ones((heads,), param_dtype))
        self.norm_scale = nnx.Param(jnp.ones((inner,), param_dtype))
        self.out_proj = nnx.Linear(inner, features, use_bias=False, **kinds)

    def _state_parts(self, compute: Any) -> list[tuple[tuple[int, ...], Any]]:
        return [
            ((self.conv_width - 1, self.inner + 2 * self.groups * self.state_size), compute),
            ((self.heads, self.state_size, self.head_size), wide(compute)),
        ]

    def _run(self, x: Array, state: State, tokens: Tokens) -> tuple[Array, State]:
        # The step sizes' columns on their own: their result stays in the dtype of states.
        kernel, exact = self.in_proj.kernel[...], wide(x.dtype)
        dt = product(x, kernel[:, -self.heads :], exact)
        z, x = jnp.split(product(x, kernel[:, : -self.heads]), (self.inner,), -1)
        x, window = tokens.run(
            recurrence.causal_conv1d, x, self.conv_weight[...], self.conv_bias[...], state=state[0]
        )
        x, B, C = jnp.split(jax.nn.silu(x), (self.inner, self.inner + self.groups * self.state_size), -1)
        x = x.reshape(*tokens.lead, self.heads, self.head_size)
        B, C = (y.reshape(*tokens.lead, self.groups, self.state_size) for y in (B, C))
        dt = jax.nn.softplus(dt + read(self.dt_bias))
        value = (dt[..., None] * x).astype(x.dtype)
        y, last = tokens.run(recurrence.ssd, C, B, value, -dt * jnp.exp(read(self.A_log)), state=state[1])
        y = y.astype(exact) + read(self.D)[:, None] * x
        return self.out_proj(self._norm(y.reshape(z.shape), z)), (window, last)

    def _norm(self, y: Array, z: Array) -> Array:
        """The gated norm of y in the dtype of states, in the dtype of the gate z."""
        y = y * jax.nn.silu(z.astype(y.dtype))
        groups = y.reshape(*y.shape[:-1], self.groups, self.inner // self.groups)
        square = jnp.mean(groups * groups, -1, keepdims=True)
        y = (groups * jax.lax.rsqrt(square + self.norm_epsilon)).reshape(y.shape)
        return (y * read(self.norm_scale)).astype(z.dtype)
