"""Plans of tasks without records: by the predictions of a prior, else by the guesses of the rules.

Tests: `tests/tuner/learn/test_prior.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

from relax_tune.database.records import VariantRecord
from relax_tune.errors import BuildError
from relax_tune.tuner.learn.prior import Coverage, Prior, feature_names, sketch_names, with_machine
from relax_tune.tuner.learn.recorded_rows import library_row, log_roofline
from relax_tune.tuner.learn.warm_start import RecordedHistory
from relax_tune.tuner.plan.select import DispatchPlan, PlanEntry, select
from relax_tune.tuner.search.space import Candidate, CodeArray, FeatureArray
from relax_tune.tuner.task.sketch_set import SketchSet
from relax_tune.tuner.task.task import points_array
from relax_tune.tuner.task.variants import TaskVariants

DRAWN = 512
"""Random candidates of each sketch that are scored in addition to the guesses of the rules."""
SEED_DRAWN = 128
"""The same, for the first batch of a search."""
KNOWN = 16
"""Scored candidates that resemble the fastest ones of similar functions."""
PER_ANCHOR = 4
"""Candidates of each anchor that may be dispatched."""
GROUPS = 12
"""Groups of candidates with equal layouts whose code is generated to find one that fits."""
PREDICTED = ("matmul", "flash")
"""Rules whose functions the prior plans in builds without records, by the names of their first sketches (`docs/design/plans.md`)."""
LEAF_COST = 0.03
"""Predicted gain in log time that justifies another guard: predictions are less sure than measurements."""


SOME_ROUTINE = ""
"""Stands for the first variant around a library call: the schedules of its epilogue are only generated if it is chosen."""

Predicted = tuple[DispatchPlan, dict[str, VariantRecord]]


class PlanSource(Protocol):
    """Plans of tasks that have no times on this device."""

    def plan(self, task_variants: TaskVariants, exclude: Collection[str] = ()) -> Predicted | None:
        """Return a plan and its variants, none of them among `exclude`; None if the source knows no plan."""
        ...


@dataclass(frozen=True, eq=False)
class Predictor:
    """Predictions for tasks without records.

    Attributes:
        prior: Ranks candidates; None leaves the choice to the rules.
        history: Names candidates that resemble the fastest ones of similar functions.
        similar: Plans of similar devices, which take precedence.
    """

    prior: Prior | None = None
    history: RecordedHistory | None = None
    similar: PlanSource | None = None

    def plan(self, task_variants: TaskVariants, exclude: Collection[str] = ()) -> Predicted | None:
        """Return a plan of candidates that are likely fast, and its variants.

        If the prior fits the task (`_fits`), the plan dispatches the candidates it ranks first at each anchor. Otherwise it
        dispatches the first guess of the rules.

        Returns:
            None if only the fallback rule applies, or if the first guess is excluded.
        """
        similar = None if self.similar is None else self.similar.plan(task_variants, exclude)
        if similar is not None:
            return similar
        sketch_set = task_variants.sketch_set
        if sketch_set.first.name == "fallback":  # the generic form itself
            return None
        guess = sketch_set.best_guess()
        if guess.key in exclude:  # it failed here, so similar candidates may fail, too
            return None
        by_rules = not sketch_set.first.name.startswith(PREDICTED)
        if self.prior is None or by_rules or not self._fits(sketch_set):
            plan = DispatchPlan((PlanEntry((), guess.key),), 0.0)
            return (plan, {guess.key: guess}) if _has_program(task_variants, guess) else None
        return _ranked(task_variants, self.prior, self._pool(sketch_set), exclude)

    def plan_within(
        self, task_variants: TaskVariants, fits: Callable[[VariantRecord], bool], exclude: Collection[str] = ()
    ) -> Predicted | None:
        """Return a plan of the tuned candidates that fit, by the prior or else the first guess of the rules; None if there are none.

        Args:
            fits: Depends only on the sketch and on the tunables of `Sketch.layout_tunables`.
        """
        sketch_set = task_variants.sketch_set
        if self.prior is None or not self._fits(sketch_set):
            guesses = map(sketch_set.record_of, sketch_set.seeds())
            guess = next((g for g in guesses if g.key not in exclude and fits(g)), None)
            return None if guess is None else (DispatchPlan((PlanEntry((), guess.key),), 0.0), {guess.key: guess})
        codes = self._pool(sketch_set)
        mean = _log_times(sketch_set, self.prior, codes)[0] @ np.asarray(sketch_set.task.domain.weights)
        names = [s.layout_tunables for s in sketch_set.sketches]
        groups: dict[tuple[object, ...], list[int]] = {}
        for row in map(int, np.argsort(mean, kind="stable")):
            (candidate,) = sketch_set.space.candidates(codes[row : row + 1])
            values = dict(zip((t.name for t in sketch_set.sketches[candidate.sketch].tunables), candidate.values))
            groups.setdefault((candidate.sketch, *(values[n] for n in names[candidate.sketch])), []).append(row)
        for rows in itertools.islice(groups.values(), GROUPS):
            (candidate,) = sketch_set.space.candidates(codes[rows[:1]])
            if fits(sketch_set.record_of(candidate)):
                return _ranked(task_variants, self.prior, codes[rows], exclude, library=False)
        return None

    def times(
        self, task_variants: TaskVariants, variants: Mapping[str, VariantRecord]
    ) -> dict[str, list[float | None]]:
        """Return the predicted seconds of tuned variants at the anchors, which are good for a comparison; none without a prior."""
        sketch_set = task_variants.sketch_set
        if self.prior is None or self.prior.names != feature_names(sketch_set.hardware):
            return {}
        candidates = {k: sketch_set.candidate_of(v) for k, v in variants.items() if v.kind == "tuned"}
        known = {k: c for k, c in candidates.items() if c is not None}
        if not known:
            return {}
        log_time = _log_times(sketch_set, self.prior, sketch_set.space.encode(list(known.values())))[0]
        return {k: [float(t) for t in np.exp(row)] for k, row in zip(known, log_time)}

    def likely(self, sketch_set: SketchSet, count: int) -> list[Candidate]:
        """Return the candidates that the prior ranks first, alternating between the anchors; empty if the prior does not fit.

        They depend on no records.
        """
        if self.prior is None or not self._fits(sketch_set):
            return []
        space = sketch_set.space
        codes = _drawn(sketch_set, sketch_set.seeds(), SEED_DRAWN)
        order = np.argsort(_log_times(sketch_set, self.prior, codes)[0], axis=0, kind="stable")
        rows = list(dict.fromkeys(map(int, order[:count].ravel())))[:count]
        return space.candidates(codes[rows]) if rows else []

    def _fits(self, sketch_set: SketchSet) -> bool:
        """Return True if the prior has this version's features and covers the task's kernels, and there are sketches to rank."""
        if self.prior is None or self.prior.names != feature_names(sketch_set.hardware):
            return False
        if not sketch_set.task.domain.points or sketch_set.first.name == "fallback":
            return False
        func, hardware = sketch_set.task.func, sketch_set.hardware
        # The rules know what an instruction is good for, the prior only what was recorded. The generation of all sketches takes most
        # of the time of an untuned build, so the function is compared before its sketches.
        return self.prior.covers >= Coverage.of(func, (), hardware) and self.prior.covers >= Coverage.of(
            func, (s.func for s in sketch_set.sketches), hardware
        )

    def _pool(self, sketch_set: SketchSet) -> CodeArray:
        """Return the candidates to rank: seeds, candidates of similar functions, and random ones of every sketch."""
        known = [
            *sketch_set.seeds(),
            *(self.history.of_similar_functions(sketch_set, KNOWN) if self.history is not None else ()),
        ]
        return _drawn(sketch_set, known, DRAWN)


UNTRAINED = Predictor()
"""A predictor that leaves every choice to the rules."""


def _drawn(sketch_set: SketchSet, known: Sequence[Candidate], count: int) -> CodeArray:
    """Return the codes of known candidates, and of `count` of each sketch."""
    space = sketch_set.space
    # A fixed seed: the same build must choose the same kernels.
    drawn = [space.draw(np.random.default_rng(0), n, count) for n in range(len(space.sketches))]
    return space.distinct(np.concatenate([space.encode(known), *drawn]))


def _log_times(
    sketch_set: SketchSet, prior: Prior, codes: CodeArray
) -> tuple[FeatureArray, FeatureArray, FeatureArray]:
    """Return the predicted log times of candidates (N, points), their features (N * points, F) and the roofline of each point."""
    space, points, hardware = (
        sketch_set.space,
        points_array(sketch_set.task.domain.points),
        sketch_set.hardware,
    )
    width = len(sketch_names(hardware))
    features = space.features(codes, points)[:, :, :width].reshape(-1, width)
    scale = log_roofline(features, hardware).reshape(len(codes), len(points)).min(axis=0)
    log_time = prior.log_time(with_machine(features, hardware)).reshape(len(codes), len(points)) + scale
    return log_time, features, scale


def _ranked(
    task_variants: TaskVariants, prior: Prior, codes: CodeArray, exclude: Collection[str], library: bool = True
) -> Predicted | None:
    """Return the plan that a prior predicts to be fastest, among candidates and perhaps a library call, and its variants."""
    space, points = task_variants.sketch_set.space, task_variants.task.domain.points
    log_time, features, scale = _log_times(task_variants.sketch_set, prior, codes)
    order = np.argsort(log_time, axis=0, kind="stable")
    tuned = cache(lambda row: task_variants.sketch_set.record_of(space.candidates(codes[row : row + 1])[0]))
    of_library: dict[str, list[float | None]] = {}
    variants: dict[str, VariantRecord] = {}
    if library and task_variants.library.forms:
        rows = np.stack([library_row(row) for row in features[: len(points)]])
        of_library[SOME_ROUTINE] = [
            float(t) for t in np.exp(prior.log_time(with_machine(rows, task_variants.hardware)) + scale)
        ]
    refused = set(exclude)
    while True:
        times = dict(of_library)
        for a in range(len(points)):
            # The best of each anchor and not of their mean: a candidate that is fast at one end of the range may be
            # slow at the other.
            usable = (row for row in map(int, order[:, a]) if tuned(row).key not in refused)
            for row in itertools.islice(usable, PER_ANCHOR):
                variants[tuned(row).key] = tuned(row)
                times[tuned(row).key] = [float(t) for t in np.exp(log_time[row])]
        if not times:
            return None
        plan = select(times, task_variants.task.domain, libraries=tuple(of_library), leaf_cost=LEAF_COST)
        if SOME_ROUTINE in plan.variants:
            row_of_library = of_library.pop(SOME_ROUTINE)
            routine = next((v for v in task_variants.library.variants if v.key not in exclude), None)
            if routine is not None:
                variants[routine.key], of_library[routine.key] = routine, row_of_library
            continue
        # Only the chosen ones are generated: generating one takes longer than ranking thousands.
        wrong = {k for k in plan.variants if not _has_program(task_variants, variants[k])}
        if not wrong:
            return plan, {k: variants[k] for k in plan.variants}
        refused |= wrong
        of_library = {k: row for k, row in of_library.items() if k not in wrong}


def _has_program(task_variants: TaskVariants, variant: VariantRecord) -> bool:
    """Return True if the code of a variant can be generated. It was never measured, so nothing else has shown that."""
    try:
        task_variants.program(variant)
    except BuildError:
        return False
    return True
