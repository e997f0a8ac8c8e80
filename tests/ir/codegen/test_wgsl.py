"""WGSL: the text of kernels, refusals, and results on a device for integers, casts, conversions and NaN."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.ir.codegen import codegen_cases as make
from tests.ir.codegen.codegen_runner import TARGETS, Compiled, opened
from tests.ir.codegen.grid_cases import TEXTS, function
from tests.ir.codegen.test_math import SPECIALS, elementwise, ulps

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.generate import CodeTarget, generate
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, bf16, f4e2m1, f8e4m3fn, f16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64
from relax_tune.ir.core.expr import (
    Expr,
    Var,
    call,
    cast,
    const,
    floordiv,
    floormod,
    load,
    lt,
    maximum,
    minimum,
    ne,
    select,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import BufferStore, For, seq
from relax_tune.ir.interp.interp import run_prim
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.runtime.device.base import Device

WGSL = TARGETS["webgpu"]
Array = NDArray[Any]


def parsed(text: str) -> PrimFunc:
    return parse_prim_func(text.strip() + "\n")


# the text


GATHER = """
@prim_func(outputs=1)
def gather(ids: Buffer((n,), i64), x: Buffer((m, 8), f16), y: Buffer((n, 8), f32)):
    for g in group(n):
        for v in vectorized(8):
            y[g, v] = cast(x[max(min(ids[g], m - 1), 0), v], f32)
"""


def test_text_of_gather_is_stable(golden: Callable[[str, str], None]) -> None:
    golden("wgsl_gather.txt", generate(parsed(GATHER), WGSL).source.rstrip("\n"))


def test_text_of_matmul_is_stable(golden: Callable[[str, str], None]) -> None:
    golden("wgsl_matmul.txt", generate(make.matmul("webgpu", 2, 4, 8, "pow2"), WGSL).source.rstrip("\n"))


def test_barriers_of_wgsl_are_printed() -> None:
    for name, (barriers, _exchanges, _text) in TEXTS.items():
        source = generate(function(name), WGSL).source
        assert len(re.findall(r"\w+Barrier\(\);", source)) >= min(barriers, 1), name
        assert "rt_across" not in source


def test_integers_of_a_launch_are_checked_where_sizes_decide() -> None:
    kernel = generate(parsed(GATHER), WGSL)
    assert "rt_most: i32" in kernel.source and len(kernel.scalars) == 3
    sizes = {"((n": "((4", "group(n": "group(4", "((m": "((9", "m - 1": "8"}
    text = GATHER
    for symbol, size in sizes.items():
        text = text.replace(symbol, size)
    fixed = generate(parsed(text), WGSL)
    assert "rt_most" not in fixed.source and not fixed.scalars


def test_integers_beyond_32_bits_are_refused() -> None:
    text = """
@prim_func(outputs=1)
def big(x: Buffer((3, 4294967296), f32), y: Buffer((3,), f32)):
    for g in group(3):
        y[g] = x[g, 4294967295]
"""
    with pytest.raises(BuildError, match=r"integers of 32 bits in big"):
        generate(parsed(text), WGSL)


def test_loop_with_end_from_memory_is_refused() -> None:
    text = """
@prim_func(outputs=1)
def rows(size: Buffer((n,), i64), y: Buffer((n,), f32)):
    for g in group(n):
        y[g] = 0.0
        for k in serial(size[g]):
            y[g] = y[g] + 1.0
"""
    with pytest.raises(BuildError, match=r"loop over k\w* .*value from memory"):
        generate(parsed(text), WGSL)
    kernel = generate(parsed(text.replace("serial(size[g])", "serial(max(min(size[g], n), 0))")), WGSL)
    assert "rt_min_wide" in kernel.source


def copy(source: DType, target: DType, value: Callable[[Expr], Expr]) -> PrimFunc:
    n, i = Var("n"), Var("i")
    x, y = Buffer("x", (n,), source), Buffer("y", (n,), target)
    return PrimFunc("copy", (x, y), 1, For(i, n, BufferStore(y, (i,), value(load(x, (i,)))), "group"))


@pytest.mark.parametrize(
    ("func", "words"),
    [
        (copy(f64, f64, lambda x: x), "no float64"),
        (copy(f32, f32, lambda x: cast(cast(x, f64) * 2.0, f32)), "no float64"),
        (copy(u64, u64, lambda x: floordiv(x, const(3, u64))), "no floordiv of uint64"),
        (copy(u64, f32, lambda x: cast(x, f32)), "uint64 to float32"),
    ],
)
def test_type_missing_in_wgsl_is_refused(func: PrimFunc, words: str) -> None:
    with pytest.raises(BuildError, match=words):
        generate(func, WGSL)


def test_kernel_of_more_arrays_than_bindings_is_refused() -> None:
    func = function("by one item, for all")
    arrays = len(func.buffers)
    generate(func, CodeTarget("webgpu", 4, None, arrays))
    with pytest.raises(BuildError, match=rf"at most {arrays - 1} arrays .* got {arrays}"):
        generate(func, CodeTarget("webgpu", 4, None, arrays - 1))


def test_shared_memory_counts_whole_words() -> None:
    text = """
