"""Values of settings as text, and the names that settings and their values had before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from relax_tune.errors import UserError
from relax_tune.tuner.option import Option, flag_of

# Renamed values, and their new names.
RENAMED_SETTINGS: Mapping[str, str] = {"products": "qkv"}
RENAMED_VALUES: Mapping[tuple[str, str], str] = {
    ("products", "apart"): "separate",
    ("products", "joined"): "merged",
    ("attention", "whole"): "fused",
    ("attention", "apart"): "unfused",
}


def successor(name: str, value: object) -> str:
    """Return the end of an error message that names the successor of a renamed value, or an empty text."""
    new = RENAMED_VALUES.get((name, value)) if isinstance(value, str) else None
    return "" if new is None else f", which is now called {new!r}"


def renamed(name: str, shown: str, new: str, value: object) -> str:
    """Return the error message for a renamed setting."""
    return f"{shown} is called {new} now; found {value!r:.80}{successor(name, value)}"


def has_password(url: str) -> bool:
    """Return whether a database's URL holds a password."""
    try:
        parts = urlsplit(url)
    except ValueError:  # no URL: a store says so
        return False
    return bool(parts.password) or any(name.lower() in ("password", "passwd") for name, _ in parse_qsl(parts.query))


def number_of(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UserError(f"RELAX_TUNE_{name.upper()} wants a whole number, found {value!r}") from None


def decimal_of(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UserError(f"RELAX_TUNE_{name.upper()} wants a number, found {value!r}") from None


def boolean_of(name: str, value: str) -> bool:
    if value.lower() not in _BOOLEANS:
        raise UserError(f"RELAX_TUNE_{name.upper()} wants true or false, found {value!r}")
    return _BOOLEANS[value.lower()]


def text_of(name: str, value: str) -> str:
    return value


_KINDS: Mapping[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
}
_BOOLEANS: Mapping[str, bool] = {"true": True, "1": True, "false": False, "0": False}
PARSED: Mapping[type, Callable[[str, str], Any]] = {int: number_of, float: decimal_of, bool: boolean_of}
KINDS: Mapping[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def check_value(name: str, declared: Option, value: object) -> None:
    """Raise UserError for a value of another type than declared, or beyond the declared choices."""
    flag = flag_of(name)
    if declared.choices:
        if not isinstance(value, str) or value not in declared.choices:
            wanted = ", ".join(declared.choices)
            raise UserError(f"{flag} wants one of {wanted}; found {value!r:.80}{successor(name, value)}")
    elif declared.kind is int:
        if type(value) is not int:
            raise UserError(f"{flag} wants a whole number, found {value!r:.80}")
    elif declared.kind is float:
        if type(value) not in (int, float):
            raise UserError(f"{flag} wants a number, found {value!r:.80}")
    elif declared.kind is bool:
        if type(value) is not bool:
            raise UserError(f"{flag} wants true or false, found {value!r:.80}")
    elif not isinstance(value, str):
        raise UserError(f"{flag} wants text, found {value!r:.80}")
