"""Installing: everything needed is in the source distribution, and the native library is optional."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import probjax

ROOT = Path(__file__).parents[1]
NO_COMPILER = {"CC": "no-such-compiler", "CXX": "no-such-compiler"}


def run(command: list[str], **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PROBJAX_")}
    return subprocess.run(
        command, cwd=ROOT, env={**environment, **settings}, capture_output=True, text=True, timeout=300
    )


def build(what: str, folder: Path, **settings: str) -> Path:
    """Run the build backend as pip does, and return the file that it makes."""
    code = f"from scikit_build_core import build; build.build_{what}({str(folder)!r})"
    done = run([sys.executable, "-c", code], **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.iterdir()
    return made


def test_headers_are_those_of_the_oldest_jax():
    # XLA refuses a library that was built with headers newer than itself.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (runs_with,) = (need for need in project["project"]["dependencies"] if need.startswith("jax>="))
    assert runs_with.replace(">=", "~=") in project["build-system"]["requires"]


def test_source_distribution_has_all_that_is_needed(tmp_path):
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    tracked = {
        str(path.relative_to(ROOT))
        for folder in ("src", "csrc", "tests", "scripts")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not {"build", "__pycache__"} & set(path.parts)
    }
    assert tracked <= names
    assert {"pyproject.toml", "Makefile", "constraints.txt", "README.md", "LICENSE", "PKG-INFO"} <= names
    assert not [name for name in names if name.startswith("csrc/build") or "__pycache__" in name]


def test_wheel_without_a_compiler_is_pure(tmp_path):
    wheel = build("wheel", tmp_path, **NO_COMPILER)
    assert wheel.name == f"probjax-{probjax.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert "probjax/__init__.py" in names and "probjax/py.typed" in names
    assert not [name for name in names if "_lib" in name]


def test_a_library_that_was_asked_for_must_be_built(tmp_path):
    with pytest.raises(AssertionError, match="no-such-compiler"):
        build("wheel", tmp_path, PROBJAX_NATIVE="1", **NO_COMPILER)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("option", "status"), [(["--optional"], 0), ([], 1)])
def test_make_without_a_compiler(tmp_path, option, status):
    done = run(["scripts/native", *option, str(tmp_path / "build")], **NO_COMPILER)
    assert done.returncode == status
    assert "No native library" in done.stderr


@pytest.mark.slow  # compiles all kernels
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_wheel_with_a_compiler_serves_every_python(tmp_path):
    wheel = build("wheel", tmp_path, PROBJAX_NATIVE="1")
    version, python, abi, platform = wheel.stem.split("-")[1:]
    assert (version, python, abi) == (probjax.__version__, "py3", "none") and platform != "any"
    libraries = [entry for entry in zipfile.ZipFile(wheel).infolist() if "_lib/" in entry.filename]
    assert len(libraries) == 1
    assert libraries[0].file_size < 2e6
