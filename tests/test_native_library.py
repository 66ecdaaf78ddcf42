"""The native library's loader: lazy, once, and whatever is wrong is a reason in words."""

import ctypes
import os
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

import probjax
from probjax import _native
from probjax.cli import main


@pytest.fixture
def fresh(monkeypatch):
    """A loader that nobody has asked yet, with no settings; what it finds does not outlive the test."""
    monkeypatch.setattr(_native, "_loaded", None)
    for name in ("PROBJAX_NATIVE", "PROBJAX_NATIVE_LIBRARY"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def run_python(code: str, **settings: str) -> str:
    """Output of a process that has imported nothing yet."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **settings},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class FakeLibrary:
    """A library with this package's symbols, all of them given by the test."""

    def __init__(self, abi=_native.ABI, **symbols):
        self.probjax_abi = lambda: abi
        self.probjax_isa = lambda: b"baseline"
        self.__dict__.update(symbols)


def load(monkeypatch, library):
    monkeypatch.setenv("PROBJAX_NATIVE_LIBRARY", "/somewhere/library.so")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)


def test_import_loads_nothing():
    run_python(
        "import sys, probjax\n"
        "native = sys.modules.get('probjax._native')\n"
        "assert native is None or native._loaded is None"
    )


def test_usable_or_says_why():
    if _native.reason() is None:
        assert _native.isa() in {"baseline", "avx2", "avx512", "neon"}
        assert _native.path().is_file()
        assert _native.describe() == f"{_native.path()} [{_native.isa()}]"
    else:
        assert _native.isa() is None
        assert _native.describe().startswith(f"none: {_native.reason()}")


def test_size():
    assert (
        _native.path() is None
        or "PROBJAX_NATIVE_LIBRARY" in os.environ
        or _native.path().stat().st_size < 2e6
    )


def test_turned_off(fresh):
    fresh.setenv("PROBJAX_NATIVE", "0")
    assert _native.reason() == "turned off by PROBJAX_NATIVE=0"
    assert (_native.isa(), _native.path()) == (None, None)


@pytest.mark.parametrize("exists", [False, True])
def test_file_that_does_not_load(fresh, tmp_path, exists):
    file = tmp_path / "library.so"
    if exists:
        file.write_text("not a library")
    fresh.setenv("PROBJAX_NATIVE_LIBRARY", str(file))
    assert "does not load" in _native.reason() and str(file) in _native.reason()
    assert _native.path() == file


def test_some_other_library(fresh):
    fresh.setenv("PROBJAX_NATIVE_LIBRARY", np._core._multiarray_umath.__file__)
    assert "is not probjax's native library" in _native.reason() and "probjax_abi" in _native.reason()


def test_other_version(fresh):
    load(fresh, FakeLibrary(abi=_native.ABI + 1))
    assert f"interface {_native.ABI + 1}, wanted {_native.ABI}" in _native.reason()
    assert _native.isa() is None


def test_no_cpu_in_jax(fresh):
    def no_cpu(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    load(fresh, FakeLibrary(**dict.fromkeys(_native.TARGETS.values())))
    fresh.setattr(jax, "local_devices", no_cpu)
    assert "Unknown backend cpu" in _native.reason()


def test_library_that_xla_refuses():
    # Handlers that do not answer XLA's question for their version, as those of a much older library. In a
    # process of its own: the order matters, JAX's CPU has not started yet.
    out = run_python(
        "import ctypes\n"
        "import jax.numpy as jnp\n"
        "import probjax\n"
        "from probjax import _native\n"
        "handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda frame: None)\n"
        "class Library:\n"
        "    probjax_abi = staticmethod(lambda: _native.ABI)\n"
        "    class probjax_isa:\n"
        "        def __new__(cls): return b'baseline'\n"
        "for symbol in _native.TARGETS.values(): setattr(Library, symbol, handler)\n"
        "ctypes.CDLL = lambda path: Library\n"
        "print(_native.reason())\n"
        "x = jnp.ones((1, 300, 2, 8))\n"
        "print(probjax.dot_product_attention(x, x, x).sum())\n",
        PROBJAX_NATIVE_LIBRARY="library.so",
    )
    assert "XLA refuses library.so" in out and "API version" in out
    assert "4800" in out


def test_loaded_once_by_many_threads(fresh):
    calls = []

    def slowly():
        calls.append(1)
        time.sleep(0.05)
        return _native._State(reason="slow")

    fresh.setattr(_native, "_load", slowly)
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(_native.reason())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["slow"] * 8 and len(calls) == 1


@pytest.mark.parametrize("newest", ["package", "checkout"])
def test_newest_is_found(fresh, tmp_path, newest):
    files = {
        "package": tmp_path / "site" / "probjax" / "_lib" / _native._FILE,
        "checkout": tmp_path / "csrc" / "build" / _native._FILE,
    }
    fresh.setattr(
        probjax, "__path__", [str(tmp_path / "src" / "probjax"), str(tmp_path / "site" / "probjax")]
    )
    fresh.setattr(_native, "_ROOT", tmp_path)
    assert _native._find() is None
    for name, file in files.items():
        file.parent.mkdir(parents=True)
        file.touch()
        os.utime(file, (1e9, 1e9 + (name == newest)))
    assert _native._find() == files[newest]


@pytest.mark.parametrize("checkout", [False, True])
@pytest.mark.parametrize("compiler", [None, "/usr/bin/c++"])
def test_missing_library_says_what_to_do(fresh, tmp_path, checkout, compiler):
    fresh.setattr(_native, "_ROOT", tmp_path)
    fresh.setattr(_native, "_find", lambda: None)
    fresh.setattr(_native.shutil, "which", lambda _: compiler)
    if checkout:
        (tmp_path / "csrc").mkdir()
        (tmp_path / "csrc" / "CMakeLists.txt").touch()
    text = _native.describe()
    assert text.startswith("none: the native library has not been built; ")
    assert ("install g++ >= 11 or clang >= 14" in text) == (compiler is None)
    assert ("make native" if checkout else "PROBJAX_NATIVE=1 pip install") in text


def test_system_without_kernels(fresh):
    fresh.setattr(_native, "_find", lambda: None)
    fresh.setattr(_native.platform, "system", lambda: "Windows")
    fresh.setattr(_native.platform, "machine", lambda: "AMD64")
    assert _native.reason() == "there are no native kernels for Windows AMD64"


def test_info_shows_it(fresh, capsys):
    fresh.setenv("PROBJAX_NATIVE", "0")
    assert main(["info"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("native library")]
    assert lines and "none: turned off by PROBJAX_NATIVE=0" in lines[0]
