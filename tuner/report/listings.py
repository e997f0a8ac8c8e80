"""Submitted jobs, tuning runs, devices and units as tables, facts and documents.

Tests: `tests/tuner/report/test_listings.py`.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from relax_tune.database.counts import TargetStats, UnitStats
from relax_tune.database.jobs.submitted import SubmittedJob
from relax_tune.database.records import JobRecord, Measurement, Target, Workload, parse_json
from relax_tune.database.reference import SPREAD, Reference, kernels_of
from relax_tune.tuner.job.job_log import LAST_BEAT, state_of
from relax_tune.tuner.measure.cluster.fleet import LentDevice
from relax_tune.tuner.measure.cluster.identity import protocol_misfit
from relax_tune.tuner.plan.task_rows import variant_text
from relax_tune.tuner.report.progress import recorded_progress_text
from relax_tune.tuner.report.subject import Cell, Facts, PageLink, Section, Subject, Table, TrialCount, listing, table
from relax_tune.tuner.report.texts import moment_text, seconds_text

NO_JOBS = "No such jobs; `relax-tune jobs submit` queues one."
NO_RUNS = "No runs on record; `relax-tune tune` makes one."
NO_TARGETS = "No targets on record; `relax-tune tune` adds the one it measures on."
_NOTE_CHARACTERS = 60


def progress_of(job: SubmittedJob) -> Cell:
    """Return the measured candidates of a job and their planned number; `-` if unknown. Rows of jobs are untrusted."""
    progress = job.values("progress")
    measured, planned = progress.get("trials"), progress.get("of")
    if not isinstance(measured, int) or not isinstance(planned, int) or measured < 0 or planned <= 0:
        return "-"
    return TrialCount(measured, planned)


def job_facts(job: SubmittedJob, *, local: bool = False) -> Facts:
    """List the fields of a submitted job. local: times of this machine's zone instead of UTC"""
    facts: dict[str, Cell] = {
        "job": PageLink(job.id, ("jobs", job.id)),
        "state": job.state,
        "progress": progress_of(job),
        "tasks, speed, time left": recorded_progress_text(job.values("progress")),
        "failures": str(job.values("progress").get("failures", "-")),
        "message": job.message or _wait_of(job),
        "model": job.name,
        "target": str(job.values("settings").get("target", job.label)),
        "device": job.label,
        "priority": str(job.priority),
        "user": job.owner,
        "note": job.note,
        **{name: moment_text(getattr(job, f"{name}_at"), local=local) for name in ("submitted", "started", "ended")},
        "time spent": f"{job.spent_secs:.0f} s",
        "exit code": "" if job.exit_code is None else str(job.exit_code),
        "runs": str(job.runs),
        "services lost": str(job.losses),
        "settings": _pairs_text(job.values("settings")),
        **{f"result: {name}": str(value) for name, value in job.values("result").items()},
    }
    return tuple((name, text or "-") for name, text in facts.items())


def _wait_of(job: SubmittedJob) -> str:
    """Return what a queued job that no service has taken yet waits for."""
    return (
        f"waits for a service for {job.label} (`relax-tune jobs work`)"
        if job.state == "queued" and not job.runs
        else ""
    )


def job_document(job: SubmittedJob) -> dict[str, Any]:
    """Return a job as JSON values."""
    return {**asdict(job), **{name: job.values(name) for name in ("settings", "progress", "result")}}


def jobs_table(jobs: Sequence[SubmittedJob], *, local: bool = False) -> Table:
    """Return a row for each submitted job."""
    columns = ("job", "state", "progress", "failures", "model", "target", "priority", "user", "submitted")
    rows = []
    for job in jobs:
        facts = dict(job_facts(job, local=local))
        rows.append([*(facts[name] for name in columns), (job.note or job.message or _wait_of(job))[:_NOTE_CHARACTERS]])
    return table((*columns, "note or message"), rows, ("failures", "priority"))


def job_subject(job: SubmittedJob) -> Subject:
    """Return a submitted job, as `jobs show` shows it."""
    return Subject(f"Job {job.id}", (Section("job", "", job_facts(job, local=True)),), job_document(job))


def jobs_subject(jobs: Sequence[SubmittedJob]) -> Subject:
    """Return the list of jobs, as `jobs list` shows it."""
    return listing("Submitted jobs", jobs_table(jobs, local=True), NO_JOBS, [job_document(job) for job in jobs])


