"""Operations that read an operand several times, like integer quotients: source of linear size, equal results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.cuda_emulation.driver import emulated
from tests.ir.codegen.codegen_runner import Compiled, opened
from tests.support.candidates import MACHINES, WIDE
from tests.support.schedule_functions import pointwise

from relax_tune.ir.codegen.generate import CodeTarget, Language, generate, split_kernels
from relax_tune.ir.core.dtype import DType, f32, i8, i16, i32, i64, u8, u64
from relax_tune.ir.core.expr import Var, add, const, floordiv, mul, ne, select
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.movement import Take
from relax_tune.ir.op.math.elementwise import Cast, Mul, Sub
from relax_tune.ir.op.math.numeric import Modulo, Quotient
from relax_tune.ir.op.reduction.reduce import Sum
from relax_tune.ir.passes.pipeline import lower
from relax_tune.runtime.device.base import Device
from relax_tune.schedules.sketch import generate_sketches, instantiate
from relax_tune.tuner.task.legal_values import first_legal

Array = NDArray[Any]
TARGETS: dict[Language, Any] = {
    "c": WIDE,
    "opencl": MACHINES["opencl"],
    "cuda": MACHINES["gpu"],
    "webgpu": MACHINES["gpu"],
}


def quotients(g: GraphBuilder, v: Any, count: int, shape: Sequence[Any], dtype: DType) -> Any:
    for number in range(count):
        v = g.call((Quotient(), Modulo())[number % 2], v, g.input(f"y{number}", shape, dtype))
    return v


def chain(count: int, dtype: DType) -> PrimFunc:
    """((x / y0) % y1) / y2 ..."""
    g = GraphBuilder()
    shape = (g.symbol("n", 1, 512), 64)
    (func,) = lower(g.finish(quotients(g, g.input("x", shape, dtype), count, shape, dtype))).prims.values()
    return func


def remainders(count: int, dtype: DType) -> PrimFunc:
    """x - x / y * y, applied repeatedly: C's fmod of integers."""
    g = GraphBuilder()
    n = g.symbol("n", 1, 512)
    v, y = g.input("x", (n, 64), dtype), g.input("y", (64,), dtype)
    for _ in range(count):
        v = g.call(Sub(), v, g.call(Mul(), g.call(Quotient(), v, y), y))
    return next(iter(lower(g.finish(v)).prims.values()))


def rows(count: int, dtype: DType) -> PrimFunc:
    """Rows of a table, indexed with quotients."""
    g = GraphBuilder()
    n = g.symbol("n", 1, 512)
    place = quotients(g, g.input("i", (n,), dtype), count, (n,), dtype)
    place = place if dtype in (i32, i64) else g.call(Cast(i64), place)
    return next(iter(lower(g.finish(g.call(Take(), g.input("x", (1000, 64)), place))).prims.values()))


def elements(count: int, dtype: DType) -> PrimFunc:
    """Elements of an array, indexed with a quotient per lane."""
    g = GraphBuilder()
    n = g.symbol("n", 1, 512)
    place = quotients(g, g.input("i", (n, 64), dtype), count, (n, 64), dtype)
    place = place if dtype in (i32, i64) else g.call(Cast(i64), place)
    return next(iter(lower(g.finish(g.call(Take(), g.input("x", (1000,)), place))).prims.values()))


def row_sums(count: int, dtype: DType) -> PrimFunc:
    g = GraphBuilder()
    shape = (g.symbol("n", 1, 512), 64)
    whole = quotients(g, g.input("x", shape, dtype), count, shape, dtype)
    return next(iter(lower(g.finish(g.call(Sum((1,)), whole))).prims.values()))


PROGRAMS: dict[str, Callable[[int, DType], PrimFunc]] = {
    p.__name__: p for p in (chain, remainders, rows, elements, row_sums)
}


def longest(func: PrimFunc, language: Language) -> int:
    """The length of the longest text among the first and the last schedules, without the prelude."""
    machine, length = TARGETS[language], 0
    sketches = generate_sketches(func, machine)
    for sketch in {s.name: s for s in (sketches[0], sketches[-1])}.values():
        values = first_legal(sketch)
        assert values is not None
        for part in split_kernels(instantiate(sketch, values)):
            source = generate(part, CodeTarget(language, machine.lanes)).source
            length = max(length, len(source.partition("/*end prelude*/")[2] or source))
    return length


