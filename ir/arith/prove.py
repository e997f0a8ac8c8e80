"""Decisions about integer conditions: yes, no, or unknown. Unknown is never a silent yes.

Tests: `tests/ir/arith/test_case_split.py`.
"""

from __future__ import annotations

from relax_tune.ir.arith.bounds import Env, remember
from relax_tune.ir.arith.case_split import by_cases, possible
from relax_tune.ir.arith.inequality import Question
from relax_tune.ir.arith.proof import FLIP, Proof
from relax_tune.ir.core.dtype import bool_
from relax_tune.ir.core.expr import Const, Expr, ExprLike, eq, expr

__all__ = ["EMPTY", "Proof", "prove", "prove_equal", "refuted"]

EMPTY = Env()


def prove(cond: Expr, env: Env | None = None) -> Proof:
    """Decide a condition: comparisons of integers under and, or, not.

    Anything else is UNKNOWN unless it is a literal or a fact of the env.
    """
    env = env or EMPTY
    if isinstance(cond, Const):
        return Proof.YES if cond.value else Proof.NO
    proof = env.proofs.get(cond)
    if not isinstance(proof, Proof):
        proof = _prove(cond, env)
        remember(env.proofs, cond, proof)
    return proof


def _prove(cond: Expr, env: Env) -> Proof:
    ctx = Question(env)
    proof = ctx.decide(cond)
    # Parts of a connective are proved before cases are split: each has its own entry in the table and its own effort.
    if proof is Proof.UNKNOWN and cond.op == "not":
        return FLIP[prove(cond.args[0], env)]
    if proof is Proof.UNKNOWN and cond.op in ("and", "or"):
        parts = [prove(a, env) for a in cond.args]
        strong = Proof.NO if cond.op == "and" else Proof.YES
        if strong in parts:
            return strong
        if Proof.UNKNOWN not in parts:
            return parts[0]
    if proof is Proof.UNKNOWN:
        # A condition that is true at one sample and false at another has no goals left, and needs no search.
        goals = possible(cond, ctx)
        proof = by_cases(cond, env, goals)
        if proof is Proof.UNKNOWN and env.solver is not None and goals:
            proof = env.solver.decide(cond, env, goals)
    return proof


def prove_equal(a: ExprLike, b: ExprLike, env: Env | None = None) -> Proof:
    """Decide a == b over integers, or between a condition and a literal truth value."""
    left, right = expr(a), expr(b)
    for truth, cond in ((left, right), (right, left)):
        # the samples that spare the search a question read conditions, not comparisons of them
        if isinstance(truth, Const) and truth.dtype is bool_:
            proof = prove(cond, env)
            return proof if truth.value else FLIP[proof]
    return prove(eq(left, right), env)


def refuted(cond: Expr, env: Env) -> bool:
    """Return whether one of a few sampled assignments that the env allows violates a condition. No proof is tried."""
    question = Question(env)
    question.start(cond)
    return Proof.YES not in possible(cond, question)
