"""Refusals of hoist_factors, and sums with factors per group of steps."""

from __future__ import annotations

import pytest
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.support import schedule_functions as make
from tests.support import zoo
from tests.support.meaning import assert_same_meaning

from relax_tune.ir.core.expr import Var, const
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.schedules.schedule import Schedule


def scaled_sum(k: int | None = 5, start: float = 0.0, local: bool = False) -> PrimFunc:
    """Make y = 1 + sum of x * s over rows; s is an input of the row, or with `local` an intermediate."""
    n, depth = Var("n"), Var("k") if k is None else const(k)
    b = TensorBuilder("scaled_sum")
    x, s, t, y = b.input("x", (n, depth)), b.input("s", (n,)), b.alloc("t", (n,)), b.output("y", (n,))
    scale = b.alloc("own", (n,)) if local else s
    if local:
        b.compute(scale, lambda i: s[i] + 1.0, name="made")
    b.reduce(t, (depth,), const(start), lambda acc, i, r: acc + x[i, r] * scale[i], name="sum")
    b.compute(y, lambda i: t[i] + 1.0, name="more")
    return b.finish()


HOIST = step("hoist_factors", block="sum")
REFUSALS = [
    refuse("a maximum", lambda: zoo.row_max().func, step("hoist_factors", block="row_max"), message="sum of products"),
    refuse("an output", lambda: zoo.row_sum().func, step("hoist_factors", block="row_sum"), message="in an intermediate"),
    refuse("nothing to take out", lambda: make.matmul(4, 6), step("hoist_factors", block="mm"), message="can leave the sum"),
    refuse("nothing that would stay", scaled_sum, HOIST, HOIST, message="can leave the sum"),
    refuse("perhaps nothing to sum", lambda: scaled_sum(None), HOIST, message="sum over something"),
    refuse("a start that is not 0", lambda: scaled_sum(start=1.0), HOIST, message="start at 0"),
    refuse("a factor that the loop computes", lambda: scaled_sum(local=True), HOIST, message="can leave the sum"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS, ids=lambda c: c.what)
def test_hoist_factors_of_unfit_step_is_refused(case: Refusal) -> None:
    check(case)


@pytest.mark.parametrize("transposed", [False, True])
def test_hoist_factors_moves_factors_of_groups(transposed: bool) -> None:
    func = make.quantised(3, 11, 8, 4, transposed)
    s = Schedule(func)
    s.split("matmul_k", [None, 4])
    s.apply("rfactor", block="matmul", loop="matmul_k_0")
    s.apply("hoist_factors", block="matmul_rf")
    for m in (0, 1, 5):
        assert_same_meaning(func, s.func, {"m": m}, seed=m)
