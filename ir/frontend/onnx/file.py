"""Read ONNX files and check them before any node is imported."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Union

from relax_tune.errors import ParseError, UserError
from relax_tune.ir.frontend.onnx.tensors import require_onnx

Source = Union[str, Path, bytes, Any]
"""A path, the bytes of a model, or an `onnx.ModelProto`."""


def is_model_proto(value: object) -> bool:
    """Return True for an onnx.ModelProto, without importing onnx."""
    return any(c.__name__ == "ModelProto" and c.__module__.partition(".")[0] == "onnx" for c in type(value).__mro__)


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
            raise ParseError(f"expected an ONNX model, got: {error}; give the path of an .onnx file") from None
    if not isinstance(source, (bytes, bytearray, memoryview)):
        raise UserError(f"expected a path, bytes or an onnx.ModelProto, got {type(source).__name__}")
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(bytes(source))
    except Exception as error:  # protobuf's DecodeError has no public home that every version shares
        raise ParseError(
            f"{what}: expected an ONNX model, got: {error}; is the file complete and really ONNX?"
        ) from None
    _check_whole(proto, what)
    return proto, folder


def _check_whole(proto: Any, what: str) -> None:
    """Require an opset, outputs, and valid unique names. Raises ParseError."""
    if not proto.opset_import or not proto.HasField("graph") or not proto.graph.output:
        raise ParseError(
            f"{what}: expected an ONNX model with an opset, a graph and outputs, got "
            f"{len(proto.opset_import)} opsets and {len(proto.graph.output)} outputs; is the file complete and really ONNX?"
        )
    # The importer reads every name as text; bytes would fail somewhere in the middle of it.
    damaged = [s for s in _strings(proto) if not isinstance(s, str)]
    if damaged:
        raise ParseError(f"{what}: expected names in UTF-8, got {damaged[0]!r}; is the file complete and really ONNX?")
    graph = proto.graph
    _check_once((i.name for i in graph.input), f"{what}: inputs", "rename one of them")
    _check_once((t.name for t in graph.initializer), f"{what}: initializers", "rename one of them")
    produced = (n for node in graph.node for n in node.output if n)
    provided = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    _check_once(
        (*provided, *produced), f"{what}: values", "every value has one producer; was the graph edited by hand?"
    )
    _check_once((f"{f.domain}.{f.name}" for f in proto.functions), f"{what}: functions", "keep one of them")


def _check_once(names: Iterable[str], what: str, advice: str) -> None:
    twice = [n for n, count in Counter(names).items() if count > 1]
    if twice:
        raise ParseError(f"{what}: expected distinct names, got {twice[0]!r} twice; {advice}")


def names_read(graph: Any) -> set[str]:
    """Return the names that a graph reads from outside, also in its inner graphs."""
    produced = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    read: set[str] = set()
    for n in graph.node:
        read |= names_read_by(n) - produced
        produced |= {*n.output}
    return (read | ({o.name for o in graph.output} - produced)) - {""}


def names_read_by(node: Any) -> set[str]:
    """Return the names that a node reads, also in its graphs."""
    inner = (g for a in node.attribute for g in (*([a.g] if a.HasField("g") else []), *a.graphs))
    return {*node.input}.union(*map(names_read, inner)) - {""}


def sorted_nodes(nodes: Sequence[Any], available: Container[str]) -> list[Any]:
    """Return nodes in topological order, which is the order of the file where that is one.

    The format requires this order. ONNX Runtime accepts others, and tools that edit files write them.

    Args:
        nodes: The nodes of a graph.
        available: Names of inputs, initializers and outer values.

    Raises:
        ParseError: A node reads what no node makes, or the graph has a cycle.
    """
    makers = {name: position for position, n in enumerate(nodes) for name in n.output if name}
    needs: list[set[int]] = []
    for position, n in enumerate(nodes):
        for name in n.input:
            if name and name not in makers and name not in available:
                raise ParseError(
                    f"{_title(n)}: expected input {name!r} from an earlier node, an input or an initializer, got none; "
                    "is the file complete?"
                )
        read = [(name, makers[name]) for name in names_read_by(n) if name in makers]
        needs.append({maker for name, maker in read if maker < position or name not in available})
    readers: dict[int, list[int]] = {}
    for position, makers_of in enumerate(needs):
        for maker in makers_of:
            readers.setdefault(maker, []).append(position)
    missing = [len(makers_of) for makers_of in needs]
    ready = [position for position, count in enumerate(missing) if count == 0]
    order: list[int] = []
    while ready:
        # A heap, so that nodes stay in the order of the file wherever it is a valid one.
        order.append(position := heapq.heappop(ready))
        for reader in readers.get(position, ()):
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, reader)
    if len(order) < len(nodes):
        raise _cycle(nodes, needs, set(order))
    return [nodes[position] for position in order]


def _cycle(nodes: Sequence[Any], needs: Sequence[set[int]], done: set[int]) -> ParseError:
    """Make the error for nodes in a cycle. done: nodes before it."""
    blocked = next(position for position in range(len(nodes)) if position not in done)
    maker = min(needs[blocked] - done)
    name = next(name for name in nodes[maker].output if name in names_read_by(nodes[blocked]))
    return ParseError(
        f"{_title(nodes[blocked])}: expected input {name!r} from an earlier node, but {nodes[maker].op_type} "
        f"{nodes[maker].name or name!r} makes it later; the graph has a cycle"
    )


def _title(node: Any) -> str:
    return f"node {node.name or (node.output[0] if node.output else '')!r}, operator {node.op_type}"


def _strings(proto: Any) -> Iterator[Any]:
    """Yield the names that the importer reads, as bytes where protobuf met a name that is not UTF-8."""
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
