"""Reference kernels: two fixed programs whose times show whether units of one name are equally fast.

`compute` is bound by arithmetic, `stream` by memory bandwidth. A unit's time is the smallest sample, which excludes short
disturbances: only a unit that is permanently slower differs.

Tests: `tests/tuner/measure/cluster/test_fleet.py`.
"""

from __future__ import annotations

from relax_tune.database.reference import TOLERANCE, Reference, disagreement
from relax_tune.errors import MeasureError
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
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.measure.messages import MeasureRequest, TimingPolicy

__all__ = ["TOLERANCE", "Reference", "disagreement", "measure_reference", "reference_program"]

_POLICY = TimingPolicy(min_repeats=10, max_repeats=100, budget_secs=0.3)
# (elements, steps per element), for processors (True) and for devices with a grid (False).
_POINTS = {
    True: {"compute": (1 << 14, 256), "stream": (1 << 22, 1)},
    False: {"compute": (1 << 21, 256), "stream": (1 << 24, 1)},
}


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


def measure_reference(runner: Runner) -> Reference:
    """Time the reference kernels. Raises MeasureError if the device cannot run them."""
    kind = runner.device_info().kind
    points = _POINTS[service_kernels(kind).axes == 0]
    timings = tuple({"n": n, "k": k} for n, k in points.values())
    program = reference_program(kind).to_json()
    (result,) = runner.submit([MeasureRequest("reference", program, (), timings, _POLICY)]).result()
    if not result.ok:
        raise MeasureError(
            f"expected the times of the reference kernels on {runner.device_info().name!r}, but they failed at stage "
            f"{result.stage!r}: {result.message}; run `relax-tune doctor` there"
        )
    return {name: min(timing.samples_secs) for name, timing in zip(points, result.timings, strict=True)}