@pytest.mark.pairwise
@pytest.mark.slow
@pytest.mark.parametrize("language", TARGETS)
@pytest.mark.parametrize("dtype", [i64, i8, i32], ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_source_of_repeated_operands_grows_linearly(program: str, dtype: DType, language: Language) -> None:
    sizes = {count: longest(PROGRAMS[program](count, dtype), language) for count in (1, 2, 4, 6)}
    each = max((sizes[2] - sizes[1]), (sizes[4] - sizes[2]) / 2)
    assert sizes[6] - sizes[4] <= 2 * 1.5 * each + 200
    assert sizes[6] < 40_000


@pytest.fixture(params=["c", "opencl", "cuda"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Device]]:
    device: Device = emulated(tmp_path) if request.param == "cuda" else opened(request.param)
    yield request.param, device
    device.close()


def edges(dtype: DType, count: int, seed: int) -> Array:
    """Numbers that include the ends of the type, 0 and -1."""
    rng, info = np.random.default_rng(seed), np.iinfo(dtype.numpy)
    numbers = rng.integers(max(info.min, -1000), min(info.max, 1000), count).astype(dtype.numpy)
    special = [0, 1, info.min, info.max, *([-1, info.min + 1] if info.min else [])]
    numbers[rng.permutation(count)[: 4 * len(special)]] = np.asarray(special * 4, dtype.numpy)
    return numbers


def exact(values: Array, divisors: Sequence[Array], dtype: DType) -> Array:
    """Truncated quotients and floored remainders in integers of any size, 0 for a divisor of 0, wrapped to the type."""
    bits, results = dtype.bytes * 8, []
    for row in zip(values.ravel().tolist(), *(d.ravel().tolist() for d in divisors), strict=True):
        v = row[0]
        for number, y in enumerate(row[1:]):
            if y == 0:
                v = 0
            elif number % 2:
                v = v % y
            else:
                v = abs(v) // abs(y) * (1 if (v < 0) == (y < 0) else -1)
                v = (v + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1) if dtype.numpy.kind == "i" else v
        results.append(v)
    return np.asarray(results, dtype.numpy).reshape(values.shape)


@pytest.mark.slow
@pytest.mark.ccompiler
@pytest.mark.opencl
@pytest.mark.parametrize("dtype", [i64, i8, i32, i16, u8, u64], ids=str)
def test_generate_quotients_of_edges_gives_whole_numbers(dtype: DType, place: tuple[str, Device]) -> None:
    language, device = place
    func = chain(4, dtype)
    machine = MACHINES["gpu" if language == "cuda" else language]
    sketches = generate_sketches(func, machine)
    scheduled = [instantiate(s, v) for s in (sketches[0], sketches[-1]) if (v := first_legal(s)) is not None]
    arrays = [edges(dtype, 5 * 64, seed).reshape(5, 64) for seed in range(5)]
    expected = exact(arrays[0], arrays[1:], dtype)
    for kernel in Compiled.together(device, language, scheduled):
        (actual,) = kernel([*arrays, np.zeros_like(expected)], ())
        assert np.array_equal(actual, expected)


@pytest.mark.ccompiler
def test_generate_division_behind_a_condition_stays_behind() -> None:
    n = Var("n")
    b = TensorBuilder("guarded")
    x, y, z = b.input("A", (n,), i64), b.input("B", (n,), i64), b.output("C", (n,), i64)

    def value(i: Any) -> Any:
        whole = floordiv(x[i], y[i])
        return select(ne(y[i], const(0, i64)), add(mul(whole, whole), whole), const(7, i64))

    b.compute(z, value, name="divide")
    device = opened("c")
    a, d = np.arange(-20, 20), np.tile(np.asarray([0, 3, -4, 0, 5]), 8)
    (actual,) = Compiled(device, "c", b.finish())([a, d, np.zeros_like(a)], ())
    device.close()
    whole = a // np.where(d == 0, 1, d)
    assert np.array_equal(actual, np.where(d == 0, 7, whole * whole + whole))


def test_vectors_of_floats_without_repeated_operands_stay_vectors() -> None:
    source = generate(
        next(
            iter(split_kernels(instantiate((s := generate_sketches(pointwise(2), WIDE))[0], first_legal(s[0]) or {})))
        ),
        CodeTarget("c", 16),
    ).source
    assert f"{f32.short}x16u" in source
