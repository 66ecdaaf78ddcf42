"""The bare recurrences as cells: LRU, Mamba's selective state space, and its dual form with one head."""

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
    exact_linear,
    product,
    read,
    wide,
)


class LRUCell(RecurrentModule):
    """Linear recurrent unit (arXiv:2303.06349): a diagonal, complex, linear recurrence.

    `h_t = λ h_{t-1} + exp(gamma) B x_t`, `y_t = Re(C h_t) + D x_t`, `λ = exp(-exp(nu) + i exp(theta))`.

    λ starts uniform in area on the ring r_min <= |λ| <= r_max, gamma at log sqrt(1 - |λ|²), so that states
    have variance 1 for white inputs. D is a matrix, as in a dense layer, not the paper's vector; it starts
    with variance 1 / features, B and C with such variances that the output's is about 2.

    Args:
      features: channels of input and output, D.
      state_size: complex numbers of the state, N; `features` by default.
      r_min, r_max: the ring that |λ| is drawn from, 0 <= r_min <= r_max <= 1.
      max_phase: the phase of λ is uniform on (0, max_phase], in radians.
      dtype: of the computation, None for what inputs and parameters are promoted to. The state, λ and gamma
        are float32 (complex64) at least.
      param_dtype: of the parameters.
      rngs: for the initial values; it is not kept.

    State: (h,), h (*B, N) complex64 (complex128 for float64).

    Raises:
      ValueError: for sizes below 1, or radii that make no ring.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from probjax.nn import LRUCell
      >>> cell = LRUCell(8, rngs=nnx.Rngs(0))
      >>> y, state = cell(jnp.ones((2, 5, 8)), return_state=True)
      >>> y.shape, state[0].dtype
      ((2, 5, 8), dtype('complex64'))
    """

    def __init__(
        self,
        features: int,
        state_size: int | None = None,
        *,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 2 * math.pi,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.features, self.state_size = features, _size(features, state_size)
        self.dtype, self.param_dtype = dtype, param_dtype
        if not 0 <= r_min <= r_max <= 1 or r_min == 1:
            raise ValueError(
                f"r_min, r_max: got {r_min}, {r_max}, want 0 <= r_min <= r_max <= 1 and r_min < 1"
            )
        N = self.state_size
        decay = _init.ring(rngs.params(), (N,), r_min, r_max)
        phase = max_phase * (1 - jax.random.uniform(rngs.params(), (N,), jnp.float32))  # never 0
        self.nu = nnx.Param(jnp.log(decay).astype(param_dtype))
        self.theta = nnx.Param(jnp.log(phase).astype(param_dtype))
        # 1 - |λ|² as it is written loses all digits at |λ| close to 1.
        self.gamma = nnx.Param((0.5 * jnp.log(-jnp.expm1(-2 * decay))).astype(param_dtype))

        def normal(rows: int, columns: int, variance: float) -> nnx.Param:
            return nnx.Param(
                math.sqrt(variance) * jax.random.normal(rngs.params(), (rows, columns), param_dtype)
            )

        self.B_re, self.B_im = (normal(features, N, 1 / (2 * features)) for _ in range(2))
        self.C_re, self.C_im = (normal(N, features, 1 / N) for _ in range(2))
        self.D = normal(features, features, 1 / features)

    def _state_parts(self, compute: Any) -> list[tuple[tuple[int, ...], Any]]:
        return [((self.state_size,), jnp.promote_types(wide(compute), jnp.complex64))]

    def _run(self, x: Array, state: State, tokens: Tokens) -> tuple[Array, State]:
        exact = wide(x.dtype)
        rate, angle = jnp.exp(read(self.nu)).astype(exact), jnp.exp(read(self.theta)).astype(exact)
        a = jnp.exp(jax.lax.complex(-rate, angle))
        # gamma joins B, real and imaginary parts one product each way: fewer passes over (L, N) arrays.
        B = jnp.concatenate([read(self.B_re), read(self.B_im)], 1) * jnp.tile(jnp.exp(read(self.gamma)), 2)
        b = product(x, B, exact)
        h, last = tokens.run(
            recurrence.linear_scan,
            a,
            jax.lax.complex(b[..., : self.state_size], b[..., self.state_size :]),
            state=state[0],
        )
        parts = jnp.concatenate([h.real, h.imag], -1).astype(x.dtype)
        C = jnp.concatenate([self.C_re[...], -self.C_im[...]], 0)
        return product(parts, C) + product(x, self.D[...]), (last,)


class MambaCell(RecurrentModule):
    """The selective state space of Mamba (arXiv:2312.00752) without the block around it.

    `dt = softplus(to_dt x)`, and per channel `h_t = exp(dt_t A) h_{t-1} + dt_t (to_B x_t) x_t`,
    `y_t = (to_C x_t) · h_t + D x_t`, with `A = -exp(A_log)`. No convolution, gate, expansion or low-rank step
    size: these are `MambaBlock`'s. A starts at -1 … -N (S4D-real), D at 1, the bias of `to_dt` at step
    sizes that are log-uniform on [0.001, 0.1].

    Args:
      features: channels, D.
      state_size: states per channel, N; `features` by default.
      dtype: of the computation, None for what inputs and parameters are promoted to. A, the step sizes,
        decays and the state are float32 at least.
      param_dtype: of the parameters.
      rngs: for the initial values; it is not kept.

    State: (h,), h (*B, D, N) float32 (float64 for float64).

    Raises:
      ValueError: for sizes below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from probjax.nn import MambaCell
      >>> cell = MambaCell(8, state_size=4, rngs=nnx.Rngs(0))
      >>> y, state = cell.step(jnp.ones((2, 8)), cell.init_state(2))
      >>> y.shape, state[0].shape
      ((2, 8), (2, 8, 4))
    """

    def __init__(
        self,
        features: int,
        state_size: int | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.features, self.state_size = features, _size(features, state_size)
        self.dtype, self.param_dtype = dtype, param_dtype
        N = self.state_size
        self.A_log = nnx.Param(_init.s4d_log(features, N, param_dtype))
        self.D = nnx.Param(jnp.ones((features,), param_dtype))
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "dot_general": dot_general, "rngs": rngs}
        self.to_B = nnx.Linear(features, N, **kinds)
        self.to_C = nnx.Linear(features, N, **kinds)
        self.to_dt = nnx.Linear(features, features, bias_init=_init.step_bias, **kinds)

    def _state_parts(self, compute: Any) -> list[tuple[tuple[int, ...], Any]]:
        return [((self.features, self.state_size), wide(compute))]

    def _run(self, x: Array, state: State, tokens: Tokens) -> tuple[Array, State]:
        y, last = tokens.run(
            recurrence.selective_scan,
            x,
            exact_linear(self.to_dt, x),
            -jnp.exp(read(self.A_log)),
            self.to_B(x),
            self.to_C(x),
            self.D[...],
            dt_softplus=True,
            state=state[0],
        )
        return y, (last,)


class SSDCell(RecurrentModule):
    """Gated linear attention with one head: Mamba-2's dual form (arXiv:2405.21060) without its block.

    `h_t = exp(-softplus(decay x_t)) h_{t-1} + (key x_t) (value x_t)ᵀ`, `y_t = h_tᵀ (query x_t)`.

    The decay lies between 0 and 1 whatever the logit, so states stay bounded. `query` starts with variance
    1 / N, so that query · key is of size 1.

    Args:
      features: channels, D, also of the values.
      state_size: size of queries and keys, N; `features` by default.
      dtype: of the computation, None for what inputs and parameters are promoted to. Log-decays and the state
        are float32 at least.
      param_dtype: of the parameters.
      rngs: for the initial values; it is not kept.

    State: (h,), h (*B, 1, N, D) float32 (float64 for float64); the axis of size 1 is the head.

    Raises:
      ValueError: for sizes below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from probjax.nn import SSDCell
      >>> cell = SSDCell(8, rngs=nnx.Rngs(0))
      >>> cell(jnp.ones((3, 8)), mask=jnp.array([True, True, False])).shape
      (3, 8)
    """

    def __init__(
        self,
        features: int,
        state_size: int | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.features, self.state_size = features, _size(features, state_size)
        self.dtype, self.param_dtype = dtype, param_dtype
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "dot_general": dot_general, "rngs": rngs}
        small = nnx.initializers.variance_scaling(1 / self.state_size, "fan_in", "truncated_normal")
        self.query = nnx.Linear(features, self.state_size, kernel_init=small, **kinds)
        self.key = nnx.Linear(features, self.state_size, **kinds)
        self.value = nnx.Linear(features, features, **kinds)
        self.decay = nnx.Linear(features, 1, **kinds)

    def _state_parts(self, compute: Any) -> list[tuple[tuple[int, ...], Any]]:
        return [((1, self.state_size, self.features), wide(compute))]

    def _run(self, x: Array, state: State, tokens: Tokens) -> tuple[Array, State]:
        query, key, value = (layer(x)[..., None, :] for layer in (self.query, self.key, self.value))
        log_decay = -jax.nn.softplus(exact_linear(self.decay, x))
        y, last = tokens.run(recurrence.ssd, query, key, value, log_decay, state=state[0])
        return y[..., 0, :], (last,)


def _size(features: int, state_size: int | None) -> int:
    state_size = features if state_size is None else state_size
    at_least_one(features=features, state_size=state_size)
    return state_size
