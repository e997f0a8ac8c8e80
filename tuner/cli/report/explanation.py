"""A comparison of the cost model's ranking with measured times of a task's candidates.

Tests: `tests/tuner/cli/test_show.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from relax_tune.database.records import Measurement
from relax_tune.schedules.cost.features import sketch_features
from relax_tune.tuner.plan.plans import times_of
from relax_tune.tuner.search.models.cost_model import GradientBoostedModel
from relax_tune.tuner.search.space import Candidate
from relax_tune.tuner.task.task import points_array
from relax_tune.tuner.task.unfused_variants import in_parts
from relax_tune.tuner.task.variants import TaskVariants

# With fewer candidates than this the trees have nothing to split.
FEWEST = 8
# How many of the fastest candidates are shown.
SHOWN = 4


def opinion(task_variants: TaskVariants, records: Sequence[Measurement]) -> dict[str, Any]:
    """Return predicted and measured seconds of the fastest candidates, as plain values.

    Each is predicted by a model trained on all *other* candidates of the task, failures included. `candidates` counts
    candidates with times; when there are fewer than FEWEST the answer ends with `lacks`, a sentence. features: of the
    fastest candidate, name -> value at each anchor.
    """
    times, variants = times_of(task_variants, records)
    timed: dict[Candidate, Sequence[float | None]] = {}
    for key, row in times.items():
        candidate = task_variants.sketch_set.candidate_of(variants[key]) if variants[key].kind == "tuned" else None
        if candidate is not None and any(t is not None for t in row):
            timed[candidate] = row
    if len(timed) < FEWEST:
        lacks = f"expected at least {FEWEST} candidates with times to train on, got {len(timed)}"
        foreign = sum(variants[k].kind == "tuned" and not in_parts(variants[k]) for k in times) - len(timed)
        if foreign:
            lacks += f" (and {foreign} of sketches this version does not make)"
        return {"candidates": len(timed), "lacks": lacks}
    broken = {
        v
        for r in records
        if r.status == "failed" and (v := task_variants.sketch_set.candidate_of(r.variant)) is not None
    }
    candidates = sorted({*timed, *broken})
    points = points_array(task_variants.task.domain.points)
    features = task_variants.sketch_set.space.features(task_variants.sketch_set.space.encode(candidates), points)
    log_time = np.full(features.shape[:2], math.nan)
    for place, candidate in enumerate(candidates):
        for anchor, secs in enumerate(timed.get(candidate, ())):
            log_time[place, anchor] = math.nan if secs is None else math.log(secs)
    weights = np.asarray(task_variants.task.domain.weights)
    known = np.isfinite(log_time)
    mean = np.where(known.all(axis=1), np.where(known, log_time, 0.0) @ weights, math.inf)
    order = [int(place) for place in np.argsort(mean, kind="stable")[:SHOWN] if math.isfinite(mean[place])]
    rows = []
    for place in order:
        predicted, spread = _predicted(features, log_time, [c in broken for c in candidates], place)
        record = task_variants.sketch_set.record_of(candidates[place])
        rows.append(
            {
                "sketch": record.sketch,
                "parameters": record.values,
                "measured_secs": np.exp(log_time[place]).tolist(),
                "predicted_secs": np.exp(predicted).tolist(),
                "within": np.exp(spread).tolist(),
            }
        )
    return {
        "candidates": len(timed),
        "failed": len(broken),
        "rows": rows,
        "features": _named(task_variants, features, order),
    }


def _predicted(features: Any, log_time: Any, broken: Sequence[bool], place: int) -> tuple[Any, Any]:
    """Predict the mean and spread (S,) of the log seconds of a row, by a model trained without it."""
    usable = np.isfinite(log_time) | np.asarray(broken)[:, None]
    usable[place] = False
    rows, shapes = np.nonzero(usable)
    model = GradientBoostedModel()
    model.fit(features[rows, shapes], log_time[rows, shapes], shapes.astype(np.int64))
    return model.predict(features[place])


def _named(task_variants: TaskVariants, features: Any, order: Sequence[int]) -> dict[str, list[float]]:
    names = [f.name for f in sketch_features(task_variants.sketch_set.sketches[0].func, task_variants.hardware)]
    if not order:
        return {}
    return {name: features[order[0], :, column].astype(float).tolist() for column, name in enumerate(names)}
