"""The tuning loop: propose, measure, record, learn; for all tasks of a model (DESIGN 7).

Everything the loop knows it can learn again from the store: an interrupted job resumes by running again, and a job whose
trials are all recorded measures nothing.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from relax_tune.database.records import Measurement, Workload
from relax_tune.database.records import Variant as VariantRecord
from relax_tune.database.store import Store
from relax_tune.errors import BuildError, ScheduleError
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.expr import Expr, Var, as_int, const, substitute
from relax_tune.tuner.emit import input_fill
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.measure.inputs import random_array
from relax_tune.tuner.measure.messages import CheckCase, MeasureRequest, MeasureResult, TimingPolicy
from relax_tune.tuner.reference import evaluate, tolerances
from relax_tune.tuner.search.base import Failure, Outcome, Result, SearchProblem, SearchStrategy
from relax_tune.tuner.search.registry import make_strategy
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task import Choices, Task, points_array

FORMAT_VERSION = 1
CHECK_SEED = 7
LEASE_SECS = 600.0
FINALISTS = 3


@dataclass(frozen=True)
class Progress:
    """What a display needs after every batch."""

    task: str
    position: int
    tasks: int
    trials: int
    failures: int
    best_secs: float
    library_secs: float | None
    generic_secs: float | None


@dataclass
class TaskState:
    """One task under tuning: what is known of each variant, and the strategy that proposes the next."""

    choices: Choices
    strategy: SearchStrategy
    tuned: set[str] = field(default_factory=set)
    failures: int = 0
    times: dict[str, list[float | None]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    variants: dict[str, VariantRecord] = field(default_factory=dict)
    samples: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    visits: dict[tuple[str, int], int] = field(default_factory=dict)
    fresh: bool = False
    last_gain: float = 1.0
    exhausted: bool = False

    @property
    def task(self) -> Task:
        return self.choices.task

    def best(self, kind: str | None = None) -> float | None:
        """Weighted seconds over the anchors of the best variant at each; None when some anchor has none."""
        keys = [k for k in self.times if kind is None or self.kinds[k] == kind]
        total = 0.0
        for a, w in enumerate(self.task.domain.weights):
            known = [t for k in keys if (t := self.times[k][a]) is not None]
            if not known:
                return None
            total += w * min(known)
        return total


@dataclass
class TuneResult:
    """What a job did."""

    trials: int = 0
    measurements: int = 0
    failures: int = 0
    wall_secs: float = 0.0
    compiles: int = 0


class Tuner:
    """Tunes the tasks of one model on one device into one store.

    `report` is called after every batch. Raises MeasureError when the device cannot measure at all, DatabaseError when
    records cannot be kept; a failing candidate or task is recorded and never stops the others.
    """

    def __init__(
        self,
        choices: Sequence[Choices],
        target_key: str,
        runner: Runner,
        store: Store,
        settings: Settings,
        job: str,
        report: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self.target_key = target_key
        self.runner = runner
        self.store = store
        self.settings = settings
        self.job = job
        self.report = report
        self.result = TuneResult()
        self.states = [self._open(c) for c in choices]
        self._references: dict[tuple[str, int], CheckCase] = {}

    def _open(self, choices: Choices) -> TaskState:
        task = choices.task
        self.store.add_workload(Workload(task.key, task.text, FORMAT_VERSION, task.name))
        problem = SearchProblem(choices.space, points_array(task.domain.points), list(task.domain.weights))
        seed = int.from_bytes(
            hashlib.blake2b(f"{self.settings.seed}:{task.key}".encode(), digest_size=8).digest(), "little"
        )
        strategy = make_strategy(self.settings.strategy, problem, np.random.default_rng(seed))
        state = TaskState(choices, strategy)
        known = self.store.measurements(task.key, self.target_key)
        self._learn(state, known)
        return state

    # -- the job ------------------------------------------------------------------------------------------------------

    def run(self) -> TuneResult:
        """Tune until every task has had its share. Interruptible between batches without losing a record."""
        started = time.monotonic()
        for state in self.states:
            self._baselines(state)
        first = min(self.settings.batch, self.settings.candidates)
        for state in self.states:
            if not state.tuned:
                seeds = state.choices.seeds(max(1, first // 2)) if first else ()
                self._measure(state, [state.choices.tuned(c) for c in seeds])
            while len(state.tuned) < first and not state.exhausted:
                self._round(state, first - len(state.tuned))
        budget = self.settings.candidates * len(self.states)
        while sum(len(s.tuned) for s in self.states) < budget:
            open_ = [s for s in self.states if not s.exhausted and len(s.tuned) < 3 * self.settings.candidates]
            if not open_:
                break
            left = budget - sum(len(s.tuned) for s in self.states)
            self._round(max(open_, key=self._worth), min(self.settings.batch, left))
        for state in self.states:
            self._finals(state)
        self.result.wall_secs = time.monotonic() - started
        return self.result

    def _worth(self, state: TaskState) -> tuple[float, str]:
        """Expected end-to-end seconds gained by another batch: calls x time x recent relative gain."""
        best = state.best()
        calls = max(1, len(state.task.sites))
        seconds = 1.0 if best is None else best
        return calls * seconds * max(state.last_gain, 0.01) / (
            1 + len(state.tuned) / self.settings.candidates
        ), state.task.key

    def _baselines(self, state: TaskState) -> None:
        """Time the generic and the library form wherever they have no record yet."""
        missing = []
        for make in (lambda: (state.choices.generic(),), state.choices.library_variants):
            try:
                missing += [v for v in make() if v.key not in state.kinds]
            except ScheduleError:
                continue
        self._measure(state, missing)

    def _round(self, state: TaskState, count: int) -> None:
        before = state.best()
        asked = state.strategy.ask(count)
        if not asked:
            state.exhausted = True
            return
        self._measure(state, [state.choices.tuned(c) for c in asked])
        after = state.best()
        state.last_gain = 1.0 if before is None or after is None else max(0.0, math.log(before / after))

    def _finals(self, state: TaskState) -> None:
        """Time the contenders once more, all in one interleaved batch: early figures come from different moments.

        Done after new trials, or when it was never done; so a job whose trials are all recorded measures nothing.
        """
        if not state.fresh and any(count > 1 for count in state.visits.values()):
            return
        keys: dict[str, None] = {}
        for a in range(len(state.task.domain.points)):
            for kind, count in (("tuned", FINALISTS), ("library", 1), ("generic", 1)):
                timed = [
                    (t, k) for k, row in state.times.items() if state.kinds[k] == kind and (t := row[a]) is not None
                ]
                best = min((t for row in state.times.values() if (t := row[a]) is not None), default=math.inf)
                keys |= dict.fromkeys(k for t, k in sorted(timed)[:count] if t < 2 * best)
        self._measure(state, [state.variants[k] for k in sorted(keys)], "final", 3 * self.settings.timing_secs)

    # -- measuring ----------------------------------------------------------------------------------------------------

    def _measure(
        self, state: TaskState, variants: Sequence[VariantRecord], part: str = "trial", budget_secs: float | None = None
    ) -> None:
        if not variants:
            return
        task = state.task
        requests: list[MeasureRequest] = []
        records: list[Measurement] = []
        by_id: dict[str, VariantRecord] = {}
        bindings = task.bindings()
        for variant in variants:
            identity = self._id(task, variant, part)
            try:
                program = state.choices.program(variant)
            except BuildError as error:
                records.append(self._failed(task, variant, identity, "constraint", str(error)))
                continue
            by_id[identity] = variant
            requests.append(
                MeasureRequest(
                    identity,
                    program.to_json(),
                    tuple(self._check(state, n) for n in range(2)),
                    bindings,
                    TimingPolicy(3, 20, budget_secs or self.settings.timing_secs, 0.1, self._stops(state)),
                )
            )
        results = self.runner.submit(requests).result() if requests else []
        for result in results:
            records += self._records(task, by_id[result.id], result)
        self.store.add_measurements(records)
        self.result.measurements += len(records)
        self.result.compiles += len(requests)
        if part == "trial":
            self.result.trials += sum(v.kind == "tuned" for v in variants)
            state.fresh = True
        self._learn(state, records)
        self._tell_progress(state)

    def _stops(self, state: TaskState) -> tuple[float | None, ...]:
        """A shape stops early where a candidate is several times slower than what is known."""
        stops: list[float | None] = []
        for a in range(len(state.task.domain.points)):
            known = [t for times in state.times.values() if (t := times[a]) is not None]
            stops.append(4 * min(known) if known else None)
        return tuple(stops)

    def _records(self, task: Task, variant: VariantRecord, result: MeasureResult) -> list[Measurement]:
        if not result.ok:
            return [
                self._failed(task, variant, result.id, result.stage or "runtime", result.message, result.build_secs)
            ]
        return [
            Measurement(
                id=f"{result.id}.{number}",
                workload=task.key,
                target=self.target_key,
                variant=variant,
                symbols=timing.symbols,
                samples_secs=timing.samples_secs,
                checked=result.checked,
                build_secs=result.build_secs,
                job=self.job,
                measured_at=time.time(),
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
            stage=stage,  # type: ignore[arg-type]
            message=message or f"failed at stage {stage} without a message",
            build_secs=build_secs,
            job=self.job,
            measured_at=time.time(),
        )

    def _id(self, task: Task, variant: VariantRecord, part: str) -> str:
        text = f"{task.key}:{self.target_key}:{variant.key}:{self.job}:{part}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _check(self, state: TaskState, number: int) -> CheckCase:
        key = (state.task.key, number)
        if key not in self._references:
            self._references[key] = check_case(state.task, number)
        return self._references[key]

    # -- learning -----------------------------------------------------------------------------------------------------

    def _learn(self, state: TaskState, records: Sequence[Measurement]) -> None:
        """Put records into the matrix of times and tell the strategy."""
        points = {tuple(sorted(b.items())): a for a, b in enumerate(state.task.bindings())}
        told: dict[str, tuple[VariantRecord, dict[int, Outcome]]] = {}
        for record in sorted(records, key=lambda r: r.id):
            variant = record.variant
            state.kinds[variant.key] = variant.kind
            state.variants[variant.key] = variant
            row = state.times.setdefault(variant.key, [None] * len(points))
            outcomes = told.setdefault(variant.key, (variant, {}))[1]
            if record.status == "failed":
                state.failures += 1
                self.result.failures += record.job == self.job
                for a in range(len(points)):
                    outcomes.setdefault(a, Failure(record.stage or "runtime", record.message))
                continue
            spot = points.get(tuple(sorted(record.symbols.items())))
            if spot is None or not record.checked:
                continue
            pooled = state.samples.setdefault((variant.key, spot), [])
            pooled += record.samples_secs
            state.visits[variant.key, spot] = state.visits.get((variant.key, spot), 0) + 1
            row[spot] = seconds = statistics.median(pooled)
            outcomes[spot] = seconds
        results = []
        for variant, outcomes in told.values():
            if variant.kind != "tuned":
                continue
            candidate = state.choices.candidate_of(variant)
            if candidate is not None:
                state.tuned.add(variant.key)
                results.append(Result(candidate, outcomes))
        if results:
            state.strategy.tell(results)

    def _tell_progress(self, state: TaskState) -> None:
        self.report(
            Progress(
                state.task.name,
                self.states.index(state) if state in getattr(self, "states", []) else 0,
                len(self.states),
                len(state.tuned),
                state.failures,
                state.best("tuned") or math.nan,
                state.best("library"),
                state.best("generic"),
            )
        )


def check_case(task: Task, number: int) -> CheckCase:
    """A shape, random inputs for it and the expected outputs. Number 0 is small, 1 is larger; both are off any tile."""
    sizes = (5, 19) if number == 0 else (2, 67)
    symbols: dict[str, int] = {}
    values = {}
    highest = [max(p[a] for p in task.domain.points) for a in range(len(task.func.symbols))]
    for v, top in zip(task.func.symbols, highest):
        value = min(top, sizes[0] if top <= 16 else sizes[1])
        symbols[task.symbol_names[v]] = value
        values[v] = value
    inputs = []
    for position, b in enumerate(task.func.input_buffers):
        shape = tuple(_size(d, values) for d in b.shape)
        seed = 0 if b in task.func.consts else CHECK_SEED + number
        inputs.append(random_array(f"p{position}", b.dtype.name, shape, input_fill(task.func, b), seed))
    expected = evaluate(task.func, inputs, values)
    limits = tolerances(task.func, values, expected)
    return CheckCase(
        symbols,
        CHECK_SEED + number,
        tuple(e.astype(b.dtype.numpy) for e, b in zip(expected, task.func.output_buffers, strict=True)),
        tuple(r for r, _ in limits),
        tuple(a for _, a in limits),
    )


def _size(e: Expr, values: Mapping[Var, int]) -> int:
    result = as_int(simplify(substitute(e, {v: const(x) for v, x in values.items()})))
    assert result is not None, f"{e!r} has symbols besides the task's"
    return result
