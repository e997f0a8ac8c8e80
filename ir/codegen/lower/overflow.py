"""Index polynomials whose terms may leave 64 bits, although their value does not.

Values of indices are bounded (`ir/check/no_overflow.py`), but a substitution may expand one to a polynomial whose terms cancel, or are
multiplied by 0 last. Printers compute such polynomials in unsigned integers, whose sum modulo 2^64 is right.

Tests: `tests/ir/codegen/lower/test_overflow.py`.
"""

from __future__ import annotations

from collections.abc import Collection

from relax_tune.ir.codegen.lower.affine import Algebra, Poly, as_constant
from relax_tune.ir.core.expr import Expr, Op, Var

SIZE = (1 << 31) - 1
"""The largest size of a symbol without a declared bound; calls refuse larger ones."""
LIMIT = 1 << 62
"""The largest magnitude of an index."""


class Magnitudes:
    """Upper bounds of the magnitudes of integers, at the largest sizes of all symbols; None for values from memory.

    Args:
        signed: Symbols that may be negative and larger than a size.
    """

    def __init__(self, algebra: Algebra, signed: Collection[Expr] = ()) -> None:
        self._algebra, self._signed = algebra, signed
        self._variables: dict[Var, int | None] = {}
        self._atoms: dict[Expr, int | None] = {}

    def variable(self, v: Var, extent: Poly) -> None:
        """Record a loop's variable, which is less than `extent`; its value is an index."""
        bound = self._of(extent)
        self._variables[v] = None if bound is None else min(bound, LIMIT)

    def may_overflow(self, p: Poly) -> bool:
        """Return whether an intermediate result of a polynomial may leave 64 bits, given that its value does not.

        Without such negative terms, a partial sum is at most the sum plus `LIMIT`. A product is at most the sum, unless its last factor
        is 0, so only its part before the last factor counts.
        """
        unknown = [m for m, c in p.items() if len(m) == 1 and abs(c) == 1 and self._atom(m[0]) is None]
        if unknown:  # a value from memory is bounded if the rest is, since the sum is
            rest = self._of({m: c for m, c in p.items() if m != unknown[0]})
            return rest is None or rest > LIMIT
        negative = 0
        for m, c in p.items():
            product = 1
            for n, atom in enumerate(m):
                bound = self._atom(atom)
                if bound is None:
                    return True
                product *= bound
                if n < len(m) - 1 and product > LIMIT:
                    return True
            if c < 0 or any(self._may_be_negative(a) for a in m):
                negative += product * abs(c)
        # The value is at most LIMIT, so the positive terms are at most LIMIT more than the negative ones: small
        # negative terms leave no partial sum that overflows.
        return negative > LIMIT

    def _of(self, p: Poly) -> int | None:
        total = 0
        for m, c in p.items():
            product = abs(c)
            for atom in m:
                bound = self._atom(atom)
                if bound is None:
                    return None
                product *= bound
            total += product
        return total

    def _may_be_negative(self, a: Expr) -> bool:
        low = self._algebra.atom_interval(a)[0]
        return a in self._signed or ((low is None or low < 0) and not (isinstance(a, Var) and low is None))

    def _atom(self, a: Expr) -> int | None:
        if isinstance(a, Var):
            low, high = self._algebra.atom_interval(a)
            if low is not None and high is not None:
                return max(abs(low), abs(high))
            return LIMIT if a in self._signed else self._variables.get(a, SIZE)
        if a not in self._atoms or not self._algebra.free(a).isdisjoint(self._algebra.env):
            bound = self._operation(a)
            self._atoms[a] = None if bound is None else min(bound, LIMIT)
        return self._atoms[a]

    def _operation(self, a: Expr) -> int | None:
        low, high = self._algebra.atom_interval(a)
        if low is not None and high is not None:
            return max(abs(low), abs(high))
        if not isinstance(a, Op) or a.op not in ("floordiv", "floormod", "min", "max", "select", "abs"):
            return None
        parts = [self._of(self._algebra.poly(x)) for x in (a.args[1:] if a.op == "select" else a.args)]
        known = [x for x in parts if x is not None]
        if len(known) < len(parts):
            return self._between(a)
        if a.op == "floordiv":
            return known[0] // max(as_constant(self._algebra.poly(a.args[1])) or 1, 1) + 1
        return known[1] if a.op == "floormod" else max(known)

    def _between(self, a: Op) -> int | None:
        """Return the bound of `max(min(x, b), c)` or `min(max(x, b), c)` for a value x from memory."""
        if a.op not in ("min", "max"):
            return None
        for inner, outer in (a.args, a.args[::-1]):
            if isinstance(inner, Op) and inner.op == {"max": "min", "min": "max"}[a.op]:
                parts = [self._of(self._algebra.poly(x)) for x in (outer, *inner.args)]
                known = [x for x in parts if x is not None]
                if parts[0] is not None and len(known) > 1:
                    return max(known)
        return None
