"""Libraries that packages bring by entry points: measured beside everything else, dispatched, and refused when they are wrong."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import relax_tune as rt
from relax_tune.errors import BuildError
from relax_tune.ir.op.reduction.reduce import Softmax
from relax_tune.runtime.library.registry import open_libraries
from relax_tune.tuner.cli import doctor
from relax_tune.tuner.cli.doctor import examine
from relax_tune.tuner.task.alternatives import all_alternatives

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_library"
POINTS = {
    group.split(".")[1]: points["own"]
    for group, points in tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"].items()
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages that every process sees, with one that brings a library."""
    folder = tmp_path / "site"
    shutil.copytree(EXAMPLE / "own_library", folder / "own_library")
    installed(folder, **POINTS)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    yield folder
    for name in [n for n in sys.modules if n.split(".")[0] == "own_library"]:
        del sys.modules[name]


def installed(folder: Path, libraries: str, alternatives: str) -> None:
    """What pip leaves of a package."""
    about = folder / "own_library-1.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-library\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        f"[relax_tune.libraries]\nown = {libraries}\n[relax_tune.alternatives]\nown = {alternatives}\n"
    )


@pytest.mark.ccompiler
def test_user_routine_is_measured_and_dispatched(package: Path, tmp_path: Path) -> None:
    graph = rt.GraphBuilder()
    x = graph.input("x", (2, graph.symbol("n", 1, 32), 9))
    module, records = graph.finish(graph.call(Softmax(), x)), tmp_path / "records.db"
    result = rt.tune(module, target="c", db=records, trials=1, effort="quick")
    assert not result.work.problems
    with rt.open_database(str(records), create=False, read_only=True) as store:
        found = {
            (r.variant.sketch, r.status, r.checked)
            for r in store.query(result.target.key)
            if r.variant.kind == "library"
        }
    assert found == {("own.softmax", "ok", True)}
    artifact = rt.build(module, target="c", db=records, policy="library", effort="quick")
    given = np.random.default_rng(0).standard_normal((2, 5, 9)).astype(np.float32)
    wanted = np.exp(given) / np.exp(given).sum(-1, keepdims=True)
    with rt.load(artifact.save(tmp_path / "softmax.rta")) as model:
        np.testing.assert_allclose(model.run([given])[0], wanted, rtol=1e-5)
    targets = {s.target for c in artifact.program.calls for v in c.variants for s in v.steps}
    assert targets == {"own.softmax"}


@pytest.mark.process
@pytest.mark.parametrize(
    ("library", "alternative", "message"),
    [
        ("own_library.routines:Lines", "", r"package own-library, .*libraries 'own': .*Lines cannot be imported"),
        ("no_such_module:Library", "", r"no_such_module:Library cannot be imported: ModuleNotFoundError"),
        ("own_library.routines:np", "", r"opens a library, got 'module' object"),
        ("relax_tune.runtime.library.openblas:OpenBlas", "", r"library of an unused name.* got 'openblas'"),
        ("", "own_library.alternatives:graph", r"expected an Alternative or several, got <"),
        ("", "relax_tune.ir.passes.library.library_forms:ALTERNATIVES", r"expected one entry for 'openblas\.sgemm', got a second"),
    ],
)  # fmt: skip
def test_wrong_library_package_is_named(package: Path, library: str, alternative: str, message: str) -> None:
    if "openblas" in library and importlib.util.find_spec("scipy_openblas32") is None:
        pytest.skip("needs the scipy-openblas32 package")
    installed(package, library or POINTS["libraries"], alternative or POINTS["alternatives"])
    with pytest.raises(BuildError, match=message):
        if library:
            open_libraries()
        else:
            all_alternatives()
    # the whole examination takes seconds, once is enough
    findings = examine("memory://") if "no_such_module" in library else doctor._libraries(os.environ)
    (finding,) = (f for f in findings if f.area == "library")
    assert finding.state == "missing" and "own-library" in finding.result and finding.advice
