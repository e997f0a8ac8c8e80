"""The normal form: integer expressions as polynomials over atoms.

Atoms are variables, floor quotients, minima and maxima, and nodes without algebra (loads, selects, casts). A remainder is
not an atom: `x % c` is `x - c * (x // c)`, so `x % c + x // c * c` is `x` by plain arithmetic. Equal arguments give one
atom, so equal expressions mostly have equal polynomials. The form serves decisions; `render` writes code.

A `Normalizer` lives for one question. Its atoms are numbered by first appearance, so nothing depends on names or history.

Tests: `tests/ir/arith/test_random_expressions.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from relax_tune.ir.arith import poly as P
from relax_tune.ir.arith.atoms import AtomBound, Atoms, Kind
from relax_tune.ir.arith.bounds import dtype_interval, wraps
from relax_tune.ir.arith.poly import Mono, Poly
from relax_tune.ir.arith.proof import Proof
from relax_tune.ir.core.dtype import DType, i64
from relax_tune.ir.core.expr import Const, Expr, Load, Var, free_vars
from relax_tune.ir.core.intervals import UNBOUNDED
from relax_tune.ir.core.scalar_ops import ALGEBRA


@dataclass(slots=True, eq=False)
class Normalizer(Atoms):
    """Normal forms under one env, for one question about expressions of one dtype."""

    ready: bool = False
    _started: bool = False
    _polys: dict[Expr, Poly] = field(default_factory=dict)
    _bounds: dict[int, list[AtomBound]] = field(default_factory=dict)
    _rewrites: list[tuple[Mono, int, Poly]] = field(default_factory=list)
    _divisible: list[tuple[Poly, Poly]] = field(default_factory=list)
    _equalities: list[Poly] = field(default_factory=list)
    _inequalities: list[Poly] | None = None

    # -- expressions to polynomials

    def poly(self, e: Expr) -> Poly:
        """Return the normal form of an integer expression."""
        self.start(e)
        return self._poly(e)

    def start(self, e: Expr) -> None:
        """Begin a proof: number its variables first, then read the equations among the facts."""
        if self._started:
            return
        self._started = True
        # An equation replaces the earliest of its atoms (`_equation`). With the variables of the question numbered
        # first, the choice does not depend on the order in which the facts mention them.
        if any(f.op == "eq" for f in self.env.facts):
            for v in free_vars(e):
                if v.dtype.is_int:
                    self.atom("var", (), v, v)
            self._read_equations()
        self.ready = True

    def _poly(self, e: Expr) -> Poly:
        polys = self._polys
        cached = polys.get(e)
        if cached is not None:
            return cached
        stack = [e]
        while stack:
            n = stack[-1]
            below = [c for c in n.children if c not in polys]
            if below:
                stack.extend(reversed(below))
                continue
            stack.pop()
            if n not in polys:
                polys[n] = self._read(n) if n.dtype.is_int else {}
        return polys[e]

    def _read(self, n: Expr) -> Poly:
        if isinstance(n, Const):
            return P.constant(int(n.value))
        if isinstance(n, Var):
            lo, hi = self.env.range_of(n)
            if lo is not None and lo == hi:
                return P.constant(lo)
            return self.reduced({(self.atom("var", (), n, n),): 1})
        if algebraic(n):
            a, b = (self._polys[x] for x in n.args)
            if n.op == "add" or n.op == "sub":
                out = P.plus(a, b, 1 if n.op == "add" else -1)
                return out if len(out) <= P.MAX_TERMS else self.opaque(n)
            if n.op == "mul":
                # This bounds the work. The product itself may have far fewer terms, since equal monomials merge.
                return self.mul(a, b) if len(a) * len(b) <= 4 * P.MAX_TERMS else self.opaque(n)
            if n.op == "floordiv":
                return self.div(a, b, n)
            if n.op == "floormod":
                if not b:
                    return self.opaque(n)
                # not an atom: x % c and x // c then cancel by plain arithmetic
                back = self.mul(b, self.div(a, b, None))
                return P.plus(a, back, -1)
            return self.extreme("min" if n.op == "min" else "max", a, b, n)
        if n.op == "cast" and wide(n.dtype):
            inner = n.args[0]
            if inner.dtype.is_int and n.dtype.holds(inner.dtype):  # widening keeps the value
                return self._polys[inner]
        return self.opaque(n)

    def mul(self, a: Poly, b: Poly) -> Poly:
        return self.reduced(P.product(a, b))

    def opaque(self, n: Expr) -> Poly:
        """Return an atom for `n`. Equal children give the same atom."""
        parts = tuple(("p", P.key(self._polys[c])) if c.dtype.is_int else ("e", c) for c in n.children)
        what: object = n.buffer if isinstance(n, Load) else n.op or n
        if n.op == "select":
            # Guards of split loops are selects that the bounds decide: the value of one side takes part in further arithmetic.
            answer = self.decide(n.args[0])
            if answer is not Proof.UNKNOWN:
                return self._polys[n.args[1 if answer is Proof.YES else 2]]
        kind: Kind = "other"
        args: tuple[Poly, ...] = ()
        if n.op == "select" and wide(n.dtype):
            kind, args = "select", (self._polys[n.args[1]], self._polys[n.args[2]])
        return {(self.atom(kind, args, n, (what, n.dtype, parts)),): 1}

    # -- floor division, minima

    def div(self, x: Poly, c: Poly, source: Expr | None) -> Poly:
        """Return x // c, where c is not zero."""
        if not c:
            return {(self.atom("div", (x, c), source),): 1}
        number = P.as_constant(c)
        if number is not None and number < 0:  # x // -c == -x // c
            x, c, number, source = P.scaled(x, -1), P.constant(-number), -number, None
        if number == 1:
            return x
        # (c * A + B) // c == A + B // c
        whole, rest = P.divide(x, c)
        if whole:
            source = None
        if not rest:
            return whole
        positive = number is not None or self.nonneg(c)
        if positive:
            inner = self._div_small(rest, c, source)
        else:
            inner = {(self.atom("div", (rest, c), source),): 1}
        return P.plus(whole, inner) if whole else inner

    def _div_small(self, x: Poly, c: Poly, source: Expr | None) -> Poly:
        """Return x // c for c > 0, x already reduced by c."""
        number = P.as_constant(c)
        same = None if number is None else self.constant_quotient(x, number)
        if same is not None:
            return P.constant(same)
        # `constant_quotient` has decided all quotients of two constants.
        if number is None or len(x) > 1 or P.ONE not in x:
            # x // c == 0 when 0 <= x < c, and -1 when -c <= x < 0
            if self.nonneg(x):
                if self.nonneg(P.minus_one(P.plus(c, x, -1))):
                    return {}
            elif self.nonneg(P.minus_one(P.scaled(x, -1))) and self.nonneg(P.plus(c, x)):
                return P.constant(-1)
        for dividend, divisor in self._divisible:
            # (k * D + B) // c == k * (D // c) + B // c when c divides D
            if divisor == c:
                head = P.lead(dividend)
                # the nearest multiple, so that the rest has the smallest coefficients
                k = (x.get(head, 0) + dividend[head] // 2) // dividend[head] if head in x else 0
                if k and not (k == 1 and x == dividend):
                    q: Poly = {(self.atom("div", (dividend, c), None),): k}
                    return P.plus(self.reduced(q), self.div(P.plus(x, dividend, -k), c, None))
        cancelled = self.cancel(x, c)
        if cancelled is not None:
            factor, quotient, _ = cancelled
            return self.div(quotient, P.divide(c, factor)[0], None)
        # (x // a + k) // c == (x + k * a) // (a * c)
        if len(x) - (P.ONE in x) == 1:
            ((mono, k),) = ((m, k) for m, k in x.items() if m)
            if k == 1 and len(mono) == 1 and self.atoms[mono[0]].kind == "div":
                inner, a = self.atoms[mono[0]].args
                if a and self.nonneg(a):
                    offset = P.scaled(a, x.get(P.ONE, 0))
                    return self.div(P.plus(inner, offset), self.mul(a, c), None)
        return self.reduced({(self.atom("div", (x, c), source),): 1})

    def extreme(self, kind: Literal["min", "max"], a: Poly, b: Poly, source: Expr | None) -> Poly:
        """Return min or max: flattened, without dominated arguments, with shared terms pulled out."""
        # min(min(x, y), z) is one atom with three arguments, so that the order of nesting does not matter
        args: list[Poly] = []
        for p in (a, b):
            ((mono, k),) = p.items() if len(p) == 1 else (((), 0),)
            same = k == 1 and len(mono) == 1 and self.atoms[mono[0]].kind == kind
            args.extend(self.atoms[mono[0]].args if same else (p,))
        candidates: list[Poly] = []
        for p in args:
            # `source` is what the atom is printed as. Without the argument that is left out, printing from the
            # arguments is cheaper.
            if any(self.beats(kind, q, p) for q in candidates):
                source = None
                continue
            candidates = [q for q in candidates if not self.beats(kind, p, q)]
            candidates.append(p)
        if len(candidates) == 1:
            return candidates[0]
        # min(n + a, n + b) == n + min(a, b): equal minima get equal atoms, and the shared part takes part in further arithmetic
        shared = {m: k for m, k in candidates[0].items() if m and all(p.get(m) == k for p in candidates[1:])}
        base = min(p.get(P.ONE, 0) for p in candidates)
        if base:
            shared[P.ONE] = base
        if shared:
            candidates = [P.plus(p, shared, -1) for p in candidates]
            source = None
        # A set, so that min(a, b) and min(b, a) are one atom.
        identity = (kind, frozenset(P.key(p) for p in candidates))
        inner: Poly = {(self.atom(kind, tuple(candidates), source, identity),): 1}
        return P.plus(shared, inner) if shared else inner

    # -- bounds

    def bounds(self, number: int) -> list[AtomBound]:
        """Return the symbolic bounds of an atom."""
        bounds = self._bounds.get(number)
        if bounds is None:
            bounds = self._bounds[number] = []
            bounds.extend(self._bounds_of(number))
        return bounds

    def _bounds_of(self, number: int) -> list[AtomBound]:
        atom = self.atoms[number]
        one: Poly = {P.ONE: 1}
        out: list[AtomBound] = []
        if atom.kind == "div":
            x, c = atom.args
            if c and self.nonneg(c):  # x - c + 1 <= c * (x // c) <= x
                out.append(AtomBound(c, self._increment(P.plus(x, c, -1)), False))
                out.append(AtomBound(c, x, True))
        source = atom.source
        if atom.kind == "var" and isinstance(source, Var):
            lo, hi = self.env.bounds.get(source, (None, None))
            if lo is not None and not isinstance(lo, Const):
                out.append(AtomBound(one, self._poly(lo), False))
            if hi is not None and not isinstance(hi, Const):
                out.append(AtomBound(one, self._poly(hi), True))
        return out

    def _increment(self, p: Poly) -> Poly:
        return P.plus(p, {P.ONE: 1})

    # -- facts

    def reduced(self, p: Poly) -> Poly:
        """Apply the equations among the facts, left side to right side."""
        if not self._rewrites:
            return p
        # The equations need not be confluent or terminating as rewrites, so the number of steps is bounded.
        for _ in range(50):
            for mono, k, rest in self._rewrites:
                inside, outside = P.extract(p, mono)
                if inside and all(v % k == 0 for v in inside.values()):
                    p = P.plus(outside, P.product({m: v // k for m, v in inside.items()}, rest))
                    break
            else:
                return p
        return p

    def _read_equations(self) -> None:
        for fact in self.env.facts:
            if fact.op == "eq" and fact.args[0].dtype.is_int and fact.args[1].dtype.is_int:
                a, b = fact.args
                self._divides(a, b)
                self._equation(P.plus(self._poly(a), self._poly(b), -1))
                # what was read before the fact was known may be reducible now
                self._polys.clear()

    @property
    def inequalities(self) -> list[Poly]:
        """Polynomials that are >= 0 by the facts but not by their intervals."""
        if self._inequalities is None:
            if not self.ready:
                return []
            self._inequalities = []
            for p in self._equalities:
                self._inequality(p)
                self._inequality(P.scaled(p, -1))
            for fact in self.env.facts:
                if fact.op in ("lt", "le") and fact.args[0].dtype.is_int:
                    a, b = fact.args
                    p = P.plus(self._poly(b), self._poly(a), -1)
                    self._inequality(P.minus_one(p) if fact.op == "lt" else p)
        return self._inequalities

    def _divides(self, a: Expr, b: Expr) -> None:
        """Record that D % c == 0."""
        if b.value == 0 and a.op == "floormod" and algebraic(a):
            dividend, divisor = self._poly(a.args[0]), self._poly(a.args[1])
            if dividend and divisor:
                self._divisible.append((dividend, divisor))

    def _equation(self, p: Poly) -> None:
        """Orient p == 0 as k * mono -> rest; the monomial of highest degree whose coefficient is a unit goes left."""
        # A unit coefficient needs no division. A right side that contains the left one would be rewritten forever.
        units = [m for m, k in p.items() if m and abs(k) == 1 and not any(_contains(o, m) for o in p if o != m)]
        if units:
            mono = min(units, key=lambda m: (-len(m), m))
            rest = {m: -k * p[mono] for m, k in p.items() if m != mono}
            self._rewrites.append((mono, 1, rest))
        self._equalities.append(p)

    def _inequality(self, p: Poly) -> None:
        lo = self.interval(p)[0]
        if (lo is None or lo < 0) and self._inequalities is not None:
            self._inequalities.append(p)


def _contains(m: Mono, d: Mono) -> bool:
    return P.divide_mono(m, d) is not None


def algebraic(n: Expr) -> bool:
    """Return whether the normal form understands an operation: 64-bit integers that do not overflow by contract."""
    return n.op in ALGEBRA and n.dtype is i64 and all(a.dtype is i64 for a in n.args) and not wraps(n)


def wide(dtype: DType) -> bool:
    return dtype_interval(dtype) is UNBOUNDED and dtype.is_int
