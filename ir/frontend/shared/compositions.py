"""Small compositions of operators, and the end of every import, for importers of every format."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from relax_tune.errors import ParseError
from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.check.aliasing import is_view
from relax_tune.ir.core.dtype import DType, bool_, f32, i64, u64
from relax_tune.ir.core.expr import Expr, ExprLike, as_int, const, expr, floordiv, le, maximum, mul, sub
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import AnyBinding, Binding, GVar, Value
from relax_tune.ir.frontend.shared import folded_weights, recognised_masks, recognised_norms
from relax_tune.ir.frontend.shared.writer import ImportedValue, Writer, tensor_dims
from relax_tune.ir.op.base import product
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.movement import ExpandDims, Permute, Slice, Take
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.math.bits import IntegerPower
from relax_tune.ir.op.math.elementwise import (
    Add,
    AddScalar,
    Cast,
    MaximumScalar,
    Minimum,
    Mul,
    MulScalar,
    Rsqrt,
    Sub,
    Tanh,
)
from relax_tune.ir.op.math.logic import Equal, Less, LessEqual, LogicalAnd, NotEqual, Where
from relax_tune.ir.op.math.numeric import Fmod, Modulo, Quotient
from relax_tune.ir.op.reduction.reduce import LayerNorm
from relax_tune.ir.rewrite.emitter import Emitter, rewrite_function, tensor_info
from relax_tune.ir.rewrite.rules import rewrite


def _factors(dims: Sequence[Expr]) -> tuple[int, list[Expr]]:
    """Return a product of dims as a number and other factors."""
    number, rest, stack = 1, [], list(dims)
    while stack:
        e = stack.pop()
        if e.value is not None:
            number *= int(e.value)
        elif e.op == "mul":
            stack.extend(e.args)
        else:
            rest.append(e)
    return number, rest


def cancelled(w: Writer, have: Sequence[Expr], others: Sequence[Expr]) -> tuple[Expr, Expr]:
    """Return the quotient of two products as (numerator, denominator) without common factors."""
    top, upper = _factors([w.simplify(d) for d in have])
    bottom, lower = _factors([w.simplify(d) for d in others])
    for e in list(lower):
        if e in upper:
            upper.remove(e)
            lower.remove(e)
    if bottom and top % bottom == 0:
        top, bottom = top // bottom, 1
    return w.simplify(mul(product(upper), const(top))), w.simplify(mul(product(lower), const(bottom)))


def missing_dim(w: Writer, have: Sequence[Expr], others: Sequence[Expr]) -> Expr:
    """Return the dim that makes the products of both equal: common factors cancel."""
    above, below = cancelled(w, have, others)
    return above if as_int(below) in (0, 1) else w.simplify(floordiv(above, below))


def permute(w: Writer, value: Value, axes: Sequence[int]) -> Value:
    return value if tuple(axes) == tuple(range(len(axes))) else w.emit(Permute(tuple(axes)), value)


def slice_axis(w: Writer, value: Value, axis: int, begin: Expr, end: Expr) -> Value:
    """Return `value[..., begin:end, ...]`, the value itself if the slice covers the dim."""
    same = w.g.deduction.same
    if as_int(begin) == 0 and (
        same(end, tensor_dims(value)[axis]) or w.g.deduction.proves(le(tensor_dims(value)[axis], end)) is Proof.YES
    ):
        return value
    return w.emit(Slice(axis, begin, end), value)


def reversed_along(w: Writer, value: Value, axis: int) -> Value:
    """Return `value[..., ::-1, ...]`."""
    return w.emit(Slice(axis, w.simplify(sub(tensor_dims(value)[axis], 1)), const(-1), -1), value)


def pad(
    w: Writer, value: Value, pads: Sequence[tuple[ExprLike, ExprLike]], fill: float = 0.0, mode: str = "constant"
) -> Value:
    """Pad `value` by (before, after) elements along each axis; negative numbers crop."""
    grown: list[list[Expr]] = []
    for axis, pair in enumerate(pads):
        before, after = (w.simplify(expr(e)) for e in pair)
        begin, cut = (const(0) if w.natural(e) else w.simplify(maximum(mul(e, -1), 0)) for e in (before, after))
        size = tensor_dims(value)[axis]
        value = slice_axis(w, value, axis, begin, w.simplify(maximum(sub(size, cut), 0)))
        grown.append([e if w.natural(e) else w.simplify(maximum(e, 0)) for e in (before, after)])
    if all(as_int(e) == 0 for pair in grown for e in pair):
        return value
    front, behind = (tuple(pair[side] for pair in grown) for side in (0, 1))
    return w.emit(Pad(front, behind, mode, fill), value)


def take(w: Writer, table: Value, axis: int, indices: Value) -> Value:
    """Take rows along `axis` at non-negative `indices`, whose dims replace the axis."""
    n, k = len(tensor_dims(table)), len(tensor_dims(indices))
    front = permute(w, table, [axis, *(p for p in range(n) if p != axis)])
    found = w.emit(Take(), front, indices)
    return permute(w, found, [*range(k, k + axis), *range(k), *range(k + axis, n + k - 1)])


def cast_to(w: Writer, value: Value, source: DType, target: DType) -> Value:
    """Cast to another type. As a bool, every value but zero is true."""
    if source is target:
        return value
    if target is bool_:
        if source.is_small:
            value, source = w.emit(Cast(f32), value), f32
        return w.emit(NotEqual(), value, w.literal(0, source))
    return w.emit(Cast(target), value)


def clip(w: Writer, x: Value, element: DType, low: float | None, high: float | None) -> Value:
    if low is not None:
        x = w.emit(MaximumScalar(low), x)
    return x if high is None else w.emit(Minimum(), x, w.literal(high, element))


def sign(w: Writer, x: Value, element: DType) -> Value:
    """Emit -1, 0 or 1 by the sign of `x`; 0 for NaN."""
    zero = w.literal(0, element)
    above = w.emit(Cast(element), w.emit(Less(), zero, x))
    return above if element.is_unsigned else w.emit(Sub(), above, w.emit(Cast(element), w.emit(Less(), x, zero)))


def remainder(w: Writer, x: Value, y: Value, element: DType, towards_zero: bool) -> Value:
    """Emit the remainder of a division: towards zero with the sign of `x`, otherwise with that of `y`.

    Of integers divided by 0 it is 0."""
    if element.is_int:
        if not towards_zero:
            return w.emit(Modulo(), x, y)
        rest = w.emit(Sub(), x, w.emit(Mul(), w.emit(Quotient(), x, y), y))
        return w.emit(Where(), w.emit(Equal(), y, w.literal(0, element)), y, rest)
    rest = w.emit(Fmod(), x, y)
    if towards_zero:
        return rest
    zero = w.literal(0, element)
    differs = w.emit(NotEqual(), w.emit(Less(), rest, zero), w.emit(Less(), y, zero))
    some = w.emit(LogicalAnd(), w.emit(NotEqual(), rest, zero), differs)
    return w.emit(Where(), some, w.emit(Add(), rest, y), rest)


def integer_power(w: Writer, x: Value, base: DType, y: Value, exponent: DType) -> Value:
    """Emit a power of integers of type `base`. Exponents of a type that it lacks are kept by a wider power.

    Raises: ParseError for uint64 with exponents that may be negative."""
    if base.holds(exponent):
        return w.emit(IntegerPower(), x, cast_to(w, y, exponent, base))
    wide = u64 if exponent is u64 else i64
    if base is u64:
        raise ParseError(f"wanted exponents of an unsigned type beside uint64, found {exponent}; cast them first")
    found = w.emit(IntegerPower(), cast_to(w, x, base, wide), cast_to(w, y, exponent, wide))
    return cast_to(w, found, wide, base)


def tanh_gelu(w: Writer, x: Value) -> Value:
    """Return `x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) / 2`."""
    cube = w.emit(Mul(), w.emit(Mul(), x, x), x)
    inner = w.emit(MulScalar(math.sqrt(2 / math.pi)), w.emit(Add(), x, w.emit(MulScalar(0.044715), cube)))
    return w.emit(Mul(), w.emit(MulScalar(0.5), x), w.emit(AddScalar(1.0), w.emit(Tanh(), inner)))


def batch_norm(
    w: Writer, x: Value, gamma: Value | None, beta: Value | None, mean: Value, var: Value, eps: float
) -> Value:
    """Return batch normalisation at inference (Ioffe and Szegedy 2015): one factor and one summand for each channel."""
    scale = w.emit(Rsqrt(), w.emit(AddScalar(eps), var))
    scale = scale if gamma is None else w.emit(Mul(), scale, gamma)
    moved = w.emit(MulScalar(-1.0), w.emit(Mul(), mean, scale))
    moved = moved if beta is None else w.emit(Add(), beta, moved)
    channels = [tensor_dims(mean)[0], *[const(1)] * (len(tensor_dims(x)) - 2)]
    return w.emit(Add(), w.emit(Mul(), x, w.reshape(scale, channels)), w.reshape(moved, channels))


def group_norm(w: Writer, x: Value, groups: Expr, gamma: Value | None, beta: Value | None, eps: float) -> Value:
    """Return group normalisation (Wu and He 2018) of (batch, channels, dims...), with as many groups as channels of instances.

    gamma, beta: (channels,)"""
    dims = tensor_dims(x)
    each = w.simplify(floordiv(dims[1], groups))

    def weight(given: Value | None, plain: float) -> Value:
        if given is None:
            return w.full([const(1)], plain, tensor_info(x).dtype or f32)
        return w.reshape(given, [groups, each, const(1)])

    viewed = w.reshape(x, [dims[0], groups, each, product(dims[2:])])
    return w.reshape(w.emit(LayerNorm(eps, 2), viewed, weight(gamma, 1.0), weight(beta, 0.0)), dims)


def along_last_axis(w: Writer, value: Value, axis: int, fn: Callable[[Value], Value]) -> Value:
    """Apply a row operator along any axis."""
    n = len(tensor_dims(value))
    order = [*(p for p in range(n) if p != axis), axis]
    return permute(w, fn(permute(w, value, order)), [order.index(p) for p in range(n)])


def triangle(w: Writer, x: ImportedValue, k: int, upper: bool) -> ImportedValue:
    """Zero the elements below (upper) or above the diagonal `k` places right of the main one."""
    rows = w.emit(ExpandDims((1,)), w.emit(Iota(x.shape[-2])))
    columns = w.emit(Iota(x.shape[-1]))
    diagonal = w.emit(AddScalar(k), rows)
    kept = w.emit(LessEqual(), diagonal, columns) if upper else w.emit(LessEqual(), columns, diagonal)
    return w.of(w.emit(Where(), kept, w.tensor(x), w.literal(0, x.dtype)), x.natural)


FINISHED_RULES = (
    recognised_norms.RULES, recognised_masks.CHOICES, recognised_masks.RULES, folded_weights.SCALES, folded_weights.RULES,
)  # fmt: skip
"""Rules of whole programs, one set after the other, as each applies once to what the one before it left."""


def finish_import(w: Writer, items: Sequence[ImportedValue], names: Sequence[str]) -> IRModule:
    """Return the program with recognised norms and every result in memory of its own.

    Parameters, constants and values returned twice are copied."""
    used, results = set[Value](), []
    for item in items:
        value = root = w.tensor(item)
        while isinstance(root, GVar) and is_view(written := w.definitions.get(root, root)):
            root = written.operands[0]
        if root not in w.definitions or root in used:
            value = w.reshape(value, [const(1)]) if item.ndim == 0 else value
            value = root = w.g.call(Permute(tuple(range(max(item.ndim, 1)))), value)
            value = w.reshape(value, item.shape)
        used.add(root)
        results.append(value)
    module = w.g.finish(results if len(results) > 1 else results[0])
    module = _renamed(module, dict(zip(results, names, strict=True)))
    for rules in FINISHED_RULES:
        module = rewrite(module, rules)
    return folded_weights.with_constant_weights(module)


def _renamed(module: IRModule, names: Mapping[Value, str]) -> IRModule:
    """Return the module with its results named as in the model."""

    def visit(out: Emitter, binding: AnyBinding) -> None:
        name = names.get(binding.var)
        if name is None or not isinstance(binding, Binding):
            out.keep(binding)
            return
        var = GVar(name, binding.var.info)
        value = out.value(binding.value)
        out.mapping[binding.var] = var
        out.bindings.append(Binding(var, value))

    main = rewrite_function(module.graphs["main"], visit)
    return replace(module, functions={**module.functions, "main": main})
