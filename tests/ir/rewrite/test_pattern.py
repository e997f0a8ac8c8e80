"""Patterns over dataflow: what matches and what does not, captures, conditions with three answers, and clear mistakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from relax_tune.errors import UserError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.dtype import f16, f32
from relax_tune.ir.core.expr import Var, as_int, eq, le
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Call, CallTIR, GVar, Value
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.deduce.pattern_kinds import PatternKind
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.movement import Permute, Split
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Cast, Div, Exp, Mul, MulScalar, Relu, Sigmoid, Sub, Unary
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Softmax, Sum
from relax_tune.ir.passes.graph.legalize import Legalize
from relax_tune.ir.rewrite.match import Match
from relax_tune.ir.rewrite.pattern import Pattern, library, maybe, op, tir, value, weight
from relax_tune.ir.rewrite.rules import matches

Builder = Callable[[GraphBuilder], Value | tuple[Value, ...]]


def module(make: Builder) -> IRModule:
    g = GraphBuilder()
    result = make(g)
    return g.finish(result)


def matches_of(p: Pattern, make: Builder | IRModule) -> list[Match]:
    return list(matches(make if isinstance(make, IRModule) else module(make), p))


def linear(g: GraphBuilder, bias: bool = True, turned: bool = False) -> GVar:
    """relu(x w + b), the bias on either side."""
    x = g.input("x", (g.symbol("n", 1, 64), 8))
    y = g.call(Matmul(), x, g.constant("w", np.ones((8, 4), np.float32)))
    b = g.constant("b", np.arange(4, dtype=np.float32))
    if bias:
        y = g.call(Add(), b, y) if turned else g.call(Add(), y, b)
    return g.call(Relu(), y)


def names(m: Match) -> dict[str, str]:
    return {k: v.name for k, v in m.values.items() if hasattr(v, "name")}


@pytest.mark.parametrize("turned", [False, True])
def test_operators_captures_and_either_order(turned: bool) -> None:
    p = op(Relu, op(Matmul, "x", "w").named("product") + "b")
    (m,) = matches_of(p, lambda g: linear(g, turned=turned))
    assert names(m) == {"x": "x", "w": "w", "product": "matmul", "b": "b"}
    assert [v.name for v in m.inside] == ["relu", "add", "matmul"]
    assert isinstance(m.definition("product"), Call) and m.info("x") == m.info("x") and m.array("w").shape == (8, 4)
    assert not matches_of(op(Relu, op(Mul, "p", "b")), linear)


def test_maybe_matches_with_and_without_bias() -> None:
    p = op(Relu, maybe(value("x") @ "w", lambda y: y + "b"))
    with_bias, without = (matches_of(p, lambda g, b=b: linear(g, b)) for b in (True, False))
    assert ["b" in m for m in with_bias] == [True] and ["b" in m for m in without] == [False]


def added(g: GraphBuilder, left: type[Unary] | None, right: type[Unary] | None) -> GVar:
    """left(a) + right(b)."""
    sides = [g.input(name, (3,)) for name in "ab"]
    return g.call(Add(), *(s if o is None else g.call(o(), s) for o, s in zip((left, right), sides, strict=True)))


def test_alternatives_come_in_order_and_backtrack() -> None:
    either = (op(Exp, "x") | op(Relu, "x")) + "y"
    for inner in (Exp, Relu):
        (m,) = matches_of(either, lambda g, inner=inner: added(g, inner, None))
        assert names(m) == {"x": "a", "y": "b"}
    both = matches_of(op(Exp, "x") + "y", lambda g: added(g, Exp, Exp))
    assert [names(m)["x"] for m in both] == ["a", "b"], "the order that is written comes first"

    def twice(g: GraphBuilder) -> GVar:
        a = g.input("a", (3,))
        return g.call(Add(), g.call(Exp(), a), a)

    (m,) = matches_of(value("x") + op(Exp, "x"), twice)  # the first order binds x to the wrong side
    assert names(m) == {"x": "a"}


def silu(g: GraphBuilder, same: bool) -> GVar:
    h = g.input("h", (4,))
    return g.call(Mul(), g.call(Sigmoid(), h if same else g.input("k", (4,))), h)


def softmax(g: GraphBuilder, same: bool) -> GVar:
    x = g.input("x", (3, 4))
    e = g.call(Exp(), x)
    return g.call(Div(), e, g.call(Sum((1,), True), e if same else g.call(Exp(), x)))


def test_capture_matches_one_value_only() -> None:
    for p, make in (
        (value("h") * op(Sigmoid, "h"), silu),
        (op(Exp, "x").named("e") / op(Sum, "e", keepdims=True), softmax),
    ):
        assert matches_of(p, lambda g, make=make: make(g, True)) and not matches_of(
            p, lambda g, make=make: make(g, False)
        )


def test_attributes_classes_and_weights() -> None:
    turned = lambda g: g.call(Matmul(True), g.input("a", (3, 4)), g.input("b", (5, 4)))
    assert matches_of(op(Matmul, transpose_b=True), turned) and not matches_of(op(Matmul, transpose_b=False), turned)
    assert not matches_of(value("a") @ "b", turned)
    moved = lambda g: g.call(Permute((0, 2, 1)), g.input("a", (3, 4, 5)))
    assert matches_of(op(Permute, axes=(0, 2, 1)), moved)
    assert matches_of(op(Permute, "a", axes=lambda axes: axes[0] == 0), moved)
    assert not matches_of(op(Permute, axes=lambda axes: axes[0] == 1), moved)
    assert matches_of(op(Unary, "x"), lambda g: g.call(Exp(), g.input("x", (2,)))), "a class stands for those below it"
    assert matches_of(op(Cast, "x", dtype=f16), lambda g: g.call(Cast(f16), g.input("x", (2,))))
    assert matches_of(op(AddScalar, value=1), lambda g: g.call(AddScalar(1.0), g.input("x", (2,))))
    half = lambda g: g.call(Mul(), g.constant("h", np.full((2, 2), 0.1, np.float16)), g.input("x", (2, 2), f16))
    assert matches_of(op(Mul, "x", 0.1), half) and not matches_of(op(Mul, "x", 0.2), half)
    (m,) = matches_of(op(Mul, "x", weight("w")), half)
    assert m.array("w").shape == (2, 2)
    with pytest.raises(UserError, match="expected a constant as 'x'"):
        m.array("x")


def test_numbers_in_operators_and_in_constants() -> None:
    def built(g: GraphBuilder, how: str) -> GVar:
        x = g.input("x", (3,))
        scalars = {"add": AddScalar(0.1), "sub": AddScalar(-0.1), "mul": MulScalar(0.1)}
        return g.call(scalars[how], x) if how in scalars else g.call(Mul(), g.constant("c", np.float32([0.1] * 3)), x)

    for p, fits in (
        (value("x") + 0.1, ["add"]),
        (value("x") - 0.1, ["sub"]),
        (0.1 * value("x"), ["mul", "constant"]),
        (1 + value("x"), []),
    ):
        assert [
            how for how in ("add", "sub", "mul", "constant") if matches_of(p, lambda g, how=how: built(g, how))
        ] == fits


def test_fields_of_tuples_and_other_names() -> None:
    def make(g: GraphBuilder) -> Value:
        parts = g.call(Split(2, 0), g.input("x", (4, 3)))
        a, b = g.item(parts, 0), g.item(parts, 1)
        return g.call(Sub(), g.emit(a), b)  # through another name

    parts = op(Split, "x").named("parts")
    assert matches_of(parts[0] - parts[1], make) and not matches_of(parts[1] - parts[0], make)


def test_once_needs_a_single_reader() -> None:
    def make(g: GraphBuilder, again: bool) -> Value | tuple[Value, ...]:
        e = g.call(Exp(), g.input("x", (3,)))
        y = g.call(Relu(), e)
        return (y, g.call(Sigmoid(), e)) if again else y

    p = op(Relu, op(Exp, "x").once())
    assert matches_of(p, lambda g: make(g, False)) and not matches_of(p, lambda g: make(g, True))
    assert not matches_of(op(Exp, "x").once(), lambda g: g.call(Exp(), g.input("x", (3,)))), (
        "a result is read by others"
    )


def product(g: GraphBuilder, *dims: Any) -> GVar:
    return g.call(Matmul(), g.input("a", dims[:2]), g.input("b", dims[2:]))


def test_dims_are_proved_and_never_guessed() -> None:
    square = value("a").of("m", "k") @ value("b").of("k", "m")
    (m,) = matches_of(square, lambda g: product(g, n := g.symbol("n"), 4, 4, n))
    assert as_int(m.dim("k")) == 4 and isinstance(m.dim("m"), Var) and not m.unknown
    assert not matches_of(square, lambda g: product(g, 3, 4, 4, 5)), "never"
    (m,) = matches_of(square, lambda g: product(g, g.symbol("n"), 4, 4, g.symbol("p")))
    assert [repr(c) for c in m.unknown] == ["n == p"], "noted where it is unknown"
    wide = op(Relu, value("x").of(..., 8, dtype=f32))
    assert matches_of(wide, lambda g: g.call(Relu(), g.input("x", (2, g.symbol("n"), 8))))
    assert matches_of(wide, lambda g: g.call(Relu(), g.input("x", (8,))))
    assert not matches_of(wide, lambda g: g.call(Relu(), g.input("x", (2, 8), f16)))
    assert not matches_of(wide, lambda g: g.call(Relu(), g.input("x", ())))
    assert not matches_of(op(Relu, value("x").of(None, 8)), lambda g: g.call(Relu(), g.input("x", None))), (
        "no dims known"
    )
    assert matches_of(
        op(Relu, value("x").of(ndim=2)), lambda g: g.call(Relu(), g.parameter("x", TensorInfo(None, f32, 2)))
    )


def test_where_takes_bool_expression_or_proof() -> None:
    make = lambda g: g.call(Relu(), g.input("x", (g.symbol("n", 1, 64) * 8,)))
    rows = op(Relu, value("x").of("n"))
    assert matches_of(rows.where(lambda m: eq(m.dim("n") % 4, 0)), make)[0].unknown == ()
    assert matches_of(rows.where(lambda m: le(m.dim("n"), 512)), make)[0].unknown == ()
    assert not matches_of(rows.where(lambda m: eq(m.dim("n"), 3)), make)
    (m,) = matches_of(rows.where(lambda m: eq(m.dim("n") % 16, 0)), make)
    assert len(m.unknown) == 1
    assert matches_of(rows.where(lambda m: True), make) and not matches_of(rows.where(lambda m: False), make)
    assert not matches_of(rows.where(lambda m: Proof.UNKNOWN), make)
    with pytest.raises(UserError, match=r"condition.* got n \* 8"):
        matches_of(rows.where(lambda m: m.dim("n")), make)
    with pytest.raises(UserError, match="expression or a Proof"):
        matches_of(rows.where(lambda m: None), make)
    with pytest.raises(UserError, match="dim called 'k'"):
        matches_of(rows.where(lambda m: eq(m.dim("k"), 1)), make)


def test_tensor_functions_and_libraries() -> None:
    lowered = Legalize(strict=True)(module(linear))
    (m,) = matches_of(tir(tir("x", "w", kind=PatternKind.OUT_FUSIBLE).named("p") | tir("x"), "b"), lowered)
    assert names(m)["x"] == "x" and isinstance(m.definition("p"), CallTIR)
    assert len(matches_of(tir(kind=PatternKind.ELEMENTWISE), lowered)) == 1
    assert len(matches_of(tir(callee="matmul"), lowered)) == 1 and not matches_of(tir(callee="softmax"), lowered)
    assert len(matches_of(tir(), lowered)) == 3
    out = TensorInfo((Var("n"),), f32)
    call = lambda g: g.call_library(
        "blas.copy", [g.input("x", (g.symbol("n"),))], g.call(Exp(), g.input("y", (2,))).info
    )
    assert out and matches_of(library("blas.copy", "x"), call) and not matches_of(library("blas.axpy"), call)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: op("matmul"), r"class of an operator, .*got 'matmul'"),
        (lambda: op(Matmul(), "x"), r"expected the class of an operator"),
        (lambda: op(Matmul, "x", transposed=True), r"attribute of Matmul, got 'transposed'; .*transpose_b"),
        (lambda: op(Relu, "x", axis=1), r"got 'axis'; it has none"),
        (lambda: op(Relu, None), r"expected a pattern, .*number, got None"),
        (lambda: op(Softmax, "my x"), r"name for a capture, .*got 'my x'"),
        (lambda: op(Relu, "x") | Relu(), r"expected a pattern, .*capture or a number"),
        (lambda: value("x").of(3, ...), r"expected `...` as the first of the dims"),
        (lambda: value("x").of(2.5), r"expected a dim .*None, got 2.5"),
        (lambda: op(Split, "x")["a"], r"number of a tuple's field, got 'a'"),
    ],
)  # fmt: skip
def test_pattern_refuses_wrong_arguments(make: Callable[[], Pattern], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
