"""Interleaved timing of candidates: rounds over all of them, a few samples per visit, all samples stored.

Interleaving spreads the load of other processes over all candidates. On processors, time in which the threads of a sample waited
because other processes had the processor is no time of the kernel: samples without waiting are preferred, more of them are taken
where there are few, and the others are shortened by the fraction that was waiting.

In the regime `warm`, each visit of a short kernel begins with an untimed launch, because the packed weights of other candidates have
evicted its weights. In the regime `flushed`, every sample begins by filling the caches with other data.

Tests: `tests/tuner/measure/device_process/test_timing.py`.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple, Protocol

from relax_tune.runtime.bound_program import BoundProgram
from relax_tune.runtime.device.base import Device, DeviceClock
from relax_tune.tuner.measure.device_process.contention import ThreadTimes
from relax_tune.tuner.measure.messages import ShapeTiming, Symbols, TimingPolicy

_VISIT_SECS = 0.01  # samples of one visit
_VISIT_SAMPLES = 5
_REWARM_BELOW_SECS = 0.02  # a longer launch warms its caches itself
_QUEUED_BELOW_SECS = 1e-3  # on devices with a queue, shorter launches are timed several at a time, as models queue them
_QUEUED_SECS = 500e-6
_QUEUED_LAUNCHES = (4, 64)  # at least, at most: threads that sleep between single launches wake up in each sample
_AWAKE_SECS = 0.03  # an idle GPU raises its clocks over some milliseconds of work
_QUIET = 0.02  # contention of a sample up to which it counts as undisturbed
_MOST_SAMPLES = 3  # factor on the number of samples, to find undisturbed ones
_BEATEN = (
    2.0  # a contestant that is slower than the fastest one by this factor stops, as above `TimingPolicy.stop_above`
)
_DISTURBED = 2.0  # factor on the limit within one visit, which another process may have disturbed as a whole
_FAR = 0.65  # part of the time to stop at from which on a contestant takes no more than the least number of samples


class Sample(NamedTuple):
    """Seconds per launch without waiting for processors, and the contention for them (None: unknown)."""

    secs: float
    contention: float | None = None


class Clock(Protocol):
    """A timer of launches on a device.

    Attributes:
        flushed: number of launches in a sample of the regime `flushed`, each with a flush of the caches before it.
    """

    flushed: int

    def secs(
        self, device: Device, bound: BoundProgram, launches: int, flush: Callable[[], None] | None = None
    ) -> Sample:
        """Return the time of one launch, over `launches` launches and one synchronisation.

        Args:
            flush: runs before each launch, untimed.
        """
        ...

    def repeats(self, single: float, timed: Callable[[int], float]) -> tuple[int, float]:
        """Return the number of launches in a sample of a short kernel, and the seconds of one of them.

        Args:
            single: seconds of a launch that is timed by itself.
            timed: returns the seconds per launch for a number of launches.
        """
        ...


class HostClock:
    """The device's event timer if it has one, else the clock of this process.

    Args:
        threads: Times of the threads that run the kernels; None if others run them.
    """

    flushed = 1

    def __init__(self, threads: ThreadTimes | None = None) -> None:
        self._threads = threads

    def secs(
        self, device: Device, bound: BoundProgram, launches: int, flush: Callable[[], None] | None = None
    ) -> Sample:
        """Time launches, queued before one synchronisation, or one after a flush; see `Clock.secs`."""
        if flush is not None:
            flush()
        launch, series = bound.launch, bound.series(launches) if launches > 1 else None
        if series is not None:
            launch, repeats = series, 1
        else:
            repeats = launches

        def work() -> None:
            for _ in range(repeats):
                launch()

        before = None if self._threads is None else self._threads.read()
        secs = device.elapsed(work) if isinstance(device, DeviceClock) else None
        if secs is None:
            began = time.perf_counter()
            work()
            device.synchronize()
            secs = time.perf_counter() - began
        if self._threads is None or before is None:
            return Sample(secs / launches)
        contention = self._threads.contention(before, self._threads.read(), launches)
        # Threads that all get the same part of their ready time take longer by its reciprocal.
        return Sample(secs * (1 - contention) / launches, contention)

    def repeats(self, single: float, timed: Callable[[int], float]) -> tuple[int, float]:
        """Return as many launches as share the cost of waking up; see `Clock.repeats`."""
        least, most = _QUEUED_LAUNCHES
        launches = min(most, max(least, math.ceil(_QUEUED_SECS / max(single, 1e-6))))
        return launches, timed(launches)


@dataclass(slots=True)
class Contestant:
    """One candidate at one shape.

    Attributes:
        enter: runs before each visit, untimed: records progress, loads inputs.
        flush: runs before each sample, untimed; a sample is then `Clock.flushed` launches.
        target: number of undisturbed samples to take, chosen in the first visit.
        limit: seconds above which it stops.
    """

    bound: BoundProgram
    policy: TimingPolicy
    symbols: Symbols
    stop_above: float | None
    enter: Callable[[], None]
    flush: Callable[[], None] | None = None
    samples: list[Sample] = field(default_factory=list)
    visits: int = 0
    launches: int = 1
    target: int = 0
    rewarm: bool = True
    lost: bool = False
    wall_secs: float = 0.0
    error: Exception | None = None
    limit: float = field(init=False)

    def __post_init__(self) -> None:
        self.limit = math.inf if self.stop_above is None else self.stop_above

    @property
    def done(self) -> bool:
        """True if it needs no further visit."""
        return self.error is not None or self.lost or self.missing <= 0

    @property
    def fastest(self) -> float:
        """Seconds of the fastest sample; 0 without one."""
        return min((s.secs for s in self.samples), default=0.0)

    @property
    def quiet(self) -> list[Sample]:
        """The undisturbed samples."""
        return [s for s in self.samples if s.contention is None or s.contention <= _QUIET]

    @property
    def missing(self) -> int:
        """The number of further samples to take: few of a contestant that is far behind."""
        far = self.fastest > _FAR * self.limit
        target = min(self.target, self.policy.min_repeats) if far else self.target
        return min(target - len(self.quiet), _MOST_SAMPLES * target - len(self.samples))

    def stop_if_beaten(self, warm_up: float) -> None:
        """Stop after the first sample if it is undisturbed, and it and the launch before it are far above the limit."""
        self.lost = bool(self.quiet) and min(warm_up, self.fastest) > _DISTURBED * self.limit

    def race(self, leader: float) -> None:
        """Compare with the fastest contestant of the batch, if the policy has times to stop at."""
        if self.policy.stop_above:
            self.limit = min(math.inf if self.stop_above is None else self.stop_above, _BEATEN * leader)
            self.lost = self.visits > 1 and len(self.samples) > 1 and self.fastest > self.limit

    def timing(self) -> ShapeTiming:
        """Return the result of timing: the undisturbed samples where they are enough, else all."""
        quiet = self.quiet
        chosen = quiet if len(quiet) >= min(self.target, self.policy.min_repeats) else self.samples
        known = [s.contention for s in chosen if s.contention is not None]
        secs = tuple(s.secs for s in chosen)
        return ShapeTiming(
            self.symbols, secs, self.launches, self.policy.regime, self.lost, fmean(known) if known else None
        )


def time_interleaved(
    device: Device,
    contestants: Sequence[Contestant],
    failures: tuple[type[Exception], ...],
    clock: Clock | None = None,
) -> None:
    """Take every contestant's samples, interleaved.

    Args:
        failures: exceptions that end only their contestant, as its `error`.
        clock: timer of launches; None times them in this process.
    """
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadTimes()) if device.info.unit.startswith("cpu:") else None
        watch = HostClock(threads if threads is not None and threads.known else None) if clock is None else clock
        if gc.isenabled():
            # A collection within a sample would count as time of the kernel.
            gc.disable()
            stack.callback(gc.enable)
        if contestants and _is_gpu(device):
            _visit(device, contestants[0], _wake, failures, watch)
        leader = math.inf
        for contestant in contestants:
            contestant.race(leader)
            _visit(device, contestant, _first_visit, failures, watch)
            leader = min([leader, *(s.secs for s in contestant.samples)])
        if threads is not None:
            threads.refresh()  # a first launch may start the device's threads
        active = [contestant for contestant in contestants if not contestant.done]
        while active:
            for contestant in active:
                _visit(device, contestant, _sample, failures, watch)
            active = [contestant for contestant in active if not contestant.done]
            leader = min(
                (median(s.secs for s in c.samples) for c in contestants if len(c.samples) > 1), default=math.inf
            )
            for contestant in active:
                contestant.race(leader)
            active = [contestant for contestant in active if not contestant.done]


def _visit(
    device: Device,
    contestant: Contestant,
    what: Callable[[Device, Contestant, Clock], None],
    failures: tuple[type[Exception], ...],
    clock: Clock,
) -> None:
    began = time.perf_counter()
    try:
        contestant.enter()
        contestant.bound.prepare()
        what(device, contestant, clock)
    except failures as error:
        contestant.error = error
    contestant.wall_secs += time.perf_counter() - began


def _is_gpu(device: Device) -> bool:
    return dict(device.info.limits).get("warp", 1) > 1


def _wake(device: Device, contestant: Contestant, clock: Clock) -> None:
    until = time.perf_counter() + _AWAKE_SECS
    while time.perf_counter() < until:
        clock.secs(device, contestant.bound, 1)


def _first_visit(device: Device, contestant: Contestant, clock: Clock) -> None:
    """Warm up, estimate the time of a launch, and choose how many samples fit the budget. The estimate is the first sample if it can be."""
    policy = contestant.policy
    single = clock.secs(device, contestant.bound, 1).secs
    if single > policy.max_single_secs:
        contestant.samples.append(clock.secs(device, contestant.bound, 1))
        contestant.target, contestant.rewarm = 2, False
        contestant.stop_if_beaten(single)
        return
    if _is_gpu(device):
        clock.secs(device, contestant.bound, 1)  # the second launch records
    if contestant.flush is not None:
        contestant.launches = clock.flushed
    began = time.perf_counter()
    estimate = clock.secs(device, contestant.bound, contestant.launches, contestant.flush)
    warm_up, single, queued = single, estimate.secs, False
    if contestant.flush is not None:  # flushing counts in the budget
        single = (time.perf_counter() - began) / contestant.launches
    elif device.info.kind != "c" and single < _QUEUED_BELOW_SECS:
        timed = lambda launches: clock.secs(device, contestant.bound, launches).secs
        contestant.launches, single = clock.repeats(single, timed)
        queued = True
    sample = max(single * contestant.launches, 1e-7)
    contestant.target = max(policy.min_repeats, min(policy.max_repeats, int(policy.budget_secs / sample)))
    contestant.rewarm = contestant.flush is None and single < _REWARM_BELOW_SECS
    if not queued:
        contestant.samples.append(estimate)
        contestant.visits += 1
        contestant.stop_if_beaten(warm_up)


def _sample(device: Device, contestant: Contestant, clock: Clock) -> None:
    """Make one visit: an untimed launch if the device needs it, then samples until the visit's time is used."""
    bound, samples = contestant.bound, contestant.samples
    if contestant.rewarm:
        clock.secs(device, bound, 1)
    contestant.visits += 1
    limit = contestant.limit * (_DISTURBED if contestant.visits < 2 else 1)
    give_up = time.perf_counter() + _VISIT_SECS
    count = min(_VISIT_SAMPLES, contestant.missing)
    if contestant.policy.stop_above and len(samples) < contestant.policy.min_repeats:
        count = min(count, contestant.policy.min_repeats - len(samples))  # then it is compared with the others
    for _ in range(count):
        samples.append(clock.secs(device, bound, contestant.launches, contestant.flush))
        # A single sample may be slow by accident.
        if len(samples) >= 2 and contestant.fastest > limit:
            contestant.lost = True
            return
        if time.perf_counter() > give_up:
            return
