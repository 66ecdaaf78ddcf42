"""The suites by name, made from their configurations."""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from probjax.bench.parallel import Workers


class _Home(NamedTuple):
    """Where a suite's classes are; loaded when the suite is wanted."""

    config: str
    suite: str
    peer: str | None = None
    """What starts PyTorch's process for the suite's rows of it."""


_ATTENTION_PEER = "probjax.bench.attention.torch_row:TorchPeer"
_SUITES = {
    "attention": _Home(
        "probjax.bench.attention.config:AttentionConfig",
        "probjax.bench.attention.suite:AttentionSuite",
        _ATTENTION_PEER,
    ),
    "dispatch": _Home(
        "probjax.bench.dispatch.config:DispatchConfig",
        "probjax.bench.dispatch.suite:DispatchSuite",
        _ATTENTION_PEER,
    ),
    "recurrence": _Home(
        "probjax.bench.recurrence.config:RecurrenceConfig",
        "probjax.bench.recurrence.suite:RecurrenceSuite",
        "probjax.bench.recurrence.torch_row:ReferencePeer",
    ),
    "ssm": _Home("probjax.bench.ssm.config:SsmConfig", "probjax.bench.ssm.suite:SsmSuite"),
    "transformer": _Home(
        "probjax.bench.transformer.config:TransformerConfig",
        "probjax.bench.transformer.suite:TransformerSuite",
        "probjax.bench.network.torch_row:TransformerPeer",
    ),
    "diffusion": _Home(
        "probjax.bench.transformer.config:DiffusionConfig",
        "probjax.bench.transformer.suite:TransformerSuite",
    ),
    "scan_remat": _Home(
        "probjax.bench.scan_remat.config:ScanRematConfig",
        "probjax.bench.scan_remat.suite:ScanRematSuite",
    ),
    "remat": _Home("probjax.bench.remat.config:RematConfig", "probjax.bench.remat.suite:RematSuite"),
    "unet": _Home("probjax.bench.unet.config:UnetConfig", "probjax.bench.unet.suite:UnetSuite"),
    "moe": _Home("probjax.bench.moe.config:MoeConfig", "probjax.bench.moe.suite:MoeSuite"),
}


def load(path: str) -> Any:
    """Return what ``MODULE:NAME`` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def config_class(name: str) -> Any:
    """Return the class of a suite's configurations."""
    return load(_SUITES[name].config)


def suite_class(name: str) -> Any:
    """Return the class of a suite; it is made from a configuration and PyTorch's process or None."""
    return load(_SUITES[name].suite)


def _open_torch(name: str, configs: Sequence[Any]) -> Any:
    """Start PyTorch's process where a row of it is wanted; its labels begin with ``torch``."""
    peer, first = _SUITES[name].peer, configs[0]
    wanted = any(impl.startswith("torch") for config in configs for impl in config.impls)
    return load(peer)(first.torch_python, first.device) if peer and wanted else None


def open_suite(name: str, fields: dict[str, Any], torch: Any = None) -> tuple[Any, Any, Any]:
    """Return a suite, its configuration, and torch's process where a row needs one.

    Args:
      name: the suite's.
      fields: the configuration's fields.
      torch: torch's process where it runs already.
    """
    config = config_class(name)(**fields)
    torch = torch or _open_torch(name, [config])
    return suite_class(name)(config, torch), config, torch


@contextlib.contextmanager
def open_peers(suite: str, configs: Sequence[Any]) -> Iterator[tuple[Any, Workers | None, Any]]:
    """Start the processes that a run needs: torch's where a row is torch's, or those that measure.

    Args:
      suite: its name.
      configs: its configurations; the number of processes and the interpreter are those of the first.

    Yields:
      Torch's process or None, the measuring processes or None, and what torch says of itself.
    """
    first = configs[0]
    if first.workers > 1:
        with Workers(first.workers, suite, first) as workers:
            yield None, workers, workers.start()
    elif (torch := _open_torch(suite, configs)) is not None:
        with contextlib.closing(torch):
            yield torch, None, torch.hello
    else:
        yield None, None, None
