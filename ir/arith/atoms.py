"""Atoms of the normal form: their numbers and their constant intervals.

Tests: `tests/ir/arith/test_case_split.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from typing import Literal

from relax_tune.ir.arith import poly as P
from relax_tune.ir.arith.bounds import Env, interval
from relax_tune.ir.arith.normal_form import NormalForm
from relax_tune.ir.arith.poly import Mono, Poly
from relax_tune.ir.core import intervals
from relax_tune.ir.core.expr import Expr, Var
from relax_tune.ir.core.intervals import UNBOUNDED, Interval

Kind = Literal["var", "div", "mod", "min", "max", "select", "other"]


@dataclass(slots=True)
class Atom:
    """An indivisible part of a polynomial.

    Attributes:
        kind: the operation; `mod` is for printing only, `other` has no algebra (loads, casts).
        args: polynomials of the operands.
        source: expression that it was first read from, if any.
        range: constant interval, computed on demand.
    """

    kind: Kind
    args: tuple[Poly, ...]
    source: Expr | None
    range: Interval | None = None


@dataclass(slots=True)
class AtomBound:
    """A symbolic bound of an atom a: scale * a <= limit (upper) or scale * a >= limit (lower), with scale > 0."""

    scale: Poly
    limit: Poly
    upper: bool


@dataclass(slots=True, eq=False)
class Atoms(NormalForm[int]):
    """The atoms of one question, numbered in order of first appearance. Equal operands give one atom."""

    env: Env
    atoms: list[Atom] = field(default_factory=list)
    _index: dict[object, int] = field(default_factory=dict)
    _ranges: dict[Mono, Interval] = field(default_factory=dict)

    def interval(self, p: Poly) -> Interval:
        """Return a constant interval of a polynomial. The interval of each monomial is computed once."""
        lo: int | None = 0
        hi: int | None = 0
        ranges = self._ranges
        for mono, k in p.items():
            ends = ranges.get(mono)
            if ends is None:
                ends = ranges[mono] = P.bounds({mono: 1}, self.atom_interval)
            least, most = ends if k > 0 else (ends[1], ends[0])
            lo = None if lo is None or least is None else lo + k * least
            hi = None if hi is None or most is None else hi + k * most
            if lo is None and hi is None:
                return UNBOUNDED
        return lo, hi

    def atom(self, kind: Kind, args: tuple[Poly, ...], source: Expr | None, identity: object = None) -> int:
        """Return the number of this atom; a new one is numbered next.

        Args:
            identity: key in place of kind and operands.
        """
        key = (kind, *(P.key(a) for a in args)) if identity is None else identity
        number = self._index.get(key)
        if number is None:
            number = self._index[key] = len(self.atoms)
            self.atoms.append(Atom(kind, args, source))
        return number

    def number_of(self, v: Var) -> int | None:
        """Return the number of a variable, None for an unknown one."""
        return self._index.get(v)

    def atom_interval(self, number: int) -> Interval:
        """Return a constant interval of an atom."""
        atom = self.atoms[number]
        if atom.range is None:
            atom.range = self._atom_interval(atom)
        return atom.range

    def _atom_interval(self, atom: Atom) -> Interval:
        if atom.kind == "var":
            assert isinstance(atom.source, Var)
            return self.env.range_of(atom.source)
        if atom.kind == "other":
            assert atom.source is not None
            return interval(atom.source, self.env)
        return reduce(_INTERVALS[atom.kind], (self.interval(a) for a in atom.args))


_INTERVALS = {
    "div": intervals.floordiv,
    "mod": intervals.floormod,
    "min": intervals.minimum,
    "max": intervals.maximum,
    "select": intervals.hull,
}
