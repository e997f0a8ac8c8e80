"""Deduction of operators, casts, calls and branches, and the checks that undecided conditions become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples
from tests.support.programs import (
    agree,
    checked,
    info,
    interpreted_refuses,
    never,
    ones,
    read,
    refuse,
    result,
    run,
    same,
    tensor,
    text_refused,
)

from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Var, const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import CallFunction, Function
from relax_tune.ir.core.struct_info import ObjectInfo, TensorInfo, TupleInfo
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.deduce.relations import is_base
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.indexing.movement import Concat, Flatten, Reshape, Slice, Split
from relax_tune.ir.op.math.elementwise import Add, Exp, MulScalar
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.shapes import Unique
from relax_tune.ir.passes.control.inline import Inline
from relax_tune.ir.passes.fusion.fuse import FuseOps
from relax_tune.ir.passes.graph.cleanup import CancelViews, DeadCode, Deduce, TidyNames
from relax_tune.ir.passes.graph.collapse import CollapseDims
from relax_tune.ir.passes.graph.constant_fold import FoldConstants
from relax_tune.ir.passes.graph.legalize import Legalize
from relax_tune.ir.passes.pipeline import Pass
from relax_tune.runtime.device.base import Device

pytestmark = pytest.mark.ccompiler
PASSES: tuple[Pass, ...] = (
    Inline(), Deduce(), FoldConstants(), DeadCode(), Legalize(), Legalize(), FuseOps(), CollapseDims(), CancelViews(),
    TidyNames(),
)  # fmt: skip


def test_reshape(device: Device) -> None:
    g = GraphBuilder()
    n = g.symbol("n")
    y = g.call(Reshape((n, const(4))), g.input("x", (n, 2, 2)))
    z = g.call(Flatten(), g.call(Exp(), y))
    assert is_base(tensor(n, 4), y.info) is is_base(tensor(n * 4), z.info) is Proof.YES
    module = checked(g.finish(z))
    (result, _) = agree(module, device, [ones(3, 2, 2)], [ones(0, 2, 2)])
    np.testing.assert_allclose(result, np.exp(ones(12)), rtol=1e-5)

    never(lambda: g.call(Reshape((const(5),)), g.input("w", (3, 4))), "12", "5", "op.reshape")
    at_least_one = GraphBuilder()
    n = at_least_one.symbol("n", lower=1)
    never(lambda: at_least_one.call(Reshape((n, const(5))), at_least_one.input("x", (n, 4))), "n * 4", "n * 5")

    g = GraphBuilder()
    n = g.symbol("n")
    y = g.call(Reshape((n, const(5))), g.input("x", (n, 4)))
    module = checked(g.finish(g.call(Exp(), y)))
    agree(module, device, [ones(0, 4)])
    refuse(module, device, [ones(2, 4)], "8", "10", "op.reshape", "^^^")


def test_matmul(device: Device) -> None:
    g = GraphBuilder()
    n, k, m = g.symbol("n"), g.symbol("k"), g.symbol("m")
    x = g.input("x", (n, k))
    assert g.call(Matmul(), x, g.input("y", (k, m))).info == tensor(n, m)
    assert not g.checks
    never(lambda: g.call(Matmul(), g.input("p", (n, 3)), g.input("q", (4, m))), "3 and 4", "op.matmul(p, q")

    g = GraphBuilder()
    n, k, m = g.symbol("n"), g.symbol("k"), g.symbol("m")
    z = g.call(Matmul(), g.input("x", (n, k)), g.input("y", (m, 8)))
    assert z.info == tensor(n, 8) and len(g.checks) == 1
    module = checked(g.finish(z))
    agree(module, device, [ones(2, 3), ones(3, 8)], [ones(0, 3), ones(3, 8)], [ones(2, 0), ones(0, 8)])
    refuse(module, device, [ones(2, 3), ones(5, 8)], "k == m", "got 3 and 5", "^^^")


def test_add(device: Device) -> None:
    g = GraphBuilder()
    n, m = g.symbol("n"), g.symbol("m")
    x = g.input("x", (n, 4))
    assert g.call(Add(), x, g.input("row", (1, 4))).info == tensor(n, 4) and not g.checks
    never(lambda: g.call(Add(), x, g.input("z", (n, 3))), "dim 1", "4 and 3", "op.add(x, z)")
    w = g.input("w", (m, 4))
    y = g.call(Add(), x, w)
    assert y.info == TensorInfo(None, f32, 2) and len(g.checks) == 1

    module = read("""
        @function
        def main(x: Tensor((n, 4), f32), w: Tensor((m, 4), f32)) -> Tensor(None, f32, ndim=2):
            y: Tensor(None, f32, ndim=2) = op.add(x, w)
            return y
    """)
    for a, b in ((3, 3), (1, 3), (3, 1), (0, 1)):
        assert run(module, ones(a, 4), ones(b, 4)).shape == np.broadcast_shapes((a, 4), (b, 4))
    agree(module, device, *([ones(a, 4), ones(b, 4)] for a, b in ((3, 3), (1, 3), (3, 1), (0, 1), (1, 0))))
    refuse(module, device, [ones(2, 4), ones(3, 4)], "dim 0", "got 2 and 3", "op.add(x, w)", "^^^")
    module = read("""
        @function
        def main(x: Tensor((n, 4), f32), w: Tensor((m, 4), f32)) -> Tensor((n, 4), f32):
            c: Tensor((n, 4), f32) = match_cast(w, Tensor((n, 4), f32))
            y: Tensor((n, 4), f32) = op.add(x, c)
            return y
    """)
    agree(module, device, [ones(3, 4), ones(3, 4)])
    refuse(module, device, [ones(2, 4), ones(3, 4)], "match_cast of w", "dim 0", "2", "3", "^^^")


def test_concat_and_split(device: Device) -> None:
    g = GraphBuilder()
    n, m = g.symbol("n"), g.symbol("m")
    y = g.call(Concat(0), g.input("x", (n, 4)), g.input("z", (m, 4)))
    assert y.info == tensor(n + m, 4)
    agree(checked(g.finish(y)), device, [ones(2, 4), ones(3, 4)], [ones(0, 4), ones(1, 4)])

    g = GraphBuilder()
    n = g.symbol("n")
    halves = g.call(Split(2), g.input("x", (n * 2, 4)), hint="halves")
    assert halves.info == TupleInfo((tensor(n, 4),) * 2)
    g.input("rows", (n,))
    a, b = run(checked(g.finish(halves)), ones(6, 4), ones(3))
    assert a.tolist() == ones(6, 4)[:3].tolist() and b.tolist() == ones(6, 4)[3:].tolist()

    g = GraphBuilder()
    n = g.symbol("n")
    module = checked(g.finish(g.call(Split(3), g.input("x", (n, 4)))))
    for size in (0, 1, 2, 3, 7):
        c = -(-size // 3)
        expected = [max(min(c, size - i * c), 0) for i in range(3)]
        assert [part.shape[0] for part in run(module, ones(size, 4))] == expected


def test_slice(device: Device) -> None:
    g = GraphBuilder()
    n = g.symbol("n")
    x = g.input("x", (n,))
    first, rest = g.call(Slice(0, const(0), const(3)), x), g.call(Slice(0, const(1), n), x)
    module = checked(g.finish((g.call(Exp(), first), g.call(Exp(), rest))))
    calls = [[ones(size)] for size in (0, 1, 2, 3, 9)]
    for (x_value,), (a, b) in zip(calls, agree(module, device, *calls), strict=True):
        size = len(x_value)
        assert a.shape == (min(3, size),) and b.shape == (max(size - 1, 0),)
        np.testing.assert_allclose(b, np.exp(x_value[1:]), rtol=1e-5)


CAST = """
    @function
    def main(x: Tensor((n, 2), f32), y: {y}) -> Tensor((n, 2), f32):
        c: Tensor((n, 2), f32) = match_cast(y, Tensor((n, 2), f32))
        z: Tensor((n, 2), f32) = op.add(x, c)
        return z
