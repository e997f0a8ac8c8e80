"""Records as values: frozen dataclasses of text and numbers, validated by their constructors.

Every record is well-formed, whether it comes from a tuning job, a database row or an exchange file: each constructor checks its
fields and raises `DatabaseError` with the field, what was expected and what it got. This module depends neither on SQL (see
`relax_tune.database.models`) nor on the compiler.

Tests: `tests/database/test_opening.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from relax_tune.errors import DatabaseError
from relax_tune.json_shapes import has_shape

VariantKind = Literal["tuned", "library", "generic"]
Status = Literal["ok", "failed"]
Stage = Literal["constraint", "compile", "launch", "runtime", "wrong-result", "timeout", "crash", "device-lost"]
Regime = Literal["warm", "flushed"]
JobState = Literal["queued", "running", "done", "failed", "interrupted"]

VARIANT_KINDS: tuple[VariantKind, ...] = get_args(VariantKind)
STATUSES: tuple[Status, ...] = get_args(Status)
STAGES: tuple[Stage, ...] = get_args(Stage)
REGIMES: tuple[Regime, ...] = get_args(Regime)
JOB_STATES: tuple[JobState, ...] = get_args(JobState)

KEY_LIMIT = 200
"""Longest id, key, name or holder in characters: they are indexed."""
SYMBOLS_LIMIT = 1000
"""Longest canonical text of a point in the symbol space: it is indexed."""
MESSAGE_LIMIT = 16_000
"""A longer failure message keeps its head and its tail."""
TEXT_LIMIT = 2**20
"""Longest text of any record in characters. Without a limit, an altered row could exhaust the memory of its readers."""
SAMPLES_LIMIT = 100_000
VERSION_LIMIT = 2**31 - 1
INT64_MAX = 2**63 - 1


def canonical_json(value: Any) -> str:
    """Return the canonical JSON text of a value: sorted keys, no spaces, non-ASCII as is. Raises `DatabaseError` for NaN and infinity."""
    try:
        return _ENCODER.encode(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise DatabaseError(
            f"expected a value that JSON can represent (text, finite numbers, lists, objects): {error}"
        ) from None


def parse_json(text: str, where: str, limit: int = TEXT_LIMIT) -> Any:
    """Return the value of a JSON text.

    Args:
        where: Name of the text in errors.
        limit: Most characters.

    Raises:
        DatabaseError: The text is longer, is not JSON, contains NaN or infinity, or is nested too deeply.
    """
    if isinstance(text, str) and len(text) > limit:
        raise DatabaseError(f"{where}: expected JSON text of at most {limit} characters, got more")
    try:
        # Python's parser accepts NaN and Infinity, which JSON (RFC 8259) does not have; the decoder refuses them.
        return _DECODER.decode(text)
    except (ValueError, RecursionError, TypeError) as error:
        raise DatabaseError(f"{where}: expected JSON text, got {_shown(text)}: {error}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


# `json.dumps` and `json.loads` with options create an encoder or decoder for each call.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def content_key(value: Any) -> str:
    """Return 32 hex digits: BLAKE2b (16 bytes) of the canonical JSON of `value`. Raises `DatabaseError` when it has none."""
    try:
        data = canonical_json(value).encode()
    except UnicodeEncodeError:
        raise DatabaseError("expected valid Unicode, got a lone surrogate in a text") from None
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested or long beyond what Python prints
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _text(value: Any, where: str, *, limit: int = TEXT_LIMIT, empty: bool = True) -> str:
    """Return `value` if it is text every engine can store: valid Unicode, no NUL, at most `limit` characters."""
    if type(value) is not str:
        raise DatabaseError(f"{where}: expected text, got {_shown(value)}")
    if not value and not empty:
        raise DatabaseError(f"{where}: expected text of 1 to {limit} characters, got none")
    if len(value) > limit:
        raise DatabaseError(f"{where}: expected at most {limit} characters, got more")
    # Nearly all texts are ASCII, which `isascii` tells without encoding them.
    if not value.isascii() or "\0" in value:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise DatabaseError(f"{where}: expected valid Unicode, got a lone surrogate in {_shown(value)}") from None
        if "\0" in value:
            # PostgreSQL stores no NUL in text.
            raise DatabaseError(f"{where}: expected text without NUL characters, got {_shown(value)}")
    return value


def _key(value: Any, where: str) -> str:
    return _text(value, where, limit=KEY_LIMIT, empty=False)


def _choice(value: Any, allowed: Sequence[str], where: str) -> None:
    if type(value) is not str or value not in allowed:
        raise DatabaseError(f"{where}: expected one of {', '.join(allowed)}, got {_shown(value)}")


def _number(value: Any, where: str) -> float:
    """Return a finite number >= 0 as a float."""
    # Not by isinstance, for which True is an int.
    if type(value) is int and value <= INT64_MAX:
        value = float(value)
    if type(value) is not float or not math.isfinite(value) or value < 0:
        raise DatabaseError(f"{where}: expected a finite number >= 0, got {_shown(value)}")
    return value


def _known_number(value: Any, where: str) -> float | None:
    """Return a finite number as a float, or None for an unknown one."""
    if value is None:
        return None
    if (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) <= INT64_MAX):
        return float(value)
    raise DatabaseError(f"{where}: expected a finite number or none, got {_shown(value)}")


def _integer(value: Any, where: str, lower: int = -INT64_MAX - 1) -> int:
    if type(value) is not int or not lower <= value <= INT64_MAX:
        raise DatabaseError(f"{where}: expected an integer of at most 64 bits, at least {lower}, got {_shown(value)}")
    return value


def _integers(value: Any, where: str) -> dict[str, int]:
    """Return a name -> integer mapping with sorted names."""
    if not isinstance(value, Mapping):
        raise DatabaseError(f"{where}: expected names mapped to integers, got {_shown(value)}")
    return {_key(name, where): _integer(value[name], f"{where}[{name!r}]") for name in _sorted_names(value, where)}


def single(secs: float) -> float:
    """Round seconds to a 32-bit float, which halves the size of samples. Seconds that would become infinite or 0 are not rounded."""
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", secs))
    except OverflowError:
        return secs
    return rounded if math.isfinite(rounded) and (rounded > 0 or secs == 0) else secs


def _sorted_names(value: Mapping[Any, Any], where: str) -> list[str]:
    for name in value:
        if type(name) is not str:
            raise DatabaseError(f"{where}: expected text as names, got {_shown(name)}")
    return sorted(value)


def _pairs(value: Any, where: str) -> tuple[tuple[str, str], ...]:
    """Return (key, value) text pairs, sorted; keys must be distinct."""
    if not isinstance(value, (tuple, list)):
        raise DatabaseError(f"{where}: expected (key, value) text pairs, got {_shown(value)}")
    pairs = []
    for pair in value:
        if not has_shape(pair, (object, object)):
            raise DatabaseError(f"{where}: expected (key, value) text pairs, got {_shown(pair)}")
        pairs.append((_key(pair[0], where), _text(pair[1], f"{where}[{pair[0]!r}]")))
    pairs.sort()
    for before, after in zip(pairs, pairs[1:]):
        if before[0] == after[0]:
            raise DatabaseError(f"{where}: expected each key once, got {after[0]!r} twice")
    return tuple(pairs)


def _clean_message(value: Any, where: str) -> str:
    """Return the message of a failure in storable form: a message must not be the reason to lose a record.

    Characters that cannot be stored are replaced, and the middle of a long text is removed.
    """
    if type(value) is not str:
        raise DatabaseError(f"{where}: expected text, got {_shown(value)}")
    text = value.replace("\0", "�").encode("utf-8", "replace").decode("utf-8")
    if len(text) > MESSAGE_LIMIT:
        # Compilers state the first error at the head, drivers the cause at the end.
        half = MESSAGE_LIMIT // 2 - 30
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
    return text


@dataclass(frozen=True, slots=True)
class Target:
    """Device, driver and compiler, identified well enough to reuse a timing.

    Attributes:
        limits: Sizes and counts of the device, such as `workers` and `l2_bytes` (`DeviceInfo.limits`); empty if unknown.
        reference: Seconds of the reference kernels on the units of this target, by name; empty if unknown.
        key: Hash of kind, name and fingerprint.
    """

    kind: str
    name: str
    fingerprint: tuple[tuple[str, str], ...] = ()
    limits: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    reference: tuple[tuple[str, float], ...] = field(default=(), compare=False)
    key: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        _key(self.kind, "target kind")
        _text(self.name, "target name", limit=1000)
        object.__setattr__(self, "fingerprint", _pairs(self.fingerprint, "target fingerprint"))
        object.__setattr__(self, "limits", tuple(_integers(dict(self.limits), "target limits").items()))
        times = {_key(k, "target reference"): _number(v, "target reference") for k, v in dict(self.reference).items()}
        object.__setattr__(self, "reference", tuple(sorted(times.items())))
        # Without limits and reference times: they are measured or read from the driver, and must not change the key.
        object.__setattr__(self, "key", content_key([self.kind, self.name, self.fingerprint]))


@dataclass(frozen=True, slots=True)
class Environment:
    """Versions of libraries and tools during a measurement, as (name, fingerprint) pairs.

    Times of a library call hold only for the same fingerprint. `key` is the hash of the facts.
    """

    facts: tuple[tuple[str, str], ...]
    key: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", _pairs(self.facts, "environment facts"))
        object.__setattr__(self, "key", content_key(["environment", self.facts]))


@dataclass(frozen=True, slots=True)
class Workload:
    """A tensor function as text.

    Attributes:
        key: Hash of the normalised text. The store does not verify it; the parser of `text` does.
        hint: A readable name.
    """

    key: str
    text: str
    format_version: int
    hint: str = ""

    def __post_init__(self) -> None:
        _key(self.key, "workload key")
        _text(self.text, "workload text", empty=False)
        _integer(self.format_version, "workload format_version", 0)
        _text(self.hint, "workload hint", limit=1000)


@dataclass(frozen=True, slots=True)
class VariantRecord:
    """A variant of a workload: a schedule, a library call or the generic kernel.

    Attributes:
        trace: JSON text.
        parameters: JSON text of an object name -> integer; the constructor brings it into canonical form.
        key: Hash of the other fields.
    """

    kind: VariantKind
    sketch: str = ""
    trace: str = "[]"
    parameters: str = "{}"
    key: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        _choice(self.kind, VARIANT_KINDS, "variant kind")
        _text(self.sketch, "variant sketch")
        parse_json(_text(self.trace, "variant trace"), "variant trace")
        values = parse_json(_text(self.parameters, "variant parameters"), "variant parameters")
        object.__setattr__(self, "parameters", canonical_json(_integers(values, "variant parameters")))
        object.__setattr__(self, "key", content_key([self.kind, self.sketch, self.trace, self.parameters]))

    @property
    def values(self) -> dict[str, int]:
        """The parameters, name -> integer."""
        values: dict[str, int] = json.loads(self.parameters)
        return values


@dataclass(frozen=True, slots=True)
class Measurement:
    """The times of a variant at a shape, or a failure.

    Attributes:
        id: Unique name, given by the caller.
        workload, target: Keys.
        symbols: The shape, name -> integer; empty for a failure before a shape was chosen.
        samples_secs: Raw seconds: at least one if ok, none if failed.
        checked: Whether the output was compared with the reference.
        build_secs: Seconds from source to binary.
        job, environment: Keys; empty if unknown.
        measured_at: Unix seconds by the caller's clock; 0 if unknown. Only pruning and exports use it.
        worker, host, unit: Names of the measuring process, its machine and its physical device; empty if unknown.
        clock_mhz, celsius: Clock and temperature of the unit after the batch; None if its driver has no sensor.
        contention: Fraction of the time in which the kernel's threads were ready to run and waited for a processor, because other
            processes had it: 0 on a quiet machine; None if unknown.
    """

    id: str
    workload: str
    target: str
    variant: VariantRecord
    symbols: dict[str, int] = field(default_factory=dict, hash=False)
    status: Status = "ok"
    stage: Stage | None = None
    message: str = ""
    samples_secs: tuple[float, ...] = ()
    regime: Regime = "warm"
    checked: bool = False
    build_secs: float = 0.0
    job: str = ""
    environment: str = ""
    measured_at: float = 0.0
    worker: str = ""
    host: str = ""
    unit: str = ""
    clock_mhz: float | None = None
    celsius: float | None = None
    contention: float | None = None

    def __post_init__(self) -> None:
        where = f"measurement {_shown(self.id)}"
        _key(self.id, "measurement id")
        _key(self.workload, f"{where} workload")
        _key(self.target, f"{where} target")
        if not isinstance(self.variant, VariantRecord):
            raise DatabaseError(f"{where} variant: expected a VariantRecord, got {_shown(self.variant)}")
        object.__setattr__(self, "symbols", _integers(self.symbols, f"{where} symbols"))
        symbols_text(self.symbols)
        _choice(self.status, STATUSES, f"{where} status")
        _choice(self.regime, REGIMES, f"{where} regime")
        if type(self.checked) is not bool:
            raise DatabaseError(f"{where} checked: expected true or false, got {_shown(self.checked)}")
        if not isinstance(self.samples_secs, (tuple, list)):
            raise DatabaseError(f"{where} samples: expected seconds, got {_shown(self.samples_secs)}")
        if len(self.samples_secs) > SAMPLES_LIMIT:
            raise DatabaseError(f"{where} samples: expected at most {SAMPLES_LIMIT}, got {len(self.samples_secs)}")
        samples = tuple(_number(value, f"{where} samples") for value in self.samples_secs)
        object.__setattr__(self, "samples_secs", samples)
        object.__setattr__(self, "build_secs", _number(self.build_secs, f"{where} build_secs"))
        object.__setattr__(self, "measured_at", _number(self.measured_at, f"{where} measured_at"))
        for name in ("job", "environment", "worker", "host", "unit"):
            _text(getattr(self, name), f"{where} {name}", limit=KEY_LIMIT)
        for name in ("clock_mhz", "celsius", "contention"):
            object.__setattr__(self, name, _known_number(getattr(self, name), f"{where} {name}"))
        if self.contention is not None and not 0 <= self.contention <= 1:
            raise DatabaseError(f"{where} contention: expected a number from 0 to 1, got {_shown(self.contention)}")
        if self.status == "ok":
            if not samples:
                raise DatabaseError(f"{where}: expected at least one sample of an ok measurement, got none")
            if self.stage is not None or self.message != "":
                raise DatabaseError(f"{where}: an ok measurement has no stage and no message, got {_shown(self.stage)}")
        else:
            _choice(self.stage, STAGES, f"{where} stage")
            object.__setattr__(self, "message", _clean_message(self.message, f"{where} message"))
            if samples:
                raise DatabaseError(f"{where}: a failed measurement has no samples, got {len(samples)}")
            if not self.message:
                raise DatabaseError(f"{where}: expected the message of a failure at stage {self.stage!r}, got none")

    @property
    def median_secs(self) -> float:
        """Median of the raw samples in seconds. Raises `DatabaseError` for a failure: it has no time."""
        if not self.samples_secs:
            raise DatabaseError(f"measurement {self.id!r} failed at stage {self.stage!r}: it has no time to ask for")
        # The median, since single samples may be much longer when something else runs, and are never much shorter.
        return statistics.median(self.samples_secs)

    @property
    def subject(self) -> tuple[str, str, str, str, str]:
        """The measured thing: workload, target, variant, point, regime. One id never stands for two subjects."""
        return (self.workload, self.target, self.variant.key, symbols_text(self.symbols), self.regime)


@dataclass(frozen=True, slots=True)
class Selection:
    """Conditions of the measurements to prune. A measurement is selected if it meets all given conditions.

    Attributes:
        older_than, since: Unix seconds; a measurement of unknown time is neither older nor later.
        worker: Name of a worker, its host or its unit.
        job: Full name of a job.

    Raises:
        DatabaseError: No condition was given, which would remove everything, or a time is invalid.
    """

    older_than: float | None = None
    since: float | None = None
    failed: bool = False
    worker: str | None = None
    job: str | None = None

    def __post_init__(self) -> None:
        if not self.failed and all(c is None for c in (self.older_than, self.since, self.worker, self.job)):
            raise DatabaseError(
                "prune: expected at least one of older_than, since, failed, worker and job; without one, everything would be removed"
            )
        for name, given in (("older_than", self.older_than), ("since", self.since)):
            if given is not None and not (math.isfinite(given) and given >= 0):
                raise DatabaseError(f"prune {name}: expected Unix seconds >= 0, got {given!r}")

    def takes(self, m: Measurement) -> bool:
        """Return True if a measurement meets every condition."""
        return (
            (not self.failed or m.status == "failed")
            and (self.older_than is None or 0 < m.measured_at < self.older_than)
            and (self.since is None or m.measured_at >= self.since)
            and (self.worker is None or self.worker in (m.worker, m.host, m.unit))
            and (self.job is None or self.job == m.job)
        )


def symbols_text(symbols: Mapping[str, int]) -> str:
    """Return the canonical text of a point, by which the store compares points. Raises `DatabaseError` when it is too long."""
    text = canonical_json(dict(symbols))
    if len(text) > SYMBOLS_LIMIT:
        raise DatabaseError(f"expected symbols of at most {SYMBOLS_LIMIT} characters in all, got {len(text)}")
    return text


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The dispatch of a workload on a target.

    Attributes:
        version: Number of the plan in its origin, from 1.
        entries: JSON text.
        origin: Id of the database that built the plan; empty for the one that stores it.
        turn: Position among the plans of the task that became current in this database, from 1; 0 if it never did.
    """

    workload: str
    target: str
    version: int
    entries: str
    origin: str = ""
    turn: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        _key(self.workload, "plan workload")
        _key(self.target, "plan target")
        _integer(self.version, "plan version", 1)
        if self.version > VERSION_LIMIT:
            raise DatabaseError(f"plan version: expected less than 2**31, got {self.version}")
        parse_json(_text(self.entries, "plan entries"), "plan entries")
        _text(self.origin, "plan origin", limit=KEY_LIMIT)
        _integer(self.turn, "plan turn", 0)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A tuning run. `settings` is JSON text."""

    id: str
    settings: str = "{}"
    state: JobState = "queued"

    def __post_init__(self) -> None:
        _key(self.id, "job id")
        parse_json(_text(self.settings, "job settings"), "job settings")
        _choice(self.state, JOB_STATES, "job state")


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to tune a task.

    Attributes:
        expires_at: Unix seconds of the store's clock.
        trials: Candidates that the holder is measuring.
    """

    workload: str
    target: str
    holder: str
    expires_at: float
    trials: int = 0

    def __post_init__(self) -> None:
        _key(self.workload, "lease workload")
        _key(self.target, "lease target")
        _key(self.holder, "lease holder")
        object.__setattr__(self, "expires_at", _number(self.expires_at, "lease expires_at"))
        _integer(self.trials, "lease trials", 0)


@dataclass(frozen=True, slots=True)
class ShapeHistogram:
    """Counts of the served values of a symbol.

    Attributes:
        task: Key of a model or workload.
        counts: JSON text, value -> count.
    """

    task: str
    symbol: str
    counts: str

    def __post_init__(self) -> None:
        _key(self.task, "histogram task")
        _key(self.symbol, "histogram symbol")
        values = _integers(parse_json(_text(self.counts, "histogram counts"), "histogram counts"), "histogram counts")
        for value, count in values.items():
            digits = value.removeprefix("-")
            if not (digits.isascii() and digits.isdigit() and len(digits) <= 18) or count < 0:
                raise DatabaseError(
                    f"histogram counts: expected integers as text mapped to counts >= 0, got {value!r:.80}: {count!r:.80}"
                )
        object.__setattr__(self, "counts", canonical_json(values))

    @property
    def by_value(self) -> dict[int, int]:
        """Value -> count, sorted by value."""
        counts: dict[str, int] = json.loads(self.counts)
        return dict(sorted((int(value), count) for value, count in counts.items()))
