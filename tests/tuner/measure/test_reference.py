"""Reference times: medians of quiet moments, and the comparison of a unit with the records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import repeat

import pytest
from tests.tuner.measure.cluster.fake_unit import FakeRunner

from relax_tune.database.reference import SPREAD, disagreement
from relax_tune.errors import MeasureError, is_temporary
from relax_tune.tuner.measure.base import OtherUnit
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult, ShapeTiming, failed
from relax_tune.tuner.measure.reference import MOMENTS, QUIET, measure_reference, measure_until_agreed, wait_for_quiet

Samples = Sequence[float]


class Moments(FakeRunner):
    """A unit whose reference kernels take these samples, moment by moment."""

    def __init__(self, moments: Iterator[Samples]) -> None:
        super().__init__({"unit": "u"}, "w")
        self.moments, self.asked = moments, 0

    def submit(self, batch: Sequence[MeasureRequest]) -> Future[list[MeasureResult]]:
        self.asked += 1
        done: Future[list[MeasureResult]] = Future()
        samples = tuple(next(self.moments))
        (request,) = batch
        done.set_result(
            [MeasureResult(request.id, "ok", timings=tuple(ShapeTiming(dict(s), samples) for s in request.timings))]
        )
        return done


def test_reference_time_is_the_median_of_quiet_moments() -> None:
    busy, quiet = [23.9, 2.0, 30.0, 23.0], [1.9, 1.92, 1.91, 1.9]
    runner = Moments(iter([busy, quiet, busy, [1.88] * 4, [1.95] * 4]))
    times = measure_reference(runner, 60.0)
    assert runner.asked == 5
    assert times["compute"] == times["stream"] == pytest.approx(1.905)
    assert 0 < times["compute" + SPREAD] <= QUIET


def test_restless_unit_is_timed_with_a_large_spread() -> None:
    runner = Moments(repeat([1.0, 2.0, 3.0, 2.0]))
    times = measure_reference(runner, 0.0)
    assert runner.asked == MOMENTS
    assert (times["compute"], times["compute" + SPREAD]) == (2.0, pytest.approx(0.25))


def test_spreads_are_never_compared() -> None:
    assert disagreement({"a": 1.0, "a" + SPREAD: 0.01}, {"a": 1.1, "a" + SPREAD: 0.5}) == ""


def test_comparison_waits_for_an_agreeing_moment() -> None:
    runner = Moments(iter([[20.0], [3.0], [1.1]]))
    measure_until_agreed(runner, {"compute": 1.0}, 60.0)
    assert runner.asked == 3


class Contended(FakeRunner):
    """A unit whose kernels wait for a processor: the fraction of their time, moment by moment; None if the system does not tell."""

    def __init__(self, contentions: Iterator[float | None]) -> None:
        super().__init__({"unit": "u"}, "w")
        self.contentions = contentions

    def submit(self, batch: Sequence[MeasureRequest]) -> Future[list[MeasureResult]]:
        done: Future[list[MeasureResult]] = Future()
        contention = next(self.contentions)
        (request,) = batch
        timings = tuple(ShapeTiming(dict(s), (1.0,), contention=contention) for s in request.timings)
        done.set_result([MeasureResult(request.id, "ok", timings=timings)])
        return done


@pytest.mark.parametrize("contention", [None, 0.0, 0.5])
def test_measuring_begins_at_once_beside_few_processes(contention: float | None) -> None:
    notices: list[str] = []
    wait_for_quiet(Contended(iter([contention])), 60.0, notices.append)
    assert not notices


def test_busy_machine_is_named_and_waited_for() -> None:
    notices: list[str] = []
    pauses: list[float] = []
    wait_for_quiet(Contended(iter([0.85, 0.9, 0.1])), 60.0, notices.append, pauses.append)
    (notice,) = notices
    assert "85%" in notice and "waiting up to 60 s" in notice and len(pauses) == 2


def test_wait_for_a_quiet_machine_ends() -> None:
    notices: list[str] = []
    wait_for_quiet(Contended(repeat(0.85)), 0.0, notices.append, lambda _: None)
    assert "still busy" in notices[-1]


def test_unit_of_another_speed_is_refused_for_now() -> None:
    with pytest.raises(
        OtherUnit, match=r"reference kernel compute: expected 1000\.000 ms.*got 2000\.000 ms.*--renew"
    ) as error:
        measure_until_agreed(Moments(repeat([2.0])), {"compute": 1.0}, 0.0)
    assert is_temporary(error.value)


def test_failing_reference_kernel_is_an_error() -> None:
    class Failing(FakeRunner):
        def submit(self, batch: Sequence[MeasureRequest]) -> Future[list[MeasureResult]]:
            done: Future[list[MeasureResult]] = Future()
            done.set_result([failed(r.id, "launch", "no such function") for r in batch])
            return done

    with pytest.raises(MeasureError, match="failed at stage 'launch': no such function"):
        measure_reference(Failing({"unit": "u"}, "w"))


@pytest.mark.ccompiler
@pytest.mark.process
def test_local_runner_times_the_unit_once_and_compares() -> None:
    with LocalRunner("c") as runner:
        times = runner.calibrate({})
        assert {"compute", "stream"} <= times.keys() and runner.calibrate({}) is times
        assert runner.calibrate(times) is times
        with pytest.raises(OtherUnit):
            runner.calibrate({"compute": times["compute"] * 1e3})
