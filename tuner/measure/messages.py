"""Requests to a runner and its results: plain values with a JSON form (`relax_tune.tuner.measure.codec`).

A failed measurement is a value: `MeasureResult.status == "failed"` with the stage that failed and a message.

Tests: `tests/tuner/measure/test_codec.py`.
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

    Attributes:
        symbols: a value for every symbol of the program.
        seed: seed of the random inputs (`inputs.random_inputs`).
        expected: one array per program output, in order.
        rtol, atol: one number per output; an element passes if `abs(actual - expected) <= atol + rtol * abs(expected) + slack`
            (equal NaNs and infinities pass).
        slack: for each output one number per element, or None for 0; used where rounding is amplified, or an integer is rounded
            from a float next to a tie.
    """

    symbols: Symbols
    seed: int
    expected: tuple[NDArray[Any], ...]
    rtol: tuple[float, ...]
    atol: tuple[float, ...]
    slack: tuple[NDArray[Any] | None, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.expected) == len(self.rtol) == len(self.atol):
            raise MeasureError(
                "expected one rtol and one atol per expected output, got "
                f"{len(self.expected)} outputs, {len(self.rtol)} rtol, {len(self.atol)} atol; give each output its own"
            )
        shapes = [None if s is None else s.shape for s in self.slack]
        expected_shapes = [e.shape for e in self.expected]
        if shapes and (
            len(shapes) != len(expected_shapes) or any(s not in (None, w) for s, w in zip(shapes, expected_shapes))
        ):
            raise MeasureError(
                f"expected a slack of its shape or None for each expected output, {expected_shapes}, got shapes {shapes}"
            )


@dataclass(frozen=True, slots=True)
class TimingPolicy:
    """Limits of timing a shape; all times in seconds.

    Attributes:
        min_repeats, max_repeats: limits of the number of samples, which otherwise is the number that fits `budget_secs`.
        max_single_secs: a shape whose single run takes longer gets two samples only.
        stop_above: empty, or per timing the seconds above which a candidate is no contender, None if unknown. A shape stops, and is
            marked `ShapeTiming.lost`, when its best sample is slower after the second visit, or twice as slow within the first. If it is
            not empty, the candidates of a batch also race each other: one that takes twice the time of the fastest stops, and one
            that is far behind takes `min_repeats` samples.
        regime: `warm` starts each visit with an untimed launch; `flushed` fills the caches with other data before each sample, so
            that a launch reads everything from memory.
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
                f"expected 1 <= min_repeats <= max_repeats in TimingPolicy, got {self.min_repeats} and "
                f"{self.max_repeats}; raise max_repeats or lower min_repeats"
            )


@dataclass(frozen=True, slots=True, eq=False)
class MeasureRequest:
    """One candidate to build, check and time.

    Attributes:
        id: identity of the measurement; an id given twice in a batch is measured once.
        program_json: `Program.to_json()`.
        timings: symbol bindings to time.
        deadline_secs: longest duration of one step (compilation, one check, one visit of the timing rounds) before the device
            process is killed.
        constant_seed: seed of the random constants.
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
                f"expected no stop_above or one per timing in request {self.id!r}, got {stops} for "
                f"{len(self.timings)} timings; use None for a shape without a time to beat"
            )
        if not (math.isfinite(self.deadline_secs) and self.deadline_secs > 0):
            raise MeasureError(
                f"expected a positive, finite deadline_secs in request {self.id!r}, got {self.deadline_secs}; "
                "give the seconds a single step may take"
            )


@dataclass(frozen=True, slots=True)
class ShapeTiming:
    """The raw samples at one symbol binding, in the order they were taken.

    Attributes:
        samples_secs: seconds per launch of the whole variant, synchronisation included, without waiting for processors that other
            processes had.
        launches_per_sample: if above one, each sample is the mean of this number of launches, queued before one synchronisation
            (short kernels on devices with a queue).
        lost: sampling stopped early because another candidate was faster (`TimingPolicy.stop_above`).
        contention: fraction of the time in which threads were ready to run and waited for a processor, mean of the samples; None if
            unknown.
    """

    symbols: Symbols
    samples_secs: tuple[float, ...]
    launches_per_sample: int = 1
    regime: Regime = "warm"
    lost: bool = False
    contention: float | None = None


@dataclass(frozen=True, slots=True)
class UnitState:
    """The physical device of a measurement, and its state after the batch.

    Attributes:
        worker: name of the measuring process.
        host: name of its machine.
        unit: UUID or bus id of a GPU, host of a processor.
        clock_mhz, celsius: None if the driver does not report them.
    """

    worker: str = ""
    host: str = ""
    unit: str = ""
    clock_mhz: float | None = None
    celsius: float | None = None


@dataclass(frozen=True, slots=True)
class MeasureResult:
    """The answer to the request of the same id.

    Attributes:
        status: `ok` if the outputs passed all `checks`; `timings` then has every requested shape in order. `failed` otherwise;
            `stage` and `message` give the reason, and `timings` is empty.
        checked: there was at least one check, and every check passed.
        build_secs, run_secs: wall seconds of building, and of checking plus timing.
        unit: measuring unit; empty in a device process, whose supervisor adds it.
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
        """True if the request was measured. Only such a record, if also `checked`, may be selected."""
        return self.status == "ok"


def failed(
    request_id: str, stage: Stage, message: str, build_secs: float = 0.0, run_secs: float = 0.0
) -> MeasureResult:
    """Return a failed result. Records store the message, so it names the expected and the actual value."""
    return MeasureResult(request_id, "failed", stage, message, build_secs=build_secs, run_secs=run_secs)


def distinct_requests(batch: Sequence[MeasureRequest]) -> list[MeasureRequest]:
    """Return the first request of each id, in order."""
    first: dict[str, MeasureRequest] = {}
    for request in batch:
        first.setdefault(request.id, request)
    return list(first.values())
