"""Prefix scans by the reference: right for every kind, at lengths whose square no memory holds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from relax_tune.ir.core.dtype import DType, f32, i8
from relax_tune.ir.core.expr import Var, add, const, le, select
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.interp.interp import run_prim
from relax_tune.ir.interp.reference import evaluate_prim
from relax_tune.ir.op.reduction.scan import CumProd, CumSum, Scan

KINDS = tuple(itertools.product((CumSum, CumProd), (0, 1), (False, True), (False, True)))


def scan(op: Scan, dtype: DType = f32) -> PrimFunc:
    return op.legalize("scan", [TensorInfo((Var("n"), Var("m")), dtype)])


@pytest.mark.parametrize(("kind", "axis", "exclusive", "reverse"), KINDS)
@pytest.mark.parametrize("dtype", [f32, i8])
def test_evaluate_scan_gives_results_of_interpreter(
    kind: type[Scan], axis: int, exclusive: bool, reverse: bool, dtype: DType
) -> None:
    func = scan(kind(axis, exclusive, reverse), dtype)
    for shape in ((0, 3), (3, 0), (1, 1), (5, 7)):
        x = (np.random.default_rng(0).standard_normal(shape) * 3).astype(dtype.numpy)
        expected = np.empty(shape, dtype.numpy)
        run_prim(func, [x, expected])
        (actual,) = evaluate_prim(func, [x])
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_evaluate_scan_passes_nan_to_later_results_alone() -> None:
    x = np.array([[1, np.nan, 2]], np.float32)
    assert np.array_equal(evaluate_prim(scan(CumSum(1)), [x])[0], [[1, np.nan, np.nan]], equal_nan=True)
    assert np.array_equal(evaluate_prim(scan(CumSum(1, True, True)), [x])[0], [[np.nan, 2, 0]], equal_nan=True)


def test_evaluate_long_scan_takes_linear_work() -> None:
    func = CumSum(1).legalize("scan", [TensorInfo((const(2), const(1 << 20)), f32)])
    (result,) = evaluate_prim(func, [np.ones((2, 1 << 20), np.float32)])
    assert np.array_equal(result[1], np.arange(1, (1 << 20) + 1))


def test_evaluate_sum_of_prefixes_from_other_value_gives_results_of_interpreter() -> None:
    b = TensorBuilder("sums")
    n = Var("n")
    x = b.input("x", (n,), f32)
    y = b.output("y", (n,), f32)
    b.reduce(y, (n,), const(1.0, f32), lambda old, i, k: add(old, select(le(k, i), x[k], const(1.0, f32))), "sums")
    func, given, expected = b.finish(), np.arange(5, dtype=np.float32), np.empty(5, np.float32)
    run_prim(func, [given, expected])
    np.testing.assert_allclose(evaluate_prim(func, [given])[0], expected)
