"""Decisions about integer conditions: yes, no, or unknown. Unknown is never a silent yes."""

from __future__ import annotations

from relax_tune.ir.arith.bounds import Env, remember
from relax_tune.ir.arith.case_split import by_cases, possible
from relax_tune.ir.arith.inequality import Question
from relax_tune.ir.arith.proof import FLIP, Proof
from relax_tune.ir.core.expr import Const, Expr, ExprLike, eq, expr

__all__ = ["EMPTY", "Proof", "prove", "prove_equal"]

EMPTY = Env()


def prove(cond: Expr, env: Env | None = None) -> Proof:
    """Decide a condition: comparisons of integers under and, or, not.

    Anything else is UNKNOWN unless it is a literal or a fact of the env.
    """
    env = env or EMPTY
    if isinstance(cond, Const):
        return Proof.YES if cond.value else Proof.NO
    found = env.proofs.get(cond)
    if not isinstance(found, Proof):
        found = _prove(cond, env)
        remember(env.proofs, cond, found)
    return found


def _prove(cond: Expr, env: Env) -> Proof:
    ctx = Question(env)
    found = ctx.decide(cond)
    if found is Proof.UNKNOWN and cond.op == "not":
        return FLIP[prove(cond.args[0], env)]
    if found is Proof.UNKNOWN and cond.op in ("and", "or"):
        parts = [prove(a, env) for a in cond.args]
        strong = Proof.NO if cond.op == "and" else Proof.YES
        if strong in parts:
            return strong
        if Proof.UNKNOWN not in parts:
            return parts[0]
    if found is Proof.UNKNOWN:
        goals = possible(cond, ctx)
        found = by_cases(cond, env, goals)
        if found is Proof.UNKNOWN and env.solver is not None and goals:
            found = env.solver.decide(cond, env, goals)
    return found


def prove_equal(a: ExprLike, b: ExprLike, env: Env | None = None) -> Proof:
    """Decide a == b over integers."""
    return prove(eq(expr(a), expr(b)), env)
