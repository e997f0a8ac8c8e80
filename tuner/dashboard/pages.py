"""The pages of the dashboard: the lists, and a page for each job, run, model, device and task.

Tests: `tests/tuner/dashboard/test_dashboard.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import time

from relax_tune.database.jobs.queue import JobQueue
from relax_tune.errors import UserError
from relax_tune.tuner.measure.cluster.fleet import LentDevice
from relax_tune.tuner.report.collect import models_of, of_plan_set, of_run, of_submitted, of_target, runs_of
from relax_tune.tuner.report.devices import fleet_section
from relax_tune.tuner.report.listings import (
    NO_JOBS,
    NO_RUNS,
    NO_TARGETS,
    jobs_table,
    run_facts,
    runs_table,
    targets_table,
)
from relax_tune.tuner.report.page import dashboard_page
from relax_tune.tuner.report.sections import Limits
from relax_tune.tuner.report.subject import Cell, PageLink, Section, Subject, Table, table
from relax_tune.tuner.report.texts import named

NEWEST = 200
"""Number of jobs, and of runs, on the front page."""
RECORDS = 5_000
"""Records of a device that the pictures of one page are drawn from; beyond, each task has its pictures on its own page."""
LIMITS = Limits(records=RECORDS)
LOG_PARTS = 40


@dataclass(frozen=True)
class Pages:
    """Makes pages from a database that is open read-only.

    Attributes:
        lent: Asks a scheduler for its units; None without a scheduler.
        limits: Limits of a page, except of the page of one task.
    """

    store: JobQueue
    lent: Callable[[], Sequence[LentDevice]] | None = None
    limits: Limits = LIMITS

    def overview(self) -> Subject:
        """Return the front page: jobs, runs, models, devices."""
        store = self.store
        jobs = store.submitted(limit=NEWEST)
        runs = sorted(store.jobs(), key=lambda run: str(run_facts(run)[2][1]), reverse=True)
        left = (f"{len(runs) - NEWEST} older runs are not listed.",) if len(runs) > NEWEST else ()
        full = (f"The newest {NEWEST} jobs are listed.",) if len(jobs) == NEWEST else ()
        devices = [s for t in store.targets() if (s := store.stats(t.key)) is not None]
        no_plans = "No plans are on record; `relax-tune tune` stores a model's."
        fleet = (("fleet", PageLink("units that workers lend now", ("fleet",))),) if self.lent is not None else ()
        sections = (
            Section("overview", "Overview", (("database", store.where), *fleet)),
            _listed("jobs", "Submitted jobs", jobs_table(jobs), NO_JOBS, full),
            _listed("runs", "Tuning runs", runs_table(runs[:NEWEST]), NO_RUNS, left),
            _listed("models", "Models", self._models(), no_plans),
            _listed("devices", "Devices", targets_table(devices), NO_TARGETS),
        )
        return Subject("Tuning", sections)

    def _models(self) -> Table:
        hints = {workload.key: named(workload.key, workload.hint) for workload in self.store.workloads(None)}
        models: dict[str, set[str]] = {}
        for target in self.store.targets():
            for workload, keys in models_of(self.store, target.key).items():
                for key in keys:
                    models.setdefault(key, set()).add(hints.get(workload, workload[:12]))
        rows: list[list[Cell]] = [
            [PageLink(key[:12], ("models", key)), str(len(names)), ", ".join(sorted(names, key=len)[-3:])]
            for key, names in sorted(models.items())
        ]
        return table(("model", "tasks", "such as"), rows, ("tasks",))

    def job(self, id: str) -> Subject | None:
        """Return the page of a submitted job; None for an unknown id."""
        job = next((j for j in self.store.find(id) if j.id == id), None)
        if job is None:
            return None
        subject = of_submitted(self.store, job, self.limits)
        log = "".join(text for _, _, text in self.store.log(job.id)[-LOG_PARTS:])[-60_000:]
        runs = runs_of(self.store, job)
        more = [_listed("runs", "Runs", runs_table(runs), "")] if runs else []
        more += [Section("log", "End of the log", texts=(log,))] if log else []
        return replace(subject, sections=(*subject.sections, *more))

    def run(self, id: str) -> Subject | None:
        """Return the page of a tuning run; None for an unknown id."""
        run = self.store.job(id)
        return None if run is None else of_run(self.store, run, self.limits)

    def model(self, id: str) -> Subject | None:
        """Return the page of a model by its stored plans; None for an unknown key."""
        try:
            return of_plan_set(self.store, id, self.limits)
        except UserError:
            return None

    def device(self, id: str) -> Subject | None:
        """Return the page of a device; None for an unknown key."""
        target = self.store.target(id)
        return None if target is None else of_target(self.store, target, self.limits)

    def task(self, id: str, workload: str) -> Subject | None:
        """Return the page of a task on a device; None for unknown keys."""
        target, known = self.store.target(id), self.store.workload(workload)
        return None if target is None or known is None else of_target(self.store, target, Limits(), known)

    def fleet(self) -> Subject | None:
        """Return the page of the units that workers lend; None without a scheduler."""
        return None if self.lent is None else Subject("Fleet", (fleet_section(self.lent()),))


def trouble(title: str, text: str) -> Subject:
    """Return a page with the reason of a failure."""
    return Subject(title, (Section("trouble", notes=(text,)),))


def html(subject: Subject) -> str:
    """Return a page as HTML, as of now."""
    return dashboard_page(subject, datetime.fromtimestamp(time(), UTC).strftime("%Y-%m-%d %H:%M:%S UTC"))


def _listed(id: str, title: str, values: Table, empty: str, notes: tuple[str, ...] = ()) -> Section:
    return Section(id, title, (), notes if values.rows else (empty,), tables=(values,) if values.rows else ())
