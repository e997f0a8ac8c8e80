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
from relax_tune.tuner.measure.reference import MOMENTS, QUIET, measure_reference, measure_until_agreed

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


def test_unit_that_is_never_quiet_is_timed_with_its_spread() -> None:
    runner = Moments(repeat([1.0, 2.0, 3.0, 2.0]))
    times = measure_reference(runner, 0.0)
    assert runner.asked == MOMENTS
    assert (times["compute"], times["compute" + SPREAD]) == (2.0, pytest.approx(0.25))


def test_spreads_are_never_compared() -> None:
    assert disagreement({"a": 1.0, "a" + SPREAD: 0.01}, {"a": 1.1, "a" + SPREAD: 0.5}) == ""


def test_comparison_waits_for_a_moment_that_agrees() -> None:
    runner = Moments(iter([[20.0], [3.0], [1.1]]))
    measure_until_agreed(runner, {"compute": 1.0}, 60.0)
    assert runner.asked == 3


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
def test_local_runner_times_its_unit_once_and_compares_it() -> None:
    with LocalRunner("c") as runner:
        times = runner.calibrate({})
        assert {"compute", "stream"} <= times.keys() and runner.calibrate({}) is times
        assert runner.calibrate(times) is times
        with pytest.raises(OtherUnit):
            runner.calibrate({"compute": times["compute"] * 1e3})
