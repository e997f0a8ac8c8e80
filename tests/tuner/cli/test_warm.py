"""`warm`, and `build --cpu`: compiled kernels in artifacts and in the cache, without a second compilation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.tuner.job.job_processes import small_model
from typer.testing import CliRunner, Result

from relax_tune.runtime.artifact import load_artifact
from relax_tune.tuner.cli.app import app

pytestmark = [pytest.mark.ccompiler]
RUNNER = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with source.rta, and objects.rta of the same model with compiled kernels."""
    folder = tmp_path_factory.mktemp("warm")
    model = str(small_model(folder))
    for name, more in (("source", ()), ("objects", ("--cpu", "native"))):
        out = str(folder / f"{name}.rta")
        done = RUNNER.invoke(
            app,
            [
                "build",
                model,
                "--target",
                "c",
                "--db",
                "memory://",
                "--bound",
                "n=1:8",
                "--no-self-test",
                "--out",
                out,
                *more,
            ],
        )
        assert done.exit_code == 0, done.output
    return folder


def warm(*arguments: str) -> Result:
    return RUNNER.invoke(app, ["warm", *arguments])


def document(*arguments: str) -> list[dict[str, Any]]:
    done = warm(*arguments, "--json")
    assert done.exit_code == 0, done.output
    entries: list[dict[str, Any]] = json.loads(done.stdout)["artifacts"]
    return entries


def test_build_with_cpu_stores_objects_next_to_the_source(folder: Path) -> None:
    source, objects = (load_artifact(folder / f"{name}.rta") for name in ("source", "objects"))
    assert [o.name for o in objects.objects] == ["native"] and source.objects == ()
    assert objects.programs == source.programs


def test_warm_compiles_once_and_verifies_objects(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path))
    paths = [str(folder / "source.rta"), str(folder / "objects.rta")]
    source, objects = document(*paths)
    (compiled,), (verified,) = source["devices"], objects["devices"]
    assert compiled["compiled"] == compiled["libraries"] >= 3 and compiled["objects"] is None
    assert verified["compiled"] == 0 and verified["objects"] == "native" and objects["stored"] == ["native"]
    files = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "c").iterdir()}
    assert len(files) == compiled["libraries"] + verified["libraries"]
    (again,) = document(paths[0])[0]["devices"]
    assert again == {**compiled, "compiled": 0}
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "c").iterdir()} == files


def test_warm_without_json_prints_origin_and_time(folder: Path) -> None:
    text = " ".join(warm(str(folder / "objects.rta")).output.split())
    assert "compiled objects of the artifact (native) verified" in text and "ready in" in text


def test_warm_without_compiler_is_for_objects_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert document(str(folder / "objects.rta"))[0]["devices"][0]["compiled"] == 0
    done = warm(str(folder / "source.rta"))
    assert done.exit_code == 2 and "CC=no-such-compiler" in done.output


@pytest.mark.parametrize(("arguments", "says"), [(["none.rta"], "no such file"), ([], "Missing argument")])
def test_warm_of_wrong_arguments_fails(arguments: list[str], says: str) -> None:
    done = warm(*arguments)
    assert done.exit_code == 2 and says in done.output


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--cpu", "avx9"), "got 'avx9'"),
        (("--cpu", "native,"), "got ''"),
        (("--target", "opencl", "--cpu", "native"), "expected the target c, got opencl"),
    ],
)
def test_build_for_wrong_cpu_is_refused_before_anything_is_written(
    folder: Path, tmp_path: Path, more: tuple[str, ...], says: str
) -> None:
    out = tmp_path / "m.rta"
    arguments = ["build", str(folder / "small.onnx"), "--bound", "n=1:8", "--db", "memory://", "--out", str(out)]
    given = arguments if "--target" in more else [*arguments, "--target", "c"]
    done = RUNNER.invoke(app, [*given, *more])
    assert done.exit_code == 2 and says in done.output and not out.exists(), done.output
