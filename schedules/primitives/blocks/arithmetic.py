"""The primitive that changes a block's arithmetic: multiply_by_reciprocal."""

from __future__ import annotations

import math
from dataclasses import replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import (
    Const,
    Expr,
    Load,
    Var,
    const,
    div,
    free_vars,
    mul,
    postorder,
    select,
    substitute,
    transform,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.independence import updates_in_place, writers
from relax_tune.schedules.loop_tree import enclosing, find_block, replace_node, with_body
from relax_tune.schedules.primitives.reduction.reductions import combiner
from relax_tune.schedules.symbols import are_variables, by_variable

# The smallest normal f32: its reciprocal is finite in f32 and wider.
SMALLEST_NORMAL = 2.0**-126
# Operations that turn a rounding error into a jump.
DISCONTINUOUS = frozenset({"floor", "rint", "fmod", "floordiv", "floormod", "lt", "le", "eq", "ne"})


def multiply_by_reciprocal(func: PrimFunc, block: str) -> PrimFunc:
    """Replace a division by a multiplication with the reciprocal, where the innermost loop does not change the divisor.

    Code generation hoists the reciprocal, so that one division serves all iterations of the loop.

    Before: `for i: for j: Y[i, j] = E[i, j] / S[i]`
    After: `for i: for j: Y[i, j] = E[i, j] * (1 / S[i])`
    Checks: there is such a division, of 32 or 64 bits. The divisor is a count, a root, a sum of powers as in softmax, or
    bounded from below, so that its reciprocal cannot overflow. The quotient is never rounded to a whole number or compared.
    The result may differ in its last bit.
    """
    node = find_block(func, block)
    path = enclosing(func, node)
    # Only a divisor that the innermost loop does not change gains: otherwise each iteration would divide once and
    # multiply in addition.
    moving = {i.var for i, b in zip(node.iters, node.bindings) if path and path[-1].var in free_vars(b)}
    reciprocals: set[Expr] = set()

    def rewritten(e: Expr) -> Expr | None:
        # The reciprocal of a 16-bit float would be rounded to 11 or 8 bits, far more than the last bit of the result.
        if e.op != "div" or not e.dtype.is_float or e.dtype.is_half:
            return None
        top, bottom = e.args
        if not moving & set(free_vars(top)) or moving & set(free_vars(bottom)) or isinstance(bottom, Const):
            return None
        if not _has_reciprocal(func, bottom):
            return None
        product = mul(top, div(const(1.0, e.dtype), bottom))
        reciprocals.add(product)
        return product

    value = transform(node.body.value, rewritten)
    if not reciprocals:
        raise ScheduleError(
            f"{func.name}: multiply_by_reciprocal expects a division in {block!r} by a value that its innermost loop does not change: "
            "a count, a root, a sum as in softmax, or one that a maximum bounds from below"
        )
    new = replace(node, body=replace(node.body, value=value))
    changed = with_body(func, replace_node(func.body, node, new))
    _require_continuous_uses(changed, new, reciprocals)
    return changed


def _require_continuous_uses(func: PrimFunc, node: Block, reciprocals: set[Expr]) -> None:
    """Check that no block rounds or compares a value that depends on the expressions `reciprocals` in `node`."""
    touched = set()
    order = blocks(func.body)
    for b in order[order.index(node) :]:
        for store in (b.body, b.init):
            if store is None:
                continue
            known: dict[Expr, bool] = {}
            for e in postorder((store.value,)):
                reads = isinstance(e, Load) and e.buffer in touched
                known[e] = reads or (b is node and e in reciprocals) or any(known[c] for c in e.children)
                # A quotient of exactly 3 may become 2.9999998, which floor makes 2: no longer a difference in the
                # last bit.
                whole = e.op in DISCONTINUOUS or (e.op == "cast" and not e.dtype.is_float)
                if whole and any(known[c] for c in e.children):
                    raise ScheduleError(
                        f"{func.name}: multiply_by_reciprocal expects a quotient that is not rounded or compared, got {e!r} in "
                        f"block {b.name!r}"
                    )
            if known[store.value]:
                touched.add(store.buffer)


def _has_reciprocal(func: PrimFunc, e: Expr) -> bool:
    """Return whether `e` provably has a finite reciprocal: it is 0 or at least the smallest normal number."""
    if e.op in ("sqrt", "rsqrt") or (e.op == "cast" and e.args[0].dtype.is_int):
        return True
    if e.op == "select":
        return all(_has_reciprocal(func, a) for a in e.args[1:])
    if e.op == "cast":
        return e.dtype.bytes >= 4 and _has_reciprocal(func, e.args[0])
    return _lower_bound(e) >= SMALLEST_NORMAL or (isinstance(e, Load) and _is_softmax_sum(func, e))


def _lower_bound(e: Expr) -> float:
    """Return a lower bound of `e`."""
    if isinstance(e, Const):
        return float(e.value)
    if e.op in ("sqrt", "rsqrt", "exp", "abs") or (e.op == "mul" and e.args[0] is e.args[1]):
        return 0.0
    if e.op == "max":
        return max(map(_lower_bound, e.args))
    if e.op == "min":
        return min(map(_lower_bound, e.args))
    return sum(map(_lower_bound, e.args)) if e.op == "add" else -math.inf


def _is_softmax_sum(func: PrimFunc, x: Load) -> bool:
    """Return whether `x` reads a softmax denominator, the sum over k of exp(t[k] - max t).

    Such a sum is at least exp(0), or the sum of an empty range.
    """
    adds = _reduction(func, x, "add", 0.0)
    if adds is None:
        return False
    power = _without_producers(func, combiner(adds)[1])
    condition = None
    if power.op == "select":
        condition, power, hidden = power.args
        if hidden.value != 0:
            return False
    if power.op != "exp":
        return False
    difference = power.args[0]
    if difference.op != "sub" or not isinstance(difference.args[1], Load):
        return False
    term, top = difference.args
    assert isinstance(top, Load)
    largest = _reduction(func, top, "max", -math.inf)
    # The maximum must be over the same terms as the sum. Then the largest term is exp(0), and the sum is at least 1.
    if largest is None or top.indices != adds.body.indices:
        return False
    maxima_at = [*largest.body.indices, *(i.var for i in largest.iters if i.kind == "reduce")]
    sums_at = [*top.indices, *(i.var for i in adds.iters if i.kind == "reduce")]
    if len(maxima_at) != len(sums_at) or [i.extent for i in largest.iters] != [i.extent for i in adds.iters]:
        return False
    renaming: dict[Var, Expr] = by_variable(maxima_at, sums_at)
    largest_term = substitute(_without_producers(func, combiner(largest)[1]), renaming)
    expected = term if condition is None else select(condition, term, const(-math.inf, term.dtype))
    return largest_term is expected


def _reduction(func: PrimFunc, x: Load, operation: str, start: float) -> Block | None:
    """Return the one block that writes the buffer of `x`, if it reduces by `operation` from `start`; else None."""
    producers = writers(func, x.buffer)
    if len(producers) != 1 or producers[0].init is None or not are_variables(producers[0].body.indices):
        return None
    init = producers[0].init.value
    try:
        combined, _ = combiner(producers[0])
    except ScheduleError:
        return None
    return producers[0] if combined == operation and init.value == start else None


def _without_producers(func: PrimFunc, e: Expr) -> Expr:
    """Inline the spatial producers of the loads in `e`."""

    def leaf(n: Expr) -> Expr | None:
        producers = writers(func, n.buffer) if isinstance(n, Load) else ()
        if not isinstance(n, Load) or len(producers) != 1 or producers[0].is_reduction:
            return None
        stored_at = producers[0].body.indices
        if updates_in_place(producers[0]) or not are_variables(stored_at):
            return None
        at: dict[Var, Expr] = by_variable(stored_at, n.indices)
        return _without_producers(func, substitute(producers[0].body.value, at))

    return transform(e, leaf)
