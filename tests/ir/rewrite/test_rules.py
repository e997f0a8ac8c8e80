"""Rewriting by patterns at every point of the pipeline: what is put where, and that meaning stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from relax_tune.errors import UserError, VerifyError
from relax_tune.ir.check.structural import first_difference
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Var, const, eq, maximum
from relax_tune.ir.core.function import IRModule, PrimFunc
from relax_tune.ir.core.graph import Call, CallDPSLibrary, CallFunction, CallTIR, Function, If, Value
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.deduce.pattern_kinds import PatternKind
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Exp, Gelu, Mul, MulScalar, Relu, Sigmoid, Sub, Tanh
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.passes.graph.legalize import Legalize
from relax_tune.ir.passes.pipeline import lower
from relax_tune.ir.rewrite.pattern import maybe, op, tir, value
from relax_tune.ir.rewrite.rules import LEVELS, Rule, Site, rewrite
from relax_tune.ir.text.parser import parse_module
from relax_tune.ir.text.printer import print_text

RNG = np.random.default_rng(5)


def rand(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


def layer(bias: bool = True) -> IRModule:
    """relu(x w + b) * 2 for n rows."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 6))
    y = g.call(Matmul(), x, g.constant("w", rand(6, 4)))
    y = g.call(Add(), y, g.constant("b", rand(4))) if bias else y
    return g.finish(g.call(MulScalar(2.0), g.call(Relu(), y)))


def values(module: IRModule, name: str = "main") -> list[Value]:
    f = module.functions[name]
    assert isinstance(f, Function)
    return [b.value for b in f.bindings]


def sgemm(inputs: Sequence[Any], outs: Sequence[Any], sizes: Sequence[int]) -> None:
    a, b = inputs
    assert list(sizes[:3]) == [a.shape[0], b.shape[1], a.shape[1]]
    outs[0][...] = a @ b


def checked(before: IRModule, rules: Rule | Sequence[Rule], *args: Any) -> IRModule:
    """The rewritten module: it verifies, prints, and means the same in the interpreter."""
    after = rewrite(before, rules)
    assert after is not before
    verify(after)
    assert first_difference(after, parse_module(print_text(after), OPERATORS, after.constants)) is None
    libraries = {"openblas.sgemm": sgemm}
    expected = run_function(before, "main", list(args))
    np.testing.assert_allclose(
        run_function(after, "main", list(args), libraries), np.asarray(expected), rtol=1e-5, atol=1e-5
    )
    return after


def relu_of_sum(symbol: str = "rows") -> PrimFunc:
    rows, columns = Var(symbol), Var("columns")
    b = TensorBuilder("relu_of_sum")
    x, y = b.input("x", (rows, columns)), b.input("y", (columns,))
    z = b.output("z", (rows, columns))
    b.compute(z, lambda i, j: maximum(x[i, j] + y[j], 0.0))
    return b.finish()


def put_relu_of_sum(s: Site) -> Value:
    return s.tir(relu_of_sum(), "x", "y")


# -- what is put --------------------------------------------------------------------------------------------------------------


def test_rewrite_puts_tensor_function_for_operators() -> None:
    rule = Rule(op(Relu, value("x") + "y"), put_relu_of_sum, "relu of a sum")
    after = checked(layer(), rule, rand(5, 6))
    kinds = [type(v) for v in values(after)]
    assert kinds == [Call, CallTIR, Call] and "relu_of_sum" in after.functions
    assert rewrite(layer(bias=False), rule).functions.keys() == {"main"}


def to_sgemm(s: Site) -> Value:
    m, n, k = (s.dim(d) for d in "mnk")
    product = s.library("openblas.sgemm", "x", "w", scalars=(m, n, k, 0, 0, k, n, n), out=TensorInfo((m, n), f32))
    return s.call(Add(), product, "bias") if "bias" in s else product


PRODUCT = value("x").of("m", "k", dtype=f32) @ value("w").of("k", "n")


def test_rewrite_puts_library_call_with_and_without_bias() -> None:
    rule = Rule(maybe(PRODUCT, lambda p: p + "bias"), to_sgemm)
    for bias in (True, False):
        after = checked(layer(bias), rule, rand(3, 6))
        assert [type(v) for v in values(after)].count(CallDPSLibrary) == 1
        assert checked(layer(bias), rule, rand(0, 6))


def test_rewrite_puts_expression_or_existing_value() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 3))
    y = g.call(Mul(), g.call(Sigmoid(), x), x)
    module = g.finish(g.call(Exp(), g.call(Sub(), g.call(Add(), y, y), y)))
    same = Rule((value("a") + "b") - "b", lambda s: s["a"], "a + b - b")
    after = checked(module, same, rand(4, 3))
    assert [type(v.op) for v in values(after) if isinstance(v, Call)] == [Sigmoid, Mul, Exp]
    tanh = Rule(
        op(Sigmoid, "x"),
        lambda s: s.call(MulScalar(0.5), s.call(AddScalar(1.0), s.call(Tanh(), s.call(MulScalar(0.5), "x")))),
    )
    assert Sigmoid not in {type(v.op) for v in values(checked(module, tanh, rand(2, 3))) if isinstance(v, Call)}


