"""A node of an exported torch program with resolved arguments.

Tests: `tests/ir/frontend/torch/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Union

import numpy as np

from relax_tune.ir.core.dtype import DType, bool_, f32, f64, i8, i16, i64, u8
from relax_tune.ir.core.expr import Expr, as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.core.scalar_ops import converted
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.shared.node import Node, Number, number_of, shown
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch import workarounds


@dataclass(frozen=True, slots=True, eq=False)
class ComplexValue:
    """A complex tensor as the tensors of its real and its imaginary parts.

    Both have the same dims and the same element type."""

    real: ImportedValue
    imag: ImportedValue


@dataclass(frozen=True, slots=True, eq=False)
class TorchNode(Node):
    """A node of an exported program with resolved arguments. `op` is an overload, such as `aten.add.Tensor`.

    Attributes:
        args, kwargs: Imported values, expressions of dims, numbers, texts, element types, None, and lists.
        results: Annotation that torch states of each result.
        source: Line of the model.
        plain_weights: Weights that only linear layers read.
        places: (position, name) in torch's signature of the attributes that handlers of both formats read, by ONNX's name.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[TensorInfo | None, ...] = ()
    source: str = ""
    plain_weights: frozenset[str] = frozenset()
    places: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    def shown_arguments(self) -> str:
        return ", ".join(map(_shown, (*self.args, *(f"{k}={_shown(v)}" for k, v in self.kwargs.items()))))

    def place(self) -> str:
        return f"; from {self.source}" if self.source else ""

    def workaround(self) -> str:
        return workarounds.of_operator(self.op)

    def attribute(self, name: str, default: Any = None) -> Any:
        value = self.argument(*self.places[name]) if name in self.places else None
        return default if value is None else value

    def optional(self, position: int) -> ImportedValue | None:
        value = self.args[position] if position < len(self.args) else None
        return value if isinstance(value, ImportedValue) else None

    def typed(self, w: Writer, position: int) -> ImportedValue:
        return as_item(w, self.args[position], self.dtype)

    # arguments

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument by position or name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def item(self, position: int) -> ImportedValue:
        """Return an argument that must be a tensor. Raises ParseError."""
        item = self.optional(position)
        if item is None:
            got = _shown(self.args[position]) if position < len(self.args) else "none"
            raise self.refuse(f"expected a tensor as argument {position}, got {got}")
        return item

    def items(self, position: int) -> list[ImportedValue]:
        """Return the tensors in an argument that is a list."""
        return [i for i in self.args[position] if isinstance(i, ImportedValue)]

    def number(self, position: int, name: str, default: int | None = None) -> int:
        """Return an argument that must be a constant integer. Raises ParseError."""
        value = self.argument(position, name, default)
        n = as_int(value) if isinstance(value, (int, Expr)) else None
        if n is None:
            raise self.refuse(f"expected {name} as a number, got {_shown(value)}")
        return n

    def axis_at(self, position: int, name: str, ndim: int, default: int | None = None) -> int:
        """Normalise a possibly negative axis to 0 .. ndim-1. Raises ParseError."""
        return self.normalised(self.number(position, name, default), ndim, name)

    def axes(self, position: int, name: str, ndim: int) -> tuple[int, ...]:
        """Return one or several axes; none or an empty list: all."""
        value = self.argument(position, name)
        listed = [value] if isinstance(value, (int, Expr)) else list(value or ())
        known = [as_int(a) for a in listed]
        if any(a is None or not -ndim <= a < max(ndim, 1) for a in known):
            raise self.refuse(f"expected {name} in {-ndim}..{ndim - 1}, got {_shown(listed)}")
        return tuple(a % ndim for a in known if a is not None and ndim) or tuple(range(ndim))

    def reduction(self, w: Writer, ndim: int) -> tuple[tuple[int, ...], bool]:
        # without keepdim an axis of 1 is dropped; of a full reduction the results of torch have no dims
        return self.axes(1, "dim", ndim), len(self.dims) == ndim and self.flag("keepdims")

    # results

    @property
    def result(self) -> TensorInfo:
        """Annotation that torch states of the first result. Raises ParseError when it is no tensor."""
        info = self.results[0] if self.results else None
        if info is None:
            raise self.refuse("expected a node with a tensor as result")
        return info

    @property
    def dims(self) -> tuple[Expr, ...]:
        return self.result.shape or ()

    @property
    def dtype(self) -> DType:
        element = self.result.dtype
        if element is None:
            raise self.refuse("expected a result of a known element type")
        return element


Result = Union[ImportedValue, ComplexValue, Expr, Number, Sequence["ImportedValue | ComplexValue | None"], None]
Handler = Callable[[Writer, TorchNode], Result]


def with_attributes(handler: Handler, **places: tuple[int, str]) -> Handler:
    """Make a handler of torch from one of both formats: (position, name) of the attributes that it reads, by ONNX's name."""
    return lambda w, n: handler(w, replace(n, places=places))


def _shown(value: Any) -> str:
    if isinstance(value, ComplexValue):
        return f"{value.real.name}: complex of {value.real.info!r}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return shown(value)


def dim(value: Any) -> Expr:
    """Convert a number or expression to an expression."""
    return value if isinstance(value, Expr) else const(int(value))


def wrapped(value: Number, element: DType) -> Number:
    """Return a number as torch stores it in an element type: integers that are too large for it wrap around."""
    if isinstance(value, float) or not element.is_int:
        return value
    low, high = element.limits
    return (value - low) % (high - low + 1) + low


def as_item(w: Writer, value: Any, element: DType) -> ImportedValue:
    """Cast a tensor to an element type, or make a tensor without dims of a number or expression."""
    if isinstance(value, ImportedValue):
        if value.dtype is element:
            return value
        if value.array is not None and value.array.size == 1:
            return w.constant(np.asarray(converted(value.array, element)), value.name)
        cast = w.cast(w.tensor(value), element)
        return w.of(cast, value.natural and element.is_int)
    known = number_of(value)
    if known is not None:
        return w.constant(np.asarray(wrapped(known, element), element.numpy), "literal")
    scalar = np.empty((), object)
    scalar[()] = value
    return as_item(w, w.known(scalar, i64, "size"), element)


def as_value(w: Writer, value: Any, element: DType) -> Value:
    return w.tensor(as_item(w, value, element))


def common_type(a: Any, b: Any) -> DType:
    """Return the common element type of two operands (torch type promotion).

    Of one kind, a tensor with dims takes precedence over one without dims, and that over a number."""
    ranked = []
    for x in (a, b):
        if isinstance(x, ImportedValue):
            kind = 2 if x.dtype.is_float else 1 if x.dtype.is_int else 0
            ranked.append((kind, 1 if x.ndim else 0, x.dtype.bytes, x.dtype))
        else:
            element = bool_ if isinstance(x, bool) else f32 if isinstance(x, float) else i64
            kind = 2 if element is f32 else 1 if element is i64 else 0
            ranked.append((kind, -1, element.bytes, element))
    best = max(ranked, key=lambda r: r[:3])
    # no 8-bit type holds both
    if {r[3] for r in ranked} == {i8, u8} and len({r[1] for r in ranked}) == 1:
        return i16
    if best[1] < 0 and any(r[3] is f64 for r in ranked):
        return f64
    return best[3]
