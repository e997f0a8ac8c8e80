"""What of a GPU's ways is no part of a candidate's time, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.measure.device_process import timing
from relax_tune.tuner.measure.device_process.timing import Contestant, time_interleaved
from relax_tune.tuner.measure.messages import TimingPolicy

LAUNCH_SECS, RECORDING_SECS, SLEEPY_SECS = 10e-6, 2e-3, 0.02


class Clock:
    """Launches take their time, ten times as much before the device was at work for so long; the second one is recorded, too."""

    def __init__(self) -> None:
        self.now = self.worked = 0.0
        self.device = SimpleNamespace(info=DeviceInfo("cuda", "", (), (("warp", 32),)), synchronize=lambda: None)

    def launch(self, times: int = 1) -> None:
        took = times * LAUNCH_SECS * (10 if self.worked < SLEEPY_SECS else 1)
        self.now, self.worked = self.now + took, self.worked + took

    def contestant(self) -> Contestant:
        runs: list[int] = []

        def launch() -> None:
            self.launch()
            runs.append(1)
            self.now += RECORDING_SECS * (len(runs) == 2)

        def series(times: int) -> Callable[[], None]:
            return lambda: self.launch(times)

        bound: Any = SimpleNamespace(launch=launch, prepare=lambda: None, series=series)
        policy = TimingPolicy(3, 20, 0.02, 0.1, (), "warm")
        return Contestant(bound, policy, {}, None, lambda: None)


def test_neither_waking_up_nor_recording_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    found = [clock.contestant() for _ in range(3)]
    time_interleaved(cast(Any, clock.device), found, ())
    for contestant in found:
        assert [s.secs for s in contestant.samples] == pytest.approx([LAUNCH_SECS] * 20)
        assert contestant.launches == pytest.approx(50, abs=1), "as many as fill the time of a sample"


def test_launches_below_a_millisecond_share_a_wake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now, launch_secs, wake_secs = [0.0], 300e-6, 100e-6

    def spend(secs: float) -> None:
        now[0] += secs

    info = DeviceInfo("opencl", "", (), (("warp", 1),))
    device: Any = SimpleNamespace(info=info, synchronize=lambda: spend(wake_secs))
    bound: Any = SimpleNamespace(launch=lambda: spend(launch_secs), prepare=lambda: None, series=lambda times: None)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    contestant = Contestant(bound, TimingPolicy(3, 20, 0.02, 0.1, (), "warm"), {}, None, lambda: None)
    time_interleaved(device, [contestant], ())
    assert contestant.launches == 4
    assert [s.secs for s in contestant.samples] == pytest.approx(
        [launch_secs + wake_secs / 4] * len(contestant.samples)
    )


class Paced:
    """A clock whose contestants take the seconds that their programs are."""

    flushed = 1

    def secs(self, device: Any, bound: Any, launches: int, flush: Any = None) -> timing.Sample:
        return timing.Sample(bound.secs, 0.0)

    def repeats(self, single: float, timed: Callable[[int], float]) -> tuple[int, float]:
        raise AssertionError("on processors launches are timed one by one")


def _timed(secs: list[float], stop_above: tuple[float | None, ...]) -> list[Contestant]:
    """Time contestants that take so long, at a budget of twenty samples of the first."""
    policy = TimingPolicy(3, 20, 20 * secs[0], 10.0, stop_above)
    device: Any = SimpleNamespace(info=DeviceInfo("c", "", (), ()), synchronize=lambda: None)

    def contestant(taken: float) -> Contestant:
        bound: Any = SimpleNamespace(prepare=lambda: None, secs=taken)
        return Contestant(bound, policy, {}, stop_above[0] if stop_above else None, lambda: None)

    found = [contestant(s) for s in secs]
    time_interleaved(device, found, (), Paced())
    return found


def test_contestants_far_behind_take_few_samples_and_beaten_ones_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_VISIT_SAMPLES", 1)  # as of launches that take longer than a visit
    near, ahead, far, beaten = _timed([1.05, 1.0, 1.5, 2.5], (None,))
    assert len(ahead.samples) == len(near.samples) == 20
    assert len(far.samples) == 3 and not far.lost
    assert len(beaten.samples) == 2 and beaten.lost and beaten.timing().lost


def test_time_to_stop_at_counts_before_the_first_round() -> None:
    ahead, beaten, doubtful = _timed([1.0, 5.0, 2.5], (2.0,))
    assert len(beaten.samples) == 1 and beaten.lost, "it and the launch before it took more than twice the limit"
    assert len(doubtful.samples) == 2 and doubtful.lost
    assert len(ahead.samples) == 20 and not ahead.lost


def test_policy_without_times_to_stop_at_has_no_race() -> None:
    assert [len(c.samples) for c in _timed([1.0, 1.5, 2.5], ())] == [20, 13, 8]


def test_hopeless_contestant_behind_a_fast_one_stops_in_the_first_visit() -> None:
    ahead, generic = _timed([1.0, 5.0], (None,))
    assert len(ahead.samples) == 20 and not ahead.lost
    assert len(generic.samples) == 1 and generic.lost, "a warm-up and one sample of more than four times the fastest"


def test_disturbed_first_visit_ends_no_race() -> None:
    launches: list[int] = []

    class Disturbed(Paced):
        def secs(self, device: Any, bound: Any, count: int, flush: Any = None) -> timing.Sample:
            if bound.secs == 1.0:
                return timing.Sample(1.0, 0.0)
            launches.append(1)
            return timing.Sample(9.0, 0.7) if len(launches) < 3 else timing.Sample(0.9, 0.0)

    policy = TimingPolicy(3, 20, 20.0, 100.0, (None,))
    device: Any = SimpleNamespace(info=DeviceInfo("c", "", (), ()), synchronize=lambda: None)
    bounds: list[Any] = [SimpleNamespace(prepare=lambda: None, secs=s) for s in (1.0, 0.9)]
    ahead, disturbed = [Contestant(b, policy, {}, None, lambda: None) for b in bounds]
    time_interleaved(device, [ahead, disturbed], (), Disturbed())
    assert not disturbed.lost and {s.secs for s in disturbed.quiet} == {0.9}
