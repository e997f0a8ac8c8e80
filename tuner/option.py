"""Declarations of settings: help, default, values, and the commands that take them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeVar

Command = Literal["tune", "build", "plan", "show", "pack", "install", "submit", "work", "report", "dashboard"]
"""Commands that take settings; `submit` and `work` are those of `relax-tune jobs`."""
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

    help: sentences that say what the setting does
    default: the default as help prints it
    commands: commands that take the setting
    kind: type of the value
    choices: permitted values; empty permits any
    suggestions: values that a shell offers
    metavar: placeholder of the value in a command's help
    reaches_out: True for a setting that names a file, a host or a database, or lets a model run programs
    """

    help: str
    default: str
    commands: tuple[Command, ...]
    kind: type = str
    choices: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    metavar: str = ""
    reaches_out: bool = False


def option(
    value: T,
    help: str,
    *,
    commands: tuple[Command, ...],
    default: str = "",
    kind: type = str,
    choices: tuple[str, ...] = (),
    suggestions: tuple[str, ...] = (),
    metavar: str = "",
    reaches_out: bool = False,
) -> T:
    """Declare a field of `Settings` with the default `value`. default: its text, if `value` does not say it"""
    suggested = suggestions or choices
    shown = metavar or "|".join(suggested).replace(" ", "")
    declared = Option(help, default or str(value), commands, kind, choices, suggested, shown, reaches_out)
    made: T = field(default=value, metadata={"option": declared})
    return made


def flag_of(name: str) -> str:
    """Return the command-line flag of a setting."""
    return f"--{name.replace('_', '-')}"


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    return f"RELAX_TUNE_{name.upper()}"
