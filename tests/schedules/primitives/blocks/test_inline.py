"""Refusals of reverse_compute_inline, and what it makes of split, permuted and cut producers (compute_inline: with blocks)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.support import schedule_functions as make
from tests.support import zoo
from tests.support.meaning import assert_same_meaning

from relax_tune.ir.core.expr import Expr, Var, call, const, lt, maximum, select
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.schedules.analysis import inlinable
from relax_tune.schedules.schedule import Schedule


def softmax() -> PrimFunc:
    return zoo.softmax().func


def wider() -> PrimFunc:
    """C takes the first n of the n + 1 elements of B."""
    n = Var("n")
    b = TensorBuilder("wider")
    x, y, z = b.input("A", (n + 1,)), b.alloc("B", (n + 1,)), b.output("C", (n,))
    b.scalar(n)
    b.compute(y, lambda i: x[i] * 2.0, name="double")
    b.compute(z, lambda i: y[i] + 1.0, name="inc")
    return b.finish()


def read_twice() -> PrimFunc:
    n = Var("n")
    b = TensorBuilder("read_twice")
    x, y, z = b.input("A", (n,)), b.alloc("B", (n,)), b.output("C", (n,))
    b.compute(y, lambda i: x[i] * 2.0, name="double")
    b.compute(z, lambda i: y[i] + y[n - 1 - i], name="both")
    return b.finish()


def spread() -> PrimFunc:
    """B has fewer dims than what reads it."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("spread")
    x, y, z = b.input("A", (n,)), b.alloc("B", (n,)), b.output("C", (n, m))
    w = b.input("W", (n, m))
    b.compute(y, lambda i: x[i] * 2.0, name="double")
    b.compute(z, lambda i, j: y[i] + w[i, j], name="widen")
    return b.finish()


def between() -> PrimFunc:
    """The last block reads a second buffer, which is written after B."""
    n = Var("n")
    b = TensorBuilder("between")
    x, y, s, z = b.input("A", (n,)), b.alloc("B", (n,)), b.alloc("S", (1,)), b.output("C", (n,))
    b.compute(y, lambda i: x[i] * 2.0, name="double")
    b.reduce(s, (n,), const(0.0), lambda acc, i, k: acc + x[k], name="sum")
    b.compute(z, lambda i: y[i] + s[0], name="shift")
    return b.finish()


def ranked(value: Callable[[Expr], Expr]) -> PrimFunc:
    """C counts the smaller elements of B, which a function makes of A."""
    n = Var("n")
    b = TensorBuilder("ranked")
    x, y, z = b.input("A", (n,)), b.alloc("B", (n,)), b.output("C", (n,))
    b.compute(y, lambda i: value(x[i]), name="make")
    b.reduce(z, (n,), const(0.0), lambda acc, i, k: acc + select(lt(y[k], y[i]), 1.0, 0.0), name="rank")
    return b.finish()


REFUSALS = [
    refuse(
        "copies that are compared", lambda: ranked(lambda v: v * 3.0 + 1.0), step("compute_inline", block="make"),
        message="which may be rounded differently",
    ),
    refuse(
        "copies of a function", lambda: ranked(lambda v: call("exp", v)), step("compute_inline", block="make"),
        message="which may be rounded differently",
    ),
    refuse("a reduction", softmax, step("reverse_compute_inline", block="row_sum"), message="is a reduction"),
    refuse("what reads inputs", make.chain, step("reverse_compute_inline", block="double"), message="to read an intermediate"),
    refuse("a narrower intermediate", spread, step("reverse_compute_inline", block="widen"), message="at all of its iterators"),
    refuse("an intermediate with other readers", softmax, step("reverse_compute_inline", block="div"), message="read by 'div' only"),
    refuse("two places", read_twice, step("reverse_compute_inline", block="both"), message="at several places"),
    refuse("a reducing producer", make.matmul, step("reverse_compute_inline", block="relu"), message="spatial producer, 'mm'"),
    refuse("before what it needs", between, step("reverse_compute_inline", block="shift"), message="cannot move before 'sum'"),
    refuse(
        "after its loops were split",
        make.chain,
        step("split", loop="inc_i", factors=[None, 4]),
        step("reverse_compute_inline", block="inc"),
        message="one loop per iterator",
    ),
    refuse(
        "a copy filled once",
        lambda: make.matmul(4, 6, epilogue=False),
        step("cache_read", block="mm", buffer="W"),
        step("cache_read", block="mm", buffer="W_cache"),
        step("mark_prepack", block="W_cache_copy"),
        step("reverse_compute_inline", block="W_cache_cache_copy"),
        message="runs once",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS, ids=lambda c: c.what)
def test_inline_of_unfit_step_is_refused(case: Refusal) -> None:
    check(case)


def test_a_tiled_permuted_producer() -> None:
    s = Schedule(make.flipped())
    s.split("double_i", [None, 3])
    s.reorder(["double_j", "double_i_1"])
    s.parallel("double_i_0")
    s.apply("reverse_compute_inline", block="turn")
    assert [b.name for b in blocks(s.func.body)] == ["double"] and s.func.allocs == ()
    for n, m in ((0, 2), (1, 1), (2, 5), (3, 4), (7, 3)):
        assert_same_meaning(make.flipped(), s.func, {"n": n, "m": m})


def test_reverse_compute_inline_writes_read_elements_only() -> None:
    s = Schedule(wider())
    s.apply("reverse_compute_inline", block="inc")
    assert s.func.allocs == ()
    for n in (0, 1, 5):
        assert_same_meaning(wider(), s.func, {"n": n})


@pytest.mark.parametrize("value", [lambda v: v * 3.0, lambda v: maximum(v, 0.0)], ids=["a product", "a maximum"])
def test_inline_keeps_copies_rounded_alike(value: Callable[[Expr], Expr]) -> None:
    s = Schedule(ranked(value))
    assert inlinable(s.func, blocks(s.func.body)[0])
    s.compute_inline("make")
    assert_same_meaning(ranked(value), s.func, {"n": 5})
    assert not inlinable(ranked(lambda v: v * 3.0 + 1.0), blocks(ranked(lambda v: v * 3.0 + 1.0).body)[0])
