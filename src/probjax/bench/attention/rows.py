"""What each JAX label of the attention suites calls."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import math
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import probjax
from probjax.attention import implementations
from probjax.bench.attention.cells import BUCKETS, MAX_DISTANCE, AttentionCell, distance_buckets
from probjax.bench.measure import Unavailable

# f(query, key, value, *extra), where extra are the cell's further inputs in the order of `cell.extra`.
type Attention = Callable[..., Any]
# The fused kernels of each platform, best first: the row probjax_mha calls the first that is available.
_FUSED = {"cpu": ("native", "tiled"), "cuda": ("triton",)}
_HALF = ("bfloat16", "float16")


def platform() -> str:
    """Return the platform of the default backend under the name that lowering uses."""
    backend = jax.default_backend()
    if backend != "gpu":
        return backend
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"


def dense_bias(table: jax.Array, length: int) -> jax.Array:
    """Return the bias (1, heads, length, length) of a table, for callers that take only arrays.

    Of four forms tried (index of buckets, index of distances, skewed copies, one-hot product) the index of
    distances is the fastest on XLA:CPU, forward and backward, so that the peers are not held back by it.

    Args:
      table: (heads, buckets) bias of each bucket.
      length: number of queries and keys.
    """
    by_distance = table[:, distance_buckets(length)]
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    return by_distance[:, jnp.maximum(distance, 0)][None]


def _array_arguments(cell: AttentionCell, extra: Sequence[jax.Array]) -> dict[str, Any]:
    """Return the arguments of `jax.nn.dot_product_attention` for a cell; tokamax takes the same."""
    arguments: dict[str, Any] = {"is_causal": cell.causal}
    if cell.window is not None:
        arguments["local_window_size"] = (cell.window, 0)
    for name, array in zip(cell.extra, extra, strict=True):
        if name == "table":
            arguments["bias"] = dense_bias(array, cell.seq)
        elif name == "segment_ids":
            arguments["mask"] = (array[:, :, None] == array[:, None, :])[:, None]
        else:
            arguments[name] = array
    return arguments


def _jax_nn(cell: AttentionCell, implementation: str) -> tuple[Attention, str]:
    if implementation == "cudnn":
        if platform() != "cuda":
            raise Unavailable("cuDNN needs an NVIDIA GPU")
        if cell.dtype not in _HALF:
            raise Unavailable(f"cuDNN's attention takes {' and '.join(_HALF)} only, not {cell.dtype}")
    call: Any = jax.nn.dot_product_attention

    def attention(query: jax.Array, key: jax.Array, value: jax.Array, *extra: jax.Array) -> jax.Array:
        arguments = _array_arguments(cell, extra)
        return call(query, key, value, implementation=implementation, **arguments)

    return attention, implementation


def _dense_mask(cell: AttentionCell, arguments: dict[str, Any]) -> jax.Array | None:
    """Return one boolean mask for callers that have no other argument for it."""
    distance = jnp.arange(cell.seq)[:, None] - jnp.arange(cell.seq)[None, :]
    parts = [arguments["mask"]] if "mask" in arguments else []
    if cell.causal:
        parts.append((distance >= 0)[None, None])
    if cell.window is not None:
        parts.append((distance <= cell.window)[None, None])
    if not parts:
        return None
    mask = parts[0]
    for part in parts[1:]:
        mask = mask & part
    return mask


def _flax(cell: AttentionCell) -> tuple[Attention, str]:
    try:
        from flax import nnx
    except ImportError as error:
        raise Unavailable(f"flax.nnx cannot be imported ({error}): install flax") from None

    def attention(query: jax.Array, key: jax.Array, value: jax.Array, *extra: jax.Array) -> jax.Array:
        arguments = _array_arguments(cell, extra)
        mask = _dense_mask(cell, arguments)
        return nnx.dot_product_attention(query, key, value, bias=arguments.get("bias"), mask=mask)

    return attention, "flax"


def _pallas_mha(cell: AttentionCell) -> tuple[Attention, str]:
    if platform() != "cuda":
        raise Unavailable("JAX's Pallas kernel for GPUs needs an NVIDIA GPU")
    if cell.variant not in ("plain", "causal", "documents"):
        raise Unavailable(f"JAX's Pallas kernel takes no {cell.variant}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.experimental.pallas.ops.gpu.attention import mha
    except ImportError as error:
        raise Unavailable(f"this JAX has no pallas.ops.gpu.attention ({error})") from None

    def attention(query: jax.Array, key: jax.Array, value: jax.Array, *extra: jax.Array) -> jax.Array:
        ids = extra[0] if extra else None
        return mha(query, key, value, ids, sm_scale=1 / math.sqrt(cell.head_dim), causal=cell.causal)

    return attention, "triton"


class _Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes empty modules for a package that is imported but not used."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != self._package:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module empty."""


def import_tokamax() -> Any:
    """Return tokamax; its import of xprof, which attention does not use, is satisfied with empty modules.

    Raises:
      Unavailable: when it is not installed, or does not load.
    """
    if "xprof" not in sys.modules and importlib.util.find_spec("xprof") is None:
        sys.meta_path.append(_Empty("xprof"))
    try:
        return importlib.import_module("tokamax")
    # A library of this many dependencies breaks in many ways, none of which is ours to name.
    except Exception as error:
        raise Unavailable(f"tokamax cannot be imported ({type(error).__name__}: {error})") from None


