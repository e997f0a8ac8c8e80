"""Training rows from the database for a task's cost model, before its first trial.

Rows come from the task at other shapes, from the same task on other devices of the kind, and from other tasks of the
device. Features have the same names for every sketch of every function, so a record is useful wherever its trace
applies. The trace is replayed once with free tunables, and evaluated at the record's numbers and shape.

A history depends on the set of records, not on their order. Its cost is bounded by a number of workloads and of rows of each,
chosen by their ids, which are hashes. Tasks of the model under tuning are left out: their new records would make candidates
depend on the number of interruptions.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from relax_tune.database.records import Measurement, Regime
from relax_tune.database.store import Store
from relax_tune.errors import RelaxTuneError
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.schedules.cost.features import FeatureFunction
from relax_tune.schedules.schedule import replay
from relax_tune.schedules.sketch import Sketch
from relax_tune.schedules.target import HardwareInfo
from relax_tune.schedules.trace import Trace
from relax_tune.tuner.search.base import TrainingRows
from relax_tune.tuner.search.space import FeatureArray, FloatArray, IntArray, ParameterSpace
from relax_tune.tuner.task.task import Choices

Point = tuple[tuple[str, int], ...]

OWN_ROWS = 192
"""Rows of the task itself, from each source: other shapes, other devices."""
OTHER_ROWS = 64
"""Rows of each other workload."""
OTHER_DEVICES = 2
OTHER_WORKLOADS = 4
LOOKED_AT = 512
"""Workloads whose words are compared to choose the most similar ones."""
SKETCHES = 4
"""Traces of a workload that are replayed: those with the most rows."""
ROWS_A_READ = 4
"""Records read per wanted row, since records at the anchors go to the search itself, and some do not apply."""
FAULTS = ("constraint", "compile", "launch", "runtime", "wrong-result", "timeout", "crash")
FLOPS_COLUMN, BYTES_COLUMN = 0, 1
_WORD = re.compile(r"[A-Za-z_]\w*|[-+*/%<>]+|\d+")


@dataclass(eq=False)
class RecordedHistory:
    """A reader of histories for the tasks of one model on one device. Replayed sketches are kept, since tasks share
    them.

    own: keys of the model's workloads
    """

    store: Store
    target_key: str
    own: Collection[str]
    _funcs: dict[str, PrimFunc | None] = field(default_factory=dict)
    _functions: dict[tuple[str, str], FeatureFunction | None] = field(default_factory=dict)
    _texts: dict[str, str] | None = None
    _words: dict[str, frozenset[str]] = field(default_factory=dict)

    def rows(self, choices: Choices) -> TrainingRows | None:
        """Return the history of a task; None when the database has nothing that applies."""
        task = choices.task
        self._funcs[task.key] = task.func
        anchors = {tuple(sorted(b.items())) for b in task.bindings()}
        part = partial(self._part, task.regime, hardware=choices.hardware)
        parts = [part(self.target_key, workload=task.key, count=OWN_ROWS, but=anchors)]
        parts += [part(target, workload=task.key, count=OWN_ROWS) for target in self._other_devices()]
        others = self._other_workloads(task.key, task.text)
        parts += [part(self.target_key, workload=key, count=OTHER_ROWS) for key in others]
        found = [p for p in parts if p is not None]
        if not found:
            return None
        rows = np.concatenate([p.features for p in found])
        several = (
            len(choices.space.sketches) > 1
        )  # the last column is then the sketch, whose number has no meaning in other spaces
        features = np.full((len(rows), rows.shape[1] + several), np.nan, np.float32)
        features[:, : rows.shape[1]] = rows
        firsts = np.cumsum([0, *(int(p.groups.max()) + 1 for p in found)])
        groups = np.concatenate([p.groups + first for p, first in zip(found, firsts)])
        return TrainingRows(features, np.concatenate([p.log_time for p in found]), groups)

    def _other_devices(self) -> list[str]:
        """Return a few targets of this target's kind."""
        mine = self.store.target(self.target_key)
        alike = [t.key for t in self.store.targets() if mine is not None and t.kind == mine.kind and t.key != mine.key]
        return sorted(alike, key=lambda key: _digest(self.target_key, key))[:OTHER_DEVICES]

    def _other_workloads(self, key: str, text: str) -> list[str]:
        """Return the workloads of other models whose texts share the most words with this one."""
        if self._texts is None:
            self._texts = {w.key: w.text for w in self.store.workloads(self.target_key) if w.key not in self.own}
        near = sorted(self._texts, key=lambda other: _digest(key, other))[:LOOKED_AT]
        for other in near:
            if other not in self._words:
                self._words[other] = frozenset(_WORD.findall(self._texts[other]))
        mine = frozenset(_WORD.findall(text))
        likest = sorted(near, key=lambda other: (-_likeness(mine, self._words[other]), other))[:OTHER_WORKLOADS]
        for other in likest:
            if other not in self._funcs:
                self._funcs[other] = _parsed(self._texts[other])
        return likest

    def _part(
        self,
        regime: Regime,
        target: str,
        *,
        hardware: HardwareInfo,
        workload: str,
        count: int,
        but: Collection[Point] = (),
    ) -> TrainingRows | None:
        """Return up to `count` rows of one workload on one device, timed in one regime. Groups are its shapes, counted
        from 0.
        """
        func = self._funcs[workload]
        if func is None:
            return None
        records = self.store.query(target, workload, kinds=("tuned",), regime=regime, limit=ROWS_A_READ * count)
        timed = [r for r in records if r.status == "ok" and r.checked and r.median_secs > 0 and _point(r) not in but]
        shapes = sorted({_point(r) for r in timed})
        if not shapes:
            return None
        by_trace: dict[str, list[Measurement]] = {}
        for record in sorted([*timed, *(r for r in records if r.stage in FAULTS)], key=lambda r: r.id):
            by_trace.setdefault(record.variant.trace, []).append(record)
        frequent = sorted(by_trace, key=lambda trace: (-len(by_trace[trace]), trace))[:SKETCHES]
        kept = {r.id for r in sorted((r for t in frequent for r in by_trace[t]), key=lambda r: r.id)[:count]}
        found = []
        for trace in sorted(frequent):
            function = self._function(hardware, workload, func, trace)
            if function is not None:
                found.append(_rows(function, func, [r for r in by_trace[trace] if r.id in kept], shapes))
        if not any(len(p.log_time) for p in found):
            return None
        features = np.concatenate([p.features for p in found])
        groups = np.concatenate([p.groups for p in found])
        scale = log_roofline(features, hardware)
        floors = np.full(len(shapes), np.inf)
        np.minimum.at(floors, groups, scale)  # one scale a shape
        log_time = np.concatenate([p.log_time for p in found]) - floors[groups]
        return TrainingRows(features, log_time, groups)

    def _function(self, hardware: HardwareInfo, workload: str, func: PrimFunc, trace: str) -> FeatureFunction | None:
        """Return the features of a recorded sketch; None for a trace that does not apply to the workload."""
        key = (workload, trace)
        if key not in self._functions:
            try:
                made = replay(Trace.from_json(trace), func)
                sketch = Sketch("recorded", made.func, made.trace, ())
                self._functions[key] = FeatureFunction(sketch, hardware)
            except Exception:  # rows may come from any version and user: rows that do not apply are skipped
                self._functions[key] = None
        return self._functions[key]


