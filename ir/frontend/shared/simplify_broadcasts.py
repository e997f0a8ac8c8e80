"""Broadcasts, counters and tensors of one value that exporters write out, taken back to what they say.

Elementwise operators run before a broadcast, not behind it; a table read at 0, 1, 2 ... is a cut of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from relax_tune.ir.arith.prove import Proof
from relax_tune.ir.core.expr import Expr, as_int, const, le
from relax_tune.ir.core.graph import Call, Value
from relax_tune.ir.core.graph_builder import info_of
from relax_tune.ir.core.struct_info import TensorInfo
from relax_tune.ir.frontend.shared.decomposed_ops import Emit, Made
from relax_tune.ir.op.attention import Attention
from relax_tune.ir.op.base import Deduction, OperatorSpec, axis_index
from relax_tune.ir.op.create import Iota
from relax_tune.ir.op.elementwise import Binary, Unary
from relax_tune.ir.op.logic import Where
from relax_tune.ir.op.movement import BroadcastTo, Concat, ExpandDims, Reshape, Slice, Take


def shape_of(v: Value) -> tuple[Expr, ...]:
    info = info_of(v)
    return (info.shape or ()) if isinstance(info, TensorInfo) else ()


def before_broadcasts(op: OperatorSpec, args: Sequence[Value], made: Made, emit: Emit, ctx: Deduction) -> Value | None:
    """f(broadcast(x), y) = broadcast(f(x, y)), and no broadcast at all where y has the dims; None when nothing changes.

    A view that only adds dims of 1 moves behind the operator too, where the other arguments have no dims."""
    if isinstance(op, Attention) and len(args) == 4:
        mask = _without_leading_ones(_source(args[3], made, ctx), made, len(shape_of(args[0])))
        return None if mask is args[3] else emit(op, *args[:3], mask)
    if not isinstance(op, (Unary, Binary, Where)):
        return None
    wide = [p for p, a in enumerate(args) if shape_of(a)]
    call = made.get(args[wide[0]]) if len(wide) == 1 else None
    if call is not None and isinstance(call.op, (ExpandDims, Reshape)) and _adds_ones(call):
        plain = [call.args[0] if p == wide[0] else a for p, a in enumerate(args)]
        return emit(Reshape(shape_of(args[wide[0]])), emit(op, *plain))
    sources = [_source(a, made, ctx) for a in args]
    if not isinstance(op, Unary):
        longest = max(len(shape_of(s)) for s in sources)
        sources = [_without_leading_ones(s, made, longest) for s in sources]
    if all(a is b for a, b in zip(args, sources, strict=True)):
        return None
    wanted = op.infer([info_of(a) for a in args], ctx)
    found = op.infer([info_of(s) for s in sources], ctx)
    if not isinstance(wanted, TensorInfo) or not isinstance(found, TensorInfo) or None in (wanted.shape, found.shape):
        return None
    assert wanted.shape is not None and found.shape is not None
    same = len(wanted.shape) == len(found.shape) and all(map(ctx.same, wanted.shape, found.shape))
    result = emit(op, *sources)
    return result if same else emit(BroadcastTo(wanted.shape), result)


def _adds_ones(view: Call) -> bool:
    """Whether a view only puts dims of 1 between the dims."""
    assert isinstance(view.op, (ExpandDims, Reshape))
    if isinstance(view.op, ExpandDims):
        return True
    own, now = shape_of(view.args[0]), view.op.shape
    return bool(own) and len(now) > len(own) and _beyond_ones(own) == _beyond_ones(now)


def _beyond_ones(dims: Sequence[Expr]) -> list[Expr]:
    return [d for d in dims if as_int(d) != 1]


def _source(v: Value, made: Made, ctx: Deduction) -> Value:
    """`x` when `v` is certain to be `x` broadcast."""
    call = made.get(v)
    if call is None or not isinstance(call.op, BroadcastTo):
        return v
    own, wide = shape_of(call.args[0]), call.op.shape
    tail = wide[len(wide) - len(own) :]
    certain = all(as_int(d) == 1 or ctx.same(d, t) for d, t in zip(own, tail, strict=True))
    return call.args[0] if certain else v


def _without_leading_ones(v: Value, made: Made, longest: int) -> Value:
    """`x` when `v` is `x` under more dims of 1 in front, which broadcasting adds itself where another operand has `longest`."""
    call = made.get(v)
    if call is None or not isinstance(call.op, (ExpandDims, Reshape)):
        return v
    own, now = shape_of(call.args[0]), shape_of(v)
    more = len(now) - len(own)
    if more > 0 and len(now) <= longest and own and now[more:] == own and all(as_int(d) == 1 for d in now[:more]):
        return call.args[0]
    return v


def counting(v: Value, made: Made) -> tuple[int, Expr] | None:
    """(axis, size) when `v` counts 0, 1 ... size-1 along one axis and is the same along all others."""
    call = made.get(v)
    if call is None:
        return None
    if isinstance(call.op, Iota):
        return 0, call.op.size
    if not isinstance(call.op, (ExpandDims, BroadcastTo, Reshape)):
        return None
    inner = counting(call.args[0], made)
    if inner is None:
        return None
    axis, size = inner
    own, now = shape_of(call.args[0]), shape_of(v)
    if isinstance(call.op, BroadcastTo):
        # a counter of one element may be the dim that is repeated
        moved = axis + len(now) - len(own)
        return (moved, size) if own[axis] == now[moved] else None
    kept = [p for p, d in enumerate(now) if as_int(d) != 1]
    if _beyond_ones(now) != _beyond_ones(own) or as_int(size) == 1:
        return None
    return kept[[p for p, d in enumerate(own) if as_int(d) != 1].index(axis)], size


def shorter_counter(op: Slice, args: Sequence[Value], made: Made, emit: Emit, ctx: Deduction) -> Value | None:
    """The first elements of 0, 1, 2 ... are a counter of their own."""
    found = counting(args[0], made)
    info = op.infer([info_of(a) for a in args], ctx)
    dims = shape_of(args[0])
    if found is None or as_int(op.begin) != 0 or op.step != 1 or not isinstance(info, TensorInfo) or info.shape is None:
        return None
    axis = axis_index("slice", op.axis, len(dims))
    if found[0] != axis or any(as_int(d) != 1 for p, d in enumerate(dims) if p != axis):
        return None
    counter = emit(Iota(info.shape[axis]))
    return counter if len(dims) == 1 else emit(Reshape(info.shape), counter)


def cut_of_table(op: Take, args: Sequence[Value], made: Made, emit: Emit, ctx: Deduction) -> Value | None:
    """table[0, 1 ... n-1] = table[:n], when the table is certain to have n rows."""
    found = counting(args[1], made)
    if found is None:
        return None
    axis, size = found
    where, table = shape_of(args[1]), shape_of(args[0])
    if any(as_int(d) != 1 for p, d in enumerate(where) if p != axis):
        return None
    if ctx.proves(le(size, table[0])) is not Proof.YES:
        return None
    rows = args[0] if ctx.same(size, table[0]) else emit(Slice(0, const(0), size), args[0])
    ones = tuple(p for p in range(len(where)) if p != axis)
    if not ones:
        return rows
    # views of the row axis alone: dims of 1 before and behind it
    return emit(Reshape((*where, *table[1:])), rows)


def grid_axes(indices: Value, made: Made, ctx: Deduction, sizes: Sequence[Expr]) -> tuple[int, ...] | None:
    """For indices (..., k) into dims `sizes` that count along one leading axis each: those axes, all different."""
    call = made.get(indices)
    n = len(shape_of(indices)) - 1
    if call is None or not isinstance(call.op, Concat) or axis_index("concat", call.op.axis, n + 1) != n:
        return None
    if len(call.args) != len(sizes):
        return None
    axes: list[int] = []
    for part, size in zip(call.args, sizes, strict=True):
        found = counting(part, made)
        if found is None or found[0] >= n or found[0] in axes or not ctx.same(found[1], size):
            return None
        axes.append(found[0])
    return tuple(axes)
