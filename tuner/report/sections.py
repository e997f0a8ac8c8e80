"""The sections of a report: each device with its figures, and its tasks.

Tests: `tests/tuner/report/test_report.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from relax_tune.database.counts import TaskStats, UnitStats
from relax_tune.database.records import Target
from relax_tune.database.store import Store
from relax_tune.tuner.report.analysis import comparison, importance, roofline
from relax_tune.tuner.report.devices import recorded_units
from relax_tune.tuner.report.listings import target_facts
from relax_tune.tuner.report.pictures import convergence, failures, model_time, regret, time_over_shape, variants_table
from relax_tune.tuner.report.recorded import RecordedTask, operators_of
from relax_tune.tuner.report.subject import Cell, Facets, Facts, Figure, PageLink, Section, Table, table
from relax_tune.tuner.report.texts import moment_text, named, seconds_text

TASKS = 12
"""Default number of tasks of a device with a separate figure."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a report.

    Attributes:
        tasks: Number of tasks of a device with a separate figure.
        records: Records of a device to read for figures; None for all.
        named: A part of the names of the tasks to show; empty for all.
        other: Another store, to compare with, and its name; None without.
    """

    tasks: int = TASKS
    records: int | None = None
    named: str = ""
    other: tuple[Store, str] | None = None


@dataclass(frozen=True)
class DeviceView:
    """A device with the tasks to show.

    Attributes:
        tasks: Tasks with their records, the costliest first; empty where reading them would take too long.
        notes: Sentences on invalid records, and on what is left out.
        counts: Counts of the tasks in the database.
        others: The tasks of another store, to compare with; None without.
    """

    target: Target
    tasks: tuple[RecordedTask, ...]
    units: tuple[UnitStats, ...]
    notes: tuple[str, ...] = ()
    counts: tuple[TaskStats, ...] = ()
    others: tuple[RecordedTask, ...] | None = None

    @property
    def device(self) -> str:
        """The device's name, with the start of its key: two devices may have one name."""
        return f"{self.target.kind}: {self.target.name} ({self.target.key[:6]})"


def sections_of(devices: Sequence[DeviceView], facts: Facts, notes: Sequence[str], limits: Limits) -> list[Section]:
    """Return all sections of a report: an overview with these facts and notes, and the devices."""
    sections = [Section("overview", "Overview", (*facts, *_counts(devices)), tuple(notes))]
    for number, view in enumerate(devices, 1):
        anchor = f"device{number}"
        view = replace(view, tasks=tuple(t for t in view.tasks if limits.named in t.name))
        sections += [
            device_section(view, anchor, limits.other[1] if limits.other else ""),
            *tasks_sections(view, anchor, limits.tasks),
        ]
    return sections


def device_section(view: DeviceView, anchor: str, name: str = "") -> Section:
    """Return the section of a device: its facts, and the figures over all tasks. name: of the records to compare with"""
    tasks = view.tasks
    figures: list[Figure] = [
        model_time(tasks, f"{anchor}-time"),
        regret(tasks, f"{anchor}-regret"),
        convergence(tasks, f"{anchor}-trials", "trials"),
        convergence(tasks, f"{anchor}-seconds", "seconds"),
        failures(tasks, f"{anchor}-failures"),
        importance(tasks, f"{anchor}-importance"),
        roofline(tasks, f"{anchor}-roofline"),
    ]
    if view.others is not None:
        figures.insert(0, comparison(tasks, view.others, name, f"{anchor}-comparison"))
    units = recorded_units(view.units, [r for t in tasks for r in t.records], f"{anchor}-units")
    title = f"Device {view.target.kind}: {view.target.name}"
    shown = figures if tasks or not view.counts else ()
    return Section(anchor, title, target_facts(view.target), view.notes, (*shown, units), device=view.device)


def tasks_sections(view: DeviceView, anchor: str, most: int) -> list[Section]:
    """Return the sections of a device's tasks: their counts, a figure for each of the costliest, and the variants that these name."""
    shown = view.tasks[:most]
    notes = (f"The {len(shown)} costliest of {len(view.tasks)} tasks have a picture.",)
    figures = tuple(time_over_shape(t, f"{anchor}-task{n}") for n, t in enumerate(shown, 1))
    tables = (_tasks_table(view),) if view.counts else ()
    variants = tuple(variants_table(t, f"{anchor}-task{n}") for n, t in enumerate(shown, 1) if t.named_variants)
    name, shown_notes = view.target.name, notes if len(view.tasks) > most else ()
    pictures = Section(f"{anchor}-tasks", f"Tasks on {name}", (), shown_notes, figures, tables, device=view.device)
    if not variants:
        return [pictures]
    return [pictures, Section(f"{anchor}-variants", f"Variants on {name}", tables=variants, device=view.device)]


def _tasks_table(view: DeviceView) -> Table:
    pages = ("devices", view.target.key, "tasks")
    rows: list[list[Cell]] = []
    for c in view.counts:
        numbers = [f"{c.measurements:,}", f"{c.failed:,}", moment_text(c.last)]
        rows.append([PageLink(named(c.workload, c.hint), (*pages, c.workload)), *numbers])
    names = [named(c.workload, c.hint) for c in view.counts]
    facets = [Facets(name, operators_of(name)) for name in names]
    return table(("task", "measurements", "failed", "last"), rows, ("measurements", "failed"), facets=facets)


def _counts(devices: Sequence[DeviceView]) -> Facts:
    tasks = [t for view in devices for t in view.tasks]
    if not tasks:
        counts = [c for view in devices for c in view.counts]
        measured, failed = sum(c.measurements for c in counts), sum(c.failed for c in counts)
        numbers = (("tasks", len(counts)), ("measurements", measured), ("failed measurements", failed))
        return tuple((name, f"{number:,}") for name, number in numbers) if counts else ()
    records = [r for t in tasks for r in t.shown_records]
    times = [r.measured_at for r in records if r.measured_at > 0]
    return (
        ("tasks", str(len(tasks))),
        ("candidates", f"{sum(t.trials for t in tasks):,}"),
        ("measurements", f"{len(records):,}"),
        ("failed measurements", f"{sum(len(t.failures) for t in tasks):,}"),
        ("time of compilers and timed calls", seconds_text(sum(r.build_secs + sum(r.samples_secs) for r in records))),
        *((("from first to last record", seconds_text(max(times) - min(times))),) if times else ()),
    )
