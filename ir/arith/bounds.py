"""What is known of variables: bounds, loops, facts; and constant intervals of expressions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Protocol

from relax_tune.ir.core.dtype import DType
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

if TYPE_CHECKING:
    from relax_tune.ir.arith.logic import Proof

# A closed interval of integers; None is unbounded.
Interval = tuple[int | None, int | None]
UNBOUNDED: Interval = (None, None)

_CACHE_LIMIT = 4096


class Solver(Protocol):
    """Decides what our own proofs leave open. Answers depend on the question and on `name` only."""

    @property
    def name(self) -> str:
        """Package and version."""

    def decide(self, cond: Expr, env: Env, goals: Collection[Proof]) -> Proof:
        """Which of `goals` (YES, NO) is the answer for every assignment the env allows; UNKNOWN when neither is proved."""


class Env:
    """Immutable knowledge about integer variables.

    `bounds` maps a variable to (lo, hi), both inclusive and possibly symbolic, hi None for unbounded. A variable that is not
    mentioned is >= 0; a tunable lies between the least and the greatest value of its domain. `facts` are conditions that
    hold. `solver` is asked what nothing else decides. Answers are remembered in the env, in tables of bounded size; they depend
    on the question only.
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
        # twice, so that a later fact sharpens what an earlier one says
        for f in self.facts + (self.facts if len(self.facts) > 1 else ()):
            _learn(f, self)

    def __repr__(self) -> str:
        known = [f"{v.name} in [{lo}, {'' if hi is None else hi}]" for v, (lo, hi) in self.bounds.items()]
        return f"Env({', '.join(known + [repr(f) for f in self.facts])})"

    def with_bound(self, var: Var, lo: ExprLike, hi: ExprLike | None) -> Env:
        """Also lo <= var <= hi (inclusive; None: no upper bound). Replaces an earlier bound of the same variable."""
        return Env({**self.bounds, var: (lo, hi)}, self.facts, self.solver)

    def with_loop(self, var: Var, extent: ExprLike) -> Env:
        """Inside `for var in range(extent)`: var in [0, extent - 1], and the loop runs at least once."""
        size = expr(extent)
        out = Env.__new__(Env)
        out.solver = self.solver
        out.bounds = {**self.bounds, var: (const(0), sub(size, 1))}
        runs = le(1, size)
        known = isinstance(runs, Const) or runs in self.facts
        out.facts = self.facts if known else (*self.facts, runs)
        out.simplified, out.proofs, out._ranges = {}, {}, {}
        out._limits = dict(self._limits)  # learnt once: entering loops is common
        if not known:
            _learn(runs, out)
        return out

    def with_fact(self, cond: Expr) -> Env:
        """Also `cond`, a conjunction of conditions that hold (`n <= 512`, `k == m`, `N % T == 0`)."""
        return Env(self.bounds, (*self.facts, cond), self.solver)

    def range_of(self, var: Var) -> Interval:
        """The constant interval of a variable."""
        found = self._ranges.get(var)
        if found is None:
            self._ranges[var] = (0, None)  # what is known while its own bounds are being read
            found = self._limits.get(var, UNBOUNDED)
            if isinstance(var, Tunable):
                found = meet(found, (var.domain[0], var.domain[-1]))
            if var in self.bounds:
                lo, hi = self.bounds[var]
                self._ranges[var] = UNBOUNDED
                found = meet(found, (interval(lo, self)[0], None if hi is None else interval(hi, self)[1]))
            else:
                found = meet(found, (0, None))
            self._ranges[var] = found
        return found

    def limit(self, var: Var, found: Interval) -> None:
        """Note a constant interval that a fact implies; for the constructor only."""
        self._limits[var] = meet(self._limits.get(var, UNBOUNDED), found)
        self._ranges.clear()


def opposite(cond: Expr) -> Expr | None:
    """The comparison that holds where a comparison of integers does not; None for other conditions."""
    if not isinstance(cond, Op) or cond.op not in _OPPOSITE or not all(a.dtype.is_int for a in cond.args):
        return None
    return _OPPOSITE[cond.op](*cond.args)


