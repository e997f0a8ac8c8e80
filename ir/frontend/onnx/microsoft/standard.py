"""Operators of com.microsoft that are, or nearly are, operators of the standard domain, and distances of rows.

Tests: `tests/ir/frontend/onnx/microsoft/test_standard.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from relax_tune.ir.core.dtype import i32
from relax_tune.ir.frontend.onnx import images, indexing, shape, sizes
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.shared.handlers.neural import matmul
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer

STANDARD: Mapping[str, Handler] = {
    op: handler for module in (shape, indexing, images, sizes) for op, handler in module.HANDLERS.items()
}


def _standard(w: Writer, node: OnnxNode, op: str, version: int, **attributes: Any) -> Sequence[ImportedValue | None]:
    """Import a node as an operator of the standard domain, with further attributes."""
    inner = replace(node, op=op, domain="", version=version, attributes={**node.attributes, **attributes})
    result = STANDARD[op](w, inner)
    return [result] if isinstance(result, ImportedValue) else result


def as_standard(op: str, version: int, **attributes: Any) -> Handler:
    """Make the handler of a standard operator at a version, with further attributes."""
    return lambda w, node: _standard(w, node, op, version, **attributes)


def _pad(w: Writer, node: OnnxNode) -> Sequence[ImportedValue | None]:
    """Import Pad, whose pads may have a dim of 1 in front."""
    pads = node.item(1)
    if pads.ndim == 2:
        pads = w.constant(np.array(node.integers(w, 1)), "pads")
    return _standard(w, replace(node, inputs=(node.inputs[0], pads, *node.inputs[2:])), "Pad", 13)


def _expand_dims(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import ExpandDims: one more dim of 1 at an axis of the result."""
    axis = node.integers(w, 1)
    if len(axis) != 1:
        raise node.refuse(f"expected one axis, got {axis}")
    x = node.item(0)
    return w.of(w.expand_dims(w.tensor(x), (node.normalised(axis[0], x.ndim + 1),)), x.natural)


def _range(w: Writer, node: OnnxNode) -> Sequence[ImportedValue | None]:
    """Import Range, whose step is 1 by default."""
    if node.has(2):
        return _standard(w, node, "Range", 11)
    one = w.constant(np.ones((), node.item(0).dtype.numpy), "one")
    return _standard(w, replace(node, inputs=(*node.inputs[:2], one)), "Range", 11)


def _unique(w: Writer, node: OnnxNode) -> Sequence[ImportedValue | None]:
    """Import Unique: elements in the order in which they occur, the place of each element among them, and their counts."""
    inner = replace(node, outputs=(node.outputs[0], "", *node.outputs[1:]))
    values, _, *others = _standard(w, inner, "Unique", 11, sorted=0)
    return [values, *others]


def _distances(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import CDist: distances of the rows of a (n, k) and b (m, k), or their squares, (n, m).

    They are sums of squared differences: the form with one matrix product loses the digits of close rows.
    """
    a, b = node.item(0), node.item(1)
    if a.ndim != 2 or b.ndim != 2:
        raise node.refuse(f"expected two matrices, got {a.info!r} and {b.info!r}")
    rows, columns = w.expand_dims(w.tensor(a), (1,)), w.expand_dims(w.tensor(b), (0,))
    difference = w.sub(rows, columns)
    total = w.sum(w.mul(difference, difference), (2,))
    return w.of(w.sqrt(total) if node.choice("metric", "sqeuclidean", "euclidean") == "euclidean" else total)


def _integer_product(w: Writer, node: OnnxNode) -> ImportedValue:
    """Import MatMulInteger16: the exact product of int16 matrices, in int32."""
    return matmul(w, replace(node, inputs=tuple(w.of(w.cast(node.operand(w, p), i32)) for p in range(2))))


HANDLERS: Mapping[str, Handler] = {
    "Trilu": as_standard("Trilu", 14), "GridSample": as_standard("GridSample", 16), "GatherND": as_standard("GatherND", 12),
    "Pad": _pad, "ExpandDims": _expand_dims, "Range": _range, "Unique": _unique, "CDist": _distances,
    "MatMulInteger16": _integer_product,
}  # fmt: skip
