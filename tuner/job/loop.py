"""The tuning loop over all tasks of a model: propose, measure, record, learn.

The store holds the loop's whole state. An interrupted job resumes by running again, and a job whose trials are all recorded
measures nothing. Several jobs may work on one store. A job holds a lease on a task while it measures a batch of it, and the
next holder first reads the records of the others.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from relax_tune.database.records import Environment, VariantRecord, Workload
from relax_tune.errors import DatabaseError, MeasureError, ScheduleError, UnexpectedErrorWarning
from relax_tune.tuner.job.batches import Batches, error_text
from relax_tune.tuner.job.budget import TrialBudget
from relax_tune.tuner.job.forecast import Forecast
from relax_tune.tuner.job.progress import TuningProgress, TuningSummary
from relax_tune.tuner.job.recording import Recording
from relax_tune.tuner.job.task_leases import TaskLeases
from relax_tune.tuner.job.task_state import TaskState, baselines_of
from relax_tune.tuner.learn.device_records import DeviceRecords
from relax_tune.tuner.learn.recorded_rows import roofline
from relax_tune.tuner.learn.similar_devices import SearchKnowledge
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.measure.interrupts import shielded
from relax_tune.tuner.plan.validation import unvalidated
from relax_tune.tuner.search.base import SearchProblem, SearchStrategy
from relax_tune.tuner.search.registry import make_strategy
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.domain import Point
from relax_tune.tuner.task.task import FORMAT_VERSION, points_array
from relax_tune.tuner.task.variants import TaskVariants

LEASE_POLL_SECS = 0.5
"""How often to ask for tasks that other jobs hold, when nothing else is left to do."""
TRIAL_SHARE = 0.8
"""Part of a time limit after which no new candidates are tried: contenders that were timed once need the rest."""
FINAL_BUDGETS = 3
"""Factor on a trial's time budget for contenders."""


@dataclass(frozen=True, slots=True)
class JobContext:
    """A running job as its tuning loop sees it.

    Attributes:
        name: Unique among all writers to the store (`relax_tune.tuner.job.job_names`).
        report: Called after every batch.
        beat: Called regularly while the job is alive.
        notice: Receives a sentence when other jobs are waited for.
    """

    name: str
    report: Callable[[TuningProgress], None] = lambda _: None
    beat: Callable[[], None] = lambda: None
    notice: Callable[[str], None] = lambda _: None


