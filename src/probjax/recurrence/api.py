"""`linear_scan`, `selective_scan`, `ssd`, one-token forms: checks, normal form, what surrounds the
kernels."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from probjax import _precision
from probjax._op import Array, apply
from probjax.recurrence import _arguments as check
from probjax.recurrence import _steps, primitive
from probjax.recurrence.spec import LEAST_CHUNK, RecurrenceSpec


@dataclass(frozen=True)
class _Prepared:
    """A call in its normal form.

    Attributes:
      operands: as the primitive takes them, in the state dtype.
      lead: (*B, L) of the call, L = 1 for a single token.
      reset: where the state is cut, (*B or 1, L), or None.
      mask: which tokens count, likewise.
      out: shape and dtype of the result.
      state_shape: of the caller's state.
    """

    operands: list[Array]
    lead: tuple[int, ...]
    reset: Array | None
    mask: Array | None
    out: jax.ShapeDtypeStruct
    state_shape: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        return self.operands[0].dtype


def linear_scan(
    a: Any,
    b: Any,
    *,
    axis: int = -2,
    initial_state: Any = None,
    reset: Any = None,
    segment_ids: Any = None,
    mask: Any = None,
    reverse: bool = False,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Runs `h_t = a_t h_{t-1} + b_t` elementwise, for real or complex numbers.

    The recurrence of LRU (arXiv:2303.06349), RG-LRU (arXiv:2402.19427), minGRU and S5. Letters: *B any
    leading axes, L the sequence, C channels. There is no restriction on |a|. Memory is that of the result.

    Args:
      a: broadcasts to `b`; floating or complex: (*B, L, C), or (C,) for constant factors, or a number.
      b: (*B, L, C), floating or complex; with another `axis`, the axes before that are *B, those after it C.
      axis: the time axis of `b`.
      initial_state: broadcasts to `b`'s shape without the time axis; None is zeros.
      reset: (*B, L) or what broadcasts to it, bool: the state coming into the token counts as zero.
      segment_ids: (*B, L) or what broadcasts to it, integers: the state is cut where the id differs from that
        of the valid token before it. The first token is no boundary.
      mask: (*B, L) or what broadcasts to it, bool: a token that is False is skipped. The state passes it, its
        result is zero, and nothing of it, not even a NaN, reaches a result or a gradient.
      reverse: run from the last token to the first.
      implementation: "reference", "scan", "native", or None to choose.

    Returns:
      h: `b`'s shape and dtype, complex if `a` is.
      last: the state after the last token, `b`'s shape without the time axis, in the state dtype: float32, or
        what that and the arguments are promoted to.

    Raises:
      ValueError: for shapes that do not fit, or an axis that `b` lacks.
      TypeError: for integer or bool numbers, or a `mask`, `reset` or `segment_ids` of another kind.
      NotImplementedError: when the named implementation cannot run the call.

    Example:
      >>> import jax.numpy as jnp
      >>> from probjax import recurrence
      >>> h, last = recurrence.linear_scan(0.5, jnp.ones((4, 1)))
      >>> print(h[:, 0], last)
      [1.    1.5   1.75  1.875] [1.875]
    """
    b = check.array("b", b, complex_allowed=True)
    axis = _axis(axis, b.ndim)
    prepared = _prepare_linear(a, b, axis, initial_state, reset, segment_ids, mask, reverse)
    spec = RecurrenceSpec(
        reverse=bool(reverse), implementation=check.implementation(implementation, "linear_scan")
    )
    if b.shape[axis] == 0:
        state = prepared.operands[2]
        last = jnp.broadcast_to(state, (*prepared.lead[:-1], state.shape[-1]))
        return jnp.zeros(b.shape, prepared.out.dtype), last.reshape(prepared.state_shape)
    (h,) = apply(primitive.linear_scan_call(prepared.dtype, spec), prepared.operands)
    last = h[..., 0 if reverse else -1, :]
    h = check.select(prepared.mask, h, 0, 1)
    return h.reshape(b.shape).astype(prepared.out.dtype), last.reshape(prepared.state_shape)


