"""Pieces that several benchmark tests use."""

import json
import os
from pathlib import Path

TINY = {"seqs": "16", "dims": "8", "heads": 2, "repeats": 3, "min_sample_ms": 0.1}


def load(path):
    """Return a result file's content."""
    return json.loads(Path(path).read_text())


def rows_of(path, **wanted):
    """Return the rows of a result file that have these values."""
    return [
        row for row in load(path)["results"] if all(row.get(name) == value for name, value in wanted.items())
    ]


def alive(pid):
    """Return whether a process exists and is no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")
