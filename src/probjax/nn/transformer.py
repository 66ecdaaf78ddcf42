"""The transformer: pre-norm blocks of attention and MLP, and stacks of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from probjax.attention import dot_product_attention
from probjax.nn._cpu import dot_general, settle
from probjax.nn._module import at_least_one
from probjax.nn._stack import Stack
from probjax.nn.attention import MultiHeadAttention
from probjax.nn.embedding import sinusoidal_embedding
from probjax.nn.mlp import MLP, check_rate, dropout, fold
from probjax.nn.norm import AdaptiveLayerNorm

Array = jax.Array

POSITIONS = (None, "sinusoidal", "learned")


class TransformerBlock(nnx.Module):
    """One pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)); (*B, L, features) to the same.

    Args:
      features: channels, D.
      num_heads: query heads.
      num_kv_heads: key/value heads; None is `num_heads`.
      mlp_features: hidden units of the MLP; None is 4 D.
      activation: of the MLP.
      use_bias: whether projections and MLP have biases.
      normalize_qk, rotary, relative_positions, attention_fn: as in `MultiHeadAttention`.
      condition_features: None, or the channels of a condition that scales and shifts what follows both
        norms: `AdaptiveLayerNorm`.
      condition_hidden: hidden units of each of these two maps; None for linear ones.
      gate: whether the condition also gates the results of attention and MLP (adaLN-Zero): the block starts
        as the identity.
      context_features: None, or the channels of a context that a cross-attention between the two reads.
      dropout_rate: of the attention weights and the results of attention and MLP, where a call is given a
        key.
      dtype: of the computation, None for what inputs and parameters are promoted to.
      param_dtype: of the parameters.
      rngs: for the initial values; it is not kept.

    Raises:
      ValueError: for sizes that do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from probjax.nn import TransformerBlock
      >>> TransformerBlock(64, 8, rngs=nnx.Rngs(0))(jnp.ones((2, 10, 64)), is_causal=True).shape
      (2, 10, 64)
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        mlp_features: int | None = None,
        activation: Callable[[Array], Array] = jax.nn.gelu,
        use_bias: bool = True,
        normalize_qk: bool = False,
        rotary: float | None = None,
        relative_positions: int | None = None,
        condition_features: int | None = None,
        condition_hidden: int | None = None,
        gate: bool = False,
        context_features: int | None = None,
        dropout_rate: float = 0.0,
        attention_fn: Callable[..., Any] = dot_product_attention,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        at_least_one(features=features)
        if gate and condition_features is None:
            raise ValueError("gate: got True without condition_features, want those of what gates")
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        heads = {
            "num_kv_heads": num_kv_heads,
            "use_bias": use_bias,
            "normalize_qk": normalize_qk,
            "dropout_rate": dropout_rate,
            "attention_fn": attention_fn,
            **kinds,
        }

        def norm() -> nnx.Module:
            if condition_features is None:
                return nnx.LayerNorm(features, **kinds)
            return AdaptiveLayerNorm(
                features, condition_features, hidden_features=condition_hidden, gate=gate, **kinds
            )

        self.features = features
        self.dropout_rate = check_rate("dropout_rate", dropout_rate)
        self.condition_features, self.gate, self.context_features = condition_features, gate, context_features
        self.attention_norm = norm()
        self.attention = MultiHeadAttention(
            num_heads, features, rotary=rotary, relative_positions=relative_positions, **heads
        )
        if context_features is not None:
            self.context_norm = nnx.LayerNorm(features, **kinds)
            self.context_attention = MultiHeadAttention(
                num_heads, features, in_kv_features=context_features, **heads
            )
        self.mlp_norm = norm()
        hidden = 4 * features if mlp_features is None else mlp_features
        self.mlp = MLP((features, hidden, features), activation=activation, use_bias=use_bias, **kinds)

    def __call__(
        self,
        x: Array,
        *,
        condition: Array | None = None,
        context: Array | None = None,
        mask: Any = None,
        bias: Any = None,
        is_causal: bool = False,
        context_mask: Any = None,
        positions: Any = None,
        cache: Any = None,
        dropout_key: Array | None = None,
    ) -> Any:
        """Runs the block.

        Args:
          x: (*B, L, features), floating.
          condition: (*B, condition_features) or one per token, where the block takes one.
          context: (*B, S, context_features), where the block takes one.
          mask, bias, is_causal, positions, cache: of the self-attention, as in `MultiHeadAttention`.
          context_mask: which of the context's entries are seen, as `mask` says it of the own tokens.
          dropout_key: a key draws dropout; None leaves it out.

        Returns:
          (*B, L, features) in the dtype of the computation; with `cache` also the next one.

        Raises:
          ValueError: for shapes that do not fit, or a condition or context that is missing or not wanted.
        """
        wants(condition, "condition", self.condition_features)
        wants(context, "context", self.context_features)
        keys = [fold(dropout_key, i) for i in range(5)]
        h, gate = self._normed(self.attention_norm, x, condition)
        y = self.attention(
            h,
            mask=mask,
            bias=bias,
            is_causal=is_causal,
            positions=positions,
            cache=cache,
            dropout_key=keys[0],
        )
        if cache is not None:
            y, cache = y
        x = settle(x + self._gated(dropout(y, self.dropout_rate, keys[1]), gate))
        if context is not None:
            y = self.context_attention(self.context_norm(x), context, mask=context_mask, dropout_key=keys[4])
            x = settle(x + dropout(y, self.dropout_rate, fold(keys[4], 1)))
        h, gate = self._normed(self.mlp_norm, x, condition)
        x = x + self._gated(dropout(self.mlp(h), self.dropout_rate, keys[2]), gate)
        return x if cache is None else (x, cache)

    def _normed(self, norm: Any, x: Array, condition: Array | None) -> tuple[Array, Array | None]:
        if condition is None:
            return norm(x), None
        return norm(x, condition) if self.gate else (norm(x, condition), None)

    def _gated(self, y: Array, gate: Array | None) -> Array:
        return y if gate is None else y * gate


