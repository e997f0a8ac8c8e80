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
from dataclasses import asdict, replace
from functools import partial

import numpy as np

from relax_tune.database.records import Environment, Measurement, VariantRecord, Workload
from relax_tune.database.store import Store
from relax_tune.errors import DatabaseError, MeasureError, RelaxTuneError, ScheduleError
from relax_tune.tuner.job import task_leases
from relax_tune.tuner.job.progress import TuningProgress, TuningSummary
from relax_tune.tuner.job.scheduling import WORTHWHILE
from relax_tune.tuner.job.task_leases import TaskLeases
from relax_tune.tuner.job.task_state import HOPELESS, TaskState
from relax_tune.tuner.learn.recorded_rows import roofline
from relax_tune.tuner.learn.warm_start import RecordedHistory
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.measure.interrupts import shielded
from relax_tune.tuner.measure.messages import CheckCase, MeasureRequest, MeasureResult, TimingPolicy
from relax_tune.tuner.plan.library_facts import LibraryFacts
from relax_tune.tuner.plan.validation import checkable, unvalidated
from relax_tune.tuner.search.base import SearchProblem, SearchStrategy, TrainingRows
from relax_tune.tuner.search.registry import make_strategy
from relax_tune.tuner.search.space import Candidate
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.check import check_at, check_case
from relax_tune.tuner.task.domain import Point
from relax_tune.tuner.task.task import Choices, Task, binding, points_array
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


