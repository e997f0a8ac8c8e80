"""Throughput of the search: (candidate, shape) rows filtered, featurised and scored per second, and trials per second.

The model is the production cost model, trained on the records of a database (at least a thousand rows). The rows are random candidates
of one task of MiniLM at eight shapes. `all` is what a search does: filter, then featurise and score in pieces, on two threads; the other
figures are single steps over all rows. Trials are those of a fresh job for lengths up to 128, where no single run takes 20 ms. Medians
of repeats.

    python -m experiments.search.search_throughput --db sqlite:///minilm-experiment.db --device c
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

from experiments.harness.e2e_cases import minilm_folder
from experiments.harness.pages import RESULTS, environment
from relax_tune.database.store import open_store
from relax_tune.ir.frontend.load import load_model
from relax_tune.tuner.job.device_job import DeviceJob, device_job
from relax_tune.tuner.job.devices import device_info, open_runner
from relax_tune.tuner.search.models.cost_model import GradientBoostedModel
from relax_tune.tuner.search.strategies.evolution import score
from relax_tune.tuner.settings import Settings
from relax_tune.tuner.task.task import points_array

ROWS = 100_000
SHAPES = 8
# Closed-form features, and the sketch; a task of one sketch has no such column.
WIDTH = 50


def training_rows(job: DeviceJob) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Features, log seconds and groups of every tuned record of the device."""
    features, times, groups = [], [], []
    group = 0
    for task_variants in job.task_variants.values():
        points = points_array(task_variants.task.domain.points)
        spots = {tuple(sorted(b.items())): a for a, b in enumerate(task_variants.task.bindings())}
        for record in job.store.query(job.target.key, task_variants.task.key, status="ok", kinds=("tuned",)):
            candidate = task_variants.sketch_set.candidate_of(record.variant)
            spot = spots.get(tuple(sorted(record.symbols.items())))
            if candidate is None or spot is None:
                continue
            row = task_variants.sketch_set.space.features(
                task_variants.sketch_set.space.encode([candidate]), points[spot : spot + 1]
            )[0, 0]
            features.append(row if len(row) == WIDTH else np.append(row, np.float32(0)))
            times.append(np.log(record.median_secs))
            groups.append(group + spot)
        group += len(points)
    return np.asarray(features, np.float32), np.asarray(times), np.asarray(groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", default="sqlite:///minilm-experiment.db")
    parser.add_argument("--device", default="c")
    parser.add_argument("--task", default="fused_matmul_add_gelu")
    parser.add_argument("--trial-candidates", type=int, default=32)
    args = parser.parse_args()
    before = environment()
    module = load_model(minilm_folder(), {"b": (1, 8), "n": (1, 512)})
    with open_store(args.db) as store:
        settings = Settings(target=args.device, effort="quick")
        job = device_job(module, device_info(args.device), store, settings)
        features, times, groups = training_rows(job)
        model = GradientBoostedModel()
        order = np.argsort(groups, kind="stable")
        model.fit(features[order], times[order], groups[order])
        task_variants = job.task_variants[args.task]
        space = task_variants.sketch_set.space
        codes = space.sample(np.random.default_rng(0), ROWS)
        codes = codes[np.random.default_rng(1).integers(0, len(codes), ROWS)]
        shapes = np.asarray([[x] for x in (1, 8, 32, 64, 128, 512, 1024, 4096)[:SHAPES]], np.int64)
        samples: dict[str, list[float]] = {"filter": [], "features": [], "score": [], "all": []}
        for _ in range(5):
            start = time.perf_counter()
            kept = codes[space.valid(codes)]
            filtered = time.perf_counter()
            rows = space.features(kept, shapes)
            described = time.perf_counter()
            model.rank(rows.reshape(-1, rows.shape[2]))
            ranked = time.perf_counter()
            score(space, codes[space.valid(codes)], shapes, model.rank)
            end = time.perf_counter()
            for name, secs in (
                ("filter", filtered - start),
                ("features", described - filtered),
                ("score", ranked - described),
                ("all", end - ranked),
            ):
                samples[name].append(secs)
        count = len(codes) * len(shapes)
        result = {
            "environment": before,
            "device": args.device,
            "records_trained_on": len(features),
            "features": int(features.shape[1]),
            "rows": count,
            "million_rows_per_second": {k: count / statistics.median(v) / 1e6 for k, v in samples.items()},
            "trials": trials(args),
        }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"search_throughput_{args.device}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def trials(args: argparse.Namespace) -> dict[str, float]:
    """Return the trials per second of a fresh job with an in-memory database, including the last timings of contenders."""
    settings = Settings(target=args.device, effort="quick", trials=args.trial_candidates)
    module = load_model(minilm_folder(), {"b": (1, 1), "n": (1, 128)})
    with open_store("memory://") as store:
        job = device_job(module, device_info(args.device), store, settings)
        runner = open_runner(settings)
        result = job.tune(runner)
        runner.close()
    return {
        "trials": result.trials,
        "wall_secs": result.wall_secs,
        "trials_per_second": result.trials / result.wall_secs,
    }


if __name__ == "__main__":
    main()
