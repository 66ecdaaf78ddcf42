"""Measured tables: which implementation and which cut is fastest on one GPU, as data.

A table is a JSON file. Those in the folder `data` beside this module come with the package, with the device
they were measured on; `probjax tune` writes one for the user's own GPU, whose entries come first.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
PASSES = ("forward", "backward", "tangent")
IMPLEMENTATIONS = ("triton", "cudnn")
_MOST_WARPS = 32  # of one program, on every NVIDIA GPU
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
    another implementation is faster), and the microseconds on the device of all that were tried. Without
    microseconds it was not measured: its cuts are those of the same call with, or without, a mask.
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

        Kind and dtype (float16 counts as bfloat16) are the key's own, and so is masked, unless the table has
        only the other of that kind and dtype; the head size is its own or else the next larger one. Among
        those the nearest in the logarithms of both lengths counts, and then in that of pairs; of two equally
        near the smaller. None if nothing of that kind and dtype, or no head size so large, was measured.
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
    """Where `probjax tune` keeps its tables: $PROBJAX_CACHE, or probjax in the user's cache directory.

    Raises:
      FileNotFoundError: neither is set, and the user has no home directory.
    """
    given = os.environ.get("PROBJAX_CACHE")
    if given:
        return Path(given)
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "probjax"
    base = Path("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    try:
        return base.expanduser() / "probjax"
    except RuntimeError:
        raise FileNotFoundError(
            "the user has no home directory: set PROBJAX_CACHE to a directory for tables"
        ) from None


def file_name(device: str) -> str:
    """The name of a device's table."""
    return f"attention_{re.sub(r'[^a-z0-9]+', '_', device.lower()).strip('_')}.json"


def table_for(device: str) -> Table | None:
    """The entries of the user's own table of a device, and those of the packaged one for other keys; None if
    there is neither.
    """
    return _table_for(device, _own_directory())


@functools.lru_cache(maxsize=16)
def _table_for(device: str, own: Path | None) -> Table | None:
    tables = [table for folder in _folders(own) if (table := _read(folder / file_name(device))) is not None]
    if not tables:
        return None
    entries: dict[Key, Entry] = {}
    for table in tables:  # the user's own comes first, and is seldom the whole grid
        for entry in table.entries:
            entries.setdefault(entry.key, entry)
    return Table(tables[0].device, tables[0].versions, tuple(entries.values()))


def source(device: str) -> Path | None:
    """The first file that `table_for` reads; None if there is none."""
    paths = (folder / file_name(device) for folder in _folders(_own_directory()))
    return next((path for path in paths if _read(path) is not None), None)


def _own_directory() -> Path | None:
    try:
        return cache_directory()
    except FileNotFoundError:
        return None


def _folders(own: Path | None) -> list[Path]:
    return [_PACKAGED] if own is None else [own, _PACKAGED]


@functools.lru_cache(maxsize=32)
def _read(path: Path) -> Table | None:
    """A table; None, with one warning, if it is broken, and without one if there is none."""
    try:
        if not path.is_file():
            return None
    except OSError:  # a directory that this user may not enter, as a container's home directory can be
        return None
    try:
        table = load(path)
        if file_name(table.device) != path.name:
            raise ValueError(f"it was measured on {table.device!r}, which its name does not say")
    except (OSError, ValueError) as error:
        warnings.warn(
            f"the table {path} is ignored: {error}; run `probjax tune` again or delete it", stacklevel=4
        )
        return None
    return table


def save(table: Table, path: Path) -> None:
    """Writes a table, whole or not at all, and forgets what was read before."""
    head = {"format": FORMAT, "device": table.device, "versions": dict(table.versions)}
    lines = ",\n".join(f"  {json.dumps(_content(entry))}" for entry in table.entries)
    text = json.dumps(head, indent=1)[:-2] + f',\n "entries": [\n{lines}\n ]\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)
    _read.cache_clear()
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
        raise ValueError(f"{path.name}: got format {got!r}, want {FORMAT}")
    for name, kind in (("device", str), ("versions", dict), ("entries", list)):
        if not isinstance(content.get(name), kind):
            raise ValueError(f"{path.name}: {name}: got {content.get(name)!r:.60}, want a {kind.__name__}")
    entries = []
    for number, x in enumerate(content["entries"]):
        try:
            entries.append(_entry(x))
        except ValueError as error:
            raise ValueError(f"{path.name}: entry {number}: {error}") from None
    return Table(content["device"], content["versions"], tuple(entries))


def _entry(content: Any) -> Entry:
    if not isinstance(content, dict):
        raise ValueError(f"got {content!r:.60}, want an object")

    def field_of(name: str, right: Callable[[Any], bool], want: str) -> Any:
        if name not in content or not right(content[name]):
            raise ValueError(f"{name}: got {content.get(name)!r:.60}, want {want}")
        return content[name]

    def one_of(name: str, known: Sequence[str]) -> str:
        return str(field_of(name, lambda x: x in known, f"one of {', '.join(known)}"))

    def size(name: str) -> int:
        return int(field_of(name, lambda x: _whole(x) and x > 0, "a whole number of 1 or more"))

    def mapping(name: str) -> dict[str, Any]:
        return dict(field_of(name, lambda x: isinstance(x, dict), "an object"))

    key = Key(
        kind=one_of("kind", PASSES),
        dtype=str(field_of("dtype", lambda x: isinstance(x, str), "a name")),
        head_size=size("head_size"),
        queries=size("queries"),
        keys=size("keys"),
        pairs=size("pairs"),
        masked=bool(field_of("masked", lambda x: isinstance(x, bool), "true or false")),
    )
    kernels = {name: _blocks(name, cut) for name, cut in mapping("kernels").items()}
    times = mapping("microseconds")
    for name, us in times.items():
        if not isinstance(us, int | float) or isinstance(us, bool) or not 0 <= us < math.inf:
            raise ValueError(f"microseconds: got {us!r:.60} of {name}, want a number")
    return Entry(key, one_of("implementation", IMPLEMENTATIONS), kernels, times)


def _whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _blocks(name: str, cut: Any) -> Blocks:
    if isinstance(cut, list) and len(cut) == 4 and all(_whole(n) for n in cut):
        queries, keys, warps, stages = cut
        powers = all(n > 0 and n & (n - 1) == 0 for n in (queries, keys, warps))
        if powers and min(queries, keys) >= 16 and warps <= _MOST_WARPS and 1 <= stages <= 8:
            return Blocks(queries, keys, warps, stages)
    raise ValueError(
        f"{name}: got the cut {cut!r:.60}, want [queries, keys, warps, stages]: powers of two of 16 or more, "
        f"a power of two of warps, at most {_MOST_WARPS}, and 1 to 8 stages"
    )
