"""The command line, `relax-tune COMMAND`: the table of commands and their common parts, without heavy imports.

Exit codes: 0 done, 2 a mistake the user can correct, 3 nothing usable was measured, 4 a server or a
fleet is away or busy (the same command may succeed later), 130 interrupted
(`tuner/cli/start.py`); 1 when the reader of the output has gone (`relax-tune db top | head -1`), without a message.

Tests: `tests/tuner/cli/test_cli.py`, `tests/tuner/cli/test_cli_help.py`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, NamedTuple, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from relax_tune.errors import RelaxTuneError, RelaxTuneWarning, is_temporary, system_reason
from relax_tune.printable import printable

USER_ERROR, NOTHING_MEASURED, TRY_LATER = 2, 3, 4


class CommandEntry(NamedTuple):
    """A command.

    module, attribute: `attribute` of `commands/MODULE.py`, a function or, for a group, a `typer.Typer`
    summary: its line of help
    examples: command lines that show it
    """

    module: str
    attribute: str
    summary: str
    examples: tuple[str, ...]


COMMANDS: dict[str, CommandEntry] = {
    "tune": CommandEntry(
        "tune",
        "tune",
        "Measure a model's kernels on a device, build its artifact.",
        (
            "relax-tune tune ./encoder --target c --bound b=1:8 --bound n=1:512",
            "relax-tune tune model.onnx --target opencl --effort quick --out model.rta",
        ),
    ),
    "build": CommandEntry(
        "build",
        "build",
        "Build a model's artifact from what has been measured. Measures nothing.",
        (
            "relax-tune build ./encoder --target c --bound b=1:8 --bound n=1:512",
            "relax-tune build ./encoder --policy library --out library.rta",
        ),
    ),
    "pack": CommandEntry(
        "portable.pack",
        "pack",
        "Pack a model and its records into one portable file.",
        (
            "relax-tune pack ./encoder --bound b=1:8 --bound n=1:512",
            "relax-tune pack model.onnx --db sqlite:///records.db --out model.rtp",
        ),
    ),
    "install": CommandEntry(
        "portable.install",
        "install",
        "Install a pack on a device: verify, time, build its artifact.",
        (
            "relax-tune install encoder.rtp --target c",
            "relax-tune install encoder.rtp --target opencl --budget 50 --out encoder.rta",
        ),
    ),
    "weights": CommandEntry(
        "portable.weights",
        "weights",
        "Write a built artifact with the weights of another model.",
        (
            "relax-tune weights encoder-c.rta ./finetuned --out finetuned.rta",
            "relax-tune weights encoder-c.rta ./encoder --adapter ./lora --out lora.rta",
        ),
    ),
    "run": CommandEntry(
        "run",
        "run",
        "Run an artifact on text or on arrays.",
        (
            'relax-tune run encoder-c.rta --model ./encoder --text "a sentence" --text "another"',
            'relax-tune run decoder-c.rta --model ./decoder --text "Once upon a" --temperature 0.7 --top-p 0.9 --stream',
            "relax-tune run encoder-c.rta --inputs arrays.npz --out results.npz",
            "relax-tune run encoder-c.rta --inputs arrays.npz --record-shapes shapes.json",
        ),
    ),
    "warm": CommandEntry(
        "warm",
        "warm",
        "Compile or verify everything that opening an artifact needs.",
        ("relax-tune warm encoder-c.rta decoder-c.rta", "relax-tune warm encoder-c.rta --json"),
    ),
    "serve": CommandEntry(
        "serve",
        "serve",
        "Serve artifacts over HTTP, with batches by measured times.",
        (
            "relax-tune serve encoder-c.rta --model ./encoder --p99-ms 50",
            "relax-tune serve encoder=encoder-c.rta encoder:2=new.rta decoder-c.rta --model decoder-c=./decoder",
            "relax-tune serve encoder-c.rta --host 10.0.0.1 --token-file token --logs json",
        ),
    ),
    "bench": CommandEntry(
        "bench",
        "bench",
        "Time artifacts against each other, interleaved.",
        ("relax-tune bench tuned.rta library.rta --shape b=1,n=8 --shape b=8,n=512",),
    ),
    "export": CommandEntry(
        "portable.export",
        "export",
        "Write an artifact as C sources, which run without Python.",
        (
            "relax-tune export encoder-c.rta --c encoder",
            "relax-tune export decoder-c.rta --c decoder --function prefill --function decode",
        ),
    ),
    "plan": CommandEntry(
        "plan",
        "plan",
        "Show which kernel runs for which shapes; check against use.",
        (
            "relax-tune plan encoder-c.rta --c plans.c",
            "relax-tune plan ./encoder --target c --check --profile served.json",
        ),
    ),
    "show": CommandEntry(
        "show",
        "show",
        "Show a model's program and tasks, or one task in detail.",
        (
            "relax-tune show ./encoder --what tasks",
            "relax-tune show ./encoder --after FuseOps",
            "relax-tune show ./encoder --task softmax --target c",
            "relax-tune show softmax --target c --what trace --what source",
        ),
    ),
    "report": CommandEntry(
        "views.report",
        "report",
        "Write an HTML report of what tuning did.",
        (
            "relax-tune report encoder-c.rta --db records.db --out encoder.html",
            "relax-tune report ./encoder --target c --bound b=1:8 --bound n=1:512",
            "relax-tune report records.db",
        ),
    ),
    "dashboard": CommandEntry(
        "views.dashboard",
        "dashboard",
        "Show jobs, models and devices of a database in a browser.",
        (
            "relax-tune dashboard --db records.db",
            "relax-tune dashboard --db postgresql://tuner@records.lan/tuning --host 10.0.0.1 --token-file token",
        ),
    ),
    "web": CommandEntry(
        "views.web",
        "web",
        "Serve an artifact and a page that runs it in the browser.",
        ("relax-tune web encoder-webgpu.rta --model ./encoder",),
    ),
    "db": CommandEntry(
        "exchange",
        "app",
        "Inspect, move and repair the database of measurements.",
        ("relax-tune db stats", "relax-tune db top softmax --count 5", "relax-tune db export records.jsonl"),
    ),
    "model": CommandEntry(
        "model",
        "app",
        "Train a cost model for kernels without measurements.",
        (
            "relax-tune model train --target c --out team.prior",
            "relax-tune model evaluate --target c",
        ),
    ),
    "jobs": CommandEntry(
        "fleet.jobs",
        "app",
        "Submit models to tuning services and manage the jobs.",
        (
            "relax-tune jobs submit ./encoder --target cuda --bound n=1:512 --priority 5",
            "relax-tune jobs work --device c --db postgresql://tuner@records.lan/tuning --files /shared/files",
            "relax-tune jobs list --state running",
        ),
    ),
    "scheduler": CommandEntry(
        "fleet.cluster",
        "scheduler",
        "Start the scheduler that connects jobs and workers.",
        (
            "relax-tune scheduler",
            "relax-tune scheduler --host 10.0.0.1 --ca ca.pem --certificate head.pem --key head.key",
        ),
    ),
    "workers": CommandEntry(
        "fleet.cluster",
        "workers",
        "List the units that workers lend to a scheduler.",
        ("relax-tune workers tls://127.0.0.1:8786",),
    ),
    "worker": CommandEntry(
        "fleet.cluster",
        "worker",
        "Lend this machine's devices to the jobs of a scheduler.",
        ("relax-tune worker tls://127.0.0.1:8786 --device c --device opencl",),
    ),
    "devices": CommandEntry(
        "devices",
        "devices",
        "List the devices kernels can be tuned for and run on here.",
        ("relax-tune devices", "relax-tune devices --json"),
    ),
    "doctor": CommandEntry(
        "devices",
        "doctor",
        "Report what is installed, missing, or would be faster.",
        ("relax-tune doctor", "relax-tune doctor --json --db sqlite:///records.db"),
    ),
    "certificate": CommandEntry(
        "fleet.certificates",
        "app",
        "Create the certificates of a fleet.",
        (
            "relax-tune certificate authority ./fleet",
            "relax-tune certificate issue ./fleet gpu1 --role worker",
            "relax-tune certificate issue ./fleet gpu1 --role worker --renew",
        ),
    ),
    "sign": CommandEntry(
        "portable.sign",
        "sign",
        "Sign a file with your key; write FILE.sig next to it.",
        ("relax-tune sign --make-key release.key", "relax-tune sign encoder-c.rta --key release.key"),
    ),
    "verify": CommandEntry(
        "portable.sign",
        "verify",
        "Check the signature of a file against a public key.",
        ("relax-tune verify encoder-c.rta --public release.key.pub",),
    ),
    "allow": CommandEntry(
        "devices",
        "allow",
        "Let a folder's relax-tune.toml choose files and databases.",
        ("relax-tune allow", "relax-tune allow ./project --revoke"),
    ),
}


def examples(*lines: str) -> str:
    """Return the last paragraph of a command's help."""
    return "\n".join(("\b", "Examples:" if len(lines) > 1 else "Example:", *(f"  {line}" for line in lines)))


