"""Trees of files predict as xgboost's own, and altered files are read or rejected; none ends the process."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.effort import examples

from relax_tune.errors import UserError
from relax_tune.tuner.learn.prior import Coverage, Prior
from relax_tune.tuner.learn.trees import MOST_NODES, NO_CHILD, Trees

xgb = pytest.importorskip("xgboost", reason="xgboost is not installed (extra tune)")
COLUMNS = 6


def rows(count: int, seed: int) -> np.ndarray:
    dice = np.random.default_rng(seed)
    return np.where(dice.random((count, COLUMNS)) < 0.1, np.nan, dice.normal(size=(count, COLUMNS)) * 8).astype(
        np.float32
    )


@pytest.fixture(scope="module")
def booster() -> object:
    x = rows(600, 0)
    y = np.nan_to_num(x).sum(axis=1) + np.nan_to_num(x[:, 0] * x[:, 1])
    return xgb.train({"max_depth": 5, "nthread": 1, "base_score": 1.25, "seed": 0}, xgb.DMatrix(x, label=y), 12)


@pytest.fixture
def saved(booster: object, tmp_path: Path) -> Path:
    names = tuple(f"column {n}" for n in range(COLUMNS))
    Prior("processor", names, Trees.of(booster), Coverage(lanes=8), {"rows": 600}).save(tmp_path / "small.prior")
    return tmp_path / "small.prior"


def walked(trees: Trees, x: np.ndarray) -> np.ndarray:
    """The sums for rows (N, F), by walking each tree for each row."""
    total, start = np.full(len(x), trees.base), 0
    for count in trees.counts:
        for at, row in enumerate(x):
            node = start
            while trees.left[node] != NO_CHILD:
                tested = row[trees.feature[node]]
                left = bool(trees.default_left[node]) if np.isnan(tested) else tested < trees.value[node]
                node = start + (trees.left[node] if left else trees.right[node])
            total[at] += trees.value[node]
        start += count
    return total


def test_trees_of_file_predict_as_the_trained_model(booster: xgb.Booster, saved: Path) -> None:
    x, prior = rows(400, 1), Prior.read(saved)
    np.testing.assert_array_equal(prior.log_time(x), booster.inplace_predict(x).astype(np.float64))
    np.testing.assert_allclose(prior.log_time(x), walked(prior.trees, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("digits", [-4, -1, 1, 4])
def test_last_digits_of_features_do_not_change_predictions(booster: xgb.Booster, saved: Path, digits: int) -> None:
    """The thresholds are values of training rows, and processors compute logarithms with different last digits."""
    x, prior = rows(600, 0), Prior.read(saved)
    inner = prior.trees.left != NO_CHILD
    assert np.isin(prior.trees.value[inner], x).mean() > 0.9
    moved = (x.view(np.int32) + np.where(np.isnan(x), 0, digits).astype(np.int32)).view(np.float32)
    np.testing.assert_array_equal(prior.log_time(moved), prior.log_time(x))
    np.testing.assert_array_equal(prior.log_time(x), booster.inplace_predict(x).astype(np.float64))


def parts(saved: Path) -> tuple[dict[str, object], bytes]:
    head, _, trees = saved.read_bytes().partition(b"\n")
    return json.loads(head), zlib.decompress(trees)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("left", 1 << 30), ("left", -2), ("left", 0), ("right", 1 << 20), ("right", NO_CHILD), ("feature", COLUMNS), ("feature", -1),
        ("value", np.nan), ("value", np.inf), ("default_left", 2), ("counts", 0), ("counts", 1 << 31),
    ],
)  # fmt: skip
def test_file_of_one_altered_number_is_refused(saved: Path, column: str, value: float) -> None:
    prior = Prior.read(saved)
    altered = getattr(prior.trees, column).copy()
    altered[0] = value
    replace(prior, trees=replace(prior.trees, **{column: altered})).save(saved)
    with pytest.raises(UserError, match="not a prior"):
        Prior.read(saved)


def test_file_of_a_shared_node_or_a_deep_tree_is_refused(saved: Path) -> None:
    prior = Prior.read(saved)
    shared = prior.trees.right.copy()
    shared[0] = prior.trees.left[0]
    depth = 200  # a chain: each inner node has a leaf and the next inner node
    index = np.arange(2 * depth + 1, dtype=np.int32)
    inner = (index % 2 == 0) & (index < 2 * depth)
    chain = Trees(
        np.array([2 * depth + 1]), np.where(inner, index + 1, NO_CHILD).astype("<i4"), np.where(inner, index + 2, NO_CHILD).astype("<i4"),
        np.zeros_like(index), np.zeros(len(index), np.float32), np.zeros(len(index), np.uint8), 0.0,
    )  # fmt: skip
    for trees in (replace(prior.trees, right=shared), chain):
        replace(prior, trees=trees).save(saved)
        with pytest.raises(UserError, match=r"one parent|levels"):
            Prior.read(saved)


@pytest.mark.parametrize(
    "fields",
    [
        {"trees": 0}, {"trees": -1}, {"trees": True}, {"trees": 1 << 60}, {"trees": "12"}, {"nodes": MOST_NODES + 1},
        {"nodes": 1.5}, {"base": None}, {"base": float("nan")}, {"base": 1e300}, {"base": 10**400}, {"names": []},
        {"names": ["x"] * 5000}, {"names": ["x"]}, {"names": 7}, {"covers": []},
        {"covers": {"dtypes": 3}}, {"about": 5}, {"family": None, "about": None},
    ],
)  # fmt: skip
def test_file_of_an_altered_head_is_refused(saved: Path, fields: dict[str, object]) -> None:
    head, plain = parts(saved)
    saved.write_bytes(json.dumps({**head, **fields}).encode() + b"\n" + zlib.compress(plain))
    with pytest.raises(UserError, match="not a prior"):
        Prior.read(saved)


@pytest.mark.parametrize("head", [b"[" * 100_000, b"7", b'"form"', b"\xff\xfe", b'{"form": 4}'])
def test_file_of_another_head_is_refused(saved: Path, head: bytes) -> None:
    saved.write_bytes(head + b"\n" + saved.read_bytes().partition(b"\n")[2])
    with pytest.raises(UserError, match="not a prior"):
        Prior.read(saved)


def test_bomb_needs_bounded_memory(saved: Path) -> None:
    head, plain = parts(saved)
    packer = zlib.compressobj(9)
    bomb = b"".join([packer.compress(plain), *(packer.compress(bytes(1 << 20)) for _ in range(256)), packer.flush()])
    assert len(bomb) < 1 << 20
    saved.write_bytes(json.dumps(head).encode() + b"\n" + bomb)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="bytes of trees"):
            Prior.read(saved)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


MUTATE = """
import json, random, struct, sys, zlib
from pathlib import Path
import numpy as np
from relax_tune.errors import UserError
from relax_tune.tuner.learn.prior import Prior
source, count = Path(sys.argv[1]), int(sys.argv[2])
whole = source.read_bytes()
head, _, trees = whole.partition(b"\\n")
plain, counts, dice = zlib.decompress(trees), {"read": 0, "refused": 0}, random.Random(7)
numbers = (0, 1, -1, -2, 2, 127, 255, 1 << 15, 1 << 20, (1 << 31) - 1, -(1 << 31))
for number in range(count):
    if number % 4 == 0:  # bytes of the file
        data = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
    elif number % 4 == 1:  # a shorter or longer file
        at = dice.randrange(len(whole))
        data = whole[:at] + bytes(dice.randrange(200)) * dice.randint(0, 1)
    else:  # numbers of the arrays
        data = bytearray(plain)
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(len(data) // 4) * 4
            data[at : at + 4] = struct.pack("<i", dice.choice(numbers))
        data = head + b"\\n" + zlib.compress(bytes(data))
    source.with_suffix(".mutated").write_bytes(bytes(data))
    print(number, flush=True, file=sys.stderr)
    try:
        prior = Prior.read(source.with_suffix(".mutated"))
        assert prior.log_time(np.ones((5, len(prior.names)), np.float32)).shape == (5,)
        counts["read"] += 1
    except UserError:
        counts["refused"] += 1
print(json.dumps(counts))
"""


COUNT = examples(1200)


@pytest.mark.process
def test_mutated_priors_are_read_or_refused(saved: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", MUTATE, str(saved), str(COUNT)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert counts["read"] + counts["refused"] == COUNT, counts
    assert counts["read"] > COUNT // 20 and counts["refused"] > COUNT // 4, counts
