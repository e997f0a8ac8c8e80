"""The interpreter on graph functions: all levels mixed, symbols bound at run time, refusals that name the place."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from tests.ir.text.test_text_graph import feed_forward

from relax_tune.errors import UserError, VerifyError
from relax_tune.ir.core.dtype import DType, bf16, f16, f32, f64
from relax_tune.ir.core.expr import Var, const
from relax_tune.ir.core.function import Bound, IRModule
from relax_tune.ir.core.graph import Binding, Call, DataflowBlock, Function, GVar, ShapeValue, TupleValue
from relax_tune.ir.core.struct_info import ShapeInfo, TensorInfo, TupleInfo
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.math.elementwise import Cast, Exp, Relu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.passes.pipeline import lower


@pytest.mark.parametrize(("b", "n"), [(1, 1), (2, 7), (3, 16)])
def test_run_function_feed_forward_same_after_lowering(b: int, n: int) -> None:
    m = feed_forward()
    x = np.random.default_rng(b).standard_normal((b, n, 8)).astype(np.float32)
    w = {k.removeprefix("ff."): v.astype(np.float64) for k, v in m.constants.items()}
    h = x.astype(np.float64) @ w["w1"] + w["b1"]
    h = h * 0.5 * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))
    h = h @ w["w2"] + w["b2"] + x
    h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-5) * w["scale"] + w["shift"]
    np.testing.assert_allclose(run_function(m, "main", [x]), h, rtol=1e-4, atol=1e-4)
    for name, stage in lower(m).stages:
        np.testing.assert_allclose(run_function(stage, "main", [x]), h, rtol=1e-4, atol=1e-4, err_msg=name)


def doubling() -> IRModule:
    """call_tir doubling [n] -> [2n], twice."""
    b, k = TensorBuilder("double"), Var("k")
    x, y = b.input("x", (k,)), b.output("y", (k * 2,))
    b.compute(y, lambda i: x[i % k])
    g, n = GraphBuilder(), Var("n")
    x1 = g.input("x", (n,))
    name = g.add(b.finish())
    x2 = g.call_tir(name, [x1], TensorInfo((n * 2,), f32))
    return g.finish(g.call_tir(name, [x2], TensorInfo((n * 4,), f32)))


def test_run_function_repeated_call_tir() -> None:
    out = run_function(doubling(), "main", [np.arange(3, dtype=np.float32)])
    assert isinstance(out, np.ndarray) and out.tolist() == [0, 1, 2] * 4
    empty = run_function(doubling(), "main", [np.zeros(0, np.float32)])
    assert isinstance(empty, np.ndarray) and empty.shape == (0,)


def test_run_function_mixes_levels_and_libraries() -> None:
    g, n = GraphBuilder(), Var("n")
    x, w = g.input("x", (n, 3)), g.constant("w", np.arange(6, dtype=np.float32).reshape(3, 2))
    y = g.call_library("blas.gemm", [x, w], TensorInfo((n, const(2)), f32), [n, 2, 3])
    m = g.finish(g.call(Relu(), y))
    calls: list[tuple[int, ...]] = []

    def gemm(inputs, outputs, scalars):  # type: ignore[no-untyped-def]
        calls.append(tuple(scalars))
        np.matmul(*inputs, out=outputs[0])

    x_value = np.arange(12, dtype=np.float32).reshape(4, 3) - 6
    out = run_function(m, "main", [x_value], {"blas.gemm": gemm})
    np.testing.assert_array_equal(out, np.maximum(x_value @ m.constants["w"], 0))
    assert calls == [(4, 2, 3)]
    with pytest.raises(UserError, match=r"library routine 'blas.gemm'"):
        run_function(m, "main", [x_value])


def test_run_function_shapes_and_tuples() -> None:
    n, m = Var("n"), Var("m")
    s, x = GVar("s", ShapeInfo((n, m))), GVar("x", TensorInfo((n,), f32))
    t = GVar("t", TupleInfo((ShapeInfo((n * m,)), x.info)))
    bindings = (Binding(sh := GVar("sh", ShapeInfo((n * m,))), ShapeValue((n * m,))), Binding(t, TupleValue((sh, x))))
    f = Function("main", (s, x), (DataflowBlock(bindings),), t, t.info)
    module = IRModule({"main": f})
    shape, array = run_function(module, "main", [(2, 5), np.ones(2, np.float32)])
    assert shape == (10,) and array.tolist() == [1, 1]
    with pytest.raises(UserError, match=r"parameter x: .* dim 0 \(n\) .*2, got 3"):
        run_function(module, "main", [(2, 5), np.ones(3, np.float32)])
    with pytest.raises(UserError, match=r"parameter s: .*got a tuple of 3"):
        run_function(module, "main", [(2, 5, 1), np.ones(2, np.float32)])


def with_match_cast() -> IRModule:
    """x: (n,), y of unknown shape, y cast to (n, 2)."""
    g, n = GraphBuilder(), Var("n")
    g.input("x", (n,))
    y = g.input("y", None, None)
    return g.finish(g.match_cast(y, TensorInfo((n, const(2)), f32)))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((4, 2), r"match_cast of y: expected .* dim 0 \(n\) equal to 3, got 4"),
        ((3, 5), r"match_cast of y: expected .* dim 1 \(2\) equal to 2, got 5"),
        ((6,), r"match_cast of y: expected .* with 2 dims, got 1 dims"),
    ],
)
def test_match_cast_mismatch_raises(shape: tuple[int, ...], message: str) -> None:
    x = np.zeros(3, np.float32)
    run_function(with_match_cast(), "main", [x, np.zeros((3, 2), np.float32)])
    with pytest.raises(UserError, match=message):
        run_function(with_match_cast(), "main", [x, np.zeros(shape, np.float32)])


@pytest.mark.parametrize("dtype", [f16, bf16, f32, f64])
def test_cast_from_float64_rounds_to_target_dtype(dtype: DType) -> None:
    g = GraphBuilder()
    m = g.finish(g.call(Cast(dtype), g.input("x", (3,), f64)))
    x = np.array([0.1, 1e300, np.nan])
    for module in (m, lower(m).module):
        actual = run_function(module, "main", [x])
        with np.errstate(over="ignore"):
            expected = x.astype(dtype.numpy)
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual.astype(np.float64), expected.astype(np.float64))


def test_match_cast_binds_symbols() -> None:
    g, m = GraphBuilder(), Var("m")
    y = g.match_cast(g.input("y", None, f32), TensorInfo((m,), f32))
    module = g.finish(g.call(Exp(), y))
    for size in (0, 3):
        out = run_function(module, "main", [np.zeros(size, np.float32)])
        assert isinstance(out, np.ndarray) and out.tolist() == [1.0] * size


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([np.zeros(2, np.float32)], r"main: parameter x: .* with 2 dims, got 1 dims"),
        ([np.zeros((3, 2))], r"main: parameter x: .* of float32, got float64"),
        ([], "main: parameter x: .*got no argument"),
        ([(3, 2)], r"main: parameter x: .* got a tuple of 2"),
        ([np.zeros((3, 4), np.float32)], r"main: parameter x: .* dim 1 \(2\) equal to 2, got 4"),
        ([np.zeros((5, 2), np.float32)], r"main: expected 0 <= n <= 4, got n = 5"),
        ([np.zeros((3, 2), np.float32)] * 2, r"main: expected 1 arguments, got 2"),
    ],
)
def test_run_function_wrong_arguments_raise(args: list[np.ndarray], message: str) -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", upper=4), 2))
    m = g.finish(g.call(Relu(), x))
    run_function(m, "main", [np.zeros((4, 2), np.float32)])
    with pytest.raises(UserError, match=message):
        run_function(m, "main", args)
    with pytest.raises(UserError, match="graph function called 'nothing'"):
        run_function(m, "nothing", args)


def test_operator_run_time_check_raises() -> None:
    g, n, k, m = GraphBuilder(), Var("n"), Var("k"), Var("m")
    module = g.finish(g.call(Matmul(), g.input("x", (n, k)), g.input("y", (m, 8))))
    x = np.ones((2, 3), np.float32)
    out = run_function(module, "main", [x, np.ones((3, 8), np.float32)])
    assert isinstance(out, np.ndarray) and (out == 3).all()
    with pytest.raises(UserError, match=r"3.*4|4.*3"):
        run_function(module, "main", [x, np.ones((4, 8), np.float32)])


def test_wrong_annotation_raises() -> None:
    n = Var("n")
    x, y = GVar("x", TensorInfo((n,), f32)), GVar("y", TensorInfo((n + 1,), f32))
    f = Function("main", (x,), (DataflowBlock((Binding(y, Call(Relu(), (x,))),)),), y, y.info)
    with pytest.raises(VerifyError, match=r"value y: .*\(n \+ 1\) .*4, got 3 [\s\S]*op.relu\(x\)\n.*\^"):
        run_function(IRModule({"main": f}, {}, (Bound(n),)), "main", [np.zeros(3, np.float32)])
    good = replace(f, ret=x)
    bad = IRModule({"main": replace(good, blocks=())})
    with pytest.raises(VerifyError, match="the result: expected"):
        run_function(bad, "main", [np.zeros(3, np.float32)])
