"""Files of samples: their forms, their split, and the words for wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_tune.errors import UserError
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.indexing.movement import Take
from relax_tune.ir.op.math.elementwise import Add
from relax_tune.tuner.quality.samples import SplitSamples

Array = np.ndarray[Any, Any]


def model() -> IRModule:
    g = GraphBuilder()
    x, ids = g.input("x", (g.symbol("n", 1, 9), 3)), g.input("ids", (g.symbol("n", 1, 9),), i64)
    return g.finish(g.call(Add(), x, g.call(Take(), g.constant("table", np.zeros((4, 3), "f4")), ids)))


def arrays(count: int, n: int = 5) -> dict[str, Array]:
    rng = np.random.default_rng(count)
    return {"x": rng.standard_normal((count, n, 3)).astype("f4"), "ids": rng.integers(0, 4, (count, n))}


def stacked(path: Path, **found: Array) -> Path:
    np.savez(path, **found)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("count", [2, 3, 8])
def test_stacked_samples_are_split_in_halves(tmp_path: Path, count: int) -> None:
    given = arrays(count)
    found = SplitSamples.read(stacked(tmp_path / "s.npz", **given), model(), 0)
    assert found.function == "main" and len(found.validation) == count // 2
    both = [*found.choosing, *found.validation]
    assert sorted(s["x"].tobytes() for s in both) == sorted(x.tobytes() for x in given["x"])
    again = SplitSamples.read(tmp_path / "s.npz", model(), 0)
    assert [s["x"].tobytes() for s in again.validation] == [s["x"].tobytes() for s in found.validation]


def test_another_seed_holds_out_other_samples(tmp_path: Path) -> None:
    path = stacked(tmp_path / "s.npz", **arrays(20))
    splits = {tuple(s["x"].tobytes() for s in SplitSamples.read(path, model(), seed).validation) for seed in range(4)}
    assert len(splits) == 4


def test_folder_of_calls_may_have_samples_of_several_shapes(tmp_path: Path) -> None:
    for number, n in enumerate((2, 9, 4)):
        one = arrays(1, n)
        stacked(tmp_path / f"{number}.npz", **{name: a[0] for name, a in one.items()})
    found = SplitSamples.read(tmp_path, model(), 0)
    assert sorted(len(s["x"]) for s in (*found.choosing, *found.validation)) == [2, 4, 9]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"x": None}, "model's inputs, x, ids; the file lacks x"),
        ({"extra": np.zeros(2)}, "the file has extra"),
        ({"x": np.zeros((4, 5, 3))}, "x: expected f32, got float64; convert it with astype"),
        ({"x": np.zeros((5, 3), "f4")}, "x: expected 3 dims, the first of them of samples, got shape (5, 3)"),
        ({"x": np.zeros((3, 5, 3), "f4")}, "as many samples of each input, got 3 of x, 4 of ids"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, change: dict[str, Array | None], words: str) -> None:
    given = {name: a for name, a in {**arrays(4), **change}.items() if a is not None}
    given = dict(sorted(given.items(), reverse=True))
    with pytest.raises(UserError, match="--samples") as found:
        SplitSamples.read(stacked(tmp_path / "s.npz", **given), model(), 0)
    assert words in str(found.value)


def test_too_few_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"at least 2 samples, .* got 1"):
        SplitSamples.read(stacked(tmp_path / "s.npz", **arrays(1)), model(), 0)
    with pytest.raises(UserError, match=r"got a folder without \.npz files"):
        SplitSamples.read(tmp_path / "..", model(), 0)
    with pytest.raises(UserError, match="does not exist"):
        SplitSamples.read(tmp_path / "none.npz", model(), 0)
    with pytest.raises(UserError, match=r"0.npz: x: .*2 dims, .*\(4, 5, 3\)"):
        (tmp_path / "folder").mkdir()
        stacked(tmp_path / "folder" / "0.npz", **arrays(4))
        SplitSamples.read(tmp_path / "folder", model(), 0)
