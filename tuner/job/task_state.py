"""The state of one task under tuning: tried variants, their times at the anchors, and the search strategy.

Tests: `tests/tuner/job/test_loop.py`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from relax_tune.database.records import Measurement, VariantRecord
from relax_tune.errors import ScheduleError, left_out
from relax_tune.tuner.job.scheduling import expected_saving
from relax_tune.tuner.measure.messages import MeasureResult
from relax_tune.tuner.search.base import Failure, Outcome, Result, SearchStrategy
from relax_tune.tuner.task.domain import Point
from relax_tune.tuner.task.task import Task
from relax_tune.tuner.task.unfused_variants import in_parts
from relax_tune.tuner.task.variants import TaskVariants

UnderWay = Literal["", "trials", "exclusive"]
# Candidates of each anchor that are timed once more as contenders, in addition to the best library and generic variant.
FINALISTS = 3
# A variant slower than the best by this factor is no contender.
HOPELESS = 2.0
# Trials per sketch, on average, after which sketches without a trial are tried.
TRIALS_A_SKETCH = 2


@dataclass(eq=False)
class TaskState:
    """One task under tuning. Variants are identified by their keys.

    Attributes:
        rng: Generator of the strategy.
        strategy: None until it is constructed, and for a task without a space.
        pending: Results for the strategy, until it is constructed.
        tuned: Candidates of this version's space that need no more measuring.
        failed: Variants with a failure.
        times: Seconds at each anchor, medians of all samples, of each variant without a failure.
        foreign: Sketch of each recorded tuned variant that this version's rules do not generate.
        attempted: Variants that this job has measured.
        retimed: Variants that this job has measured again as contenders, each with an anchor.
        visits: Number of records by variant and anchor.
        counts: Test for records that are valid on this device; others are ignored.
        finals, validations: Numbers of batches of contenders.
        counted: Number of records in the store at the last reading; invalid rows are counted too, and not read.
        lacking: Number of records, and the shapes at which contenders lacked times then.
        flying: Number of budgeted candidates that are being measured.
        under_way: `trials` if only candidates are being measured, `exclusive` if anything else is, empty if nothing is.
    """

    position: int
    task_variants: TaskVariants
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    strategy: SearchStrategy | None = None
    pending: dict[str, dict[int, Outcome]] = field(default_factory=dict)
    baselines: tuple[VariantRecord, ...] = ()
    tuned: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    times: dict[str, list[float | None]] = field(default_factory=dict)
    variants: dict[str, VariantRecord] = field(default_factory=dict)
    records: set[str] = field(default_factory=set)
    foreign: dict[str, str] = field(default_factory=dict)
    attempted: set[str] = field(default_factory=set)
    retimed: set[tuple[str, int]] = field(default_factory=set)
    samples: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    visits: dict[tuple[str, int], int] = field(default_factory=dict)
    counts: Callable[[Measurement], bool] = lambda _: True
    finals: int = 0
    validations: int = 0
    counted: int = 0
    lacking: tuple[int, Mapping[str, Sequence[Point]]] | None = None
    flying: int = 0
    under_way: UnderWay = ""
    exhausted: bool = False
    given_up: bool = False

    @property
    def task(self) -> Task:
        return self.task_variants.task

    @property
    def ended(self) -> bool:
        """True if the task tries no further candidate."""
        return self.exhausted or self.given_up

    def known(self, key: str) -> bool:
        """Return True if a variant has a time at every anchor, or failed."""
        return key in self.failed or (key in self.times and None not in self.times[key])

    def settled(self, key: str) -> bool:
        """Return True if this job need not measure a variant."""
        return self.known(key) or key in self.attempted

    def missing(self) -> list[VariantRecord]:
        """Return the variants that are always timed and not yet settled.

        They include the guesses of a sketch for which only variants of other versions are on record: nothing else would tell that
        the sketch is worth a trial.
        """
        unknown_sketches = set(self.foreign.values()) - {v.sketch for v in self.variants.values()}
        return [
            v
            for v in (
                *self.baselines,
                *(self.task_variants.sketch_set.guesses(unknown_sketches) if unknown_sketches else ()),
            )
            if not self.settled(v.key)
        ]

    def untried_guesses(self) -> list[VariantRecord]:
        """Return the first guess of each sketch without a record, once the other sketches have had their trials.

        That is when the candidates so far are slower than what can be dispatched without a search, or when there were
        TRIALS_A_SKETCH trials per sketch.
        """
        if self.strategy is None or self.flying or not self.tuned:
            return []
        if not self._is_behind() and len(self.tuned) < TRIALS_A_SKETCH * len(self.task_variants.sketch_set.sketches):
            return []
        tried = {v.sketch for v in self.variants.values()}
        return [v for v in self.task_variants.sketch_set.first_guesses(tried) if not self.settled(v.key)]

    def _is_behind(self) -> bool:
        """Return True if the best candidates are slower over the anchors than variants that need no search."""
        rows = [row for k, row in self.times.items() if k in self.tuned]
        ours, others = 0.0, 0.0
        for a, (weight, other) in enumerate(zip(self.task.domain.weights, self.dispatchable(), strict=True)):
            ours += weight * min((t for row in rows if (t := row[a]) is not None), default=math.inf)
            others += weight * other
        return ours > others

    def best(self, kind: str | None = None) -> float | None:
        """Return the weighted seconds over the anchors, each by its best variant; None if an anchor has no time."""
        keys = [k for k in self.times if kind is None or self.variants[k].kind == kind]
        total = 0.0
        for a, w in enumerate(self.task.domain.weights):
            known = [t for k in keys if (t := self.times[k][a]) is not None]
            if not known:
                return None
            total += w * min(known)
        return total

    def best_at(self, anchor: int) -> float | None:
        """Return the smallest time at one anchor."""
        return min((t for row in self.times.values() if (t := row[anchor]) is not None), default=None)

    def dispatchable(self) -> list[float]:
        """Return the seconds of the best variant outside the search space at each anchor; inf without one."""
        tried = self.variants
        rows = [row for k, row in self.times.items() if tried[k].kind != "tuned" or in_parts(tried[k])]
        count = len(self.task.domain.points)
        return [min((t for row in rows if (t := row[a]) is not None), default=math.inf) for a in range(count)]

    def saving(self, batch: int, after: int = 0) -> float:
        """Return the seconds per run of the model that a batch is expected to save, weighted over the anchors.

        Args:
            after: Candidates that are tried before the batch, in vain.
        """
        total = 0.0
        rows = [row for key, row in self.times.items() if self.variants[key].kind == "tuned"]
        for a, weight in enumerate(self.task.domain.weights):
            best = self.best_at(a)
            times = [t for row in rows if (t := row[a]) is not None]
            total += weight * expected_saving(
                times, len(self.tuned) + self.flying + after, batch, 1.0 if best is None else best
            )
        return total * max(1, len(self.task.sites))

    def seconds(self) -> float:
        """Return the seconds that this task takes per run of the model; 0 while an anchor has no time."""
        return (self.best() or 0.0) * max(1, len(self.task.sites))

    def incomplete(self) -> list[VariantRecord]:
        """Return candidates without a time at some anchor, since they were measured over another range; the best come first."""
        ranked: list[tuple[float, str]] = []
        for key, row in self.times.items():
            variant = self.variants[key]
            if (
                variant.kind != "tuned"
                or self.settled(key)
                or self.task_variants.sketch_set.candidate_of(variant) is None
            ):
                continue
            lags = [math.log(t / b) for a, t in enumerate(row) if t is not None and (b := self.best_at(a)) is not None]
            ranked.append((sum(lags) / len(lags) if lags else math.inf, key))
        return [self.variants[key] for _, key in sorted(ranked)]

    def finalists(self) -> dict[str, list[int]]:
        """Return the contenders to time once more, in one interleaved batch, with the anchors at which they contend.

        A contender is also timed where it was so slow that something may have disturbed it; racing soon stops it if nothing did. The
        result is empty once every contender has been timed twice, so a job whose trials are all recorded measures nothing.
        """
        anchors_by_key: dict[str, list[int]] = {}
        for a in range(len(self.task.domain.points)):
            best = self.best_at(a) or 0.0
            contenders: set[str] = set()
            leaders: set[str] = set()
            for kind, count in (("tuned", FINALISTS), ("library", 1), ("generic", 1)):
                timed = [
                    (t, k)
                    for k, row in self.times.items()
                    if self.variants[k].kind == kind and None not in row and (t := row[a]) is not None
                ]
                contenders |= {k for t, k in sorted(timed)[:count] if t < HOPELESS * best}
                # The leaders are timed again with them: times are compared within one batch, under the same conditions.
                leaders |= {k for t, k in timed if t == best}
            new = {k for k in contenders if (k, a) not in self.retimed and self.visits.get((k, a), 0) < 2}
            for key in new | leaders if new else ():
                anchors_by_key.setdefault(key, []).append(a)
        for key, anchors in anchors_by_key.items():
            anchors += [a for a in range(len(self.times[key])) if a not in anchors and self._doubtful(key, a)]
        return {key: sorted(anchors) for key, anchors in sorted(anchors_by_key.items())}

    def _doubtful(self, key: str, anchor: int) -> bool:
        time, best = self.times[key][anchor], self.best_at(anchor)
        once = (key, anchor) not in self.retimed and self.visits.get((key, anchor), 0) < 2
        return once and time is not None and best is not None and time >= HOPELESS * best

    def learn(self, records: Sequence[Measurement], job: str) -> None:
        """Add records to the matrix of times and pass them to the strategy. Known records change nothing."""
        points = {tuple(sorted(b.items())): a for a, b in enumerate(self.task.bindings())}
        outcomes_by_key: dict[str, dict[int, Outcome]] = {}
        # Sorted by id, so that the state does not depend on the order in which the store returns records.
        for record in sorted(records, key=lambda r: r.id):
            if record.id in self.records:
                continue
            self.records.add(record.id)
            if (record.stage == "device-lost" and record.job != job) or not self.counts(record):
                continue  # no statement about the variant
            key = record.variant.key
            if self._is_foreign(record.variant):
                continue  # no build dispatches it, so its time must not count as the task's
            self.variants[key] = record.variant
            outcomes = outcomes_by_key.setdefault(key, {})
            if record.status == "failed":
                self.failed.add(key)
                for a in range(len(points)):
                    outcomes.setdefault(a, Failure(record.stage or "runtime", record.message))
                continue
            if not record.checked or record.median_secs <= 0:
                continue
            row = self.times.setdefault(key, [None] * len(points))
            spot = points.get(tuple(sorted(record.symbols.items())))
            if spot is not None:
                pooled = self.samples.setdefault((key, spot), [])
                pooled += record.samples_secs
                self.visits[key, spot] = self.visits.get((key, spot), 0) + 1
                row[spot] = outcomes[spot] = statistics.median(pooled)
        for key in self.failed:
            self.times.pop(key, None)
        self._tell(outcomes_by_key)

    def _is_foreign(self, variant: VariantRecord) -> bool:
        """Return True if this version's rules do not generate a tuned variant."""
        if variant.kind != "tuned" or in_parts(variant) or variant.key in self.variants:
            return False
        if variant.key not in self.foreign and self.task_variants.sketch_set.candidate_of(variant) is None:
            self.foreign[variant.key] = variant.sketch
        return variant.key in self.foreign

    def untried(self) -> bool:
        """Return True if candidates are on record that the strategy, not yet constructed, could not count."""
        return not self.exhausted and any(
            self.variants[k].kind == "tuned" and not in_parts(self.variants[k]) for k in self.pending
        )

    def begin(self, strategy: SearchStrategy) -> None:
        """Set the strategy and pass it all known results."""
        self.strategy = strategy
        self._tell(self.pending)
        self.pending = {}

    def _tell(self, outcomes_by_key: dict[str, dict[int, Outcome]]) -> None:
        if self.strategy is None:
            for key, outcomes in outcomes_by_key.items():
                self.pending.setdefault(key, {}).update(outcomes)
            return
        results = []
        for key, outcomes in outcomes_by_key.items():
            variant = self.variants[key]
            candidate = self.task_variants.sketch_set.candidate_of(variant) if variant.kind == "tuned" else None
            if candidate is None:
                continue
            if self.known(key):
                self.tuned.add(key)
            if outcomes:
                results.append(Result(candidate, outcomes))
        if results:
            self.strategy.tell(results)


def baselines_of(task_variants: TaskVariants) -> tuple[VariantRecord, ...]:
    """Return the generic, library and unfused variants, which are always timed."""
    records: list[VariantRecord] = []
    # The generic form is last: at large shapes it is far slower than the others, whose times then stop it.
    forms: Mapping[str, Callable[[], Sequence[VariantRecord]]] = {
        "the library forms": lambda: task_variants.library.variants,
        "the unfused variants": lambda: task_variants.unfused.variants,
        "the generic form": lambda: (task_variants.sketch_set.generic(),),
    }
    for name, make in forms.items():
        with left_out(name, task_variants.task.name, ScheduleError):
            records += make()
    return tuple(records)


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A batch under way.

    Attributes:
        candidates: Keys of variants that count in the budget.
        by_id: Variant of each request.
        failures: Records of variants without a program.
        future: Results of the runner.
    """

    state: TaskState
    kind: UnderWay
    candidates: list[str]
    by_id: Mapping[str, VariantRecord]
    failures: list[Measurement]
    future: Future[list[MeasureResult]]
