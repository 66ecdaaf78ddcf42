"""The UNet, in one, two or three spatial dimensions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from probjax.nn._cpu import dot_general
from probjax.nn._module import at_least_one
from probjax.nn._stack import check_remat, rematerialised
from probjax.nn.attention import MultiHeadAttention
from probjax.nn.mlp import check_rate, dropout, fold
from probjax.nn.transformer import wants

Array = jax.Array

_MOST_GROUPS = 32


def groups_of(channels: int) -> int:
    """Groups of a group norm: the most up to 32 that divide the channels into groups of two or more.

    A group of one channel at one position, as narrow networks have at the bottom, would be normed to zero.
    """
    most = max(1, min(_MOST_GROUPS, channels // 2))
    return max(n for n in range(1, most + 1) if channels % n == 0)


class ResidualBlock(nnx.Module):
    """Norm, SiLU, convolution, twice, beside a linear skip: (B, *spatial, in) to (B, *spatial, out).

    A condition scales and shifts what follows the second norm. Arguments as in `UNet`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: tuple[int, ...],
        *,
        condition_features: int | None,
        dropout_rate: float,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.dropout_rate = dropout_rate
        self.norm1 = nnx.GroupNorm(in_channels, groups_of(in_channels), **kinds)
        self.conv1 = nnx.Conv(in_channels, out_channels, kernel_size, **kinds)
        self.norm2 = nnx.GroupNorm(out_channels, groups_of(out_channels), **kinds)
        self.conv2 = nnx.Conv(out_channels, out_channels, kernel_size, **kinds)
        self.skip = nnx.Linear(in_channels, out_channels, use_bias=False, dot_general=dot_general, **kinds)
        if condition_features is not None:
            zeros = nnx.initializers.zeros_init()
            self.modulation = nnx.Linear(
                condition_features, 2 * out_channels, kernel_init=zeros, dot_general=dot_general, **kinds
            )

    def __call__(self, x: Array, condition: Array | None, key: Array | None) -> Array:
        h = self.conv1(jax.nn.silu(self.norm1(x)))
        h = self.norm2(h)
        if condition is not None:
            parts = self.modulation(jax.nn.silu(condition))
            scale, shift = jnp.split(parts.reshape(len(parts), *(1,) * (x.ndim - 2), parts.shape[-1]), 2, -1)
            h = h * (1 + scale) + shift
        h = dropout(jax.nn.silu(h), self.dropout_rate, key)
        return self.conv2(h) + self.skip(x)


class SpatialAttention(nnx.Module):
    """Attention of all positions to each other, and then to a context: (B, *spatial, C) to the same."""

    def __init__(
        self, channels: int, num_heads: int, context_features: int | None, attention_fn: Any, **kinds: Any
    ):
        heads = {"attention_fn": attention_fn, **kinds} if attention_fn else kinds
        self.norm = nnx.GroupNorm(channels, groups_of(channels), **kinds)
        self.attention = MultiHeadAttention(num_heads, channels, **heads)
        if context_features is not None:
            self.context_norm = nnx.LayerNorm(channels, **kinds)
            self.context_attention = MultiHeadAttention(
                num_heads, channels, in_kv_features=context_features, **heads
            )

    def __call__(self, x: Array, context: Array | None, context_mask: Any) -> Array:
        h = self.norm(x).reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
        y = x.reshape(h.shape) + self.attention(h)
        if context is not None:
            y = y + self.context_attention(self.context_norm(y), context, mask=context_mask)
        return y.reshape(x.shape)


