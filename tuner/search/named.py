"""Searching any space of named values: tile sizes, flags, algorithm names, cut down by constraints. No compiler needed.

space = SearchSpace({"block": [16, 32, 64], "layout": ["row", "column"]}, ["block != 64 or layout == 'row'"])
search = Search(space, strategy="evolution", seed=0)
while configurations := search.ask(8):
    search.tell([(c, measure(c)) for c in configurations])
search.best
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from relax_tune.errors import UserError
from relax_tune.ir.core.expr import Expr
from relax_tune.schedules.cost.vectorized import compile_numpy
from relax_tune.tuner.search.base import Failure, Result, SearchProblem
from relax_tune.tuner.search.expressions import Column, TextConstraint
from relax_tune.tuner.search.registry import make_strategy
from relax_tune.tuner.search.space import (
    BoolArray,
    Candidate,
    Constraint,
    IntArray,
    Parameter,
    ParameterSpace,
    SketchSpace,
)

Value = bool | int | float | str
Configuration = dict[str, Value]


@dataclass(frozen=True, eq=False)
class SearchSpace:
    """Named parameters with finite lists of values, and which combinations of them are legal.

    Numbers are a scale, whose neighbours are taken to be similar, independently of the order they are listed in; text and truth values
    are labels. A constraint is text in Python's syntax (`tuner.search.expressions` says how much of it) or a scalar
    expression of `ir.expr` whose variables are named as integer parameters; all must hold.

    Raises:
        UserError: No values, values listed twice or of no such kind, a constraint that cannot be evaluated.
    """

    parameters: Mapping[str, tuple[Value, ...]]
    constraints: tuple[str | Expr, ...]
    space: ParameterSpace

    def __init__(
        self,
        parameters: Mapping[str, Sequence[Value]],
        constraints: Sequence[str | Expr] = (),
        name: str = "space",
    ) -> None:
        ordered = {key: _ordered(key, values) for key, values in parameters.items()}
        object.__setattr__(self, "parameters", ordered)
        object.__setattr__(self, "constraints", tuple(constraints))
        own = tuple(_parameter(key, values) for key, values in ordered.items())
        object.__setattr__(self, "space", ParameterSpace([SketchSpace(name, own, self._constraint())]))

    def _constraint(self) -> Constraint | None:
        if not self.constraints:
            return None
        tests = [
            TextConstraint(c, self.parameters) if isinstance(c, str) else _ExprConstraint(c, self.parameters)
            for c in self.constraints
        ]
        # Integers are stored as values; anything else as positions, which the constraint must see as values.
        tables = {name: (np.asarray(values), _plain(values)) for name, values in self.parameters.items()}

        def holds(rows: IntArray) -> BoolArray:
            columns = {n: rows[:, j] if plain else t[rows[:, j]] for j, (n, (t, plain)) in enumerate(tables.items())}
            return np.asarray(np.logical_and.reduce([test(columns) for test in tests]), dtype=np.bool_)

        return holds

    def candidate(self, configuration: Mapping[str, Value]) -> Candidate:
        """Return the point of a configuration.

        Raises:
            UserError: A parameter that is missing or unknown, or a value that is not among its own.
        """
        if set(configuration) != set(self.parameters):
            raise UserError(
                f"expected a value for each of {', '.join(self.parameters)}, got {dict(configuration)!r:.200}; "
                "tell configurations as `ask` returned them"
            )
        coded = []
        for name, values in self.parameters.items():
            value = configuration[name]
            if value not in values:
                raise UserError(f"expected {name} as one of {list(values)!r:.200}, got {value!r:.80}")
            position = values.index(value)
            coded.append(int(value) if _plain(values) else position)
        return Candidate(0, tuple(coded))

    def configuration(self, candidate: Candidate) -> Configuration:
        """Return the named values of a point."""
        return {
            name: value if _plain(values) else values[value]
            for (name, values), value in zip(self.parameters.items(), candidate.values, strict=True)
        }


class Search:
    """One search over a space, driven from outside: ask for configurations, measure them, tell their costs.

    Any strategy of `tuner.search.registry` by name. The configurations depend on the space, the seed and the reported
    costs, not on their order. Not thread-safe.

    Raises:
        UserError: An unknown strategy, or one whose package is missing.
    """

    def __init__(self, space: SearchSpace, strategy: str = "evolution", seed: int = 0) -> None:
        self.space = space
        self._strategy = make_strategy(strategy, SearchProblem(space.space), np.random.default_rng(seed))
        self._best: tuple[float, Candidate] | None = None

    def ask(self, count: int = 1) -> list[Configuration]:
        """Return up to `count` new configurations; none when the space is exhausted. Asking for several at
        once lets them be measured side by side.

        Raises:
            ScheduleError: No configuration satisfies the constraints.
        """
        return [self.space.configuration(c) for c in self._strategy.ask(count)]

    def tell(self, results: Iterable[tuple[Mapping[str, Value], float | None]]) -> None:
        """Record the costs of configurations: seconds, or any positive number where less is better; None for a failure.

        Raises:
            UserError: A configuration outside the space, or a cost that is not a positive number.
        """
        costs = [(self.space.candidate(c), cost) for c, cost in results]
        self._strategy.tell([Result(c, {0: Failure("runtime") if cost is None else float(cost)}) for c, cost in costs])
        for candidate, cost in costs:
            if cost is not None and (self._best is None or (float(cost), candidate) < self._best):
                self._best = float(cost), candidate

    @property
    def best(self) -> tuple[Configuration, float] | None:
        """The cheapest reported configuration and its cost; None without one."""
        return None if self._best is None else (self.space.configuration(self._best[1]), self._best[0])


class _ExprConstraint:
    """A scalar expression as a constraint over integer parameters."""

    def __init__(self, expr: Expr, parameters: Mapping[str, tuple[Value, ...]]) -> None:
        self._run, variables = compile_numpy([expr])
        for variable in variables:
            if variable.name not in parameters or not _plain(parameters[variable.name]):
                raise UserError(
                    f"expected a constraint over integer parameters, got {variable.name!r} in {expr}; write it as text, or rename it"
                )

    def __call__(self, columns: Mapping[str, Column]) -> BoolArray:
        numbers = {n: np.asarray(c, np.float64) for n, c in columns.items() if c.dtype.kind in "iuf"}
        (value,) = self._run(numbers)
        return np.array(np.broadcast_to(value, (len(next(iter(columns.values()))),)) != 0, dtype=np.bool_)


def _plain(values: Sequence[Value]) -> bool:
    """Return True if all values are integers, which the space holds directly; other values are stored as positions."""
    return all(type(v) is int for v in values)


def _ordered(name: str, values: Sequence[Value]) -> tuple[Value, ...]:
    """Return the values in order: numbers sorted, labels as listed."""
    kinds = {isinstance(v, str) if isinstance(v, (bool, int, float, str)) else None for v in values}
    if isinstance(values, str) or len(kinds) != 1 or None in kinds:
        raise UserError(
            f"expected parameter {name!r} as a list of numbers and truth values, or of texts, got {values!r:.200}; "
            "use the text of anything else"
        )
    if any(isinstance(v, (int, float)) and not -(2**62) < v < 2**62 for v in values) or len(set(values)) != len(values):
        raise UserError(
            f"expected parameter {name!r} to list distinct values of common size, got {list(values)!r:.200}; "
            "list each once (1, 1.0 and True are equal)"
        )
    return tuple(values) if kinds == {True} else tuple(sorted(v for v in values if not isinstance(v, str)))


def _parameter(name: str, values: tuple[Value, ...]) -> Parameter:
    ordered = not isinstance(values[0], str)
    if _plain(values):
        return Parameter(name, tuple(int(v) for v in values), ordered)
    return Parameter(name, tuple(range(len(values))), ordered)
