"""Every operator: its NumPy meaning, its loops under the interpreter, and its deduction agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.operator_samples import SAMPLES, Sample, dims

from relax_tune.errors import DeduceError
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import (
    dtype,
    f32,
    f64,
    i64,
)
from relax_tune.ir.core.expr import Var, as_int, const, expr
from relax_tune.ir.core.graph import Call, Function
from relax_tune.ir.core.struct_info import TensorInfo, TupleInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp import run_prim
from relax_tune.ir.interp.reference import evaluate_function, evaluate_prim
from relax_tune.ir.op.base import Deduction, OperatorSpec
from relax_tune.ir.op.devices import DeviceOperator
from relax_tune.ir.op.indexing.movement import (
    Slice,
    Take,
)
from relax_tune.ir.op.math.bits import (
    BitCast,
)
from relax_tune.ir.op.math.elementwise import (
    Add,
    AddScalar,
    Cast,
    Exp,
)
from relax_tune.ir.op.math.logic import Compare
from relax_tune.ir.op.math.quantize import Quantize
from relax_tune.ir.op.neural.window import PoolPositions
from relax_tune.ir.op.reduction.einsum import Einsum
from relax_tune.ir.op.reduction.scan import ArgMax, TopK
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.op.shapes import ShapeOperator
from relax_tune.ir.passes.graph.decompose import Decompose
from relax_tune.ir.passes.pipeline import lower


def info(a: np.ndarray[Any, Any]) -> TensorInfo:
    return TensorInfo(tuple(expr(d) for d in a.shape), dtype(a.dtype))


def shapes_of(result: Any) -> list[tuple[int, ...]]:
    infos = result.fields if isinstance(result, TupleInfo) else (result,)
    return [tuple(as_int(d) for d in i.shape) for i in infos]


@pytest.mark.parametrize("case", SAMPLES, ids=lambda c: f"{c[0].name}-{'-'.join(str(a.shape) for a in c[1])}")
def test_legalized_loops_equal_numpy_semantics(case: Sample) -> None:
    op, arrays = case
    expected = op.evaluate(arrays)
    expected = expected if isinstance(expected, tuple) else (expected,)
    infos = [info(a) for a in arrays]
    assert shapes_of(op.infer(infos, Deduction())) == [w.shape for w in expected]
    func = op.legalize("f", infos)
    outs = [np.full(w.shape, 77, w.dtype) for w in expected]
    run_prim(func, [*arrays, *outs])
    for got, w in zip(outs, expected, strict=True):
        assert got.dtype == w.dtype
        np.testing.assert_allclose(got, w, rtol=2e-5, atol=2e-6)
    for got, w in zip(evaluate_prim(func, arrays), expected, strict=True):
        np.testing.assert_allclose(got, w, rtol=2e-5, atol=2e-6)


DECOMPOSED = [c for c in SAMPLES if type(c[0]).decompose is not OperatorSpec.decompose]


@pytest.mark.parametrize("case", DECOMPOSED, ids=lambda c: f"{c[0].name}-{'-'.join(str(a.shape) for a in c[1])}")
def test_decomposed_operator_computes_same_values(case: Sample) -> None:
    op, arrays = case
    g = GraphBuilder()
    args = [g.input(f"x{p}", info(a).shape, info(a).dtype) for p, a in enumerate(arrays)]
    module = g.finish(g.call(op, *args, hint="result"))
    decomposed = Decompose()(module)
    main = decomposed.functions["main"]
    assert isinstance(main, Function) and all(b.var.name == "result" for b in main.bindings[-1:])
    terms = op.equation.replace(".", "").split("->")[0].split(",") if isinstance(op, Einsum) else []
    diagonal = any(len(set(t)) < len(t) for t in terms)  # diagonals are not decomposed
    assert any(isinstance(b.value, Call) and b.value.op == op for b in main.bindings) is diagonal
    verify(decomposed)
    expected = op.evaluate(arrays)
    for form in (decomposed, lower(module).module):
        np.testing.assert_allclose(evaluate_function(form, arrays), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", [c for c in SAMPLES if c[1] and c[1][0].dtype == np.float32], ids=lambda c: c[0].name)
def test_double_precision_stays(case: Sample) -> None:
    op, arrays = case
    if isinstance(op, (Cast, BitCast, Compare, ArgMax, TopK, Quantize, PoolPositions)):
        return
    wide = [a.astype(np.float64) if a.dtype == np.float32 else a for a in arrays]
    results = op.evaluate(wide)
    assert all(a.dtype == np.float64 for a in (results if isinstance(results, tuple) else (results,)))


def test_every_operator_with_loops_has_a_sample() -> None:
    # those on shapes and devices are no loop nests, and tested with the graph
    loops = {o for o in OPERATORS.values() if not issubclass(o, (ShapeOperator, DeviceOperator))}
    assert {type(op) for op, _ in SAMPLES} == loops


def test_attributes_with_symbols_are_bound_before_evaluating() -> None:
    n = Var("n")
    op = Slice(0, const(1), n)
    np.testing.assert_array_equal(op.substituted({n: const(3)}).evaluate([np.arange(5.0)]), [1.0, 2.0])
    with pytest.raises(DeduceError, match="bind its symbols first"):
        op.evaluate([np.arange(5.0)])


def test_wrong_dtypes_and_arities_are_refused() -> None:
    x, i = TensorInfo(dims(3), f32), TensorInfo(dims(3), i64)
    with pytest.raises(DeduceError, match=r"exp: .*floating-point"):
        Exp().infer([i], Deduction())
    with pytest.raises(DeduceError, match=r"add_scalar: .*i64.* got 0\.5"):
        AddScalar(0.5).infer([i], Deduction())
    with pytest.raises(DeduceError, match=r"add: .*f32 and i64"):
        Add().infer([x, i], Deduction())
    with pytest.raises(DeduceError, match="add: expected 2 arguments, got 1"):
        Add().infer([x], Deduction())
    with pytest.raises(DeduceError, match="take: expected int32 or int64 indices"):
        Take().infer([x, TensorInfo(dims(3), f64)], Deduction())
