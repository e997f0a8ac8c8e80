"""ONNX Det."""

from __future__ import annotations

from collections.abc import Mapping

from relax_tune.ir.core.dtype import f32
from relax_tune.ir.frontend.onnx.node import Handler, OnnxNode
from relax_tune.ir.frontend.shared.algorithms.elimination import determinant
from relax_tune.ir.frontend.shared.compositions import cast_to
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer


def _det(w: Writer, node: OnnxNode) -> ImportedValue:
    x = node.item(0)
    work = f32 if x.dtype.is_half else x.dtype
    found = determinant(w, cast_to(w, w.tensor(x), x.dtype, work), work)
    return w.of(cast_to(w, found, work, x.dtype))


HANDLERS: Mapping[str, Handler] = {"Det": _det}
