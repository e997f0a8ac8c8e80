"""Refusals of the primitives on iterators, and on inputs laid out by them."""

from __future__ import annotations

import pytest
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.support import schedule_functions as make

from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import Var, cast, const
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.tensor_builder import TensorBuilder


def wide() -> PrimFunc:
    """Windows that reach as far as they like: nothing says that they stay inside."""
    n, m, r = Var("n"), Var("m"), Var("r")
    b = TensorBuilder("wide")
    x, w, y, z = b.input("A", (n, r)), b.input("W", (3,)), b.alloc("B", (n, m)), b.output("C", (n, m))
    b.reduce(y, (3,), const(0.0), lambda acc, i, j, k: acc + x[i, j + k] * w[k], name="slide")
    b.compute(z, lambda i, j: y[i, j] * 2.0, name="twice")
    return b.finish()


def twice() -> PrimFunc:
    """A block that reads at two places, and at one that is read."""
    n = Var("n")
    b = TensorBuilder("twice")
    b.scalar(n)
    x, at = b.input("A", (n + 1,)), b.input("I", (n,), i64)
    y, z = b.output("C", (n,)), b.output("D", (n,))
    b.compute(y, lambda i: x[i] + x[i + 1], name="pair")
    b.compute(z, lambda i: cast(at[i], x.buffer.dtype) + x[cast(at[i], i64)], name="take")
    return b.finish()


def halved() -> PrimFunc:
    """Every other element: rows are not walked along."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("halved")
    b.scalar(n)
    b.scalar(m)
    x, y, z = b.input("A", (n, m * 2)), b.alloc("B", (n, m)), b.output("C", (n, m))
    b.compute(y, lambda i, j: x[i, j * 2], name="half")
    b.compute(z, lambda i, j: y[i, j] + 1.0, name="inc")
    return b.finish()


ROWS = ["slide_i", "slide_j"]
SPLIT = step("split", loop="slide_j", factors=[None, 4])

REFUSALS = [
    refuse("join what is split", make.windows, SPLIT, step("fuse_block_iters", block="slide", names=ROWS), message="one loop per iterator"),
    refuse(
        "join another order", make.windows, step("fuse_block_iters", block="slide", names=ROWS[::-1]), message="directly inside each other"
    ),
    refuse(
        "join places and taps",
        make.windows,
        step("fuse_block_iters", block="slide", names=["slide_j", "slide_k"]),
        message="iterators of one kind",
    ),
    refuse(
        "join marked loops",
        make.windows,
        step("set_kind", loop="relu_j", kind="parallel"),
        step("fuse_block_iters", block="relu", names=["relu_i", "relu_j"]),
        message="expects a serial loop",
    ),
    refuse(
        "rows of an output",
        make.windows,
        step("flatten_rows", block="relu", names=["relu_i", "relu_j"], buffer="B"),
        message="an intermediate of floats",
    ),
    refuse("one loop of rows", make.windows, step("flatten_rows", block="slide", names=["slide_i"], buffer="A"), message="two loops"),
    refuse("rows of another", make.windows, step("flatten_rows", block="slide", names=ROWS, buffer="W"), message="to read 'W'"),
    refuse(
        "rows in steps",
        halved,
        step("flatten_rows", block="half", names=["half_i", "half_j"], buffer="A"),
        message="shifts in its last",
    ),
    refuse("rows without an end", wide, step("flatten_rows", block="slide", names=ROWS, buffer="A"), message="stays inside"),
    refuse("taps of two places", twice, step("reindex", block="pair", buffer="A", dims=[0]), message="one place, got 2"),
    refuse("taps that are read", twice, step("reindex", block="take", buffer="A", dims=[0]), message="read nothing"),
    refuse("a dim that is none", make.windows, step("reindex", block="slide", buffer="A", dims=[2]), message="distinct dimensions"),
    refuse("taps into nowhere", make.windows, step("reindex", block="slide", buffer="A", dims=[1], scope="moon"), message="a scope"),
    refuse("taps without an end", wide, step("reindex", block="slide", buffer="A", dims=[1]), message="cannot prove"),
    refuse("taps of what is split", make.windows, SPLIT, step("reindex", block="slide", buffer="A", dims=[1]), message="one loop per"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS, ids=lambda c: c.what)
def test_block_iters_of_unfit_step_is_refused(case: Refusal) -> None:
    check(case)
