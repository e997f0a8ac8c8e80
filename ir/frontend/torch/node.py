"""A node of an exported torch program with resolved arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np

from relax_tune.errors import ParseError
from relax_tune.ir.core.dtype import DType, bool_, f32, f64, i8, i16, i64, u8
from relax_tune.ir.core.expr import Expr, as_int, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.core.scalar_ops import converted
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.shared.compositions import cast_to
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer

Number = Union[int, float, bool]


@dataclass(frozen=True, slots=True, eq=False)
class ComplexValue:
    """A complex tensor as the tensors of its real and its imaginary parts.

    Both have the same dims and the same element type."""

    real: ImportedValue
    imag: ImportedValue


@dataclass(frozen=True, slots=True, eq=False)
class TorchNode:
    """A node with resolved arguments.

    name: name of the node
    op: overload, such as `aten.add.Tensor`
    args, kwargs: imported values, expressions of dims, numbers, texts, element types, None, and lists
    results: annotation that torch states of each result
    source: line of the model
    beside: neighbouring nodes, for messages
    near: similar names, for messages
    plain_weights: weights that only linear layers read
    """

    name: str
    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[TensorInfo | None, ...]
    source: str = ""
    beside: str = ""
    near: tuple[str, ...] = ()
    plain_weights: frozenset[str] = frozenset()

    def refuse(self, why: str) -> ParseError:
        """Make the error for an unsupported node, with its arguments, its line in the model and similar names."""
        takes = ", ".join(_shown(a) for a in (*self.args, *(f"{k}={_shown(v)}" for k, v in self.kwargs.items())))
        near = f"; near in name and supported: {', '.join(self.near)}" if self.near else ""
        source = f"; from {self.source}" if self.source else ""
        return ParseError(f"node {self.name!r}, operator {self.op} of ({takes}): {why}{self.beside}{source}{near}")

    # arguments

    def given(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument by position or name."""
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def item(self, position: int) -> ImportedValue:
        """Return an argument that must be a tensor. Raises ParseError."""
        found = self.args[position] if position < len(self.args) else None
        if not isinstance(found, ImportedValue):
            raise self.refuse(f"wanted a tensor as argument {position}, found {_shown(found)}")
        return found

    def items(self, position: int) -> list[ImportedValue]:
        """Return the tensors in an argument that is a list."""
        return [i for i in self.args[position] if isinstance(i, ImportedValue)]

    def number(self, position: int, name: str, default: int | None = None) -> int:
        """Return an argument that must be a constant integer. Raises ParseError."""
        found = self.given(position, name, default)
        n = as_int(found) if isinstance(found, (int, Expr)) else None
        if n is None:
            raise self.refuse(f"wanted {name} as a number, found {_shown(found)}")
        return n

    def axis(self, position: int, name: str, ndim: int, default: int | None = None) -> int:
        """Normalise a possibly negative axis to 0 .. ndim-1. Raises ParseError."""
        found = self.number(position, name, default)
        if not -ndim <= found < max(ndim, 1):
            raise self.refuse(f"wanted {name} in {-ndim}..{ndim - 1}, found {found}")
        return found % ndim if ndim else 0

    def axes(self, position: int, name: str, ndim: int) -> tuple[int, ...]:
        """Return one or several axes; none or an empty list: all."""
        found = self.given(position, name)
        listed = [found] if isinstance(found, (int, Expr)) else list(found or ())
        known = [as_int(a) for a in listed]
        if any(a is None or not -ndim <= a < max(ndim, 1) for a in known):
            raise self.refuse(f"wanted {name} in {-ndim}..{ndim - 1}, found {_shown(listed)}")
        return tuple(a % ndim for a in known if a is not None and ndim) or tuple(range(ndim))

    # results

    @property
    def result(self) -> TensorInfo:
        """Annotation that torch states of the first result. Raises ParseError when it is no tensor."""
        found = self.results[0] if self.results else None
        if found is None:
            raise self.refuse("wanted a node that gives a tensor")
        return found

    @property
    def dims(self) -> tuple[Expr, ...]:
        return self.result.shape or ()

    @property
    def dtype(self) -> DType:
        found = self.result.dtype
        if found is None:
            raise self.refuse("wanted a result of a known element type")
        return found


Result = Union[ImportedValue, ComplexValue, Expr, Number, Sequence["ImportedValue | ComplexValue | None"], None]
Handler = Callable[[Writer, TorchNode], Result]


def _shown(value: Any) -> str:
    if isinstance(value, ImportedValue):
        return f"{value.name}: {value.info!r}"
    if isinstance(value, ComplexValue):
        return f"{value.real.name}: complex of {value.real.info!r}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value)


def dim(value: Any) -> Expr:
    """Convert a number or expression to an expression."""
    return value if isinstance(value, Expr) else const(int(value))


def number_of(value: Any) -> Number | None:
    """Return a Python number, or the value of a constant expression; None for anything else."""
    if isinstance(value, (bool, int, float)):
        return value
    return as_int(value) if isinstance(value, Expr) else None


def as_item(w: Writer, value: Any, element: DType) -> ImportedValue:
    """Cast a tensor to an element type, or make a tensor without dims of a number or expression."""
    if isinstance(value, ImportedValue):
        if value.dtype is element:
            return value
        if value.array is not None and value.array.size == 1:
            return w.constant(np.asarray(converted(value.array, element)), value.name)
        found = cast_to(w, w.tensor(value), value.dtype, element)
        return w.of(found, value.natural and element.is_int)
    known = number_of(value)
    if known is not None:
        return w.constant(np.asarray(known, element.numpy), "literal")
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
    if {r[3] for r in ranked} == {i8, u8} and len({r[1] for r in ranked}) == 1:
        return i16
    if best[1] < 0 and any(r[3] is f64 for r in ranked):
        return f64
    return best[3]
