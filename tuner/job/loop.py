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
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from relax_tune.database.records import Environment, Measurement, Target, VariantRecord, Workload
from relax_tune.database.rules import Spent
from relax_tune.database.store import Store
from relax_tune.errors import DatabaseError, MeasureError, RelaxTuneError, ScheduleError
from relax_tune.tuner.job import task_leases
from relax_tune.tuner.job.progress import TuningProgress, TuningSummary
from relax_tune.tuner.job.recording import Recording
from relax_tune.tuner.job.scheduling import WORTHWHILE
from relax_tune.tuner.job.task_leases import TaskLeases
from relax_tune.tuner.job.task_state import HOPELESS, TaskState, UnderWay, baselines_of
from relax_tune.tuner.learn.like_devices import Likely, RecordedKnowledge
from relax_tune.tuner.learn.recorded_rows import roofline
from relax_tune.tuner.learn.warm_start import RecordedHistory
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.measure.interrupts import shielded
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult, TimingPolicy
from relax_tune.tuner.plan.library_facts import LibraryFacts
from relax_tune.tuner.plan.validation import checkable, unvalidated
from relax_tune.tuner.search.base import SearchProblem, SearchStrategy
from relax_tune.tuner.search.registry import make_strategy
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.check import CheckCases
from relax_tune.tuner.task.domain import Point
from relax_tune.tuner.task.task import Choices, binding, points_array
from relax_tune.tuner.task.unfused_variants import in_parts

