"""PyTorch's attention behind JSON lines; runs in any interpreter that has torch and numpy, and imports
nothing else.

Usage: PYTHON torch_child.py PARENT_PID, then one JSON object per line of standard input, one answer for each:

  {"op": "hello", "threads": N}    sets the number of threads; versions
  {"op": "load", "path": P, "mode": M, "dtype": D, "causal": C}
                                   reads query, key, value, cotangent (batch, heads, seq, head_dim) and
                                   perhaps by_distance (heads, 2 seq - 1) from an .npz file
  {"op": "first"}                  calls once; seconds
  {"op": "run", "n": N}            calls N times; seconds in all
  {"op": "result", "path": P}      writes the last outputs to an .npz file
  {"op": "quit"}

An answer with "error" tells what went wrong; the process goes on.
"""

import contextlib
import ctypes
import gc
import json
import os
import sys
import time
from typing import Any


def die_with_parent(parent: int) -> None:
    """Ask the kernel to end this process with its parent: a stopped one does not notice a closed pipe."""
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig, sigkill = 1, 9
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, sigkill, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit("the parent process is gone")


def give_back_memory() -> None:
    """Return freed memory to the system, so that a later peak is not hidden in it."""
    gc.collect()
    if sys.platform.startswith("linux"):
        # Only the GNU C library has it.
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


class Server:
    """One loaded case and the operations on it."""

    def __init__(self, torch: Any, numpy: Any) -> None:
        self.torch = torch
        self.numpy = numpy
        self.call: Any = None
        self.outputs: Any = None

    def hello(self, threads: int) -> dict[str, Any]:
        """Set the number of threads; report versions."""
        torch = self.torch
        torch.set_num_threads(threads)
        # Start the threads, the matrix library and the gradient engine now: none belongs to the first case.
        square = torch.ones(1, 1, 256, 64, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(square, square, square).sum().backward()
        return {
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "numpy": self.numpy.__version__,
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "precision": torch.get_float32_matmul_precision(),
        }

    def load(self, path: str, mode: str, dtype: str, causal: bool) -> dict[str, Any]:
        """Read the inputs of a case; the mask, if there is one, is made here, outside of what is timed."""
        self.call = self.outputs = None
        torch = self.torch
        kind = getattr(torch, dtype)
        with self.numpy.load(path) as file:
            arrays = {name: torch.from_numpy(file[name]) for name in file.files}
        by_distance = arrays.pop("by_distance", None)
        cases = {name: array.to(kind).contiguous() for name, array in arrays.items()}
        mask = None if by_distance is None else expand(by_distance).to(kind)[None]
        query, key, value, cotangent = (cases[name] for name in ("query", "key", "value", "cotangent"))
        attend = torch.nn.functional.scaled_dot_product_attention
        options = {"attn_mask": mask, "is_causal": causal and mask is None}

        def forward() -> dict[str, Any]:
            with torch.inference_mode():
                return {"output": attend(query, key, value, **options)}

        def gradients() -> dict[str, Any]:
            output = attend(query, key, value, **options)
            found = torch.autograd.grad(output, (query, key, value), cotangent)
            return dict(zip(("query", "key", "value"), found, strict=True))

        if mode == "fwdbwd":
            for array in (query, key, value):
                array.requires_grad_(True)
        self.call = gradients if mode == "fwdbwd" else forward
        del arrays, cases, by_distance
        give_back_memory()
        return {}

    def first(self) -> dict[str, Any]:
        """Call once, with all that happens only once."""
        return self.run(1)

    def run(self, n: int) -> dict[str, Any]:
        """Call n times; return the seconds in all."""
        begin = time.perf_counter()
        for _ in range(n):
            self.outputs = self.call()
        return {"seconds": time.perf_counter() - begin}

    def result(self, path: str) -> dict[str, Any]:
        """Write the last outputs."""
        arrays = {name: array.detach().float().numpy() for name, array in self.outputs.items()}
        self.numpy.savez(path, **arrays)
        return {}


def expand(by_distance: Any) -> Any:
    """Return the matrix (heads, seq, seq) whose entry (i, j) is by_distance[j - i + seq - 1]."""
    length = (by_distance.shape[1] + 1) // 2
    # Row i is the window that starts at length - 1 - i: the reversed rows of all windows.
    return by_distance.unfold(1, length, 1).flip(1).contiguous()


def main() -> None:
    """Serve requests until the input ends."""
    # Answers go to the old standard output; whatever a library prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    die_with_parent(int(sys.argv[1]))
    import numpy
    import torch

    server = Server(torch, numpy)
    gc.disable()
    for line in sys.stdin:
        request = json.loads(line)
        op = request.pop("op")
        if op == "quit":
            return
        try:
            answer = getattr(server, op)(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
