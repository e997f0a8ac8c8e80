"""Rules that move arithmetic on weights before a run, so that models of every format do the same work.

Constant folding computes the new weights. The rules need the finished program, since they count readers.

Tests: `tests/ir/frontend/onnx/test_onnx_parts.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from relax_tune.ir.core.expr import Expr, as_int, const
from relax_tune.ir.core.function import IRModule
from relax_tune.ir.core.graph import AnyBinding, Binding, Call, Constant, GVar, Value
from relax_tune.ir.core.names import fresh
from relax_tune.ir.core.struct_info import TensorInfo, tensor_dims
from relax_tune.ir.op.base import axis_index
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, ExpandDims, Permute, Reshape, Slice
from relax_tune.ir.op.math.elementwise import Add, AddScalar, Div, DivScalar, Mul, MulScalar, Rsqrt, Sqrt, Sub
from relax_tune.ir.op.neural.window import Conv
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.rewrite.emitter import Emitter, rewrite_function
from relax_tune.ir.rewrite.match import Scope
from relax_tune.ir.rewrite.pattern import op, value, weight
from relax_tune.ir.rewrite.rules import Rule, Site

FOLDED = (Add, AddScalar, Div, DivScalar, ExpandDims, Mul, MulScalar, Permute, Reshape, Rsqrt, Slice, Sqrt, Sub)
"""Operators that are followed from weights to weights."""


def reads_only_weights(v: Value, scope: Scope) -> bool:
    """Return whether a value is computed only from weights, by the operators `FOLDED`."""
    stack, visited = [v], set[Value]()
    while stack:
        v = scope.source(stack.pop())
        call = scope.call(v)
        if isinstance(v, Constant) or v in visited:
            continue
        if call is None or not isinstance(call.op, FOLDED):
            return False
        visited.add(v)
        stack.extend(call.args)
    return True


def _only_weights(site: Site, *names: str) -> bool:
    return all(reads_only_weights(site[n], site.match.scope) for n in names)


# scales after convolutions, from batch normalisation

CONV = op(Conv, "x", weight("w")).once().named("conv")
SCALED_CONV = op(Mul, CONV, "scale") | op(Mul, op(Add, CONV, "bias").once(), "scale")


def _scaled_kernel(site: Site) -> Value | None:
    channels, kernel, scale = site.shape("conv"), site.shape("w"), site.shape("scale")
    axis = len(scale) - len(kernel) + 1  # of channels
    by_channel = axis in (0, 1) and all(as_int(d) == 1 for p, d in enumerate(scale) if p != axis)
    names = ("scale", "bias") if "bias" in site else ("scale",)
    if not by_channel or scale[axis] != channels[1] or not _only_weights(site, *names):
        return None
    column = site.call(Reshape((kernel[0], *[const(1)] * (len(kernel) - 1))), "scale")
    conv = site.call(site.operator("conv", Conv), "x", site.call(Mul(), "w", column))
    return site.call(Add(), conv, site.call(Mul(), "bias", "scale")) if "bias" in site else conv


# summands after convolutions, from batch normalisation. Its scale has rounded the kernel already, so that one more rounding of
# weights changes nothing. Other sums stay as they are: (x + b) + c and x + (b + c) differ where one of the weights is large

NORMED_CONV = op(Conv, "x", op(Mul, weight("w"), "column")).once().named("conv")
SHIFTED_CONV = op(Add, op(Add, NORMED_CONV, "bias").once(), "moved")


def _one_bias(site: Site) -> Value | None:
    same = site.shape("bias") == site.shape("moved") and bool(site.shape("bias"))
    if not same or not _only_weights(site, "bias", "moved"):
        return None
    return site.call(Add(), "conv", site.call(Add(), "bias", "moved"))


# sums with weights


def _parts_with_table(site: Site) -> Value | None:
    """Add a table of weights to the parts of a concatenation, if one of the parts reads only weights."""
    scope, whole, table = site.match.scope, site.shape("whole"), site.shape("table")
    joined = scope.call(site["whole"])
    assert joined is not None and isinstance(joined.op, Concat)
    axis = axis_index("concat", joined.op.axis, len(whole)) - len(whole)
    at = len(table) + axis
    fits = len(table) <= len(whole) and all(as_int(d) == 1 or d == e for d, e in zip(table[::-1], whole[::-1]))
    if at < 0 or not fits or table[at] != whole[axis] or not _only_weights(site, "table"):
        return None
    widened = [_widened(a, scope) for a in joined.args]
    # Without a part of weights nothing would be computed earlier, and the sums would only become more.
    if not any(reads_only_weights(a, scope) for a in widened):
        return None
    parts, begin = [], 0
    for original, part in zip(joined.args, widened, strict=True):
        dims = getattr(original.info, "shape", None)
        size = as_int(dims[axis]) if dims else None
        if size is None:
            return None
        rows = site.call(Slice(at, const(begin), const(begin + size)), "table")
        total = site.call(Add(), part, rows)
        parts.append(total if dims is None or part is original else site.call(BroadcastTo(dims), total))
        begin += size
    return site.call(joined.op, *parts)


def _widened(v: Value, scope: Scope) -> Value:
    """Return what a value broadcasts; the value itself unless it is a broadcast to as many dims."""
    call = scope.call(v)
    if call is None or not isinstance(call.op, BroadcastTo):
        return v
    inner = call.args[0]
    dims = getattr(inner.info, "shape", None)
    # the table may not widen the part along the dims that were broadcast
    return inner if dims is not None and len(dims) == len(call.op.shape) else v


# columns of products

PRODUCT = op(Matmul, "x", weight("w"), transpose_b=False).once()
COLUMNS = op(
    Slice, (op(Add, PRODUCT, weight("bias")) | op(Matmul, "x", weight("w"), transpose_b=False)).named("wide"), step=1
).named("cut")


def _columns_of_weights(site: Site) -> Value | None:
    """Multiply by the columns that a slice takes, if the readers of the product share its columns out."""
    scope, cut, w = site.match.scope, site.operator("cut", Slice), site.shape("w")
    if len(w) != 2 or not _is_last(cut, site.shape("wide")) or not _shared_out(scope, site["wide"], w[1]):
        return None
    cut_columns = Slice(1, cut.begin, cut.end)
    y = site.call(Matmul(), "x", site.call(cut_columns, "w"))
    return site.call(Add(), y, site.call(Slice(0, cut.begin, cut.end), "bias")) if "bias" in site else y


def _is_last(cut: Slice, dims: tuple[Expr, ...]) -> bool:
    return axis_index("slice", cut.axis, len(dims)) == len(dims) - 1


def _shared_out(scope: Scope, wide: Value, width: Expr) -> bool:
    """Return whether the readers of a value take all its columns, each column once."""
    assert isinstance(wide, GVar)
    ends: list[tuple[int, int]] = []
    for call in scope.definitions.values():
        if not isinstance(call, Call) or wide not in call.args:
            continue
        if (
            not isinstance(call.op, Slice)
            or call.op.step != 1
            or not _is_last(call.op, getattr(wide.info, "shape", ()))
        ):
            return False
        begin, end = as_int(call.op.begin), as_int(call.op.end)
        if begin is None or end is None:
            return False
        ends.append((begin, end))
    ends.sort()
    chained = all(one[1] == two[0] for one, two in zip(ends, ends[1:]))
    whole = bool(ends) and chained and (ends[0][0], ends[-1][1]) == (0, as_int(width))
    return whole and scope.readers.get(wide, 0) == len(ends) > 1


# order of operands

PRODUCTS = (Matmul, Conv)


def _product_first(site: Site) -> Value | None:
    a, b = site.root.args
    scope = site.match.scope
    # One order for all formats: models of several exporters then have the same tasks.
    if a.info != b.info or not _is_product(b, scope) or _is_product(a, scope):
        return None
    return site.call(site.root.op, b, a)


def _is_product(v: Value, scope: Scope) -> bool:
    """Return whether a value is a product, perhaps with a bias."""
    call = scope.call(v)
    if call is not None and isinstance(call.op, Add) and any(isinstance(a, Constant) for a in call.args):
        call = next((scope.call(a) for a in call.args if not isinstance(a, Constant)), None)
    return call is not None and isinstance(call.op, PRODUCTS)


# weights of products as constants

DEEPEST = 12
"""Operators between weights that are followed."""


def with_constant_weights(module: IRModule) -> IRModule:
    """Return the module with the weights of products and convolutions computed, where they read only weights.

    Later passes such as quantisation look for constants there."""
    main = module.graphs["main"]
    calls = {b.var: b.value for b in main.bindings if isinstance(b, Binding) and isinstance(b.value, Call)}
    constants = dict(module.constants)
    known: dict[Value, Constant] = {}

    def folded(v: Value, depth: int) -> Constant | None:
        """Return a value as a constant; None unless `FOLDED` makes it of constants, in few steps that add no elements."""
        if isinstance(v, Constant):
            return v
        call = calls.get(v) if isinstance(v, GVar) else None
        if v in known or call is None or depth == 0 or not isinstance(call.op, FOLDED):
            return known.get(v)
        args = [a for a in (folded(a, depth - 1) for a in call.args) if a is not None]
        dims = [as_int(d) for d in tensor_dims(v.info)]
        arrays = [constants[a.name] for a in args]
        # A weight that grows would make the artifact larger than the file.
        if len(args) < len(call.args) or None in dims or math.prod(d or 0 for d in dims) > max(a.size for a in arrays):
            return None
        name = fresh(f"{args[0].name}.{call.op.name}", constants)
        constants[name] = np.asarray(call.op.evaluate(arrays), arrays[0].dtype, order="C")
        assert isinstance(v.info, TensorInfo)
        known[v] = Constant(name, v.info)
        return known[v]

    def visit(out: Emitter, binding: AnyBinding) -> None:
        call = calls.get(binding.var)
        if call is not None and isinstance(call.op, PRODUCTS) and isinstance(call.args[1], GVar):
            weights = folded(call.args[1], DEEPEST)
            if weights is not None:
                out.mapping[call.args[1]] = weights
        out.keep(binding)

    new = rewrite_function(main, visit)
    if new is main:
        return module
    return replace(module, functions={**module.functions, "main": new}, constants=constants)


SCALES = (
    Rule(
        SCALED_CONV,
        _scaled_kernel,
        "scale of a convolution",
        level="import",
        equation="(conv(x, w) + b) * s = conv(x, w * s) + b * s",
    ),
)
RULES = (
    Rule(
        SHIFTED_CONV, _one_bias, "summands of a convolution", level="import",
        equation="(conv(x, w * s) + b) + m = conv(x, w * s) + (b + m)",
    ),
    Rule(
        op(Add, op(Concat).named("whole").once(), "table"), _parts_with_table, "sum of parts", level="import",
        equation="concat(w, x) + t = concat(w + t[:k], x + t[k:])",
    ),
    Rule(
        COLUMNS, _columns_of_weights, "columns of a product", level="import",
        equation="(x @ w + b)[..., i:j] = x @ w[:, i:j] + b[i:j]",
    ),
    Rule(
        op(Add, value("a"), value("b")) | op(Mul, value("a"), value("b")), _product_first, "product first", level="import",
        equation="a + x @ w = x @ w + a",
    ),
)  # fmt: skip
