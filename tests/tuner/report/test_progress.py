"""Progress in words, in a job's facts, and as a bar that Python programs show."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from relax_tune.database.jobs.submitted import SubmittedJob
from relax_tune.tuner.job.progress import TuningProgress
from relax_tune.tuner.report.listings import job_facts
from relax_tune.tuner.report.progress import ProgressBar, duration_text, progress_text
from relax_tune.tuner.report.texts import ratio_text

PROGRESS = TuningProgress("matmul", 0, 10, 5, 1, 1e-3, 2e-3, 4e-3, 3, 0.25, 14.2e-3, 23.1e-3, 40, 38.4)
TEXT = "3 of 10 tasks done, model 14.2 ms (1.63x the start), about 38 s left"


def test_text_names_tasks_speed_and_time_left() -> None:
    assert progress_text(PROGRESS) == TEXT
    assert progress_text(TuningProgress("matmul", 0, 1, 0, 0, math.nan, None, None)) == "0 of 1 tasks done"


@pytest.mark.parametrize(("secs", "text"), [(38.4, "38 s"), (89.0, "89 s"), (720.0, "12 min"), (9000.0, "2.5 h")])
def test_durations(secs: float, text: str) -> None:
    assert duration_text(secs) == text


@pytest.mark.parametrize(
    ("base", "text"), [(1.634, "1.63x"), (16.34, "16.3x"), (163.4, "163x"), (75123.94, "75,100x"), (0.0123, "0.01x")]
)
def test_ratios_have_three_digits(base: float, text: str) -> None:
    assert ratio_text(base, 1.0) == text


def test_bar_shows_tasks_and_speed() -> None:
    file = io.StringIO()
    with ProgressBar(Console(file=file, force_terminal=True, width=160)) as bar:
        bar.report(PROGRESS)
    assert "3/10" in file.getvalue() and "model 14.2 ms (1.63x the start), about 38 s left" in file.getvalue()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"done": 3, "tasks": 10, "model_secs": 14.2e-3, "first_secs": 23.1e-3, "left_secs": 38.4}, TEXT),
        ({"tasks": 10}, "-"),
        ({"done": "3", "tasks": 10}, "-"),
        ({"done": 3, "tasks": 10, "model_secs": "fast"}, "-"),
    ],
)
def test_job_facts_include_progress(values: dict[str, object], text: str) -> None:
    job = SubmittedJob("aa11", "file:00", "minilm", '{"target":"c"}', "c", progress=json.dumps(values))
    assert dict(job_facts(job))["tasks, speed, time left"] == text
