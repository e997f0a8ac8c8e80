"""Searching any space of named values: tile sizes, flags, algorithm names, cut down by constraints. No compiler needed.

space = SearchSpace({"block": [16, 32, 64], "layout": ["row", "column"]}, ["block != 64 or layout == 'row'"])
search = Search(space, strategy="evolution", seed=0)
while configurations := search.ask(8):
    search.tell([(c, measure(c)) for c in configurations])
search.best
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import numpy as np

from relax_tune.errors import UserError
from relax_tune.ir.core.expr import Expr
from relax_tune.schedules.cost.vectorized import compile_numpy
from relax_tune.tuner.option import names_arguments
from relax_tune.tuner.search.base import Failure, Result, SearchProblem
from relax_tune.tuner.search.callables import FunctionConstraint, dependent_values
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
ConstraintLike = str | Expr | Callable[..., object]
Direction = Literal["minimize", "maximize"]


@dataclass(frozen=True, eq=False)
class SearchSpace:
    """Named parameters with finite lists of values, and which combinations of them are legal.

    Numbers are a scale, whose neighbours are taken to be similar, independently of the order they are listed in; text and truth values
    are labels.

    Args:
        parameters: The values of each parameter; or a function of earlier parameters, by name, that returns the values it has for
            them: `lambda tile: [u for u in (1, 2, 4, 8) if u <= tile]`.
        constraints: Conditions that must all hold. Each is text in Python's syntax (`tuner.search.expressions` says how much of it), a
            scalar expression of `ir.expr` whose variables are named as integer parameters, or a function of parameters by name, such
            as `lambda tile, unroll: tile % unroll == 0`. A function whose one argument has no parameter's name gets the whole
            configuration, a dict. Functions are called once for each row, so text is faster.

    Raises:
        UserError: No values, values listed twice or of no such kind, a constraint that cannot be evaluated, or a function that fails.

    Example:
        ```python
        space = SearchSpace(
            {"tile": [16, 32, 64], "unroll": lambda tile: [u for u in (1, 2, 4, 8) if u * 8 <= tile], "layout": ["row", "column"]},
            ["tile < 64 or layout == 'row'", lambda tile, unroll: tile * unroll <= 256],
        )
        ```
    """

    parameters: Mapping[str, tuple[Value, ...]]
    constraints: tuple[ConstraintLike, ...]
    space: ParameterSpace

    def __init__(
        self,
        parameters: Mapping[str, Sequence[Value] | Callable[..., Sequence[Value]]],
        constraints: Sequence[ConstraintLike] = (),
        name: str = "space",
    ) -> None:
        if callable(constraints) or isinstance(constraints, (str, Expr)):
            raise UserError(f"expected constraints as a list, got one {type(constraints).__name__}; put it into [ ]")
        ordered: dict[str, tuple[Value, ...]] = {}
        dependent: list[FunctionConstraint] = []
        for key, values in parameters.items():
            if callable(values):
                values, membership = dependent_values(key, values, ordered)
                dependent.append(membership)
            ordered[key] = _ordered(key, values)
        object.__setattr__(self, "parameters", ordered)
        object.__setattr__(self, "constraints", tuple(constraints))
        own = tuple(_parameter(key, values) for key, values in ordered.items())
        tests: list[Test] = [*dependent, *map(self._test, self.constraints)]
        object.__setattr__(self, "space", ParameterSpace([SketchSpace(name, own, self._constraint(tests))]))

    def _test(self, constraint: ConstraintLike) -> Test:
        if isinstance(constraint, str):
            return TextConstraint(constraint, self.parameters)
        if isinstance(constraint, Expr):
            return _ExprConstraint(constraint, self.parameters)
        if callable(constraint):
            return FunctionConstraint.of(constraint, self.parameters)
        raise UserError(
            f"expected a constraint as text, a function or a scalar expression, got {constraint!r:.80}, a {type(constraint).__name__}"
        )

    def _constraint(self, tests: Sequence[Test]) -> Constraint | None:
        if not tests:
            return None
        # Integers are stored as values; anything else as positions, which the constraint must see as values.
        tables = {name: (np.asarray(values), _plain(values)) for name, values in self.parameters.items()}

        def holds(rows: IntArray) -> BoolArray:
            columns = {n: rows[:, j] if plain else t[rows[:, j]] for j, (n, (t, plain)) in enumerate(tables.items())}
            valid = np.ones(len(rows), np.bool_)
            for test in tests:
                # Later tests see only the rows left: functions may rely on the conditions before them.
                valid[valid] = test({n: c[valid] for n, c in columns.items()})
            return valid

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

    Args:
        space: What to search.
        strategy: Name of the strategy.
        seed: Seed of all random choices.
        direction: `minimize` where less is better, such as seconds; `maximize` where more is, such as operations per second.

    Raises:
        UserError: An unknown strategy or direction, or a strategy whose package is missing.

    Example:
        ```python
        search = Search(SearchSpace({"tile": [16, 32, 64]}), direction="maximize", seed=0)
        search.tell([(c, -abs(c["tile"] - 32)) for c in search.ask(3)])
        assert search.best == ({"tile": 32}, 0.0)
        ```
    """

    def __init__(
        self, space: SearchSpace, strategy: str = "evolution", seed: int = 0, direction: Direction = "minimize"
    ) -> None:
        if not isinstance(space, SearchSpace):
            raise UserError(
                f"expected a SearchSpace to search, got a {type(space).__name__}; make one of its parameters"
            )
        if direction not in get_args(Direction):
            raise UserError(f"expected the direction as minimize or maximize, got {direction!r:.80}")
        self.space, self.direction = space, direction
        problem = SearchProblem(space.space, any_number=True)
        with names_arguments():
            self._strategy = make_strategy(strategy, problem, np.random.default_rng(seed))
        self._best: tuple[float, Candidate] | None = None

    def ask(self, count: int = 1) -> list[Configuration]:
        """Return up to `count` new configurations; none when the space is exhausted. Asking for several at
        once lets them be measured side by side.

        Raises:
            ScheduleError: No configuration satisfies the constraints.
        """
        return [self.space.configuration(c) for c in self._strategy.ask(count)]

    def tell(self, results: Iterable[tuple[Mapping[str, Value], float | None]]) -> None:
        """Record the costs of configurations. Nothing is recorded if one of them is refused.

        Args:
            results: Pairs of a configuration and its cost: any real number, in the direction of the search. None, NaN and the
                infinities say that the configuration failed and has no cost: it is never the best one, and configurations like it
                are tried less.

        Raises:
            UserError: Something other than such pairs, or a configuration outside the space.
        """
        costs = [(self.space.candidate(c), cost) for c, cost in _pairs(results)]
        sign = -1.0 if self.direction == "maximize" else 1.0
        outcomes = [(c, Failure("runtime") if cost is None else sign * cost) for c, cost in costs]
        self._strategy.tell([Result(c, {0: outcome}) for c, outcome in outcomes])
        for candidate, outcome in outcomes:
            if isinstance(outcome, float) and (self._best is None or (outcome, candidate) < self._best):
                self._best = outcome, candidate

    @property
    def best(self) -> tuple[Configuration, float] | None:
        """The best reported configuration and its cost; None without one."""
        if self._best is None:
            return None
        number, candidate = self._best
        return self.space.configuration(candidate), (0.0 - number) if self.direction == "maximize" else number


