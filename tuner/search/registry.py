"""Every search strategy by name: from the modules in `tuner/search/strategies`, then from installed packages.

Tests: `tests/tuner/search/strategies/test_strategy_contract.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING

from relax_tune.errors import UserError
from relax_tune.plugins import extended
from relax_tune.tuner.search import strategies

if TYPE_CHECKING:  # settings import this module for the names, without NumPy
    import numpy as np

    from relax_tune.tuner.search.base import SearchProblem, SearchStrategy

    Constructor = Callable[[SearchProblem, np.random.Generator], SearchStrategy]

GROUP = "relax_tune.strategies"


def all_strategies() -> Mapping[str, Constructor]:
    """Return the constructor of each strategy by name, the built-in ones first.

    A constructor takes a problem and a generator; further arguments have defaults. Its attributes `packages` and `install`, if
    it has them, are packages that it needs beyond the tuner's own and the arguments of `pip install` that install them.

    Raises:
        BuildError: A package registers something else, or a name that is in use.
    """
    return extended(_built_in(), GROUP, callable, "a class that is constructed from a problem and a generator")


@cache
def _built_in() -> Mapping[str, Constructor]:
    constructors: dict[str, Constructor] = {}
    for module in pkgutil.iter_modules(strategies.__path__, f"{strategies.__name__}."):
        for name, constructor in importlib.import_module(module.name).STRATEGIES.items():
            assert name not in constructors, f"{module.name}: {name} is in use"
            constructors[name] = constructor
    return dict(sorted(constructors.items()))


def strategy_names() -> tuple[str, ...]:
    """Return the names that `--strategy` takes."""
    return tuple(all_strategies())


def check_strategy(name: str) -> Constructor:
    """Return the constructor of a strategy that can run on this machine.

    Raises:
        UserError: No strategy has the name, or a package that it needs is missing.
    """
    constructors = all_strategies()
    if name not in constructors:
        raise UserError(f"--strategy expects one of {', '.join(constructors)}; got {name!r}")
    packages = getattr(constructors[name], "packages", ())
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        install = getattr(constructors[name], "install", " ".join(missing))
        raise UserError(f"--strategy {name} needs {' and '.join(missing)}, not installed here; pip install {install}")
    return constructors[name]


def make_strategy(name: str, problem: SearchProblem, rng: np.random.Generator) -> SearchStrategy:
    """Construct a strategy by name.

    Raises:
        UserError: As `check_strategy`.
    """
    return check_strategy(name)(problem, rng)
