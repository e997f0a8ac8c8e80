"""Plans of tasks without records: what the prior predicts, else what the rules guess."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

from relax_tune.database.records import VariantRecord
from relax_tune.errors import BuildError
from relax_tune.tuner.learn.prior import Prior, feature_names, sketch_names, with_machine
from relax_tune.tuner.learn.recorded_rows import library_row, log_roofline
from relax_tune.tuner.learn.warm_start import RecordedHistory
from relax_tune.tuner.plan.select import DispatchPlan, PlanEntry, select
from relax_tune.tuner.search.space import Candidate, CodeArray, FeatureArray
from relax_tune.tuner.task.task import Choices, points_array

DRAWN = 512
"""Candidates of each sketch that are scored beside the rules' guesses."""
SEED_DRAWN = 128
"""The same, for the first batch of a search."""
KNOWN = 16
"""Candidates that are like those of similar functions."""
KEPT = 4
"""Candidates of each anchor that may be dispatched."""
LEAF_COST = 0.03
"""Predicted gain in log time that justifies another guard: predictions are less sure than measurements."""


Predicted = tuple[DispatchPlan, dict[str, VariantRecord]]


class PlanSource(Protocol):
    """Plans of tasks that have no times on this device. Raises nothing for a task it knows nothing of."""

    def plan(self, choices: Choices, without: Collection[str] = ()) -> Predicted | None:
        """Return a plan and its variants, none of them among `without`; None without one."""
        ...


@dataclass(frozen=True, eq=False)
class Predictor:
    """Knowledge of candidates without records.

    prior: ranks them; None leaves the choice to the rules
    history: names some like the fastest of similar functions
    elsewhere: plans of like devices, which come first
    """

    prior: Prior | None = None
    history: RecordedHistory | None = None
    elsewhere: PlanSource | None = None

    def plan(self, choices: Choices, without: Collection[str] = ()) -> Predicted | None:
        """Return a plan of candidates that are likely fast, and these; None if no rule applies, or only to those `without`.

        None, too, where the rules' first guess is among `without`. It has one variant, that guess, unless a prior of this version's
        features ranks candidates at every anchor.
        """
        there = None if self.elsewhere is None else self.elsewhere.plan(choices, without)
        if there is not None:
            return there
        if choices.sketches[0].name == "fallback":  # the generic form itself
            return None
        guess = choices.guess()
        if guess.key in without:  # it failed here, and what is like it may
            return None
        if self.prior is None or not self._fits(choices):
            plan = DispatchPlan((PlanEntry((), guess.key),), 0.0)
            return (plan, {guess.key: guess}) if _has_program(choices, guess) else None
        return _ranked(choices, self.prior, self._pool(choices), without)

    def likely(self, choices: Choices, count: int) -> list[Candidate]:
        """Return candidates that the prior ranks first, of each anchor in turn; none where it knows nothing of the rules.

        They depend on the prior alone, not on records.
        """
        if self.prior is None or not self._fits(choices):
            return []
        space = choices.space
        codes = _drawn(choices, choices.seeds(), SEED_DRAWN)
        order = np.argsort(_log_times(choices, self.prior, codes)[0], axis=0, kind="stable")
        rows = list(dict.fromkeys(map(int, order[:count].ravel())))[:count]
        return space.candidates(codes[rows]) if rows else []

    def _fits(self, choices: Choices) -> bool:
        """Return whether the prior has this version's features, and the task shapes and rules to rank."""
        known = self.prior is not None and self.prior.names == feature_names(choices.hardware)
        return known and bool(choices.task.domain.points) and choices.sketches[0].name != "fallback"

    def _pool(self, choices: Choices) -> CodeArray:
        """Return the candidates to rank: of the rules, like those of similar functions, and drawn from every sketch."""
        known = [*choices.seeds(), *(self.history.alike(choices, KNOWN) if self.history is not None else ())]
        return _drawn(choices, known, DRAWN)


UNTRAINED = Predictor()
"""Leaves every choice to the rules."""


def _drawn(choices: Choices, known: Sequence[Candidate], count: int) -> CodeArray:
    """Return the codes of known candidates, and of `count` of each sketch."""
    space = choices.space
    drawn = [space.draw(np.random.default_rng(0), n, count) for n in range(len(space.sketches))]
    return space.distinct(np.concatenate([space.encode(known), *drawn]))


def _log_times(choices: Choices, prior: Prior, codes: CodeArray) -> tuple[FeatureArray, FeatureArray, FeatureArray]:
    """Return the predicted log times of candidates (N, points), their features (N * points, F) and the roofline of each point."""
    space, points, hardware = choices.space, points_array(choices.task.domain.points), choices.hardware
    width = len(sketch_names(hardware))
    features = space.features(codes, points)[:, :, :width].reshape(-1, width)
    scale = log_roofline(features, hardware).reshape(len(codes), len(points)).min(axis=0)
    log_time = prior.log_time(with_machine(features, hardware)).reshape(len(codes), len(points)) + scale
    return log_time, features, scale


def _ranked(choices: Choices, prior: Prior, codes: CodeArray, without: Collection[str]) -> Predicted | None:
    """Return the plan that a prior predicts to be fastest, of some candidates and the library's call, and its variants."""
    space, points = choices.space, choices.task.domain.points
    log_time, features, scale = _log_times(choices, prior, codes)
    order = np.argsort(log_time, axis=0, kind="stable")
    tuned = cache(lambda row: choices.tuned(space.candidates(codes[row : row + 1])[0]))
    library: dict[str, list[float | None]] = {}
    variants: dict[str, VariantRecord] = {}
    routine = next((v for v in choices.library_variants() if v.key not in without), None)
    if routine is not None:
        rows = np.stack([library_row(row) for row in features[: len(points)]])
        variants[routine.key] = routine
        library[routine.key] = [float(t) for t in np.exp(prior.log_time(with_machine(rows, choices.hardware)) + scale)]
    refused = set(without)
    while True:
        times = dict(library)
        for a in range(len(points)):
            usable = (row for row in map(int, order[:, a]) if tuned(row).key not in refused)
            for row in itertools.islice(usable, KEPT):
                variants[tuned(row).key] = tuned(row)
                times[tuned(row).key] = [float(t) for t in np.exp(log_time[row])]
        if not times:
            return None
        plan = select(times, choices.task.domain, libraries=tuple(library), leaf_cost=LEAF_COST)
        # code is generated for the few that are chosen: that takes longer than to rank thousands
        wrong = {k for k in plan.variants if not _has_program(choices, variants[k])}
        if not wrong:
            return plan, {k: variants[k] for k in plan.variants}
        refused |= wrong
        library = {k: row for k, row in library.items() if k not in wrong}


def _has_program(choices: Choices, variant: VariantRecord) -> bool:
    """Return False for a variant whose code cannot be generated: nothing was measured, so nothing has shown that yet."""
    try:
        choices.program(variant)
    except BuildError:
        return False
    return True
