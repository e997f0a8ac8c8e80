"""Records as rows for a cost model: the features of a recorded variant at a shape, and its time.

Features have the same names for every sketch of every function, so a record is useful wherever its trace applies. The trace is
replayed once with free tunables, and evaluated at the record's numbers and shape.

Tests: `tests/tuner/learn/test_warm_start.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from relax_tune.database.records import Measurement, Regime
from relax_tune.database.store import Store
from relax_tune.errors import RelaxTuneError
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.text.parser import RECORD_CHARACTERS, parse_prim_func
from relax_tune.schedules.cost.features import FeatureFunction
from relax_tune.schedules.schedule import replay
from relax_tune.schedules.sketch import Sketch
from relax_tune.schedules.target import HardwareInfo
from relax_tune.schedules.trace import Trace
from relax_tune.tuner.search.base import TrainingRows
from relax_tune.tuner.search.space import FeatureArray, FloatArray, IntArray, ParameterSpace

Point = tuple[tuple[str, int], ...]

SKETCHES = 4
"""Traces of a workload that are replayed, the ones with the most rows."""
ROWS_A_READ = 4
"""Records read per row: records at the anchors go to the search itself, and others do not apply."""
FAULTS = ("constraint", "compile", "launch", "runtime", "wrong-result", "timeout", "crash")
FLOPS_COLUMN, BYTES_COLUMN = 0, 1


@dataclass(eq=False)
class RecordedRows:
    """A reader of rows from a store. Replayed sketches are cached, since tasks share them.

    Attributes:
        hardware: Device whose limits the features use.
        funcs: Function of each workload that was read; None if this version cannot parse it.
    """

    store: Store
    hardware: HardwareInfo
    funcs: dict[str, PrimFunc | None] = field(default_factory=dict)
    _functions: dict[tuple[str, str], FeatureFunction | None] = field(default_factory=dict)
    _replayed: dict[tuple[str, str], PrimFunc] = field(default_factory=dict)
    _timed: dict[str, set[str]] = field(default_factory=dict)

    def know(self, workload: str, text: str) -> None:
        """Read the function of a workload, unless it is known."""
        if workload not in self.funcs:
            self.funcs[workload] = _parsed(text)

    def scheduled(self, workload: str) -> tuple[PrimFunc, Sequence[PrimFunc]]:
        """Return the function of a workload that has rows, and its scheduled sketches that have times."""
        func = self.funcs[workload]
        assert func is not None, "a workload with rows has a function"
        return func, [self._replayed[workload, trace] for trace in sorted(self._timed.get(workload, ()))]

    def part(
        self,
        regime: Regime,
        target: str,
        *,
        workload: str,
        count: int,
        but: Collection[Point] = (),
        sketches: int = SKETCHES,
        libraries: bool = False,
    ) -> TrainingRows | None:
        """Return up to `count` rows of one workload on one device, timed in one regime. Groups are its shapes, counted from 0.

        Args:
            but: Shapes to leave out.
            sketches: Most traces.
            libraries: Add a row for the fastest library call at each shape (`library_row`).
        """
        func = self.funcs[workload]
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
        frequent = sorted(by_trace, key=lambda trace: (-len(by_trace[trace]), trace))[:sketches]
        # Ids are hashes, so the first ones are a fair sample that does not depend on the order of arrival.
        sampled = {r.id for r in sorted((r for t in frequent for r in by_trace[t]), key=lambda r: r.id)[:count]}
        parts = []
        for trace in sorted(frequent):
            function = self._function(workload, func, trace)
            if function is not None:
                rows = _rows(function, func, [r for r in by_trace[trace] if r.id in sampled], shapes)
                parts.append(rows)
                if np.isfinite(rows.log_time).any():
                    self._timed.setdefault(workload, set()).add(trace)
        if not any(len(p.log_time) for p in parts):
            return None
        if libraries:
            calls = self.store.query(target, workload, kinds=("library",), regime=regime, status="ok")
            parts.append(_of_libraries(calls, shapes, parts))
        features = np.concatenate([p.features for p in parts])
        groups = np.concatenate([p.groups for p in parts])
        scale = log_roofline(features, self.hardware)
        # Sketches differ in the work they count (padding, recomputation); the least roofline of a shape scales all of
        # its rows.
        floors = np.full(len(shapes), np.inf)
        np.minimum.at(floors, groups, scale)  # one scale a shape
        log_time = np.concatenate([p.log_time for p in parts]) - floors[groups]
        return TrainingRows(features, log_time, groups)

    def _function(self, workload: str, func: PrimFunc, trace: str) -> FeatureFunction | None:
        """Return the features of a recorded sketch; None for a trace that does not apply to the workload."""
        key = (workload, trace)
        if key not in self._functions:
            try:
                schedule = replay(Trace.from_json(trace), func)
                sketch = Sketch("recorded", schedule.func, schedule.trace, ())
                self._functions[key] = FeatureFunction(sketch, self.hardware)
                self._replayed[key] = sketch.func
            except Exception:  # records may come from any version and user; traces that do not apply are skipped
                self._functions[key] = None
        return self._functions[key]


def _rows(
    function: FeatureFunction, func: PrimFunc, records: Sequence[Measurement], shapes: Sequence[Point]
) -> TrainingRows:
    """Return the rows of one sketch's records, without records whose values are outside its domains."""
    domains = {t.name: frozenset(t.domain) for t in function.tunables}
    names = [f"s{a}" for a in range(len(func.symbols))]
    usable = [
        r
        for r in records
        if all(r.variant.values.get(n) in domain for n, domain in domains.items())
        and (r.status == "failed" or (sorted(r.symbols) == sorted(names) and min(r.symbols.values(), default=0) >= 0))
    ]
    # A failure usually precedes any shape, so it counts at the middle shape.
    groups = np.asarray([shapes.index(_point(r)) if r.status == "ok" else len(shapes) // 2 for r in usable], np.int64)
    values = [r.variant.values for r in usable]
    tunables = {n: np.asarray([v[n] for v in values], np.int64) for n in domains}
    points = {v.name: np.asarray([dict(p).get(n, 1) for p in shapes], np.int64) for v, n in zip(func.symbols, names)}
    described = function(tunables, points) if usable else np.zeros((0, 1, len(function.names)), np.float32)
    features = np.broadcast_to(described, (len(usable), len(shapes), described.shape[2]))[
        np.arange(len(usable)), groups
    ]
    log_time = np.asarray([math.log(r.median_secs) if r.status == "ok" else np.nan for r in usable], np.float64)
    # A closed form may divide by zero at shapes of 0 or at values of an older domain.
    sound = np.isfinite(features).all(axis=1)
    return TrainingRows(np.ascontiguousarray(features[sound]), log_time[sound], groups[sound])


def _of_libraries(calls: Sequence[Measurement], shapes: Sequence[Point], known: Sequence[TrainingRows]) -> TrainingRows:
    """Return a row for the fastest library call at each shape that has rows of kernels."""
    features = np.concatenate([p.features for p in known])
    groups = np.concatenate([p.groups for p in known])
    best: dict[int, float] = {}
    for r in calls:
        if r.checked and r.median_secs > 0 and _point(r) in shapes:
            number = shapes.index(_point(r))
            best[number] = min(best.get(number, math.inf), math.log(r.median_secs))
    groups_timed = [g for g in sorted(best) if (groups == g).any()]
    rows = [library_row(features[np.flatnonzero(groups == g)[0]]) for g in groups_timed]
    width = features.shape[1]
    return TrainingRows(
        np.asarray(rows, np.float32).reshape(-1, width),
        np.asarray([best[g] for g in groups_timed]),
        np.asarray(groups_timed, np.int64),
    )


def library_row(kernel: FeatureArray) -> FeatureArray:
    """Return the features (F,) of a library call for the work of a kernel: only the work is known, the rest is NaN."""
    row = np.full_like(kernel, np.nan)
    row[[FLOPS_COLUMN, BYTES_COLUMN]] = kernel[[FLOPS_COLUMN, BYTES_COLUMN]]
    return row


def log_roofline(features: FeatureArray, hardware: HardwareInfo) -> FloatArray:
    """Return the log seconds (R,) of a nominal machine for the work of each row (R, F), by which functions and shapes
    become comparable.

    A processor has full vectors at 2 GHz, 8 GB/s and a launch of one microsecond. A GPU has 128 lanes and 15 GB/s for each
    multiprocessor.
    """
    # the inverse of log2(1 + x), which the columns hold
    flops, moved = (np.exp2(features[:, c].astype(np.float64)) - 1 for c in (FLOPS_COLUMN, BYTES_COLUMN))
    lanes, bandwidth = (128, 15e9 * hardware.workers) if hardware.is_gpu else (hardware.lanes, 8e9)
    # 4e9: an FMA is two operations
    return np.asarray(np.log(1e-6 + flops / (4e9 * lanes * hardware.workers) + moved / bandwidth))


def roofline(space: ParameterSpace, points: IntArray, hardware: HardwareInfo) -> FloatArray:
    """Return the roofline seconds (S,) of a task's own space at its anchors; 1 where no sketch has features."""
    described = [number for number, sketch in enumerate(space.sketches) if sketch.features is not None]
    if not described:
        return np.ones(len(points))
    first = np.zeros((len(described), 1 + space.width), np.int32)
    first[:, 0] = described
    features = space.features(first, points)
    rows = log_roofline(features.reshape(-1, features.shape[2]), hardware).reshape(len(first), len(points))
    return np.asarray(np.exp(rows.min(axis=0)))


def _parsed(text: str) -> PrimFunc | None:
    """Return a workload's function; None when this version cannot read it."""
    try:
        return parse_prim_func(text, RECORD_CHARACTERS)
    except RelaxTuneError:
        return None


def _point(record: Measurement) -> Point:
    return tuple(sorted(record.symbols.items()))
