"""The experiment on the time of tuning: its curve and its page, without a device."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
from experiments.search import tuning_time

from relax_tune.database.records import Measurement, VariantRecord
from relax_tune.tuner.report.recorded import RecordedTask

SMALL, LARGE = (("s0", 1),), (("s0", 8),)


def _records(task: str, *found: tuple[str, float, float, float]) -> list[Measurement]:
    return [
        Measurement(
            *(f"{task}.{name}.{number}", task, "here", VariantRecord("tuned", name), {"s0": size}),
            samples_secs=(secs,),
            checked=True,
            measured_at=at,
        )
        for name, at, *pair in found
        for number, (size, secs) in enumerate(zip((1, 8), pair, strict=True))
    ]


def test_curve_starts_from_untuned_kernels_and_sums_geometric_means() -> None:
    weights = {SMALL: 0.5, LARGE: 0.5}
    first = RecordedTask(
        "a", "a", _records("a", ("x", 12, 9.0, 9.0), ("y", 14, 1.0, 9.0), ("z", 15, 9.0, 9.0)), weights=weights
    )
    second = RecordedTask("b", "b", _records("b", ("x", 13, 2.0, 8.0)), calls=10, weights=weights)
    steps = tuning_time.curve([first, second], {"a": [4.0, 4.0], "b": [4.0, 4.0]}, 10.0)
    assert steps[0] == (0.0, pytest.approx(4 + 40))
    at = dict(steps)
    assert at[2.0] == pytest.approx(9 + 40)  # slower than the untuned kernel, but all that is on record
    assert at[4.0] == pytest.approx(3 + 40) and 5.0 not in at
    assert steps[-1][1] == pytest.approx(math.sqrt(9) + 10 * 4)


def test_reached_counts_from_the_last_step_below_a_part() -> None:
    assert tuning_time.reached([(0.0, 1.0), (2.0, 4.0), (5.0, 1.02), (9.0, 1.0)], 0.95) == 5.0
    assert tuning_time.reached([(0.0, 1.0), (3.0, 1.0)], 0.95) == 0.0


def test_work_is_named_by_the_outermost_known_folder() -> None:
    assert tuning_time.work_of(None) == tuning_time.OTHER
    assert tuning_time.work_of(sys._getframe()) == tuning_time.OTHER
    scope: dict[str, Any] = {"frame": sys._getframe, "work_of": tuning_time.work_of}
    exec(compile("def inner(then):\n    return then()\n", "/x/ir/passes/a.py", "exec"), scope)
    inner = scope["inner"]
    exec(compile("def outer(then):\n    return then()\n", "/x/tuner/search/a.py", "exec"), scope)
    here = lambda: tuning_time.work_of(sys._getframe())
    assert inner(here) == "lowering"
    assert scope["outer"](lambda: inner(here)) == "searching"


def test_page_and_picture_show_every_run() -> None:
    run = {
        **{"environment": {"cpu": "none"}, "settings": {"trials": 4, "caches": "warm"}, "tasks": 2, "trials": 8},
        **{"wall_secs": 16.0, "shares": {"compiling": 0.5, "searching": 0.25}, "start": 0.5},
        **{"curve": [[0.0, 2.0], [4.0, 1.0]], "reached": {"0.9": 4.0, "0.95": 4.0, "0.98": 4.0, "0.99": 4.0}},
    }
    text = "\n".join(tuning_time.page({"minilm:c:plain": run, "minilm:c:prior": run}))
    assert "| minilm:c:plain | warm | 2 | 8 | 16 | 0.50 | 0.50 | 4 | 4 | 4 | 4 |" in text
    assert "| minilm:c:prior | 50.0% | 25.0% |" in text
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed (extra report)")
    svg = tuning_time.picture({"minilm:c:plain": run})
    assert svg.startswith("<svg xmlns=") and "var(" not in svg
