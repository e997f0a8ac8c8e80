"""`--activations int8`: what a build says of its loss, and the settings it goes with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.support.tuner_models import QUICK

import relax_tune as rt
from relax_tune.errors import UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.math.elementwise import Relu
from relax_tune.ir.op.reduction.linalg import Matmul

pytestmark = pytest.mark.ccompiler


def two_layers() -> IRModule:
    rng = np.random.default_rng(0)
    g = GraphBuilder()
    x = g.input("x", (g.symbol("m", 1, 40), 32))
    first = g.constant("first", rng.standard_normal((32, 48)).astype(np.float32))
    second = g.constant("second", rng.standard_normal((24, 48)).astype(np.float32))
    return g.finish(g.call(Matmul(True), g.call(Relu(), g.call(Matmul(), x, first)), second))


def noted(**settings: object) -> str:
    settings = {"activations": "int8", **settings}
    artifact = rt.build(two_layers(), target="c", db="memory://", policy="generic", **settings)
    (note,) = [n for n in artifact.notes if n.startswith(("activations", "weights"))]
    return note


def cosine_of(note: str) -> float:
    return float(note.split("cosine ")[1].split(",")[0])


def test_build_says_the_loss_of_activations() -> None:
    note = noted()
    assert note.endswith("against the unquantised model, on random inputs")
    assert 0.999 < cosine_of(note) < 1


def test_precision_adds_to_the_loss() -> None:
    note = noted(activations="f32", weights="int8", precision="bf16")
    assert note.startswith("weights int8, precision bf16: ")
    assert cosine_of(note) < cosine_of(noted(activations="f32", weights="int8"))


def test_fewer_bits_lose_more() -> None:
    notes = [noted(activations="f32", weights=kind) for kind in ("int8", "int4")] + [noted(weights="int4")]
    starts = ("weights int8: ", "weights int4: ", "activations int8, weights int4: ")
    assert [note.startswith(start) for note, start in zip(notes, starts)] == [True] * 3
    int8, int4, both = map(cosine_of, notes)
    assert 1 > int8 > int4 > 0.97 and abs(int4 - both) < 0.002


def test_samples_measure_the_loss(tmp_path: Path) -> None:
    """A column a thousand times the others leaves little of them in a row's eight bits."""
    rng, file = np.random.default_rng(1), tmp_path / "calls.npz"
    np.savez(file, x=rng.standard_normal((4, 9, 32)).astype(np.float32))
    usual = cosine_of(noted(samples=str(file)))
    wide = rng.standard_normal((4, 9, 32)).astype(np.float32)
    wide[..., 3] *= 1000
    np.savez(file, x=wide)
    note = noted(samples=str(file))
    assert note.endswith(f"on the samples of {file}") and usual > 0.999
    largest = float(note.split("max_abs ")[1].split(" ")[0])
    assert largest > 10


def test_results_of_groups_are_near() -> None:
    module, x = two_layers(), np.random.default_rng(2).standard_normal((7, 32)).astype(np.float32)
    by_floats, by_whole = (
        rt.build(module, target="c", db="memory://", settings=QUICK, self_test=False, weights="int4", activations=kind)
        for kind in ("f32", "int8")
    )
    with by_floats.open() as a, by_whole.open() as b:
        (wanted,), (found,) = a.run([x]), b.run([x])
    assert not np.array_equal(found, wanted)
    np.testing.assert_allclose(found, wanted, atol=0.03 * float(np.abs(wanted).max()))


def test_results_have_eight_bits() -> None:
    module, x = two_layers(), np.random.default_rng(2).standard_normal((7, 32)).astype(np.float32)
    exact, lower = (
        rt.build(module, target="c", db="memory://", settings=QUICK, self_test=False, activations=kind)
        for kind in ("f32", "int8")
    )
    with exact.open() as a, lower.open() as b:
        (wanted,), (found,) = a.run([x]), b.run([x])
    assert not np.array_equal(found, wanted)
    np.testing.assert_allclose(found, wanted, atol=0.03 * float(np.abs(wanted).max()))
    assert {str(a.dtype) for a in lower.constants.values()} == {"int8", "int32", "float32"}


def test_unfit_samples_are_refused_before_tuning(tmp_path: Path) -> None:
    np.savez(tmp_path / "calls.npz", y=np.ones((4, 9, 32), np.float32))
    with pytest.raises(UserError, match=r"inputs, x; .*lacks x; has y"):
        rt.tune(two_layers(), target="c", db="memory://", activations="int8", samples=tmp_path / "calls.npz")


@pytest.mark.parametrize(("name", "value"), [("activations", "int8"), ("weights", "int4")])
def test_quality_excludes_a_type_for_all(name: str, value: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "calls.npz", x=np.ones((4, 9, 32), np.float32))
    with pytest.raises(UserError, match=f"{name}= {value}"):
        rt.build(
            two_layers(),
            target="c",
            db="memory://",
            quality="cosine>=0.9",
            samples=tmp_path / "calls.npz",
            **{name: value},
        )
