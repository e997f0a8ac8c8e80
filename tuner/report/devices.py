"""The figures of devices: the units that measured, and the units that workers lend.

Tests: `tests/tuner/report/test_report.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from relax_tune.database.counts import UnitStats
from relax_tune.database.records import Measurement
from relax_tune.database.reference import kernels_of
from relax_tune.tuner.measure.cluster.address import TlsFiles
from relax_tune.tuner.measure.cluster.client import SchedulerConnection
from relax_tune.tuner.measure.cluster.fleet import LentDevice
from relax_tune.tuner.report.charts import FAILED, TIMED, bars, dots, unit_of
from relax_tune.tuner.report.listings import lent_table, units_table
from relax_tune.tuner.report.subject import Figure, Section


def recorded_units(units: Sequence[UnitStats], records: Sequence[Measurement], anchor: str) -> Figure:
    """Make the figure of the units that measured on a device."""
    title = "Units that measured on this device"
    if not units:
        return Figure(anchor, title, "No measurement is on record for this device; `relax-tune tune` makes some.")
    parts = []
    for u in units:
        name = u.worker or u.host or u.unit or "unnamed"
        parts.append({"name": name, "value": u.measurements - u.failed, "part": TIMED})
        parts.append({"name": name, "value": u.failed, "part": FAILED})
    total, failed = sum(u.measurements for u in units), sum(u.failed for u in units)
    summary = f"{len(units)} {'unit' if len(units) == 1 else 'units'} with {total:,} measurements; {failed:,} failed."
    chart = bars(parts, x="measurements (count)", name="worker", parts=(TIMED, FAILED))
    return Figure(anchor, title, summary, chart, units_table(units, records))


def lent_units(devices: Sequence[LentDevice], anchor: str) -> Figure:
    """Make the figure of the units that a scheduler's workers lend now, with their reference times and quarantines."""
    title = "Units lent now"
    if not devices:
        return Figure(anchor, title, "The scheduler has no workers; `relax-tune worker` lends devices.")
    kernels = sorted({name for d in devices for name in kernels_of(d.reference)})
    unit, size = unit_of([d.reference[name] for d in devices for name in kernels_of(d.reference)])
    times = [
        {"name": f"{d.worker} {d.label}", "value": d.reference[name] / size, "series": name}
        for d in devices
        for name in kernels_of(d.reference)
    ]
    quarantined = [d.worker for d in devices if d.quarantine]
    summary = f"{len(devices)} {'unit is' if len(devices) == 1 else 'units are'} known to the scheduler; "
    summary += f"quarantined: {', '.join(quarantined)}." if quarantined else "none is quarantined."
    chart = dots(times, x=f"time of the reference kernel ({unit})", name="unit", series=kernels) if times else None
    return Figure(anchor, title, summary, chart, lent_table(devices))


def fleet_section(devices: Sequence[LentDevice]) -> Section:
    """Return the section of the units that a scheduler's workers lend."""
    return Section("fleet", "Fleet", figures=(lent_units(devices, "fleet-units"),))


def lent_now(scheduler: str, tls: TlsFiles | None, wait_secs: float) -> list[LentDevice]:
    """Ask a scheduler for the units that its workers lend. Raises `FleetAway` when it does not answer in time."""
    with contextlib.closing(SchedulerConnection(scheduler, tls, wait_secs)) as connection:
        return list(connection.devices())