def linear_scan_step(
    a: Any, b: Any, *, state: Any, reset: Any = None, mask: Any = None
) -> tuple[Array, Array]:
    """Runs one token of `linear_scan`: its result is that of a call with L = 1.

    Args:
      a: broadcasts to `b`.
      b: (*B, C).
      state: broadcasts to `b`'s shape.
      reset, mask: bool, broadcast to (*B,).

    Returns:
      h: `b`'s shape and dtype, complex if `a` is; zero where `mask` is False.
      state: the next state.

    Raises:
      ValueError, TypeError: as in `linear_scan`.

    Example:
      >>> import jax.numpy as jnp
      >>> from probjax import recurrence
      >>> h, state = recurrence.linear_scan_step(0.5, jnp.ones(1), state=jnp.full(1, 2.0))
      >>> print(h)
      [2.]
    """
    b = check.array("b", b, complex_allowed=True)
    check.at_least("b", b, 1, "(*B, C)")
    a = check.array("a", a, complex_allowed=True)
    a = check.widened("a", a, b.shape, "the shape of b")
    reset, mask = (_step_flag(name, x, b.shape[:-1]) for name, x in (("reset", reset), ("mask", mask)))
    prepared = _prepare_linear(
        jnp.expand_dims(a, -2), jnp.expand_dims(b, -2), b.ndim - 1, state, reset, None, mask, False, "state"
    )
    state, h = _steps.linear_scan(
        jnp.broadcast_to(prepared.operands[2], b.shape),
        {i: jnp.squeeze(prepared.operands[i], -2) for i in range(2)},
    )
    if prepared.mask is not None:
        h = jnp.where(prepared.mask, h, 0)
    return h.astype(prepared.out.dtype), state


def _prepare_linear(
    a: Any,
    b: Array,
    axis: int,
    initial_state: Any,
    reset: Any,
    segment_ids: Any,
    mask: Any,
    reverse: bool,
    state_name: str = "initial_state",
) -> _Prepared:
    lead, channels = b.shape[: axis + 1], b.shape[axis + 1 :]
    shape = lead[:-1] + channels
    a = check.widened("a", check.array("a", a, complex_allowed=True), b.shape, "the shape of b")
    state = None if initial_state is None else check.array(state_name, initial_state, complex_allowed=True)
    dtype = check.state_dtype(b, a, state)
    if state is None:
        state = jnp.zeros((1,) * len(shape), dtype)
    else:
        state = check.widened(state_name, state, shape, "b's shape without the time axis")
    out = b.dtype
    if jnp.issubdtype(a.dtype, jnp.complexfloating) and not jnp.issubdtype(out, jnp.complexfloating):
        out = jnp.promote_types(out, jnp.complex64)
    reset, mask = check.cuts(reset, segment_ids, mask, lead, reverse)

    a, state = (_one_axis(x.astype(dtype), len(lead) - drop, channels) for x, drop in ((a, 0), (state, 1)))
    b = b.astype(dtype).reshape(*lead, math.prod(channels))
    if mask is not None:
        a, b = check.select(mask, a, 1, 1), check.select(mask, b, 0, 1)
    if reset is not None:
        a = check.select(~reset, a, 0, 1)
    return _Prepared([a, b, state], lead, reset, mask, jax.ShapeDtypeStruct(b.shape, out), shape)


def _one_axis(x: Array, lead: int, channels: tuple[int, ...]) -> Array:
    """`x` with the axes after the first `lead` ones merged; those are of full size or all of size 1."""
    tail = x.shape[lead:]
    if math.prod(tail) != 1 and tail != channels:
        x = jnp.broadcast_to(x, x.shape[:lead] + channels)
    return x.reshape(*x.shape[:lead], math.prod(x.shape[lead:]))


