"""Features: one list of names for all sketches, finite numbers, values worked out by hand, rows and arrays alike."""

from __future__ import annotations

import random

import numpy as np
import pytest
from tests.support import schedule_functions as make
from tests.support.candidates import CASES, GPU_CASES, MACHINES, WIDE, sketches_of
from tests.support.effort import thinned

from relax_tune.schedules.cost.features import FeatureFunction
from relax_tune.schedules.sketch import generate_sketches

C = WIDE


def packed_matmul() -> dict[str, float]:
    """Features of a (10, 24) x (24, 96) matmul with bias and maximum: panels of 32 packed columns, tiles of 4 rows.

    Loops: panels j_0 (3, parallel), i_0 (3), k (24), i_1 (4, unrolled), j_1 (32, vectorized).
    """
    sketch = next(s for s in generate_sketches(make.matmul(96, 24), C) if s.name == "matmul.panels.packed")
    features = FeatureFunction(sketch, C)
    row = features({"NR": np.array([32]), "MR": np.array([4]), "RG": np.array([1])}, {"m": np.array([10])})
    assert row.shape == (1, 1, len(features.names)) and row.dtype == np.float32
    values = dict(zip(features.names, row[0, 0].astype(float), strict=True))
    return {f.name: 2 ** values[f.name] - 1 if f.log else values[f.name] for f in features.features}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # multiply and add for each of 10 * 96 * 24 points, a store of zero and two operations at each of 10 * 96
        ("flops", 2 * 10 * 96 * 24 + 10 * 96 + 2 * 10 * 96),
        ("bytes", 4 * (10 * 24 + 24 * 96 + 96 + 10 * 96)),
        ("intensity", 48960 / 14400),
        # 3 * 4 rows run where 10 are needed
        ("points", 3 * 3 * 24 * 4 * 32),
        ("padding", 12 / 10),
        ("parallel", 3),
        ("waves", 2),
        ("wave_use", 3 / 4),
        ("work_each", 3 * 24 * 4 * 32),
        ("flops_each", 48960 / 3),
        ("vector", 32),
        ("vectors", 2),
        ("lane_use", 1),
        ("tile_rows", 4),
        # 4 rows of 2 vectors accumulate; with them 2 vectors of W and 1 element of A
        ("registers", 8),
        ("register_use", 11 / 32),
        ("loads_per_point", 6 / 8),
        ("inner_trip", 24),
        ("outer_trip", 3),
        ("trip_each", 72),
        # C: 4 x 32, A: 4 x 24, packed W: 24 x 32
        ("tile_bytes", 4 * (4 * 32 + 4 * 24 + 24 * 32)),
        ("tile_l1", 3968 / (48 << 10)),
        # 12 rows of tiles touch no more than the 10 there are
        ("worker_bytes", 4 * (10 * 32 + 10 * 24 + 24 * 32)),
        ("all_bytes", 4 * (10 * 96 + 10 * 24 + 24 * 96)),
        ("traffic", 3 * 5312),
        # the store of zero and the last block each run on 3 * 3 tiles of 4 x 32
        ("other_work", 3 * 3 * 4 * 32 * (1 + 2)),
        ("scalar_work", 0),
        ("tail_pow2", 1),
        ("tail_peel", 0),
        ("guarded", 3),
        ("prepared", 1),
        ("blocks", 3),
        ("scratch", 4 * 24 * 96),
        # A does not move along the columns, the packed W moves by one
        ("stride0", 0),
        ("stride1", 1),
        ("stride2", 0),
        ("tile0", 4 * 4 * 24),
        ("tile1", 4 * 24 * 32),
        ("worker0", 4 * 10 * 24),
        ("worker1", 4 * 24 * 32),
        ("whole0", 4 * 10 * 24),
        ("whole1", 4 * 24 * 96),
        ("whole2", 0),
    ],
)
def test_features_of_matmul_match_hand_values(name: str, value: float, by_name: dict[str, float]) -> None:
    assert by_name[name] == pytest.approx(value, rel=2e-5, abs=1e-6)


@pytest.fixture(scope="module")
def by_name() -> dict[str, float]:
    return packed_matmul()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "machine"), thinned((n, m) for m in MACHINES for n in (GPU_CASES if m == "gpu" else CASES))
)
def test_features_of_all_sketches_agree_in_names_and_are_finite(name: str, machine: str) -> None:
    names = FeatureFunction(sketches_of("pointwise 1", machine)[1][-1], MACHINES[machine]).names
    assert len(set(names)) == len(names)
    shapes, (func, sketches) = CASES[name][1], sketches_of(name, machine)
    rng = random.Random(name)
    points = [*shapes, {v.name: 2048 for v in func.symbols}] if func.symbols else [{}]
    columns = {v.name: np.array([p[v.name] for p in points]) for v in func.symbols}
    for sketch in sketches:
        features = FeatureFunction(sketch, MACHINES[machine])
        assert features.names == names
        rows = [{t.name: rng.choice(t.domain) for t in sketch.tunables} for _ in range(3)] if sketch.tunables else [{}]
        together = features({t.name: np.array([r[t.name] for r in rows]) for t in sketch.tunables}, columns)
        assert together.shape == (len(rows), len(points), len(features.names))
        assert np.isfinite(together).all(), [
            features.names[at] for at in np.flatnonzero(~np.isfinite(together).all(axis=(0, 1)))
        ]
        for a, row in enumerate(rows):
            for b, point in enumerate(points):
                single_row = features(
                    {k: np.array([v]) for k, v in row.items()},
                    {v.name: np.array([point[v.name]]) for v in func.symbols},
                )
                np.testing.assert_array_equal(single_row[0, 0], together[a, b])


def test_features_of_fitting_tile_show_no_padding() -> None:
    sketch = next(s for s in generate_sketches(make.matmul(96, 24), C) if s.name == "matmul.panels.packed")
    features = FeatureFunction(sketch, C)
    heights = np.array([1, 2, 5, 6, 10, 14])
    out = features({"NR": np.full(6, 32), "MR": heights, "RG": np.full(6, 1)}, {"m": np.array([10])})
    padding = 2 ** out[:, 0, features.names.index("padding")] - 1
    np.testing.assert_allclose(padding, -(-10 // heights) * heights / 10, rtol=1e-5)