@prim_func(outputs=1)
def turned(x: Buffer((n, 16), bf16), y: Buffer((n, 16), bf16)):
    tile = alloc((16,), bf16, scope="shared")
    for g in group(n):
        for a in item(16):
            tile[a] = x[g, a]
        for b in item(16):
            y[g, b] = tile[15 - b]
"""
    generate(parsed(text), CodeTarget("webgpu", 4, 64))
    with pytest.raises(BuildError, match=r"at most 63 bytes .* got 64"):
        generate(parsed(text), CodeTarget("webgpu", 4, 63))


def test_launch_of_many_groups_is_in_rows() -> None:
    source = """
@prim_func(outputs=1)
def f(x: Buffer((n, 70000), f32), y: Buffer((n, 70000), f32)):
    for i in group(n, axis=0):
        for j in group(70000, axis=1):
            y[i, j] = x[i, j]
"""
    kernel = generate(parsed(source), WGSL)
    assert "rt_number / (n) % " not in kernel.source and "if (rt_number >= n * 70000) { return; }" in kernel.source
    assert [str(e) for e in kernel.grid] == ["min(n * 70000, 65535)", "(n * 70000 + 65534) // 65535"]
    small = generate(parsed(source.replace("70000", "7").replace("(n", "(9").replace("group(9,", "group(9,")), WGSL)
    assert "rt_number" not in small.source and [str(e) for e in small.grid] == ["9", "7"]


# on a device


@pytest.fixture(scope="module")
def webgpu() -> Iterator[Device]:
    device = opened("webgpu")
    yield device
    device.close()


pytest_device = pytest.mark.webgpu


def run(device: Device, func: PrimFunc, arrays: list[Array]) -> list[Array]:
    return Compiled(device, "webgpu", func)(arrays)


@pytest_device
@pytest.mark.parametrize("name", TEXTS)
def test_invocations_compute_the_same_as_loops(name: str, webgpu: Device) -> None:
    func = function(name)
    kernels = Compiled(webgpu, "webgpu", func)
    rng = np.random.default_rng(1)
    for n in (0, 1, 5):
        dims = {"n": n, "m": 3}
        shapes = [[dims.get(str(d), d) for d in b.shape] for b in func.buffers]
        arrays = [rng.standard_normal([int(str(d)) for d in s]).astype(np.float32) for s in shapes]
        expected = [a.copy() for a in arrays]
        run_prim(func, expected)
        for actual, e in zip(kernels(arrays), expected[1:], strict=True):
            np.testing.assert_allclose(actual, e, rtol=1e-6)


# largest errors in units in the last place, as docs/design/webgpu.md has them
ERRORS = {
    "exp": 2, "log": 2, "log2": 3, "log10": 3, "tanh": 6, "erf": 6, "sqrt": 3, "rsqrt": 4, "sin": 4, "cos": 4, "tan": 6, "asin": 4,
    "acos": 3, "atan": 4, "sinh": 5, "cosh": 5, "asinh": 4, "acosh": 4, "atanh": 4, "floor": 0, "rint": 0, "abs": 0,
}  # fmt: skip
NUMPY: dict[str, Callable[[Array], Array]] = {
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
    "rsqrt": lambda v: 1 / np.sqrt(v), "erf": lambda v: np.asarray(np.frompyfunc(__import__("math").erf, 1, 1)(v), float),
}  # fmt: skip


def spread() -> Array:
    """Floats of every magnitude and both signs, a grid around 0, and the special values; no denormal numbers."""
    bits = np.arange(0x00800000, 0x7F800000, 1009 * 397, dtype=np.int64).astype(np.int32).view(np.float32)
    near = np.concatenate([np.linspace(-12, 12, 3001), np.linspace(-1, 1, 1001), np.linspace(-90, 90, 1001)])
    special = SPECIALS[~((np.abs(SPECIALS) < np.finfo(np.float32).tiny) & (SPECIALS != 0))]
    return np.concatenate([bits, -bits, near.astype(np.float32), special])


@pytest_device
@pytest.mark.parametrize("name", ERRORS)
def test_function_webgpu_is_right_to_few_units(name: str, webgpu: Device) -> None:
    x = spread()
    (y,) = run(webgpu, elementwise(name, 4, "vectorized"), [x, np.empty_like(x)])
    with np.errstate(all="ignore"):
        expected = NUMPY.get(name, getattr(np, name, None))(x.astype(np.float64))
    tiny = np.finfo(np.float32).tiny
    error = np.where((np.abs(expected) < tiny) & (np.abs(y) < tiny), 0, ulps(y, expected))
    worst = int(np.argmax(np.where(np.isnan(error), np.inf, error)))
    assert error[worst] <= ERRORS[name], f"{x[worst]!r} gives {y[worst]!r}, expected {expected[worst]!r}"


@pytest_device
@pytest.mark.parametrize("name", ["pow", "atan2", "fmod"])
def test_function_of_two_webgpu_matches_numpy(name: str, webgpu: Device) -> None:
    ends = [0.0, -0.0, 1.0, -1.0, 2.0, -3.0, 0.5, -2.5, 8.0, 1000.0, -1e30, 3e38, np.inf, -np.inf, np.nan, 0.1, 17.25]
    rng = np.random.default_rng(4)
    a, b = (np.array(p, np.float32).reshape(-1) for p in np.meshgrid(ends, ends))
    wide = (rng.standard_normal(4000) * 10.0 ** rng.integers(-3, 4, 4000)).astype(np.float32)
    a, b = np.concatenate([a, np.abs(wide)]), np.concatenate([b, rng.permutation(wide)])
    n, i = Var("n"), Var("i")
    x, y, z = (Buffer(v, (n,), f32) for v in "xyz")
    func = PrimFunc(
        "two", (x, y, z), 1, For(i, n, BufferStore(z, (i,), call(name, load(x, (i,)), load(y, (i,)))), "group")
    )
    (actual,) = run(webgpu, func, [a, b, np.empty_like(a)])
    functions = {"pow": np.power, "atan2": np.arctan2, "fmod": np.fmod}
    with np.errstate(all="ignore"):
        expected = functions[name](a.astype(np.float64), b.astype(np.float64)).astype(np.float32)
    comparable = (np.abs(expected) >= np.finfo(np.float32).tiny) | (expected == 0) | np.isnan(expected)
    np.testing.assert_allclose(actual[comparable], expected[comparable], rtol=0 if name == "fmod" else 1e-5)
    exact = comparable & (expected == 0)
    np.testing.assert_array_equal(np.signbit(actual[exact]), np.signbit(expected[exact]))


def chosen(x: Expr, y: Expr) -> list[Expr]:
    return [
        maximum(x, y),
        minimum(x, y),
        maximum(x, const(0.0, f32)),
        select(lt(x, y), const(1.0, f32), const(2.0, f32)),
        select(ne(x, x), const(1.0, f32), const(2.0, f32)),
        cast(cast(x, i32), f32),
    ]


@pytest_device
@pytest.mark.parametrize("lanes", [1, 4])
def test_nan_and_infinity_on_webgpu_keep_order(lanes: int, webgpu: Device) -> None:
    """NaN wins min and max, compares false, differs from itself, and casts to the smallest integer."""
    ends = np.array([0.0, -0.0, 1.0, -2.5, 3e38, -3e38, np.inf, -np.inf, np.nan, 5e9, 7.0, -7.0], np.float32)
    a, b = (np.array(p, np.float32).reshape(-1) for p in np.meshgrid(ends, ends))
    o, v = Var("o"), Var("v")
    x, y = (Buffer(name, (const(len(a)),), f32) for name in "xy")
    at = o * lanes + v
    outputs = [Buffer(f"r{k}", (const(len(a)),), f32) for k in range(6)]
    stores = seq(
        *(BufferStore(r, (at,), e) for r, e in zip(outputs, chosen(load(x, (at,)), load(y, (at,))), strict=True))
    )
    loop = For(o, const(len(a) // lanes), For(v, const(lanes), stores, "vectorized"), "group")
    func = PrimFunc("order", (x, y, *outputs), 6, loop)
    expected = [np.empty_like(a) for _ in range(6)]
    run_prim(func, [a, b, *expected])
    actual = run(webgpu, func, [a, b, *(np.empty_like(a) for _ in range(6))])
    for k, (f, w) in enumerate(zip(actual, expected, strict=True)):
        np.testing.assert_array_equal(f, w, f"{k}")


def edges(dtype: DType) -> Array:
    low, high = dtype.limits
    numbers = [low, low + 1, low // 3, 0, 1, 2, 3, 7, 100, high // 3, high // 2 + 1, high - 1, high]
    numbers += [-1, -2, -7] if low < 0 else []
    return np.array(sorted(set(numbers)), dtype.numpy)


def whole(x: Expr, y: Expr) -> list[Expr]:
    d = x.dtype
    divisor = select(ne(y, const(0, d)), y, const(1, d))
    return [
        x + y, x - y, x * y, floordiv(x, divisor), floormod(x, divisor), minimum(x, y), maximum(x, y), call("abs", x),
        call("bitwise_and", x, y), call("bitwise_xor", x, y), call("shift_left", x, y), call("shift_right", x, y),
        call("integer_power", x, y),
    ]  # fmt: skip


@pytest_device
@pytest.mark.parametrize("dtype", [i8, u8, i16, u16, i32, u32, i64], ids=str)
def test_integers_webgpu_wrap_as_documented(dtype: DType, webgpu: Device) -> None:
    a, b = (p.reshape(-1) for p in np.meshgrid(edges(dtype), edges(dtype)))
    n, i = Var("n"), Var("i")
    x, y = Buffer("x", (n,), dtype), Buffer("y", (n,), dtype)
    values = whole(load(x, (i,)), load(y, (i,)))
    for start in range(0, len(values), 6):  # an adapter can bind only a few arrays
        part = values[start : start + 6]
        results = [Buffer(f"r{k}", (n,), dtype) for k in range(len(part))]
        stores = seq(*(BufferStore(r, (i,), e) for r, e in zip(results, part, strict=True)))
        func = PrimFunc("whole", (x, y, *results), len(part), For(i, n, stores, "group"))
        expected = [np.empty_like(a) for _ in part]
        run_prim(func, [a, b, *expected])
        actual = run(webgpu, func, [a, b, *(np.empty_like(a) for _ in part)])
        for k, (f, w) in enumerate(zip(actual, expected, strict=True)):
            np.testing.assert_array_equal(f, w, f"{values[start + k].op}")


@pytest_device
@pytest.mark.parametrize("source", [f32, f16, bf16, i8, u16, u32, i64], ids=str)
def test_casts_webgpu_match_interpreter(source: DType, webgpu: Device) -> None:
    targets = [i8, u8, i16, u16, i32, u32, i64, f32, f16, bf16]
    around = [float(1 << k) for k in (7, 8, 15, 16, 24, 31, 32, 62, 63)]
    floats = [0.0, 0.5, 0.99, 1.5, 2.5, 300.7, 1e9, 1e19, 65519.0, 65520.0, np.inf, np.nan, *around]
    if source.is_float:
        with np.errstate(over="ignore"):
            x = np.array([*floats, *(-f for f in floats)], np.float32).astype(source.numpy)
    else:
        x = edges(source)
    n, i = Var("n"), Var("i")
    given = Buffer("x", (n,), source)
    for start in range(0, len(targets), 5):
        results = [Buffer(f"r{k}", (n,), t) for k, t in enumerate(targets[start : start + 5])]
        stores = seq(*(BufferStore(r, (i,), cast(load(given, (i,)), r.dtype)) for r in results))
        func = PrimFunc("casts", (given, *results), len(results), For(i, n, stores, "group"))
        expected = [np.empty(len(x), r.dtype.numpy) for r in results]
        run_prim(func, [x, *expected])
        actual = run(webgpu, func, [x, *(np.empty_like(w) for w in expected)])
        for r, f, w in zip(results, actual, expected, strict=True):
            np.testing.assert_array_equal(f.astype(np.float64), w.astype(np.float64), f"{source} to {r.dtype}")


@pytest_device
@pytest.mark.parametrize("dtype", [f16, bf16, f8e4m3fn, f4e2m1], ids=str)
def test_packed_floats_webgpu_round_to_nearest(dtype: DType, webgpu: Device) -> None:
    codes = np.arange(1 << min(dtype.bits, 16), dtype=np.uint16 if dtype.bytes == 2 else np.uint8).view(dtype.numpy)
    numbers = np.unique(codes.astype(np.float32)[np.isfinite(codes.astype(np.float32))])
    middle = (numbers[1:].astype(np.float64) + numbers[:-1]) / 2
    x = np.concatenate([numbers, middle.astype(np.float32), np.nextafter(middle.astype(np.float32), np.float32(0))])[
        ::3
    ]
    x = x[np.abs(x) > np.finfo(np.float32).tiny]  # denormal floats may be read as 0
    n, i = Var("n"), Var("i")
    a, packed, back = Buffer("a", (n,), f32), Buffer("p", (n,), dtype), Buffer("b", (n,), f32)
    stores = seq(
        BufferStore(packed, (i,), cast(load(a, (i,)), dtype)), BufferStore(back, (i,), cast(load(packed, (i,)), f32))
    )
    func = PrimFunc("rounded", (a, packed, back), 2, For(i, n, stores, "group"))
    actual, again = run(webgpu, func, [x, np.empty(len(x), dtype.numpy), np.empty_like(x)])
    expected = x.astype(dtype.numpy)
    np.testing.assert_array_equal(actual.astype(np.float32), expected.astype(np.float32))
    np.testing.assert_array_equal(again, expected.astype(np.float32))
    assert ml_dtypes.finfo(dtype.numpy).bits == dtype.bits
