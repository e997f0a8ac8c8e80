"""`import relax_tune as rt`: what it offers, and that it means what the commands mean."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.tuner_models import feed_forward, feed_forward_reference, row_scale

import relax_tune as rt
from relax_tune.database.store import open_store
from relax_tune.errors import ArtifactError, BuildError, DatabaseError, ParseError, UserError, VerifyError
from relax_tune.ir.deduce.pattern_kinds import PatternKind
from relax_tune.ir.op.math.elementwise import MulScalar, Relu
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.op.reduction.reduce import Softmax
from relax_tune.ir.rewrite.pattern import op, tir
from relax_tune.ir.rewrite.rules import LEVELS, LevelName
from relax_tune.tuner.job.device_job import DeviceJob
from relax_tune.tuner.job.progress import TuningProgress, TuningSummary

QUICK = {"target": "c", "trials": 2, "effort": "quick"}

pytestmark = pytest.mark.self_test


def test_public_names_are_documented_objects() -> None:
    assert len(rt.__all__) == 51 and set(rt.__all__) <= set(dir(rt))
    for name in rt.__all__:
        assert getattr(rt, name).__doc__, name
    with pytest.raises(AttributeError, match=r"no attribute 'tuna'; it has .*tune"):
        rt.tuna  # noqa: B018


@pytest.mark.opencl
@pytest.mark.ccompiler
def test_artifact_with_library_opens_only_on_recorded_device(tmp_path: Path) -> None:
    graph = rt.GraphBuilder()
    x = graph.input("x", (graph.symbol("n", 1, 32), 8))
    w = np.ones((8, 4), np.float32)
    module = graph.finish(graph.call(Matmul(), x, graph.constant("w", w)))
    built = rt.build(module, target="opencl", db="memory://", policy="library")
    assert not built.program.kernels
    with rt.load(built.save(tmp_path / "m.rta"), "opencl") as model:
        np.testing.assert_array_equal(model.run([np.ones((3, 8), np.float32)])[0], np.full((3, 4), 8))


@pytest.mark.process
def test_running_imports_nothing_of_the_tuner() -> None:
    script = "import sys, relax_tune as rt; rt.load, rt.Model, rt.Artifact; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "relax_tune.runtime.artifact" in names
    for heavy in (
        "xgboost",
        "optuna",
        "sqlalchemy",
        "rich",
        "relax_tune.ir",
        "relax_tune.tuner",
        "relax_tune.database",
    ):
        assert heavy not in names


@pytest.mark.process
def test_api_missing_package_error_names_the_extra() -> None:
    script = (
        "import sys; sys.modules['sqlalchemy'] = None\n"
        "import relax_tune as rt\n"
        "try: rt.open_database\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "relax_tune.open_database needs the package sqlalchemy, which is not installed; pip install 'relax-tune[tune]'\n"
    )


@pytest.mark.process
@pytest.mark.parametrize("package", ["typer", "sqlalchemy"])
def test_command_missing_package_error_names_the_extra(package: str) -> None:
    script = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv[1:] = ['db', 'stats']\n"
        "from relax_tune.tuner.cli.start import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    wanted = f"error: expected the package {package}, got none; pip install 'relax-tune[tune]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", wanted)


@pytest.mark.ccompiler
def test_tune_build_save_load_run(tmp_path: Path) -> None:
    module, records = feed_forward(), tmp_path / "records.db"
    seen: list[TuningProgress] = []
    result = rt.tune(module, db=records, on_progress=seen.append, **QUICK)
    assert seen and result.work.measurements > 0 and result.work.problems == ()
    assert {row.name for row in result.tasks} == {p.task for p in seen}
    assert result.secs is not None and result.secs > 0 and result.notes == ()
    assert result.to_json()["measurements"] == result.work.measurements

    with rt.open_database(f"sqlite:///{records}", create=False, read_only=True) as store:
        found = store.query(result.target.key)
        assert len(found) == result.work.measurements
        assert {m.workload for m in found} == {row.key for row in result.tasks}
        assert all(m.checked for m in store.query(result.target.key, status="ok"))

        artifact = rt.build(module, target="c", db=store, effort="quick")
        assert store.targets()  # a store that was given stays open
    assert artifact.notes == ()
    assert [str(s) for s in artifact.inputs] == ["x: float32 (n, 24)"]
    assert [s.shape for s in artifact.outputs] == [("n", 24)]

    path = artifact.save(tmp_path / "model.rta")
    assert rt.load_artifact(path).save(tmp_path / "again.rta").read_bytes() == path.read_bytes()
    with rt.load(path) as model:
        assert model.inputs == artifact.inputs
        for n in (1, 7, 128):
            x = np.random.default_rng(n).standard_normal((n, 24)).astype(np.float32)
            (by_name,), (in_order,) = model.run({"x": x}), model.run([x])
            assert np.array_equal(by_name, in_order)
            np.testing.assert_allclose(by_name, feed_forward_reference(module, x), rtol=1e-4, atol=1e-4)
        with pytest.raises(UserError, match=r"n <= 128, got 129"):
            model.run({"x": np.zeros((129, 24), np.float32)})

    again = rt.tune(module, db=records, **QUICK)
    assert again.work.measurements == 0 and again.tasks == result.tasks


@pytest.mark.ccompiler
def test_an_open_store_stays_open_and_memory_is_enough() -> None:
    with rt.open_database("memory://") as store:
        result = rt.tune(row_scale(), db=store, **QUICK)
        assert store.count(result.target.key) == result.work.measurements > 0


@pytest.mark.ccompiler
def test_tune_warns_of_notes_and_records_may_be_required(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine, and a device that is lost before anything is measured."""
    lost = TuningSummary(problems=(("softmax", "the device is lost"),), contention=0.5)
    monkeypatch.setattr(DeviceJob, "tune", lambda *_: lost)
    monkeypatch.setattr(DeviceJob, "store_plans", lambda *_: None)
    with rt.open_database("memory://") as store:
        with pytest.warns(rt.RelaxTuneWarning) as caught:
            result = rt.tune(row_scale(), db=store, self_test=False, **QUICK)
        texts = [str(w.message) for w in caught]
        assert "the device is lost" in texts[0] and "50%" in texts[1] and texts[2:] == list(result.notes)
        assert result.notes and {w.filename for w in caught} == {__file__}
        with pytest.raises(BuildError, match=r"1 of 1.*softmax"):
            rt.tune(row_scale(), db=store, self_test=False, require_measured=True, **QUICK)


