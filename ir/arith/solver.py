"""Decisions by Z3 on questions that the proof search leaves open, if the extra `solver` is installed.

Z3 decides whether the facts and the negation of a claim are satisfiable. Z3's resource count limits its effort, and
every question has its own context. So answers depend on the question and on Z3's version, never on load or history.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from operator import add, eq, ge, le, lt, mul, ne, sub
from types import ModuleType
from typing import Any

from relax_tune.errors import RelaxTuneError
from relax_tune.ir.arith.bounds import Env, dtype_interval
from relax_tune.ir.arith.normal import algebraic, wide
from relax_tune.ir.arith.proof import Proof
from relax_tune.ir.core.expr import Const, Expr, Tunable, Var, postorder

# In Z3's resource units; a question about three dims takes a few hundred to fifty thousand.
RLIMIT = 300_000
# Building terms takes time that `rlimit` does not count.
MAX_NODES = 2000


@dataclass(frozen=True, slots=True)
class Z3:
    """The solver of the package `z3-solver`.

    Attributes:
        name: package and version, as recorded in artifacts.
    """

    name: str

    def decide(self, cond: Expr, env: Env, goals: Collection[Proof]) -> Proof:
        """Return the answer among `goals` that holds for every assignment that the env allows, or UNKNOWN.

        Raises:
            RelaxTuneError: the installed package cannot be loaded.
        """
        for goal in (Proof.YES, Proof.NO):
            if goal in goals and self._refuted(cond, env, goal is Proof.NO):
                return goal
        return Proof.UNKNOWN

    def _refuted(self, cond: Expr, env: Env, value: bool) -> bool:
        """Prove that no assignment gives `cond` this value."""
        z3 = _module(self.name)
        question = _Question(z3, env)
        claim = question.read(cond)
        if claim is None:
            return False
        solver = z3.Solver(ctx=question.context)
        # A limit of steps and not of time, so that the answer does not depend on the machine or its load.
        solver.set("rlimit", RLIMIT)
        solver.set("random_seed", 0)
        solver.add(*question.known(), claim if value else z3.Not(claim))
        return bool(solver.check() == z3.unsat)


@cache
def installed_solver() -> Z3 | None:
    """Return the solver, None unless the extra `solver` is installed."""
    try:
        return Z3(f"z3-solver {version('z3-solver')}")
    except PackageNotFoundError:
        return None


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module("z3")
    except (ImportError, OSError) as error:
        raise RelaxTuneError(
            f"{name}: the package z3 is installed but cannot be loaded: {error}; "
            "pip install --force-reinstall 'relax-tune[solver]', or uninstall z3-solver to do without"
        ) from error


class _Question:
    """Scalar expressions as terms of one Z3 context; integers are unbounded, as index arithmetic is by contract."""

    def __init__(self, z3: ModuleType, env: Env) -> None:
        self.z3 = z3
        self.env = env
        self.context = z3.Context()
        self.terms: dict[Expr, Any] = {}
        self.side: list[Any] = []
        self.waiting: list[Var] = []

    def known(self) -> list[Any]:
        """Return the facts, the bounds of the variables met, and the conditions that divisors are not zero."""
        facts = [self.read(f) for f in self.env.facts]
        while self.waiting:
            v = self.waiting.pop(0)
            term, (low, high) = self.terms[v], self.env.range_of(v)
            # A symbolic bound may mention further variables, which `read` appends to `waiting`.
            for bound, compare in zip(self.env.bounds.get(v, ()), (ge, le)):
                limit = None if bound is None else self.read(bound)
                if limit is not None:
                    self.side.append(compare(term, limit))
            self.within(term, low, high)
            if isinstance(v, Tunable):
                self.side.append(self.z3.Or(*(term == x for x in v.domain)))
        return [*self.side, *(f for f in facts if f is not None)]

    def read(self, e: Expr) -> Any:
        """Return the Z3 term of an expression; None for one that is too large."""
        for count, n in enumerate(postorder((e,))):
            if count > MAX_NODES:
                return None
            if n not in self.terms:
                self.terms[n] = self.term(n)
        return self.terms[e]

    def term(self, n: Expr) -> Any:
        z3 = self.z3
        if isinstance(n, Const) and (n.dtype.is_int or n.dtype.short == "bool"):
            return z3.BoolVal(bool(n.value), self.context) if n.dtype.short == "bool" else self.number(int(n.value))
        if n.op:
            args = [self.terms[a] for a in n.args]
            if n.op in _COMPARISONS and all(a.dtype.is_int for a in n.args):
                return _COMPARISONS[n.op](*args)
            if n.op in ("and", "or", "not"):
                return {"and": z3.And, "or": z3.Or, "not": z3.Not}[n.op](*args)
            if n.op == "select" and wide(n.dtype):
                return z3.If(*args)
            if n.op == "cast" and wide(n.dtype) and n.args[0].dtype.is_int and n.dtype.holds(n.args[0].dtype):
                return args[0]
            if algebraic(n):
                return self.arithmetic(n.op, *args)
        return self.opaque(n)

    def arithmetic(self, name: str, a: Any, b: Any) -> Any:
        if name in _RING:
            return _RING[name](a, b)
        if name in ("min", "max"):
            return self.z3.If(a <= b if name == "min" else a >= b, a, b)
        # Z3 rounds so that remainders are >= 0: floor division for positive divisors, and x // c == -x // -c for others
        self.side.append(b != 0)
        quotient = a / b if self.z3.is_int_value(b) and b.as_long() > 0 else self.z3.If(b > 0, a / b, (-a) / (-b))
        return quotient if name == "floordiv" else a - b * quotient

    def opaque(self, n: Expr) -> Any:
        """Return a free variable of the dtype, the same for every occurrence of the node."""
        name = f"x{len(self.terms)}"
        if n.dtype.short == "bool":
            return self.z3.Bool(name, self.context)
        term = self.z3.Int(name, self.context)
        if isinstance(n, Var) and n.dtype.is_int:
            self.waiting.append(n)
        else:
            self.within(term, *dtype_interval(n.dtype))
        return term

    def within(self, term: Any, low: int | None, high: int | None) -> None:
        if low is not None:
            self.side.append(term >= self.number(low))
        if high is not None:
            self.side.append(term <= self.number(high))

    def number(self, value: int) -> Any:
        return self.z3.IntVal(value, self.context)


_RING: Mapping[str, Callable[[Any, Any], Any]] = {"add": add, "sub": sub, "mul": mul}
_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {"lt": lt, "le": le, "eq": eq, "ne": ne}
