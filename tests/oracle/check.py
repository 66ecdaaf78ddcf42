"""Run a call through an implementation of the package and compare it with the float64 oracle."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import probjax

from .biases import BiasSpec, ScoreFunction, SoftCap
from .draw import normal
from .numpy_attention import Call, Solution, forward, gradients
from .sizes import Sizes
from .specs import Spec

#: Every implementation that has to pass these tests on a CPU. A new one joins by adding its name.
IMPLEMENTATIONS = tuple(
    os.environ.get("PROBJAX_TEST_IMPLEMENTATIONS", "reference,dense,tiled,native").split(",")
)

_PLATFORM = os.environ.get("PROBJAX_TEST_PLATFORM", "cpu")
_MISSING = {name: probjax.attention.implementations(_PLATFORM)[name] for name in IMPLEMENTATIONS}

#: Those that this machine has.
AVAILABLE = tuple(name for name in IMPLEMENTATIONS if _MISSING[name] is None)

#: The same as parameters of a test: one that is missing is skipped with the reason.
PARAMETERS = [
    pytest.param(name, marks=[pytest.mark.skip(reason=f"{name}: {why}")] if why else [])
    for name, why in _MISSING.items()
]

#: Largest error in the max norm relative to the largest entry, by dtype.
TOLERANCES = {"float64": 5e-14, "float32": 2e-6, "bfloat16": 1.2e-2, "float16": 2e-3}

_OPTIONS = ("is_causal", "local_window_size", "causal_alignment", "logits_soft_cap")
_INTEGERS = ("query_seq_lengths", "key_value_seq_lengths", "segment_ids")


def rounded(array: np.ndarray, dtype: Any) -> np.ndarray:
    """`array` rounded to `dtype`, as float64."""
    return array.astype(_numpy_type(dtype)).astype(np.float64)


def _numpy_type(dtype: Any) -> Any:
    return {"bfloat16": ml_dtypes.bfloat16}.get(jnp.dtype(dtype).name, jnp.dtype(dtype))


def cast(call: Call, dtype: Any, bias_dtype: Any = None) -> Call:
    """The call with its arrays rounded to `dtype`, so that package and oracle start from the same numbers."""
    bias_dtype = dtype if bias_dtype is None else bias_dtype
    bias = call.bias
    if isinstance(bias, np.ndarray):
        bias = rounded(bias, bias_dtype)
    elif bias is not None:
        bias = bias.cast(_numpy_type(bias_dtype))
    real = jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32
    return dataclasses.replace(
        call,
        query=rounded(call.query, dtype),
        key=rounded(call.key, dtype),
        value=rounded(call.value, dtype),
        bias=bias,
        sinks=None if call.sinks is None else rounded(np.asarray(call.sinks), real),
        scale=None if call.scale is None else float(rounded(np.asarray(call.scale), real)),
    )


def cotangents(call: Call, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Fixed random cotangents of output and log-sum-exp."""
    *lead, T, N, _ = call.query.shape
    out = normal(*lead, T, N, call.value.shape[-1], seed="ct_out")
    real = jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32
    return rounded(out, dtype), rounded(normal(*lead, T, N, seed="ct_lse"), real)


@functools.cache
def _compiled(
    implementation: str, static: tuple[Any, ...], build: _Build, differentiate: bool, optimized: bool
) -> Callable[..., Any]:
    options = dict(static)

    def run(real, other, ct):
        def attend(real):
            return probjax.dot_product_attention(
                **build.arguments(real, other), **options, implementation=implementation, return_residual=True
            )

        if not differentiate:
            return attend(real), {}
        (out, lse), pull = jax.vjp(attend, real)
        return (out, lse), pull((ct[0].astype(out.dtype), ct[1].astype(lse.dtype)))[0]

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 3} if optimized else None)


