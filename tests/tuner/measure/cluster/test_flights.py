"""When a batch on a worker is late, or its worker missing for too long."""

from __future__ import annotations

from relax_tune.errors import MeasureError
from relax_tune.tuner.measure.cluster.fleet import LentDevice
from relax_tune.tuner.measure.cluster.fleet_view import FleetView, hidden_key
from relax_tune.tuner.measure.cluster.flights import SentFlight
from relax_tune.tuner.measure.ledger import Batch, Group
from relax_tune.tuner.measure.messages import MeasureRequest


def device(address: str, silent_secs: float = 0.0) -> LentDevice:
    return LentDevice(address, "c", address, "h", "u", "id", "fake | ", {}, 1.25, "", silent_secs)


def flight(deadline: float = 10.0) -> SentFlight:
    requests = [MeasureRequest("a", "{}", (), ())]
    return SentFlight(Group(Batch(requests), requests), None, device("w"), deadline)


class Scheduler:
    """Listings of two workers, one of which is silent, and of tasks of this and another job."""

    def devices(self) -> list[LentDevice]:
        return [device("v", silent_secs=1e3), device("w")]

    def processing(self) -> dict[str, list[str]]:
        return {"w": [hidden_key("flying"), hidden_key("landed"), hidden_key("other")]}


def test_flight_is_late_over_the_deadline_or_with_a_silent_worker() -> None:
    assert not flight().is_late({}, 10.0) and flight().is_late({}, 10.1)
    assert flight().is_late({"w"}, 0.0) and not flight().is_late({"v"}, 0.0)


def test_flight_superseded_or_resolved_is_never_late() -> None:
    superseded, resolved = flight(), flight()
    superseded.superseded = True
    resolved.group.batch.fail(MeasureError("closed"))
    assert not superseded.is_late({"w"}, 1e9) and not resolved.is_late({"w"}, 1e9)


def test_worker_missing_for_a_moment_is_not_gone() -> None:
    subject = flight()
    assert not subject.is_gone({"v"}, 100.0) and not subject.is_gone({"v"}, 102.9)
    assert not subject.is_gone({"w"}, 103.0), "it is connected again"
    assert not subject.is_gone({"v"}, 104.0) and subject.is_gone({"v"}, 107.1)


def test_free_worker_is_heard_of_not_busy_and_without_refusal() -> None:
    view = FleetView(Scheduler(), "c", "", lambda _: None)
    heard, silent = view.split_silent(view.fitting("id", {}))
    assert [d.address for d in heard] == ["w"] and silent == {"v": 1e3}
    assert view.free(heard, ()) == heard and view.free(heard, {"w"}) == []
    view.refuse("w")
    assert view.free(heard, ()) == []


def test_foreign_excludes_flying_and_landed_batches() -> None:
    view = FleetView(Scheduler(), "c", "", lambda _: None)
    view.land("landed")
    assert view.foreign(["flying"]) == {"w": 1}


def test_fitting_reports_each_misfit_once_per_listing() -> None:
    notices: list[str] = []
    reference: dict[str, float] = {}
    view = FleetView(Scheduler(), "c", "", notices.append)
    for _ in range(2):
        assert view.fitting("another", reference) == []
    assert len(notices) == 2 and "worker w is excluded: another device" in notices[1]
