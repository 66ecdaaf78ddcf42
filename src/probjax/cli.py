"""The command line: ``probjax bench``, ``probjax report``, ``probjax info``."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

_STARTED = time.monotonic()
_INTERRUPTED = 130

_BENCH_TEXT = """\
Measure attention forward and backward against JAX's and PyTorch's, interleaved in one run: time, memory, and
error against float64. Rows that cannot run here are listed with the reason. Ctrl-C keeps the cells finished
so far.
"""
_BENCH_EXAMPLES = """\
examples:
  probjax bench attention --preset quick
  probjax bench attention --seqs 512,2048 --variants causal --impls probjax_default,jax_xla
  probjax bench attention --preset reference --torch-python ~/torch/bin/python --output full.json
  probjax bench attention --seqs 512 --max-fit --memory-limit 2G --fit-seqs 4096,16384
"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    from probjax.bench.attention.config import AttentionConfig

    parser = argparse.ArgumentParser(
        prog="probjax", description="Fast exact attention for JAX: benchmarks, reports, machine information."
    )
    parser.add_argument("--version", action="version", version=f"probjax {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    bench = commands.add_parser("bench", help="measure one suite and write a result file")
    suites = bench.add_subparsers(dest="suite", metavar="SUITE", required=True)
    attention = suites.add_parser(
        "attention",
        help="attention against its peers",
        description=_BENCH_TEXT,
        epilog=_BENCH_EXAMPLES,
        formatter_class=_Formatter,
    )
    AttentionConfig.add_arguments(attention)
    attention.set_defaults(action=_bench_attention, parser=attention)

    report = commands.add_parser(
        "report",
        help="make an HTML page of result files",
        description="Make one self-contained HTML page of one or more result files, side by side.",
    )
    report.add_argument("files", nargs="+", type=Path, metavar="FILE", help="result files of probjax bench")
    report.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="HTML",
        help="the page (default: report.html)",
    )
    report.set_defaults(action=_report, parser=report)

    info = commands.add_parser(
        "info",
        help="show the machine, versions and implementations available",
        description="Show the machine, versions, implementations and peers, and why some are not available.",
    )
    info.add_argument(
        "--torch-python", metavar="PATH", help="an interpreter with torch (default: as in bench)"
    )
    info.set_defaults(action=_info, parser=info)
    return parser


def _version() -> str:
    from probjax.bench.machine import package_version

    return package_version() or "(no version)"


def _bench_attention(arguments: argparse.Namespace) -> int:
    from probjax.bench.attention.config import AttentionConfig, configs

    wanted = configs(AttentionConfig.given(arguments))
    _choose_platform(wanted[0].device)
    from probjax.bench.attention.run import run_attention

    run_attention(wanted, started=_STARTED)
    return 0


def _choose_platform(device: str) -> None:
    # JAX takes an accelerator by default when there is one; the header must be true of every row.
    import jax

    jax.config.update("jax_platforms", device)


def _report(arguments: argparse.Namespace) -> int:
    from probjax.bench.report import write_report

    write_report(arguments.files, arguments.output)
    print(f"written: {arguments.output}")
    return 0


def _info(arguments: argparse.Namespace) -> int:
    from probjax import _native
    from probjax.bench.machine import info_lines

    lines = [*info_lines(arguments.torch_python), ("native library", _native.describe())]
    width = max(len(topic) for topic, _ in lines)
    for topic, text in lines:
        print(f"{topic:<{width}}  {text}")
    return 0


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      arguments: words after the program's name; those of this process by default.

    Returns:
      The exit status: 0, 1 after an error, 2 after a wrong argument, 130 after an interruption.
    """
    parsed = build_parser().parse_args(arguments)
    # What ends a long run from outside (timeout, a batch system) shall keep its rows as Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return parsed.action(parsed)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left (`| head`); Python would complain once more when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, FileNotFoundError, PermissionError, IsADirectoryError) as error:
        if isinstance(error, ValueError):
            parsed.parser.error(str(error))
        print(f"probjax: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