def wants(x: Any, name: str, features: int | None) -> None:
    """Raises ValueError where an input is missing, or there is no use for it."""
    if (x is None) != (features is None):
        got, want = ("None", "an array") if x is None else ("an array", "None")
        hint = "" if x is None else f": built without {name}_features"
        raise ValueError(f"{name}: got {got}, want {want}{hint}")


class Transformer(nnx.Module):
    """A stack of transformer blocks: (*B, L, in_features) to (*B, L, out_features).

    Args:
      features: channels of the blocks.
      num_layers: number of blocks.
      num_heads: query heads.
      in_features, out_features: None, or the channels of inputs and outputs: then linear maps come first and
        last.
      positions: None; "sinusoidal"; or "learned": a vector for each of `max_length` positions. Both are added
        to the inputs of the first block. Rotary and relative ones are the blocks' own: `rotary`,
        `relative_positions`.
      max_length: most positions of "learned" ones; positions beyond give NaN.
      final_norm: whether a layer norm follows the last block.
      scan_layers: hold the parameters of all blocks in one array each, with a leading axis, and run them by
        `jax.lax.scan`: the program does not grow with their number. Values are the same.
      remat: what the backward pass keeps of each block: "none": everything; "full": its input only, the
        rest is computed again; "dots_saveable": results of matrix products; "save_attention": outputs and
        log-sum-exps of attention.
      unroll: blocks in one turn of the scan's loop.
      dtype: of the computation, None for what inputs and parameters are promoted to.
      param_dtype: of the parameters.
      rngs: for the initial values; it is not kept.
      **block: further arguments of `TransformerBlock`.

    Raises:
      ValueError: for sizes that do not fit or unknown names.
      TypeError: for arguments that neither this nor the block has.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from probjax.nn import Transformer
      >>> model = Transformer(64, num_layers=2, num_heads=8, in_features=3, rotary=10_000, rngs=nnx.Rngs(0))
      >>> y = model(jnp.ones((2, 10, 3)), is_causal=True)
      >>> y.shape
      (2, 10, 64)

      Token by token:

      >>> cache = model.init_cache(2, length=10)
      >>> step, cache = model(jnp.ones((2, 1, 3)), is_causal=True, cache=cache)
      >>> step.shape
      (2, 1, 64)
    """

    def __init__(
        self,
        features: int,
        num_layers: int,
        num_heads: int,
        *,
        in_features: int | None = None,
        out_features: int | None = None,
        positions: str | None = None,
        max_length: int | None = None,
        final_norm: bool = True,
        scan_layers: bool = False,
        remat: str = "none",
        unroll: int = 1,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **block: Any,
    ):
        at_least_one(features=features)
        if positions not in POSITIONS:
            raise ValueError(f"positions: got {positions!r}, want one of {', '.join(map(repr, POSITIONS))}")
        if (positions == "learned") != (max_length is not None):
            raise ValueError(f'max_length: got {max_length}, want a length with positions="learned" only')
        kinds = {"dtype": dtype, "param_dtype": param_dtype}
        self.features, self.num_layers, self.max_length = features, num_layers, max_length
        self.in_features = features if in_features is None else in_features
        self.positions, self.final_norm = positions, final_norm
        self.dtype, self.param_dtype = dtype, param_dtype
        linear = {"dot_general": dot_general, "rngs": rngs, **kinds}
        self.embed = None if in_features is None else nnx.Linear(in_features, features, **linear)
        if max_length is not None:
            table = 0.02 * jax.random.normal(rngs.params(), (max_length, features), param_dtype)
            self.position_table = nnx.Param(table)
        self.stack = Stack(
            lambda _, rngs: TransformerBlock(features, num_heads, **block, **kinds, rngs=rngs),
            num_layers,
            scan_layers=scan_layers,
            remat=remat,
            unroll=unroll,
            rngs=rngs,
        )
        if final_norm:
            self.norm = nnx.LayerNorm(features, **kinds, rngs=rngs)
        self.head = None if out_features is None else nnx.Linear(features, out_features, **linear)

    def __call__(
        self,
        x: Array,
        *,
        condition: Array | None = None,
        context: Array | None = None,
        mask: Any = None,
        bias: Any = None,
        is_causal: bool = False,
        context_mask: Any = None,
        positions: Any = None,
        cache: Any = None,
        dropout_key: Array | None = None,
    ) -> Any:
        """Runs the blocks.

        Args:
          x: (*B, L, in_features), floating.
          condition, context, context_mask, mask, bias, is_causal: handed to every block, see
            `TransformerBlock`. A mask is attention's alone: the other layers compute on every token, so
            set padded tokens to zero. NaN in them leaves the results of others alone, not the gradients
            of the parameters.
          positions: (*B, L) numbers of the tokens; None counts from 0, or on from the cache.
          cache: from `init_cache` or the call before: these tokens follow those that it holds; see
            `MultiHeadAttention`.
          dropout_key: a key draws dropout, another mask in every block; None leaves it out.

        Returns:
          (*B, L, out_features or features) in the dtype of the computation; with `cache` also the next one.

        Raises:
          ValueError: for shapes that do not fit.
          TypeError: for an `x` that is not floating.
        """
        x = jnp.asarray(x)
        if x.ndim < 2 or x.shape[-1] != self.in_features:
            raise ValueError(f"x: got shape {x.shape}, want (*B, L, {self.in_features})")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"x: got dtype {x.dtype}, want a floating one; embed tokens first, by nnx.Embed")
        x = self._positioned(x if self.embed is None else self.embed(x), positions, cache)
        if self.embed is None:
            x = x.astype(jnp.promote_types(x.dtype, self.param_dtype) if self.dtype is None else self.dtype)

        def body(block: Any, x: Array, index: Any, held: Any) -> tuple[Array, Any]:
            rotary = positions if block.attention.rotary is not None else None
            out = block(
                x,
                condition=condition,
                context=context,
                mask=mask,
                bias=bias,
                is_causal=is_causal,
                context_mask=context_mask,
                positions=rotary,
                cache=held,
                dropout_key=fold(dropout_key, index),
            )
            return (out, None) if held is None else out

        x, cache = self.stack(body, x, cache) if cache is not None else (self.stack(body, x)[0], None)
        if self.final_norm:
            x = self.norm(settle(x))
        if self.head is not None:
            x = self.head(x)
        return x if cache is None else (x, cache)

    def _positioned(self, x: Array, positions: Any, cache: Any) -> Array:
        if self.positions is None:
            return x
        length = x.shape[-2]
        if positions is None:
            first = 0 if cache is None else cache[0].index.reshape(-1)[0]
            if self.max_length is not None and cache is None and length > self.max_length:
                raise ValueError(f"x: got {length} tokens, want at most max_length = {self.max_length}")
            positions = first + jnp.arange(length)
        positions = jnp.asarray(positions)
        if self.positions == "sinusoidal":
            return x + sinusoidal_embedding(positions, self.features).astype(x.dtype)
        table = self.position_table[...].astype(x.dtype)
        # Beyond the table NaN, not its last row.
        return x + table.at[positions].get(mode="fill", fill_value=jnp.nan)

    def init_cache(self, batch_shape: int | Sequence[int], length: int) -> Any:
        """Empty caches of all blocks, for inputs with the leading axes `batch_shape` and at most `length`
        tokens in all.
        """
        batch = tuple(batch_shape) if isinstance(batch_shape, Sequence) else (batch_shape,)
        if self.num_layers == 0:
            raise ValueError(
                "init_cache: this model has no blocks, want at least one to hold keys and values"
            )
        block = self.stack.blocks[0]
        return self.stack.gather([block.attention.init_cache(batch, length)] * self.num_layers)
