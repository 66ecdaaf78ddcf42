"""One run of the attention suite: from configurations to a result file and a table."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from probjax.bench.attention.cells import CELL_COLUMNS, VARIANTS
from probjax.bench.attention.config import PEERS, AttentionConfig
from probjax.bench.attention.suite import AttentionSuite, memory_work
from probjax.bench.attention.torch_row import TorchPeer
from probjax.bench.machine import cores_used, device_header
from probjax.bench.measure import Deadline
from probjax.bench.parallel import Workers, run_suite
from probjax.bench.results import ResultFile
from probjax.bench.run import default_console, report_dropped, report_load, require_backend
from probjax.bench.runner import Bar, CostModel, interruptible
from probjax.bench.suites import open_peers
from probjax.bench.table import print_list, print_reasons, print_rows, print_summary

_KEY = ("tag", "impl", *CELL_COLUMNS, "memory_limit_mb")
_MEMORY_TABLES = {
    "peaks": ("impl", "variant", "mode", "dtype", "head_dim", "seq", "peak_mb", "baseline_mb", "reason"),
    "max_fit": ("impl", "variant", "mode", "dtype", "memory_limit_mb", "max_seq", "tried", "reason"),
}
_GROUP = ("variant", "mode", "dtype", "head_dim", "batch", "heads")


def run_attention(
    configs: AttentionConfig | Sequence[AttentionConfig],
    *,
    console: Console | None = None,
    started: float | None = None,
) -> Path:
    """Measure attention, write a result file and print a table.

    Args:
      configs: what to measure; several are run one after the other into one file, under the output, the
        budget and the interpreter of the first.
      console: where the progress bar and the table go; standard output by default.
      started: when the budget began, on the clock of `time.monotonic`; now by default.

    Returns:
      The path of the result file.

    Raises:
      ValueError: when a setting cannot be met (no such interpreter, a file of another machine to append to).
      KeyboardInterrupt: after Ctrl-C; the file then holds the cells finished so far.
    """
    configs = [configs] if isinstance(configs, AttentionConfig) else list(configs)
    console = console or default_console()
    first = configs[0]
    deadline = Deadline(first.budget, time.monotonic() if started is None else started)
    require_backend(first.device)
    path = Path(first.output or f"attention_{first.device}.json")
    with open_peers("attention", configs) as (torch, workers, hello):
        results = ResultFile(path, device_header(hello), append=first.append, key=_KEY)
        dropped = _measure(configs, results, torch, workers, deadline, console)
    report_dropped(console, dropped)
    report_load(console, results.load_average)
    return path


def _measure(
    configs: Sequence[AttentionConfig],
    results: ResultFile,
    torch: TorchPeer | None,
    workers: Workers | None,
    deadline: Deadline,
    console: Console,
) -> list[dict[str, Any]]:
    """Run all configurations; print the tables also when the user interrupts."""
    dropped: list[dict[str, Any]] = []
    costs = CostModel()
    works = [cell.work for config in configs for cell in config.cells()]
    try:
        with interruptible(results), Bar(console, works) as bar:
            for config in configs:
                results.begin(config.header())
                shared = {"tag": config.tag, "run": results.run, "threads": cores_used()}
                dropped += run_suite(
                    AttentionSuite(config, torch),
                    workers,
                    settings=config,
                    results=results,
                    deadline=deadline,
                    bar=bar,
                    costs=costs,
                    shared=shared,
                    dropped_before=dropped,
                    note=lambda: {"idle": torch.idle()} if torch else {},
                )
                dropped += _memory(config, results, deadline, bar, shared)
            if dropped:
                results.annotate(dropped=dropped)
    finally:
        _print(console, results, configs[0].device)
        console.print(f"written: {results.path}", markup=False, soft_wrap=True)
    return dropped


def _memory(
    config: AttentionConfig, results: ResultFile, deadline: Deadline, bar: Bar, shared: dict[str, Any]
) -> list[dict[str, Any]]:
    """Measure peak memory and lengths that fit, as far as asked for."""
    dropped = []
    for section, columns, measure in memory_work(config, config.torch_python):
        if results.measured({**columns, **shared}, section):
            continue
        if deadline.left() <= 0:
            dropped.append({"section": section, **columns, "reason": "the time budget was spent"})
            continue
        bar.show(
            " ".join(str(columns[name]) for name in ("impl", "variant", "mode", "dtype")) + f": {section}"
        )
        results.add([{**measure(), **shared}], section)
    return dropped


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    return VARIANTS.index(row["variant"]), row["dtype"], row["head_dim"], row["mode"], row["seq"]


def _print(console: Console, results: ResultFile, device: str) -> None:
    """Print the tables of this run, or of the whole file when it had everything already."""
    rows = [row for row in results.rows if row.get("run") == results.run] or results.rows
    if rows:
        line = ("seq",) if len({row.get("tag") for row in rows}) == 1 else ("seq", "tag")
        ordered = sorted(rows, key=_order)
        peers = PEERS[device]
        print_rows(console, ordered, group=_GROUP, line=line, peers=peers)
        print_summary(console, ordered, group=_GROUP[:4], column="seq", impl="probjax_default", peers=peers)
        print_reasons(console, rows)
        console.print("vs X: X's median over this row's; above 1 this row is faster. Error: against float64.")
    for section, columns in _MEMORY_TABLES.items():
        found = [row for row in results.section(section) if row.get("run") == results.run]
        if found:
            print_list(console, found, title=section, columns=columns)
            print_reasons(console, [row for row in found if row["status"] == "unavailable"])