FORMAT_VERSION = 1
# How long to wait before asking again for tasks that other jobs hold, when nothing else is left to do.
LEASE_POLL_SECS = 0.5
# Factor on a trial's time budget for contenders.
FINAL_BUDGETS = 3
# Fewest and most samples of a shape in a trial. Contenders get more than twice as many, so that the median of all
# samples is one of the second timing's: luck in the first timing, which selects contenders, does not decide.
ROUNDS = (3, 20)
FINAL_ROUNDS = (7, 60)
# The longest a single step of a measurement may take before its process is killed.
DEADLINE_SECS = 30.0
# The same where a library is called, which may compile its kernels when it is first used (CLBlast with PoCL: minutes on a
# busy machine).
LIBRARY_DEADLINE_SECS = 180.0


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A batch under way. way: `trials` or `alone`; candidates: keys that count in the budget; failures: of variants without a program"""

    state: TaskState
    way: UnderWay
    candidates: list[str]
    by_id: Mapping[str, VariantRecord]
    failures: list[Measurement]
    future: Future[list[MeasureResult]]


class Tuner:
    """Tunes the tasks of one model on one device into one store.

    libraries: name and fingerprint of each library in the device process; every record names them.

    `report` is called after every batch, `beat` regularly while the job is alive, `notice` when other jobs are waited
    for. `job` is the name of this run, unique among all writers to the store (see `relax_tune.tuner.job.job_names`).
    elsewhere: records that only say which candidates to try first

    Raises MeasureError when the device cannot measure at all, DatabaseError when records cannot be kept. A failing
    candidate or task is recorded and never stops the others.
    """

    def __init__(
        self,
        choices: Sequence[Choices],
        target: Target,
        runner: Runner,
        store: Store,
        settings: Settings,
        job: str,
        libraries: Mapping[str, str],
        report: Callable[[TuningProgress], None] = lambda _: None,
        beat: Callable[[], None] = lambda: None,
        notice: Callable[[str], None] = lambda _: None,
        elsewhere: Store | None = None,
        likely: Likely = lambda choices, count: (),
    ) -> None:
        self.target_key = target.key
        self.runner = runner
        self.store = store
        self.settings = settings
        self.job = job
        self.report = report
        self.beat = beat
        self.result = TuningSummary()
        self._checks = CheckCases()
        self._leases = TaskLeases(store, target.key, job, notice)
        self._facts = LibraryFacts(store, libraries)
        with shielded():
            environment = store.add_environment(Environment(tuple(libraries.items())))
        self._recording = Recording(target.key, job, environment)
        self._flights: list[_Flight] = []
        workloads = {c.task.key for c in choices}
        self._history = RecordedKnowledge(
            target,
            RecordedHistory(store, target.key, workloads),
            None if elsewhere is None else RecordedHistory(elsewhere, target.key, workloads, target.kind),
            likely,
        )
        self.states = [self._open(c, position) for position, c in enumerate(choices)]

    def _open(self, choices: Choices, position: int) -> TaskState:
        task = choices.task
        with shielded():
            self.store.add_workload(Workload(task.key, task.text, FORMAT_VERSION, task.name))
        state = TaskState(position, choices, counts=self._facts.counts)
        with self._isolated(state):
            state.baselines = baselines_of(choices)
        self._refresh(state)
        if state.records and state.strategy is None:
            self._begin(state)
        return state

    def _begin(self, state: TaskState) -> None:
        """Make the task's strategy. It makes the sketches, which takes a while, so variants without sketches are
        measured before.
        """
        with self._isolated(state):
            self._reseed(state)
            state.begin(self._strategy(state))
        state.exhausted = state.strategy is None

    def _strategy(self, state: TaskState) -> SearchStrategy:
        choices, domain = state.choices, state.task.domain
        points = points_array(domain.points)
        scale = roofline(choices.space, points, choices.hardware)
        known = partial(self._history.rows, choices)
        weights = list(domain.timed(scale.tolist()).weights)
        problem = SearchProblem(choices.space, points, weights, scale, state.dispatchable, history=known)
        return make_strategy(self.settings.strategy, problem, state.rng)

    def _reseed(self, state: TaskState) -> None:
        """Seed the next draw by the seed and the number of records, so that interruptions do not change it."""
        text = f"{self.settings.seed}:{state.task.key}:{len(state.tuned) + state.flying}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        state.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state

    # -- the job ------------------------------------------------------------------------------------------------------

    def run(self) -> TuningSummary:
        """Tune until every task has had its share, or time is over. Interruptible between batches without losing a record.

        As many batches are under way as the runner measures at a time, of several tasks or of one.
        """
        started = time.monotonic()
        self._ends = started + 60 * (self.settings.max_minutes or math.inf)
        try:
            self._run()
        finally:
            self._leases.release_all()
        self.result.wall_secs = time.monotonic() - started
        return self.result

    def _run(self) -> None:
        blocked: set[int] = set()
        while True:
            self.beat()
            over = time.monotonic() > self._ends
            state = None if over or len(self._flights) >= self.runner.slots() else self._next(blocked)
            if state is not None:
                if not self._start(state):
                    blocked.add(state.position)
            elif self._flights:
                self._land_next()
                blocked.clear()
            elif blocked and not over:
                blocked.clear()
                if self._next(blocked) is not None:
                    self._leases.waiting(s.task for s in self.states)
                    time.sleep(LEASE_POLL_SECS)
            else:
                break

    def _next(self, but: set[int]) -> TaskState | None:
        """Return the task to work on.

        Tasks without baselines come first, then tasks without a first batch, then the most promising one. Tasks whose
        contenders were timed once or lack shapes come last. A task gets a second batch under way only for more candidates.
        """
        able = [s for s in self.states if s.position not in but and not s.given_up]
        idle = [s for s in able if not s.under_way]
        for wanted in (TaskState.missing, self._wants_first):
            for state in idle:
                if wanted(state):
                    return state
        for state in self.states:
            self._refresh(state)
        ready = [s for s in able if s.under_way != "alone" and not self._wants_first(s)]
        promising = max((s for s in ready if self._wants_more(s)), key=self._worth, default=None)
        return promising or next((s for s in idle if s.finalists() or self._unvalidated(s)), None)

    def _start(self, state: TaskState) -> bool:
        """Start the next batch of a task. Returns False if another job holds the task, or has claimed the rest of the budget."""
        if not state.under_way and not self._leases.acquire(state.task):
            return False
        able = True
        try:
            self._refresh(state)
            with self._isolated(state, give_up=True):
                able = self._advance(state)
        finally:
            if not state.under_way:
                self._leases.release(state.task)
        return able

    def _advance(self, state: TaskState) -> bool:
        """Start the next batch of a task, if it still wants one. Returns False if the budget is claimed by other jobs."""
        if state.under_way != "trials" and (missing := state.missing()):
            self._measure(state, missing)
        elif self._wants_first(state):
            if state.strategy is None:
                self._begin(state)
            return not self._wants_first(state) or self._first_batch(state)
        elif self._wants_more(state):
            if state.strategy is None:  # the budget is too small for first batches
                self._begin(state)
            wanted = min(self.settings.batch, self._left)
            guesses = state.untried_guesses()[:wanted]
            return state.exhausted or self._claimed_round(state, len(guesses) or wanted, guesses)
        elif state.under_way:
            return False
        elif again := state.finalists():
            state.retimed.update(v.key for v in again)
            state.finals += 1
            self._measure(state, again, f"final{state.finals}", FINAL_BUDGETS * self.settings.timing_secs)
        elif shapes := self._unvalidated(state):
            state.validations += 1
            contenders = [state.variants[k] for k in shapes]
            state.lacking = len(state.records), {}
            self._measure(state, contenders, f"validation{state.validations}", shapes=shapes)
        return True

    def _first_batch(self, state: TaskState) -> bool:
        """Measure the seeds, or fill up the first batch. Returns False if the budget is claimed by other jobs."""
        seeds: list[VariantRecord] = []
        if not state.tuned:
            found = map(state.choices.tuned, self._history.seeds(state.choices, self._first))
            seeds = [v for v in found if not state.settled(v.key)]
        return self._claimed_round(state, len(seeds) or self._first - len(state.tuned), seeds)

    def _claimed_round(self, state: TaskState, wanted: int, seeds: Sequence[VariantRecord] = ()) -> bool:
        """Measure seeds or new candidates, as many as the budget leaves. Returns False if other jobs have claimed the rest."""
        count, before = self._claim(state, wanted), state.flying
        try:
            if count and seeds:
                self._measure(state, seeds[:count])
            elif count:
                self._round(state, count)
        finally:
            self._leases.settle(state.task, count - (state.flying - before))
        return count > 0

    def _claim(self, state: TaskState, wanted: int) -> int:
        """Claim candidates of the budget that all jobs on these tasks share; return their number.

        Raises DatabaseError where the store counts other records than it has, which only an altered one does.
        """
        before: dict[str, Spent] = {}
        while (count := self._leases.claim(state.task, wanted, self._budget, spent := self._spent())) is None:
            if spent == before:
                raise DatabaseError(
                    f"{self.store.where}: wanted as many records of a task as the database counts, found others; its rows were "
                    "altered: `relax-tune db check` says which"
                )
            before = spent
            for other in self.states:
                self._refresh(other)
        return count

    def _spent(self) -> dict[str, Spent]:
        kept = {s.task.key: 0 if self._ended(s) else self._first for s in self.states}
        return {(k := s.task.key): Spent(len(s.records), s.task.regime, len(s.tuned), kept[k]) for s in self.states}

    def _land_next(self) -> None:
        """Wait for a batch, store its records and learn from them. Of several, the one that was started first comes first."""
        while not wait([f.future for f in self._flights], task_leases.LEASE_SECS / 3, FIRST_COMPLETED).done:
            self._renew()
        flight = next(f for f in self._flights if f.future.done())
        self._flights.remove(flight)
        state = flight.state
        try:
            with self._isolated(state, give_up=True):
                self._land(flight, flight.future.result())
        finally:
            state.flying -= len(flight.candidates)
            state.under_way = next((f.way for f in self._flights if f.state is state), "")
            if state.under_way:
                self._leases.settle(state.task, len(flight.candidates))
            else:
                self._leases.release(state.task)

    def _unvalidated(self, state: TaskState) -> Mapping[str, Sequence[Point]]:
        """Return the shapes at which the plan's variants lack times. Shapes that brought no record are not tried again."""
        if state.lacking is None or state.lacking[0] != len(state.records):
            with shielded():
                found = self.store.query(self.target_key, state.task.key, regime=state.task.regime)
            own = [r for r in found if r.variant.key not in state.foreign]
            records = [r for r in own if r.id in state.records and state.counts(r)]
            state.lacking = len(state.records), {}
            with self._isolated(state, give_up=True):
                state.lacking = len(state.records), unvalidated(state.choices, records, self.settings.effort)
        return state.lacking[1]

    def _wants_first(self, state: TaskState) -> bool:
        return not state.exhausted and len(state.tuned) < self._first

    def _wants_more(self, state: TaskState) -> bool:
        if self._left <= 0 or state.exhausted or len(state.tuned) + state.flying >= 3 * self.settings.candidates:
            return False
        return self._worth(state)[0] >= WORTHWHILE * sum(s.seconds() for s in self.states)

    @property
    def _first(self) -> int:
        each = self.settings.candidates if self.settings.budget is None else self._budget // max(1, len(self.states))
        return min(self.settings.batch, self.settings.candidates, each)

    @property
    def _budget(self) -> int:
        every = self.settings.candidates * len(self.states)
        return every if self.settings.budget is None else min(every, self.settings.budget)

    def _ended(self, state: TaskState) -> bool:
        return state.exhausted or state.given_up

    @property
    def _left(self) -> int:
        """Candidates left in the budget, less those under way and the first batches of tasks held by other jobs."""
        tried = [(s, len(s.tuned) + s.flying) for s in self.states]
        return self._budget - sum(count if self._ended(s) else max(count, self._first) for s, count in tried)

    def _worth(self, state: TaskState) -> tuple[float, str]:
        """Return the seconds of the whole model that another batch is expected to save, and the task's key."""
        saving = state.saving(min(self.settings.batch, self._left))
        return max(saving, state.seconds() if state.untried_guesses() else 0.0), state.task.key

    def _round(self, state: TaskState, count: int) -> None:
        assert state.strategy is not None
        again = state.incomplete()[:count]
        asked = []
        if len(again) < count:
            self._reseed(state)
            try:
                asked = state.strategy.ask(count - len(again))
            except ScheduleError:  # no candidate satisfies the constraints
                asked = []
        variants = {v.key: v for v in (*again, *map(state.choices.tuned, asked))}
        if not variants:
            state.exhausted = True
            return
        self._measure(state, list(variants.values()))

    # -- several jobs, and tasks that cannot be tuned ----------------------------------------------------------------

    def _renew(self) -> None:
        """Renew the lease and the job's sign of life."""
        self.beat()
        self._leases.renew()

    def _refresh(self, state: TaskState) -> None:
        """Learn the records of a task that were added to the store."""
        with shielded():
            key, regime = state.task.key, state.task.regime
            new = self.store.count(self.target_key, key, regime=regime) != len(state.records)
            records = self.store.query(self.target_key, key, regime=regime) if new else ()
        if new:
            with self._isolated(state, give_up=True):
                state.learn(records, self.job)
            if state.strategy is None and state.untried():
                self._begin(state)  # only a strategy tells which candidates of other jobs count

    @contextmanager
    def _isolated(self, state: TaskState, give_up: bool = False) -> Iterator[None]:
        """Confine an error to its task: record it, report it, and end at most that task."""
        try:
            yield
        except (MeasureError, DatabaseError):
            raise
        except Exception as error:  # the boundary at which a task's own failure, whatever it is, becomes a record
            state.given_up |= give_up
            message = _described(error)
            self.result.problems += ((state.task.name, message),)
            digest = hashlib.blake2b(f"{state.task.key}:{self.target_key}:{message}".encode(), digest_size=16)
            variant = VariantRecord("tuned", "none")
            failure = self._recording.failed(state.task, variant, digest.hexdigest(), "constraint", message)
            with shielded():
                self.result.failures += self.store.add_measurements([failure])

    # -- measuring ----------------------------------------------------------------------------------------------------

    def _measure(
        self,
        state: TaskState,
        variants: Sequence[VariantRecord],
        part: str = "trial",
        budget_secs: float | None = None,
        shapes: Mapping[str, Sequence[Point]] | None = None,
    ) -> None:
        """Start to build, check and time variants at the anchors, or each at shapes of its own."""
        if not variants:
            return
        task = state.task
        requests: list[MeasureRequest] = []
        records: list[Measurement] = []
        by_id: dict[str, VariantRecord] = {}
        bindings = task.bindings()
        checks = standard = tuple(self._checks.case(task, n) for n in range(2))
        stops = self._stops(state) if shapes is None else ()
        least, most = ROUNDS if part == "trial" else FINAL_ROUNDS
        policy = TimingPolicy(least, most, budget_secs or self.settings.timing_secs, 0.1, stops, task.regime)
        for variant in variants:
            self._renew()
            identity = self._recording.id(task, variant, part)
            try:
                program = state.choices.program(variant)
            except Exception as error:  # one candidate that cannot be generated is that candidate's failure
                records.append(self._recording.failed(task, variant, identity, "constraint", _described(error)))
                continue
            by_id[identity] = variant
            if shapes is not None:
                bindings = tuple(map(binding, shapes[variant.key]))
                checks = tuple(self._checks.at(task, p) for p in checkable(task, shapes[variant.key])) or standard
            requests.append(MeasureRequest(identity, program.to_json(), checks, bindings, policy, _deadline(variant)))
        state.attempted.update(v.key for v in variants)
        candidates = [v.key for v in variants if v.kind == "tuned" and not in_parts(v)] if part == "trial" else []
        done: Future[list[MeasureResult]] = Future()
        if requests:
            done = self.runner.submit(requests)
        else:
            done.set_result([])
        state.flying += len(candidates)
        state.under_way = "trials" if len(candidates) == len(variants) else "alone"
        self._flights.append(_Flight(state, state.under_way, candidates, by_id, records, done))

    def _land(self, flight: _Flight, results: Sequence[MeasureResult]) -> None:
        """Store the records of a batch and learn from them."""
        state, records = flight.state, flight.failures
        for result in results:
            records = [*records, *self._recording.of(state.task, flight.by_id[result.id], result)]
        with shielded():
            self.store.add_measurements(records)
        self.result.measurements += len(records)
        self.result.failures += sum(r.status == "failed" for r in records)
        self.result.compiles += len(flight.by_id)
        self.result.trials += len(flight.candidates)
        state.learn(records, self.job)
        state.tuned.update(flight.candidates)  # counted as spent, even without a usable result
        self._tell_progress(state)

    def _stops(self, state: TaskState) -> tuple[float | None, ...]:
        """Return the time at each anchor above which measuring stops early, since the candidate is no contender."""
        best = [state.best_at(a) for a in range(len(state.task.domain.points))]
        return tuple(None if b is None else HOPELESS * b for b in best)

    def _tell_progress(self, state: TaskState) -> None:
        self.report(
            TuningProgress(
                state.task.name,
                state.position,
                len(self.states),
                len(state.tuned),
                len(state.failed),
                state.best("tuned") or math.nan,
                state.best("library"),
                state.best("generic"),
            )
        )


def _deadline(variant: VariantRecord) -> float:
    return LIBRARY_DEADLINE_SECS if variant.kind == "library" else DEADLINE_SECS


def _described(error: Exception) -> str:
    """Return the text of an error, with its type if it is not one of ours."""
    return str(error) if isinstance(error, RelaxTuneError) else f"{type(error).__name__}: {error}"
