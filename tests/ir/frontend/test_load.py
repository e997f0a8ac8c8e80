"""Importers of installed distributions: they read sources that no format of this package claims."""

from __future__ import annotations

import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import relax_tune as rt
from relax_tune.errors import BuildError, ParseError, UserError
from relax_tune.ir.frontend.load import PLUGINS
from relax_tune.ir.interp.reference import evaluate_function

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_importer"
POINT = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"][PLUGINS]["csv"]
FIRST, SECOND = np.float32([[1, -2], [3, 4], [0, 1]]), np.float32([[2], [-1]])


def install(site: Path, point: str, distribution: str = "own-importer") -> None:
    """Write the metadata that pip leaves of a distribution with one importer."""
    metadata = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{PLUGINS}]\ncsv = {point}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages with the example, whose metadata the test writes."""
    folder = tmp_path / "site"
    shutil.copytree(EXAMPLE / "own_importer", folder / "own_importer")
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("own_importer", None)


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    folder = tmp_path / "layers"
    folder.mkdir()
    np.savetxt(folder / "0.csv", FIRST, delimiter=",")
    np.savetxt(folder / "1.csv", SECOND, delimiter=",")
    return folder


def test_importer_of_a_distribution_reads_a_new_format(site: Path, layers: Path) -> None:
    install(site, POINT)
    module = rt.load_model(layers, {"batch": (1, 8)})
    assert [(b.var.name, b.lower, b.upper) for b in module.bounds] == [("batch", 1, 8)]
    x = np.float32([[1, 2, 3], [-1, 0, 5]])
    np.testing.assert_allclose(evaluate_function(module, [x]), np.maximum(x @ FIRST, 0) @ SECOND)


def test_importer_leaves_other_sources_to_the_errors_of_load_model(site: Path, tmp_path: Path) -> None:
    install(site, POINT)
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(UserError, match=r"notes\.txt.*\.gguf, \.onnx"):
        rt.load_model(tmp_path / "notes.txt")
    with pytest.raises(UserError, match=r"got a dict; weights are no model"):
        rt.load_model({})


def test_importer_may_recognise_objects(site: Path) -> None:
    (site / "of_lists.py").write_text(
        "from own_importer import *\n"
        "def load(source, bounds):\n"
        "    if isinstance(source, list):\n"
        "        graph = rt.GraphBuilder()\n"
        "        return graph.finish(graph.call(Relu(), graph.input('x', source)))\n"
    )
    install(site, "of_lists:load")
    assert evaluate_function(rt.load_model([2]), [np.float32([-1, 1])]).tolist() == [0, 1]
    with pytest.raises(UserError, match=r"pooling 'mean'.*package own-importer"):
        rt.load_model([2], pooling="mean")
    sys.modules.pop("of_lists")


def test_first_importer_by_distribution_wins(site: Path, layers: Path) -> None:
    install(site, POINT)
    install(site, "math:pi", "z-package")  # not asked, hence not refused
    assert rt.load_model(layers).functions


@pytest.mark.parametrize(
    ("point", "error", "message"),
    [
        ("math:pi", BuildError, "package own-importer, .*expected a function"),
        ("builtins:max", ParseError, "layers: package own-importer, .*failed: TypeError"),
        ("operator:contains", ParseError, "failed: TypeError"),
        ("builtins:print", ParseError, "config.json"),
        ("builtins:pow", ParseError, "failed: TypeError"),
        ("builtins:isinstance", ParseError, "failed: TypeError"),
        ("own_importer:np.array_equal", BuildError, "expected an IRModule, or None"),
    ],
)
def test_wrong_importer_is_refused_by_name(
    site: Path, layers: Path, point: str, error: type[Exception], message: str
) -> None:
    install(site, point)
    with pytest.raises(error, match=message):
        rt.load_model(layers)


def test_errors_of_an_importer_pass(site: Path, layers: Path) -> None:
    install(site, POINT)
    np.savetxt(layers / "1.csv", FIRST, delimiter=",")
    with pytest.raises(ParseError, match=r"1\.csv: expected 2 rows, got 3"):
        rt.load_model(layers)


def test_load_model_of_an_onnx_model_in_memory() -> None:
    parser = pytest.importorskip("onnx.parser", reason="needs the onnx package: pip install 'relax-tune[onnx]'")
    text = '<ir_version: 9, opset_import: ["" : 20]> graph (float[n] x) => (float[n] y) { y = Relu(x) }'
    module = rt.load_model(parser.parse_model(text), {"n": (1, 8)})
    assert evaluate_function(module, [FIRST[0]]).tolist() == [1, 0]
    with pytest.raises(UserError, match="pooling 'mean' applies only to Hugging Face folders"):
        rt.load_model(parser.parse_model(text), pooling="mean")
