"""The sections of a report: each device with its figures, and its tasks."""

from __future__ import annotations

from collections.abc import Sequence

from relax_tune.tuner.quantities import seconds_text
from relax_tune.tuner.report.devices import UnitHealth, facts_of, lent_units, recorded_units
from relax_tune.tuner.report.figure import Figure, Section
from relax_tune.tuner.report.pictures import convergence, failures, model_time, regret, time_over_shape
from relax_tune.tuner.report.subject import DeviceView, Facts, Subject

TASKS = 12
"""Tasks with a picture of their own, for each device."""


def sections_of(subject: Subject, most_tasks: int = TASKS, lent: Sequence[UnitHealth] | None = None) -> list[Section]:
    """Return all sections of a subject. most_tasks: tasks of a device with a picture; lent: units of a scheduler, if asked"""
    found = [Section("overview", "Overview", (*subject.facts, *_counts(subject)), subject.notes)]
    for number, view in enumerate(subject.devices, 1):
        found += [device_section(view, f"device{number}"), tasks_section(view, f"device{number}", most_tasks)]
    if lent is not None:
        found.append(Section("fleet", "Fleet", figures=(lent_units(lent, "fleet-units"),)))
    return found


def device_section(view: DeviceView, anchor: str) -> Section:
    """Return the section of a device: its facts, and the figures over all tasks."""
    tasks = view.tasks
    figures: list[Figure] = [
        model_time(tasks, f"{anchor}-time"),
        regret(tasks, f"{anchor}-regret"),
        convergence(tasks, f"{anchor}-trials", "trials"),
        convergence(tasks, f"{anchor}-seconds", "seconds"),
        failures(tasks, f"{anchor}-failures"),
        recorded_units(view.units, [r for t in tasks for r in t.records], f"{anchor}-units"),
    ]
    title = f"Device {view.target.kind}: {view.target.name}"
    return Section(anchor, title, tuple(facts_of(view.target)), view.notes, tuple(figures))


def tasks_section(view: DeviceView, anchor: str, most: int) -> Section:
    """Return the section of a device's tasks: a figure for each of the costliest."""
    shown = view.tasks[:most]
    left = len(view.tasks) - len(shown)
    notes = (f"The {len(shown)} costliest of {len(view.tasks)} tasks have a picture.",) if left else ()
    figures = tuple(time_over_shape(t, f"{anchor}-task{n}") for n, t in enumerate(shown, 1))
    return Section(f"{anchor}-tasks", f"Tasks on {view.target.name}", (), notes, figures)


def _counts(subject: Subject) -> Facts:
    tasks = [t for view in subject.devices for t in view.tasks]
    if not tasks:
        return ()
    times = [r.measured_at for t in tasks for r in t.shown_records if r.measured_at > 0]
    spent = sum(r.build_secs + sum(r.samples_secs) for t in tasks for r in t.shown_records)
    counted = (
        ("tasks", str(len(tasks))),
        ("candidates", f"{sum(t.trials for t in tasks):,}"),
        ("measurements", f"{sum(len(t.shown_records) for t in tasks):,}"),
        ("failed measurements", f"{sum(len(t.failures) for t in tasks):,}"),
        ("time of compilers and timed calls", seconds_text(spent)),
    )
    return (*counted, ("from first to last record", seconds_text(max(times) - min(times)))) if times else counted
