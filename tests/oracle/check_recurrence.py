"""Run a call of a recurrence through an implementation of the package, and compare it with the float64
oracle."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from probjax import recurrence

from . import numpy_recurrence as oracle
from .draw import normal

#: Implementations that have to pass these tests. On a GPU: PROBJAX_TEST_RECURRENCES=scan.
IMPLEMENTATIONS = tuple(os.environ.get("PROBJAX_TEST_RECURRENCES", "reference,scan,native").split(","))
_PLATFORM = os.environ.get("PROBJAX_TEST_PLATFORM", "cpu")
_MISSING = recurrence.implementations(_PLATFORM)
_NATIVE = ("linear_scan", "selective_scan")

#: Largest error relative to the largest entry, by dtype; the contract's bound for float32 is 1e-5.
TOLERANCES = {"float32": 1e-5, "float64": 1e-12, "complex64": 1e-5, "complex128": 1e-12}


def among(*names: str) -> list[Any]:
    """Those implementations that are tested here, as parameters."""
    return [
        pytest.param(
            name, marks=[pytest.mark.skip(reason=f"{name}: {_MISSING[name]}")] if _MISSING[name] else []
        )
        for name in names
        if name in IMPLEMENTATIONS
    ]


def parameters(*operations: str) -> list[Any]:
    """Every pair of operation and implementation; what is missing here is skipped, with the reason."""
    pairs = []
    for operation in operations:
        for name in IMPLEMENTATIONS:
            if name == "native" and operation not in _NATIVE:
                continue
            why = _MISSING[name]
            marks = [pytest.mark.skip(reason=f"{name}: {why}")] if why else []
            pairs.append(pytest.param(operation, name, marks=marks, id=f"{operation}-{name}"))
    return pairs


@dataclass(eq=False)
class Case:
    """One call: `arrays` are the numbers by argument, `tokens` what is said of tokens, `options` the rest."""

    operation: str
    arrays: dict[str, np.ndarray]
    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    reverse: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def main(self) -> str:
        return {"linear_scan": "b", "ssd": "value"}.get(self.operation, "x")

    @property
    def lead(self) -> tuple[int, ...]:
        """(*B, L)."""
        x = self.arrays[self.main]
        return x.shape[: -2 if self.operation == "ssd" else -1]

    def call(self, arrays: Any, implementation: str | None, **more: Any) -> Any:
        """The package's results."""
        function = getattr(recurrence, self.operation)
        options = {**self.tokens, **self.options, "reverse": self.reverse, **more}
        return function(**arrays, **options, implementation=implementation)

    def cast(self, dtype: Any) -> dict[str, Any]:
        kinds = {"c": np.result_type(dtype, np.complex64)}
        return {name: jnp.asarray(x, kinds.get(x.dtype.kind, dtype)) for name, x in self.arrays.items()}

    def expected(self, arrays: Any = None, xp: Any = np) -> tuple[Any, Any]:
        """The oracle's results, in the dtype of `arrays` (by default float64 ones)."""
        arrays = self.arrays if arrays is None else arrays
        *batch, length = self.lead
        tokens = {name: np.broadcast_to(x, (*batch, length)) for name, x in self.tokens.items()}
        full = {name: self._full(name, x, xp) for name, x in arrays.items()}
        rows = []
        for index in np.ndindex(*batch):
            of_row = {name: x if name in _SHARED else x[index] for name, x in full.items()}
            said = oracle.Tokens(**{name: x[index] for name, x in tokens.items()}, reverse=self.reverse)
            rows.append(self._row(of_row, said, xp))
        stacked = (xp.stack([row[i] for row in rows]) for i in range(2))
        return tuple(x.reshape(*batch, *x.shape[1:]) for x in stacked)

    def _full(self, name: str, x: Any, xp: Any) -> Any:
        """The argument with all axes of a batch of rows."""
        if name in _SHARED:
            return x
        main = self.arrays[self.main].shape
        lead, size = self.lead, math.prod(self.lead)
        if name in ("B", "C"):
            x = x if x.ndim == len(main) + 1 else x[..., None, :]
            return xp.broadcast_to(x, (*lead, *x.shape[-2:]))
        if name == "initial_state":
            shape = {
                "linear_scan": lambda: (*lead[:-1], main[-1]),
                "selective_scan": lambda: (*lead[:-1], *self.arrays["A"].shape),
                "ssd": lambda: (*lead[:-1], main[-2], self.arrays["key"].shape[-1], main[-1]),
                "causal_conv1d": lambda: (*lead[:-1], len(self.arrays["weight"]) - 1, main[-1]),
            }[self.operation]()
            return xp.broadcast_to(x, shape)
        if name in ("query", "key") or size == 0:
            return x
        return xp.broadcast_to(x, main[:-1] if name == "log_decay" else main)

    def _row(self, arrays: Any, tokens: oracle.Tokens, xp: Any) -> tuple[Any, Any]:
        arrays = dict(arrays)
        state = arrays.pop("initial_state")
        options = {name: x for name, x in self.options.items() if name == "dt_softplus"}
        return getattr(oracle, self.operation)(**arrays, state=state, **options, tokens=tokens, xp=xp)


