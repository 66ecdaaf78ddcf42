"""The UNet in float64 NumPy, convolutions as sums over taps. Of the module it takes the parameters' names."""

import itertools

import numpy as np
from transformer_reference import array, attention, linear, norm, silu


def group_norm(p, x, groups, epsilon=1e-6):
    y = x.reshape(len(x), -1, groups, x.shape[-1] // groups)
    mean, var = y.mean((1, 3), keepdims=True), y.var((1, 3), keepdims=True)
    return ((y - mean) / np.sqrt(var + epsilon)).reshape(x.shape) * array(p["scale"]) + array(p["bias"])


def padded(x, before, after):
    return np.pad(x, [(0, 0), *zip(before, after, strict=True), (0, 0)])


def conv(p, x, strides=None):
    """With as much padding that an axis of n gives ceil(n / stride)."""
    kernel = array(p["kernel"])
    taps, rank = kernel.shape[:-2], kernel.ndim - 2
    strides = strides or (1,) * rank
    sizes = [-(-n // s) for n, s in zip(x.shape[1:-1], strides, strict=True)]
    missing = [
        max((m - 1) * s + k - n, 0) for m, s, k, n in zip(sizes, strides, taps, x.shape[1:-1], strict=True)
    ]
    x = padded(x, [m // 2 for m in missing], [m - m // 2 for m in missing])
    y = np.zeros((len(x), *sizes, kernel.shape[-1]))
    for tap in itertools.product(*map(range, taps)):
        cut = tuple(slice(t, t + (m - 1) * s + 1, s) for t, m, s in zip(tap, sizes, strides, strict=True))
        y += x[(slice(None), *cut)] @ kernel[tap]
    return y + array(p["bias"])


def grow(p, x, strides):
    """Every entry adds the taps, 2 per step, around its place; the kernel is not turned round."""
    kernel = array(p["kernel"])
    taps, sizes = kernel.shape[:-2], x.shape[1:-1]
    wide = np.zeros(
        (len(x), *(n * s + k for n, s, k in zip(sizes, strides, taps, strict=True)), kernel.shape[-1])
    )
    for tap in itertools.product(*map(range, taps)):
        back = tuple(k - 1 - t for k, t in zip(taps, tap, strict=True))
        cut = tuple(slice(b, b + (n - 1) * s + 1, s) for b, n, s in zip(back, sizes, strides, strict=True))
        wide[(slice(None), *cut)] += x @ kernel[tap]
    # The taps reach (k - s) / 2 beyond on each side.
    cut = tuple(
        slice((k - s) // 2, (k - s) // 2 + n * s) for k, s, n in zip(taps, strides, sizes, strict=True)
    )
    return wide[(slice(None), *cut)] + array(p["bias"])


def block(p, x, condition, groups):
    h = conv(p["conv1"], silu(group_norm(p["norm1"], x, groups(x.shape[-1]))))
    h = group_norm(p["norm2"], h, groups(h.shape[-1]))
    if condition is not None:
        parts = linear(p["modulation"], silu(condition)).reshape(len(x), *(1,) * (x.ndim - 2), -1)
        scale, shift = np.split(parts, 2, -1)
        h = h * (1 + scale) + shift
    return conv(p["conv2"], silu(h)) + linear(p["skip"], x)


def attend(p, x, context, groups):
    h = group_norm(p["norm"], x, groups(x.shape[-1])).reshape(len(x), -1, x.shape[-1])
    y = x.reshape(h.shape) + attention(p["attention"], h)
    if context is not None:
        y = y + attention(p["context_attention"], norm(p["context_norm"], y), context)
    return y.reshape(x.shape)


def unet(p, x, *, strides, groups, condition=None, context=None):
    def run(steps, h):
        for i in range(len(steps)):
            h = block(steps[i]["block"], h, condition, groups)
            if "attention" in steps[i]:
                h = attend(steps[i]["attention"], h, context, groups)
        return h

    h = first = linear(p["embed"], x)
    kept, deep = [], len(p["down"])
    for i in range(deep):
        h = run(p["down"][i], h)
        kept.append(h)
        if i < deep - 1:
            h = conv(p["shrink"][i], h, strides)
    h = run(p["middle"], h)
    for i in reversed(range(deep)):
        h = run(p["up"][i], np.concatenate([h, kept[i]], -1))
        if i:
            h = grow(p["grow"][i - 1], h, strides)
            h = h[(slice(None), *(slice(n) for n in kept[i - 1].shape[1:-1]))]
    return linear(p["head"], np.concatenate([h, first], -1))
