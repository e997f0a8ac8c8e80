"""ONNX optionals whose content is certain at import: a value, or nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.onnx.control.sequences import NothingValue
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer


def _optional(w: Writer, node: OnnxNode) -> ImportedValue:
    return node.item(0) if node.has(0) else NothingValue("nothing", TensorInfo(None, None))


def _get(w: Writer, node: OnnxNode) -> ImportedValue:
    found = node.item(0)
    if isinstance(found, NothingValue):
        raise node.refuse("wanted an optional with a value, found one without; ask OptionalHasElement before, in an If")
    return found


def _has(w: Writer, node: OnnxNode) -> ImportedValue:
    return w.constant(np.asarray(node.has(0) and not isinstance(node.item(0), NothingValue)), node.outputs[0])


HANDLERS: Mapping[str, Handler] = {"Optional": _optional, "OptionalGetElement": _get, "OptionalHasElement": _has}
