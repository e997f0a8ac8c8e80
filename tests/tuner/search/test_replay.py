"""Search quality as a number: recorded GPU spaces played back."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from tests.tuner.search.search_fixtures import PROBLEMS, bowl, play

from relax_tune.errors import UserError
from relax_tune.tuner.search.base import Failure, Result, SearchProblem, TrainingRows
from relax_tune.tuner.search.registry import make_strategy
from relax_tune.tuner.search.replay import RecordedRunner, RecordedSpace, load_recorded, recorded_spaces, replay
from relax_tune.tuner.search.space import Candidate, Parameter, ParameterSpace, SketchSpace
from relax_tune.tuner.search.strategies.evolution import EvolutionarySearch, EvolutionSettings

DATA = Path(__file__).parents[2] / "data" / "replay"


@pytest.fixture(scope="module")
def spaces() -> dict[str, RecordedSpace]:
    return recorded_spaces(DATA)


@pytest.fixture(scope="module")
def convolution(spaces: dict[str, RecordedSpace]) -> RecordedSpace:
    return spaces["convolution-rtx_2080_ti"]


def reached(name: str, recorded: RecordedSpace, seed: int, evaluations: int = 110) -> np.ndarray:
    return replay(
        make_strategy(name, SearchProblem(recorded.space), np.random.default_rng(seed)), recorded, evaluations, 8
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "ran", "best_ms"),
    [
        ("gemm-rtx_2080_ti", 17_956, 17_956, 11.48),
        ("convolution-rtx_2080_ti", 6_768, 5_256, 0.900),
        ("convolution-rtx_3090", 6_768, 5_220, 0.523),
        ("convolution_milo-a4000", 4_362, 4_201, 1.021),
        ("convolution_milo-a6000", 4_362, 3_889, 0.603),
        ("convolution_milo-w6600", 4_362, 4_362, 1.728),
        ("dedispersion_milo-a4000", 11_130, 11_130, 147.7),
        ("gemm-rtx_titan", 17_956, 17_956, 11.47),
        ("pnpoly-rtx_3090", 4_092, 3_774, 8.714),
    ],
)
def test_constraints_allow_exactly_the_recorded_rows(
    spaces: dict[str, RecordedSpace], name: str, rows: int, ran: int, best_ms: float
) -> None:
    recorded = spaces[name]
    listed = recorded.space.listed()
    assert listed is not None
    assert set(recorded.space.candidates(listed)) == set(recorded.outcomes) and len(listed) == rows
    assert sum(isinstance(o, float) for o in recorded.outcomes.values()) == ran
    assert recorded.optimum * 1e3 == pytest.approx(best_ms, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["convolution-rtx_2080_ti", "convolution_milo-a6000", "dedispersion_milo-a4000", "pnpoly-rtx_3090"]
)
def test_evolution_beats_random_and_comes_close_to_the_optimum(spaces: dict[str, RecordedSpace], name: str) -> None:
    ours = reached("evolution", spaces[name], seed=0, evaluations=150)
    chance = [reached("random", spaces[name], seed, 150)[-1] for seed in range(15)]
    assert ours[-1] > 0.95
    assert ours[-1] > np.median(chance)
    assert (np.diff(ours) >= 0).all()


def test_runner_counts_and_plays_failures(convolution: RecordedSpace) -> None:
    runner = RecordedRunner(convolution)
    failing = next(c for c, o in convolution.outcomes.items() if isinstance(o, Failure))
    outcome = runner.run([failing])[0].outcomes[0]
    assert isinstance(outcome, Failure) and outcome.stage and runner.evaluations == 1
    with pytest.raises(UserError, match="recorded"):
        runner.run([Candidate(0, (1,))])


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n1,2\n"))
    with pytest.raises(UserError, match="time_ms"):
        load_recorded(path)


@pytest.mark.slow
def test_breeding_finds_the_optimum_of_a_space_too_large_to_list() -> None:
    """Eight parameters of 32 values; random search of as many points stays far away."""
    domain = tuple(range(1, 33))
    space = ParameterSpace(
        [SketchSpace("big", tuple(Parameter(f"p{i}", domain) for i in range(8)), lambda r: r.sum(axis=1) % 2 == 0)]
    )
    target = np.array([4, 30, 16, 8, 25, 3, 12, 20])

    def seconds(candidate: Candidate) -> float:
        return float(np.exp(0.01 * np.square(np.asarray(candidate.values) - target).sum()) * 1e-4)

    def best(strategy: object, rounds: int) -> float:
        found = np.inf
        for _ in range(rounds):
            asked = strategy.ask(16)  # type: ignore[attr-defined]
            strategy.tell([Result(c, {0: seconds(c)}) for c in asked])  # type: ignore[attr-defined]
            found = min(found, *(seconds(c) for c in asked))
        return found

    problem = SearchProblem(space)
    small = EvolutionSettings(screened=1024, population=256, generations=3)
    ours = best(EvolutionarySearch(problem, np.random.default_rng(0), small), 9)
    chance = best(make_strategy("random", problem, np.random.default_rng(0)), 9)
    assert ours < 2.5e-4 and chance > 5e-4, (ours, chance)


@pytest.mark.slow
def test_every_shape_gets_a_fast_candidate() -> None:
    """The optimum moves with the shape; one set of proposals has to serve all three."""
    problem = PROBLEMS["two sketches, three shapes"]()
    listed = problem.space.listed()
    assert listed is not None
    everything = problem.space.candidates(listed)
    asked = [
        c
        for batch in play(EvolutionarySearch(problem, np.random.default_rng(1)), problem, [16, 8, 8, 8])
        for c in batch
    ]
    for shape in range(3):
        times = {c: o for c in everything if isinstance(o := bowl(c, shape), float)}
        assert min(times[c] for c in asked if c in times) <= sorted(times.values())[2]


@pytest.mark.slow
def test_history_of_other_tasks_warms_the_search_up(spaces: dict[str, RecordedSpace]) -> None:
    """Rows of the same space on another device, told as history, beat a cold start in the first modelled batch."""
    convolution, other = spaces["convolution-rtx_2080_ti"], spaces["convolution-rtx_3090"]
    codes = other.space.sample(np.random.default_rng(0), 600)
    answers = [other.outcomes[c] for c in other.space.candidates(codes)]
    log_time = np.array([np.log(a) if isinstance(a, float) else np.nan for a in answers])
    problem = SearchProblem(convolution.space)
    features = convolution.space.features(codes, problem.shapes)[:, 0]
    history = TrainingRows(features, log_time, np.zeros(600, dtype=np.int64))

    def after(rows: TrainingRows | None, seed: int) -> float:
        told = SearchProblem(convolution.space, history=lambda: rows)
        return float(replay(EvolutionarySearch(told, np.random.default_rng(seed)), convolution, 24, 8)[-1])

    warm = [after(history, seed) for seed in range(5)]
    cold = [after(None, seed) for seed in range(5)]
    assert np.median(warm) > np.median(cold)
