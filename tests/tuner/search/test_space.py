"""Spaces: codes and candidates, constraints, sampling, features, distances."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples
from tests.tuner.search.search_fixtures import flat, tiles, wide

from relax_tune.errors import ScheduleError, UserError
from relax_tune.tuner.search.space import Candidate, Parameter, ParameterSpace, SketchSpace
from relax_tune.tuner.search.strategies.evolution import crossover, mutate

domains = st.lists(st.integers(-4, 64), min_size=1, max_size=4, unique=True).map(tuple)
parameters = st.lists(domains, min_size=0, max_size=4).map(
    lambda ds: tuple(Parameter(f"p{i}", d, ordered=i % 2 == 0) for i, d in enumerate(ds))
)


def even(rows: np.ndarray) -> np.ndarray:
    return rows.sum(axis=1) % 2 == 0


@given(st.lists(parameters, min_size=1, max_size=3), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(60), deadline=None)
def test_listing_sampling_and_codes_agree(boxes: list[tuple[Parameter, ...]], constrained: bool, seed: int) -> None:
    space = ParameterSpace([SketchSpace(f"s{i}", ps, even if constrained else None) for i, ps in enumerate(boxes)])
    wanted = sorted(
        Candidate(i, values)
        for i, ps in enumerate(boxes)
        for values in itertools.product(*(p.domain for p in ps))
        if not constrained or sum(values) % 2 == 0
    )
    listed = space.listed()
    assert listed is not None
    assert sorted(space.candidates(listed)) == wanted
    assert np.array_equal(space.encode(space.candidates(listed)), listed)
    assert len(np.unique(space.keys(listed))) == len(listed)
    assert all(space.contains(c) for c in wanted)
    rng = np.random.default_rng(seed)
    if not wanted:
        with pytest.raises(ScheduleError, match="got none"):
            space.sample(rng, 1)
        return
    assert sorted(space.candidates(space.sample(rng, len(wanted) + 5))) == wanted
    few = space.candidates(space.sample(rng, 3))
    assert len(set(few)) == min(3, len(wanted)) and set(few) <= set(wanted)
    points = space.coordinates(listed)
    assert ((points >= 0) & (points <= 1)).all()
    assert len(np.unique(points.round(12), axis=0)) == len(listed)
    assert np.isfinite(space.features(listed, np.array([[3, 0], [7, 9]]))).any(axis=2).all()


def test_rejection_fills_a_large_space_and_shares_between_sketches() -> None:
    space = ParameterSpace([wide(), flat()])
    assert space.listed() is None
    codes = space.sample(np.random.default_rng(0), 200)
    assert len(space.distinct(codes)) == 200 and space.valid(codes).all()
    assert (codes[:, 0] == 1).sum() == 15  # all there are


@pytest.mark.slow
def test_large_space_without_legal_points_raises() -> None:
    never = SketchSpace("never", wide().parameters, lambda rows: np.zeros(len(rows), dtype=np.bool_))
    with pytest.raises(ScheduleError, match=r"'never' \(2097152 random points tried\)"):
        ParameterSpace([never]).sample(np.random.default_rng(0), 4)


def test_spaces_beyond_64_bits_still_tell_points_apart() -> None:
    space = ParameterSpace([SketchSpace("huge", tuple(Parameter(f"p{i}", tuple(range(64))) for i in range(12)))])
    codes = space.sample(np.random.default_rng(0), 500)
    keys = space.keys(codes)
    assert keys.dtype.kind == "V" and len(np.unique(keys)) == 500
    assert np.array_equal(space.distinct(np.concatenate([codes, codes[:7]])), codes)


@pytest.mark.parametrize("seed", range(3))
def test_children_stay_in_the_box_and_differ_from_parents(seed: int) -> None:
    space = ParameterSpace([tiles(), flat(), SketchSpace("fixed", (Parameter("x", (3,)),))])
    rng = np.random.default_rng(seed)
    parents = space.sample(rng, 90)
    for children in (mutate(space, rng, parents), crossover(rng, parents, 200)):
        position = children[:, 1:]
        assert ((position >= 0) & (position < space.domain_sizes[children[:, 0]])).all()
    mutants = mutate(space, rng, parents)
    changed = (mutants != parents).sum(axis=1)
    assert changed.max() <= 3 and (changed > 0).mean() > 0.5 and (mutants[:, 0] == parents[:, 0]).all()


def test_features_of_a_union_do_not_mix_meanings() -> None:
    def two(rows: np.ndarray, shapes: np.ndarray) -> np.ndarray:
        return np.stack(
            [
                np.repeat(rows[:, :1], len(shapes), axis=1),
                np.repeat(shapes[None, :, 0], len(rows), axis=0),
            ],
            axis=2,
        ).astype(np.float32)

    space = ParameterSpace([SketchSpace("a", (Parameter("x", (1, 2)),), features=two), flat()])
    codes = space.encode([Candidate(0, (2,)), Candidate(1, (8, 9))])
    shapes = np.array([[4], [16]])
    values = space.features(codes, shapes)
    assert values.dtype == np.float32 and values.shape[:2] == (2, 2)
    assert values[0, :, :2].tolist() == [[2, 4], [2, 16]] and np.isnan(values[0, :, 2:-1]).all()
    assert np.isnan(values[1, :, :2]).all() and np.isfinite(values[1, :, 2:]).all()
    assert values[:, 0, -1].tolist() == [0, 1]


def test_parameters_of_one_name_share_an_axis() -> None:
    space = ParameterSpace(
        [SketchSpace("a", (Parameter("tile", (1, 4)),)), SketchSpace("b", (Parameter("tile", (2, 16)),))]
    )
    points = space.coordinates(space.encode([Candidate(0, (4,)), Candidate(1, (2,)), Candidate(1, (16,))]))
    assert points.tolist() == [[2 / 3, 1, 0], [1 / 3, 0, 1], [1.0, 0, 1]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Parameter("x", ()),
        lambda: Parameter("x", (1, 1)),
        lambda: ParameterSpace([]),
        lambda: ParameterSpace([flat(), flat()]),
        lambda: ParameterSpace([SketchSpace("s", (Parameter("x", (1,)), Parameter("x", (2,))))]),
    ],
)
def test_malformed_spaces_are_refused(make: object) -> None:
    with pytest.raises(UserError):
        make()  # type: ignore[operator]


def test_candidate_keys() -> None:
    assert Candidate(1, (64, 2)).key == "1:64,2" and Candidate(0, ()).key == "0:"
    assert Candidate(0, (9,)) < Candidate(1, (1,))
