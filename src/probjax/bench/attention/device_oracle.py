"""The reference for long sequences: dense attention on the device in true float32, one head at a time.

Float64 on the processor would take minutes there. It is XLA's automatic derivative of the plain formula and
shares no code with the implementations; its own error is some 1e-6, so the error columns of half types and of
TF32 are true with it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from probjax.bench.attention.cells import distance_buckets


def reference(
    inputs: dict[str, np.ndarray], *, causal: bool, gradients: bool, window: int | None = None
) -> dict[str, np.ndarray]:
    """Return what `oracle.reference` returns, computed in float32 on the default device."""
    batch, length, heads, _ = inputs["query"].shape
    options = {"causal": causal, "window": window, "gradients": gradients}
    parts: dict[tuple[int, int], dict[str, Any]] = {}
    for h in range(heads):
        for b in range(batch):
            one = {name: inputs[name][b, :, h] for name in ("query", "key", "value", "cotangent")}
            if "table" in inputs:
                # The bias of a pair depends on its distance alone.
                one["by_distance"] = inputs["table"][h, distance_buckets(length)]
            if "bias" in inputs:
                one["bias"] = inputs["bias"][0, h]
            if "segment_ids" in inputs:
                one["segment_ids"] = inputs["segment_ids"][b]
            if "mask" in inputs:
                one["mask"] = inputs["mask"][b, 0]
            parts[b, h] = _one_head(one, **options)

    def stacked(name: str) -> np.ndarray:
        rows = [np.stack([np.asarray(parts[b, h][name]) for h in range(heads)], 1) for b in range(batch)]
        return np.stack(rows)

    def summed(name: str) -> np.ndarray:
        rows = [sum(np.asarray(parts[b, h][name], np.float64) for b in range(batch)) for h in range(heads)]
        return np.stack(rows)

    out = {"output": stacked("output")}
    if gradients:
        out |= {name: stacked(name) for name in ("query", "key", "value")}
        if "bias" in inputs:
            out["bias"] = summed("bias")[None]
        if "table" in inputs:
            out["table"] = _by_bucket(summed("by_distance"), inputs["table"].shape, length)
    return out


def _by_bucket(by_distance: np.ndarray, shape: tuple[int, ...], length: int) -> np.ndarray:
    table = np.zeros(shape)
    for row, values in zip(table, by_distance, strict=True):
        np.add.at(row, distance_buckets(length), values)
    return table


@functools.partial(jax.jit, static_argnames=("causal", "window", "gradients"))
def _one_head(
    one: dict[str, jax.Array], *, causal: bool, window: int | None, gradients: bool
) -> dict[str, jax.Array]:
    learned = ("query", "key", "value", *(name for name in ("bias", "by_distance") if name in one))

    def attend(values: dict[str, jax.Array]) -> jax.Array:
        length, head_dim = values["query"].shape
        distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
        scores = values["query"] @ values["key"].T / np.sqrt(head_dim)
        if "bias" in values:
            scores += values["bias"]
        if "by_distance" in values:
            scores += values["by_distance"][jnp.maximum(distance, 0)]
        visible = jnp.ones((length, length), bool)
        if causal:
            visible &= distance >= 0
        if window is not None:
            visible &= distance <= window
        if "segment_ids" in one:
            visible &= one["segment_ids"][:, None] == one["segment_ids"][None, :]
        if "mask" in one:
            visible &= one["mask"]
        return jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1) @ values["value"]

    with jax.default_matmul_precision("highest"):
        values = {name: one[name].astype(jnp.float32) for name in learned}
        if not gradients:
            return {"output": attend(values)}
        output, pull = jax.vjp(attend, values)
        return {"output": output, **pull(one["cotangent"].astype(jnp.float32))[0]}
