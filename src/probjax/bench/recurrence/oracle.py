"""The recurrences and their gradients in float64 NumPy: what the error columns are measured against.

It shares no code with the implementations: explicit loops over time, gradients by hand. States are kept at
the starts of chunks only and made again in the backward pass, so that long sequences fit into memory.
"""

from collections.abc import Callable, Iterator

import numpy as np

type Arrays = dict[str, np.ndarray]
_CHUNK = 32


def reference(op: str, inputs: Arrays, *, gradients: bool) -> Arrays:
    """Return the exact output of a cell, and its gradients.

    Args:
      op: see `cells.RecurrenceCell`.
      inputs: from `cells.make_inputs`.
      gradients: whether to compute the gradients of the real part of sum(output · cotangent) too, complex
        ones in JAX's convention (without conjugation).

    Returns:
      float64 or complex128 arrays: `output`, and with `gradients` one for each operand.
    """
    wide = {
        name: array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
        for name, array in inputs.items()
    }
    if op == "selective_scan":
        return _selective(wide, gradients)
    return (_ssd if op == "ssd" else _linear)(wide, gradients)


def _chunks(length: int) -> Iterator[slice]:
    for start in range(0, length, _CHUNK):
        yield slice(start, min(start + _CHUNK, length))


def _run(a: np.ndarray, b: np.ndarray, h: np.ndarray) -> np.ndarray:
    """All h_t = a_t h_{t-1} + b_t over axis 1, from `h`; the axis of `a` may have size 1."""
    every = np.empty((b.shape[0], b.shape[1], *h.shape[1:]), b.dtype)
    for t in range(b.shape[1]):
        np.multiply(a[:, min(t, a.shape[1] - 1)], h, out=every[:, t])
        every[:, t] += b[:, t]
        h = every[:, t]
    return every


def _back(a: np.ndarray, d: np.ndarray, late: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All g_t = d_t + a_{t+1} g_{t+1} of a chunk, where `late` is a_{t+1} g_{t+1} at its end; a_0 g_0 too."""
    every = np.empty_like(d)
    for t in range(d.shape[1] - 1, -1, -1):
        np.add(d[:, t], late, out=every[:, t])
        late = a[:, min(t, a.shape[1] - 1)] * every[:, t]
    return every, late


def _before(h: np.ndarray, start: np.ndarray) -> np.ndarray:
    return np.concatenate([start[:, None], h[:, :-1]], 1)


def _linear(x: Arrays, gradients: bool) -> Arrays:
    b = x["b"]
    a = x["a"] if x["a"].ndim == b.ndim else x["a"][None, None]
    h = _run(a, b, np.zeros_like(b[:, 0]))
    if not gradients:
        return {"output": h}
    g, _ = _back(a, x["cotangent"], np.zeros_like(b[:, 0]))
    da = g * _before(h, np.zeros_like(b[:, 0]))
    return {"output": h, "a": da if x["a"].ndim == b.ndim else da.sum((0, 1)), "b": g}


def _both_ways(
    length: int,
    h: np.ndarray,
    forward: Callable[[slice, np.ndarray], np.ndarray],
    backward: Callable[[slice, np.ndarray, np.ndarray], np.ndarray] | None,
) -> None:
    """Run over the chunks, forward and then backward.

    Args:
      length: of the sequence.
      h: the state before it.
      forward: takes a chunk and the state before it, returns the state after it.
      backward: takes a chunk, the state before it and the gradient that comes from after it, returns the
        gradient that goes before it.
    """
    starts = []
    for chunk in _chunks(length):
        starts.append(h)
        h = forward(chunk, h)
    late = np.zeros_like(h)
    if backward is not None:
        for chunk, start in reversed(list(zip(_chunks(length), starts, strict=True))):
            late = backward(chunk, start, late)


def _selective(x: Arrays, gradients: bool) -> Arrays:
    u, A, B, C = x["x"], x["A"], x["B"], x["C"]
    dt = np.logaddexp(0, x["dt"])
    out = {"output": np.empty_like(u)}
    if gradients:
        out |= {name: np.zeros_like(x[name]) for name in ("x", "dt", "A", "B", "C", "D")}

    def states(c: slice, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        a = np.exp(dt[:, c, :, None] * A)
        return a, _run(a, (dt[:, c] * u[:, c])[..., None] * B[:, c, None], h)

    def forward(c: slice, h: np.ndarray) -> np.ndarray:
        _, every = states(c, h)
        out["output"][:, c] = (every @ C[:, c, :, None])[..., 0] + x["D"] * u[:, c]
        return every[:, -1].copy()

    def backward(c: slice, start: np.ndarray, late: np.ndarray) -> np.ndarray:
        a, every = states(c, start)
        ct = x["cotangent"][:, c]
        g, late = _back(a, ct[..., None] * C[:, c, None], late)
        d_exponent = g * _before(every, start) * a
        d_input = (g @ B[:, c, :, None])[..., 0]  # of dt · x
        step = dt[:, c]
        out["A"] += np.einsum("bldn,bld->dn", d_exponent, step)
        slope = 1 / (1 + np.exp(-x["dt"][:, c]))
        out["dt"][:, c] = slope * ((d_exponent * A).sum(-1) + d_input * u[:, c])
        out["x"][:, c] = d_input * step + ct * x["D"]
        out["B"][:, c] = ((step * u[:, c])[:, :, None] @ g)[:, :, 0]
        out["C"][:, c] = (ct[:, :, None] @ every)[:, :, 0]
        out["D"] += (ct * u[:, c]).sum((0, 1))
        return late

    start = np.zeros((u.shape[0], *A.shape))
    _both_ways(u.shape[1], start, forward, backward if gradients else None)
    return out


def _ssd(x: Arrays, gradients: bool) -> Arrays:
    q, k, v = x["query"], x["key"], x["value"]
    decay = np.exp(x["log_decay"])
    out = {"output": np.empty_like(v)}
    if gradients:
        out |= {name: np.zeros_like(x[name]) for name in ("query", "key", "value", "log_decay")}

    def states(c: slice, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        a = decay[:, c, :, None, None]
        return a, _run(a, k[:, c, :, :, None] * v[:, c, :, None], h)

    def forward(c: slice, h: np.ndarray) -> np.ndarray:
        _, every = states(c, h)
        out["output"][:, c] = (q[:, c, :, None] @ every)[..., 0, :]
        return every[:, -1].copy()

    def backward(c: slice, start: np.ndarray, late: np.ndarray) -> np.ndarray:
        a, every = states(c, start)
        ct = x["cotangent"][:, c]
        g, late = _back(a, q[:, c, :, :, None] * ct[:, :, :, None], late)
        out["log_decay"][:, c] = (g * _before(every, start)).sum((-1, -2)) * decay[:, c]
        out["query"][:, c] = (every @ ct[..., None])[..., 0].sum(2, keepdims=True)
        out["key"][:, c] = (g @ v[:, c, :, :, None])[..., 0].sum(2, keepdims=True)
        out["value"][:, c] = (k[:, c, :, None] @ g)[..., 0, :]
        return late

    start = np.zeros((v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]))
    _both_ways(v.shape[1], start, forward, backward if gradients else None)
    return out
