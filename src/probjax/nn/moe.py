"""Mixture of experts: each token goes through a few of many MLPs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from probjax.nn._cpu import dot_general
from probjax.nn._module import _flag, at_least_one, wide

Array = jax.Array

DISPATCHES = ("sorted", "dense")

FEWEST_ROWS, MOST_ROWS = 8, 512
"""Tokens of one tile of products, see `tile_rows` and docs/models.md."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoEAux:
    """What a call of `MixtureOfExperts` says of its routing; float32, masked tokens left out.

    Attributes:
      load_balance_loss: (), E Σ_e p_e f_e, with the mean router probability p and the fraction f of
        assignments of each expert: 1 if either is uniform (Fedus et al., arXiv:2101.03961).
      z_loss: (), the mean of logsumexp(logits)² (Zoph et al., arXiv:2202.08906).
      expert_fraction: (E,), f.
      overflow: (), the fraction of assignments that were dropped.
    """

    load_balance_loss: Array
    z_loss: Array
    expert_fraction: Array
    overflow: Array


class MixtureOfExperts(nnx.Module):
    """Experts, each a gated MLP `down(silu(gate x) · up x)`, of which every token takes the best few.

    The router's logits are float32 products at full precision, whatever the dtype; of the chosen experts'
    logits a softmax gives the weights. Of equal logits the expert with the lower number is chosen.

    Args:
      features: channels of inputs and outputs, D.
      hidden_features: hidden units of each expert.
      num_experts: E.
      num_selected: experts per token, k.
      capacity_factor: None, and no assignment is dropped; or a number f: each expert takes at most
        max(1, ceil(f N k / E)) of the N tokens' assignments (masked tokens count in N), the others are
        dropped, second choices before first ones and later tokens before earlier ones.
      dispatch: "sorted": an expert computes what it is given. "dense": every expert computes every token, a
        reference, E / k times the work.
      jitter: the router's inputs are multiplied by numbers from [1 - jitter, 1 + jitter) where a call is
        given a key.
      dtype: of the experts' computation, None for what inputs and parameters are promoted to.
      param_dtype: of the parameters.
      rngs: for the initial values; it is not kept.

    Raises:
      ValueError: for sizes below 1, more choices than experts, or factors out of range.

    Sharding: parameters have the experts as their first axis; with `dispatch="dense"` or a capacity they may
    be sharded along it.

    Source: Shazeer et al., arXiv:1701.06538; without drops as in Gale et al., arXiv:2211.15841.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from probjax.nn import MixtureOfExperts
      >>> experts = MixtureOfExperts(16, 32, num_experts=4, rngs=nnx.Rngs(0))
      >>> y, aux = experts(jnp.ones((2, 10, 16)))
      >>> y.shape, float(aux.overflow)
      ((2, 10, 16), 0.0)
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        num_experts: int,
        *,
        num_selected: int = 2,
        capacity_factor: float | None = None,
        dispatch: str = "sorted",
        jitter: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        at_least_one(features=features, hidden_features=hidden_features, num_experts=num_experts)
        if not 1 <= num_selected <= num_experts:
            raise ValueError(
                f"num_selected: got {num_selected}, want 1 to {num_experts}, the number of experts"
            )
        if dispatch not in DISPATCHES:
            raise ValueError(f"dispatch: got {dispatch!r}, want one of {', '.join(map(repr, DISPATCHES))}")
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise ValueError(f"capacity_factor: got {capacity_factor}, want None or a number above 0")
        if capacity_factor is not None and dispatch == "dense":
            raise ValueError('capacity_factor: got one with dispatch="dense", want None: that drops nothing')
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter: got {jitter}, want a number in [0, 1)")
        self.features, self.num_experts, self.num_selected = features, num_experts, num_selected
        self.capacity_factor, self.dispatch, self.jitter = capacity_factor, dispatch, jitter
        self.dtype, self.param_dtype = dtype, param_dtype
        init = nnx.initializers.lecun_normal(batch_axis=0)
        shapes = {"gate": (features, hidden_features), "up": (features, hidden_features)}
        shapes["down"] = (hidden_features, features)
        flat = nnx.initializers.lecun_normal()
        self.router = nnx.Param(flat(rngs.params(), (features, num_experts), param_dtype))
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(init(rngs.params(), (num_experts, *shape), param_dtype)))

    def __call__(self, x: Array, *, mask: Any = None, key: Array | None = None) -> tuple[Array, MoEAux]:
        """Routes and computes.

        Args:
          x: (*B, features), floating; *B any leading axes, also none.
          mask: bool, broadcasts to *B: a token that is False is padding. Its output is zero, it takes no
            expert's capacity, and nothing of it, not even a NaN, reaches an output or a gradient.
          key: a key draws the jitter; None leaves it out.

        Returns:
          y: (*B, features) in the dtype of the computation; zero where all of a token's choices were dropped.
          aux: losses and statistics. Nothing adds them to a loss but the caller.

        Raises:
          ValueError, TypeError: for shapes and dtypes that do not fit.
        """
        x = jnp.asarray(x)
        if x.ndim < 1 or x.shape[-1] != self.features:
            raise ValueError(f"x: got shape {x.shape}, want (*B, {self.features})")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"x: got dtype {x.dtype}, want a floating one")
        lead = x.shape[:-1]
        mask = _flag("mask", mask, jnp.bool_, lead, "*B")
        x = x.reshape(math.prod(lead), self.features)
        valid = None if mask is None else jnp.broadcast_to(mask, lead).reshape(-1)
        if valid is not None:
            x = jnp.where(valid[:, None], x, jnp.zeros((), x.dtype))
        chosen, weights, routing = self._route(x, valid, key)
        dtype = jnp.promote_types(x.dtype, self.param_dtype) if self.dtype is None else self.dtype
        x = x.astype(dtype)
        experts = tuple(p[...] for p in (self.gate, self.up, self.down))
        dropped = jnp.zeros((), jnp.float32)
        if self.dispatch == "dense" or x.shape[0] == 0:
            y = self._dense(x, experts, chosen, weights)
        else:
            y, dropped = self._sparse(x, experts, chosen, weights)
        balance, z, fraction = routing
        aux = MoEAux(balance, z, fraction, dropped)
        return y.astype(dtype).reshape(*lead, self.features), aux

    def _route(
        self, x: Array, valid: Array | None, key: Array | None
    ) -> tuple[Array, Array, tuple[Array, Array, Array]]:
        """Chosen experts (k, N), E where a token is padding; weights (k, N); the first fields of `MoEAux`."""
        E = self.num_experts
        exact = wide(jnp.promote_types(x.dtype, self.param_dtype))
        inputs = x.astype(exact)
        if key is not None and self.jitter:
            low, high = 1 - self.jitter, 1 + self.jitter
            inputs = inputs * jax.random.uniform(key, inputs.shape, exact, low, high)
        logits = jnp.matmul(inputs, self.router[...].astype(exact), precision="highest")
        best, chosen = lax.top_k(logits, self.num_selected)
        weights = jax.nn.softmax(best, -1)
        if valid is not None:
            chosen = jnp.where(valid[:, None], chosen, E)
            weights = jnp.where(valid[:, None], weights, 0)
        counted = jnp.ones(x.shape[0], exact) if valid is None else valid.astype(exact)
        number = jnp.maximum(jnp.sum(counted), 1)
        fraction = jnp.sum(jax.nn.one_hot(chosen, E, dtype=exact), (0, 1)) / (number * self.num_selected)
        probability = counted @ jax.nn.softmax(logits, -1) / number
        z = counted @ jax.nn.logsumexp(logits, -1) ** 2 / number
        balance = E * jnp.sum(probability * fraction)
        routing = balance.astype(jnp.float32), z.astype(jnp.float32), fraction.astype(jnp.float32)
        return chosen.T, weights.T, routing

    def _dense(self, x: Array, experts: tuple[Array, ...], chosen: Array, weights: Array) -> Array:
        gate, up, down = (w.astype(x.dtype) for w in experts)
        out = _batched(_glu(_all(x, gate), _all(x, up)), down)
        # (k, N, E) of a few: what each expert's result counts.
        share = jnp.sum(jax.nn.one_hot(chosen, self.num_experts, dtype=weights.dtype) * weights[..., None], 0)
        return jnp.einsum("end,ne->nd", out.astype(share.dtype), share)

    def _sparse(
        self, x: Array, experts: tuple[Array, ...], chosen: Array, weights: Array
    ) -> tuple[Array, Array]:
        k, N = chosen.shape
        E = self.num_experts
        flat = chosen.reshape(-1)
        # Which assignment of its expert each is, first choices before second ones.
        onto = flat[:, None] == jnp.arange(E)
        rank = jnp.sum(jnp.where(onto, jnp.cumsum(onto, 0, dtype=jnp.int32), 0), -1) - 1
        sizes = jnp.sum(onto, 0, dtype=jnp.int32)
        real, expert = flat < E, jnp.minimum(flat, E - 1)
        token = jnp.tile(jnp.arange(N, dtype=jnp.int32), k)
        dropped = jnp.zeros((), jnp.float32)
        if self.capacity_factor is not None:
            capacity = max(1, math.ceil(self.capacity_factor * N * k / E))
            keep = real & (rank < capacity)
            dropped = jnp.sum(real & ~keep) / jnp.maximum(jnp.sum(real), 1).astype(jnp.float32)
            slot = jnp.where(keep, expert * capacity + rank, E * capacity)
            held = _put(x, token, slot, E * capacity).reshape(E, capacity, self.features)
            gate, up, down = (w.astype(x.dtype) for w in experts)
            out = _batched(_glu(_batched(held, gate), _batched(held, up)), down)
            y = _get(out.reshape(E * capacity, self.features), slot)
        else:
            y = _tiled(x, token, expert, rank, real, sizes, experts)
        y = jnp.sum(y.reshape(k, N, self.features).astype(weights.dtype) * weights[..., None], 0)
        return y, dropped


def _tiled(
    x: Array, token: Array, expert: Array, rank: Array, real: Array, sizes: Array, kernels: tuple[Array, ...]
) -> Array:
    """Results (k N, D) of all assignments: tiles of tokens, each with a copy of its expert's kernels."""
    E, M = sizes.shape[0], token.shape[0]
    rows = tile_rows(M, E)
    count = M // rows + (min(E, M) if isinstance(M, int) else E)
    # Tiles of each expert, and where they begin.
    tiles = -(-sizes // rows)
    begin = jnp.cumsum(tiles) - tiles
    slot = jnp.where(real, begin[expert] * rows + rank, count * rows)
    of_tile = jnp.searchsorted(jnp.cumsum(tiles), jnp.arange(count), side="right")
    # Rounded after the copy: the gradient adds up the tiles of an expert in the parameters' dtype.
    gate, up, down = (w[jnp.minimum(of_tile, E - 1)].astype(x.dtype) for w in kernels)
    held = _put(x, token, slot, count * rows).reshape(count, rows, x.shape[-1])
    out = _batched(_glu(_batched(held, gate), _batched(held, up)), down)
    return _get(out.reshape(count * rows, x.shape[-1]), slot)


def tile_rows(assignments: Any, experts: int) -> int:
    """Tokens of a tile: a power of two near half of what an expert gets, within bounds.

    More and less is slower: each tile copies kernels, and the last one of each expert is padded.
    """
    # A symbolic number of tokens, as in an exported program, cannot be compared.
    if not isinstance(assignments, int):
        return MOST_ROWS // 4
    near = 2 ** math.floor(math.log2(max(assignments / (2 * experts), 1)))
    return min(max(near, FEWEST_ROWS), MOST_ROWS, assignments)


def _put(x: Array, token: Array, slot: Array, count: int) -> Array:
    """Rows of x (N, D) at their slots, (count, D); the other slots are zero."""
    source = jnp.full((count,), x.shape[0], jnp.int32).at[slot].set(token, mode="drop", unique_indices=True)
    return x.at[source].get(mode="fill", fill_value=0)


def _get(out: Array, slot: Array) -> Array:
    """The rows at some slots; zero for slots beyond the last."""
    return out.at[slot].get(mode="fill", fill_value=0)


def _glu(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


def _all(x: Array, kernels: Array) -> Array:
    """(N, D) through every kernel (E, D, H): (E, N, H)."""
    return jnp.moveaxis(dot_general(x, kernels, (((1,), (1,)), ((), ()))), 1, 0)


def _batched(x: Array, kernels: Array) -> Array:
    return dot_general(x, kernels, (((2,), (1,)), ((0,), (0,))))