def _tokamax(cell: AttentionCell, implementation: str) -> tuple[Attention, str]:
    tokamax = import_tokamax()

    def attention(query: jax.Array, key: jax.Array, value: jax.Array, *extra: jax.Array) -> jax.Array:
        arguments = _array_arguments(cell, extra)
        return tokamax.dot_product_attention(query, key, value, implementation=implementation, **arguments)

    return attention, implementation


def _sees_past(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= query


def _sees_all(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return jnp.logical_and(query >= 0, key >= 0)


def _sees_document(batch: Any, head: Any, query: Any, key: Any, ids: Any) -> Any:
    return jnp.logical_and(ids[batch, query] == ids[batch, key], key <= query)


def _sees_marked(batch: Any, head: Any, query: Any, key: Any, mask: Any) -> Any:
    return mask[batch, 0, query, key]


def _function_mask(cell: AttentionCell, extra: dict[str, Any]) -> Any:
    """Return the cell's mask as a MaskFunction; where there is none, a function that is always true."""
    window = cell.window
    if window is not None:
        return probjax.masks.MaskFunction(_window_function(window))
    if "segment_ids" in extra:
        return probjax.masks.MaskFunction(_sees_document, extra["segment_ids"])
    if "mask" in extra:
        return probjax.masks.MaskFunction(_sees_marked, extra["mask"])
    return probjax.masks.MaskFunction(_sees_past if cell.causal else _sees_all)


def _window_function(window: int) -> Callable[..., Any]:
    # One function object for all calls: a new one is a new program.
    if window not in _WINDOW_FUNCTIONS:

        def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return jnp.logical_and(key <= query, query - key <= window)

        _WINDOW_FUNCTIONS[window] = sees
    return _WINDOW_FUNCTIONS[window]


_WINDOW_FUNCTIONS: dict[int, Callable[..., Any]] = {}


def _available(implementation: str) -> str | None:
    """Return why an implementation is not available, or None when it is."""
    found = implementations(platform())
    return found.get(implementation, f"probjax has no implementation named {implementation} yet")


def _fused() -> str:
    names = _FUSED.get(platform(), ("tiled",))
    for name in names:
        if _available(name) is None:
            return name
    raise Unavailable(f"no fused kernel is available: {_available(names[-1])}")


def _probjax(
    cell: AttentionCell, implementation: str | None, *, function_mask: bool = False
) -> tuple[Attention, str]:
    """Return our own attention with the given implementation, and the name of the one that runs."""
    if implementation is not None and (reason := _available(implementation)) is not None:
        raise Unavailable(reason)

    def arguments(extra: Sequence[Any]) -> dict[str, Any]:
        named = dict(zip(cell.extra, extra, strict=True))
        found: dict[str, Any] = {"precision": None if cell.precision == "default" else cell.precision}
        if "table" in named:
            found["bias"] = probjax.biases.RelativePosition(
                named["table"], bucketing="t5", max_distance=MAX_DISTANCE, bidirectional=False
            )
        if "bias" in named:
            found["bias"] = named["bias"]
        if function_mask:
            return {**found, "mask": _function_mask(cell, named)}
        found["is_causal"] = cell.causal
        if cell.window is not None:
            found["local_window_size"] = (cell.window, 0)
        return found | {name: named[name] for name in ("segment_ids", "mask") if name in named}

    def attention(query: Any, key: Any, value: Any, *extra: Any) -> Any:
        return probjax.dot_product_attention(
            query, key, value, implementation=implementation, **arguments(extra)
        )

    if implementation is not None:
        return attention, implementation
    shape = jax.ShapeDtypeStruct(cell.shape, cell.dtype)
    shapes = [extra_shape(cell, name) for name in cell.extra]
    plan = probjax.attention_plan(shape, shape, shape, platform=platform(), **arguments(shapes))
    return attention, plan.implementation


def extra_shape(cell: AttentionCell, name: str) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of one of the inputs in `cell.extra`."""
    batch, seq, heads, _ = cell.shape
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "table": ((heads, BUCKETS), jnp.float32),
        "bias": ((1, heads, seq, seq), cell.dtype),
        "segment_ids": ((batch, seq), jnp.int32),
        "mask": ((batch, 1, seq, seq), jnp.bool_),
    }
    return jax.ShapeDtypeStruct(*shapes[name])


def _flex(cell: AttentionCell) -> tuple[Attention, str]:
    # On a GPU it stands beside probjax_mha: what the function costs, not what another choice would.
    return _probjax(cell, _fused() if platform() == "cuda" else None, function_mask=True)


ROWS: dict[str, Callable[[AttentionCell], tuple[Attention, str]]] = {
    "probjax_default": lambda cell: _probjax(cell, None),
    "probjax_mha": lambda cell: _probjax(cell, _fused()),
    "probjax_flex": _flex,
    "probjax_flax": _flax,
    "probjax_cudnn": lambda cell: _probjax(cell, "cudnn"),
    "xla_dense": lambda cell: _probjax(cell, "dense"),
    "xla_tiled": lambda cell: _probjax(cell, "tiled"),
    "mha_interpret": lambda cell: _probjax(cell, "interpret"),
    "jax_xla": lambda cell: _jax_nn(cell, "xla"),
    "jax_cudnn": lambda cell: _jax_nn(cell, "cudnn"),
    "pallas_mha": _pallas_mha,
    "tokamax_mosaic": lambda cell: _tokamax(cell, "mosaic"),
    "tokamax_triton": lambda cell: _tokamax(cell, "triton"),
    "tokamax_xla": lambda cell: _tokamax(cell, "xla"),
}
