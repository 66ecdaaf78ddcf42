"""The suites by name, made from their configurations."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from probjax.bench.attention.config import TORCH_IMPLS, AttentionConfig
from probjax.bench.attention.suite import AttentionSuite
from probjax.bench.attention.torch_row import TorchPeer
from probjax.bench.dispatch.config import DispatchConfig
from probjax.bench.dispatch.suite import DispatchSuite
from probjax.bench.parallel import Workers

_SUITES: dict[str, tuple[Any, Any]] = {
    "attention": (AttentionConfig, AttentionSuite),
    "dispatch": (DispatchConfig, DispatchSuite),
}


def open_suite(
    name: str, fields: dict[str, Any], torch: TorchPeer | None = None
) -> tuple[Any, Any, TorchPeer | None]:
    """Return a suite, its configuration, and torch's process where a row needs one.

    Args:
      name: ``attention`` or ``dispatch``.
      fields: the configuration's fields.
      torch: torch's process where it runs already.
    """
    config_class, suite_class = _SUITES[name]
    config = config_class(**fields)
    needed = any(impl in TORCH_IMPLS for impl in config.impls)
    if needed and torch is None:
        torch = TorchPeer(config.torch_python, config.device)
    return suite_class(config, torch), config, torch


@contextlib.contextmanager
def open_peers(
    suite: str, configs: Sequence[Any]
) -> Iterator[tuple[TorchPeer | None, Workers | None, dict[str, Any] | None]]:
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
    elif any(impl in TORCH_IMPLS for config in configs for impl in config.impls):
        with contextlib.closing(TorchPeer(first.torch_python, first.device)) as torch:
            yield torch, None, torch.hello
    else:
        yield None, None, None
