"""The experiment on dynamic shapes: what it computes from times, and what it writes of them."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from experiments.dynamic import buckets, plans, regret, shapes, tuning

from relax_tune.runtime.artifact import new_artifact


def test_regret_is_chosen_by_odd_rounds_and_scored_by_even_ones() -> None:
    plain, slow = [[1.0, 1.0]] * 6, [[1.1], [1.1, 1.1]] * 3
    assert regret.regret(plain, plain) == 0 and regret.regret(plain, slow) == 0
    assert regret.regret(slow, plain) == pytest.approx(0.1)
    lucky = [
        [3.0],
        [0.5],
    ] * 3  # chosen for its odd rounds: what it then takes in even ones is its own best, and the rival's bar
    assert regret.regret(lucky, plain) == 0 and regret.regret(plain, lucky) == pytest.approx(1 / 3 - 1)
    rows = [{"regret": r, "floor": 0.01} for r in (0.0, 0.02, 0.1)]
    found = regret.summed(rows)
    assert found == pytest.approx({"regret_mean": 0.04, "regret_p99": 0.1, "floor_mean": 0.01, "floor_p99": 0.01})


@pytest.mark.parametrize("top", [1, 7, 100, 4096])
def test_sizes_are_drawn_from_the_whole_range_and_were_not_timed(top: int) -> None:
    known = {1, 2, top, 64}
    found = regret.drawn(top, 8, known)
    assert found == sorted(set(found)) and not known & set(found) and all(1 <= m <= top for m in found)
    if top == 4096:
        for part in range(1, 8):  # of the first part, 1 and 2, both are known
            assert any(top ** (part / 8) <= m <= top ** ((part + 1) / 8) for m in found), part


def test_the_bound_of_a_ratio() -> None:
    assert buckets.upper_bound([1.25] * 30) == 1.25
    rng = np.random.default_rng(1)
    ratios = (1 + 0.05 * rng.standard_normal(400)).tolist()
    few, many = buckets.upper_bound(ratios[:30]), buckets.upper_bound(ratios)
    assert statistics.median(ratios) < many < few < max(ratios)
    assert buckets.pairs([[1.0, 2.0, 9.0], [3.0]], [[4.0], [1.0, 2.0]]) == [0.5, 2.0]
    intervals = [(1, 3, "tuned"), (4, 4, "library"), (5, 100, "tuned"), (101, 110, "library")]
    assert buckets.middles(intervals, 2) == [(2, (1, 3, "tuned")), (22, (5, 100, "tuned"))]


def test_report_states_ratios_goals_and_wrong_sizes() -> None:

    def row(**us: float) -> dict[str, dict[str, float]]:
        return {name: {"median_us": t} for name, t in us.items()}

    times = {
        "mikpoly n=100": row(numpy=300.0, library=240.0, kernels=200.0, ours=200.0),
        "mikpoly n=1024": row(numpy=300.0, library=310.0, kernels=400.0, ours=300.0),
        f"{shapes.GELU} n=64": row(library=150.0, kernels=100.0, ours=100.0),
    }
    tuned = {"mikpoly": {"wall_secs": 3.0, "timings": 40, "sketches": ["openblas.sgemm"], "libraries": ["openblas"]}}
    checks = {"mikpoly": {"sizes": 64, "wrong": {"kernels": [], "ours": [7]}}}
    names = ["numpy", "library", "kernels", "ours"]
    found = {"times": times, "names": names, "tuning": tuned, "checks": checks, "environment": {"cpu": "none"}}
    text = "\n".join(shapes.report({"c": {"mikpoly": found}}))
    assert "| mikpoly n=100 | 300.0 | 240.0 | 200.0 | 200.0 | 1.20 | 1.20 | - | - |" in text
    assert "| mikpoly n=1024 | 300.0 | 310.0 | 400.0 | 300.0 | 1.00 | 0.75 | - | - |" in text
    assert "could choose from openblas." in text
    assert "WRONG at {'ours': [7]}" in text and '{"cpu": "none"}' in text
    assert "512..2048 rows (goal: 1.0): ours at least 1.00, geometric mean 1.00; kernels at least 0.75" in text
    assert "over library and kernel (1.4): at least 1.50" in text and "dynamic build (100): not timed" in text
    sizes = shapes.with_primes([1, 10, 100], 500)
    assert sizes == [1, 2, 7, 10, 97, 100, 499, 500]


@pytest.mark.ccompiler
def test_plan_times_and_intervals_are_measured(tmp_path: Path) -> None:
    found = plans.measured(tmp_path, 2, 3)
    assert found["tasks"] == 2 and found["entries"] > 1.5 and found["python_us"] > 0 and found["c_ns"] > 0
    assert "2 tasks" in plans.lines(found)[0]
    program, (entries,) = plans.model_program(1, 3)
    artifact = new_artifact((program,), {"w0": np.zeros((32, 48), np.float32)}, {})
    artifact.save(tmp_path / "one.rta")
    intervals = tuning.intervals(tmp_path / "one.rta", 300)
    assert [low for low, _, _ in intervals] == [1, *(high + 1 for _, high, _ in intervals[:-1])]
    assert intervals[-1][1] == 300 and 1 < len(intervals) <= entries


def test_tuned_kernels_are_stored_by_tuning_options(tmp_path: Path) -> None:
    work = tuning.Work
    made = [
        work(tmp_path, target, trials, top) for target in ("c", "opencl") for trials in (2, 64) for top in (None, 100)
    ]
    assert len({w.builds("ours") for w in made}) == len(made)
    known = {"wall_secs": 1.5, "trials": 2, "timings": 9, "sizes": [1, 100], "sketches": ["a"], "libraries": []}
    note = made[1].builds("notes") / "mikpoly n=5.json"
    note.parent.mkdir(parents=True)
    note.write_text(json.dumps(known))
    assert made[1].tune("mikpoly", 5).sizes == (1, 100)
    assert made[1].kernel("mikpoly").dims == {"n": 100} and math.prod(made[0].kernel("mikpoly").dims.values()) == 8192
