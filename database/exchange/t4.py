"""The auto-tuning community's T4 results (JSON, schema 1.x), as Kernel Tuner and KTT write and read them.

T4 has a flat list of (configuration, times, validity). Our other fields (trace, variant kind, point, job, libraries) go into
each result's `measurements` list under `relax_tune.*` names, and the first result of a workload has its text. So our own files
lose only where a record was measured. Output checks count only when the caller trusts the file. Results are read and written one
at a time, whatever their number.
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
_APIS = {"opencl": "OpenCL", "cuda": "CUDA", "webgpu": "WebGPU"}


def t4_parts(
    target: Target,
    measurements: Iterable[Measurement],
    version: str,
    workloads: Callable[[str], Workload | None] = lambda _: None,
    environments: Callable[[str], Environment | None] = lambda _: None,
) -> Iterator[str]:
    """Yield the parts of T4 JSON text of measurements of one target, in seconds. version: of the tool

    A configuration holds the variant's parameters and, as `symbol.NAME`, the point. workloads, environments: look-ups by key, for
    what the first result of each says beside

    Raises:
        DatabaseError: a measurement is of another target.
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
                f"T4: wanted measurements of target {target.key!r}, found {measurement.id!r} of {measurement.target!r}; export "
                "each target on its own"
            )
        result = _result(measurement)
        if measurement.workload not in described:
            described.add(measurement.workload)
            if (workload := workloads(measurement.workload)) is not None:
                told = {"text": workload.text, "format_version": workload.format_version, "hint": workload.hint}
                result["measurements"].append(_entry("text", told))
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
    if 0 < measurement.measured_at < 2**35:
        result["timestamp"] = datetime.fromtimestamp(measurement.measured_at, UTC).isoformat()
    return result


@dataclass(frozen=True, slots=True)
class T4Result:
    """A result of a file. workload, environment: what it says of them beside, where it does"""

    measurement: Measurement
    workload: Workload | None
    environment: Environment | None


def t4_target(opened: Callable[[], TextIO]) -> Target | None:
    """Return the target that a file of ours names; None for others. Raises `DatabaseError` for a file that is not T4."""
    with opened() as file:
        metadata = t4_metadata(file)
    told = metadata.get("relax_tune.target")
    if told is None or not has_shape(
        told, {"kind": object, "name": object, "fingerprint": list, "limits": dict, "reference": dict}
    ):
        return None
    pairs = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in told["fingerprint"])
    limits, reference = (tuple(told[name].items()) for name in ("limits", "reference"))
    return Target(told["kind"], told["name"], pairs, limits, reference)


def t4_metadata(file: TextIO) -> dict[str, Any]:
    """Read a whole file; return its metadata. Raises `DatabaseError` unless it is T4 of schema 1.x with a known time unit."""
    found: dict[str, Any] = {}
    for name, value in iter_document(file, "T4", "results"):
        found[name] = True if name == "results" else value
    if "results" not in found:
        raise DatabaseError("T4: wanted an object with a list `results`, found something else; give a T4 results file")
    schema = found.get("schema_version", "1.0.0")
    if not isinstance(schema, str) or schema.split(".")[0] != "1":
        raise DatabaseError(f"T4: wanted schema version 1.x, found {schema!r:.40}; upgrade the tool")
    metadata = found.get("metadata", {})
    unit = metadata.get("timeunit", "milliseconds") if isinstance(metadata, dict) else None
    if unit not in tuple(_UNITS):
        raise DatabaseError(f"T4: wanted a timeunit of {', '.join(_UNITS)}, found {unit!r:.40}; correct the file")
    return {**metadata, "timeunit": unit}


def read_t4(
    opened: Callable[[], TextIO], workload: str | None, target: str, *, trust_checks: bool = False
) -> Iterator[T4Result]:
    """Yield the results of a T4 file. The caller gives the keys of target and workload, which T4 does not name reliably; results
    in files of ours name their own workload.

    Times are in `metadata.timeunit`, milliseconds where the file does not say (Kernel Tuner's). A configuration becomes
    a `tuned` variant of sketch `t4` whose trace is the configuration and whose parameters are its integers, except in
    files we wrote. Ids hash the content, so importing again is a no-op. Output checks by other tools count only if
    `trust_checks`.

    opened: opens the file, which is read twice: first its metadata, which may stand at its end

    Raises:
        DatabaseError: not T4, a result is malformed (named by its index), or names no workload where none is given.
    """
    with opened() as file:
        unit = _UNITS[t4_metadata(file)["timeunit"]]
    with opened() as file:
        results = (item for name, item in iter_document(file, "T4", "results") if name == "results" and item is not END)
        for index, result in enumerate(results):
            try:
                own = _own_workload(result, workload or "")
                if not own:
                    raise DatabaseError("wanted a workload, found none named; choose it with --workload KEY")
                yield _t4_result(result, own, target, unit, trust_checks)
            except DatabaseError as error:
                raise DatabaseError(f"T4 result {index}: {error}") from None


def _t4_result(result: Any, workload: str, target: str, unit: float, trust_checks: bool) -> T4Result:
    extra = _extra(result.get("measurements", []))
    measurement = _measurement(result, workload, target, unit, trust_checks)
    told = environment = None
    if has_shape(extra.get("text"), {"text": object, "format_version": object, "hint": object}):
        told = Workload(workload, **{name: extra["text"][name] for name in ("text", "format_version", "hint")})
    if isinstance(extra.get("facts"), list):
        environment = Environment(tuple(tuple(p) if isinstance(p, list) else p for p in extra["facts"]))
    return T4Result(measurement, told, environment)


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
            raise DatabaseError("wanted `runtimes` of a correct result, found none")
        samples = tuple(_seconds(value, unit) for value in runtimes)
        checked = trust_checks and result.get("correctness") == 1
        return Measurement(samples_secs=samples, checked=checked, **common)
    if invalidity not in tuple(_STAGES):
        raise DatabaseError(f"wanted an `invalidity` of correct, {', '.join(_STAGES)}, found {invalidity!r:.40}")
    stage = extra.get("stage", _STAGES[invalidity])
    return Measurement(status="failed", stage=stage, message=extra.get("message", f"T4: {invalidity}"), **common)


def _moment(timestamp: Any) -> float:
    """Return the Unix seconds of a moment that names its time zone; 0 for others."""
    try:
        moment = datetime.fromisoformat(timestamp)
        return max(0.0, moment.timestamp()) if moment.tzinfo is not None else 0.0
    except (TypeError, ValueError, OverflowError):
        return 0.0


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