"""


@pytest.mark.parametrize("y", ["Tensor(None, None)", "Tensor(None, f32, ndim=2)", "Tensor((p, q), f32)"])
def test_match_cast(device: Device, y: str) -> None:
    module = read(CAST.format(y=y))
    agree(module, device, [ones(3, 2), ones(3, 2)])
    refuse(module, device, [ones(3, 2), ones(4, 2)], " y", "dim 0", "4", "3")
    refuse(module, device, [ones(3, 2), ones(3, 5)], " y", "dim 1", "5", "2")
    text = interpreted_refuses(module, [ones(3, 2), ones(4, 2)], "match_cast(y, Tensor((n, 2), f32))", "^^^")
    assert "match_cast of y: " in text


def test_arguments(device: Device) -> None:
    module = read("""
        @function
        def main(x: Tensor((n, 2), f32)) -> Tensor((n, 2), f32):
            y: Tensor((n, 2), f32) = op.exp(x)
            return y
    """)
    refuse(module, device, [ones(3)], "main: parameter x: expected", "2 dim", "got 1", "(3,)")
    refuse(module, device, [ones(3, 2, dtype=np.float64)], "main: parameter x: expected", "float32", "got float64")
    refuse(module, device, [], "main: ", "expected ", " x", "got ")
    interpreted_refuses(module, [], "main: parameter x: expected Tensor((n, 2), f32), got no argument")


def test_declared_results(device: Device) -> None:
    text = """
        @function
        def main(x: Tensor((n,), f32), w: Tensor((m,), f32), one: Tensor((1,), f32)) -> Tensor((n,), f32):
            with dataflow():
                y: Tensor(({size},), f32) = op.concat({args}, axis=0)
            return y
    """
    text_refused(text.format(size="n + 1", args="x, one"), "expected n, got n + 1", "return y")
    g = GraphBuilder()
    n = g.symbol("n")
    y = g.call(Concat(0), g.input("x", (n,)), g.constant("one", ones(1)))
    never(lambda: g.finish(y, tensor(n)), "result of main", "expected n, got n + 1", "return concat")

    module = read(text.format(size="m", args="w"))
    agree(module, device, [ones(3), ones(3), ones(1)])
    refuse(module, device, [ones(3), ones(4), ones(1)], "main: the result: ", "dim 0", "3", "4", "return y", "^^^")


SUB = """
    @function
    def sub(s: Shape([n, m])) -> Tensor((n * m,), i64):
        with dataflow():
            y: Tensor((n * m,), i64) = op.iota(size=n * m)
        return y

    @function
    def main(x: Tensor((n,), f32), u: Shape(None, ndim=2)) -> {ret}:
        with dataflow():
            y: {ret} = call("sub", {s})
        return y
