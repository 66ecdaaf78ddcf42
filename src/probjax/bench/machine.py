"""What a result was measured on: the `device` header of a result file, and `probjax info`."""

import ctypes.util
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

# Settings that change how memory is given out, and with it the time of everything that makes large
# temporaries.
_ALLOCATOR_PREFIXES = ("MALLOC_", "GLIBC_TUNABLES", "TCMALLOC_", "LD_PRELOAD", "XLA_PYTHON_CLIENT_")
_THREAD_NAMES = ("OMP_", "GOMP_", "MKL_NUM", "KMP_", "OPENBLAS_NUM", "XLA_FLAGS", "NPROC")


def version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        named = {key.strip(): value.strip() for key, value in fields.items()}
        name = named.get("model name") or named.get("Model") or named.get("Hardware")
        if name:
            return name
    except OSError:
        pass
    return platform.processor() or platform.machine()


def vector_extensions() -> list[str]:
    """Return the vector extensions of the processor that matrix products use, where they are listed."""
    wanted = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve")
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    flags = set()
    for line in text.splitlines():
        if line.lower().startswith(("flags", "features")):
            flags.update(line.split(":", 1)[1].split())
            break
    return [name for name in wanted if name in flags]


def cores_used() -> int:
    """Return the number of cores that this process may run on; XLA and torch start as many threads."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_gb() -> float | None:
    """Return the machine's main memory in units of 2**30 bytes."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _environment(prefixes: tuple[str, ...]) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    if "LD_PRELOAD" in found:
        # Which library, not where this machine keeps it.
        found["LD_PRELOAD"] = " ".join(
            Path(part).name for part in found["LD_PRELOAD"].replace(":", " ").split()
        )
    return found


def allocator() -> dict[str, str]:
    """Return the C library and the environment settings of its memory allocator."""
    library, number = platform.libc_ver()
    name = f"{library} {number}".strip() or ctypes.util.find_library("c") or "unknown"
    return {"library": name, **_environment(_ALLOCATOR_PREFIXES)}


def git_state() -> tuple[str | None, bool | None]:
    """Return the revision of the checkout that holds this package, and whether tracked files differ."""
    here = Path(__file__).parent
    if shutil.which("git") is None:
        return None, None

    def ask(*arguments: str) -> str | None:
        done = subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else None

    # A package installed inside some other project's checkout must not report that project's revision.
    if not ask("ls-files", "--", str(Path(__file__).name)):
        return None, None
    revision, changes = ask("rev-parse", "HEAD"), ask("status", "--porcelain", "--untracked-files=no")
    return revision, None if changes is None else bool(changes)


def gpu() -> dict[str, Any]:
    """Return name, driver and memory of the first NVIDIA GPU, empty without one."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        name, driver, memory = (part.strip() for part in done.stdout.splitlines()[0].split(","))
        return {"gpu": name, "driver": driver, "gpu_memory_gb": round(float(memory) / 1024, 1)}
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return {}


def device_header(torch: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the `device` header of a result file.

    Args:
      torch: what the torch child process said of itself, or None without one.

    Returns:
      JSON values: versions, device, processor, cores, threads, memory, allocator and thread settings.
    """
    import jax

    from probjax.bench.measure import describe

    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise RuntimeError(f"JAX found no device: {describe(error)}") from error
    return {
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "devices": [str(device) for device in devices],
        "python": platform.python_version(),
        "device_kind": devices[0].device_kind,
        **gpu(),
        "torch": torch["torch"] if torch else None,
        "torch_python": torch["python"] if torch else None,
        "torch_threads": torch["threads"] if torch else None,
        "torch_capability": torch["capability"] if torch else None,
        "processor": processor(),
        "vector_extensions": vector_extensions(),
        "cores": os.cpu_count(),
        "cores_used": cores_used(),
        "threads": cores_used(),
        "memory_gb": memory_gb(),
        "os": f"{platform.system()} {platform.machine()}",
        "jaxlib": version("jaxlib"),
        "numpy": version("numpy"),
        "flax": version("flax"),
        "probjax": package_version(),
        "allocator": allocator(),
        "thread_settings": _environment(_THREAD_NAMES),
    }


def package_version() -> str | None:
    """Return probjax's version, also of a source tree that is not installed."""
    import probjax

    return getattr(probjax, "__version__", None) or version("probjax")


def load_average() -> list[float] | None:
    """Return the system's load over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None


def info_lines(torch_python: str | None = None) -> list[tuple[str, str]]:
    """Return what `probjax info` prints, as pairs of a topic and a text.

    Args:
      torch_python: an interpreter that has torch; None looks for one.
    """
    import jax

    from probjax import attention, recurrence
    from probjax.bench.attention.torch_row import find_torch

    torch, reason = find_torch(torch_python)
    memory = memory_gb()
    lines = [
        ("processor", f"{processor()} [{', '.join(vector_extensions()) or 'unknown vector extensions'}]"),
        ("cores", f"{cores_used()} used of {os.cpu_count()}"),
        ("memory", f"{memory} GiB" if memory else "unknown"),
        (
            "system",
            f"{platform.system()} {platform.release()} {platform.machine()}, {allocator()['library']}",
        ),
        ("python", f"{platform.python_version()} at {sys.executable}"),
        ("probjax", package_version() or "no version"),
    ]
    lines += [
        (name, version(name) or "not installed") for name in ("jax", "jaxlib", "numpy", "flax", "optax")
    ]
    lines.append(("devices", ", ".join(f"{device} ({device.device_kind})" for device in jax.devices())))
    lines.append(("torch", f"{torch['torch']} in Python {torch['python']}" if torch else reason))
    for name, value in {**allocator(), **_environment(_THREAD_NAMES)}.items():
        if name != "library":
            lines.append((name, value))
    for operation in (attention, recurrence):
        name = operation.__name__.rpartition(".")[2]
        found = operation.implementations().items()
        lines += [(f"{name} {implementation}", reason or "available") for implementation, reason in found]
    return lines
