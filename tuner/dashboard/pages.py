"""The pages of the dashboard, as HTML: the lists, and a page for each job, run, model and device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from time import time
from typing import Any
from urllib.parse import quote

from relax_tune.database.jobs.queue import JobQueue
from relax_tune.database.jobs.submitted import SubmittedJob
from relax_tune.database.records import JobRecord
from relax_tune.errors import UserError
from relax_tune.tuner.job.job_log import state_of
from relax_tune.tuner.report.devices import UnitHealth, lent_units, moment
from relax_tune.tuner.report.figure import Section
from relax_tune.tuner.report.page import environment
from relax_tune.tuner.report.sections import sections_of
from relax_tune.tuner.report.subject import (
    Subject,
    models_of,
    of_device,
    of_plan_set,
    of_run,
    of_submitted,
    run_facts,
    runs_of,
)

NEWEST = 200
"""Jobs, and runs, that the front page lists."""
LOG_PARTS = 40
BAD, GOOD = frozenset({"failed", "interrupted"}), frozenset({"done"})


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a list. href: page of the subject; value, most: progress, 0 of 0 if unknown"""

    name: str
    href: str
    state: str = ""
    cells: tuple[str, ...] = ()
    value: int = 0
    most: int = 0

    @property
    def tone(self) -> str:
        """The style of the state."""
        return "bad" if self.state in BAD else "good" if self.state in GOOD else ""


@dataclass(frozen=True)
class Pages:
    """Makes pages from a database that was opened read-only.

    lent: asks for the units of a scheduler, None without one; tasks: pictures of tasks on a page
    """

    store: JobQueue
    lent: Callable[[], Sequence[UnitHealth]] | None = None
    tasks: int = 12

    def overview(self) -> str:
        """Return the front page: jobs, runs, models, devices."""
        jobs = [_job_row(job) for job in self.store.submitted(limit=NEWEST)]
        runs = sorted(self.store.jobs(), key=lambda run: run_facts(run)[2], reverse=True)
        shown = [_run_row(run) for run in runs[:NEWEST]]
        hints = {workload.key: workload.hint or workload.key[:12] for workload in self.store.workloads(None)}
        devices, models = [], dict[str, set[str]]()
        for target in self.store.targets():
            stats = self.store.stats(target.key)
            failed = 0 if stats is None else sum(count for _, count in stats.failures)
            counts = (0, 0, 0) if stats is None else (stats.workloads, stats.measurements, failed)
            cells = tuple(f"{n:,}" for n in counts)
            devices.append(Row(f"{target.kind}: {target.name}", f"/devices/{quote(target.key, safe='')}", "", cells))
            for workload, keys in models_of(self.store, target.key).items():
                for key in keys:
                    models.setdefault(key, set()).add(hints.get(workload, workload[:12]))
        listed = [
            Row(
                key[:12],
                f"/models/{quote(key, safe='')}",
                "",
                (str(len(names)), ", ".join(sorted(names, key=len)[-3:])),
            )
            for key, names in sorted(models.items())
        ]
        return _page(
            "overview.html", "Tuning", self._now(), jobs=jobs, runs=shown, devices=devices, models=listed, fleet=self.lent is not None,
            left=max(len(runs) - NEWEST, 0), newest=NEWEST, where=self.store.where,
        )  # fmt: skip

    def job(self, id: str) -> str | None:
        """Return the page of a submitted job; None for an unknown id."""
        job = next((j for j in self.store.find(id) if j.id == id), None)
        if job is None:
            return None
        log = "".join(text for _, _, text in self.store.log(job.id)[-LOG_PARTS:])
        runs = [_run_row(run) for run in runs_of(self.store, job)]
        return self._subject(of_submitted(self.store, job), row=_job_row(job), log=log[-60_000:], runs=runs)

    def run(self, id: str) -> str | None:
        """Return the page of a tuning run; None for an unknown id."""
        run = self.store.job(id)
        return None if run is None else self._subject(of_run(self.store, run), row=_run_row(run))

    def model(self, key: str) -> str | None:
        """Return the page of a model by its stored plans; None for an unknown key."""
        try:
            return self._subject(of_plan_set(self.store, key))
        except UserError:
            return None

    def device(self, key: str) -> str | None:
        """Return the page of a device; None for an unknown key."""
        target = self.store.target(key)
        if target is None:
            return None
        view = of_device(self.store, target)
        return self._subject(
            Subject(f"Device {target.kind}: {target.name}", (view,), (("database", self.store.where),))
        )

    def fleet(self) -> str | None:
        """Return the page of the units that a scheduler's workers lend; None without a scheduler."""
        if self.lent is None:
            return None
        section = Section("fleet", "Units", figures=(lent_units(self.lent(), "fleet-units"),))
        return _page("subject.html", "Fleet", self._now(), sections=[section], row=None, log="", runs=[])

    def trouble(self, title: str, text: str) -> str:
        """Return a page that says why there is none."""
        return _page("trouble.html", title, self._now(), text=text)

    def _subject(self, subject: Subject, row: Row | None = None, log: str = "", runs: Sequence[Row] = ()) -> str:
        sections = sections_of(subject, self.tasks)
        return _page("subject.html", subject.title, self._now(), sections=sections, row=row, log=log, runs=list(runs))

    @staticmethod
    def _now() -> str:
        return datetime.fromtimestamp(time(), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _job_row(job: SubmittedJob) -> Row:
    told = job.values("progress")
    trials, of = told.get("trials"), told.get("of")
    known = isinstance(trials, int) and isinstance(of, int) and trials >= 0 and of > 0
    progress = f"{trials} of {of}" if known else "-"
    cells = (
        progress,
        str(told.get("failures", "-")),
        job.name,
        job.label,
        job.owner,
        moment(job.submitted_at),
        job.note or job.message,
    )
    value, most = (min(int(str(trials)), int(str(of))), int(str(of))) if known else (0, 0)
    return Row(job.id, f"/jobs/{quote(job.id, safe='')}", job.state, cells, value, most)


def _run_row(run: JobRecord) -> Row:
    facts = dict(run_facts(run))
    cells = (facts["last seen"], facts.get("target", "-"), facts.get("effort", "-"), facts.get("submitted", "-"))
    return Row(run.id.partition("@")[0], f"/runs/{quote(run.id, safe='')}", state_of(run), cells)


@cache
def _templates() -> Any:
    import jinja2

    own = environment().overlay()
    own.loader = jinja2.ChoiceLoader(
        [jinja2.PackageLoader("relax_tune.tuner.dashboard", "templates"), environment().loader]
    )
    return own


def _page(template: str, title: str, now: str, **values: Any) -> str:
    text: str = _templates().get_template(template).render(title=title, now=now, **values)
    return text
