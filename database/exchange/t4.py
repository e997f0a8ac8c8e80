"""The auto-tuning community's T4 results (JSON, schema 1.x), as Kernel Tuner and KTT write and read them.

T4 has a flat list of (configuration, times, validity). Our other fields (trace, variant kind, point, job, libraries) go into
each result's `measurements` list under `relax_tune.*` names, and the first result of a workload has its text. So files of this tool
lose only the worker, host and unit of a record. Output checks count only if the caller trusts the file. Results are read and written
one at a time, so files may be larger than memory.

Tests: `tests/database/exchange/test_t4.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

from relax_tune.database.exchange.json_stream import END, iter_document
from relax_tune.database.records import (
    Environment,
    Measurement,
    Stage,
    Target,
    VariantRecord,
    Workload,
    canonical_json,
    content_key,
)
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
_APIS = {"opencl": "OpenCL", "cuda": "CUDA", "webgpu": "WebGPU"}


def t4_parts(
    target: Target,
    measurements: Iterable[Measurement],
    version: str,
    workloads: Callable[[str], Workload | None] = lambda _: None,
    environments: Callable[[str], Environment | None] = lambda _: None,
) -> Iterator[str]:
    """Yield the parts of the T4 JSON text of measurements of one target, in seconds.

    A configuration has the variant's parameters and, as `symbol.NAME`, the shape.

    Args:
        version: Version of the tool.
        workloads, environments: Look-ups by key; the first result of each has its description.

    Raises:
        DatabaseError: A measurement is of another target.
    """
    metadata: dict[str, Any] = {
        "platform": target.kind,
        "device": target.name,
        "autotuner": "relax-tune",
        "autotuner_version": version,
    }
    if target.kind in _APIS:
        metadata["compute_api"] = _APIS[target.kind]
    metadata["timeunit"] = "seconds"
    metadata["relax_tune.target"] = {
        "kind": target.kind,
        "name": target.name,
        "fingerprint": [list(pair) for pair in target.fingerprint],
        "limits": dict(target.limits),
        "reference": dict(target.reference),
    }
    yield f'{{"metadata":{canonical_json(metadata)},"results":['
    described: set[str] = set()
    for number, measurement in enumerate(measurements):
        if measurement.target != target.key:
            raise DatabaseError(
                f"T4: expected measurements of target {target.key!r}, got {measurement.id!r} of {measurement.target!r}; export "
                "each target to a separate file"
            )
        result = _result(measurement)
        if measurement.workload not in described:
            described.add(measurement.workload)
            if (workload := workloads(measurement.workload)) is not None:
                description = {"text": workload.text, "format_version": workload.format_version, "hint": workload.hint}
                result["measurements"].append(_entry("text", description))
        if measurement.environment and measurement.environment not in described:
            described.add(measurement.environment)
            if (environment := environments(measurement.environment)) is not None:
                result["measurements"].append(_entry("facts", [list(pair) for pair in environment.facts]))
        yield ("," if number else "") + canonical_json(result)
    yield f'],"schema_version":"{SCHEMA}"}}'


def _entry(name: str, value: Any) -> dict[str, Any]:
    return {"name": f"relax_tune.{name}", "value": value, "unit": ""}


def _result(measurement: Measurement) -> dict[str, Any]:
    ok = measurement.stage is None
    extra: list[dict[str, Any]] = [
        _entry("id", measurement.id),
        _entry("workload", measurement.workload),
        _entry("kind", measurement.variant.kind),
        _entry("sketch", measurement.variant.sketch),
        _entry("trace", measurement.variant.trace),
        _entry("regime", measurement.regime),
    ]
    for name in ("job", "environment"):
        if value := getattr(measurement, name):
            extra.append(_entry(name, value))
    if ok:
        extra.insert(0, {"name": "time", "value": measurement.median_secs, "unit": "seconds"})
    else:
        extra += [_entry("stage", measurement.stage), _entry("message", measurement.message)]
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
    # 0 stands for an unknown time, and `datetime` ends with the year 9999.
    if 0 < measurement.measured_at < 2**35:
        result["timestamp"] = datetime.fromtimestamp(measurement.measured_at, UTC).isoformat()
    return result


@dataclass(frozen=True, slots=True)
class T4Result:
    """A result of a T4 file, with the workload and the environment that it describes; None if it does not."""

    measurement: Measurement
    workload: Workload | None
    environment: Environment | None


def t4_target(opened: Callable[[], TextIO]) -> Target | None:
    """Return the target that a file of this tool names; None for files of other tools. Raises `DatabaseError` unless it is T4."""
    with opened() as file:
        metadata = t4_metadata(file)
    fields = metadata.get("relax_tune.target")
    if fields is None or not has_shape(
        fields, {"kind": object, "name": object, "fingerprint": list, "limits": dict, "reference": dict}
    ):
        return None
    pairs = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in fields["fingerprint"])
    limits, reference = (tuple(fields[name].items()) for name in ("limits", "reference"))
    return Target(fields["kind"], fields["name"], pairs, limits, reference)


def t4_metadata(file: TextIO) -> dict[str, Any]:
    """Read a whole file; return its metadata. Raises `DatabaseError` unless it is T4 of schema 1.x with a known time unit."""
    document: dict[str, Any] = {}
    for name, value in iter_document(file, "T4", "results"):
        document[name] = True if name == "results" else value
    if "results" not in document:
        raise DatabaseError("T4: expected an object with a list `results`; give a T4 results file")
    schema = document.get("schema_version", "1.0.0")
    if not isinstance(schema, str) or schema.split(".")[0] != "1":
        raise DatabaseError(f"T4: expected schema version 1.x, got {schema!r:.40}; upgrade the tool")
    metadata = document.get("metadata", {})
    unit = metadata.get("timeunit", "milliseconds") if isinstance(metadata, dict) else None
    if unit not in tuple(_UNITS):
        raise DatabaseError(f"T4: expected a timeunit of {', '.join(_UNITS)}, got {unit!r:.40}; correct the file")
    return {**metadata, "timeunit": unit}


def read_t4(
    opened: Callable[[], TextIO], workload: str | None, target: str, *, trust_checks: bool = False
) -> Iterator[T4Result]:
    """Yield the results of a T4 file.

    T4 does not name target and workload reliably, so the caller gives their keys; results in files of this tool name their workload.
    Times are in `metadata.timeunit`, by default milliseconds as Kernel Tuner writes. A configuration of another tool becomes a `tuned`
    variant of sketch `t4`, with the configuration as trace and its integers as parameters. Ids hash the content, so importing again
    adds nothing.

    Args:
        opened: Opens the file. It is read twice, since its metadata may be at the end.
        workload: Key of the workload of results that name none.
        trust_checks: Believe that outputs were compared with a reference.

    Raises:
        DatabaseError: The file is not T4, a result is malformed (named by its index), or has no workload.
    """
    with opened() as file:
        unit = _UNITS[t4_metadata(file)["timeunit"]]
    with opened() as file:
        results = (item for name, item in iter_document(file, "T4", "results") if name == "results" and item is not END)
        for index, result in enumerate(results):
            try:
                own = _own_workload(result, workload or "")
                if not own:
                    raise DatabaseError("the result names no workload; choose one with --workload KEY")
                yield _t4_result(result, own, target, unit, trust_checks)
            except DatabaseError as error:
                raise DatabaseError(f"T4 result {index}: {error}") from None


def _t4_result(result: Any, workload: str, target: str, unit: float, trust_checks: bool) -> T4Result:
    extra = _extra(result.get("measurements", []))
    measurement = _measurement(result, workload, target, unit, trust_checks)
    described = environment = None
    if has_shape(extra.get("text"), {"text": object, "format_version": object, "hint": object}):
        described = Workload(workload, **{name: extra["text"][name] for name in ("text", "format_version", "hint")})
    if isinstance(extra.get("facts"), list):
        environment = Environment(tuple(tuple(p) if isinstance(p, list) else p for p in extra["facts"]))
    return T4Result(measurement, described, environment)


def _own_workload(result: Any, named: str) -> str:
    if not isinstance(result, Mapping):
        raise DatabaseError("expected an object")
    own = _extra(result.get("measurements", [])).get("workload")
    return own if isinstance(own, str) else named


def _measurement(result: Mapping[str, Any], workload: str, target: str, unit: float, trust_checks: bool) -> Measurement:
    configuration: Any = result.get("configuration")
    times: Any = result.get("times", {})
    if not has_shape((configuration, times), (Mapping, Mapping)):
        raise DatabaseError("expected the objects `configuration` and `times`")
    extra = _extra(result.get("measurements", []))
    symbols = {k.removeprefix("symbol."): v for k, v in configuration.items() if k.startswith("symbol.")}
    values = {k: v for k, v in configuration.items() if not k.startswith("symbol.") and type(v) is int}
    variant = VariantRecord(
        extra.get("kind", "tuned"),
        extra.get("sketch", "t4"),
        extra.get("trace", canonical_json(configuration)),
        canonical_json(values),
    )
    common: dict[str, Any] = {
        "id": extra.get("id", f"t4-{content_key([workload, target, result])}"),
        "workload": workload,
        "target": target,
        "variant": variant,
        "symbols": symbols,
        "regime": extra.get("regime", "warm"),
        "build_secs": _seconds(times.get("compilation_time", times.get("compilation", 0.0)), unit),
        "job": extra.get("job", ""),
        "environment": extra.get("environment", ""),
        "measured_at": _moment(result.get("timestamp")),
    }
    invalidity = result.get("invalidity")
    if invalidity == "correct":
        runtimes = times.get("runtimes")
        if not isinstance(runtimes, list) or not runtimes:
            raise DatabaseError("`runtimes` of a correct result is missing or empty")
        samples = tuple(_seconds(value, unit) for value in runtimes)
        checked = trust_checks and result.get("correctness") == 1
        return Measurement(samples_secs=samples, checked=checked, **common)
    if invalidity not in tuple(_STAGES):
        raise DatabaseError(f"expected an `invalidity` of correct, {', '.join(_STAGES)}, got {invalidity!r:.40}")
    stage = extra.get("stage", _STAGES[invalidity])
    return Measurement(status="failed", stage=stage, message=extra.get("message", f"T4: {invalidity}"), **common)


def _moment(timestamp: Any) -> float:
    """Return the Unix seconds of an ISO timestamp with a time zone; 0 for others."""
    try:
        moment = datetime.fromisoformat(timestamp)
        return max(0.0, moment.timestamp()) if moment.tzinfo is not None else 0.0
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _extra(measurements: Any) -> dict[str, Any]:
    """Return the `relax_tune.*` entries by the rest of their name."""
    if not isinstance(measurements, list):
        raise DatabaseError("expected a list `measurements`")
    extensions = {}
    for entry in measurements:
        if has_shape(entry, {"name": str}) and entry["name"].startswith("relax_tune."):
            extensions[entry["name"].removeprefix("relax_tune.")] = entry.get("value")
    return extensions


def _seconds(value: Any, unit: float) -> float:
    # JSON's integers have any length, and `float` raises OverflowError for long ones.
    if type(value) is not float and (type(value) is not int or abs(value) >= 2**63):
        raise DatabaseError(f"expected a time, got {value!r:.40}")
    return float(value) * unit
