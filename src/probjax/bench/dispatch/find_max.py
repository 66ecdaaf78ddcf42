"""The longest sequence that runs: twice the last one until it fails, each length in a fresh process."""

import dataclasses
import sys
from typing import Any

from probjax.bench.attention.config import TORCH_IMPLS
from probjax.bench.attention.memory import out_of_memory
from probjax.bench.child import Child, ChildDied, ChildTimeout
from probjax.bench.dispatch.cells import DispatchCell
from probjax.bench.dispatch.config import DispatchConfig
from probjax.bench.measure import Failed, Unavailable, describe
from probjax.bench.parallel import environment


def groups(config: DispatchConfig) -> list[DispatchCell]:
    """Return one cell for each search, at the longest of `seq_lens`, where it begins."""
    start = max(config.seq_lens)
    return [cell for cell in config.cells() if cell.seq == start]


def columns(cell: DispatchCell, impl: str) -> dict[str, Any]:
    """Return the columns that name a search; the length is what it finds."""
    found = {name: value for name, value in cell.columns().items() if name not in ("seq", "suite")}
    return {"impl": impl, **found}


def find_max(config: DispatchConfig, cell: DispatchCell, impl: str) -> dict[str, Any]:
    """Search for one implementation.

    Args:
      config: the configuration.
      cell: from `groups`.
      impl: row label.

    Returns:
      A row with `max_seq` (None when not even the first length runs) and what each length tried gave:
      ``runs``, ``memory``, ``timeout`` or an error.
    """
    row = columns(cell, impl)
    tried: dict[str, str] = {}
    longest = None
    seq = cell.seq
    while seq <= config.max_seq:
        try:
            tried[str(seq)] = runs(config, dataclasses.replace(cell, seq=seq), impl)
        except Unavailable as error:
            if longest is None:
                return {**row, "tried": tried, "status": "unavailable", "reason": describe(error)}
            tried[str(seq)] = describe(error)
        if tried[str(seq)] != "runs":
            break
        longest, seq = seq, 2 * seq
    return {**row, "max_seq": longest, "tried": tried, "status": "ok"}


def runs(config: DispatchConfig, cell: DispatchCell, impl: str) -> str:
    """Return whether one call runs in a process of its own: "runs", or why it does not.

    Raises:
      Unavailable: when the row cannot run here at all.
    """
    if impl in TORCH_IMPLS:
        raise Unavailable("--find-max tries the JAX rows only")
    fields = {**dataclasses.asdict(config), "impls": [impl]}
    command = [config.child or sys.executable, "-m", "probjax.bench.worker"]
    with Child(command, env=environment(), pause=False) as child:
        try:
            child.request(config.child_timeout, op="open", suite="dispatch", config=fields)
            child.request(config.child_timeout, op="once", cell=dataclasses.asdict(cell), impl=impl)
        except ChildTimeout:
            return "timeout"
        except Failed as error:
            text = describe(error)
            return "memory" if isinstance(error, ChildDied) or out_of_memory(text) else f"error: {text}"
    return "runs"
