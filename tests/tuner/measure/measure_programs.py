"""Small programs written by hand, good and bad in every way a candidate can be, in C, OpenCL and WGSL."""

from __future__ import annotations

import numpy as np

from relax_tune.runtime.program.program import (
    BufferSpec,
    CallSite,
    CallVariant,
    Fill,
    KernelSource,
    LaunchStep,
    Program,
    Symbol,
)
from relax_tune.runtime.program.scalars import Opcode, ScalarBuilder
from relax_tune.tuner.measure.device_process.inputs import random_constants, random_inputs
from relax_tune.tuner.measure.messages import CheckCase, MeasureRequest, TimingPolicy

POLICY = TimingPolicy(min_repeats=3, max_repeats=6, budget_secs=0.002)
LIMIT_SECS = 120.0

# What the loop over `i` does for one element of y = x * w[i % 4] + x0, where x0 goes through the temporary t.
GOOD = "t[i] = x[0]; y[i] = x[i] * w[i % 4] + t[i];"
BODIES = {
    "good": GOOD,
    "also-good": "t[i] = w[i % 4]; y[i] = x[i] * t[i] + x[0];",
    "hang": "volatile int go = 1; while (go) { } " + GOOD,
    "crash": "*(volatile SPACE int *)(n - n) = 1; " + GOOD,
    "wrong": "t[i] = x[0]; y[i] = x[i] * w[i % 4] - t[i];",
    "syntax": "y[i] = this is not a program;",
    "silent": "t[i] = x[0];",
    "stale": "y[i] = x[i] * w[i % 4] + t[i];",
    "greedy": "for (int m = 0; m < 64 && !i; m++) { void *volatile p = __builtin_malloc(1ul << 30); if (!p) __builtin_abort(); } "
    + GOOD,
    "forking": "extern int fork(void), setsid(void), pause(void); for (int c = 0; c < 20; c++) if (!fork()) "
    "{ if (c % 2) setsid(); for (;;) pause(); } for (;;) pause(); " + GOOD,
    "overrun": GOOD + " if (i == n - 1) y[n] = 1.0f;",
}

WGSL_BODIES = {
    "hang": "while (x[0] != 12345.0) { y[i] = y[i] + 1.0; } " + GOOD,
    "overrun": GOOD + " if (i == n - 1) { y[n] = 1.0; }",
}
WGSL = """@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> w: array<f32>;
@group(0) @binding(2) var<storage, read_write> t: array<f32>;
@group(0) @binding(3) var<storage, read_write> y: array<f32>;
struct Scalars { n: i32 }
@group(0) @binding(4) var<uniform> s: Scalars;
@compute @workgroup_size(64)
fn NAME(@builtin(global_invocation_id) at: vec3<u32>) {
  let n = s.n;
  let i = i32(at.x);
  if (i < n) { BODY }
}
"""


def kernel(name: str, body: str, language: str) -> KernelSource:
    pointers = [("const ", "x"), ("const ", "w"), ("", "t"), ("", "y")]
    if language == "c":
        arguments = ", ".join(f"{const}float *restrict {pointer}" for const, pointer in pointers)
        loop = f"  for (int64_t i = 0; i < n; i++) {{ {body} }}\n".replace("SPACE", "")
        return KernelSource(name, "c", f"#include <stdint.h>\nvoid {name}({arguments}, int64_t n) {{\n{loop}}}\n")
    if language == "webgpu":
        kind = next((kind for kind in WGSL_BODIES if BODIES[kind] == body), "")
        return KernelSource(name, "webgpu", WGSL.replace("NAME", name).replace("BODY", WGSL_BODIES.get(kind, body)), ())
    arguments = ", ".join(f"global {const}float *restrict {pointer}" for const, pointer in pointers)
    text = f"kernel void {name}({arguments}, long n) {{\n  long i = get_global_id(0);\n  if (i < n) {{ {body} }}\n}}\n"
    return KernelSource(name, "opencl", text.replace("SPACE", "global"))


def program(kind: str, language: str, name: str | None = None) -> Program:
    """x: (n,) f32, w: (4,) f32 constant, y: (n,) f32, t: (n,) f32 temporary; 1 <= n <= 5000."""
    scalars = ScalarBuilder()
    n, zero, four = scalars.symbol(0), scalars.const(0), scalars.const(4)
    groups = scalars.op(Opcode.FLOORDIV, scalars.op(Opcode.ADD, n, scalars.const(63)), scalars.const(64))
    nbytes = scalars.op(Opcode.MUL, n, four)
    entry = (name or f"kernel_{kind}").replace("-", "_")
    grid = () if language == "c" else (groups,)
    local = () if language == "c" else (64,)
    if kind == "no-library":
        steps = (LaunchStep("library", "nolib.routine", (0, 3), (n,)),)
        kernels: tuple[KernelSource, ...] = ()
    else:
        steps = (LaunchStep("kernel", entry, (0, 1, 2, 3), (n,), grid, local),)
        kernels = (kernel(entry, BODIES[kind], language),)
    return Program(
        symbols=(Symbol("n", 1, 5000),),
        scalars=scalars.code,
        checks=(),
        buffers=(
            BufferSpec("x", "float32", (n,), "input"),
            BufferSpec("w", "float32", (four,), "const", fill=Fill("normal", high=2.0)),
            BufferSpec("t", "float32", (n,), "temp", storage=0),
            BufferSpec("y", "float32", (n,), "output"),
        ),
        storages=(nbytes,),
        kernels=kernels,
        prepare=(),
        calls=(CallSite("call", "task", zero, (CallVariant("tuned", steps),)),),
        inputs=(0,),
        outputs=(3,),
    )


def check(subject: Program, n: int, seed: int) -> CheckCase:
    (x,) = random_inputs(subject, {"n": n}, seed)
    w = random_constants(subject)["w"]
    wanted = (x.astype(np.float64) * w[np.arange(n) % 4] + x[0]).astype(np.float32)
    return CheckCase({"n": n}, seed, (wanted,), (1e-5,), (1e-5,))


def request(kind: str, language: str, *, id: str | None = None, deadline_secs: float = 60.0) -> MeasureRequest:
    subject = program(kind, language)
    return MeasureRequest(
        id=id or kind,
        program_json=subject.to_json(),
        checks=(check(subject, 4096, 1), check(subject, 37, 2)),
        timings=({"n": 1}, {"n": 1000}, {"n": 5000}),
        policy=POLICY,
        deadline_secs=deadline_secs,
    )
