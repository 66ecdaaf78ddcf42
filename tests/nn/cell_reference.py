"""Cells and blocks written down again in NumPy: float64, one document and one token at a time."""

import math

import numpy as np


def outputs(name, cell, params, x, reset=None, segment_ids=None, mask=None):
    """What cell `name` gives for x (B, L, D): each document of valid tokens on its own, zero at padding."""
    x = np.asarray(x, np.float64)
    lead = x.shape[:2]
    y = np.zeros(x.shape)
    reset, segment_ids, mask = (
        np.broadcast_to(default if flag is None else np.asarray(flag), lead)
        for flag, default in ((reset, False), (segment_ids, 0), (mask, True))
    )
    for row in range(lead[0]):
        documents, last = [], None
        for t in np.flatnonzero(mask[row]):
            if last is None or reset[row, t] or segment_ids[row, t] != segment_ids[row, last]:
                documents.append([])
            documents[-1].append(t)
            last = t
        for tokens in documents:
            y[row, tokens] = DOCUMENT[name](cell, params, x[row, tokens])
    return y


def softplus(x):
    return np.logaddexp(0, x)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def linear(p, x):
    y = x @ p["kernel"]
    return y + p["bias"] if "bias" in p else y


def convolved(p, x):
    width = p["conv_weight"].shape[0]
    y = np.zeros_like(x)
    for t in range(len(x)):
        y[t] = p["conv_bias"]
        for back in range(min(width, t + 1)):
            y[t] += p["conv_weight"][width - 1 - back] * x[t - back]
    return y


def lru(cell, p, x):
    eigenvalue = np.exp(-np.exp(p["nu"]) + 1j * np.exp(p["theta"]))
    h, y = np.zeros(len(eigenvalue), complex), np.zeros_like(x)
    for t in range(len(x)):
        h = eigenvalue * h + np.exp(p["gamma"]) * (x[t] @ (p["B_re"] + 1j * p["B_im"]))
        y[t] = (h @ (p["C_re"] + 1j * p["C_im"])).real + x[t] @ p["D"]
    return y


def selective(x, dt, A, B, C, D):
    h, y = np.zeros(A.shape), np.zeros_like(x)
    for t in range(len(x)):
        h = np.exp(dt[t][:, None] * A) * h + (dt[t] * x[t])[:, None] * B[t]
        y[t] = h @ C[t] + D * x[t]
    return y


def mamba(cell, p, x):
    dt = softplus(linear(p["to_dt"], x))
    return selective(x, dt, -np.exp(p["A_log"]), linear(p["to_B"], x), linear(p["to_C"], x), p["D"])


def ssd(cell, p, x):
    query, key, value, logit = (linear(p[part], x) for part in ("query", "key", "value", "decay"))
    h, y = np.zeros((key.shape[1], value.shape[1])), np.zeros_like(x)
    for t in range(len(x)):
        h = sigmoid(-logit[t]) * h + np.outer(key[t], value[t])
        y[t] = query[t] @ h
    return y


def mamba_block(cell, p, x):
    inner = p["D"].shape[0]
    rank, states = p["dt_proj"]["kernel"].shape[0], p["A_log"].shape[1]
    both = linear(p["in_proj"], x)
    x, z = both[:, :inner], both[:, inner:]
    x = silu(convolved(p, x))
    low = linear(p["x_proj"], x)
    dt = softplus(linear(p["dt_proj"], low[:, :rank]))
    y = selective(x, dt, -np.exp(p["A_log"]), low[:, rank : rank + states], low[:, rank + states :], p["D"])
    return linear(p["out_proj"], y * silu(z))


def mamba2_block(cell, p, x):
    H, P, G, N = cell.heads, cell.head_size, cell.groups, cell.state_size
    E = H * P
    projected = linear(p["in_proj"], x)
    z, convolve, dt = projected[:, :E], projected[:, E : 2 * E + 2 * G * N], projected[:, 2 * E + 2 * G * N :]
    convolve = silu(convolved(p, convolve))
    dt = softplus(dt + p["dt_bias"])
    y = np.zeros((len(x), H, P))
    for head in range(H):
        group = head // (H // G)
        value = convolve[:, head * P : (head + 1) * P]
        B = convolve[:, E + group * N : E + (group + 1) * N]
        C = convolve[:, E + (G + group) * N : E + (G + group + 1) * N]
        h = np.zeros((N, P))
        for t in range(len(x)):
            h = np.exp(-dt[t, head] * np.exp(p["A_log"][head])) * h + dt[t, head] * np.outer(B[t], value[t])
            y[t, head] = C[t] @ h + p["D"][head] * value[t]
    y = y.reshape(len(x), E) * silu(z)
    parts = y.reshape(len(x), G, E // G)
    parts = parts / np.sqrt((parts**2).mean(-1, keepdims=True) + cell.norm_epsilon)
    return linear(p["out_proj"], parts.reshape(len(x), E) * p["norm_scale"])


def rglru_block(cell, p, x):
    gate = gelu(linear(p["linear_gate"], x))
    x = convolved(p, linear(p["linear_x"], x))

    def blocks(q, x):
        size = q["kernel"].shape[1]
        parts = [x[:, k * size : (k + 1) * size] @ kernel for k, kernel in enumerate(q["kernel"])]
        return sigmoid(np.concatenate(parts, -1) + q["bias"])

    a = np.exp(-8 * blocks(p["recurrence_gate"], x) * softplus(p["Lambda"]))
    multiplier = np.sqrt(1 - a * a)
    multiplier[:1] = 1
    into = multiplier * blocks(p["input_gate"], x) * x
    h = np.zeros(x.shape)
    for t in range(len(x)):
        h[t] = a[t] * (h[t - 1] if t else 0) + into[t]
    return linear(p["linear_out"], h * gate)


DOCUMENT = {
    "lru": lru,
    "mamba": mamba,
    "ssd": ssd,
    "mamba_block": mamba_block,
    "mamba2_block": mamba2_block,
    "rglru_block": rglru_block,
}
