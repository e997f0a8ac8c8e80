"""`relax-tune scheduler`, `worker` and `workers`.

Tests: `tests/tuner/measure/cluster/test_tls.py`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer

from relax_tune.errors import MeasureError, UserError
from relax_tune.runtime.device.registry import devices_of_class, open_device
from relax_tune.tuner.cli.commands.options import Ca, Certificate, Key, Logs, Metrics, among
from relax_tune.tuner.cli.report.console import make_console
from relax_tune.tuner.cli.report.logs import teller
from relax_tune.tuner.cli.report.view import view
from relax_tune.tuner.measure.cluster.address import TlsFiles, check_address, tls_files
from relax_tune.tuner.measure.cluster.client import SchedulerConnection
from relax_tune.tuner.measure.cluster.fleet import label_of, silence_of
from relax_tune.tuner.measure.cluster.processes import serve_worker, start_scheduler
from relax_tune.tuner.measure.cluster.scraping import check_scraping
from relax_tune.tuner.measure.cluster.tls import ANSWER_SECS, check_files, check_scheduler
from relax_tune.tuner.measure.cluster.trust.expiry import expiry_warnings
from relax_tune.tuner.measure.cluster.trust.loopback import place_of
from relax_tune.tuner.measure.reference import TOLERANCE
from relax_tune.tuner.report.listings import lent_subject
from relax_tune.tuner.report.subject import Subject
from relax_tune.tuner.settings import Logs as LogForm
from relax_tune.tuner.settings import load_settings

OPEN_SECS = 20.0
SchedulerArgument = Annotated[
    str, typer.Argument(metavar="ADDRESS", help="The scheduler's address: tls://127.0.0.1:8786 or tls://HOST:8786.")
]
DeviceOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DEVICE",
        autocompletion=among("c", "opencl", "cuda", "webgpu"),
        help="A device to lend: c, opencl, opencl:PART, cuda (every GPU), cuda:NUMBER or webgpu. May be repeated; at least one. "
        "[default: none]",
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The worker's name in records, before its devices. [default: this host's name]"),
]
ToleranceOption = Annotated[
    float,
    typer.Option(metavar="FACTOR", help="How far reference times of one kind of device may differ, above 1."),
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
    name: NameOption = None,
    tolerance: ToleranceOption = TOLERANCE,
    logs: Logs = None,
) -> None:
    """Lend this machine's devices to the jobs of a scheduler.

    Runs until interrupted, with one worker process per physical device, each started again when it is lost. Jobs ask for a class of
    device, such as cuda; a batch goes only to the kind of device that it is for. A reference kernel is timed at the start and every
    hour: a device that becomes slower or faster than --tolerance allows is no longer lent, until it is as at the start.

    Beyond loopback the address must be tls:// and the three certificate files must be given: here, as RELAX_TUNE_CA and so on, or in
    relax-tune.toml. `relax-tune certificate` makes them, and takes them back. A worker measures what any job of the authority sends,
    and kernels are programs, so make an authority for one team.

    `relax-tune scheduler` starts the scheduler, with its certificate.
    """
    settings = load_settings({"ca": ca, "certificate": certificate, "key": key, "logs": logs})
    tls = tls_files(settings.ca, settings.certificate, settings.key)
    check_address(scheduler, tls)
    specs = device or []
    if not specs:
        raise UserError("expected at least one --device to lend (c, opencl, cuda, webgpu), got none")
    if tolerance <= 1:
        raise UserError(f"--tolerance expects a factor above 1, got {tolerance:g}")
    _need_dask()
    units = units_of(specs)
    place, own = place_of(scheduler, tls, "worker", ANSWER_SECS)
    check_files(own, ("worker",))
    check_scheduler(place, own)
    stop, tell = stop_on_signal(), _warned_teller(settings.logs, tls, "worker")
    threads = []
    for unit, lent in units.items():
        called = f"{name or socket.gethostname()}/{'+'.join(lent)}"
        tell(f"lending {', '.join(lent)} ({unit}) to {scheduler} as {called}; interrupt to end")
        serve = partial(
            serve_worker, scheduler, lent, stop, name=called, tolerance=tolerance, tls=tls, host=host,
            report=tell,
        )  # fmt: skip
        threads.append(threading.Thread(target=serve))
        threads[-1].start()
    for thread in threads:
        thread.join()


def units_of(specs: list[str]) -> dict[str, list[str]]:
    """Return the devices of each physical unit, by its name. Raises UserError for two devices of a class on one unit."""
    units: dict[str, list[str]] = {}
    for spec in dict.fromkeys(one for given in specs for one in devices_of_class(given)):
        device = open_device(spec)
        unit = device.info.unit or spec
        device.close()
        if any(label_of(spec) == label_of(other) for other in units.get(unit, ())):
            raise UserError(f"expected one device of a class per unit, got {spec} and {units[unit][0]} both on {unit}")
        units.setdefault(unit, []).append(spec)
    return units


def _warned_teller(form: LogForm, tls: TlsFiles | None, command: str) -> Callable[[str], None]:
    """Return the function that a command says its sentences with; it has named certificates that end soon."""
    tell = teller(form, make_console(stderr=True), command)
    for line in expiry_warnings(tls):
        tell(line)
    return tell


def _need_dask() -> None:
    if importlib.util.find_spec("distributed") is None:
        raise MeasureError(
            "expected Dask Distributed for a scheduler and workers, got it not installed; pip install 'relax-tune[cluster]'"
        )


def stop_on_signal() -> threading.Event:
    """Return an event that Ctrl-C and termination set."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def scheduler(
    host: Annotated[str, typer.Option(metavar="HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", help="The port to listen on.")] = 8786,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    metrics: Metrics = None,
    logs: Logs = None,
) -> None:
    """Start the scheduler that connects jobs and workers.

    Runs until interrupted. Beyond loopback the three certificate files must be given; `relax-tune certificate` makes them. On loopback
    it makes its own, and only workers and jobs of the same user fit.

    --metrics tells Prometheus of the fleet: units by state, and of each unit its batches, reference times and quarantine.

    It keeps nothing: when it is started again, workers come back by themselves and the same `relax-tune tune` goes on.
    """
    settings = load_settings({"ca": ca, "certificate": certificate, "key": key, "logs": logs})
    tls = tls_files(settings.ca, settings.certificate, settings.key)
    _need_dask()
    if tls is not None:
        check_files(tls, ("scheduler",))
    if metrics is not None:
        check_scraping(metrics)
    stop, tell = stop_on_signal(), _warned_teller(settings.logs, tls, "scheduler")
    process, address = start_scheduler(host, port, tls=tls, metrics=metrics, report=tell)
    with process:
        tell(f"scheduler at {address}; interrupt to end")
        while not stop.is_set() and process.wait(0.2) is None:
            pass
        if not stop.is_set():
            raise MeasureError(
                f"expected the scheduler to run until interrupted, got it ended; it printed: {process.log()}"
            )


@view
def workers(
    scheduler: SchedulerArgument,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
) -> Subject:
    """List the units that workers lend to a scheduler."""
    settings = load_settings({"ca": ca, "certificate": certificate, "key": key})
    tls = tls_files(settings.ca, settings.certificate, settings.key)
    with contextlib.closing(SchedulerConnection(scheduler, tls, OPEN_SECS)) as connection:
        devices = connection.devices()
    return lent_subject(devices, silence_of(len({device.address for device in devices})))
