"""Every search strategy by its name, in one place."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import numpy as np

from relax_tune.errors import UserError
from relax_tune.tuner.search.base import SearchProblem, SearchStrategy
from relax_tune.tuner.search.strategies.baselines import GridSearch, RandomSearch
from relax_tune.tuner.search.strategies.evolution import EvolutionarySearch
from relax_tune.tuner.search.strategies.optuna_search import OptunaSearch

STRATEGIES: Mapping[str, Callable[[SearchProblem, np.random.Generator], SearchStrategy]] = MappingProxyType(
    {
        "evolution": EvolutionarySearch,
        "random": RandomSearch,
        "grid": GridSearch,
        "optuna": OptunaSearch,
        "optuna-cmaes": partial(OptunaSearch, sampler="cmaes"),
        "optuna-gp": partial(OptunaSearch, sampler="gp"),
    }
)
"""Constructors from a problem and a generator; a strategy's own settings come after those and have defaults."""


# Packages a strategy wants beyond the tuner's own, and what installs them.
_WANTS = {
    "optuna": (("optuna",), "'relax-tune[tune]'"),
    "optuna-cmaes": (("optuna", "cmaes"), "'relax-tune[tune]'"),
    "optuna-gp": (("optuna", "scipy", "torch"), "optuna scipy torch"),
}


def check_strategy(name: str) -> str:
    """Return the name, when such a strategy can be made here.

    Raises:
        UserError: there is none of that name, or a package that it needs is missing.
    """
    if name not in STRATEGIES:
        raise UserError(f"--strategy wants one of {', '.join(STRATEGIES)}; found {name!r}")
    packages, install = _WANTS.get(name, ((), ""))
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(f"--strategy {name} wants {' and '.join(missing)}, found none; pip install {install}")
    return name


def make_strategy(name: str, problem: SearchProblem, rng: np.random.Generator) -> SearchStrategy:
    """Return a strategy by name.

    Raises:
        UserError: as `check_strategy`.
    """
    return STRATEGIES[check_strategy(name)](problem, rng)
