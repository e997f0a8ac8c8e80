"""Reference kernels: two fixed programs whose times tell whether units of one name are equally fast.

`compute` is bound by arithmetic, `stream` by memory. A unit's time is the smallest sample, so that short disturbances
do not count; a unit that stays slower, or becomes so, is found.
"""

from __future__ import annotations

from collections.abc import Mapping

from relax_tune.errors import MeasureError
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

TOLERANCE = 1.25
"""Factor by which reference times of one target may differ."""
_POLICY = TimingPolicy(min_repeats=10, max_repeats=100, budget_secs=0.3)
# Elements and steps per element: for processors, and for devices with a grid.
_POINTS = {
    True: {"compute": (1 << 14, 256), "stream": (1 << 22, 1)},
    False: {"compute": (1 << 21, 256), "stream": (1 << 24, 1)},
}
_GROUP = 256
_BODY = "float a = x[i]; for (long long j = 0; j < k; ++j) a = a * 0.999f + 0.001f; y[i] = a;"
_WGSL_BODY = "var a = x[i]; for (var j = 0; j < s.k; j++) { a = a * 0.999f + 0.001f; } y[i] = a;"
_AXIS = 65535
_TEXTS = {
    "c": "#include <stdint.h>\nvoid relax_tune_reference(const float *restrict x, float *restrict y, int64_t n, int64_t k)"
    " {{\n  #pragma omp parallel for\n  for (int64_t i = 0; i < n; ++i) {{ {} }}\n}}\n",
    "opencl": "kernel void relax_tune_reference(global const float *restrict x, global float *restrict y, long n, long k)"
    " {{\n  long i = get_global_id(0);\n  if (i < n) {{ {} }}\n}}\n",
    "cuda": 'extern "C" __global__ void relax_tune_reference(const float* __restrict__ x, float* __restrict__ y, '
    "long long n, long long k) {{\n  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;\n"
    "  if (i < n) {{ {} }}\n}}\n",
    "webgpu": "@group(0) @binding(0) var<storage, read> x: array<f32>;\n"
    "@group(0) @binding(1) var<storage, read_write> y: array<f32>;\nstruct Scalars {{ n: i32, k: i32 }}\n"
    "@group(0) @binding(2) var<uniform> s: Scalars;\n@compute @workgroup_size(256)\n"
    "fn relax_tune_reference(@builtin(global_invocation_id) at: vec3<u32>) {{\n  let i = i32(at.x) + i32(at.y) * 65535 * 256;\n"
    "  if (i < s.n) {{ {} }}\n}}\n",
}

Reference = Mapping[str, float]
"""Seconds by name of the reference kernel."""


def reference_program(kind: str) -> Program:
    """Return the program for a kind of device. x, y: (n,) f32; k: steps per element"""
    scalars = ScalarBuilder()
    n, k, zero = scalars.symbol(0), scalars.symbol(1), scalars.const(0)
    above = scalars.op(Opcode.ADD, n, scalars.const(_GROUP - 1))
    groups = scalars.op(Opcode.FLOORDIV, above, scalars.const(_GROUP))
    body = {"opencl": _BODY.replace("long long", "long"), "webgpu": _WGSL_BODY}.get(kind, _BODY)
    most = scalars.const(_AXIS)
    rows = scalars.op(Opcode.FLOORDIV, scalars.op(Opcode.ADD, groups, scalars.const(_AXIS - 1)), most)
    launches = {"c": ((), ()), "webgpu": ((scalars.op(Opcode.MIN, groups, most), rows), (_GROUP, 1))}
    grid, local = launches.get(kind, ((groups,), (_GROUP,)))
    step = LaunchStep("kernel", "relax_tune_reference", (0, 1), (n, k), grid, local)
    return Program(
        symbols=(Symbol("n", 1, 1 << 24), Symbol("k", 1, 256)),
        scalars=scalars.code,
        checks=(),
        buffers=(BufferSpec("x", "float32", (n,), "input"), BufferSpec("y", "float32", (n,), "output")),
        storages=(),
        kernels=(KernelSource("relax_tune_reference", kind, _TEXTS[kind].format(body)),),
        prepare=(),
        calls=(CallSite("reference", "reference", zero, (CallVariant("generic", (step,)),)),),
        inputs=(0,),
        outputs=(1,),
    )


def measure_reference(runner: Runner) -> Reference:
    """Time the reference kernels. Raises MeasureError when the device cannot run them."""
    kind = runner.device_info().kind
    points = _POINTS[kind == "c"]
    timings = tuple({"n": n, "k": k} for n, k in points.values())
    program = reference_program(kind).to_json()
    (result,) = runner.submit([MeasureRequest("reference", program, (), timings, _POLICY)]).result()
    if not result.ok:
        raise MeasureError(
            f"wanted the times of the reference kernels on {runner.device_info().name!r}, found that they failed at stage "
            f"{result.stage!r}: {result.message}; run `relax-tune doctor` there"
        )
    return {name: min(timing.samples_secs) for name, timing in zip(points, result.timings, strict=True)}


def disagreement(wanted: Reference, found: Reference, tolerance: float) -> str:
    """Say which reference times differ by more than the factor `tolerance`; empty if none does."""
    lines = [
        f"reference kernel {name}: wanted {wanted[name] * 1e3:.3f} ms within a factor of {tolerance:g}, "
        f"found {found[name] * 1e3:.3f} ms"
        for name in sorted(wanted.keys() & found.keys())
        if max(wanted[name], found[name]) > tolerance * min(wanted[name], found[name])
    ]
    return "; ".join(lines)
