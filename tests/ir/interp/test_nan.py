"""NaN and equal elements mean what they mean in PyTorch: fused or not, at known sizes or symbolic ones, in every language and schedule.

Maxima and minima of anything with a NaN are NaN, its place is the place of the extreme, and it ranks above every number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cuda_emulation.driver import emulated
from tests.ir.codegen.codegen_runner import Compiled, kernels_of
from tests.support.built_modules import UNFUSED, executed, job_of
from tests.support.candidates import CASES, MACHINES, arguments, function, problems, sampled, sketches_of
from tests.support.effort import some, thinned
from tests.support.programs import agree
from tests.support.tuner_models import DEVICES, opened

from relax_tune.errors import BuildError
from relax_tune.ir.core.dtype import DType, bf16, f16, f32, i32
from relax_tune.ir.core.expr import Var, as_int, const, maximum, minimum
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.indexing.gather import GatherElements
from relax_tune.ir.op.indexing.movement import Reshape
from relax_tune.ir.op.math.elementwise import Maximum, MaximumScalar, Minimum, MulScalar, Relu
from relax_tune.ir.op.neural.window import Pool
from relax_tune.ir.op.reduction.reduce import Max, Min, Softmax
from relax_tune.ir.op.reduction.scan import ArgMax, TopK
from relax_tune.ir.op.shapes import Unique
from relax_tune.ir.passes.pipeline import STANDARD
from relax_tune.schedules.sketch import Sketch, generate_sketches
from relax_tune.schedules.target import HardwareInfo

Array = np.ndarray[Any, Any]
PLACES = tuple(ArgMax(1, least, last) for least in (False, True) for last in (False, True))
EXTREMES = (
    "row max",
    "column extremes",
    "softmax",
    "softmax with mask",
    "attention",
    "attention over a cache",
    "attention, f16",
)
SIZES = {"column extremes": {"n": 70, "m": 37}, "attention": {"n": 5, "m": 41}, "softmax": {"n": 5, "m": 41}}
RANKS = tuple(TopK(const(k), 1, largest) for k, largest in ((3, True), (9, True), (9, False)))


def rows(dtype: Any = np.float32) -> Array:
    """Rows of nine: with no NaN, one, two, nothing else; with infinities, equal elements and both zeros."""
    x = np.random.default_rng(7).integers(-3, 4, (7, 9)).astype(dtype)
    if np.issubdtype(dtype, np.floating):
        x[1, 4] = x[2, 0] = x[2, 8] = x[5, 7] = math.nan
        x[3] = math.nan
        x[4, 2:4] = math.inf
        x[4, 5] = x[5, 5] = -math.inf
        x[6] = [0.0, -0.0] * 4 + [0.0]
    return x


def ranked(row: Array, largest: bool) -> list[int]:
    """Places of the elements, best first: NaN above all numbers, equal ones in order."""
    keys = [(math.isnan(v), 0.0 if math.isnan(v) else float(v)) for v in row]
    return sorted(range(len(row)), key=lambda p: tuple(-float(k) for k in keys[p]) if largest else keys[p])


def place(row: Array, least: bool, last: bool) -> int:
    nans = [p for p, v in enumerate(row) if math.isnan(v)]
    best = nans or [p for p, v in enumerate(row) if v == (min(row) if least else max(row))]
    return best[-1 if last else 0]


def extreme(row: Array, least: bool) -> Any:
    return math.nan if any(math.isnan(v) for v in row) else min(row) if least else max(row)


def meaning(x: Array) -> list[Array]:
    """The results of `extremes`, spelled out."""
    result: list[Any] = [[place(row, op.least, op.last) for row in x] for op in PLACES]
    result += [[ranked(row, op.largest)[: as_int(op.k)] for row in x] for op in RANKS]
    order = np.array(result[-2])
    result.append(np.take_along_axis(x, order, 1))
    result += [[extreme(row, least) for row in x] for least in (False, True)]
    result += [[extreme(column, False) for column in x.T]]
    return [np.asarray(f) for f in result]


def extremes(dtype: DType, symbolic: bool) -> IRModule:
    """Places, ranks and extremes of scaled rows."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 1, 40) if symbolic else 7, g.symbol("m", 9, 20) if symbolic else 9), dtype)
    y = g.call(MulScalar(1), x) if dtype is i32 else g.call(MulScalar(2.0), x)
    results = [g.call(op, y) for op in (*PLACES, *RANKS)]
    results.append(g.call(GatherElements(1), y, results[-2]))
    results += [g.call(op, y) for op in (Max((1,)), Min((1,)), Max((0,)))]
    return g.finish(results)


def pointwise() -> IRModule:
    g = GraphBuilder()
    n = g.symbol("n", 1, 40)
    x, z = g.input("x", (n, 9)), g.input("z", (n, 9))
    results = [g.call(op, x, z) for op in (Maximum(), Minimum())]
    results += [g.call(Relu(), x), g.call(MaximumScalar(0.5), x), g.call(Softmax(), x)]
    results.append(g.call(Pool((3,), (2,), (1,)), g.call(Reshape((const(1), n, const(9))), x)))
    return g.finish(results)


def compare(actual: Any, expected: Any, where: str) -> None:
    for p, (f, w) in enumerate(zip(actual, expected, strict=True)):
        np.testing.assert_allclose(f, w, rtol=1e-5, err_msg=f"{where}, result {p}")


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("symbolic", [True, False], ids=["symbolic", "static"])
def test_places_and_ranks_beside_nan_agree_with_torch(kind: str, fused: bool, symbolic: bool) -> None:
    with opened(kind) as device:
        for dtype in (f32, f16, i32) if fused else (f32,):
            module, x = extremes(dtype, symbolic), rows(dtype.numpy)
            expected = meaning(x * (1 if dtype is i32 else 2))
            compare(run_function(module, "main", [x]), expected, "interpreter")
            job = job_of(module, device, STANDARD if fused else UNFUSED)
            with executed(job.build("generic").program, job, device) as run:
                compare(run.run([x]), expected, f"{kind} {dtype}")


