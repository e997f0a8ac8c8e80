"""Running jobs in a database: written by the job while it runs, judged by readers.

Tests: `tests/tuner/job/test_job.py`.
"""

from __future__ import annotations

import json
import time
from types import TracebackType

from relax_tune.database.records import JobRecord, JobState, canonical_json
from relax_tune.database.store import Store
from relax_tune.errors import DatabaseError
from relax_tune.tuner.job.job_names import lives, new_holder
from relax_tune.tuner.measure.interrupts import shielded
from relax_tune.tuner.settings import Settings

# How often a job records that it is alive. A job without such a record for SILENT_SECS counts as dead.
BEAT_SECS = 20.0
SILENT_SECS = 120.0
LAST_BEAT = "seen_at"
"""Setting of a job record: Unix seconds of its last heartbeat. The stored name is part of the database's contents."""


class RunningJob:
    """One tuning job in the database, from `running` to `done` or `interrupted`; a context manager.

    Attributes:
        name: Unique among all writers to the store. Readers on this machine tell from it whether the job's process is alive
            (`relax_tune.tuner.job.job_names`); other readers use the time of the last `beat`.

    Args:
        submitted: Id of the submitted job that it runs.
    """

    def __init__(self, store: Store, settings: Settings, submitted: str = "") -> None:
        self.name = new_holder()
        self._store = store
        chosen = {
            "target": settings.target,
            "effort": settings.effort,
            "trials": settings.trials,
            "strategy": settings.strategy,
            "seed": settings.seed,
            "submitted": submitted or None,
        }
        self._settings = {name: value for name, value in chosen.items() if value is not None}
        self._beaten = 0.0

    def beat(self) -> None:
        """Record that the job is alive, at most once in BEAT_SECS."""
        if time.monotonic() - self._beaten >= BEAT_SECS:
            self._put("running")
            self._beaten = time.monotonic()

    def _put(self, state: JobState) -> None:
        text = canonical_json(self._settings | {LAST_BEAT: int(time.time())})
        with shielded():
            self._store.put_job(JobRecord(self.name, text, state))

    def __enter__(self) -> RunningJob:
        with shielded():
            for job in self._store.jobs("running"):
                if state_of(job) == "interrupted":
                    self._store.put_job(JobRecord(job.id, job.settings, "interrupted"))
            self.beat()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._put("done" if kind is None else "interrupted")
        except DatabaseError:
            if kind is None:
                raise
            # the first error says more, for example that this database is gone


def state_of(job: JobRecord, now: float | None = None) -> JobState:
    """Return the most likely state of a job: one recorded as `running` may have been killed.

    A job of this machine runs as long as its process lives, one of another machine as long as its last heartbeat is recent.

    Args:
        now: Unix seconds; None: the present.
    """
    if job.state != "running":
        return job.state
    alive = lives(job.id)
    if alive is not None:
        return "running" if alive else "interrupted"
    settings = json.loads(job.settings)
    last_beat = settings.get(LAST_BEAT) if isinstance(settings, dict) else None
    recent = (
        isinstance(last_beat, int | float) and abs((time.time() if now is None else now) - last_beat) <= SILENT_SECS
    )
    return "running" if recent else "interrupted"
