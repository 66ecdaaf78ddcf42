"""Which implementation runs which call, as data, with the reason.

An implementation is one row per operation of `ROWS`. Only this module decides to use another one than the
first choice, and only when the caller named none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from probjax._call import Implementation
from probjax._op import Call
from probjax.recurrence import native, reference, scan


@dataclass(frozen=True)
class Row:
    """One implementation: what it is by operation, and why it cannot run (on a platform, or a call)."""

    name: str
    implementations: dict[str, Implementation]
    unavailable: Callable[[str], str | None]
    declines: Callable[[Call, Sequence[Any]], str | None]


_NATIVE: dict[str, Any] = {
    "linear_scan": native.LINEAR_SCAN_NATIVE,
    "selective_scan": native.SELECTIVE_SCAN_NATIVE,
}

ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        Row(
            "reference",
            {
                "linear_scan": reference.LINEAR_SCAN,
                "selective_scan": reference.SELECTIVE_SCAN,
                "ssd": reference.SSD,
            },
            lambda platform: None,
            lambda call, arrays: None,
        ),
        Row(
            "scan",
            {"linear_scan": scan.LINEAR_SCAN, "selective_scan": scan.SELECTIVE_SCAN, "ssd": scan.SSD},
            lambda platform: None,
            lambda call, arrays: None,
        ),
        Row(
            "native",
            {**_NATIVE},
            native.unavailable,
            lambda call, arrays: _NATIVE[call.operation.name].declines(call, arrays),
        ),
    )
}


def implementation(call: Call, platform: str | None, operands: Sequence[Any]) -> Implementation:
    """What runs a call on a platform."""
    name, _ = choose(call, platform, operands)
    return ROWS[name].implementations[call.operation.name]


def choose(call: Call, platform: str | None, operands: Sequence[Any]) -> tuple[str, str]:
    """The name of the implementation for a call on a platform, and the reason.

    Args:
      call: the call.
      platform: one of JAX's lowering platforms; None where it is not known.
      operands: its operands; shapes and dtypes suffice.
    """
    spec = call.spec
    if spec.plain:
        return "scan", "derivatives of higher order are taken of the plain-JAX implementation"
    if spec.implementation is not None:
        reason = why_not(spec.implementation, call, platform, operands)
        if reason is not None:
            raise NotImplementedError(
                f"implementation: {spec.implementation!r} cannot run {call.operation.name} here: {reason}"
            )
        return spec.implementation, "named by the caller"
    if spec.portable:
        return "scan", "an exported program must not need this package"
    reason = why_not("native", call, platform, operands)
    if reason is None:
        return "native", "the C++ kernels are the fastest on CPUs"
    return "scan", f"not native: {reason}"


def why_not(name: str, call: Call, platform: str | None, operands: Sequence[Any]) -> str | None:
    """Why an implementation cannot run a call on a platform; None if it can."""
    row = ROWS[name]
    if call.operation.name not in row.implementations:
        return f"there is no such implementation of {call.operation.name}"
    return unavailable(name, platform) or row.declines(call, operands)


def unavailable(name: str, platform: str | None) -> str | None:
    """Why an implementation cannot run on a platform; None if it can."""
    return ROWS[name].unavailable(platform or jax.default_backend())


def implementations(platform: str | None = None) -> dict[str, str | None]:
    """Every implementation of the recurrences: None where it is available, else the reason why it is not.

    `native` is there for `linear_scan` and `selective_scan` only.

    Args:
      platform: "cpu", "cuda", "rocm" or "tpu"; None takes the default backend.
    """
    return {name: unavailable(name, platform) for name in ROWS}