@pytest.mark.parametrize("kind", DEVICES)
def test_pointwise_extremes_of_nan_are_nan(kind: str) -> None:
    x, z = rows(), np.roll(rows(), 1, 0)
    with np.errstate(invalid="ignore"):
        e = np.exp(x - x.max(1, keepdims=True))
    pooled = np.stack([x[:, p : p + 3].max(1) for p in (0, 2, 4, 6)], 1)[None]
    expected = [
        np.maximum(x, z),
        np.minimum(x, z),
        np.maximum(x, 0),
        np.maximum(x, 0.5),
        e / e.sum(1, keepdims=True),
        pooled,
    ]
    module = pointwise()
    compare(run_function(module, "main", [x, z]), expected, "interpreter")
    with opened(kind) as device:
        job = job_of(module, device, STANDARD)
        with executed(job.build("generic").program, job, device) as run:
            compare(run.run([x, z]), expected, kind)


def check_extremes(device: Any, language: str, case: str, sketches: Sequence[Sketch]) -> None:
    instances = [m for _, _, m in sampled(sketches, f"NaN {case}")]
    for sketch, run in zip(sketches, Compiled.together(device, language, instances), strict=True):
        for seed, value in enumerate((math.nan, math.inf, -math.inf)):
            dims = SIZES.get(case) or CASES[case][1][0]
            arrays, scalars = arguments(run.func, dims, seed)
            places = [p for p in (3, 50, 51) if p < arrays[0].size]
            arrays[0].flat[places] = value
            with np.errstate(invalid="ignore"):
                assert not problems(function(case), arrays, run(arrays, scalars), dims), (sketch.name, value)


def positions(machine: HardwareInfo) -> list[tuple[OperatorSpec, Array, Sketch]]:
    """Sketches of operators of positions and extremes, at known sizes and symbolic ones, with what they must find."""
    result = meaning(rows())
    ops = list(zip((*PLACES, *RANKS, Max((1,)), Min((1,)), Max((0,))), result[:7] + result[8:], strict=True))
    funcs = [(op, y, op.legalize("f", [TensorInfo((const(7), const(9)), f32)])) for op, y in ops]
    symbolic = [(op, y, op.legalize("f", [TensorInfo((Var("n"), Var("m")), f32)])) for op, y in ops]
    return some(((op, y, s) for op, y, f in (*funcs, *symbolic) for s in generate_sketches(f, machine)), 18)


def is_built(func: PrimFunc, language: str) -> bool:
    """Whether a candidate has a kernel. Ranks of rows of unknown length do not fit in registers."""
    try:
        return bool(kernels_of(func, language))
    except BuildError:
        return False


def check_positions(device: Any, language: str, cases: Sequence[tuple[OperatorSpec, Array, Sketch]]) -> None:
    instances = [m for _, _, m in sampled([s for _, _, s in cases], "NaN positions")]
    built = [(case, m) for case, m in zip(cases, instances, strict=True) if is_built(m, language)]
    assert len(built) > len(cases) // 2
    runs = Compiled.together(device, language, [m for _, m in built])
    for ((op, expected, sketch), _), run in zip(built, runs, strict=True):
        (y,) = run([rows(), np.empty(expected.shape, run.func.output_buffers[0].dtype.numpy)])
        np.testing.assert_allclose(y, expected, err_msg=f"{op!r} {sketch.name}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("case", thinned(EXTREMES, 4))
def test_every_schedule_of_maxima_passes_nan_on(kind: str, case: str) -> None:
    """Vectors, several accumulators, two passes and maxima that grow give NaN where the loops as written do."""
    with opened(kind) as device:
        check_extremes(device, kind, case, some(sketches_of(case, kind)[1]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", thinned(DEVICES))
def test_every_schedule_of_places_and_ranks_beside_nan_agrees_with_torch(kind: str) -> None:
    with opened(kind) as device:
        check_positions(device, kind, positions(MACHINES[kind]))


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.ccompiler
@pytest.mark.process
def test_every_schedule_in_cuda_text_beside_nan_agrees_with_torch(tmp_path: Path) -> None:
    machine = replace(MACHINES["gpu"], language="cuda", capability=80)
    device = emulated(tmp_path)
    try:
        check_positions(device, "cuda", positions(machine))
        for case in some(EXTREMES):
            check_extremes(device, "cuda", case, some(generate_sketches(function(case), machine)))
    finally:
        device.close()


def test_literals_fold_nan_to_nan() -> None:
    nan = const(math.nan)
    for fold in (maximum, minimum):
        for a, b in ((nan, const(1.0)), (const(1.0), nan)):
            assert math.isnan(float(fold(a, b).value or 0))


@pytest.mark.ccompiler
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_unique_keeps_each_nan(dtype: DType) -> None:
    g = GraphBuilder()
    module = g.finish(g.call(Unique(), g.call(MulScalar(2.0), g.input("x", (g.symbol("n"),), dtype))))
    x = np.array([math.nan, 1, -math.inf, math.nan, 1], dtype.numpy)
    with opened("c") as device:
        (result,) = agree(module, device, [x])
    np.testing.assert_array_equal(result.astype(np.float32), [-math.inf, 2, math.nan, math.nan])