_OPPOSITE: Mapping[str, Callable[[Expr, Expr], Expr]] = {
    "lt": lambda a, b: le(b, a),
    "le": lambda a, b: lt(b, a),
    "eq": ne,
    "ne": eq,
}


def _plain(fact: Expr) -> Expr:
    """A fact without the `not` in front of a comparison."""
    other = opposite(fact.args[0]) if isinstance(fact, Op) and fact.op == "not" else None
    return fact if other is None else other


def remember(table: dict[Expr, object] | dict[Expr, Expr], key: Expr, value: object) -> None:
    """Store an answer; a full table starts over."""
    if len(table) >= _CACHE_LIMIT:
        table.clear()
    table[key] = value  # type: ignore[assignment]


def meet(a: Interval, b: Interval) -> Interval:
    """Both hold."""
    lo = b[0] if a[0] is None else a[0] if b[0] is None else max(a[0], b[0])
    hi = b[1] if a[1] is None else a[1] if b[1] is None else min(a[1], b[1])
    return lo, hi


def hull(a: Interval, b: Interval) -> Interval:
    """One of them holds."""
    return (
        None if a[0] is None or b[0] is None else min(a[0], b[0]),
        None if a[1] is None or b[1] is None else max(a[1], b[1]),
    )


def add_intervals(a: Interval, b: Interval) -> Interval:
    return (
        None if a[0] is None or b[0] is None else a[0] + b[0],
        None if a[1] is None or b[1] is None else a[1] + b[1],
    )


def scale_interval(a: Interval, k: int) -> Interval:
    lo, hi = None if a[0] is None else a[0] * k, None if a[1] is None else a[1] * k
    return (lo, hi) if k >= 0 else (hi, lo)


def mul_intervals(a: Interval, b: Interval) -> Interval:
    if a[0] is not None and b[0] is not None and a[0] >= 0 and b[0] >= 0:
        return a[0] * b[0], None if a[1] is None or b[1] is None else a[1] * b[1]
    if a == (0, 0) or b == (0, 0):
        return 0, 0
    if _empty(a) or _empty(b):  # facts that contradict each other: anything is true
        return UNBOUNDED
    if None not in a and None not in b:
        ends = [x * y for x in a for y in b if x is not None and y is not None]
        return min(ends), max(ends)
    if a[1] is not None and a[1] <= 0:
        return scale_interval(mul_intervals(scale_interval(a, -1), b), -1)
    if b[1] is not None and b[1] <= 0:
        return scale_interval(mul_intervals(a, scale_interval(b, -1)), -1)
    for x, y in ((a, b), (b, a)):  # one is >= 0, the other of mixed sign: its finite ends scale with the largest factor
        if x[0] is not None and x[0] >= 0 and x[1] is not None:
            return None if y[0] is None else y[0] * x[1], None if y[1] is None else y[1] * x[1]
    return UNBOUNDED


def _empty(a: Interval) -> bool:
    return a[0] is not None and a[1] is not None and a[0] > a[1]


def div_intervals(a: Interval, b: Interval) -> Interval:
    """Floor division; a divisor that is >= 0 is positive, because divisors are never zero."""
    if b[0] is None or b[0] < 0:
        return UNBOUNDED
    least, most = max(b[0], 1), None if b[1] is None else max(b[1], 1)
    lo = hi = None
    if a[0] is not None:
        lo = a[0] // least if a[0] < 0 else 0 if most is None else a[0] // most
    if a[1] is not None:
        hi = a[1] // least if a[1] >= 0 else -1 if most is None else a[1] // most
    return lo, hi


def mod_intervals(a: Interval, b: Interval) -> Interval:
    if b[0] is None or b[0] < 0:
        return UNBOUNDED
    top = None if b[1] is None else b[1] - 1
    if a[0] is not None and a[0] >= 0:
        if a[1] is not None and a[1] < max(b[0], 1):
            return a
        top = top if a[1] is None else a[1] if top is None else min(top, a[1])
    return 0, top


def dtype_interval(dtype: DType) -> Interval:
    """Every value of a narrow integer type; wide integers are unbounded (index arithmetic does not overflow)."""
    return {"u8": (0, 255), "i8": (-128, 127), "bool": (0, 1)}.get(dtype.short, UNBOUNDED)


