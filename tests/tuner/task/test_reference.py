"""The reference: the same values as the interpreter, in f64; and how far a right kernel may be from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from tests.support import zoo
from tests.support.tuner_models import task_variants_of

from relax_tune.errors import VerifyError
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, f32, i8, i32, i64, u8, u32, u64
from relax_tune.ir.core.expr import Var, call, const, load, minimum
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.scalar_ops import MATH, SCALAR_OPS, converted
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterVar, Stmt
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.interp import reference
from relax_tune.ir.interp.interp import bind_symbols, run_prim
from relax_tune.ir.interp.rounding_errors import rounding_errors
from relax_tune.tuner.task import check as check_module
from relax_tune.tuner.task.check import CheckCases, check_case, check_elements
from relax_tune.tuner.task.domain import Domain
from relax_tune.tuner.task.reference import evaluate, tolerances


@pytest.mark.parametrize(
    ("case", "dims"),
    [(c, d) for c in zoo.cases() for d in c.sizes],
    ids=lambda x: x.name if hasattr(x, "name") else None,
)
def test_agrees_with_the_interpreter_and_with_numpy(case: zoo.Case, dims: Mapping[str, int]) -> None:
    arguments, expected = case.arguments(np.random.default_rng(1), dims)
    inputs = arguments[: len(case.func.input_buffers)]
    env = bind_symbols(case.func, arguments, case.scalar_arguments(dims))
    symbols = {v: int(env[v]) for v in case.func.symbols}
    found = evaluate(case.func, inputs, symbols)
    run_prim(case.func, arguments, case.scalar_arguments(dims))
    for f, e, a in zip(found, expected, arguments[len(inputs) :], strict=True):
        assert f.shape == e.shape == a.shape
        assert f.dtype == np.float64
        np.testing.assert_allclose(f, e, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(a, f, rtol=2e-5, atol=2e-5)


def turned(name: str, reduce: bool) -> PrimFunc:
    """y[j, i] = x[i, j], or the sum over k of x[i, k] * w[k, j]: iterators in another order than the store's indices."""
    n, m, depth = Var("n"), Var("m"), const(5)
    i, j, k = Var("i"), Var("j"), Var("k")
    x = Buffer("x", (n, depth if reduce else m), f32)
    w, y = Buffer("w", (depth, m), f32), Buffer("y", (m, n), f32)
    iters = (IterVar(i, n), IterVar(j, m), *((IterVar(k, depth, "reduce"),) if reduce else ()))
    loops = tuple(Var(f"l{v.var.name}") for v in iters)
    value = load(y, (j, i)) + load(x, (i, k)) * load(w, (k, j)) if reduce else load(x, (i, j))
    init = BufferStore(y, (j, i), const(0.0)) if reduce else None
    body: Stmt = Block("turn", iters, loops, BufferStore(y, (j, i), value), init)
    for var, it in reversed(list(zip(loops, iters, strict=True))):
        body = For(var, it.extent, body)
    return PrimFunc(name, (x, w, y) if reduce else (x, y), 1, body)


