"""Every rule of the verifier is broken once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.support import zoo

from relax_tune.errors import VerifyError
from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f16, f32, i64
from relax_tune.ir.core.expr import Expr, Tunable, Var, cast, const, load, lt, op
from relax_tune.ir.core.function import Bound, IRModule, PrimFunc
from relax_tune.ir.core.graph import (  # fmt: skip
    Binding,
    Call,
    CallTIR,
    Constant,
    DataflowBlock,
    Function,
    GVar,
    MatchCast,
    ShapeValue,
    TupleItem,
    TupleValue,
    Value,
)
from relax_tune.ir.core.stmt import Block, BufferStore, For, IfThenElse, IterVar, Stmt, seq
from relax_tune.ir.core.struct_info import ShapeInfo, TensorInfo, TupleInfo
from relax_tune.ir.op.math.elementwise import Relu


@pytest.mark.parametrize("index", range(len(zoo.functions())))
def test_the_zoo_is_well_formed(index: int) -> None:
    verify(zoo.functions()[index])


N, U = Var("n"), Var("u")
X, Y = Buffer("x", (N, const(4)), f32), Buffer("y", (N,), f32)
T = Buffer("t", (const(4),), f32)
VI, VK = Var("vi"), Var("vk")
LI, LK = Var("i"), Var("k")
SUM = Block(
    "sum",
    (IterVar(VI, N), IterVar(VK, const(4), "reduce")),
    (LI, LK),
    BufferStore(Y, (VI,), load(Y, (VI,)) + load(X, (VI, VK))),
    BufferStore(Y, (VI,), const(0.0)),
)


def nest(block: Stmt = SUM) -> Stmt:
    return For(LI, N, For(LK, const(4), block))


GOOD = PrimFunc("f", (X, Y), 1, nest())


def body(s: Stmt) -> PrimFunc:
    return replace(GOOD, body=s)


def in_block(**change: object) -> PrimFunc:
    return body(nest(replace(SUM, **change)))  # type: ignore[arg-type]


def value(e: Expr, buffer: Buffer = Y) -> PrimFunc:
    return body(For(LI, N, BufferStore(buffer, (LI,), e)))


def loop(**change: object) -> PrimFunc:
    return body(replace(For(LI, N, BufferStore(Y, (LI,), const(0.0))), **change))  # type: ignore[arg-type]


FOUR, L8, V8 = Buffer("four", (const(4),), f32), Var("l8"), Var("v8")


def eight(buffer: Buffer) -> Stmt:
    store = BufferStore(buffer, (V8,), const(0.0))
    return For(L8, const(8), Block("eight", (IterVar(V8, const(8)),), (L8,), store))


ONE = load(X, (LI, const(0)))
BROKEN: list[tuple[str, Callable[[], PrimFunc], str]] = [
    ("parameter twice", lambda: replace(GOOD, params=(X, Y, Y)), "got y twice"),
    ("alloc shadows parameter", lambda: replace(GOOD, allocs=(X,)), "got x twice"),
    ("no outputs", lambda: replace(GOOD, outputs=0), "expected 1 to 2 outputs, got 0"),
    ("constant output", lambda: replace(GOOD, consts=(Y,)), "constant y is not an input"),
    ("shape of unknown symbol", lambda: replace(GOOD, allocs=(Buffer("t", (U,), f32),)), "u is not in scope in the shape of t"),
    ("float dims", lambda: replace(GOOD, allocs=(Buffer("t", (const(4.0),), f32),)), "expected integer dims"),
    ("buffer names", lambda: replace(GOOD, allocs=(Buffer("x", (N,), f32),)), "distinct buffer names, got 'x' twice"),
    ("block names", lambda: body(seq(nest(), For(U, N, For(Var("w"), N, Block("sum", (), (), BufferStore(Y, (U,), const(0.0))))))),
     "distinct block names, got 'sum' twice"),
    ("loop names", lambda: body(seq(nest(), For(Var("i"), N, BufferStore(Y, (const(0),), const(0.0))))), "distinct loop names"),
    ("unwritten output", lambda: replace(GOOD, params=(X, Y, Buffer("z", (N,), f32)), outputs=2), "output z is never written"),
    ("unwritten alloc", lambda: replace(value(load(T, (LI,))), allocs=(T,)), "t is read, but nothing writes it"),
    ("condition", lambda: body(IfThenElse(N, BufferStore(Y, (const(0),), const(0.0)))), "expected a condition, got n"),
    ("unknown variable", lambda: value(cast(U, f32)), "u is not in scope in this statement; in scope: i, n"),
    ("shadowed symbol", lambda: loop(var=N, body=BufferStore(Y, (N,), const(0.0))), "loop variable n is already a symbol"),
    ("nested loop variable", lambda: body(For(LI, N, For(LI, N, SUM))), "loop variable i is already|distinct loop names"),
    ("float extent", lambda: loop(extent=const(4.0)), "expected an integer extent"),
    ("tunable loop", lambda: loop(var=Tunable("T", (1,))), "loop variable T is a tunable"),
    ("symbolic vector", lambda: loop(kind="vectorized"), "expected a constant extent for a vectorized loop, got n"),
    ("symbolic unroll", lambda: loop(kind="unrolled"), "expected a constant extent for a unrolled loop, got n"),
    ("grid axis", lambda: loop(kind="group", axis=3), "expected a grid axis of a group loop below 3, got 3"),
    ("value type", lambda: value(cast(ONE, f16)), "expected a value of type f32 for y, got f16"),
    ("written constant", lambda: replace(value(ONE), consts=(X,), body=seq(nest(), BufferStore(X, (const(0),) * 2, const(0.0)))),
     "constant x is written"),
    ("written input", lambda: body(seq(nest(), BufferStore(X, (const(0),) * 2, const(0.0)))), "input x is written"),
    ("unknown buffer", lambda: value(load(T, (LI,))), "buffer t is neither a parameter nor allocated"),
    ("store rank", lambda: body(For(LI, N, BufferStore(Y, (LI, LI), const(0.0)))), "buffer y has 1 dims, got 2 indices"),
    ("index type", lambda: value(load(Y, (const(0.0),))), "expected integer indices of y"),
    ("mixed types", lambda: value(op("add", (ONE, const(1)), f32)), "expected operands of one type, got f32 and i64"),
    ("select condition", lambda: value(op("select", (N, ONE, ONE), f32)), "expected a condition for select"),
    ("logic of numbers", lambda: body(IfThenElse(op("not", (N,), lt(N, 1).dtype), nest())), "expected conditions, got i64"),
    ("division of integers", lambda: value(cast(op("div", (N, N), i64), f32)), "expected floats for div"),
    ("exp of integers", lambda: value(cast(op("exp", (N,), i64), f32)), "expected floats for exp"),
    ("floor division of floats", lambda: value(op("floordiv", (ONE, ONE), f32)), "expected integers for floordiv"),
    ("result type", lambda: value(op("add", (ONE, ONE), f16)), "expected the result type f32, got f16"),
    ("missing binding", lambda: in_block(bindings=(LI,)), "expected one binding for each of 2 iterators, got 1"),
    ("iterator twice", lambda: in_block(iters=(SUM.iters[0],) * 2), "iterator vi is bound already"),
    ("iterator shadows loop", lambda: in_block(iters=(IterVar(LI, N), SUM.iters[1])), "iterator i is bound already"),
    ("binding uses iterator", lambda: in_block(bindings=(LI, VI)), "vi is not in scope in bindings and predicate"),
    ("predicate uses iterator", lambda: in_block(predicate=lt(VI, 3)), "vi is not in scope in bindings and predicate"),
    ("domain uses iterator", lambda: in_block(iters=(SUM.iters[0], IterVar(VK, VI, "reduce"))), "vi is not in scope in the domains"),
    ("binding reads", lambda: in_block(bindings=(LI, cast(load(Y, (LI,)), i64))), "bindings that read no buffer"),
    ("predicate type", lambda: in_block(predicate=N), "expected a condition as predicate"),
    ("reduce iterator stores", lambda: in_block(body=replace(SUM.body, indices=(VK,)), init=None), "reduce iterator vk chooses"),
    ("reduction from nothing", lambda: in_block(init=None, body=replace(SUM.body, value=load(X, (VI, VK)))), "a reduction needs init"),
    ("init of nothing", lambda: in_block(iters=(SUM.iters[0], IterVar(VK, const(4)))), "without a reduce iterator"),
    ("init elsewhere", lambda: in_block(init=BufferStore(Y, (const(0),), const(0.0))), "expected init\\(\\) to store where"),
    ("init depends", lambda: in_block(init=BufferStore(Y, (VI,), load(X, (VI, VK)))), "initial value depends on the reduction"),
    ("store behind the end", lambda: replace(GOOD, allocs=(FOUR,), body=seq(nest(), eight(FOUR))), "in four below 4, got v8 below 8"),
    ("prepare reads inputs", lambda: in_block(role="prepack"), "prepacks constants, but reads x"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_broken_tensor_functions(make: Callable[[], PrimFunc], message: str) -> None:
    verify(GOOD)
    with pytest.raises(VerifyError, match=message) as caught:
        verify(make())
    assert str(caught.value).startswith("f: ")
    assert re.search(r"\n +\d+ \| .*\n +\| +\^+$", str(caught.value)), "expected an excerpt with a caret"


def test_the_excerpt_shows_the_statement() -> None:
    with pytest.raises(VerifyError) as caught:
        verify(value(cast(U, f32)))
    assert str(caught.value).splitlines()[-2:] == [
        "    6 |         y[i] = cast(u, f32)",
        "      |         ^^^^^^^^^^^^^^^^^^^",
    ]


def test_verify_tunable_extents_are_not_checked() -> None:
    t = Tunable("T", (1, 2))
    verify(loop(extent=t, kind="vectorized"))
    verify(loop(extent=const(8), kind="vectorized"))


def test_prepared_constants() -> None:
    w, packed = Buffer("w", (const(4),), f32), Buffer("p", (const(4),), f32)
    v, s = Var("v"), Var("s")
    pack = For(
        Var("q"),
        const(4),
        Block("pack", (IterVar(v, const(4)),), (const(0),), BufferStore(packed, (v,), load(w, (v,))), role="prepack"),
    )
    use = For(s, N, BufferStore(Y, (s,), load(packed, (s,))))
    verify(PrimFunc("f", (w, Y), 1, seq(pack, use), (packed,), (w,)))


# graph functions

A = GVar("a", TensorInfo((N, const(4)), f32))
INFO = A.info
assert isinstance(INFO, TensorInfo)
B = GVar("b", INFO)


def graph(*bindings: Binding | MatchCast, ret: Value = B, ret_info: object = INFO) -> Function:
    return Function("main", (A,), (DataflowBlock(bindings),), ret, ret_info)  # type: ignore[arg-type]


def module(f: Function, **constants: np.ndarray) -> IRModule:
    return IRModule({"main": f, "f": GOOD, "scaled": zoo.scaled()}, constants, (Bound(N, 1, 8),))


def relu(x: Value, var: GVar = B) -> Binding:
    return Binding(var, Call(Relu(), (x,)))


ROWS = TensorInfo((N,), f32)
R = GVar("r", ROWS)
W = Constant("w", TensorInfo((const(2),), f32))
V = Constant("v", TensorInfo((const(4),), f32))
M = Var("m")


def rows_of(callee: str, *args: Value, out: TensorInfo = ROWS) -> Function:
    return graph(Binding(R, CallTIR(callee, args, (out,))), ret=R, ret_info=ROWS)


GRAPHS: list[tuple[str, Callable[[], Function], str]] = [
    ("used before defined", lambda: graph(relu(GVar("c", INFO))), "c is used before it is defined"),
    ("nested", lambda: graph(relu(Call(Relu(), (A,)))), "got a Call; bind it first"),
    ("defined twice", lambda: graph(relu(A), relu(A)), "b is defined twice"),
    ("no annotation", lambda: graph(relu(A, GVar("c", None))), "expected an annotation on c, got None"),  # type: ignore[arg-type]
    (
        "plain numbers as dims",
        lambda: graph(relu(A, GVar("c", TensorInfo((4,), f32)))),  # type: ignore[arg-type]
        "expected integer expressions as dims of c, got 4",
    ),
    ("unknown constant", lambda: graph(relu(Constant("u", W.info), GVar("c", W.info))), "no constant called 'u'"),
    ("constant's shape", lambda: graph(relu(W, GVar("c", W.info))), "'w' is not what its annotation says: dim 0: expected 2, got 3"),
    ("deduced dims", lambda: graph(relu(A, GVar("b", TensorInfo((N, const(5)), f32)))), "dim 1: expected 5, got 4"),
    ("deduced ndim", lambda: graph(relu(A, GVar("b", ROWS))), "expected 1 dims, got 2"),
    ("deduced dtype", lambda: graph(relu(A, GVar("b", TensorInfo((N, const(4)), f16)))), "expected dtype f16, got f32"),
    ("unbound symbol", lambda: graph(relu(A, GVar("b", TensorInfo((M, const(4)), f32)))), "symbol m is bound by no parameter"),
    ("unbound shape", lambda: graph(Binding(GVar("s", ShapeInfo(None, 1)), ShapeValue((M,))), ret=A), "symbol m is bound by no"),
    ("match_cast never", lambda: graph(MatchCast(GVar("c", ROWS), A, ROWS), ret=A), "can never hold: expected 1 dims, got 2"),
    ("no callee", lambda: rows_of("g", A), "tensor function called 'g'; the module has f, scaled"),
    ("callee's arity", lambda: rows_of("f", A, A), "f takes 1 arguments and 1 outputs, got 2 and 1"),
    ("callee's dims", lambda: rows_of("f", A, out=TensorInfo((N + 1,), f32)), r"f, parameter y: dim 0: expected n, got n \+ 1"),
    ("callee's dtype", lambda: rows_of("f", A, out=TensorInfo((N,), f16)), "f, parameter y: expected dtype f32, got f16"),
    ("callee's scalars", lambda: graph(Binding(R, CallTIR("scaled", (V,), (V.info,))), ret=A), "scaled takes 1 scalars, got 0"),
    ("result", lambda: graph(relu(A), ret_info=TensorInfo((N + 1, const(4)), f32)), r"dim 0: expected n \+ 1, got n"),
    ("result is nested", lambda: graph(relu(A), ret=Call(Relu(), (A,))), "got a Call; bind it first"),
    ("tuple item", lambda: graph(Binding(B, TupleItem(A, 0))), "expected a tuple to take item 0 of"),
    ("tuple fields", lambda: graph(Binding(GVar("t", TupleInfo((INFO,))), TupleValue((A, A))), ret=A), "expected 1 fields, got 2"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), [g[1:] for g in GRAPHS], ids=[g[0] for g in GRAPHS])
def test_broken_graph_functions(make: Callable[[], Function], message: str) -> None:
    verify(module(graph(relu(A)), w=np.zeros(3, np.float32), v=np.zeros(4, np.float32)))
    with pytest.raises(VerifyError, match=message) as caught:
        verify(module(make(), w=np.zeros(3, np.float32), v=np.zeros(4, np.float32)))
    assert str(caught.value).startswith("main: ")


def test_modules() -> None:
    good = module(graph(relu(A)))
    verify(good)
    with pytest.raises(VerifyError, match=r"function 'other' .*got 'f'"):
        verify(replace(good, functions={"other": GOOD}))
    with pytest.raises(VerifyError, match=r"bound of n: .*got 3 and 2"):
        verify(replace(good, bounds=(Bound(N, 3, 2),)))
    with pytest.raises(VerifyError, match="expected operands of one type"):
        verify(replace(good, functions={"f": value(op("add", (ONE, const(1)), f32))}))


def test_verify_fitting_call_tir_and_match_cast_pass() -> None:
    cast_info = TensorInfo((M, const(4)), f32)
    c = GVar("c", cast_info)
    r = GVar("r", TensorInfo((M,), f32))
    rows = Binding(r, CallTIR("f", (c,), (TensorInfo((M,), f32),)))
    verify(module(graph(MatchCast(c, A, cast_info), rows, ret=TupleValue((r, A)), ret_info=TupleInfo((r.info, INFO)))))
