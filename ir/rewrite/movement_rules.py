"""Equations of operators that move elements without changing them, which importers and passes share.

Tests: `tests/ir/rewrite/test_rule_tables.py`.
"""

from __future__ import annotations

from relax_tune.ir.core.expr import as_int
from relax_tune.ir.core.graph import Call, Value
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.deduce.deduce import infer_value
from relax_tune.ir.op.indexing.movement import VIEWS, BroadcastTo, Concat, Permute, Reshape, Slice
from relax_tune.ir.op.indexing.pad import Pad
from relax_tune.ir.op.math.elementwise import Cast
from relax_tune.ir.op.reduction.linalg import Matmul
from relax_tune.ir.rewrite.pattern import Either, op
from relax_tune.ir.rewrite.rules import Rule, Site


def swaps_last_two(axes: tuple[int, ...]) -> bool:
    """Return whether a permutation exchanges the last two axes and nothing else."""
    n = len(axes)
    return n >= 2 and axes == (*range(n - 2), n - 1, n - 2)


def is_identity(axes: tuple[int, ...]) -> bool:
    """Return whether a permutation leaves every axis in its place."""
    return axes == tuple(range(len(axes)))


def _view(site: Site) -> Value:
    return site.call(site.root.op, "x")


def _composed(site: Site) -> Value | None:
    outer, inner = site.operator("outer", Permute), site.operator("inner", Permute)
    if len(outer.axes) != len(inner.axes):
        return None
    return site.call(Permute(tuple(inner.axes[a] for a in outer.axes)), "x")


def _argument(site: Site) -> Value:
    return site["x"]


def _same_dtype(site: Site) -> Value | None:
    info = site.match.info("x")
    return site["x"] if isinstance(info, TensorInfo) and site.operator("cast", Cast).dtype is info.dtype else None


def _same_dims(site: Site) -> Value | None:
    value, ctx = site.root, site.deduction
    info = value.args[0].info
    # A reversed slice has the dims of its argument, but not its order.
    if isinstance(value.op, Slice) and value.op.step < 0:
        return None
    new = infer_value(value, ctx)
    if not isinstance(info, TensorInfo) or not isinstance(new, TensorInfo) or None in (info.shape, new.shape):
        return None
    old, dims = info.shape or (), new.shape or ()
    return value.args[0] if len(dims) == len(old) and all(map(ctx.same, dims, old)) else None


def _by_flag(site: Site) -> Value:
    return site.call(Matmul(not site.operator("product", Matmul).transpose_b), "a", "b")


def _padded_parts(site: Site) -> Value | None:
    pad, joined = site.operator("padded", Pad), site.definition("joined")
    assert isinstance(joined, Call) and isinstance(joined.op, Concat)
    axis = joined.op.axis % len(pad.before)
    # Padding along the joined axis would put elements between the parts.
    if as_int(pad.before[axis]) != 0 or as_int(pad.after[axis]) != 0:
        return None
    return site.call(joined.op, *(site.call(pad, x) for x in joined.args))


VIEW_OF_VIEW = Rule(
    op(Reshape, op(Reshape, "x")), _view, "view of a view", equation="reshape(reshape(x, s), t) = reshape(x, t)"
)
PERMUTE_OF_PERMUTE = Rule(
    op(Permute, op(Permute, "x").named("inner")).named("outer"), _composed, "permute of a permute",
    equation="permute(permute(x, p), q) = permute(x, [p[a] for a in q])",
)  # fmt: skip
IDENTITY_PERMUTE = Rule(
    op(Permute, "x", axes=is_identity), _argument, "identity permute", equation="permute(x, (0, 1, ...)) = x"
)
SAME_DTYPE = Rule(
    op(Cast, "x").named("cast"), _same_dtype, "cast to the same dtype", equation="cast(x, dtype of x) = x"
)
CONCAT_OF_ONE = Rule(op(Concat, "x"), _argument, "concat of one", equation="concat(x) = x")
PAD_OF_CONCAT = Rule(
    op(Pad, op(Concat).named("joined").once()).named("padded"), _padded_parts, "pad of a concat",
    equation="pad(concat(x, y, axis), b, a) = concat(pad(x, b, a), pad(y, b, a), axis) where b[axis] = a[axis] = 0",
)  # fmt: skip
UNCHANGED_DIMS = Rule(
    Either(tuple(op(kind) for kind in (*VIEWS, BroadcastTo, Slice))), _same_dims, "unchanged dims",
    equation="reshape(x, dims of x) = x; so do flatten, expand_dims, broadcast_to and slice",
)  # fmt: skip
TRANSPOSED_OPERAND = Rule(
    op(Matmul, "a", op(Permute, "b", axes=swaps_last_two)).named("product"), _by_flag, "transposed operand",
    equation="matmul(a, permute(b), transpose_b=t) = matmul(a, b, transpose_b=not t)",
)  # fmt: skip