class Tuner:
    """Tunes the tasks of one model on one device into one store.

    A candidate or task that fails is recorded and never stops the others.

    Args:
        records: Records of the device; every new record names its libraries.
        knowledge: What the search knows before its first trial.

    Raises:
        MeasureError: The device cannot measure at all.
        DatabaseError: Records cannot be stored.
    """

    def __init__(
        self,
        tasks: Sequence[TaskVariants],
        records: DeviceRecords,
        runner: Runner,
        settings: Settings,
        knowledge: SearchKnowledge,
        job: JobContext,
    ) -> None:
        self.records, self.store, self.settings, self.job = records, records.store, settings, job
        self._knowledge = knowledge
        self._leases = TaskLeases(self.store, records.target.key, job.name, job.notice)
        with shielded():
            environment = self.store.add_environment(Environment(tuple(records.libraries.items())))
        recording = Recording(records.target.key, job.name, environment)
        self._batches = Batches(runner, self.store, recording, settings.timing_secs, self._renew, self._report)
        self.summary: TuningSummary = self._batches.summary
        self.states = [self._open(variants, position) for position, variants in enumerate(tasks)]
        self._budget = TrialBudget(self.states, settings, self._leases, self._refresh)
        self._forecast = Forecast(self.states, self._budget)

    def _open(self, task_variants: TaskVariants, position: int) -> TaskState:
        task = task_variants.task
        with shielded():
            self.store.add_workload(Workload(task.key, task.text, FORMAT_VERSION, task.name))
        state = TaskState(position, task_variants, counts=self.records.counts)
        with self._isolated(state):
            state.baselines = baselines_of(task_variants)
        self._refresh(state)
        if state.records and state.strategy is None:
            self._begin(state)
        return state

    def _begin(self, state: TaskState) -> None:
        """Construct the task's strategy.

        That generates the sketches, which takes a while, so variants without sketches are measured before.
        """
        with self._isolated(state):
            self._reseed(state)
            state.begin(self._strategy(state))
        state.exhausted = state.strategy is None

    def _strategy(self, state: TaskState) -> SearchStrategy:
        sketch_set, domain = state.task_variants.sketch_set, state.task.domain
        points = points_array(domain.points)
        scale = roofline(sketch_set.space, points, sketch_set.hardware)
        history = partial(self._knowledge.rows, sketch_set)
        weights = list(domain.timed(scale.tolist()).weights)
        problem = SearchProblem(sketch_set.space, points, weights, scale, state.dispatchable, history=history)
        return make_strategy(self.settings.strategy, problem, state.rng)

    def _reseed(self, state: TaskState) -> None:
        """Seed the next draw by the seed and the number of records, so that interruptions do not change it."""
        text = f"{self.settings.seed}:{state.task.key}:{len(state.tuned) + state.flying}"
        # `hash()` differs between processes, so a cryptographic hash derives the seed.
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        state.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state

    # -- the job ------------------------------------------------------------------------------------------------------

    def run(self) -> TuningSummary:
        """Tune until every task has had its share, or time is over.

        May be interrupted between batches without losing a record. As many batches are under way as the runner measures at a
        time, of several tasks or of one.
        """
        started = time.monotonic()
        limit = 60 * (self.settings.max_minutes or math.inf)
        self._ends, self._trials_end = started + limit, started + TRIAL_SHARE * limit
        try:
            self._run()
        except MeasureError:
            # The error belongs to one batch. Others that ended before it hold paid-for results, which would be lost
            # with the job.
            self._batches.store_finished()
            raise
        finally:
            self._leases.release_all()
        self.summary.wall_secs = time.monotonic() - started
        self.summary.expected_gain = self._forecast.expected_gain()
        return self.summary

    def _run(self) -> None:
        blocked: set[int] = set()
        while True:
            self.job.beat()
            now = time.monotonic()
            over, self._budget.closed = now > self._ends, now > self._trials_end
            state = None if over or self._batches.is_full else self._next(blocked)
            if state is not None:
                if not self._start(state):
                    blocked.add(state.position)
            elif self._batches:
                self._finish_next()
                blocked.clear()
            elif blocked and not over:
                blocked.clear()
                if self._next(blocked) is not None:
                    # None of our own batches is under way, so only leases or claims of other jobs are in the way. The
                    # store tells nobody when one ends, so ask again.
                    self._leases.waiting(s.task for s in self.states)
                    time.sleep(LEASE_POLL_SECS)
            else:
                break

    def _next(self, blocked: set[int]) -> TaskState | None:
        """Return the task to work on.

        Tasks without baselines come first, then tasks without a first batch, of these the one that takes most of the model's time,
        then the most promising one. Tasks whose contenders were timed once or lack shapes come last. A task gets a second batch under
        way only for more candidates.
        """
        able = [s for s in self.states if s.position not in blocked and not s.given_up]
        idle = [s for s in able if not s.under_way]
        for state in idle:
            if state.missing():
                return state
        if first := [s for s in idle if self._budget.needs_first(s)]:
            return max(first, key=TaskState.seconds)
        for state in self.states:
            self._refresh(state)
        ready = [s for s in able if s.under_way != "exclusive" and not self._budget.needs_first(s)]
        promising = max((s for s in ready if self._budget.needs_more(s)), key=self._budget.worth, default=None)
        return promising or next((s for s in idle if s.finalists() or self._unvalidated(s)), None)

    def _start(self, state: TaskState) -> bool:
        """Start the next batch of a task. Returns False if another job holds the task or has claimed the rest of the budget."""
        if not state.under_way and not self._leases.acquire(state.task):
            return False
        able = True
        try:
            self._refresh(state)
            with self._isolated(state, give_up=True):
                able = self._advance(state)
        finally:
            if not state.under_way:
                # A task whose batch started keeps its lease until the batch is stored; otherwise another job would
                # draw the same candidates.
                self._leases.release(state.task)
        return able

    def _advance(self, state: TaskState) -> bool:
        """Start the next batch of a task, if it is due. Returns False if other jobs have claimed the budget."""
        if state.under_way != "trials" and (missing := state.missing()):
            self._batches.start(state, missing)
        elif self._budget.needs_first(state):
            if state.strategy is None:
                self._begin(state)
            return not self._budget.needs_first(state) or self._first_batch(state)
        elif self._budget.needs_more(state):
            if state.strategy is None:  # the budget is too small for first batches
                self._begin(state)
            count = min(self.settings.batch, self._budget.left)
            guesses = state.untried_guesses()[:count]
            return state.exhausted or self._claimed_round(state, len(guesses) or count, guesses)
        elif state.under_way:
            return False
        elif finalists := state.finalists():
            state.retimed.update((key, a) for key, anchors in finalists.items() for a in anchors)
            state.finals += 1
            contenders = [state.variants[k] for k in finalists]
            self._batches.start(state, contenders, f"final{state.finals}", FINAL_BUDGETS, anchors=finalists)
        elif shapes := self._unvalidated(state):
            state.validations += 1
            contenders = [state.variants[k] for k in shapes]
            state.lacking = len(state.records), {}
            self._batches.start(state, contenders, f"validation{state.validations}", shapes=shapes)
        return True

    def _first_batch(self, state: TaskState) -> bool:
        """Measure the seeds, or fill up the first batch. Returns False if other jobs have claimed the budget."""
        seeds: list[VariantRecord] = []
        size = self._budget.first_batch
        if not state.tuned:
            sketch_set = state.task_variants.sketch_set
            records = map(sketch_set.record_of, self._knowledge.seeds(sketch_set, size))
            seeds = [v for v in records if not state.settled(v.key)]
        return self._claimed_round(state, len(seeds) or size - len(state.tuned), seeds)

    def _claimed_round(self, state: TaskState, count: int, seeds: Sequence[VariantRecord] = ()) -> bool:
        """Measure seeds or new candidates, as many as the budget leaves. Returns False if other jobs have claimed the rest."""
        claimed, before = self._budget.claim(state, count), state.flying
        try:
            if claimed and seeds:
                self._batches.start(state, seeds[:claimed])
            elif claimed:
                self._round(state, claimed)
        finally:
            # what was claimed but not started goes back to all jobs
            self._leases.settle(state.task, claimed - (state.flying - before))
        return claimed > 0

    def _round(self, state: TaskState, count: int) -> None:
        assert state.strategy is not None
        incomplete = state.incomplete()[:count]
        candidates = []
        if len(incomplete) < count:
            self._reseed(state)
            try:
                candidates = state.strategy.ask(count - len(incomplete))
            except ScheduleError:  # no candidate satisfies the constraints
                candidates = []
        records = (*incomplete, *map(state.task_variants.sketch_set.record_of, candidates))
        variants = {v.key: v for v in records}
        if not variants:
            state.exhausted = True
            return
        self._batches.start(state, list(variants.values()))

    def _finish_next(self) -> None:
        """Wait for a batch, store its records and learn from them."""
        flight = self._batches.next_finished()
        state = flight.state
        try:
            with self._isolated(state, give_up=True):
                self._batches.store_results(flight, flight.future.result())
        finally:
            self._batches.removed(flight)
            if state.under_way:
                # The lease stays, because another batch of the task is under way; only the trials of this one leave
                # the claim.
                self._leases.settle(state.task, len(flight.candidates))
            else:
                self._leases.release(state.task)

    def _unvalidated(self, state: TaskState) -> Mapping[str, Sequence[Point]]:
        """Return the shapes at which the plan's variants lack times. Shapes that brought no record are not tried again."""
        if state.lacking is None or state.lacking[0] != len(state.records):
            with shielded():
                stored = self.store.query(self.records.target.key, state.task.key, regime=state.task.regime)
            dispatchable = [r for r in stored if r.variant.key not in state.foreign]
            records = [r for r in dispatchable if r.id in state.records and state.counts(r)]
            state.lacking = len(state.records), {}
            with self._isolated(state, give_up=True):
                state.lacking = len(state.records), unvalidated(state.task_variants, records, self.settings.effort)
        return state.lacking[1]

    def _report(self, state: TaskState) -> None:
        self.job.report(self._forecast.progress(state))

    # -- several jobs, and tasks that cannot be tuned ------------------------------------------------------------------

    def _renew(self) -> None:
        """Renew the leases and the job's heartbeat."""
        self.job.beat()
        self._leases.renew()

    def _refresh(self, state: TaskState) -> None:
        """Learn the records of a task that were added to the store."""
        with shielded():
            target, key, regime = self.records.target.key, state.task.key, state.task.regime
            # Counted before they are read: records that are added meanwhile are read again.
            counted = self.store.count(target, key, regime=regime)
            new = counted != state.counted
            records = self.store.query(target, key, regime=regime) if new else ()
            state.counted = counted
        if new:
            with self._isolated(state, give_up=True):
                state.learn(records, self.job.name)
            if state.strategy is None and state.untried():
                self._begin(state)  # only a strategy tells which candidates of other jobs count

    @contextmanager
    def _isolated(self, state: TaskState, give_up: bool = False) -> Iterator[None]:
        """Confine an error to its task: record it, report it, and end at most that task."""
        try:
            yield
        except (MeasureError, DatabaseError, UnexpectedErrorWarning):
            raise
        except Exception as error:  # the boundary at which every failure of a task becomes a record
            state.given_up |= give_up
            message = error_text(error)
            self.summary.problems += ((state.task.name, message),)
            text = f"{state.task.key}:{self.records.target.key}:{message}"
            identity = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
            recording = self._batches.recording
            failure = recording.failed(state.task, VariantRecord("tuned", "none"), identity, "constraint", message)
            with shielded():
                self.summary.failures += self.store.add_measurements([failure])
