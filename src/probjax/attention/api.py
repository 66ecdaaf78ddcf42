"""The public calls: what runs, and what would run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from probjax._op import Array, apply, residual_name
from probjax.attention._flax import from_flax
from probjax.attention.plan import AttentionPlan, plan_of
from probjax.attention.prepare import prepare
from probjax.attention.primitive import ATTENTION, outputs_for

#: The `jax.ad_checkpoint.checkpoint_name` names of output and log-sum-exp, for a policy such as
#: `jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)`: then backward does not run forward again.
RESIDUAL_NAMES = tuple(residual_name(ATTENTION, output) for output in outputs_for(jnp.float32))


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    causal_alignment: str = "top_left",
    logits_soft_cap: Any = None,
    sinks: Any = None,
    segment_ids: Any = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    precision: Any = None,
    implementation: str | None = None,
    return_residual: bool = False,
    **flax: Any,
) -> Array | tuple[Array, Array]:
    """Scaled dot-product attention, exact, with memory linear in the sequence, under every JAX
    transformation.

    Axis letters: *B any number of leading batch axes (also none), T query length, S key length, N query
    heads, K key/value heads (N a multiple of K; query head h uses key/value head h // (N / K)), D head
    size, V value size.

    The score of (query i, key j) is scale · q·k, then the soft cap, then the bias; then masks hide pairs. A
    row that sees no key gives output 0, log-sum-exp −inf and zero gradients; what is hidden never matters,
    not even NaN.

    Args:
      query: (*B, T, N, D), float64, float32, bfloat16 or float16.
      key: (*B, S, K, D), dtype of `query`.
      value: (*B, S, K, V), dtype of `query`.
      bias: float array that broadcasts to (*B, N, T, S), or an object of `probjax.biases`. Differentiable.
        −inf hides.
      mask: bool array that broadcasts to (*B, N, T, S), or an object of `probjax.masks`. True means attend.
      scale: factor of q·k, a number or a scalar array (differentiable). None: 1/sqrt(D).
      is_causal: query i sees keys up to its own position, by `causal_alignment`.
      query_seq_lengths: integers (*B,): rows from there on are empty.
      key_value_seq_lengths: integers (*B,): keys from there on are hidden.
      local_window_size: query i sees keys from `left` before to `right` after its position; one int for
        both sides. None or −1 is no bound on that side.
      causal_alignment: "top_left" (query i stands at key i) or "bottom_right" (at key i + S − T), for
        causal and windows.
      logits_soft_cap: c > 0: scores s become c · tanh(s / c).
      sinks: (N,) float: a logit per head that joins the softmax with no value. Differentiable.
      segment_ids: integers (*B, T) if T = S, else a pair (*B, T), (*B, S): only equal ids see each other.
      dropout_rate: probability of dropping a weight, in [0, 1]; survivors are scaled by 1 / (1 − rate).
      dropout_key: a JAX key, needed if `dropout_rate` > 0. The mask is a function of (key, batch, head,
        query, key) alone: `probjax.attention.dropout_mask` shows it. Inside `jax.shard_map` fold the
        shard's index into the key.
      precision: as in `jax.numpy.dot`. "highest" is true float32 on every platform.
      implementation: None chooses (see `attention_plan`), or one of `probjax.attention.implementations()`.
      return_residual: also return the log-sum-exp.
      **flax: what `flax.nnx.MultiHeadAttention` hands to its `attention_fn` besides, so that this function
        is one: `dropout_rng` (another name of `dropout_key`), `deterministic` (True: no dropout), `dtype`
        (of the computation), `broadcast_dropout` (every batch entry and head has its own mask here, whatever
        it says) and `module`, which has to be None: there are no weights to sow.

    Returns:
      Output (*B, T, N, V) in the dtype of `query`. With `return_residual`, also the log-sum-exp of the
      scores (sink included, dropout not), natural logarithm, (*B, T, N), float32 (float64 for float64
      inputs), differentiable.

    Raises:
      TypeError, ValueError: naming the argument, what was got and what is wanted.
      NotImplementedError: the named implementation cannot run this call.

    Softmax and sums are in float32 (float64 for float64). Derivatives of first order run fused; those of
    higher order are taken of the tiled plain-JAX implementation. Backward is deterministic.

    On CPUs "native", C++ kernels, runs whatever it has a form for: everything but functions of the score and
    large mask functions of arrays. It needs the native library (`probjax info` says whether it is there);
    programs that are exported do without it, unless it is named. Arrays with heads before length,
    (B, N, T, D) with K = N, need no transposition: pass `x[..., None, :]`, where heads are a batch axis.

    Source: Dao et al., arXiv:2205.14135; Rabe and Staats, arXiv:2112.05682.

    Example:
      >>> import jax, probjax
      >>> q = jax.random.normal(jax.random.key(0), (2, 128, 8, 64))
      >>> probjax.dot_product_attention(q, q, q, is_causal=True).shape
      (2, 128, 8, 64)
    """
    if flax:
        query, key, value, dropout_rate, dropout_key = from_flax(
            (query, key, value), dropout_rate, dropout_key, **flax
        )
    call, operands = prepare(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        causal_alignment=causal_alignment,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        segment_ids=segment_ids,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        precision=precision,
        implementation=implementation,
    )
    out, lse = apply(call, operands)
    return (out, lse) if return_residual else out


def attention_plan(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    platform: str | None = None,
    **arguments: Any,
) -> AttentionPlan:
    """What `dot_product_attention` would run for this call, and why. Computes nothing.

    Args:
      query, key, value, bias, mask: as there; `jax.ShapeDtypeStruct` serves for any array, also inside
        objects.
      platform: "cpu", "cuda", "rocm" or "tpu"; None takes the default backend.
      **arguments: the other arguments of the call.

    Returns:
      The implementation, its tiles, an estimate of its temporary memory, the reason, and why the others
      were not chosen.

    Example:
      >>> import jax, jax.numpy as jnp, probjax
      >>> x = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32)
      >>> probjax.attention_plan(x, x, x, is_causal=True, platform="tpu").implementation
      'tiled'
    """
    if platform is not None and platform not in ("cpu", "cuda", "rocm", "tpu"):
        raise ValueError(f'platform: got {platform!r}, want "cpu", "cuda", "rocm" or "tpu"')
    arguments.pop("return_residual", None)
    traced = {k: v for k, v in arguments.items() if _holds_arrays(v)}
    fixed = {k: v for k, v in arguments.items() if k not in traced}
    prepared: list = []

    def record(query: Any, key: Any, value: Any, bias: Any, mask: Any, traced: Any) -> None:
        prepared.append(prepare(query, key, value, bias, mask, **traced, **fixed))

    jax.eval_shape(record, query, key, value, bias, mask, traced)
    call, operands = prepared[0]
    return plan_of(call, operands, platform or jax.default_backend())


def _holds_arrays(x: Any) -> bool:
    return any(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in jax.tree.leaves(x))
