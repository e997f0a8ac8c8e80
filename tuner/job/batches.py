"""The batches of a job that are being measured: requests to the runner, and records of the results.

Tests: `tests/tuner/job/test_several_batches.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from statistics import fmean

from relax_tune.database.records import Measurement, VariantRecord
from relax_tune.database.store import Store
from relax_tune.errors import RelaxTuneError
from relax_tune.tuner.job import task_leases
from relax_tune.tuner.job.progress import TuningSummary
from relax_tune.tuner.job.recording import Recording
from relax_tune.tuner.job.task_state import HOPELESS, Flight, TaskState
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.measure.interrupts import shielded
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult, TimingPolicy
from relax_tune.tuner.plan.validation import checkable
from relax_tune.tuner.task.check import CheckCases
from relax_tune.tuner.task.domain import Point
from relax_tune.tuner.task.task import binding
from relax_tune.tuner.task.unfused_variants import in_parts

ROUNDS = (3, 20)
"""Fewest and most samples of a shape in a trial."""
FINAL_ROUNDS = (7, 60)
"""The same for contenders: more than twice as many, so that the median of all samples is one of the second timing. Luck in the
first timing, which selects contenders, then does not decide.
"""
DEADLINE_SECS = 30.0
"""Longest duration of a single step of a measurement before its process is killed."""
LIBRARY_DEADLINE_SECS = 180.0
"""The same where a library is called, which may compile its kernels on first use (CLBlast with PoCL: minutes on a busy machine)."""


class Batches:
    """The batches that are being measured, in the order in which they were started.

    Attributes:
        renew: Called while something is waited for: renews leases and the job's heartbeat.
        report: Called after every batch with its task.
        summary: Counts of the job so far.
    """

    def __init__(
        self,
        runner: Runner,
        store: Store,
        recording: Recording,
        timing_secs: float,
        renew: Callable[[], None],
        report: Callable[[TaskState], None],
    ) -> None:
        self.runner, self.store, self.recording = runner, store, recording
        self.timing_secs = timing_secs
        self.renew, self.report = renew, report
        self.summary = TuningSummary()
        self._checks = CheckCases()
        self._flights: list[Flight] = []
        self._contentions: list[float] = []

    def __bool__(self) -> bool:
        return bool(self._flights)

    @property
    def is_full(self) -> bool:
        """True if the runner takes no further batch now."""
        return len(self._flights) >= self.runner.slots()

    def start(
        self,
        state: TaskState,
        variants: Sequence[VariantRecord],
        part: str = "trial",
        budget_factor: float = 1.0,
        shapes: Mapping[str, Sequence[Point]] | None = None,
        anchors: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Start to build, check and time variants of a task.

        Args:
            part: Reason to measure, part of the records' ids: `trial`, or a later timing of contenders.
            budget_factor: On the time budget of a variant.
            shapes: Shapes at which each variant is timed, by key; None: the anchors of the task.
            anchors: Numbers of the anchors at which each variant is timed, by key; None: all.
        """
        if not variants:
            return
        task = state.task
        requests: list[MeasureRequest] = []
        failures: list[Measurement] = []
        by_id: dict[str, VariantRecord] = {}
        at_anchors, stops = task.bindings(), _stops(state)
        checks = standard = self._checks.standard(task)
        least, most = ROUNDS if part == "trial" else FINAL_ROUNDS
        policy = TimingPolicy(least, most, budget_factor * self.timing_secs, 0.1, (), task.regime)
        for variant in variants:
            self.renew()
            identity = self.recording.id(task, variant, part)
            try:
                program = state.task_variants.program(variant)
            except RelaxTuneError as error:  # one candidate that cannot be generated is that candidate's failure
                failures.append(
                    self.recording.failed(task, variant, identity, "constraint", error_text(error)),
                )
                continue
            by_id[identity] = variant
            chosen: Sequence[int] = range(len(at_anchors)) if anchors is None else anchors[variant.key]
            bindings = tuple(at_anchors[a] for a in chosen)
            racing = replace(policy, stop_above=tuple(stops[a] for a in chosen))
            if shapes is not None:
                bindings, racing = tuple(map(binding, shapes[variant.key])), policy
                checks = self._checks.all_at(task, checkable(task, shapes[variant.key])) or standard
            deadline = LIBRARY_DEADLINE_SECS if variant.kind == "library" else DEADLINE_SECS
            requests.append(MeasureRequest(identity, program.to_json(), checks, bindings, racing, deadline))
        state.attempted.update(v.key for v in variants)
        candidates = [v.key for v in variants if v.kind == "tuned" and not in_parts(v)] if part == "trial" else []
        # A batch whose programs all failed to generate still becomes a flight, so that its failures are stored in
        # order.
        results: Future[list[MeasureResult]] = Future()
        if requests:
            results = self.runner.submit(requests)
        else:
            results.set_result([])
        state.flying += len(candidates)
        state.under_way = "trials" if len(candidates) == len(variants) else "exclusive"
        self._flights.append(Flight(state, state.under_way, candidates, by_id, failures, results))

    def next_finished(self) -> Flight:
        """Wait for a batch and remove it. Of several finished ones, the one that was started first comes first."""
        # `renew` acts once a third of the lease has gone. Looking every third leaves another third in hand when it
        # looked just before.
        while not wait([f.future for f in self._flights], task_leases.LEASE_SECS / 3, FIRST_COMPLETED).done:
            self.renew()
        flight = next(f for f in self._flights if f.future.done())
        self._flights.remove(flight)
        return flight

    def removed(self, flight: Flight) -> None:
        """Update the state of a finished batch's task, also where its results could not be stored."""
        state = flight.state
        state.flying -= len(flight.candidates)
        state.under_way = next((f.kind for f in self._flights if f.state is state), "")

    def store_results(self, flight: Flight, results: Sequence[MeasureResult]) -> None:
        """Store the records of a batch and learn from them."""
        state, records = flight.state, flight.failures
        for result in results:
            records = [*records, *self.recording.of(state.task, flight.by_id[result.id], result)]
        with shielded():
            state.counted += self.store.add_measurements(records)
        self._contentions += [r.contention for r in records if r.contention is not None]
        self.summary.contention = fmean(self._contentions) if self._contentions else None
        self.summary.measurements += len(records)
        self.summary.failures += sum(r.status == "failed" for r in records)
        self.summary.compiles += len(flight.by_id)
        self.summary.trials += len(flight.candidates)
        state.learn(records, self.recording.job)
        state.tuned.update(flight.candidates)  # spent even without a usable result
        self.report(state)

    def store_finished(self) -> None:
        """Store the records of the batches that have ended, before an error of another ends the job."""
        for flight in self._flights:
            if flight.future.done() and flight.future.exception() is None:
                self.store_results(flight, flight.future.result())


def _stops(state: TaskState) -> tuple[float | None, ...]:
    """Return the seconds at each anchor above which measuring stops early, since the candidate is no contender."""
    best = [state.best_at(a) for a in range(len(state.task.domain.points))]
    return tuple(None if b is None else HOPELESS * b for b in best)


def error_text(error: Exception) -> str:
    """Return the text of an error, with its type unless it is one of this package."""
    return str(error) if isinstance(error, RelaxTuneError) else f"{type(error).__name__}: {error}"