@pytest.mark.parametrize(("chunk", "parts"), [(35, 1), (13, 4), (1, 7)])
def test_reference_evaluates_row_invariant_parts_once(chunk: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large matrix costs as much for many rows as for one."""
    monkeypatch.setattr(reference, "PRODUCT_CHUNK", chunk)
    contract, found = reference.BlockEvaluator._contract, list[int]()
    monkeypatch.setattr(
        reference.BlockEvaluator, "_contract", lambda s, a, b, x: (found.append(a.size), contract(s, a, b, x))[1]
    )
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((7, 5), np.float32), rng.standard_normal((5, 3), np.float32)
    func = turned("many", True)
    (y,) = evaluate(func, [x, w], {v: {"n": 7, "m": 3}[v.name] for v in func.symbols})
    np.testing.assert_allclose(y, (x.astype(float) @ w.astype(float)).T)
    assert len(found) == parts and sum(found) == x.size


@pytest.mark.parametrize(("n", "m"), [(0, 4), (1, 1), (7, 3), (3, 0)])
def test_stores_in_another_order_than_the_iterators(n: int, m: int) -> None:
    rng = np.random.default_rng(n)
    x, w = rng.standard_normal((n, 5)).astype(np.float32), rng.standard_normal((5, m)).astype(np.float32)
    image = rng.standard_normal((n, m)).astype(np.float32)
    for func, inputs, expected in (
        (turned("copy", False), [image], image.T.astype(np.float64)),
        (turned("product", True), [x, w], (x.astype(np.float64) @ w).T),
    ):
        (found,) = evaluate(func, inputs, dict(zip(func.symbols, (n, m), strict=True)))
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
        out = np.full((m, n), np.nan, np.float32)
        run_prim(func, [*inputs, out])
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_reference_evaluates_one_image_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first iterator with several values is cut, and parts give the results of the whole."""
    b = TensorBuilder("shifted")
    h = Var("h")
    x, y = b.input("X", (1, h, 6)), b.output("Y", (1, h, 6))
    b.compute(y, lambda n, i, j: x[n, i, j] * 2.0 + x[n, minimum(i + 1, h - 1), j])
    func, image = b.finish(), np.random.default_rng(0).standard_normal((1, 9, 6)).astype(np.float32)
    value, parts = reference.BlockEvaluator._value, list[int]()
    monkeypatch.setattr(reference.BlockEvaluator, "_value", lambda s, e: (parts.append(s.extents[1]), value(s, e))[1])
    wide = image.astype(np.float64)
    expected = wide * 2.0 + wide[:, [*range(1, 9), 8]]
    for chunk, cuts in ((reference.CHUNK, [9]), (24, [4, 4, 1]), (1, [1] * 9)):
        monkeypatch.setattr(reference, "CHUNK", chunk)
        parts.clear()
        (found,) = evaluate(func, [image], {h: 9})
        assert parts == cuts
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [i8, u8, i32, u32, i64, u64])
@pytest.mark.parametrize("source", [np.float16, np.float32, np.float64])
def test_casts_of_values_within_a_type_equal_casts_beside_others(dtype: DType, source: type[np.floating[Any]]) -> None:
    """An array of values that the type has takes a shorter way than one with NaN."""
    values = np.array([-129.0, -128.5, -1.5, -0.5, 0.0, 0.5, 127.5, 255.9, 300.0], source)
    beside = converted(np.append(values, source(np.nan)), dtype)[:-1]
    found = converted(values, dtype)
    assert found.dtype == beside.dtype
    np.testing.assert_array_equal(found, beside)


def test_reference_of_empty_reduction_is_the_initial_value() -> None:
    by_name = {c.name: c.func for c in zoo.cases()}
    for name, start in (("row_sum", 0.0), ("row_max", -np.inf)):
        func = by_name[name]
        (found,) = evaluate(func, [np.zeros((4, 0), np.float32)], dict(zip(func.symbols, (4, 0))))
        assert found.tolist() == [start] * 4


def alternating(transposed: bool) -> PrimFunc:
    """y[i, j] = x[i, 2, j] - (x[i, 1, j] - (x[i, 0, j] - 1)), or the same at y[j, i]: no sum, product, max or min."""
    n, i, j, k = Var("n"), Var("i"), Var("j"), Var("k")
    x = Buffer("x", (n, const(3), const(4)), f32)
    y = Buffer("y", (const(4), n) if transposed else (n, const(4)), f32)
    place = (j, i) if transposed else (i, j)
    iters = (IterVar(i, n), IterVar(j, const(4)), IterVar(k, const(3), "reduce"))
    loops = (Var("li"), Var("lj"), Var("lk"))
    step = BufferStore(y, place, load(x, (i, k, j)) - load(y, place))
    body: Stmt = Block("alternating", iters, loops, step, BufferStore(y, place, const(1.0)))
    for var, it in reversed(list(zip(loops, iters, strict=True))):
        body = For(var, it.extent, body)
    return PrimFunc("alternating", (x, y), 1, body)


