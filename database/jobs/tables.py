"""The tables of submitted jobs and their logs.

Tests: `tests/database/jobs/test_queue.py`.
"""

from __future__ import annotations

from sqlalchemy import CheckConstraint, ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from relax_tune.database.jobs.submitted import SUBMITTED_STATES
from relax_tune.database.models import Base, one_of


class SubmittedJobRow(Base):
    __tablename__ = "submitted_jobs"
    __table_args__ = (
        CheckConstraint(one_of("state", SUBMITTED_STATES), name="submitted_jobs_state"),
        Index("submitted_jobs_by_turn", "state", "priority", "submitted_at"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    model: Mapped[str]
    name: Mapped[str]
    settings: Mapped[str]
    label: Mapped[str]
    priority: Mapped[int]
    owner: Mapped[str]
    note: Mapped[str]
    max_secs: Mapped[float | None]
    attempts: Mapped[int]
    state: Mapped[str]
    submitted_at: Mapped[float]
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    not_before: Mapped[float]
    holder: Mapped[str]
    expires_at: Mapped[float]
    runs: Mapped[int]
    losses: Mapped[int]
    cancel: Mapped[bool]
    spent_secs: Mapped[float]
    progress: Mapped[str]
    message: Mapped[str]
    exit_code: Mapped[int | None]
    result: Mapped[str]


class JobLogRow(Base):
    __tablename__ = "job_logs"

    job: Mapped[str] = mapped_column(ForeignKey("submitted_jobs.id"), primary_key=True)
    run: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    text: Mapped[str]
