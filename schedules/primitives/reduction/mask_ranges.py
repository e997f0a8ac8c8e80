"""Ranges of keys that a mask does not exclude entirely for a tile of queries (e.g. the causal bound).

They are derived from the comparisons of the mask's condition.

Tests: `tests/schedules/primitives/reduction/test_online_softmax.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.bounds import Env, opposite
from relax_tune.ir.arith.linear import linear
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import (
    Const,
    Expr,
    Load,
    Var,
    add,
    conjuncts,
    const,
    eq,
    floordiv,
    free_vars,
    le,
    maximum,
    minimum,
    mul,
    op,
    sub,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import For
from relax_tune.schedules.independence import writers
from relax_tune.schedules.primitives.reduction.reductions import combiner
from relax_tune.schedules.symbols import are_variables, by_variable

# Bound on the blocks and conditions followed from a score to its mask.
MAX_DEPTH = 16


def unmasked_range(
    func: PrimFunc, score: Expr, loop: For, ranges: Mapping[Var, Expr], env: Env, from_first: bool = True
) -> tuple[Expr, Expr]:
    """Return (first, count) of the iterations of `loop` with a score that may exceed minus infinity. count may be negative.

    Each conjunct of the mask's condition bounds the iterations by itself, over all rows; the range is conservative.

    Args:
        ranges: Extents of the variables over which a score counts (rows of the tile).
        env: Facts known at the loop, but not in its iterations, which may be none.
        from_first: Whether leading masked iterations are skipped too.

    Raises:
        ScheduleError: If no condition bounds the iterations.
    """
    inner = dict(ranges)
    first: Expr = const(0)
    end = loop.extent
    for part in _conditions(func, score, inner):
        # An iteration can be skipped if the condition fails for all rows of the tile: if even the largest slack is
        # negative.
        room = _slack(part)
        most = None if room is None else bound_over(room, inner, True, env)
        parts = None if most is None else linear(most, (loop.var,), env)
        if parts is None or loop.var not in parts[0]:
            continue
        slope, rest = parts[0][loop.var], parts[1]
        if prove(le(1, slope), env) is Proof.YES:  # slope * step + rest >= 0
            if not from_first:
                continue
            # slope * step + rest >= 0 from step = ceil(-rest / slope) on; adding slope - 1 turns the ceiling into a
            # floor.
            least = sub(sub(slope, 1), rest)
            # max(least, 0), written so that `least` stays whole: quotients of x - 8 and of x + 24 differ in form
            first = maximum(first, floordiv(sub(least, minimum(least, 0)), slope))
        elif prove(le(slope, -1), env) is Proof.YES:
            # rest - fall * step >= 0 up to step = rest // fall; one more `fall` makes it the count of these steps.
            fall = simplify(mul(slope, -1), env)
            last = _in_proof_form(floordiv(maximum(add(rest, fall), 0), fall), env)
            end = end if prove(le(end, last), env) is Proof.YES else minimum(end, last)
    first = _in_proof_form(first, env)
    if end is loop.extent and prove(eq(first, 0), env) is Proof.YES:
        raise ScheduleError(
            f"{func.name}: expected scores under a condition on rows and keys by comparisons that are linear in {loop.var.name!r}, got "
            f"{score!r}, where every step may be unmasked"
        )
    return first, simplify(sub(end, first), env)


def _in_proof_form(e: Expr, env: Env) -> Expr:
    """Rewrite an expression in the form it has as a part of others: regions compare by form."""
    parts = linear(e, (), env)
    return simplify(e, env) if parts is None else parts[1]


def _conditions(func: PrimFunc, score: Expr, ranges: dict[Var, Expr]) -> list[Expr]:
    """Return conditions that all hold where a score is above minus infinity; iterators of maxima join `ranges`."""
    conditions: list[Expr] = []
    for _ in range(MAX_DEPTH):
        if score.op == "select" and _is_masked(score.args[2]):
            conditions += conjuncts(score.args[0])
            score = score.args[1]
            continue
        definition = _definition(func, score, ranges)
        if definition is None:
            break
        score = definition
    return conditions


def _definition(func: PrimFunc, score: Expr, ranges: dict[Var, Expr]) -> Expr | None:
    """Return the value of an element of an intermediate, or the term of its maximum; None for any other definition."""
    if not isinstance(score, Load) or score.buffer not in func.allocs:
        return None
    blocks = writers(func, score.buffer)
    # A separate block may write minus infinity first, once `decompose_reduction` has split the maximum.
    starts = [b for b in blocks if not b.is_reduction and b.init is None and _is_masked(b.body.value)]
    makers = [b for b in blocks if b not in starts]
    if len(makers) != 1 or (starts and not makers[0].is_reduction):
        return None
    (node,) = makers
    at = node.body.indices
    if not are_variables(at) or len(set(at)) != len(at):
        return None
    steps = {i.var: Var(i.var.name) for i in node.iters if i.kind == "reduce"}
    term = node.body.value
    if steps:
        operation, term = combiner(node)
        if operation != "max" or not (starts if node.init is None else _is_masked(node.init.value)):
            return None
    ranges.update({steps[i.var]: i.extent for i in node.iters if i.var in steps})
    values = by_variable(at, score.indices)
    return substitute(term, values | steps)


def _is_masked(e: Expr) -> bool:
    return e.dtype.is_float and e.value == -math.inf


def _slack(part: Expr) -> Expr | None:
    """Return an expression that is at least 0 exactly where a comparison of integers holds; None for other conditions."""
    other = opposite(part.args[0]) if part.op == "not" else None
    part = part if other is None else other
    if part.op not in ("le", "lt") or not part.args[0].dtype.is_int:
        return None
    a, b = part.args
    return sub(b, a) if part.op == "le" else sub(sub(b, a), 1)


def bound_over(e: Expr, ranges: Mapping[Var, Expr], largest: bool, env: Env) -> Expr | None:
    """Bound an expression over all values of the variables of `ranges`, from above if `largest`, else from below.

    None if it is not known to be monotonic in them.
    """
    if not any(v in ranges for v in free_vars(e)):
        return e
    if isinstance(e, Var):
        return sub(ranges[e], 1) if largest else const(0)
    parts = linear(e, [v for v in free_vars(e) if v in ranges], env)
    if parts is not None:
        total = parts[1]
        for v, slope in parts[0].items():
            rises = prove(le(0, slope), env) is Proof.YES
            if not rises and prove(le(slope, 0), env) is not Proof.YES:
                return None
            if rises == largest:
                total = add(total, mul(slope, sub(ranges[v], 1)))
        return total
    if len(e.args) != 2:
        return None
    a, b = e.args
    if e.op == "sub":
        ends = bound_over(a, ranges, largest, env), bound_over(b, ranges, not largest, env)
    elif e.op in ("add", "min", "max"):
        ends = bound_over(a, ranges, largest, env), bound_over(b, ranges, largest, env)
    elif e.op == "floordiv" and isinstance(b, Const) and b.value > 0:
        ends = bound_over(a, ranges, largest, env), b
    else:
        return None
    return None if ends[0] is None or ends[1] is None else op(e.op, (ends[0], ends[1]), e.dtype)
