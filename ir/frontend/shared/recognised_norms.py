"""Rules that recognise RMS norms and rotary positions, since one operator becomes one loop nest.

They run on the finished program, since the tables of a rotation are weights whose values are compared.
"""

from __future__ import annotations

import numpy as np

from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.core.expr import Expr, as_int, const, eq, ge
from relax_tune.ir.core.graph import Constant, Value
from relax_tune.ir.core.graph_base import Operator
from relax_tune.ir.core.struct_info import tensor_dims
from relax_tune.ir.op.indexing.movement import Concat, ExpandDims, Reshape, Slice
from relax_tune.ir.op.math.elementwise import AddScalar, Cast, Div, DivScalar, Mul, MulScalar, Rsqrt, Sqrt
from relax_tune.ir.op.math.numeric import Cos, Sin
from relax_tune.ir.op.neural.decoder import RmsNorm, Rotary
from relax_tune.ir.op.reduction.reduce import Mean
from relax_tune.ir.rewrite.match import Scope
from relax_tune.ir.rewrite.pattern import op, value
from relax_tune.ir.rewrite.rules import Rule, Site

# Operators that keep equal halves of a row equal.
ELEMENTWISE: tuple[type[Operator], ...] = (AddScalar, Cast, Cos, DivScalar, MulScalar, Sin)


# x * rsqrt(mean(x * x) + eps) * gamma, with the root written in any of three ways

SPREAD = op(AddScalar, op(Mean, op(Mul, "x", "x"), keepdims=True).named("mean")).named("moved")
ROOT = op(Sqrt, SPREAD)
NORMED = value("x") * (op(Rsqrt, SPREAD) | op(Div, 1, ROOT)) | op(Div, "x", ROOT)
NORM = NORMED * value("gamma")


def _put_norm(site: Site) -> Value | None:
    mean, shifted = site.operator("mean", Mean), site.operator("moved", AddScalar)
    dims, weights = site.shape("x"), site.shape("gamma")
    if mean.axes not in ((len(dims) - 1,), (-1,)) or len(weights) != 1 or weights[0] is not dims[-1]:
        return None
    return site.call(RmsNorm(float(shifted.value)), "x", "gamma")


# x * cos + concat(-x[..., d/2:], x[..., :d/2]) * sin

TURNED = op(Concat, op(MulScalar, op(Slice, "x").named("second"), value=-1), op(Slice, "x").named("first"))
ROTATION = value("x") * value("cos") + TURNED.named("turned") * value("sin")


def _put_rotation(site: Site) -> Value | None:
    """Replace a rotation by one over tables of half rows, if both halves of the model's rows are proved equal."""
    dims, rotated = site.shape("x"), site.operator("turned", Concat)
    width, last = as_int(dims[-1]) if dims else None, len(dims) - 1
    if last < 1 or width is None or width % 2 or rotated.axis % len(dims) != last:
        return None
    half = width // 2
    for name, begin in (("first", 0), ("second", half)):
        part = site.operator(name, Slice)
        window = (part.axis % len(dims), part.step, as_int(part.begin), as_int(part.end))
        if window != (last, 1, begin, begin + half):
            return None
    tables = [_half_rows(site, name, dims[-2], half) for name in ("cos", "sin")]
    if tables[0] is None or tables[1] is None or tables[0][1] is not tables[1][1]:
        return None
    return site.call(Rotary(tables[0][1], last - 1), "x", tables[0][0], tables[1][0])


def _half_rows(site: Site, name: str, positions: Expr, half: int) -> tuple[Value, Expr] | None:
    """Return a table of half rows and its row of the first position.

    None unless the capture has exactly one row for each position and both halves of every row are equal."""
    scope, rows, dims = site.match.scope, site[name], site.shape(name)
    if len(dims) < 2 or any(as_int(d) != 1 for d in dims[:-2]) or as_int(dims[-1]) != 2 * half:
        return None
    # The operator has tables of half rows, which is right only if the model rotates both halves by the same angles.
    if prove(eq(dims[-2], positions), scope.env) is not Proof.YES or not _paired(scope, rows, half):
        return None
    call = scope.call(scope.source(rows))
    # A slice of a stored table becomes the table and a first row: the slice then costs nothing at run time.
    if call is not None and isinstance(call.op, Slice) and len(dims) == 2 and call.op.axis % 2 == 0:
        begin, table = call.op.begin, scope.source(call.args[0])
        if isinstance(table, Constant) and call.op.step == 1 and prove(ge(begin, 0), scope.env) is Proof.YES:
            return site.call(Slice(1, const(0), const(half)), table), begin
    flat = rows if len(dims) == 2 else site.call(Reshape(dims[-2:]), rows)
    return site.call(Slice(1, const(0), const(half)), flat), const(0)


def _paired(scope: Scope, rows: Value, half: int) -> bool:
    """Return whether both halves of every row are proved equal."""
    while True:
        rows = scope.source(rows)
        if isinstance(rows, Constant):
            array = scope.module.constants[rows.name]
            return bool(np.array_equal(array[..., :half], array[..., half:]))
        call = scope.call(rows)
        if call is None or not call.args:
            return False
        dims, before = tensor_dims(rows.info), tensor_dims(call.args[0].info)
        if isinstance(call.op, Concat) and call.op.axis % len(dims) == len(dims) - 1:
            return len(call.args) == 2 and scope.source(call.args[0]) is scope.source(call.args[1])
        along = isinstance(call.op, Slice) and call.op.axis % len(dims) < len(dims) - 1
        view = isinstance(call.op, (ExpandDims, Reshape)) and bool(before) and before[-1] is dims[-1]
        if not (along or view or isinstance(call.op, ELEMENTWISE)):
            return False
        rows = call.args[0]


RULES = (
    Rule(
        NORM, _put_norm, "rms norm", level="import",
        equation="x * rsqrt(mean(x * x) + eps) * gamma = rms_norm(x, gamma)",
    ),
    Rule(
        ROTATION, _put_rotation, "rotary positions", level="import",
        equation="x * cos + concat(-x[..., d/2:], x[..., :d/2]) * sin = rotary(x, cos[:, :d/2], sin[:, :d/2])",
    ),
)  # fmt: skip
