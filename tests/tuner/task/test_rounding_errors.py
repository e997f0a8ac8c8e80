"""Checks know how far rounding is amplified: right kernels pass next to ties and cancellations, wrong ones fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support import zoo
from tests.support.tuner_models import QUICK

from relax_tune.database.store import MemoryStore
from relax_tune.ir.core.dtype import f32, i8, i32
from relax_tune.ir.core.expr import call, cast, const, div, maximum, minimum
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp import bind_symbols, run_prim
from relax_tune.ir.interp.rounding_errors import rounding_errors
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.measure.device_process.compare import difference
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.task.reference import evaluate, rounding_slack, tolerances

Array = NDArray[Any]
F = np.float32


class Judge:
    """The check of a function at some inputs, as a device process makes it."""

    def __init__(self, func: PrimFunc, inputs: list[Array]) -> None:
        assert not func.symbols
        self.expected = evaluate(func, inputs, {})
        self.limits = tolerances(func, {}, self.expected)
        self.slack = rounding_slack(func, inputs, {}, self.expected, self.limits)
        self.dtypes = [b.dtype.numpy for b in func.output_buffers]

    @property
    def wanted(self) -> Array:
        return self.expected[0].astype(self.dtypes[0])

    def says(self, found: Array, with_slack: bool = True) -> str | None:
        return difference("y", found, self.wanted, *self.limits[0], self.slack[0] if with_slack else None)


def quantise(rows: int, columns: int) -> PrimFunc:
    """The rows of x as int8, each by a scale of its own."""
    b = TensorBuilder("quantise")
    x, s, y = b.input("x", (rows, columns)), b.input("s", (rows,)), b.output("y", (rows, columns), i8)
    b.compute(
        y,
        lambda i, j: cast(maximum(minimum(call("rint", div(x[i, j], s[i])), const(127.0)), const(-127.0)), i8),
        name="round",
    )
    return b.finish()


def rows_of(rows: int, columns: int) -> tuple[Array, Array]:
    x = np.random.default_rng(3).standard_normal((rows, columns)).astype(F)
    return x, (np.abs(x).max(1) / F(127)).astype(F)


def rounded(x: Array) -> Array:
    return np.clip(np.rint(x), -127, 127).astype(np.int8)


@pytest.mark.parametrize("columns", [768, 2048])
def test_check_of_rounded_rows_passes_each_right_kernel(columns: int) -> None:
    x, s = rows_of(600, columns)
    judge = Judge(quantise(600, columns), [x, s])
    right = [rounded(x / s[:, None]), rounded(x * (F(1) / s)[:, None]), judge.wanted]
    assert [judge.says(y) for y in right] == [None] * 3
    assert any(judge.says(y, with_slack=False) for y in right)  # the kernels do differ at ties
    assert judge.slack[0] is not None and 0 < np.count_nonzero(judge.slack[0]) < 1e-3 * x.size
    assert judge.slack[0].max() == 1


def off_by_one_at(places: NDArray[np.bool_], y: Array) -> Array:
    return np.where(places, y - np.sign(y) - (y == 0), y).astype(y.dtype)


ROW_MUTANTS: Mapping[str, Callable[[Array, Array, Array], Array]] = {
    "off by one everywhere": lambda x, s, slack: off_by_one_at(np.ones(x.shape, bool), rounded(x / s[:, None])),
    "off by one at a hundredth": lambda x, s, slack: off_by_one_at(
        (np.random.default_rng(1).random(x.shape) < 0.01) & (slack == 0), rounded(x / s[:, None])
    ),
    "off by one at one place": lambda x, s, slack: off_by_one_at(
        np.arange(x.size).reshape(x.shape) == np.flatnonzero(slack == 0)[5], rounded(x / s[:, None])
    ),
    "off by two at ties": lambda x, s, slack: (rounded(x / s[:, None]) + 2 * (slack > 0)).astype(np.int8),
    "column beside": lambda x, s, slack: rounded(np.roll(x, 1, 1) / s[:, None]),
    "row beside": lambda x, s, slack: rounded(x / np.roll(s, 1)[:, None]),
    "last column left out": lambda x, s, slack: rounded(
        np.where(np.arange(x.shape[1]) < x.shape[1] - 1, x, 0) / s[:, None]
    ),
    "scale off by a hundredth": lambda x, s, slack: rounded(x / (s * F(1.01))[:, None]),
    "truncated": lambda x, s, slack: np.clip(np.trunc(x / s[:, None]), -127, 127).astype(np.int8),
}


@pytest.mark.parametrize("mutant", ROW_MUTANTS)
def test_check_of_rounded_rows_fails_each_wrong_kernel(mutant: str) -> None:
    x, s = rows_of(600, 768)
    judge = Judge(quantise(600, 768), [x, s])
    assert judge.slack[0] is not None
    assert judge.says(ROW_MUTANTS[mutant](x, s, judge.slack[0])) is not None


def linear(rows: int, columns: int, depth: int) -> PrimFunc:
    """int8 rows by int8 weights, summed in int32, by the scales of rows and columns."""
    b = TensorBuilder("linear")
    x, w = b.input("x", (rows, depth), i8), b.input("w", (columns, depth), i8)
    s, t = b.input("s", (rows,)), b.input("t", (columns,))
    total, y = b.alloc("total", (rows, columns), i32), b.output("y", (rows, columns))
    b.reduce(
        total, (depth,), const(0, i32), lambda acc, i, j, k: acc + cast(x[i, k], i32) * cast(w[j, k], i32), name="dots"
    )
    b.compute(y, lambda i, j: cast(total[i, j], f32) * s[i] * t[j], name="scale")
    return b.finish()


def test_check_of_whole_number_products_passes_right_and_fails_wrong_kernels() -> None:
    x, s = rows_of(600, 768)
    q = rounded(x / s[:, None])
    rng = np.random.default_rng(5)
    w, t = rng.integers(-127, 128, (32, 768)).astype(np.int8), rng.uniform(0.5, 2, 32).astype(F)
    judge = Judge(linear(600, 32, 768), [q, w, s, t])
    total = q.astype(np.int32) @ w.T.astype(np.int32)
    assert judge.says(total.astype(F) * s[:, None] * t) is None
    assert judge.says(total.astype(F) * (s[:, None] * t)) is None
    short = q[:, :-1].astype(np.int32) @ w[:, :-1].T.astype(np.int32)
    beside = np.roll(q, 1, 1).astype(np.int32) @ w.T.astype(np.int32)
    for wrong in (short, beside, total * 1.01, total + 400):
        assert judge.says((wrong.astype(F) * s[:, None] * t).astype(F)) is not None


def product(rows: int, columns: int, depth: int) -> PrimFunc:
    b = TensorBuilder("product")
    x, w, y = b.input("x", (rows, depth)), b.input("w", (depth, columns)), b.output("y", (rows, columns))
    b.reduce(y, (depth,), const(0.0), lambda acc, i, j, k: acc + x[i, k] * w[k, j], name="dots")
    return b.finish()


def test_check_of_sums_passes_other_orders_and_fails_wrong_kernels() -> None:
    rng = np.random.default_rng(7)
    x, w = rng.standard_normal((40, 2048)).astype(F), rng.standard_normal((2048, 24)).astype(F)
    judge = Judge(product(40, 24, 2048), [x, w])
    terms = x[:, :, None] * w[None]
    in_order = np.add.accumulate(terms, 1)[:, -1]
    assert [judge.says(y) for y in (in_order, np.add.accumulate(terms[:, ::-1], 1)[:, -1], x @ w)] == [None] * 3
    for wrong in (in_order - terms[:, -1], np.roll(x, 1, 1) @ w, x @ w * F(1.01), in_order - terms[:, 0]):
        assert judge.says(wrong.astype(F)) is not None


def normalised(rows: int, columns: int) -> PrimFunc:
    """(x - m) / sqrt(max(q - m * m, 0) + 1e-12), whose mean m and mean of squares q are inputs."""
    b = TensorBuilder("normalised")
    x, m, q = b.input("x", (rows, columns)), b.input("m", (rows,)), b.input("q", (rows,))
    y = b.output("y", (rows, columns))
    b.compute(
        y,
        lambda i, j: (x[i, j] - m[i]) * call("rsqrt", maximum(q[i] - m[i] * m[i], const(0.0)) + const(1e-12)),
        name="normalise",
    )
    return b.finish()


def test_check_of_cancelling_variance_passes_right_and_fails_wrong_kernels() -> None:
    rng = np.random.default_rng(11)
    x, m = rng.standard_normal((400, 96)).astype(F), rng.standard_normal(400).astype(F)
    near = (m.astype(np.float64) ** 2 * (1 + rng.choice([1e-7, -1e-7, 3e-8, 0.0], 400))).astype(F)
    q = np.where(np.arange(400) % 4, near, m * m + F(0.5)).astype(F)
    judge = Judge(normalised(400, 96), [x, m, q])
    plain = (q - m * m).astype(F)
    fused = (q.astype(np.float64) - m.astype(np.float64) ** 2).astype(F)  # one rounding, as by FMA
    right = [((x - m[:, None]) / np.sqrt(np.maximum(v, 0) + F(1e-12))[:, None]).astype(F) for v in (plain, fused)]
    assert [judge.says(y) for y in right] == [None] * 2
    assert any(judge.says(y, with_slack=False) for y in right)
    for wrong in (right[0] * F(1.01), np.roll(right[0], 1, 1), np.roll(right[0], 1, 0), x * F(1)):
        assert judge.says(wrong.astype(F)) is not None


@pytest.mark.parametrize(
    ("case", "dims"), [(c, c.sizes[-1]) for c in zoo.cases()], ids=lambda x: x.name if hasattr(x, "name") else None
)
def test_rounding_errors_bound_single_precision(case: zoo.Case, dims: Mapping[str, int]) -> None:
    arguments, _ = case.arguments(np.random.default_rng(1), dims)
    inputs = arguments[: len(case.func.input_buffers)]
    env = bind_symbols(case.func, arguments, case.scalar_arguments(dims))
    symbols = {v: int(env[v]) for v in case.func.symbols}
    exact = evaluate(case.func, inputs, symbols)
    bounds = rounding_errors(case.func, inputs, symbols)
    run_prim(case.func, arguments, case.scalar_arguments(dims))
    for bound, e, found in zip(bounds, exact, arguments[len(inputs) :], strict=True):
        assert (np.abs(found.astype(np.float64) - e) <= bound + 1e-30).all()
        assert (
            bound <= 1e-4 * np.maximum(np.abs(e), np.abs(e).max(initial=0))
        ).all()  # and none of these amplifies it much


@pytest.mark.self_test
@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.slow
@pytest.mark.parametrize("width", [768, 2048])
def test_tested_build_with_int8_activations_refuses_nothing(width: int) -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 1, 1024), width))
    w = g.constant("w", np.random.default_rng(0).standard_normal((width, 16)).astype(F))
    module = g.finish(g.call(Matmul(), x, w))
    with contextlib.closing(LocalRunner("c")) as runner:
        job = device_job(module, runner.device_info(), MemoryStore(), replace(QUICK, activations="int8"))
        built = job.tested_build(runner)
    assert built.self_test is not None and built.self_test["failed"] == []
