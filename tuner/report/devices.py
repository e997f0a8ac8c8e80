"""The figures about devices: who measured on them, and how the units that workers lend are."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from relax_tune.database.counts import UnitStats
from relax_tune.database.records import Measurement, Target
from relax_tune.tuner.quantities import seconds_text
from relax_tune.tuner.report.charts import bars, dots, unit_of
from relax_tune.tuner.report.figure import Figure, table


@dataclass(frozen=True, slots=True)
class UnitHealth:
    """A unit that a worker lends now.

    reference: seconds of the reference kernels by name; quarantine: why it gets no batch, empty if it does
    """

    worker: str
    host: str
    unit: str
    label: str
    about: str
    reference: dict[str, float]
    quarantine: str
    silent_secs: float


def moment(seen: float) -> str:
    """Format Unix seconds as a date and time in UTC; `-` for an unknown time."""
    if not 0 < seen < 2**35:
        return "-"
    return datetime.fromtimestamp(seen, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def facts_of(target: Target) -> list[tuple[str, str]]:
    """List what is known of a device: names, fingerprint, reference times."""
    facts = [("kind", target.kind), ("name", target.name), ("key", target.key)]
    facts += [(name, value) for name, value in target.fingerprint if value not in (target.kind, target.name)]
    facts += [(f"reference kernel `{name}`", seconds_text(secs)) for name, secs in target.reference]
    return facts


def recorded_units(units: Sequence[UnitStats], records: Sequence[Measurement], anchor: str) -> Figure:
    """Make the figure of the units that measured for a device."""
    title = "Units that measured for this device"
    if not units:
        return Figure(anchor, title, "No measurement is on record for this device; `relax-tune tune` makes some.")
    clocks: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    heat: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for r in records:
        where = (r.worker, r.host, r.unit)
        if r.clock_mhz is not None:
            clocks[where].append(r.clock_mhz)
        if r.celsius is not None:
            heat[where].append(r.celsius)
    rows, drawn = [], []
    for u in units:
        where = (u.worker, u.host, u.unit)
        name = u.worker or u.host or u.unit or "unnamed"
        drawn += [
            {"name": name, "value": u.measurements - u.failed, "part": "with a time"},
            {"name": name, "value": u.failed, "part": "failed"},
        ]
        rows.append(
            [
                *(text or "-" for text in where),
                f"{u.measurements:,}",
                f"{u.failed:,}",
                f"{statistics.median(clocks[where]):.0f}" if clocks[where] else "-",
                f"{max(heat[where]):.0f}" if heat[where] else "-",
                moment(u.last),
            ]
        )
    total, failed = sum(u.measurements for u in units), sum(u.failed for u in units)
    summary = f"{len(units)} {'unit' if len(units) == 1 else 'units'} made {total:,} measurements, of which {failed:,} failed."
    numbers = ("measurements", "failed", "median clock (MHz)", "hottest (°C)")
    columns = ("worker", "host", "unit", *numbers, "last")
    chart = bars(drawn, x="measurements (count)", name="worker", parts=("with a time", "failed"))
    return Figure(anchor, title, summary, chart, table(columns, rows, numbers))


def lent_units(units: Sequence[UnitHealth], anchor: str) -> Figure:
    """Make the figure of the units that a scheduler's workers lend now, with their reference times and quarantines."""
    title = "Units lent now"
    if not units:
        return Figure(anchor, title, "The scheduler has no workers; `relax-tune worker` lends devices.")
    names = sorted({name for u in units for name in u.reference})
    unit, size = unit_of([secs for u in units for secs in u.reference.values()])
    drawn = [
        {"name": f"{u.worker} {u.label}", "value": secs / size, "series": name}
        for u in units
        for name, secs in sorted(u.reference.items())
    ]
    rows = [
        [
            *(u.worker, u.host, u.unit, u.label, u.about.strip(" |")),
            *(seconds_text(u.reference.get(name)) for name in names),
            f"quarantined: {u.quarantine}" if u.quarantine else "lent",
            f"{u.silent_secs:.0f}",
        ]
        for u in units
    ]
    kept = [u.worker for u in units if u.quarantine]
    summary = f"{len(units)} {'unit is' if len(units) == 1 else 'units are'} known to the scheduler; "
    summary += f"quarantined: {', '.join(kept)}." if kept else "none is quarantined."
    chart = dots(drawn, x=f"time of the reference kernel ({unit})", name="unit", series=names) if drawn else None
    columns = ("worker", "host", "unit", "class", "device", *names, "state", "silent (s)")
    return Figure(anchor, title, summary, chart, table(columns, rows, (*names, "silent (s)")))
