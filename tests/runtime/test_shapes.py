"""Shape profiles: what they count, how they merge, and which files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.effort import examples

from relax_tune.errors import RelaxTuneError, UserError
from relax_tune.runtime.artifact import new_artifact
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.shapes import EXACT, STEPS, Histogram, ShapeProfile, bin_of

VALUES = st.dictionaries(st.integers(0, 2**40) | st.integers(0, 600), st.integers(1, 5), max_size=40)
MANY = st.integers(1, 10**6).map(lambda seed: dict.fromkeys(range(seed, seed + 3 * EXACT, 2), 1))


@given(st.integers(0, 2**63 - 1))
def test_every_value_is_in_one_narrow_bin(value: int) -> None:
    lower, upper = bin_of(value)
    assert lower <= value <= upper and (upper - lower) * STEPS <= lower
    assert bin_of(lower) == bin_of(upper) == (lower, upper)
    assert bin_of(upper + 1)[0] == upper + 1


@settings(max_examples=examples(50), deadline=None)
@given(VALUES | MANY, VALUES | MANY, VALUES)
def test_merging_counts_as_one_would_have_in_any_order(a: dict[int, int], b: dict[int, int], c: dict[int, int]) -> None:
    together: dict[int, int] = {}
    for counts in (a, b, c):
        for value, count in counts.items():
            together[value] = together.get(value, 0) + count
    x, y, z = map(Histogram.of, (a, b, c))
    whole = Histogram.of(together)
    assert x.merged(y).merged(z) == z.merged(y.merged(x)) == whole
    assert whole.total == sum(together.values()) == sum(whole.values.values())
    assert whole.binned == (len(together) > EXACT) and len(whole.bins) < 1000
    if together:
        assert (whole.low, whole.high) == (min(together), max(together))
        assert {bin_of(v) for v in whole.values} == {bin_of(v) for v in together}
    if not whole.binned:
        assert whole.values == together


@settings(max_examples=examples(30), deadline=None)
@given(VALUES | MANY, VALUES)
def test_shape_profile_json_round_trip_is_equal(a: dict[int, int], b: dict[int, int]) -> None:
    profile = ShapeProfile("m")
    for value, count in a.items():
        profile.add("main", "n", Histogram.of({value: count}))
    profile.add("other", "k", Histogram.of(b or {1: 1}))
    assert ShapeProfile.from_json(profile.to_json()).to_json() == profile.to_json()


def test_model_counts_served_shapes(device: Device, small: Any, tmp_path: Path) -> None:
    program = small.program(device.info.kind)
    artifact = new_artifact(program, small.constants, {"model": "a" * 32})
    profile = ShapeProfile()
    with artifact.open(device, shapes=profile) as model:
        for n in (3, 7, 3):
            model.run([np.zeros((n, 3), np.float32)])
        with pytest.raises(UserError):
            model.run([np.zeros((3, 4), np.float32)])  # what is refused is not served
        assert profile.histograms[program.name]["n"].values == {3: 2, 7: 1}
        model.run([np.zeros((7, 3), np.float32)])
    file = tmp_path / "deeper" / "shapes.json"
    profile.save(file)
    again = ShapeProfile.read(file)
    assert again.histograms[program.name]["n"].values == {3: 2, 7: 2}
    again.merge(profile)
    assert again.histograms[program.name]["n"].total == 8
    with pytest.raises(UserError, match="for each model"):
        artifact.open(device, shapes=ShapeProfile("b" * 32))


def test_histogram_memory_is_bounded() -> None:
    profile = ShapeProfile()
    record = profile.recorder("main", ["b", "n"])
    for step in range(5000):
        record((step % 7, step * step))
    found = profile.histograms["main"]
    assert found["b"].values == {b: len(range(b, 5000, 7)) for b in range(7)}
    assert found["n"].binned and found["n"].total == 5000 and len(found["n"].bins) < 1000
    assert all(len(counts) < 5000 for _, _, counts in profile._pending)


def test_other_files_are_refused(tmp_path: Path) -> None:
    profile = ShapeProfile("m")
    profile.add("main", "n", Histogram.of({3: 1, 5: 2}))
    profile.add("main", "b", Histogram.of({1: 3}))
    whole = profile.to_json()
    file = tmp_path / "shapes.json"
    with pytest.raises(UserError, match="shape profile"):
        ShapeProfile.read(file)
    for cut in range(0, len(whole) - 2, 9):
        file.write_text(whole[:cut])
        with pytest.raises(UserError, match="shape profile"):
            ShapeProfile.read(file)
    document = json.loads(whole)
    symbol = document["functions"]["main"]["n"]
    for change in (
        {"counts": [[3, 3, 1], [5, 5, 1]]},  # another number of calls than of b
        {"counts": [[5, 5, 2], [3, 3, 1]]},
        {"counts": [[3, 4, 1], [5, 5, 2]]},
        {"counts": [[3, 3, 1], [5, 5, 2.0]]},
        {"counts": [[3, 3, -1], [5, 5, 4]]},
        {"counts": []},
        {"high": 9},
        {"low": None},
        {"binned": 1},
    ):
        document["functions"]["main"]["n"] = symbol | change
        with pytest.raises(RelaxTuneError):
            ShapeProfile.from_json(json.dumps(document))
    document["functions"]["main"]["n"] = symbol
    assert ShapeProfile.from_json(json.dumps(document)).to_json() == whole
    for name, value in (("format", "other"), ("schema", 2), ("model", None), ("functions", [])):
        with pytest.raises(RelaxTuneError):
            ShapeProfile.from_json(json.dumps(document | {name: value}))
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder"):
        profile.save(tmp_path / "folder")