def test_rewrite_puts_graph_function() -> None:
    g = GraphBuilder("activated")
    x = g.input("x", (g.symbol("rows"), 4))
    part = g.finish(
        g.call(MulScalar(2.0), g.call(Relu(), g.call(Add(), x, g.constant("shift", np.zeros(4, np.float32)))))
    )
    rule = Rule(op(MulScalar, op(Relu, "x"), value=2.0), lambda s: s.function(part, "x"))
    after = checked(layer(), rule, rand(5, 6))
    assert isinstance(values(after)[-1], CallFunction) and "shift" in after.constants
    assert len(lower(after).calls()) == 1, "it is put in place, and fuses"
    clash = GraphBuilder("main")
    other = clash.finish(clash.call(Relu(), clash.input("x", (4,))))
    with pytest.raises(VerifyError, match=r"function called 'main'[\s\S]*\^"):
        rewrite(layer(), Rule(op(Relu, "x"), lambda s: s.function(other, "x")))


# -- where -------------------------------------------------------------------------------------------------------------------


def test_rewrite_prefers_outermost_match_and_first_rule() -> None:
    g = GraphBuilder()
    v = g.input("x", (4,))
    for _ in range(5):
        v = g.call(Relu(), v)
    module = g.finish(v)
    pairs = Rule(op(Relu, op(Relu, "x")), lambda s: s.call(Relu(), "x"), "pair")
    ones = Rule(op(Relu, "x"), lambda s: s.call(Relu(), s.call(Relu(), "x")), "single")
    assert len(values(checked(module, pairs, rand(4)))) == 3, "from the result: two pairs, and the first alone"
    assert len(values(checked(module, [pairs, ones], rand(4)))) == 4
    assert len(values(checked(module, [ones, pairs], rand(4)))) == 10


def test_rewrite_keeps_values_with_other_readers() -> None:
    g = GraphBuilder()
    x = g.input("x", (3, 4))
    e = g.call(Exp(), x)
    module = g.finish([g.call(Relu(), e), g.call(Tanh(), e)])
    both = Rule(op(Relu, op(Exp, "x")), lambda s: s.call(Exp(), "x"))
    after = checked(module, both, rand(3, 4))
    assert [type(v.op) for v in values(after) if isinstance(v, Call)] == [Exp, Exp, Tanh]
    once = Rule(op(Relu, op(Exp, "x").once()), lambda s: s.call(Exp(), "x"))
    assert rewrite(module, once) is module
    assert rewrite(module, Rule(op(Relu, "x"), lambda s: None)) is module, "a rule may decline"


def test_rewrite_reaches_branches_and_other_functions() -> None:
    g = GraphBuilder()
    n = g.symbol("n")
    x = g.input("x", (n, 4))
    y = g.branch(eq(n, 3), lambda: g.call(Gelu(), g.call(Relu(), x)), lambda: g.call(Relu(), g.call(Gelu(), x)))
    module = g.finish(y)
    rule = Rule(op(Gelu, op(Relu, "x")), lambda s: s.call(Relu(), "x"), "not the same, to see it")
    after = rewrite(module, rule)
    verify(after)
    (branch,) = values(after)
    assert isinstance(branch, If) and [len(s.bindings) for s in (branch.then, branch.orelse)] == [1, 2]


def test_pattern_stops_at_match_cast_and_branches() -> None:
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n"), 4))
    cast = g.match_cast(g.call(Exp(), x), TensorInfo((Var("m"), const(4)), f32))
    module = g.finish(g.call(Relu(), cast))
    assert rewrite(module, Rule(op(Relu, op(Exp, "x")), lambda s: s["x"])) is module
    g = GraphBuilder()
    x = g.input("x", (n := g.symbol("n"), 4))
    e = g.call(Exp(), x)
    module = g.finish(g.branch(eq(n, 3), lambda: g.call(Relu(), e), lambda: e))
    assert rewrite(module, Rule(op(Relu, op(Exp, "x")), lambda s: s["x"])) is module


# -- what nobody can prove ---------------------------------------------------------------------------------------------------


