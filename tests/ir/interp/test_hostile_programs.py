"""Adversarial programs: each is built, or refused before it runs; every call gives what NumPy gives, interpreted and compiled,
or is refused by both with a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.support.programs import checked, compiled, interpreted_refuses, never, ones, read, run, same, tensor

from relax_tune.errors import UserError
from relax_tune.ir.core.expr import Expr, Var, ceildiv, const, maximum
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import GVar
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, Flatten, Reshape, Slice, Split
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.math.elementwise import Add, Exp
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.scan import TopK
from relax_tune.ir.passes.pipeline import lower
from relax_tune.runtime.device.base import Device

pytestmark = pytest.mark.ccompiler


@dataclass(frozen=True)
class Case:
    """make: the program over symbols n and m, whose values x (n,) and y (m,) it takes; numpy: what it means; sizes: calls that work;
    bad: calls that do not, each with words of its refusal; declared: the result's dims."""

    make: Callable[[GraphBuilder, GVar, GVar, Var, Var], GVar]
    numpy: Callable[[Any, Any], Any]
    sizes: Sequence[tuple[int, int]]
    bad: Sequence[tuple[int, int, Sequence[str]]] = ()
    declared: Callable[[Var, Var], Sequence[Expr | int]] | None = None
    checks: int = 0


def cut(g: GraphBuilder, x: GVar, begin: Expr | int, end: Expr | int, step: int = 1) -> GVar:
    begin, end = (e if isinstance(e, Expr) else const(e) for e in (begin, end))
    return g.call(Slice(0, begin, end, step), x)


def split3(g: GraphBuilder, x: GVar, y: GVar, n: Var, m: Var) -> GVar:
    parts = g.call(Split(3), x)
    return g.call(Concat(0), *(g.item(parts, i) for i in range(3)))


def padded_blocks(g: GraphBuilder, x: GVar, y: GVar, n: Var, m: Var) -> GVar:
    blocks = ceildiv(n, 4)
    whole = g.call(Pad((const(0),), (blocks * 4 - n,)), x)
    return cut(g, g.call(Flatten(), g.call(Reshape((blocks, const(4))), whole)), 0, n)


