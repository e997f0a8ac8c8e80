"""Metrics of a service: what became of its jobs, scraped over HTTP from a port of its own."""

from __future__ import annotations

import urllib.request

import pytest

from relax_tune.errors import UserError
from relax_tune.tuner.service.service_metrics import ServiceMetrics

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (extra dashboard)")


def test_service_metrics_count_events_and_running_jobs() -> None:
    metrics = ServiceMetrics()
    for event in ("taken", "taken", "done", "taken", "lost"):
        metrics.observe(event)  # type: ignore[arg-type]
    with metrics.served("0") as url:
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(url, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
    assert 'relax_tune_service_jobs_total{event="taken"} 3.0' in lines
    assert 'relax_tune_service_jobs_total{event="crashed"} 0.0' in lines
    assert "relax_tune_service_jobs_running 1.0" in lines


@pytest.mark.parametrize("address", ["", "port", "127.0.0.1:", "127.0.0.1:70000", "1:2:x"])
def test_service_metrics_refuse_other_than_a_port(address: str) -> None:
    with pytest.raises(UserError, match="--metrics expects"), ServiceMetrics().served(address):
        pass


def test_service_metrics_name_a_taken_port() -> None:
    with ServiceMetrics().served("0") as url:
        address = url.removeprefix("http://").removesuffix("/metrics")
        with pytest.raises(UserError, match="cannot be opened"), ServiceMetrics().served(address):
            pass
