"""Options that several commands share: the settings, as `tuner/settings` declares them, and a few others.

Tests: `tests/tuner/test_settings.py`.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from relax_tune.tuner.cli.report.console import make_console, say
from relax_tune.tuner.option import Command, flag_of
from relax_tune.tuner.settings import OPTIONS, Settings, load_settings, settings_taken_by

T = TypeVar("T")


def among(*values: str) -> Callable[[str], list[str]]:
    """Return an `autocompletion=` function that offers the values that continue the typed text."""

    def complete(incomplete: str) -> list[str]:
        return [v for v in values if v.startswith(incomplete)]

    return complete


def setting_option(name: str) -> Any:
    """Return the typer option that declares a setting."""
    declared, flag = OPTIONS[name], flag_of(name)
    return typer.Option(
        f"{flag}/--no-{flag.removeprefix('--')}" if declared.kind is bool else flag,
        metavar=None if declared.kind is bool else declared.metavar,
        autocompletion=among(*declared.suggestions) if declared.suggestions else None,
        help=f"{declared.help} [default: {declared.default}]",
    )


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The folder of a Hugging Face model, a .gguf, .onnx or .pt2 file, a .relax file of program text, or package:NAME/FOLDER for "
        "a folder inside an installed package.",
    ),
]
Function = Annotated[
    str | None,
    typer.Option(
        "--function",
        metavar="NAME",
        help="Which of the artifact's functions, such as prefill or decode. [default: main, or the only one]",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        autocompletion=among("c", "opencl", "cuda", "webgpu"),
        help="Run on c, opencl, opencl:PART of a device's name, cuda:NUMBER, or webgpu. [default: the kind the artifact was built for]",
    ),
]
Bounds = Annotated[
    list[str] | None,
    typer.Option(
        "--bound",
        metavar="NAME=LOW:HIGH",
        help="Bounds of a symbol, such as n=1:512. May be repeated. [default: what the model declares]",
    ),
]
Database = Annotated[str | None, setting_option("db")]
Ca = Annotated[str | None, setting_option("ca")]
Certificate = Annotated[str | None, setting_option("certificate")]
Key = Annotated[str | None, setting_option("key")]
Logs = Annotated[str | None, setting_option("logs")]
Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST:]PORT",
        help="Answer Prometheus here; a port without a host listens on 127.0.0.1. [default: nowhere]",
    ),
]
RequireMeasured = Annotated[
    bool,
    typer.Option(
        "--require-measured",
        help="End with an error that lists them when tasks have no usable record; write no artifact.",
    ),
]
Verify = Annotated[bool, typer.Option("--verify", help="Verify the program before and after every pass.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; all else goes to stderr.")]


@dataclass(frozen=True, slots=True)
class SettingFlags:
    """The settings given on a command line, by name; None for a flag that was not given."""

    given: Mapping[str, Any]

    def load(self) -> Settings:
        """Merge the flags over the other sources of settings. A device that is chosen for a command is printed on stderr."""
        chosen = self.load_any()
        if "target" not in self.given:
            return chosen
        from relax_tune.tuner.job.devices import with_concrete_target  # needs the extra `tune`, unlike `run`

        return with_concrete_target(chosen, partial(say, make_console(stderr=True)))

    def load_any(self) -> Settings:
        """Return the same settings, whose target may be `auto`, `cpu` or `gpu`: no device is looked for."""
        return load_settings(self.given)

    def flags(self, *names: str) -> dict[str, Any]:
        """Return the values by flag: for these settings, or for all."""
        return {flag_of(name): self.given[name] for name in names or self.given}


def with_settings(command: Command) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Replace the parameter `settings` of a command by an option for each setting that the command takes.

    The command's function receives them as one `SettingFlags`."""
    names = settings_taken_by(command)

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        hints = get_type_hints(function, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for p in inspect.signature(function).parameters.values():
            if p.name != "settings":
                parameters.append(p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[p.name]))
                continue
            for name in names:
                value: Any = OPTIONS[name].kind | None
                kind: Any = Annotated[value, setting_option(name)]
                parameters.append(
                    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
                )

        @functools.wraps(function)
        def run(**given: Any) -> T:
            return function(settings=SettingFlags({name: given.pop(name) for name in names}), **given)

        run.__annotations__ = {p.name: p.annotation for p in parameters}
        vars(run)["__signature__"] = inspect.Signature(parameters)
        return run

    return decorate


def print_json(value: Any) -> None:
    """Print one JSON document on stdout, keys in the order given. JSON escapes all control characters but one."""
    print(json.dumps(value, indent=2, allow_nan=False).replace("\x7f", "\\u007f"))