"""


def test_shape_arguments(device: Device) -> None:
    for s, ret in (
        ("shape(n, 4)", "Tensor((n * 4,), i64)"),
        ("shape(3, 4)", "Tensor((12,), i64)"),
        ("u", "Tensor(None, i64, ndim=1)"),
    ):
        module = read(SUB.format(s=s, ret=ret))
        assert is_base(info(module, "y"), _deduced(module)) is Proof.YES
        assert is_base(_deduced(module), info(module, "y")) is Proof.YES
        size = {"shape(n, 4)": 20, "shape(3, 4)": 12, "u": 14}[s]
        (result,) = agree(module, device, [ones(5), (7, 2)])
        assert result.tolist() == list(range(size))
    text_refused(SUB.format(s="shape(n, 4)", ret="Tensor((n * 5 + 1,), i64)"), "n * 5 + 1", 'call("sub", shape(n, 4))')


def _deduced(module: IRModule) -> object:
    """What deduction says of the last binding of `main`."""
    from relax_tune.ir.core.graph import Function
    from relax_tune.ir.deduce.deduce import infer_value
    from relax_tune.ir.op.base import Deduction

    f = module.functions["main"]
    assert isinstance(f, Function)
    return infer_value(f.bindings[-1].value, Deduction())


def test_branches(device: Device) -> None:
    text = """
        @function
        def main(c: Tensor((), bool), x: {x}, w: {w}) -> {ret}:
            y: {ret}
            if c:
                with dataflow():
                    a: {x} = {a}
                y = a
            else:
                y = w
            return y
    """
    for x, w, ret, values in (
        ("Tensor((n, 4), f32)", "Tensor((m, 4), f32)", TensorInfo(None, f32, 2), (ones(2, 4), ones(3, 4))),
        ("Tensor((n, 4), f32)", "Tensor((n, 4), f16)", TensorInfo(None, None, 2), (ones(2, 4), ones(2, 4, dtype="f2"))),
        ("Tensor((n, 4), f32)", "Shape([n, m])", ObjectInfo(), (ones(2, 4), (2, 5))),
    ):
        printed = {TensorInfo: f"Tensor(None, {getattr(ret, 'dtype', None)}, ndim=2)", ObjectInfo: "Object()"}[
            type(ret)
        ]
        if "f16" in w:
            printed = "Tensor((n, 4), None)"
        module = read(text.format(x=x, w=w, ret=printed, a="op.exp(x)"))
        deduced = _deduced(module)
        assert is_base(result(module), deduced) is is_base(deduced, result(module)) is Proof.YES  # type: ignore[arg-type]
        taken, other = agree(module, device, [np.array(True), *values], [np.array(False), *values])
        np.testing.assert_allclose(taken, np.exp(values[0]), rtol=1e-5)
        np.testing.assert_array_equal(other, values[1])


def test_never_fitting_calls_are_refused() -> None:
    text = """
        @function
        def g(x: Tensor((n, n), f32)) -> Tensor((n,), f32):
            with dataflow():
                y: Tensor((n,), f32) = op.sum(x, axes=(0,), keepdims=False)
            return y

        @function
        def main(x: Tensor({dims}, f32)) -> Tensor(None, f32, ndim=1):
            with dataflow():
                y: Tensor(None, f32, ndim=1) = call("g", x)
            return y
    """
    text_refused(text.format(dims="(3, 4)"), "g: parameter x: dim 1: expected n = 3, got 4", 'call("g", x)')
    inner = read(text.format(dims="(3, 3)"))
    g = GraphBuilder("outer")
    g.include(inner)
    never(lambda: g.call_function("g", g.input("z", (3, 4))), "g: parameter x: dim 1: expected n = 3, got 4")


def test_data_dependent(device: Device) -> None:
    g = GraphBuilder()
    u = g.call(Unique(), g.input("x", (g.symbol("n"),)))
    assert u.info == TensorInfo(None, f32, 1)
    y = g.call(Exp(), u)
    assert y.info == TensorInfo(None, f32, 1)
    m = Var("m")
    z = g.match_cast(y, tensor(m))
    assert z.info == tensor(m)
    module = checked(g.finish(g.call(Exp(), z)))
    assert result(module) == tensor(m)
    inputs = [np.array([2, 1, 2, 1], np.float32), np.zeros(0, np.float32)]
    for x, actual in zip(inputs, agree(module, device, *([x] for x in inputs)), strict=True):
        np.testing.assert_allclose(actual, np.exp(np.exp(np.unique(x))), rtol=1e-5)


def levels() -> IRModule:
    """Operators, a tensor function, a library routine, a function called and a view, over (n, 3)."""
    inner = GraphBuilder("norm")
    k = Var("k")
    a = inner.input("a", (k, 3))
    called = inner.finish(inner.call(Add(), a, inner.call(Exp(), a)))

    b, rows = TensorBuilder("negate"), Var("r")
    x, y = b.input("x", (rows, 3)), b.output("y", (rows, 3))
    b.compute(y, lambda i, j: 0 - x[i, j])
    g = GraphBuilder()
    n = g.symbol("n", upper=9)
    g.include(called)
    p, w = g.input("p", (n, 3)), g.constant("w", np.arange(9, dtype=np.float32).reshape(3, 3) / 9)
    q = g.call_tir(g.add(b.finish()), [g.call(Matmul(), p, w)], tensor(n, 3))
    r = g.call_library("blas.gemm", [g.call_function("norm", q), w], tensor(n, 3), [n, 3, 3])
    flat = g.call(Reshape((n * 3,)), g.call(Add(), r, g.call(MulScalar(2.0), p)))
    return checked(g.finish((g.call(Exp(), flat), g.call(Concat(0), flat, flat))))


@settings(max_examples=examples(20), deadline=None)
@given(st.permutations(PASSES))
def test_passes_in_any_order(order: list[Pass]) -> None:
    def gemm(inputs: Sequence[Any], outputs: Sequence[Any], _: Sequence[int]) -> None:
        np.matmul(*inputs, out=outputs[0])

    module = levels()
    inputs = [ones(5, 3) / 9, ones(0, 3), ones(1, 3)]
    references = [run_function(module, "main", [x], {"blas.gemm": gemm}) for x in inputs]
    for step in order:
        module = step(module)
        verify(module)
    main = module.functions["main"]
    assert isinstance(main, Function) and not any(isinstance(b.value, CallFunction) for b in main.bindings)
    for x, expected in zip(inputs, references, strict=True):
        same(run_function(module, "main", [x], {"blas.gemm": gemm}), expected, repr(order))
