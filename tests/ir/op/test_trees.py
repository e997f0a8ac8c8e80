"""Ensembles of decision trees as an operator: loops against NumPy, and built for the processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.programs import agree, opened
from tests.support.random_trees import forest, forest_module

from relax_tune.errors import DeduceError
from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.base import Deduction
from relax_tune.ir.op.reduction.trees import TreeEnsemble
from relax_tune.ir.passes.pipeline import lower

Array = np.ndarray[Any, Any]


def rows_of(n: int, features: int) -> Array:
    x = np.random.default_rng(n).integers(-3, 4, (n, features)).astype(np.float32)
    x[::3, :1] = np.nan
    return x


@pytest.mark.parametrize("trees, depth, targets", [(1, 1, 1), (5, 3, 1), (7, 6, 3), (2, 0, 2)])
@pytest.mark.parametrize("aggregate", ["sum", "min", "max"])
@pytest.mark.parametrize("nan_first", [False, True])
def test_tree_ensemble_loops_equal_numpy(trees: int, depth: int, targets: int, aggregate: str, nan_first: bool) -> None:
    tables = forest(trees, depth, 4, targets, trees, nan_first)
    op = TreeEnsemble(trees, depth, aggregate, nan_first)
    module = forest_module(op, tables, 4)
    for n in (0, 1, 5):
        x = rows_of(n, 4)
        wanted = op.evaluate([x, *tables])
        np.testing.assert_allclose(run_function(lower(module).module, "main", [x]), wanted, rtol=1e-5)


def test_tree_ensemble_sides_of_nan_by_node() -> None:
    # root: feature 0 up to 0 goes to node 1; NaN to node 2 by its side
    feature, child = np.zeros(3, np.int32), np.array([1, 1, 2], np.int32)
    split, row = np.array([0, np.inf, np.inf], np.float32), np.array([0, 0, 1], np.int32)
    values, x = np.array([[1], [2]], np.float32), np.array([[np.nan], [0], [1]], np.float32)
    for side, wanted in ((1, [2, 1, 2]), (0, [1, 1, 2])):
        tables = [feature, child, split, row, values, np.array([side, 0, 0], np.int32)]
        op = TreeEnsemble(1, 1)
        assert op.evaluate([x, *tables])[:, 0].tolist() == wanted
        module = forest_module(op, tables, 1)
        assert np.asarray(run_function(lower(module).module, "main", [x]))[:, 0].tolist() == wanted


@pytest.mark.process
@pytest.mark.ccompiler
def test_tree_ensemble_built_for_the_processor_equals_numpy() -> None:
    tables = forest(50, 6, 5, 2, 1, False)
    module = forest_module(TreeEnsemble(50, 6), tables, 5)
    with opened("c") as device:
        agree(module, device, *([rows_of(n, 5)] for n in (1, 7, 64)))


def test_tree_ensemble_of_integers_raises() -> None:
    infos = [TensorInfo((3, 4), i64), *(TensorInfo((1,), i64) for _ in range(4)), TensorInfo((1, 1), f32)]
    with pytest.raises(DeduceError, match="tree_ensemble"):
        TreeEnsemble(1, 1).infer(infos, Deduction())
