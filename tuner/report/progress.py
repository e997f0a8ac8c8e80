"""The progress of a tuning job as text, and as a bar for Python programs and notebooks.

Tests: `tests/tuner/report/test_progress.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from relax_tune.tuner.job.progress import TuningProgress
from relax_tune.tuner.report.texts import percent_text, ratio_text, seconds_text

if TYPE_CHECKING:
    from rich.console import Console


def progress_text(progress: TuningProgress) -> str:
    """Return what is done and what is left: `3 of 10 tasks done, model 14.2 ms (1.63x the start), about 40 s left`."""
    counts = f"{progress.done} of {progress.tasks} tasks done"
    return ", ".join([counts, *_speed_parts(progress.model_secs, progress.first_secs, progress.left_secs)])


def recorded_progress_text(values: Mapping[str, Any]) -> str:
    """Return the same of the progress of a submitted job; empty if unknown. Rows of jobs are untrusted."""
    done, tasks = values.get("done"), values.get("tasks")
    secs = [values.get(name) for name in ("model_secs", "first_secs", "left_secs")]
    if not (type(done) is int and type(tasks) is int and all(x is None or type(x) in (int, float) for x in secs)):
        return ""
    return ", ".join([f"{done} of {tasks} tasks done", *_speed_parts(*secs)])


def _speed_parts(model_secs: float | None, first_secs: float | None, left_secs: float | None) -> list[str]:
    parts = []
    if model_secs is not None:
        parts.append(f"model {seconds_text(model_secs)} ({ratio_text(first_secs, model_secs)} the start)")
    if left_secs is not None:
        parts.append(f"about {duration_text(left_secs)} left")
    return parts


def duration_text(secs: float) -> str:
    """Format an estimated duration: `40 s`, `12 min`, `2.5 h`."""
    if secs < 90:
        return f"{secs:.0f} s"
    return f"{secs / 60:.0f} min" if secs < 5400 else f"{secs / 3600:.1f} h"


class ProgressBar:
    """A bar of the tasks that are done, with the speed of the model; a context manager.

    Args:
        console: Where it is shown; stderr, or the output of a notebook's cell.
    """

    def __init__(self, console: Console | None = None) -> None:
        # Imported here, since the text of a progress needs no terminal.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("tuning"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
        shown = Console(stderr=True) if console is None else console
        self._bar = Progress(*columns, TimeElapsedColumn(), console=shown)
        self._task = self._bar.add_task("tuning", total=None, text="")

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def report(self, progress: TuningProgress) -> None:
        """Show the newest numbers after a batch."""
        share = "" if progress.share is None else f" ({percent_text(progress.share)} of the model)"
        speed = _speed_parts(progress.model_secs, progress.first_secs, progress.left_secs)
        words = ", ".join([*speed, f"{progress.task}{share}"])
        self._bar.update(self._task, total=progress.tasks, completed=progress.done, text=words)
