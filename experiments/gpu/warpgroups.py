"""The part of `suite.py` that checks products by warpgroups (`wgmma`) on a GPU, and times them.

First the rule's guesses multiply matrices of sizes that no tile divides, and each result is compared with the reference. Those that agree
are then timed at large sizes, together with guesses of `mma.data_parallel` and with cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

import relax_tune as rt
from experiments.gpu.context import Context, OutOfTimeError, Row, absent
from experiments.gpu.models import TYPES
from experiments.gpu.timing import seconds
from relax_tune.errors import BuildError, RelaxTuneError
from relax_tune.ir.codegen.generate import CodeTarget
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.passes.pipeline import lower
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.cuda import CUDADevice
from relax_tune.runtime.device.cuda_compiler import CUDACompiler
from relax_tune.runtime.executor import Executor
from relax_tune.runtime.library.cublas import CuBlas
from relax_tune.schedules.sketch import GPU_RULES, Sketch, generate_sketches, instantiate
from relax_tune.schedules.target import HardwareInfo
from relax_tune.tuner.measure.device_process.inputs import random_inputs
from relax_tune.tuner.program.program_builder import KernelStage, candidate_program
from relax_tune.tuner.task.reference import evaluate, tolerances

Array = NDArray[Any]
HOPPER = 9
# (k, n, values of m) where results are checked, and where kernels are timed; emulations are asked for less.
CHECKED = ((200, 72, (1, 67, 200)),)
TIMED = ((4096, 4096, (512, 4096)),)
TINY = ((64, 32, (5,)),)
# Types, and whether the matrix is turned.
FORMS = (("bf16", False), ("bf16", True), ("f16", False), ("f16", True))
# Guesses that are tried, and of these that are timed: one of each tile is enough.
TRIED, RACED = 6, 3


def opened(target: str) -> Device:
    """Return the device of a target whose kernels may use instructions of its generation only."""
    return CUDADevice(
        int(target.partition(":")[2] or 0), compiler=lambda architecture: CUDACompiler(f"{architecture}a")
    )


def product_of(kind: str, k: int, n: int, turned: bool) -> PrimFunc:
    """x (m, k) times w, (k, n) or turned (n, k), all of a type of 16 bits."""
    g = rt.GraphBuilder()
    x = g.input("x", (g.symbol("m"), k), TYPES[kind])
    w = g.input("w", (n, k) if turned else (k, n), TYPES[kind])
    (func,) = lower(g.finish(g.call(Matmul(turned), x, w))).prims.values()
    return func


def candidates(device: Device, func: PrimFunc, rule: str, tiny: bool) -> Iterator[tuple[str, Callable[[], Executor]]]:
    """Return the first guesses of a rule's first sketch for a function, as text, with the parameters of each. tiny: only the last."""
    machine = replace(HardwareInfo.from_limits(device.info.kind, dict(device.info.limits)), has_wgmma=True)
    target, names = CodeTarget("cuda", machine.lanes), {v: v.name for v in func.symbols}
    for sketch in generate_sketches(func, machine, {rule: GPU_RULES[rule]})[:1]:
        for values in sketch.guesses[-1:] if tiny else sketch.guesses[:TRIED]:

            def program(sketch: Sketch = sketch, values: Mapping[str, int] = values) -> Executor:
                stage = KernelStage(instantiate(sketch, values))
                return Executor(candidate_program(func, sketch.name, [stage], target, names), device, {}, {})

            yield ", ".join(f"{k} {v}" for k, v in values.items()), program


def difference(func: PrimFunc, m: int, found: Array, wanted: Array) -> str:
    """Return how a result for m rows differs from the expected one; empty if it agrees."""
    exact = wanted.astype(np.float64)
    ((rtol, atol),) = tolerances(func, {v: m for v in func.symbols}, (exact,))
    if np.allclose(found.astype(np.float64), exact, rtol, atol):
        return ""
    return f"wrong: m = {m}: off by {np.max(np.abs(found.astype(np.float64) - exact)):.3g}"