class _Build:
    """Puts the arrays of a call back into arguments; equal structure means one compiled function."""

    def __init__(self, call: Call):
        self.bias, self.mask = call.bias, call.mask
        self.key = (_signature(call.bias), _signature(call.mask))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Build) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def arguments(self, real: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        arguments = {**real, **other}
        for name, spec in (("bias", self.bias), ("mask", self.mask)):
            if isinstance(spec, Spec):
                arguments[name] = spec.build(iter(arguments[name]))
        return arguments


def holds(spec: Any, kind: type) -> bool:
    """Whether a description of a mask or bias holds one of this kind."""
    return isinstance(spec, kind) or any(holds(child, kind) for child in getattr(spec, "children", ()))


def can_run(implementation: str, call: Call) -> bool:
    """The C++ kernels cannot call functions of the score."""
    return implementation != "native" or not holds(call.bias, ScoreFunction)


def cases(table: Iterable[str], *with_functions: str) -> list[Any]:
    """Names of a table of cases as parameters; `with_functions` are those with a function of the score."""
    mark = pytest.mark.score_function
    return [pytest.param(name, marks=[mark] if name in with_functions else []) for name in table]


def _signature(value: Any) -> Any:
    return value.signature() if isinstance(value, Spec) else type(value).__name__


def _arrays(call: Call, dtype: Any, bias_dtype: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    real: dict[str, Any] = {
        name: jnp.asarray(getattr(call, name), dtype) for name in ("query", "key", "value")
    }
    wide = jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32
    for name in ("scale", "sinks"):
        if getattr(call, name) is not None:
            real[name] = jnp.asarray(getattr(call, name), wide)
    bias_dtype = dtype if bias_dtype is None else bias_dtype
    if isinstance(call.bias, np.ndarray):
        real["bias"] = jnp.asarray(call.bias, bias_dtype)
    elif isinstance(call.bias, BiasSpec):
        real["bias"] = [jnp.asarray(array, bias_dtype) for array in call.bias.arrays()]
    other: dict[str, Any] = {}
    if call.mask is not None:
        other["mask"] = (
            jnp.asarray(call.mask)
            if isinstance(call.mask, np.ndarray)
            else [jnp.asarray(x) for x in call.mask.arrays()]
        )
    for name in _INTEGERS:
        value = getattr(call, name)
        if value is not None:
            other[name] = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), value)
    return real, other


def solve(
    implementation: str,
    call: Call,
    dtype: Any = "float32",
    *,
    bias_dtype: Any = None,
    differentiate: bool = True,
    dropout: tuple[float, jax.Array] | None = None,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """out, lse and the gradients under the fixed cotangents, as float64 NumPy arrays, from the package.

    The dtypes and shapes of all results are asserted here.
    """
    with jax.enable_x64(jnp.dtype(dtype) == jnp.float64):
        real, other = _arrays(call, dtype, bias_dtype)
        static = {
            name: getattr(call, name)
            for name in _OPTIONS
            if getattr(call, name) != Call.__dataclass_fields__[name].default
        }
        static |= options or {}
        if dropout is not None:
            static["dropout_rate"], other["dropout_key"] = dropout
        # As users compile them (see tests/conftest.py): large calls, which measure rounding errors, and those
        # with a soft cap, whose tanh is less accurate without optimisations.
        capped = call.logits_soft_cap is not None or holds(call.bias, SoftCap)
        optimized = capped or call.sizes.T * call.sizes.S > 60_000
        run = _compiled(implementation, tuple(sorted(static.items())), _Build(call), differentiate, optimized)
        (out, lse), grads = run(real, other, cotangents(call, dtype))
    *lead, T, N, _ = call.query.shape
    assert out.shape == (*lead, T, N, call.value.shape[-1])
    assert out.dtype == jnp.dtype(dtype)
    assert lse.shape == (*lead, T, N)
    assert lse.dtype == (jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)
    for (path, grad), (_, primal) in zip(
        jax.tree.leaves_with_path(grads),
        jax.tree.leaves_with_path(real) if differentiate else [],
        strict=True,
    ):
        assert grad.shape == primal.shape, f"gradient of {path}: {grad.shape}, argument {primal.shape}"
        assert grad.dtype == primal.dtype, f"gradient of {path}: {grad.dtype}, argument {primal.dtype}"
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), {"out": out, "lse": lse, **grads})


