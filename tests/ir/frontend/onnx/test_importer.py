"""What is wrong with an ONNX model is said in one paragraph: where, what was wanted, what was found, and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ir.frontend.onnx.onnx_models import check, model, onnx
from tests.support.effort import examples
from typer.testing import CliRunner

from relax_tune.errors import ParseError, RelaxTuneError, UserError
from relax_tune.ir.frontend.load import load_model
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.passes.pipeline import lower
from relax_tune.ir.text.printer import print_text
from relax_tune.tuner.cli.app import app

RELU = "(float[n] x) => (float[n] y) { y = Relu(x) }"
CHAIN = """(float[a, 3] x, float[a, 3] z) => (float[a, 3] y) <float[3, 3] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0}> {
  s = Shape(x)
  t = MatMul(x, w)
  u = Relu(t)
  v = Reshape(u, s)
  y = Add(v, z) }"""


def refused(proto: Any, bounds: Any = None) -> str:
    with pytest.raises(RelaxTuneError) as caught:
        load_onnx(proto, bounds)
    said = str(caught.value)
    assert said and "\n" not in said, said
    return said


def edited(text: str, edit: Callable[[Any], Any], opset: int = 20) -> Any:
    proto = model(text, opset)
    edit(proto)
    return proto


def node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    return onnx.helper.make_node(op, inputs, outputs, **attributes)


def test_load_onnx_unsupported_operator_names_neighbours() -> None:
    text = """(float[a, 3] x) => (float[q] y) {
      ["before"] t = Relu(x)
      ["strange"] u = Det(t)
      ["after"] v = Abs(u)
      ["last"] y = Add(u, v) }"""
    said = refused(model(text))
    assert "node 'strange', operator Det (domain ai.onnx, opset 20, version 11)" in said
    assert "of (relu: Tensor((a, 3), f32))" in said
    assert "fed by Relu 'before'" in said and "read by Abs 'after', Add 'last'" in said


def test_names_cannot_break_the_message_into_lines() -> None:
    proto = model(RELU)
    proto.graph.node[0].op_type, proto.graph.node[0].domain = "Re\nlu", "a\rb"
    assert "operator Re?lu (domain a?b, opset 0)" in refused(proto)


def test_a_custom_domain_is_named() -> None:
    proto = edited(RELU, lambda p: p.graph.node[0].MergeFrom(onnx.NodeProto(domain="com.example", name="mine")))
    said = refused(proto)
    assert "node 'mine', operator Relu (domain com.example, opset 0)" in said and "got domain 'com.example'" in said


@pytest.mark.parametrize("edit, wanted", [
    (lambda p: p.graph.node[1].input.__setitem__(1, "gone"), "operator MatMul: expected input 'gone' .* got none"),
    (lambda p: p.graph.initializer.pop(), "operator MatMul: expected input 'w' .* got none"),
    (lambda p: p.graph.node[1].output.__setitem__(0, "u"), "values: expected distinct names, got 'u' twice"),
    (lambda p: p.graph.node[1].output.__setitem__(0, "x"), "values: expected distinct names, got 'x' twice"),
    (lambda p: p.graph.node[0].output.__setitem__(0, "w"), "values: expected distinct names, got 'w' twice"),
    (lambda p: p.graph.input.append(p.graph.input[0]), "inputs: expected distinct names, got 'x' twice"),
    (lambda p: p.graph.initializer.append(p.graph.initializer[0]), "initializers: expected distinct names, got 'w' twice"),
    (lambda p: p.graph.node[1].input.__setitem__(0, "v"), "Reshape 'v' makes it later; .*cycle"),
    (lambda p: p.graph.node[2].input.__setitem__(0, "u"), "Relu 'u' makes it later; .*cycle"),
    (lambda p: p.graph.output.pop(), "graph and outputs, got 1 opsets and 0 outputs"),
    (lambda p: p.graph.output[0].__setattr__("name", "nobody"), "output 'nobody': expected a node that makes it"),
    (lambda p: p.ClearField("opset_import"), "graph and outputs, got 0 opsets"),
    (lambda p: p.graph.input[0].type.tensor_type.ClearField("shape"), "input 'x': .*number of dims, got an unknown"),
    (lambda p: p.graph.input[0].type.tensor_type.__setattr__("elem_type", 4), "operator MatMul .*got: matmul: expected"),
    (lambda p: p.graph.input[0].type.tensor_type.__setattr__("elem_type", 14), "input 'x': expected a number of a supported.*COMPLEX64"),
    (lambda p: p.graph.input[0].type.tensor_type.__setattr__("elem_type", 99), "input 'x': expected a number .*, got 99"),
    (lambda p: p.graph.input[0].ClearField("type"), "input 'x': expected a tensor, got no type"),
    (lambda p: p.graph.initializer[0].__setattr__("data_type", 8), "tensor 'w': expected a number of a supported.*STRING"),
    (lambda p: p.graph.initializer[0].dims.append(2), "tensor 'w': expected 18 values"),
    (lambda p: p.graph.initializer[0].dims.__setitem__(0, -3), "tensor 'w': expected dims of 0 or more"),
    (lambda p: p.graph.initializer[0].dims.__setitem__(0, 4), "tensor 'w': expected 12 values"),
    (lambda p: p.graph.node[2].attribute.append(onnx.helper.make_attribute("slope", 1.0)), "Unrecognized attribute: slope"),
    (lambda p: p.graph.node[2].input.append("x"), "input size 2 not in range"),
    (lambda p: p.graph.sparse_initializer.append(onnx.SparseTensorProto(values=onnx.TensorProto(name="sp"))), "'sp': expected a dense"),
])  # fmt: skip
def test_load_onnx_inconsistent_graph_raises(edit: Callable[[Any], Any], wanted: str) -> None:
    with pytest.raises(ParseError, match=wanted):
        load_onnx(edited(CHAIN, edit))
    refused(edited(CHAIN, edit))


def test_sequences_maps_and_optionals_are_no_tensors() -> None:
    kind = onnx.helper.make_sequence_type_proto(onnx.helper.make_tensor_type_proto(1, [2]))
    said = refused(edited(RELU, lambda p: p.graph.input[0].type.CopyFrom(kind)))
    assert "input 'x': expected a tensor, got sequence_type" in said


def test_a_branch_without_a_side_is_named() -> None:
    branch = model("() => (float[1] r) <float[1] c = {1.0}> { r = Identity(c) }").graph
    proto = model("(bool k) => (float[1] y) { y = Identity(k) }")
    proto.graph.node[0].CopyFrom(node("If", ["k"], ["y"], then_branch=branch))
    said = refused(proto)
    assert (
        "operator If (domain ai.onnx, opset 20, version 19)" in said
        and "expected a graph in attribute else_branch" in said
    )


def test_sparse_constants_are_refused() -> None:
    values = onnx.helper.make_tensor("v", 1, [1], [3.0])
    sparse = onnx.helper.make_sparse_tensor(values, onnx.helper.make_tensor("i", 7, [1], [1]), [3])
    proto = edited(RELU, lambda p: p.graph.node[0].CopyFrom(node("Constant", [], ["y"], sparse_value=sparse)))
    assert "operator Constant" in refused(proto)


@pytest.mark.parametrize("text, wanted", [
    ('(float[n] x) => (float[n] y) { y = Gelu<approximate = "sigmoid">(x) }', "approximate 'none' or 'tanh', got 'sigmoid'"),
    ('(float[1, 4, 2, 2] x) => (float[q] y) { y = DepthToSpace<blocksize = 2, mode = "ABC">(x) }', "mode 'DCR' or 'CRD', got 'ABC'"),
    ("(float[n] x) => (float[n] y) { y = Softmax<axis = 3>(x) }", "expected an axis in -1..0, got 3"),
    ("(float[n, 2] x) => (float[q] y) { y = Transpose<perm = [0, 0]>(x) }", "permutation"),
    ("(float[n, 2] x) => (float[q] y) { y = Transpose<perm = [1]>(x) }", "permutation"),
    ("(float[n] x, bool t) => (float[n] y) <float r = {0.5}> { y = Dropout(x, r, t) }", "training_mode as a constant"),
    ("(float[n] x) => (float[n] y) <bool t = {1}, float r = {1.0}> { y = Dropout(x, r, t) }", "from 0 to below 1"),
    ("(float[n, n] x) => (float y) { y = Det(x) }", "operator Det .*known at import, got n x n"),
    ("(float[b, c, h, w] x, float[r, 4] i, int64[r] j) => (float[r, c, 1, 1] y) { y = RoiAlign<mode = \"max\">(x, i, j) }",
     "sampling_ratio .*mode 'max'"),
    ("(float[n] x) => (float[n] y) { y = RandomUniformLike<dtype = 7>(x) }", "operator RandomUniformLike .*random floats"),
    ("(float[n, 6] x) => (float[q] y, float[r] z) <int64[2] s = {2, 5}> { y, z = Split<axis = 1>(x, s) }", "operator Split"),
    ("(float[n] x) => (float[q] y) <int64[2] s = {-1, -1}> { y = Reshape(x, s) }", "at most one -1"),
    ("(float[4] x) => (float[q] y) <int64[1] s = {3}> { y = Reshape(x, s) }", "equal products"),
    ("(float[2] x) => (float[q] y) <int64[1] s = {0}> { y = Squeeze(x, s) }", "operator Squeeze"),
    ("(float[n] x, int64 k) => (float[q] y) { y = Expand(x, k) }", "operator Expand"),
    ("(float[3] x, float[4] z) => (float[q] y) { y = Add(x, z) }", "operator Add .*expected equal dims"),
    ("(float[n] x, int64[n] z) => (float[q] y) { y = Add(x, z) }", "operator Add .*expected one dtype"),
    ("(int64[n] x) => (int64[n] y) { y = Exp(x) }", "operator Exp .*floating-point"),
])  # fmt: skip
def test_load_onnx_unsupported_attributes_raise(text: str, wanted: str) -> None:
    with pytest.raises(ParseError, match=wanted):
        load_onnx(model(text))
    refused(model(text))


def test_a_bound_the_model_contradicts() -> None:
    text = "(float[n, 3] x) => (float[4, 3] y) <int64[2] s = {4, 3}> { y = Reshape(x, s) }"
    load_onnx(model(text), {"n": (1, 8)})
    assert "operator Reshape" in refused(model(text), {"n": (5, 8)})
    with pytest.raises(UserError, match=r"bounds of m: .* which are n"):
        load_onnx(model(text), {"m": (1, 2)})
    for bounds in ((4, 1), (-1, 3)):
        with pytest.raises(UserError, match=r"symbol 'n': .*lower <= upper"):
            load_onnx(model(text), {"n": bounds})


def test_load_onnx_odd_dim_names_stay_distinct() -> None:
    proto = model("(float[a, b, c, d] x) => (float[q] y) { y = Relu(x) }")
    names = ["2*n + 1", "batch size", "batch-size", "größe"]
    for dim, name in zip(proto.graph.input[0].type.tensor_type.shape.dim, names):
        dim.dim_param = name
    module = load_onnx(proto, {"batch-size": (2, 3)})
    found = [(b.var.name, b.lower, b.upper) for b in module.bounds]
    assert [n for n, _, _ in found] == ["v_2_n___1", "batch_size", "batch_size_", "gr__e"]
    assert found[2][1:] == (2, 3) and found[1][1:] == (1, None)
    assert "batch_size_" in print_text(lower(module).module)


def test_load_onnx_unnamed_dims_become_fresh_symbols() -> None:
    proto = model("(float[x_1, k] x, float[a] z) => (float[q] y) { y = Relu(x) }")
    shape = proto.graph.input[0].type.tensor_type.shape
    shape.dim[1].Clear()
    assert [b.var.name for b in load_onnx(proto).bounds] == ["x_1", "x_1_", "a"]
    shape.dim[1].dim_value = -1  # as some exporters write it
    assert [b.var.name for b in load_onnx(proto).bounds] == ["x_1", "x_1_", "a"]


def test_no_elements_are_no_mistake() -> None:
    text = "(float[a, 3] x) => (float[q] y) <float[0, 3] none = {}> { y = Concat<axis = 0>(x, none) }"
    check(model(text), [np.ones((2, 3), np.float32)])
    check(model("(float[a, 0] x) => (float[a, 0] y) { y = Relu(x) }"), [np.ones((2, 0), np.float32)])


def external(folder: Path, **changes: str) -> Path:
    proto = model(
        "(float[n, 3] x) => (float[n, 2] y) <float[3, 2] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}> { y = MatMul(x, w) }"
    )
    t = proto.graph.initializer[0]
    (folder / "w.bin").write_bytes(onnx.numpy_helper.to_array(t).tobytes())
    t.ClearField("float_data")
    t.data_location = onnx.TensorProto.EXTERNAL
    for key, value in ({"location": "w.bin", "offset": "0", "length": "24"} | changes).items():
        t.external_data.add(key=key, value=value)
    path = folder / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.mark.parametrize("changes, wanted", [
    ({"location": "gone.bin"}, "does not exist"), ({"location": ""}, "inside the model's folder"),
    ({"location": "."}, "does not exist"), ({"location": "/etc/passwd"}, "inside the model's folder"),
    ({"location": "../w.bin"}, "inside the model's folder"), ({"location": "a/../../w.bin"}, "inside the model's folder"),
    ({"location": "w.bin\0"}, "tensor 'w'"), ({"location": "link.bin"}, "is a link out of it"),
    ({"offset": "4"}, "got a length of 24 in a file of 24 bytes"), ({"offset": "-8"}, "is the file complete"),
    ({"length": "20"}, "got a length of 20"), ({"length": "x"}, "numeric offset and length"),
    ({"offset": str(2**70)}, "is the file complete"),
])  # fmt: skip
def test_load_onnx_missing_external_data_raises(tmp_path: Path, changes: dict[str, str], wanted: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "w.bin").write_bytes(bytes(64))
    (folder / "link.bin").symlink_to(tmp_path / "w.bin")
    with pytest.raises(ParseError, match=wanted):
        load_model(external(folder, **changes))


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_load_onnx_altered_bytes_raise_or_print(data: st.DataObject) -> None:
    whole = bytearray(model(CHAIN).SerializeToString())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(whole) - 1))
        kind = data.draw(st.sampled_from(("set", "cut", "insert", "swap")))
        if kind == "set":
            whole[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del whole[at : at + data.draw(st.integers(1, 4))]
        elif kind == "insert":
            whole[at:at] = bytes([data.draw(st.integers(0, 255))])
        else:
            other = data.draw(st.integers(0, len(whole) - 1))
            whole[at], whole[other] = whole[other], whole[at]
    with contextlib.suppress(RelaxTuneError):
        print_text(lower(load_onnx(bytes(whole))).module)


@pytest.mark.parametrize("content, wanted", [
    (b"garbage", "really ONNX"), (model(CHAIN).SerializeToString()[:-40], "an ONNX model"),
    (model("(float[n] x) => (float[q] y) { y = Det(x) }").SerializeToString(), "operator Det"),
], ids=["garbage", "truncated", "unsupported"])  # fmt: skip
def test_command_line_onnx_error_is_one_paragraph(tmp_path: Path, content: bytes, wanted: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    done = CliRunner().invoke(app, ["tune", str(path), "--target", "c", "--db", f"sqlite:///{tmp_path / 't.db'}"])
    said = done.stderr.strip()
    assert done.exit_code == 2 and wanted in " ".join(said.split()) and "Traceback" not in said
    assert "\n\n" not in said and not (tmp_path / "t.db").exists()
