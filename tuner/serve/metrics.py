"""Metrics for Prometheus: requests, batches, the device's time, what waits.

Tests: `tests/tuner/serve/test_app.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Labels = tuple[str, str]
"""Name and version of a model."""


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        model = ("model", "version")
        prefix = "relax_tune_serve"
        self._requests = Counter(
            f"{prefix}_requests",
            "Requests by endpoint, model and status.",
            ("endpoint", *model, "status"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            f"{prefix}_request_seconds",
            "Time from a request to its answer.",
            ("endpoint", *model),
            buckets=SECS,
            registry=self.registry,
        )
        self._batch = Histogram(
            f"{prefix}_batch_requests", "Requests that ran together.", model, buckets=COUNTS, registry=self.registry
        )
        self._rows = Counter(f"{prefix}_rows", "Rows computed for requests.", model, registry=self.registry)
        self._device = Counter(f"{prefix}_device_seconds", "Time of the device.", model, registry=self.registry)
        self._tokens = Counter(f"{prefix}_generated_tokens", "Tokens generated.", model, registry=self.registry)
        self._waiting = Gauge(f"{prefix}_waiting", "Requests in a model's queue.", model, registry=self.registry)
        self._active = Gauge(f"{prefix}_active", "Requests that are read, wait or run.", registry=self.registry)

        self._rounds = Counter(
            f"{prefix}_improve_rounds", "Rounds of tuning by outcome.", (*model, "outcome"), registry=self.registry
        )
        self._gain = Gauge(
            f"{prefix}_improve_gain",
            "Share of the time of the served sizes that the last swap saves, as measured before it.",
            model,
            registry=self.registry,
        )
        self._swaps = Counter(f"{prefix}_swaps", "Artifacts that were swapped in.", model, registry=self.registry)

    def watch(self, active: Callable[[], int]) -> None:
        """Read the number of requests in progress at each scrape."""
        self._active.set_function(active)

    def watch_queue(self, labels: Labels, size: Callable[[], int]) -> None:
        """Read the size of a queue at each scrape."""
        self._waiting.labels(*labels).set_function(size)

    def request(self, endpoint: str, labels: Labels, status: int, secs: float) -> None:
        """Count an answered request."""
        self._requests.labels(endpoint, *labels, str(status)).inc()
        self._seconds.labels(endpoint, *labels).observe(secs)

    def batch(self, labels: Labels, requests: int, rows: int, secs: float) -> None:
        """Count a call of a model."""
        self._batch.labels(*labels).observe(requests)
        self._rows.labels(*labels).inc(rows)
        self._device.labels(*labels).inc(secs)

    def round(self, labels: Labels, outcome: str, gain: float | None) -> None:
        """Count a round of tuning for a model. outcome: `swapped`, `returned`, `refused` or `failed`"""
        self._rounds.labels(*labels, outcome).inc()
        self._gain.labels(*labels).set(gain or 0.0)

    def swap(self, labels: Labels) -> None:
        """Count a swap of a model's artifact."""
        self._swaps.labels(*labels).inc()

    def tokens(self, labels: Labels, count: int, secs: float) -> None:
        """Count generated tokens."""
        self._tokens.labels(*labels).inc(count)
        self._device.labels(*labels).inc(secs)

    def text(self) -> bytes:
        """Return all metrics in the text form of Prometheus."""
        text: bytes = generate_latest(self.registry)
        return text
