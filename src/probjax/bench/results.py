"""Result files: rows by key, continued with `append`, written whole or not at all."""

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from probjax.bench.machine import git_state, load_average

# Numbers of two machines, or of two versions of the compiler, do not belong into one file.
_SAME_MACHINE = ("jax", "backend", "device_kind", "processor", "cores_used")


class ResultFile:
    """One JSON result file: `device`, `config`, `configs`, `runs`, `results` and lists of other measurements.

    Args:
      path: where it is written.
      device: the header of this machine, see `machine.device_header`.
      append: continue the file when it exists; otherwise an existing file is kept under the name
        ``PATH.bak``.
      key: the row columns that together name one measurement.

    Raises:
      ValueError: when the file that should be continued is no result file or came from another machine, or
        when the path cannot be written.
    """

    def __init__(self, path: Path, device: Mapping[str, Any], *, append: bool, key: Sequence[str]) -> None:
        self.path = path
        self._key = tuple(key)
        self._data: dict[str, Any] = {"device": dict(device), "config": None, "runs": [], "results": []}
        _require_writable(path)
        self._backup = path.exists() and not append
        if path.exists() and append:
            self._data = self._load(device)
        revision, dirty = git_state()
        self._run: dict[str, Any] = {
            "run": len(self._data["runs"]),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "git_revision": revision,
            "git_dirty": dirty,
            "load_average": load_average(),
            "interrupted": False,
        }
        self._data["runs"].append(self._run)

    def _load(self, device: Mapping[str, Any]) -> dict[str, Any]:
        data = read_results(self.path)
        old = data["device"]
        for name in _SAME_MACHINE:
            if old.get(name) != device.get(name):
                raise ValueError(
                    f"append: {self.path} was measured with {name} {old.get(name)!r}, here it is"
                    f" {device.get(name)!r}; times of the two do not compare: give another --output"
                )
        data.setdefault("runs", [])
        return {**data, "device": {**old, **device}}

    @property
    def run(self) -> int:
        """The number of this run in the file; rows of one run were measured interleaved."""
        return self._run["run"]

    @property
    def load_average(self) -> list[float] | None:
        """The system's load when the run began."""
        return self._run["load_average"]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows so far, oldest first."""
        return self._data["results"]

    def section(self, name: str) -> list[dict[str, Any]]:
        """The rows of a section other than `results`, such as `peaks`."""
        return self._data.get(name, [])

    def begin(self, config: Mapping[str, Any]) -> None:
        """Make `config` the file's configuration and keep an earlier, different one in `configs`."""
        earlier = self._data["config"]
        if earlier is not None and earlier != dict(config):
            configs = self._data.setdefault("configs", [])
            if earlier not in configs:
                configs.append(earlier)
        self._data["config"] = dict(config)

    def annotate(self, **facts: Any) -> None:
        """Add facts about this run: what was dropped, whether it was interrupted, how long it took."""
        self._run.update(facts)

    def _name(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in self._key)

    def measured(self, row: Mapping[str, Any], section: str = "results") -> bool:
        """Return whether a row with this key has been measured; unavailable or broken ones have not."""
        return any(
            old.get("status", "ok") == "ok" and self._name(old) == self._name(row)
            for old in self._data.get(section, [])
        )

    def add(self, rows: Iterable[Mapping[str, Any]], section: str = "results") -> None:
        """Add rows, each in the place of an old one with the same key, and write the file."""
        before = self._data.get(section, [])
        kept = list(before)
        for row in rows:
            kept = [old for old in kept if self._name(old) != self._name(row)]
            kept.append(dict(row))
        self._data[section] = kept
        try:
            self.save()
        except (ValueError, TypeError):
            # A row that JSON cannot hold must not spoil every later write.
            self._data[section] = before
            raise

    def save(self) -> None:
        """Write the file in one step: a reader, or a crash, never meets half of it."""
        if self._backup:
            os.replace(self.path, self.path.with_name(self.path.name + ".bak"))
            self._backup = False
        text = json.dumps(self._data, indent=2, allow_nan=False)
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            # mkstemp makes files for the owner alone; results are for everybody the umask allows.
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)
            os.replace(name, self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _require_writable(path: Path) -> None:
    """Raise ValueError for a path that cannot be written: before an hour of measuring, not after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output: cannot make the folder of {path} ({error.strerror})") from None
    if path.is_dir():
        raise ValueError(f"output: {path} is a folder, wanted the name of a file")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"output: no permission to write into {path.parent}")


def read_results(path: Path) -> dict[str, Any]:
    """Return the content of a result file.

    Args:
      path: the file.

    Returns:
      Its JSON object; `device` is an object, `results` a list.

    Raises:
      ValueError: when it is no result file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no JSON file ({error}), wanted a result file of probjax bench") from None
    if not isinstance(data, dict) or not isinstance(data.get("results"), list):
        raise ValueError(f"{path} has no list named 'results', wanted a result file of probjax bench")
    if not isinstance(data.get("device"), dict):
        raise ValueError(f"{path} has no object named 'device', wanted a result file of probjax bench")
    return data
