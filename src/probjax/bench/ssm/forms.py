"""The cells of the suite `ssm` over other forms of the recurrences: same parameters, same products around it.

A form is a subclass of the public cell whose call takes another recurrence; what the rows of one cell of the
suite differ in is that alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from probjax import recurrence
from probjax.bench.recurrence import naive
from probjax.nn import LRUCell, MambaCell, SSDCell

Array = jax.Array
CELLS: dict[str, type] = {"mamba": MambaCell, "ssd": SSDCell, "lru": LRUCell}


def _named(operation: Callable[..., Any], implementation: str) -> Callable[..., Array]:
    run = partial(operation, implementation=implementation)
    if operation is recurrence.selective_scan:
        run = partial(run, dt_softplus=True)
    return lambda *operands: run(*operands)[0]


_SCANS: dict[str, dict[str, Callable[..., Array]]] = {
    "probjax_scan": {
        "mamba": _named(recurrence.selective_scan, "scan"),
        "ssd": _named(recurrence.ssd, "scan"),
        "lru": _named(recurrence.linear_scan, "scan"),
    },
    "xla_associative": {
        "mamba": naive.associative_selective_scan,
        "ssd": naive.associative_ssd,
        "lru": naive.associative_linear_scan,
    },
}


def cell_class(impl: str, cell: str) -> type:
    """Return the class of a cell for a row label: the public one, or a form of it.

    Args:
      impl: ``probjax_default``, ``probjax_scan`` or ``xla_associative``.
      cell: ``mamba``, ``ssd`` or ``lru``.
    """
    public = CELLS[cell]
    if impl == "probjax_default":
        return public
    body, scan = _BODIES[cell], _SCANS[impl][cell]

    def call(self: Any, x: Array) -> Array:
        return body(self, x, scan)

    return type(public.__name__, (public,), {"__call__": call})


def _exact(layer: Any, x: Array) -> Array:
    """A linear layer whose factors are rounded to the dtype of `x`, added up in float32."""
    product = x.astype(jnp.float32) @ layer.kernel[...].astype(x.dtype).astype(jnp.float32)
    return product + layer.bias[...]


def _mamba(cell: Any, x: Array, scan: Callable[..., Array]) -> Array:
    x = x if cell.dtype is None else x.astype(cell.dtype)
    A = -jnp.exp(cell.A_log[...])
    return scan(x, _exact(cell.to_dt, x), A, cell.to_B(x), cell.to_C(x), cell.D[...])


def _ssd(cell: Any, x: Array, scan: Callable[..., Array]) -> Array:
    x = x if cell.dtype is None else x.astype(cell.dtype)
    query, key, value = (layer(x)[..., None, :] for layer in (cell.query, cell.key, cell.value))
    return scan(query, key, value, -jax.nn.softplus(_exact(cell.decay, x)))[..., 0, :]


def _lru(cell: Any, x: Array, scan: Callable[..., Array]) -> Array:
    x = x if cell.dtype is None else x.astype(cell.dtype)
    exact = x.astype(jnp.float32)
    a = jnp.exp(jax.lax.complex(-jnp.exp(cell.nu[...]), jnp.exp(cell.theta[...])))
    scale = jnp.exp(cell.gamma[...])
    B = jnp.concatenate([cell.B_re[...] * scale, cell.B_im[...] * scale], 1).astype(x.dtype)
    b = exact @ B.astype(jnp.float32)
    size = cell.state_size
    h = scan(a, jax.lax.complex(b[..., :size], b[..., size:]))
    C = jnp.concatenate([cell.C_re[...], -cell.C_im[...]], 0).astype(x.dtype)
    return jnp.concatenate([h.real, h.imag], -1).astype(x.dtype) @ C + x @ cell.D[...].astype(x.dtype)


_BODIES: dict[str, Callable[..., Array]] = {"mamba": _mamba, "ssd": _ssd, "lru": _lru}
