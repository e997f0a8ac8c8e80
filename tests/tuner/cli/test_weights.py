"""`relax-tune weights`: a built artifact with other weights from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.effort import GENERIC
from tests.tuner.cli.cli_model import make_bert
from typer.testing import CliRunner

import relax_tune as rt
from relax_tune.tuner.cli.app import app

pytestmark = [pytest.mark.ccompiler, pytest.mark.slow]
RUNNER = CliRunner()
IDS = np.array([[2, 5, 7]])
BUILD: dict[str, Any] = {
    "target": "c",
    "db": "memory://",
    "bounds": {"b": (1, 2), "n": (1, 8)},
    "self_test": False,
    **GENERIC,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models of one structure, one of another, and an artifact of the first."""
    root = tmp_path_factory.mktemp("weights")
    make_bert(root / "base")
    make_bert(root / "tuned", seed=5)
    rt.build(root / "base", **BUILD).save(root / "base.rta")
    return root


def weights(*arguments: object, code: int = 0) -> str:
    done = RUNNER.invoke(app, ["weights", *map(str, arguments)])
    assert done.exit_code == code, f"{done.output}{done.exception!r}"
    return done.stdout if code == 0 else done.stderr


def result(artifact: Path) -> np.ndarray:  # type: ignore[type-arg]
    with rt.load(artifact) as model:
        out: np.ndarray = model(IDS, np.ones_like(IDS))[0]  # type: ignore[type-arg]
        return out


def test_weights_equals_a_build_of_the_other_model(place: Path) -> None:
    answer = json.loads(weights(place / "base.rta", place / "tuned", "--out", place / "tuned.rta", "--json"))
    assert answer["artifact"] == str(place / "tuned.rta")
    built = rt.build(place / "tuned", **BUILD)
    built.save(place / "built.rta")
    assert answer["model"] == built.manifest["extra"]["model"]
    np.testing.assert_array_equal(result(place / "tuned.rta"), result(place / "built.rta"))
    assert np.abs(result(place / "tuned.rta") - result(place / "base.rta")).max() > 1e-3


def test_weights_overwrites_no_artifact_of_another_model(place: Path) -> None:
    before = (place / "base.rta").read_bytes()
    assert "of another model" in weights(place / "base.rta", place / "tuned", "--out", place / "base.rta", code=2)
    assert (place / "base.rta").read_bytes() == before


@pytest.mark.parametrize(
    ("artifact", "model", "message"),
    [("none.rta", "tuned", "none.rta"), ("base.rta", "nowhere", "nowhere"), ("tuned", "tuned", "tuned")],
)
def test_weights_of_wrong_files_are_refused(place: Path, artifact: str, model: str, message: str) -> None:
    assert message in weights(place / artifact, place / model, "--out", place / "x.rta", code=2)
    assert not (place / "x.rta").exists()


def test_weights_of_another_structure_are_refused(place: Path) -> None:
    graph = rt.GraphBuilder()
    x = graph.input("x", (graph.symbol("n", 1, 16), 8))
    weight = graph.constant("weight", np.ones((8, 4), np.float32))
    from relax_tune.ir.op.reduction.linalg import Matmul

    rt.build(graph.finish(graph.call(Matmul(), x, weight)), target="c", db="memory://", self_test=False).save(
        place / "other.rta"
    )
    weights(place / "other.rta", place / "tuned", "--out", place / "x.rta", code=2)
    assert not (place / "x.rta").exists()
