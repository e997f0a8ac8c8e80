"""Index arithmetic of the lowering and of the printers: the polynomials of `ir/arith/poly` over expressions.

Atoms are variables and opaque sub-expressions. Printing a kernel needs thousands of small polynomials. Therefore the polynomial of each
expression is computed once without an environment (`static`), and known values of variables (unrolled loops, lanes) are substituted
afterwards (`resolve`).
"""

from __future__ import annotations

from collections.abc import Iterable

from relax_tune.ir.arith import poly as P
from relax_tune.ir.arith.bounds import wraps
from relax_tune.ir.arith.normal_form import NormalForm
from relax_tune.ir.arith.poly import ONE, K, PolyOf, PolyOver, as_constant, constant, plus
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import Const, Expr, Op, Var, add, const, floordiv, free_vars, mul, rebuild, sub
from relax_tune.ir.core.intervals import UNBOUNDED, Interval
from relax_tune.ir.core.scalar_ops import DIVISIONS, SCALAR_OPS

__all__ = ["ONE", "Algebra", "Monomial", "Poly", "as_constant", "constant", "plus"]

Monomial = tuple[Expr, ...]
Poly = PolyOver[Expr]


class Algebra(NormalForm[Expr]):
    """Polynomials under an environment.

    Attributes:
        env: Known values of variables (unrolled loops, lanes).
        ranges: Inclusive bounds of variables. A variable without an entry is a symbol, >= 0.
        nests: For each variable of a nest that replaces a fused loop (`lowered.nest_fused_loops`), all variables of the nest.
    """

    def __init__(self) -> None:
        self.env: dict[Var, Poly] = {}
        self.ranges: dict[Var, Interval] = {}
        self.nests: dict[Var, frozenset[Var]] = {}
        self._order: dict[Expr, int] = {}
        self._static: dict[Expr, Poly] = {}
        self._free: dict[Expr, frozenset[Var]] = {}
        self._atoms: dict[object, Expr] = {}

    def free(self, e: Expr) -> frozenset[Var]:
        """Return the variables of an expression."""
        variables = self._free.get(e)
        if variables is None:
            variables = self._free[e] = frozenset(free_vars(e))
        return variables

    def depends(self, p: Poly, variables: Iterable[Var]) -> bool:
        """Return whether any of the variables occurs in `p`."""
        names = frozenset(variables)
        return any(not names.isdisjoint(self.free(a)) for m in p for a in m)

    def times(self, a: PolyOf[Expr, K], b: PolyOf[Expr, K]) -> PolyOf[Expr, K]:
        return P.product(a, b, self._rank)

    def _rank(self, atom: Expr) -> int:
        # Factors are ordered by first appearance: a total order that does not depend on hashes, so printed kernels
        # are reproducible.
        return self._order.setdefault(atom, len(self._order))

    def atom(self, e: Expr) -> Poly:
        if isinstance(e, Op) and (e.op in DIVISIONS or e.op in ("min", "max", "select")) and e.dtype.is_int:
            # equal up to the order of terms: the same atom
            key = tuple(frozenset(self.static(a).items()) if a.dtype.is_int else a for a in e.args)
            e = self._atoms.setdefault((e.op, frozenset(key) if e.op in ("min", "max") else key), e)
        self._rank(e)
        return {(e,): 1}

    def static(self, e: Expr) -> Poly:
        """Return the polynomial of `e` without the environment."""
        p = self._static.get(e)
        if p is None:
            # The result is reused under other environments, so it must not depend on the present one.
            env, self.env = self.env, {}
            p = self._static[e] = self._make(e)
            self.env = env
        return p

    def poly(self, e: Expr) -> Poly:
        """Return the polynomial of `e` under the environment."""
        return self.resolve(self.static(e))

    def resolve(self, p: Poly) -> Poly:
        """Substitute the environment in `p`."""
        env = self.env
        if not env:
            return p
        out: Poly = {}
        changed = False
        for m, c in p.items():
            if not m:
                out[m] = out.get(m, 0) + c
                continue
            known: Poly | None = None
            rest: list[Expr] = []
            for a in m:
                value = env.get(a) if isinstance(a, Var) else self._resolve_atom(a)
                if value is None:
                    rest.append(a)
                else:
                    known = value if known is None else self.times(known, value)
            if known is None:
                out[m] = out.get(m, 0) + c
                continue
            changed = True
            term = self.times(known, {tuple(rest): 1}) if rest else known
            for n, d in term.items():
                out[n] = out.get(n, 0) + c * d
        if not changed:
            return p
        return {m: c for m, c in out.items() if c}

    def _resolve_atom(self, a: Expr) -> Poly | None:
        if self.free(a).isdisjoint(self.env):
            return None
        args = tuple(self.expr(self.poly(c)) if c.dtype is i64 else self._rebuilt(c) for c in a.children)
        return self.static(rebuild(a, args))

    def _rebuilt(self, e: Expr) -> Expr:
        if self.free(e).isdisjoint(self.env):
            return e
        return rebuild(e, tuple(self.expr(self.poly(c)) if c.dtype is i64 else self._rebuilt(c) for c in e.children))

    def _make(self, e: Expr) -> Poly:
        if isinstance(e, Const):
            return constant(int(e.value))
        if isinstance(e, Op) and e.dtype is i64 and not wraps(e):
            name = e.op
            if name in ("add", "sub"):
                return self.joined(plus(self.static(e.args[0]), self.static(e.args[1]), 1 if name == "add" else -1))
            if name == "mul":
                return self.times(self.static(e.args[0]), self.static(e.args[1]))
            if name in DIVISIONS:
                return self._divide(e)
            if name in ("min", "max"):
                return self._choose(e)
        return self.atom(e)

    def _divide(self, e: Op) -> Poly:
        """Return a quotient or remainder by a positive constant; divisible terms are taken out of the division."""
        # Each step leaves an equal expression with a smaller dividend, until only an opaque atom remains.
        a, d = self.static(e.args[0]), as_constant(self.static(e.args[1]))
        if d is None or d <= 0:
            return self.atom(e)
        is_quotient = e.op == "floordiv"
        quotient, rest = P.divide_by_number(a, d)
        constant_part = self.constant_quotient(rest, d)
        if constant_part is not None:
            return plus(quotient, constant(constant_part)) if is_quotient else plus(rest, constant(-constant_part * d))
        cancelled = self.cancel(a, constant(d))
        if cancelled is not None:
            factor, quotient, rest = cancelled
            inner = self.static(rebuild(e, (self.expr(quotient), const(d // factor[ONE]))))
            return inner if is_quotient else plus(rest, inner, factor[ONE])
        exact = {m: c for m, c in a.items() if c % d == 0 and m}
        # The constant is taken out only if the rest stays >= 0: targets divide a non-negative number in fewer
        # instructions.
        multiple = a.get(ONE, 0) // d * d
        if multiple and self._is_nonnegative(plus(plus(a, exact, -1), constant(-multiple))):
            exact[ONE] = multiple
        if not exact:
            # rebuilt without variables that cancelled: the atom would seem to depend on their loops
            top = self.expr(a)
            return self.atom(rebuild(e, (top, const(d))) if self.free(top) < self.free(e.args[0]) else e)
        # (c*d*x + r) // d = c*x + r // d; the terms of r must stay under one division
        inner = self.static(rebuild(e, (self.expr(plus(a, exact, -1)), const(d))))
        return plus({m: c // d for m, c in exact.items()}, inner) if is_quotient else inner

    def _is_nonnegative(self, p: Poly) -> bool:
        low = self.interval(p)[0]
        return low is not None and low >= 0

    def joined(self, p: Poly) -> Poly:
        """Merge quotients and remainders of one number, `a // d * d + a % d == a`.

        The address of a fused loop becomes linear in its variable again.
        """
        for m, c in tuple(p.items()):
            rest = m[0] if len(m) == 1 else None
            if not isinstance(rest, Op) or rest.op != "floormod":
                continue
            multiple = self.times(self.static(floordiv(*rest.args)), self.static(rest.args[1]))
            if multiple and all(p.get(n, 0) == c * k for n, k in multiple.items()):
                without = plus(plus(p, multiple, -c), {m: 1}, -c)
                return self.joined(plus(without, self.static(rest.args[0]), c))
        return p

    def _choose(self, e: Op) -> Poly:
        a, b = self.static(e.args[0]), self.static(e.args[1])
        for winner, loser in ((b, a), (a, b)):
            if self.beats("min" if e.op == "min" else "max", winner, loser):
                return winner
        return self.atom(e)

    def expr(self, p: Poly) -> Expr:
        """Return `p` as an expression, terms in order of first appearance, negative ones last."""
        total: Expr | None = None
        offset = p.get(ONE, 0)
        terms = [(m, c) for m, c in p.items() if m and c > 0] + [(m, c) for m, c in p.items() if m and c < 0]
        for m, c in terms:
            term = m[0]
            for a in m[1:]:
                term = mul(term, a)
            if total is None:
                total = mul(term, const(c))
            else:
                total = add(total, mul(term, const(c))) if c > 0 else sub(total, mul(term, const(-c)))
        if total is None:
            return const(offset)
        return add(total, const(offset)) if offset >= 0 else sub(total, const(-offset))

    def atom_interval(self, a: Expr) -> Interval:
        """Return inclusive bounds of an atom."""
        if isinstance(a, Var):
            known = self.env.get(a)
            return self.ranges.get(a, (0, None)) if known is None else self.interval(known)
        operation = SCALAR_OPS[a.op].interval if isinstance(a, Op) and not wraps(a) else None
        if operation is None:
            return UNBOUNDED
        return operation(*(self.interval(self.static(x)) if x.dtype.is_int else UNBOUNDED for x in a.children))
