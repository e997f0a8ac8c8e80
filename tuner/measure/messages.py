"""Requests to a runner and its answers: plain, JSON-able values (see `relax_tune.tuner.measure.codec`).

A failed measurement is a value: `MeasureResult.status == "failed"` with the stage that failed and a message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from numpy.typing import NDArray

from relax_tune.errors import MeasureError

Stage = Literal["constraint", "compile", "launch", "runtime", "wrong-result", "timeout", "crash", "device-lost"]
Regime = Literal["warm", "flushed"]
STAGES: tuple[str, ...] = get_args(Stage)
REGIMES: tuple[str, ...] = get_args(Regime)

Symbols = dict[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class CheckCase:
    """One shape at which the outputs are compared with a reference before anything is timed.

    symbols: a value for every symbol of the program. seed: names the random inputs (`inputs.random_inputs`).
    expected: one array per program output, in order. rtol, atol: one number per output; an element passes when
    `abs(found - wanted) <= atol + rtol * abs(wanted)` (equal NaNs and infinities pass).
    """

    symbols: Symbols
    seed: int
    expected: tuple[NDArray[Any], ...]
    rtol: tuple[float, ...]
    atol: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.expected) == len(self.rtol) == len(self.atol):
            raise MeasureError(
                "wanted one rtol and one atol per expected output, found "
                f"{len(self.expected)} outputs, {len(self.rtol)} rtol, {len(self.atol)} atol; give each output its own"
            )


@dataclass(frozen=True, slots=True)
class TimingPolicy:
    """Limits of timing a shape; all times in seconds.

    The number of samples is the number that fits `budget_secs`, within [min_repeats, max_repeats]. A shape whose single run is
    longer than `max_single_secs` gets two samples only. `stop_above` (empty, or one entry per timing) holds times that no
    contender is slower than. A shape stops, and is marked `ShapeTiming.lost`, when its best sample is slower after the second
    visit or twice as slow within the first. regime `warm`: each visit starts with an untimed launch. `flushed`: before each
    sample the caches are filled with other data, so that a launch reads everything from memory.
    """

    min_repeats: int = 5
    max_repeats: int = 50
    budget_secs: float = 0.05
    max_single_secs: float = 0.5
    stop_above: tuple[float | None, ...] = ()
    regime: Regime = "warm"

    def __post_init__(self) -> None:
        if not 1 <= self.min_repeats <= self.max_repeats:
            raise MeasureError(
                f"wanted 1 <= min_repeats <= max_repeats in TimingPolicy, found {self.min_repeats} and "
                f"{self.max_repeats}; raise max_repeats or lower min_repeats"
            )


@dataclass(frozen=True, slots=True, eq=False)
class MeasureRequest:
    """One candidate to build, check and time.

    id: the measurement's identity; asking twice with one id is harmless. program_json: `Program.to_json()`.
    timings: the symbol bindings to time. deadline_secs: the longest any single step of it may take (compiling, one
    check, one visit of the timing rounds) before the device process is killed. constant_seed: names the random
    constants.
    """

    id: str
    program_json: str
    checks: tuple[CheckCase, ...]
    timings: tuple[Symbols, ...]
    policy: TimingPolicy = field(default_factory=TimingPolicy)
    deadline_secs: float = 30.0
    constant_seed: int = 0

    def __post_init__(self) -> None:
        stops = len(self.policy.stop_above)
        if stops not in (0, len(self.timings)):
            raise MeasureError(
                f"wanted no stop_above or one per timing in request {self.id!r}, found {stops} for "
                f"{len(self.timings)} timings; use None for a shape without a contender"
            )
        if not (math.isfinite(self.deadline_secs) and self.deadline_secs > 0):
            raise MeasureError(
                f"wanted a positive, finite deadline_secs in request {self.id!r}, found {self.deadline_secs}; "
                "give the seconds a single step may take"
            )


@dataclass(frozen=True, slots=True)
class ShapeTiming:
    """The raw samples at one symbol binding, in the order they were taken.

    samples_secs: wall seconds per launch of the whole variant, synchronisation included. launches_per_sample: when
    above one, each sample is the mean of that many launches queued before one synchronisation (short kernels on devices
    with a queue). lost: sampling stopped early because a contender was faster (`TimingPolicy.stop_above`).
    """

    symbols: Symbols
    samples_secs: tuple[float, ...]
    launches_per_sample: int = 1
    regime: Regime = "warm"
    lost: bool = False


@dataclass(frozen=True, slots=True)
class UnitState:
    """The physical device of a measurement, and its state after the batch.

    worker: name of the measuring process. host: name of its machine. unit: UUID or bus id of a GPU, host of a processor.
    clock_mhz, celsius: None if the driver does not say.
    """

    worker: str = ""
    host: str = ""
    unit: str = ""
    clock_mhz: float | None = None
    celsius: float | None = None


@dataclass(frozen=True, slots=True)
class MeasureResult:
    """The answer to the request of the same id.

    status `ok`: outputs were right at all `checks`, `timings` has every requested shape in order. status `failed`:
    `stage` and `message` say where and why; timings are empty. checked: every check was run and
    passed, and there was at least one. build_secs, run_secs: wall seconds spent building, and checking plus timing.
    unit: the measuring unit, empty in a device process, whose supervisor knows it.
    """

    id: str
    status: Literal["ok", "failed"]
    stage: Stage | None = None
    message: str = ""
    timings: tuple[ShapeTiming, ...] = ()
    checked: bool = False
    build_secs: float = 0.0
    run_secs: float = 0.0
    unit: UnitState = UnitState()

    @property
    def ok(self) -> bool:
        """True if it was measured. Its record may win only then, and only when `checked`."""
        return self.status == "ok"


def failed(
    request_id: str, stage: Stage, message: str, build_secs: float = 0.0, run_secs: float = 0.0
) -> MeasureResult:
    """Make a failed result. A record keeps the message, so it must say what was wanted and what was found."""
    return MeasureResult(request_id, "failed", stage, message, build_secs=build_secs, run_secs=run_secs)


def distinct_requests(batch: Sequence[MeasureRequest]) -> list[MeasureRequest]:
    """Return the first request of each id, in order."""
    first: dict[str, MeasureRequest] = {}
    for request in batch:
        first.setdefault(request.id, request)
    return list(first.values())
