"""The tables of records, as typed SQLAlchemy models.

Values that many measurements share (traces, points, places, messages) are rows of tables of their own and are referred to by
number: ten million records take 270 bytes each this way. Samples and ids are binary (`relax_tune.database.sql.codec`).
`relax_tune.database.migrations` creates these tables; a test compares the two.

Tests: `tests/database/test_schema.py`.
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

from relax_tune.database.records import JOB_STATES, REGIMES, STAGES, TEXT_LIMIT, VARIANT_KINDS

_SQLITE_CLOCK = "(julianday('now') - 2440587.5) * 86400.0"


def one_of(column: str, values: Sequence[str]) -> str:
    """Return the SQL text of a check that `column` holds one of `values`."""
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


def _below(column: str, limit: int) -> str:
    return f"{column} BETWEEN 0 AND {limit - 1}"


def truncated_columns(table: Any, *names: str) -> list[ColumnElement[Any]]:
    """Return columns of a table whose texts the engine truncates just above the limit of records.

    A row with a longer text is invalid. The record's constructor refuses the truncated text, and the row takes little memory.
    """
    return [
        func.substr(c, 1, TEXT_LIMIT + 1).label(c.name) if isinstance(c.type, Text) and not c.primary_key else c
        for c in (table.c[name] for name in names)
    ]


class Base(DeclarativeBase):
    """Text is unbounded and floats are 64 bits on every engine."""

    type_annotation_map = {str: Text(), float: Double()}  # noqa: RUF012 - SQLAlchemy reads it from the class

    @classmethod
    def columns(cls) -> list[ColumnElement[Any]]:
        """Return all columns, long texts truncated as by `truncated_columns`."""
        return truncated_columns(cls.__table__, *cls.__table__.columns.keys())


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
    """Kind, sketch and trace of variants; variants that differ only in their parameters share a row."""

    __tablename__ = "traces"
    __table_args__ = (CheckConstraint(_below("kind", len(VARIANT_KINDS)), name="traces_kind"),)

    number: Mapped[int] = mapped_column(Identity(), primary_key=True)
    key: Mapped[bytes] = mapped_column(unique=True)
    kind: Mapped[int] = mapped_column(SmallInteger)
    sketch: Mapped[str]
    trace: Mapped[str]


class VariantRow(Base):
    """Variants of all kinds: the sketch of a library variant is the name of the routine."""

    __tablename__ = "variants"

    number: Mapped[int] = mapped_column(Identity(), primary_key=True)
    key: Mapped[bytes] = mapped_column(unique=True)
    trace: Mapped[int] = mapped_column(ForeignKey("traces.number"))
    parameters: Mapped[str]


class WorkloadTaskRow(Base):
    """Pairs of a target and a workload measured on it."""

    __tablename__ = "tasks"
    __table_args__ = (UniqueConstraint("target", "workload", name="tasks_by_target"),)

    number: Mapped[int] = mapped_column(Identity(), primary_key=True)
    target: Mapped[str] = mapped_column(ForeignKey("targets.key"))
    workload: Mapped[str] = mapped_column(ForeignKey("workloads.key"))


class PointRow(Base):
    """Shapes: the value of each symbol, as JSON text."""

    __tablename__ = "points"

    number: Mapped[int] = mapped_column(Identity(), primary_key=True)
    key: Mapped[bytes] = mapped_column(unique=True)
    symbols: Mapped[str]


class PlaceRow(Base):
    """Origins of measurements: job, environment key, worker, host and unit; empty if unknown."""

    __tablename__ = "places"

    number: Mapped[int] = mapped_column(Identity(), primary_key=True)
    key: Mapped[bytes] = mapped_column(unique=True)
    job: Mapped[str]
    environment: Mapped[str]
    worker: Mapped[str]
    host: Mapped[str]
    unit: Mapped[str]


class MessageRow(Base):
    """Messages of failures."""

    __tablename__ = "messages"

    number: Mapped[int] = mapped_column(Identity(), primary_key=True)
    key: Mapped[bytes] = mapped_column(unique=True)
    text: Mapped[str]


class MeasurementRow(Base):
    """Measurements. Columns are in the order in which PostgreSQL needs the least padding.

    Attributes:
        kind: Index in `VARIANT_KINDS`, repeated from the trace for the filters of queries.
        stage: 0 for ok, else 1 + index in `STAGES`.
        regime: Index in `REGIMES`.
        message: Number of a message; 0 for none.
    """

    __tablename__ = "measurements"
    __table_args__ = (
        CheckConstraint(_below("kind", len(VARIANT_KINDS)), name="measurements_kind"),
        CheckConstraint(_below("stage", len(STAGES) + 1), name="measurements_stage"),
        CheckConstraint(_below("regime", len(REGIMES)), name="measurements_regime"),
        CheckConstraint("(stage = 0) = (message = 0)", name="measurements_message"),
        Index("measurements_by_task", "task", "point"),
        Index("measurements_by_variant", "variant"),
    )

    id: Mapped[bytes] = mapped_column(primary_key=True)
    measured_at: Mapped[float]
    build_secs: Mapped[float]
    clock_mhz: Mapped[float | None]
    celsius: Mapped[float | None]
    contention: Mapped[float | None]
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
    """Counts of measurements, updated in the transaction that writes them, so that statistics read no measurement.

    Attributes:
        last: Newest `measured_at`.
    """

    __tablename__ = "tallies"

    task: Mapped[int] = mapped_column(ForeignKey("tasks.number"), primary_key=True, autoincrement=False)
    place: Mapped[int] = mapped_column(ForeignKey("places.number"), primary_key=True, autoincrement=False)
    kind: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    stage: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    regime: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False)
    checked: Mapped[bool] = mapped_column(primary_key=True)
    count: Mapped[int] = mapped_column(BigInteger)
    last: Mapped[float]


class AboutRow(Base):
    """Facts of the database by name.

    `id` names the database in the plans of others. `reads_from` and `writes_from` are the oldest schemas whose code may read and
    write it.
    """

    __tablename__ = "about"

    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[str]


class PlanRow(Base):
    """Plans by task, origin and version.

    Attributes:
        origin: Id of the database that built the plan; empty for this one.
        turn: Order in which plans of a task became current in this database; 0 for plans that never did.
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
        """Select the Unix seconds of the server's clock, or of this machine's for SQLite."""
        seconds = "extract(epoch FROM clock_timestamp())" if dialect == "postgresql" else _SQLITE_CLOCK
        return select(literal_column(seconds, Double()))


class HistogramRow(Base):
    __tablename__ = "histograms"

    task: Mapped[str] = mapped_column(primary_key=True)
    symbol: Mapped[str] = mapped_column(primary_key=True)
    counts: Mapped[str]
