"""Recurrences over time: linear, selective (Mamba-1), of outer products (Mamba-2), and the causal
convolution.

`linear_scan`, `selective_scan`, `ssd`, `causal_conv1d` take whole sequences, any part of one, with a state
that is carried on; each `*_step` takes a single token.
"""

from probjax.recurrence.api import (
    linear_scan,
    linear_scan_step,
    selective_scan,
    selective_scan_step,
    ssd,
    ssd_step,
)
from probjax.recurrence.conv import causal_conv1d, causal_conv1d_step
from probjax.recurrence.dispatch import implementations
from probjax.recurrence.primitive import RESIDUAL_NAMES

__all__ = [
    "RESIDUAL_NAMES",
    "causal_conv1d",
    "causal_conv1d_step",
    "implementations",
    "linear_scan",
    "linear_scan_step",
    "selective_scan",
    "selective_scan_step",
    "ssd",
    "ssd_step",
]