class Tuner:
    """Tunes the tasks of one model on one device into one store.

    libraries: name and fingerprint of each library in the device process; every record names them.

    `report` is called after every batch, `beat` regularly while the job is alive, `notice` when other jobs are waited
    for. `job` is the name of this run, unique among all writers to the store (see `relax_tune.tuner.job.job_names`).

    Raises MeasureError when the device cannot measure at all, DatabaseError when records cannot be kept. A failing
    candidate or task is recorded and never stops the others.
    """

    def __init__(
        self,
        choices: Sequence[Choices],
        target_key: str,
        runner: Runner,
        store: Store,
        settings: Settings,
        job: str,
        libraries: Mapping[str, str],
        report: Callable[[TuningProgress], None] = lambda _: None,
        beat: Callable[[], None] = lambda: None,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.target_key = target_key
        self.runner = runner
        self.store = store
        self.settings = settings
        self.job = job
        self.report = report
        self.beat = beat
        self.result = TuningSummary()
        self._references: dict[tuple[str, int], CheckCase] = {}
        self._references_at: dict[tuple[str, Point], CheckCase] = {}
        self._leases = TaskLeases(store, target_key, job, notice)
        self._facts = LibraryFacts(store, libraries)
        with shielded():
            self._environment = store.add_environment(Environment(tuple(libraries.items())))
        self._history = RecordedHistory(store, target_key, {c.task.key for c in choices})
        self.states = [self._open(c, position) for position, c in enumerate(choices)]

    def _open(self, choices: Choices, position: int) -> TaskState:
        task = choices.task
        with shielded():
            self.store.add_workload(Workload(task.key, task.text, FORMAT_VERSION, task.name))
        state = TaskState(position, choices, counts=self._facts.counts)
        with self._isolated(state):
            state.baselines = _baselines(choices)
        self._refresh(state)
        if state.records:
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
        known = partial(self._known_elsewhere, choices)
        weights = list(domain.timed(scale.tolist()).weights)
        problem = SearchProblem(choices.space, points, weights, scale, state.dispatchable, history=known)
        return make_strategy(self.settings.strategy, problem, state.rng)

    def _seeds(self, choices: Choices, count: int) -> list[Candidate]:
        """Return the first candidates: half of them like the fastest of similar functions, the others of the rules."""
        with shielded():
            alike = self._history.alike(choices, count // 2)
        return list(dict.fromkeys((*alike, *choices.seeds())))[:count]

    def _known_elsewhere(self, choices: Choices) -> TrainingRows | None:
        with shielded():
            return self._history.rows(choices)

    def _reseed(self, state: TaskState) -> None:
        """Seed the next draw by the seed and the number of records, so that interruptions do not change it."""
        text = f"{self.settings.seed}:{state.task.key}:{len(state.tuned)}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        state.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state

    # -- the job ------------------------------------------------------------------------------------------------------

    def run(self) -> TuningSummary:
        """Tune until every task has had its share. Interruptible between batches without losing a record."""
        started = time.monotonic()
        held_elsewhere: set[int] = set()
        while True:
            self.beat()
            state = self._next(held_elsewhere)
            if state is None:
                if not held_elsewhere:
                    break
                waited = [s.task for s in self.states if s.position in held_elsewhere]
                held_elsewhere.clear()
                if self._next(held_elsewhere) is not None:
                    self._leases.waiting(waited)
                    time.sleep(LEASE_POLL_SECS)
                continue
            with self._leased(state) as mine:
                if not mine:
                    held_elsewhere.add(state.position)
                    continue
                with self._isolated(state, give_up=True):
                    self._advance(state)
        self.result.wall_secs = time.monotonic() - started
        return self.result

    def _next(self, but: set[int]) -> TaskState | None:
        """Return the task to work on.

        Tasks without baselines come first, then tasks without a first batch, then the most promising one. Tasks whose
        contenders were timed once or lack shapes come last.
        """
        able = [s for s in self.states if s.position not in but and not s.given_up]
        for wanted in (self._missing, self._wants_first):
            for state in able:
                if wanted(state):
                    return state
        for state in able:
            self._refresh(state)
        promising = max((s for s in able if self._wants_more(s)), key=self._worth, default=None)
        return promising or next((s for s in able if s.finalists() or self._unvalidated(s)), None)

    def _advance(self, state: TaskState) -> None:
        """Measure the next batch of a task."""
        if missing := self._missing(state):
            self._measure(state, missing)
        elif self._wants_first(state):
            if state.strategy is None:
                self._begin(state)
            if not self._wants_first(state):
                return
            if not state.tuned:
                seeds = self._seeds(state.choices, max(1, self._first // 2))
                self._measure(state, [v for c in seeds if not state.settled((v := state.choices.tuned(c)).key)])
            if len(state.tuned) < self._first:
                self._round(state, self._first - len(state.tuned))
        elif self._wants_more(state):
            self._round(state, min(self.settings.batch, self._left))
        elif again := state.finalists():
            state.retimed.update(v.key for v in again)
            state.finals += 1
            self._measure(state, again, f"final{state.finals}", FINAL_BUDGETS * self.settings.timing_secs)
        elif shapes := self._unvalidated(state):
            state.validations += 1
            contenders = [state.variants[k] for k in shapes]
            state.lacking = len(state.records), {}
            self._measure(state, contenders, f"validation{state.validations}", shapes=shapes)

    def _unvalidated(self, state: TaskState) -> Mapping[str, Sequence[Point]]:
        """Return the shapes at which the plan's variants lack times. Shapes that brought no record are not tried again."""
        if state.lacking is None or state.lacking[0] != len(state.records):
            with shielded():
                found = self.store.query(self.target_key, state.task.key, regime=state.task.regime)
            records = [r for r in found if r.id in state.records and state.counts(r)]
            state.lacking = len(state.records), {}
            with self._isolated(state, give_up=True):
                state.lacking = len(state.records), unvalidated(state.choices, records, self.settings.effort)
        return state.lacking[1]

    def _wants_first(self, state: TaskState) -> bool:
        return not state.exhausted and len(state.tuned) < self._first

    def _wants_more(self, state: TaskState) -> bool:
        if self._left <= 0 or state.exhausted or len(state.tuned) >= 3 * self.settings.candidates:
            return False
        return self._worth(state)[0] >= WORTHWHILE * sum(s.seconds() for s in self.states)

    @property
    def _first(self) -> int:
        return min(self.settings.batch, self.settings.candidates)

    @property
    def _left(self) -> int:
        """Candidates left in the budget, less the first batches of tasks held by other jobs."""
        spent = sum(len(s.tuned) if s.exhausted or s.given_up else max(len(s.tuned), self._first) for s in self.states)
        return self.settings.candidates * len(self.states) - spent

    def _missing(self, state: TaskState) -> list[VariantRecord]:
        return [v for v in state.baselines if not state.settled(v.key)]

    def _worth(self, state: TaskState) -> tuple[float, str]:
        """Return the seconds of the whole model that another batch is expected to save, and the task's key."""
        return state.saving(min(self.settings.batch, self._left)), state.task.key

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

    @contextmanager
    def _leased(self, state: TaskState) -> Iterator[bool]:
        """Hold the lease of a task and learn what other jobs have added. Yields False when another job holds it."""
        if not self._leases.acquire(state.task):
            yield False
            return
        try:
            self._refresh(state)
            yield True
        finally:
            self._leases.release(state.task)

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
            failure = self._failed(state.task, variant, digest.hexdigest(), "constraint", message)
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
        """Build, check and time variants at the anchors, or each at shapes of its own, and store the records."""
        if not variants:
            return
        task = state.task
        requests: list[MeasureRequest] = []
        records: list[Measurement] = []
        by_id: dict[str, VariantRecord] = {}
        bindings = task.bindings()
        checks = standard = tuple(self._check(state, n) for n in range(2))
        stops = self._stops(state) if shapes is None else ()
        least, most = ROUNDS if part == "trial" else FINAL_ROUNDS
        policy = TimingPolicy(least, most, budget_secs or self.settings.timing_secs, 0.1, stops, task.regime)
        for variant in variants:
            self._renew()
            identity = self._id(task, variant, part)
            try:
                program = state.choices.program(variant)
            except Exception as error:  # one candidate that cannot be generated is that candidate's failure
                records.append(self._failed(task, variant, identity, "constraint", _described(error)))
                continue
            by_id[identity] = variant
            if shapes is not None:
                bindings = tuple(map(binding, shapes[variant.key]))
                checks = tuple(self._check_at(state, p) for p in checkable(task, shapes[variant.key])) or standard
            requests.append(MeasureRequest(identity, program.to_json(), checks, bindings, policy, _deadline(variant)))
        for result in self._results(requests):
            records += self._records(task, by_id[result.id], result)
        with shielded():
            self.store.add_measurements(records)
        self.result.measurements += len(records)
        self.result.failures += sum(r.status == "failed" for r in records)
        self.result.compiles += len(requests)
        candidates = [v.key for v in variants if v.kind == "tuned" and not in_parts(v)]
        if part == "trial":
            self.result.trials += len(candidates)
        state.attempted.update(v.key for v in variants)
        state.learn(records, self.job)
        state.tuned.update(candidates)  # counted as spent, even without a usable result
        self._tell_progress(state)

    def _results(self, requests: Sequence[MeasureRequest]) -> Sequence[MeasureResult]:
        if not requests:
            return []
        future = self.runner.submit(requests)
        while True:
            try:
                return future.result(timeout=task_leases.LEASE_SECS / 3)
            except TimeoutError:
                if future.done():
                    raise
                self._renew()

    def _stops(self, state: TaskState) -> tuple[float | None, ...]:
        """Return the time at each anchor above which measuring stops early, since the candidate is no contender."""
        best = [state.best_at(a) for a in range(len(state.task.domain.points))]
        return tuple(None if b is None else HOPELESS * b for b in best)

    def _records(self, task: Task, variant: VariantRecord, result: MeasureResult) -> list[Measurement]:
        if not result.ok:
            return [
                replace(
                    self._failed(
                        task, variant, result.id, result.stage or "runtime", result.message, result.build_secs
                    ),
                    **asdict(result.unit),
                )
            ]
        return [
            Measurement(
                id=f"{result.id}.{number}",
                workload=task.key,
                target=self.target_key,
                variant=variant,
                symbols=timing.symbols,
                samples_secs=timing.samples_secs,
                regime=timing.regime,
                checked=result.checked,
                build_secs=result.build_secs,
                job=self.job,
                environment=self._environment,
                measured_at=time.time(),
                **asdict(result.unit),
            )
            for number, timing in enumerate(result.timings)
            if timing.samples_secs
        ]

    def _failed(
        self, task: Task, variant: VariantRecord, identity: str, stage: str, message: str, build_secs: float = 0.0
    ) -> Measurement:
        return Measurement(
            id=f"{identity}.f",
            workload=task.key,
            target=self.target_key,
            variant=variant,
            status="failed",
            regime=task.regime,
            stage=stage,  # type: ignore[arg-type]
            message=message or f"failed at stage {stage} without a message",
            build_secs=build_secs,
            job=self.job,
            environment=self._environment,
            measured_at=time.time(),
        )

    def _id(self, task: Task, variant: VariantRecord, part: str) -> str:
        timed = "" if task.regime == "warm" else f":{task.regime}"
        text = f"{task.key}:{self.target_key}:{variant.key}:{self.job}:{part}{timed}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _check(self, state: TaskState, number: int) -> CheckCase:
        key = (state.task.key, number)
        if key not in self._references:
            self._references[key] = check_case(state.task, number)
        return self._references[key]

    def _check_at(self, state: TaskState, point: Point) -> CheckCase:
        key = (state.task.key, point)
        if key not in self._references_at:
            self._references_at[key] = check_at(state.task, point)
        return self._references_at[key]

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


def _baselines(choices: Choices) -> tuple[VariantRecord, ...]:
    """Return the generic form, the library forms and the unfused variants, which are always timed."""
    found: list[VariantRecord] = []
    for make in (lambda: (choices.generic(),), choices.library_variants, choices.variants_in_parts):
        try:
            found += make()
        except ScheduleError:
            continue
    return tuple(found)


def _deadline(variant: VariantRecord) -> float:
    return LIBRARY_DEADLINE_SECS if variant.kind == "library" else DEADLINE_SECS


def _described(error: Exception) -> str:
    """Return the text of an error, with its type if it is not one of ours."""
    return str(error) if isinstance(error, RelaxTuneError) else f"{type(error).__name__}: {error}"