def test_database_named_like_another_is_created_with_a_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rt.open_database(tmp_path / "records.db").close()
        rt.open_database(tmp_path / "records.db").close()
        rt.open_database(tmp_path / "other.db").close()
    with pytest.raises(DatabaseError, match=r"did you mean .*records\.db"):
        rt.open_database(tmp_path / "recrods.db", create=False)
    with pytest.warns(rt.RelaxTuneWarning, match=r"recrods\.db is new.*records\.db") as caught:
        rt.open_database(tmp_path / "recrods.db").close()
    assert caught[0].filename == __file__


def test_build_from_a_missing_database_is_refused_and_makes_none(tmp_path: Path) -> None:
    open_store(f"sqlite:///{tmp_path / 'records.db'}").close()
    (tmp_path / "recordz.db").write_text("no database")
    before = set(tmp_path.iterdir())
    for name in ("record.db", "recrods.db", "Records.db"):
        for url in (tmp_path / name, f"sqlite:///{tmp_path / name}"):
            with pytest.raises(DatabaseError, match=rf"no file exists .*did you mean {tmp_path / 'records.db'}\?"):
                rt.build(row_scale(), target="c", db=url, self_test=False)
    with pytest.raises(DatabaseError, match="no file exists at this path; correct"):
        rt.build(row_scale(), target="c", db=tmp_path / "elsewhere.db", self_test=False)
    with pytest.raises(DatabaseError, match="no file"):
        rt.build(row_scale(), target="c", db=tmp_path / "no" / "r.db", self_test=False)
    assert set(tmp_path.iterdir()) == before
    with pytest.raises(DatabaseError, match="malformed"):
        rt.build(row_scale(), target="c", db="nonsense")


@pytest.mark.ccompiler
def test_build_without_records_warns_and_records_may_be_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty database, one of another device, and this user's that is not there yet; memory:// is empty on purpose."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = tmp_path / "records.db"
    open_store(f"sqlite:///{path}").close()
    options: dict[str, Any] = {"target": "c", "self_test": False}
    for db in (path, None):
        with pytest.warns(UserWarning, match="1 of 1 tasks .*for c in sqlite:.*softmax.*relax-tune tune") as found:
            rt.build(row_scale(), db=db, **options)
        assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rt.build(row_scale(), db="memory://", **options)
        rt.build(row_scale(), db=path, policy="generic", **options)
    for empty in (path, None, "memory://"):
        with pytest.raises(BuildError, match=r"1 of 1.*softmax"):
            rt.build(row_scale(), db=empty, require_measured=True, **options)
    for policy in ("generic", "library", "predicted"):
        with pytest.raises(UserError, match=r"require_measured.*policy"):
            rt.build(row_scale(), db=path, policy=policy, require_measured=True, **options)


