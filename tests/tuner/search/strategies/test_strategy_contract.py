"""The promises of `SearchStrategy`, for every strategy in the registry."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.effort import EFFORT
from tests.tuner.search.search_fixtures import PROBLEMS, bowl, flat, play, tiles, wide

from relax_tune.errors import ScheduleError, UserError
from relax_tune.tuner.search.base import Failure, Result, SearchProblem, SearchStrategy
from relax_tune.tuner.search.registry import check_strategy, make_strategy, strategy_names
from relax_tune.tuner.search.space import Candidate, Parameter, ParameterSpace, SketchSpace
from relax_tune.tuner.settings import OPTIONS, Settings


def usable(name: str) -> bool:
    try:
        return bool(check_strategy(name))
    except UserError:
        return False


def strategies(*but: str) -> list[Any]:
    """The names of all strategies as test parameters; one that wants torch is skipped where there is none."""
    torch = [pytest.mark.torch, pytest.mark.skipif(not usable("optuna-gp"), reason="expects torch and scipy")]
    names = sorted(set(strategy_names()) - set(but))
    return [pytest.param(name, marks=torch if name == "optuna-gp" else []) for name in names]


every_strategy = pytest.mark.parametrize("name", strategies())
every_problem = pytest.mark.parametrize("problem", sorted(PROBLEMS))


def fresh(name: str, problem: SearchProblem, seed: int = 7) -> SearchStrategy:
    return make_strategy(name, problem, np.random.default_rng(seed))


@pytest.mark.slow
@every_strategy
@every_problem
def test_candidates_are_legal_and_never_repeat(name: str, problem: str) -> None:
    made = PROBLEMS[problem]()
    asked = play(fresh(name, made), made, [5, 20, 1, 8])
    flat_list = list(itertools.chain(*asked))
    assert len(set(flat_list)) == len(flat_list)
    assert all(made.space.contains(c) for c in flat_list)
    listed = made.space.listed()
    assert len(flat_list) == 34 if listed is None else len(flat_list) == min(34, len(listed))
    assert all(len(batch) <= size for batch, size in zip(asked, [5, 20, 1, 8]))


@pytest.mark.slow
@every_strategy
@every_problem
def test_order_and_chunks_of_answers_leave_no_mark(name: str, problem: str) -> None:
    if EFFORT != "heavy" and name.startswith("optuna") and problem == "large":
        pytest.skip("Optuna takes ten seconds for this space: run with --heavy")
    made = PROBLEMS[problem]()
    sizes = [18, 6, 6]
    straight = play(fresh(name, made), made, sizes)
    shuffled = play(fresh(name, made), made, sizes, shuffle=np.random.default_rng(3))
    assert straight == shuffled


@every_strategy
def test_random_strategies_depend_on_the_seed(name: str) -> None:
    made = PROBLEMS["large"]()
    first, second = (fresh(name, made, seed).ask(12) for seed in (1, 2))
    assert (first == second) == (name == "grid")


@pytest.mark.slow
@every_strategy
@pytest.mark.parametrize("problem", ["one parameter", "one point", "one sketch"])
def test_strategy_exhausts_a_small_space(name: str, problem: str) -> None:
    if EFFORT != "heavy" and name.startswith("optuna") and problem == "one sketch":
        pytest.skip("Optuna takes half a minute for this space: run with --heavy")
    made = PROBLEMS[problem]()
    listed = made.space.listed()
    assert listed is not None
    strategy = fresh(name, made)
    batch = max(16, len(listed) // 6)
    asked = list(itertools.chain(*play(strategy, made, [batch] * (len(listed) // batch + 2))))
    assert sorted(asked) == made.space.candidates(listed)
    assert strategy.ask(4) == [] and strategy.ask(1) == []


@every_strategy
def test_strategy_exhausts_a_space_of_failures(name: str) -> None:
    made = PROBLEMS["one parameter"]()
    asked = play(fresh(name, made), made, [10] * 5, answer=lambda c, s: Failure("launch"))
    assert len(set(itertools.chain(*asked))) == 39


@pytest.mark.slow
@every_strategy
def test_candidates_told_but_never_asked_are_not_asked(name: str) -> None:
    made = PROBLEMS["one parameter"]()
    strategy = fresh(name, made)
    strategy.tell([Result(Candidate(0, (x,)), {0: 1e-3 * x}) for x in range(1, 31)])
    assert sorted(strategy.ask(100)) == [Candidate(0, (x,)) for x in range(31, 40)]


@every_strategy
def test_ask_twice_without_answers_gives_distinct_candidates(name: str) -> None:
    made = PROBLEMS["one sketch"]()
    strategy = fresh(name, made)
    asked = strategy.ask(20) + strategy.ask(20)
    assert len(set(asked)) == 40


@pytest.mark.slow
@every_strategy
def test_some_shapes_may_be_left_out(name: str) -> None:
    """Racing stops timing clear losers: most candidates have a time at one shape only, one shape has none."""
    made = PROBLEMS["two sketches, three shapes"]()
    strategy = fresh(name, made)
    for _ in range(3):
        batch = strategy.ask(16)
        strategy.tell([Result(c, {0: bowl(c, 0)} | ({1: bowl(c, 1)} if i < 5 else {})) for i, c in enumerate(batch)])
    assert len(strategy.ask(8)) == 8


@every_strategy
def test_space_without_legal_points_raises(name: str) -> None:
    never = SketchSpace("never", (Parameter("x", (1, 2, 3)),), lambda rows: np.zeros(len(rows), dtype=np.bool_))
    with pytest.raises(ScheduleError, match=r"'never' \(all 3 points tried\)"):
        fresh(name, SearchProblem(ParameterSpace([never]))).ask(1)


@every_strategy
def test_a_sketch_without_legal_points_is_passed_over(name: str) -> None:
    never = SketchSpace("never", (Parameter("x", (1, 2, 3)),), lambda rows: np.zeros(len(rows), dtype=np.bool_))
    made = SearchProblem(ParameterSpace([never, flat()]))
    asked = list(itertools.chain(*play(fresh(name, made), made, [8, 8])))
    assert len(asked) == 15 and {c.sketch for c in asked} == {1}


@every_strategy
@pytest.mark.parametrize(
    ("result", "message"),
    [
        (Result(Candidate(0, (3, 1, 0)), {0: 1.0}), "not in it"),
        (Result(Candidate(0, (64, 64, 0)), {0: 1.0}), "breaks its constraints"),
        (Result(Candidate(4, (1,)), {0: 1.0}), "not in it"),
        (Result(Candidate(0, (1, 1, 0)), {1: 1.0}), "shape indices below 1"),
        (Result(Candidate(0, (1, 1, 0)), {0: float("inf")}), "positive seconds"),
        (Result(Candidate(0, (1, 1, 0)), {0: 0.0}), "positive seconds"),
    ],
)
def test_wrong_results_are_refused(name: str, result: Result, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fresh(name, SearchProblem(ParameterSpace([tiles()]))).tell([result])


@pytest.mark.slow
@pytest.mark.parametrize("name", strategies("random", "grid"))
def test_strategy_with_results_beats_random(name: str) -> None:
    """After the same number of trials of a smooth space, whatever learns has found better than chance has."""

    def best(strategy: str, seed: int) -> float:
        made = SearchProblem(ParameterSpace([wide()]))
        asked = itertools.chain(*play(fresh(strategy, made, seed), made, [16] * 4))
        return min(time for c in asked if isinstance(time := bowl(c, 0), float))

    assert sum(best(name, seed) for seed in range(3)) < sum(best("random", seed) for seed in range(3))


def test_strategy_without_package_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, p=None: None if n == "torch" else found(n, p))
    with pytest.raises(UserError, match=r"optuna-gp.*torch.*pip install optuna scipy torch"):
        check_strategy("optuna-gp")


def test_unknown_strategy() -> None:
    with pytest.raises(UserError, match="evolution"):
        make_strategy("annealing", PROBLEMS["one point"](), np.random.default_rng(0))
    assert Settings().strategy in strategy_names() == OPTIONS["strategy"].suggestions


def test_strategy_of_an_installed_package_is_listed_last_and_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    metadata = tmp_path / "some_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: some-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[relax_tune.strategies]\nannealing = some_package:Annealing\n")
    (tmp_path / "some_package.py").write_text(
        "from relax_tune.tuner.search.strategies.baselines import RandomSearch\nclass Annealing(RandomSearch): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert strategy_names()[-1] == "annealing" and "annealing" in OPTIONS["strategy"].suggestions
    assert type(make_strategy("annealing", PROBLEMS["one point"](), np.random.default_rng(0))).__name__ == "Annealing"
