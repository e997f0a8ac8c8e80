"""The auto-tuning community's T4 results (JSON, schema 1.x), as Kernel Tuner and KTT write and read them.

T4 has a flat list of (configuration, times, validity). Our other fields (trace, variant kind, point) go into each
result's `measurements` list under `relax_tune.*` names. So our own files lose only job, environment and time. Output
checks count only when the caller trusts the file. To move databases use JSON Lines
(`relax_tune.database.exchange.jsonl`); T4 serves other tools.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from relax_tune.database.records import (
    Measurement,
    Regime,
    Stage,
    Target,
    VariantRecord,
    canonical_json,
    content_key,
    parse_json,
)
from relax_tune.database.stored_names import rename_variant
from relax_tune.errors import DatabaseError
from relax_tune.json_shapes import has_shape

SCHEMA = "1.1.0"

_INVALIDITY: dict[Stage, str] = {
    "constraint": "constraints",
    "compile": "compile",
    "launch": "runtime",
    "runtime": "runtime",
    "wrong-result": "correctness",
    "timeout": "timeout",
    "crash": "runtime",
    "device-lost": "runtime",
}
_STAGES: dict[str, Stage] = {
    "constraints": "constraint",
    "compile": "compile",
    "runtime": "runtime",
    "correctness": "wrong-result",
    "timeout": "timeout",
}
_UNITS = {"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6, "nanoseconds": 1e-9}
_APIS = {"opencl": "OpenCL", "cuda": "CUDA"}


def export_t4(target: Target, measurements: Iterable[Measurement], version: str) -> str:
    """Return T4 JSON text of measurements of one target, in seconds. version: of the tool

    A configuration holds the variant's parameters and, as `symbol.NAME`, the point.

    Raises:
        DatabaseError: a measurement is of another target.
    """
    results = []
    for measurement in sorted(measurements, key=lambda m: m.id):
        if measurement.target != target.key:
            raise DatabaseError(
                f"T4: wanted measurements of target {target.key!r}, found {measurement.id!r} of {measurement.target!r}; export "
                "each target on its own"
            )
        results.append(_result(measurement))
    metadata = {"platform": target.kind, "device": target.name, "autotuner": "relax-tune", "autotuner_version": version}
    if target.kind in _APIS:
        metadata["compute_api"] = _APIS[target.kind]
    metadata["timeunit"] = "seconds"
    return canonical_json({"schema_version": SCHEMA, "metadata": metadata, "results": results})


def _result(measurement: Measurement) -> dict[str, Any]:
    ok = measurement.stage is None
    extra: list[dict[str, Any]] = [
        {"name": "relax_tune.id", "value": measurement.id, "unit": ""},
        {"name": "relax_tune.workload", "value": measurement.workload, "unit": ""},
        {"name": "relax_tune.kind", "value": measurement.variant.kind, "unit": ""},
        {"name": "relax_tune.sketch", "value": measurement.variant.sketch, "unit": ""},
        {"name": "relax_tune.trace", "value": measurement.variant.trace, "unit": ""},
        {"name": "relax_tune.regime", "value": measurement.regime, "unit": ""},
    ]
    if ok:
        extra.insert(0, {"name": "time", "value": measurement.median_secs, "unit": "seconds"})
    else:
        extra.append({"name": "relax_tune.stage", "value": measurement.stage, "unit": ""})
        extra.append({"name": "relax_tune.message", "value": measurement.message, "unit": ""})
    result: dict[str, Any] = {
        "configuration": {
            **measurement.variant.values,
            **{f"symbol.{name}": value for name, value in measurement.symbols.items()},
        },
        "objectives": ["time"],
        "times": {"compilation_time": measurement.build_secs, "runtimes": list(measurement.samples_secs)},
        "invalidity": "correct" if measurement.stage is None else _INVALIDITY[measurement.stage],
        "correctness": int(ok and measurement.checked),
        "measurements": extra,
    }
    if 0 < measurement.measured_at < 2**35:
        result["timestamp"] = datetime.fromtimestamp(measurement.measured_at, UTC).isoformat()
    return result


def import_t4(text: str, workload: str, target: str, *, trust_checks: bool = False) -> list[Measurement]:
    """Return the measurements of T4 JSON text. The caller gives the keys of workload and target, which T4 does not name
    reliably. Results that name another workload (in files we wrote) are left out.

    Times are in `metadata.timeunit`, milliseconds where the file does not say (Kernel Tuner's). A configuration becomes
    a `tuned` variant of sketch `t4` whose trace is the configuration and whose parameters are its integers, except in
    files we wrote. Ids hash the content, so importing again is a no-op. Output checks by other tools count only if
    `trust_checks`.

    Raises:
        DatabaseError: not T4, a result is malformed (named by its index), or all results are of other workloads.
    """
    document = parse_json(text, "T4")
    if not has_shape(document, {"results": list}):
        raise DatabaseError("T4: wanted an object with a list `results`, found something else; give a T4 results file")
    schema = document.get("schema_version", "1.0.0")
    if not isinstance(schema, str) or schema.split(".")[0] != "1":
        raise DatabaseError(f"T4: wanted schema version 1.x, found {schema!r:.40}; upgrade the tool")
    metadata = document.get("metadata", {})
    unit = metadata.get("timeunit", "milliseconds") if isinstance(metadata, dict) else None
    if unit not in tuple(_UNITS):
        raise DatabaseError(f"T4: wanted a timeunit of {', '.join(_UNITS)}, found {unit!r:.40}; correct the file")
    found = []
    others: dict[str, None] = {}
    for index, result in enumerate(document["results"]):
        try:
            own = _own_workload(result, workload)
            if own != workload:
                others[own] = None
                continue
            found.append(_measurement(result, workload, target, _UNITS[unit], trust_checks))
        except DatabaseError as error:
            raise DatabaseError(f"T4 result {index}: {error}") from None
    if others and not found:
        known = ", ".join(key[:12] for key in list(others)[:10])
        raise DatabaseError(
            f"T4: wanted results of the workload {workload[:12]}, found those of {known}; name one of them"
        )
    return found


def _own_workload(result: Any, named: str) -> str:
    if not isinstance(result, Mapping):
        raise DatabaseError("wanted an object, found something else")
    own = _extra(result.get("measurements", [])).get("workload")
    return own if isinstance(own, str) else named


def _measurement(result: Mapping[str, Any], workload: str, target: str, unit: float, trust_checks: bool) -> Measurement:
    configuration: Any = result.get("configuration")
    times: Any = result.get("times", {})
    if not has_shape((configuration, times), (Mapping, Mapping)):
        raise DatabaseError("wanted the objects `configuration` and `times`, found something else")
    extra = _extra(result.get("measurements", []))
    symbols = {k.removeprefix("symbol."): v for k, v in configuration.items() if k.startswith("symbol.")}
    values = {k: v for k, v in configuration.items() if not k.startswith("symbol.") and type(v) is int}
    variant = VariantRecord(
        extra.get("kind", "tuned"),
        extra.get("sketch", "t4"),
        extra.get("trace", canonical_json(configuration)),
        canonical_json(values),
    )
    if "trace" in extra:  # ours, perhaps of before a renaming
        variant = rename_variant(variant)
    id = extra.get("id", f"t4-{content_key([workload, target, result])}")
    regime: Regime = extra.get("regime", "warm")
    build = _seconds(times.get("compilation_time", times.get("compilation", 0.0)), unit)
    invalidity = result.get("invalidity")
    if invalidity == "correct":
        runtimes = times.get("runtimes")
        if not isinstance(runtimes, list) or not runtimes:
            raise DatabaseError("wanted `runtimes` of a correct result, found none")
        samples = tuple(_seconds(value, unit) for value in runtimes)
        checked = trust_checks and result.get("correctness") == 1
        return Measurement(
            id,
            workload,
            target,
            variant,
            symbols,
            samples_secs=samples,
            regime=regime,
            checked=checked,
            build_secs=build,
        )
    if invalidity not in tuple(_STAGES):
        raise DatabaseError(f"wanted an `invalidity` of correct, {', '.join(_STAGES)}, found {invalidity!r:.40}")
    stage = extra.get("stage", _STAGES[invalidity])
    message = extra.get("message", f"T4: {invalidity}")
    return Measurement(
        id,
        workload,
        target,
        variant,
        symbols,
        status="failed",
        stage=stage,
        message=message,
        regime=regime,
        build_secs=build,
    )


def _extra(measurements: Any) -> dict[str, Any]:
    """Return our extensions of the format, by short name."""
    if not isinstance(measurements, list):
        raise DatabaseError("wanted a list `measurements`, found something else")
    found = {}
    for entry in measurements:
        if has_shape(entry, {"name": str}) and entry["name"].startswith("relax_tune."):
            found[entry["name"].removeprefix("relax_tune.")] = entry.get("value")
    return found


def _seconds(value: Any, unit: float) -> float:
    if type(value) is not float and (type(value) is not int or abs(value) >= 2**63):
        raise DatabaseError(f"wanted a time, found {value!r:.40}")
    return float(value) * unit
