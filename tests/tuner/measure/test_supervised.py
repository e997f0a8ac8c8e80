"""The supervisor of every runner, over a transport of one unit whose attempts end as the test says."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest
from tests.tuner.measure.measure_programs import LIMIT_SECS

from relax_tune.errors import FleetUnavailable, MeasureError
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.measure.ledger import Batch, Blame, Group, Ledger, RetryPolicy
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult
from relax_tune.tuner.measure.supervised import Ended, SupervisedRunner

Reason = Blame | BaseException | None


class OneUnit:
    """A transport whose attempt ends when the test calls `end`."""

    name = "one unit"
    policy = RetryPolicy(2, bisects=False)

    def __init__(self, unopened: Exception | None = None) -> None:
        self.unopened = unopened
        self.sent: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.calls: list[str] = []
        self.broken: Exception | None = None
        self._ends: queue.SimpleQueue[tuple[str, Reason] | None] = queue.SimpleQueue()
        self._group: Group | None = None

    def end(self, ok: str = "", reason: Reason = None) -> None:
        """End the attempt with results for the ids in `ok`."""
        self._ends.put((ok, reason))

    def open(self) -> DeviceInfo:
        if self.unopened is not None:
            raise self.unopened
        return DeviceInfo("c", "one", (), (), ())

    def slots(self) -> int:
        return 1

    def poll(self) -> Sequence[Ended]:
        if self._group is None or (end := self._ends.get()) is None:
            return ()
        group, self._group = self._group, None
        group.batch.store([MeasureResult(id, "ok") for id in end[0]], group.requests)
        return (Ended(group, end[1]),)

    def send(self, ledger: Ledger) -> None:
        if self.broken is not None:
            error, self.broken, self._group = self.broken, None, None
            raise error
        if self._group is None and (group := ledger.take()) is not None:
            self._group = group
            self.sent.put("".join(request.id for request in group.requests))

    def end_batch(self, batch: Batch) -> None:
        assert not batch.future.done()
        self.calls.append("end batch " + "".join(request.id for request in batch.requests))

    def wake(self) -> None:
        self._ends.put(None)

    def stop(self) -> None:
        self.calls.append("stop")
        self._ends.put(None)

    def close(self) -> None:
        assert not [thread for thread in threading.enumerate() if thread.name == "measure-one unit"]
        self.calls.append("close")


@pytest.fixture
def unit() -> OneUnit:
    return OneUnit()


@pytest.fixture
def runner(unit: OneUnit) -> Iterator[SupervisedRunner]:
    with SupervisedRunner(unit) as opened:
        yield opened


def submit(runner: SupervisedRunner, ids: str) -> Future[list[MeasureResult]]:
    return runner.submit([MeasureRequest(id, "{}", (), ()) for id in ids])


def ids_of(future: Future[list[MeasureResult]]) -> str:
    return "".join(result.id for result in future.result(LIMIT_SECS) if result.ok)


def test_runner_sends_batches_in_order_and_the_rest_of_an_early_end_first(
    unit: OneUnit, runner: SupervisedRunner
) -> None:
    first, second = submit(runner, "abc"), submit(runner, "d")
    unit.end("b", Blame("departed", (), "why"))
    unit.end("ca")
    unit.end("d")
    assert (ids_of(first), ids_of(second)) == ("abc", "d")
    assert [unit.sent.get(timeout=LIMIT_SECS) for _ in range(3)] == ["abc", "ac", "d"]
    assert unit.calls == ["end batch abc", "end batch d"]


def test_batch_without_all_results_fails_and_names_the_requests(unit: OneUnit, runner: SupervisedRunner) -> None:
    future = submit(runner, "abc")
    unit.end("b")
    with pytest.raises(MeasureError, match=r"from 'one unit', got none for \['a', 'c'\]"):
        future.result(LIMIT_SECS)


def test_error_of_an_attempt_fails_one_batch(unit: OneUnit, runner: SupervisedRunner) -> None:
    first, second = submit(runner, "a"), submit(runner, "b")
    unit.end("", ZeroDivisionError("odd"))
    unit.end("b")
    with pytest.raises(ZeroDivisionError, match="odd"):
        first.result(LIMIT_SECS)
    assert ids_of(second) == "b"


def test_error_of_the_transport_fails_pending_batches_and_measures_later_ones(
    unit: OneUnit, runner: SupervisedRunner
) -> None:
    first, second = submit(runner, "a"), submit(runner, "b")
    assert unit.sent.get(timeout=LIMIT_SECS) == "a"
    unit.broken = FleetUnavailable("away")
    unit.wake()
    for future in (first, second):
        with pytest.raises(FleetUnavailable, match="away"):
            future.result(LIMIT_SECS)
    third = submit(runner, "c")
    assert unit.sent.get(timeout=LIMIT_SECS) == "c"
    unit.end("c")
    assert ids_of(third) == "c"


def test_cancelled_batch_is_not_sent(unit: OneUnit, runner: SupervisedRunner) -> None:
    first, second, third = submit(runner, "a"), submit(runner, "b"), submit(runner, "c")
    assert unit.sent.get(timeout=LIMIT_SECS) == "a"
    assert second.cancel() and not first.cancel()
    unit.end("a")
    assert unit.sent.get(timeout=LIMIT_SECS) == "c"
    unit.end("c")
    assert ids_of(third) == "c"


def test_closed_runner_ends_pending_futures_and_closes_the_transport_last(unit: OneUnit) -> None:
    runner = SupervisedRunner(unit)
    futures = submit(runner, "a"), submit(runner, "b")
    assert unit.sent.get(timeout=LIMIT_SECS) == "a"
    runner.close()
    for future in futures:
        with pytest.raises(MeasureError, match="the runner on 'one unit' was closed"):
            future.result(0)
    assert sorted(unit.calls[:-1]) == ["end batch a", "end batch b", "stop"] and unit.calls[-1] == "close"
    with pytest.raises(MeasureError, match="the runner on 'one unit' is closed"):
        submit(runner, "c")


def test_transport_failing_to_open_is_closed() -> None:
    unit = OneUnit(MeasureError("no device"))
    with pytest.raises(MeasureError, match="no device"):
        SupervisedRunner(unit)
    assert unit.calls == ["stop", "close"]