def checked(device: Device, func: PrimFunc, rows: Sequence[int], tiny: bool) -> Iterator[tuple[str, str]]:
    """Return each guess of the rule, with the difference of its result."""
    for text, program in candidates(device, func, "gpu_wgmma", tiny):
        problem = ""
        try:
            executor = program()
            for m in rows:
                arrays = random_inputs(executor.program, {"m": m}, m)
                (wanted,) = evaluate(func, arrays, {v: m for v in func.symbols})
                problem = problem or difference(func, m, executor.run(arrays)[0], wanted)
            executor.close()
        except RelaxTuneError as error:
            problem = f"wrong: {' '.join(str(error).split())[:200]}"
        yield text, problem


def timed(
    device: Device, func: PrimFunc, rule: str, m: int, but: Collection[str], tiny: bool
) -> tuple[float, str, Array] | None:
    """Seconds of the fastest of the first guesses but some, which it is, and its result; None where there is none."""
    found = []
    for text, program in islice((x for x in candidates(device, func, rule, tiny) if x[0] not in but), RACED):
        executor = program()
        result = executor.run(random_inputs(executor.program, {"m": m}, 0))[0]
        found.append((median(seconds(device, [executor.bind({"m": m}).launches])), text, result))
        executor.close()
    return min(found, key=lambda x: x[0]) if found else None


def of_library(device: Device, kind: str, sizes: tuple[int, int, int], turned: bool) -> float | None:
    """Seconds of cuBLAS, where there is one."""
    try:
        blas = CuBlas()
    except BuildError:
        return None
    m, n, k = sizes
    buffers = [device.alloc(2 * size) for size in (m * k, k * n, m * n)]
    for buffer, size in zip(buffers, (m * k, k * n)):
        device.upload(buffer, np.random.default_rng(0).standard_normal(size, np.float32).astype(TYPES[kind].numpy))
    run = blas.bind(f"cublas.gemm_{kind}", device, buffers, [m, n, k, 0, int(turned), k, k if turned else n, n])
    found = median(seconds(device, [[run]]))
    for buffer in buffers:
        device.free(buffer)
    return found


def warpgroups(context: Context) -> Iterator[Row]:
    """Yield which guesses are right, then their times."""
    device = opened(context.target)
    if dict(device.info.limits).get("compute_major") != HOPPER:
        yield absent("warpgroups", f"a GPU of compute capability 9.0; {device.info.name} has another")
        return
    forms = FORMS[-1:] if context.tiny else FORMS
    bad: dict[tuple[str, bool], set[str]] = {form: set() for form in forms}
    for form in forms:
        for k, n, rows in TINY if context.tiny else CHECKED:
            for text, problem in checked(device, product_of(form[0], k, n, form[1]), rows, context.tiny):
                if context.left() < 0:
                    raise OutOfTimeError
                yield {"key": f"{_named(*form)} {k} x {n}, {text}", "result": problem or "verified"}
                bad[form] |= {text} if problem else set()
    for form in forms[:2]:
        for k, n, rows in TINY if context.tiny else TIMED:
            func = product_of(form[0], k, n, form[1])
            for m in rows:
                key = f"{_named(*form)} {k} x {n}, M = {m}"
                if context.left() < 0:
                    raise OutOfTimeError
                ours = timed(device, func, "gpu_wgmma", m, bad[form], context.tiny) if context.new([key]) else None
                tiles = timed(device, func, "gpu_mma", m, (), context.tiny) if ours is not None else None
                if ours is None or tiles is None:
                    continue
                library = of_library(device, form[0], (m, n, k), form[1])
                yield {
                    "key": key, "result": difference(func, m, ours[2], tiles[2]) or "as mma.data_parallel", "us": ours[0] * 1e6,
                    "mma.data_parallel, us": tiles[0] * 1e6, "cuBLAS, us": library and library * 1e6,
                    "TFLOP/s": 2 * m * n * k / ours[0] / 1e12, "it runs": ours[1], "mma.data_parallel runs": tiles[1],
                }  # fmt: skip
    device.close()


def _named(kind: str, turned: bool) -> str:
    return f"{kind} {'nt' if turned else 'nn'}"
