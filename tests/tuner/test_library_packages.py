"""Libraries that packages bring by entry points: measured beside everything else, dispatched, and refused when they are wrong."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import relax_tune as rt
from relax_tune.errors import BuildError
from relax_tune.ir.op.reduce import Softmax
from relax_tune.runtime.library.registry import open_libraries
from relax_tune.tuner.alternatives import all_alternatives
from relax_tune.tuner.doctor import examine

ROWS = '''
import numpy as np
from relax_tune.errors import MeasureError


class Rows:
    """Row softmax in NumPy."""

    name = "rows"
    routines = {"rows.softmax": ("n", "k")}

    def fingerprint(self):
        return (("numpy", np.__version__),)

    def bind(self, routine, device, buffers, scalars):
        n, k = scalars
        launch = device.bind_host(lambda views: self.softmax(views, n, k), buffers)
        if launch is None:
            raise MeasureError("rows: wanted a device that shares memory with the host")
        return launch

    def softmax(self, views, n, k):
        x, space, y = (v[: n * k * 4].view(np.float32).reshape(n, k) for v in views)
        np.exp(x - x.max(1, keepdims=True), out=space)
        np.divide(space, space.sum(1, keepdims=True), out=y)
'''

ENTRIES = """
import relax_tune as rt
from relax_tune.ir.op.reduce import Softmax
from relax_tune.ir.passes.alternatives import Alternative, whole

graph = rt.GraphBuilder()
reference = graph.finish(graph.call(Softmax(), graph.input("x", (graph.symbol("n"), graph.symbol("k")))))
SOFTMAX = Alternative(
    "rows.softmax", whole(reference), scalars=("n", "k"), targets=("c",), workspace=lambda size: size["n"] * size["k"] * 4
)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages that every process sees, with one that brings a library."""
    folder = tmp_path / "site"
    (folder / "rows_package").mkdir(parents=True)
    (folder / "rows_package" / "__init__.py").write_text("")
    (folder / "rows_package" / "routines.py").write_text(ROWS)
    (folder / "rows_package" / "entries.py").write_text(ENTRIES)
    installed(folder, "rows_package.routines:Rows", "rows_package.entries:SOFTMAX")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    yield folder
    for name in [n for n in sys.modules if n.split(".")[0] == "rows_package"]:
        del sys.modules[name]


def installed(folder: Path, library: str, alternative: str) -> None:
    about = folder / "rows_package-1.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rows-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        f"[relax_tune.libraries]\nrows = {library}\n[relax_tune.alternatives]\nsoftmax = {alternative}\n"
    )


@pytest.mark.ccompiler
def test_a_routine_of_ones_own_is_measured_and_dispatched(package: Path, tmp_path: Path) -> None:
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
    assert found == {("rows.softmax", "ok", True)}
    artifact = rt.build(module, target="c", db=records, policy="library", effort="quick")
    given = np.random.default_rng(0).standard_normal((2, 5, 9)).astype(np.float32)
    wanted = np.exp(given) / np.exp(given).sum(-1, keepdims=True)
    with rt.load(artifact.save(tmp_path / "softmax.rta")) as model:
        np.testing.assert_allclose(model.run([given])[0], wanted, rtol=1e-5)
    targets = {s.target for c in artifact.program.calls for v in c.variants for s in v.steps}
    assert targets == {"rows.softmax"}


@pytest.mark.parametrize(
    ("library", "alternative", "message"),
    [
        ("rows_package.routines:Lines", "", r"package rows-package, entry point relax_tune\.libraries 'rows': wanted .*Lines, found"),
        ("no_such_module:Rows", "", r"wanted no_such_module:Rows, found: No module named"),
        ("rows_package.routines:np", "", r"wanted a class that opens a library, found: 'module' object is not callable"),
        ("relax_tune.runtime.library.openblas:OpenBlas", "", r"wanted a library of a name of its own.* found 'openblas'"),
        ("", "rows_package.entries:graph", r"wanted an Alternative or several, found <"),
        ("", "relax_tune.ir.passes.alternatives:ALTERNATIVES", r"wanted one entry for 'openblas\.sgemm', found a second"),
    ],
)  # fmt: skip
def test_a_package_that_is_wrong_is_named(package: Path, library: str, alternative: str, message: str) -> None:
    if "openblas" in library and importlib.util.find_spec("scipy_openblas32") is None:
        pytest.skip("needs the scipy-openblas32 package")
    installed(package, library or "rows_package.routines:Rows", alternative or "rows_package.entries:SOFTMAX")
    with pytest.raises(BuildError, match=message):
        if library:
            open_libraries()
        else:
            all_alternatives()
    (told,) = (f for f in examine("memory://") if f.area == "library")
    assert told.state == "missing" and "rows-package" in told.found and told.advice
