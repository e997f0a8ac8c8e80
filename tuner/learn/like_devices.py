"""Records of like devices: the candidates that were fastest there come first here, and their rows train the cost model.

Times of other devices choose what is tried. They never count as times of this device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from relax_tune.database.records import Target, VariantRecord
from relax_tune.database.store import Store
from relax_tune.tuner.learn.warm_start import RecordedHistory
from relax_tune.tuner.measure.interrupts import shielded
from relax_tune.tuner.search.base import TrainingRows
from relax_tune.tuner.search.space import Candidate
from relax_tune.tuner.task.task import Choices

LIKEST = 4
"""Devices whose fastest candidates are tried."""


def like_targets(store: Store, here: Target) -> list[Target]:
    """Return the targets of a device's kind, the likest first: those with most facts and limits in common.

    A device of the same key is the likest."""
    facts = {*here.fingerprint, *here.limits, ("name", here.name)}

    def rank(other: Target) -> tuple[bool, int, str]:
        shared = facts & {*other.fingerprint, *other.limits, ("name", other.name)}
        return other.key != here.key, -len(shared), other.key

    return sorted((t for t in store.targets() if t.kind == here.kind), key=rank)


def fastest_there(store: Store, target: str, choices: Choices) -> list[VariantRecord]:
    """Return the tuned variants of a task on a device, fastest first: of each shape the best, then of each the second.

    The largest shape comes first."""
    by_shape: dict[tuple[tuple[str, int], ...], dict[float, VariantRecord]] = {}
    records = store.query(target, choices.task.key, kinds=("tuned",), status="ok", regime=choices.task.regime)
    for r in sorted(records, key=lambda r: (r.median_secs, r.variant.key)):
        if r.checked and r.median_secs > 0:
            by_shape.setdefault(tuple(sorted(r.symbols.items())), {}).setdefault(r.median_secs, r.variant)
    shapes = sorted(by_shape, key=lambda s: (-math.prod(max(x, 1) for _, x in s), s))
    ranked = zip_longest(*(by_shape[s].values() for s in shapes))
    return list({v.key: v for rank in ranked for v in rank if v is not None}.values())


def winners(store: Store, here: Target, choices: Choices, count: int) -> list[Candidate]:
    """Return up to `count` candidates that were fastest on the likest devices, the likest first.

    Each is a point of this device's own space: the very candidate, or the nearest legal one of the same sketch."""
    found: dict[Candidate, None] = {}
    for target in like_targets(store, here)[:LIKEST]:
        for variant in fastest_there(store, target.key, choices)[: 2 * count]:
            if len(found) == count:
                return list(found)
            same = choices.candidate_of(variant)
            like = choices.candidate_like(variant) if same is None else same
            if like is not None:
                found[like] = None
    return list(found)


Likely = Callable[[Choices, int], Sequence[Candidate]]


@dataclass(frozen=True, eq=False)
class RecordedKnowledge:
    """Everything on record that a search is told before its first trial.

    here: the device
    own: history in the store of the job
    elsewhere: history in the records of a pack, if there is one
    likely: names candidates that a prior ranks first, as many as are asked for
    """

    here: Target
    own: RecordedHistory
    elsewhere: RecordedHistory | None = None
    likely: Likely = lambda choices, count: ()

    def rows(self, choices: Choices) -> TrainingRows | None:
        """Return the training rows of all histories."""
        with shielded():
            parts = [self.own.rows(choices), *([] if self.elsewhere is None else [self.elsewhere.rows(choices)])]
        return joined([p for p in parts if p is not None])

    def seeds(self, choices: Choices, first: int) -> list[Candidate]:
        """Return the first candidates of a task, for a first batch of `first`.

        A quarter is like the fastest of similar functions, a quarter of the rules. Half is what was fastest on like devices, with
        records of a pack, and what a prior ranks first."""
        half = max(1, first // 2)
        with shielded():
            there = [] if self.elsewhere is None else winners(self.elsewhere.store, self.here, choices, half)
            alike = self.own.alike(choices, half // 2)
        known = list(dict.fromkeys((*alike, *choices.seeds())))[:half]
        ranked = [c for c in self.likely(choices, first) if c not in known]
        return list(dict.fromkeys((*there, *ranked[: max(0, first - len(known) - len(there))], *known)))[
            : max(1, first)
        ]


def joined(parts: Sequence[TrainingRows]) -> TrainingRows | None:
    """Return rows of several histories as one, their groups apart; None without any."""
    if len(parts) < 2:
        return parts[0] if parts else None
    firsts = np.cumsum([0, *(int(p.groups.max()) + 1 for p in parts)])
    return TrainingRows(
        np.concatenate([p.features for p in parts]),
        np.concatenate([p.log_time for p in parts]),
        np.concatenate([p.groups + first for p, first in zip(parts, firsts)]),
    )
