"""The interpreter agrees with NumPy on the zoo, point by point and as arrays, and refuses wrong programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import zoo
from tests.support.effort import examples

from relax_tune.errors import UserError, VerifyError
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f32, i32, i64
from relax_tune.ir.core.expr import TRUE, Tunable, Var, const, load, lt
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IfThenElse, rewrite, seq
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.interp.interp import run_prim

SIZES = [(case, dims) for case in zoo.cases() for dims in case.sizes]


@pytest.mark.parametrize(("case", "dims"), SIZES, ids=lambda x: getattr(x, "name", None) or str(list(x.values())))
@pytest.mark.parametrize("lower", [False, True], ids=["blocks", "lowered"])
def test_interp_zoo_equals_numpy(case: zoo.Case, dims: Mapping[str, int], lower: bool) -> None:
    args, expected = case.arguments(np.random.default_rng(7), dims)
    single = [a.copy() for a in args]
    func = zoo.lowered(case.func) if lower else case.func
    run_prim(func, args, case.scalar_arguments(dims))
    run_prim(func, single, case.scalar_arguments(dims), vectorise=False)
    for got, single_point, want in zip(args[-func.outputs :], single[-func.outputs :], expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)
        np.testing.assert_array_equal(got, single_point)


@settings(max_examples=examples(12), deadline=None)
@given(st.integers(0, 9), st.integers(0, 17), st.sampled_from((1, 2, 4)), st.sampled_from((4, 8, 16)))
def test_interp_sketch_same_for_all_tunables(n: int, m: int, t0: int, t1: int) -> None:
    tunables = Tunable("T0", (1, 2, 4)), Tunable("T1", (4, 8, 16))
    rng = np.random.default_rng(n * 31 + m)
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((n, 8), (8, m)))
    c = np.full((n, m), np.nan, np.float32)
    run_prim(zoo.tiled_matmul(tunables), [a, b, c], tunables={tunables[0]: t0, tunables[1]: t1})
    np.testing.assert_allclose(c, a.astype(np.float64) @ b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_interp_vectorised_matmul_32() -> None:
    case = next(c for c in zoo.cases() if c.name == "matmul")
    args, (expected,) = case.arguments(np.random.default_rng(0), {"n": 32, "m": 32, "k": 32})
    run_prim(case.func, args)
    np.testing.assert_allclose(args[-1], expected, rtol=1e-4, atol=1e-4)


def test_interp_float32_rounds_every_operation() -> None:
    b = TensorBuilder("sum")
    x, y = b.input("x", (Var("n"),)), b.output("y", ())
    b.reduce(y, (x.buffer.shape[0],), const(0.0), lambda acc, k: acc + x[k])
    values = np.array([2**24, 1, 1, 1], np.float32)
    out = np.zeros((), np.float32)
    run_prim(b.finish(), [values, out])
    assert out == np.float32(2**24)


def test_interp_int32_wraps_division_floors() -> None:
    b = TensorBuilder("ints")
    x, y = b.input("x", (2,), i32), b.output("y", (2, 3), i32)
    two = const(2, i32)
    q = b.input("q", (2,), i32)
    b.compute(y, lambda i, j: q[i] // two * 10 + q[i] % two + x[i] * two)
    out = np.zeros((2, 3), np.int32)
    run_prim(b.finish(), [np.array([2**30, 1], np.int32), np.array([-3, 3], np.int32), out])
    assert out[:, 0].tolist() == [2**31 - 19, 13]


def _copy(shift: int, n: int = 4, store_shift: int = 0) -> PrimFunc:
    x, y, i = Buffer("x", (Var("n"),), f32), Buffer("y", (const(n),), f32), Var("i")
    body = For(i, const(n), BufferStore(y, (i + store_shift,), load(x, (i + shift,))))
    return PrimFunc("copy", (x, y), 1, body)


@pytest.mark.parametrize("vectorise", [False, True])
@pytest.mark.parametrize("n", [4, 40])
def test_interp_out_of_bounds_raises(n: int, vectorise: bool) -> None:
    x, y = np.zeros(n, np.float32), np.zeros(n, np.float32)
    with pytest.raises(VerifyError, match=rf"copy: read of x\[{n}\] .*\n(.*\n)+.*\^\^"):
        run_prim(_copy(1, n), [x, y], vectorise=vectorise)
    with pytest.raises(VerifyError, match=r"read of x\[-1\]"):
        run_prim(_copy(-1, n), [x, y], vectorise=vectorise)
    with pytest.raises(VerifyError, match=rf"write of y\[{n}\] is out of bounds"):
        run_prim(_copy(0, n, 1), [x, y], vectorise=vectorise)
    run_prim(_copy(0, n), [x, y], vectorise=vectorise)


@pytest.mark.parametrize("vectorise", [False, True])
@pytest.mark.parametrize("n", [4, 40])
def test_interp_unwritten_intermediate_raises(n: int, vectorise: bool) -> None:
    t, y, i, j = Buffer("t", (const(n),), f32), Buffer("y", (const(n),), f32), Var("i"), Var("j")
    fill = For(i, const(n - 1), BufferStore(t, (i,), const(1.0)))
    body = seq(fill, For(j, const(n), BufferStore(y, (j,), load(t, (j,)))))
    with pytest.raises(VerifyError, match=rf"read of t\[{n - 1}\], .*nothing .*written"):
        run_prim(PrimFunc("f", (y,), 1, body, (t,)), [np.zeros(n, np.float32)], vectorise=vectorise)


def test_interp_reduction_without_init_raises() -> None:
    case = next(c for c in zoo.cases() if c.name == "row_sum")
    body = rewrite(case.func.body, lambda s: replace(s, init=None) if isinstance(s, Block) else s)
    args, _ = case.arguments(np.random.default_rng(0), {"n": 3, "m": 2})
    with pytest.raises(VerifyError, match=r"read of y\[0\], which nothing has written"):
        run_prim(replace(case.func, body=body), args)


def test_interp_unwritten_output_raises() -> None:
    y, i = Buffer("y", (const(4), const(2)), f32), Var("i")
    body = For(i, const(4), IfThenElse(lt(i, 3), BufferStore(y, (i, const(0)), const(1.0))))
    out = np.full((4, 2), 5, np.float32)
    with pytest.raises(VerifyError, match=r"output y\[0, 1\] was never written"):
        run_prim(PrimFunc("f", (y,), 1, body), [out])
    assert (out == 5).all()


def test_interp_missing_predicate_raises() -> None:
    sound = zoo.tiled_matmul()
    body = rewrite(sound.body, lambda s: replace(s, predicate=TRUE) if isinstance(s, Block) else s)
    args = [np.zeros((5, 8), np.float32), np.zeros((8, 8), np.float32), np.zeros((5, 8), np.float32)]
    run_prim(sound, args)
    with pytest.raises(VerifyError, match=r"'mm' .*vi = 5"):
        run_prim(replace(sound, body=body), args)


def test_interp_dependent_points_run_in_order() -> None:
    """A scatter that writes an element twice keeps the last value, and a running sum sees the one before it."""
    idx, x, y = Buffer("idx", (const(32),), i64), Buffer("x", (const(32),), f32), Buffer("y", (const(16),), f32)
    i, j, k = Var("i"), Var("j"), Var("k")
    scatter = For(i, const(32), BufferStore(y, (load(idx, (i,)),), load(x, (i,))))
    scan = For(j, const(15), BufferStore(y, (j + 1,), load(y, (j,)) + load(y, (j + 1,))))
    double = For(k, const(32), BufferStore(y, (k % 16,), load(y, (k % 16,)) * 2.0))
    values, out = np.arange(32, dtype=np.float32), np.zeros(16, np.float32)
    run_prim(PrimFunc("f", (idx, x, y), 1, seq(scatter, scan, double)), [np.arange(32) % 16, values, out])
    np.testing.assert_array_equal(out, np.cumsum(values[16:]) * 4)


def test_interp_wrong_arguments_raise() -> None:
    case = next(c for c in zoo.cases() if c.name == "matmul")
    z = lambda *s: np.zeros(s, np.float32)
    with pytest.raises(UserError, match=r"matmul: expected B.*dim 0 \(k\) .*3, got 4"):
        run_prim(case.func, [z(2, 3), z(4, 5), z(2, 5)])
    with pytest.raises(UserError, match=r"matmul: expected A: .* got 1 dims"):
        run_prim(case.func, [z(2), z(3, 5), z(2, 5)])
    with pytest.raises(UserError, match="got 2 dims of float64"):
        run_prim(case.func, [z(2, 3).astype(np.float64), z(3, 5), z(2, 5)])
    with pytest.raises(UserError, match=r"3 arrays \(A, B, C\), got 2"):
        run_prim(case.func, [z(2, 3), z(3, 5)])
    with pytest.raises(UserError, match=r"expected 1 scalar arguments \(n\), got 0"):
        run_prim(zoo.scaled(), [z(4), z(4)])


def test_interp_explicit_scalars() -> None:
    out = np.zeros(4, np.float32)
    run_prim(zoo.scaled(), [np.ones(4, np.float32), out], [3])
    assert out.tolist() == [3.0] * 4


def test_interp_unbound_symbol_and_zero_divisor_raise() -> None:
    y, i, q = Buffer("y", (const(4),), i64), Var("i"), Var("q")
    with pytest.raises(VerifyError, match="q has no value"):
        run_prim(PrimFunc("f", (y,), 1, For(i, const(4), BufferStore(y, (i,), q))), [np.zeros(4, np.int64)])
    with pytest.raises(VerifyError, match="integer division by zero"):
        run_prim(PrimFunc("f", (y,), 1, For(i, const(4), BufferStore(y, (i,), i // i))), [np.zeros(4, np.int64)])
