"""`tune`, `build` and `plan` of a model whose weights get types under a bound."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import relax_tune as rt
from relax_tune.ir.op.math.elementwise import Relu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.tuner.cli.app import app

RUNNER = CliRunner()
GOAL = ("--quality", "cosine>=0.99", "--samples", "samples.npz")


def command(folder: Path, *arguments: str) -> Result:
    with contextlib.chdir(folder):
        return RUNNER.invoke(app, list(arguments))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model of two products and samples of its input."""
    rng = np.random.default_rng(0)
    g = rt.GraphBuilder()
    x = g.input("x", (g.symbol("n", 1, 4), 128))
    first, second = (g.constant(n, rng.standard_normal((128, 128)).astype("f4")) for n in ("first", "second"))
    module = g.finish(g.call(Matmul(), g.call(Relu(), g.call(Matmul(), x, first)), second))
    rt.save_model(module, tmp_path / "m.relax")
    np.savez(tmp_path / "samples.npz", x=rng.standard_normal((4, 2, 128)).astype("f4"))
    return tmp_path


@pytest.mark.ccompiler
@pytest.mark.process
@pytest.mark.heavy
def test_commands_choose_show_and_choose_again(folder: Path) -> None:
    common = ("m.relax", "--target", "c", "--db", "t.db", "--effort", "quick", "--no-libraries", *GOAL)
    done = command(folder, "tune", *common, "--trials", "0", "--out", "m.rta", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)["quality"]
    assert document["bound"] == "cosine>=0.99" and document["held_out"]["cosine"] >= 0.99
    shown = command(folder, "plan", "m.rta", "--json")
    assert json.loads(shown.stdout)["quality"] == document
    assert "Front of time and quality" in shown.stderr and "on 2 held-out samples, chosen on 2" in shown.stderr
    found = rt.tune(
        rt.load_model(folder / "m.relax"),
        target="c",
        db=folder / "t.db",
        effort="quick",
        trials=0,
        libraries=False,
        quality="cosine>=0.99",
        samples=folder / "samples.npz",
    )
    assert found.work.measurements == 0 and found.quality == document == found.to_json()["quality"]
    for name, kind in document["types"].items():
        assert f"{name}: {kind}\n" in shown.stderr
    again = command(folder, "tune", *common, "--trials", "0", "--out", "again.rta")
    assert again.exit_code == 0 and "0 new measurements" in again.output, again.output
    built = command(folder, "build", *common, "--out", "built.rta")
    assert built.exit_code == 0, built.output
    assert len({(folder / f"{name}.rta").read_bytes() for name in ("m", "again", "built")}) == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        (GOAL[:2], "--quality expects --samples too"),
        (GOAL[2:], "--samples expects --quality too"),
        (("--quality", "cosine<=1", *GOAL[2:]), "expects cosine>=NUMBER, since a larger cosine is better"),
        ((*GOAL[:2], "--samples", "none.npz"), "none.npz does not exist"),
        ((*GOAL, "--precision", "f16"), "got --precision f16 for all; leave one of them out"),
    ],
)
@pytest.mark.parametrize("name", ["tune", "build"])
def test_wrong_arguments_are_refused_before_work(
    folder: Path, name: str, arguments: tuple[str, ...], words: str
) -> None:
    done = command(folder, name, "m.relax", "--target", "c", "--db", "t.db", *arguments)
    assert done.exit_code == 2 and words in done.output
    assert not (folder / "t.db").exists()
