"""Conditional reads in C: compilers vectorise short loops of them with masks, and one compiler got the masks wrong."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import Array, Compiled, opened

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, bool_, f32, i32
from relax_tune.ir.core.expr import Expr, Var, and_, call, const, gt, load, ne, or_, select
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import BufferStore, For, IfThenElse, LoopKind, Stmt, seq

ROWS = 64
TRIPS = (2, 4, 5, 8, 16)
Body = Callable[[Buffer, tuple[Expr, ...], Expr, Expr], Stmt]


def _stored(value: Callable[[Expr, Expr], Expr]) -> Body:
    return lambda y, at, c, x: BufferStore(y, at, value(c, x))


def _branch(y: Buffer, at: tuple[Expr, ...], c: Expr, x: Expr) -> Stmt:
    return seq(BufferStore(y, at, const(2.0)), IfThenElse(c, BufferStore(y, at, x)))


def _one_of(c: Expr) -> Expr:
    return select(c, const(1.0), const(2.0))


# What is stored, given a condition and a read: as a statement, and in NumPy.
BODIES: dict[str, tuple[Body, Callable[[Array, Array], Array]]] = {
    "select": (_stored(lambda c, x: select(c, x, const(2.0))), lambda c, x: np.where(c, x, 2)),
    "other arm": (_stored(lambda c, x: select(c, const(2.0), x * 0.5)), lambda c, x: np.where(c, 2, x * 0.5)),
    "root": (_stored(lambda c, x: select(c, call("sqrt", x * x), const(2.0))), lambda c, x: np.where(c, np.abs(x), 2)),
    "and": (_stored(lambda c, x: _one_of(and_(c, gt(x, 0.0)))), lambda c, x: np.where(c & (x > 0), 1, 2)),
    "or": (_stored(lambda c, x: _one_of(or_(c, gt(x, 0.0)))), lambda c, x: np.where(c | (x > 0), 1, 2)),
    "branch": (_branch, lambda c, x: np.where(c, x, 2)),
}


def _function(body: Body, trips: int, kind: LoopKind, dtype: DType) -> PrimFunc:
    shape = (const(ROWS), const(trips))
    chosen, x, y = Buffer("chosen", shape, dtype), Buffer("x", shape, f32), Buffer("y", shape, f32)
    i, j = Var("i"), Var("j")
    c = load(chosen, (i, j))
    stored = body(y, (i, j), c if dtype is bool_ else ne(c, 0), load(x, (i, j)))
    return PrimFunc("f", (chosen, x, y), 1, For(i, const(ROWS), For(j, const(trips), stored, kind), "parallel"))


@pytest.mark.process
@pytest.mark.parametrize("dtype", [bool_, i32], ids=str)
def test_conditional_reads_in_short_loops_are_exact(dtype: DType) -> None:
    kinds: tuple[LoopKind, ...] = ("serial", "unrolled")
    cases = list(product(BODIES, TRIPS, kinds))
    rng = np.random.default_rng(0)
    device = opened("c")
    kernels = Compiled.together(device, "c", [_function(BODIES[n][0], t, k, dtype) for n, t, k in cases])
    for run, (name, trips, kind) in zip(kernels, cases, strict=True):
        chosen = rng.integers(0, 2, (ROWS, trips)).astype(dtype.numpy)
        x = rng.standard_normal((ROWS, trips), np.float32)
        (actual,) = run([chosen, x, np.empty_like(x)])
        expected = BODIES[name][1](chosen != 0, x).astype(np.float32)
        np.testing.assert_array_equal(actual, expected, f"{name}, {trips} of {kind}")
    device.close()
