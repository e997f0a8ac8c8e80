"""ATen operators that make complex numbers, take them apart, and compute with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from relax_tune.ir.core.dtype import bool_, f32
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.algorithms.fourier import multiplied
from relax_tune.ir.frontend.shared.compositions import cast_to, slice_axis
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer
from relax_tune.ir.frontend.torch.complex.parts import (
    BY_PARTS,
    PRODUCTS,
    by_parts,
    complex_item,
    complex_of,
    operand,
    parts_of,
    product_of,
    spread,
)
from relax_tune.ir.frontend.torch.functions import hypot
from relax_tune.ir.frontend.torch.math import number, same
from relax_tune.ir.frontend.torch.node import ComplexValue, Handler, Result, TorchNode, as_item, as_value, number_of
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.indexing.movement import Concat, ExpandDims
from relax_tune.ir.op.math.elementwise import Add, Div, Exp, Maximum, Mul, MulScalar, Sub
from relax_tune.ir.op.math.logic import Equal, LogicalAnd, LogicalOr, NotEqual
from relax_tune.ir.op.math.numeric import Abs, Atan2, Cos, Log, Sin

FromReal = Callable[[Handler], Handler]
"""Makes a handler of complex numbers from that of the real operator."""


def tensor(n: TorchNode, position: int) -> ComplexValue:
    """Return an argument that must be a complex tensor. Raises ParseError."""
    found = n.args[position] if position < len(n.args) else None
    if not isinstance(found, ComplexValue):
        raise n.refuse(f"wanted a complex tensor as argument {position}; make it one by torch.complex")
    return found


def values(w: Writer, x: ComplexValue) -> tuple[Value, Value]:
    return w.tensor(x.real), w.tensor(x.imag)


# real tensors to complex ones, and back


def _complex(w: Writer, n: TorchNode) -> ComplexValue:
    real, imag = (spread(w, as_value(w, n.args[p], n.dtype), n.dims) for p in (0, 1))
    return complex_of(w, real, imag)


def _polar(w: Writer, n: TorchNode) -> ComplexValue:
    size, angle = (spread(w, as_value(w, n.args[p], n.dtype), n.dims) for p in (0, 1))
    return complex_of(w, w.emit(Mul(), size, w.emit(Cos(), angle)), w.emit(Mul(), size, w.emit(Sin(), angle)))


def _view_as_complex(w: Writer, n: TorchNode) -> ComplexValue:
    value, last = w.tensor(n.item(0)), n.item(0).ndim - 1
    parts = (w.reshape(slice_axis(w, value, last, const(p), const(p + 1)), n.dims) for p in (0, 1))
    return complex_of(w, *parts)


def as_real(w: Writer, x: ComplexValue) -> ImportedValue:
    """Return the parts as the last dim."""
    last = x.real.ndim
    return w.of(w.emit(Concat(last), *(w.emit(ExpandDims((last,)), v) for v in values(w, x))))


def _cast(w: Writer, n: TorchNode) -> ImportedValue:
    """Import a cast to a real type; torch drops the imaginary part, and takes as true what has a part that is not 0."""
    x = tensor(n, 0)
    if n.dtype is not bool_:
        return as_item(w, x.real, n.dtype)
    both = (cast_to(w, w.tensor(p), p.dtype, bool_) for p in (x.real, x.imag))
    return w.of(w.emit(LogicalOr(), *both))


def _to_complex(w: Writer, n: TorchNode) -> ComplexValue:
    return complex_item(w, n.args[0], n.dtype, n.dims)


def _conjugate(w: Writer, n: TorchNode) -> ComplexValue:
    x = tensor(n, 0)
    return ComplexValue(x.real, w.of(w.emit(MulScalar(-1), w.tensor(x.imag))))


def _ones(w: Writer, n: TorchNode) -> ComplexValue:
    return ComplexValue(w.uniform(n.dims, 1.0, n.dtype), w.uniform(n.dims, 0.0, n.dtype))


def _abs(w: Writer, n: TorchNode) -> ImportedValue:
    return w.of(hypot(w, *values(w, tensor(n, 0)), n.dtype))


def _angle(w: Writer, n: TorchNode) -> ImportedValue:
    real, imag = values(w, tensor(n, 0))
    return w.of(w.emit(Atan2(), imag, real))


# arithmetic


def _sum(sign: int) -> Handler:
    """Make a handler of `a + sign * alpha * b`."""

    def handler(w: Writer, n: TorchNode) -> ComplexValue:
        alpha = number_of(n.given(2, "alpha", 1))
        if alpha is None:
            raise n.refuse("wanted alpha as a real number; multiply the tensor by it first")
        (a, b), (c, d) = operand(w, n.args[0], n), operand(w, n.args[1], n)
        if abs(alpha) != 1:
            c, d = (w.emit(MulScalar(abs(alpha)), c), None if d is None else w.emit(MulScalar(abs(alpha)), d))
        minus = sign * alpha < 0
        op: OperatorSpec = Sub() if minus else Add()
        if d is None:
            assert b is not None
            imag = spread(w, b, n.dims)
        elif b is None:
            imag = spread(w, w.emit(MulScalar(-1), d) if minus else d, n.dims)
        else:
            imag = w.emit(op, b, d)
        return complex_of(w, w.emit(op, a, c), imag)

    return handler


def _quotient(w: Writer, n: TorchNode) -> ComplexValue:
    """Import a quotient; the divisor is first divided by its larger part (torch, c10/util/complex_math.h)."""
    if n.given(2, "rounding_mode") is not None:
        raise n.refuse("wanted no rounding_mode of complex numbers")
    (a, b), (c, d) = operand(w, n.args[0], n), operand(w, n.args[1], n)
    if d is None:
        assert b is not None
        by = number(n.args[1])
        if by is not None and 1e-30 < abs(by) < 1e30 and n.dtype.bytes >= 4:
            return complex_of(w, *(w.emit(MulScalar(1.0 / by), v) for v in (a, b)))
        return complex_of(w, w.emit(Div(), a, c), w.emit(Div(), b, c))
    largest = w.emit(Maximum(), w.emit(Abs(), c), w.emit(Abs(), d))
    c, d = w.emit(Div(), c, largest), w.emit(Div(), d, largest)
    size = w.emit(Add(), w.emit(Mul(), c, c), w.emit(Mul(), d, d))
    turned = w.emit(MulScalar(-1.0), d)
    real, imag = multiplied(w, (a, b), (c, turned))
    assert imag is not None
    return complex_of(w, *(w.emit(Div(), w.emit(Div(), v, size), largest) for v in (real, imag)))


def _reciprocal(w: Writer, n: TorchNode) -> ComplexValue:
    return _quotient(w, replace(n, args=(1.0, n.args[0])))


def _power(w: Writer, n: TorchNode) -> ComplexValue:
    exponent = number_of(n.args[1])
    if not isinstance(n.args[0], ComplexValue) or exponent not in (2, 3):
        raise n.refuse("wanted a power of 2 or 3; write others by torch.polar, torch.abs and torch.angle")
    x = values(w, n.args[0])
    found = multiplied(w, x, x)
    real, imag = found if exponent == 2 else multiplied(w, found, x)
    assert imag is not None
    return complex_of(w, real, imag)


def _exp(w: Writer, n: TorchNode) -> ComplexValue:
    real, imag = values(w, tensor(n, 0))
    size = w.emit(Exp(), real)
    return complex_of(w, w.emit(Mul(), size, w.emit(Cos(), imag)), w.emit(Mul(), size, w.emit(Sin(), imag)))


def _log(w: Writer, n: TorchNode) -> ComplexValue:
    real, imag = values(w, tensor(n, 0))
    return complex_of(w, w.emit(Log(), hypot(w, real, imag, n.dtype)), w.emit(Atan2(), imag, real))


def _compared(op: OperatorSpec, both: OperatorSpec) -> Handler:
    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        tensors = [a for a in (parts_of(given)[0] for given in n.args) if isinstance(a, ImportedValue)]
        element = max((t.dtype for t in tensors if t.dtype.is_float), key=lambda d: d.bytes, default=f32)
        pairs = []
        for p in (0, 1):
            real, imag = parts_of(n.args[p])
            pairs.append((as_value(w, real, element), as_value(w, 0.0 if imag is None else imag, element)))
        return w.of(w.emit(both, *(w.emit(op, x, y) for x, y in zip(*pairs, strict=True))))

    return handler


def _combined(op: OperatorSpec) -> FromReal:
    """Make a maker of handlers that combine what the real operator gives for both parts."""

    def make(real: Handler) -> Handler:
        def handler(w: Writer, n: TorchNode) -> ImportedValue:
            x = tensor(n, 0)
            found = (real(w, replace(n, args=(p, *n.args[1:]))) for p in (x.real, x.imag))
            return w.of(w.emit(op, *(w.tensor(f) for f in found if isinstance(f, ImportedValue))))

        return handler

    return make


def _of_first_part(real: Handler) -> Handler:
    return lambda w, n: real(w, replace(n, args=(tensor(n, 0).real, *n.args[1:])))


def _of_magnitudes(real: Handler) -> Handler:
    return lambda w, n: real(w, replace(n, args=(_abs(w, n), *n.args[1:])))


def _linear(real: Handler) -> Handler:
    """Make a handler of a product with a matrix and the sum with a bias."""

    def handler(w: Writer, n: TorchNode) -> Result:
        found = product_of(real, (0, 1))(w, replace(n, args=n.args[:2], kwargs={}))
        bias = n.given(2, "bias")
        return found if bias is None else _sum(1)(w, replace(n, args=(found, bias), kwargs={}))

    return handler


def _einsum(real: Handler) -> Handler:
    """Make a handler of an einsum of one or two operands."""

    def listed(w: Writer, n: TorchNode) -> Result:
        return real(w, replace(n, args=(n.args[0], list(n.args[1:]))))

    def handler(w: Writer, n: TorchNode) -> Result:
        if len(n.args[1]) > 2:
            raise n.refuse("wanted at most two operands beside complex ones; write it as several einsums")
        apart = replace(n, args=(n.args[0], *n.args[1]))
        return product_of(listed, (1, 2))(w, apart) if len(n.args[1]) == 2 else by_parts(listed, ())(w, apart)

    return handler


def _getitem(w: Writer, n: TorchNode) -> Result:
    found = n.args[0][n.number(1, "index")]
    if not isinstance(found, (ImportedValue, ComplexValue)):
        raise n.refuse(f"wanted a result that is a tensor; {n.beside}")
    return found


MADE: Mapping[str, Handler] = {
    "aten.complex.default": _complex, "aten.polar.default": _polar, "aten.view_as_complex.default": _view_as_complex,
    "aten.view_as_real.default": lambda w, n: as_real(w, tensor(n, 0)),
    "aten._conj.default": same, "aten._conj_physical.default": same, "aten.conj_physical.default": same,
    "aten.resolve_conj.default": same, "aten.resolve_neg.default": same,
    "aten.real.default": same, "aten._neg_view.default": lambda w, n: w.of(w.emit(MulScalar(-1), w.tensor(n.item(0)))),
}  # fmt: skip
"""Operators that make complex numbers of real ones, and what those on complex numbers are to real ones."""

ON_COMPLEX: Mapping[str, Handler] = {
    "aten.view_as_real.default": MADE["aten.view_as_real.default"],
    "aten.complex.default": _complex, "aten.polar.default": _polar, "aten.view_as_complex.default": _view_as_complex,
    "aten.real.default": lambda w, n: tensor(n, 0).real, "aten.imag.default": lambda w, n: tensor(n, 0).imag,
    "aten._conj.default": _conjugate, "aten._conj_physical.default": _conjugate, "aten.conj_physical.default": _conjugate,
    "aten.resolve_conj.default": lambda w, n: tensor(n, 0), "aten.resolve_neg.default": lambda w, n: tensor(n, 0),
    "aten.abs.default": _abs, "aten.angle.default": _angle, 
    "aten.add.Tensor": _sum(1), "aten.add.Scalar": _sum(1), "aten.sub.Tensor": _sum(-1), "aten.sub.Scalar": _sum(-1),
    "aten.div.Tensor": _quotient, "aten.div.Scalar": _quotient, "aten.reciprocal.default": _reciprocal,
    "aten.rsub.Scalar": lambda w, n: _sum(-1)(w, replace(n, args=(n.args[1], n.args[0], *n.args[2:]))),
    "aten.pow.Tensor_Scalar": _power, "aten.square.default": lambda w, n: _power(w, replace(n, args=(n.args[0], 2))),
    "aten.exp.default": _exp, "aten.log.default": _log,
    "aten.eq.Tensor": _compared(Equal(), LogicalAnd()), "aten.eq.Scalar": _compared(Equal(), LogicalAnd()),
    "aten.ne.Tensor": _compared(NotEqual(), LogicalOr()), "aten.ne.Scalar": _compared(NotEqual(), LogicalOr()),
    "getitem": _getitem,
}  # fmt: skip

SPECTRA = frozenset(f"aten.{name}.default" for name in ("_fft_r2c", "_fft_c2c", "_fft_c2r", "stft", "istft"))
"""Operators whose handlers take and give complex numbers as they are."""

FROM_REAL: Mapping[str, FromReal] = {
    "aten.isnan.default": _combined(LogicalOr()), "aten.isinf.default": _combined(LogicalOr()), "aten.var.correction": _combined(Add()),
    "aten.sym_size.int": _of_first_part, "aten._assert_tensor_metadata.default": _of_first_part,
    "aten.linalg_vector_norm.default": _of_magnitudes, "aten.linear.default": _linear, "aten.einsum.default": _einsum,
}  # fmt: skip
"""Operators that are made of the real operator."""


def handler_of(op: str, real: Handler | None, gives_complex: bool) -> Handler | None:
    """Return the handler of an operator that takes or gives complex numbers; None for one that is not supported.

    real: handler of the operator on real numbers"""
    if op == "aten._to_copy.default":
        return _to_complex if gives_complex else _cast
    if op == "aten.ones_like.default" and gives_complex:
        return _ones
    if op in ON_COMPLEX:
        return ON_COMPLEX[op]
    if real is None or op in SPECTRA:
        return real
    if op in FROM_REAL:
        return FROM_REAL[op](real)
    if op in PRODUCTS:
        return product_of(real, PRODUCTS[op])
    if op not in BY_PARTS:
        return None
    both = by_parts(real, BY_PARTS[op])
    return both if gives_complex else lambda w, n: tensor(replace(n, args=(both(w, n),)), 0).real