class LazyCommands(TyperGroup):
    """A group that imports a command's module when the command runs.

    So `--help`, `--version` and the completion of a command's name stay quick, and a command's module may import heavy
    packages.
    """

    _listing = False

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, entry in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=entry.summary)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command; while listing, return a stub that knows only its line of help."""
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

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete a word without importing any command."""
        self._listing = True
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self._listing = False

    def invoke(self, ctx: Any) -> Any:
        """Run the command; its errors become one paragraph on stderr and an exit code."""
        try:
            return super().invoke(ctx)
        except RelaxTuneError as error:
            print(f"error: {printable(str(error))}", file=sys.stderr)
            raise typer.Exit(TRY_LATER if is_temporary(error) else USER_ERROR) from None
        except OSError as error:
            if error.filename is None:
                raise  # the command's own output, see `main`
            print(f"error: {printable(str(error.filename))}: {system_reason(error)}", file=sys.stderr)
            raise typer.Exit(TRY_LATER if is_temporary(error) else USER_ERROR) from None


def load_command(name: str) -> Any:
    """Import the module of a command in `COMMANDS`, and return the command."""
    entry = COMMANDS[name]
    function = getattr(importlib.import_module(f"relax_tune.tuner.cli.commands.{entry.module}"), entry.attribute)
    if isinstance(function, typer.Typer):
        return typer.main.get_command(function)
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, epilog=examples(*entry.examples))(function)
    return typer.main.get_command(single)


