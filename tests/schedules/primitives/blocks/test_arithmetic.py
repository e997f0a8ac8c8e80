"""Divisors that multiply_by_reciprocal accepts and refuses: their reciprocals must not overflow."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.support import schedule_functions as make
from tests.support import zoo
from tests.support.meaning import assert_same_meaning

from relax_tune.ir.core.dtype import f16, i32
from relax_tune.ir.core.expr import Expr, Var, call, cast, const, div, eq, lt, maximum, select
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.op.base import Deduction
from relax_tune.ir.op.neural.decoder import CausalSoftmax
from relax_tune.schedules.schedule import Schedule

n, m = Var("n"), Var("m")


def scaled(divisor: Callable[[Expr], Expr], after: Callable[[Expr], Expr] = lambda q: q) -> PrimFunc:
    """Divide rows by a function of their sums of squares, and apply `after` to the quotients in another block."""
    b = TensorBuilder("scaled")
    x, y = b.input("x", (n, m)), b.output("y", (n, m))
    total, q = b.alloc("total", (n,)), b.alloc("q", (n, m))
    b.reduce(total, (m,), const(0.0), lambda acc, i, k: acc + x[i, k] * x[i, k], name="sum")
    b.compute(q, lambda i, j: div(x[i, j], divisor(total[i])), name="divide")
    b.compute(y, lambda i, j: after(q[i, j]), name="after")
    return b.finish()


def exponentials(shift: bool, start: float = 0.0) -> PrimFunc:
    """Softmax that does not sum the powers of differences from the largest element."""
    b = TensorBuilder("exponentials")
    x, z, y = b.input("x", (n, m)), b.input("z", (n, m)), b.output("y", (n, m))
    top, total = b.alloc("top", (n,)), b.alloc("total", (n,))
    b.reduce(top, (m,), const(-math.inf), lambda acc, i, k: maximum(acc, x[i, k]), name="max")
    term = z if shift else x
    b.reduce(total, (m,), const(start), lambda acc, i, k: acc + call("exp", term[i, k] - top[i]), name="sum")
    b.compute(y, lambda i, j: div(call("exp", x[i, j] - top[i]), total[i]), name="divide")
    return b.finish()


def causal(window: int | None) -> PrimFunc:
    rows = TensorInfo((n, m), zoo.softmax().func.input_buffers[0].dtype)
    return CausalSoftmax(const(2), 1, window).legalize("causal", [rows], (), Deduction())


TAKEN = {
    "softmax": (lambda: zoo.softmax().func, "div"),
    "masked softmax": (make.softmax_mask, "row_div"),
    "causal softmax": (lambda: causal(None), "softmax"),
    "behind a window": (lambda: causal(2), "softmax"),
    "a count": (lambda: scaled(lambda _: cast(m, zoo.softmax().func.input_buffers[0].dtype)), "divide"),
    "a root": (lambda: scaled(lambda t: call("sqrt", t)), "divide"),
    "from below": (lambda: scaled(lambda t: maximum(t, const(1e-9))), "divide"),
    "a sum of what is not negative": (lambda: scaled(lambda t: call("exp", t) + call("abs", t) + 1e-5), "divide"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_multiply_by_reciprocal_keeps_meaning(name: str) -> None:
    func, block = TAKEN[name][0](), TAKEN[name][1]
    s = Schedule(func)
    s.apply("multiply_by_reciprocal", block=block)
    assert s.func is not func
    for dims in ({"n": 3, "m": 5}, {"n": 1, "m": 1}, {"n": 2, "m": 0}, {"n": 0, "m": 3}):
        assert_same_meaning(func, s.func, {**dims, "b": 2})


DIVIDE = step("multiply_by_reciprocal", block="divide")
BELOW: Callable[[Expr], Expr] = lambda t: maximum(t, const(1.0))
SUM = r"expects a division in 'divide'"
REFUSALS = [
    refuse("a sum may be tiny", lambda: scaled(lambda t: t), DIVIDE, message=SUM),
    refuse(
        "a bound from below that is too small", lambda: scaled(lambda t: maximum(t, const(1e-39))), DIVIDE, message=SUM
    ),
    refuse("one side of a choice", lambda: scaled(lambda t: select(lt(t, 1.0), t, const(1.0))), DIVIDE, message=SUM),
    refuse("a sum of other powers", lambda: exponentials(shift=True), DIVIDE, message=SUM),
    refuse("a sum with another initial value", lambda: exponentials(False, start=-1.0), DIVIDE, message=SUM),
    refuse("by an element", make.softmax_mask, step("multiply_by_reciprocal", block="row_exp"), message="a division"),
    refuse("16 bits", lambda: scaled(lambda t: cast(cast(t, f16), t.dtype)), DIVIDE, message=SUM),
    refuse("rounded", lambda: scaled(BELOW, lambda q: call("rint", q)), DIVIDE, message="not rounded or compared"),
    refuse("a whole number", lambda: scaled(BELOW, lambda q: cast(cast(q, i32), q.dtype)), DIVIDE, message="cast"),
    refuse("compared", lambda: scaled(BELOW, lambda q: select(eq(q, 1.0), q, -q)), DIVIDE, message="or compared"),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda c: c.what)
def test_multiply_by_reciprocal_of_unfit_step_is_refused(case: Refusal) -> None:
    check(case)
