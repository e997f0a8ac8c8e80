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
