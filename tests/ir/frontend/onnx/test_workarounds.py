"""What a refusal of an ONNX model says to do is done here: the model then imports, and gives ONNX's own results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import check, model, onnx
from tests.support.meaning import own_results

from relax_tune.errors import ParseError, RelaxTuneError
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.interp.reference import evaluate_function

X = np.random.default_rng(3).standard_normal((4, 4)).astype(np.float32)


def refusal(proto: Any, *parts: str) -> str:
    with pytest.raises(RelaxTuneError) as caught:
        load_onnx(proto)
    message = str(caught.value)
    assert all(p in message for p in parts), message
    return message


def ours(proto: Any, inputs: Sequence[Any]) -> list[Any]:
    module = load_onnx(proto)
    return list(own_results(evaluate_function(module, list(inputs)), module))


def parts_around(tmp_path: Path, proto: Any, before: Sequence[str], after: Sequence[str]) -> tuple[Any, Any]:
    """The model up to `before` and the model from `after` on, as the message says."""
    path = tmp_path / "whole.onnx"
    onnx.save(proto, path)
    inputs, outputs = [i.name for i in proto.graph.input], [o.name for o in proto.graph.output]
    first, second = tmp_path / "first.onnx", tmp_path / "second.onnx"
    onnx.utils.extract_model(str(path), str(first), inputs, list(before), check_model=False)
    onnx.utils.extract_model(str(path), str(second), list(after), outputs, check_model=False)
    return onnx.load(first), onnx.load(second)


@pytest.mark.parametrize("op", ["Odd", "Strange"])
def test_refusal_of_unknown_operator_names_node_and_the_cut_imports(op: str, tmp_path: Path) -> None:
    text = f"""<ir_version: 9, opset_import: ["" : 20, "test.odd" : 1]>
    g (float[n, 4] x) => (float[n, 4] y) <float[n, 4] t, float[n, 4] u> {{
      t = Relu(x)
      ["odd"] u = test.odd.{op}(t)
      y = Add(u, u) }}"""
    proto = onnx.parser.parse_model(text)
    message = refusal(
        proto, f"node 'odd', operator {op}", "node 1 of the graph", "up to t", "from u on", "extract_model"
    )
    assert "domain test.odd" in message
    first, second = parts_around(tmp_path, proto, ["t"], ["u"])
    (t,) = ours(first, [X])
    (y,) = ours(second, [t[::-1] * 2])
    np.testing.assert_allclose(y, 4 * np.maximum(X, 0)[::-1], rtol=1e-6)


def test_refusal_in_a_branch_names_the_path_of_the_node() -> None:
    text = """<ir_version: 9, opset_import: ["" : 20, "test.odd" : 1]>
    g (float[n, 4] x, bool c) => (float[n, 4] y) {
      t = Relu(x)
      ["choice"] y = If (c) <then_branch = a () => (float[n, 4] v) { ["odd"] v = test.odd.Odd(t) },
                             else_branch = b () => (float[n, 4] w) { w = Neg(t) }> }"""
    refusal(onnx.parser.parse_model(text), "node 'odd'", "node 0 of graph 'a' in node 1 of the graph", "workaround: ")


def test_refusal_in_a_branch_of_an_input_number_is_followed_by_a_fixed_number() -> None:
    """The other side cannot be imported, since it is for other sizes."""
    text = """<ir_version: 9, opset_import: ["" : 20]>
    g (float[4, 4] x, int64 rate) => (float[a, b] y)
      <int64 high = {16000}, int64[2] rows = {2, 8}, int64[2] wrong = {3, 5}> {
      slow = Equal(rate, high)
      ["choice"] y = If (slow) <then_branch = a () => (float[a, b] v) { v = Reshape(x, rows) },
                               else_branch = b () => (float[a, b] w) { w = Reshape(x, wrong) }> }"""
    proto = onnx.parser.parse_model(text)
    refusal(proto, "operator Reshape", "If 'choice'", "--bound rate=16000:16000")
    module = load_onnx(proto, {"rate": (16000, 16000)})
    np.testing.assert_array_equal(evaluate_function(module, [X]), X.reshape(2, 8))


def test_refusal_of_texts_is_followed_by_the_model_behind_the_texts(tmp_path: Path) -> None:
    text = """(string[n] s, float[n] x) => (float[n] y) {
      t = StringNormalizer(s)
      u = Cast<to = 1>(t)
      y = Add(u, x) }"""
    proto = model(text)
    refusal(proto, "input 's'", "STRING", "extract_model")
    onnx.save(proto, tmp_path / "whole.onnx")
    onnx.utils.extract_model(
        str(tmp_path / "whole.onnx"), str(tmp_path / "part.onnx"), ["u", "x"], ["y"], check_model=False
    )
    u = np.float32([1, 2, 3])
    np.testing.assert_allclose(ours(onnx.load(tmp_path / "part.onnx"), [u, u])[0], 2 * u)


def test_refusal_of_a_sequence_input_is_followed_by_tensors() -> None:
    proto = model("(seq(float[n, 4]) s) => (float[m, 4] y) { y = ConcatFromSequence<axis = 0>(s) }")
    refusal(proto, "input 's'", "sequence", "SequenceConstruct")
    edited = model(
        """(float[n, 4] a, float[n, 4] b) => (float[m, 4] y) {
          s = SequenceConstruct(a, b)
          y = ConcatFromSequence<axis = 0>(s) }"""
    )
    check(edited, [X, X[::-1].copy()])


def test_refusal_of_a_sequence_result_is_followed_by_concatenation() -> None:
    body = "s = SequenceConstruct(a, b)"
    refusal(
        model(f"(float[n, 4] a, float[n, 4] b) => (seq(float[n, 4]) s) {{ {body} }}"),
        "output 's'",
        "ConcatFromSequence",
    )
    edited = f"(float[n, 4] a, float[n, 4] b) => (float[m, 4] y) {{ {body} y = ConcatFromSequence<axis = 0>(s) }}"
    check(model(edited), [X, X])


def test_refusal_of_an_optional_input_is_followed_by_the_tensor() -> None:
    proto = model("(optional(float[n, 4]) o) => (float[n, 4] y) { x = OptionalGetElement(o) y = Neg(x) }")
    refusal(proto, "input 'o'", "optional", "OptionalGetElement")
    check(model("(float[n, 4] x) => (float[n, 4] y) { y = Neg(x) }"), [X])


def test_refusal_of_an_input_deciding_sizes_is_followed_by_an_initializer() -> None:
    proto = model("(float[4, 4] x, int64[1] axis) => (float[a, b] y) { y = ReduceSum(x, axis) }")
    refusal(proto, "operator ReduceSum", "input 1", "initializer.append", "'axis'")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.int64([1]), "axis"))
    np.testing.assert_allclose(ours(proto, [X])[0], X.sum(1, keepdims=True), rtol=1e-5)


def test_refusal_of_unknown_dims_is_followed_by_equal_bounds() -> None:
    proto = model("(float[n, n] x) => (float y) { y = Det(x) }")
    refusal(proto, "--bound n=4:4")
    check(proto, [X], {"n": (4, 4)})


def test_refusal_of_slices_of_unknown_length_is_followed_by_equal_bounds() -> None:
    proto = model("(float[m, n] x) => (float[k, n] y) { y = Unique<axis = 0>(x) }")
    refusal(proto, "--bound n=4:4")
    module = load_onnx(proto, {"n": (4, 4)})
    rows = X[[0, 1, 0, 3]]
    np.testing.assert_array_equal(evaluate_function(module, [rows]), np.unique(rows, axis=0))


def test_equal_bounds_make_a_dim_a_number_kept_by_calls() -> None:
    module = load_onnx(model("(float[m, n] x) => (float[m, n] y) { y = Relu(x) }"), {"n": (4, 4)})
    assert [b.var.name for b in module.bounds] == ["m"]
    assert load_onnx(model("(float[n] x) => (float[n] y) { y = Relu(x) }"), {"n": (4, 4)}).bounds == ()


def test_refusal_of_a_new_opset_is_followed_by_an_older_one() -> None:
    newest = onnx.defs.onnx_opset_version()
    text = "(float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }"
    refusal(model(text, newest + 1), f"got {newest + 1}", f"export the model with opset {newest}")
    check(model(text, newest), [X])


def test_refusal_of_an_unknown_rank_is_followed_by_named_dims() -> None:
    proto = model("(float[n, 4] x) => (float[n, 4] y) { y = Neg(x) }")
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    refusal(proto, "input 'x'", "make_tensor_value_info")
    stated = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", "length"])
    proto.graph.input[0].CopyFrom(stated)
    check(proto, [X])


def test_refusal_of_a_sparse_initializer_is_followed_by_a_dense_one() -> None:
    proto = model("(float[4] x) => (float[4] y) { y = Add(x, w) }")
    values = onnx.numpy_helper.from_array(np.float32([2, 3]), "w")
    places = onnx.numpy_helper.from_array(np.int64([0, 3]), "w_places")
    proto.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, places, [4]))
    refusal(proto, "initializer 'w'", "sparse", "dense")
    proto.graph.ClearField("sparse_initializer")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([2, 0, 0, 3]), "w"))
    check(proto, [X[0]])


def test_refusals_of_every_kind_of_operator_end_with_a_workaround() -> None:
    """Wrong arguments of standard operators, each of which another handler refuses."""
    texts = [
        "(float[n, 4] x) => (float[q] y) { y = ImageDecoder(x) }",
        "(float[n] x, int64[k] s) => (float[q] y) { y = Reshape(x, s) }",
        "(float[n, 4] x, int64[1] k) => (float[n, q] y, int64[n, q] i) { y, i = TopK<axis = 9>(x, k) }",
        "(float[n, 4] x) => (float[n, 2] y) { y = Squeeze(x, x) }",
    ]
    for text in texts:
        with pytest.raises(ParseError, match=r"node 0 of the graph.*; workaround: "):
            load_onnx(model(text))


def test_refusal_of_the_layout_of_a_processor_is_followed_by_a_lower_level(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install onnxruntime")
    text = "(float[n, 16, 8, 8] x) => (float[n, 16, 8, 8] y) { y = Conv<pads = [1, 1, 1, 1]>(x, w) }"
    kernel = np.random.default_rng(4).standard_normal((16, 16, 3, 3)).astype(np.float32)
    plain = model(text)
    plain.graph.initializer.append(onnx.numpy_helper.from_array(kernel, "w"))
    x = np.random.default_rng(5).standard_normal((2, 16, 8, 8)).astype(np.float32)

    def optimised(level: str) -> Any:
        path, options = tmp_path / f"{level}.onnx", runtime.SessionOptions()
        options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, level)
        options.optimized_model_filepath, options.log_severity_level = str(path), 4
        runtime.InferenceSession(plain.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return onnx.load(path)

    proto = optimised("ORT_ENABLE_ALL")
    if not any(n.domain == "com.microsoft.nchwc" for n in proto.graph.node):
        pytest.skip("ONNX Runtime has no blocked layout on this processor")
    refusal(proto, "com.microsoft.nchwc", "block size", "ORT_ENABLE_EXTENDED")
    (y,) = ours(optimised("ORT_ENABLE_EXTENDED"), [x])
    session = runtime.InferenceSession(plain.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(y, session.run(None, {"x": x})[0], rtol=1e-4, atol=1e-4)
