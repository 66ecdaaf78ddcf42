"""PyTorch's attention behind JSON lines; runs in any interpreter that has torch and numpy, and imports
nothing else.

Usage: PYTHON torch_child.py PARENT_PID, then one JSON object per line of standard input, one answer for each:

  {"op": "hello", "threads": N, "device": "cpu" or "cuda"}
                                   sets the number of threads; versions
  {"op": "load", "case": I, "path": P, "mode": M, "dtype": D, "causal": C, "backend": B, ...}
                                   reads query, key, value, cotangent (batch, heads, seq, head_dim) and
                                   perhaps by_distance (heads, 2 seq - 1), bias, segment_ids or mask from an
                                   .npz file, and keeps the case under the number I (0 when none is given)
  {"op": "first", "case": I}       calls once; seconds
  {"op": "run", "case": I, "n": N} calls N times; seconds in all
  {"op": "device", "case": I, "n": N}
                                   replays a CUDA graph of N calls; microseconds of one call on the device
  {"op": "result", "case": I, "path": P, "step": [b, h] or null}
                                   writes the last outputs, or every b-th batch row and h-th head of them
  {"op": "drop", "case": I}        forgets the case
  {"op": "quit"}

An answer with "error" tells what went wrong; with "unavailable" too, that torch cannot do this at all. The
process goes on.
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


class Case:
    """One loaded case: its call, the settings of torch that it needs, and the last outputs."""

    def __init__(self, call: Any, settle: Any) -> None:
        self.call = call
        self.settle = settle
        self.outputs: Any = None


class Server:
    """The loaded cases and the operations on them."""

    def __init__(self, torch: Any, numpy: Any) -> None:
        self.torch = torch
        self.numpy = numpy
        self.device_name = "cpu"
        self.cases: dict[int, Case] = {}
        self.kept: tuple[Any, dict[str, Any]] | None = None
        self.flex: Any = None

    def hello(self, threads: int, device: str = "cpu") -> dict[str, Any]:
        """Set the number of threads; report versions."""
        torch = self.torch
        torch.set_num_threads(threads)
        self.device_name = device
        if device == "cuda" and not torch.cuda.is_available():
            raise Refused("this torch sees no GPU")
        # Start the threads, the matrix library and the gradient engine now: none belongs to the first case.
        square = torch.ones(1, 1, 256, 64, requires_grad=True, device=device)
        torch.nn.functional.scaled_dot_product_attention(square, square, square).sum().backward()
        cpu = torch.backends.cpu.get_cpu_capability()
        return {
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "numpy": self.numpy.__version__,
            "threads": torch.get_num_threads(),
            "capability": cpu if device == "cpu" else torch.cuda.get_device_name(),
            "precision": torch.get_float32_matmul_precision(),
        }

    def load(
        self,
        path: str,
        mode: str,
        dtype: str,
        causal: bool,
        backend: str = "sdpa",
        case: int = 0,
        window: int | None = None,
        precision: str = "default",
        output: bool = False,
    ) -> dict[str, Any]:
        """Read the inputs of a case; masks are made here, outside of what is timed."""
        torch = self.torch
        self.cases.pop(case, None)
        cases = self.read(path, getattr(torch, dtype))
        learned = ["query", "key", "value", *(["bias"] if "bias" in cases else [])]
        if mode == "fwdbwd":
            # Leaves of their own: another case may be timed forward over the same arrays.
            cases = {**cases, **{name: cases[name].detach().requires_grad_(True) for name in learned}}
        self.settle(backend, precision)
        attend = self.attention(cases, backend, causal, window)
        query, key, value = (cases[name] for name in ("query", "key", "value"))
        quiet = torch.inference_mode if self.device_name == "cpu" else torch.no_grad

        def forward() -> dict[str, Any]:
            with quiet():
                return {"output": attend(query, key, value)}

        def gradients() -> dict[str, Any]:
            result = attend(query, key, value)
            found = torch.autograd.grad(result, [cases[name] for name in learned], cases["cotangent"])
            named = dict(zip(learned, found, strict=True))
            return {"output": result, **named} if output else named

        def settle() -> None:
            self.settle(backend, precision)

        self.cases[case] = Case(gradients if mode == "fwdbwd" else forward, settle)
        give_back_memory()
        return {}

    def read(self, path: str, kind: Any) -> dict[str, Any]:
        """Return the arrays of a file on the device. On a GPU they are kept: many cases share them."""
        if self.kept is not None and self.kept[0] == (path, kind):
            return self.kept[1]
        self.kept = None
        with self.numpy.load(path) as file:
            arrays = {name: self.torch.from_numpy(file[name]) for name in file.files}
        found = {}
        for name in list(arrays):
            array = arrays.pop(name)
            as_it_is = name == "by_distance" or not array.is_floating_point()
            found[name] = array.to(self.device_name, None if as_it_is else kind).contiguous()
        if "by_distance" in found:
            found["dense"] = expand(found.pop("by_distance")).to(kind)[None]
        if self.device_name == "cuda":
            self.kept = ((path, kind), found)
        return found

    def settle(self, backend: str, precision: str) -> None:
        """Allow one backend of scaled_dot_product_attention alone, or all, and set the precision."""
        torch = self.torch
        if self.device_name == "cpu":
            if backend != "sdpa":
                raise Refused(f"torch's {backend} attention is measured on GPUs only")
            return
        torch.set_float32_matmul_precision("highest" if precision == "highest" else "high")
        for name in ("flash", "cudnn", "mem_efficient", "math"):
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(backend in (name, "sdpa", "flex"))

    def attention(self, cases: dict[str, Any], backend: str, causal: bool, window: int | None) -> Any:
        """Return f(query, key, value) for a case."""
        torch = self.torch
        if backend == "flex":
            return self.flex_attention(cases, causal, window)
        mask = dense_mask(torch, cases, causal, window)
        attend = torch.nn.functional.scaled_dot_product_attention
        options = {"attn_mask": mask, "is_causal": causal and mask is None}

        def with_backend(query: Any, key: Any, value: Any) -> Any:
            return attend(query, key, value, **options)

        return with_backend

    def flex_attention(self, cases: dict[str, Any], causal: bool, window: int | None) -> Any:
        """Return compiled FlexAttention with the case's mask as blocks and its bias as a function."""
        torch = self.torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if self.flex is None:
            # Every case is a program of its own; beyond a limit torch would run them without compiling.
            for name in ("recompile_limit", "cache_size_limit", "accumulated_recompile_limit"):
                if hasattr(torch._dynamo.config, name):
                    setattr(torch._dynamo.config, name, 10_000)
            self.flex = torch.compile(flex_attention, dynamic=False)
        flex = self.flex
        options: dict[str, Any] = {}
        visible = mask_function(cases, causal, window)
        if visible is not None:
            batch, _, length, _ = cases["query"].shape
            rows = batch if "segment_ids" in cases or "mask" in cases else None
            options["block_mask"] = create_block_mask(visible, rows, None, length, length, device="cuda")
        bias = cases.get("bias")
        if "dense" in cases:
            raise Refused("FlexAttention is not measured with a relative-position bias")
        if bias is not None:
            options["score_mod"] = lambda score, b, h, q, k: score + bias[0, h, q, k]
        return lambda query, key, value: flex(query, key, value, **options)

    def first(self, case: int = 0) -> dict[str, Any]:
        """Call once, with all that happens only once."""
        return self.run(1, case)

    def run(self, n: int, case: int = 0) -> dict[str, Any]:
        """Call n times; return the seconds in all. Calls on a GPU follow each other without waiting."""
        chosen = self.cases[case]
        chosen.settle()
        begin = time.perf_counter()
        for _ in range(n):
            chosen.outputs = chosen.call()
        self.wait()
        return {"seconds": time.perf_counter() - begin}

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.device_name == "cuda":
            self.torch.cuda.synchronize()

    def device(self, n: int, case: int = 0) -> dict[str, Any]:
        """Replay n calls as one CUDA graph, ten times; return the median microseconds of one call."""
        torch = self.torch
        self.cases[case].settle()
        call = self.cases[case].call
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(n):
                call()
        graph.replay()
        times = []
        for _ in range(10):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return {"device_us": 1e3 * sorted(times)[len(times) // 2] / n}

    def result(self, path: str, case: int = 0, step: list[int] | None = None) -> dict[str, Any]:
        """Write the last outputs, or a part of them."""
        arrays = {}
        for name, array in self.cases[case].outputs.items():
            if step is not None:
                array = array[:, :: step[1]] if name == "bias" else array[:: step[0], :: step[1]]
            arrays[name] = array.detach().float().cpu().numpy()
        self.numpy.savez(path, **arrays)
        return {}

    def drop(self, case: int = 0) -> dict[str, Any]:
        """Forget a case."""
        self.cases.pop(case, None)
        return {}


class Refused(Exception):
    """What torch cannot do here at all."""


def dense_mask(torch: Any, cases: dict[str, Any], causal: bool, window: int | None) -> Any:
    """Return the one array that `scaled_dot_product_attention` takes for a mask or bias, or None."""
    if "dense" in cases:
        return cases["dense"]
    if "bias" in cases:
        return cases["bias"]
    if "mask" in cases:
        return cases["mask"]
    visible = mask_function(cases, causal, window)
    if visible is None or ("segment_ids" not in cases and window is None):
        # It has an argument for causal alone.
        return None
    batch, _, length, _ = cases["query"].shape
    place = torch.arange(length, device=cases["query"].device)
    rows = torch.arange(batch if "segment_ids" in cases else 1, device=place.device)
    return visible(rows[:, None, None, None], 0, place[:, None], place[None, :])


def mask_function(cases: dict[str, Any], causal: bool, window: int | None) -> Any:
    """Return f(batch, head, query, key) that says what is visible, or None where all is."""
    if "mask" in cases:
        mask = cases["mask"]
        return lambda b, h, q, k: mask[b, 0, q, k]
    if "segment_ids" in cases:
        ids = cases["segment_ids"]
        return lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q >= k)
    if window is not None:
        return lambda b, h, q, k: (q >= k) & (q - k <= window)
    return (lambda b, h, q, k: q >= k) if causal else None


def expand(by_distance: Any) -> Any:
    """Return the matrix (heads, seq, seq) whose entry (i, j) is by_distance[j - i + seq - 1]."""
    length = (by_distance.shape[1] + 1) // 2
    # Row i is the window that starts at length - 1 - i: the reversed rows of all windows.
    return by_distance.unfold(1, length, 1).flip(1).contiguous()


def main(server_class: Any = Server) -> None:
    """Serve requests until the input ends.

    Args:
      server_class: whose methods are the operations; another suite's child has a subclass of `Server`.
    """
    # Answers go to the old standard output; whatever a library prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    die_with_parent(int(sys.argv[1]))
    import numpy
    import torch

    server = server_class(torch, numpy)
    gc.disable()
    for line in sys.stdin:
        request = json.loads(line)
        op = request.pop("op")
        if op == "quit":
            return
        try:
            answer = getattr(server, op)(**request)
        except Refused as error:
            answer = {"error": str(error), "unavailable": True}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
            # What scaled_dot_product_attention says when the backend asked for does not take the call.
            if "No available kernel" in str(error):
                answer["unavailable"] = True
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
