"""A node of an ONNX graph with resolved inputs.

Tests: `tests/ir/frontend/onnx/test_importer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

from relax_tune.ir.core.dtype import DType, f64, i64
from relax_tune.ir.core.expr import Expr, Var, as_int, const
from relax_tune.ir.core.struct_info import ShapeInfo
from relax_tune.ir.frontend.onnx.tensors import element_type
from relax_tune.ir.frontend.onnx.workarounds import INITIALIZER, cut
from relax_tune.ir.frontend.shared.node import Node, shown
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.op.base import product
from relax_tune.ir.op.shapes import TensorToShape


@dataclass(frozen=True, slots=True, eq=False)
class OnnxNode(Node):
    """An ONNX node with resolved inputs.

    Attributes:
        opset: Opset of its domain.
        inputs: Imported values; None for an omitted optional input.
        attributes: Values by name.
        outputs: Names of the results; "" for a result after the first that nothing reads.
        domain: Domain of the operator.
        version: Version of the operator's definition.
        path: Place in the file: the index of the node, and the graph or function that has it.
        names: Names in the file of what it reads.
        inner: Whether it is in a graph of another node, or in a function.
        given: Names of the inputs of the model.
    """

    opset: int
    inputs: tuple[ImportedValue | None, ...]
    attributes: Mapping[str, Any]
    outputs: tuple[str, ...]
    domain: str = ""
    version: int | None = None
    path: str = ""
    names: tuple[str, ...] = ()
    inner: bool = False
    given: Collection[str] = ()

    def shown_arguments(self) -> str:
        return ", ".join("nothing" if i is None else shown(i) for i in self.inputs)

    def definition(self) -> str:
        version = "" if self.version is None else f", version {self.version}"
        return f" (domain {self.domain or 'ai.onnx'}, opset {self.opset}{version})"

    def place(self) -> str:
        return f"; {self.path}" if self.path else ""

    def workaround(self) -> str:
        return cut([n for n in self.names if n], [n for n in self.outputs if n], self.inner) if self.path else ""

    def has(self, position: int) -> bool:
        return self.optional(position) is not None

    def optional(self, position: int) -> ImportedValue | None:
        return self.inputs[position] if position < len(self.inputs) else None

    def item(self, position: int) -> ImportedValue:
        item = self.optional(position)
        if item is None:
            raise self.refuse(f"expected input {position}, got none")
        return item

    def typed(self, w: Writer, position: int) -> ImportedValue:
        return self.item(position)

    def attribute(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)

    def real(self, name: str, default: float | None = None) -> float:
        """Return an attribute that must be a constant number; with a float64 input, as the 32-bit number that the standard stores."""
        value = Node.real(self, name, default)
        exact = any(i is not None and i.info.dtype is f64 for i in self.inputs)
        return float(np.float32(value)) if exact else value

    def is_read(self, position: int) -> bool:
        """Return True if any node, inner graph or result reads output `position`, which is not the first."""
        return position < len(self.outputs) and self.outputs[position] != ""

    def element(self, name: str, default: DType | None = None) -> DType:
        """Return an attribute that is the number of an element type. Raises ParseError."""
        number = self.integer(name, 0)
        return default if default is not None and not number else element_type(number, f"node {self.name!r}")

    # inputs that decide shapes

    def integers(self, w: Writer, position: int) -> list[int]:
        """Return an input that must be integer literals. Raises ParseError."""
        literals = integers(w.scalars(self.item(position)))
        if literals is None:
            raise self.refuse(
                f"expected input {position} to be constant, got {self.item(position).info!r}", self._known(position)
            )
        return literals

    def expressions(self, w: Writer, position: int) -> list[Expr]:
        """Return an input that must be known from shapes and constants. Raises ParseError."""
        scalars = w.scalars(self.item(position))
        if scalars is None:
            raise self.refuse(
                f"expected input {position} to be known from constants and shapes, got {w.unknown(self.item(position))}",
                self._known(position),
            )
        return list(scalars.reshape(-1))

    def sizes(self, w: Writer, position: int, scalar: bool = False) -> list[Expr]:
        """Return an input of sizes. Those computed from tensors become symbols, which the runtime reads.

        Args:
            scalar: Whether the input is one size, which may have no dim.

        Raises:
            ParseError: The number of sizes is unknown.
        """
        item = self.item(position)
        if w.scalars(item) is not None:
            return self.expressions(w, position)
        count = as_int(w.simplify(product(item.shape)))
        if count is None or (count != 1 if scalar else item.ndim != 1):
            raise self.refuse(f"expected a number of sizes in input {position}, got {item.info!r}")
        values = w.cast(w.reshape(w.tensor(item), [const(count)]), i64)
        symbols = tuple(Var(w.g.fresh("size")) for _ in range(count))
        w.g.match_cast(w.g.call(TensorToShape(), values), ShapeInfo(symbols))
        return [*symbols]

    def _known(self, position: int) -> str:
        """Return what to do about an input that is not known at import; "" for one that other nodes compute."""
        name = self.names[position] if position < len(self.names) else ""
        return INITIALIZER.replace("NAME", repr(name)) if name in self.given else ""

    def axes(self, w: Writer, position: int, ndim: int) -> tuple[int, ...] | None:
        """Return axes given as attribute or input; None without them."""
        axes = self.attributes.get("axes")
        if axes is None and self.has(position):
            axes = self.integers(w, position)
        return None if axes is None else tuple(self.normalised(int(a), ndim) for a in axes)

    def reduction(self, w: Writer, ndim: int) -> tuple[tuple[int, ...], bool]:
        axes = self.axes(w, 1, ndim) or (() if self.flag("noop_with_empty_axes") else tuple(range(ndim)))
        return axes, self.flag("keepdims", True)


def integers(scalars: NDArray[np.object_] | None) -> list[int] | None:
    """Return the values if all are integer literals, else None."""
    if scalars is None:
        return None
    values = [as_int(e) for e in scalars.reshape(-1)]
    return None if None in values else [n for n in values if n is not None]


Handler = Callable[[Writer, OnnxNode], Union[ImportedValue, Sequence[Union[ImportedValue, None]]]]
