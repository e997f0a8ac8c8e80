"""Decisions within one question: three-valued logic over the proof search."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd

from relax_tune.ir.arith import poly as P
from relax_tune.ir.arith.bounds import opposite
from relax_tune.ir.arith.inequality import Prover
from relax_tune.ir.arith.normal import Normalizer
from relax_tune.ir.arith.poly import Poly
from relax_tune.ir.arith.proof import FLIP, Proof
from relax_tune.ir.core.expr import Const, Expr, postorder


@dataclass(slots=True, eq=False)
class Question(Normalizer):
    """Normal forms, proofs and decisions under one env, for one question about expressions of one dtype."""

    prover: Prover = field(init=False)

    def __post_init__(self) -> None:
        self.prover = Prover(self)

    def nonneg(self, p: Poly) -> bool:
        """Prove p >= 0 for every assignment the env allows."""
        return self.prover.nonneg(p)

    def decide(self, cond: Expr) -> Proof:
        """Decide a boolean expression."""
        return decide(cond, self)


def decide(cond: Expr, ctx: Question) -> Proof:
    """Decide a boolean expression under the env of `ctx`."""
    done: dict[Expr, Proof] = {}
    for n in postorder((cond,)):
        done[n] = _decide(n, done, ctx)
    return done[cond]


def _decide(n: Expr, done: dict[Expr, Proof], ctx: Question) -> Proof:
    if isinstance(n, Const):
        return Proof.YES if n.value else Proof.NO
    if n.dtype.short != "bool":
        return Proof.UNKNOWN
    if ctx.env.facts:
        if n in ctx.env.facts:
            return Proof.YES
        if opposite(n) in ctx.env.facts:
            return Proof.NO
    if n.op == "not":
        return FLIP[done[n.args[0]]]
    if n.op in ("and", "or"):
        parts = [done[a] for a in n.args]
        strong, weak = (Proof.NO, Proof.YES) if n.op == "and" else (Proof.YES, Proof.NO)
        if strong in parts:
            return strong
        return weak if all(p is weak for p in parts) else Proof.UNKNOWN
    if n.op not in ("lt", "le", "eq", "ne") or not all(a.dtype.is_int for a in n.args):
        return Proof.UNKNOWN
    difference = P.plus(ctx.poly(n.args[1]), ctx.poly(n.args[0]), -1)
    if n.op == "ne":
        return FLIP[_zero(difference, ctx)]
    if n.op == "eq":
        return _zero(difference, ctx)
    return _at_least(difference, 1 if n.op == "lt" else 0, ctx)


def _at_least(p: Poly, least: int, ctx: Question) -> Proof:
    """Decide p >= least."""
    if ctx.nonneg(P.plus(p, P.constant(least), -1)):
        return Proof.YES
    if ctx.nonneg(P.plus(P.constant(least - 1), p, -1)):
        return Proof.NO
    return Proof.UNKNOWN


def _zero(p: Poly, ctx: Question) -> Proof:
    """Decide p == 0."""
    number = P.as_constant(p)
    if number is not None:
        return Proof.YES if number == 0 else Proof.NO
    g = 0
    for m, k in p.items():
        if m:
            g = gcd(g, k)
    if p.get(P.ONE, 0) % g:
        return Proof.NO
    below, above = ctx.nonneg(P.scaled(p, -1)), ctx.nonneg(p)
    if below and above:
        return Proof.YES
    if not above and ctx.nonneg(ctx.minus_one(P.scaled(p, -1))):
        return Proof.NO
    if not below and ctx.nonneg(ctx.minus_one(p)):
        return Proof.NO
    return Proof.UNKNOWN