@pytest.mark.parametrize("chunk", [1, reference.PRODUCT_CHUNK])
def test_reduction_other_than_a_sum_is_evaluated_by_steps(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "PRODUCT_CHUNK", chunk)
    func, x = alternating(False), np.random.default_rng(0).standard_normal((5, 3, 4)).astype(np.float32)
    wide, symbols = x.astype(np.float64), dict(zip(func.symbols, (5,), strict=True))
    (found,) = evaluate(func, [x], symbols)
    np.testing.assert_allclose(found, wide[:, 2] - (wide[:, 1] - (wide[:, 0] - 1)), rtol=1e-12, atol=1e-12)
    out = np.full((5, 4), np.nan, np.float32)
    run_prim(func, [x, out])
    np.testing.assert_allclose(out, found, rtol=1e-5, atol=1e-5)
    (error,) = rounding_errors(func, [x], symbols)
    assert error.shape == out.shape and (error > 0).all() and (np.abs(out - found) <= error).all()
    assert error.max() < 1e-4


def test_reference_of_unsupported_function_falls_back_to_interpreter() -> None:
    """Reductions by steps are only supported where the results are in the order of the iterators."""
    func = alternating(True)
    with pytest.raises(VerifyError, match="expected results at its iterators"):
        evaluate(func, [np.ones((2, 3, 4), np.float32)], dict(zip(func.symbols, (2,), strict=True)))
    check = check_case(task_variants_of(func, Domain(((1,), (40,)), (0.5, 0.5))).task, 1)
    (expected,) = check.expected
    assert expected.shape == (4, check.symbols["s0"]) and np.isfinite(expected).all() and np.ptp(expected) > 0


@pytest.mark.parametrize("name", sorted(MATH))
def test_reference_scalar_functions_agree_with_interpreter(name: str) -> None:
    n, b = Var("n"), TensorBuilder("one")
    x, z, y = b.input("x", (n,)), b.input("z", (n,)), b.output("y", (n,))
    two = SCALAR_OPS[name].arity == 2
    b.compute(y, lambda i: call(name, x[i], z[i]) if two else call(name, x[i]) + z[i])
    func, rng = b.finish(), np.random.default_rng(3)
    arrays = [(rng.random(16) + shift).astype(np.float32) for shift in (0.25, 0.5)]
    out = np.empty(16, np.float32)
    run_prim(func, [*arrays, out])
    (found,) = evaluate(func, arrays, {n: 16})
    np.testing.assert_allclose(found, out, rtol=2e-6, atol=2e-6)


def test_stores_at_computed_places() -> None:
    case = next(c for c in zoo.cases() if c.name == "concat_blocks")
    check = check_case(task_variants_of(case.func, Domain(((1, 1), (40, 40)), (0.5, 0.5))).task, 1)
    (expected,) = check.expected
    assert expected.shape == (sum(check.symbols.values()), 3) and np.isfinite(expected).all()


@pytest.mark.slow
def test_chunks_of_a_large_block_join() -> None:
    n = Var("n")
    b = TensorBuilder("large")
    x, y = b.input("x", (n, 600)), b.output("y", (n,))
    b.reduce(y, (600,), const(0.0), lambda acc, i, k: acc + x[i, k])
    rows = 20_000  # more than one chunk of 4 Mi elements
    array = np.random.default_rng(2).standard_normal((rows, 600), dtype=np.float32)
    (found,) = evaluate(b.finish(), [array], {n: rows})
    np.testing.assert_allclose(found, array.sum(axis=1, dtype=np.float64), rtol=1e-9, atol=1e-9)


