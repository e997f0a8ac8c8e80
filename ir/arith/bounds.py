"""Knowledge about variables (bounds, loops, facts), and constant intervals of expressions.

Tests: `tests/ir/arith/test_case_split.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from relax_tune.ir.arith.proof import Proof
from relax_tune.ir.core import intervals
from relax_tune.ir.core.dtype import ALL, DType, bool_, i32, i64, u64
from relax_tune.ir.core.expr import (
    Const,
    Expr,
    ExprLike,
    Load,
    Op,
    Tunable,
    Var,
    as_int,
    conjuncts,
    const,
    eq,
    expr,
    le,
    lt,
    ne,
    postorder,
    sub,
)
from relax_tune.ir.core.intervals import UNBOUNDED, Interval, meet, within
from relax_tune.ir.core.scalar_ops import SCALAR_OPS

# Entries in each table of an `Env`. `prove.EMPTY` lives as long as the process, so its tables must not grow with
# every question.
_CACHE_LIMIT = 4096


class Solver(Protocol):
    """A decision procedure for questions that our own proofs leave open. Answers depend only on the question and on
    `name`.
    """

    @property
    def name(self) -> str:
        """Package and version."""

    def decide(self, cond: Expr, env: Env, goals: Collection[Proof]) -> Proof:
        """Return the one of `goals` (YES, NO) that is the answer under every allowed assignment; UNKNOWN without a
        proof.
        """


class Env:
    """Immutable knowledge about integer variables.

    Attributes:
        bounds: variable to (lo, hi), both inclusive and possibly symbolic; hi is None for unbounded. A variable without an entry is >=
            0. A tunable also lies between the ends of its domain.
        facts: conditions that hold.
        solver: tried after all other proofs.

    Answers depend only on the question; tables of bounded size cache them.
    """

    __slots__ = ("_limits", "_ranges", "bounds", "facts", "proofs", "simplified", "solver")

    def __init__(
        self,
        bounds: Mapping[Var, tuple[ExprLike, ExprLike | None]] | None = None,
        facts: tuple[Expr, ...] = (),
        solver: Solver | None = None,
    ) -> None:
        self.solver = solver
        self.bounds: dict[Var, tuple[Expr, Expr | None]] = {
            v: (expr(lo), None if hi is None else expr(hi)) for v, (lo, hi) in (bounds or {}).items()
        }
        self.facts = tuple(dict.fromkeys(_plain(p) for f in facts for p in conjuncts(f)))
        self.simplified: dict[Expr, Expr] = {}
        self.proofs: dict[Expr, object] = {}
        self._ranges: dict[Var, Interval] = {}
        self._limits: dict[Var, Interval] = {}
        # two passes, so that a later fact sharpens an earlier one
        for f in self.facts + (self.facts if len(self.facts) > 1 else ()):
            _learn(f, self)

    def __repr__(self) -> str:
        known = [f"{v.name} in [{lo}, {'' if hi is None else hi}]" for v, (lo, hi) in self.bounds.items()]
        return f"Env({', '.join(known + [repr(f) for f in self.facts])})"

    def with_bound(self, var: Var, lo: ExprLike, hi: ExprLike | None) -> Env:
        """Add lo <= var <= hi (None: no upper bound) in place of an earlier bound of the variable."""
        return Env({**self.bounds, var: (lo, hi)}, self.facts, self.solver)

    def with_loop(self, var: Var, extent: ExprLike, runs: bool = True) -> Env:
        """Enter `for var in range(extent)`: var is in [0, extent - 1], and the loop runs at least once.

        Args:
            runs: False if the question also concerns the initial value of a reduction, which is stored even if the loop does not run.
        """
        size = _length(expr(extent))
        out = Env.__new__(Env)
        out.solver = self.solver
        out.bounds = {**self.bounds, var: (const(0), sub(size, 1))}
        once = le(1, size)
        known = not runs or isinstance(once, Const) or once in self.facts
        out.facts = self.facts if known else (*self.facts, once)
        out.simplified, out.proofs, out._ranges = {}, {}, {}
        out._limits = dict(self._limits)  # copied, not derived again: entering loops is frequent
        if not known:
            _learn(once, out)
        return out

    def with_fact(self, cond: Expr) -> Env:
        """Add a conjunction of conditions that hold (`n <= 512`, `k == m`, `N % T == 0`)."""
        return Env(self.bounds, (*self.facts, cond), self.solver)

    def range_of(self, var: Var) -> Interval:
        """Return the constant interval of a variable."""
        limits = self._ranges.get(var)
        if limits is None:
            self._ranges[var] = (0, None)  # provisional: ends cycles of bounds
            limits = self._limits.get(var, UNBOUNDED)
            if isinstance(var, Tunable):
                limits = meet(limits, (var.domain[0], var.domain[-1]))
            if var in self.bounds:
                lo, hi = self.bounds[var]
                # A declared bound may mention the variable itself: until it is read, nothing is assumed, not even >= 0.
                self._ranges[var] = UNBOUNDED
                limits = meet(limits, (interval(lo, self)[0], None if hi is None else interval(hi, self)[1]))
            else:
                limits = meet(limits, (0, None))
            self._ranges[var] = limits
        return limits

    def limit(self, var: Var, limits: Interval) -> None:
        """Record a constant interval that a fact implies. Only the constructor calls this."""
        self._limits[var] = meet(self._limits.get(var, UNBOUNDED), limits)
        self._ranges.clear()


def _length(extent: Expr) -> Expr:
    """Return the extent of a loop that runs at least once: n for `max(n, 0)`."""
    if extent.op == "max":
        for n, other in (extent.args, extent.args[::-1]):
            if isinstance(other, Const) and other.value <= 0:
                return _length(n)
    return extent


def opposite(cond: Expr) -> Expr | None:
    """Return the negation of a comparison of integers as a comparison; None for other conditions."""
    if cond.op not in _OPPOSITE or not all(a.dtype.is_int for a in cond.args):
        return None
    return _OPPOSITE[cond.op](*cond.args)


_OPPOSITE: Mapping[str, Callable[[Expr, Expr], Expr]] = {
    "lt": lambda a, b: le(b, a),
    "le": lambda a, b: lt(b, a),
    "eq": ne,
    "ne": eq,
}


def _plain(fact: Expr) -> Expr:
    """Write a negated comparison as a comparison."""
    other = opposite(fact.args[0]) if fact.op == "not" else None
    return fact if other is None else other


def remember(table: dict[Expr, object] | dict[Expr, Expr], key: Expr, value: object) -> None:
    """Store an answer; a full table starts over."""
    if len(table) >= _CACHE_LIMIT:
        table.clear()
    table[key] = value  # type: ignore[assignment]


_RANGES: Mapping[DType, Interval] = {d: d.limits for d in ALL if d.is_int and d not in (i32, i64)} | {bool_: (0, 1)}


def dtype_interval(dtype: DType) -> Interval:
    """Return the range of a type of elements. int32 and int64 are unbounded: index arithmetic does not overflow."""
    return _RANGES.get(dtype, UNBOUNDED)


# How near the ends of int64 a value may come: at its least or greatest; at most 32 bits of data, or such data times a size.
_LEAST, _GREATEST, _DATA, _PRODUCT = 1, 2, 4, 8
_ENDS = _LEAST | _GREATEST
_WRAPPING = frozenset({"add", "sub", "mul", "abs", "floordiv"})
_INT32 = (-(1 << 31), (1 << 31) - 1)


def wraps(e: Expr) -> bool:
    """Tell whether a sum, product, `abs` or quotient by -1 may leave its type; the algebra does not look into such.

    By contract, variables, sizes and int64 arithmetic on them never do. Elements of tensors may."""
    if e.op not in _WRAPPING or (e.op == "floordiv" and as_int(e.args[1]) != -1):
        return False
    if e.dtype is not i64:
        return e.dtype.is_int
    if e.op in ("abs", "floordiv"):
        return bool(reach(e.args[0]) & _LEAST)
    return _overflows(e.op, reach(e.args[0]), reach(e.args[1]))


def _overflows(op: str, a: int, b: int) -> bool:
    return bool((a | b) & _ENDS) or (op == "mul" and (bool(a and b) or bool((a | b) & _PRODUCT)))


def reach(e: Expr) -> int:
    """Return how near the ends of int64 an integer expression may be."""
    # The answer is stored in the node and not in a table: it depends on no environment, and an interned node is
    # shared by all expressions that contain it.
    if not isinstance(e, Op):
        return _reach_of_leaf(e)
    if e.reach < 0:
        for n in postorder((e,)):
            if isinstance(n, Op) and n.reach < 0:
                n.reach = _reach_of(n)
    return e.reach


def _reach_of_leaf(n: Expr) -> int:
    if isinstance(n, Const):
        # Sizes below 2**31 count as 0, as variables do: by contract, index arithmetic on them stays far from the ends
        # of int64.
        size = abs(n.value)
        return 0 if size < 1 << 31 else _DATA if size < 1 << 62 else _ENDS
    return 0 if not isinstance(n, Load) else _ENDS if n.dtype is i64 else _DATA


def _reach_of(n: Op) -> int:
    if n.dtype is not i64:
        return _DATA
    args = [reach(a) for a in n.args]
    if n.op == "cast":
        return _ENDS if n.args[0].dtype.is_float or n.args[0].dtype is u64 else args[0]
    # |a % b| < |b|, however large a is.
    if n.op == "floormod":
        return args[1]
    if n.op in ("shift_left", "integer_power", "bitcast"):
        return _ENDS
    if n.op in ("min", "max"):
        # A minimum is at the greatest value only if both operands are, at the least value if either is.
        both = _GREATEST if n.op == "min" else _LEAST
        return (args[0] | args[1]) & ~both | (args[0] & args[1] & both)
    if n.op == "select":
        return args[1] | args[2]
    # Every other operation is assumed to come as near to the ends as any of its operands.
    whole = 0
    for r in args:
        whole |= r
    if n.op not in ("add", "sub", "mul"):
        return whole
    return _ENDS if _overflows(n.op, args[0], args[1]) else whole | _PRODUCT if n.op == "mul" and whole else whole


def interval(e: ExprLike, env: Env) -> Interval:
    """Return a constant interval that holds all values of the integer expression `e`."""
    e = expr(e)
    if not e.children:
        return _interval_of(e, {}, env)
    done: dict[Expr, Interval] = {}
    for n in postorder((e,)):
        done[n] = _interval_of(n, done, env)
    return done[e]


def _interval_of(n: Expr, done: Mapping[Expr, Interval], env: Env) -> Interval:
    if isinstance(n, Const):
        return (int(n.value), int(n.value)) if n.dtype.is_int else UNBOUNDED
    if not n.dtype.is_int:
        return UNBOUNDED
    if isinstance(n, Var):
        return env.range_of(n)
    if isinstance(n, Load):
        return dtype_interval(n.dtype)
    of_operation = SCALAR_OPS[n.op].interval
    values = UNBOUNDED if of_operation is None else of_operation(*(done[a] for a in n.args))
    if n.op == "cast" and n.args[0].dtype.is_int:
        values = done[n.args[0]]
        if not n.dtype.holds(n.args[0].dtype) and not within(values, n.dtype.limits):
            values = UNBOUNDED
    # Overflow wraps in kernels, but the interval arithmetic counts without bounds: its result holds only without a wrap.
    if wraps(n) and (n.dtype is i64 or not within(values, _INT32)):
        values = UNBOUNDED
    room = dtype_interval(n.dtype)
    if room is not UNBOUNDED and not within(values, room):  # a narrow type wraps around
        return room
    return values


def _learn(fact: Expr, env: Env) -> None:
    """Read constant limits of variables off a comparison that holds."""
    if fact.op not in ("lt", "le", "eq"):
        return
    a, b = fact.args
    if not (a.dtype.is_int and b.dtype.is_int):
        return
    # An upper limit of b bounds a, since a <= b; a lower limit of b says something about a only if both are equal.
    slack = 1 if fact.op == "lt" else 0
    ia, ib = interval(a, env), interval(b, env)
    _narrow(a, (ib[0] if fact.op == "eq" else None, None if ib[1] is None else ib[1] - slack), env)
    _narrow(b, (None if ia[0] is None else ia[0] + slack, ia[1] if fact.op == "eq" else None), env)


def _narrow(e: Expr, known: Interval, env: Env) -> None:
    """Narrow the variables of `e`, given that `e` lies in `known`."""
    while known != UNBOUNDED:
        lo, hi = known
        if isinstance(e, Var):
            env.limit(e, known)
            return
        if len(e.args) != 2 or e.dtype is not i64 or wraps(e):
            return
        a, b = e.args
        ia, ib = interval(a, env), interval(b, env)
        k = as_int(b)
        if e.op == "add":
            _narrow(b, intervals.sub(known, ia), env)
            e, known = a, intervals.sub(known, ib)
        elif e.op == "sub":
            _narrow(b, intervals.sub(ia, known), env)
            e, known = a, intervals.add(known, ib)
        elif e.op == "floordiv" and k is not None and k > 0:
            # a // k in [lo, hi] holds exactly for a in [lo * k, hi * k + k - 1]
            e, known = a, (None if lo is None else lo * k, None if hi is None else hi * k + k - 1)
        elif e.op == "mul" and ia[0] is not None and ib[0] is not None and min(ia[0], ib[0]) >= 0:
            # a * b in [lo, hi] with both >= 0: lo >= 1 makes both >= 1, and each is at most hi / (the least of the other)
            _narrow(b, _factor(known, ia), env)
            e, known = a, _factor(known, ib)
        elif (e.op == "min" and lo is not None) or (e.op == "max" and hi is not None):
            # min(a, b) >= lo bounds both operands; min(a, b) <= hi bounds only one of them, which is unknown
            known = (lo, None) if e.op == "min" else (None, hi)
            _narrow(b, known, env)
            e = a
        else:
            return


def _factor(product: Interval, other: Interval) -> Interval:
    """Return the interval of a, given a, b >= 0, a * b in `product` and b in `other`."""
    lo, hi = product
    least = None if lo is None or lo < 1 else 1 if other[1] is None else -(-lo // other[1]) if other[1] else None
    most = hi // other[0] if hi is not None and other[0] else None
    return least, most
