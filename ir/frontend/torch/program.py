"""Plain data of an exported torch program, read by the importer and stored as JSON without torch.

A dim is an int, the name of a symbol, or `[operation, dim, dim ...]` with an operation of `DIMS`. Arguments of nodes are
numbers, also complex ones, texts, None, lists, `Ref` (result of another node), or a `DType`.

Tests: `tests/ir/frontend/torch/test_importer.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce, singledispatch
from typing import Any

from numpy.typing import NDArray

from relax_tune.errors import ParseError
from relax_tune.ir.core.dtype import DType, dtype, f16, f32, f64
from relax_tune.ir.core.expr import Expr, add, const, floordiv, floormod, maximum, minimum, mul

FORMAT = 1
DIMS: Mapping[str, Callable[[Expr, Expr], Expr]] = {
    "add": add, "mul": mul, "floordiv": floordiv, "mod": floormod, "max": maximum, "min": minimum,
}  # fmt: skip

COMPLEX: Mapping[str, DType] = {"torch.complex32": f16, "torch.complex64": f32, "torch.complex128": f64}
"""Element type of the parts of a complex number, by torch's name of the complex type."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to the result of the node or input with this name."""

    name: str


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """Annotation of a tensor by torch.

    Attributes:
        dims: Dims, in the form that the module describes.
        element: Element type, or None if unsupported.
        spelled: Name of an unsupported element type.
    """

    dims: tuple[Any, ...]
    element: DType | None
    spelled: str = ""

    @property
    def parts(self) -> DType | None:
        """Element type of the parts of a complex tensor; None for another."""
        return COMPLEX.get(self.spelled)


@dataclass(frozen=True, slots=True)
class TorchSymbol:
    """A dynamic dim with its inclusive range; upper None: no limit."""

    name: str
    lower: int
    upper: int | None


@dataclass(frozen=True, slots=True)
class TorchCall:
    """One node of the program.

    Attributes:
        op: Overload, such as `aten.add.Tensor`; `sym.mul` for arithmetic on dims; or `getitem`.
        result: TorchTensor, None for another value, or a list of both.
        source: Line of the model.
    """

    name: str
    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class TorchGraph:
    """A graph that is an argument of a node: parameters by name, nodes in order, and results."""

    params: tuple[str, ...]
    nodes: tuple[TorchCall, ...]
    results: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class TorchProgram:
    """An exported program.

    Attributes:
        symbols: Dynamic dims.
        inputs: Tensors by name, in order.
        constants: Weight of each parameter or buffer; tied ones have the same weight.
        weights: Values of weights by name.
        nodes: Nodes, in order.
        outputs: (name, Ref or number or None), in order.
        limits: (dim, lower, upper) of computed dims; upper None: no limit.
        state: Weight with the initial value of each buffer that the program writes to: the last inputs, which the last results
            replace.
    """

    symbols: tuple[TorchSymbol, ...]
    inputs: tuple[tuple[str, TorchTensor], ...]
    constants: Mapping[str, str]
    weights: Mapping[str, NDArray[Any]]
    nodes: tuple[TorchCall, ...]
    outputs: tuple[tuple[str, Any], ...]
    limits: tuple[tuple[Any, int, int | None], ...] = ()
    state: Mapping[str, str] = field(default_factory=dict)


def dim_of(dim: Any, symbols: Mapping[str, Expr]) -> Expr:
    """Convert a dim to an expression. Raises ParseError for a symbol that no input has."""
    if isinstance(dim, int):
        return const(dim)
    if isinstance(dim, str):
        if dim not in symbols:
            raise ParseError(f"expected dims that follow from the inputs' dims, got {dim}, which depends on data")
        return symbols[dim]
    operation, *parts = dim
    return reduce(DIMS[operation], (dim_of(p, symbols) for p in parts))


def to_json(program: TorchProgram) -> str:
    """Write a program without its weights as JSON, one node a line."""
    head = {
        "format": FORMAT,
        "symbols": [[s.name, s.lower, s.upper] for s in program.symbols],
        "inputs": [[n, _plain(t)] for n, t in program.inputs],
        "constants": dict(program.constants),
        "outputs": [[n, _plain(v)] for n, v in program.outputs],
        "limits": [list(limit) for limit in program.limits],
        "state": dict(program.state),
    }
    nodes = _plain(program.nodes)
    # One line for each node keeps differences between recorded programs readable.
    lines = [f" {json.dumps(k)}: {json.dumps(v)}," for k, v in head.items()]
    body = ",\n".join("  " + json.dumps(n) for n in nodes)
    return "\n".join(["{", *lines, ' "nodes": [', body, " ]", "}", ""])


def from_json(text: str, weights: Mapping[str, NDArray[Any]]) -> TorchProgram:
    """Read the JSON of `to_json` and add the weights. Raises ParseError for another format."""
    data = json.loads(text)
    if data.get("format") != FORMAT:
        raise ParseError(f"recorded program: expected format {FORMAT}, got {data.get('format')}; record it again")
    return TorchProgram(
        tuple(TorchSymbol(*s) for s in data["symbols"]),
        tuple((n, _read(t)) for n, t in data["inputs"]),
        data["constants"],
        weights,
        tuple(map(_call, data["nodes"])),
        tuple((n, _read(v)) for n, v in data["outputs"]),
        tuple((d, low, high) for d, low, high in data.get("limits", ())),
        data.get("state", {}),
    )


@singledispatch
def _plain(value: Any) -> Any:
    """Convert a value to JSON data; see `_read`."""
    return value


@_plain.register
def _(value: Ref) -> Any:
    return {"ref": value.name}


@_plain.register
def _(value: TorchCall) -> Any:
    kwargs = {k: _plain(v) for k, v in value.kwargs.items()}
    return [value.name, value.op, _plain(value.args), kwargs, _plain(value.result), value.source]


@_plain.register
def _(value: TorchGraph) -> Any:
    return {"graph": [list(value.params), _plain(value.nodes), _plain(value.results)]}


@_plain.register
def _(value: DType) -> Any:
    return {"dtype": value.short}


@_plain.register
def _(value: TorchTensor) -> Any:
    return {"tensor": list(value.dims), "of": value.element.short if value.element else None, "as": value.spelled}


@_plain.register
def _(value: float) -> Any:
    return value if math.isfinite(value) else {"float": str(value)}


@_plain.register
def _(value: complex) -> Any:
    return {"complex": [_plain(value.real), _plain(value.imag)]}


@_plain.register(list)
@_plain.register(tuple)
def _(value: Sequence[Any]) -> Any:
    return [_plain(v) for v in value]


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(v) for v in value]
    if not isinstance(value, dict):
        return value
    if "graph" in value:
        params, nodes, results = value["graph"]
        return TorchGraph(tuple(params), tuple(map(_call, nodes)), tuple(map(_read, results)))
    if "ref" in value:
        return Ref(value["ref"])
    if "dtype" in value:
        return dtype(value["dtype"])
    if "complex" in value:
        return complex(*map(_read, value["complex"]))
    if "float" in value:
        return float(value["float"])
    return TorchTensor(tuple(value["tensor"]), dtype(value["of"]) if value["of"] else None, value["as"])


def _call(fields: Sequence[Any]) -> TorchCall:
    name, op, args, kwargs, result, source = fields
    return TorchCall(name, op, tuple(map(_read, args)), {k: _read(v) for k, v in kwargs.items()}, _read(result), source)
