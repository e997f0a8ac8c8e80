"""Every search strategy by its name, in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from relax_tune.errors import UserError
from relax_tune.tuner.search.base import SearchProblem, SearchStrategy
from relax_tune.tuner.search.baselines import GridSearch, RandomSearch
from relax_tune.tuner.search.evolution import EvolutionarySearch
from relax_tune.tuner.search.optuna_search import OptunaSearch

DEFAULT_STRATEGY = "evolution"

STRATEGIES: Mapping[str, Callable[[SearchProblem, np.random.Generator], SearchStrategy]] = MappingProxyType(
    {
        "evolution": EvolutionarySearch,
        "random": RandomSearch,
        "grid": GridSearch,
        "optuna": OptunaSearch,
    }
)
"""Constructors from a problem and a generator; a strategy's own settings come after those and have defaults."""


def make_strategy(name: str, problem: SearchProblem, rng: np.random.Generator) -> SearchStrategy:
    """A strategy by name.

    Raises:
        UserError: there is none of that name.
    """
    if name not in STRATEGIES:
        raise UserError(f"wanted a search strategy among {sorted(STRATEGIES)}, found {name!r}; choose one of them")
    return STRATEGIES[name](problem, rng)
