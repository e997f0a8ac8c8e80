"""The text form: goldens, round trips, and refusals that point at the place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import zoo
from tests.support.effort import examples

from relax_tune.errors import ParseError
from relax_tune.ir.check.structural import first_difference, structural_equal
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import bf16, bool_, f16, f32, f64, i8, i32, i64
from relax_tune.ir.core.expr import (
    Expr,
    Tunable,
    Var,
    and_,
    call,
    cast,
    const,
    eq,
    floordiv,
    floormod,
    le,
    load,
    lt,
    ne,
    not_,
    op,
    or_,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IfThenElse, IterVar, Seq, seq
from relax_tune.ir.interp.interp import run_prim
from relax_tune.ir.text import parser
from relax_tune.ir.text.parser import RECORD_CHARACTERS, parse_prim_func, parse_text
from relax_tune.ir.text.printer import print_text


def round_trip(f: PrimFunc) -> PrimFunc:
    """What the printed text reads back as, checked to be the same program and the same text."""
    text = print_text(f)
    back = parse_prim_func(text)
    assert first_difference(f, back) is None, text
    assert print_text(back) == text
    normal = print_text(f, normalise=True)
    assert structural_equal(parse_prim_func(normal), f)
    assert print_text(parse_prim_func(normal), normalise=True) == normal
    return back


@pytest.mark.parametrize("index", range(len(zoo.functions())))
def test_round_trip_of_the_zoo(index: int) -> None:
    round_trip(zoo.functions()[index])


@pytest.mark.parametrize("name", ["matmul_bias_gelu", "softmax", "mean_pool"])
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    func = next(c.func for c in zoo.cases() if c.name == name)
    golden(f"{name}.txt", print_text(func))
    golden(f"{name}.normal.txt", print_text(func, normalise=True))


def test_golden_scheduled(golden: Callable[[str, str], None]) -> None:
    golden("tiled_sketch.txt", print_text(zoo.tiled_matmul((Tunable("T0", (1, 2, 4)), Tunable("T1", (4, 8))))))
    golden("tiled_lowered.txt", print_text(zoo.lowered(zoo.tiled_matmul())))


def test_a_parsed_function_runs() -> None:
    case = zoo.cases()[2]
    args, (expected,) = case.arguments(np.random.default_rng(0), {"n": 3, "m": 5, "k": 2})
    run_prim(round_trip(case.func), args)
    np.testing.assert_allclose(args[-1], expected, rtol=1e-5)


def wrap(value: Expr, *variables: Var) -> PrimFunc:
    y = Buffer("y", (), value.dtype)
    return PrimFunc("f", (y, *variables), 1, BufferStore(y, (), value))


VI, VJ = Var("i"), Var("j")
X = Var("x", f32)
LEAVES = st.one_of(st.sampled_from((VI, VJ)), st.integers(-9, 9).map(const))


def _integer(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    names = st.sampled_from(("add", "sub", "mul", "min", "max", "floordiv", "floormod"))
    binary = st.tuples(names, inner, inner).map(lambda t: op(t[0], (t[1], t[2]), i64))
    compare = st.tuples(st.sampled_from(("lt", "le", "eq", "ne")), inner, inner).map(
        lambda t: op(t[0], (t[1], t[2]), bool_)
    )
    logic = st.tuples(st.sampled_from(("and", "or")), compare, compare).map(lambda t: op(t[0], (t[1], t[2]), bool_))
    negated = compare.map(lambda c: op("not", (c,), bool_))
    chosen = st.tuples(st.one_of(compare, logic, negated), inner, inner).map(lambda t: op("select", t, i64))
    return st.one_of(binary, chosen)


@settings(max_examples=examples(150), deadline=None)
@given(st.recursive(LEAVES, _integer, max_leaves=12))
def test_round_trip_of_expressions_without_folding(e: Expr) -> None:
    round_trip(wrap(e, VI, VJ))


@pytest.mark.parametrize(
    "e",
    [
        const(-1.5, bf16), cast(X, bf16),
        const(0.1), const(-0.0), const(1e-30), const(float("inf")), const(float("-inf")), const(float("nan")),
        const(3, i8), const(-3, i32), const(0.5, f16), const(2.5, f64), const(float("inf"), f64), const(True), const(2**40),
        X * 2.0, X * const(-2.0), call("pow", X, const(2.0)), cast(X, f16), cast(VI, f32) + X, -VI, VI - (VJ - 1), (VI - VJ) - 1,
        VI // 4 * 4 + VI % 4, VI * (VJ + 1) % 3, not_(and_(lt(VI, VJ), or_(eq(VI, 1), ne(VJ, 2)))), and_(lt(VI, 1), not_(le(VJ, 2))),
        eq(cast(lt(VI, VJ), i64), 1), floordiv(VI, floormod(VJ, 3) + 1), or_(lt(VI, 1), and_(lt(VI, 2), lt(VI, 3))),
    ],
    ids=repr,
)  # fmt: skip
def test_round_trip_of_corners(e: Expr) -> None:
    round_trip(wrap(e, VI, VJ, X))


def test_every_kind_of_loop_and_block() -> None:
    n = Var("n")
    x, y = Buffer("x", (n,), f32), Buffer("y", (n,), f32)
    t = Buffer("t", (const(8),), f32, "shared")
    i, j, k, u, v = (Var(s) for s in "ijkuv")
    copy = Block("copy-in", (IterVar(v, const(8)),), (j,), BufferStore(t, (v,), const(0.0)), role="prepack")
    body = seq(
        For(i, n, For(j, const(8), copy, "item", 0), "group", 1, "peel"),
        For(
            k,
            n,
            IfThenElse(
                lt(k, 3),
                BufferStore(y, (k,), load(x, (k,))),
                seq(BufferStore(y, (k,), const(1.0)), BufferStore(y, (k,), const(2.0))),
            ),
        ),
        For(u, n, Seq(()), "unrolled"),
        For(u, n, IfThenElse(lt(u, 2), IfThenElse(lt(u, 1), Seq(()))), "vectorized", 0, "pow2"),
    )
    back = round_trip(PrimFunc("kinds", (x, y), 1, body, (t,), (x,)))
    assert back.consts == (back.params[0],)


def test_names_are_hints() -> None:
    """Clashing, reserved and impossible names still give text that reads back."""
    n = Var("for")
    x, y = Buffer("f32", (n, Var("for")), f32), Buffer("a.b/c", (n,), f32)
    i, j = Var("i"), Var("i")
    body = For(i, n, For(j, const(2), BufferStore(y, (i,), load(x, (i, j)) + cast(Var("f32"), f32))))
    text = print_text(round_trip(PrimFunc("layer.0", (x, y, Var("0")), 1, body)))
    assert '@prim_func(outputs=1, name="layer.0")' in text
    assert "a_b_c[i] = f32_1[i, i_1]" in text


def test_small_dtypes_of_variables() -> None:
    i, s = Var("i", i32), Var("s", i32)
    y = Buffer("y", (const(4),), i32)
    vi = Var("vi", i32)
    block = Block("b", (IterVar(vi, const(4, i32)),), (i,), BufferStore(y, (vi,), vi + s))
    round_trip(PrimFunc("f", (y, s), 1, For(i, const(4, i32), block)))


def test_parse_untyped_numbers_take_dtype_of_other_operand() -> None:
    text = """
