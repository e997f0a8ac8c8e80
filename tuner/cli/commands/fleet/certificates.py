"""`relax-tune certificate ...`: an authority of a fleet, and certificates of roles.

Tests: `tests/tuner/cli/test_certificates.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from relax_tune.errors import UserError
from relax_tune.tuner.cli.app import COMMANDS, examples
from relax_tune.tuner.cli.report.console import make_console, say
from relax_tune.tuner.measure.cluster.trust import authority as fleet

app = typer.Typer(
    help="Create the certificates of a fleet.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    epilog=examples(*COMMANDS["certificate"].examples),
)
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of the authority; keep it on one machine.")]


@app.command(epilog=examples("relax-tune certificate authority ./fleet"))
def authority(
    folder: Folder,
    days: Annotated[int, typer.Option(metavar="DAYS", help="How long it lives.")] = fleet.AUTHORITY_DAYS,
) -> None:
    """Create an authority: copy ca.pem to every machine, keep ca.key here."""
    say(make_console(stderr=True), "wrote {} and {}".format(*fleet.make_authority(folder, days)))


@app.command(epilog=examples("relax-tune certificate issue ./fleet gpu1 --role worker"))
def issue(
    folder: Folder,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The host of a scheduler, worker or database server, or a job's name.")
    ],
    role: Annotated[str, typer.Option(metavar="ROLE", help="scheduler, worker, job or database.")],
    days: Annotated[int, typer.Option(metavar="DAYS", help="Days of validity.")] = fleet.DAYS,
    renew: Annotated[bool, typer.Option("--renew", help="Replace the certificate and key of this name.")] = False,
) -> None:
    """Write NAME.pem and NAME.key, to be copied to that machine with ca.pem.

    A job's certificate identifies a client only: it is accepted neither as a scheduler nor as a worker. A database's is the
    certificate of a PostgreSQL server (`ssl_cert_file`, `ssl_key_file`).
    """
    if role not in get_args(fleet.Role):
        raise UserError(f"--role expects {', '.join(fleet.ROLES)}, got {role!r:.80}")
    certificate, key = fleet.issue(folder, name, role, days, renew)  # type: ignore[arg-type]
    say(make_console(stderr=True), f"wrote {certificate} and {key}: {fleet.describe(certificate)}")


@app.command(
    epilog=examples("relax-tune certificate renew ./fleet", "relax-tune certificate renew ./fleet gpu1 --days 30")
)
def renew(
    folder: Folder,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Names to renew in any case. [default: all that expire soon]"),
    ] = None,
    within: Annotated[
        float, typer.Option("--within-days", metavar="DAYS", help="Renew certificates that expire within DAYS days.")
    ] = fleet.SOON_DAYS,
    days: Annotated[
        int | None, typer.Option(metavar="DAYS", help="Validity of the new certificates. [default: as before]")
    ] = None,
) -> None:
    """Renew certificates that expire soon. Meant for a daily timer.

    Copy NAME.pem and NAME.key to their machine again: running schedulers, workers and jobs load them without a restart. A process
    that reads its files from FOLDER renews them itself.
    """
    console = make_console(stderr=True)
    renewed = fleet.renew(folder, names or (), within, days)
    for certificate in renewed:
        say(console, f"renewed {certificate}: {fleet.describe(certificate)}")
    if not renewed:
        say(console, f"no certificate in {folder} expires within {within:g} days")


@app.command(epilog=examples("relax-tune certificate revoke ./fleet gpu1"))
def revoke(
    folder: Folder,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name whose certificates are all revoked.")],
) -> None:
    """Revoke the certificates of a name, in FOLDER/ca.crl.

    Copy the list next to ca.pem on every machine. Running processes apply it within seconds and close the connections of revoked
    certificates.
    """
    path, new = fleet.revoke(folder, name)
    say(make_console(stderr=True), f"wrote {path} with {new} more; copy it next to ca.pem on every machine")


@app.command(epilog=examples("relax-tune certificate show ./fleet/gpu1.pem"))
def show(certificate: Annotated[Path, typer.Argument(metavar="FILE", help="A certificate in PEM.")]) -> None:
    """Print the name, the role and the expiry of a certificate."""
    say(make_console(), fleet.describe(certificate))
