"""One run of the suite `ssm`: from configurations to a result file and a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from probjax.bench.run import run
from probjax.bench.ssm.config import CELL_COLUMNS, CELLS, PEERS, SsmConfig
from probjax.bench.table import print_reasons, print_rows, print_summary

_KEY = ("tag", "impl", *CELL_COLUMNS)
_GROUP = ("cell", "dtype", "batch", "model_dim")


def run_ssm(
    configs: SsmConfig | Sequence[SsmConfig],
    *,
    console: Console | None = None,
    started: float | None = None,
) -> Path:
    """Measure stacks of recurrent cells, write a result file and print a table; see `bench.run.run`."""
    configs = [configs] if isinstance(configs, SsmConfig) else list(configs)
    return run("ssm", configs, key=_KEY, print_tables=print_tables, console=console, started=started)


def print_tables(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print the rows of a run with their ratios to the peers."""
    ordered = sorted(rows, key=_order)
    line = ["op", "tokens"]
    line += [name for name in ("variant", "layers", "tag") if len({row.get(name) for row in rows}) > 1]
    print_rows(console, ordered, group=_GROUP, line=line, peers=PEERS)
    plain = [row for row in ordered if row.get("variant") is None]
    print_summary(
        console, plain, group=("cell", "dtype", "op"), column="tokens", impl="probjax_default", peers=PEERS
    )
    print_reasons(console, rows)
    console.print("vs X: X's median over this row's; above 1 this row is faster. temp MB: by XLA's account.")


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    return CELLS.index(row["cell"]), row["dtype"], row["op"], row["tokens"], row.get("variant") or ""