SOME = ((5, 2), (0, 0), (1, 1), (3, 7))
CASES: dict[str, Case] = {
    # dims that are split and joined again are proved, not checked
    "cut and joined": Case(
        lambda g, x, y, n, m: g.call(Concat(0), cut(g, x, 0, 3), cut(g, x, 3, n)),
        lambda x, y: x,
        SOME,
        declared=lambda n, m: (n,),
    ),
    "split and joined": Case(split3, lambda x, y: x, SOME, declared=lambda n, m: (n,)),
    "halves swapped": Case(
        lambda g, x, y, n, m: g.call(Concat(0), cut(g, x, n // 2, n), cut(g, x, 0, n // 2)),
        lambda x, y: np.concatenate([x[len(x) // 2 :], x[: len(x) // 2]]),
        SOME,
        declared=lambda n, m: (n,),
    ),
    "even and odd": Case(
        lambda g, x, y, n, m: g.call(Concat(0), cut(g, x, 0, n, 2), cut(g, x, 1, n, 2)),
        lambda x, y: np.concatenate([x[::2], x[1::2]]),
        SOME,
        declared=lambda n, m: (n,),
    ),
    "cut twice": Case(
        lambda g, x, y, n, m: cut(g, cut(g, x, 1, n), 1, n),
        lambda x, y: x[2:],
        SOME,
        declared=lambda n, m: (maximum(n - 2, 0),),
    ),
    "padded to blocks": Case(padded_blocks, lambda x, y: x, SOME, declared=lambda n, m: (n,)),
    "joined both ways": Case(
        lambda g, x, y, n, m: g.call(Add(), g.call(Concat(0), x, y), g.call(Concat(0), y, x)),
        lambda x, y: np.concatenate([x, y]) + np.concatenate([y, x]),
        SOME,
        declared=lambda n, m: (m + n,),
    ),
    "a remainder": Case(lambda g, x, y, n, m: cut(g, x, 0, n % 4), lambda x, y: x[: len(x) % 4], SOME),
    "an end before its begin": Case(lambda g, x, y, n, m: cut(g, x, 3, 1), lambda x, y: x[3:1], SOME),
    # what may be negative is checked, before anything reads there
    "a begin below 0": Case(
        lambda g, x, y, n, m: cut(g, x, m - 3, n),
        lambda x, y: x[len(y) - 3 :],
        ((5, 4), (2, 9), (0, 3)),
        ((5, 2, ("slice: begin: expected at least 0, got -1 (m - 3)", "^^^")),),
        checks=1,
    ),
    "an end below 0": Case(
        lambda g, x, y, n, m: cut(g, x, 0, n - m),
        lambda x, y: x[: len(x) - len(y)],
        ((5, 2), (3, 3)),
        ((1, 2, ("slice: end: expected at least 0, got -1 (n - m)",)),),
        checks=1,
    ),
    "a dim below 0": Case(
        lambda g, x, y, n, m: g.call(BroadcastTo((n - 2, n)), x),
        lambda x, y: np.broadcast_to(x, (len(x) - 2, len(x))),
        ((5, 2), (2, 0)),
        ((1, 2, ("broadcast_to: dim 0 of the result: expected at least 0, got -1 (n - 2)", "^^^")),),
        checks=1,
    ),
    "fewer than no numbers": Case(
        lambda g, x, y, n, m: g.call(Iota(n - m)),
        lambda x, y: np.arange(len(x) - len(y)),
        ((5, 2), (2, 2)),
        ((1, 3, ("iota: size: expected at least 0, got -2 (n - m)",)),),
        checks=1,
    ),
    "fewer than the best none": Case(
        lambda g, x, y, n, m: g.call(TopK(n - m, 0), x),
        lambda x, y: np.argsort(-x, kind="stable")[: len(x) - len(y)],
        ((5, 2), (2, 2), (0, 0)),
        ((1, 3, ("top_k: k: expected at least 0, got -2 (n - m)",)),),
        checks=1,
    ),
    "padding taken away": Case(
        lambda g, x, y, n, m: g.call(Pad((const(0),), (n - m,)), x),
        lambda x, y: np.pad(x, (0, len(x) - len(y))),
        ((5, 2), (2, 2)),
        ((5, 6, ("pad: more elements: expected at least 0, got -1 (n - m)",)),),
        checks=1,
    ),
    "repeated where it is 1 only when it runs": Case(
        lambda g, x, y, n, m: g.call(Exp(), g.call(BroadcastTo((const(2), m)), x)),
        lambda x, y: np.exp(np.broadcast_to(x, (2, len(y)))),
        ((3, 3), (1, 4), (0, 0), (1, 0)),
        ((2, 3, ("broadcast_to: dim 1: expected n to be m or 1", "got 2 and 3")),),
        checks=1,
    ),
    # products and quotients
    "rows of m": Case(
        lambda g, x, y, n, m: g.call(Reshape((n // m, m)), x),
        lambda x, y: x.reshape(-1, len(y)),
        ((6, 3), (0, 3), (7, 1)),
        ((6, 4, ("got 6 and 4", "reshape")), (6, 0, ()), (0, 0, ())),
        checks=1,
    ),
    "pairs": Case(
        lambda g, x, y, n, m: g.call(Reshape((n // 2, const(2))), x),
        lambda x, y: x.reshape(-1, 2),
        ((6, 0), (0, 0)),
        ((5, 1, ("got 5 and 4", "reshape")), (1, 1, ("got 1 and 0",))),
        checks=1,
    ),
    "a product of sums": Case(
        lambda g, x, y, n, m: g.call(
            Matmul(),
            g.call(Reshape((const(1), n + m)), g.call(Concat(0), x, y)),
            g.call(BroadcastTo((m + n, const(2))), g.constant("w", ones(1, 2))),
        ),
        lambda x, y: np.concatenate([x, y])[None] @ np.broadcast_to(ones(1, 2), (len(x) + len(y), 2)),
        SOME,
        declared=lambda n, m: (1, 2),
    ),
    # results that are declared
    "a result of another symbol": Case(
        lambda g, x, y, n, m: g.call(Exp(), y),
        lambda x, y: np.exp(y),
        ((3, 3), (0, 0)),
        ((3, 4, ("the result", "dim 0", "got 4", "return exp")),),
        declared=lambda n, m: (n,),
    ),
    "three times where it is twice": Case(
        lambda g, x, y, n, m: g.call(Concat(0), x, x),
        lambda x, y: np.concatenate([x, x]),
        ((0, 3),),
        ((2, 0, ("the result", "dim 0", "6", "got 4")),),
        declared=lambda n, m: (n * 3,),
    ),
    "a cast to a square": Case(
        lambda g, x, y, n, m: g.call(Add(), g.match_cast(y, tensor(n)), x),
        lambda x, y: x + y,
        ((3, 3), (0, 0)),
        ((3, 1, ("match_cast of y", "dim 0", "3", "got 1")),),
    ),
    "a cast to what is odd": Case(
        lambda g, x, y, n, m: g.match_cast(g.call(Exp(), x), tensor(Var("k") * 2 + 1)),
        lambda x, y: np.exp(x),
        ((5, 0), (1, 0)),
        ((4, 0, ("match_cast of exp", "dim 0", "3", "got 4")), (0, 0, ("match_cast of exp",))),
    ),
}


def program(case: Case) -> IRModule:
    g = GraphBuilder()
    n, m = g.symbol("n"), g.symbol("m")
    x, y = g.input("x", (n,)), g.input("y", (m,))
    out = case.make(g, x, y, n, m)
    assert len(g.checks) >= case.checks
    before = len(g.checks)
    module = checked(g.finish(out, None if case.declared is None else tensor(*case.declared(n, m))))
    if case.declared is not None and not case.bad:
        assert len(g.checks) == before == 0, g.checks
    return module


def both_refuse(module: IRModule, call: Callable[..., Any], args: Sequence[Any], words: Sequence[str]) -> None:
    interpreted_refuses(module, args, "main", *words)
    with pytest.raises(UserError) as caught:
        call(*args)
    for word in ("main", *words):
        assert word in str(caught.value), f"{word} in {caught.value}"


@pytest.mark.parametrize("name", CASES)
def test_hostile_calls_match_numpy_or_give_reason(name: str, device: Device) -> None:
    case = CASES[name]
    module = program(case)
    with compiled(module, device) as call:
        for a, b in case.sizes:
            args = ones(a) / 8, ones(b) / 8
            result = run(module, *args)
            same(result, np.asarray(case.numpy(*args)).astype(result.dtype), f"{a}, {b}")
            same(call(*args), result, f"{a}, {b}, compiled")
        for a, b, words in case.bad:
            both_refuse(module, call, (ones(a), ones(b)), words)


TEXTS: dict[str, tuple[str, Sequence[Sequence[Any]], Sequence[tuple[Sequence[Any], Sequence[str]]]]] = {
    "a callee takes what is even": (
        """
        @function
        def sub(x: Tensor((2 * k,), f32)) -> Tensor((k,), f32):
            with dataflow():
                y: Tensor((k,), f32) = op.slice(x, axis=0, begin=0, end=k)
            return y

        @function
        def main(x: Tensor((n,), f32)) -> Tensor(None, f32, ndim=1):
            with dataflow():
                z: Tensor(None, f32, ndim=1) = call("sub", x)
                w: Tensor(None, f32, ndim=1) = op.exp(z)
            return w
        """,
        [[ones(4)], [ones(0)]],
        [([ones(5)], ("sub: parameter x", "dim 0", "4", "got 5", 'call("sub", x)'))],
    ),
    "a callee's bounds": (
        """
        k = symbol("k", lower=2, upper=4)

        @function
        def sub(x: Tensor((k,), f32)) -> Tensor((k,), f32):
            with dataflow():
                y: Tensor((k,), f32) = op.exp(x)
            return y

        @function
        def main(x: Tensor((n,), f32)) -> Tensor((n,), f32):
            with dataflow():
                z: Tensor((n,), f32) = call("sub", x)
            return z
        """,
        [[ones(2)], [ones(4)]],
        [
            ([ones(5)], ("sub: expected 2 <= k <= 4, got k = 5", 'call("sub", x)')),
            ([ones(0)], ("sub: expected 2 <= k <= 4, got k = 0",)),
        ],
    ),
    "an annotation claims more than is deduced": (
        """
        @function
        def main(x: Tensor((n,), f32)) -> Tensor((3,), f32):
            with dataflow():
                z: Tensor((3,), f32) = op.slice(x, axis=0, begin=0, end=3)
                w: Tensor((3,), f32) = op.exp(z)
            return w
        """,
        [[ones(3)], [ones(5)]],
        [([ones(2)], ("value z", "dim 0", "3", "got 2", "op.slice(x"))],
    ),
    "a symbol that is what is left of a dim": (
        """
        @function
        def main(x: Tensor((n + m,), f32), y: Tensor((n,), f32)) -> Tensor((n,), f32):
            with dataflow():
                a: Tensor((n,), f32) = op.slice(x, axis=0, begin=0, end=n)
                b: Tensor((n,), f32) = op.add(a, y)
            return b
        """,
        [[ones(5), ones(3)], [ones(3), ones(3)], [ones(2), ones(0)]],
        [([ones(2), ones(3)], ("expected 0 <= m, got m = -1",))],
    ),
    "inner dims, one of them a sum": (
        """
        @function
        def main(x: Tensor((n, k), f32), y: Tensor((k + m, 8), f32)) -> Tensor((n, 8), f32):
            with dataflow():
                z: Tensor((n, 8), f32) = op.matmul(x, y, transpose_b=False)
            return z
        """,
        [[ones(3, 4), ones(4, 8)], [ones(0, 0), ones(0, 8)]],
        [([ones(3, 4), ones(5, 8)], ("matmul", "inner dims", "got 4 and 5", "op.matmul(x, y"))],
    ),
    "a dim that divides": (
        """
        m = symbol("m", upper=9)

        @function
        def main(x: Tensor((n,), f32), y: Tensor((m,), f32)) -> Tensor((n // m,), f32):
            with dataflow():
                z: Tensor((n // m,), f32) = op.slice(x, axis=0, begin=0, end=n // m)
                w: Tensor((n // m,), f32) = op.exp(z)
            return w
        """,
        [[ones(7), ones(3)], [ones(0), ones(1)]],
        [([ones(7), ones(0)], ("n // m",)), ([ones(0), ones(0)], ("n // m",))],
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_programs_in_text(name: str, device: Device) -> None:
    text, calls, bad = TEXTS[name]
    module = read(text)
    with compiled(module, device) as call:
        for args in calls:
            same(call(*args), run(module, *args), name)
        for args, words in bad:
            interpreted_refuses(module, args, *words)
            with pytest.raises(UserError) as caught:
                call(*args)
            assert all(word in str(caught.value) for word in ("main", *words)), caught.value


def test_impossible_claims_are_refused_at_source_line() -> None:
    g = GraphBuilder()
    n, k = g.symbol("n", 5, 9), g.symbol("k", 1)
    x = g.input("x", (n,))
    y = g.input("y", (k, 4))
    never(lambda: cut(g, x, 0, n - 10), "slice: end: expected at least 0, got n - 10")
    never(
        lambda: g.call(BroadcastTo((4 - n, n)), x), "broadcast_to: dim 0 of the result: expected at least 0, got 4 - n"
    )
    never(lambda: g.call(Iota(n - 10)), "iota: size: expected at least 0", "n - 10")
    never(lambda: g.call(Reshape((k * k + 1, const(4))), y), "reshape", "products")
    never(lambda: g.call(Matmul(), g.call(Reshape((const(4), k)), y), g.input("w", (k + n, 2))), "inner dims", "k + n")
    never(lambda: g.match_cast(x, tensor(10)), "x: dim 0: expected 10, got n")
    never(lambda: g.finish(g.call(Exp(), x), tensor(n * n)), "expected n * n, got n")
    assert not g.checks


def test_checked_annotation_refines_shape() -> None:
    lowered = lower(read(TEXTS["an annotation claims more than is deduced"][0]))
    (check,) = [c for c in lowered.checks["main"] if "value z" in c.message]
    assert check.values[0] is const(3)
    assert lowered.functions["main"].ret_info == tensor(3)
    assert {p.shape for f in lowered.prims.values() for p in f.output_buffers} >= {(const(3),)}
