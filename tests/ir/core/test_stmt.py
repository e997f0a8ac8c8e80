"""Traversal of statements, and the marks of loops."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from relax_tune.ir.check.structural import structural_equal
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import FALSE, TRUE, Expr, Var, const, load, lt
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import (
    EMPTY,
    AsyncFence,
    Barrier,
    Block,
    BufferStore,
    Declare,
    For,
    IfThenElse,
    IterVar,
    Let,
    LoopMarks,
    Seq,
    Stmt,
    accesses,
    map_exprs,
    replace_buffers,
    rewrite,
    seq,
    substitute_stmt,
    walk,
    when,
)
from relax_tune.ir.interp.interp import run_prim
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.ir.text.printer import print_text

N, P, Q = Var("n"), Var("i"), Var("j")
X, Y = Buffer("X", (N,), f32), Buffer("Y", (N,), f32)


def copy(i: Expr = P) -> BufferStore:
    return BufferStore(Y, (i,), load(X, (i,)))


def lowered() -> Stmt:
    """A tree with one node of every class but blocks."""
    inside = Let(Q, P + 1, seq(when(lt(Q, N), copy(Q)), AsyncFence(0), Barrier(frozenset({"shared"}))))
    return Declare((Buffer("S", (const(4),), f32, "shared"),), For(P, N, inside))


def block() -> Block:
    v = Var("v")
    return Block("b", (IterVar(v, N),), (P,), copy(v), None, lt(P, N))


def test_rewrite_without_change_returns_same_object() -> None:
    for s in (lowered(), For(P, N, block())):
        assert rewrite(s, lambda n: n) is s
        assert map_exprs(s, lambda e: e) is s
        assert substitute_stmt(s, {Var("other"): const(1)}) is s
        assert replace_buffers(s, {Buffer("Z", (N,), f32): X}) is s


def test_rewrite_to_empty_drops_enclosing_statements() -> None:
    only_store = Declare((), For(P, N, IfThenElse(lt(P, N), Let(Q, P, copy(Q)))))
    assert rewrite(only_store, lambda n: EMPTY if isinstance(n, BufferStore) else n) is EMPTY
    two = seq(only_store, copy())
    assert isinstance(rewrite(two, lambda n: EMPTY if isinstance(n, For) else n), BufferStore)


def test_map_exprs_folds_decided_conditions() -> None:
    s = IfThenElse(lt(P, N), copy(), EMPTY)
    assert map_exprs(s, lambda e: TRUE if e is s.cond else e) is s.then
    assert map_exprs(s, lambda e: FALSE if e is s.cond else e) is EMPTY


def test_replace_buffers_reaches_loads_stores_and_blocks() -> None:
    new = {X: Buffer("X2", (N,), f32), Y: Buffer("Y2", (N,), f32)}
    for s in (lowered(), For(P, N, block())):
        result = {b.name for b, _indices, _written in accesses(replace_buffers(s, new))}
        assert result == {"X2", "Y2"}
        assert [type(n) for n in walk(replace_buffers(s, new))] == [type(n) for n in walk(s)]


@pytest.mark.parametrize("field", fields(LoopMarks), ids=lambda f: f.name)
def test_loop_mark_is_printed_parsed_and_compared(field) -> None:  # type: ignore[no-untyped-def]
    value = {bool: True, int: 3, str: "dot4_u8i8_x16"}[type(field.default)]
    plain = PrimFunc("f", (X, Y), 1, For(P, N, block()))
    assert isinstance(plain.body, For)
    marked = replace(plain, body=plain.body.marked(**{field.name: value}))
    text = print_text(marked)
    assert f"{field.name}=" in text and f"{field.name}=" not in print_text(plain)
    assert structural_equal(parse_prim_func(text), marked)
    assert not structural_equal(plain, marked)


@pytest.mark.parametrize("where", ["printer", "structural equality", "verifier", "interpreter"])
def test_consumer_of_unknown_statement_raises_with_class_name(where: str) -> None:
    class Strange(Stmt):
        __slots__ = ()

    func = PrimFunc("f", (X, Y), 1, Seq((For(P, N, block()), Strange())))
    uses = {
        "printer": lambda: print_text(func),
        "structural equality": lambda: structural_equal(func, replace(func)),
        "verifier": lambda: verify(func),
        "interpreter": lambda: run_prim(func, [np.zeros(3, np.float32), np.zeros(3, np.float32)]),
    }
    with pytest.raises(TypeError, match="has no case for the statement Strange"):
        uses[where]()
