"""Benchmark configurations: one frozen dataclass is the command line, the JSON header and the Python API.

A suite writes its configuration as a dataclass whose fields are made with `option`. The field's `Kind` reads
and prints its values, so that ``--seqs 512,1024``, ``{"seqs": "512,1024"}`` in a result file and ``seqs=(512,
1024)`` in Python all pass through the same check and mean the same.
"""

import argparse
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self


class Kind(NamedTuple):
    """How one sort of option is read from text, and how it is written to a JSON header."""

    parse: Callable[[Any], Any]
    show: Callable[[Any], Any]
    metavar: str | None
    wanted: str


def _split(text: str) -> list[str]:
    return [part.strip() for part in str(text).split(",") if part.strip()]


def _comma(values: Any) -> str:
    return values if isinstance(values, str) else ",".join(str(value) for value in values)


def names(*choices: str) -> Kind:
    """Return the kind of a comma list of names out of `choices`; duplicates are dropped."""

    def parse(text: str) -> tuple[str, ...]:
        got = _split(text)
        unknown = [name for name in got if name not in choices]
        if unknown or not got:
            raise ValueError(f"unknown {', '.join(unknown)}" if unknown else "an empty list")
        return tuple(dict.fromkeys(got))

    return Kind(parse, _comma, "A,B,...", f"a comma list out of {', '.join(choices)}")


def _positive(text: Any, convert: Callable[[Any], Any]) -> Any:
    value = convert(text)
    if not value > 0 or not math.isfinite(value):
        raise ValueError(f"{value} is not above zero")
    return value


def _parse_ints(text: str) -> tuple[int, ...]:
    got = tuple(dict.fromkeys(_positive(part, int) for part in _split(text)))
    if not got:
        raise ValueError("an empty list")
    return got


def _parse_size(text: Any) -> str:
    parse_bytes(text)
    return str(text)


def _parse_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def parse_bytes(text: str | int) -> int:
    """Return a number of bytes from text such as ``"4G"``, ``"512M"`` or ``"1.5GiB"`` (powers of 1024).

    Args:
      text: a number with an optional unit K, M, G or T; without a unit it is bytes.

    Returns:
      The size in bytes.

    Raises:
      ValueError: when the text is no positive size.
    """
    body = str(text).strip().upper().removesuffix("B").removesuffix("I")
    power = "KMGT".find(body[-1:]) + 1 if body[-1:] else 0
    number = body[:-1] if power else body
    return int(_positive(number, float) * 1024**power)


def _integer(value: Any) -> int:
    # int(2.5) is 2: a fraction must not be cut off silently.
    if isinstance(value, float) and value != int(value):
        raise ValueError(f"{value} is not whole")
    return int(value)


INTS = Kind(_parse_ints, _comma, "N,N,...", "positive whole numbers with commas between, such as 512,1024")
INTEGER = Kind(lambda text: _positive(text, _integer), lambda value: value, "N", "a positive whole number")
SECONDS = Kind(
    lambda text: _positive(text, float), lambda value: value, "SECONDS", "a number of seconds above zero"
)
NUMBER = Kind(lambda text: _positive(text, float), lambda value: value, "X", "a number above zero")
SIZE = Kind(_parse_size, str, "SIZE", "a size such as 4G or 512M")
TEXT = Kind(str, str, "TEXT", "text")
FLAG = Kind(_parse_flag, lambda value: value, None, "true or false")
# Only the last part of a path goes into a result file: the rest says nothing to another reader of it.
PATH = Kind(os.path.expanduser, lambda path: Path(path).name, "PATH", "a path")


def choice(*choices: str) -> Kind:
    """Return the kind of one name out of `choices`."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"unknown {text}")
        return text

    return Kind(parse, str, "|".join(choices), f"one of {', '.join(choices)}")


def option(default: Any, kind: Kind, help: str) -> Any:
    """Return a dataclass field that is also a command line flag and a header key.

    Args:
      default: the value when nothing is given.
      kind: how it is read and written.
      help: one line for ``--help``.

    Returns:
      A dataclass field.
    """
    return dataclasses.field(default=default, metadata={"kind": kind, "help": help})


@dataclasses.dataclass(frozen=True)
class Config:
    """Base of the suites' configurations: checks every field on construction."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            kind: Kind = field.metadata["kind"]
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            # Through text and back only for lists: "512,1024" and (512, 1024) are then one spelling.
            given = kind.show(value) if isinstance(value, tuple | list) else value
            try:
                object.__setattr__(self, field.name, kind.parse(given))
            except (ValueError, TypeError, OverflowError) as error:
                raise ValueError(f"{field.name}: got {value!r} ({error}), wanted {kind.wanted}") from None

    def header(self) -> dict[str, Any]:
        """Return the configuration as JSON values under the names of its fields."""
        shown = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            shown[field.name] = None if value is None else field.metadata["kind"].show(value)
        return shown

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Self:
        """Return the configuration that a header describes; keys of other programs are ignored."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in header.items() if name in known})

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add one flag per field; a flag that is not given leaves no attribute behind."""
        for field in dataclasses.fields(cls):
            kind: Kind = field.metadata["kind"]
            flag = "--" + field.name.replace("_", "-")
            default = None if field.default is None else str(kind.show(field.default)).replace(",", ", ")
            if kind is FLAG:
                parser.add_argument(
                    flag, action="store_true", default=argparse.SUPPRESS, help=field.metadata["help"]
                )
                continue
            shown = "" if default is None else f" (default: {default})"
            parser.add_argument(
                flag,
                type=_argument(kind),
                default=argparse.SUPPRESS,
                metavar=kind.metavar,
                help=(field.metadata["help"] + shown).replace("%", "%%"),
            )

    @classmethod
    def given(cls, arguments: argparse.Namespace) -> dict[str, Any]:
        """Return the fields that the command line named."""
        known = {field.name for field in dataclasses.fields(cls)}
        return {name: value for name, value in vars(arguments).items() if name in known}


def _argument(kind: Kind) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return kind.parse(text)
        except (ValueError, OverflowError) as error:
            raise argparse.ArgumentTypeError(f"got {text!r} ({error}), wanted {kind.wanted}") from None

    return parse


class Preset(NamedTuple):
    """A name for several configurations that are run one after the other."""

    parts: Sequence[Mapping[str, Any]]
    common: Mapping[str, Any] = {}


def expand[C](make: Callable[..., C], presets: Mapping[str, Preset], given: Mapping[str, Any]) -> list[C]:
    """Return the configurations that a set of fields stands for: one, or those of its preset.

    Args:
      make: a suite's configuration.
      presets: the values of its field `preset`.
      given: fields by name; what is given wins over the preset.

    Returns:
      Configurations, without duplicates, to be run one after the other into one file.
    """
    if given.get("preset") is None:
        return [make(**given)]
    chosen = presets[given["preset"]]
    return list(dict.fromkeys(make(**{**chosen.common, **part, **given}) for part in chosen.parts))
