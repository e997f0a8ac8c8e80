"""Metrics for Prometheus: counts of a database's jobs, measurements and units, read at each scrape.

Tests: `tests/tuner/dashboard/test_dashboard.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from time import time
from typing import Any

from relax_tune.database.jobs.queue import JobQueue
from relax_tune.database.jobs.submitted import SUBMITTED_STATES, SubmittedJob
from relax_tune.errors import UserError
from relax_tune.printable import printable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
UNENDED: tuple[Any, ...] = ("queued", "running")


def check_prometheus() -> None:
    """Raise `UserError` if prometheus-client is not installed."""
    if find_spec("prometheus_client") is None:
        raise UserError("metrics need prometheus-client, which is not installed; pip install 'relax-tune[dashboard]'")


class DatabaseCollector:
    """A Prometheus collector over a database that was opened read-only."""

    def __init__(self, store: JobQueue) -> None:
        self._store = store

    def collect(self) -> Iterator[Any]:
        """Yield the families of metrics."""
        yield from self._jobs()
        yield from self._targets()

    def _jobs(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        jobs = self._store.submitted()
        states = Counter(job.state for job in jobs)
        count = GaugeMetricFamily("relax_tune_jobs", "Submitted jobs by state.", labels=["state"])
        for state in SUBMITTED_STATES:
            count.add_metric([state], states[state])
        yield count
        oldest = min((job.submitted_at for job in jobs if job.state == "queued"), default=None)
        waiting = GaugeMetricFamily(
            "relax_tune_oldest_queued_job_seconds", "Age of the oldest queued job; 0 without one."
        )
        waiting.add_metric([], 0.0 if oldest is None else max(time() - oldest, 0.0))
        yield waiting
        trials = GaugeMetricFamily(
            "relax_tune_job_candidates", "Candidates measured by a running job.", labels=["job", "device"]
        )
        planned = GaugeMetricFamily(
            "relax_tune_job_candidates_planned", "Planned candidates of a running job.", labels=["job", "device"]
        )
        for job in jobs:
            if job.state == "running":
                trials.add_metric([job.id, printable(job.label)], _count(job, "trials"))
                planned.add_metric([job.id, printable(job.label)], _count(job, "of"))
        yield trials
        yield planned

    def _targets(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        measured = GaugeMetricFamily(
            "relax_tune_measurements", "Measurements on record.", labels=["target", "device", "result"]
        )
        tasks = GaugeMetricFamily("relax_tune_tasks", "Tasks with measurements.", labels=["target", "device"])
        units = GaugeMetricFamily(
            "relax_tune_unit_last_measured_seconds",
            "Unix time of a unit's newest record.",
            labels=["target", "worker", "host", "unit"],
        )
        for target in self._store.targets():
            stats = self._store.stats(target.key)
            if stats is None:
                continue
            where = [target.key, printable(target.name)]
            tasks.add_metric(where, stats.workloads)
            for result, count in (("ok", stats.ok), *stats.failures):
                measured.add_metric([*where, result], count)
            for unit in self._store.units(target.key):
                units.add_metric([target.key, *map(printable, (unit.worker, unit.host, unit.unit))], unit.last)
        yield measured
        yield tasks
        yield units


def _count(job: SubmittedJob, name: str) -> float:
    value = job.values("progress").get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def database_metrics(store: JobQueue) -> bytes:
    """Return the metrics of a database in the text form of Prometheus. Raises UserError without prometheus-client."""
    check_prometheus()
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(DatabaseCollector(store))  # type: ignore[arg-type,unused-ignore]
    text: bytes = generate_latest(registry)
    return text
