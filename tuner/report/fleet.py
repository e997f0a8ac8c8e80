"""The units that a scheduler's workers lend now, as reports show them."""

from __future__ import annotations

import contextlib

from relax_tune.tuner.measure.cluster.address import TlsFiles
from relax_tune.tuner.measure.cluster.client import SchedulerConnection
from relax_tune.tuner.report.devices import UnitHealth


def lent_now(scheduler: str, tls: TlsFiles | None, wait_secs: float) -> list[UnitHealth]:
    """Ask a scheduler for its units. Raises FleetAway when it does not answer in time."""
    with contextlib.closing(SchedulerConnection(scheduler, tls, wait_secs)) as connection:
        return [
            UnitHealth(d.worker, d.host, d.unit, d.label, d.about, dict(d.reference), d.quarantine, d.silent_secs)
            for d in connection.devices()
        ]
