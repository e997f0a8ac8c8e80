"""Complex tensors as pairs of real ones: operators that work part by part, and products as products of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from relax_tune.ir.core.dtype import DType
from relax_tune.ir.core.expr import Expr
from relax_tune.ir.core.graph import Value
from relax_tune.ir.frontend.shared.writer import Array, ImportedValue, Writer, tensor_dims
from relax_tune.ir.frontend.torch.node import ComplexValue, Handler, Result, TorchNode, as_item, as_value
from relax_tune.ir.frontend.torch.program import TorchTensor
from relax_tune.ir.op.indexing.movement import BroadcastTo
from relax_tune.ir.op.math.elementwise import Add, Sub

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
    """Return the real or the imaginary part of a tensor, a number or a list; that of a real one is itself or 0."""
    if isinstance(value, ComplexValue):
        return value.imag if imaginary else value.real
    if isinstance(value, complex):
        return value.imag if imaginary else value.real
    if isinstance(value, (list, tuple)):
        return [part(w, v, imaginary, element) for v in value]
    if not imaginary or value is None:
        return value
    return w.uniform(value.shape, 0.0, element) if isinstance(value, ImportedValue) else 0.0


def _held(w: Writer, value: Any, imaginary: bool, element: DType) -> Any:
    """Return an argument that is no number of the result with the part of each complex tensor in it."""
    if isinstance(value, (list, tuple)):
        return [_held(w, v, imaginary, element) for v in value]
    return part(w, value, imaginary, element) if isinstance(value, ComplexValue) else value


def joined(real: Any, imag: Any) -> Result:
    """Return the results of an operator on both parts as complex ones."""
    if isinstance(real, Sequence):
        return [joined(r, i) for r, i in zip(real, imag, strict=True)]  # type: ignore[misc]
    return ComplexValue(real, imag) if isinstance(real, ImportedValue) else None


def by_parts(real: Handler, positions: Sequence[int]) -> Handler:
    """Make a handler that computes each part by the handler of the real operator; see `BY_PARTS`."""

    def handler(w: Writer, n: TorchNode) -> Result:
        found = []
        for imaginary in (False, True):
            args = tuple((part if p in positions else _held)(w, a, imaginary, n.dtype) for p, a in enumerate(n.args))
            kwargs = {k: _held(w, v, imaginary, n.dtype) for k, v in n.kwargs.items()}
            found.append(real(w, replace(n, args=args, kwargs=kwargs)))
        return joined(*found)

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
            found = real(w, replace(n, args=tuple(args)))
            assert isinstance(found, ImportedValue)
            return found

        (a, b), (c, d) = (parts_of(n.args[p]) for p in positions)
        return combined(w, times(a, c), times(b, d), times(a, d), times(b, c))

    return handler


def combined(
    w: Writer, ac: ImportedValue | None, bd: ImportedValue | None, ad: ImportedValue | None, bc: ImportedValue | None
) -> ComplexValue:
    """Return `ac - bd + (ad + bc) i`; None: 0."""
    assert ac is not None
    real = ac if bd is None else w.of(w.emit(Sub(), w.tensor(ac), w.tensor(bd)))
    both = [w.tensor(v) for v in (ad, bc) if v is not None]
    return ComplexValue(real, w.of(w.emit(Add(), *both) if len(both) == 2 else both[0]))


def spread(w: Writer, value: Value, dims: Sequence[Expr]) -> Value:
    """Return a value with dims that it broadcasts to."""
    have = tensor_dims(value)
    if len(have) == len(dims) and all(map(w.g.deduction.same, have, dims)):
        return value
    return w.emit(BroadcastTo(tuple(dims)), value)


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
