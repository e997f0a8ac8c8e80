"""The tables of the newest schema, as typed SQLAlchemy models.

Texts, points and origins that many measurements share are kept once, and are referred to by number. Samples and ids are binary
(`relax_tune.database.sql.codec`). `relax_tune.database.migrations` creates these tables; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    CheckConstraint,
    ForeignKey,
    Identity,
    Index,
    Select,
    UniqueConstraint,
    func,
    literal_column,
    select,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.sql import ColumnElement
from sqlalchemy.types import BigInteger, Double, SmallInteger, Text

from relax_tune.database.jobs.submitted import SUBMITTED_STATES
from relax_tune.database.records import JOB_STATES, REGIMES, STAGES, TEXT_LIMIT, VARIANT_KINDS

_SQLITE_CLOCK = "(julianday('now') - 2440587.5) * 86400.0"


def one_of(column: str, values: Sequence[str]) -> str:
    """Return the SQL text of a check that `column` holds one of `values`."""
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


def _below(column: str, limit: int) -> str:
    return f"{column} BETWEEN 0 AND {limit - 1}"


class Base(DeclarativeBase):
    """Text is unbounded and floats are 64 bits on every engine."""

    type_annotation_map = {str: Text(), float: Double()}  # noqa: RUF012 - SQLAlchemy reads it from the class

    @classmethod
    def columns(cls) -> list[ColumnElement[Any]]:
        """Return all columns. A text that is too long for a record is cut to one that still is, so that its row takes little memory."""
        return [
            func.substr(c, 1, TEXT_LIMIT + 1).label(c.name) if isinstance(c.type, Text) and not c.primary_key else c
            for c in cls.__table__.columns
        ]


class TargetRow(Base):
    __tablename__ = "targets"

    key: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    name: Mapped[str]
    fingerprint: Mapped[str]
    limits: Mapped[str] = mapped_column(server_default="{}")
    reference: Mapped[str] = mapped_column(server_default="{}")


class EnvironmentRow(Base):
    __tablename__ = "environments"

    key: Mapped[str] = mapped_column(primary_key=True)
    facts: Mapped[str]


class WorkloadRow(Base):
    __tablename__ = "workloads"

    key: Mapped[str] = mapped_column(primary_key=True)
    text: Mapped[str]
    format_version: Mapped[int]
    hint: Mapped[str]


class TraceRow(Base):
    """Kind, sketch and trace, which the variants that differ in their parameters share."""

    __tablename__ = "traces"
    __table_args__ = (CheckConstraint(_below("kind", len(VARIANT_KINDS)), name="traces_kind"),)

    number: Mapped[int] = mapped_column(Identity(), primary_key=True)
    key: Mapped[bytes] = mapped_column(unique=True)
    kind: Mapped[int] = mapped_column(SmallInteger)
    sketch: Mapped[str]
    trace: Mapped[str]


class VariantRow(Base):
    """Tuned, library and generic variants alike: a library call is a variant whose sketch names the routine."""

    __tablename__ = "variants"

    number: Mapped[int] = mapped_column(Identity(), primary_key=True)
    key: Mapped[bytes] = mapped_column(unique=True)
    trace: Mapped[int] = mapped_column(ForeignKey("traces.number"))
    parameters: Mapped[str]


class WorkloadTaskRow(Base):
    """A workload that was measured on a target."""

    __tablename__ = "tasks"
    __table_args__ = (UniqueConstraint("target", "workload", name="tasks_by_target"),)

    number: Mapped[int] = mapped_column(Identity(), primary_key=True)
    target: Mapped[str] = mapped_column(ForeignKey("targets.key"))
    workload: Mapped[str] = mapped_column(ForeignKey("workloads.key"))


class PointRow(Base):
    """The symbols of a measurement."""

    __tablename__ = "points"

    number: Mapped[int] = mapped_column(Identity(), primary_key=True)
    key: Mapped[bytes] = mapped_column(unique=True)
    symbols: Mapped[str]


class PlaceRow(Base):
    """The origin of a measurement: job, libraries, worker, host, unit. environment: key, empty if unknown"""

    __tablename__ = "places"

    number: Mapped[int] = mapped_column(Identity(), primary_key=True)
    key: Mapped[bytes] = mapped_column(unique=True)
    job: Mapped[str]
    environment: Mapped[str]
    worker: Mapped[str]
    host: Mapped[str]
    unit: Mapped[str]


class MessageRow(Base):
    """The message of failures."""

    __tablename__ = "messages"

    number: Mapped[int] = mapped_column(Identity(), primary_key=True)
    key: Mapped[bytes] = mapped_column(unique=True)
    text: Mapped[str]


class MeasurementRow(Base):
    """Columns are in the order in which PostgreSQL packs them best.

    kind, stage, regime: places in `VARIANT_KINDS`, `STAGES` (from 1; 0 is ok) and `REGIMES`; message: 0 for none
    """

    __tablename__ = "measurements"
    __table_args__ = (
        CheckConstraint(_below("kind", len(VARIANT_KINDS)), name="measurements_kind"),
        CheckConstraint(_below("stage", len(STAGES) + 1), name="measurements_stage"),
        CheckConstraint(_below("regime", len(REGIMES)), name="measurements_regime"),
        CheckConstraint("(stage = 0) = (message = 0)", name="measurements_message"),
        Index("measurements_by_task", "task", "point"),
        Index("measurements_by_number", "variant"),
    )

    id: Mapped[bytes] = mapped_column(primary_key=True)
    measured_at: Mapped[float]
    build_secs: Mapped[float]
    clock_mhz: Mapped[float | None]
    celsius: Mapped[float | None]
    task: Mapped[int] = mapped_column(ForeignKey("tasks.number"))
    point: Mapped[int] = mapped_column(ForeignKey("points.number"))
    variant: Mapped[int] = mapped_column(ForeignKey("variants.number"))
    place: Mapped[int] = mapped_column(ForeignKey("places.number"))
    message: Mapped[int]
    kind: Mapped[int] = mapped_column(SmallInteger)
    stage: Mapped[int] = mapped_column(SmallInteger)
    regime: Mapped[int] = mapped_column(SmallInteger)
    checked: Mapped[bool]
    samples: Mapped[bytes]


class TallyRow(Base):
    """Numbers of measurements, which whoever writes measurements keeps. last: the newest `measured_at`"""

    __tablename__ = "tallies"

    task: Mapped[int] = mapped_column(ForeignKey("tasks.number"), primary_key=True, autoincrement=False)
    place: Mapped[int] = mapped_column(ForeignKey("places.number"), primary_key=True, autoincrement=False)
    kind: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    stage: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    regime: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    checked: Mapped[bool] = mapped_column(primary_key=True)
    count: Mapped[int] = mapped_column(BigInteger)
    last: Mapped[float]


class UnreadableRow(Base):
    """Measurements of an earlier schema that could not be read, as JSON text."""

    __tablename__ = "unreadable"

    id: Mapped[str] = mapped_column(primary_key=True)
    why: Mapped[str]
    content: Mapped[str]


class AboutRow(Base):
    """Facts of the database: `id`, its name for others; `reads_from` and `writes_from`, the oldest schemas whose code may."""

    __tablename__ = "about"

    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]


class PlanRow(Base):
    """Plans under the id of the database that made them, empty for this one.

    turn: order in which plans of a task became the current one here; 0 for plans that never did
    """

    __tablename__ = "plans"

    workload: Mapped[str] = mapped_column(ForeignKey("workloads.key"), primary_key=True)
    target: Mapped[str] = mapped_column(ForeignKey("targets.key"), primary_key=True)
    origin: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    entries: Mapped[str]
    turn: Mapped[int]


class JobRow(Base):
    __tablename__ = "jobs"
    __table_args__ = (CheckConstraint(one_of("state", JOB_STATES), name="jobs_state"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    settings: Mapped[str]
    state: Mapped[str]


class LeaseRow(Base):
    __tablename__ = "leases"

    workload: Mapped[str] = mapped_column(ForeignKey("workloads.key"), primary_key=True)
    target: Mapped[str] = mapped_column(ForeignKey("targets.key"), primary_key=True)
    holder: Mapped[str]
    expires_at: Mapped[float]
    trials: Mapped[int] = mapped_column(server_default="0")

    @classmethod
    def clock(cls, dialect: str) -> Select[*tuple[Any, ...]]:
        """Return the Unix seconds of the database's clock; for a SQLite file, that of its machine."""
        seconds = "extract(epoch FROM clock_timestamp())" if dialect == "postgresql" else _SQLITE_CLOCK
        return select(literal_column(seconds, Double()))


class HistogramRow(Base):
    __tablename__ = "histograms"

    task: Mapped[str] = mapped_column(primary_key=True)
    symbol: Mapped[str] = mapped_column(primary_key=True)
    counts: Mapped[str]


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
