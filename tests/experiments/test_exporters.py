"""Files of exporters: the table, the inputs, the judgement and the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments.families.exporter_torch import Exporter, edges, store_cases
from experiments.families.exporters import (
    attempt,
    exporters,
    fitted,
    make,
    missing_packages,
    page,
    row,
    stored_cases,
)

onnx = pytest.importorskip("onnx", reason="needs the onnx package: pip install 'relax-tune[onnx]'")

X = np.float32([[1.0, -2.0, 3.0]])


def model(text: str) -> Any:
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 20, "odd" : 1]> graph {text}')


def result(status: str, why: str = "") -> dict[str, Any]:
    return {"exporter": "torch_script", "model": "mlp", "status": status, "why": why, "commit": "0123abcd"}


def test_exporters_have_models_and_packages() -> None:
    assert all(e.models and e.packages and len(set(e.models)) == len(e.models) for e in exporters().values())
    assert missing_packages(Exporter(lambda *_: None, ("a",), ("onnx", "no_such_package"))) == ["no_such_package"]


def test_edge_inputs_are_zeros_large_numbers_and_least_integers() -> None:
    zeros, large, least = edges([{"x": X, "ids": np.int64([5, 9]), "mask": np.int64([1, 0])}])
    assert not zeros["x"].any() and np.array_equal(large["x"], 100 * X) and large["x"].dtype == np.float32
    assert [*least["ids"]] == [5, 5] and [*least["mask"]] == [1, 0]


def test_stored_cases_keep_the_order_of_inputs(tmp_path: Path) -> None:
    store_cases(tmp_path, "m", [{"b": X, "a": np.int64([k])} for k in range(11)])
    cases = stored_cases(tmp_path, "m")
    assert len(cases) == 14 and [*cases[10]] == ["b", "a"] and cases[10]["a"] == [10]


def test_inputs_are_fitted_by_name_or_place_and_cast() -> None:
    proto = model("(float16[n, 3] x, int32[k] ids) => (float16[n, 3] y) { y = Relu(x) }")
    feeds = fitted(proto, {"ids": np.int64([4]), "x": X})
    assert feeds is not None and feeds["x"].dtype == np.float16 and feeds["ids"].dtype == np.int32
    feeds = fitted(proto, {"first": X, "second": np.int64([4])})
    assert feeds is not None and [*feeds] == ["x", "ids"]
    assert fitted(model("(float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }"), {"x": X}) is None


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("(float[n, 3] x) => (float[n, 3] y) { y = Exp(x) }", "right"),
        ("(float[n, 3] x) => (float[n, 3] y) { y = odd.Strange(x) }", "no peer"),
        ('(float[n, 3] x) => (string[q] y) <string[1] y = {"a"}> { z = Exp(x) }', "refused"),
    ],
)
def test_attempt_judges_a_file(text: str, status: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install onnxruntime")
    store_cases(tmp_path, "m", [{"x": X}, {"x": np.repeat(X, 3, 0)}])
    (tmp_path / "some").mkdir()
    path = tmp_path / "some" / "m.onnx"
    onnx.save(model(text), path)
    judged = attempt(tmp_path, path, False)
    assert judged["status"] == status
    assert judged.get("cases") == (5 if status == "right" else None)


def test_page_counts_states_and_missing_packages() -> None:
    lines = page([result("right"), result("refused", "a | b")], {"tf2onnx": ["tensorflow"]})
    assert "* files: 2; 1 right, 1 refused" in lines and "* tf2onnx: not tried; missing tensorflow" in lines
    assert any("refused: a \\| b" in line for line in lines)
    assert row(result("right") | {"error": 1e-7, "built": True}).count("interpreter, C") == 1


def test_make_names_missing_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    one = {"some": Exporter(lambda *_: None, ("m",), ("no_such_package",))}
    monkeypatch.setattr("experiments.families.exporters.exporters", lambda: one)
    make(tmp_path, "", False)
    assert capsys.readouterr().out == "some: missing no_such_package\n"
