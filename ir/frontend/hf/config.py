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
    """Fields of one JSON object. Each reader raises ParseError naming the field, the wanted and the found value."""

    data: Mapping[str, Any]
    where: str

    def wrong(self, key: str, wanted: str) -> ParseError:
        found = self.data.get(key)
        return ParseError(f"{self.where}: {key}: wanted {wanted}, found {found!r:.80}; {INSTEAD}")

    def whole(self, key: str, default: int | None = None) -> int:
        """Read an integer of at least 1. `default` stands for a field that is missing or null."""
        value = self.data.get(key)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise self.wrong(key, f"a whole number from 1 to {LARGEST}")
        return value

    def wholes(self, key: str, default: Sequence[int], count: int | None = None, least: int = 1) -> tuple[int, ...]:
        """Read a list of integers of at least `least`. `count`: its length, if known."""
        found = self.data.get(key)
        found = default if found is None else found
        right = isinstance(found, (list, tuple)) and all(type(v) is int and least <= v <= LARGEST for v in found)
        if not right or not 1 <= len(found) <= MOST_LAYERS or count not in (None, len(found)):
            many = "" if count is None else f"{count} "
            raise self.wrong(key, f"a list of {many}whole numbers of at least {least}")
        return tuple(found)

    def pair(self, key: str, default: int) -> tuple[int, int]:
        """Read a height and width, as one number or two."""
        found = self.data.get(key)
        if isinstance(found, (list, tuple)):
            height, width = self.wholes(key, (), 2)
            return height, width
        return (self.whole(key, default),) * 2

    def layers(self, key: str) -> int:
        """Read a number of layers."""
        found = self.whole(key)
        if found > MOST_LAYERS:
            raise self.wrong(key, f"at most {MOST_LAYERS} layers")
        return found

    def number(self, key: str, default: float | None, low: float, high: float, wanted: str) -> float:
        """Read a number with `low <= number < high`, described by `wanted`. `default` stands for a missing field."""
        value = self.data.get(key, default)
        if type(value) not in (int, float) or not low <= value < high:
            raise self.wrong(key, wanted)
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
                f"{self.where}: wanted {key} to be a multiple of {of}, found {value} and {unit}; {INSTEAD}"
            )


def batch_bounds(bounds: Bounds | None) -> tuple[int, int | None]:
    """Return the inclusive bounds of `b`, the only symbol of a model of images. Raises UserError for other symbols."""
    given = checked_bounds(bounds)
    unknown = sorted(set(given) - {"b"})
    if unknown:
        raise UserError(
            f"wanted bounds of the model's symbol b (batch), found {', '.join(unknown)[:80]}; correct the name"
        )
    return given.get("b", (1, None))


def sample_bounds(least: int, bounds: Bounds | None) -> tuple[tuple[int, int | None], tuple[int, int | None]]:
    """Return the inclusive bounds of `b` (batch) and `n` (samples of sound). Raises UserError for impossible bounds."""
    given = checked_bounds(bounds)
    unknown = sorted(set(given) - {"b", "n"})
    if unknown:
        raise UserError(
            f"wanted bounds of the model's symbols b (batch) and n (samples), found {', '.join(unknown)[:80]}; correct the name"
        )
    n: tuple[int, int | None] = given.get("n", (least, None))
    if n[0] < least:
        raise UserError(f"bound of n: wanted at least {least}, the samples of one frame, found {n[0]}; raise it")
    return given.get("b", (1, None)), n


def symbol_bounds(positions: int, bounds: Bounds | None) -> tuple[tuple[int, int | None], tuple[int, int]]:
    """Return the inclusive bounds of `b` (batch) and `n` (positions). Raises UserError for impossible bounds."""
    given = checked_bounds(bounds)
    unknown = sorted(set(given) - {"b", "n"})
    if unknown:
        raise UserError(
            f"wanted bounds of the model's symbols b (batch) and n (positions), found {', '.join(unknown)[:80]}; "
            "correct the name"
        )
    n = given.get("n", (1, positions))
    if n[1] > positions:
        raise UserError(
            f"bound of n: wanted at most {positions}, the positions this model has, found {n[1]}; lower the bound"
        )
    return given.get("b", (1, None)), n
