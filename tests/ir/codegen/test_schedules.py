"""Scheduled functions on every target: tails, tiles, loop kinds and element types against the interpreter or NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.ir.codegen import codegen_cases as make
from tests.ir.codegen.codegen_runner import CANARY, TARGETS, Compiled, opened
from tests.support.effort import examples, some

from relax_tune.ir.core.dtype import DType, bf16, bool_, f16, f32, f64, i8, i32, i64, u8
from relax_tune.ir.core.expr import (
    Expr,
    and_,
    as_int,
    call,
    cast,
    const,
    div,
    floormod,
    lt,
    maximum,
    minimum,
    not_,
    select,
)
from relax_tune.ir.interp.interp import run_prim
from relax_tune.runtime.device.base import Device

LANGUAGES = ("c", "opencl")
TAILS = ("predicate", "peel", "pow2", "exact", "narrow")


@pytest.fixture(scope="module", params=LANGUAGES)
def device(request: pytest.FixtureRequest) -> Any:
    opened_device = opened(request.param)
    yield request.param, opened_device
    opened_device.close()


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (np.vectorize(math.erf, otypes=[float])(x * math.sqrt(0.5)) + 1)


TILES: tuple[tuple[int, int, Any], ...] = (
    (4, 16, "pow2"), (4, 16, "peel"), (6, 8, "pow2"), (3, 5, "pow2"), (3, 24, "peel"), (1, 8, "predicate"),
    (4, 12, "predicate"), (2, 20, "pow2"), (5, 16, "exact"), (2, 24, "exact"),
)  # fmt: skip


@pytest.mark.process
def test_tiled_matmul(device: tuple[str, Device]) -> None:
    language, machine = device
    tiles = some(TILES, 2)
    funcs = [
        make.matmul(language, rows, cols, 7, tail, compact=cols in (16, 5), guarded_init=rows != 4)
        for rows, cols, tail in tiles
    ]
    for (rows, cols, tail), run in zip(tiles, Compiled.together(machine, language, funcs), strict=True):
        _check_matmul(run, rows, cols, tail)


def _check_matmul(run: Compiled, rows: int, cols: int, tail: str) -> None:
    rng = np.random.default_rng(3)
    sizes = {0, 1, rows - 1, rows, rows + 1, 2 * rows + 3, 13}
    for m, n in product(sorted(sizes), (1, cols - 1, cols, 2 * cols + 1)):
        what = f"{rows}x{cols} {tail}: {m} {n}"
        a, b = rng.standard_normal((m, 7), np.float32), rng.standard_normal((7, n), np.float32)
        bias = rng.standard_normal(n, np.float32)
        (c,) = run([a, b, bias, np.empty((m, n), np.float32)])
        np.testing.assert_allclose(c, gelu(a.astype(float) @ b + bias), rtol=1e-5, atol=1e-5, err_msg=what)


@pytest.mark.process
def test_row_softmax(device: tuple[str, Device]) -> None:
    language, machine = device
    choices: list[tuple[int, Any]] = some(
        [(16, "predicate"), (16, "peel"), (24, "pow2"), (12, "peel"), (64, "peel")], 2
    )
    funcs = [make.row_softmax(language, tile, tail) for tile, tail in choices]
    for (tile, _tail), run in zip(choices, Compiled.together(machine, language, funcs), strict=True):
        _check_softmax(run, tile)


def _check_softmax(run: Compiled, tile: int) -> None:
    rng = np.random.default_rng(4)
    for n, m in ((1, 1), (3, tile - 1), (2, tile), (5, tile + 1), (2, 3 * tile + 7), (0, 4)):
        x = rng.standard_normal((n, m), np.float32) * np.float32(5)
        if n > 2:
            x[0, 0], x[1, :] = -np.inf, np.float32(-3e38)
        (y,) = run([x, np.empty_like(x)])
        e = np.exp(x.astype(float) - x.max(axis=1, keepdims=True, initial=-np.inf))
        np.testing.assert_allclose(y, e / e.sum(axis=1, keepdims=True), rtol=2e-6, atol=1e-12, err_msg=f"{n} {m}")
    x = np.ones((2, tile + 3), np.float32)
    x[0, 1] = np.nan
    (y,) = run([x, np.empty_like(x)])
    assert np.isnan(y[0]).all() and np.isfinite(y[1]).all()


KINDS = st.sampled_from(["serial", "unrolled", "vectorized"])


@pytest.mark.process
@settings(max_examples=examples(6), deadline=None, derandomize=True)
@given(
    tiles=st.tuples(st.integers(1, 5), st.integers(1, 40)),
    kinds=st.tuples(KINDS, KINDS),
    tails=st.tuples(st.sampled_from(TAILS), st.sampled_from(TAILS)),
    lanes=st.sampled_from([4, 8]),
    extra=st.lists(st.integers(0, 90), max_size=2),
)
@example(tiles=(2, 1), kinds=("serial", "vectorized"), tails=("predicate", "narrow"), lanes=4, extra=[])
@example(tiles=(3, 8), kinds=("serial", "vectorized"), tails=("peel", "narrow"), lanes=4, extra=[3, 33])
@pytest.mark.parametrize("language", LANGUAGES)
def test_pointwise_schedules(
    language: str, tiles: tuple[int, int], kinds: Any, tails: Any, lanes: int, extra: list[int]
) -> None:
    machine = opened(language)
    func = make.pointwise(language, tiles, kinds, tails, lambda x: x * x + 1.0)
    run = Compiled(machine, language, func, lanes * 2 if language == "c" else lanes)
    whole = tiles[0] * tiles[1]
    for n in {0, 1, whole - 1, whole, whole + 1, *extra}:
        x = np.random.default_rng(n).standard_normal(n, np.float32)
        (y,) = run([x, np.empty_like(x)])
        expected = np.empty_like(x)
        run_prim(func, [x, expected])
        np.testing.assert_allclose(y, expected, rtol=1e-6, err_msg=f"{n}")
    machine.close()


BOUNDS: tuple[tuple[int, int, Callable[[Expr], Expr]], ...] = (
    (4, 16, lambda r: 40 - r * 16), (3, 16, lambda r: 50 - r * 16), (4, 16, lambda r: 16 - r * 4),
    (16, 16, lambda r: r + 1), (5, 16, lambda r: const(4) - r),
)  # fmt: skip


@pytest.mark.process
def test_narrow_tail_of_ragged_rows_stays_within_conditions(device: tuple[str, Device]) -> None:
    language, machine = device
    funcs = [make.ragged_rows(language, rows, cols, bound) for rows, cols, bound in BOUNDS]
    for (rows, cols, bound), run in zip(BOUNDS, Compiled.together(machine, language, funcs), strict=True):
        x = np.random.default_rng(1).standard_normal((rows, cols), np.float32)
        expected = np.full(x.nbytes, CANARY, np.uint8).view(np.float32).reshape(x.shape)
        for r in range(rows):
            end = max(as_int(bound(const(r))) or 0, 0)
            expected[r, :end] = x[r, :end] + 1
        (y,) = run([x, np.empty_like(x)])
        np.testing.assert_array_equal(y, expected)


def _fill(dtype: DType, n: int) -> np.ndarray:
    rng = np.random.default_rng(5)
    if dtype.is_float:
        return rng.standard_normal(n).astype(dtype.numpy) * 3
    if dtype is bool_:
        return rng.integers(0, 2, n).astype(bool)
    return rng.integers(0 if dtype is u8 else -100, 100, n).astype(dtype.numpy)


VALUES: list[tuple[str, DType, DType, Callable[[Expr], Expr]]] = [
    ("widen i8", i8, f32, lambda x: cast(x, f32) * 0.5),
    ("widen u8", u8, f32, lambda x: cast(x, f32) * 0.5),
    ("i8 to i32", i8, i32, lambda x: cast(x, i32) * 3 + 1),
    ("f32 to i32", f32, i32, lambda x: cast(x * 4.0, i32)),
    ("f32 to i8", f32, i8, lambda x: cast(x * 4.0, i8)),
    ("f64", f64, f64, lambda x: call("exp", x) + call("sqrt", call("abs", x))),
    ("f32 to f64", f32, f64, lambda x: cast(x, f64) * 0.1),
    ("f64 to f32", f64, f32, lambda x: cast(x, f32) * 2.0),
    ("i64", i64, i64, lambda x: x * 3 - 7),
    ("i64 division", i64, i64, lambda x: x // 7 * 10 + x % 7),
    ("i32 remainder", i32, i32, lambda x: floormod(x, const(7, i32))),
    ("i64 to f32", i64, f32, lambda x: cast(x, f32) + 0.5),
    ("bool to f32", bool_, f32, lambda x: select(x, const(2.0), const(-1.0))),
    ("compare", f32, bool_, lambda x: and_(lt(x, 1.0), not_(lt(x, -1.0)))),
    ("compare f64", f64, f32, lambda x: select(lt(x, const(0.5, f64)), const(1.0), const(0.0))),
    ("cast bool", bool_, f32, lambda x: cast(x, f32)),
    ("relu", f32, f32, lambda x: maximum(x, 0.0)),
    ("clip", f32, f32, lambda x: minimum(maximum(const(-1.0), x), 1.5)),
    ("select", f32, f32, lambda x: select(lt(x, 0.0), x * 0.1, x)),
    ("int select", i32, i32, lambda x: select(lt(x, const(3, i32)), x, const(0, i32) - x)),
    ("shared", f32, f32, lambda x: div(x, call("exp", x * -1.0) + 1.0) + call("exp", x * -1.0)),
    ("floor", f32, f32, lambda x: call("floor", x) + call("rsqrt", call("abs", x) + 1.0)),
    ("power", f32, f32, lambda x: call("pow", x, const(2.0)) + call("pow", call("abs", x), const(1.5))),
    ("f16 to f32", f16, f32, lambda x: cast(x, f32) * 0.5),
    ("f32 to f16", f32, f16, lambda x: cast(x * 0.5, f16)),
    ("same f16", f16, f16, lambda x: x),
    ("i32 to f16", i32, f16, lambda x: cast(x, f16)),
    ("bool to bf16", bool_, bf16, lambda x: cast(x, bf16)),
    ("bf16 to i8", bf16, i8, lambda x: cast(x * 4.0, i8)),
    ("same bf16", bf16, bf16, lambda x: select(lt(x, 0.0), maximum(x, -2.0), x)),
    ("f16 to bf16 to f32", f16, f32, lambda x: cast(cast(x, bf16), f32) * 0.5),
    ("same", i8, i8, lambda x: x),
    ("same bool", bool_, bool_, lambda x: x),
]


@pytest.mark.process
@pytest.mark.parametrize("kind", ["vectorized", "serial"])
def test_element_types(device: tuple[str, Device], kind: Any) -> None:
    language, machine = device
    tile = 16 if language == "c" else 8
    chosen = VALUES if kind == "vectorized" else VALUES[::3]
    funcs = [
        make.pointwise(language, (2, tile), ("serial", kind), ("peel", "predicate"), value, source, target)
        for _name, source, target, value in chosen
    ]
    for (name, source, target, _value), run in zip(chosen, Compiled.together(machine, language, funcs), strict=True):
        for n in (0, 1, 2 * tile, 3 * tile + 5):
            x = _fill(source, n)
            (y,) = run([x, np.empty(n, target.numpy)])
            expected = np.empty(n, target.numpy)
            run_prim(run.func, [x, expected])
            np.testing.assert_allclose(y, expected, rtol=2e-6, atol=1e-7, err_msg=f"{name} {n}")


@pytest.mark.process
def test_nan_and_infinity_agree_with_numpy(device: tuple[str, Device]) -> None:
    language, machine = device
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 2.0, -2.0, np.nan] * 3, np.float32)
    tile = 16 if language == "c" else 8
    for value in (lambda v: maximum(v, 0.0), lambda v: minimum(v * 2.0, v), lambda v: maximum(const(1.0), v)):
        for kind in ("vectorized", "serial"):
            func = make.pointwise(language, (1, tile), ("serial", kind), ("peel", "peel"), value)
            (y,) = Compiled(machine, language, func)([x, np.empty_like(x)])
            expected = np.empty_like(x)
            with np.errstate(all="ignore"):
                run_prim(func, [x, expected])
            np.testing.assert_array_equal(y, expected)


@pytest.mark.process
@pytest.mark.parametrize("vectors", [2, 3, 6])
def test_rest_of_a_tile_of_several_vectors(device: tuple[str, Device], vectors: int) -> None:
    language, machine = device
    lanes = TARGETS[language].lanes
    tile = vectors * lanes
    func = make.pointwise(language, (1, tile), ("serial", "vectorized"), ("peel", "peel"), lambda x: x * 2.0 + 1.0)
    run = Compiled(machine, language, func)
    for n in (0, 1, lanes - 1, lanes, lanes + 1, tile - 1, tile, tile + 1, 2 * tile + lanes + 3):
        x = np.random.default_rng(n).standard_normal(n, np.float32)
        (y,) = run([x, np.empty_like(x)])
        np.testing.assert_array_equal(y, x * 2 + 1, err_msg=str(n))


@pytest.mark.process
def test_long_vectors_become_loops(device: tuple[str, Device]) -> None:
    language, machine = device
    func = make.pointwise(language, (1, 403), ("serial", "vectorized"), ("peel", "predicate"), lambda x: x * 2.0 + 1.0)
    run = Compiled(machine, language, func)
    for n in (0, 5, 402, 403, 404, 1000):
        x = np.random.default_rng(n).standard_normal(n, np.float32)
        (y,) = run([x, np.empty_like(x)])
        np.testing.assert_array_equal(y, x * 2 + 1)
