"""Proofs by cases: a condition without a proof may be decided once a choice in it is decided.

Every split covers all assignments, so a claim that holds in each case holds. The effort is counted and limited. Choices
(`select`, `min`, `max`) are split first, which leaves polynomials. Then a variable is at its least value or above it,
where products and quotients change their behaviour (n * n >= n).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from relax_tune.ir.arith.bounds import Env, opposite
from relax_tune.ir.arith.counterexamples import Samples
from relax_tune.ir.arith.inequality import Question
from relax_tune.ir.arith.proof import Proof
from relax_tune.ir.core.expr import Const, Expr, Var, const, eq, free_vars, le, lt, postorder
from relax_tune.ir.core.scalar_ops import DIVISIONS

# Effort for one question in polynomials (a case costs at least _CASE), depth of splits, and assignments tried before
# them.
EFFORT = 1500
MAX_DEPTH = 6
_CASE = 40
_ASSIGNMENTS = 40


def possible(cond: Expr, ctx: Question) -> tuple[Proof, ...]:
    """Return the answers that agree with every sampled assignment; empty if both truth values occur."""
    truths = Samples(ctx, 0).truths(cond, _ASSIGNMENTS)
    return tuple(goal for goal in (Proof.YES, Proof.NO) if (goal is Proof.NO) not in truths)


def by_cases(cond: Expr, env: Env, goals: Collection[Proof]) -> Proof:
    """Decide a condition that `decide` left open.

    Args:
        goals: the answers that are possible.
    """
    return next((goal for goal in goals if _Cases(cond, goal).hold(env, 0)), Proof.UNKNOWN)


def _read(cond: Expr, env: Env) -> Question:
    ctx = Question(env)
    ctx.start(cond)
    return ctx


class _Cases:
    def __init__(self, cond: Expr, goal: Proof) -> None:
        self.cond = cond
        self.goal = goal
        self.left = EFFORT

    def hold(self, env: Env, depth: int) -> bool:
        """Prove the goal in every case of some split of `env`."""
        if depth >= MAX_DEPTH:
            return False
        # Only the first split is tried at each depth: trying all would multiply the effort by their number at every
        # level. Its cases become facts, so the next split comes first one level deeper.
        split = next(_splits(self.cond, env), None)
        return split is not None and all(self.settled(case, env, depth) for case in split)

    def settled(self, case: Expr, env: Env, depth: int) -> bool:
        if self.left <= 0:
            return False
        inner = env.with_fact(case)
        ctx = Question(inner)
        proof = ctx.decide(self.cond)
        # Reading a case costs time even if its proof is immediate.
        self.left -= max(ctx.prover.spent, _CASE)
        if proof is not Proof.UNKNOWN:
            return proof is self.goal or Question(env).decide(case) is Proof.NO  # an impossible case: anything holds
        return self.hold(inner, depth + 1) or Question(env).decide(case) is Proof.NO


def _splits(cond: Expr, env: Env) -> Iterator[tuple[Expr, ...]]:
    """Yield splits into cases that cover all assignments and are not decided by the facts."""
    ctx = _read(cond, env)
    curved: list[Var] = []
    for n in postorder((cond,)):
        if not n.op or n is cond:
            continue
        choice = le(*n.args) if n.op in ("min", "max") else n
        cases = _alternatives(choice)
        if cases and ctx.decide(choice) is Proof.UNKNOWN:
            yield cases
        if n.op in DIVISIONS or (n.op == "mul" and not any(isinstance(a, Const) for a in n.args)):
            curved.extend(v for v in free_vars(n) if v.dtype.is_int)
    for fact in env.facts:
        cases = fact.args if fact.op == "or" else _alternatives(fact)
        if fact.op in ("or", "ne") and not any(ctx.decide(c) is Proof.YES for c in cases):
            yield cases
    for v in dict.fromkeys(curved):
        # What changes with a variable, such as n * n >= n, changes at 0 and 1: larger least values are not split.
        low, high = env.range_of(v)
        if low is not None and low <= 1 and low != high:
            yield eq(v, const(low, v.dtype)), le(const(low + 1, v.dtype), v)


def _alternatives(cond: Expr) -> tuple[Expr, ...]:
    """Return the cases of a comparison of integers; none for other expressions."""
    other = opposite(cond)
    if other is None:
        return ()
    a, b = cond.args
    return (lt(a, b), eq(a, b), lt(b, a)) if cond.op in ("eq", "ne") else (cond, other)
