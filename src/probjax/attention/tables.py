"""Measured tables: which implementation and which cut is fastest on one GPU, as data.

A table is a JSON file. Those in the folder `data` beside this module come with the package, with the device
they were measured on; `probjax tune` writes one for the user's own GPU, which is looked at first.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
PASSES = ("forward", "backward", "tangent")
_PACKAGED = Path(__file__).with_name("data")


@dataclass(frozen=True)
class Blocks:
    """How one kernel is cut: queries and keys of a tile, warps of a program, stages of its loads."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True)
class Key:
    """What an entry was measured for.

    Attributes:
      kind: one of PASSES.
      dtype: "bfloat16", "float16", "float32", "float32_high" or "float32_highest" (by precision).
      head_size: head size, rounded up to a power of two.
      queries: T.
      keys: S.
      pairs: batch entries times query heads.
      masked: whether there was a mask.
    """

    kind: str
    dtype: str
    head_size: int
    queries: int
    keys: int
    pairs: int
    masked: bool


@dataclass(frozen=True)
class Entry:
    """The best that was found for a key: the implementation, the cuts of the Triton kernels (also where
    another implementation is faster), and the microseconds on the device of all that were tried.
    """

    key: Key
    implementation: str
    kernels: Mapping[str, Blocks]
    microseconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """Entries of one device."""

    device: str
    versions: Mapping[str, str]
    entries: tuple[Entry, ...]

    def lookup(self, key: Key) -> Entry | None:
        """The entry measured nearest to a key.

        Kind, dtype (float16 counts as bfloat16) and masked are the key's own; the head size is its own or
        else the next larger one. Among those the nearest in the logarithms of both lengths counts, and then
        in that of pairs. None if nothing of that kind and dtype, or no head size so large, was measured.
        """
        dtype = "bfloat16" if key.dtype == "float16" else key.dtype
        alike = [e for e in self.entries if e.key.kind == key.kind and e.key.dtype == dtype]
        alike = [e for e in alike if e.key.masked == key.masked] or alike
        sizes = sorted({e.key.head_size for e in alike if e.key.head_size >= key.head_size})
        if not sizes:
            return None
        size = sizes[0]
        return min((e for e in alike if e.key.head_size == size), key=lambda e: _distance(e.key, key))


def _distance(a: Key, b: Key) -> tuple[float, ...]:
    def apart(x: int, y: int) -> float:
        return abs(math.log2(max(x, 1)) - math.log2(max(y, 1)))

    lengths = apart(a.queries, b.queries) + apart(a.keys, b.keys)
    return round(lengths, 6), round(apart(a.pairs, b.pairs), 6), a.queries, a.keys, a.pairs


def cache_directory() -> Path:
    """Where `probjax tune` keeps its tables: $PROBJAX_CACHE, or probjax in the user's cache directory."""
    given = os.environ.get("PROBJAX_CACHE")
    if given:
        return Path(given)
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "probjax"
    base = Path("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return base.expanduser() / "probjax"


def file_name(device: str) -> str:
    """The name of a device's table."""
    return f"attention_{re.sub(r'[^a-z0-9]+', '_', device.lower()).strip('_')}.json"


def table_for(device: str) -> Table | None:
    """The table of a device: the user's own, else the packaged one; None if there is neither."""
    return _table_for(device, str(cache_directory()))


@functools.lru_cache(maxsize=16)
def _table_for(device: str, directory: str) -> Table | None:
    found = source(device, directory)
    if found is None:
        return None
    try:
        return load(found)
    except (OSError, ValueError) as error:
        warnings.warn(f"the table {found} is ignored: {error}", stacklevel=2)
        packaged = _PACKAGED / file_name(device)
        return load(packaged) if packaged.is_file() and packaged != found else None


def source(device: str, directory: str | None = None) -> Path | None:
    """The file that `table_for` reads; None if there is none."""
    for folder in (Path(directory) if directory else cache_directory(), _PACKAGED):
        path = folder / file_name(device)
        if path.is_file():
            return path
    return None


def save(table: Table, path: Path) -> None:
    """Writes a table, whole or not at all, and forgets what was read before."""
    head = {"format": FORMAT, "device": table.device, "versions": dict(table.versions)}
    lines = ",\n".join(f"  {json.dumps(_content(entry))}" for entry in table.entries)
    text = json.dumps(head, indent=1)[:-2] + f',\n "entries": [\n{lines}\n ]\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)
    _table_for.cache_clear()


def _content(entry: Entry) -> dict[str, Any]:
    return {
        **asdict(entry.key),
        "implementation": entry.implementation,
        "kernels": {name: [b.queries, b.keys, b.warps, b.stages] for name, b in entry.kernels.items()},
        "microseconds": {name: round(us, 2) for name, us in entry.microseconds.items()},
    }


def load(path: Path) -> Table:
    """Reads a table.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is no table; the text says what is wrong.
    """
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name}: it is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        got = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path.name}: got format {got!r}, want {FORMAT}: run `probjax tune` again")
    try:
        entries = tuple(_entry(x) for x in content["entries"])
        return Table(str(content["device"]), dict(content["versions"]), entries)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path.name}: an entry lacks or misspells a field: {error}") from None


def _entry(content: Mapping[str, Any]) -> Entry:
    names = ("kind", "dtype", "head_size", "queries", "keys", "pairs", "masked")
    key = Key(**{name: content[name] for name in names})
    if key.kind not in PASSES:
        raise ValueError(f"kind: got {key.kind!r}, want one of {', '.join(PASSES)}")
    kernels = {name: _blocks(name, cut) for name, cut in content["kernels"].items()}
    return Entry(key, str(content["implementation"]), kernels, dict(content.get("microseconds", {})))


def _blocks(name: str, cut: Sequence[Any]) -> Blocks:
    powers = all(isinstance(n, int) and n > 0 and n & (n - 1) == 0 for n in cut[:3])
    if (
        len(cut) != 4
        or not powers
        or not isinstance(cut[3], int)
        or not 1 <= cut[3] <= 8
        or min(cut[:2]) < 16
    ):
        raise ValueError(
            f"{name}: got the cut {cut}, want [queries, keys, warps, stages], powers of two of 16 or more, "
            "a power of two of warps, and 1 to 8 stages"
        )
    return Blocks(*cut)
