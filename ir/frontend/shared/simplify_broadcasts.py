"""Rules for explicit broadcasts and counters: work moves before a broadcast, a gather at counted indices becomes a
slice.

A counter is a tensor of 0, 1, 2 ... along one axis.

Tests: `tests/ir/frontend/onnx/test_onnx_broadcasts.py`, `tests/ir/rewrite/test_rule_tables.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.expr import Expr, as_int, const, le
from relax_tune.ir.core.graph import Call, Value
from relax_tune.ir.core.names import same_objects
from relax_tune.ir.core.struct_info import TensorInfo, tensor_dims
from relax_tune.ir.op.base import Deduction, OperatorSpec, axis_index
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.indexing.gather import GatherND
from relax_tune.ir.op.indexing.movement import BroadcastTo, Concat, ExpandDims, Permute, Reshape, Slice, Take
from relax_tune.ir.op.math.elementwise import Binary, Unary
from relax_tune.ir.op.math.logic import Where
from relax_tune.ir.op.neural.attention import Attention
from relax_tune.ir.op.reduction.reduce import LayerNorm
from relax_tune.ir.rewrite.match import Scope
from relax_tune.ir.rewrite.movement_rules import is_identity
from relax_tune.ir.rewrite.pattern import op
from relax_tune.ir.rewrite.rules import Rule, Site


def shape_of(v: Value) -> tuple[Expr, ...]:
    """Return the dims of a tensor; () where they are not known."""
    return tensor_dims(v.info)


# broadcasts

ELEMENTWISE = op(Unary) | op(Binary) | op(Where)


def _before_view(site: Site) -> Value | None:
    """Move an operator before the views of its operands, if the other arguments have no dims."""
    (operator, args), scope = _parts(site.root), site.match.scope
    wide = [p for p, a in enumerate(args) if shape_of(a)]
    views = {p: view for p in wide if (view := _view_of(args[p], scope)) is not None}
    if not wide or len(views) < len(wide):
        return None
    first = views[wide[0]]
    if not (len(wide) == 1 and _adds_ones(first)) and not _of_groups(list(views.values()), scope):
        return None
    plain = [views[p].args[0] if p in views else a for p, a in enumerate(args)]
    return site.call(Reshape(shape_of(args[wide[0]])), site.call(operator, *plain))


def _of_groups(views: Sequence[Call], scope: Scope) -> bool:
    """Return whether views of one shape hold a normalisation by group, which takes the work on its result."""
    dims, now = shape_of(views[0].args[0]), shape_of(views[0])
    if any(shape_of(v.args[0]) != dims or shape_of(v) != now for v in views):
        return False
    calls = [scope.call(v.args[0]) for v in views]
    return any(m is not None and isinstance(m.op, LayerNorm) and m.op.axes > 1 for m in calls)


def _before_broadcast(site: Site) -> Value | None:
    """Apply an operator before the broadcasts of its operands.

    The result is broadcast, unless the other arguments give it the dims.
    """
    (operator, args), scope, ctx = _parts(site.root), site.match.scope, site.deduction
    sources = [_broadcast_source(a, scope, ctx) for a in args]
    if not isinstance(operator, Unary):
        longest = max(len(shape_of(s)) for s in sources)
        sources = [_without_leading_ones(s, scope, longest) for s in sources]
    if same_objects(args, sources):
        return None
    before, after = (operator.infer([a.info for a in values], ctx) for values in (args, sources))
    if not isinstance(before, TensorInfo) or not isinstance(after, TensorInfo):
        return None
    if before.shape is None or after.shape is None:
        return None
    result = site.call(operator, *sources)
    same = len(before.shape) == len(after.shape) and all(map(ctx.same, before.shape, after.shape))
    return result if same else site.call(BroadcastTo(before.shape), result)


def _narrow_mask(site: Site) -> Value | None:
    scope, rank = site.match.scope, len(site.shape("q"))
    mask = _without_leading_ones(_broadcast_source(site["mask"], scope, site.deduction), scope, rank)
    return None if mask is site["mask"] else site.call(site.root.op, "q", "k", "v", mask)


def _parts(call: Call) -> tuple[OperatorSpec, tuple[Value, ...]]:
    assert isinstance(call.op, OperatorSpec)
    return call.op, call.args


def _view_of(v: Value, scope: Scope) -> Call | None:
    """Return the call that makes `v` by inserting dims of 1 or by a reshape; None for another value."""
    call = scope.call(v)
    return call if call is not None and isinstance(call.op, (ExpandDims, Reshape)) else None


def _adds_ones(view: Call) -> bool:
    """Return whether a view only inserts dims of 1."""
    if isinstance(view.op, ExpandDims):
        return True
    assert isinstance(view.op, Reshape)
    before, now = shape_of(view.args[0]), view.op.shape
    return bool(before) and len(now) > len(before) and _beyond_ones(before) == _beyond_ones(now)


def _beyond_ones(dims: Sequence[Expr]) -> list[Expr]:
    return [d for d in dims if as_int(d) != 1]


def _broadcast_source(v: Value, scope: Scope, ctx: Deduction) -> Value:
    """Return `x` if `v` is certain to be `x` broadcast, otherwise `v`."""
    call = scope.call(v)
    if call is None or not isinstance(call.op, BroadcastTo):
        return v
    narrow, wide = shape_of(call.args[0]), call.op.shape
    tail = wide[len(wide) - len(narrow) :]
    certain = all(as_int(d) == 1 or ctx.same(d, t) for d, t in zip(narrow, tail, strict=True))
    return call.args[0] if certain else v


def _without_leading_ones(v: Value, scope: Scope, longest: int) -> Value:
    """Return `x` if `v` is `x` under more leading dims of 1, which broadcasting to `longest` dims adds anyway."""
    call = _view_of(v, scope)
    if call is None:
        return v
    before, now = shape_of(call.args[0]), shape_of(v)
    more = len(now) - len(before)
    if more > 0 and len(now) <= longest and before and now[more:] == before and all(as_int(d) == 1 for d in now[:more]):
        return call.args[0]
    return v


# counters


def counting(v: Value, scope: Scope) -> tuple[int, Expr] | None:
    """Return (axis, size) if `v` counts 0, 1 ... size-1 along one axis and repeats along all others."""
    call = scope.call(v)
    if call is None:
        return None
    if isinstance(call.op, Iota):
        return 0, call.op.size
    if not isinstance(call.op, (ExpandDims, BroadcastTo, Reshape)):
        return None
    inner = counting(call.args[0], scope)
    if inner is None:
        return None
    axis, size = inner
    before, now = shape_of(call.args[0]), shape_of(v)
    if isinstance(call.op, BroadcastTo):
        # a counter of one element may be the dim that is repeated
        target = axis + len(now) - len(before)
        return (target, size) if before[axis] == now[target] else None
    wide = [p for p, d in enumerate(now) if as_int(d) != 1]
    # A counter of one element cannot be distinguished from other dims of 1.
    if _beyond_ones(now) != _beyond_ones(before) or as_int(size) == 1:
        return None
    return wide[[p for p, d in enumerate(before) if as_int(d) != 1].index(axis)], size


def _shorter_counter(site: Site) -> Value | None:
    cut, counter = site.operator("cut", Slice), site["counter"]
    counter_axis, dims = counting(counter, site.match.scope), shape_of(counter)
    info = cut.infer([counter.info], site.deduction)
    if counter_axis is None or as_int(cut.begin) != 0 or cut.step != 1 or not isinstance(info, TensorInfo):
        return None
    axis = axis_index("slice", cut.axis, len(dims))
    if info.shape is None or counter_axis[0] != axis or any(as_int(d) != 1 for p, d in enumerate(dims) if p != axis):
        return None
    shorter = site.call(Iota(info.shape[axis]))
    return shorter if len(dims) == 1 else site.call(Reshape(info.shape), shorter)


def _first_rows(site: Site) -> Value | None:
    """Replace a gather of the first rows by a slice, if the table is proved to have that many rows."""
    counted, ctx = counting(site["indices"], site.match.scope), site.deduction
    if counted is None:
        return None
    axis, size = counted
    where, table = site.shape("indices"), site.shape("table")
    if any(as_int(d) != 1 for p, d in enumerate(where) if p != axis) or ctx.proves(le(size, table[0])) is not Proof.YES:
        return None
    rows = site["table"] if ctx.same(size, table[0]) else site.call(Slice(0, const(0), size), "table")
    # only dims of 1 are before and after the row axis
    return rows if len(where) == 1 else site.call(Reshape((*where, *table[1:])), rows)


def _grid_of_table(site: Site) -> Value | None:
    """Replace a gather whose indices count along the axes of the table by the table permuted and broadcast."""
    where, table, ctx = site.shape("indices"), site.shape("table"), site.deduction
    depth = as_int(where[-1]) if where else None
    axes = _grid_axes(site["indices"], site.match.scope, ctx, table[: depth or 0])
    if axes is None:
        return None
    lead, rest = where[:-1], table[len(axes) :]
    order = (*sorted(range(len(axes)), key=lambda p: axes[p]), *range(len(axes), len(table)))
    value = site["table"] if is_identity(order) else site.call(Permute(order), "table")
    grid_dims = tuple(d if p in axes else const(1) for p, d in enumerate(lead))
    dims = [table[p] for p in order]
    if len(dims) != len(grid_dims) + len(rest) or not all(map(ctx.same, dims, (*grid_dims, *rest))):
        value = site.call(Reshape((*grid_dims, *rest)), value)
    return value if grid_dims == lead else site.call(BroadcastTo((*lead, *rest)), value)


def _grid_axes(indices: Value, scope: Scope, ctx: Deduction, sizes: Sequence[Expr]) -> tuple[int, ...] | None:
    """Return the axes along which indices (..., k) into dims `sizes` count, if there are k different ones."""
    call = scope.call(indices)
    n = len(shape_of(indices)) - 1
    if call is None or not isinstance(call.op, Concat) or axis_index("concat", call.op.axis, n + 1) != n:
        return None
    if len(call.args) != len(sizes):
        return None
    axes: list[int] = []
    for part, size in zip(call.args, sizes, strict=True):
        counted = counting(part, scope)
        if counted is None or counted[0] >= n or counted[0] in axes or not ctx.same(counted[1], size):
            return None
        axes.append(counted[0])
    return tuple(axes)


RULES = (
    Rule(
        op(Attention, "q", "k", "v", "mask"), _narrow_mask, "attention with a broadcast mask", level="import",
        equation="attention(q, k, v, broadcast(mask)) = attention(q, k, v, mask)",
    ),
    Rule(
        ELEMENTWISE, _before_view, "elementwise work behind a view", level="import",
        equation="f(view(x)) = view(f(x)) where the view only adds dims of 1, or x is normalised by group",
    ),
    Rule(
        ELEMENTWISE, _before_broadcast, "elementwise work behind a broadcast", level="import",
        equation="f(broadcast(x), y) = broadcast(f(x, y))",
    ),
    Rule(
        op(Take, "table", "indices"), _first_rows, "counted rows", level="import",
        equation="table[[0, 1 ... n-1]] = table[:n]",
    ),
    Rule(
        op(GatherND, "table", "indices"), _grid_of_table, "counted grid", level="import",
        equation="table[i, j] for counters i and j along axes of their own = broadcast(permute(table))",
    ),
    Rule(
        op(Slice, "counter").named("cut"), _shorter_counter, "slice of a counter", level="import",
        equation="[0, 1, 2 ...][:n] = [0, 1 ... n-1]",
    ),
)  # fmt: skip
