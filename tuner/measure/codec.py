"""Requests, results and device descriptions as JSON text, schema-checked when read.

A batch of candidates of one task repeats the same expected arrays, so a batch carries each distinct array once: as
base64, or, if both sides share a folder, as a file in it that later batches find again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from relax_tune.errors import MeasureError
from relax_tune.json_shapes import has_shape
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.measure.messages import (
    REGIMES,
    STAGES,
    CheckCase,
    MeasureRequest,
    MeasureResult,
    ShapeTiming,
    TimingPolicy,
    UnitState,
)

T = TypeVar("T")
_SURROGATE = re.compile("[\ud800-\udfff]")


# Smaller arrays are encoded as base64 even with a folder.
FILED_BYTES = 1 << 14


class _ArrayTable:
    """The distinct arrays of one batch; equal contents share an entry.

    Args:
        folder: folder for large arrays; None encodes all of them as base64.
    """

    def __init__(self, folder: Path | None) -> None:
        self.entries: list[dict[str, Any]] = []
        self._folder = folder
        self._by_digest: dict[tuple[str, tuple[int, ...], str], int] = {}
        self._by_identity: dict[int, int] = {}
        self._alive: list[NDArray[Any]] = []

    def add(self, array: NDArray[Any]) -> int:
        # All candidates of a task carry the same array objects, so nearly every call ends here, without a hash of the
        # data.
        known = self._by_identity.get(id(array))
        if known is not None:
            return known
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        digest = hashlib.blake2b(data.data, digest_size=16).hexdigest()
        key = (array.dtype.name, array.shape, digest)
        index = self._by_digest.get(key)
        if index is None:
            index = self._by_digest[key] = len(self.entries)
            entry = {"dtype": array.dtype.name, "shape": list(array.shape)}
            self.entries.append(entry | self._contents(data, digest))
        self._by_identity[id(array)] = index
        self._alive.append(array)  # an id is only valid while its array lives
        return index

    def _contents(self, data: NDArray[np.uint8], digest: str) -> dict[str, str]:
        if self._folder is None or data.nbytes < FILED_BYTES:
            return {"data": base64.b64encode(data.data).decode("ascii")}
        path = self._folder / digest
        if not path.exists():
            # A file under its digest is taken to be whole, also after a process died while writing.
            unfinished = path.with_suffix(".new")
            data.tofile(unfinished)
            unfinished.replace(path)
        return {"file": digest}

    def tidy(self) -> None:
        """Remove the files that no array of this batch uses."""
        if self._folder is not None:
            used = {entry.get("file") for entry in self.entries}
            for path in self._folder.iterdir():
                if path.name not in used:
                    path.unlink()


def _refuse(what: str, expected: str, value: object) -> MeasureError:
    return MeasureError(
        f"expected {expected} as {what} of a measuring message, got {str(value)[:80]!r}; "
        "the two sides must run the same version of relax-tune"
    )


def _field(record: Mapping[str, Any], name: str, check: Callable[[Any], bool], expected: str) -> Any:
    value = record.get(name)
    if not check(value):
        raise _refuse(name, expected, value)
    return value


_is_list = partial(has_shape, shape=list)
_is_object = partial(has_shape, shape=dict)
_is_bool = partial(has_shape, shape=bool)


def _is_text(value: Any) -> bool:
    """Return True for text that a database and a terminal take: JSON can hold halves of characters."""
    return isinstance(value, str) and (value.isascii() or not _SURROGATE.search(value))


def _is_digest(value: Any) -> bool:
    return _is_text(value) and re.fullmatch("[0-9a-f]{32}", value) is not None


def _is_int(value: Any) -> bool:
    # of 64 bits, as databases store them
    return type(value) is int and -(2**63) <= value < 2**63


def _is_count(value: Any) -> bool:
    return _is_int(value) and bool(value >= 0)


def _is_seconds(value: Any) -> bool:
    return _is_finite(value) and bool(value >= 0)


def _is_number(value: Any) -> bool:
    return value is None or _is_finite(value)


def _is_finite(value: Any) -> bool:
    # by comparison: integers of JSON may be too large for a float
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_fraction(value: Any) -> bool:
    return value is None or (_is_number(value) and 0 <= value <= 1)


def _are_objects(value: Any) -> bool:
    return _is_list(value) and all(map(_is_object, value))


def _seconds_tuple(record: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = _field(record, name, lambda v: _is_list(v) and all(map(_is_seconds, v)), "a list of seconds")
    return tuple(float(value) for value in values)


def _symbols(value: Any) -> dict[str, int]:
    if not _is_object(value) or not all(_is_text(k) and _is_int(v) for k, v in value.items()):
        raise _refuse("symbols", "an object of integers", value)
    return dict(value)


def _is_dtype(value: Any) -> bool:
    """Return True for one name, such as `float32` or `<f4`: NumPy would evaluate longer texts."""
    return isinstance(value, str) and re.fullmatch(r"[<>|=]?[A-Za-z]\w{0,31}", value, re.ASCII) is not None


def _decode_array(entry: Any, folder: Path | None) -> NDArray[Any]:
    if not _is_object(entry):
        raise _refuse("array", "an object", entry)
    shape = _field(entry, "shape", lambda v: _is_list(v) and all(map(_is_count, v)), "a list of sizes")
    try:
        dtype = np.dtype(_field(entry, "dtype", _is_dtype, "a dtype name"))
        if folder is not None and "file" in entry:
            name = _field(entry, "file", _is_digest, "the digest of an array")
            data = (folder / name).read_bytes()
        else:
            data = base64.b64decode(_field(entry, "data", _is_text, "base64 text"), validate=True)
    except (TypeError, ValueError, SyntaxError) as error:
        raise _refuse("array", "a numeric dtype and base64 data", error) from error
    if dtype.hasobject or dtype.subdtype or not dtype.itemsize or len(data) != math.prod(shape) * dtype.itemsize:
        raise _refuse("array", f"{math.prod(shape) * dtype.itemsize} bytes of {dtype}", f"{len(data)} bytes")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def _load(text: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refuse("text", "JSON", f"{error}: {text[:40]}") from error
    if not _is_object(record):
        raise _refuse("text", "a JSON object", record)
    return record


def _unique(ids: Sequence[str], what: str) -> None:
    if len(set(ids)) != len(ids):
        raise _refuse(what, "distinct ids", sorted(ids))


def encode_batch(requests: Sequence[MeasureRequest], folder: Path | None = None) -> str:
    """Encode a batch as one JSON text, each distinct expected array once.

    Args:
        folder: folder for large arrays, named by their contents; files of earlier batches that this one does not use are removed.

    Raises:
        OSError: an array cannot be written to the folder.
    """
    table = _ArrayTable(folder)
    records = []
    for request in requests:
        checks = [
            {
                "symbols": case.symbols,
                "seed": case.seed,
                "expected": [table.add(array) for array in case.expected],
                "rtol": case.rtol,
                "atol": case.atol,
                "slack": [None if s is None else table.add(s) for s in case.slack],
            }
            for case in request.checks
        ]
        records.append(
            {
                "id": request.id,
                "program": request.program_json,
                "checks": checks,
                "timings": request.timings,
                "policy": asdict(request.policy),
                "deadline_secs": request.deadline_secs,
                "constant_seed": request.constant_seed,
            }
        )
    table.tidy()
    return json.dumps({"arrays": table.entries, "requests": records}, separators=(",", ":"))


def _decode_policy(record: Mapping[str, Any]) -> TimingPolicy:
    stops = _field(record, "stop_above", _is_list, "a list of seconds or null")
    if not all(stop is None or _is_seconds(stop) for stop in stops):
        raise _refuse("stop_above", "a list of seconds or null", stops)
    return TimingPolicy(
        min_repeats=_field(record, "min_repeats", _is_count, "a count"),
        max_repeats=_field(record, "max_repeats", _is_count, "a count"),
        budget_secs=_field(record, "budget_secs", _is_seconds, "seconds"),
        max_single_secs=_field(record, "max_single_secs", _is_seconds, "seconds"),
        stop_above=tuple(stops),
        regime=_field(record, "regime", lambda v: v in REGIMES, " or ".join(REGIMES)),
    )


def decode_batch(text: str, folder: Path | None = None) -> list[MeasureRequest]:
    """Decode the text of `encode_batch`, with its folder. Raises MeasureError naming the field that does not fit."""
    record = _load(text)
    arrays = [_decode_array(entry, folder) for entry in _field(record, "arrays", _is_list, "a list")]

    # Indices are checked before use: Python would read a negative one as counted from the end.
    def are_indices(value: Any) -> bool:
        return _is_list(value) and all(_is_count(index) and index < len(arrays) for index in value)

    def expected(case: Mapping[str, Any]) -> tuple[NDArray[Any], ...]:
        indices = _field(case, "expected", are_indices, f"a list of indices below {len(arrays)}")
        return tuple(arrays[index] for index in indices)

    def slack(case: Mapping[str, Any]) -> tuple[NDArray[Any] | None, ...]:
        given = _field(case, "slack", _is_list, "a list of indices or null")
        if not are_indices([index for index in given if index is not None]):
            raise _refuse("slack", f"a list of indices below {len(arrays)} or null", given)
        return tuple(None if index is None else arrays[index] for index in given)

    requests = []
    for entry in _field(record, "requests", _are_objects, "a list of objects"):
        checks = tuple(
            CheckCase(
                symbols=_symbols(case.get("symbols")),
                seed=_field(case, "seed", _is_count, "a count"),
                expected=expected(case),
                rtol=_seconds_tuple(case, "rtol"),
                atol=_seconds_tuple(case, "atol"),
                slack=slack(case),
            )
            for case in _field(entry, "checks", _are_objects, "a list of objects")
        )
        requests.append(
            MeasureRequest(
                id=_field(entry, "id", _is_text, "text"),
                program_json=_field(entry, "program", _is_text, "text"),
                checks=checks,
                timings=tuple(_symbols(value) for value in _field(entry, "timings", _is_list, "a list")),
                policy=_decode_policy(_field(entry, "policy", _is_object, "an object")),
                deadline_secs=_field(entry, "deadline_secs", _is_seconds, "seconds"),
                constant_seed=_field(entry, "constant_seed", _is_count, "a count"),
            )
        )
    # Results are assigned by id, so of two requests with one id, one would never be answered.
    _unique([request.id for request in requests], "requests")
    return requests


def encode_results(results: Sequence[MeasureResult]) -> str:
    """Encode results as one JSON text."""
    return json.dumps({"results": [asdict(result) for result in results]}, separators=(",", ":"))


def _decode_timing(record: Any) -> ShapeTiming:
    if not _is_object(record):
        raise _refuse("timings", "a list of objects", record)
    return ShapeTiming(
        symbols=_symbols(record.get("symbols")),
        samples_secs=_seconds_tuple(record, "samples_secs"),
        launches_per_sample=_field(record, "launches_per_sample", lambda v: _is_int(v) and v >= 1, "a positive count"),
        regime=_field(record, "regime", lambda v: v in REGIMES, " or ".join(REGIMES)),
        lost=_field(record, "lost", _is_bool, "true or false"),
        contention=_field(record, "contention", _is_fraction, "a number from 0 to 1 or null"),
    )


def _decode_unit(record: Any) -> UnitState:
    if not _is_object(record):
        raise _refuse("unit", "an object", record)
    names = (_field(record, name, _is_text, "text") for name in ("worker", "host", "unit"))
    numbers = (_field(record, name, _is_number, "a number or null") for name in ("clock_mhz", "celsius"))
    return UnitState(*names, *numbers)


def decode_results(text: str) -> list[MeasureResult]:
    """Decode the text of `encode_results`. Raises MeasureError naming the field that does not fit."""
    results = []
    for record in _field(_load(text), "results", _are_objects, "a list of objects"):
        status = _field(record, "status", lambda v: v in ("ok", "failed"), "'ok' or 'failed'")
        stage = record.get("stage")
        if (status == "ok") != (stage is None) or (stage is not None and stage not in STAGES):
            raise _refuse("stage", f"one of {', '.join(STAGES)} for a failure and none for a success", stage)
        results.append(
            MeasureResult(
                id=_field(record, "id", _is_text, "text"),
                status=status,
                stage=stage,
                message=_field(record, "message", _is_text, "text"),
                timings=tuple(_decode_timing(entry) for entry in _field(record, "timings", _is_list, "a list")),
                checked=_field(record, "checked", _is_bool, "true or false"),
                build_secs=_field(record, "build_secs", _is_seconds, "seconds"),
                run_secs=_field(record, "run_secs", _is_seconds, "seconds"),
                unit=_decode_unit(record.get("unit")),
            )
        )
    _unique([result.id for result in results], "results")
    return results


def decode_device(record: Any) -> DeviceInfo:
    """Decode the JSON form of a `DeviceInfo` and its libraries. Raises MeasureError naming the field that does not fit."""
    if not _is_object(record):
        raise _refuse("device", "an object", record)

    def pairs(name: str, check: Callable[[Any], bool], expected: str) -> tuple[tuple[str, Any], ...]:
        def fits(value: Any) -> bool:
            return _is_list(value) and all(
                _is_list(p) and len(p) == 2 and _is_text(p[0]) and check(p[1]) for p in value
            )

        return tuple(
            (key, value) for key, value in _field(record, name, fits, f"a list of pairs of a name and {expected}")
        )

    return DeviceInfo(
        kind=_field(record, "kind", _is_text, "text"),
        name=_field(record, "name", _is_text, "text"),
        fingerprint=pairs("fingerprint", _is_text, "text"),
        limits=pairs("limits", _is_int, "a whole number"),
        libraries=pairs("libraries", _is_text, "text"),
        unit=_field(record, "unit", _is_text, "text"),
    )
