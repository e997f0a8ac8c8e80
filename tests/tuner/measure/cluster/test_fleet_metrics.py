"""Metrics of a scheduler: its fleet as Prometheus reads it."""

from __future__ import annotations

import time
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest
from tests.tuner.measure.cluster.fake_unit import fake_unit, start_fake
from tests.tuner.measure.measure_programs import LIMIT_SECS, request

from relax_tune.errors import MeasureError
from relax_tune.tuner.measure.codec import encode_batch

pytest.importorskip("distributed", reason="Dask Distributed is not installed (extra cluster)")
pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (extra dashboard)")
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from relax_tune.tuner.measure.cluster.fleet import METRIC
from relax_tune.tuner.measure.cluster.fleet_metrics import STATES, FleetCollector
from relax_tune.tuner.measure.cluster.identity import requirement_text
from relax_tune.tuner.measure.cluster.processes import start_scheduler
from relax_tune.tuner.measure.cluster.runner import DaskRunner


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and labels, without hosts."""
    return {
        (s.name, *(s.labels[name] for name in sorted(s.labels) if name != "host")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def worker(address: str, last_seen: float, told: Any) -> SimpleNamespace:
    return SimpleNamespace(address=address, metrics={METRIC: told}, last_seen=last_seen, processing={"key": 1.0})


def test_fleet_metrics_tell_state_and_batches_of_each_unit() -> None:
    drifted, lost = fake_unit({"unit": "drifted\x1b[31m"}), fake_unit({"unit": "lost"})
    runner: Any = drifted._runners["c"]
    batch = encode_batch([request("good", "c")])
    drifted.measure("c", requirement_text(runner.device_info(), {}), batch)
    runner.slow = 2.0
    drifted.check()
    drifted.measure("c", requirement_text(runner.device_info(), {}), batch)
    workers = {"a": worker("a", 100.0, drifted.state()), "b": worker("b", 70.0, lost.state())}
    workers["c"] = worker("c", 100.0, {"c": {"worker": "malformed"}})
    workers["d"] = worker("d", 100.0, {"c": {**lost.state()["c"], "worker": "old", "protocol": 1}})
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FleetCollector(SimpleNamespace(workers=workers, clients={"job": 1})))  # type: ignore[arg-type,unused-ignore]
    text = generate_latest(registry).decode()
    drifted.close()
    lost.close()
    found = samples(text)
    name = "drifted\\x1b[31m"
    assert found["relax_tune_fleet_jobs",] == 1 and found["relax_tune_fleet_batches",] == 4
    states = {state: found["relax_tune_fleet_units", "c", state] for state in STATES}
    assert states == {"lent": 0, "quarantined": 1, "silent": 1, "other-version": 1}
    assert found["relax_tune_unit_batches_total", "c", "measured", name, name] == 1
    assert found["relax_tune_unit_batches_total", "c", "refused", name, name] == 1
    assert found["relax_tune_unit_quarantined", "c", name, name] == 1
    assert found["relax_tune_unit_silent_seconds", "c", "lost", "lost"] == 30
    kernel = next(key[3] for key in found if key[0] == "relax_tune_unit_reference_seconds")
    start, check = (
        found["relax_tune_unit_reference_seconds", at, "c", kernel, name, name] for at in ("start", "check")
    )
    assert check == pytest.approx(2 * start) and "\x1b" not in text


@pytest.mark.process
def test_scheduler_answers_prometheus_of_workers() -> None:
    said: list[str] = []
    process, address = start_scheduler(metrics="0", report=said.append)
    with process, start_fake(address, "one", secs=0.01), DaskRunner(address, "c") as runner:
        runner.submit([request("good", "c")]).result(LIMIT_SECS)
        url, give_up = said[0].removeprefix("metrics at "), time.monotonic() + LIMIT_SECS
        measured = 0.0
        while measured == 0 and time.monotonic() < give_up:  # workers tell a scheduler of their state twice a second
            with urllib.request.urlopen(url, timeout=30) as answer:
                found = samples(answer.read().decode())
            measured = found["relax_tune_unit_batches_total", "c", "measured", "one", "one"]
            time.sleep(0.1)
        assert measured == 1 and found["relax_tune_fleet_units", "c", "lent"] == 1
        with pytest.raises(MeasureError, match=r"error: --metrics .*cannot be opened"):
            start_scheduler(metrics=url.removeprefix("http://").removesuffix("/metrics"))
