"""How the GPU kernels are cut: by a measured table where there is one, else by rules that fit every GPU.

Kernels by name: "forward"; "tangent"; and for backward "one" (all gradients of a head in one program) or
"query" and "key"; and "bias".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax.numpy as jnp

from probjax.attention import _triton, tables
from probjax.attention._triton import HALF, SIX, THREE, ceil_power
from probjax.attention.tables import Blocks, Key

Kernels = dict[str, Blocks]

NAMES = {"forward": ("forward",), "tangent": ("tangent",), "backward": ("one", "query", "key", "bias")}

_MEMORY = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227}
"""Shared memory of one program in KiB, by compute capability (CUDA programming guide, table of features)."""
_LEAST_MEMORY = 99


@dataclass(frozen=True)
class Shape:
    """What the cut of a call depends on. `products` as in `_triton`."""

    dtype: str
    products: str
    T: int
    S: int
    N: int
    K: int
    D: int
    V: int
    batch: int
    masked: bool
    biased: bool = False

    @property
    def itemsize(self) -> int:
        return int(jnp.dtype(self.dtype).itemsize)

    @property
    def width(self) -> int:
        return ceil_power(max(self.D, self.V))

    def key(self, kind: str) -> Key:
        """The entry of a table that is for this call."""
        exact = {SIX: "_highest", THREE: "_high"}.get(self.products, "")
        return Key(
            kind=kind,
            dtype=self.dtype + exact,
            head_size=self.width,
            queries=self.T,
            keys=self.S,
            pairs=self.batch * self.N,
            masked=self.masked,
        )


def limit() -> int:
    """Bytes of shared memory that a program can have on the GPU at hand, or on any where there is none."""
    found = _triton.capability()
    return _MEMORY.get(found or (0, 0), 227 if found and found > (9, 0) else _LEAST_MEMORY) * 1024


def memory(name: str, block: Blocks, shape: Shape) -> int:
    """How many bytes of shared memory a kernel needs: tiles that stay, tiles in flight, and scratch.

    For half types this is what Triton 3 was seen to ask for on an H200, to the byte; for float32 an upper
    bound.
    """
    row, column = block.queries * shape.itemsize, block.keys * shape.itemsize
    D, V = ceil_power(shape.D), ceil_power(shape.V)
    both, area = D + V, block.queries * block.keys
    kept, moving = {
        "forward": (row * D, column * both),
        "tangent": (row * 2 * D, column * 2 * both),
        "query": (row * both, column * both),
        "key": (column * both, row * both),
        "one": (column * both, row * both),
        "bias": (0, (row + column) * both),
    }[name]
    need = kept + max(block.stages, 1) * moving
    if shape.biased:
        need += area * shape.itemsize
    if shape.masked:
        need += area
    if name == "one":
        need += area * shape.itemsize
    if shape.products != HALF:  # operands change their layout on the way to the matrix units
        need += max(row, column) * max(D, V) + area * 4
    if shape.products in (SIX, THREE):  # and come in parts
        need += need // 2
    return need


def fitted(name: str, block: Blocks, shape: Shape) -> Blocks:
    """The cut made smaller until it fits: fewer stages, then smaller tiles."""
    while memory(name, block, shape) > limit():
        if block.stages > 1:
            block = replace(block, stages=block.stages - 1)
        elif block.queries > 16 and (block.queries >= block.keys or name == "one"):
            block = replace(block, queries=block.queries // 2)
        elif block.keys > 16 and name != "one":
            block = replace(block, keys=block.keys // 2)
        else:
            break
    return block


def chosen(kind: str, shape: Shape) -> Kernels:
    """The cut of every kernel of a kind ("forward", "backward", "tangent") for a call."""
    found = rules(kind, shape)
    entry = entry_of(kind, shape)
    if entry is not None:
        measured = {name: _cap(name, block, shape) for name, block in entry.kernels.items() if name in found}
        if kind == "backward" and "one" not in entry.kernels:
            found.pop("one", None)
        found |= measured
    return {name: fitted(name, block, shape) for name, block in found.items()}


def entry_of(kind: str, shape: Shape) -> tables.Entry | None:
    """The measured entry nearest to a call; None without a table for the GPU at hand."""
    device = _triton.device_kind()
    table = None if device is None else tables.table_for(device)
    return None if table is None else table.lookup(shape.key(kind))


def _cap(name: str, block: Blocks, shape: Shape) -> Blocks:
    """A cut measured for another length: no tile is longer than the call, and "one" takes all keys at
    once.
    """
    rows, columns = ceil_power(shape.T), ceil_power(shape.S)
    keys = columns if name == "one" else min(block.keys, columns)
    return replace(block, queries=min(block.queries, rows), keys=keys)


def _block(queries: int, keys: int, warps: int, stages: int) -> Blocks:
    return Blocks(queries=queries, keys=keys, warps=warps, stages=stages)


def rules(kind: str, shape: Shape) -> Kernels:
    """A cut for a GPU that was not measured: what was good on several shapes of an H200, on the small
    side.
    """
    wide, half = shape.width, shape.products == HALF
    rows, columns = ceil_power(shape.T), ceil_power(shape.S)
    side = 64 if (half and wide <= 128) or wide <= 64 else 32
    warps = 8 if wide > 128 else 4
    small = max(rows, columns)
    if small <= 32:
        warps = 1 if small == 16 else 2
    row, column = min(rows, side), min(columns, side)
    if kind != "backward":
        return {kind: _block(row, column, warps, 2)}
    kernels = {
        "query": _block(row, min(columns, 32 if wide <= 64 else side), warps, 2),
        "key": _block(min(rows, 32 if wide <= 64 else side), column, warps, 2),
        "bias": _block(row, column, warps, 1),
    }
    if columns <= (
        128
        if half and not shape.masked and wide <= 64
        else 64
        if wide <= 64 and shape.products != SIX
        else 16
    ):
        kernels["one"] = _block(row, columns, warps if columns <= 64 else 8, 1)
    return kernels


def candidates(key: Key) -> list[Kernels]:
    """Cuts worth measuring for a key."""
    rows, columns, wide = ceil_power(key.queries), ceil_power(key.keys), key.head_size
    name = key.dtype.split("_")[0]
    products = {"float32": "tf32", "float32_highest": SIX, "float32_high": THREE}.get(key.dtype, HALF)
    shape = Shape(name, products, key.queries, key.keys, 1, 1, wide, wide, key.pairs, key.masked)
    found: list[Kernels] = []
    for tile in _tiles(rows, columns, wide):
        if key.kind != "backward":
            found.append({key.kind: tile})
        elif tile.keys == columns and columns <= 128:
            found.append({"one": tile})
    if key.kind == "backward":
        both = list(_tiles(rows, columns, wide))
        found += [{"query": tile, "key": tile} for tile in both]
    return [c for c in found if all(memory(n, b, shape) <= limit() for n, b in c.items())]


def _tiles(rows: int, columns: int, wide: int) -> Iterator[Blocks]:
    sizes = (16, 32, 64, 128)
    for queries, keys in itertools.product(sizes, sizes):
        if queries > rows or keys > columns or queries < min(rows, 32) or keys < min(columns, 32):
            continue
        area = queries * keys
        for warps in (1, 2) if area <= 32 * 32 else (4, 8) if area > 64 * 64 or wide > 64 else (2, 4):
            for stages in (1,) if columns == keys and rows == queries else (2, 3):
                yield _block(queries, keys, warps, stages)