def test_tolerances_grow_with_the_reduction_and_the_magnitude_and_integers_have_none() -> None:
    matmul = next(c for c in zoo.cases() if c.name == "matmul").func
    n, m, k = (next(v for v in matmul.symbols if v.name == name) for name in ("n", "m", "k"))

    def limit(depth: int, size: float) -> float:
        ((_, atol),) = tolerances(matmul, {n: 4, m: 4, k: depth}, [np.full((4, 4), size)])
        return atol

    assert limit(4096, 10.0) > limit(16, 10.0) > limit(16, 0.1) > 0
    assert limit(512, 30.0) < 1e-2  # still finds a wrong element
    b = TensorBuilder("ids")
    s = Var("s")
    x, y = b.input("x", (s,), i64), b.output("y", (s,), i64)
    b.compute(y, lambda i: x[i] * 2)
    func = b.finish()
    assert tolerances(func, {s: 3}, [np.zeros(3)]) == [(0.0, 0.0)]
    (found,) = evaluate(func, [np.array([1, 2, 2**40])], {s: 3})
    assert found.dtype == np.int64 and found.tolist() == [2, 4, 2**41]


def test_costly_checks_are_left_out_on_demand() -> None:
    """A self-test computes the checks of a function up to a limit of elements, and one check always."""
    n = Var("n")
    b = TensorBuilder("wide")
    x, y = b.input("X", (n, 100)), b.output("Y", (n, 100))
    b.compute(y, lambda i, j: x[i, j] * 2.0)
    task = task_variants_of(b.finish(), Domain(((2,), (7,), (500,)), (0.4, 0.4, 0.2))).task
    checks = CheckCases()
    for limit, sizes in (
        (None, [19, 67]),
        (67 * 200, [19, 67]),
        (19 * 200, [19]),
        (10 * 200, [7]),
        (2 * 200, [2]),
        (1, [19]),
    ):
        cases = checks.standard(task) if limit is None else checks.standard(task, limit)
        assert [n for case in cases for n in case.symbols.values()] == sizes


def test_check_elements_of_a_product_counts_factors_and_sums() -> None:
    n = Var("n")
    b = TensorBuilder("product")
    x, w, y = b.input("X", (n, 30)), b.input("W", (30, 50)), b.output("Y", (n, 50))
    b.reduce(y, (30,), const(0.0), lambda y, i, j, k: y + x[i, k] * w[k, j])
    task = task_variants_of(b.finish(), Domain(((1,), (500,)), (0.5, 0.5))).task
    drawn, factors, sums = 7 * 30 + 30 * 50, 7 * 30 + 30 * 50, 7 * 50
    assert check_elements(task, (7,)) == drawn + factors + sums


def test_check_cases_draw_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All cases of a task have the same weights, and drawing them is most of the time of a small check."""
    drawn = list[str]()
    real = check_module.random_array
    monkeypatch.setattr(check_module, "random_array", lambda *contents: (drawn.append(contents[0]), real(*contents))[1])
    n = Var("n")
    b = TensorBuilder("scaled")
    x, w, y = b.input("X", (n, 10)), b.input("W", (10,), const=True), b.output("Y", (n, 10))
    b.compute(y, lambda i, j: x[i, j] * w[j])
    task = task_variants_of(b.finish(), Domain(((1,), (500,)), (0.5, 0.5))).task
    cases = CheckCases().standard(task)
    assert drawn == ["p0", "p1", "p0"]
    for number, case in enumerate(cases):
        np.testing.assert_array_equal(case.expected[0], check_case(task, number).expected[0])


def test_check_cases_at_one_shape_evaluate_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of fixed size has one shape: of both standard cases and of its plan."""
    evaluated, real = list[int](), check_module.evaluate
    monkeypatch.setattr(check_module, "evaluate", lambda *a: (evaluated.append(1), real(*a))[1])
    b = TensorBuilder("fixed")
    x, y = b.input("X", (4, 10)), b.output("Y", (4, 10))
    b.compute(y, lambda i, j: x[i, j] * 2.0)
    task = task_variants_of(b.finish(), Domain(((),), (1.0,))).task
    checks = CheckCases()
    (case,) = checks.standard(task)
    assert checks.all_at(task, task.domain.points) == (case,)
    assert len(evaluated) == 1
