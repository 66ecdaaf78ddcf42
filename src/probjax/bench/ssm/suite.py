"""The suite `ssm`: cells, rows and their errors for the loop in `runner`."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from probjax.bench.measure import Prepared, Unavailable, Wrong
from probjax.bench.network import rows
from probjax.bench.ssm.config import SsmCell, SsmConfig
from probjax.bench.ssm.oracle import reference

_SEED = 20261201
# A result further off than this is wrong, not inexact, and gets no time.
_WRONG = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}
# NVIDIA GPUs multiply float32 with 10 bits of mantissa unless told otherwise.
_WRONG_TF32 = 5e-2


class SsmSuite:
    """The suite `ssm`.

    Args:
      config: what to measure.
      torch: None; no row is PyTorch's.
    """

    def __init__(self, config: SsmConfig, torch: None = None) -> None:
        self._config = config
        self.device = config.device
        self._network: tuple[Any, rows.Network] | None = None
        self._exact: tuple[Any, np.ndarray] | None = None

    def cells(self) -> Sequence[SsmCell]:
        """Return the grid, in the order of measuring."""
        return self._config.grid()

    def impls(self) -> Sequence[str]:
        """Return the row labels wanted."""
        return self._config.impls

    def prepare(self, impl: str, cell: SsmCell) -> Prepared:
        """Compile and warm up one row."""
        ready = rows.prepare(
            impl,
            self.network(impl, cell),
            op=cell.op,
            variant=cell.variant,
            device=self.device,
            memory_limit=self._config.memory_limit,
        )
        if ready.columns["implementation"] == "xla":
            # The public cells take this one of ours where there is no native library.
            ready.columns["implementation"] = "associative" if impl == "xla_associative" else "scan"
        return ready

    def network(self, impl: str, cell: SsmCell) -> rows.Network:
        """Return the model of a row with its parameters and inputs, the same for every row of a cell."""
        key = (impl, cell.cell, cell.dtype, cell.tokens, cell.variant == "remat")
        if self._network is None or self._network[0] != key:
            self._network = (key, build(impl, cell))
        return self._network[1]

    def check(self, cell: SsmCell, prepared: Prepared) -> dict[str, Any]:
        """Return the error column: the output's, or the loss's of a train step.

        Raises:
          Wrong: when it is too large for the dtype, or when a result is not finite.
        """
        if not prepared.columns["finite"]:
            raise Wrong("a result is not finite")
        if self._config.no_ref:
            return {}
        exact = self._reference(prepared.impl, cell)
        found = prepared.result()
        if cell.trains:
            wanted = float(np.mean(exact**2))
            error = abs(float(found["loss"]) - wanted) / wanted
        else:
            error = float(np.abs(found["y"] - exact).max() / np.abs(exact).max())
        tf32 = self.device == "gpu" and cell.dtype == "float32"
        if not math.isfinite(error) or error > (_WRONG_TF32 if tf32 else _WRONG[cell.dtype]):
            columns = {"rel_err": error} if math.isfinite(error) else {}
            raise Wrong(f"the result is wrong: relative error {error:.1e} against the reference", columns)
        return {"rel_err": error}

    def _reference(self, impl: str, cell: SsmCell) -> np.ndarray:
        key = (cell.cell, cell.dtype, cell.tokens)
        if self._exact is None or self._exact[0] != key:
            from flax import nnx

            network = self.network(impl, cell)
            x = np.asarray(network.inputs[0], np.float64)
            self._exact = (key, reference(nnx.to_pure_dict(network.parameters), x, cell=cell.cell))
        return self._exact[1]


def make_model(impl: str, cell: SsmCell) -> Any:
    """Return the model of a row, with the same parameters whatever the row.

    Args:
      impl: a row label, see `forms.cell_class`.
      cell: the cell.

    Raises:
      Unavailable: without Flax.
    """
    try:
        from flax import nnx
    except ImportError as error:
        raise Unavailable(f"flax.nnx cannot be imported ({error}): install flax") from None
    import jax.numpy as jnp

    from probjax.bench.ssm.forms import cell_class
    from probjax.bench.ssm.model import Model

    return Model(
        cell.model_dim,
        cell.layers,
        cell_class(impl, cell.cell),
        remat=cell.variant == "remat",
        dtype=jnp.dtype(cell.dtype),
        rngs=nnx.Rngs(_SEED),
    )


def build(impl: str, cell: SsmCell) -> rows.Network:
    """Return the model of a row as a function, with its parameters and inputs; see `make_model`."""
    model = make_model(impl, cell)
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from probjax.bench.ssm.model import FEATURES

    definition, parameters = nnx.split(model)

    def apply(parameters: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(definition, parameters)(x)

    generator = np.random.default_rng([_SEED, cell.batch, cell.tokens])
    x = jnp.asarray(generator.standard_normal((cell.batch, cell.tokens, FEATURES), np.float32), cell.dtype)
    return rows.Network(apply, parameters, (x,))