def interval(e: ExprLike, env: Env) -> Interval:
    """A constant interval that holds all values of the integer expression `e`."""
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
    assert isinstance(n, Op)
    found = _INTERVALS[n.op](*(done[a] for a in n.args)) if n.op in _INTERVALS else UNBOUNDED
    if n.op == "cast" and n.args[0].dtype.is_int:
        found = done[n.args[0]]
    room = dtype_interval(n.dtype)
    if room is not UNBOUNDED and not _within(found, room):  # a narrow type wraps around
        return room
    return found


def _within(a: Interval, b: Interval) -> bool:
    return meet(a, b) == a and None not in a


_INTERVALS: Mapping[str, Callable[..., Interval]] = {
    "add": add_intervals,
    "sub": lambda a, b: add_intervals(a, scale_interval(b, -1)),
    "mul": mul_intervals,
    "floordiv": div_intervals,
    "floormod": mod_intervals,
    "min": lambda a, b: (
        None if a[0] is None or b[0] is None else min(a[0], b[0]),
        b[1] if a[1] is None else a[1] if b[1] is None else min(a[1], b[1]),
    ),
    "max": lambda a, b: (
        b[0] if a[0] is None else a[0] if b[0] is None else max(a[0], b[0]),
        None if a[1] is None or b[1] is None else max(a[1], b[1]),
    ),
    "select": lambda c, a, b: hull(a, b),
    "abs": lambda a: meet((0, None), hull(a, scale_interval(a, -1))),
}


def _learn(fact: Expr, env: Env) -> None:
    """Read constant limits of variables off a comparison that holds."""
    if not isinstance(fact, Op) or fact.op not in ("lt", "le", "eq"):
        return
    a, b = fact.args
    if not (a.dtype.is_int and b.dtype.is_int):
        return
    slack = 1 if fact.op == "lt" else 0
    ia, ib = interval(a, env), interval(b, env)
    _narrow(a, (ib[0] if fact.op == "eq" else None, None if ib[1] is None else ib[1] - slack), env)
    _narrow(b, (None if ia[0] is None else ia[0] + slack, ia[1] if fact.op == "eq" else None), env)


def _narrow(e: Expr, found: Interval, env: Env) -> None:
    """`e` is known to lie in `found`: pass that down to the variables it is made of."""
    while found != UNBOUNDED:
        lo, hi = found
        if isinstance(e, Var):
            env.limit(e, found)
            return
        if not isinstance(e, Op) or len(e.args) != 2 or e.dtype.short not in ("i32", "i64"):
            return
        a, b = e.args
        ia, ib = interval(a, env), interval(b, env)
        k = as_int(b)
        if e.op == "add":
            _narrow(b, add_intervals(found, scale_interval(ia, -1)), env)
            e, found = a, add_intervals(found, scale_interval(ib, -1))
        elif e.op == "sub":
            _narrow(b, add_intervals(ia, scale_interval(found, -1)), env)
            e, found = a, add_intervals(found, ib)
        elif e.op == "floordiv" and k is not None and k > 0:
            e, found = a, (None if lo is None else lo * k, None if hi is None else hi * k + k - 1)
        elif e.op == "mul" and ia[0] is not None and ib[0] is not None and min(ia[0], ib[0]) >= 0:
            # a * b in [lo, hi] with both >= 0: lo >= 1 makes both >= 1, and each is at most hi / (the least of the other)
            _narrow(b, _factor(found, ia), env)
            e, found = a, _factor(found, ib)
        elif (e.op == "min" and lo is not None) or (e.op == "max" and hi is not None):
            found = (lo, None) if e.op == "min" else (None, hi)
            _narrow(b, found, env)
            e = a
        else:
            return


def _factor(found: Interval, other: Interval) -> Interval:
    """The interval of a when a * b lies in `found`, a and b are >= 0 and b lies in `other`."""
    lo, hi = found
    least = None if lo is None or lo < 1 else 1 if other[1] is None else -(-lo // other[1]) if other[1] else None
    most = hi // other[0] if hi is not None and other[0] else None
    return least, most
