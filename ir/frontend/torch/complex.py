"""Complex tensors as pairs of real ones: operators that work part by part, products of parts, and the rest of ATen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from relax_tune.ir.core.dtype import DType, bool_, f32
from relax_tune.ir.core.expr import Expr, const
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.handlers.fourier import multiplied
from relax_tune.ir.frontend.shared.handlers.math import hypot, identity
from relax_tune.ir.frontend.shared.node import number_of
from relax_tune.ir.frontend.shared.operators import tensor_dims
from relax_tune.ir.frontend.shared.writer import Array, ImportedValue, Writer
from relax_tune.ir.frontend.torch.math import number
from relax_tune.ir.frontend.torch.node import ComplexValue, Handler, Result, TorchNode, as_item, as_value
from relax_tune.ir.frontend.torch.program import TorchTensor
from relax_tune.ir.op.base import OperatorSpec
from relax_tune.ir.op.math.elementwise import Add, Sub
from relax_tune.ir.op.math.logic import Equal, LogicalAnd, LogicalOr, NotEqual
from relax_tune.ir.op.math.numeric import Atan2

BY_PARTS: Mapping[str, Sequence[int]] = {
    **dict.fromkeys((
        "aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.unsqueeze.default", "aten.squeeze.dims",
        "aten.squeeze.dim", "aten.squeeze.default", "aten.expand.default", "aten.permute.default", "aten.transpose.int",
        "aten.t.default", "aten.slice.Tensor", "aten.flip.default", "aten.select.int", "aten.view_copy.default",
        "aten.permute_copy.default", "aten.narrow_copy.default", "aten.unbind_copy.int", "aten.split_with_sizes.default",
        "aten.split.Tensor", "aten.repeat.default", "aten.index_select.default", "aten.gather.default", "aten.index.Tensor",
        "aten.zeros_like.default", "aten.empty.memory_format", "aten.empty_permuted.default", "aten.tril.default",
        "aten.triu.default", "aten.as_strided.default", "aten.diagonal.default", "aten.unfold.default", "aten.embedding.default",
        "aten.clone.default", "aten.alias.default", "aten.detach.default", "aten.contiguous.default",
        "aten.lift_fresh_copy.default", "aten.neg.default",
    ), ()),
    **dict.fromkeys((
        "aten.sum.dim_IntList", "aten.sum.default", "aten.mean.dim", "aten.mean.default", "aten.cumsum.default",
    ), (0,)),
    "aten.constant_pad_nd.default": (0, 2), "aten.where.self": (1, 2), "aten.cat.default": (0,), "aten.copy.default": (0, 1),
    "aten.full.default": (1,), "aten.full_like.default": (1,), "aten.scalar_tensor.default": (0,),
    "aten.index_put.default": (0, 2), "aten.scatter.src": (0, 3), "aten.scatter.value": (0, 3),
    "aten.scatter_add.default": (0, 3), "aten.slice_scatter.default": (0, 1), "aten.select_scatter.default": (0, 1),
    "aten.diagonal_scatter.default": (0, 1), "aten.masked_scatter.default": (0, 2),
}  # fmt: skip
"""Operators that compute each part by itself, and the arguments whose imaginary part is 0 if they are real."""


PRODUCTS: Mapping[str, tuple[int, int]] = {
    "aten.mul.Tensor": (0, 1), "aten.mul.Scalar": (0, 1), "aten.matmul.default": (0, 1), "aten.bmm.default": (0, 1),
    "aten.mm.default": (0, 1),
}  # fmt: skip
"""Operators that are linear in two arguments."""


def is_complex(value: Any) -> bool:
    """Return whether a value is a complex tensor or number, or holds one."""
    if isinstance(value, (list, tuple)):
        return any(map(is_complex, value))
    return isinstance(value, (ComplexValue, complex)) or (isinstance(value, TorchTensor) and value.parts is not None)


def constant(w: Writer, array: Array, name: str) -> ImportedValue | ComplexValue:
    """Return a constant of the program; complex numbers are elements with fields `real` and `imag`."""
    if array.dtype.names is None:
        return w.constant(array, name)
    real, imag = (w.constant(array[p].copy(), f"{name}.{p}") for p in ("real", "imag"))
    return ComplexValue(real, imag)


def part(w: Writer, value: Any, imaginary: bool, element: DType) -> Any:
    """Return the real or the imaginary part of a tensor, a number or a list; a real value is its own real part, its imaginary part is 0."""
    if isinstance(value, ComplexValue):
        return value.imag if imaginary else value.real
    if isinstance(value, complex):
        return value.imag if imaginary else value.real
    if isinstance(value, (list, tuple)):
        return [part(w, v, imaginary, element) for v in value]
    if not imaginary or value is None:
        return value
    return w.uniform(value.shape, 0.0, element) if isinstance(value, ImportedValue) else 0.0


def _part_of_argument(w: Writer, value: Any, imaginary: bool, element: DType) -> Any:
    """Return an argument that is no number of the result with the part of each complex tensor in it."""
    if isinstance(value, (list, tuple)):
        return [_part_of_argument(w, v, imaginary, element) for v in value]
    return part(w, value, imaginary, element) if isinstance(value, ComplexValue) else value


def joined(real: Any, imag: Any) -> Result:
    """Return the results of an operator on both parts as complex ones."""
    if isinstance(real, Sequence):
        return [joined(r, i) for r, i in zip(real, imag, strict=True)]  # type: ignore[misc]
    return ComplexValue(real, imag) if isinstance(real, ImportedValue) else None


def by_parts(real: Handler, positions: Sequence[int]) -> Handler:
    """Make a handler that computes each part by the handler of the real operator; see `BY_PARTS`."""

    def handler(w: Writer, n: TorchNode) -> Result:
        results = []
        for imaginary in (False, True):
            args = tuple(
                (part if p in positions else _part_of_argument)(w, a, imaginary, n.dtype) for p, a in enumerate(n.args)
            )
            kwargs = {k: _part_of_argument(w, v, imaginary, n.dtype) for k, v in n.kwargs.items()}
            results.append(real(w, replace(n, args=args, kwargs=kwargs)))
        return joined(*results)

    return handler


def parts_of(value: Any) -> tuple[Any, Any]:
    """Return (real part, imaginary part) of an operand; None for an imaginary part that is 0."""
    if isinstance(value, ComplexValue):
        return value.real, value.imag
    if isinstance(value, complex):
        return value.real, value.imag
    return value, None


def product_of(real: Handler, positions: tuple[int, int]) -> Handler:
    """Make a handler of a product of complex numbers: products of their parts by the handler of the real operator."""

    def handler(w: Writer, n: TorchNode) -> ComplexValue:
        def times(a: Any, b: Any) -> ImportedValue | None:
            if a is None or b is None:
                return None
            args = list(n.args)
            args[positions[0]], args[positions[1]] = a, b
            product = real(w, replace(n, args=tuple(args)))
            assert isinstance(product, ImportedValue)
            return product

        (a, b), (c, d) = (parts_of(n.args[p]) for p in positions)
        return combined(w, times(a, c), times(b, d), times(a, d), times(b, c))

    return handler


def combined(
    w: Writer, ac: ImportedValue | None, bd: ImportedValue | None, ad: ImportedValue | None, bc: ImportedValue | None
) -> ComplexValue:
    """Return `ac - bd + (ad + bc) i`; None: 0."""
    assert ac is not None
    real = ac if bd is None else w.of(w.sub(w.tensor(ac), w.tensor(bd)))
    both = [w.tensor(v) for v in (ad, bc) if v is not None]
    return ComplexValue(real, w.of(w.add(*both) if len(both) == 2 else both[0]))


def broadcast_to_dims(w: Writer, value: Value, dims: Sequence[Expr]) -> Value:
    """Return a value with dims that it broadcasts to."""
    have = tensor_dims(value)
    if len(have) == len(dims) and all(map(w.g.deduction.same, have, dims)):
        return value
    return w.broadcast_to(value, tuple(dims))


def operand(w: Writer, value: Any, n: TorchNode) -> tuple[Value, Value | None]:
    """Return the parts of an operand as tensors of the type of the result; None for an imaginary part that is 0."""
    real, imag = parts_of(value)
    return as_value(w, real, n.dtype), None if imag is None else as_value(w, imag, n.dtype)


def complex_of(w: Writer, real: Value, imag: Value) -> ComplexValue:
    return ComplexValue(w.of(real), w.of(imag))


def complex_item(w: Writer, value: Any, element: DType, dims: Sequence[Expr]) -> ComplexValue:
    """Return a tensor as a complex one, cast to an element type of its parts."""
    real, imag = parts_of(value)
    first = as_item(w, real, element)
    return ComplexValue(first, w.uniform(dims, 0.0, element) if imag is None else as_item(w, imag, element))


FromReal = Callable[[Handler], Handler]
"""Makes a handler of complex numbers from the handler of the real operator."""


def tensor(n: TorchNode, position: int) -> ComplexValue:
    """Return an argument that must be a complex tensor. Raises ParseError."""
    value = n.args[position] if position < len(n.args) else None
    if not isinstance(value, ComplexValue):
        raise n.refuse(f"expected a complex tensor as argument {position}; make it one by torch.complex")
    return value


def values(w: Writer, x: ComplexValue) -> tuple[Value, Value]:
    return w.tensor(x.real), w.tensor(x.imag)


# real tensors to complex ones, and back


def _complex(w: Writer, n: TorchNode) -> ComplexValue:
    real, imag = (broadcast_to_dims(w, as_value(w, n.args[p], n.dtype), n.dims) for p in (0, 1))
    return complex_of(w, real, imag)


def _polar(w: Writer, n: TorchNode) -> ComplexValue:
    size, angle = (broadcast_to_dims(w, as_value(w, n.args[p], n.dtype), n.dims) for p in (0, 1))
    return complex_of(w, w.mul(size, w.cos(angle)), w.mul(size, w.sin(angle)))


def _view_as_complex(w: Writer, n: TorchNode) -> ComplexValue:
    value, last = w.tensor(n.item(0)), n.item(0).ndim - 1
    parts = (w.reshape(w.slice(value, last, const(p), const(p + 1)), n.dims) for p in (0, 1))
    return complex_of(w, *parts)


def as_real(w: Writer, x: ComplexValue) -> ImportedValue:
    """Return the parts as the last dim."""
    last = x.real.ndim
    return w.of(w.concat(last, *(w.expand_dims(v, (last,)) for v in values(w, x))))


def _cast(w: Writer, n: TorchNode) -> ImportedValue:
    """Import a cast to a real type; torch drops the imaginary part, and takes as true what has a part that is not 0."""
    x = tensor(n, 0)
    if n.dtype is not bool_:
        return as_item(w, x.real, n.dtype)
    both = (w.cast(w.tensor(p), bool_) for p in (x.real, x.imag))
    return w.of(w.logical_or(*both))


def _to_complex(w: Writer, n: TorchNode) -> ComplexValue:
    return complex_item(w, n.args[0], n.dtype, n.dims)


def _conjugate(w: Writer, n: TorchNode) -> ComplexValue:
    x = tensor(n, 0)
    return ComplexValue(x.real, w.of(w.mul(w.tensor(x.imag), -1)))


def _ones(w: Writer, n: TorchNode) -> ComplexValue:
    return ComplexValue(w.uniform(n.dims, 1.0, n.dtype), w.uniform(n.dims, 0.0, n.dtype))


def _abs(w: Writer, n: TorchNode) -> ImportedValue:
    return w.of(hypot(w, *values(w, tensor(n, 0))))


def _angle(w: Writer, n: TorchNode) -> ImportedValue:
    real, imag = values(w, tensor(n, 0))
    return w.of(w.emit(Atan2(), imag, real))


# arithmetic


def _sum(sign: int) -> Handler:
    """Make a handler of `a + sign * alpha * b`."""

    def handler(w: Writer, n: TorchNode) -> ComplexValue:
        alpha = number_of(n.argument(2, "alpha", 1))
        if alpha is None:
            raise n.refuse("expected alpha as a real number; multiply the tensor by it first")
        (a, b), (c, d) = operand(w, n.args[0], n), operand(w, n.args[1], n)
        if abs(alpha) != 1:
            c, d = (w.mul(c, abs(alpha)), None if d is None else w.mul(d, abs(alpha)))
        minus = sign * alpha < 0
        op: OperatorSpec = Sub() if minus else Add()
        if d is None:
            assert b is not None
            imag = broadcast_to_dims(w, b, n.dims)
        elif b is None:
            imag = broadcast_to_dims(w, w.mul(d, -1) if minus else d, n.dims)
        else:
            imag = w.emit(op, b, d)
        return complex_of(w, w.emit(op, a, c), imag)

    return handler


def _quotient(w: Writer, n: TorchNode) -> ComplexValue:
    """Import a quotient; the divisor is first divided by its larger part (torch, c10/util/complex_math.h)."""
    if n.argument(2, "rounding_mode") is not None:
        raise n.refuse("expected no rounding_mode of complex numbers")
    (a, b), (c, d) = operand(w, n.args[0], n), operand(w, n.args[1], n)
    if d is None:
        assert b is not None
        by = number(n.args[1])
        if by is not None:
            return complex_of(w, *(w.div(v, by) for v in (a, b)))
        return complex_of(w, w.div(a, c), w.div(b, c))
    largest = w.maximum(w.abs(c), w.abs(d))
    c, d = w.div(c, largest), w.div(d, largest)
    size = w.add(w.mul(c, c), w.mul(d, d))
    negated = w.mul(d, -1.0)
    real, imag = multiplied(w, (a, b), (c, negated))
    assert imag is not None
    return complex_of(w, *(w.div(w.div(v, size), largest) for v in (real, imag)))


def _reciprocal(w: Writer, n: TorchNode) -> ComplexValue:
    return _quotient(w, replace(n, args=(1.0, n.args[0])))


def _power(w: Writer, n: TorchNode) -> ComplexValue:
    exponent = number_of(n.args[1])
    if not isinstance(n.args[0], ComplexValue) or exponent not in (2, 3):
        raise n.refuse("expected a power of 2 or 3; write others by torch.polar, torch.abs and torch.angle")
    x = values(w, n.args[0])
    square = multiplied(w, x, x)
    real, imag = square if exponent == 2 else multiplied(w, square, x)
    assert imag is not None
    return complex_of(w, real, imag)


def _exp(w: Writer, n: TorchNode) -> ComplexValue:
    real, imag = values(w, tensor(n, 0))
    size = w.exp(real)
    return complex_of(w, w.mul(size, w.cos(imag)), w.mul(size, w.sin(imag)))


def _log(w: Writer, n: TorchNode) -> ComplexValue:
    real, imag = values(w, tensor(n, 0))
    return complex_of(w, w.log(hypot(w, real, imag)), w.emit(Atan2(), imag, real))


def _compared(op: OperatorSpec, both: OperatorSpec) -> Handler:
    def handler(w: Writer, n: TorchNode) -> ImportedValue:
        tensors = [a for a in (parts_of(argument)[0] for argument in n.args) if isinstance(a, ImportedValue)]
        element = max((t.dtype for t in tensors if t.dtype.is_float), key=lambda d: d.bytes, default=f32)
        pairs = []
        for p in (0, 1):
            real, imag = parts_of(n.args[p])
            pairs.append((as_value(w, real, element), as_value(w, 0.0 if imag is None else imag, element)))
        return w.of(w.emit(both, *(w.emit(op, x, y) for x, y in zip(*pairs, strict=True))))

    return handler


def _combined(op: OperatorSpec) -> FromReal:
    """Make a function from the handler of a real operator to a handler that combines its results for both parts."""

    def make(real: Handler) -> Handler:
        def handler(w: Writer, n: TorchNode) -> ImportedValue:
            x = tensor(n, 0)
            results = (real(w, replace(n, args=(p, *n.args[1:]))) for p in (x.real, x.imag))
            return w.of(w.emit(op, *(w.tensor(f) for f in results if isinstance(f, ImportedValue))))

        return handler

    return make


def _of_first_part(real: Handler) -> Handler:
    return lambda w, n: real(w, replace(n, args=(tensor(n, 0).real, *n.args[1:])))


def _of_magnitudes(real: Handler) -> Handler:
    return lambda w, n: real(w, replace(n, args=(_abs(w, n), *n.args[1:])))


def _linear(real: Handler) -> Handler:
    """Make a handler of a product with a matrix and the sum with a bias."""

    def handler(w: Writer, n: TorchNode) -> Result:
        y = product_of(real, (0, 1))(w, replace(n, args=n.args[:2], kwargs={}))
        bias = n.argument(2, "bias")
        return y if bias is None else _sum(1)(w, replace(n, args=(y, bias), kwargs={}))

    return handler


def _einsum(real: Handler) -> Handler:
    """Make a handler of an einsum of one or two operands."""

    def listed(w: Writer, n: TorchNode) -> Result:
        return real(w, replace(n, args=(n.args[0], list(n.args[1:]))))

    def handler(w: Writer, n: TorchNode) -> Result:
        if len(n.args[1]) > 2:
            raise n.refuse("expected at most two operands where one is complex; write it as several einsums")
        separate = replace(n, args=(n.args[0], *n.args[1]))
        return product_of(listed, (1, 2))(w, separate) if len(n.args[1]) == 2 else by_parts(listed, ())(w, separate)

    return handler


def _getitem(w: Writer, n: TorchNode) -> Result:
    value = n.args[0][n.number(1, "index")]
    if not isinstance(value, (ImportedValue, ComplexValue)):
        raise n.refuse(f"expected a result that is a tensor; {n.neighbours}")
    return value


CONSTRUCTORS: Mapping[str, Handler] = {
    "aten.complex.default": _complex, "aten.polar.default": _polar, "aten.view_as_complex.default": _view_as_complex,
    "aten.view_as_real.default": lambda w, n: as_real(w, tensor(n, 0)),
    "aten._conj.default": identity, "aten._conj_physical.default": identity, "aten.conj_physical.default": identity,
    "aten.resolve_conj.default": identity, "aten.resolve_neg.default": identity,
    "aten.real.default": identity, "aten._neg_view.default": lambda w, n: w.of(w.mul(w.tensor(n.item(0)), -1)),
}  # fmt: skip
"""Operators that make complex numbers of real ones, and operators on complex numbers that are applied to real ones."""


ON_COMPLEX: Mapping[str, Handler] = {
    "aten.view_as_real.default": CONSTRUCTORS["aten.view_as_real.default"],
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
    "aten.isnan.default": _combined(LogicalOr()), "aten.isinf.default": _combined(LogicalOr()),
    "aten.var.correction": _combined(Add()),
    "aten.sym_size.int": _of_first_part, "aten._assert_tensor_metadata.default": _of_first_part,
    "aten.linalg_vector_norm.default": _of_magnitudes, "aten.linear.default": _linear, "aten.einsum.default": _einsum,
}  # fmt: skip
"""Operators whose handlers call the handler of the real operator."""


def handler_of(op: str, real: Handler | None, gives_complex: bool) -> Handler | None:
    """Return the handler of an operator with complex arguments or results; None if it is not supported.

    Args:
        real: Handler of the operator on real numbers.
    """
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