def settings_of_run(run: JobRecord) -> dict[str, Any]:
    """Return the settings of a tuning run, with the time at which it was last alive."""
    settings = parse_json(run.settings, f"run {run.id}")
    return settings if isinstance(settings, dict) else {"settings": settings}


def run_facts(run: JobRecord, *, local: bool = False) -> Facts:
    """List the fields of a tuning run: its id, its state, when it was last alive, its settings."""
    settings = settings_of_run(run)
    alive = moment_text(settings.pop(LAST_BEAT, None), local=local)
    fields = ((str(name), str(value)) for name, value in sorted(settings.items()))
    return (("run", PageLink(run.id, ("runs", run.id))), ("state", state_of(run)), ("last active", alive), *fields)


def runs_table(runs: Sequence[JobRecord], *, local: bool = False) -> Table:
    """Return a row for each tuning run."""
    rows = []
    for run in runs:
        id, state, alive, *settings = run_facts(run, local=local)
        rows.append([id[1], state[1], alive[1], _pairs_text(dict(settings))])
    return table(("run", "state", "last active", "settings"), rows)


def runs_subject(runs: Sequence[JobRecord]) -> Subject:
    """Return the list of tuning runs, as `jobs runs` shows it."""
    document = [{"id": run.id, "state": state_of(run), "settings": settings_of_run(run)} for run in runs]
    return listing("Tuning runs", runs_table(runs, local=True), NO_RUNS, document)


def units_table(units: Sequence[UnitStats], records: Sequence[Measurement] = (), *, local: bool = False) -> Table:
    """Return a row for each unit that measured, with the clocks and temperatures in `records`."""
    clocks: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    temperatures: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for record in records:
        unit = (record.worker, record.host, record.unit)
        if record.clock_mhz is not None:
            clocks[unit].append(record.clock_mhz)
        if record.celsius is not None:
            temperatures[unit].append(record.celsius)
    rows = []
    for u in units:
        unit = (u.worker, u.host, u.unit)
        row = [*(name or "-" for name in unit), f"{u.measurements:,}", f"{u.failed:,}"]
        if records:
            row.append(f"{statistics.median(clocks[unit]):.0f}" if clocks[unit] else "-")
            row.append(f"{max(temperatures[unit]):.0f}" if temperatures[unit] else "-")
        rows.append([*row, moment_text(u.last, local=local)])
    sensors = ("median clock (MHz)", "hottest (°C)") if records else ()
    numbers = ("measurements", "failed", *sensors)
    return table(("worker", "host", "unit", *numbers, "last"), rows, numbers)


def units_subject(units: Sequence[UnitStats]) -> Subject:
    """Return the units that measured, as `db units` shows them."""
    empty = "No measurements on record; run `relax-tune tune`."
    return listing("Units", units_table(units, local=True), empty, [asdict(u) for u in units])


def lent_table(devices: Sequence[LentDevice], silence_secs: float | None = None) -> Table:
    """Return a row for each unit that workers lend.

    Args:
        silence_secs: Seconds after which a worker counts as silent; None adds a column of the seconds instead.
    """
    kernels = sorted({name for device in devices for name in kernels_of(device.reference)})
    rows = []
    for d in devices:
        state = f"quarantined: {d.quarantine}" if d.quarantine else protocol_misfit(d.protocol) or "lent"
        if silence_secs is not None and d.silent_secs >= silence_secs:
            state = f"silent for {d.silent_secs:.0f} s"
        row = [d.worker, d.host, d.unit, d.label, d.about.strip(" |")]
        row += [*(seconds_text(d.reference.get(name)) for name in kernels), state]
        rows.append([*row, f"{d.silent_secs:.0f}"] if silence_secs is None else row)
    silent = ("silent (s)",) if silence_secs is None else ()
    columns = ("worker", "host", "unit", "class", "device", *kernels, "state", *silent)
    return table(columns, rows, (*kernels, *silent))


def lent_subject(devices: Sequence[LentDevice], silence_secs: float) -> Subject:
    """Return the units that workers lend, as `workers` shows them."""
    empty = "No workers; `relax-tune worker` lends devices."
    return listing("Lent units", lent_table(devices, silence_secs), empty, [asdict(d) for d in devices])