@prim_func(outputs=1)
def f(x: Buffer((n,), f64), y: Buffer((n,), f64)):
    for i in serial(n):
        y[i] = max(x[i] * 2, 0) + select(i < 3, 1, x[i]) - 1.5
"""
    x, y, i = Buffer("x", (n := Var("n"),), f64), Buffer("y", (n,), f64), Var("i")
    here = load(x, (i,))
    value = op("max", (here * const(2, f64), const(0, f64)), f64) + op("select", (lt(i, 3), const(1, f64), here), f64)
    expected = PrimFunc("f", (x, y), 1, For(i, n, BufferStore(y, (i,), value - const(1.5, f64))))
    assert first_difference(parse_prim_func(text), expected) is None


HEAD = "@prim_func(outputs=1)\ndef f(x: Buffer((n,), f32), y: Buffer((n,), f32)):\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:", r"line 1, column 7: not Python syntax"),
        (HEAD + "    for i in serial(m):\n        y[i] = x[i]", r"line 3, column 21: nothing is called 'm'[\s\S]*\n +\| {21}\^"),
        (HEAD + "    for i in range(n):\n        y[i] = x[i]", r"line 3, column 14: expected serial\(...\) or parallel"),
        (HEAD + "    y[0] = x[0, 0]", r"line 3, column 14: buffer x has 1 dims, got 2"),
        (HEAD + "    y[0] = sinc(x[0])", r"unknown function 'sinc'"),
        (HEAD + "    y[0] = x[0] ** 2", r"expected one of \+ - \*"),
        (HEAD + "    y[0] = exp(x[0], x[0])", r"exp takes 1 arguments, got 2"),
        (HEAD + "    y[0] = z[0]", r"nothing is called 'z'"),
        (HEAD + "    y[0] = f", r"nothing is called 'f'"),
        (HEAD + "    y[0] = y", r"expected a scalar, got the buffer y"),
        (HEAD + "    y[0] = 99999999999999999999", r"expected a 64-bit integer"),
        (HEAD + "    y[0] = 'a'", r"expected a 64-bit integer"),
        (HEAD + "    y[0] = 0 < x[0] < 1", r"expected one comparison"),
        (HEAD + "    import os", r"expected a loop, a block, an if or a store"),
        (HEAD + "    y[0] = __import__('os').system('true')", r"expected a scalar expression"),
        (HEAD + "    with block('b'):\n        v = spatial(n)\n        y[v] = 0.0", r"expected spatial\(extent, value\)"),
        (HEAD + "    with block('b', when=True):\n        y[0] = 0.0", r"unknown option 'when'; known: where, role"),
        (HEAD + "    with block('b'):\n        y[0] = 0.0\n        y[1] = 0.0", r"expected one store in block 'b', got 2"),
        (HEAD + "    for i in serial(n, tail='some'):\n        y[i] = x[i]", r"expected a tail mode, one of predicate"),
        ("T = tunable([0, 1])\n" + HEAD + "    y[0] = x[0]", r"line 1, column 1: tunable 'T': expected a non-empty domain"),
        ("@prim_func(outputs=1)\ndef f(x: Buffer((n,), f31)):\n    pass", r"expected an element type, one of bool, i8"),
        ("@prim_func(outputs=3)\ndef f(x: Buffer((n,), f32)):\n    pass", r"outputs=3"),
        ("def f(x):\n    pass", r"expected @prim_func"),
        ("module(version=99)", r"expected text of version 1, got 99"),
        ("print('x')", r"expected module\(...\) or extern"),
        ("", r"expected one function"),
        ("(" * 150 + ")" * 150, r"line 1"),
        ("x" + "[0]" * 100_000, r"line 1"),
        ("\0", r"line 1"),
    ],
)  # fmt: skip
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        parse_text(text)


def test_long_chains_are_not_recursed_into() -> None:
    e: Expr = VI
    for _ in range(900):
        e = op("add", (e, const(1)), i64)
    round_trip(wrap(e, VI))


def test_text_of_a_record_beyond_the_limit_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser, "parse_text", lambda *_: pytest.fail("expected the text left alone"))
    with pytest.raises(ParseError, match=r"1048576 characters .*got 1048577"):
        parse_prim_func("#" * (RECORD_CHARACTERS + 1), RECORD_CHARACTERS)


@pytest.mark.parametrize("parse", [parse_text, parse_prim_func])
def test_parser_of_no_text_is_refused(parse: Any) -> None:
    for value in (None, b"@prim_func", 3):
        with pytest.raises(ParseError, match="expected the text of a program"):
            parse(value)
