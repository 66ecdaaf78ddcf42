"""Shared pieces of the benchmark tests: a tiny configuration, and stand-ins for the torch process."""

import io
import stat
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from bench_helpers import TINY

# Speaks the protocol of torch_child.py in NumPy alone. `FAKE_DIES_AT` names an operation at which it dies,
# once: the file `FAKE_DIED` remembers that it did.
_FAKE = """
import json, os, signal, sys, time
import numpy as np

case = {}


def attend(q, k, v, causal):
    s = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    if "by_distance" in case:
        t = q.shape[-2]
        i, j = np.mgrid[:t, :t]
        s = s + case["by_distance"][:, j - i + t - 1]
    elif causal:
        s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    return p, p @ v


def call():
    q, k, v, ct = (case[n].astype(float) for n in ("query", "key", "value", "cotangent"))
    p, out = attend(q, k, v, case["causal"])
    if case["mode"] == "fwd":
        return {"output": out}
    d = p * (ct @ np.swapaxes(v, -1, -2) - (ct * out).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
    return {"query": d @ k, "key": np.swapaxes(d, -1, -2) @ q, "value": np.swapaxes(p, -1, -2) @ ct}


for line in sys.stdin:
    request = json.loads(line)
    op = request.pop("op")
    died = os.environ.get("FAKE_DIED", "")
    if op == os.environ.get("FAKE_DIES_AT") and not os.path.exists(died):
        open(died, "w").close()
        print("out of luck", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    answer = {}
    if op == "hello":
        answer = {"torch": "fake", "python": "0", "numpy": np.__version__, "threads": request["threads"]}
        answer |= {"capability": "none", "precision": "highest"}
    elif op == "load":
        case = dict(np.load(request.pop("path"))) | request
    elif op in ("first", "run"):
        begin = time.perf_counter()
        for _ in range(request.get("n", 1)):
            outputs = call()
        answer = {"seconds": time.perf_counter() - begin}
    elif op == "result":
        np.savez(request["path"], **{n: a.astype(np.float32) for n, a in outputs.items()})
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def tiny(tmp_path):
    """Fields of a configuration that runs in a moment."""
    return {**TINY, "output": str(tmp_path / "out.json")}


@pytest.fixture
def fake_torch(tmp_path):
    """An "interpreter" that serves the torch protocol whatever script it is given."""
    script = tmp_path / "fake_child.py"
    script.write_text(_FAKE)
    program = tmp_path / "python-with-torch"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}"\n')
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    return program


@pytest.fixture
def dying_torch(fake_torch, tmp_path, monkeypatch):
    """A stand-in that dies once, at the operation that the returned function is given."""

    def at(operation):
        monkeypatch.setenv("FAKE_DIES_AT", operation)
        monkeypatch.setenv("FAKE_DIED", str(tmp_path / "died"))
        return fake_torch

    return at


@pytest.fixture
def console():
    """A console whose text can be read back with `console.file.getvalue()`."""
    return Console(file=io.StringIO(), width=160)
