"""The command line: ``probjax bench``, ``probjax report``, ``probjax tune``, ``probjax info``."""

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


_DISPATCH_EXAMPLES = """\
examples:
  probjax bench dispatch --workers 8
  probjax bench dispatch --dtypes bfloat16 --seq-lens 64,512 --impls probjax_default,jax_cudnn --tag after
  probjax bench dispatch --find-max --batch 1 --impls probjax_default,jax_xla --max-seq 65536
"""


_SSM_EXAMPLES = """\
examples:
  probjax bench ssm --preset quick
  probjax bench ssm --cells mamba --tokens 1024 --variants none,remat
  probjax bench ssm --preset reference --output ssm_cpu.json
"""


_RECURRENCE_EXAMPLES = """\
examples:
  probjax bench recurrence --preset quick
  probjax bench recurrence --operations ssd --seqs 1024,4096 --impls probjax_default,xla_associative
  probjax bench recurrence --preset gpu --output recurrence_gpu.json
"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    from probjax.bench.attention.config import AttentionConfig
    from probjax.bench.dispatch.config import DispatchConfig
    from probjax.bench.recurrence.config import RecurrenceConfig
    from probjax.bench.ssm.config import SsmConfig

    parser = argparse.ArgumentParser(
        prog="probjax",
        description="Fast exact attention and recurrences for JAX: benchmarks, reports, machine information.",
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

    dispatch = suites.add_parser(
        "dispatch",
        help="many short calls of attention, as small models make them",
        description="Measure short attention calls from Python, inside a program and on the device, against "
        "JAX's own ways, tokamax and PyTorch. Meant for a GPU; it runs on a CPU too.",
        epilog=_DISPATCH_EXAMPLES,
        formatter_class=_Formatter,
    )
    DispatchConfig.add_arguments(dispatch)
    dispatch.set_defaults(action=_bench_dispatch, parser=dispatch)

    ssm = suites.add_parser(
        "ssm",
        help="stacks of recurrent cells: forward and train step",
        description="Measure stacks of Mamba, SSD and LRU cells, forward and one train step, against the "
        "same model with the associative scan over whole arrays of states.",
        epilog=_SSM_EXAMPLES,
        formatter_class=_Formatter,
    )
    SsmConfig.add_arguments(ssm)
    ssm.set_defaults(action=_bench_ssm, parser=ssm)

    recurrence = suites.add_parser(
        "recurrence",
        help="the bare recurrences against their peers",
        description="Measure linear_scan, selective_scan and ssd, forward and backward, against the usual "
        "forms in plain JAX, mamba_ssm's loop in PyTorch and jax-linear-attention: time, memory, and error "
        "against float64.",
        epilog=_RECURRENCE_EXAMPLES,
        formatter_class=_Formatter,
    )
    RecurrenceConfig.add_arguments(recurrence)
    recurrence.set_defaults(action=_bench_recurrence, parser=recurrence)

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


def _bench_attention(arguments: argparse.Namespace) -> int:
    from probjax.bench.attention.config import AttentionConfig, configs

    wanted = configs(AttentionConfig.given(arguments))
    _choose_platform(wanted[0].device)
    from probjax.bench.attention.run import run_attention

    run_attention(wanted, started=_STARTED)
    return 0


def _bench_dispatch(arguments: argparse.Namespace) -> int:
    from probjax.bench.dispatch.config import DispatchConfig

    config = DispatchConfig(**DispatchConfig.given(arguments))
    if config.device is not None:
        _choose_platform(config.device)
    from probjax.bench.dispatch.run import run_dispatch

    run_dispatch(config, started=_STARTED)
    return 0


def _bench_ssm(arguments: argparse.Namespace) -> int:
    from probjax.bench.ssm.config import SsmConfig, configs

    wanted = configs(SsmConfig.given(arguments))
    _choose_platform(wanted[0].device)
    from probjax.bench.ssm.run import run_ssm

    run_ssm(wanted, started=_STARTED)
    return 0


def _bench_recurrence(arguments: argparse.Namespace) -> int:
    from probjax.bench.recurrence.config import RecurrenceConfig, configs

    wanted = configs(RecurrenceConfig.given(arguments))
    _choose_platform(wanted[0].device)
    from probjax.bench.recurrence.run import run_recurrence

    run_recurrence(wanted, started=_STARTED)
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
