"""`relax-tune worker` and `relax-tune jobs`."""

from __future__ import annotations

import importlib.util
import json as json_text
import signal
import threading
from datetime import datetime
from typing import Annotated

import typer

from relax_tune.database.store import open_store
from relax_tune.errors import MeasureError, UserError
from relax_tune.runtime.device.registry import open_device
from relax_tune.tuner.cli.commands.options import Ca, Certificate, Database, Json, Key, among, print_json
from relax_tune.tuner.cli.report.console import make_console, make_table, say
from relax_tune.tuner.job.job_log import SEEN, state_of
from relax_tune.tuner.measure.cluster.address import check_address, tls_files
from relax_tune.tuner.measure.cluster.processes import serve_worker
from relax_tune.tuner.measure.cluster.tls import check_files, check_scheduler
from relax_tune.tuner.settings import load_settings

SchedulerArgument = Annotated[
    str, typer.Argument(metavar="ADDRESS", help="The scheduler's address: tcp://127.0.0.1:8786 or tls://HOST:8786.")
]
DeviceOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DEVICE",
        autocompletion=among("c", "opencl", "cuda"),
        help="A device to lend: c, opencl, opencl:PART or cuda:NUMBER. May be repeated; at least one. [default: none]",
    ),
]
HostOption = Annotated[
    str | None,
    typer.Option(metavar="HOST", help="The address to listen on, such as 10.0.0.7. [default: Dask's choice]"),
]


def worker(
    scheduler: SchedulerArgument,
    device: DeviceOption = None,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    host: HostOption = None,
) -> None:
    """Lend this machine's devices to the jobs of a Dask scheduler.

    Runs until interrupted, and starts its worker process again when that is lost. Beyond loopback the address must be
    tls:// and the three certificate files must be given: here, as RELAX_TUNE_CA and so on, or in relax-tune.toml.

    Whoever holds a certificate of the authority can run programs on every worker, so make an authority for this alone.
    With openssl, once:

    \b
      openssl req -x509 -newkey rsa:3072 -nodes -days 365 -subj /CN=tuning-ca -keyout ca.key -out ca.pem

    For each machine (here gpu1), where ca.key is; ca.pem, gpu1.pem and gpu1.key then go to gpu1, ca.key goes nowhere:

    \b
      openssl req -newkey rsa:3072 -nodes -subj /CN=gpu1 -keyout gpu1.key -out gpu1.csr
      openssl x509 -req -days 365 -in gpu1.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out gpu1.pem

    The scheduler, with a certificate of its own (its page of statistics is plain HTTP and stays on its machine):

    \b
      DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES=0 dask scheduler --protocol tls --port 8786 \\
        --tls-ca-file ca.pem --tls-cert head.pem --tls-key head.key --dashboard-address 127.0.0.1:8787
    """
    settings = load_settings({"ca": ca, "certificate": certificate, "key": key})
    tls = tls_files(settings.ca, settings.certificate, settings.key)
    check_address(scheduler, tls)
    specs = device or []
    if not specs:
        raise UserError("wanted at least one --device to lend (c, opencl, cuda), found none")
    for spec in specs:
        open_device(spec).close()
    if importlib.util.find_spec("distributed") is None:
        raise MeasureError(
            "wanted Dask Distributed to lend devices, found it not installed; pip install 'relax-tune[cluster]'"
        )
    if tls is not None:
        check_files(tls, serves=True)
    check_scheduler(scheduler, tls)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    console = make_console(stderr=True)
    say(console, f"lending {', '.join(specs)} to {scheduler}; interrupt to end")
    serve_worker(scheduler, specs, stop, tls=tls, host=host, report=lambda line: say(console, line))


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
    table = make_table("job", "state", "last seen", "settings")
    for job in found:
        settings = json_text.loads(job.settings)
        settings = settings if isinstance(settings, dict) else {"settings": settings}
        shown = ", ".join(f"{k}={v}" for k, v in settings.items() if k != SEEN)
        table.add_row(job.id, state_of(job), _moment(settings.get(SEEN)), shown)
    console.print(table)


def _moment(seen: object) -> str:
    """Format Unix seconds as this machine's local time; `-` for an unknown time."""
    if not isinstance(seen, int | float) or not 0 <= seen < 2**35:
        return "-"
    return datetime.fromtimestamp(seen).isoformat(" ", "seconds")
