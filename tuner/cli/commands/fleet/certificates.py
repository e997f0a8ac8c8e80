"""`relax-tune certificate ...`: an authority of a fleet, and certificates of roles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from relax_tune.errors import UserError
from relax_tune.tuner.cli.app import COMMANDS, examples
from relax_tune.tuner.cli.report.console import make_console, say
from relax_tune.tuner.measure.cluster.trust import authority as fleet

app = typer.Typer(
    help="Make the certificates of a fleet.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    epilog=examples(*COMMANDS["certificate"].examples),
)
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of the authority, on one machine alone.")]


@app.command(epilog=examples("relax-tune certificate authority ./fleet"))
def authority(
    folder: Folder,
    days: Annotated[int, typer.Option(metavar="DAYS", help="How long it lives.")] = fleet.AUTHORITY_DAYS,
) -> None:
    """Make an authority: ca.pem goes to every machine, ca.key stays here."""
    say(make_console(stderr=True), "wrote {} and {}".format(*fleet.make_authority(folder, days)))


@app.command(epilog=examples("relax-tune certificate issue ./fleet gpu1 --role worker"))
def issue(
    folder: Folder,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The host of a scheduler or worker, or a job's name.")],
    role: Annotated[str, typer.Option(metavar="ROLE", help="scheduler, worker or job.")],
    days: Annotated[int, typer.Option(metavar="DAYS", help="How long it lives.")] = fleet.DAYS,
    renew: Annotated[bool, typer.Option("--renew", help="Replace the certificate and key of this name.")] = False,
) -> None:
    """Give NAME.pem and NAME.key, which go to that machine with ca.pem.

    A job's certificate is good for a client alone: it can play neither scheduler nor worker.
    """
    if role not in get_args(fleet.Role):
        raise UserError(f"--role wants {', '.join(fleet.ROLES)}, found {role!r:.80}")
    certificate, key = fleet.issue(folder, name, role, days, renew)  # type: ignore[arg-type]
    say(make_console(stderr=True), f"wrote {certificate} and {key}: {fleet.describe(certificate)}")


@app.command(
    epilog=examples("relax-tune certificate renew ./fleet", "relax-tune certificate renew ./fleet gpu1 --days 30")
)
def renew(
    folder: Folder,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="These, whenever they end. [default: all that end soon]"),
    ] = None,
    within: Annotated[
        float, typer.Option("--within-days", metavar="DAYS", help="What ends so soon is renewed.")
    ] = fleet.SOON_DAYS,
    days: Annotated[
        int | None, typer.Option(metavar="DAYS", help="How long they live then. [default: as long as before]")
    ] = None,
) -> None:
    """Give certificates anew before they end; for a daily timer.

    NAME.pem and NAME.key then go to their machine again: running schedulers, workers and jobs take them up without a restart.
    A process whose files lie in FOLDER itself renews its own.
    """
    console = make_console(stderr=True)
    renewed = fleet.renew(folder, names or (), within, days)
    for certificate in renewed:
        say(console, f"renewed {certificate}: {fleet.describe(certificate)}")
    if not renewed:
        say(console, f"nothing of {folder} ends within {within:g} days")


@app.command(epilog=examples("relax-tune certificate revoke ./fleet gpu1"))
def revoke(
    folder: Folder,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose certificates are taken back, all of them.")],
) -> None:
    """Take back the certificates of a name, in FOLDER/ca.crl.

    The list goes beside ca.pem on every machine. Running processes follow it within seconds: they cut off whoever is in it.
    """
    path, new = fleet.revoke(folder, name)
    say(make_console(stderr=True), f"wrote {path} with {new} more; copy it beside ca.pem on every machine")


@app.command(epilog=examples("relax-tune certificate show ./fleet/gpu1.pem"))
def show(certificate: Annotated[Path, typer.Argument(metavar="FILE", help="A certificate in PEM.")]) -> None:
    """Print the name, the role and the end of a certificate."""
    say(make_console(), fleet.describe(certificate))
