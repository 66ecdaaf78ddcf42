"""Attention layer, transformer and diffusion transformer in float64 NumPy: one product after the other.

Of the modules they take the parameters' names, nothing else.
"""

import numpy as np
from flax import nnx


def tree(module):
    """The parameters of a module as nested dicts of float64 arrays."""
    return nnx.to_pure_dict(nnx.state(module))


def array(x):
    return np.asarray(x, np.float64)


def linear(p, x, axes=1):
    kernel = array(p["kernel"])
    y = np.tensordot(x, kernel, axes)
    return y + array(p["bias"]) if "bias" in p else y


def norm(p, x, epsilon=1e-6):
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon)
    if "scale" in p:
        y = y * array(p["scale"])
    return y + array(p["bias"]) if "bias" in p else y


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


def rotate(x, positions, theta):
    half = x.shape[-1] // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = positions[..., None] * theta ** (-i / half)
        a, b = x[..., i], x[..., half + i]
        out[..., i] = a * np.cos(angle) - b * np.sin(angle)
        out[..., half + i] = a * np.sin(angle) + b * np.cos(angle)
    return out


def attention(p, x, context=None, *, visible=True, added=0.0, rotary=None, positions=None, relative=False):
    """x (B, T, D); `visible` and `added` broadcast to (B, N, T, S)."""
    context = x if context is None else context
    q, k, v = linear(p["query"], x), linear(p["key"], context), linear(p["value"], context)
    if "query_ln" in p:
        q, k = norm(p["query_ln"], q), norm(p["key_ln"], k)
    T, S, N = q.shape[1], k.shape[1], q.shape[2]
    if rotary is not None:
        positions = np.broadcast_to(np.arange(T), x.shape[:2]) if positions is None else positions
        q, k = rotate(q, positions, rotary), rotate(k, positions, rotary)
    k, v = (np.repeat(y, N // y.shape[2], 2) for y in (k, v))
    score = np.einsum("btnd,bsnd->bnts", q, k) / np.sqrt(q.shape[-1])
    if relative:
        table = array(p["relative_table"])
        R = table.shape[1]
        bucket = np.clip(np.arange(S)[None] - np.arange(T)[:, None] + R // 2, 0, R - 1)
        score = score + table[:, bucket]
    visible = np.broadcast_to(visible, score.shape)
    score = np.where(visible, score + added, -np.inf)
    most = score.max(-1, keepdims=True)
    weight = np.exp(score - np.where(np.isfinite(most), most, 0))
    total = weight.sum(-1, keepdims=True)
    weight = weight / np.where(total == 0, 1, total)
    return linear(p["out"], np.einsum("bnts,bsnd->btnd", weight, v), 2)


def mlp(p, x, activation=gelu):
    last = len(p["layers"]) - 1
    for i in range(last + 1):
        x = linear(p["layers"][i], x)
        x = activation(x) if i < last else x
    return x


def modulated(p, x, condition, gate):
    if condition is None:
        return norm(p, x), 1.0
    m = p["modulation"]
    parts = mlp(m, condition) if "layers" in m else linear(m, silu(condition))
    parts = np.split(parts[:, None], 3 if gate else 2, -1)
    y = norm(p.get("norm", {}), x) * (1 + parts[0]) + parts[1]
    return y, parts[2] if gate else 1.0


def block(p, x, *, condition=None, context=None, gate=False, context_visible=True, **options):
    h, g = modulated(p["attention_norm"], x, condition, gate)
    x = x + g * attention(p["attention"], h, **options)
    if context is not None:
        h = norm(p["context_norm"], x)
        x = x + attention(p["context_attention"], h, context, visible=context_visible)
    h, g = modulated(p["mlp_norm"], x, condition, gate)
    return x + g * mlp(p["mlp"], h)


def sinusoidal(positions, features):
    half = (features + 1) // 2
    angles = positions[..., None] * 10_000.0 ** (-np.arange(half) / half)
    return np.concatenate([np.sin(angles), np.cos(angles)], -1)[..., :features]


def transformer(p, x, *, positions=None, layers=None, **options):
    """Of unrolled stacks."""
    x = linear(p["embed"], x) if "embed" in p else x
    if positions == "sinusoidal":
        x = x + sinusoidal(np.arange(x.shape[1]), x.shape[-1])
    elif positions == "learned":
        x = x + array(p["position_table"])[: x.shape[1]]
    blocks = p["stack"]["blocks"]
    for i in range(len(blocks)):
        x = block(blocks[i], x, **options)
    x = norm(p["norm"], x) if "norm" in p else x
    return linear(p["head"], x) if "head" in p else x


def diffusion(p, x, t, *, condition=None, gate=True, positions="sinusoidal", **options):
    angles = t[:, None] * array(p["frequencies"]["frequencies"])[:, 0]
    time = mlp(p["time_mlp"], np.concatenate([np.cos(angles), np.sin(angles)], -1), silu)
    if condition is not None:
        time = time + linear(p["condition"], condition)
    x = transformer(p["transformer"], x, positions=positions, condition=time, gate=gate, **options)
    if "norm" in p:
        x, _ = modulated(p["norm"], x, time, False)
    return linear(p["head"], x)
