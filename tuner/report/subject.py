"""Subjects of reports: a database, a job, a model or an artifact, as the tasks of each device with their records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from relax_tune.database.counts import UnitStats
from relax_tune.database.jobs.submitted import SubmittedJob
from relax_tune.database.records import REGIMES, JobRecord, PlanRecord, Target, Workload, parse_json
from relax_tune.database.store import Store
from relax_tune.errors import DatabaseError, UserError
from relax_tune.runtime.artifact import Artifact
from relax_tune.tuner.job.job import Job
from relax_tune.tuner.job.job_log import SEEN, state_of
from relax_tune.tuner.plan.plans import shape_of
from relax_tune.tuner.plan.stored_plans import KeptPlan, read_plan
from relax_tune.tuner.plan.task_rows import symbol_labels
from relax_tune.tuner.report.devices import moment
from relax_tune.tuner.report.recorded import RecordedTask

Facts = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class DeviceView:
    """A device with the tasks to show, the costliest first. notes: sentences on what could not be read"""

    target: Target
    tasks: tuple[RecordedTask, ...]
    units: tuple[UnitStats, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subject:
    """The subject of a report. facts: (name, value) pairs shown first"""

    title: str
    devices: tuple[DeviceView, ...]
    facts: Facts = ()
    notes: tuple[str, ...] = ()


@dataclass
class _Reader:
    """Reads the tasks of one target."""

    store: Store
    target: Target
    notes: list[str] = field(default_factory=list)

    def plans(self) -> dict[str, list[PlanRecord]]:
        """Return all versions of the plans by workload, the newest last."""
        found: dict[str, list[PlanRecord]] = {}
        for record in self.store.plans(self.target.key):
            found.setdefault(record.workload, []).append(record)
        return found

    def kept(self, record: PlanRecord | None) -> KeptPlan | None:
        """Return a plan; None, and a note, for one that cannot be read."""
        if record is None:
            return None
        try:
            return read_plan(record)
        except DatabaseError as error:
            self.notes.append(f"left out a plan: {error}")
            return None

    def tasks(self, workload: Workload, plan: KeptPlan | None) -> list[RecordedTask]:
        """Return the tasks of a workload: one for each state of the caches with records."""
        found = []
        for regime in REGIMES:
            records = self.store.query(self.target.key, workload.key, regime=regime)
            if records:
                suffix = "" if regime == "warm" else f" ({regime} caches)"
                found.append(RecordedTask(workload.key, f"{workload.hint or workload.key[:12]}{suffix}", records, plan))
        return found

    def view(self, tasks: Sequence[RecordedTask]) -> DeviceView:
        """Return the device with these tasks. Tasks of one name get the start of their keys."""
        names = Counter(t.name for t in tasks)
        told = [t if names[t.name] == 1 else replace(t, name=f"{t.name} {t.key[:6]}") for t in tasks]
        told.sort(key=lambda t: (-(t.secs or 0.0) * (t.calls or 1), t.name, t.key))
        return DeviceView(self.target, tuple(told), tuple(self.store.units(self.target.key)), tuple(self.notes))


def of_device(
    store: Store, target: Target, workloads: Collection[str] | None = None, runs: frozenset[str] | None = None
) -> DeviceView:
    """Return a device with its newest plans. workloads: keys of the ones to show; runs: ids of the runs to show"""
    reader = _Reader(store, target)
    plans = reader.plans()
    tasks = []
    for workload in store.workloads(target.key):
        if workloads is None or workload.key in workloads:
            newest = plans.get(workload.key, [None])[-1]
            tasks += [replace(t, runs=runs) for t in reader.tasks(workload, reader.kept(newest))]
    if runs is not None:
        tasks = [t for t in tasks if t.shown_records]
    return reader.view(tasks)


def of_database(store: Store) -> Subject:
    """Return all devices of a database."""
    devices = tuple(of_device(store, target) for target in store.targets())
    notes = () if devices else ("Nothing is on record in this database; `relax-tune tune` measures a model.",)
    return Subject("Database of measurements", devices, (("database", store.where),), notes)


def run_facts(run: JobRecord) -> Facts:
    """List what is known of a tuning run: its state and its settings."""
    settings = parse_json(run.settings, f"run {run.id}")
    told = settings if isinstance(settings, dict) else {"settings": settings}
    seen = told.pop(SEEN, 0)
    facts = [
        ("run", run.id),
        ("state", state_of(run)),
        ("last seen", moment(seen) if isinstance(seen, int | float) else "-"),
    ]
    return (*facts, *((str(k), str(v)) for k, v in sorted(told.items())))


def of_run(store: Store, run: JobRecord) -> Subject:
    """Return what one tuning run measured."""
    return _of_runs(store, f"Tuning run {run.id.partition('@')[0]}", frozenset([run.id]), run_facts(run))


def runs_of(store: Store, job: SubmittedJob) -> list[JobRecord]:
    """List the tuning runs of a submitted job."""
    found = []
    for run in store.jobs():
        settings = parse_json(run.settings, f"run {run.id}")
        if isinstance(settings, dict) and settings.get("submitted") == job.id:
            found.append(run)
    return found


def of_submitted(store: Store, job: SubmittedJob) -> Subject:
    """Return what the runs of a submitted job measured."""
    runs = frozenset(run.id for run in runs_of(store, job))
    return _of_runs(store, f"Job {job.id}: {job.name}", runs, job_facts(job))


def job_facts(job: SubmittedJob) -> Facts:
    """List what is known of a submitted job."""
    told = job.values("progress")
    counted = f"{told['trials']} of {told['of']} candidates" if {"trials", "of"} <= told.keys() else "-"
    pairs = {
        "state": job.state,
        "progress": counted,
        "failures": str(told.get("failures", "-")),
        "message": job.message,
        "model": job.name,
        "device": job.label,
        "priority": str(job.priority),
        "user": job.owner,
        "note": job.note,
        "submitted": moment(job.submitted_at),
        "started": moment(job.started_at or 0.0),
        "ended": moment(job.ended_at or 0.0),
        "time spent": f"{job.spent_secs:.0f} s",
        "runs": str(job.runs),
        "services lost": str(job.losses),
        "settings": ", ".join(f"{k}={v}" for k, v in job.values("settings").items()),
    }
    return tuple((name, text or "-") for name, text in pairs.items())


def _of_runs(store: Store, title: str, runs: frozenset[str], facts: Facts) -> Subject:
    views = []
    for target in store.targets():
        view = of_device(store, target, runs=runs)
        if view.tasks:
            views.append(view)
    notes = (
        ()
        if views
        else ("Nothing is on record of this job: it has not measured yet, or all it asked for was on record.",)
    )
    return Subject(title, tuple(views), (*facts, ("database", store.where)), notes)


def of_plan_set(store: Store, model: str) -> Subject:
    """Return the tasks of a model by its newest plans, on every device that has some."""
    views = []
    for target in store.targets():
        workloads = {w for w, m in models_of(store, target.key).items() if model in m}
        if workloads:
            views.append(of_device(store, target, workloads))
    if not views:
        raise UserError(f"wanted plans of the model {model!r:.80}, {store.where} has none; see `relax-tune db stats`")
    return Subject(f"Model {model[:12]}", tuple(views), (("model", model), ("database", store.where)))


def models_of(store: Store, target: str) -> dict[str, set[str]]:
    """Return the keys of the models that have plans on a target, by workload."""
    found: dict[str, set[str]] = {}
    for record in store.plans(target):
        document = parse_json(record.entries, "plan entries")
        if isinstance(document, dict) and isinstance(model := document.get("model"), str):
            found.setdefault(record.workload, set()).add(model)
    return found


def of_artifact(store: Store, artifact: Artifact, name: str) -> Subject:
    """Return the tasks that an artifact calls, with its plans. Raises UserError for one of a device without records."""
    extra = artifact.manifest.get("extra")
    key = str(extra.get("target", "")) if isinstance(extra, dict) else ""
    target = store.target(key) if key else None
    if target is None:
        raise UserError(
            f"{name}: wanted records of the device it was built for, {store.where} has none; give the database it was tuned with by --db"
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
        kept = [k for record in plans.get(workload.key, []) if (k := reader.kept(record)) is not None]
        plan = next((k for k in reversed(kept) if set(k[1]) == dispatched[workload.key]), None)
        if plan is None:
            reader.notes.append(
                f"{workload.hint or workload.key[:12]}: the database has no plan of the variants in this artifact"
            )
        tasks += [replace(t, calls=calls[workload.key]) for t in reader.tasks(workload, plan)]
    unknown = len(calls) - len({t.key for t in tasks})
    notes = [f"{unknown} of {len(calls)} tasks have no records in this database."] if unknown else []
    if any(program.name != "main" for program in artifact.programs):
        notes.append("Calls are counted once for each function; loops may run them more often.")
    facts = (("artifact", name), ("functions", ", ".join(artifact.functions)), ("database", store.where))
    return Subject(f"Artifact {name}", (reader.view(tasks),), facts, tuple(notes))


def of_job(job: Job, name: str) -> Subject:
    """Return the tasks of a model that is at hand, with its stored plans for one device."""
    reader = _Reader(job.store, job.target)
    sets = job.plan_sets()
    plans: Mapping[str, PlanRecord] = sets[-1].records if sets else {}
    notes = [] if sets else ["No plans of this model are stored for this device; `relax-tune tune` stores some."]
    tasks = []
    for choices in job.choices.values():
        task = choices.task
        weights = {shape_of(p): w for p, w in zip(task.domain.points, task.domain.weights)}
        records, plan = job.records(task.key, task.regime), reader.kept(plans.get(task.key))
        tasks.append(RecordedTask(task.key, task.name, records, plan, symbol_labels(task), len(task.sites), weights))
    facts = (
        ("model", name),
        ("key", job.key),
        ("device", f"{job.target.kind}, {job.target.name}"),
        ("database", job.store.where),
    )
    return Subject(f"Model {name}", (reader.view(tasks),), facts, tuple(notes))
