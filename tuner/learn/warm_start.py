"""Training rows from the database for a task's cost model, before its first trial.

Rows come from the task at other shapes, from the same task on other devices of the kind, and from other tasks of the
device (`tuner/learn/recorded_rows`).

A history depends on the set of records, not on their order. Its cost is bounded by a number of workloads and of rows of each,
chosen by their ids, which are hashes. Tasks of the model under tuning are left out: their new records would make candidates
depend on the number of interruptions.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from relax_tune.database.records import VariantRecord
from relax_tune.database.store import Store
from relax_tune.ir.text.parser import RECORD_CHARACTERS
from relax_tune.tuner.learn.recorded_rows import RecordedRows
from relax_tune.tuner.search.base import TrainingRows
from relax_tune.tuner.search.space import Candidate
from relax_tune.tuner.task.sketch_set import SketchSet

OWN_ROWS = 192
"""Rows of the task itself from each source: other shapes, other devices."""
OTHER_ROWS = 64
"""Rows of each other workload."""
OTHER_DEVICES = 2
OTHER_WORKLOADS = 4
LOOKED_AT = 512
"""Most workloads whose words are compared to choose the most similar ones, and most records read of each."""
_WORD = re.compile(r"[A-Za-z_]\w*|[-+*/%<>]+|\d+")


@dataclass(eq=False)
class RecordedHistory:
    """A reader of histories for the tasks of one model on one device. Replayed sketches are cached, since tasks share them.

    Attributes:
        own: Keys of the model's workloads.
        kind: Kind of the device; None: as recorded in the store.
    """

    store: Store
    target_key: str
    own: Collection[str]
    kind: str | None = None
    _reader: RecordedRows | None = None
    _others: list[str] | None = None
    _texts: dict[str, str] = field(default_factory=dict)
    _words: dict[str, frozenset[str]] = field(default_factory=dict)

    def rows(self, sketch_set: SketchSet) -> TrainingRows | None:
        """Return the history of a task; None if no record applies."""
        task = sketch_set.task
        reader = self._reader = self._reader or RecordedRows(self.store, sketch_set.hardware)
        reader.funcs[task.key] = task.func
        anchors = {tuple(sorted(b.items())) for b in task.bindings()}
        part = partial(reader.part, task.regime)
        parts = [part(self.target_key, workload=task.key, count=OWN_ROWS, but=anchors)]
        parts += [part(target, workload=task.key, count=OWN_ROWS) for target in self._other_devices()]
        others = self._other_workloads(task.key, task.text)
        for other in others:
            reader.know(other, self._texts[other])
        parts += [part(self.target_key, workload=key, count=OTHER_ROWS) for key in others]
        parts_with_rows = [p for p in parts if p is not None]
        if not parts_with_rows:
            return None
        rows = np.concatenate([p.features for p in parts_with_rows])
        many_sketches = len(sketch_set.space.sketches) > 1
        # With several sketches the last column is the sketch's number, which means nothing in another space: NaN.
        features = np.full((len(rows), rows.shape[1] + many_sketches), np.nan, np.float32)
        features[:, : rows.shape[1]] = rows
        firsts = np.cumsum([0, *(int(p.groups.max()) + 1 for p in parts_with_rows)])
        groups = np.concatenate([p.groups + first for p, first in zip(parts_with_rows, firsts)])
        return TrainingRows(features, np.concatenate([p.log_time for p in parts_with_rows]), groups)

    def of_similar_functions(self, sketch_set: SketchSet, count: int) -> list[Candidate]:
        """Return up to `count` candidates that resemble the fastest ones of the most similar workloads on record.

        From each workload come the fastest at its smallest, middle and largest shape; the most similar workload comes first.
        """
        candidates: dict[Candidate, None] = {}
        for key in self._other_workloads(sketch_set.task.key, sketch_set.task.text):
            records = self.store.query(
                self.target_key, key, kinds=("tuned",), status="ok", regime=sketch_set.task.regime, limit=LOOKED_AT
            )
            by_shape: dict[tuple[tuple[str, int], ...], tuple[float, str, VariantRecord]] = {}
            for r in records:
                if r.checked and r.median_secs > 0:
                    shape = tuple(sorted(r.symbols.items()))
                    now = (r.median_secs, r.variant.key, r.variant)
                    by_shape[shape] = min(by_shape.get(shape, now), now, key=lambda x: x[:2])
            shapes = sorted(by_shape, key=lambda s: (math.prod(max(x, 1) for _, x in s), s))
            for shape in dict.fromkeys((shapes[0], shapes[len(shapes) // 2], shapes[-1]) if shapes else ()):
                candidate = sketch_set.similar_candidate(by_shape[shape][2])
                if candidate is not None:
                    candidates[candidate] = None
        return list(candidates)[:count]

    def _other_devices(self) -> list[str]:
        """Return a few targets of this target's kind."""
        mine = self.store.target(self.target_key)
        kind = mine.kind if mine is not None else self.kind
        alike = [t.key for t in self.store.targets() if t.kind == kind and t.key != self.target_key]
        # A pseudo-random choice that is the same in every run.
        return sorted(alike, key=lambda key: _digest(self.target_key, key))[:OTHER_DEVICES]

    def _other_workloads(self, key: str, text: str) -> list[str]:
        """Return the workloads of other models whose texts share the most words with this one."""
        if self._others is None:
            self._others = [other for other in self.store.measured(self.target_key) if other not in self.own]
        near = sorted(self._others, key=lambda other: _digest(key, other))[:LOOKED_AT]
        for w in self.store.known_workloads(other for other in near if other not in self._texts):
            self._texts[w.key] = w.text if len(w.text) <= RECORD_CHARACTERS else ""
        near = [other for other in near if self._texts.get(other)]
        for other in near:
            if other not in self._words:
                self._words[other] = frozenset(_WORD.findall(self._texts[other]))
        mine = frozenset(_WORD.findall(text))
        return sorted(near, key=lambda other: (-_likeness(mine, self._words[other]), other))[:OTHER_WORKLOADS]


def _likeness(a: frozenset[str], b: frozenset[str]) -> float:
    return len(a & b) / max(len(a | b), 1)


def _digest(*parts: str) -> bytes:
    return hashlib.blake2b(":".join(parts).encode(), digest_size=8).digest()
