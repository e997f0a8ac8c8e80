"""Random graph programs: their text, what the interpreter gives against what deduction says, and that passes keep meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.programs import same
from tests.support.random_graphs import SIZES, SLOW, Made, graphs

from relax_tune.errors import DeduceError, UserError
from relax_tune.ir.check.structural import first_difference, structural_hash
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.expr import eq
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import Call, Function, If, Value
from relax_tune.ir.interp.interp_expr import Tape
from relax_tune.ir.interp.interp_graph import run_function
from relax_tune.ir.op.base import env_of
from relax_tune.ir.op.indexing.movement import Permute
from relax_tune.ir.op.math.elementwise import Add, MulScalar, Relu, Tanh
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.passes.control.inline import Inline
from relax_tune.ir.passes.fusion.fuse import FuseOps
from relax_tune.ir.passes.graph.canonical import Canonicalise
from relax_tune.ir.passes.graph.cleanup import CancelViews, DeadCode, Deduce, TidyNames
from relax_tune.ir.passes.graph.collapse import CollapseDims
from relax_tune.ir.passes.graph.constant_fold import FoldConstants
from relax_tune.ir.passes.graph.cse import CommonSubexpressions
from relax_tune.ir.passes.graph.legalize import Legalize
from relax_tune.ir.passes.graph.push_permutes import PushPermutes
from relax_tune.ir.rewrite.match import Scope, find_matches, same_value
from relax_tune.ir.rewrite.pattern import Pattern, maybe, op, value
from relax_tune.ir.rewrite.rules import RewriteByPattern, Rule, Site
from relax_tune.ir.text.parser import parse_module
from relax_tune.ir.text.printer import print_text

PASSES = (
    Inline(), Deduce(), Canonicalise(), FoldConstants(), PushPermutes(), CommonSubexpressions(), DeadCode(), Legalize(), FuseOps(),
    CollapseDims(), CancelViews(), TidyNames(),
)  # fmt: skip


def outcome(module: IRModule, args: list[Any]) -> Any:
    """The result, or the refusal."""
    try:
        return run_function(module, "main", args)
    except UserError as error:
        return error


def refused(error: DeduceError, expected: Any) -> None:
    """Sharper annotations may show that a function never runs to its end: then `main` did not either, unless it is another."""
    assert isinstance(expected, UserError) or not str(error).startswith("main: "), f"{error}\n{expected!r}"


@SLOW
@given(graphs())
def test_parse_of_print_equal(made: Made) -> None:
    verify(made.module)
    text = print_text(made.module)
    back = parse_module(text, OPERATORS, made.module.constants)
    assert first_difference(made.module, back) is None, text
    assert structural_hash(made.module) == structural_hash(back) and print_text(back) == text
    verify(back)


@SLOW
@given(graphs(), SIZES, st.integers(0, 9))
def test_values_agree_with_deduction(made: Made, sizes: dict[str, int], seed: int) -> None:
    """The interpreter compares every value with its annotation; a refusal must name a function and show the place."""
    result = outcome(made.module, made.arguments(sizes, np.random.default_rng(seed)))
    if isinstance(result, UserError):
        text = str(result)
        assert "expected" in text and "got" in text and text.split(":")[0] in made.module.functions, text


@SLOW
@given(graphs(), SIZES, st.integers(0, 9))
def test_inlining_keeps_values_and_checks(made: Made, sizes: dict[str, int], seed: int) -> None:
    args = made.arguments(sizes, np.random.default_rng(seed))
    expected = outcome(made.module, args)
    try:
        inlined, checks = Inline().run(made.module)
    except DeduceError as error:
        refused(error, expected)
        return
    verify(inlined)
    main = inlined.functions["main"]
    assert isinstance(main, Function)
    names = [b.var.name for b in main.bindings if not isinstance(b.value, If)]
    assert len(names) == len(set(names)), print_text(inlined)
    assert Inline()(inlined) is inlined or first_difference(Inline()(inlined), inlined) is None
    actual = outcome(inlined, args)
    text = f"{print_text(made.module)}\n\n{print_text(inlined)}\n{expected}"
    if isinstance(expected, UserError):
        env = {v: sizes[v.name] for v in made.symbols}
        known = [c for c in checks["main"] if all(v in env for v in _symbols(c))]
        fires = any(not Tape((c.cond,), {}).run(env)[0] for c in known)
        assert isinstance(actual, UserError) or fires, text
    else:
        assert not isinstance(actual, UserError), f"{text}\n{actual}"
        same(actual, expected, text, 1e-4)


def _symbols(check: Any) -> Any:
    from relax_tune.ir.core.expr import free_vars

    return free_vars(check.cond, *check.values)


@pytest.mark.slow
@SLOW
@given(graphs(), SIZES, st.permutations(PASSES), st.integers(0, 9))
def test_passes_in_any_order_keep_values(made: Made, sizes: dict[str, int], order: list[Any], seed: int) -> None:
    args = made.arguments(sizes, np.random.default_rng(seed))
    expected = outcome(made.module, args)
    if isinstance(expected, UserError):
        return
    module = made.module
    for step in order:
        try:
            module = step(module)
        except DeduceError as error:
            refused(error, expected)
            return
        text = f"{print_text(made.module)}\n\nafter {step!r}:\n{print_text(module)}"
        verify(module)
        actual = outcome(module, args)
        assert not isinstance(actual, UserError), f"{text}\n{actual}"
        same(actual, expected, text, 1e-4)


def again(s: Site) -> Value:
    call = s.definition("product")
    assert isinstance(call, Call)
    product = s.call(call.op, "a", "b")
    return s.call(Add(), "c", product) if "c" in s else product


IDENTITIES = (
    Rule(value("a") + "b", lambda s: s.call(Add(), "b", "a"), "a + b = b + a"),
    Rule(op(Relu, op(Relu, "x")), lambda s: s.call(Relu(), "x"), "relu of relu"),
    Rule(op(Tanh, value("x").of(..., "n")).where(lambda m: eq(m.dim("n") % 2, 0)), lambda s: s.call(Tanh(), "x"), guarded=True),
    Rule(op(Relu, "x"), lambda s: s.call(Relu(), s.call(Relu(), "x"))),
    Rule(maybe(op(Matmul, "a", "b").named("product"), lambda p: p + "c"), again, "another product", guarded=True),
    Rule(op(MulScalar, "x", value=0.0), lambda s: None, "declines"),
    Rule(op(Permute, op(Permute, "x", axes=(1, 0)), axes=(1, 0)), lambda s: s["x"]),
)  # fmt: skip


@SLOW
@given(graphs(), SIZES, st.integers(0, 9))
def test_pattern_rewrites_keep_values(made: Made, sizes: dict[str, int], seed: int) -> None:
    module = RewriteByPattern(IDENTITIES)(made.module)
    verify(module)
    assert print_text(RewriteByPattern(IDENTITIES)(made.module)) == print_text(module), "the same every time"
    args = made.arguments(sizes, np.random.default_rng(seed))
    expected, actual = outcome(made.module, args), outcome(module, args)
    if isinstance(expected, UserError) or isinstance(actual, UserError):
        assert isinstance(expected, UserError) and isinstance(actual, UserError), (
            f"{expected!r}\n{actual!r}\n{print_text(module)}"
        )
    else:
        same(actual, expected, print_text(module), 1e-4)


def shown(v: Value, definitions: Mapping[Value, Value], depth: int, leaves: dict[str, Value]) -> Pattern:
    """The pattern of exactly what computes `v`, to a depth; `leaves` are its captures."""
    call = definitions.get(v)
    if depth and isinstance(call, Call):
        attributes = {f.name: getattr(call.op, f.name) for f in fields(call.op)}
        return op(type(call.op), *(shown(a, definitions, depth - 1, leaves) for a in call.args), **attributes)
    name = next((n for n, leaf in leaves.items() if same_value(leaf, v)), f"v{len(leaves)}")
    leaves[name] = v
    return value(name)


@SLOW
@given(graphs(), st.integers(1, 3))
def test_pattern_of_value_matches_value(made: Made, depth: int) -> None:
    main = made.module.functions["main"]
    assert isinstance(main, Function)
    scope = Scope.over(main.bindings, main.ret, made.module, env_of(made.module.bounds))
    for b in main.bindings:
        if isinstance(b.value, Call):
            leaves: dict[str, Value] = {}
            p = shown(b.var, {v: x for v, x in scope.definitions.items() if isinstance(x, Call)}, depth, leaves)
            expected = {n: scope.source(v) for n, v in leaves.items()}
            assert any(m.values == expected for m in find_matches(p, b.var, scope)), f"{p}\n{print_text(made.module)}"
            other = op(Permute if not isinstance(b.value.op, Permute) else Relu)
            assert not list(find_matches(other, b.var, scope))
