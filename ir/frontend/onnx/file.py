"""Read ONNX files and check them before any node is imported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Union

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.frontend.onnx.tensors import require_onnx

Source = Union[str, Path, bytes, Any]
"""A path, the bytes of a model, or an `onnx.ModelProto`."""


def read_model(source: Source) -> tuple[Any, Path | None]:
    """Return the model and the folder of its file (None from memory). Raises ParseError, UserError."""
    onnx = require_onnx()
    if isinstance(source, onnx.ModelProto):
        _check_whole(source, "the given model")
        return source, None
    what = "the given bytes"
    folder: Path | None = None
    if isinstance(source, (str, Path)):
        path = Path(source)
        what, folder = str(path), path.parent
        try:
            source = path.read_bytes()
        except OSError as error:
            raise ParseError(f"wanted an ONNX model, found: {error}; give the path of an .onnx file") from None
    if not isinstance(source, (bytes, bytearray, memoryview)):
        raise UserError(f"wanted a path, bytes or an onnx.ModelProto, found {type(source).__name__}")
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(bytes(source))
    except Exception as error:  # protobuf's DecodeError has no public home that every version shares
        raise ParseError(
            f"{what}: wanted an ONNX model, found: {error}; is the file complete and really ONNX?"
        ) from None
    _check_whole(proto, what)
    return proto, folder


def _check_whole(proto: Any, what: str) -> None:
    """Require an opset, outputs, and valid unique names. Raises ParseError."""
    if not proto.opset_import or not proto.HasField("graph") or not proto.graph.output:
        raise ParseError(
            f"{what}: wanted an ONNX model with an opset, a graph and outputs, found "
            f"{len(proto.opset_import)} opsets and {len(proto.graph.output)} outputs; is the file complete and really ONNX?"
        )
    damaged = [s for s in _strings(proto) if not isinstance(s, str)]
    if damaged:
        raise ParseError(f"{what}: wanted names in UTF-8, found {damaged[0]!r}; is the file complete and really ONNX?")
    graph = proto.graph
    _check_once((i.name for i in graph.input), f"{what}: inputs", "rename one of them")
    _check_once((t.name for t in graph.initializer), f"{what}: initializers", "rename one of them")
    made = (n for node in graph.node for n in node.output if n)
    given = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    _check_once((*given, *made), f"{what}: values", "every value is made once; was the graph put together by hand?")
    _check_once((f"{f.domain}.{f.name}" for f in proto.functions), f"{what}: functions", "keep one of them")


def _check_once(names: Iterable[str], what: str, advice: str) -> None:
    twice = [n for n, count in Counter(names).items() if count > 1]
    if twice:
        raise ParseError(f"{what}: wanted distinct names, found {twice[0]!r} twice; {advice}")


def order_of(nodes: Sequence[Any], given: Container[str]) -> None:
    """Require topological order: each node reads inputs or results of earlier nodes. Raises ParseError."""
    seen: set[str] = set()
    for position, n in enumerate(nodes):
        for name in n.input:
            if name and name not in seen and name not in given:
                title = f"node {n.name or (n.output[0] if n.output else '')!r}, operator {n.op_type}"
                later = next((m for m in nodes[position:] if name in m.output), None)
                if later is not None:
                    raise ParseError(
                        f"{title}: wanted input {name!r} made by an earlier node, found that {later.op_type} "
                        f"{later.name or name!r} makes it later; the graph has a cycle, or its nodes are out of order"
                    )
                raise ParseError(
                    f"{title}: wanted input {name!r} made by an earlier node, an input or an initializer, found none; "
                    "is the file complete?"
                )
        seen.update(n.output)


def _strings(proto: Any) -> Iterator[Any]:
    """Yield the names that the importer reads; protobuf gives bytes for a name that is not UTF-8."""
    for opset in (*proto.opset_import, *(o for f in proto.functions for o in f.opset_import)):
        yield opset.domain
    for f in proto.functions:
        yield from (f.domain, f.name, *f.input, *f.output)
        yield from _strings_of_nodes(f.node)
    yield from _strings_of_graph(proto.graph)


def _strings_of_nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    for n in nodes:
        yield from (n.op_type, n.domain, n.name, *n.input, *n.output)
        for a in n.attribute:
            yield from (a.name, a.ref_attr_name, a.t.name)
            for graph in (*([a.g] if a.HasField("g") else []), *a.graphs):
                yield from _strings_of_graph(graph)


def _strings_of_graph(graph: Any) -> Iterator[Any]:
    yield graph.name
    yield from _strings_of_nodes(graph.node)
    for t in graph.initializer:
        yield t.name
        for entry in t.external_data:
            yield from (entry.key, entry.value)
    for v in (*graph.input, *graph.output):
        yield v.name
        for d in v.type.tensor_type.shape.dim:
            yield d.dim_param
