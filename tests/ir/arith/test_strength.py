"""Strength of proofs on a fixed corpus of generated facts, each true or false at every assignment tried.

A change that decides less fails here; what is decided must be right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from random import Random

import numpy as np
import pytest

from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.counterexamples import Samples, _Outside
from relax_tune.ir.arith.inequality import Question
from relax_tune.ir.arith.poly import Poly
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.core.expr import (
    Const,
    Expr,
    Op,
    Var,
    add,
    and_,
    ceildiv,
    const,
    eq,
    floordiv,
    floormod,
    le,
    lt,
    maximum,
    minimum,
    mul,
    ne,
    not_,
    or_,
    postorder,
    select,
    sub,
)

n, m, k, j = (Var(x) for x in "nmkj")
SYMBOLS = (n, m, k)
DIVISORS = (const(2), const(3), const(4), const(8), m + 1, maximum(k, 1))
BINARY: Mapping[str, Callable[[Expr, Expr], Expr]] = {
    "add": add, "sum": add, "sub": sub, "mul": mul, "product": mul, "min": minimum, "max": maximum,
}  # fmt: skip
DIVIDING = {"div": floordiv, "mod": floormod, "ceildiv": ceildiv}
NUMPY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "floordiv": np.floor_divide, "floormod": np.mod,
    "min": np.minimum, "max": np.maximum, "select": np.where, "lt": np.less, "le": np.less_equal, "eq": np.equal,
}  # fmt: skip


def points() -> Mapping[Expr, np.ndarray]:
    """All small assignments, and large ones."""
    rng = Random(5)
    large = [[rng.choice((rng.randrange(30), rng.randrange(1000), 0, 1)) for _ in SYMBOLS] for _ in range(300)]
    columns = np.array([*product(range(6), repeat=3), *large], dtype=np.int64).T
    return dict(zip(SYMBOLS, columns))


def some(rng: Random, depth: int) -> Expr:
    if depth == 0 or rng.random() < 0.15:
        return rng.choice([*SYMBOLS, *SYMBOLS, const(rng.choice((1, 1, 2, 3, 4, 8)))])
    name = rng.choice([*BINARY, *DIVIDING, "select"])
    a, b = some(rng, depth - 1), some(rng, depth - 1)
    if name in BINARY:
        return BINARY[name](a, b)
    if name in DIVIDING:
        return DIVIDING[name](a, rng.choice(DIVISORS))
    return select(rng.choice((le, lt))(some(rng, 0), some(rng, 0)), a, b)


def corpus(seed: int, count: int, depth: int) -> list[tuple[Expr, bool]]:
    rng, known, result = Random(seed), points(), list[tuple[Expr, bool]]()
    while len(result) < count:
        cond = rng.choice((le, le, le, lt, eq))(some(rng, depth), some(rng, depth))
        values: dict[Expr, np.ndarray] = dict(known)
        for node in postorder((cond,)):
            if isinstance(node, Const):
                values[node] = np.full_like(known[n], node.value)
            elif isinstance(node, Op):
                values[node] = NUMPY[node.op](*(values[a] for a in node.args))
        # that two random sums differ everywhere is seldom of interest
        dull = isinstance(cond, Op) and cond.op == "eq" and rng.random() < 0.9
        if values[cond].all() or not (values[cond].any() or dull):
            result.append((cond, bool(values[cond][0])))
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "count", "floor"), [(1, 150, 1.0), (2, 250, 0.98), (3, 100, 0.92)])
def test_corpus_decided_above_floor_never_wrongly(depth: int, count: int, floor: float) -> None:
    facts = corpus(depth, count, depth)
    open_: list[Expr] = []
    for cond, truth in facts:
        answer = prove(cond)
        assert answer is not (Proof.NO if truth else Proof.YES), cond
        if answer is Proof.UNKNOWN:
            open_.append(cond)
    assert len(open_) <= (1 - floor) * count, open_


third = ceildiv(n, 3)
PIECES = [maximum(minimum(third, n - i * third), 0) for i in range(3)]
N_M = Env().with_fact(le(n, m))


@pytest.mark.parametrize(
    ("cond", "env"),
    [
        (le(n, n * n), None),
        (le(n + m, maximum(n, m) * 2), None),
        (eq(minimum(n, m) + maximum(n, m), n + m), None),
        (eq(minimum(n, m) * maximum(n, m), n * m), None),
        (eq(select(lt(n, m), n, m), minimum(n, m)), None),
        (eq(minimum(3, n) + maximum(n - 3, 0), n), None),  # x[:3] and x[3:]
        (eq(PIECES[0] + PIECES[1] + PIECES[2], n), None),  # concat(split(x, 3))
        (eq(n // 2 + ceildiv(n, 2), n), None),
        (le(n // 2, n * n), None),
        (eq(floormod(k, maximum(k, 1)), 0), None),
        (or_(le(n, m), le(m, n)), None),
        (and_(le(n, n * n), le(m, m * m)), None),
        (le(n * n, m * m), N_M),
        (le(n * k, m * j), N_M.with_fact(le(k, j))),
        (le(1, n), Env().with_fact(ne(n, 0))),
        (eq(n, m), Env().with_fact(not_(ne(n, m)))),
        (lt(m, n), Env().with_fact(not_(le(n, m)))),
        (le(n, 3), Env().with_fact(or_(eq(n, 2), eq(n, 3)))),
        (eq(n * n, n), Env().with_bound(n, 0, 1)),
    ],
    ids=repr,
)
def test_case_split_decides(cond: Expr, env: Env | None) -> None:
    assert prove(cond, env) is Proof.YES
    assert prove(not_(cond), env) is Proof.NO


class ReadMeanwhile(Samples):
    """Samples of which none gives a claim a value, and whose first reading asks the same question once more."""

    nested = False

    def _value(self, p: Poly, s: int, point: dict[int, int]) -> int:
        if not self.nested:
            self.nested = True
            assert not self.refute(p)
        raise _Outside


def test_samples_left_out_by_a_nested_question_are_left_out_once() -> None:
    question = Question(Env({n: (0, None)}))
    p = question.poly(n)
    samples = ReadMeanwhile(question)
    assert len(samples.points) > 1
    assert not samples.refute(p) and samples.points == []
