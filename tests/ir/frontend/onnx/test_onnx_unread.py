"""Outputs that nothing reads, and nodes in another order than that of the data."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tests.ir.frontend.onnx.onnx_models import check, model, onnx, reference
from tests.ir.frontend.onnx.test_operators import f

from relax_tune.errors import ParseError
from relax_tune.ir.frontend.onnx.importer import load_onnx
from relax_tune.ir.interp.interp_graph import run_function

UNREAD = [
    (7, "(float[n, 3] x) => (float[n, 3] y) { t, mask = Dropout(x) y = Relu(t) }", [f(2, 3)]),
    (9, "(float[n, 3] x) => (float[n, 3] y) { y, mask = Dropout<ratio = 0.7>(x) }", [f(2, 3)]),
    (7, "(float[n, 3, h] x) => (float[n, 3, h] y) <float[3] s = {1.0, 2.0, 0.5}, float[3] v = {1.0, 2.0, 0.5}>"
        " { y, a, b, c, d = BatchNormalization(x, s, s, s, v) }", [f(2, 3, 4)]),
    (12, "(float[n, 2, h, w] x) => (float[n, 2, p, q] y) { y, i = MaxPool<kernel_shape = [2, 2], storage_order = 1>(x) }", [f(1, 2, 5, 4)]),
    (17, "(float[n, 4] x, float[4] s) => (float[n, 4] y) { y, mean, deviation = LayerNormalization(x, s) }", [f(3, 4), f(4)]),
]  # fmt: skip


def swapped(text: str, opset: int, order: tuple[int, ...]) -> Any:
    """A model of a text with its nodes in another order."""
    proto = model(text, opset)
    nodes = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend(nodes[position] for position in order)
    return proto


def runs_as(proto: Any, same: Any, inputs: list[Any]) -> None:
    """Require a model with branches to give what onnx's evaluator gives for one that says the same."""
    (wanted,) = reference(same, inputs)
    found = run_function(load_onnx(proto), "main", inputs)
    assert isinstance(found, np.ndarray) and found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("opset, text, inputs", UNREAD, ids=lambda v: v if isinstance(v, int) else "")
def test_load_onnx_unread_output_is_no_reason_to_refuse(opset: int, text: str, inputs: list[Any]) -> None:
    same = None
    if opset < 10:  # onnx's evaluator runs Dropout as in training and wants one result of BatchNormalization
        same = model(
            text.replace("t, mask", "t").replace("y, mask", "y").replace("y, a, b, c, d", "y"),
            15 if "Batch" in text else 13,
        )
        if "ratio" in text:
            same = model("(float[n, 3] x) => (float[n, 3] y) { y = Identity(x) }")
    check(model(text, opset), inputs, same_as=same)


def test_load_onnx_dropout_mask_read_by_inner_graph_raises() -> None:
    """A value is read, too, where only a branch of an If names it."""
    text = """(float[n] x, bool c) => (float[n] y) { t, mask = Dropout(x)
      y = If (c) <then_branch = one () => (float[n] a) { a = Cast<to = 1>(mask) }, else_branch = two () => (float[n] b) { b = Neg(t) }> }"""
    with pytest.raises(ParseError, match="operator Dropout"):
        load_onnx(model(text, 9))


def test_load_onnx_inner_graph_reads_second_output() -> None:
    text = """(float[n, 5] x, bool c) => (int64[n, 2] y) <int64[1] k = {2}> { v, i = TopK(x, k)
      y = If (c) <then_branch = one () => (int64[n, 2] a) { a = Neg(i) }, else_branch = two () => (int64[n, 2] b) { b = Abs(i) }> }"""
    for c in (True, False):
        runs_as(model(text, 13), model(text, 13), [f(3, 5), np.array(c)])


CHAIN = """(float[n, 3] x) => (float[m, 3] y) <int64[1] one = {1}, int64[1] rest = {-1}, int64[1] three = {3}> {
  s = Concat<axis = 0>(rest, three) r = Relu(x) t = Reshape(r, s) y = Add(t, x) }"""


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[1::3])
def test_load_onnx_nodes_in_another_order_give_the_same(order: tuple[int, ...]) -> None:
    check(swapped(CHAIN, 13, order), [f(2, 3)], same_as=model(CHAIN, 13))


def test_load_onnx_branch_reading_a_later_node_gives_the_same() -> None:
    text = """(float[n] x, bool c) => (float[n] y) { t = Exp(x) u = Neg(t)
      y = If (c) <then_branch = one () => (float[n] a) { a = Abs(u) }, else_branch = two () => (float[n] b) { b = Sin(t) }> }"""
    for c in (True, False):
        runs_as(swapped(text, 13, (2, 1, 0)), model(text, 13), [f(4), np.array(c)])


def test_load_onnx_inner_graph_in_another_order_gives_the_same() -> None:
    text = """(float[n] x, bool c) => (float[n] y) {
      y = If (c) <then_branch = one () => (float[n] a) { b = Exp(x) a = Abs(b) }, else_branch = two () => (float[n] d) { d = Neg(x) }> }"""
    proto = model(text, 13)
    inner = onnx.helper.get_node_attr_value(proto.graph.node[0], "then_branch").node
    first = type(inner[0])()
    first.CopyFrom(inner[0])
    del inner[0]
    inner.append(first)
    runs_as(proto, model(text, 13), [f(4), np.array(True)])


def test_load_onnx_argument_of_a_loop_takes_the_place_of_an_initializer() -> None:
    text = """(float[n] x, int64 count) => (float[n] y) <bool always = {1}> {
      y = Loop(count, always, x) <body = step (int64 i, bool c, float[n] v) => (bool go, float[n] w)
        { go = Identity(c) w = Add(v, v) }> }"""
    proto = model(text, 13)
    body = proto.graph.node[0].attribute[0].g
    body.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "v"))
    runs_as(proto, proto, [f(4), np.array(3)])


def test_load_onnx_weights_in_the_list_of_inputs_are_weights() -> None:
    """Files of IR version 3 list every initializer as an input."""
    text = """(float[n, 3] x, float[3, 2] w, float[2] b) => (float[n, 2] y)
      <float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[2] b = {1, 2}> { y = Gemm(x, w, b) }"""
    proto = model(text, 9)
    proto.ir_version = 3
    module = load_onnx(proto)
    assert set(module.constants) == {"w", "b"}
    x = f(4, 3)
    w, b = (onnx.numpy_helper.to_array(t) for t in proto.graph.initializer)
    np.testing.assert_allclose(np.asarray(run_function(module, "main", [x])), x @ w + b, rtol=1e-5)
