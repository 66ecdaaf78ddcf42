"""The reference transformer in PyTorch, behind JSON lines.

It runs in any interpreter that has torch and numpy, and imports nothing else but the attention suite's child,
whose protocol this is. The model is stock: LayerNorm, Linear, scaled_dot_product_attention; eager. In half
precision it computes under torch.autocast, from parameters in float32.
"""

import contextlib
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


def make_model(torch: Any, layers: int, features: int, heads: int) -> Any:
    """Return the transformer, (batch, tokens, features) to the same."""
    nn, functional = torch.nn, torch.nn.functional
    Module: Any = nn.Module

    class Attention(Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.out = (nn.Linear(features, features) for _ in range(4))

        def forward(self, x: Any) -> Any:
            split = [layer(x).unflatten(-1, (heads, -1)) for layer in (self.query, self.key, self.value)]
            y = functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in split))
            return self.out(y.transpose(1, 2).flatten(-2))

    class Block(Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm = nn.LayerNorm(features, eps=1e-6)
            self.attention = Attention()
            self.mlp_norm = nn.LayerNorm(features, eps=1e-6)
            self.mlp_in = nn.Linear(features, 4 * features)
            self.mlp_out = nn.Linear(4 * features, features)

        def forward(self, x: Any) -> Any:
            x = x + self.attention(self.attention_norm(x))
            hidden = functional.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")
            return x + self.mlp_out(hidden)

    return nn.Sequential(*(Block() for _ in range(layers)))


class TransformerServer(Server):
    """The loaded cases and the operations on them; all but loading are the attention suite's."""

    def load(
        self, path: str, train: bool, dtype: str, layers: int, heads: int, case: int = 0
    ) -> dict[str, Any]:
        """Read parameters and input of a case: those of block i under the names ``i.LAYER.weight``."""
        torch = self.torch
        self.cases.pop(case, None)
        kind = getattr(torch, dtype)
        with self.numpy.load(path) as file:
            arrays = {name: torch.from_numpy(file[name]).to(self.device_name) for name in file.files}
        x = arrays.pop("x").to(kind)
        model = make_model(torch, layers, x.shape[-1], heads).to(self.device_name)
        model.load_state_dict(arrays)

        def precision() -> Any:
            if kind == torch.float32:
                return contextlib.nullcontext()
            return torch.autocast(self.device_name, kind)

        def forward() -> dict[str, Any]:
            with torch.no_grad(), precision():
                return {"y": model(x)}

        optimizer = torch.optim.Adam(model.parameters())

        def step() -> dict[str, Any]:
            optimizer.zero_grad(set_to_none=True)
            with precision():
                y = model(x)
            loss = y.float().square().mean()
            loss.backward()
            optimizer.step()
            return {"loss": loss}

        self.cases[case] = Case(step if train else forward, lambda: None)
        give_back_memory()
        return {}


if __name__ == "__main__":
    main(TransformerServer)
