"""Links: the fit of latency and bandwidth, and the latest records of a device."""

from __future__ import annotations

import pytest
from tests.support.tuner_models import PAPER_DEVICE

from relax_tune.database.records import Target
from relax_tune.database.store import MemoryStore
from relax_tune.tuner.placement import links
from relax_tune.tuner.placement.links import SIZES, WAYS, Link, fit_link, record_link, stored_link

TARGET = Target(PAPER_DEVICE.kind, PAPER_DEVICE.name, PAPER_DEVICE.fingerprint)


def times(latency: float, bandwidth: float) -> dict[tuple[links.Way, int], tuple[float, ...]]:
    return {(way, n): (latency + n / bandwidth,) * 3 for way in WAYS for n in SIZES}


def test_fit_link_exact_times_gives_latency_and_bandwidth() -> None:
    link = fit_link(times(2e-5, 4e9))
    assert link.up_latency == pytest.approx(2e-5) and link.down_bandwidth == pytest.approx(4e9)
    assert link.up(1 << 20) == link.down(1 << 20) == pytest.approx(2e-5 + (1 << 20) / 4e9)


def test_fit_link_without_times_costs_nothing() -> None:
    link = fit_link({})
    assert link.up(1 << 30) == link.down(1 << 30) == 0.0


def test_stored_link_returns_the_latest_records(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    assert stored_link(store, TARGET.key) is None
    for when, latency in ((2.0, 3e-5), (1.0, 9e-5)):
        monkeypatch.setattr(links, "time_link", lambda _, latency=latency: times(latency, 4e9))
        assert isinstance(record_link(store, TARGET, None, when), Link)  # type: ignore[arg-type]
    latest = stored_link(store, TARGET.key)
    assert latest is not None and latest.up_latency == pytest.approx(3e-5)
