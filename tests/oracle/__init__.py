"""Independent references for attention and the helpers that compare the package with them."""

from . import biases, masks
from .check import (
    AVAILABLE,
    IMPLEMENTATIONS,
    PARAMETERS,
    agree,
    can_run,
    cases,
    check,
    compare,
    expected,
    solve,
)
from .draw import normal, qkv
from .jnp_dense import dense_attention
from .numpy_attention import Call, Solution, forward, gradients
from .sizes import Sizes

__all__ = [
    "AVAILABLE",
    "IMPLEMENTATIONS",
    "PARAMETERS",
    "Call",
    "Sizes",
    "Solution",
    "agree",
    "biases",
    "can_run",
    "cases",
    "check",
    "compare",
    "dense_attention",
    "expected",
    "forward",
    "gradients",
    "masks",
    "normal",
    "qkv",
    "solve",
]
