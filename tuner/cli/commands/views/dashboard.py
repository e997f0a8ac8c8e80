"""`relax-tune dashboard`: jobs, models and devices of a database, in a browser.

Tests: `tests/tuner/dashboard/test_dashboard.py`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from relax_tune.database.jobs.queue import open_queue
from relax_tune.tuner.cli.commands.options import SettingFlags, with_settings
from relax_tune.tuner.cli.report.console import make_console
from relax_tune.tuner.cli.report.logs import teller
from relax_tune.tuner.dashboard.app import make_app
from relax_tune.tuner.dashboard.guard import OPEN, access
from relax_tune.tuner.dashboard.listen import serve
from relax_tune.tuner.dashboard.metrics import check_prometheus
from relax_tune.tuner.dashboard.pages import Pages
from relax_tune.tuner.measure.cluster.address import check_needed, is_loopback, tls_files
from relax_tune.tuner.report.devices import lent_now
from relax_tune.tuner.report.page import environment

TOKEN_VARIABLE = "RELAX_TUNE_DASHBOARD_TOKEN"


@with_settings("dashboard")
def dashboard(
    *,
    settings: SettingFlags,
    host: Annotated[str, typer.Option(metavar="HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", help="The port to listen on; 0 for any that is free.")] = 8788,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"A file whose one line is the token that clients give; the variable {TOKEN_VARIABLE} holds one too. [default: a new one, "
            "in the printed address]",
        ),
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Admit every user and program of this machine, on 127.0.0.1.")
    ] = False,
) -> None:
    """Show jobs, models and devices of a database in a browser.

    The database is opened read-only, and every page only reads. The printed address has a token, which the browser remembers. Scripts
    send the token of a file as a Bearer token, and browsers ask for it as a password, with any user name. Pages refresh themselves in
    place. /metrics is for Prometheus. Put a server with TLS before it where others could listen.
    """
    chosen = settings.load()
    check_needed(chosen.scheduler, *(settings.given[name] for name in ("ca", "certificate", "key")))
    token, query = access(host, port, token_file, no_token, TOKEN_VARIABLE)
    tell = teller(chosen.logs, make_console(stderr=True), "dashboard")
    environment()
    check_prometheus()
    tls = tls_files(chosen.ca, chosen.certificate, chosen.key)
    lent = None if chosen.scheduler is None else partial(lent_now, chosen.scheduler, tls, chosen.wait_secs)
    with open_queue(chosen.db, read_only=True, wait_secs=chosen.wait_secs, notice=tell) as store:
        app = make_app(Pages(store, lent), token)
        if not is_loopback(host):
            tell(
                "the token and all pages travel as they are: where others could listen, put a server with TLS before this one"
            )
        if token is None:
            tell(OPEN)
        serve(app, host, port, lambda address: tell(f"showing {store.where} at {address}{query}; interrupt to end"))