Test = Callable[[Mapping[str, Column]], BoolArray]
"""Maps one column for each parameter to a mask of the rows that satisfy a constraint."""


def _pairs(results: Any) -> Iterator[tuple[Mapping[str, Value], float | None]]:
    """Yield the configurations and costs that a caller reported; failures as None.

    Raises:
        UserError: Something else was reported.
    """
    form = "tell takes a list of pairs, [(configuration, cost), ...]"
    if isinstance(results, (str, bytes, Mapping)) or not isinstance(results, Iterable):
        raise UserError(f"{form}; got {results!r:.80}, a {type(results).__name__}")
    for entry in results:
        if not isinstance(entry, (tuple, list)) or len(entry) != 2 or not isinstance(entry[0], Mapping):
            raise UserError(f"{form}, with configurations as `ask` returns them; got the entry {entry!r:.80}")
        configuration, cost = entry
        if cost is not None and not isinstance(cost, Real):
            raise UserError(
                f"expected the cost of {dict(configuration)!r:.80} as a real number, or None for a failure, got {cost!r:.80}, a "
                f"{type(cost).__name__}"
            )
        try:
            number = math.nan if cost is None else float(cost)
        except OverflowError:  # an integer beyond all floats
            number = math.inf
        yield configuration, number if math.isfinite(number) else None


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
    listed = isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping))
    kinds = (
        {isinstance(v, str) if isinstance(v, (bool, int, float, str)) else None for v in values} if listed else set()
    )
    if not listed or len(kinds) != 1 or None in kinds:
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
