"""Checked access to the fields of a config.json, and the bounds of symbols of imported models."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.frontend.hf.weights import read_json
from relax_tune.ir.frontend.shared.bounds import LARGEST, checked_bounds

Bounds = Mapping[str, tuple[int, int]]
MOST_LAYERS = 4096
INSTEAD = "this folder cannot be imported, but the .pt2 or .onnx file of an export of the model may"


def read_config(folder: Path) -> Mapping[str, Any]:
    """Read config.json as a mapping. Raises ParseError."""
    return read_json(folder / "config.json", "a Hugging Face model folder with config.json")


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """Fields of one JSON object. Each reader raises ParseError naming the field, the expected and the actual value."""

    data: Mapping[str, Any]
    where: str

    def wrong(self, key: str, expected: str) -> ParseError:
        return ParseError(f"{self.where}: {key}: expected {expected}, got {self.data.get(key)!r:.80}; {INSTEAD}")

    def whole(self, key: str, default: int | None = None) -> int:
        """Read an integer of at least 1. `default` stands for a field that is missing or null."""
        value = self.data.get(key)
        value = default if value is None else value
        # `type` instead of `isinstance`: true and false are integers in Python.
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise self.wrong(key, f"a whole number from 1 to {LARGEST}")
        return value

    def wholes(self, key: str, default: Sequence[int], count: int | None = None, least: int = 1) -> tuple[int, ...]:
        """Read a list of `count` (None: any number) integers of at least `least`."""
        values = self.data.get(key)
        values = default if values is None else values
        valid = isinstance(values, (list, tuple)) and all(type(v) is int and least <= v <= LARGEST for v in values)
        if not valid or not 1 <= len(values) <= MOST_LAYERS or count not in (None, len(values)):
            length = "" if count is None else f"{count} "
            raise self.wrong(key, f"a list of {length}whole numbers of at least {least}")
        return tuple(values)

    def pair(self, key: str, default: int) -> tuple[int, int]:
        """Read a height and width, as one number or two."""
        if isinstance(self.data.get(key), (list, tuple)):
            height, width = self.wholes(key, (), 2)
            return height, width
        return (self.whole(key, default),) * 2

    def layers(self, key: str) -> int:
        """Read a number of layers."""
        count = self.whole(key)
        if count > MOST_LAYERS:
            raise self.wrong(key, f"at most {MOST_LAYERS} layers")
        return count

    def number(self, key: str, default: float | None, low: float, high: float, expected: str) -> float:
        """Read a number with `low <= number < high`, described by `expected`. `default` stands for a missing field."""
        value = self.data.get(key, default)
        if type(value) not in (int, float) or not low <= value < high:
            raise self.wrong(key, expected)
        return float(value)

    def truth(self, key: str, default: bool) -> bool:
        value = self.data.get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def chosen(self, key: str, default: str, known: Collection[str]) -> str:
        """Read one of the names in `known`."""
        value = self.data.get(key, default)
        if not isinstance(value, str) or value not in known:
            raise self.wrong(key, f"one of {', '.join(known)}")
        return value

    def only(self, key: str, *values: object) -> None:
        """Require a field to be missing or to have one of `values`; the message names the first."""
        if key in self.data and not any(self.data[key] is v or self.data[key] == v for v in values):
            raise self.wrong(key, repr(values[0]))

    def labels(self) -> int:
        """Read the number of classes."""
        named = self.data.get("id2label")
        return len(named) if isinstance(named, dict) and named else self.whole("num_labels", 2)

    def multiple(self, key: str, value: int, of: str, unit: int) -> None:
        """Require `value`, the field `key`, to be a multiple of `unit`, the field `of`."""
        if value % unit:
            raise ParseError(
                f"{self.where}: expected {key} to be a multiple of {of}, got {value} and {unit}; {INSTEAD}"
            )


@dataclass(frozen=True, slots=True)
class SymbolRange:
    """Sizes that a model can take for a symbol.

    Attributes:
        meaning: plural noun for messages
        least, most: smallest and largest size; None: unlimited
        usual: upper bound if none is given; None: `most`
    """

    meaning: str
    least: int = 0
    most: int | None = None
    usual: int | None = None


BATCH = SymbolRange("batch")


def symbol_bounds(symbols: Mapping[str, SymbolRange], bounds: Bounds | None) -> dict[str, tuple[int, int | None]]:
    """Return the inclusive bounds of a model's symbols: the given ones, else 1 or `least` to `usual`.

    Raises:
        UserError: for symbols that the model does not have and sizes that it cannot take.
    """
    given = checked_bounds(bounds)
    unknown = sorted(set(given) - set(symbols))
    if unknown:
        *names, last = (f"{name} ({symbol.meaning})" for name, symbol in symbols.items())
        known = f"symbols {', '.join(names)} and {last}" if names else f"symbol {last}"
        raise UserError(f"expected bounds of the model's {known}, got {', '.join(unknown)[:80]}; correct the name")
    result: dict[str, tuple[int, int | None]] = {}
    for name, s in symbols.items():
        low, high = result[name] = given.get(name, (max(1, s.least), s.most if s.usual is None else s.usual))
        if low < s.least:
            raise UserError(f"bound of {name}: expected at least {s.least} {s.meaning}, got {low}; raise it")
        if s.most is not None and (high is None or high > s.most):
            raise UserError(
                f"bound of {name}: expected at most {s.most} {s.meaning} by this model, got {high}; lower it"
            )
    return result


def upper(span: tuple[int, int | None]) -> tuple[int, int]:
    """Return bounds of a symbol whose range has an end."""
    assert span[1] is not None
    return span[0], span[1]
