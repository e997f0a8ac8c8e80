"""Metrics of a service for Prometheus, on a separate port."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import get_args

from relax_tune.errors import UserError
from relax_tune.tuner.measure.cluster.scraping import served
from relax_tune.tuner.service.service import Event


class ServiceMetrics:
    """Counts of the events of a service's jobs. Thread-safe.

    Raises:
        UserError: prometheus-client is not installed.
    """

    def __init__(self) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge
        except ImportError:
            raise UserError(
                "--metrics needs prometheus-client, which is not installed; pip install 'relax-tune[dashboard]', or leave it out"
            ) from None
        self._registry = CollectorRegistry()
        self._events = Counter(
            "relax_tune_service_jobs",
            "Jobs of this service by event.",
            ["event"],
            registry=self._registry,
        )
        for event in get_args(Event):
            self._events.labels(event)
        self._running = Gauge(
            "relax_tune_service_jobs_running", "Running jobs of this service.", registry=self._registry
        )

    def observe(self, event: Event) -> None:
        """Count an event."""
        self._events.labels(event).inc()
        self._running.inc(1 if event == "taken" else -1)

    def served(self, address: str) -> AbstractContextManager[str]:
        """Serve the metrics at `PORT` or `HOST:PORT` inside a context; see `scraping.served`."""
        return served(self._registry, address)
