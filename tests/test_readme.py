"""The README's promises: its Python blocks run, its commands exist, and it stays short."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_there_is_an_example():
    assert blocks("python")


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code):
    # A process as the reader's: nothing imported, and one device instead of the tests' eight.
    settings = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=settings, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "the example prints the plan"


def test_make_commands_exist():
    targets = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    )
    named = re.findall(r"\bmake ([a-z-]+)", "\n".join(blocks("sh")))
    assert {"test", "bench"} <= set(named) <= targets


def test_short():
    assert len(README.splitlines()) <= 120
