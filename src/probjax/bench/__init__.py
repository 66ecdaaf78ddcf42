"""The benchmark program: suites, peers, measuring, results, tables and the report."""

from typing import Any

__all__ = [
    "AttentionConfig",
    "DiffusionConfig",
    "MoeConfig",
    "RecurrenceConfig",
    "RematConfig",
    "ScanRematConfig",
    "SsmConfig",
    "TransformerConfig",
    "UnetConfig",
    "read_results",
    "run_attention",
    "run_network",
    "run_recurrence",
    "run_ssm",
]

_HOMES = {
    "AttentionConfig": "probjax.bench.attention.config",
    "DiffusionConfig": "probjax.bench.transformer.config",
    "MoeConfig": "probjax.bench.moe.config",
    "RecurrenceConfig": "probjax.bench.recurrence.config",
    "RematConfig": "probjax.bench.remat.config",
    "ScanRematConfig": "probjax.bench.scan_remat.config",
    "SsmConfig": "probjax.bench.ssm.config",
    "TransformerConfig": "probjax.bench.transformer.config",
    "UnetConfig": "probjax.bench.unet.config",
    "read_results": "probjax.bench.results",
    "run_attention": "probjax.bench.attention.run",
    "run_network": "probjax.bench.network.run",
    "run_recurrence": "probjax.bench.recurrence.run",
    "run_ssm": "probjax.bench.ssm.run",
}


def __getattr__(name: str) -> Any:
    # Loaded on demand: the child processes and `probjax --help` need no JAX.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
