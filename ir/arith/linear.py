"""Affine structure of index expressions: coefficients, strides, extents, density."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith import poly as P
from relax_tune.ir.arith.bounds import Env, interval
from relax_tune.ir.arith.inequality import Question
from relax_tune.ir.arith.poly import Poly
from relax_tune.ir.arith.prove import EMPTY, Proof, prove, prove_equal
from relax_tune.ir.arith.render import Renderer
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import (
    Expr,
    ExprLike,
    Var,
    add,
    as_int,
    const,
    expr,
    free_vars,
    le,
    minimum,
    mul,
    postorder,
    sub,
)


def linear(e: ExprLike, vars: Iterable[Var], env: Env | None = None) -> tuple[dict[Var, Expr], Expr] | None:
    """Write `e` as sum(coefficient[v] * v) + rest, coefficients and rest free of `vars`; None if impossible.

    Coefficients may be symbolic (products of tunables). Variables with coefficient zero are left out; the others come in the
    order of `vars`. A variable that `env` pins to one value counts as that value.
    """
    e, variables = expr(e), tuple(dict.fromkeys(vars))
    ctx = Question(env or EMPTY)
    p = ctx.poly(e)
    numbers = {v: number for v in variables if (number := ctx.number_of(v)) is not None}
    factors: dict[Var, Poly] = {}
    for v, number in numbers.items():
        factor, p = P.extract(p, (number,))
        if factor:
            factors[v] = factor
    renderer = Renderer(ctx, {})
    taboo = set(variables)
    parts = [renderer.render(q, e.dtype) for q in (*factors.values(), p)]
    # A variable that remains inside of an atom (i // 4, min(i, n)) makes the expression not affine.
    if any(v in taboo for part in parts for v in free_vars(part)):
        return None
    return dict(zip(factors, parts, strict=False)), parts[-1]


def extent_of(e: ExprLike, ranges: Mapping[Var, ExprLike], env: Env | None = None) -> Expr:
    """Return the length of the range of `e`: 1 + sum(|coefficient| * (extent - 1)).

    Each variable v runs over range(ranges[v]) with at least one value.

    Raises:
        ScheduleError: `e` is not linear in the variables or the sign of a coefficient is unknown.
    """
    e, env = expr(e), env or EMPTY
    parts = linear(e, ranges, env)
    if parts is None:
        raise ScheduleError(
            f"region inference: expected an index that is linear in {', '.join(v.name for v in ranges)}, got {e}; "
            "split or fuse by simpler loops, or compute at an outer loop"
        )
    return simplify(_length(e, parts[0], ranges, env), env)


def _length(e: Expr, strides: Mapping[Var, Expr], ranges: Mapping[Var, ExprLike], env: Env) -> Expr:
    """Return the length of a range from the coefficients of the variables; see `extent_of`."""
    size: Expr = const(0, e.dtype)
    rest = 1  # less every constant stride
    for v, k in strides.items():
        if v not in ranges:
            continue
        low, high = interval(k, env)
        if low is None or low < 0:
            if high is None or high > 0:
                raise ScheduleError(f"region inference: the sign of {k}, the stride of {v.name} in {e}, is not known")
            k = simplify(mul(k, -1), env)
        stride = as_int(k)
        size = add(size, mul(k, sub(expr(ranges[v]), 1) if stride is None else expr(ranges[v])))
        rest -= stride or 0
    return add(size, rest)


def extent_within(e: ExprLike, ranges: Mapping[Var, ExprLike], dim: Expr) -> Expr:
    """Return a bound of the range of an index into `dim`: `extent_of` where it is known, and never more than `dim`."""
    try:
        return minimum(extent_of(e, ranges), dim)
    except ScheduleError:
        return dim


def extents_within(e: Expr, levels: Sequence[Mapping[Var, ExprLike]], dim: Expr) -> list[Expr]:
    """Return `extent_within` of a simplified index for each set of variables, normalising the index once."""
    clamped = {v for n in postorder((e,)) if n.op in ("min", "max", "select") for v in free_vars(n)}
    known = [clamped.isdisjoint(ranges) for ranges in levels]  # only linear indices determine an extent
    variables = {v: None for ranges, can_be in zip(levels, known, strict=True) for v in ranges if can_be}
    parts = linear(e, variables) if variables else None
    extents = []
    for ranges, can_be in zip(levels, known, strict=True):
        if not can_be:
            extents.append(dim)
        elif parts is None:
            extents.append(extent_within(e, ranges, dim))
        else:
            try:
                extents.append(minimum(_length(e, parts[0], ranges, EMPTY), dim))
            except ScheduleError:
                extents.append(dim)
    return extents


def is_dense(e: ExprLike, ranges: Mapping[Var, ExprLike], env: Env | None = None) -> bool:
    """Prove that `e` takes each value of an interval exactly once, as a mixed-radix sum.

    Some order of the variables then has strides 1, x1, x1 * x2, ... for extents x1, x2, ... Extents of 1 do not count."""
    env = env or EMPTY
    parts = linear(e, ranges, env)
    if parts is None:
        return False
    # A loop of one iteration adds nothing to the value, so its coefficient may be anything.
    left = {v: k for v, k in parts[0].items() if prove(le(expr(ranges[v]), 1), env) is not Proof.YES}
    # A variable that does not occur makes every value occur several times.
    if any(v not in parts[0] and prove(le(expr(x), 1), env) is not Proof.YES for v, x in ranges.items()):
        return False
    step: Expr = const(1)
    while left:
        following = next((v for v, k in left.items() if prove_equal(k, step, env) is Proof.YES), None)
        if following is None:
            return False
        del left[following]
        step = simplify(mul(step, expr(ranges[following])), env)
    return True
