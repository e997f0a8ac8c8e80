"""Metrics of a service for Prometheus, on a port of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import get_args

from relax_tune.errors import UserError
from relax_tune.tuner.scraping import served
from relax_tune.tuner.service.service import Event


class ServiceMetrics:
    """Counts what becomes of a service's jobs. Thread-safe.

    Raises UserError where prometheus-client is not installed."""

    def __init__(self) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge
        except ImportError:
            raise UserError(
                "--metrics wants prometheus-client, found it not installed; pip install 'relax-tune[dashboard]', or leave it out"
            ) from None
        self._registry = CollectorRegistry()
        self._events = Counter(
            "relax_tune_service_jobs",
            "Jobs of this service by what became of them.",
            ["event"],
            registry=self._registry,
        )
        for event in get_args(Event):
            self._events.labels(event)
        self._running = Gauge(
            "relax_tune_service_jobs_running", "Jobs that this service runs now.", registry=self._registry
        )

    def observe(self, event: Event) -> None:
        """Count an event."""
        self._events.labels(event).inc()
        self._running.inc(1 if event == "taken" else -1)

    def served(self, address: str) -> AbstractContextManager[str]:
        """Answer scrapes at `PORT` or `HOST:PORT` meanwhile; see `scraping.served`."""
        return served(self._registry, address)
