"""Declarations of settings: help, default, values, and the commands that take them; parsing and checks of values.

Tests: `tests/tuner/test_settings.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qsl, urlsplit

from relax_tune.errors import RelaxTuneError, UserError

Command = Literal[
    "tune", "build", "plan", "show", "pack", "install", "weights", "submit", "work", "report", "dashboard", "serve"
]
"""Commands that take settings; `submit` and `work` are subcommands of `relax-tune jobs`."""
# Groups of commands.
TUNE: tuple[Command, ...] = ("tune", "submit")
SEARCH: tuple[Command, ...] = (*TUNE, "install")
BUILD: tuple[Command, ...] = (*TUNE, "build", "install")
MODEL: tuple[Command, ...] = (*TUNE, "build", "plan", "show", "report")
PROGRAM: tuple[Command, ...] = (*MODEL, "pack")
DEVICE: tuple[Command, ...] = (*MODEL, "install")
MEASURE: tuple[Command, ...] = ("tune", "work")
FLEET: tuple[Command, ...] = (*MEASURE, "report", "dashboard")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of a setting.

    Attributes:
        help: Sentences on what the setting does.
        default: The default as help prints it.
        commands: Commands that take the setting.
        kind: Type of the value.
        choices: Permitted values; empty permits any.
        suggested: Returns the values that a shell completes in addition to `choices`, such as the names in a registry.
        placeholder: Placeholder of the value in a command's help; empty: the suggestions.
        reaches_out: True for a setting that names a file, a host or a database, or lets a model run programs. A settings file with
            such a setting is ignored until the user allows it.
    """

    help: str
    default: str
    commands: tuple[Command, ...]
    kind: type = str
    choices: tuple[str, ...] = ()
    suggested: Callable[[], tuple[str, ...]] = tuple
    placeholder: str = ""
    reaches_out: bool = False

    @property
    def suggestions(self) -> tuple[str, ...]:
        return self.choices or self.suggested()

    @property
    def metavar(self) -> str:
        return self.placeholder or "|".join(self.suggestions).replace(" ", "")


def option(
    value: T,
    help: str,
    *,
    commands: tuple[Command, ...],
    default: str = "",
    kind: type = str,
    choices: tuple[str, ...] = (),
    suggested: Callable[[], tuple[str, ...]] = tuple,
    metavar: str = "",
    reaches_out: bool = False,
) -> T:
    """Declare a field of `Settings` with the default `value`; `default` is the text of the default if it differs."""
    declared = Option(help, default or str(value), commands, kind, choices, suggested, metavar, reaches_out)
    declaration: T = field(default=value, metadata={"option": declared})
    return declaration


def flag_of(name: str) -> str:
    """Return the command-line flag of a setting."""
    return f"--{name.replace('_', '-')}"


_FLAG = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)(?: (\w+)=(\d+):(\d+))?")
_COMMAND = re.compile(r"`[^`]*`|pip install [^;,]*")


@contextmanager
def names_arguments() -> Iterator[None]:
    """Let errors name the arguments of Python's functions, not the flags of commands. Serves as a decorator too."""
    try:
        yield
    except RelaxTuneError as error:
        error.args = tuple(with_arguments(a) if isinstance(a, str) else a for a in error.args)
        raise


def with_arguments(text: str) -> str:
    """Return a message with the arguments of Python's functions in place of the flags of commands, except inside commands.

    `--wait-secs` becomes `wait_secs=`, and `--bound n=1:64` becomes `bounds={'n': (1, 64)}`.
    """
    parts, at = [], 0
    for command in _COMMAND.finditer(text):
        parts += [_FLAG.sub(_argument, text[at : command.start()]), command[0]]
        at = command.end()
    return "".join([*parts, _FLAG.sub(_argument, text[at:])])


def _argument(flag: re.Match[str]) -> str:
    name = {"bound": "bounds"}.get(flag[1], flag[1].replace("-", "_"))
    return f"{name}=" if flag[2] is None else f"{name}={{{flag[2]!r}: ({flag[3]}, {flag[4]})}}"


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    return f"RELAX_TUNE_{name.upper()}"


def has_password(url: str) -> bool:
    """Return True if a database's URL contains a password."""
    try:
        parts = urlsplit(url)
    except ValueError:  # opening the database reports a malformed URL
        return False
    return bool(parts.password) or any(name.lower() in ("password", "passwd") for name, _ in parse_qsl(parts.query))


def parse_integer(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UserError(f"RELAX_TUNE_{name.upper()} expects a whole number, got {value!r}") from None


def parse_float(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UserError(f"RELAX_TUNE_{name.upper()} expects a number, got {value!r}") from None


def parse_boolean(name: str, value: str) -> bool:
    if value.lower() not in _BOOLEANS:
        raise UserError(f"RELAX_TUNE_{name.upper()} expects true or false, got {value!r}")
    return _BOOLEANS[value.lower()]


_BOOLEANS: Mapping[str, bool] = {"true": True, "1": True, "false": False, "0": False}
PARSERS: Mapping[type, Callable[[str, str], Any]] = {
    int: parse_integer,
    float: parse_float,
    bool: parse_boolean,
    str: lambda _, value: value,
}
"""Functions that parse the value of an environment variable, by type: `parse(setting, value)`."""
KINDS: Mapping[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def check_value(name: str, declared: Option, value: object) -> None:
    """Raise `UserError` for a value that has not the declared type or is not one of the declared choices."""
    flag = flag_of(name)
    if declared.choices:
        if not isinstance(value, str) or value not in declared.choices:
            raise UserError(f"{flag} expects one of {', '.join(declared.choices)}; got {value!r:.80}")
    elif declared.kind is int:
        if type(value) is not int:
            raise UserError(f"{flag} expects a whole number, got {value!r:.80}")
    elif declared.kind is float:
        if type(value) not in (int, float):
            raise UserError(f"{flag} expects a number, got {value!r:.80}")
    elif declared.kind is bool:
        if type(value) is not bool:
            raise UserError(f"{flag} expects true or false, got {value!r:.80}")
    elif not isinstance(value, str):
        raise UserError(f"{flag} expects text, got {value!r:.80}")
