"""Whether a graph of torch.compile is an earlier graph at fixed sizes.

torch takes a dim of 1 as fixed and traces the model again for it. If the new graph consists of the nodes of an earlier one at these
sizes, the program of the earlier graph computes its results, too.

Tests: `tests/tuner/test_torch_compile.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_tune.ir.frontend.torch.export import PLACEMENT

COPIES = frozenset(f"aten.{name}.default" for name in ("clone", "alias", "detach", "lift_fresh_copy"))
"""Operators whose result is their operand; torch copies where memory is not in order, which depends on dims of 1."""
VIEWS = {"aten._unsafe_view.default": "aten.view.default", "aten.reshape.default": "aten.view.default"}
WHOLE_SLICE = (0, 2**63 - 1)
"""First and last index of a slice `[:]`, which torch keeps only if the dim is a symbol."""
OF_LAYOUT = ("as_strided", "sym_stride", "sym_storage_offset")
"""Parts of the names of operators whose results depend on how operands lie in memory, which a form does not state."""
Range = tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class FormTensor:
    """A tensor of a form: the number of an input, a constant or a node."""

    number: int


@dataclass(frozen=True, eq=False)
class GraphForm:
    """The computation of a traced graph, with its dims as expressions of sympy.

    Attributes:
        inputs: Name, whether it is a weight, element type and dims of each input.
        constants: Tensors that the graph holds.
        nodes: Operator, arguments and annotation of the results of each node.
        outputs: Tensors as places, whole numbers as expressions.
        ranges: Range of each symbol that is the dim of an input.
    """

    inputs: tuple[tuple[str, bool, Any, tuple[Any, ...]], ...]
    constants: tuple[Any, ...]
    nodes: tuple[Any, ...]
    outputs: tuple[Any, ...]
    ranges: Mapping[Any, Range]

    def outputs_for(self, other: GraphForm) -> list[int | None] | None:
        """Return the number of each output of another graph among this one's, None for a size that is fixed there.

        Returns None if this graph, at the dims of the inputs of the other one, is another computation.
        """
        if [(*i[:3], len(i[3])) for i in self.inputs] != [(*i[:3], len(i[3])) for i in other.inputs]:
            return None
        pairs = [(a, b) for i, j in zip(self.inputs, other.inputs) for a, b in zip(i[3], j[3])]
        sizes = {a: b for a, b in pairs if a in self.ranges}
        at = _substitution(sizes)
        if not (
            all(_within(other.ranges, b, self.ranges[a]) for a, b in sizes.items())
            and all(at(a) == b for a, b in pairs)
            and len(self.constants) == len(other.constants)
            and all(map(_equal, self.constants, other.constants))
            and _replaced(at, self.nodes) == other.nodes
        ):
            return None
        outputs = _replaced(at, self.outputs)
        if any(o not in outputs for o in other.outputs if not isinstance(o, int)):
            return None
        return [None if isinstance(o, int) else outputs.index(o) for o in other.outputs]


def graph_form(
    torch: Any, graph: Any, names: Sequence[str], weights: Collection[int], ranges: Mapping[Any, Any]
) -> GraphForm | None:
    """Return the form of a traced graph; None for an operator that contains graphs or depends on layouts.

    Args:
        names: Names of the placeholders.
        weights: Positions of the placeholders that are weights.
        ranges: Range of each symbol of the graph, as torch states it.
    """
    try:
        return _Reader(torch).run(graph, names, weights, ranges)
    except _NoForm:
        return None


class _NoForm(Exception):
    """A graph without a form."""


class _Reader:
    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.values: dict[Any, Any] = {}
        self.count = 0

    def run(self, graph: Any, names: Sequence[str], weights: Collection[int], ranges: Mapping[Any, Any]) -> GraphForm:
        inputs, constants, nodes = [], [], list[Any]()
        outputs: tuple[Any, ...] = ()
        symbols: set[Any] = set()
        for position, node in enumerate(graph.graph.find_nodes(op="placeholder")):
            value = node.meta["val"]
            if isinstance(value, self.torch.Tensor):
                dims = tuple(map(_dim, value.shape))
                symbols.update(d for d in dims if getattr(d, "is_symbol", False))
                inputs.append((names[position], position in weights, value.dtype, dims))
                self._place(node)
            else:
                self.values[node] = _dim(value) if isinstance(value, self.torch.SymInt) else self._argument(value)
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                constants.append(getattr(graph, node.target, None))
                self._place(node)
                if not isinstance(constants[-1], self.torch.Tensor):
                    raise _NoForm
            elif node.op == "output":
                outputs = self._argument(node.args[0])
            elif node.op == "call_function":
                nodes += self._node(node, symbols)
        known = {s: _range(ranges[s]) for s in symbols if s in ranges}
        return GraphForm(tuple(inputs), tuple(constants), tuple(nodes), outputs, known)

    def _place(self, node: Any) -> None:
        self.values[node] = FormTensor(self.count)
        self.count += 1

    def _node(self, node: Any, symbols: set[Any]) -> list[Any]:
        op, value = str(node.target), node.meta.get("val")
        if any(part in op for part in OF_LAYOUT):
            raise _NoForm
        if isinstance(value, self.torch.SymInt) and value.node.expr.free_symbols <= symbols:
            self.values[node] = _dim(value)  # arithmetic on dims
            return []
        arguments = self._argument(node.args)
        if op in COPIES or (op == "aten.slice.Tensor" and arguments[2:] == WHOLE_SLICE):
            self.values[node] = arguments[0]
            return []
        self._place(node)
        named = tuple((k, self._argument(v)) for k, v in sorted(node.kwargs.items()) if k not in PLACEMENT)
        return [(VIEWS.get(op, op), arguments, named, self._annotation(value))]

    def _annotation(self, value: Any) -> Any:
        if isinstance(value, self.torch.Tensor):
            return str(value.dtype), tuple(map(_dim, value.shape))
        if isinstance(value, (list, tuple)):
            return tuple(map(self._annotation, value))
        return _dim(value) if isinstance(value, self.torch.SymInt) else type(value).__name__

    def _argument(self, value: Any) -> Any:
        if isinstance(value, self.torch.fx.Node):
            return self.values[value]
        if isinstance(value, (list, tuple)):
            return tuple(map(self._argument, value))
        # the type tells True from 1, and the text NaN from other numbers
        return value if type(value) is int else (type(value).__name__, str(value))


def _dim(size: Any) -> Any:
    """Return a dim as a number or an expression."""
    if isinstance(size, int):
        return int(size)
    return int(size.node.expr) if size.node.expr.is_Integer else size.node.expr


def _equal(a: Any, b: Any) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and bool(a.equal(b))


def _range(span: Any) -> Range:
    return int(span.lower), int(span.upper) if span.upper.is_Integer else None


def _within(ranges: Mapping[Any, Range], size: Any, outer: Range) -> bool:
    """Return whether a dim is known to be in a range."""
    low, high = (size, size) if isinstance(size, int) else ranges.get(size, (0, None))
    return low >= outer[0] and (outer[1] is None or (high is not None and high <= outer[1]))


def _substitution(sizes: Mapping[Any, Any]) -> Callable[[Any], Any]:
    known: dict[Any, Any] = {}

    def at(dim: Any) -> Any:
        if isinstance(dim, int):
            return dim
        if dim not in known:
            value = dim.subs(sizes, simultaneous=True)
            known[dim] = int(value) if value.is_Integer else value
        return known[dim]

    return at


def _replaced(at: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_replaced(at, v) for v in value)
    return at(value) if hasattr(value, "subs") else value