_SHARED = ("A", "D", "dt_bias", "weight", "bias")


@functools.cache
def _weights(shape: tuple[int, ...], seed: str, imaginary: bool) -> np.ndarray:
    x = normal(*shape, seed=seed)
    return x + 1j * normal(*shape, seed=seed + "i") if imaginary else x


def cotangents(results: Any) -> tuple[np.ndarray, ...]:
    return tuple(
        _weights(x.shape, name, np.iscomplexobj(x)) for x, name in zip(results, ("y", "last"), strict=True)
    )


def gradients(case: Case) -> dict[str, np.ndarray]:
    """Gradients of all arrays: the oracle's loop, differentiated by JAX in float64. Slow."""
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(x) for name, x in case.arrays.items()}
        results, pull = jax.vjp(lambda arrays: case.expected(arrays, jnp), arrays)
        cts = tuple(jnp.asarray(ct, x.dtype) for ct, x in zip(cotangents(results), results, strict=True))
        return {name: np.asarray(x) for name, x in pull(cts)[0].items()}


def moved(case: Case, moves: dict[str, np.ndarray], step: float = 1e-6) -> tuple[np.ndarray, ...]:
    """The oracle's tangents along directions, by central differences of the NumPy loops."""
    up, down = (
        case.expected({name: x + sign * step * moves.get(name, 0) for name, x in case.arrays.items()})
        for sign in (1, -1)
    )
    return tuple((x - y) / (2 * step) for x, y in zip(up, down, strict=True))


def probe(case: Case, name: str, gradient: Any, tolerance: float) -> None:
    """Compares a gradient with the oracle along random directions: <gradient, v> = <cotangent, J v>."""
    gradient = np.asarray(gradient)
    assert gradient.shape == case.arrays[name].shape
    assert np.all(np.isfinite(gradient))
    scale = max(np.max(np.abs(gradient), initial=0.0), 1e-3) * np.sqrt(max(gradient.size, 1))
    for seed in range(2):
        move = _weights(gradient.shape, f"{name}{seed}", np.iscomplexobj(gradient))
        move = np.where(np.isfinite(case.arrays[name]), move, 0)
        tangents = moved(case, {name: move})
        # JAX's cotangents are paired without conjugation.
        want = sum(np.sum(ct * x) for ct, x in zip(cotangents(tangents), tangents, strict=True))
        if not np.iscomplexobj(gradient):
            want = np.real(want)
        assert abs(np.sum(gradient * move) - want) <= 4 * tolerance * scale, name


def directions(case: Case) -> dict[str, np.ndarray]:
    """A direction for every array; nothing along an infinite entry."""
    found = {}
    for name, x in case.arrays.items():
        move = _weights(x.shape, name, np.iscomplexobj(x))
        found[name] = np.where(np.isfinite(x), move, 0)
    return found


def agree(got: Any, want: np.ndarray, tolerance: float, floor: float = 1e-3) -> None:
    got = np.asarray(got)
    assert got.shape == want.shape
    assert np.all(np.isfinite(got))
    if want.size:
        assert np.max(np.abs(got - want)) <= tolerance * max(np.max(np.abs(want)), floor)


@functools.cache
def _rounded(case: Case, dtype: str) -> Case:
    """The case with numbers of that dtype, so that package and oracle start from the same."""
    arrays = {name: np.asarray(x) for name, x in case.cast(dtype).items()}
    wide = {name: x.astype(np.result_type(x.dtype, np.float64)) for name, x in arrays.items()}
    return dataclasses.replace(case, arrays=wide)


_entries = functools.cache(gradients)


def check(
    case: Case,
    implementation: str | None,
    dtype: str = "float32",
    derivatives: bool = True,
    entrywise: bool = False,
) -> None:
    """Values, gradients and tangents against the oracle; with `entrywise`, all entries of gradients."""
    tolerance = TOLERANCES[dtype]
    with jax.enable_x64(dtype == "float64"):
        arrays = case.cast(dtype)
        exact = _rounded(case, dtype)
        want = exact.expected()

        def call(arrays: Any) -> Any:
            return case.call(arrays, implementation)

        @jax.jit
        def everything(arrays: Any, moves: Any) -> Any:
            results, pull = jax.vjp(call, arrays)
            cts = tuple(jnp.asarray(ct, x.dtype) for ct, x in zip(cotangents(want), results, strict=True))
            return results, pull(cts)[0], jax.jvp(call, (arrays,), (moves,))[1]

        if not derivatives:
            for got, expected in zip(jax.jit(call)(arrays), want, strict=True):
                agree(got, expected, tolerance)
            return
        moves = directions(exact)
        given = {name: x.astype(arrays[name].dtype) for name, x in moves.items()}
        results, found, tangents = everything(arrays, given)
    for got, expected in zip(results, want, strict=True):
        agree(got, expected, tolerance)
    for got, expected in zip(tangents, moved(exact, moves), strict=True):
        agree(got, expected, max(tolerance, 1e-7))
    for name, gradient in found.items():
        assert gradient.dtype == arrays[name].dtype
        if entrywise:
            agree(gradient, _entries(exact)[name], tolerance)
        else:
            probe(exact, name, gradient, max(tolerance, 1e-7))
