"""Injectivity of index maps: mixed-radix sums and their digits, with symbolic factors.

Splits make sums (`i_0 * T + i_1`), fused loops make digits (`f // m`, `f % m`), guards bound both. The proof goes in rounds
and collects known values. A sum whose parts do not overlap determines its parts. All digits of a number determine it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith import poly as P
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.linear import extent_of, linear
from relax_tune.ir.arith.normal import Normalizer
from relax_tune.ir.arith.prove import Proof, prove, prove_equal
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import (
    TRUE,
    Expr,
    ExprLike,
    Var,
    add,
    and_,
    as_int,
    ceildiv,
    conjuncts,
    const,
    eq,
    expr,
    floordiv,
    floormod,
    free_vars,
    le,
    lt,
    mul,
    replaced,
    sub,
)
from relax_tune.ir.core.scalar_ops import DIVISIONS


def injective(indices: Sequence[Expr], ranges: Mapping[Var, ExprLike], env: Env | None = None) -> bool:
    """Prove that different values of the variables give different `indices`, each v running over range(ranges[v])."""
    env, extents = env or Env(), {v: expr(extent) for v, extent in ranges.items()}
    for v, extent in extents.items():
        env = env.with_loop(v, extent)
    return _Reader(extents, env).tells(indices, tuple(extents))


def separates(indices: Sequence[Expr], var: Var, inner: Mapping[Var, Expr], env: Env, guard: Expr = TRUE) -> bool:
    """Prove that different values of `var` give different indices for all values of the `inner` variables.

    Args:
        inner: extents of the inner variables.
        env: bounds of `var`.
        guard: condition at every point that counts (a predicate).
    """
    bound = env.bounds.get(var, (const(0), None))[1]
    extents = dict(inner) if bound is None else {**inner, var: simplify(add(bound, 1))}
    return _Reader({**{var: None}, **extents}, env, guard).tells(indices, (var,))


class _Reader:
    """Values that indices determine: variables, quotients and remainders, and expressions with a guard.

    Attributes:
        extents: extents of the variables to determine, None for an unknown one. All other variables are fixed.
    """

    def __init__(self, extents: Mapping[Var, Expr | None], env: Env, guard: Expr = TRUE) -> None:
        self.env, self.extents = env, extents
        self.plain = Normalizer(Env())
        self.stand_ins: dict[Expr, Var] = {}
        self.stands_for: dict[Var, Expr] = {}
        self.sizes: dict[Var, Expr | None] = dict(extents)
        self.known: set[Var] = set()
        self.guards: dict[Expr, Expr] = {}
        for f in conjuncts(guard):
            # Only a bound that is the same at every point limits the range of the guarded number.
            if f.op == "lt" and self._varies(f.args[0]) and not self._varies(f.args[1]):
                self.guards[f.args[0]] = f.args[1]

    def tells(self, indices: Sequence[Expr], variables: Sequence[Var]) -> bool:
        """Prove that the indices determine the variables."""
        numbers: dict[Expr, None] = dict.fromkeys(indices)
        plain: set[Expr] = set()
        while True:
            before = len(numbers), len(self.known)
            for e in tuple(numbers):
                self._read_sum(self._outermost(e, ()))
                if self.known.issuperset(variables):
                    return True
                if self.guards:
                    self._read_sum(self._outermost(e, self.guards))
            numbers |= dict.fromkeys(self._joined())
            if before == (len(numbers), len(self.known)):
                # simplifying is slow and rarely needed
                again = [e for e in numbers if e not in plain]
                plain.update(again)
                numbers |= dict.fromkeys(simplify(e, self.env) for e in again)
                if before[0] == len(numbers):
                    break
        # a variable with one value is determined
        return all(v in self.known or prove(le(v, 0), self.env) is Proof.YES for v in variables)

    def _varies(self, x: Expr) -> bool:
        return any(v in self.extents for v in free_vars(x))

    # sums

    def _read_sum(self, e: Expr) -> None:
        """Record the variables that the sum `e` of multiples of variables determines."""
        parts = self._linear(e)
        if parts is None:
            return
        left: dict[Var, Expr] = {}
        for v, step in parts[0].items():
            if not self._is_known(v):
                size = self._absolute(step)
                if size is None:
                    return
                left[v] = size
        while left:
            leading = next((v for v in left if self._tops(v, left) or self._ends(v, left)), None)
            if leading is None:
                return
            self.known.add(leading)
            del left[leading]

    def _linear(self, e: Expr) -> tuple[dict[Var, Expr], Expr] | None:
        """Return the coefficients of the variables. A fixed subexpression counts as one variable, to save time."""
        fixed: dict[Expr, Var] = {}

        def plain(x: Expr) -> Expr | None:
            if x.op not in _NUMBERS or any(v in self.sizes for v in free_vars(x)):
                return None
            return fixed.setdefault(x, Var(f"fixed{len(fixed)}"))

        short = replaced(e, plain)
        variables = [v for v in free_vars(e) if v in self.sizes]
        parts = linear(short, variables, self.env)
        if fixed and (parts is None or set(fixed.values()) & set(free_vars(*parts[0].values()))):
            return linear(e, variables, self.env)
        return parts

    def _is_known(self, v: Var) -> bool:
        """Return whether `v` is known. A digit of known variables is."""
        node = self.stands_for.get(v)
        if node is not None and all(x in self.known for x in free_vars(node) if x in self.extents):
            self.known.add(v)
        return v in self.known

    def _absolute(self, step: Expr) -> Expr | None:
        if prove(le(0, step), self.env) is Proof.YES:
            return step
        return simplify(mul(step, -1)) if prove(le(step, 0), self.env) is Proof.YES else None

    def _tops(self, v: Var, steps: Mapping[Var, Expr]) -> bool:
        """Prove that a step of `v` exceeds the largest sum of all others."""
        rest: Expr = const(0)
        for w, step in steps.items():
            size = None if w is v else self._size(w)
            if size is not None:
                rest = add(rest, mul(step, sub(size, 1)))
            elif w is not v:
                return False
        return prove(lt(rest, steps[v]), self.env) is Proof.YES

    def _ends(self, v: Var, steps: Mapping[Var, Expr]) -> bool:
        """Prove that all other steps are multiples of the range of `v`, so that a remainder determines it."""
        size = self._size(v)
        # `_tops` decides about a single variable.
        if size is None or len(steps) == 1:
            return False
        whole = simplify(mul(steps[v], size))
        return prove(le(1, whole), self.env) is Proof.YES and all(
            prove(eq(floormod(step, whole), 0), self.env) is Proof.YES for w, step in steps.items() if w is not v
        )

    # digits and guarded numbers

    def _outermost(self, e: Expr, others: Container[Expr]) -> Expr:
        """Replace the outermost varying quotients, remainders and `others` in `e` by fresh variables."""

        def number(x: Expr) -> Expr | None:
            is_number = x.op and (_is_digit(x) or (x in others and x is not e)) and self._varies(x)
            return self._stand_in(x) if is_number else None

        return replaced(e, number)

    def _stand_in(self, node: Expr) -> Var:
        stand_in = self.stand_ins.get(node)
        if stand_in is None:
            stand_in = self.stand_ins[node] = Var(f"digit{len(self.stand_ins)}")
            self.stands_for[stand_in], self.sizes[stand_in] = node, None
        return stand_in

    def _size(self, v: Var) -> Expr | None:
        """Return the extent of a variable, fresh ones included; None if unknown."""
        if self.sizes[v] is None and v in self.stands_for:
            self.sizes[v] = self._limit(self.stands_for[v])
        return self.sizes[v]

    def _limit(self, x: Expr) -> Expr | None:
        """Return an exclusive upper bound of a non-negative expression, None if unknown."""
        if x in self.guards and prove(le(0, x), self.env) is Proof.YES:
            return self.guards[x]
        if _is_digit(x):
            number, c = x.args
            if self._varies(c) or prove(le(1, c), self.env) is not Proof.YES:
                return None
            limit = c if x.op == "floormod" else self._limit(number)
            return limit if limit is None or x.op == "floormod" else simplify(ceildiv(limit, c), self.env)
        ranges = {v: size for v in free_vars(x) if (size := self.extents.get(v)) is not None}
        try:
            limit = extent_of(x, ranges, self.env)
        except ScheduleError:
            return None
        return limit if prove(and_(le(0, x), lt(x, limit)), self.env) is Proof.YES else None

    def _joined(self) -> list[Expr]:
        """Return the expressions that are known: guarded ones, and numbers with all digits known.

        Digits count from the lowest one, up to a quotient or to the range of the number."""
        known = [node for node, v in self.stand_ins.items() if v in self.known]
        joined: list[Expr] = [node for node in known if node in self.guards]
        places = [p for node in known for p in self._places(node)]
        for u in dict.fromkeys(number for number, _, _ in places):
            left = [(d, m) for number, d, m in places if number is u or self._congruent(number, d, m, u)]
            scale: Expr = const(1)
            while here := next((p for p in left if prove_equal(p[0], scale, self.env) is Proof.YES), None):
                left.remove(here)
                if here[1] is None:
                    joined.append(u)
                    break
                # The next digit must start where this one ends: a gap between digits would leave a part of the number
                # undetermined.
                scale = mul(scale, here[1])
            else:
                limit = self._limit(u)
                if limit is not None and prove(le(limit, scale), self.env) is Proof.YES:
                    joined.append(u)
        return joined

    def _places(self, digit: Expr) -> Iterator[tuple[Expr, Expr, Expr | None]]:
        """Yield the digit as (u, d, m), `u // d % m`, or (u, d, None), `u // d`, for each number u it belongs to."""
        number: Expr = digit
        divisor: Expr = const(1)
        modulus: Expr | None = None
        while _is_digit(number):
            inside, by = number.args
            if number.op == "floordiv":
                divisor = mul(divisor, by)
            elif number is digit:
                modulus = by
            else:
                whole = divisor if modulus is None else mul(divisor, modulus)
                if prove(eq(floormod(by, whole), 0), self.env) is not Proof.YES:
                    return
                modulus = simplify(floordiv(by, divisor), self.env) if modulus is None else modulus
            number = inside
            yield number, divisor, modulus
            if modulus is not None and as_int(divisor) == 1:
                number = self._term(number, modulus)

    def _term(self, number: Expr, modulus: Expr) -> Expr:
        """Return the digit that a sum equals up to multiples of the modulus; the sum itself without one."""
        terms = [number]
        while terms[0].op == "add":
            terms[:1] = terms[0].args
        digits = (x for x in terms if x is not number and _is_digit(x) and self._varies(x))
        return next((x for x in digits if self._congruent(number, const(1), modulus, x)), number)

    def _congruent(self, number: Expr, divisor: Expr, modulus: Expr | None, u: Expr) -> bool:
        """Prove number % modulus == u % modulus: the modulus divides the difference as a polynomial."""
        if modulus is None or as_int(divisor) != 1:
            return False
        n = self.plain
        by = n.poly(modulus)
        return bool(by) and not P.divide(P.plus(n.poly(number), n.poly(u), -1), by)[1]


_NUMBERS = DIVISIONS | {"min", "max", "select"}


def _is_digit(x: Expr) -> bool:
    return x.op in DIVISIONS