def selective_scan(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    *,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    initial_state: Any = None,
    reset: Any = None,
    segment_ids: Any = None,
    mask: Any = None,
    reverse: bool = False,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Runs the selective state space of Mamba-1 (arXiv:2312.00752).

    For each channel d and state n, with `dt' = softplus(dt + dt_bias)` or without softplus:
    `h_t = exp(dt'_t A) h_{t-1} + dt'_t B_t x_t`, `y_t = sum_n C_t h_t + D x_t`. There is no gate: multiply by
    silu(z) outside. Letters: *B any leading axes, L the sequence, D channels, N states, G groups. No array of
    L x D x N is formed, forward or backward. State, decay and softplus are in the state dtype: float32, or
    what that and the arguments are promoted to.

    Args:
      x: (*B, L, D), floating.
      dt: step sizes, broadcast to `x`.
      A: (D, N), the negative values themselves, not their logarithm.
      B, C: (*B, L, N), the same for all channels, or (*B, L, G, N), where channel d uses group d // (D / G).
        Batch and time axes may have size 1: (1, 1, N) does not change with time.
      D: (D,), weight of the skip connection, or None.
      dt_bias: (D,), added to `dt`, or None.
      dt_softplus: whether softplus is taken of dt + dt_bias.
      initial_state: broadcasts to (*B, D, N); None is zeros.
      reset: bool, broadcasts to (*B, L): the state coming into the token counts as zero.
      segment_ids: integers, broadcast to (*B, L): the state is cut where the id differs from that of the
        valid token before it. The first token is no boundary.
      mask: bool, broadcasts to (*B, L): a token that is False is skipped. The state passes it, its result is
        zero, and nothing of it, not even a NaN, reaches a result or a gradient.
      reverse: run from the last token to the first.
      implementation: "reference", "scan", "native", or None to choose.

    Returns:
      y: (*B, L, D) in the dtype of `x`.
      last: the state after the last token, (*B, D, N), in the state dtype.

    Raises:
      ValueError: for shapes that do not fit.
      TypeError: for numbers that are not floating, or a `mask`, `reset` or `segment_ids` of another kind.
      NotImplementedError: when the named implementation cannot run the call.

    Example:
      >>> import jax.numpy as jnp
      >>> from probjax import recurrence
      >>> x = jnp.ones((2, 5, 4))
      >>> B = C = jnp.ones((2, 5, 3))
      >>> y, last = recurrence.selective_scan(x, 0.1, -jnp.ones((4, 3)), B, C)
      >>> y.shape, last.shape
      ((2, 5, 4), (2, 4, 3))
    """
    x = check.array("x", x)
    check.at_least("x", x, 2, "(*B, L, D)")
    prepared, skip = _prepare_selective(
        x, dt, A, B, C, D, dt_bias, dt_softplus, initial_state, reset, segment_ids, mask, reverse
    )
    spec = RecurrenceSpec(
        reverse=bool(reverse), implementation=check.implementation(implementation, "selective_scan")
    )
    length = x.shape[-2]
    if length == 0:
        return jnp.zeros(x.shape, x.dtype), jnp.broadcast_to(prepared.operands[5], prepared.state_shape)
    operands = list(prepared.operands)
    if prepared.reset is not None:
        operands.append(prepared.reset)
    call = primitive.selective_scan_call(prepared.dtype, length, prepared.reset is not None, spec)
    y, last = apply(call, operands)
    y = y if skip is None else y + skip
    return check.select(prepared.mask, y, 0, 1).astype(x.dtype), last


def selective_scan_step(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    *,
    state: Any,
    dt_bias: Any = None,
    dt_softplus: bool = False,
    reset: Any = None,
    mask: Any = None,
) -> tuple[Array, Array]:
    """Runs one token of `selective_scan`: its result is that of a call with L = 1.

    Args:
      x: (*B, D).
      dt: broadcasts to `x`.
      A: (D, N).
      B, C: (*B, N) or (*B, G, N).
      D, dt_bias: (D,) or None.
      state: broadcasts to (*B, D, N).
      dt_softplus: as in `selective_scan`.
      reset, mask: bool, broadcast to (*B,).

    Returns:
      y: (*B, D) in the dtype of `x`, zero where `mask` is False.
      state: the next state, (*B, D, N), in the state dtype.

    Raises:
      ValueError, TypeError: as in `selective_scan`.

    Example:
      >>> import jax.numpy as jnp
      >>> from probjax import recurrence
      >>> x, A, B = jnp.ones(4), -jnp.ones((4, 3)), jnp.ones(3)
      >>> y, state = recurrence.selective_scan_step(x, 0.1, A, B, B, state=jnp.zeros((4, 3)))
      >>> state.shape
      (4, 3)
    """
    x = check.array("x", x)
    check.at_least("x", x, 1, "(*B, D)")
    dt = check.widened("dt", check.array("dt", dt), x.shape, "the shape of x")
    B, C = (_add_time("B", B, x.ndim), _add_time("C", C, x.ndim))
    reset, mask = (_step_flag(name, flag, x.shape[:-1]) for name, flag in (("reset", reset), ("mask", mask)))
    prepared, skip = _prepare_selective(
        jnp.expand_dims(x, -2),
        jnp.expand_dims(dt, -2),
        A,
        B,
        C,
        D,
        dt_bias,
        dt_softplus,
        state,
        reset,
        None,
        mask,
        False,
        "state",
    )
    u, dt, A, B, C, state = prepared.operands
    inputs = {
        0: u[..., 0, :],
        1: dt[..., 0, :],
        2: jnp.swapaxes(A, -1, -2),
        3: B[..., 0, :, :],
        4: C[..., 0, :, :],
    }
    if prepared.reset is not None:
        inputs[6] = prepared.reset[..., 0]
    state = jnp.broadcast_to(state, prepared.state_shape)
    state, y = _steps.selective_scan(jnp.swapaxes(state, -1, -2), inputs)
    y = y if skip is None else y + skip[..., 0, :]
    if prepared.mask is not None:
        y = jnp.where(prepared.mask, y, 0)
    return y.astype(x.dtype), jnp.swapaxes(state, -1, -2)


def _add_time(name: str, x: Any, ndim: int) -> Array:
    """A time axis in (*B, N) or (*B, G, N), where (*B, N) has `ndim` axes."""
    x = check.array(name, x)
    if x.ndim not in (ndim, ndim + 1):
        raise ValueError(f"{name}: got shape {x.shape}, want {ndim} axes, (*B, N), or {ndim + 1}, (*B, G, N)")
    return jnp.expand_dims(x, ndim - 1)


def _prepare_selective(
    x: Array,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    dt_bias: Any,
    dt_softplus: bool,
    initial_state: Any,
    reset: Any,
    segment_ids: Any,
    mask: Any,
    reverse: bool,
    state_name: str = "initial_state",
) -> tuple[_Prepared, Array | None]:
    """The operands of the primitive, and `D x` or None."""
    lead, channels = x.shape[:-1], x.shape[-1]
    dt = check.widened("dt", check.array("dt", dt), x.shape, "the shape of x")
    A = check.array("A", A)
    if A.ndim != 2 or A.shape[0] != channels:
        raise ValueError(f"A: got shape {A.shape}, want (D, N) with D = {channels}, the channels of x")
    size = A.shape[1]
    B, C = (_grouped(name, check.array(name, y), lead, channels, size) for name, y in (("B", B), ("C", C)))
    D, dt_bias = (None if y is None else check.array(name, y) for name, y in (("D", D), ("dt_bias", dt_bias)))
    for name, y in (("D", D), ("dt_bias", dt_bias)):
        if y is not None:
            check.exactly(name, y, (channels,), "one number per channel of x")
    state = None if initial_state is None else check.array(state_name, initial_state)
    dtype = check.state_dtype(x, dt, A, B, C, D, dt_bias, state)
    shape = (*lead[:-1], channels, size)
    if state is None:
        state = jnp.zeros((1,) * len(shape), dtype)
    else:
        state = check.widened(state_name, state, shape, "(*B, D, N)").astype(dtype)
    reset, mask = check.cuts(reset, segment_ids, mask, lead, reverse)

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    x, dt, A, B, C = (y.astype(dtype) for y in (x, dt, A, B, C))
    # Padding leaves the state as it is: exp(0 A) = 1, and nothing is added.
    x = check.select(mask, x, 0, 1)
    B, C = (check.select(mask if y.shape[-3] == lead[-1] else None, y, 0, 2) for y in (B, C))
    # `dt` itself, so that no NaN of padding goes through softplus, nor through its derivative.
    dt = check.select(mask, check.along(dt, -2, lead[-1]), 0, 1)
    if dt_bias is not None:
        dt = dt + dt_bias.astype(dtype)
    if dt_softplus:
        dt = jax.nn.softplus(dt)
    dt = check.select(mask, dt, 0, 1)
    A = A.reshape(*(1,) * (len(lead) - 1), *A.shape)
    skip = None if D is None else x * D.astype(dtype)
    return _Prepared([dt * x, dt, A, B, C, state], lead, reset, mask, out, shape), skip


def _grouped(name: str, x: Array, lead: tuple[int, ...], channels: int, size: int) -> Array:
    """`B` or `C` as (*B, L, G, N)."""
    rank = len(lead) + 1
    if x.ndim == rank:
        x = jnp.expand_dims(x, -2)
    if x.ndim != rank + 1 or any(n not in (1, m) for n, m in zip(x.shape, lead, strict=False)):
        raise ValueError(f"{name}: got shape {x.shape}, want {lead} and (N,) or (G, N) after it")
    if x.shape[-1] != size:
        raise ValueError(f"{name}: got {x.shape[-1]} states, want {size}, as A has")
    groups = x.shape[-2]
    if groups == 0 or channels % groups:
        raise ValueError(
            f"{name}: got {groups} groups, want a number that divides the {channels} channels of x"
        )
    return x


def ssd(
    query: Any,
    key: Any,
    value: Any,
    log_decay: Any,
    *,
    chunk_size: int = 64,
    precision: jax.lax.PrecisionLike = None,
    initial_state: Any = None,
    reset: Any = None,
    segment_ids: Any = None,
    mask: Any = None,
    reverse: bool = False,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Runs a recurrence of outer products with one decay per head: Mamba-2, gated linear attention.

    The state space dual of arXiv:2405.21060. For each head `h_t = exp(log_decay_t) h_{t-1} + key_t value_t^T`
    and `y_t = h_t^T query_t`: a token sees itself undecayed, and nothing is scaled by 1/sqrt(N). From
    Mamba-2's names: query = C, key = B, value = dt x, log_decay = dt A, the skip outside. Letters: *B any
    leading axes, L the sequence, G groups, H heads, N state size, P value size. Memory is linear in L; no
    array of L x N x P is formed, forward or backward.

    Args:
      query, key: (*B, L, G, N), floating; head h uses group h // (H / G).
      value: (*B, L, H, P).
      log_decay: broadcasts to (*B, L, H): (H,) is RetNet, 0.0 linear attention. Meant to be at most 0; -inf
        is a decay of exactly zero, with zero gradient. Positive numbers are computed as written.
      chunk_size: tokens whose results come from one matrix product, at least 1. It changes speed and memory
        only; what is below 16 counts as 16.
      precision: of the matrix products, as in `jax.numpy.dot`.
      initial_state: broadcasts to (*B, H, N, P); None is zeros.
      reset: bool, broadcasts to (*B, L): the state coming into the token counts as zero.
      segment_ids: integers, broadcast to (*B, L): the state is cut where the id differs from that of the
        valid token before it. The first token is no boundary.
      mask: bool, broadcasts to (*B, L): a token that is False is skipped. The state passes it, its result is
        zero, and nothing of it, not even a NaN, reaches a result or a gradient.
      reverse: run from the last token to the first.
      implementation: "reference", "scan", or None to choose.

    Returns:
      y: (*B, L, H, P) in the dtype of `value`.
      last: the state after the last token, (*B, H, N, P), in the state dtype: float32, or what that and the
        arguments are promoted to.

    Raises:
      ValueError: for shapes that do not fit, `chunk_size` below 1, or, where `jax_enable_checks` is on, a
        concrete `log_decay` that is positive.
      TypeError: for numbers that are not floating, or a `mask`, `reset` or `segment_ids` of another kind.
      NotImplementedError: when the named implementation cannot run the call.

    Example:
      >>> import jax.numpy as jnp
      >>> from probjax import recurrence
      >>> query = key = jnp.ones((2, 5, 1, 8))
      >>> y, last = recurrence.ssd(query, key, jnp.ones((2, 5, 4, 16)), jnp.full(4, -0.1))
      >>> y.shape, last.shape
      ((2, 5, 4, 16), (2, 4, 8, 16))
    """
    value = check.array("value", value)
    check.at_least("value", value, 3, "(*B, L, H, P)")
    prepared = _prepare_ssd(query, key, value, log_decay, initial_state, reset, segment_ids, mask, reverse)
    length = value.shape[-3]
    spec = RecurrenceSpec(
        reverse=bool(reverse),
        chunk=max(LEAST_CHUNK, _chunk_size(chunk_size)),
        precision=_precision.checked(precision),
        implementation=check.implementation(implementation, "ssd", ("reference", "scan")),
    )
    if length == 0:
        return jnp.zeros(value.shape, value.dtype), jnp.broadcast_to(
            prepared.operands[4], prepared.state_shape
        )
    y, last = apply(primitive.ssd_call(prepared.dtype, length, spec), prepared.operands)
    return check.select(prepared.mask, y, 0, 2).astype(value.dtype), last


def ssd_step(
    query: Any,
    key: Any,
    value: Any,
    log_decay: Any,
    *,
    state: Any,
    precision: jax.lax.PrecisionLike = None,
    reset: Any = None,
    mask: Any = None,
) -> tuple[Array, Array]:
    """Runs one token of `ssd`: its result is that of a call with L = 1.

    Args:
      query, key: (*B, G, N).
      value: (*B, H, P).
      log_decay: broadcasts to (*B, H).
      state: broadcasts to (*B, H, N, P).
      precision: of the product with the query.
      reset, mask: bool, broadcast to (*B,).

    Returns:
      y: (*B, H, P) in the dtype of `value`, zero where `mask` is False.
      state: the next state, (*B, H, N, P), in the state dtype.

    Raises:
      ValueError, TypeError: as in `ssd`.

    Example:
      >>> import jax.numpy as jnp
      >>> from probjax import recurrence
      >>> query = key = jnp.ones((1, 8))
      >>> y, state = recurrence.ssd_step(query, key, jnp.ones((4, 16)), -0.1, state=jnp.zeros((4, 8, 16)))
      >>> y.shape
      (4, 16)
    """
    value = check.array("value", value)
    check.at_least("value", value, 2, "(*B, H, P)")
    lead = value.shape[:-2]
    query, key = (check.array(name, x) for name, x in (("query", query), ("key", key)))
    for name, x in (("query", query), ("key", key)):
        check.at_least(name, x, 2, "(*B, G, N)")
    log_decay = check.array("log_decay", log_decay)
    log_decay = check.widened("log_decay", log_decay, value.shape[:-1], "(*B, H)")
    reset, mask = (_step_flag(name, x, lead) for name, x in (("reset", reset), ("mask", mask)))
    prepared = _prepare_ssd(
        jnp.expand_dims(query, -3),
        jnp.expand_dims(key, -3),
        jnp.expand_dims(value, -3),
        jnp.expand_dims(log_decay, -2),
        state,
        reset,
        None,
        mask,
        False,
        "state",
    )
    state = prepared.operands[4]
    inputs = {i: jnp.squeeze(x, len(lead)) for i, x in enumerate(prepared.operands[:4])}
    state, y = _steps.ssd(
        jnp.broadcast_to(state, prepared.state_shape), inputs, _precision.checked(precision)
    )
    if prepared.mask is not None:
        y = jnp.where(prepared.mask[..., None], y, 0)
    return y.astype(value.dtype), state


def _prepare_ssd(
    query: Any,
    key: Any,
    value: Array,
    log_decay: Any,
    initial_state: Any,
    reset: Any,
    segment_ids: Any,
    mask: Any,
    reverse: bool,
    state_name: str = "initial_state",
) -> _Prepared:
    *_, heads, size_out = value.shape
    lead = value.shape[:-2]
    query, key = (check.array(name, x) for name, x in (("query", query), ("key", key)))
    for name, x in (("query", query), ("key", key)):
        if x.ndim != value.ndim or x.shape[:-2] != lead:
            raise ValueError(f"{name}: got shape {x.shape}, want {lead} and (G, N) after it, as value has")
    if key.shape != query.shape:
        raise ValueError(f"key: got shape {key.shape}, want {query.shape}, that of query")
    groups, size = query.shape[-2:]
    if groups == 0 or heads % groups:
        raise ValueError(f"query: got {groups} groups, want a number that divides the {heads} heads of value")
    log_decay = check.array("log_decay", log_decay)
    _check_decay(log_decay)
    log_decay = check.widened("log_decay", log_decay, (*lead, heads), "(*B, L, H)")
    state = None if initial_state is None else check.array(state_name, initial_state)
    dtype = check.state_dtype(value, query, key, log_decay, state)
    shape = (*lead[:-1], heads, size, size_out)
    if state is None:
        state = jnp.zeros((1,) * len(shape), dtype)
    else:
        state = check.widened(state_name, state, shape, "(*B, H, N, P)").astype(dtype)
    reset, mask = check.cuts(reset, segment_ids, mask, lead, reverse)

    out = jax.ShapeDtypeStruct(value.shape, value.dtype)
    query, key, value = (check.select(mask, x.astype(dtype), 0, 2) for x in (query, key, value))
    log_decay = check.select(mask, check.along(log_decay.astype(dtype), -2, lead[-1]), 0, 1)
    if reset is not None:
        log_decay = check.select(~reset, log_decay, -math.inf, 1)
    return _Prepared([query, key, value, log_decay, state], lead, reset, mask, out, shape)


def _check_decay(log_decay: Array) -> None:
    if not jax.config.jax_enable_checks or isinstance(log_decay, jax.core.Tracer):
        return
    largest = jnp.max(log_decay, initial=-jnp.inf)
    if largest > 0:
        raise ValueError(f"log_decay: got {float(largest)}, want at most 0 (jax_enable_checks is on)")


def _chunk_size(size: Any) -> int:
    try:
        size = operator.index(size)
    except TypeError:
        raise TypeError(f"chunk_size: got {size!r}, want an integer") from None
    if size < 1:
        raise ValueError(f"chunk_size: got {size}, want at least 1")
    return size


def _axis(axis: Any, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis: got {axis}, want an axis of b, which has {ndim}")
    return axis % ndim


def _step_flag(name: str, x: Any, shape: tuple[int, ...]) -> Array | None:
    """`reset` or `mask` of a single token, with a time axis."""
    if x is None:
        return None
    return check.per_token(name, x, (*shape, 1), jnp.bool_, step=True)


__all__ = ["linear_scan", "linear_scan_step", "selective_scan", "selective_scan_step", "ssd", "ssd_step"]
