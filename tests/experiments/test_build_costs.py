"""The page of builds of two checkouts, and the costs that a child reports."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiments.families.build_costs import compared, page
from experiments.harness.pages import ROOT

FIELDS = (
    "import_secs", "total_secs", "python_secs", "gcc_secs", "gcc_calls", "source_bytes", "kernels", "open_secs", "again_secs"
)  # fmt: skip


def test_page_has_medians_and_a_row_for_each_file() -> None:
    results = {name: {"before": dict.fromkeys(FIELDS, 2 * x), "after": dict.fromkeys(FIELDS, x)} for name, x in
               (("a.onnx", 1.0), ("b.onnx", 2.0), ("c.onnx", 9.0))}  # fmt: skip
    lines = page(results)
    assert "* median of the processor time of a build: 4.0 s before, 2.0 s after" in lines
    assert [line.split(" | ")[:2] for line in lines[-3:]] == [
        ["| a.onnx", "2.0 → 1.0"], ["| b.onnx", "4.0 → 2.0"], ["| c.onnx", "18.0 → 9.0"]
    ]  # fmt: skip


@pytest.mark.process
@pytest.mark.ccompiler
def test_costs_of_a_small_model(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Exp", ["x"], ["y"])], "small",
        [helper.make_tensor_value_info("x", kind, ["n", 8])], [helper.make_tensor_value_info("y", kind, ["n", 8])],
    )  # fmt: skip
    path = tmp_path / "small.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), str(path))
    costs = compared(path, {"after": ROOT})["after"]
    assert costs["kernels"] == 1
    assert costs["gcc_calls"] >= 1 and costs["source_bytes"] > 500 and 0 < costs["gcc_secs"] < costs["total_secs"]


def test_failed_build_names_file_and_side(tmp_path: Path) -> None:
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(RuntimeError, match=r"empty\.onnx, after"):
        compared(tmp_path / "empty.onnx", {"after": ROOT})
