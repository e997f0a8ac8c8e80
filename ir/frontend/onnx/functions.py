"""Operators defined as functions of others, by the model or by the standard.

Tests: `tests/ir/frontend/onnx/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import as_int
from relax_tune.ir.frontend.onnx.node import OnnxNode
from relax_tune.ir.frontend.onnx.sequences import SequenceValue
from relax_tune.ir.frontend.onnx.tensors import NUMBERS
from relax_tune.ir.frontend.shared.writer import ImportedValue


def function_of(onnx: Any, proto: Any, node: OnnxNode, domain: str) -> Any:
    """Return the function body that the standard defines for a node, or None."""
    # Files state opsets as int64, and onnx's look-ups take a C int.
    if not 0 < node.opset < 2**31:
        return None
    try:
        schema = onnx.defs.get_schema(node.op, node.opset, domain)
    except onnx.defs.SchemaError:
        return None
    if schema.has_function:
        body = onnx.FunctionProto()
        body.CopyFrom(schema.function_body)
        body.attribute_proto.extend(a.default_value for a in schema.attributes.values() if a.default_value.name)
        return body
    # Such a body is built for given types of the inputs, which an input left out in the middle does not have.
    if not schema.has_context_dependent_function or any(
        i is None and name for i, name in zip(node.inputs, proto.input)
    ):
        return None
    types = [_type(onnx, i).SerializeToString() for i in node.inputs if i is not None]
    versions = [v for v in schema.context_dependent_function_opset_versions if v <= node.opset]
    if not versions:
        return None
    text = schema.get_context_dependent_function_with_opset_version(max(versions), proto.SerializeToString(), types)
    body = onnx.FunctionProto()
    body.ParseFromString(text)
    return body if body.node else None


def _type(onnx: Any, item: ImportedValue) -> Any:
    if isinstance(item, SequenceValue):
        some = item.stack or next(iter(item.parts), None)
        element = onnx.helper.make_tensor_type_proto(NUMBERS[some.dtype if some else f32], None)
        return onnx.helper.make_sequence_type_proto(element)
    shape = [n if (n := as_int(d)) is not None else repr(d) for d in item.shape]
    return onnx.helper.make_tensor_type_proto(NUMBERS[item.dtype], shape)


def substituted(onnx: Any, body: Any, call: Any) -> Iterator[Any]:
    """Yield the nodes of a function, with attribute references replaced by attributes of the call or defaults."""
    attributes = {a.name: a for a in body.attribute_proto}
    attributes |= {a.name: a for a in call.attribute}
    for n in body.node:
        if not any(a.ref_attr_name for a in n.attribute):
            yield n
            continue
        copy = onnx.NodeProto()
        copy.CopyFrom(n)
        del copy.attribute[:]
        for a in n.attribute:
            if not a.ref_attr_name:
                copy.attribute.append(a)
            # A reference without an attribute at the call and without a default is left out: the inner node then uses
            # the default of its operator.
            elif a.ref_attr_name in attributes:
                bound = copy.attribute.add()
                bound.CopyFrom(attributes[a.ref_attr_name])
                bound.name = a.name
        yield copy
