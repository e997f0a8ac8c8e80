"""A few assignments that the env allows, to refute a claim before a proof is searched.

Tests: `tests/ir/arith/test_strength.py`.
"""

from __future__ import annotations

from operator import eq, le, lt, ne

from relax_tune.ir.arith.normal import Normalizer
from relax_tune.ir.arith.poly import Poly
from relax_tune.ir.core.expr import Const, Expr, Load, Tunable, Var

# Each sample takes a variable at the first or last value of its range, or at one between that differs by variable.
# Unbounded ranges end at lo + _SPAN; a multiple of 64 is likely to satisfy divisibility facts.
_COUNT = 6
_SPAN = 64
_STRIDE = (3, 7, 5, 2)
# Further assignments take small values in various ratios, which refute most false claims.
_NEAR = (2, 3, 5, 9)
_COMPARE = {"lt": lt, "le": le, "eq": eq, "ne": ne}


class _Outside(Exception):
    """An assignment that the env does not allow, or that gives an atom no value."""


class Samples:
    """Assignments as tables from atom number to value, extended as atoms appear."""

    def __init__(self, ctx: Normalizer, count: int = _COUNT) -> None:
        self.ctx = ctx
        # Atoms whose value is being computed. Bounds may refer to each other (i < n and n < i + 4), which would
        # recurse for ever.
        self.active: set[int] = set()
        self.points: list[tuple[int, dict[int, int]]] = []
        for s in range(count):
            point: dict[int, int] = {}
            if self._allowed(s, point):
                self.points.append((s, point))

    def _allowed(self, s: int, point: dict[int, int]) -> bool:
        try:
            return all(self._value(f, s, point) >= 0 for f in self.ctx.inequalities)
        except _Outside:
            return False

    def truths(self, cond: Expr, count: int) -> set[bool]:
        """Return the values of a condition at up to `count` assignments that satisfy every fact. Stops once both occur."""
        truths: set[bool] = set()
        for s in range(count):
            point: dict[int, int] = {}
            try:
                if self._allowed(s, point) and all(self._holds(f, s, point) for f in self.ctx.env.facts):
                    truths.add(self._holds(cond, s, point))
            except _Outside:
                continue
            if len(truths) == 2:
                break
        return truths

    def refute(self, p: Poly) -> bool:
        """Return whether p < 0 at one of the assignments."""
        # Reading a condition of a select may ask for other proofs, which call this function meanwhile.
        for sample in tuple(self.points):
            try:
                if self._value(p, *sample) < 0:
                    return True
            except _Outside:
                self.points = [other for other in self.points if other is not sample]
        return False

    def _value(self, p: Poly, s: int, point: dict[int, int]) -> int:
        total = 0
        for m, k in p.items():
            for a in m:
                value = point.get(a)
                if value is None:
                    if a in self.active:  # bounds that depend on each other
                        raise _Outside
                    self.active.add(a)
                    try:
                        value = point[a] = self._atom(a, s, point)
                    finally:
                        self.active.discard(a)
                k *= value
            total += k
        return total

    def _holds(self, cond: Expr, s: int, point: dict[int, int]) -> bool:
        if isinstance(cond, Const):
            return bool(cond.value)
        if cond.op in ("and", "or", "not"):
            values = [self._holds(a, s, point) for a in cond.args]
            return all(values) if cond.op == "and" else any(values) if cond.op == "or" else not values[0]
        if cond.op not in _COMPARE or not all(a.dtype.is_int for a in cond.args):
            raise _Outside
        a, b = (self._value(self.ctx.poly(x), s, point) for x in cond.args)
        return bool(_COMPARE[cond.op](a, b))

    def _atom(self, number: int, s: int, point: dict[int, int]) -> int:
        atom = self.ctx.atoms[number]
        if atom.kind == "var":
            return self._variable(number, s, point)
        if atom.kind in ("div", "mod"):
            x, c = (self._value(a, s, point) for a in atom.args)
            if c == 0:
                raise _Outside
            return x // c if atom.kind == "div" else x % c
        if atom.kind in ("min", "max"):
            values = [self._value(a, s, point) for a in atom.args]
            return min(values) if atom.kind == "min" else max(values)
        if atom.kind == "select":
            assert atom.source is not None
            return self._value(atom.args[0 if self._holds(atom.source.args[0], s, point) else 1], s, point)
        # Data may have any value of its type, so a sample may choose one. Other opaque atoms (bit operations, casts
        # of floats) follow from their operands, and a free choice could contradict these.
        if isinstance(atom.source, Load):
            lo, hi = self.ctx.atom_interval(number)
            return self._pick(number, s, -_SPAN if lo is None else lo, hi)
        raise _Outside

    def _variable(self, number: int, s: int, point: dict[int, int]) -> int:
        var = self.ctx.atoms[number].source
        assert isinstance(var, Var)
        lo, hi = self.ctx.env.range_of(var)
        lo = -_SPAN if lo is None else lo
        for bound in self.ctx.bounds(number):
            limit = self._value(bound.limit, s, point)
            lo, hi = (lo, limit if hi is None else min(hi, limit)) if bound.upper else (max(lo, limit), hi)
        if hi is not None and hi < lo:
            raise _Outside
        if isinstance(var, Tunable) and s >= _COUNT:
            fitting = [v for v in var.domain if lo <= v and (hi is None or v <= hi)]
            return fitting[(s * (number + 1) + s // len(_NEAR)) % len(fitting)] if fitting else var.domain[0]
        value = self._pick(number, s, lo, hi)
        if isinstance(var, Tunable):
            # A tunable has only the values of its domain; a sample between two of them would refute claims that hold.
            return max(v for v in var.domain if v <= max(value, var.domain[0]))
        return value

    def _pick(self, number: int, s: int, lo: int, hi: int | None) -> int:
        last = lo + _SPAN if hi is None else hi
        if s < 2:
            return last if s else lo
        if s < _COUNT:
            # A fixed spread instead of a generator: answers must depend on the question only.
            return lo + (number * _STRIDE[s - 2] + s) * 11 % (last - lo + 1)
        if (s + number) % 3 == 0:  # others near their ends
            return last
        near = min(_NEAR[s % len(_NEAR)], last - lo + 1)
        return lo + (s // len(_NEAR) + 1) * (number + 1) * (number + 2) // 2 % near
