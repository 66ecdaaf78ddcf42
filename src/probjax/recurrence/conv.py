"""`causal_conv1d` and its one-token form: the short depthwise convolution in front of a state space."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from probjax._op import Array
from probjax.recurrence import _arguments as check


def causal_conv1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    initial_state: Any = None,
    reset: Any = None,
    segment_ids: Any = None,
    mask: Any = None,
    reverse: bool = False,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Runs a depthwise convolution over the current and the W - 1 tokens before it.

    `y_t = bias + sum_k weight[k] x_{t-W+1+k}`; there is no activation. Letters: *B any leading axes, L the
    sequence, D channels, W width. Sums are in the state dtype: float32, or what that and the arguments are
    promoted to.

    Args:
      x: (*B, L, D), floating.
      weight: (W, D), W at least 1; the last row multiplies the current token.
      bias: (D,) or None.
      initial_state: the W - 1 inputs before the first, oldest first, (*B, W - 1, D); its leading axes
        broadcast. None is zeros.
      reset: bool, broadcasts to (*B, L): tokens before this one count as zero, from here on.
      segment_ids: integers, broadcast to (*B, L): as `reset` where the id differs from that of the valid
        token before it. The first token is no boundary.
      mask: bool, broadcasts to (*B, L): a token that is False is skipped, as if it were not in the sequence;
        its result is zero, and nothing of it, not even a NaN, reaches a result or a gradient.
      reverse: run from the last token to the first: the convolution looks ahead.
      implementation: "reference", "scan", or None to choose.

    Returns:
      y: (*B, L, D) in the dtype of `x`.
      last: the last W - 1 inputs in the order of processing, (*B, W - 1, D), zero where there was none, in
        the dtype of `x`.

    Raises:
      ValueError: for shapes that do not fit, W below 1, or an initial state of another width.
      TypeError: for numbers that are not floating, or a `mask`, `reset` or `segment_ids` of another kind.
      NotImplementedError: when the named implementation cannot run the call.

    Example:
      >>> import jax.numpy as jnp
      >>> from probjax import recurrence
      >>> y, last = recurrence.causal_conv1d(jnp.arange(4.0)[:, None], jnp.ones((2, 1)))
      >>> print(y[:, 0], last)
      [0. 1. 3. 5.] [[3.]]
    """
    x = check.array("x", x)
    check.at_least("x", x, 2, "(*B, L, D)")
    weight, bias, state, dtype = _weights(x, weight, bias, initial_state, "initial_state")
    chosen = check.implementation(implementation, "causal_conv1d", ("reference", "scan"))
    reset, mask = check.cuts(reset, segment_ids, mask, x.shape[:-1], reverse)
    reset, mask = (None if flag is None else jnp.broadcast_to(flag, x.shape[:-1]) for flag in (reset, mask))
    x = check.select(mask, x, 0, 1)
    if reverse:
        x, reset, mask = (
            None if y is None else jnp.flip(y, axis) for y, axis in ((x, -2), (reset, -1), (mask, -1))
        )
    run = _walk if chosen == "reference" else _convolve
    y, last = run(x, weight, bias, state, reset, mask, dtype)
    return (jnp.flip(y, -2) if reverse else y), last


def causal_conv1d_step(
    x: Any, weight: Any, bias: Any = None, *, state: Any, reset: Any = None, mask: Any = None
) -> tuple[Array, Array]:
    """Runs one token of `causal_conv1d`: its result is that of a call with L = 1.

    Args:
      x: (*B, D).
      weight, bias: as in `causal_conv1d`.
      state: the W - 1 inputs before, oldest first, (*B, W - 1, D); its leading axes broadcast.
      reset, mask: bool, broadcast to (*B,).

    Returns:
      y: (*B, D) in the dtype of `x`, zero where `mask` is False.
      state: the next state, in the dtype of `x`.

    Raises:
      ValueError, TypeError: as in `causal_conv1d`.

    Example:
      >>> import jax.numpy as jnp
      >>> from probjax import recurrence
      >>> y, state = recurrence.causal_conv1d_step(jnp.ones(3), jnp.ones((2, 3)), state=jnp.ones((1, 3)))
      >>> print(y)
      [2. 2. 2.]
    """
    x = check.array("x", x)
    check.at_least("x", x, 1, "(*B, D)")
    whole = jnp.expand_dims(x, -2)
    weight, bias, state, dtype = _weights(whole, weight, bias, state, "state")
    flags = (
        check.per_token(name, flag, (*x.shape[:-1], 1), jnp.bool_, step=True)
        for name, flag in (("reset", reset), ("mask", mask))
    )
    reset, mask = (None if flag is None else flag[..., 0] for flag in flags)
    x = check.select(mask, x, 0, 1)
    return _step(x, weight, bias, state, reset, mask, dtype)


