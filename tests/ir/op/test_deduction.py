"""Deduction over symbols: what is decided at once, what is left to run time, what can never be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples

from relax_tune.errors import DeduceError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.prove import Proof, prove_equal
from relax_tune.ir.core.dtype import DType, bool_, f32, i64
from relax_tune.ir.core.expr import Expr, Var, as_int, const, expr, substitute
from relax_tune.ir.core.struct_info import TensorInfo, TupleInfo
from relax_tune.ir.op.base import Deduction, OperatorSpec
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.movement import Concat, Flatten, Reshape, Slice, Split
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.math.elementwise import Add
from relax_tune.ir.op.neural.window import Conv
from relax_tune.ir.op.reduction.einsum import Einsum
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import LayerNorm, Max, MeanPool, Min
from relax_tune.ir.op.reduction.scan import ArgMax, TopK

n, m, k = Var("n"), Var("m"), Var("k")


def tensor(*shape: Any, dtype: DType = f32) -> TensorInfo:
    return TensorInfo(tuple(expr(d) for d in shape), dtype)


def same(result: Any, *shape: Any) -> bool:
    assert isinstance(result, TensorInfo) and result.shape is not None and len(result.shape) == len(shape)
    return all(prove_equal(a, b) is Proof.YES for a, b in zip(result.shape, shape, strict=True))


def value(e: Expr, **sizes: int) -> int:
    result = as_int(substitute(e, {v: const(sizes[v.name]) for v in (n, m, k) if v.name in sizes}))
    assert result is not None, e
    return result


def test_reshape_and_flatten() -> None:
    ctx = Deduction()
    y = Reshape((n, const(4))).infer([tensor(n, 2, 2)], ctx)
    assert same(y, n, 4)
    assert same(Flatten().infer([y], ctx), n * 4)
    assert not ctx.checks


def test_reshape_impossible_element_count_raises() -> None:
    with pytest.raises(DeduceError, match="12 and 5"):
        Reshape((const(5),)).infer([tensor(3, 4)], Deduction())
    with pytest.raises(DeduceError, match="equal products"):
        Reshape((n, const(5))).infer([tensor(n, 4)], Deduction(Env({n: (1, None)})))


def test_reshape_fitting_only_if_empty_adds_check() -> None:
    ctx = Deduction()
    assert same(Reshape((n, const(5))).infer([tensor(n, 4)], ctx), n, 5)
    (check,) = ctx.checks
    assert bool(substitute(check.cond, {n: const(0)}).value)  # type: ignore[attr-defined]
    assert not bool(substitute(check.cond, {n: const(2)}).value)  # type: ignore[attr-defined]


def test_matmul() -> None:
    ctx = Deduction()
    assert same(Matmul().infer([tensor(n, k), tensor(k, m)], ctx), n, m)
    assert not ctx.checks
    with pytest.raises(DeduceError, match="3 and 4"):
        Matmul().infer([tensor(n, 3), tensor(4, m)], Deduction())
    assert same(Matmul().infer([tensor(n, k), tensor(m, 8)], ctx), n, 8)
    (check,) = ctx.checks
    assert check.values == (k, m) and "{0}" in check.message and "{1}" in check.message
    assert not bool(substitute(check.cond, {k: const(2), m: const(3)}).value)  # type: ignore[attr-defined]


def test_matmul_with_leading_dims() -> None:
    assert same(Matmul(True).infer([tensor(m, 12, n, 32), tensor(m, 12, k, 32)], Deduction()), m, 12, n, k)
    with pytest.raises(DeduceError, match="at least 2 dims"):
        Matmul().infer([tensor(n), tensor(n, 3)], Deduction())


def test_broadcasting() -> None:
    ctx = Deduction()
    assert same(Add().infer([tensor(n, 4), tensor(1, 4)], ctx), n, 4)
    assert not ctx.checks
    with pytest.raises(DeduceError, match=r"dim 1.*4 and 3"):
        Add().infer([tensor(n, 4), tensor(n, 3)], ctx)
    result = Add().infer([tensor(n, 4), tensor(m, 4)], ctx)
    assert result == TensorInfo(None, f32, 2)
    (check,) = ctx.checks
    for a, b, fits in ((3, 3, True), (1, 5, True), (5, 1, True), (3, 5, False)):
        assert bool(substitute(check.cond, {n: const(a), m: const(b)}).value) is fits  # type: ignore[attr-defined]


def test_unknown_dims_give_coarser_annotations() -> None:
    coarse = TensorInfo(None, f32, 2)
    assert Add().infer([coarse, tensor(n, 4)], Deduction()) == TensorInfo(None, f32, 2)
    assert Matmul().infer([coarse, tensor(n, 4)], Deduction()) == TensorInfo(None, f32, 2)
    assert Flatten().infer([TensorInfo(None, f32)], Deduction()) == TensorInfo(None, f32, 1)


def test_concat() -> None:
    assert same(Concat(0).infer([tensor(n, 4), tensor(m, 4)], Deduction()), n + m, 4)
    with pytest.raises(DeduceError, match="dim 1"):
        Concat(0).infer([tensor(n, 4), tensor(m, 5)], Deduction())


@pytest.mark.parametrize("op", [Max((0,)), Min((0,)), ArgMax(0)])
def test_extremes_of_truth_values_are_refused(op: OperatorSpec) -> None:
    with pytest.raises(DeduceError, match="expected a tensor of numbers"):
        op.infer([tensor(3, dtype=bool_)], Deduction())


def test_mean_pool_of_integers_is_refused() -> None:
    with pytest.raises(DeduceError, match="expected floats"):
        MeanPool().infer([tensor(2, n, 3, dtype=i64), tensor(2, n, dtype=i64)], Deduction())


def test_even_split() -> None:
    result = Split(2).infer([tensor(n * 2, 4)], Deduction())
    assert isinstance(result, TupleInfo)
    assert len(result.fields) == 2 and all(same(f, n, 4) for f in result.fields)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7])
def test_uneven_split(size: int) -> None:
    actual = Split(3).infer([tensor(n, 4)], Deduction())
    assert isinstance(actual, TupleInfo)
    c = -(-size // 3)
    expected = [max(min(c, size - i * c), 0) for i in range(3)]
    assert [value(f.shape[0], n=size) for f in actual.fields if isinstance(f, TensorInfo) and f.shape] == expected


def test_slices() -> None:
    first = Slice(0, const(0), const(3)).infer([tensor(n)], Deduction())
    rest = Slice(0, const(1), n).infer([tensor(n)], Deduction())
    assert isinstance(first, TensorInfo) and isinstance(rest, TensorInfo) and first.shape and rest.shape
    assert [value(first.shape[0], n=x) for x in (0, 2, 3, 9)] == [0, 2, 3, 3]
    assert [value(rest.shape[0], n=x) for x in (0, 1, 5)] == [0, 0, 4]
    within = Slice(0, const(0), n).infer([tensor(512)], Deduction(Env({n: (1, 512)})))
    assert same(within, n)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 9), st.integers(0, 12), st.integers(0, 12))
def test_slice_sizes_are_pythons(size: int, begin: int, end: int) -> None:
    b, e = Var("b"), Var("e")
    result = Slice(0, b, e).infer([tensor(n)], Deduction())
    assert isinstance(result, TensorInfo) and result.shape
    got = as_int(substitute(result.shape[0], {n: const(size), b: const(begin), e: const(end)}))
    assert got == len(np.arange(size)[begin:end])


@settings(max_examples=examples(80), deadline=None)
@given(st.integers(0, 9), st.integers(0, 12), st.integers(-1, 12), st.integers(1, 4), st.booleans())
def test_slices_with_steps_are_pythons(size: int, begin: int, end: int, step: int, back: bool) -> None:
    b, e = Var("b"), Var("e")
    op = Slice(0, b, e, -step if back else step)
    end = end if back else max(end, 0)
    actual = op.infer([tensor(n)], Deduction())
    assert isinstance(actual, TensorInfo) and actual.shape
    got = as_int(substitute(actual.shape[0], {n: const(size), b: const(begin), e: const(end)}))
    expected = np.arange(size)[begin : None if back and end < 0 else end : op.step]
    assert got == len(expected)
    bound = op.substituted({b: const(begin), e: const(end)})
    np.testing.assert_array_equal(bound.evaluate([np.arange(size)]), expected)


@pytest.mark.parametrize("size, before, after", [(0, 0, 0), (1, 1, 0), (2, 1, 1), (7, 3, 5)])
@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
def test_padding_of_symbolic_dims(size: int, before: int, after: int, mode: str) -> None:
    a, b = Var("a"), Var("b")
    ctx = Deduction()
    result = Pad((a,), (b,), mode).infer([tensor(n)], ctx)
    values = {n: size, a: before, b: after}
    assert isinstance(result, TensorInfo) and result.shape
    assert as_int(substitute(result.shape[0], {v: const(x) for v, x in values.items()})) == size + before + after
    bound = [ctx.simplify(substitute(c.cond, {v: const(x) for v, x in values.items()})) for c in ctx.checks]
    possible = mode == "constant" or size > (max(before, after) if mode == "reflect" else 0) or not before + after
    assert all(getattr(c, "value", None) for c in bound) is possible
    with pytest.raises(DeduceError, match=r"pad: .*at least 0, got -1"):
        Pad((const(-1),), (b,), mode).infer([tensor(n)], Deduction())
    with pytest.raises(DeduceError, match="reflect 3 elements, got 3"):
        Pad((const(3),), (const(0),), "reflect").infer([tensor(3)], Deduction())


def test_einsum() -> None:
    ctx = Deduction()
    assert same(Einsum("bij,bkj->bik").infer([tensor(n, 4, k), tensor(n, m, k)], ctx), n, 4, m)
    assert same(Einsum("...i->i...").infer([tensor(n, 4, k)], ctx), k, n, 4) and not ctx.checks
    Einsum("ij,jk->ik").infer([tensor(n, k), tensor(m, 4)], ctx)
    (check,) = ctx.checks
    assert "'j' in operand 1" in check.message and check.values == (k, m)
    for text, dims, words in (
        ("ij,jk->ik", [(2, 3), (4, 5)], "expected equal dims, got 3 and 4"), ("ij->k", [(2, 3)], "each letter of the result"),
        ("ii->i", [(1, 3)], "expected equal dims, got 1 and 3"),
        ("ij", [(2,)], "as many letters as dims"), ("i,j", [(2,)], "the 2 operands"), ("i1->i", [(2, 3)], "expected letters"),
    ):  # fmt: skip
        with pytest.raises(DeduceError, match=words):
            Einsum(text).infer([tensor(*d) for d in dims], Deduction())


@pytest.mark.parametrize("op, infos, wrong, right", [
    (Slice(0, k - 3, k), [tensor(n)], {k: 2}, {k: 3}),
    (Slice(0, const(0), k - 3), [tensor(n)], {k: 2}, {k: 3}),
    (Slice(0, k - 3, const(-1), -1), [tensor(n)], {k: 1}, {k: 2}),
    (Iota(k - 3), [], {k: 2}, {k: 3}),
    (TopK(k - 3), [tensor(n)], {k: 2, n: 5}, {k: 4, n: 5}),
    (ArgMax(0), [tensor(n, m)], {n: 0, m: 1}, {n: 1, m: 0}),
    (Conv((1,), (1,), 2), [tensor(1, 4, n), tensor(m, 2, 1)], {m: 3, n: 5}, {m: 4, n: 5}),
])  # fmt: skip
def test_undecided_sizes_add_run_time_checks(op: Any, infos: Any, wrong: Any, right: Any) -> None:
    ctx = Deduction()
    op.infer(infos, ctx)

    def holds(values: dict[Var, int]) -> bool:
        bound = (ctx.simplify(substitute(c.cond, {v: const(x) for v, x in values.items()})) for c in ctx.checks)
        return all(getattr(c, "value", None) is not False for c in bound)

    assert ctx.checks and holds(right) and not holds(wrong)


@pytest.mark.parametrize(
    ("axes", "weights", "result"),
    [
        (3, (8,), "from 1 to 2 axes, got 3"),
        (0, (8,), "got 0"),
        (2, (1, 5, 8), "at most 2 dims"),
        (2, (3, 1), "3 and 5"),
    ],
)
def test_layer_norm_unfit_axes_or_weights_raise(axes: int, weights: tuple[int, ...], result: str) -> None:
    infos = [tensor(5, 8), tensor(*weights), tensor(*weights)]
    with pytest.raises(DeduceError, match=result):
        LayerNorm(axes=axes).infer(infos, Deduction())
