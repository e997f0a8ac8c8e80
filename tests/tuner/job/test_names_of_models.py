"""Inputs and results have the names that the model's file gives them, in any alphabet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import model
from tests.support.tuner_models import QUICK, opened
from tests.tuner.export.c_exports import agree, exported

from relax_tune.database.store import MemoryStore
from relax_tune.errors import ParseError, UserError
from relax_tune.ir.core.graph import Function, GVar, TupleValue
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.frontend.text import save_text
from relax_tune.ir.op.registry import OPERATORS
from relax_tune.ir.text.parser import parse_module
from relax_tune.runtime.artifact import Artifact, load_artifact
from relax_tune.tuner.job.device_job import device_job

pytestmark = pytest.mark.ccompiler
SUM = "(float[n, 3] x, float[n, 3] z) => (float[n, 3] y, float[n, 3] v) { y = Add(x, z) v = Sub(x, z) }"
BRANCH = """(float[n, 3] x, bool z) => (float[n, 3] y, float[n, 3] v) { v = Exp(x)
  y = If(z) <then_branch = left () => (float[n, 3] a) { a = Neg(x) }, else_branch = right () => (float[n, 3] b) { b = Abs(x) }> }"""
NAMES = [
    {"x": "input:0", "z": "input_0", "y": "Identity:0", "v": "Identity_1:0"},
    {"x": "入力", "z": "вход", "y": "结果", "v": "نتيجة"},
    {"x": "model/x.1", "z": "a b-c", "y": "0", "v": "1"},
    {"x": 'a"*/@CALLS@%n', "z": "??/\\", "y": "@NAME@{0}", "v": "<b>'&"},
]


def renamed(text: str, names: dict[str, str]) -> Any:
    """A model with other names, inside of its inner graphs as well."""
    proto = model(text, 13)
    graphs = [proto.graph, *(a.g for n in proto.graph.node for a in n.attribute)]
    for value in (*proto.graph.input, *proto.graph.output):
        value.name = names[value.name]
    for node in (n for g in graphs for n in g.node):
        for values in (node.input, node.output):
            values[:] = [names.get(v, v) for v in values]
    return proto


def built(proto: Any, folder: Path) -> Artifact:
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    with opened("c") as device:
        job = device_job(load_model(folder / "m.onnx"), device.info, MemoryStore(), QUICK)
        return load_artifact(job.artifact(job.build("predicted")).save(folder / "m.rta"))


@pytest.mark.parametrize("names", NAMES, ids=range(len(NAMES)))
def test_artifact_is_called_by_names_of_the_file(names: dict[str, str], tmp_path: Path) -> None:
    artifact = built(renamed(SUM, names), tmp_path)
    assert [s.name for s in artifact.inputs] == [names["x"], names["z"]]
    assert [s.name for s in artifact.outputs] == [names["y"], names["v"]]
    x, z = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((2, 3), np.float32)
    with artifact.open() as loaded:
        found = loaded.run({names["z"]: z, names["x"]: x})
        np.testing.assert_array_equal(found, [x + z, x - z])
        with pytest.raises(UserError, match="parameter"):
            loaded.run({"other": x, names["z"]: z})


@pytest.mark.parametrize("names", NAMES, ids=range(len(NAMES)))
def test_artifact_with_branches_is_called_by_names_of_the_file(names: dict[str, str], tmp_path: Path) -> None:
    artifact = built(renamed(BRANCH, names), tmp_path)
    x = np.arange(-3, 3, dtype=np.float32).reshape(2, 3)
    with artifact.open() as loaded:
        assert [s.name for s in loaded.inputs] == [names["x"], names["z"]]
        for q in (True, False):
            np.testing.assert_allclose(
                loaded.run({names["x"]: x, names["z"]: np.array(q)})[0], -x if q else abs(x), rtol=1e-6
            )


@pytest.mark.process
@pytest.mark.parametrize("names", [NAMES[1], NAMES[3]], ids=["alphabets", "signs"])
def test_export_as_c_of_names_of_the_file_equals_artifact(names: dict[str, str], tmp_path: Path) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    artifact = built(renamed(SUM, names), tmp_path)
    with artifact.open() as loaded:
        made = exported(artifact, tmp_path / "c")
        agree(artifact, loaded, made, "main", [x, x * x])
        made.close()


@pytest.mark.parametrize("text", [SUM, BRANCH], ids=["plain", "branch"])
@pytest.mark.parametrize("names", NAMES, ids=range(len(NAMES)))
def test_text_of_a_module_gives_names_of_the_file_back(names: dict[str, str], text: str, tmp_path: Path) -> None:
    proto = renamed(text, names)
    read = load_model(save_text(load_onnx(proto), tmp_path / "m.relax"))
    main = read.functions["main"]
    assert isinstance(main, Function) and isinstance(main.ret, TupleValue)
    assert [p.name for p in main.params] == [names["x"], names["z"]]
    assert [v.name for v in main.ret.fields if isinstance(v, GVar)] == [names["y"], names["v"]]


@pytest.mark.parametrize(
    "names", ['["a"]', '{"x": 3}', '{"x": ""}', '{"x": "a\\nb"}', '{"other": "a"}', '{"x": "a", "y": "a"}', "{**x}"]
)
def test_parse_module_names_beyond_printable_ones_raise(names: str) -> None:
    text = (
        f"@function(names={names})\ndef main(x: Tensor((n,), f32)) -> Tensor((n,), f32):\n    with dataflow():\n"
        "        y: Tensor((n,), f32) = op.exp(x)\n    return y\n"
    )
    with pytest.raises(ParseError, match="name"):
        parse_module(text, OPERATORS)
