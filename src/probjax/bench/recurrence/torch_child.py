"""Mamba-1's selective scan as a plain loop over time in PyTorch, behind JSON lines.

It runs in any interpreter that has torch and numpy, and imports nothing else but the attention suite's child,
whose protocol this is. It is what mamba_ssm publishes as the reference of its kernel, which runs on a CPU,
written anew from its description: decays exp(dt A) and inputs dt B x of all steps by einsum, then one step of
Python per token. Shapes: x, dt, cotangent (batch, channels, length); A (channels, state); B, C (batch, state,
length); D (channels,).
"""

import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent / "attention")

# That folder is no package to this interpreter, nor to the type checker.
from torch_child import (  # type: ignore[import-not-found]  # noqa: E402
    Case,
    Server,
    give_back_memory,
    main,
)

_OPERANDS = ("x", "dt", "A", "B", "C", "D")
_EXACT = ("A", "D")


class LoopServer(Server):
    """The loaded cases and the operations on them; all but loading are the attention suite's."""

    def load(self, path: str, mode: str, dtype: str, case: int = 0) -> dict[str, Any]:
        """Read the inputs of a case."""
        torch = self.torch
        self.cases.pop(case, None)
        kind = getattr(torch, dtype)
        with self.numpy.load(path) as file:
            arrays = {name: torch.from_numpy(file[name]) for name in (*_OPERANDS, "cotangent")}
        arrays = {
            name: array.to(self.device_name, torch.float32 if name in _EXACT else kind).contiguous()
            for name, array in arrays.items()
        }
        operands = [arrays[name].requires_grad_(mode == "fwdbwd") for name in _OPERANDS]

        def forward() -> dict[str, Any]:
            with torch.inference_mode():
                return {"output": selective_scan(torch, *operands)}

        def gradients() -> dict[str, Any]:
            output = selective_scan(torch, *operands)
            found = torch.autograd.grad(output, operands, arrays["cotangent"])
            return dict(zip(_OPERANDS, found, strict=True))

        self.cases[case] = Case(gradients if mode == "fwdbwd" else forward, lambda: None)
        give_back_memory()
        return {}


def selective_scan(torch: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any) -> Any:
    """The loop; y (batch, channels, length) in the dtype of x, everything between in float32."""
    u, dt, B, C = (array.float() for array in (x, dt, B, C))
    dt = torch.nn.functional.softplus(dt)
    decay = torch.exp(torch.einsum("bdl,dn->bdln", dt, A))
    inputs = torch.einsum("bdl,bnl,bdl->bdln", dt, B, u)
    h = torch.zeros_like(inputs[:, :, 0])
    outputs = []
    # The published loop takes step t by an index, whose gradient is an array over all steps for each step:
    # time with the square of the length. unbind has the same values, and a gradient with the length.
    for decay_t, inputs_t, C_t in zip(decay.unbind(2), inputs.unbind(2), C.unbind(2), strict=True):
        h = decay_t * h + inputs_t
        outputs.append(torch.einsum("bdn,bn->bd", h, C_t))
    return (torch.stack(outputs, 2) + u * D[:, None]).to(x.dtype)


if __name__ == "__main__":
    main(LoopServer)
