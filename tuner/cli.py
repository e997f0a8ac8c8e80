"""The command line: `relax-tune COMMAND`. The table of commands, what every command shares, and nothing heavy.

Exit codes: 0 done, 2 a mistake the user can correct, 3 nothing usable was measured, 130 interrupted.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from relax_tune.errors import RelaxTuneError

USER_ERROR, NOTHING_MEASURED, INTERRUPTED = 2, 3, 130

# Command -> (module, object, one line of help). The object is a function or, for a group of commands, a `typer.Typer`.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "tune": ("tune", "tune", "Measure kernels for a model on a device, then build its artifact."),
    "build": ("build", "build", "Build a model's artifact from what has been measured. Measures nothing."),
    "run": ("run", "run", "Run an artifact on sentences or on arrays."),
    "bench": ("bench", "bench", "Time artifacts against each other, interleaved."),
    "db": ("db", "app", "Look at, move and mend the database of measurements."),
    "jobs": ("cluster", "jobs", "List the tuning jobs a database knows."),
    "worker": ("cluster", "worker", "Lend this machine's devices to the jobs of a Dask scheduler."),
    "devices": ("devices", "devices", "List the devices kernels can be tuned for and run on here."),
    "doctor": ("devices", "doctor", "Say what is installed here, what is missing, and what would make it faster."),
}


class LazyCommands(TyperGroup):
    """A group that imports a command's module when that command runs: `--help` and `--version` stay quick, and a
    command's heavy imports can stand at the top of its module."""

    _listing = False

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, _, summary) in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=summary)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command itself; while listing, one that knows only its line of help."""
        if self._listing or cmd_name not in COMMANDS:
            return self.commands.get(cmd_name)
        return load_command(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help without importing any command."""
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False

    def invoke(self, ctx: Any) -> Any:
        """Run the command; its errors become one paragraph on stderr and an exit code."""
        try:
            return super().invoke(ctx)
        except RelaxTuneError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(USER_ERROR) from None
        except KeyboardInterrupt:
            print(
                "interrupted; everything measured so far is kept, and the same command again goes on from there",
                file=sys.stderr,
            )
            raise typer.Exit(INTERRUPTED) from None


def load_command(name: str) -> Any:
    """The command `name` of `COMMANDS`, its module imported now."""
    module, attribute, _ = COMMANDS[name]
    found = getattr(importlib.import_module(f"relax_tune.tuner.commands.{module}"), attribute)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name)(found)
    return typer.main.get_command(single)


app = typer.Typer(
    cls=LazyCommands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        try:
            found = version("relax-tune")
        except PackageNotFoundError:
            found = "0 (not installed)"
        print(f"relax-tune {found}")
        raise typer.Exit


@app.callback()
def relax_tune(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Tune, build and run models with symbolic shapes. Settings: flags, then RELAX_TUNE_* variables, then
    relax-tune.toml in the current folder, then defaults."""


def main() -> None:
    """The `relax-tune` command."""
    app(prog_name="relax-tune")
