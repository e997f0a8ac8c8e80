"""Integers at the ends of their types and casts of floats: interpreter, reference and kernels as specified."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.cuda_emulation.driver import emulated
from tests.ir.codegen.codegen_cases import outer_kind
from tests.ir.codegen.codegen_runner import Compiled, kernels_of, opened
from tests.support.programs import agree as agree_levels

from relax_tune.ir.arith.bounds import Env, interval, wraps
from relax_tune.ir.arith.proof import Proof
from relax_tune.ir.arith.prove import prove
from relax_tune.ir.codegen.print import integers
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import INTEGERS, DType, bf16, bool_, f16, f32, f64, i8, i32, i64, u8, u16, u32, u64
from relax_tune.ir.core.expr import (
    Expr,
    Var,
    add,
    call,
    cast,
    const,
    div,
    eq,
    floordiv,
    floormod,
    lt,
    maximum,
    minimum,
    mul,
    select,
    sub,
)
from relax_tune.ir.core.expr import load as read
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.scalar_ops import converted
from relax_tune.ir.core.stmt import BufferStore, For, LoopKind, seq
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp import run_prim
from relax_tune.ir.interp.reference import evaluate_prim
from relax_tune.ir.op.indexing.movement import Take
from relax_tune.ir.op.math.elementwise import Add, Cast
from relax_tune.ir.op.math.logic import Less
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.cuda_compiler import CUDACompiler
from relax_tune.runtime.program.program import KernelSource

Array = NDArray[Any]
LANES = {"c": 8, "opencl": 4, "cuda": 4}
PLACES = [
    pytest.param("c", marks=pytest.mark.ccompiler),
    pytest.param("opencl", marks=pytest.mark.opencl),
    pytest.param("cuda", marks=pytest.mark.ccompiler),
]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Device]]:
    language = request.param
    device: Device = emulated(tmp_path) if language == "cuda" else opened(language)
    yield language, device
    device.close()


def least(dtype: DType) -> int:
    return int(np.iinfo(dtype.numpy).min)


def wrapped_to(value: int, dtype: DType) -> int:
    """Return a number reduced to the bits of a type, by the definition of two's complement."""
    low = least(dtype)
    return (value - low) % (1 << 8 * dtype.bytes) + low


