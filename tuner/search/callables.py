"""Functions of a caller in a search space: constraints, and parameters whose values depend on others.

Tests: `tests/tuner/search/test_named.py`.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax_tune.errors import UserError
from relax_tune.tuner.search.expressions import Column
from relax_tune.tuner.search.space import BoolArray

MOST_CALLS = 1 << 16
"""Most combinations of earlier parameters for which the values of a parameter are computed."""


@dataclass(frozen=True, eq=False)
class FunctionConstraint:
    """A function that tells whether a row is legal. It is called for one row at a time, with plain Python values.

    Attributes:
        names: Parameters that it takes by name; None if it takes the whole row as a dict.
    """

    function: Callable[..., object]
    names: tuple[str, ...] | None

    @staticmethod
    def of(function: Callable[..., object], parameters: Mapping[str, Sequence[Any]]) -> FunctionConstraint:
        """Return the constraint of a function.

        Raises:
            UserError: Its arguments are neither named as parameters nor a single one.
        """
        names = _arguments(function)
        if names is not None and len(names) == 1 and names[0] not in parameters:
            return FunctionConstraint(function, None)
        return FunctionConstraint(function, _known(f"the constraint {_name(function)}", names, parameters))

    def __call__(self, columns: Mapping[str, Column]) -> BoolArray:
        """Return a mask (R,) of the rows for which the function returns something true.

        Raises:
            UserError: The function fails for a row.
        """
        lists = {name: column.tolist() for name, column in columns.items()}
        rows = (dict(zip(lists, values)) for values in zip(*lists.values()))
        return np.fromiter((self._holds(row) for row in rows), np.bool_, len(next(iter(lists.values()))))

    def _holds(self, row: dict[str, Any]) -> bool:
        arguments = row if self.names is None else {n: row[n] for n in self.names}
        try:
            return bool(self.function(row) if self.names is None else self.function(**arguments))
        except ZeroDivisionError:  # breaks a constraint that is written as text, too
            return False
        except Exception as error:  # the caller's function may raise anything
            raise _failed(f"the constraint {_name(self.function)}", arguments, error) from error


def dependent_values(
    name: str, function: Callable[..., Iterable[Any]], earlier: Mapping[str, Sequence[Any]]
) -> tuple[list[Any], FunctionConstraint]:
    """Return all values that a parameter may have, and the constraint that ties them to the parameters it depends on.

    Args:
        function: Returns its values for earlier parameters, which it takes by name.
        earlier: Values of the parameters before it.

    Raises:
        UserError: Another argument, too many combinations, or a function that fails.
    """
    names = _known(f"the function of parameter {name!r}", _arguments(function), earlier)
    if math.prod(len(earlier[n]) for n in names) > MOST_CALLS:
        raise UserError(
            f"expected the values of {name!r} to depend on at most {MOST_CALLS} combinations of {', '.join(names)}; list them all, and "
            "add a constraint"
        )
    values: dict[tuple[Any, ...], frozenset[Any]] = {}
    union: dict[Any, None] = {}
    for key in itertools.product(*(earlier[n] for n in names)):
        arguments = dict(zip(names, key))
        try:
            listed = list(function(**arguments))
            values[key] = frozenset(listed)
        except Exception as error:  # the caller's function may raise anything
            raise _failed(f"the function of parameter {name!r}", arguments, error) from error
        union.update(dict.fromkeys(listed))
    member = lambda **row: row[name] in values[tuple(row[n] for n in names)]
    return list(union), FunctionConstraint(member, (*names, name))


def _arguments(function: Callable[..., object]) -> tuple[str, ...] | None:
    """Return the names of a function's arguments without defaults; None if they are unknown or variable."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions written in C have no signature
        return None
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) for p in parameters):
        return None
    return tuple(p.name for p in parameters if p.default is p.empty)


def _known(what: str, names: tuple[str, ...] | None, parameters: Mapping[str, Sequence[Any]]) -> tuple[str, ...]:
    unknown = [n for n in names or () if n not in parameters]
    if names is None or unknown:
        got = "arguments without names" if names is None else ", ".join(unknown)
        there = ", ".join(parameters) or "and none comes before it"
        raise UserError(f"expected {what} to take parameters of the space by name, {there}; got {got}")
    return names


def _name(function: Callable[..., object]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _failed(what: str, arguments: Mapping[str, Any], error: Exception) -> UserError:
    return UserError(f"{what} failed for {dict(arguments)!r:.200}: {type(error).__name__}: {error}")
