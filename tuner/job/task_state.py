"""The state of one task under tuning: tried variants, their times at the anchors, and the strategy over them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from relax_tune.database.records import Measurement, VariantRecord
from relax_tune.errors import ScheduleError
from relax_tune.tuner.job.scheduling import expected_saving
from relax_tune.tuner.search.base import Failure, Outcome, Result, SearchStrategy
from relax_tune.tuner.task.domain import Point
from relax_tune.tuner.task.task import Choices, Task
from relax_tune.tuner.task.unfused_variants import in_parts

UnderWay = Literal["", "trials", "alone"]
# Contenders of each anchor that are timed once more: this many candidates, besides the best library and generic form.
FINALISTS = 3
# Nothing this many times slower than the best is a contender.
HOPELESS = 2.0
# With as many trials for each sketch, one without any is tried too.
TRIALS_A_SKETCH = 2


@dataclass(eq=False)
class TaskState:
    """One task under tuning.

    times: seconds per variant key and anchor, medians of all samples, for variants without a failure
    failed: variants with a failure
    tuned: candidates of this version's space that need no more measuring
    foreign: sketch of each tuned variant on record that this version's rules do not make
    attempted, retimed: variants that this job has measured, and measured once more
    visits: records per variant and anchor
    counts: a test for records that are valid here; others are ignored
    finals, validations: numbers of batches of contenders
    lacking: number of records, and the shapes that contenders lacked then
    flying: candidates of the budget that are being measured
    under_way: `trials` if only candidates are being measured, `alone` if something else is, empty if nothing is
    rng: generator that the strategy draws from
    strategy: None before it is begun, and for a task without a space
    untold: results for the strategy once it is begun
    """

    position: int
    choices: Choices
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    strategy: SearchStrategy | None = None
    untold: dict[str, dict[int, Outcome]] = field(default_factory=dict)
    baselines: tuple[VariantRecord, ...] = ()
    tuned: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    times: dict[str, list[float | None]] = field(default_factory=dict)
    variants: dict[str, VariantRecord] = field(default_factory=dict)
    records: set[str] = field(default_factory=set)
    foreign: dict[str, str] = field(default_factory=dict)
    attempted: set[str] = field(default_factory=set)
    retimed: set[str] = field(default_factory=set)
    samples: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    visits: dict[tuple[str, int], int] = field(default_factory=dict)
    counts: Callable[[Measurement], bool] = lambda _: True
    finals: int = 0
    validations: int = 0
    lacking: tuple[int, Mapping[str, Sequence[Point]]] | None = None
    flying: int = 0
    under_way: UnderWay = ""
    exhausted: bool = False
    given_up: bool = False

    @property
    def task(self) -> Task:
        return self.choices.task

    def known(self, key: str) -> bool:
        """Return True if a variant has a time at every anchor, or failed."""
        return key in self.failed or (key in self.times and None not in self.times[key])

    def settled(self, key: str) -> bool:
        """Return True if this job has no reason to measure a variant."""
        return self.known(key) or key in self.attempted

    def missing(self) -> list[VariantRecord]:
        """Return the variants that are always timed, and are not settled.

        Guesses of a sketch are among them where only variants of its name that other rules made are on record: nothing else says
        that a candidate of it is worth a trial.
        """
        made = set(self.foreign.values()) - {v.sketch for v in self.variants.values()}
        return [v for v in (*self.baselines, *(self.choices.guesses(made) if made else ())) if not self.settled(v.key)]

    def untried_guesses(self) -> list[VariantRecord]:
        """Return the first guess of each sketch without a record, where candidates of the others say nothing about it.

        What was tried is slower than what can be dispatched without a search, or was enough for every sketch.
        """
        if self.strategy is None or self.flying or not self.tuned:
            return []
        if not self._is_behind() and len(self.tuned) < TRIALS_A_SKETCH * len(self.choices.sketches):
            return []
        tried = {v.sketch for v in self.variants.values()}
        return [v for v in self.choices.first_guesses(tried) if not self.settled(v.key)]

    def _is_behind(self) -> bool:
        """Return True if candidates take longer over the anchors than what can be dispatched without a search."""
        rows = [row for k, row in self.times.items() if k in self.tuned]
        ours, others = 0.0, 0.0
        for a, (weight, other) in enumerate(zip(self.task.domain.weights, self.dispatchable(), strict=True)):
            ours += weight * min((t for row in rows if (t := row[a]) is not None), default=math.inf)
            others += weight * other
        return ours > others

    def best(self, kind: str | None = None) -> float | None:
        """Return the weighted seconds over the anchors of the best variant at each; None when some anchor lacks a time."""
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
        """Return the seconds at each anchor of the best variant outside the space; inf without one."""
        tried = self.variants
        rows = [row for k, row in self.times.items() if tried[k].kind != "tuned" or in_parts(tried[k])]
        count = len(self.task.domain.points)
        return [min((t for row in rows if (t := row[a]) is not None), default=math.inf) for a in range(count)]

    def saving(self, batch: int) -> float:
        """Return the seconds of the model that a batch is expected to save: over the anchors by weight, at every call."""
        total = 0.0
        rows = [row for key, row in self.times.items() if self.variants[key].kind == "tuned"]
        for a, weight in enumerate(self.task.domain.weights):
            best = self.best_at(a)
            times = [t for row in rows if (t := row[a]) is not None]
            total += weight * expected_saving(
                times, len(self.tuned) + self.flying, batch, 1.0 if best is None else best
            )
        return total * max(1, len(self.task.sites))

    def seconds(self) -> float:
        """Return the seconds that this task now takes in the model; 0 while some anchor has no time."""
        return (self.best() or 0.0) * max(1, len(self.task.sites))

    def incomplete(self) -> list[VariantRecord]:
        """Return candidates that lack a time at some anchor, since they were measured over another range. The best ones
        come first.
        """
        found: list[tuple[float, str]] = []
        for key, row in self.times.items():
            variant = self.variants[key]
            if variant.kind != "tuned" or self.settled(key) or self.choices.candidate_of(variant) is None:
                continue
            lags = [math.log(t / b) for a, t in enumerate(row) if t is not None and (b := self.best_at(a)) is not None]
            found.append((sum(lags) / len(lags) if lags else math.inf, key))
        return [self.variants[key] for _, key in sorted(found)]

    def finalists(self) -> list[VariantRecord]:
        """Return the contenders to time once more, in one interleaved batch.

        Empty when every contender has been timed twice; so a job whose trials are all recorded measures nothing.
        """
        anchors = range(len(self.task.domain.points))
        contenders: dict[str, None] = {}
        leaders: dict[str, None] = {}
        for a in anchors:
            best = self.best_at(a) or 0.0
            for kind, count in (("tuned", FINALISTS), ("library", 1), ("generic", 1)):
                timed = [
                    (t, k)
                    for k, row in self.times.items()
                    if self.variants[k].kind == kind and None not in row and (t := row[a]) is not None
                ]
                contenders |= dict.fromkeys(k for t, k in sorted(timed)[:count] if t < HOPELESS * best)
                leaders |= dict.fromkeys(k for t, k in timed if t == best)
        new = [k for k in contenders if k not in self.retimed and any(self.visits.get((k, a), 0) < 2 for a in anchors)]
        return [self.variants[k] for k in sorted({*new, *leaders})] if new else []

    def learn(self, records: Sequence[Measurement], job: str) -> None:
        """Put records into the matrix of times and tell the strategy. Known records change nothing."""
        points = {tuple(sorted(b.items())): a for a, b in enumerate(self.task.bindings())}
        told: dict[str, dict[int, Outcome]] = {}
        for record in sorted(records, key=lambda r: r.id):
            if record.id in self.records:
                continue
            self.records.add(record.id)
            if (record.stage == "device-lost" and record.job != job) or not self.counts(record):
                continue  # says nothing of the variant
            key = record.variant.key
            if self._is_foreign(record.variant):
                continue  # no build dispatches it, so it must not stand for what there is
            self.variants[key] = record.variant
            outcomes = told.setdefault(key, {})
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
        self._tell(told)

    def _is_foreign(self, variant: VariantRecord) -> bool:
        """Return True if a tuned variant is not one that the rules of this version make."""
        if variant.kind != "tuned" or in_parts(variant) or variant.key in self.variants:
            return False
        if variant.key not in self.foreign and self.choices.candidate_of(variant) is None:
            self.foreign[variant.key] = variant.sketch
        return variant.key in self.foreign

    def untried(self) -> bool:
        """Return True if candidates are on record, and none was counted since the strategy is not begun."""
        return not self.exhausted and any(
            self.variants[k].kind == "tuned" and not in_parts(self.variants[k]) for k in self.untold
        )

    def begin(self, strategy: SearchStrategy) -> None:
        """Set the strategy, and tell it all known results."""
        self.strategy = strategy
        self._tell(self.untold)
        self.untold = {}

    def _tell(self, told: dict[str, dict[int, Outcome]]) -> None:
        if self.strategy is None:
            for key, outcomes in told.items():
                self.untold.setdefault(key, {}).update(outcomes)
            return
        results = []
        for key, outcomes in told.items():
            variant = self.variants[key]
            candidate = self.choices.candidate_of(variant) if variant.kind == "tuned" else None
            if candidate is None:
                continue
            if self.known(key):
                self.tuned.add(key)
            if outcomes:
                results.append(Result(candidate, outcomes))
        if results:
            self.strategy.tell(results)


def baselines_of(choices: Choices) -> tuple[VariantRecord, ...]:
    """Return the generic form, the library forms and the unfused variants, which are always timed."""
    found: list[VariantRecord] = []
    for make in (lambda: (choices.generic(),), choices.library_variants, choices.variants_in_parts):
        try:
            found += make()
        except ScheduleError:
            continue
    return tuple(found)