def gated() -> IRModule:
    """relu(exp(x)) for n rows."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 0, 64), 4))
    return g.finish(g.call(Tanh(), g.call(Relu(), g.call(Exp(), x))))


EVEN = op(Relu, op(Exp, value("x").of("n", 4)).once()).where(lambda m: eq(m.dim("n") % 2, 0))


def test_unknown_condition_skips_or_guards_the_match() -> None:
    calls: list[str] = []

    def put(s: Site) -> Value:
        calls.append("put")
        return s.call(Exp(), "x")  # exp is positive

    module = gated()
    assert rewrite(module, Rule(EVEN, put)) is module and not calls
    for rows in (0, 1, 4, 5):
        after = checked(module, Rule(EVEN, put, guarded=True), rand(rows, 4))
    first, _ = values(after)
    assert isinstance(first, If) and repr(first.cond.value) == "n % 2 == 0"
    assert [len(s.bindings) for s in (first.then, first.orelse)] == [1, 2], "the old computation moved to its side"
    with pytest.raises(UserError, match="level below operators"):
        Rule(EVEN, put, guarded=True, level="fused")


def test_rewrite_keeps_runtime_checks_of_replaced_values() -> None:
    """A product whose inner dims may differ is checked at run time; what takes its place must not lose that."""
    g = GraphBuilder()
    a, b = g.input("a", (g.symbol("n"), g.symbol("k"))), g.input("b", (g.symbol("j"), 4))
    module = g.finish(g.call(Matmul(), a, b))
    product = op(Matmul, value("x").of("m", "k"), value("w").of("j", "n"))
    assert rewrite(module, Rule(product, to_sgemm)) is module
    assert rewrite(module, Rule(product, to_sgemm, guarded=True)) is module
    after = checked(
        module, Rule(product, lambda s: s.call(MulScalar(1.0), s.call(Matmul(), "x", "w"))), rand(2, 3), rand(3, 4)
    )
    assert [c.cond for c in lower(after).checks["main"]] == [c.cond for c in lower(module).checks["main"]]


def test_rule_with_unfit_value_is_refused() -> None:
    for put, message in (
        (
            lambda s: s.call(Add(), "x"),
            r"main: what rule <lambda> puts for relu does not fit: add: expected 2 arguments",
        ),
        (lambda s: s.tir(relu_of_sum(), "x"), r"relu_of_sum: expected 2 arguments, 1 outputs and 0 scalars, got"),
        (lambda s: s.tir("nobody", "x"), r"tensor function called 'nobody'"),
        (lambda s: s["y"], r"expected a capture called 'y', which did not match here; there are: x"),
        (lambda s: s.call(MulScalar(1.0), s.tir(relu_of_sum(), "x", "x")), r"parameter y: expected 1 dims, got 2"),
        (lambda s: 3, r"expected a value that the site's methods make, got a int"),
    ):
        with pytest.raises(VerifyError, match=message + r"[\s\S]*\n +\| +\^+"):
            rewrite(layer(), Rule(op(Relu, "x"), put))
    with pytest.raises(UserError, match=r"level .*got 'loops'"):
        Rule(op(Relu), lambda s: None, level="loops")


# -- the pipeline --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_lower_applies_rules_at_every_level(level: Any) -> None:
    product = {
        "import": PRODUCT,
        "operators": PRODUCT,
        "functions": tir(value("x").of("m", 6), value("w"), kind=PatternKind.OUT_FUSIBLE),
        "fused": tir(value("x").of("m", 6), value("w"), "b", kind=PatternKind.OUT_FUSIBLE),
    }[level]

    def put(s: Site) -> Value:
        m = s.dim("m")
        sizes, out = (m, 4, 6, 0, 0, 6, 4, 4), TensorInfo((m, const(4)), f32)
        actual = s.library("openblas.sgemm", "x", "w", scalars=sizes, out=out)
        return s.call(MulScalar(2.0), s.call(Relu(), s.call(Add(), actual, "b"))) if "b" in s else actual

    module = layer()
    lowered = lower(module, rules=[Rule(product, put, "sgemm", level=level)])
    main = lowered.module.functions["main"]
    assert isinstance(main, Function)
    assert [type(b.value) for b in main.bindings].count(CallDPSLibrary) == 1
    for stage, m in lowered.stages:
        verify(m)
        assert stage
    x = rand(7, 6)
    expected = run_function(module, "main", [x])
    actual = run_function(lowered.module, "main", [x], {"openblas.sgemm": sgemm})
    np.testing.assert_allclose(actual, np.asarray(expected), rtol=1e-5, atol=1e-5)


def test_lower_refuses_rule_of_missing_level() -> None:
    rule = Rule(tir("x", kind=PatternKind.ELEMENTWISE), lambda s: s["x"], "drop", level="fused")
    with pytest.raises(UserError, match=r"rule drop: .*'fused', got \[Legalize"):
        lower(layer(), (Legalize(strict=True),), [rule])


def test_golden(golden: Callable[[str, str], None]) -> None:
    rules = [
        Rule(
            op(Relu, value("x") + "y").of("n", 4).where(lambda m: eq(m.dim("n") % 2, 0)), put_relu_of_sum, guarded=True
        ),
        Rule(PRODUCT, to_sgemm),
    ]
    golden("rewritten.txt", print_text(rewrite(layer(), rules)))