def _rows(
    function: FeatureFunction, func: PrimFunc, records: Sequence[Measurement], shapes: Sequence[Point]
) -> TrainingRows:
    """Return the rows of one sketch's records; those with numbers outside its domains are left out."""
    domains = {t.name: frozenset(t.domain) for t in function.tunables}
    names = [f"s{a}" for a in range(len(func.symbols))]
    kept = [
        r
        for r in records
        if all(r.variant.values.get(n) in domain for n, domain in domains.items())
        and (r.status == "failed" or (sorted(r.symbols) == sorted(names) and min(r.symbols.values(), default=0) >= 0))
    ]
    # a failure usually precedes any shape: it counts at the middle shape
    groups = np.asarray([shapes.index(_point(r)) if r.status == "ok" else len(shapes) // 2 for r in kept], np.int64)
    values = [r.variant.values for r in kept]
    tunables = {n: np.asarray([v[n] for v in values], np.int64) for n in domains}
    points = {v.name: np.asarray([dict(p).get(n, 1) for p in shapes], np.int64) for v, n in zip(func.symbols, names)}
    described = function(tunables, points) if kept else np.zeros((0, 1, len(function.names)), np.float32)
    features = np.broadcast_to(described, (len(kept), len(shapes), described.shape[2]))[np.arange(len(kept)), groups]
    log_time = np.asarray([math.log(r.median_secs) if r.status == "ok" else np.nan for r in kept], np.float64)
    sound = np.isfinite(features).all(axis=1)
    return TrainingRows(np.ascontiguousarray(features[sound]), log_time[sound], groups[sound])


def log_roofline(features: FeatureArray, hardware: HardwareInfo) -> FloatArray:
    """Return the log seconds (R,) of a nominal machine for the work of each row (R, F).  The times make functions and
    shapes comparable.

    A processor has full vectors at 2 GHz, 8 GB/s and a launch of one microsecond. A GPU has 128 lanes and 15 GB/s for each
    multiprocessor.
    """
    flops, moved = (np.exp2(features[:, c].astype(np.float64)) - 1 for c in (FLOPS_COLUMN, BYTES_COLUMN))
    lanes, bandwidth = (128, 15e9 * hardware.workers) if hardware.is_gpu else (hardware.lanes, 8e9)
    return np.asarray(np.log(1e-6 + flops / (4e9 * lanes * hardware.workers) + moved / bandwidth))


def roofline(space: ParameterSpace, points: IntArray, hardware: HardwareInfo) -> FloatArray:
    """Return the roofline seconds (S,) of a task's own space at its anchors."""
    first = np.zeros((len(space.sketches), 1 + space.width), np.int32)
    first[:, 0] = np.arange(len(space.sketches))
    features = space.features(first, points)
    rows = log_roofline(features.reshape(-1, features.shape[2]), hardware).reshape(len(first), len(points))
    return np.asarray(np.exp(rows.min(axis=0)))


def _parsed(text: str) -> PrimFunc | None:
    """Return a workload's function; None when this version cannot read it."""
    try:
        return parse_prim_func(text)
    except RelaxTuneError:
        return None


def _point(record: Measurement) -> Point:
    return tuple(sorted(record.symbols.items()))


def _likeness(a: frozenset[str], b: frozenset[str]) -> float:
    return len(a & b) / max(len(a | b), 1)


def _digest(*parts: str) -> bytes:
    return hashlib.blake2b(":".join(parts).encode(), digest_size=8).digest()
