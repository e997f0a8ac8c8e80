"""Forms of ONNX operators from before opset 13, converted to the forms of opset 13.

Two things changed: attributes became inputs, and Softmax, LogSoftmax and Hardmax work along one axis instead of on a matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from relax_tune.ir.core.dtype import bf16, f16
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.onnx.tensors import Array
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.base import product

FIRST = 13
"""Opset whose forms the handlers read."""

BECAME_INPUTS: Mapping[str, tuple[str, ...]] = {
    "Clip": ("min", "max"), "Pad": ("pads", "value"), "ReduceSum": ("axes",), "Slice": ("starts", "ends", "axes"),
    "Split": ("split",), "Squeeze": ("axes",), "TopK": ("k",), "Unsqueeze": ("axes",),
}  # fmt: skip
"""Attributes by operator that are inputs in opset 13: the first attribute is input 1."""
DEFAULTS: Mapping[tuple[str, str], float] = {("Pad", "value"): 0.0}
LARGEST = float(np.finfo(np.float32).max)
"""The bound that Clip has before opset 11 where it states none, for elements of 64 bits and for infinities, too."""


def modern(w: Writer, node: OnnxNode) -> OnnxNode:
    """Return a node in the form of opset 13: attributes that became inputs are constants."""
    names = BECAME_INPUTS.get(node.op, ())
    if node.op == "Clip" and node.opset < 11 and node.item(0).dtype not in (f16, bf16):
        node = replace(node, attributes={"min": -LARGEST, "max": LARGEST, **node.attributes})
    if node.opset >= FIRST or not any(name in node.attributes for name in names):
        return node
    inputs: list[ImportedValue | None] = [node.item(0)]
    for name in names:
        value = node.attributes.get(name, DEFAULTS.get((node.op, name)))
        inputs.append(None if value is None else w.constant(_array(node, value), name))
    while inputs[-1] is None:
        inputs.pop()
    others = {name: value for name, value in node.attributes.items() if name not in names}
    return replace(node, inputs=tuple(inputs), attributes=others)


def _array(node: OnnxNode, value: object) -> Array:
    """Make an input of an attribute: numbers have the type of the elements, integers are int64."""
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            return np.asarray(value, node.item(0).dtype.numpy)
    return np.atleast_1d(np.asarray(value, np.int64))


def rows(handler: Handler) -> Handler:
    """Make a handler of Softmax, LogSoftmax or Hardmax: before opset 13, of a matrix whose columns begin at `axis`."""

    def handle(w: Writer, node: OnnxNode) -> ImportedValue:
        x = node.item(0)
        axis = node.integer("axis", 1 if node.opset < FIRST else -1)
        if not -x.ndim <= axis < x.ndim and not (node.opset < FIRST and axis == x.ndim):
            raise node.refuse(f"expected an axis in {-x.ndim}..{x.ndim - 1}, got {axis}")
        axis = axis + x.ndim if axis < 0 else axis
        if node.opset >= FIRST or axis == x.ndim - 1:
            return _one(handler(w, replace(node, attributes={"axis": axis})))
        dims = [w.simplify(product(part)) for part in (x.shape[:axis], x.shape[axis:])]
        matrix = w.of(w.reshape(w.tensor(x), dims))
        y = _one(handler(w, replace(node, inputs=(matrix,), attributes={"axis": 1})))
        return w.of(w.reshape(w.tensor(y), x.shape))

    return handle


def _one(value: object) -> ImportedValue:
    assert isinstance(value, ImportedValue)
    return value
