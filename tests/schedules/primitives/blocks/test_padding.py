"""Refusals of pad, and that a padded block vectorises without conditions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from tests.schedules.primitives.blocks.test_compute_location import guarded
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.support import schedule_functions as make
from tests.support import zoo
from tests.support.meaning import assert_same_meaning

from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import TRUE, Expr, Tunable, Var, const, maximum
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.schedules.schedule import Schedule


def row_max() -> PrimFunc:
    return zoo.row_max().func


def summed(term: Callable[[Expr, Expr], Expr]) -> PrimFunc:
    """Y[i] += term(A[i, k], W[i])."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("summed")
    x, w, y = b.input("A", (n, m)), b.input("W", (n,)), b.output("Y", (n,))
    b.reduce(y, (m,), const(0.0), lambda acc, i, k: acc + term(x[i, k], w[i]), name="sum")
    return b.finish()


def divided() -> PrimFunc:
    n = Var("n")
    b = TensorBuilder("divided")
    x, w, y = b.input("A", (n,), i64), b.input("B", (n,), i64), b.output("Y", (n,), i64)
    b.compute(y, lambda i: x[i] // (w[i] + 1), name="div")
    return b.finish()


def gram() -> PrimFunc:
    """Y = A A^T: one buffer read at two places."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("gram")
    x, y = b.input("A", (n, m)), b.output("Y", (n, n))
    b.reduce(y, (m,), const(0.0), lambda acc, i, j, k: acc + x[i, k] * x[j, k], name="gram")
    return b.finish()


def max_of_products() -> PrimFunc:
    n, m = Var("n"), Var("m")
    b = TensorBuilder("max_of_products")
    x, y = b.input("A", (n, m)), b.output("Y", (n,))
    b.reduce(y, (m,), const(-math.inf), lambda acc, i, k: maximum(acc, x[i, k] * 2.0), name="top")
    return b.finish()


def padded(block: str, *factors: object) -> tuple[str, dict[str, object]]:
    return step("pad", block=block, factors=list(factors))


REFUSALS = [
    refuse("too few factors", make.chain, padded("inc", 4), message="2 iterators of 'inc', got 1"),
    refuse("by nothing", make.chain, padded("inc", None, 0), message="positive factor"),
    refuse("a split block", make.chain, step("split", loop="inc_i", factors=[None, 2]), padded("inc", 4, None), message="one loop"),
    refuse("a part of a buffer", lambda: zoo.concat_blocks().func, padded("first", 4, None), message="all of 'z'"),
    refuse("where it does not run without a condition", guarded, padded("some", 4), message="run without a condition"),
    refuse("shifted reads", make.stencil, padded("pair", 4), message="as plain indices"),
    refuse("a gather", lambda: zoo.gather().func, padded("take", 4, None), message="as plain indices"),
    refuse("a divisor", divided, padded("div", 4), message="divide by"),
    refuse("a sum of sums", lambda: summed(lambda a, w: a + w), padded("sum", None, 4), message="padding neutral"),
    refuse("a factor that may be infinite", lambda: summed(lambda a, w: a * w), padded("sum", None, 4), message="padding neutral"),
    refuse("a maximum of products", max_of_products, padded("top", None, 4), message="padding neutral"),
    refuse(
        "a buffer with holes",
        make.softmax_mask,
        step("storage_align", buffer="T", factor=4),
        step("transform_layout", buffer="T", index_map="a, b, c, d -> a, b, c * 2, d"),
        padded("row_max", None, None, None, 4),
        message="in parts or with padding",
    ),
    refuse(
        "what runs once",
        lambda: make.matmul(4, 6, epilogue=False),
        step("cache_read", block="mm", buffer="W"),
        step("mark_prepack", block="W_cache_copy"),
        padded("W_cache_copy", 4, None),
        message="runs once",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS, ids=lambda c: c.what)
def test_pad_of_unfit_step_is_refused(case: Refusal) -> None:
    check(case)


@pytest.mark.parametrize(
    ("func", "block", "factors"),
    [
        (row_max, "row_max", [None, 4]),
        (gram, "gram", [4, None, 2]),
        (lambda: summed(lambda a, w: a * 2.0), "sum", [3, 4]),
        (make.dot, "dot", [None, 4]),
        (make.scores, "qk", [None, None, 4, 2, 8]),
    ],
)
def test_padded_meaning(func: Callable[[], PrimFunc], block: str, factors: list[int | None]) -> None:
    s = Schedule(func())
    s.apply("pad", block=block, factors=factors)
    for size in (0, 1, 3, 4, 5):
        dims = {v.name: max(size - number, 0) for number, v in enumerate(s.func.symbols)}
        assert_same_meaning(func(), s.func, dims)


def test_a_padded_product_is_tiled_without_conditions() -> None:
    tile, width = Tunable("T", (2, 4)), Tunable("W", (4, 8))
    s = Schedule(make.matmul())
    s.apply("pad", block="mm", factors=[tile, width, None])
    i_0, i_1 = s.split("mm_i", [None, tile])
    j_0, j_1 = s.split("mm_j", [None, width])
    s.reorder([i_0, j_0, "mm_k", i_1, j_1])
    s.vectorize(j_1)
    mm = next(b for b in blocks(s.func.body) if b.name == "mm")
    assert mm.predicate is TRUE
    for m, n in ((1, 9), (5, 8), (4, 3)):
        assert_same_meaning(make.matmul(), s.func, {"m": m, "n": n, "k": 5}, tunables={tile: 4, width: 8})
