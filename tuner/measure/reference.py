"""Reference kernels: two fixed programs whose times show whether units of one name are equally fast.

`compute` is bound by arithmetic, `stream` by memory bandwidth. A unit's time is the median over the quietest of several moments, whose
spread is stored with it.

Tests: `tests/tuner/measure/test_reference.py`, `tests/tuner/measure/cluster/test_fleet.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles

from relax_tune.database.reference import SPREAD, TOLERANCE, Reference, disagreement
from relax_tune.errors import MeasureError
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.runtime.device.registry import service_kernels
from relax_tune.runtime.device.service_kernels import AXIS, REFERENCE_GROUP
from relax_tune.runtime.program.program import (
    BufferSpec,
    CallSite,
    CallVariant,
    KernelSource,
    LaunchStep,
    Program,
    Symbol,
)
from relax_tune.runtime.program.scalars import Opcode, ScalarBuilder
from relax_tune.tuner.measure.base import OtherUnit, Runner
from relax_tune.tuner.measure.messages import MeasureRequest, ShapeTiming, TimingPolicy

__all__ = ["TOLERANCE", "Reference", "disagreement", "measure_reference", "measure_until_agreed", "reference_program"]

MOMENTS = 3
"""Moments whose median is the reference time."""
QUIET = 0.1
"""Largest relative spread of the times of quiet moments."""
BUSY = 0.8
"""Contention above which a machine is too busy to begin: no sample is undisturbed, and kernels get less than a fifth of their time."""
PATIENCE_SECS = 2.0
"""Seconds for which a job waits for quiet moments; after them the quietest count."""
_POLICY = TimingPolicy(min_repeats=8, max_repeats=40, budget_secs=0.04)
# (elements, steps per element) by the kind of device.
_LOOPS = {"compute": (1 << 14, 256), "stream": (1 << 22, 1)}
_GRID = {"compute": (1 << 21, 256), "stream": (1 << 24, 1)}
_GRID_ON_PROCESSOR = {"compute-small": (1 << 14, 256), "stream-small": (1 << 22, 1)}
_PAGE = {"compute-page": (1 << 18, 256), "stream-page": (1 << 22, 1)}  # inputs travel over a network
_Moment = Mapping[str, Sequence[float]]
"""Samples by kernel."""


def reference_program(kind: str) -> Program:
    """Return the program for a kind of device. x, y: (n,) f32; k: steps per element"""
    scalars = ScalarBuilder()
    n, k, zero = scalars.symbol(0), scalars.symbol(1), scalars.const(0)
    service = service_kernels(kind)
    above = scalars.op(Opcode.ADD, n, scalars.const(REFERENCE_GROUP - 1))
    groups = scalars.op(Opcode.FLOORDIV, above, scalars.const(REFERENCE_GROUP))
    most = scalars.const(AXIS)
    rows = scalars.op(Opcode.FLOORDIV, scalars.op(Opcode.ADD, groups, scalars.const(AXIS - 1)), most)
    columns = scalars.op(Opcode.MIN, groups, most)
    grid: tuple[int, ...] = ((), (groups,), (columns, rows))[service.axes]
    local = ((), (REFERENCE_GROUP,), (REFERENCE_GROUP, 1))[service.axes]
    step = LaunchStep("kernel", "relax_tune_reference", (0, 1), (n, k), grid, local)
    return Program(
        symbols=(Symbol("n", 1, 1 << 24), Symbol("k", 1, 256)),
        scalars=scalars.code,
        checks=(),
        buffers=(BufferSpec("x", "float32", (n,), "input"), BufferSpec("y", "float32", (n,), "output")),
        storages=(),
        kernels=(KernelSource("relax_tune_reference", kind, service.reference),),
        prepare=(),
        calls=(CallSite("reference", "reference", zero, (CallVariant("generic", (step,)),)),),
        inputs=(0,),
        outputs=(1,),
    )


def measure_reference(runner: Runner, patience_secs: float = PATIENCE_SECS) -> Reference:
    """Time the reference kernels at several moments, until `MOMENTS` of them are quiet.

    Returns:
        The median of the quietest moments, and their spread.

    Raises:
        MeasureError: the device cannot run the kernels.
    """
    give_up = time.monotonic() + patience_secs
    moments: list[_Moment] = []
    while True:
        moments.append(_moment(runner))
        if len(moments) < MOMENTS:
            continue
        # Load from outside adds time, and makes it vary, so the quietest moments are the closest to the speed of the
        # unit. The choice by spread, not by time, does not favour fast results.
        reference = _summary(sorted(moments, key=_unrest)[:MOMENTS])
        if _largest_spread(reference) <= QUIET or time.monotonic() > give_up:
            return reference


def wait_for_quiet(
    runner: Runner, wait_secs: float, notice: Callable[[str], None], pause: Callable[[float], None] = time.sleep
) -> None:
    """Wait while the processors are so busy with other processes that no sample of a reference kernel is undisturbed.

    Args:
        wait_secs: Longest wait; then measuring begins all the same.
        notice: Receives a sentence before the wait, and one when it was in vain.

    Raises:
        MeasureError: the device cannot run the kernels.
    """
    give_up, noticed = time.monotonic() + wait_secs, False
    while (contention := _contention(runner)) > BUSY:
        if time.monotonic() > give_up:
            notice("this machine is still busy: times leave out what kernels waited, and records name it")
            return
        if not noticed:
            noticed = True
            notice(
                f"other processes keep this machine busy: kernels wait for a processor {contention:.0%} of their time; "
                f"waiting up to {wait_secs:g} s for a quiet moment"
            )
        pause(1.0)


def measure_until_agreed(runner: Runner, expected: Reference, patience_secs: float = PATIENCE_SECS) -> None:
    """Time the reference kernels until a moment agrees with the expected times.

    Raises:
        OtherUnit: no moment agrees.
        MeasureError: the device cannot run the kernels.
    """
    give_up = time.monotonic() + patience_secs
    while why := disagreement(expected, _summary([_moment(runner)])):
        if time.monotonic() > give_up:
            raise OtherUnit(
                f"expected a unit of {runner.device_info().name!r} as fast as in the records, got another or a busy one: {why}; "
                "measure on a quiet machine, tune into another database, or renew the stored times "
                "(`relax-tune db reference --renew`)"
            )


def _points(info: DeviceInfo) -> Mapping[str, tuple[int, int]]:
    if service_kernels(info.kind).axes == 0:
        return _LOOPS
    if ("platform", "browser") in info.fingerprint:
        return _PAGE
    return _GRID_ON_PROCESSOR if info.unit.startswith("cpu:") else _GRID


def _moment(runner: Runner) -> _Moment:
    return {name: timing.samples_secs for name, timing in _timings(runner).items()}


def _contention(runner: Runner) -> float:
    """Return the largest contention of a reference kernel at this moment; 0 if it is unknown."""
    return max(timing.contention or 0.0 for timing in _timings(runner).values())


def _timings(runner: Runner) -> Mapping[str, ShapeTiming]:
    info = runner.device_info()
    points = _points(info)
    timings = tuple({"n": n, "k": k} for n, k in points.values())
    program = reference_program(info.kind).to_json()
    (result,) = runner.submit([MeasureRequest("reference", program, (), timings, _POLICY)]).result()
    if not result.ok:
        raise MeasureError(
            f"expected the times of the reference kernels on {info.name!r}, but they failed at stage "
            f"{result.stage!r}: {result.message}; run `relax-tune doctor` there"
        )
    return dict(zip(points, result.timings, strict=True))


def _summary(moments: Sequence[_Moment]) -> Reference:
    """Return the medians over moments, and their spreads: the range of all quartiles relative to the median."""
    reference: dict[str, float] = {}
    for name in moments[0]:
        middle = median(median(m[name]) for m in moments)
        quartiles = [_quartiles(m[name]) for m in moments]
        spread = (max(high for _, high in quartiles) - min(low for low, _ in quartiles)) / middle
        reference |= {name: middle, name + SPREAD: spread}
    return reference


def _quartiles(samples: Sequence[float]) -> tuple[float, float]:
    if len(samples) < 2:
        return samples[0], samples[0]
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return low, high


def _unrest(moment: _Moment) -> float:
    return _largest_spread(_summary([moment]))


def _largest_spread(reference: Reference) -> float:
    return max(value for name, value in reference.items() if name.endswith(SPREAD))
