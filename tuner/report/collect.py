"""Collects the subjects of reports and of the dashboard: a database, a job, a model or an artifact, by the tasks of each device.

Tests: `tests/tuner/report/test_report.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from relax_tune.database.counts import TaskStats
from relax_tune.database.jobs.submitted import SubmittedJob
from relax_tune.database.records import REGIMES, JobRecord, PlanRecord, Target, Workload, parse_json
from relax_tune.database.store import Store
from relax_tune.errors import DatabaseError, UserError
from relax_tune.runtime.artifact import Artifact
from relax_tune.tuner.job.device_job import DeviceJob
from relax_tune.tuner.plan.plans import shape_of
from relax_tune.tuner.plan.stored_plans import StoredPlan, read_plan
from relax_tune.tuner.plan.task_rows import symbol_labels
from relax_tune.tuner.report.analysis import call_graph
from relax_tune.tuner.report.listings import job_facts, run_facts, settings_of_run, targets_table
from relax_tune.tuner.report.recorded import RecordedTask
from relax_tune.tuner.report.sections import DeviceView, Limits, sections_of
from relax_tune.tuner.report.subject import Facts, Section, Subject
from relax_tune.tuner.report.texts import named


@dataclass
class _Reader:
    """Reads the tasks of one target."""

    store: Store
    target: Target
    notes: list[str] = field(default_factory=list)

    def plans(self) -> dict[str, list[PlanRecord]]:
        """Return all versions of the plans by workload, the newest last."""
        plans: dict[str, list[PlanRecord]] = {}
        for record in self.store.plans(self.target.key):
            plans.setdefault(record.workload, []).append(record)
        return plans

    def read(self, record: PlanRecord | None) -> StoredPlan | None:
        """Return a plan; None, with a note, for an invalid one."""
        if record is None:
            return None
        try:
            return read_plan(record)
        except DatabaseError as error:
            self.notes.append(f"left out a plan: {error}")
            return None

    def tasks(self, workload: Workload, plan: StoredPlan | None) -> list[RecordedTask]:
        """Return the tasks of a workload: one for each state of the caches with records."""
        tasks = []
        for regime in REGIMES:
            records = self.store.query(self.target.key, workload.key, regime=regime)
            if records:
                suffix = "" if regime == "warm" else f" ({regime} caches)"
                name = f"{named(workload.key, workload.hint)}{suffix}"
                tasks.append(RecordedTask(workload.key, name, records, plan, text=workload.text, regime=regime))
        return tasks

    def view(self, tasks: Sequence[RecordedTask], counts: Sequence[TaskStats] = ()) -> DeviceView:
        """Return the device with these tasks. Tasks of one name get the start of their keys."""
        times = Counter(t.name for t in tasks)
        shown = [t if times[t.name] == 1 else replace(t, name=f"{t.name} {t.key[:6]}") for t in tasks]
        shown.sort(key=lambda t: (-(t.secs or 0.0) * (t.calls or 1), t.name, t.key))
        units = tuple(self.store.units(self.target.key))
        return DeviceView(self.target, tuple(shown), units, tuple(self.notes), tuple(counts))


def of_device(
    store: Store,
    target: Target,
    workloads: Collection[str] | None = None,
    runs: frozenset[str] | None = None,
    most: int | None = None,
) -> DeviceView:
    """Return a device with its newest plans.

    Args:
        workloads: Keys of the ones to show; None for all.
        runs: Ids of the runs to show; None for all.
        most: Largest number of records to read. Of more, only the counts are shown.
    """
    reader = _Reader(store, target)
    counts = [c for c in store.tasks(target.key, runs) if workloads is None or c.workload in workloads]
    keys = {c.workload for c in counts}
    total = sum(c.measurements for c in store.tasks(target.key) if c.workload in keys)
    if most is not None and total > most:
        reader.notes.append(
            f"The pictures are on the page of each task: one page of all {total:,} measurements would be slow. "
            "`relax-tune report` draws them in one file."
        )
        return reader.view((), counts)
    plans = reader.plans()
    tasks = []
    for workload in store.known_workloads(keys):
        newest = plans.get(workload.key, [None])[-1]
        tasks += [replace(t, runs=runs) for t in reader.tasks(workload, reader.read(newest))]
    return reader.view([t for t in tasks if runs is None or t.shown_records], counts)


def of_database(store: Store, limits: Limits) -> Subject:
    """Return all devices of a database."""
    devices = [of_device(store, target, most=limits.records) for target in store.targets()]
    empty = "Nothing is on record in this database; `relax-tune tune` measures a model."
    return _subject("Database of measurements", devices, (), () if devices else (empty,), limits, store)


def of_target(store: Store, target: Target, limits: Limits, workload: Workload | None = None) -> Subject:
    """Return one device of a database: all its tasks and their counts, or one task."""
    if workload is not None:
        view, name = of_device(store, target, [workload.key]), named(workload.key, workload.hint)
        return _subject(f"Task {name}", [view], (("task", workload.key),), (), limits, store)
    view, stats = of_device(store, target, most=limits.records), store.stats(target.key)
    whole = _subject(f"Device {target.kind}: {target.name}", [view], (), (), limits, store)
    counts = () if stats is None else (Section("counts", "Records", tables=(targets_table([stats]),)),)
    return replace(whole, sections=(*whole.sections, *counts))


def of_run(store: Store, run: JobRecord, limits: Limits) -> Subject:
    """Return what one tuning run measured."""
    return _of_runs(store, f"Tuning run {run.id.partition('@')[0]}", [run], run_facts(run), limits)


def runs_of(store: Store, job: SubmittedJob) -> list[JobRecord]:
    """List the tuning runs of a submitted job."""
    return [run for run in store.jobs() if settings_of_run(run).get("submitted") == job.id]


def of_submitted(store: Store, job: SubmittedJob, limits: Limits) -> Subject:
    """Return what the runs of a submitted job measured."""
    return _of_runs(store, f"Job {job.id}: {job.name}", runs_of(store, job), job_facts(job), limits)


def _of_runs(store: Store, title: str, runs: Sequence[JobRecord], facts: Facts, limits: Limits) -> Subject:
    ids = frozenset(run.id for run in runs)
    views = [of_device(store, target, runs=ids, most=limits.records) for target in store.targets()]
    views = [view for view in views if view.counts]
    empty = "Nothing is on record of this job: it has not measured yet, or all it asked for was on record."
    return _subject(title, views, facts, () if views else (empty,), limits, store)


def of_plan_set(store: Store, model: str, limits: Limits) -> Subject:
    """Return the tasks of a model by its newest plans, on every device that has some."""
    workloads = {t: [w for w, m in models_of(store, t.key).items() if model in m] for t in store.targets()}
    views = [of_device(store, target, keys, most=limits.records) for target, keys in workloads.items() if keys]
    if not views:
        raise UserError(f"expected plans of the model {model!r:.80}, {store.where} has none; see `relax-tune db stats`")
    return _subject(f"Model {model[:12]}", views, (("model", model),), (), limits, store)


def _subject(
    title: str, devices: Sequence[DeviceView], facts: Facts, notes: Sequence[str], limits: Limits, store: Store
) -> Subject:
    if limits.other is not None:
        devices = [replace(view, others=_others(view, *limits.other)) for view in devices]
    return Subject(title, tuple(sections_of(devices, (*facts, ("database", store.where)), notes, limits)))


def _others(view: DeviceView, store: Store, name: str) -> tuple[RecordedTask, ...]:
    """Return the tasks of another store on the same device, or of the run of this name."""
    target = store.target(view.target.key)
    if target is None:
        return ()
    runs = frozenset(run.id for run in store.jobs() if run.id == name)
    return of_device(store, target, {t.key for t in view.tasks}, runs or None).tasks


def models_of(store: Store, target: str) -> dict[str, set[str]]:
    """Return the keys of the models that have plans on a target, by workload."""
    models: dict[str, set[str]] = {}
    for record in store.plans(target):
        document = parse_json(record.entries, "plan entries")
        if isinstance(document, dict) and isinstance(model := document.get("model"), str):
            models.setdefault(record.workload, set()).add(model)
    return models


def of_artifact(store: Store, artifact: Artifact, name: str, limits: Limits) -> Subject:
    """Return the tasks that an artifact calls, with its plans. Raises UserError for one of a device without records."""
    extra = artifact.manifest.get("extra")
    key = str(extra.get("target", "")) if isinstance(extra, dict) else ""
    target = store.target(key) if key else None
    if target is None:
        raise UserError(
            f"{name}: expected records of the device it was built for, {store.where} has none; give the database it was tuned with by --db"
        )
    sites = [call for program in artifact.programs for call in program.calls if call.task]
    calls = Counter(call.task for call in sites)
    dispatched = {call.task: {v.key for v in call.variants} for call in sites}
    reader = _Reader(store, target)
    plans = reader.plans()
    tasks = []
    for workload in store.workloads(None):
        if workload.key not in calls:
            continue
        versions = [k for record in plans.get(workload.key, []) if (k := reader.read(record)) is not None]
        plan = next((k for k in reversed(versions) if set(k[1]) == dispatched[workload.key]), None)
        if plan is None:
            reader.notes.append(
                f"{named(workload.key, workload.hint)}: the database has no plan of the variants in this artifact"
            )
        tasks += [replace(t, calls=calls[workload.key]) for t in reader.tasks(workload, plan)]
    unknown = len(calls) - len({t.key for t in tasks})
    notes = [f"{unknown} of {len(calls)} tasks have no records in this database."] if unknown else []
    if any(program.name != "main" for program in artifact.programs):
        notes.append("Calls are counted once for each function; loops may run them more often.")
    facts = (("artifact", name), ("functions", ", ".join(artifact.functions)))
    subject = _subject(f"Artifact {name}", [reader.view(tasks)], facts, notes, limits, store)
    graphs = tuple(call_graph(p, tasks, f"calls{n}") for n, p in enumerate(artifact.programs, 1))
    overview, *others = subject.sections
    return replace(subject, sections=(overview, Section("calls", "Calls", figures=graphs), *others))


def of_job(job: DeviceJob, name: str, limits: Limits) -> Subject:
    """Return the tasks of a model that is at hand, with its stored plans for one device."""
    reader = _Reader(job.store, job.target)
    sets = job.plan_sets()
    plans: Mapping[str, PlanRecord] = sets[-1].records if sets else {}
    notes = [] if sets else ["No plans of this model are stored for this device; `relax-tune tune` stores some."]
    tasks = []
    for task_variants in job.task_variants.values():
        task = task_variants.task
        weights = {shape_of(p): w for p, w in zip(task.domain.points, task.domain.weights)}
        records, plan = job.records(task.key, task.regime), reader.read(plans.get(task.key))
        labels, sites = symbol_labels(task), len(task.sites)
        tasks.append(
            RecordedTask(task.key, task.name, records, plan, labels, sites, weights, text=task.text, regime=task.regime)
        )
    facts = (("model", name), ("key", job.key), ("device", f"{job.target.kind}, {job.target.name}"))
    return _subject(f"Model {name}", [reader.view(tasks)], facts, notes, limits, job.store)