def edges(dtype: DType) -> list[int]:
    low, high = least(dtype), int(np.iinfo(dtype.numpy).max)
    numbers = {low, low + 1, -1, 0, 1, 2, 3, 7, high // 3, high // 2 + 1, high - 1, high}
    return sorted({wrapped_to(x, dtype) for x in numbers})


def nonzero(y: Expr) -> Expr:
    return select(eq(y, const(0, y.dtype)), const(1, y.dtype), y)


# Operation: as an expression, and of whole numbers of any size.
OPERATIONS: dict[str, tuple[Callable[[Expr, Expr], Expr], Callable[[int, int], int]]] = {
    "add": (add, lambda x, y: x + y),
    "sub": (sub, lambda x, y: x - y),
    "mul": (mul, lambda x, y: x * y),
    "neg": (lambda x, _y: sub(const(0, x.dtype), x), lambda x, _y: -x),
    "neg by mul": (lambda x, _y: -x, lambda x, _y: -x),
    "abs": (lambda x, _y: call("abs", x), lambda x, _y: abs(x)),
    "shift left": (lambda x, _y: mul(x, const(4, x.dtype)), lambda x, _y: x * 4),
    "shift right": (lambda x, _y: floordiv(x, const(4, x.dtype)), lambda x, _y: x // 4),
    "low bits": (lambda x, _y: floormod(x, const(8, x.dtype)), lambda x, _y: x % 8),
    "div": (lambda x, y: floordiv(x, nonzero(y)), lambda x, y: x // (y or 1)),
    "mod": (lambda x, y: floormod(x, nonzero(y)), lambda x, y: x % (y or 1)),
    "least": (lambda x, y: minimum(x, y), min),
    "with the least": (lambda x, _y: add(x, const(least(x.dtype), x.dtype)), None),
}  # fmt: skip


def result(name: str, x: int, y: int, dtype: DType) -> int:
    whole = OPERATIONS[name][1]
    return wrapped_to(x + least(dtype) if whole is None else whole(x, y), dtype)


def index(v: Expr) -> Expr:
    """A row of sixteen for every number."""
    return maximum(minimum(cast(v, i64), const(15)), const(0))


# Consumers of a value: type of the result; expression of the value, an operand and a table; the same on integers.
Consumer = tuple[DType | None, Callable[[Expr, Expr, Buffer], Expr], Callable[[int, int, DType], float]]
CONSUMERS: dict[str, Consumer] = {
    "to float": (f32, lambda v, _x, _t: cast(v, f32), lambda v, _x, _d: float(np.float32(v))),
    "widened": (i64, lambda v, _x, _t: cast(v, i64), lambda v, _x, _d: wrapped_to(v, i64)),
    "unsigned": (u64, lambda v, _x, _t: cast(v, u64), lambda v, _x, _d: wrapped_to(v, u64)),
    "narrowed": (i8, lambda v, _x, _t: cast(v, i8), lambda v, _x, _d: wrapped_to(v, i8)),
    "compared": (i32, lambda v, x, _t: cast(lt(v, x), i32), lambda v, x, _d: v < x),
    "next": (
        None,
        lambda v, x, _t: floordiv(add(v, x), const(2, v.dtype)),
        lambda v, x, d: wrapped_to(v + x, d) // 2,
    ),
    "index": (f32, lambda v, _x, t: read(t, (index(v),)), lambda v, _x, _d: max(min(wrapped_to(v, i64), 15), 0) * 3.0),
}


def loops(language: str, lanes: int, pairs: int, body: Callable[[Expr], list[BufferStore]]) -> For:
    """Stores at every element, in vectors or, for one lane, in a loop of unknown length."""
    o, v = Var("o"), Var("v")
    if lanes == 1:
        kind: LoopKind = outer_kind(language)
        return For(o, Var("n"), seq(*body(o)), kind)
    inner = For(v, const(lanes), seq(*body(o * lanes + v)), "vectorized")
    return For(o, const(pairs // lanes), inner, outer_kind(language))


def arithmetic(language: str, dtype: DType, lanes: int, through_memory: bool) -> PrimFunc:
    """Every operation into every consumer, directly or through memory."""
    pairs = len(edges(dtype)) ** 2 // 4 * 4 if lanes == 1 else PAIRS
    n = Var("n") if lanes == 1 else const(pairs)
    x, y, table = Buffer("x", (n,), dtype), Buffer("y", (n,), dtype), Buffer("table", (const(16),), f32)
    copies = [Buffer(f"k{i}", (n,), dtype) for i in range(len(OPERATIONS))]
    outputs = [
        Buffer(f"r{i}", (n,), target or dtype)
        for i, (_, (target, _, _)) in enumerate(product(OPERATIONS, CONSUMERS.values()))
    ]

    def body(at: Expr) -> list[BufferStore]:
        stores, places = [], iter(outputs)
        for (operation, _), keep in zip(OPERATIONS.values(), copies, strict=True):
            value = operation(read(x, (at,)), read(y, (at,)))
            stores.append(BufferStore(keep, (at,), value))
            for _, consumer, _ in CONSUMERS.values():
                source = read(keep, (at,)) if through_memory else value
                stores.append(BufferStore(next(places), (at,), consumer(source, read(x, (at,)), table)))
        return stores

    nest = loops(language, lanes, pairs, body)
    if lanes == 1:
        (symbol,) = (n,)
        nest = For(nest.var, symbol, nest.body, nest.kind)
    return PrimFunc(f"ends_{dtype}", (x, y, table, *copies, *outputs), len(copies) + len(outputs), nest)


PAIRS = 144


def pairs_of(dtype: DType) -> tuple[Array, Array]:
    """All pairs of extreme values, padded to a multiple of the vector width."""
    pairs = (list(product(edges(dtype), repeat=2)) * 3)[:PAIRS]
    x, y = (np.array([p[k] for p in pairs], dtype.numpy) for k in (0, 1))
    return x, y


def specified_results(dtype: DType, x: Array, y: Array) -> list[Array]:
    """The specified result, computed with integers of any size."""
    results, consumed = [], []
    for name in OPERATIONS:
        values = [result(name, int(a), int(b), dtype) for a, b in zip(x, y, strict=True)]
        results.append(np.array(values, dtype.numpy))
        for target, _, of_number in CONSUMERS.values():
            numbers = [of_number(v, int(a), dtype) for v, a in zip(values, x, strict=True)]
            consumed.append(np.array(numbers, (target or dtype).numpy))
    return results + consumed


TABLE = np.arange(16, dtype=np.float32) * 3
NAMES = [*OPERATIONS, *(f"{o}, {c}" for o, c in product(OPERATIONS, CONSUMERS))]


def agree(actual: list[Array], expected: list[Array], where: str) -> None:
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        np.testing.assert_array_equal(a, b, f"{where}: {name}")


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("vectorise", [True, False])
def test_interpreter_integer_overflow_wraps(dtype: DType, vectorise: bool) -> None:
    x, y = pairs_of(dtype)
    expected = specified_results(dtype, x, y)
    for through_memory in (False, True):
        func = arithmetic("c", dtype, 8, through_memory)
        outputs = [np.empty_like(w) for w in expected]
        run_prim(func, [x, y, TABLE, *outputs], vectorise=vectorise)
        agree(outputs, expected, f"interpreter, {through_memory=}")


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_reference_integer_overflow_wraps(dtype: DType) -> None:
    x, y = pairs_of(dtype)
    b = TensorBuilder("ends")
    a, c, table = b.input("x", (PAIRS,), dtype), b.input("y", (PAIRS,), dtype), b.input("table", (16,))
    expected = specified_results(dtype, x, y)
    values = [lambda i, f=f: f(a[i], c[i]) for f, _ in OPERATIONS.values()]
    values += [
        lambda i, f=f, g=g: g(f(a[i], c[i]), a[i], table.buffer)
        for (f, _), (_, g, _) in product(OPERATIONS.values(), CONSUMERS.values())
    ]
    for k, (value, w) in enumerate(zip(values, expected, strict=True)):
        out = b.output(f"r{k}", (PAIRS,), next(d for d in (*INTEGERS, f32) if d.numpy == w.dtype))
        b.compute(out, value, f"c{k}")
    actual = evaluate_prim(b.finish(), [x, y, TABLE])  # floats as float64
    agree(
        [f.astype(w.dtype) if w.dtype == np.float32 else f for f, w in zip(actual, expected, strict=True)],
        expected,
        "reference",
    )


@pytest.mark.slow
def test_kernels_integer_overflow_wraps(place: tuple[str, Device]) -> None:
    language, device = place
    lanes = LANES[language]
    cases = [(t, 1, t in (i8, i64, u16)) for t in INTEGERS]
    # other operations are printed lane by lane
    vectors = {"cuda": (i32,), "opencl": (u8, i32, u32, i64), "c": (i8, u16, i32, u64)}
    cases += [(t, lanes, t is i32) for t in vectors[language]]
    funcs = [arithmetic(language, *case) for case in cases]
    for case, run in zip(cases, Compiled.together(device, language, funcs), strict=True):
        x, y = pairs_of(case[0])
        expected = specified_results(case[0], x, y)
        actual = run([x, y, TABLE, *(np.empty_like(w) for w in expected)])
        agree(actual, expected, f"{language}, {case}")


FLOATS = (f16, bf16, f32, f64)
TARGETS = (bool_, *INTEGERS)


def whole(x: float, dtype: DType) -> int:
    """The cast of a float to an integer, as the specification defines it."""
    wide = i64 if dtype in (i64, u32, u64) else i32
    if dtype is u64 and x >= 2.0**63:
        return int(x) if x < 2.0**64 else 0
    number = least(wide) if math.isnan(x) or math.isinf(x) else math.trunc(Fraction(x))
    return wrapped_to(number if wrapped_to(number, wide) == number else least(wide), dtype)


def special_floats(dtype: DType) -> Array:
    """Floats at the ends of integer types, between integers, infinities and NaN."""
    around = [float(1 << k) for k in (7, 8, 15, 16, 31, 32, 62, 63, 64)]
    numbers = [
        0.0,
        0.25,
        0.5,
        0.99,
        1.0,
        1.5,
        2.5,
        44.9,
        127.5,
        300.7,
        1e9,
        3e9,
        1e19,
        1e30,
        math.inf,
        math.nan,
        *around,
    ]
    x = np.array([*numbers, *(-f for f in numbers)], np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        x = x.astype(dtype.numpy)
    if dtype in (f32, f64):
        x = np.concatenate([x, np.nextafter(x, dtype.numpy.type(0)), np.nextafter(x, dtype.numpy.type(-np.inf))])
    return np.resize(x, 192)


def cast_function(language: str, source: DType, lanes: int) -> PrimFunc:
    """Casts to every type; each stored, back as a float, divided by, and compared."""
    n = Var("n") if lanes == 1 else const(192)
    x = Buffer("x", (n,), source)
    outputs = [
        Buffer(f"{what}_{t}", (n,), d or t)
        for t in TARGETS
        for what, d in (("s", None), ("b", f32), ("d", f32), ("c", i32))
    ]

    def body(at: Expr) -> list[BufferStore]:
        stores, places = [], iter(outputs)
        for t in TARGETS:
            v = cast(read(x, (at,)), t)
            back = cast(v, f32)
            big = cast(lt(const(3.0), back), i32)
            for value in (v, back, div(const(1.0), back), big):
                stores.append(BufferStore(next(places), (at,), value))
        return stores

    nest = loops(language, lanes, 192, body)
    nest = For(nest.var, n, nest.body, nest.kind) if lanes == 1 else nest
    return PrimFunc(f"casts_{source}", (x, *outputs), len(outputs), nest)


def specified_casts(x: Array) -> list[Array]:
    arrays = []
    for t in TARGETS:
        values = [float(v) != 0 if t is bool_ else whole(float(v), t) for v in x]
        back = np.array(values, t.numpy).astype(np.float32)
        with np.errstate(divide="ignore"):
            arrays += [np.array(values, t.numpy), back, np.float32(1) / back, (back > 3).astype(np.int32)]
    return arrays


@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_interpreter_cast_of_float_truncates(source: DType) -> None:
    x = special_floats(source)
    expected = specified_casts(x)
    for vectorise in (True, False):
        outputs = [np.empty_like(w) for w in expected]
        run_prim(cast_function("c", source, 8), [x, *outputs], vectorise=vectorise)
        for t, (a, w) in enumerate(zip(outputs, expected, strict=True)):
            np.testing.assert_array_equal(a, w, f"{source} to {TARGETS[t // 4]}, {t % 4}")
    for t in TARGETS:
        with np.errstate(all="raise"):
            np.testing.assert_array_equal(converted(x, t), expected[TARGETS.index(t) * 4])
        for v, w in zip(x, expected[TARGETS.index(t) * 4], strict=True):  # literals are folded in the type they have
            assert cast(const(float(v), source), t).value == w


@pytest.mark.slow
def test_kernels_cast_of_float_truncates(place: tuple[str, Device]) -> None:
    language, device = place
    cases = list(product(FLOATS, (1, LANES[language])))
    funcs = [cast_function(language, *case) for case in cases]
    for case, run in zip(cases, Compiled.together(device, language, funcs), strict=True):
        x = special_floats(case[0])
        expected = specified_casts(x)
        actual = run([x, *(np.empty_like(w) for w in expected)])
        for t, (a, w) in enumerate(zip(actual, expected, strict=True)):
            np.testing.assert_array_equal(a, w, f"{language}, {case} to {TARGETS[t // 4]}, {t % 4}")


def test_literals_beyond_type_wrap_but_sizes_stay() -> None:
    assert add(const(200, u8), const(100, u8)).value == 44
    assert sub(const(least(i32), i32), const(1, i32)).value == 2**31 - 1
    assert floordiv(const(least(i8), i8), const(-1, i8)).value == least(i8)
    # a size beyond int64 must not become a small number
    assert mul(const(1 << 40), const(1 << 40)).value is None
    assert integers.literal(least(i64)) == "(-9223372036854775807 - 1)"


def test_prove_sum_of_elements_takes_wrapping_into_account() -> None:
    n = Var("n")
    for dtype in INTEGERS:
        x = Buffer("x", (n,), dtype)
        v = read(x, (const(0),))
        one = const(1, dtype)
        assert prove(lt(v, add(v, one)), Env()) is Proof.UNKNOWN
        negative = prove(lt(call("abs", v), const(0, dtype)), Env())
        assert negative is Proof.UNKNOWN or dtype.is_unsigned
        low, _ = interval(add(v, one), Env())
        assert low is None or low <= least(dtype) or (dtype.is_unsigned and low <= 0)
    # sizes and loop variables never overflow, nor do elements once they are bounded
    element = read(Buffer("x", (n,), i64), (const(0),))
    row = maximum(minimum(element, n - 1), const(0))
    assert prove(lt(n, n + 1), Env()) is Proof.YES
    assert wraps(element + n) and not wraps(row + n) and not wraps(row * n + row)


def test_generate_product_within_int32_stays_plain() -> None:
    n = Var("n")
    x, w, y = Buffer("x", (n,), u8), Buffer("w", (n,), i8), Buffer("y", (n,), i32)
    o = Var("o")
    products = mul(cast(read(x, (o,)), i32), cast(read(w, (o,)), i32))
    func = PrimFunc("products", (x, w, y), 1, For(o, n, BufferStore(y, (o,), products), "parallel"))
    (kernel,) = kernels_of(func, "c")
    body = kernel.source.split("/*end prelude*/")[1]
    assert not re.search(r"\brt_(?!part|data|shared|from|to\b)", body)  # no helper computes the product


@pytest.mark.nvrtc
def test_generate_integers_compile_for_cuda() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    funcs = [arithmetic("cuda", i32, 4, False), cast_function("cuda", f32, 4)]
    compiled = CUDACompiler("sm_80").compile(
        [KernelSource(k.name, "cuda", k.source) for f in funcs for k in kernels_of(f, "cuda")]
    )
    assert len(compiled.kernels) == 2


@pytest.mark.parametrize("place", [p for p in PLACES if p.values[0] != "cuda"], indirect=True)
def test_graph_fused_integers_wrap_and_truncate(place: tuple[str, Device]) -> None:
    g = GraphBuilder()
    n, m = g.symbol("n"), g.symbol("m")
    a, b, c, f = g.input("a", (n,), u8), g.input("b", (n,), u8), g.input("c", (n,), i32), g.input("f", (n,))
    table = g.input("table", (m, 2))
    total = g.call(Add(), a, b)
    outputs = (
        g.call(Cast(f32), total),
        g.call(Less(), g.call(Add(), c, c), c),
        g.call(Cast(f32), g.call(Cast(u8), f)),
        g.call(Cast(f32), g.call(Cast(i32), f)),
        g.call(Take(), table, g.call(Cast(i64), total)),
    )
    args = [
        np.uint8([200, 255, 3]), np.uint8([100, 1, 4]), np.int32([2**31 - 1, -(2**31), 5]), np.float32([300.7, np.nan, -0.5]),
        np.arange(512, dtype=np.float32).reshape(256, 2),
    ]  # fmt: skip
    (actual,) = agree_levels(g.finish(outputs), place[1], args)
    np.testing.assert_array_equal(actual[0], [44, 0, 7])
    np.testing.assert_array_equal(actual[1], [True, False, False])
    np.testing.assert_array_equal(actual[2], [44, 0, 0])
    np.testing.assert_array_equal(actual[3], [300, -(2.0**31), 0])
    np.testing.assert_array_equal(actual[4][:, 0], [88, 0, 14])
