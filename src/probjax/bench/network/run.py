"""One run of a suite of whole networks: from configurations to a result file and tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from probjax.bench.network.config import NetworkConfig
from probjax.bench.network.tables import print_tables
from probjax.bench.run import run


def run_network(
    configs: NetworkConfig | Sequence[NetworkConfig],
    *,
    console: Console | None = None,
    started: float | None = None,
) -> Path:
    """Measure networks, write a result file and print tables; see `bench.run.run`.

    Args:
      configs: of one suite: `TransformerConfig`, `DiffusionConfig`, `UnetConfig`, `MoeConfig`, `RematConfig`
        or `ScanRematConfig`.
      console: where the progress bar and the tables go; standard output by default.
      started: when the budget began, on the clock of `time.monotonic`; now by default.

    Returns:
      The path of the result file.
    """
    configs = [configs] if isinstance(configs, NetworkConfig) else list(configs)
    first = configs[0]
    return run(
        first.SUITE,
        configs,
        key=("tag", "impl", *first.CELL_COLUMNS),
        print_tables=lambda console, rows: print_tables(console, rows, first.TABLE),
        console=console,
        started=started,
    )
