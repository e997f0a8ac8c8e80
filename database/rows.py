"""Conversion between domain values and table rows. Rows are untrusted, like files: they are checked when read."""

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
    symbols_text,
)
from relax_tune.errors import DatabaseError

Row = Mapping[Any, Any]


def _same_key(row: Row, made: str, table: str) -> None:
    if row["key"] != made:
        raise DatabaseError(
            f"{table} row {row['key']!r:.80}: wanted the hash of its content, {made!r}; the row was altered"
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
    for column in ("limits", "reference"):  # files written before revisions 4 and 5 lack them
        found = parse_json(row[column], f"{where} {column}") if column in row else {}
        if not isinstance(found, dict):
            raise DatabaseError(f"{where} {column}: wanted names mapped to numbers, found {found!r:.80}")
        numbers.append(tuple(found.items()))
    target = Target(row["kind"], row["name"], parse_json(row["fingerprint"], f"{where} fingerprint"), *numbers)
    _same_key(row, target.key, "targets")
    return target


def environment_values(environment: Environment) -> dict[str, Any]:
    return {"key": environment.key, "facts": canonical_json(environment.facts)}


def environment_of(row: Row) -> Environment:
    environment = Environment(parse_json(row["facts"], f"environments row {row['key']!r:.80} facts"))
    _same_key(row, environment.key, "environments")
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
    _same_key(row, variant.key, "variants")
    return variant


def measurement_values(measurement: Measurement) -> dict[str, Any]:
    return {
        "id": measurement.id,
        "workload": measurement.workload,
        "target": measurement.target,
        "variant": measurement.variant.key,
        "symbols": symbols_text(measurement.symbols),
        "status": measurement.status,
        "stage": measurement.stage,
        "message": measurement.message,
        "samples": canonical_json(measurement.samples_secs),
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
        worker=row.get("worker", ""),  # files written before revision 5 lack the unit
        host=row.get("host", ""),
        unit=row.get("unit", ""),
        clock_mhz=row.get("clock_mhz"),
        celsius=row.get("celsius"),
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
    version = row["version"]  # before schema 7 versions are also the turns
    return PlanRecord(
        row["workload"], row["target"], version, row["entries"], row.get("origin", ""), row.get("turn", version)
    )


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


def lease_of(row: Row) -> Lease:
    return Lease(row["workload"], row["target"], row["holder"], row["expires_at"], row["trials"])


def histogram_values(histogram: ShapeHistogram) -> dict[str, Any]:
    return {"task": histogram.task, "symbol": histogram.symbol, "counts": histogram.counts}


def histogram_of(row: Row) -> ShapeHistogram:
    return ShapeHistogram(row["task"], row["symbol"], row["counts"])
