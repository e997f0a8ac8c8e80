"""`relax-tune worker` and `relax-tune jobs`."""

from __future__ import annotations

import json as json_text
import signal
import threading
from typing import Annotated

import typer

from relax_tune.database.store import open_store
from relax_tune.errors import UserError
from relax_tune.runtime.device.registry import open_device
from relax_tune.tuner.commands.options import Database, Json, among, print_json
from relax_tune.tuner.job_log import state_of
from relax_tune.tuner.measure.cluster_address import TlsFiles, check_address
from relax_tune.tuner.measure.cluster_processes import serve_worker
from relax_tune.tuner.report.console import make_console, make_table, say
from relax_tune.tuner.settings import load_settings


def worker(
    scheduler: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="The scheduler's address, such as tcp://127.0.0.1:8786.")
    ],
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE",
            autocompletion=among("c", "opencl"),
            help="A device to lend: c, opencl or opencl:PART. May be repeated; at least one. [default: none]",
        ),
    ] = None,
    ca: Annotated[
        str | None,
        typer.Option(metavar="FILE.pem", help="The authority both sides trust, for tls://. [default: no TLS]"),
    ] = None,
    certificate: Annotated[
        str | None, typer.Option(metavar="FILE.pem", help="This worker's certificate. [default: no TLS]")
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="FILE.pem", help="The certificate's key. [default: no TLS]")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="The address to listen on, such as 10.0.0.7. [default: Dask's choice]"),
    ] = None,
) -> None:
    """Lend this machine's devices to the jobs of a Dask scheduler.

    Runs until interrupted, and starts its worker process again when that is lost. Beyond loopback the address must be
    tls:// and all three certificate files must be given.
    """
    files = (ca, certificate, key)
    if any(files) and not all(files):
        raise UserError("wanted --ca, --certificate and --key together, found only some of them")
    tls = TlsFiles(*(str(f) for f in files)) if all(files) else None
    check_address(scheduler, tls)
    specs = device or []
    if not specs:
        raise UserError("wanted at least one --device to lend (c, opencl), found none")
    for spec in specs:
        open_device(spec).close()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    say(make_console(stderr=True), f"lending {', '.join(specs)} to {scheduler}; interrupt to end")
    serve_worker(scheduler, specs, stop, tls=tls, host=host)


def jobs(db: Database = None, json: Json = False) -> None:
    """List the tuning jobs a database knows."""
    with open_store(load_settings({"db": db}).db, create=False, read_only=True) as store:
        found = store.jobs()
    if json:
        print_json([{"id": j.id, "state": state_of(j), "settings": json_text.loads(j.settings)} for j in found])
        return
    console = make_console()
    if not found:
        console.print("no jobs on record; `relax-tune tune` makes one")
        return
    table = make_table("job", "state", "settings")
    for job in found:
        settings = json_text.loads(job.settings)
        shown = ", ".join(f"{k}={v}" for k, v in settings.items()) if isinstance(settings, dict) else str(settings)
        table.add_row(job.id, state_of(job), shown)
    console.print(table)
