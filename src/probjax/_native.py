"""The native CPU kernels: one shared library, found and handed to XLA on the first question about it.

Importing probjax loads nothing. Whatever is wrong with the library is a reason in words, never an exception:
the plain-JAX implementations do its work. Two settings of the environment are read, once: `PROBJAX_NATIVE=0`
turns the library off, and `PROBJAX_NATIVE_LIBRARY` names the file to load.
"""

import ctypes
import os
import platform
import shutil
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

# Of all that this package and the library agree on: targets, attributes, order of operands and results. It
# changes with probjax_abi() in csrc/attention/ffi.cc, so that a library of another version is refused.
ABI = 2

# XLA's names of the targets, and the symbols that handle them.
TARGETS = {
    "probjax_attention_forward": "ProbjaxAttentionForward",
    "probjax_attention_tangent": "ProbjaxAttentionTangent",
    "probjax_attention_backward": "ProbjaxAttentionBackward",
    "probjax_linear_scan_forward": "ProbjaxLinearScanForward",
    "probjax_linear_scan_backward": "ProbjaxLinearScanBackward",
    "probjax_selective_scan_forward": "ProbjaxSelectiveScanForward",
    "probjax_selective_scan_tangent": "ProbjaxSelectiveScanTangent",
    "probjax_selective_scan_backward": "ProbjaxSelectiveScanBackward",
}

_FILE = "libprobjax_cpu" + (".dylib" if sys.platform == "darwin" else ".so")
_ROOT = Path(__file__).parents[2]  # of the checkout, when probjax runs from one

_SYSTEMS = {("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "x86_64"), ("Darwin", "arm64")}


@dataclass(frozen=True)
class _State:
    """What came of loading: the file and its instruction set, or why there is none and what to do."""

    path: Path | None = None
    isa: str | None = None
    reason: str | None = None
    advice: str | None = None


_lock = threading.Lock()
_loaded: _State | None = None


def reason() -> str | None:
    """Why the native kernels cannot be used; None when they can."""
    return _state().reason


def isa() -> str | None:
    """The instruction set of the kernels chosen for this processor; None without a usable library."""
    return _state().isa


def path() -> Path | None:
    """The library's file, also of one that is refused; None when there is none."""
    return _state().path


def describe() -> str:
    """One line for people: the library and its instruction set, or what is missing and what to do."""
    state = _state()
    if state.reason is None:
        return f"{state.path} [{state.isa}]"
    return f"none: {state.reason}" + (f"; {state.advice}" if state.advice else "")


def _state() -> _State:
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _load()
        return _loaded


def _load() -> _State:
    if os.environ.get("PROBJAX_NATIVE") == "0":
        return _State(reason="turned off by PROBJAX_NATIVE=0")
    named = os.environ.get("PROBJAX_NATIVE_LIBRARY")
    file = Path(named) if named else _find()
    if file is None:
        machine = platform.system(), platform.machine()
        if machine not in _SYSTEMS:
            return _State(reason=f"there are no native kernels for {' '.join(machine)}")
        return _State(reason="the native library has not been built", advice=_how_to_build())
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        again = None if named else _how_to_build()
        return _State(file, reason=f"the native library does not load: {error}", advice=again)
    return _register(file, library)


def _find() -> Path | None:
    import probjax

    # Next to the package's files, where pip puts it (an editable install has a second folder, in
    # site-packages), or where `make native` builds it in a checkout.
    files = [Path(folder) / "_lib" / _FILE for folder in probjax.__path__]
    files = [file for file in (*files, _ROOT / "csrc" / "build" / _FILE) if file.is_file()]
    # A checkout may have both: whatever was built last is meant.
    return max(files, key=lambda file: file.stat().st_mtime, default=None)


def _register(file: Path, library: ctypes.CDLL) -> _State:
    import jax

    try:
        abi = library.probjax_abi()
        if abi != ABI:
            text = f"{file} is of another version of probjax (interface {abi}, wanted {ABI})"
            return _State(file, reason=text, advice=_how_to_build())
        library.probjax_isa.restype = ctypes.c_char_p
        instruction_set = library.probjax_isa().decode()
        handlers = {target: getattr(library, symbol) for target, symbol in TARGETS.items()}
    except AttributeError as error:
        text = f"{file} is not probjax's native library: {error}"
        return _State(file, reason=text, advice=_how_to_build())
    try:
        # First the backend: a handler that is registered before it starts is refused only then, and a refusal
        # then keeps JAX from having a CPU at all.
        jax.local_devices(backend="cpu")
        for target, handler in handlers.items():
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler), platform="cpu")
    except Exception as error:  # a promise: never fatal, whatever jaxlib raises
        text = f"XLA refuses {file}: {str(error).rstrip('.') or type(error).__name__}"
        return _State(file, reason=text, advice=_how_to_build(for_this_jax=True))
    return _State(file, isa=instruction_set)


def _how_to_build(for_this_jax: bool = False) -> str:
    named = os.environ.get("CXX", "").split()[:1]
    has_compiler = any(shutil.which(name) for name in (*named, "c++", "g++", "clang++"))
    get = "" if has_compiler else "install g++ >= 11 or clang >= 14 (no C++ compiler was found), then "
    if (_ROOT / "csrc" / "CMakeLists.txt").is_file():
        return f"{get}run `make native` in {_ROOT}"
    tools, option = "", ""
    if for_this_jax:
        # In isolation pip builds with the headers that pyproject.toml names, not those of the jax installed.
        tools, option = "pip install scikit-build-core cmake ninja && ", " --no-build-isolation"
    return (
        f"{get}run `{tools}PROBJAX_NATIVE=1 pip install --force-reinstall --no-deps{option} .` in a checkout "
        "of probjax, which builds it or says why it cannot"
    )
