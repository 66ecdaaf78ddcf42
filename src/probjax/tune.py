"""`probjax tune`: measures attention on the GPU at hand and keeps what is fastest in the user's cache
directory.

For each key of a table (`probjax.attention.tables`) every cut of the Triton kernels that fits is compiled and
run, cuDNN beside them where it takes the call, and the best is kept. What is compared is the time of the
kernels on the device, by CUPTI, each kernel of backward on its own.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from probjax.attention import dispatch, dot_product_attention, gpu_blocks, gpu_triton, tables
from probjax.attention._triton import HALF, SIX, TF32, THREE, ceil_power
from probjax.attention.gpu_blocks import Kernels
from probjax.attention.tables import Blocks, Entry, Key, Table
from probjax.bench import device_time

DTYPES = ("bfloat16", "float32", "float32_high", "float32_highest")
NAMES = {"forward": ("forward",), "tangent": ("tangent",), "backward": ("one", "query", "key")}
"""The kernels that are measured. That of bias gradients keeps the cut of the rules."""

HEADS = 8
CALLS = 8
THREADS = 8
CUDNN_KEYS = 256
"""Fewest keys for which a faster cuDNN kernel pays for the longer time that the host needs to call it."""

Times = dict[str, float]  # microseconds of one call, by the kernel's name
Measure = Callable[[Any, Sequence[Any]], Times]


def keys(
    dtypes: Iterable[str], head_sizes: Iterable[int], lengths: Iterable[int], pairs: int, kinds: Iterable[str]
) -> list[Key]:
    """The keys of a grid, with and without a mask, those first that matter most: half types, and long ones
    last.

    Raises:
      ValueError: an unknown dtype or kind, or a size below 1.
    """
    dtypes, head_sizes, lengths, kinds = list(dtypes), list(head_sizes), list(lengths), list(kinds)
    for name, given, known in (("dtypes", dtypes, DTYPES), ("kinds", kinds, tables.PASSES)):
        for x in given:
            if x not in known:
                raise ValueError(f"{name}: got {x!r}, want some of {', '.join(known)}")
    for name, sizes in (("head_sizes", head_sizes), ("lengths", lengths), ("pairs", (pairs,))):
        if any(n < 1 for n in sizes):
            raise ValueError(f"{name}: got {tuple(sizes)}, want sizes of 1 or more")
    return [
        Key(kind, dtype, ceil_power(size), length, length, pairs, masked)
        for dtype, length, size, masked, kind in itertools.product(
            dtypes, sorted(lengths), head_sizes, (False, True), kinds
        )
    ]


def kernel_times(compiled: Any, arguments: Sequence[Any]) -> Times:
    """Median microseconds of each kernel of a program, by CUPTI; those of one name added up.

    Raises:
      RuntimeError: there is no CUPTI, or no kernel was seen.
    """
    calls = device_time.kernels(compiled, arguments, CALLS)
    found: Times = {}
    for position, (name, _) in enumerate(calls[0]):
        found[name] = found.get(name, 0.0) + 1e3 * statistics.median(call[position][1] for call in calls)
    return found


def candidates(key: Key) -> list[Kernels]:
    """Cuts worth measuring for a key."""
    rows, columns, wide = ceil_power(key.queries), ceil_power(key.keys), key.head_size
    name = key.dtype.split("_")[0]
    products = {"float32": TF32, "float32_highest": SIX, "float32_high": THREE}.get(key.dtype, HALF)
    shape = gpu_blocks.Shape(name, products, key.queries, key.keys, 1, wide, wide, key.pairs, key.masked)
    found: list[Kernels] = []
    for tile in _tiles(rows, columns, wide):
        if key.kind != "backward":
            found.append({key.kind: tile})
        elif tile.keys == columns and columns <= 128:
            found.append({"one": tile})
    if key.kind == "backward":
        both = list(_tiles(rows, columns, wide))
        found += [{"query": tile, "key": tile} for tile in both]
    return [
        c for c in found if all(gpu_blocks.memory(n, b, shape) <= gpu_blocks.limit() for n, b in c.items())
    ]


def _tiles(rows: int, columns: int, wide: int) -> Iterator[Blocks]:
    sizes = (16, 32, 64, 128)
    for queries, keys in itertools.product(sizes, sizes):
        if queries > rows or keys > columns or queries < min(rows, 32) or keys < min(columns, 32):
            continue
        area = queries * keys
        for warps in (1, 2) if area <= 32 * 32 else (4, 8) if area > 64 * 64 or wide > 64 else (2, 4):
            for stages in (1,) if columns == keys and rows == queries else (2, 3):
                yield Blocks(queries, keys, warps, stages)


def tune(
    wanted: Sequence[Key],
    *,
    seconds: float = float("inf"),
    known: Table | None = None,
    measure: Measure = kernel_times,
    report: Callable[[str], None] = print,
    keep: Callable[[Table], None] = lambda table: None,
) -> Table:
    """Measures keys one after the other.

    Args:
      wanted: the keys.
      seconds: no key is begun after this time.
      known: a table whose entries are kept, and not measured again.
      measure: what takes the times.
      report: gets a line for each key.
      keep: gets the table after each key, so that an interruption loses no more than one.

    Returns:
      The entries of `known` and the new ones.

    Raises:
      ValueError: `known` is of another device.
    """
    end = time.monotonic() + seconds
    device = str(jax.devices()[0].device_kind)
    if known is not None and tables.file_name(known.device) != tables.file_name(device):
        raise ValueError(f"append: the file has measurements of {known.device!r}, and this is {device!r}")
    entries = {entry.key: entry for entry in (known.entries if known else ())}

    def table() -> Table:
        return Table(device, {"jax": jax.__version__}, tuple(entries.values()))

    for number, key in enumerate(wanted, 1):
        if key in entries:
            continue
        if time.monotonic() > end:
            report(f"the time is over: {len(wanted) - number + 1} of {len(wanted)} keys were not measured")
            break
        try:
            found = measure_key(key, measure)
        except RuntimeError as error:  # one key that the profiler or the memory fails for is not the end
            report(f"{number}/{len(wanted)} {describe(key)}: failed: {error}")
            continue
        if found is None:
            report(f"{number}/{len(wanted)} {describe(key)}: nothing could be measured")
            continue
        entries[key] = found
        times = ", ".join(f"{name} {us:.1f} us" for name, us in sorted(found.microseconds.items()))
        report(f"{number}/{len(wanted)} {describe(key)}: {found.implementation} ({times})")
        keep(table())
    return table()


def describe(key: Key) -> str:
    mask = "causal" if key.masked else "plain"
    return f"{key.kind} {key.dtype} D {key.head_size} S {key.keys} {mask}, {key.pairs} heads in all"


def measure_key(key: Key, measure: Measure = kernel_times) -> Entry | None:
    """The best cut, and the best implementation, for one key; None if nothing runs."""
    arguments = _arguments(key)
    names = NAMES[key.kind]
    best: dict[str, tuple[float, Blocks]] = {}

    def compiled(kernels: Kernels) -> Any:
        try:
            with gpu_triton.forced(kernels):
                return _program(key, "triton").lower(*arguments).compile()
        except Exception:  # a cut that this GPU has no room for is no candidate
            return None

    tried = candidates(key)
    with ThreadPoolExecutor(THREADS) as pool:
        programs = list(pool.map(compiled, tried))
    for kernels, program in zip(tried, programs, strict=True):
        if program is None:
            continue
        times = measure(program, arguments)
        for name in names:
            us = times.get(f"probjax_{name}")
            if name in kernels and us is not None and us < best.get(name, (float("inf"),))[0]:
                best[name] = us, kernels[name]
    if not best:
        return None
    cuts = {name: block for name, (_, block) in best.items()}
    if key.kind != "backward":
        spent = {"triton": best[key.kind][0]}
        other = None if key.kind == "tangent" else _cudnn(key, arguments, measure)
        if other is not None:
            spent["cudnn"] = other
        faster = spent.get("cudnn", float("inf")) < spent["triton"] and key.keys >= CUDNN_KEYS
        return Entry(key, "cudnn" if faster else "triton", cuts, spent)
    one = best["one"][0] if "one" in best else float("inf")
    both = best["query"][0] + best["key"][0] if {"query", "key"} <= set(best) else float("inf")
    if one > both:
        cuts.pop("one", None)
    spent = {name: x for name, x in (("one", one), ("query+key", both)) if x < float("inf")}
    return Entry(key, "triton", cuts, spent)


def _cudnn(key: Key, arguments: Sequence[Any], measure: Measure) -> float | None:
    if dispatch.implementations("cuda")["cudnn"] is not None:
        return None
    try:
        return sum(measure(_program(key, "cudnn").lower(*arguments).compile(), arguments).values())
    except Exception:  # a call that cuDNN does not take
        return None


def _program(key: Key, implementation: str) -> Any:
    precision = {"float32_high": "high", "float32_highest": "highest"}.get(key.dtype)

    def attend(query: Any, key_: Any, value: Any) -> Any:
        return dot_product_attention(
            query,
            key_,
            value,
            is_causal=key.masked,
            implementation=implementation,
            precision=precision,
            return_residual=True,
        )

    def forward(query: Any, key_: Any, value: Any, ct: Any) -> Any:
        return attend(query, key_, value)

    def backward(query: Any, key_: Any, value: Any, ct: Any) -> Any:
        (_, lse), pull = jax.vjp(attend, query, key_, value)
        return pull((ct, jnp.zeros_like(lse)))

    def tangent(query: Any, key_: Any, value: Any, ct: Any) -> Any:
        return jax.jvp(attend, (query, key_, value), (ct, value, key_))

    return jax.jit({"forward": forward, "backward": backward, "tangent": tangent}[key.kind])


def _arguments(key: Key) -> list[Any]:
    heads = HEADS if key.pairs % HEADS == 0 else 1
    shape = (key.pairs // heads, key.keys, heads, key.head_size)
    dtype = key.dtype.split("_")[0]
    return [jax.random.normal(jax.random.key(n), shape, dtype) for n in range(4)]


def default_path() -> Path:
    """Where the table of the GPU at hand is kept."""
    return tables.cache_directory() / tables.file_name(str(jax.devices()[0].device_kind))
