"""Waiting for processors: read from the scheduler's statistics, taken off samples, and avoided where samples without it are enough."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.measure.device_process.contention import ThreadTimes
from relax_tune.tuner.measure.device_process.timing import Contestant, HostClock, Sample, time_interleaved
from relax_tune.tuner.measure.messages import TimingPolicy


def waits(folder: Path, **nanoseconds: int) -> None:
    """Write the statistics of threads: running, waiting and slices."""
    for name, waiting in nanoseconds.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "schedstat").write_text(f"1000 {waiting} 3\n")


def test_contention_is_the_waiting_part_of_the_ready_time(tmp_path: Path) -> None:
    waits(tmp_path, t1=5_000_000, t2=0)
    with ThreadTimes(tmp_path) as threads:
        assert threads.known
        _, before = threads.read()
        waits(tmp_path, t1=6_000_000, t2=2_040_000)
        _, after = threads.read()
        assert after - before == pytest.approx(3.04e-3)
        # of two threads in one launch, 20 us each do not count
        assert threads.contention((1.0, before), (1.009, after), 1) == pytest.approx(3e-3 / 12e-3)
        assert threads.contention((1.0, before), (1.0, before), 1) == 0


def test_threads_come_and_go(tmp_path: Path) -> None:
    waits(tmp_path, t1=1_000_000)
    with ThreadTimes(tmp_path) as threads:
        waits(tmp_path, t2=2_000_000)
        assert threads.read()[1] == pytest.approx(1e-3)
        threads.refresh()
        assert threads.read()[1] == pytest.approx(3e-3)
        (tmp_path / "t1" / "schedstat").unlink()
        (tmp_path / "t1").rmdir()
        threads.refresh()
        assert threads.read()[1] == pytest.approx(2e-3)


@pytest.mark.parametrize("content", [None, "", "x y z", "12"])
def test_system_without_statistics_is_unknown_or_says_nothing(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "t1").mkdir()
        (tmp_path / "t1" / "schedstat").write_text(content)
    with ThreadTimes(tmp_path) as threads:
        assert threads.known == (content is not None)
        assert threads.read()[1] == 0


def test_own_process_has_threads() -> None:
    with ThreadTimes() as threads:
        if not threads.known:
            pytest.skip("this system keeps no statistics of threads")
        before = threads.read()
        sum(range(200_000))
        after = threads.read()
    assert after[0] > before[0] and after[1] >= before[1]


class Waiting:
    """Times of threads that wait for a processor as long as they run."""

    known = True

    def __init__(self) -> None:
        self.reads = 0

    def read(self) -> tuple[float, float]:
        self.reads += 1
        return float(self.reads), float(self.reads)

    def contention(self, before: Sequence[float], after: Sequence[float], launches: int) -> float:
        assert after[0] > before[0] and launches == 1
        return 0.5


def test_sample_is_shortened_by_the_waiting_part() -> None:
    clock = HostClock(Waiting())  # type: ignore[arg-type]
    device: Any = SimpleNamespace(elapsed=lambda work: 8e-3, synchronize=lambda: None)
    bound: Any = SimpleNamespace(launch=lambda: None, series=lambda times: None)
    assert clock.secs(device, bound, 1) == Sample(4e-3, 0.5)


class Given:
    """A clock that gives samples in turn."""

    flushed = 1

    def __init__(self, samples: Iterator[Sample]) -> None:
        self.samples, self.taken = samples, 0

    def secs(self, *_: Any) -> Sample:
        self.taken += 1
        return next(self.samples)

    def repeats(self, single: float, timed: Callable[[int], float]) -> tuple[int, float]:
        raise AssertionError("on processors launches are timed one by one")


def timed(samples: Iterator[Sample]) -> tuple[Contestant, Given]:
    device: Any = SimpleNamespace(info=DeviceInfo("c", "", (), (), unit="cpu:here"))
    bound: Any = SimpleNamespace(prepare=lambda: None)
    contestant = Contestant(bound, TimingPolicy(3, 6, 0.006), {"n": 1}, None, lambda: None)
    clock = Given(samples)
    time_interleaved(device, [contestant], (), clock)
    return contestant, clock


def every(number: int, quiet: float, disturbed: float) -> Iterator[Sample]:
    """Yield one undisturbed sample after every `number - 1` disturbed ones."""
    while True:
        for _ in range(number - 1):
            yield Sample(disturbed, 0.4)
        yield Sample(quiet, 0.0)


def test_undisturbed_samples_are_enough() -> None:
    contestant, _ = timed(every(1, 1e-3, 9e-3))
    assert len(contestant.samples) == 6
    assert contestant.timing().samples_secs == (1e-3,) * 6 and contestant.timing().contention == 0


def test_more_samples_are_taken_until_enough_are_undisturbed() -> None:
    contestant, _ = timed(every(3, 1e-3, 1.1e-3))
    timing = contestant.timing()
    assert len(contestant.samples) > 6
    assert set(timing.samples_secs) == {1e-3} and len(timing.samples_secs) >= 3 and timing.contention == 0


def test_where_nothing_is_undisturbed_all_samples_count_and_say_so() -> None:
    contestant, _ = timed(every(1000, 1e-3, 1.1e-3))
    timing = contestant.timing()
    assert len(timing.samples_secs) == 15 and set(timing.samples_secs) == {1.1e-3}
    assert timing.contention == pytest.approx(0.4)


def test_unknown_contention_stays_unknown() -> None:
    contestant, _ = timed(iter([Sample(1e-3)] * 50))
    assert contestant.timing().contention is None and len(contestant.samples) == 6


def test_files_are_closed(tmp_path: Path) -> None:
    waits(tmp_path, t1=1)
    before = len(os.listdir("/proc/self/fd"))
    with ThreadTimes(tmp_path):
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before
