"""How the GPU kernels are cut: by a measured table where there is one, else by rules that fit every GPU.

Kernels by name: "forward"; "tangent"; and for backward "one" (all gradients of a head in one program) or
"query" and "key"; and "bias".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp

from probjax.attention import _triton, tables
from probjax.attention._triton import HALF, SIX, THREE, ceil_power
from probjax.attention.tables import Blocks, Key

Kernels = dict[str, Blocks]

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

    The main term is what five cuts with half types were refused for on an H200, to the byte; the terms for
    masks, for "one" and for float32 are estimates.
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
        return {kind: Blocks(row, column, warps, 2)}
    kernels = {
        "query": Blocks(row, min(columns, 32 if wide <= 64 else side), warps, 2),
        "key": Blocks(min(rows, 32 if wide <= 64 else side), column, warps, 2),
        "bias": Blocks(row, column, warps, 1),
    }
    longest = 16
    if wide <= 64 and shape.products != SIX:
        longest = 128 if half and not shape.masked else 64
    if columns <= longest:
        kernels["one"] = Blocks(row, columns, warps if columns <= 64 else 8, 1)
    return kernels
