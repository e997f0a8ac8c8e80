"""The display of a running tuning job: a live table on a terminal, plain lines otherwise.

Tests: `tests/tuner/cli/test_cli_pipes.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table as RichTable

from relax_tune.tuner.cli.report.console import on_terminal, rich_table, say
from relax_tune.tuner.job.progress import TuningProgress
from relax_tune.tuner.report.progress import progress_text
from relax_tune.tuner.report.subject import table
from relax_tune.tuner.report.texts import percent_text, ratio_text, seconds_text


@dataclass(slots=True)
class _Row:
    """The last progress of one task."""

    name: str
    calls: int
    last: TuningProgress | None = None


class ProgressView:
    """A display of `report`ed progress; a context manager. `tasks`: (name, calls) in the order of their positions."""

    def __init__(self, tasks: Sequence[tuple[str, int]], console: Console) -> None:
        self._rows = [_Row(name, calls) for name, calls in tasks]
        self._console = console
        self._started = time.monotonic()
        self._newest: TuningProgress | None = None
        self._live = Live(console=console, auto_refresh=False, transient=True) if on_terminal(console) else None

    def __enter__(self) -> ProgressView:
        if self._live is not None:
            self._live.start()
            self._live.update(self._table(), refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def report(self, progress: TuningProgress) -> None:
        """Show the newest numbers of a task."""
        self._newest = progress
        if 0 <= progress.position < len(self._rows):
            self._rows[progress.position].last = progress
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            return
        known = f"library {seconds_text(progress.library_secs)}, generic {seconds_text(progress.generic_secs)}"
        if progress.trials:
            over = [ratio_text(secs, progress.best_secs) for secs in (progress.library_secs, progress.generic_secs)]
            tried = f"{progress.trials} trials, {progress.failures} failed"
            known = f"{tried}, best tuned {seconds_text(progress.best_secs)} ({over[0]} library, {over[1]} generic)"
        if progress.model_secs is not None:
            known += f"; {progress_text(progress)}"
        say(self._console, f"[{progress.position + 1}/{progress.tasks}] {progress.task}: {known}")

    def _table(self) -> RichTable:
        numbers = ("calls", "share", "trials", "failed", "best tuned", "over library", "over generic")
        caption = f"{time.monotonic() - self._started:.0f} s"
        if self._newest is not None:
            caption = f"{progress_text(self._newest)}; {caption}"
        return rich_table(table(("task", *numbers), map(_cells, self._rows), numbers, caption=caption))


def _cells(row: _Row) -> list[str]:
    p = row.last
    if p is None:
        return [row.name, str(row.calls), *["-"] * 6]
    over = [ratio_text(secs, p.best_secs) for secs in (p.library_secs, p.generic_secs)]
    share = "-" if p.share is None else percent_text(p.share)
    return [row.name, str(row.calls), share, str(p.trials), str(p.failures), seconds_text(p.best_secs), *over]