def targets_table(statistics: Sequence[TargetStats]) -> Table:
    """Return a row for each device with records."""
    counts = ("workloads", "measurements", "ok", "checked")
    rows: list[list[Cell]] = []
    for s in statistics:
        kinds, failures = (", ".join(f"{n} {k}" for k, n in group) or "-" for group in (s.kinds, s.failures))
        numbers = [f"{n:,}" for n in (s.workloads, s.measurements, s.ok, s.checked)]
        key = PageLink(s.target.key[:12], ("devices", s.target.key))
        rows.append([key, s.target.kind, s.target.name, *numbers, kinds, failures])
    return table(("target", "kind", "name", *counts, "by kind", "failures"), rows, counts)


def targets_subject(statistics: Sequence[TargetStats], where: str) -> Subject:
    """Return the counts of each device's records, as `db stats` shows them."""
    document = [
        {
            "target": {"key": s.target.key, "kind": s.target.kind, "name": s.target.name},
            **{name: getattr(s, name) for name in ("workloads", "measurements", "ok", "checked")},
            "kinds": dict(s.kinds),
            "failures": dict(s.failures),
        }
        for s in statistics
    ]
    return listing("Devices with records", targets_table(statistics), NO_TARGETS, document, where)


def fastest_subject(rows: Sequence[tuple[Workload, Measurement]]) -> Subject:
    """Return the fastest variants of each workload and shape, as `db top` shows them; rows in this order."""
    document = [
        {
            **{"workload": w.key, "name": w.hint, "symbols": m.symbols},
            **{"kind": m.variant.kind, "sketch": m.variant.sketch, "parameters": m.variant.values},
            **{"median_secs": m.median_secs, "samples": len(m.samples_secs)},
        }
        for w, m in rows
    ]
    cells, before = [], ("", "")
    for w, m in rows:
        here = (w.key, ",".join(f"{k}={v}" for k, v in m.symbols.items()) or "-")
        names = ("", "") if w.key == before[0] else (w.key[:12], w.hint)
        shape = "" if here == before else here[1]
        cells.append([*names, shape, seconds_text(m.median_secs), variant_text(m.variant)])
        before = here
    values = table(("workload", "name", "shape", "median", "variant"), cells, ("median",))
    return listing("Fastest variants", values, "No checked measurements on record; run `relax-tune tune`.", document)


def rows_subject(
    title: str, targets: Sequence[Target], runs: Sequence[JobRecord], workloads: Sequence[Workload]
) -> Subject:
    """Return stored targets, runs and workloads, as `db show` shows them."""
    document: list[dict[str, Any]] = [
        {"target": t.key, "kind": t.kind, "name": t.name, "fingerprint": dict(t.fingerprint), "limits": dict(t.limits)}
        for t in targets
    ]
    document += [{"job": run.id, "state": run.state, "settings": run.settings} for run in runs]
    document += [
        {"workload": w.key, "name": w.hint, "format_version": w.format_version, "text": w.text} for w in workloads
    ]
    sections = [
        Section(
            f"target{n}",
            f"Device {t.kind}: {t.name}",
            (*target_facts(t), *((name, str(value)) for name, value in t.limits)),
        )
        for n, t in enumerate(targets)
    ]
    sections += [Section(f"run{n}", "Tuning run", run_facts(run, local=True)) for n, run in enumerate(runs)]
    for n, w in enumerate(workloads):
        facts = (("workload", w.key), ("name", w.hint), ("format version", str(w.format_version)))
        sections.append(Section(f"workload{n}", f"Workload {w.hint}", facts, texts=(w.text,)))
    return Subject(title, tuple(sections), document)


def target_facts(target: Target) -> Facts:
    """List the fields of a device: names, fingerprint, reference times."""
    facts = [("kind", target.kind), ("name", target.name), ("key", target.key)]
    facts += [(name, value) for name, value in target.fingerprint if value not in (target.kind, target.name)]
    return (*facts, *reference_facts(dict(target.reference)))


def reference_facts(reference: Reference) -> Facts:
    """List reference times with their spreads."""
    facts = []
    for name in kernels_of(reference):
        spread = reference.get(name + SPREAD)
        text = seconds_text(reference[name])
        facts.append((f"reference kernel `{name}`", text if spread is None else f"{text}, spread {spread:.0%}"))
    return tuple(facts)


def reference_subject(target: Target) -> Subject:
    """Return the reference times of a target, as `db reference` shows them."""
    reference = dict(target.reference)
    facts = reference_facts(reference) or (("reference kernels", "not timed; the next job that measures times them"),)
    document = {"target": target.key, "name": target.name, "reference": reference}
    title = f"Reference times of {target.kind}: {target.name}"
    return Subject(title, (Section("reference", title, facts),), document)


def _pairs_text(values: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{name}={value}" for name, value in dict(values).items())
