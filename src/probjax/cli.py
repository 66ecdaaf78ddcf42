"""The command line: ``probjax bench``, ``probjax report``, ``probjax tune``, ``probjax info``."""

import argparse
import os
import signal
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

_STARTED = time.monotonic()
_INTERRUPTED = 130


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    from probjax.bench.help import SUITES
    from probjax.bench.suites import config_class

    parser = argparse.ArgumentParser(
        prog="probjax",
        description="Fast exact attention and recurrences for JAX: benchmarks, reports, machine information.",
    )
    parser.add_argument("--version", action="version", version=f"probjax {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    bench = commands.add_parser("bench", help="measure one suite and write a result file")
    suites = bench.add_subparsers(dest="suite", metavar="SUITE", required=True)
    for name, about in SUITES.items():
        suite = suites.add_parser(
            name,
            help=about.title,
            description=textwrap.fill(about.text, 100),
            epilog="\n  probjax bench ".join(("examples:", *about.examples)),
            formatter_class=_Formatter,
        )
        config_class(name).add_arguments(suite)
        suite.set_defaults(action=_bench, parser=suite)

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

    tune = commands.add_parser(
        "tune",
        help="measure attention on this GPU, so that the fastest kernels are used",
        description="Measure the kernels of attention on this GPU and keep the fastest in the cache "
        "directory "
        "($PROBJAX_CACHE, else probjax in the user's cache directory). Compare docs/gpu-tuning.md.",
        formatter_class=_Formatter,
    )
    tune.add_argument(
        "--dtypes",
        default="bfloat16,float32",
        metavar="A,B",
        help="bfloat16, float32, float32_high, float32_highest (by precision; default: bfloat16,float32)",
    )
    tune.add_argument("--head-sizes", default="64,128", metavar="N,M", help="default: 64,128")
    tune.add_argument(
        "--lengths",
        default="16,32,64,128,256,512,1024,4096",
        metavar="N,M",
        help="default: powers of two from 16 to 512, 1024 and 4096",
    )
    tune.add_argument(
        "--pairs",
        type=int,
        default=512,
        metavar="N",
        help="batch entries times heads (default: 512; fewer from 1024 keys on)",
    )
    tune.add_argument(
        "--kinds", default="forward,backward,tangent", metavar="A,B", help="default: forward,backward,tangent"
    )
    tune.add_argument(
        "--seconds", type=float, default=float("inf"), metavar="S", help="no key is begun later"
    )
    tune.add_argument("--append", action="store_true", help="keep what the file has, measure the rest")
    tune.add_argument(
        "--output", type=Path, metavar="FILE", help="another file than that in the cache directory"
    )
    tune.set_defaults(action=_tune, parser=tune)

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


def _bench(arguments: argparse.Namespace) -> int:
    from probjax.bench.help import SUITES
    from probjax.bench.suites import config_class, load

    suite = SUITES[arguments.suite]
    wanted = load(suite.configs)(config_class(arguments.suite).given(arguments))
    if wanted[0].device is not None:
        _choose_platform(wanted[0].device)
    load(suite.run)(wanted if len(wanted) > 1 else wanted[0], started=_STARTED)
    return 0


def _choose_platform(device: str) -> None:
    # JAX takes an accelerator by default when there is one; the header must be true of every row.
    import jax

    # JAX_PLATFORMS, where it is set, may name a GPU by its kind, such as cuda.
    jax.config.update("jax_platforms", "cuda,cpu" if device == "gpu" else device)


def _report(arguments: argparse.Namespace) -> int:
    from probjax.bench.report import write_report

    write_report(arguments.files, arguments.output)
    print(f"written: {arguments.output}")
    return 0


def _tune(arguments: argparse.Namespace) -> int:
    import jax

    if jax.default_backend() != "gpu":
        print("probjax tune: JAX sees no GPU here; there is nothing to tune on a CPU", file=sys.stderr)
        return 2
    from probjax import tune
    from probjax.attention import dispatch, tables

    reason = dispatch.unavailable("triton", "gpu")
    if reason is not None:
        print(f"probjax tune: the kernels that it measures do not run here: {reason}", file=sys.stderr)
        return 2

    def words(text: str) -> list[str]:
        return [word.strip() for word in text.split(",") if word.strip()]

    def sizes(name: str, text: str) -> list[int]:
        try:
            return [int(word) for word in words(text)]
        except ValueError:
            raise ValueError(f"{name}: got {text!r}, want whole numbers such as 64,128") from None

    path = arguments.output or tune.default_path()
    known = tables.load(path) if arguments.append and path.is_file() else None
    lengths, head_sizes = sizes("lengths", arguments.lengths), sizes("head_sizes", arguments.head_sizes)
    wanted = [
        key
        for length in sorted(lengths)
        for key in tune.keys(
            words(arguments.dtypes),
            head_sizes,
            [length],
            max(1, min(arguments.pairs, arguments.pairs * 512 // length)),
            words(arguments.kinds),
        )
    ]
    table = tune.tune(
        wanted, seconds=arguments.seconds, known=known, keep=lambda table: tables.save(table, path)
    )
    if not table.entries:
        print("probjax tune: nothing could be measured; nothing was written", file=sys.stderr)
        return 1
    tables.save(table, path)
    print(f"written: {path}")
    return 0


def _info(arguments: argparse.Namespace) -> int:
    from probjax import _native
    from probjax.bench.machine import info_lines

    lines = [*info_lines(arguments.torch_python), ("native library", _native.describe())]
    lines.append(("GPU kernels", _tables()))
    width = max(len(topic) for topic, _ in lines)
    for topic, text in lines:
        print(f"{topic:<{width}}  {text}")
    return 0


def _tables() -> str:
    """Which measured table the GPU kernels are chosen by."""
    from probjax.attention import _triton, tables

    device = _triton.device_kind()
    if device is None:
        return "no NVIDIA GPU"
    found = tables.source(device)
    if found is None:
        return f"no measurements for {device}: general rules (run probjax tune)"
    return f"measured on {device}: {found}"


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
