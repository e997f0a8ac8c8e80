"""Reading values of declared types from untrusted text, which is refused, never repaired.

Tests: `tests/runtime/program/test_program.py`.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from relax_tune.errors import ArtifactError
from relax_tune.json_shapes import has_shape

_SHOWN_LIMIT = 4000
_LARGEST = 1e300
_LIMITED = reprlib.Repr()


def parse_json(text: str, where: str) -> Any:
    """Parse JSON. Raises ArtifactError for any other text."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{where}: expected JSON text, got something else: {error}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def read_value(kind: Any, data: Any, where: str) -> Any:
    """Build a value of a declared field type from JSON data, checking every type on the way."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        check_list(data, where, "a list")
        element = arguments[0]
        if element is int:  # the scalar list can be long: no path text per number
            for index, number in enumerate(data):
                if type(number) is not int:
                    raise wrong(f"{where}[{index}]", "a whole number", number)
            return tuple(data)
        return tuple(read_value(element, item, f"{where}[{index}]") for index, item in enumerate(data))
    if origin is Literal:
        if data not in arguments:
            raise wrong(where, "one of " + ", ".join(arguments), data)
        return data
    if origin in (Union, UnionType):
        kinds = [a for a in arguments if a is not type(None)]
        if len(kinds) == 1:
            return None if data is None else read_value(kinds[0], data, where)
        return read_value(_kind_of(kinds, data, where), data, where)
    if kind is float:
        if type(data) not in (int, float):
            raise wrong(where, "a number", data)
        if not abs(data) <= _LARGEST:
            raise wrong(where, "a finite 64-bit number", data)
        return data
    if kind in (bool, int, str):
        if type(data) is not kind:
            raise wrong(where, {bool: "true or false", int: "a whole number"}.get(kind, "text"), data)
        if kind is str and not data.isascii():
            try:
                data.encode()
            except UnicodeEncodeError:
                raise wrong(where, "valid Unicode", data) from None
        return data
    if not isinstance(data, dict):
        raise wrong(where, f"an object ({kind.__name__})", data)
    hints = _hints(kind)
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    missing, unknown = [name for name in required if name not in data], sorted(set(data) - set(hints))
    if missing or unknown:
        raise ArtifactError(
            f"{where}: expected the fields of {kind.__name__}; got missing {missing}, unknown {_LIMITED.repr(unknown)}"
        )
    return kind(**{name: read_value(hints[name], value, f"{where}.{name}") for name, value in data.items()})


def _kind_of(kinds: Sequence[type], data: Any, where: str) -> type:
    """Return the declared type that the field `kind` of the data names."""
    known = {get_args(_hints(kind)["kind"])[0]: kind for kind in kinds}
    name = data["kind"] if has_shape(data, {"kind": object}) else None
    if name not in tuple(known):
        raise wrong(where, "an object whose kind is one of " + ", ".join(known), name)
    return known[name]


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the types of the fields of a dataclass."""
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def wrong(where: str, expected: str, got: object) -> ArtifactError:
    """Make the error of an unexpected value."""
    return ArtifactError(f"{where}: expected {expected}, got {_LIMITED.repr(got)}")


def check_list(data: Any, where: str, expected: str) -> list[Any]:
    """Check that JSON data is a list, and return it."""
    if not isinstance(data, list):
        raise wrong(where, expected, data)
    return data


def check_schema(data: Any, schema: int, where: str) -> None:
    """Check that JSON data is of this schema. Raises ArtifactError."""
    got = data["schema"] if has_shape(data, {"schema": object}) else None
    if type(got) is not int or got != schema:
        raise ArtifactError(
            f"{where}: expected schema {schema}, got {got!r:.40}; rebuild the model or update relax-tune"
        )


def check_index(number: int, size: int, where: str, what: str) -> None:
    """Check that a number is an index, from 0 below `size`."""
    if not 0 <= number < size:
        raise wrong(where, f"the index of a {what} (0..{size - 1})", number)


def check_indices(numbers: Iterable[int], size: int, where: str, what: str) -> None:
    """Check that each number is an index; see `check_index`."""
    for position, number in enumerate(numbers):
        check_index(number, size, f"{where}[{position}]", what)


def check_shown(where: str, text: str) -> None:
    """Check that a text may be printed as it is."""
    if len(text) > _SHOWN_LIMIT or not text.isprintable():
        raise wrong(where, f"up to {_SHOWN_LIMIT} printable characters", text)
