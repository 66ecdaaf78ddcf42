"""The suite `ssm`: cells, rows and their errors for the loop in `runner`."""

from typing import Any

import numpy as np

from probjax.bench.measure import Prepared, Unavailable
from probjax.bench.network import rows
from probjax.bench.network.suite import NetworkSuite
from probjax.bench.ssm.config import SsmCell
from probjax.bench.ssm.oracle import reference

_SEED = 20261201


class SsmSuite(NetworkSuite):
    """The suite `ssm`; see `NetworkSuite`."""

    def prepare(self, impl: str, cell: SsmCell) -> Prepared:
        """Compile and warm up one row."""
        ready = super().prepare(impl, cell)
        if ready.columns["implementation"] == "xla":
            # The public cells take this one of ours where there is no native library.
            ready.columns["implementation"] = "associative" if impl == "xla_associative" else "scan"
        return ready

    def build(self, impl: str, cell: SsmCell) -> rows.Network:
        """Return the model of a row with its parameters and inputs, the same for every row of a cell."""
        return build(impl, cell)

    def exact(self, impl: str, cell: SsmCell, parameters: Any, *inputs: np.ndarray) -> np.ndarray:
        """Return a row's exact output in float64."""
        return reference(parameters, inputs[0], cell=cell.cell)


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
    from probjax.bench.ssm.model import make

    return make(
        cell.model_dim,
        cell.layers,
        cell_class(impl, cell.cell),
        remat="full" if cell.variant == "remat" else "none",
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