def _weights(
    x: Array, weight: Any, bias: Any, state: Any, state_name: str
) -> tuple[Array, Array | None, Array, Any]:
    """Weight and bias in the dtype of sums, the state in that of `x`, and the dtype of sums."""
    *lead, _, channels = x.shape
    weight = check.array("weight", weight)
    if weight.ndim != 2 or weight.shape[0] < 1 or weight.shape[1] != channels:
        raise ValueError(
            f"weight: got shape {weight.shape}, want (W, D) with W >= 1 and D = {channels}, as x has"
        )
    bias = None if bias is None else check.array("bias", bias)
    if bias is not None:
        check.exactly("bias", bias, (channels,), "one number per channel of x")
    shape = (*lead, weight.shape[0] - 1, channels)
    if state is None:
        state = jnp.zeros(shape, x.dtype)
    else:
        state = check.array(state_name, state)
        if state.shape[-2:] != shape[-2:]:
            raise ValueError(
                f"{state_name}: got shape {state.shape}, want {shape}, the W - 1 = {shape[-2]} inputs before"
            )
        state = check.widened(state_name, state, shape, "(*B, W - 1, D)")
    dtype = check.state_dtype(x, weight, bias, state)
    state = jnp.broadcast_to(state, shape).astype(x.dtype)
    return weight.astype(dtype), None if bias is None else bias.astype(dtype), state, dtype


def _step(
    x: Array,
    weight: Array,
    bias: Array | None,
    state: Array,
    reset: Array | None,
    mask: Array | None,
    dtype: Any,
) -> tuple[Array, Array]:
    """One token: x (*B, D), state (*B, W - 1, D), reset and mask (*B)."""
    before = check.select(None if reset is None else ~reset, state, 0, 2)
    window = jnp.concatenate([before, jnp.expand_dims(x, -2)], -2)
    y = jnp.sum(window.astype(dtype) * weight, -2)
    y = y if bias is None else y + bias
    after = window[..., 1:, :]
    if mask is not None:
        after = jnp.where(mask[..., None, None], after, state)
    return check.select(mask, y, 0, 1).astype(x.dtype), after


def _walk(
    x: Array,
    weight: Array,
    bias: Array | None,
    state: Array,
    reset: Array | None,
    mask: Array | None,
    dtype: Any,
) -> tuple[Array, Array]:
    """Token by token."""

    def body(state: Array, inputs: tuple) -> tuple[Array, Array]:
        y, state = _step(inputs[0], weight, bias, state, inputs[1], inputs[2], dtype)
        return state, y

    moved = [
        None if y is None else jnp.moveaxis(y, axis, 0) for y, axis in ((x, -2), (reset, -1), (mask, -1))
    ]
    last, y = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), state, tuple(moved))
    return jnp.moveaxis(y, 0, -2), last


def _convolve(
    x: Array,
    weight: Array,
    bias: Array | None,
    state: Array,
    reset: Array | None,
    mask: Array | None,
    dtype: Any,
) -> tuple[Array, Array]:
    """All tokens at once, a product per row of the weight. Padding is taken out, then put back."""
    length, width = x.shape[-2], weight.shape[0]
    valid = None
    if mask is not None:
        # Valid tokens first, in their order.
        order = jnp.argsort(~mask, axis=-1, stable=True)
        x = jnp.take_along_axis(x, order[..., None], -2)
        reset = None if reset is None else jnp.take_along_axis(reset, order, -1)
        valid = jnp.sum(mask, -1)
    inputs = jnp.concatenate([state, x], -2)
    y = None
    cut = None  # whether a reset lies between token t and the one `lag` before it
    for lag in range(width):
        part = jax.lax.slice_in_dim(inputs, width - 1 - lag, width - 1 - lag + length, axis=x.ndim - 2)
        if lag and reset is not None:
            late = jnp.pad(reset, [(0, 0)] * (reset.ndim - 1) + [(lag - 1, 0)])[..., :length]
            cut = late if cut is None else cut | late
            part = jnp.where(cut[..., None], 0, part)
        term = part.astype(dtype) * weight[width - 1 - lag]
        y = term if y is None else y + term
    assert y is not None
    y = y if bias is None else y + bias
    last = _window(inputs, reset, valid, width, length)
    if mask is not None:
        y = jnp.take_along_axis(y, jnp.argsort(order, axis=-1)[..., None], -2)
        y = check.select(mask, y, 0, 1)
    return y.astype(x.dtype), last


def _window(inputs: Array, reset: Array | None, valid: Array | None, width: int, length: int) -> Array:
    """The last W - 1 inputs, those before a reset being zero. `valid` counts the tokens, None for all."""
    if valid is None:
        last = jax.lax.slice_in_dim(inputs, length, length + width - 1, axis=inputs.ndim - 2)
        index = jnp.broadcast_to(jnp.arange(length, length + width - 1), (*inputs.shape[:-2], width - 1))
    else:
        index = valid[..., None] + jnp.arange(width - 1)
        last = jnp.take_along_axis(inputs, index[..., None], -2)
    if reset is None or length == 0:
        return last
    # Input i + W - 1 is token i; what lies before the latest reset is gone.
    tokens = jax.lax.broadcasted_iota(jnp.int32, reset.shape, reset.ndim - 1)
    latest = jnp.max(jnp.where(reset, tokens, -width), -1)
    return jnp.where((index >= latest[..., None] + width - 1)[..., None], last, 0)
