"""The tables, as typed SQLAlchemy models, and the queries over them.

Everything is text and numbers (JSON as text), readable without this code. `relax_tune.database.migrations` creates
these tables; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index, Select, case, distinct, func, literal_column, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.sql import ColumnElement
from sqlalchemy.types import Double, Text

from relax_tune.database.records import JOB_STATES, REGIMES, STAGES, STATUSES, VARIANT_KINDS, Selection

_SQLITE_CLOCK = "(julianday('now') - 2440587.5) * 86400.0"


def one_of(column: str, values: Sequence[str]) -> str:
    """Return the SQL text of a check that `column` holds one of `values`."""
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


class Base(DeclarativeBase):
    """Text is unbounded and floats are 64 bits on every engine."""

    type_annotation_map = {str: Text(), float: Double()}  # noqa: RUF012 - SQLAlchemy reads it from the class


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


class VariantRow(Base):
    """Tuned, library and generic variants alike: a library call is a variant whose sketch names the routine."""

    __tablename__ = "variants"
    __table_args__ = (CheckConstraint(one_of("kind", VARIANT_KINDS), name="variants_kind"),)

    key: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    sketch: Mapped[str]
    trace: Mapped[str]
    parameters: Mapped[str]


class MeasurementRow(Base):
    __tablename__ = "measurements"
    __table_args__ = (
        CheckConstraint(one_of("status", STATUSES), name="measurements_status"),
        CheckConstraint(one_of("regime", REGIMES), name="measurements_regime"),
        CheckConstraint(
            f"(status = 'ok' AND stage IS NULL) OR (status = 'failed' AND {one_of('stage', STAGES)})",
            name="measurements_stage",
        ),
        Index("measurements_by_point", "target", "workload", "symbols"),
        Index("measurements_by_variant", "variant"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    workload: Mapped[str] = mapped_column(ForeignKey("workloads.key"))
    target: Mapped[str] = mapped_column(ForeignKey("targets.key"))
    variant: Mapped[str] = mapped_column(ForeignKey("variants.key"))
    symbols: Mapped[str]
    status: Mapped[str]
    stage: Mapped[str | None]
    message: Mapped[str]
    samples: Mapped[str]
    regime: Mapped[str]
    checked: Mapped[bool]
    build_secs: Mapped[float]
    job: Mapped[str]
    environment: Mapped[str | None] = mapped_column(ForeignKey("environments.key"))
    measured_at: Mapped[float] = mapped_column(server_default="0")
    worker: Mapped[str] = mapped_column(server_default="")
    host: Mapped[str] = mapped_column(server_default="")
    unit: Mapped[str] = mapped_column(server_default="")
    clock_mhz: Mapped[float | None]
    celsius: Mapped[float | None]

    @classmethod
    def matching(
        cls,
        target: str,
        *,
        workload: str | None = None,
        symbols: str | None = None,
        status: str | None = None,
        kinds: Sequence[str] | None = None,
        regime: str | None = None,
        winners_only: bool = False,
    ) -> list[ColumnElement[bool]]:
        """Return the conditions that select measurements of one target; `winners_only` keeps ok and checked ones."""
        conditions: list[ColumnElement[bool]] = [cls.target == target]
        if workload is not None:
            conditions.append(cls.workload == workload)
        if symbols is not None:
            conditions.append(cls.symbols == symbols)
        if status is not None:
            conditions.append(cls.status == status)
        if regime is not None:
            conditions.append(cls.regime == regime)
        if winners_only:
            conditions += [cls.status == "ok", cls.checked.is_(True)]
        if kinds is not None:
            conditions.append(cls.variant.in_(select(VariantRow.key).where(VariantRow.kind.in_(kinds))))
        return conditions

    @classmethod
    def selected_by(cls, target: str, selection: Selection) -> list[ColumnElement[bool]]:
        """Return the conditions that select the measurements of one target to prune."""
        conditions = cls.matching(target, status="failed" if selection.failed else None)
        if selection.older_than is not None:
            conditions += [cls.measured_at > 0, cls.measured_at < selection.older_than]
        if selection.since is not None:
            conditions.append(cls.measured_at >= selection.since)
        if selection.job is not None:
            conditions.append(cls.job == selection.job)
        if (name := selection.worker) is not None:
            conditions.append((cls.worker == name) | (cls.host == name) | (cls.unit == name))
        return conditions

    @classmethod
    def select_columns(cls, conditions: Sequence[ColumnElement[bool]]) -> Select[*tuple[Any, ...]]:
        """Return all columns as plain rows; the caller orders them (engines disagree on how text sorts)."""
        return select(*cls.__table__.columns).where(*conditions)

    @classmethod
    def select_variants(cls, conditions: Sequence[ColumnElement[bool]]) -> Select[*tuple[Any, ...]]:
        """Return the distinct variants of the same measurements."""
        return select(*VariantRow.__table__.columns).where(VariantRow.key.in_(select(cls.variant).where(*conditions)))

    @classmethod
    def select_ranking(cls, conditions: Sequence[ColumnElement[bool]]) -> Select[*tuple[Any, ...]]:
        """Return (id, variant, samples), the columns that ranking needs."""
        return select(cls.id, cls.variant, cls.samples).where(*conditions)

    @classmethod
    def select_totals(cls, target: str) -> Select[*tuple[Any, ...]]:
        """Return one row of counts: workloads, measurements, ok ones, ok and checked ones."""
        ok = cls.status == "ok"
        return select(
            func.count(distinct(cls.workload)),
            func.count(),
            func.coalesce(func.sum(case((ok, 1), else_=0)), 0),
            func.coalesce(func.sum(case((ok & cls.checked.is_(True), 1), else_=0)), 0),
        ).where(cls.target == target)

    @classmethod
    def select_failures(cls, target: str) -> Select[*tuple[Any, ...]]:
        """Return (stage, count) of the failures."""
        return select(cls.stage, func.count()).where(*cls.matching(target, status="failed")).group_by(cls.stage)

    @classmethod
    def select_kinds(cls, target: str) -> Select[*tuple[Any, ...]]:
        """Return (variant kind, count) of the ok measurements."""
        return (
            select(VariantRow.kind, func.count())
            .join(cls, cls.variant == VariantRow.key)
            .where(*cls.matching(target, status="ok"))
            .group_by(VariantRow.kind)
        )

    @classmethod
    def select_units(cls, target: str) -> Select[*tuple[Any, ...]]:
        """Return (worker, host, unit, measurements, failed ones, newest time)."""
        failed = func.sum(case((cls.status == "failed", 1), else_=0))
        place = (cls.worker, cls.host, cls.unit)
        counts = (func.count(), failed, func.max(cls.measured_at))
        return select(*place, *counts).where(cls.target == target).group_by(*place)


class PlanRow(Base):
    __tablename__ = "plans"

    workload: Mapped[str] = mapped_column(ForeignKey("workloads.key"), primary_key=True)
    target: Mapped[str] = mapped_column(ForeignKey("targets.key"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    entries: Mapped[str]

    @classmethod
    def select_for(cls, workload: str, target: str, version: int | None) -> Select[*tuple[Any, ...]]:
        """Return the plan of that version, or the newest."""
        query = select(*cls.__table__.columns).where(cls.workload == workload, cls.target == target)
        if version is not None:
            return query.where(cls.version == version)
        return query.order_by(cls.version.desc()).limit(1)


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
