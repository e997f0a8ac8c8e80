"""Operations on bits of integers, and bits read as another type: evaluators and kernels follow the specification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.ir.codegen.codegen_cases import outer_kind
from tests.ir.codegen.codegen_runner import Compiled
from tests.ir.codegen.test_integers import LANES, edges, least, place, wrapped_to

from relax_tune.ir.check.structural import structural_equal
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import INTEGERS, DType, bf16, f16, f32, f64, i8, i16, i32, i64, u16, u32, u64
from relax_tune.ir.core.expr import Expr, Var, bitcast, call, cast, const
from relax_tune.ir.core.expr import load as read
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import BufferStore, For, seq
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp import run_prim
from relax_tune.ir.op.math import bits
from relax_tune.ir.op.reduction.reduce import MinOrHighest
from relax_tune.ir.passes.pipeline import lower
from relax_tune.ir.text.parser import parse_module
from relax_tune.ir.text.printer import print_text
from relax_tune.runtime.device.base import Device

__all__ = ["place"]
Array = NDArray[Any]
SIZE = 144


def power(x: int, n: int) -> int:
    if n < 0:
        return {0: 0, 1: 1, -1: -1 if n % 2 else 1}.get(x, 0)
    return pow(x, n, 1 << 64)


def shifted(x: int, n: int, width: int, left: bool) -> int:
    if not 0 <= n < width:
        return -1 if x < 0 and not left else 0
    return x << n if left else x >> n


# of whole numbers and the width
OPERATIONS: dict[str, Callable[[int, int, int], int]] = {
    "bitwise_and": lambda x, y, _w: x & y,
    "bitwise_or": lambda x, y, _w: x | y,
    "bitwise_xor": lambda x, y, _w: x ^ y,
    "shift_left": lambda x, y, w: shifted(x, y, w, True),
    "shift_right": lambda x, y, w: shifted(x, y, w, False),
    "integer_power": lambda x, y, _w: power(x, y),
}
OPERATORS = [
    bits.BitwiseAnd(),
    bits.BitwiseOr(),
    bits.BitwiseXor(),
    bits.ShiftLeft(),
    bits.ShiftRight(),
    bits.IntegerPower(),
]


def pairs_of(dtype: DType) -> tuple[Array, Array]:
    """Pairs of extreme values of a type with extreme values, with small counts, and with counts near its width."""
    width = 8 * dtype.bytes
    counts = [*edges(dtype), 4, 5, width - 1, width % (dtype.limits[1] + 1), wrapped_to(-3, dtype), 12]
    pairs = [(x, y) for x in edges(dtype) for y in counts]
    pairs = (pairs * 2)[:: max(len(pairs) * 2 // SIZE, 1)][:SIZE]
    x, y = (np.resize(np.array([p[k] for p in pairs], dtype.numpy), SIZE) for k in (0, 1))
    return x, y


def specified_results(dtype: DType, x: Array, y: Array) -> list[Array]:
    arrays = []
    for fn in OPERATIONS.values():
        values = [wrapped_to(fn(int(a), int(b), 8 * dtype.bytes), dtype) for a, b in zip(x, y, strict=True)]
        arrays += [np.array(values, dtype.numpy), np.array([np.float32(v) for v in values])]
    return arrays


def nest(language: str, lanes: int, n: Expr, body: Callable[[Expr], list[BufferStore]]) -> For:
    """Return the loops of stores at every element, in vectors or, for one lane, one by one."""
    o, v = Var("o"), Var("v")
    if lanes == 1:
        return For(o, n, seq(*body(o)), outer_kind(language))
    inner = For(v, const(lanes), seq(*body(o * lanes + v)), "vectorized")
    return For(o, const(SIZE // lanes), inner, outer_kind(language))


def pair_function(language: str, dtype: DType, lanes: int) -> PrimFunc:
    """A function with every operation on pairs; each result is stored as it is and as a float."""
    n: Expr = Var("n") if lanes == 1 else const(SIZE)
    x, y = Buffer("x", (n,), dtype), Buffer("y", (n,), dtype)
    outputs = [Buffer(f"r{k}", (n,), dtype if k % 2 == 0 else f32) for k in range(2 * len(OPERATIONS))]

    def body(at: Expr) -> list[BufferStore]:
        stores = []
        for k, name in enumerate(OPERATIONS):
            value = call(name, read(x, (at,)), read(y, (at,)))
            stores += [
                BufferStore(outputs[2 * k], (at,), value),
                BufferStore(outputs[2 * k + 1], (at,), cast(value, f32)),
            ]
        return stores

    return PrimFunc(f"bits_{dtype}", (x, y, *outputs), len(outputs), nest(language, lanes, n, body))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_evaluators_bits_of_integers_match_whole_numbers(dtype: DType) -> None:
    x, y = pairs_of(dtype)
    expected = specified_results(dtype, x, y)
    for vectorise in (True, False):
        outputs = [np.empty_like(w) for w in expected]
        run_prim(pair_function("c", dtype, 8), [x, y, *outputs], vectorise=vectorise)
        for k, (a, w) in enumerate(zip(outputs, expected, strict=True)):
            np.testing.assert_array_equal(a, w, f"{list(OPERATIONS)[k // 2]}, {vectorise=}")
    for op, w in zip(OPERATORS, expected[::2], strict=True):
        np.testing.assert_array_equal(op.evaluate([x, y]), w, op.name)
    np.testing.assert_array_equal(bits.BitwiseNot().evaluate([x]), ~x)


@pytest.mark.slow
def test_kernels_bits_of_integers_match_whole_numbers(place: tuple[str, Device]) -> None:
    language, device = place
    cases = [(t, 1) for t in INTEGERS] + [(t, LANES[language]) for t in (i32, u16)]
    funcs = [pair_function(language, *case) for case in cases]
    for case, run in zip(cases, Compiled.together(device, language, funcs), strict=True):
        x, y = pairs_of(case[0])
        expected = specified_results(case[0], x, y)
        actual = run([x, y, *(np.empty_like(w) for w in expected)])
        for k, (a, w) in enumerate(zip(actual, expected, strict=True)):
            np.testing.assert_array_equal(a, w, f"{language}, {case}: {list(OPERATIONS)[k // 2]}")


CASTS = [(f32, i32), (i32, f32), (f32, u32), (f64, i64), (i64, f64), (f16, i16), (u16, bf16), (f16, bf16), (i8, i8)]


def reading(language: str, lanes: int) -> PrimFunc:
    """Bits read as another type."""
    n: Expr = Var("n") if lanes == 1 else const(SIZE)
    inputs = [Buffer(f"x{k}", (n,), s) for k, (s, _) in enumerate(CASTS)]
    outputs = [Buffer(f"y{k}", (n,), t) for k, (_, t) in enumerate(CASTS)]

    def body(at: Expr) -> list[BufferStore]:
        return [BufferStore(b, (at,), bitcast(read(a, (at,)), b.dtype)) for a, b in zip(inputs, outputs, strict=True)]

    return PrimFunc("reading", (*inputs, *outputs), len(outputs), nest(language, lanes, n, body))


def test_kernels_and_evaluators_bitcast_keeps_bits(place: tuple[str, Device]) -> None:
    language, device = place
    rng = np.random.default_rng(0)
    inputs = []
    for source, target in CASTS:
        x = (
            rng.standard_normal(SIZE)
            .astype(source.numpy if source not in INTEGERS else target.numpy)
            .view(source.numpy)
        )
        x[:3] = np.array([0, 1, least(source) if source.is_int else -0.0]).astype(source.numpy)
        inputs.append(x)
    expected = [x.view(t.numpy) for x, (_, t) in zip(inputs, CASTS, strict=True)]
    interpreted = [np.empty_like(w) for w in expected]
    run_prim(reading("c", 8), [*inputs, *interpreted])
    funcs = [reading(language, lanes) for lanes in (1, LANES[language])]
    for results in (
        interpreted,
        *(run([*inputs, *(np.empty_like(w) for w in expected)]) for run in Compiled.together(device, language, funcs)),
    ):
        for a, w, c in zip(results, expected, CASTS, strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), w.view(np.uint8), f"{language}: {c}")
    for x, w, (s, t) in zip(inputs, expected, CASTS, strict=True):
        np.testing.assert_array_equal(bits.BitCast(t, s).evaluate([x]), w)


ENDS = [0.0, -0.0, 1.0, -1.0, 8.0, 1000.0, 1e-40, 3e38, np.inf, -np.inf, np.nan, 0.5]


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_kernels_logarithms_and_atan2_match_numpy_at_ends(place: tuple[str, Device], dtype: DType) -> None:
    language, device = place
    n = Var("n")
    x, y, outputs = Buffer("x", (n,), dtype), Buffer("y", (n,), dtype), [Buffer(f"r{k}", (n,), dtype) for k in range(3)]
    o = Var("o")
    values = [call("log2", read(x, (o,))), call("log10", read(x, (o,))), call("atan2", read(x, (o,)), read(y, (o,)))]
    stores = seq(*(BufferStore(b, (o,), v) for b, v in zip(outputs, values, strict=True)))
    func = PrimFunc("ends", (x, y, *outputs), 3, For(o, n, stores, outer_kind(language)))
    a, b = (np.array(p, dtype.numpy).reshape(-1) for p in np.meshgrid(ENDS, ENDS))
    (run,) = Compiled.together(device, language, [func])
    with np.errstate(all="ignore"):
        expected = [np.log2(a), np.log10(a), np.arctan2(a, b)]
    for actual, w in zip(run([a, b, *(np.empty_like(a) for _ in range(3))]), expected, strict=True):
        np.testing.assert_allclose(actual, w, rtol=4e-6 if dtype is f32 else 1e-14, atol=1e-44 if dtype is f32 else 0)
        near = np.abs(w) < 1e30
        np.testing.assert_array_equal(np.signbit(actual[near]), np.signbit(w[near]))


def test_parse_literal_of_uint64_beyond_int64() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"),), u64)
    lowered = lower(g.finish(g.call(MinOrHighest((0,), False), x))).module
    assert structural_equal(parse_module(print_text(lowered)), lowered)
