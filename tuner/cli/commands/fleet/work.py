"""`relax-tune jobs work`: the service that runs submitted jobs.

Tests: `tests/tuner/service/test_jobs_commands.py`.
"""

from __future__ import annotations

import contextlib
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import typer

from relax_tune.database.jobs.queue import HOLD_SECS, open_queue
from relax_tune.errors import TryAgainLater, UserError
from relax_tune.tuner.cli.commands.fleet.cluster import stop_on_signal
from relax_tune.tuner.cli.commands.options import Json, Metrics, SettingFlags, among, print_json, with_settings
from relax_tune.tuner.cli.report.console import make_console
from relax_tune.tuner.cli.report.logs import teller
from relax_tune.tuner.measure.cluster.address import check_needed, tls_files
from relax_tune.tuner.service.content import ContentStore
from relax_tune.tuner.service.service import Service, ServiceOptions
from relax_tune.tuner.service.service_metrics import ServiceMetrics
from relax_tune.tuner.service.submission import files_of
from relax_tune.tuner.settings import Settings


@with_settings("work")
def work(
    *,
    settings: SettingFlags,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS",
            autocompletion=among("c", "opencl", "cuda", "webgpu"),
            help="A class of device to take jobs for: c, opencl, cuda, webgpu. May be repeated. [default: all, with a --scheduler]",
        ),
    ] = None,
    slots: Annotated[int, typer.Option(metavar="N", help="Jobs to run at a time, each in its own process.")] = 1,
    until_empty: Annotated[
        bool,
        typer.Option(
            "--until-empty",
            help="End when no job is queued, not even for later, instead of waiting for more. The exit code is 4 if jobs are left "
            "that this unit may not measure.",
        ),
    ] = False,
    hold_secs: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="A service not heard of for so long loses its job to another. The shortest time of all services counts, at least 60.",
        ),
    ] = HOLD_SECS,
    metrics: Metrics = None,
    json: Json = False,
) -> None:
    """Run submitted jobs, on any number of machines at once.

    Takes the jobs of the highest priority, the oldest first, and measures here or on the workers of --scheduler. State, progress and
    logs go to the database, artifacts to --files. Each job is done once, even if services are killed: the job of a lost service
    goes to another, which continues from the records. Interrupt it (or SIGTERM) to end it; its job goes back to the queue.
    """
    chosen = settings.load()
    check_needed(chosen.scheduler, *(settings.given[name] for name in ("ca", "certificate", "key")))
    tls_files(chosen.ca, chosen.certificate, chosen.key)
    if chosen.scheduler is None and not device:
        raise UserError("expected at least one --device to take jobs for, or a --scheduler, got neither")
    if slots < 1 or not 0 < hold_secs < math.inf:
        raise UserError(f"--slots and --hold-secs want finite numbers above 0, got {slots} and {hold_secs:g}")
    options = _options(chosen, device, hold_secs)
    ended, left = _served(chosen, options, slots, until_empty, metrics)
    if json:
        print_json({"ended": ended})
    if left:
        raise TryAgainLater(f"queued jobs are left to other services: {left}")


def _served(
    chosen: Settings, options: ServiceOptions, slots: int, until_empty: bool, metrics: str | None
) -> tuple[int, str]:
    """Serve until a signal, or until no job is queued. Returns the number of ended jobs, and why others are left to other services."""
    counts = None if metrics is None else ServiceMetrics()
    stop, tell = stop_on_signal(), teller(chosen.logs, make_console(stderr=True), "work")
    with (
        contextlib.nullcontext() if counts is None or metrics is None else counts.served(metrics) as scraped,
        open_queue(chosen.db, create=True, wait_secs=chosen.wait_secs, notice=tell) as queue,
        ThreadPoolExecutor(slots, "job") as pool,
    ):
        if scraped is not None:
            tell(f"metrics at {scraped}")
        tell(f"taking jobs of {queue.where} for {', '.join(options.labels or ['every device'])}; interrupt to end")
        service = Service(queue, options, stop, tell, *([] if counts is None else [counts.observe]))
        try:
            ended = sum(pool.map(service.serve, [until_empty] * slots))
            return ended, "" if stop.is_set() else service.left_to_others()
        finally:
            stop.set()


def _options(chosen: Settings, device: list[str] | None, hold_secs: float) -> ServiceOptions:
    """Return the options of the service. Raises UserError for a folder of files that cannot be used."""
    names = ("db", "scheduler", "wait_secs", "ca", "certificate", "key", "trust_model")
    own = {name: getattr(chosen, name) for name in names}
    options = ServiceOptions(own, files_of(chosen), device or None, hold_secs, min(3.0, hold_secs / 4))
    ContentStore(options.files)
    return options
