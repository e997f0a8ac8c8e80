"""Conversion between records and mappings of their fields: rows of tables, and lines of exports.

Mappings are untrusted, like files: the constructors of records check them. Fields with a default here may be missing, since the
earliest forms of exports lack them.

Tests: `tests/database/test_store_contract.py`, `tests/database/exchange/test_jsonl.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_tune.database.records import (
    Environment,
    JobRecord,
    Lease,
    Measurement,
    PlanRecord,
    ShapeHistogram,
    Target,
    VariantRecord,
    Workload,
    canonical_json,
    parse_json,
)
from relax_tune.errors import DatabaseError

Row = Mapping[Any, Any]


def _verify_key(row: Row, key: str, table: str) -> None:
    if row["key"] != key:
        raise DatabaseError(
            f"{table} row {row['key']!r:.80}: expected the hash of its content, {key!r}; the row was altered"
        )


def target_values(target: Target) -> dict[str, Any]:
    return {
        "key": target.key,
        "kind": target.kind,
        "name": target.name,
        "fingerprint": canonical_json(target.fingerprint),
        "limits": canonical_json(dict(target.limits)),
        "reference": canonical_json(dict(target.reference)),
    }


def target_of(row: Row) -> Target:
    where = f"targets row {row['key']!r:.80}"
    numbers = []
    for column in ("limits", "reference"):
        values = parse_json(row.get(column, "{}"), f"{where} {column}")
        if not isinstance(values, dict):
            raise DatabaseError(f"{where} {column}: expected names mapped to numbers, got {values!r:.80}")
        numbers.append(tuple(values.items()))
    target = Target(row["kind"], row["name"], parse_json(row["fingerprint"], f"{where} fingerprint"), *numbers)
    _verify_key(row, target.key, "targets")
    return target


def environment_values(environment: Environment) -> dict[str, Any]:
    return {"key": environment.key, "facts": canonical_json(environment.facts)}


def environment_of(row: Row) -> Environment:
    environment = Environment(parse_json(row["facts"], f"environments row {row['key']!r:.80} facts"))
    _verify_key(row, environment.key, "environments")
    return environment


def workload_values(workload: Workload) -> dict[str, Any]:
    return {
        "key": workload.key,
        "text": workload.text,
        "format_version": workload.format_version,
        "hint": workload.hint,
    }


def workload_of(row: Row) -> Workload:
    return Workload(row["key"], row["text"], row["format_version"], row["hint"])


def variant_values(variant: VariantRecord) -> dict[str, Any]:
    return {
        "key": variant.key,
        "kind": variant.kind,
        "sketch": variant.sketch,
        "trace": variant.trace,
        "parameters": variant.parameters,
    }


def variant_of(row: Row) -> VariantRecord:
    variant = VariantRecord(row["kind"], row["sketch"], row["trace"], row["parameters"])
    _verify_key(row, variant.key, "variants")
    return variant


def measurement_content(measurement: Measurement) -> dict[str, Any]:
    """Return the fields of a measurement as JSON values."""
    return {
        "id": measurement.id,
        "workload": measurement.workload,
        "target": measurement.target,
        "variant": measurement.variant.key,
        "symbols": measurement.symbols,
        "status": measurement.status,
        "stage": measurement.stage,
        "message": measurement.message,
        "samples": measurement.samples_secs,
        "regime": measurement.regime,
        "checked": measurement.checked,
        "build_secs": measurement.build_secs,
        "job": measurement.job,
        "environment": measurement.environment or None,
        "measured_at": measurement.measured_at,
        "worker": measurement.worker,
        "host": measurement.host,
        "unit": measurement.unit,
        "clock_mhz": measurement.clock_mhz,
        "celsius": measurement.celsius,
        "contention": measurement.contention,
    }


def measurement_of(row: Row, variant: VariantRecord) -> Measurement:
    where = f"measurements row {row['id']!r:.80}"
    return Measurement(
        id=row["id"],
        workload=row["workload"],
        target=row["target"],
        variant=variant,
        symbols=parse_json(row["symbols"], f"{where} symbols"),
        status=row["status"],
        stage=row["stage"],
        message=row["message"],
        samples_secs=parse_json(row["samples"], f"{where} samples"),
        regime=row["regime"],
        checked=row["checked"],
        build_secs=row["build_secs"],
        job=row["job"],
        environment=row["environment"] or "",
        measured_at=row["measured_at"],
        worker=row.get("worker", ""),
        host=row.get("host", ""),
        unit=row.get("unit", ""),
        clock_mhz=row.get("clock_mhz"),
        celsius=row.get("celsius"),
        contention=row.get("contention"),
    )


def plan_values(plan: PlanRecord) -> dict[str, Any]:
    return {
        "workload": plan.workload,
        "target": plan.target,
        "origin": plan.origin,
        "version": plan.version,
        "entries": plan.entries,
        "turn": plan.turn,
    }


def plan_of(row: Row) -> PlanRecord:
    return PlanRecord(row["workload"], row["target"], row["version"], row["entries"], row["origin"], row["turn"])


def job_values(job: JobRecord) -> dict[str, Any]:
    return {"id": job.id, "settings": job.settings, "state": job.state}


def job_of(row: Row) -> JobRecord:
    return JobRecord(row["id"], row["settings"], row["state"])


def lease_values(lease: Lease) -> dict[str, Any]:
    return {
        "workload": lease.workload,
        "target": lease.target,
        "holder": lease.holder,
        "expires_at": lease.expires_at,
        "trials": lease.trials,
    }


def claimed(trials: object) -> int:
    """Return the candidates that a stored lease claims; 0 if the column is not a count."""
    return trials if type(trials) is int and trials > 0 else 0


def lease_of(row: Row) -> Lease:
    return Lease(row["workload"], row["target"], row["holder"], row["expires_at"], row["trials"])


def histogram_values(histogram: ShapeHistogram) -> dict[str, Any]:
    return {"task": histogram.task, "symbol": histogram.symbol, "counts": histogram.counts}


def histogram_of(row: Row) -> ShapeHistogram:
    return ShapeHistogram(row["task"], row["symbol"], row["counts"])