@pytest.mark.ccompiler
def test_build_with_all_records_warns_of_nothing() -> None:
    with rt.open_database("memory://") as store, warnings.catch_warnings():
        rt.tune(row_scale(), db=store, **QUICK)  # a busy machine causes a warning here
        warnings.simplefilter("error")
        for policy in ("measured", "stored"):
            rt.build(
                row_scale(),
                db=store,
                policy=policy,
                require_measured=True,
                **{k: v for k, v in QUICK.items() if k != "trials"},
            )


@pytest.mark.ccompiler
@pytest.mark.parametrize("name", ["softmax", "0.weight", "onnx::MatMul_1"])
def test_weight_keeps_the_name_of_the_model(name: str, tmp_path: Path) -> None:
    graph = rt.GraphBuilder()
    x, w = graph.input("x", (graph.symbol("n", 1, 8), 4)), graph.constant(name, np.ones((4, 4), np.float32))
    rows = graph.call(Softmax(), graph.call(Matmul(), x, w))
    artifact = rt.build(graph.finish(graph.call(Matmul(), rows, w)), target="c", db="memory://", self_test=False)
    with rt.load(artifact.save(tmp_path / "m.rta")) as model:
        np.testing.assert_allclose(model.run([np.ones((3, 4), np.float32)])[0], np.ones((3, 4)))


@pytest.mark.ccompiler
def test_precision_halves_the_weights_of_products() -> None:
    module = feed_forward()
    artifact = rt.build(module, target="c", db="memory://", precision="bf16", pack=False)
    stored = {name: str(array.dtype) for name, array in artifact.constants.items()}
    wide = dict.fromkeys(("b1", "b2", "scale", "shift"), "float32")
    assert stored == wide | dict.fromkeys(("w1.bf16", "w2.bf16"), "bfloat16")
    x = np.random.default_rng(0).standard_normal((5, 24)).astype(np.float32)
    with artifact.open() as model:
        (found,) = model.run([x])
    np.testing.assert_allclose(found, feed_forward_reference(module, x), atol=8 * 2.0**-8)
    with pytest.raises(UserError, match=r"precision=.*'bfloat16'"):
        rt.build(module, target="c", precision="bfloat16")


@pytest.mark.ccompiler
def test_api_wrong_argument_error_names_the_wanted(tmp_path: Path) -> None:
    module = row_scale()
    with pytest.raises(UserError, match="strategy= expects one of"):
        rt.tune(module, target="c", db="memory://", strategy="luck")
    with pytest.raises(UserError, match="bounds apply"):
        rt.build(module, target="c", db="memory://", bounds={"n": (1, 4)})
    with pytest.raises(UserError, match="measured, stored, predicted, library, generic; got 'best'"):
        rt.build(module, target="c", db="memory://", policy="best")  # type: ignore[arg-type]
    with pytest.raises((UserError, ParseError), match="no such file or folder"):
        rt.build(tmp_path / "nothing", target="c", db="memory://")
    with pytest.raises(DatabaseError, match="mysql"):
        rt.build(module, target="c", db="mysql://u@h/x")
    with pytest.raises(ArtifactError, match=r"nothing\.rta"):
        rt.load(tmp_path / "nothing.rta")


@pytest.mark.ccompiler
@pytest.mark.parametrize("level", LEVELS)
def test_rules_of_every_level_are_built(level: LevelName) -> None:
    pattern = tir("x", kind=PatternKind.ELEMENTWISE) if level in ("functions", "fused") else op(Relu, "x")
    rule = rt.Rule(pattern, lambda site: site.call(MulScalar(2.0), "x"), level=level)
    graph = rt.GraphBuilder()
    module = graph.finish(graph.call(Relu(), graph.input("x", (graph.symbol("n"), 4))))
    x = np.float32([[-1, 0, 1, 2]])
    with rt.build(module, target="c", db="memory://", policy="generic", rules=[rule]).open() as model:
        np.testing.assert_array_equal(model.run([x])[0], 2 * x)


def test_api_ill_formed_function_error_shows_excerpt() -> None:
    own = rt.parse_prim_func(
        "@prim_func(outputs=1)\ndef own(x: Buffer((n,), f32), y: Buffer((n,), f32)):\n    for i in serial(n):\n        x[i] = y[i]"
    )
    graph = rt.GraphBuilder()
    x = graph.input("x", (graph.symbol("n"),))
    module = graph.finish(graph.call_tir(graph.add(own), [x], x.info))
    with pytest.raises(VerifyError, match=r"own: .*x[\s\S]*\n +\| +\^"):
        rt.build(module, target="c", db="memory://")
