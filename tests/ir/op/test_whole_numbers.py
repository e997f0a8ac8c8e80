"""Whole numbers where operators take dims, sizes that NumPy cannot compute with, and dims that bind a symbol by division."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.built_modules import executed, job_of
from tests.support.tuner_models import DEVICES, opened

from relax_tune.errors import UserError, VerifyError
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Expr, Var, const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.create import Iota, Scalars
from relax_tune.ir.op.indexing.movement import BroadcastTo, Reshape, Slice
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.math.elementwise import Relu
from relax_tune.ir.op.neural.window import Conv, Pool
from relax_tune.ir.op.reduction.reduce import Softmax
from relax_tune.ir.op.reduction.scan import TopK

OPERATORS: tuple[Callable[[Callable[[int], Any]], OperatorSpec], ...] = (
    lambda w: BroadcastTo((w(3), w(4))),
    lambda w: Reshape((w(2), w(2))),
    lambda w: Iota(w(5)),
    lambda w: Scalars((w(5), w(-2))),
    lambda w: TopK(w(2)),
    lambda w: Slice(0, w(1), w(3)),
    lambda w: Pad((w(0),), (w(2),)),
)


@pytest.mark.parametrize("make", OPERATORS, ids=lambda make: make(int).name)
def test_operators_given_whole_numbers_equal_operators_of_literals(
    make: Callable[[Callable[[int], Any]], OperatorSpec],
) -> None:
    assert make(int) == make(const) and repr(make(int)) == repr(make(const))


def test_operator_given_symbols_and_whole_numbers_is_built() -> None:
    g = GraphBuilder()
    m = g.symbol("m")
    module = g.finish(g.call(BroadcastTo((m, 4)), g.input("x", (m, 1))))  # type: ignore[arg-type]
    assert run_function(module, "main", [np.ones((3, 1), np.float32)]).shape == (3, 4)


def of_rows(*ops: OperatorSpec, shape: tuple[Any, ...], weight: tuple[int, ...] | None = None) -> IRModule:
    g = GraphBuilder()
    n = g.symbol("n")
    y = g.input("x", tuple(n if d is None else d for d in shape))
    for op in ops:
        y = g.call(op, y, *(() if weight is None else (g.input("w", weight),)))
    return g.finish(y)


NO_ROWS: tuple[tuple[IRModule, tuple[int, ...], tuple[int, ...] | None], ...] = (
    (of_rows(Conv((1, 1), (1, 1)), shape=(None, 3, 5, 5), weight=(2, 3, 2, 2)), (0, 2, 4, 4), (2, 3, 2, 2)),
    (of_rows(Conv((1,), (1,), 3), shape=(None, 3, 5), weight=(6, 1, 2)), (0, 6, 4), (6, 1, 2)),
    (of_rows(Pool((2,), (1,), (1,)), shape=(None, 3, 5)), (0, 3, 4), None),
    (of_rows(Relu(), Softmax(), shape=(None, 4)), (0, 4), None),
)


@pytest.mark.ccompiler
@pytest.mark.parametrize("case", NO_ROWS, ids=["conv", "grouped conv", "pool", "softmax"])
def test_batch_of_none_has_a_result_of_none(case: tuple[IRModule, tuple[int, ...], tuple[int, ...] | None]) -> None:
    module, shape, weight = case
    x = np.zeros((0, *(3, 5, 5)[: len(shape) - 1]) if len(shape) > 2 else (0, 4), np.float32)
    arrays = [x] if weight is None else [x, np.ones(weight, np.float32)]
    assert run_function(module, "main", arrays).shape == shape
    with opened("c") as device:
        job = job_of(module, device)
        with executed(job.build("generic").program, job, device) as run:
            assert run.run(arrays)[0].shape == shape


def iota_of(size: Callable[[Expr], Expr]) -> IRModule:
    g = GraphBuilder()
    g.input("x", (g.symbol("n"),), f32)
    return g.finish(g.call(Iota(size(g.symbol("n")))))


@pytest.mark.parametrize("size", [lambda n: const(2**62), lambda n: n * 2**62], ids=["known", "symbolic"])
def test_sizes_beyond_memory_are_refused_in_words(size: Callable[[Expr], Expr]) -> None:
    with pytest.raises(UserError, match="iota"):
        run_function(iota_of(size), "main", [np.ones(1, np.float32)])


@pytest.mark.parametrize("kind", DEVICES)
def test_dim_of_a_multiple_binds_the_symbol(kind: str) -> None:
    """A dim n * 2 of 6 elements binds n = 3; 7 elements are refused."""
    g = GraphBuilder()
    n = g.symbol("n")
    module = g.finish(g.call(Reshape((n, const(2))), g.call(Relu(), g.input("x", (n * 2,)))))
    good, odd = np.ones(6, np.float32), np.ones(7, np.float32)
    assert run_function(module, "main", [good]).shape == (3, 2)
    with pytest.raises(UserError, match=r"dim 0 \(n \* 2\) .*6, got 7"):
        run_function(module, "main", [odd])
    with opened(kind) as device:
        job = job_of(module, device)
        with executed(job.build("generic").program, job, device) as run:
            assert run.run([good])[0].shape == (3, 2)
            with pytest.raises(UserError, match=r"dim 0: .*6 \(n \* 2\), got 7"):
                run.run([odd])


@pytest.mark.parametrize(
    "dim",
    [lambda n: n * n, lambda n: n // 2, lambda n: n % 3, lambda n: n * Var("m")],
    ids=["square", "half", "rest", "product"],
)
def test_dim_without_a_symbol_to_bind_is_refused_by_the_verifier(dim: Callable[[Expr], Expr]) -> None:
    g = GraphBuilder()
    module = g.finish(g.call(Relu(), g.input("x", (dim(g.symbol("n")),))))
    with pytest.raises(VerifyError, match="nothing determines symbol n"):
        verify(module)