class UNet(nnx.Module):
    """A UNet: (*B, *spatial, in_channels) to (*B, *spatial, out_channels), with any spatial sizes.

    Each stage has residual blocks of one width, and attention where wanted; between stages a convolution
    halves the resolution, and on the way up one doubles it. Every stage's result, and the first projection,
    are put beside what comes up.

    Args:
      in_channels: of the inputs.
      out_channels: of the outputs; None is `in_channels`.
      spatial_rank: spatial axes: 1, 2 or 3.
      channels: width of each stage, from the full resolution down.
      blocks_per_stage: residual blocks of each stage on each way; two more stand in the middle.
      kernel_size: taps of the convolutions along each spatial axis; an int is the same along all.
      strides: by what each spatial axis shrinks between stages; an int is the same along all. The
        convolutions that change the resolution have 2 taps per step along axes that shrink, else 1.
      attention: for each stage, whether attention follows its blocks, on both ways; None is nowhere.
      num_heads: of the attention; each has channels / num_heads channels.
      condition_features: None, or the channels of a vector such as an embedding of the time, that scales and
        shifts what follows the second norm of each block.
      context_features: None, or the channels of a context that every attention reads too.
      dropout_rate: before the second convolution of each block, where a call is given a key.
      attention_fn: as in `MultiHeadAttention`; None is probjax's.
      remat: what the backward pass keeps of each block, as in `Transformer`.
      dtype: of the computation, None for what inputs and parameters are promoted to.
      param_dtype: of the parameters.
      rngs: for the initial values; it is not kept.

    Raises:
      ValueError: for sizes, ranks and lengths that do not fit.

    Source: Ronneberger et al., arXiv:1505.04597; residual blocks as in Ho et al., arXiv:2006.11239.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from probjax.nn import UNet
      >>> model = UNet(3, spatial_rank=2, channels=(8, 16), attention=(False, True), rngs=nnx.Rngs(0))
      >>> model(jnp.ones((2, 9, 12, 3))).shape
      (2, 9, 12, 3)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        *,
        spatial_rank: int,
        channels: Sequence[int] = (64, 128, 256),
        blocks_per_stage: int = 1,
        kernel_size: int | Sequence[int] = 3,
        strides: int | Sequence[int] = 2,
        attention: Sequence[bool] | None = None,
        num_heads: int = 8,
        condition_features: int | None = None,
        context_features: int | None = None,
        dropout_rate: float = 0.0,
        attention_fn: Callable[..., Any] | None = None,
        remat: str = "none",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if spatial_rank not in (1, 2, 3):
            raise ValueError(f"spatial_rank: got {spatial_rank!r}, want 1, 2 or 3")
        channels = tuple(channels)
        out_channels = in_channels if out_channels is None else out_channels
        at_least_one(in_channels=in_channels, out_channels=out_channels, blocks_per_stage=blocks_per_stage)
        at_least_one(**{f"channels[{i}]": width for i, width in enumerate(channels)})
        if not channels:
            raise ValueError("channels: got none, want the width of at least one stage")
        attention = (False,) * len(channels) if attention is None else tuple(attention)
        if len(attention) != len(channels):
            raise ValueError(f"attention: got {len(attention)} flags, want one per stage, {len(channels)}")
        for width, wanted in zip(channels, attention, strict=True):
            if wanted and width % num_heads:
                raise ValueError(f"num_heads: got {num_heads}, want a divisor of a stage's {width} channels")
        if context_features is not None and not any(attention):
            raise ValueError("context_features: got some, want attention in at least one stage to read them")
        taps = _per_axis("kernel_size", kernel_size, spatial_rank)
        steps = _per_axis("strides", strides, spatial_rank)
        resampling = {
            "kernel_size": tuple(1 if step == 1 else 2 * step for step in steps),
            "strides": steps,
        }
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.in_channels, self.out_channels, self.spatial_rank = in_channels, out_channels, spatial_rank
        self.channels, self.attention_stages = channels, attention
        self.condition_features, self.context_features = condition_features, context_features
        self.dropout_rate, self.remat = check_rate("dropout_rate", dropout_rate), check_remat(remat)

        def block(width: int, out: int) -> ResidualBlock:
            return ResidualBlock(
                width, out, taps, condition_features=condition_features, dropout_rate=dropout_rate, **kinds
            )

        def attend(width: int, wanted: bool) -> SpatialAttention | None:
            return (
                SpatialAttention(width, num_heads, context_features, attention_fn, **kinds)
                if wanted
                else None
            )

        def stage(width: int, first: int, wanted: bool) -> nnx.List:
            ends = [(first, width)] + [(width, width)] * (blocks_per_stage - 1)
            return nnx.List([_Step(block(*end), attend(width, wanted)) for end in ends])

        pairs = list(itertools.pairwise(channels))
        stages = list(zip(channels, attention, strict=True))
        self.embed = nnx.Linear(in_channels, channels[0], use_bias=False, dot_general=dot_general, **kinds)
        self.down = nnx.List([stage(width, width, wanted) for width, wanted in stages])
        self.shrink = nnx.List([nnx.Conv(a, b, **resampling, **kinds) for a, b in pairs])
        deepest, wanted = stages[-1]
        self.middle = nnx.List(
            [_Step(block(deepest, deepest), attend(deepest, wanted and i == 0)) for i in range(2)]
        )
        self.up = nnx.List([stage(width, 2 * width, wanted) for width, wanted in stages])
        self.grow = nnx.List([nnx.ConvTranspose(b, a, **resampling, **kinds) for a, b in pairs])
        self.head = nnx.Linear(
            2 * channels[0], out_channels, use_bias=False, dot_general=dot_general, **kinds
        )

    def __call__(
        self,
        x: Array,
        *,
        condition: Array | None = None,
        context: Array | None = None,
        context_mask: Any = None,
        dropout_key: Array | None = None,
    ) -> Array:
        """Runs the network.

        Args:
          x: (*B, *spatial, in_channels), floating; *B any leading axes, also none.
          condition: (*B, condition_features), where the network takes one.
          context: (*B, S, context_features), where the network takes one.
          context_mask: which entries of the context are seen: bool, broadcasts to (*B, S).
          dropout_key: a key draws dropout; None leaves it out.

        Returns:
          (*B, *spatial, out_channels) in the dtype of the computation.

        Raises:
          ValueError: for shapes that do not fit, or a condition or context that is missing or not wanted.
          TypeError: for an `x` that is not floating.
        """
        x = jnp.asarray(x)
        rank = self.spatial_rank
        if x.ndim < rank + 1 or x.shape[-1] != self.in_channels:
            axes = ", ".join("DHW"[3 - rank :]) if rank > 1 else "L"
            raise ValueError(f"x: got shape {x.shape}, want (*B, {axes}, {self.in_channels})")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"x: got dtype {x.dtype}, want a floating one")
        batch, spatial = x.shape[: -rank - 1], x.shape[-rank - 1 : -1]
        wants(condition, "condition", self.condition_features)
        wants(context, "context", self.context_features)
        if condition is not None:
            condition = _flat("condition", condition, batch, (self.condition_features,))
        if context is not None:
            context = _flat("context", context, batch, (jnp.shape(context)[-2], self.context_features))
            if context_mask is not None:
                seen = jnp.broadcast_to(context_mask, (*batch, context.shape[1]))
                context_mask = seen.reshape(-1, 1, 1, context.shape[1])
        h = self.embed(x.reshape(math.prod(batch), *spatial, self.in_channels))
        first, kept, number = h, [], 0

        def run(steps: Any, h: Array) -> Array:
            nonlocal number
            for step in steps:
                definition, state = nnx.split(step)

                def one(state: Any, h: Array, key: Any, definition: Any = definition) -> Array:
                    return nnx.merge(definition, state)(h, condition, context, context_mask, key)

                h = rematerialised(one, self.remat)(state, h, fold(dropout_key, number))
                number += 1
            return h

        for i, stage in enumerate(self.down):
            h = run(stage, h)
            kept.append(h)
            if i < len(self.shrink):
                h = self.shrink[i](h)
        h = run(self.middle, h)
        for i in reversed(range(len(self.up))):
            h = run(self.up[i], jnp.concatenate([h, kept[i]], -1))
            if i > 0:
                # Of an odd size one position more comes back than there was.
                h = self.grow[i - 1](h)[(slice(None), *(slice(n) for n in kept[i - 1].shape[1:-1]))]
        h = self.head(jnp.concatenate([h, first], -1))
        return h.reshape(*batch, *spatial, self.out_channels)


class _Step(nnx.Module):
    """A residual block and the attention that follows it, if any: what remat takes as one."""

    def __init__(self, block: ResidualBlock, attention: SpatialAttention | None):
        self.block = block
        if attention is not None:
            self.attention = attention
        self.attends = attention is not None

    def __call__(
        self, x: Array, condition: Array | None, context: Array | None, context_mask: Any, key: Any
    ) -> Array:
        x = self.block(x, condition, key)
        return self.attention(x, context, context_mask) if self.attends else x


def _per_axis(name: str, sizes: int | Sequence[int], rank: int) -> tuple[int, ...]:
    sizes = tuple(sizes) if isinstance(sizes, Sequence) else (sizes,) * rank
    if len(sizes) != rank:
        raise ValueError(f"{name}: got {sizes}, want one per spatial axis, {rank}, or one int for all")
    at_least_one(**{f"{name}[{i}]": size for i, size in enumerate(sizes)})
    return sizes


def _flat(name: str, x: Any, batch: tuple[int, ...], tail: tuple[int | None, ...]) -> Array:
    x = jnp.asarray(x)
    if x.shape != (*batch, *tail):
        raise ValueError(f"{name}: got shape {x.shape}, want {(*batch, *tail)}, with the leading axes of x")
    return x.reshape(math.prod(batch), *tail)
