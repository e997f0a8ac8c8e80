"""Nodes of both formats: attributes by one name, and errors that say where a node is."""

from __future__ import annotations

import pytest

from relax_tune.errors import DeduceError, ParseError
from relax_tune.ir.core.dtype import f32, i64
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.frontend.onnx.node import OnnxNode
from relax_tune.ir.frontend.shared.handlers.math import leaky_relu
from relax_tune.ir.frontend.shared.node import Neighbours, Node, WrongValueError
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.node import TorchNode, with_attributes


def writer_and_input() -> tuple[Writer, ImportedValue]:
    w = Writer(GraphBuilder())
    return w, w.of(w.g.input("x", [w.g.symbol("n", 1, None)], f32))


def onnx_node(x: ImportedValue, **attributes: object) -> OnnxNode:
    return OnnxNode("LeakyRelu", "slope", 20, (x,), attributes, ("y",), version=16, neighbours="; read by Abs 'z'")


def torch_node(x: ImportedValue, *args: object, **kwargs: object) -> TorchNode:
    info = TensorInfo(x.shape, f32)
    return TorchNode("aten.leaky_relu.default", "slope", (x, *args), kwargs, (info,), "model.py:3: y = f(x)")


def test_shared_handler_reads_attributes_of_both_formats() -> None:
    w, x = writer_and_input()
    torch_handler = with_attributes(leaky_relu, alpha=(1, "negative_slope"))
    nodes = [
        (leaky_relu, onnx_node(x, alpha=0.25)),
        (torch_handler, torch_node(x, 0.25)),
        (torch_handler, torch_node(x, negative_slope=0.25)),
    ]
    values = [handler(w, node) for handler, node in nodes]
    slopes = [w.definitions[w.definitions[v.value].args[1]].op.value for v in values]  # type: ignore[union-attr]
    assert slopes == [0.25] * 3
    assert torch_node(x).attribute("alpha", 0.01) == onnx_node(x).attribute("alpha", 0.01) == 0.01


@pytest.mark.parametrize(("value", "error"), [(2, None), (const(2), None), (2.5, ParseError), ("2", ParseError)])
def test_integer_attribute_must_be_a_constant_integer(value: object, error: type[Exception] | None) -> None:
    node = onnx_node(writer_and_input()[1], k=value)
    if error is None:
        assert node.integer("k") == 2
    else:
        with pytest.raises(error, match=r"operator LeakyRelu .*k as an integer"):
            node.integer("k")


def test_axis_is_normalised_or_refused() -> None:
    _, x = writer_and_input()
    assert onnx_node(x, axis=-1).axis(3) == 2
    assert onnx_node(x).axis(3, 1) == 1
    with pytest.raises(ParseError, match=r"axis in -3\.\.2, got 3"):
        onnx_node(x, axis=3).axis(3)


def test_choice_refuses_other_texts() -> None:
    _, x = writer_and_input()
    assert onnx_node(x, mode=b"cubic").choice("mode", "linear", "cubic") == "cubic"
    with pytest.raises(WrongValueError, match="mode 'linear' or 'cubic', got 'x'"):
        onnx_node(x, mode="x").choice("mode", "linear", "cubic")


@pytest.mark.parametrize("make", [onnx_node, torch_node])
@pytest.mark.parametrize("error", [DeduceError("no\nlines"), KeyError("k"), TypeError(), ParseError("no")])
def test_errors_of_handlers_name_the_node_on_one_line(make: type[Node], error: Exception) -> None:
    with (
        pytest.raises(ParseError, match=r"^node 'slope', operator .*no|k|TypeError") as refusal,
        make(writer_and_input()[1]).errors(),
    ):
        raise error
    assert "\n" not in str(refusal.value)


def test_refusal_of_a_node_is_not_wrapped_again() -> None:
    node = torch_node(writer_and_input()[1])
    with (
        pytest.raises(ParseError, match=r"^node 'slope', .*: too small; from model\.py:3: y") as refusal,
        node.errors(),
    ):
        raise node.refuse("too small")
    assert str(refusal.value).count("node 'slope'") == 1


def test_neighbours_are_producers_and_readers() -> None:
    neighbours = Neighbours([("A 'a'", [], ["x"]), *[(f"B '{k}'", ["x", "x"], [f"y{k}"]) for k in range(5)]])
    assert neighbours.of(["x"], ["y0"]) == "; fed by A 'a'"
    assert neighbours.of([], ["x"]) == "; read by B '0', B '1', B '2', B '3' and others"
    assert neighbours.of(["z"], []) == ""


def test_sizes_computed_from_tensors_become_symbols() -> None:
    w, x = writer_and_input()
    k = w.of(w.g.input("k", [const(2)], i64))
    sizes = OnnxNode("Expand", "e", 20, (x, k), {}, ("y",)).sizes(w, 1)
    assert len(sizes) == 2 and all(s.op is None or s.children == () for s in sizes)