def expected(
    call: Call,
    dtype: Any = "float32",
    *,
    bias_dtype: Any = None,
    differentiate: bool = True,
    keep=None,
    rate=0.0,
):
    """The same results from the oracle."""
    call = cast(call, dtype, bias_dtype)
    value = forward(call, keep, rate)
    results: dict[str, Any] = {"out": value.out, "lse": value.lse, "unseen": unseen(value, call.sizes)}
    if differentiate:
        results |= gradients(call, *cotangents(call, dtype), keep, rate)
    return results


def unseen(value: Solution, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Which queries (*B, T, N) see no key, and which keys (*B, S, K) no query sees."""
    rows = np.moveaxis(~value.shown.any(-1), 1, 2)
    columns = ~value.shown.any(-2).reshape(sizes.B, sizes.K, sizes.group, sizes.S).any(2)
    columns = np.moveaxis(columns, 1, 2)
    return rows.reshape(*sizes.lead, sizes.T, sizes.N), columns.reshape(*sizes.lead, sizes.S, sizes.K)


def agree(got: Any, want: Any, tolerance: float, floor: float = 0.0, name: str = "value") -> None:
    """Assert max|got - want| <= tolerance * max(max|want|, floor), and non-finite values where they belong.

    Where `want` is zero everywhere (and the floor is 0) only zero agrees.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, want {want.shape}"
    finite = np.isfinite(want)
    assert np.isfinite(got[finite]).all(), f"{name}: {np.sum(~np.isfinite(got[finite]))} values not finite"
    infinite = np.isinf(want)
    assert (got[infinite] == want[infinite]).all(), f"{name}: infinities differ"
    assert not np.isfinite(got[np.isnan(want)]).any(), f"{name}: finite where NaN belongs"
    if not finite.any():
        return
    size = max(np.abs(want[finite]).max(), floor)
    error = np.abs(got[finite] - want[finite]).max()
    assert error <= tolerance * size, (
        f"{name}: error {error:.3g} of {size:.3g} is {error / (size or 1):.3g} relative, over {tolerance:.3g}"
    )


def compare(got: dict[str, Any], want: dict[str, Any], tolerance: float, call: Call) -> None:
    """`agree` on every result of `solve`.

    Sums that cancel (a bias shared by all keys has gradient 0, a traced scale is one number) are measured
    against the size that their terms have.
    """
    agree(got["out"], want["out"], tolerance, name="out")
    agree(got["lse"], want["lse"], tolerance, floor=1.0, name="lse")
    rows, columns = want["unseen"]
    assert (got["out"][rows] == 0).all(), "rows without a visible key are not zero"
    if "query" not in got:
        return
    assert (got["query"][rows] == 0).all(), "rows without a visible key have a gradient"
    assert (got["key"][columns] == 0).all(), "keys that no query sees have a gradient"
    assert (got["value"][columns] == 0).all(), "values that no query sees have a gradient"
    for name in ("query", "key", "value"):
        agree(got[name], want[name], tolerance, floor=1e-2, name=f"gradient of {name}")
    if "sinks" in got:
        agree(got["sinks"], want["sinks"], tolerance, floor=1e-1, name="gradient of sinks")
    if "scale" in got:
        agree(got["scale"], want["scale"], tolerance, floor=want["scale_norm"], name="gradient of scale")
    if "bias" in got:
        pairs = zip(*(x if isinstance(x, list) else [x] for x in (got["bias"], want["bias"])), strict=True)
        for index, (one, other) in enumerate(pairs):
            floor = want["score_norm"] / np.sqrt(max(other.size, 1))
            agree(one, other, tolerance, floor=floor, name=f"gradient of bias array {index}")


def check(
    implementation: str, call: Call, dtype: Any = "float32", *, tolerance: float | None = None, **kwargs: Any
) -> dict[str, Any]:
    """`solve`, `expected` and `compare`; returns what the package gave."""
    got = solve(implementation, call, dtype, **kwargs)
    names = ("bias_dtype", "differentiate")
    want = expected(call, dtype, **{name: kwargs[name] for name in names if name in kwargs})
    compare(got, want, TOLERANCES[jnp.dtype(dtype).name] if tolerance is None else tolerance, call)
    return got
