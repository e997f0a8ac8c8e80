"""Simplification of scalar expressions: same value for every assignment the env allows, less work to compute.

Tests: `tests/ir/arith/test_case_split.py`.
"""

from __future__ import annotations

from relax_tune.ir.arith import poly as P
from relax_tune.ir.arith.bounds import Env, remember
from relax_tune.ir.arith.inequality import Question
from relax_tune.ir.arith.normal import algebraic
from relax_tune.ir.arith.poly import Poly
from relax_tune.ir.arith.proof import Proof
from relax_tune.ir.arith.prove import EMPTY
from relax_tune.ir.arith.render import Renderer, cost
from relax_tune.ir.core.expr import FALSE, TRUE, Const, Expr, Var, postorder, rebuild


def simplify(e: Expr, env: Env | None = None) -> Expr:
    """Return a cheaper equal form of `e` under `env`.

    Integer arithmetic (i32, i64) is decided in polynomial normal form and written back factored, unless the given
    expression costs no more. Conditions that `prove` decides become literals, and choices they decide disappear.
    Floating-point operations keep their order; only what is inside them is simplified. Depends only on `e` and `env`.
    """
    env = env or EMPTY
    if isinstance(e, Const):
        return e
    simplified = env.simplified.get(e)
    if simplified is None:
        simplified = _Simplifier(env).run(e)
        remember(env.simplified, e, simplified)
    return simplified


class _Simplifier:
    def __init__(self, env: Env) -> None:
        self.ctx = Question(env)
        self.done: dict[Expr, Expr] = {}
        self.renderer = Renderer(self.ctx, self.done)
        self.dirty: set[Expr] = set()

    def run(self, root: Expr) -> Expr:
        self.ctx.start(root)
        for n in postorder((root,)):
            self.done[n] = self.visit(n)
        if root in self.dirty:
            return self.settle(root)
        return self.done[root]

    def visit(self, n: Expr) -> Expr:
        if isinstance(n, Const):
            return n
        if isinstance(n, Var):
            return self.known(self.ctx.poly(n), n) if n.dtype.is_int else n
        inside = n.op in ("add", "sub", "mul") and algebraic(n)
        args = tuple(self.done[c] if inside else self.settle(c) for c in n.children)
        new = n if args == n.children else rebuild(n, args)
        if n.dtype.is_int:
            p = self.ctx.poly(n)
            if len(p) <= 1:
                return self.known(p, new, n)
            if algebraic(n):
                return self.arithmetic(n, new, p)
            return new
        return self.condition(n, new) if n.dtype.short == "bool" and new.op else new

    def known(self, p: Poly, new: Expr, n: Expr | None = None) -> Expr:
        """Return the best form of a constant or a single term."""
        value = P.as_constant(p)
        if value is not None:
            return self.renderer.render(p, new.dtype)
        if isinstance(new, Var):
            return new
        assert n is not None
        ((mono, _),) = p.items()
        if len(mono) == 1 and self.ctx.atoms[mono[0]].source is n:
            return new
        rendered = self.renderer.render(p, new.dtype)
        if n.op in ("add", "sub") or (n.op == "mul" and p[mono] != 1):
            return rendered if cost(rendered) <= cost(new) else new
        return self.cheaper(new, rendered)

    def arithmetic(self, n: Expr, new: Expr, p: Poly) -> Expr:
        """Write the normal form out where terms merged or a quotient split; sums wait for their root."""
        # Writing out every partial sum would take quadratic time in long sums. A sum is marked instead, and written
        # out once, where something other than a sum or product reads it.
        if n.op in ("add", "sub", "mul"):
            a, b = (self.ctx.poly(x) for x in n.args)
            whole = len(a) * len(b) if n.op == "mul" else len(a) + len(b)
            if len(p) < whole or not self.dirty.isdisjoint(n.args) or _scales(n) or _leans_right(n):
                self.dirty.add(n)
            return new
        return self.cheaper(new, self.renderer.render(p, n.dtype))

    def settle(self, n: Expr) -> Expr:
        """Return the final form of the root of a sum or product. Of two forms of equal cost, the normal form is
        preferred.
        """
        if n in self.dirty:
            self.dirty.discard(n)
            rendered = self.renderer.render(self.ctx.poly(n), n.dtype)
            self.done[n] = rendered if cost(rendered) <= cost(self.done[n]) else self.done[n]
        return self.done[n]

    def cheaper(self, a: Expr, b: Expr) -> Expr:
        return b if a is not b and cost(b) < cost(a) else a

    def condition(self, n: Expr, new: Expr) -> Expr:
        if new.op in ("and", "or", "not"):
            return new
        answer = self.ctx.decide(n)
        if answer is not Proof.UNKNOWN:
            return TRUE if answer is Proof.YES else FALSE
        return new


def _scales(n: Expr) -> bool:
    """Return whether a product multiplies a literal by an expression that contains a literal."""
    return n.op == "mul" and any(isinstance(a, Const) and bool(b.op) for a, b in (n.args, n.args[::-1]))


def _leans_right(n: Expr) -> bool:
    """Return whether the last term of a sum is itself a sum."""
    return n.op == "add" and n.args[1].op == "add"
