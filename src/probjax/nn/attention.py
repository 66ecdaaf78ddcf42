"""Multi-head attention as a module, with a cache for decoding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from probjax.attention import biases, dot_product_attention
from probjax.attention._mask import Mask
from probjax.attention._rows import bias_rows, mask_rows
from probjax.attention._terms import CallShape
from probjax.attention.biases import Bias, RelativePosition, as_bias
from probjax.attention.masks import Causal
from probjax.nn._cpu import dot_general
from probjax.nn._module import at_least_one
from probjax.nn.embedding import rotary_embedding
from probjax.nn.mlp import check_rate

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens so far, of one attention layer.

    Attributes:
      key, value: (*B, S, K, D), zeros from `index` on; S is the most tokens that fit.
      index: integer, the number of tokens held.
    """

    key: Array
    value: Array
    index: Array


class MultiHeadAttention(nnx.Module):
    """Multi-head attention: (*B, T, in_features) to (*B, T, out_features).

    Parameters have the names and shapes of `flax.nnx.MultiHeadAttention`.

    Args:
      num_heads: query heads, N.
      in_features: channels of the queries' inputs.
      qkv_features: N times the head size D; None is `in_features`.
      out_features: None is `in_features`.
      num_kv_heads: key/value heads K, a divisor of N; None is N.
      in_kv_features: channels of the keys' and values' inputs; None is `in_features`.
      use_bias: whether the four projections have one.
      normalize_qk: layer norms without bias over each query's and key's channels (arXiv:2302.05442).
      rotary: None, or the base of rotary position embeddings of queries and keys, such as 10_000
        (`rotary_embedding`); self-attention only.
      relative_positions: None, or how many relative positions have a learned bias per head, zero at first:
        `biases.RelativePosition`, with the farthest ones shared.
      dropout_rate: of the attention weights, where a call is given a key.
      attention_fn: f(query, key, value, ...) like `probjax.dot_product_attention`, or a partial of it. Any
        other one, such as `jax.nn.dot_product_attention`, `flax.nnx.dot_product_attention` or one's own, is
        called with the arrays and, where there are some, `bias` and `mask` as arrays that broadcast to
        (*B, N, T, S).
      dtype: of the computation, None for what inputs and parameters are promoted to.
      param_dtype: of the parameters.
      rngs: for the initial values; it is not kept.

    Raises:
      ValueError: for sizes that do not divide.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from probjax import masks
      >>> from probjax.nn import MultiHeadAttention
      >>> attention = MultiHeadAttention(8, 64, num_kv_heads=2, rotary=10_000, rngs=nnx.Rngs(0))
      >>> attention(jnp.ones((2, 10, 64)), mask=masks.Causal() & masks.SlidingWindow(4)).shape
      (2, 10, 64)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        use_bias: bool = True,
        normalize_qk: bool = False,
        rotary: float | None = None,
        relative_positions: int | None = None,
        dropout_rate: float = 0.0,
        attention_fn: Callable[..., Any] = dot_product_attention,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        at_least_one(num_heads=num_heads, in_features=in_features)
        qkv_features = in_features if qkv_features is None else qkv_features
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        in_kv_features = in_features if in_kv_features is None else in_kv_features
        at_least_one(qkv_features=qkv_features, num_kv_heads=num_kv_heads, in_kv_features=in_kv_features)
        if qkv_features % num_heads:
            raise ValueError(f"num_heads: got {num_heads}, want a divisor of the {qkv_features} qkv_features")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: got {num_kv_heads}, want a divisor of the {num_heads} heads")
        size = qkv_features // num_heads
        if rotary is not None and size % 2:
            raise ValueError(f"rotary: got {rotary} with heads of {size} channels, want an even number")
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, size
        self.in_features, self.in_kv_features = in_features, in_kv_features
        self.out_features = in_features if out_features is None else out_features
        self.normalize_qk, self.rotary = normalize_qk, rotary
        self.dropout_rate = check_rate("dropout_rate", dropout_rate)
        self.attention_fn = attention_fn
        self.dtype, self.param_dtype = dtype, param_dtype
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        linear = functools.partial(nnx.LinearGeneral, use_bias=use_bias, dot_general=dot_general, **kinds)
        self.query = linear(in_features, (num_heads, size))
        self.key = linear(in_kv_features, (num_kv_heads, size))
        self.value = linear(in_kv_features, (num_kv_heads, size))
        if normalize_qk:
            self.query_ln = nnx.LayerNorm(size, use_bias=False, **kinds)
            self.key_ln = nnx.LayerNorm(size, use_bias=False, **kinds)
        if relative_positions is not None:
            at_least_one(relative_positions=relative_positions)
            self.relative_table = nnx.Param(jnp.zeros((num_heads, relative_positions), param_dtype))
        self.relative_positions = relative_positions
        self.out = linear((num_heads, size), self.out_features, axis=(-2, -1))

    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        mask: Any = None,
        bias: Any = None,
        is_causal: bool = False,
        positions: Any = None,
        cache: Cache | None = None,
        dropout_key: Array | None = None,
    ) -> Any:
        """Attends.

        Args:
          inputs_q: (*B, T, in_features), floating.
          inputs_k: (*B, S, in_kv_features); None is `inputs_q`.
          inputs_v: (*B, S, in_kv_features); None is `inputs_k`.
          mask: an object of `probjax.masks`, or a bool array that broadcasts to (*B, N, T, S); True attends.
          bias: an object of `probjax.biases`, or an array of that shape.
          is_causal: whether query i sees keys up to i only, besides what `mask` says.
          positions: (*B, T), for rotary embeddings; None counts from 0, or on from the cache.
          cache: of the tokens before these, from `init_cache` or the call before. These tokens are appended,
            and see each other and those before as far as the mask allows. `mask` and `bias` are then those
            of the whole sequence, all S tokens that fit by S: this call takes its rows. A causal call cut
            in any way gives what the whole one gives; with a mask that shows later tokens, those of later
            calls are not seen.
          dropout_key: a key draws dropout of the weights; None leaves it out.

        Returns:
          y: (*B, T, out_features) in the dtype of the computation.
          cache: the next one, only where one was given. More tokens than fit raise, or give NaN
            where `index` is traced.

        Raises:
          ValueError: for shapes that do not fit, or arguments that exclude each other.
          NotImplementedError: for dropout of weights with an `attention_fn` other than ours.
        """
        if inputs_k is None and inputs_v is not None:
            raise ValueError("inputs_v: got it without inputs_k, want inputs_k; values default to its input")
        own = inputs_k is None
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        inputs_q = _checked("inputs_q", inputs_q, self.in_features)
        inputs_k = _checked("inputs_k", inputs_k, self.in_kv_features)
        inputs_v = _checked("inputs_v", inputs_v, self.in_kv_features)
        if not own and (cache is not None or self.rotary is not None):
            name = "cache" if cache is not None else "rotary"
            raise ValueError(f"{name}: got it with inputs_k, want self-attention")
        query, key, value = self.query(inputs_q), self.key(inputs_k), self.value(inputs_v)
        if self.normalize_qk:
            query, key = self.query_ln(query), self.key_ln(key)
        if self.rotary is not None:
            if positions is None and cache is not None:
                positions = cache.index + jnp.arange(query.shape[-3])
            query = rotary_embedding(query, positions, theta=self.rotary)
            key = rotary_embedding(key, positions, theta=self.rotary)
        elif positions is not None:
            raise ValueError("positions: got some, want None: this layer has no rotary embeddings")
        bias = self._bias(bias)
        if cache is None:
            return self.out(self._attend(query, key, value, bias, mask, is_causal, dropout_key))
        cache, mask, bias = self._append(cache, query, key, value, bias, mask, is_causal)
        y = self._attend(query, cache.key, cache.value, bias, mask, False, dropout_key)
        return self.out(y), cache

    def init_cache(self, batch_shape: int | Sequence[int], length: int, dtype: Any = None) -> Cache:
        """An empty cache.

        Args:
          batch_shape: *B, the leading axes of the inputs to come; an integer is a single axis.
          length: the most tokens that fit, S.
          dtype: of keys and values; None is the compute dtype: `dtype`, or else `param_dtype`.
        """
        batch = tuple(batch_shape) if isinstance(batch_shape, Sequence) else (batch_shape,)
        if dtype is None:
            dtype = self.param_dtype if self.dtype is None else self.dtype
        zeros = jnp.zeros((*batch, length, self.num_kv_heads, self.head_size), dtype)
        return Cache(zeros, zeros, jnp.zeros((), jnp.int32))

    def _bias(self, bias: Any) -> Any:
        if self.relative_positions is None:
            return bias
        learned = RelativePosition(self.relative_table[...])
        return learned if bias is None else learned + bias

    def _append(
        self, cache: Cache, query: Array, key: Array, value: Array, bias: Any, mask: Any, is_causal: bool
    ) -> tuple[Cache, Any, Any]:
        *batch, count, heads, _ = query.shape
        *_, length, kv_heads, _ = cache.key.shape
        if cache.key.shape != (*batch, length, *key.shape[-2:]):
            raise ValueError(
                f"cache: got keys of shape {cache.key.shape}, want {(*batch, 'S', *key.shape[-2:])}, as "
                "init_cache makes for these inputs"
            )
        if count > length:
            raise ValueError(f"cache: got {count} tokens at once, want at most the {length} that fit")
        start = cache.index
        if not isinstance(start, jax.core.Tracer) and int(start) + count > length:
            raise ValueError(
                f"cache: got {count} tokens after the {int(start)} it holds, want at most {length} in all"
            )
        at = (*[jnp.zeros((), start.dtype)] * len(batch), start, *[jnp.zeros((), start.dtype)] * 2)
        # Beyond the end an update would be moved back over tokens that are held.
        fits = start + count <= length
        new = [
            lax.dynamic_update_slice(held, jnp.where(fits, x.astype(held.dtype), jnp.nan), at)
            for held, x in ((cache.key, key), (cache.value, value))
        ]
        shape = CallShape(tuple(batch), length, length, heads, kv_heads)
        seen = (jnp.arange(length) < start + count).reshape((1,) * (len(batch) + 2) + (-1,))
        for term in (Causal() if is_causal else None, mask):
            if term is not None:
                seen = seen & mask_rows(term, shape, start, count)
        if bias is not None:
            bias = bias_rows(bias, shape, start, count)
        return Cache(new[0], new[1], start + count), seen, bias

    def _attend(
        self, query: Array, key: Array, value: Array, bias: Any, mask: Any, is_causal: bool, dropout_key: Any
    ) -> Array:
        key, value = key.astype(query.dtype), value.astype(query.dtype)
        drops = self.dropout_rate > 0 and dropout_key is not None
        if _is_ours(self.attention_fn):
            options = {"dropout_rate": self.dropout_rate, "dropout_key": dropout_key} if drops else {}
            return self.attention_fn(query, key, value, bias, mask, is_causal=is_causal, **options)
        if drops:
            raise NotImplementedError(
                "dropout_rate: got one with an attention_fn of another library, want "
                "probjax.dot_product_attention for dropout of attention weights"
            )
        *batch, length, heads, _ = query.shape
        full = (*batch, heads, length, key.shape[-3])
        if is_causal:
            mask = Causal() if mask is None else Causal() & mask
        if isinstance(mask, Mask):
            mask = mask.dense(length, key.shape[-3], batch=tuple(batch), heads=heads)
        if bias is not None:
            bias = _added(as_bias(bias)).dense(jnp.zeros(full))
        given = {"bias": bias, "mask": mask}
        return self.attention_fn(
            query,
            key,
            value,
            # Some want all axes to be there.
            **{
                n: x.reshape((1,) * (len(full) - x.ndim) + x.shape) for n, x in given.items() if x is not None
            },
        )


def _is_ours(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return function is dot_product_attention


def _added(bias: Bias) -> Bias:
    """`bias`, if all it does is add to the score."""
    if isinstance(bias, biases._Chain):
        return _added(bias.first) + _added(bias.second)
    if not isinstance(bias, (biases.Dense, biases.ALiBi, biases.RelativePosition)):
        raise NotImplementedError(
            f"bias: got {type(bias).__name__}, which does more than add to the score, want one that adds: "
            "the attention_fn is another library's"
        )
    return bias


def _checked(name: str, x: Any, features: int) -> Array:
    x = jnp.asarray(x)
    if x.ndim < 2 or x.shape[-1] != features:
        raise ValueError(f"{name}: got shape {x.shape}, want (*B, length, {features})")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}: got dtype {x.dtype}, want a floating one")
    return x
