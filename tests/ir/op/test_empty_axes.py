"""Reductions over an axis without elements (sums are 0, means NaN, extremes and their places an error of the call), and over no axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.built_modules import UNFUSED, executed, job_of
from tests.support.tuner_models import DEVICES, opened

from relax_tune.errors import DeduceError, UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.math.elementwise import MulScalar
from relax_tune.ir.op.reduction.einsum import Einsum
from relax_tune.ir.op.reduction.reduce import Max, MaxOrLowest, Mean, Min, MinOrHighest, Sum
from relax_tune.ir.op.reduction.scan import ArgMax, Prod
from relax_tune.ir.passes.pipeline import STANDARD, Pass

WANT_ELEMENTS = (Max((1,)), Min((1,), True), Max((0, 1)), Max(), ArgMax(1), ArgMax(1, True))
HAVE_VALUES: tuple[tuple[OperatorSpec, float], ...] = (
    (Sum((1,)), 0.0),
    (Prod((1,)), 1.0),
    (Mean((1,)), np.nan),
    (MaxOrLowest((1,)), -np.inf),
    (MinOrHighest((1,)), np.inf),
)


def of_rows(*ops: OperatorSpec, least: int = 0) -> IRModule:
    g = GraphBuilder()
    x = g.call(MulScalar(2.0), g.input("x", (g.symbol("n"), g.symbol("m", least))))
    return g.finish([g.call(op, x) for op in ops])


@pytest.mark.parametrize("op", WANT_ELEMENTS, ids=repr)
def test_extremes_of_empty_axis_are_refused_in_words(op: OperatorSpec) -> None:
    module = of_rows(op)
    for rows in (3, 0):
        with pytest.raises(UserError, match=r"along axis 1: .* 1, got 0"):
            run_function(module, "main", [np.zeros((rows or 1, 0), np.float32)])
    assert np.asarray(run_function(module, "main", [np.ones((2, 3), np.float32)])[0]).size > 0


@pytest.mark.parametrize("kind", DEVICES)
def test_extremes_of_empty_axis_built_are_refused_in_words(kind: str) -> None:
    empty = np.zeros((3, 0), np.float32)
    with opened(kind) as device:
        for passes in (STANDARD, UNFUSED):
            for op in (WANT_ELEMENTS[0], WANT_ELEMENTS[4]):
                job = job_of(of_rows(op), device, passes)
                refused = pytest.raises(UserError, match=r"along axis 1: .* 1, got 0")
                with executed(job.build("generic").program, job, device) as run, refused:
                    run.run([empty])
            job = job_of(of_rows(*(op for op, _ in HAVE_VALUES)), device, passes)
            with executed(job.build("generic").program, job, device) as run:
                result: list[Any] = list(run.run([empty]))
            for (op, value), got in zip(HAVE_VALUES, result, strict=True):
                np.testing.assert_array_equal(got, np.full(3, value, np.float32), err_msg=repr(op))


def test_sums_of_empty_axis_interpreted_have_neutral_values() -> None:
    module = of_rows(*(op for op, _ in HAVE_VALUES))
    result = run_function(module, "main", [np.zeros((3, 0), np.float32)])
    for (op, value), got in zip(HAVE_VALUES, result, strict=True):
        np.testing.assert_array_equal(got, np.full(3, value, np.float32), err_msg=repr(op))


def test_extremes_of_axis_known_to_be_empty_are_refused_at_construction() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 0))
    for op in WANT_ELEMENTS:
        with pytest.raises(DeduceError, match=r"axis 1: .*got 0"):
            g.call(op, x)


def test_extremes_of_axis_known_to_have_elements_add_no_check() -> None:
    assert "required" not in repr(of_rows(*WANT_ELEMENTS, least=1))


NO_AXES = (Sum(()), Prod(()), Mean(()), Max(()), Min((), True), MaxOrLowest(()), MinOrHighest(()), Einsum("ij->ij"))


@pytest.mark.parametrize("passes", [STANDARD, UNFUSED], ids=["fused", "unfused"])
def test_reductions_over_no_axes_are_the_elements(passes: tuple[Pass, ...]) -> None:
    g = GraphBuilder()
    x, scalar = g.input("x", (g.symbol("n"), 4)), g.input("scalar", ())
    of_matrix = [g.call(MulScalar(2.0), g.call(op, x)) for op in NO_AXES]
    of_scalar = [g.call(MulScalar(2.0), g.call(op, scalar)) for op in NO_AXES[:-1]]
    module = g.finish([*of_matrix, *of_scalar])
    given = [np.random.default_rng(1).standard_normal((3, 4), np.float32), np.array(-1.5, np.float32)]
    with opened("c") as device:
        job = job_of(module, device, passes)
        with executed(job.build("generic").program, job, device) as run:
            results = list(run.run(given))
    expected = [given[0] * 2] * len(of_matrix) + [given[1] * 2] * len(of_scalar)
    for op, want, got in zip((*NO_AXES, *NO_AXES), expected, results):
        np.testing.assert_array_equal(got, want, err_msg=repr(op))
