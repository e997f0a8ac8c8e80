"""Search knowledge from records: the fastest candidates of similar devices and functions, and rows for the cost model.

Tests: `tests/tuner/pack/test_pack.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from relax_tune.database.records import Target, VariantRecord
from relax_tune.database.store import Store
from relax_tune.tuner.learn.device_records import similar_targets
from relax_tune.tuner.learn.warm_start import RecordedHistory
from relax_tune.tuner.measure.interrupts import shielded
from relax_tune.tuner.search.base import TrainingRows
from relax_tune.tuner.search.space import Candidate
from relax_tune.tuner.task.sketch_set import SketchSet

MOST_SIMILAR = 4
"""Devices whose fastest candidates are tried."""


def fastest_variants(store: Store, target: str, sketch_set: SketchSet) -> list[VariantRecord]:
    """Return the tuned variants of a task on a device: the best of each shape, then the second of each, and so on.

    The largest shape comes first.
    """
    by_shape: dict[tuple[tuple[str, int], ...], dict[float, VariantRecord]] = {}
    task = sketch_set.task
    records = store.query(target, task.key, kinds=("tuned",), status="ok", regime=task.regime)
    for r in sorted(records, key=lambda r: (r.median_secs, r.variant.key)):
        if r.checked and r.median_secs > 0:
            by_shape.setdefault(tuple(sorted(r.symbols.items())), {}).setdefault(r.median_secs, r.variant)
    shapes = sorted(by_shape, key=lambda s: (-math.prod(max(x, 1) for _, x in s), s))
    ranked = zip_longest(*(by_shape[s].values() for s in shapes))
    return list({v.key: v for rank in ranked for v in rank if v is not None}.values())


def winners(store: Store, device: Target, sketch_set: SketchSet, count: int) -> list[Candidate]:
    """Return up to `count` candidates that were fastest on the most similar devices in a store.

    Each is a point of this device's own space: the recorded candidate, or the nearest legal one of the same sketch.
    """
    candidates: dict[Candidate, None] = {}
    for target in similar_targets(store, device)[:MOST_SIMILAR]:
        for variant in fastest_variants(store, target.key, sketch_set)[: 2 * count]:
            if len(candidates) == count:
                return list(candidates)
            candidate = sketch_set.candidate_of(variant) or sketch_set.similar_candidate(variant)
            if candidate is not None:
                candidates[candidate] = None
    return list(candidates)


Likely = Callable[[SketchSet, int], Sequence[Candidate]]
"""Returns the candidates that a prior ranks first, as many as are asked for."""


@dataclass(frozen=True, eq=False)
class SearchKnowledge:
    """What a search knows before its first trial.

    Attributes:
        history: Records in the store of the job.
        similar: Records of similar devices, such as those in a pack.
        likely: Names candidates that a prior ranks first.
    """

    device: Target
    history: RecordedHistory
    similar: RecordedHistory | None = None
    likely: Likely = lambda sketch_set, count: ()

    def rows(self, sketch_set: SketchSet) -> TrainingRows | None:
        """Return the training rows of all histories."""
        with shielded():
            histories = [self.history, *([] if self.similar is None else [self.similar])]
            parts = [history.rows(sketch_set) for history in histories]
        return joined([p for p in parts if p is not None])

    def seeds(self, sketch_set: SketchSet, size: int) -> list[Candidate]:
        """Return the first candidates of a task.

        Half of them are the fastest ones on similar devices, with records of a pack, and what the prior ranks first. The rest
        are like the fastest of similar functions, at most a quarter, and seeds of the rules.

        Args:
            size: Size of the first batch.
        """
        # Records of other devices may mislead, so the guesses of the rules keep a part of the first batch.
        half = max(1, size // 2)
        with shielded():
            fastest = [] if self.similar is None else winners(self.similar.store, self.device, sketch_set, half)
            of_functions = self.history.of_similar_functions(sketch_set, half // 2)
        known = list(dict.fromkeys((*of_functions, *sketch_set.seeds())))[:half]
        ranked = [c for c in self.likely(sketch_set, size) if c not in known]
        ranked = ranked[: max(0, size - len(known) - len(fastest))]
        return list(dict.fromkeys((*fastest, *ranked, *known)))[: max(1, size)]


def joined(parts: Sequence[TrainingRows]) -> TrainingRows | None:
    """Concatenate rows of several histories, with distinct groups; None if there are no parts."""
    if len(parts) < 2:
        return parts[0] if parts else None
    # Times are only comparable within a group; two histories number theirs from 0.
    firsts = np.cumsum([0, *(int(p.groups.max()) + 1 for p in parts)])
    return TrainingRows(
        np.concatenate([p.features for p in parts]),
        np.concatenate([p.log_time for p in parts]),
        np.concatenate([p.groups + first for p, first in zip(parts, firsts)]),
    )