app = typer.Typer(
    cls=LazyCommands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 2 a mistake the message says how to correct, 3 nothing usable was measured, 4 a "
    "server or worker is away or busy (the same command may succeed later), 130 interrupted "
    "(the same command again goes on). `relax-tune COMMAND --help` has every option with an example.",
)


def _show_version(requested: bool) -> None:
    if requested:
        try:
            installed = version("relax-tune")
        except PackageNotFoundError:
            installed = "0 (not installed)"
        print(f"relax-tune {installed}")
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
    """Run the command line with prepared standard streams. Raises SystemExit."""
    _prepare_output()
    warnings.showwarning = _show_warning
    try:
        app(prog_name="relax-tune")
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF):
            raise
        # a full disk behind `> file`: the rest of the buffer cannot be written either
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"error: the output could not be written: {error.strerror}; write it to another place", file=sys.stderr)
        sys.exit(TRY_LATER if is_temporary(error) else USER_ERROR)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning of relax-tune as one line, any other as Python does."""
    if issubclass(category, RelaxTuneWarning):
        print(f"warning: {printable(str(message))}", file=sys.stderr)
    else:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        print(printable(text), end="", file=file or sys.stderr)


def _prepare_output() -> None:
    """Set standard streams to whole lines, and to escapes for characters that cannot be printed.

    A closed standard stream becomes /dev/null. Otherwise the next file opened (the database) would take its place and
    receive what libraries print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):
                stream.reconfigure(line_buffering=True, errors="backslashreplace")
