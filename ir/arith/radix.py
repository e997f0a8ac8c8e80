"""Whether index maps keep things apart: mixed-radix sums and their digits, with symbolic factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.linear import extent_of, linear
from relax_tune.ir.arith.prove import Proof, prove, prove_equal
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.expr import (
    Expr,
    ExprLike,
    Op,
    Var,
    add,
    and_,
    as_int,
    ceildiv,
    const,
    expr,
    floormod,
    free_vars,
    le,
    lt,
    mul,
    postorder,
    rebuild,
    sub,
    transform,
)


def injective(indices: Sequence[Expr], ranges: Mapping[Var, ExprLike], env: Env | None = None) -> bool:
    """Whether `indices` provably differ wherever the variables do, each v running over range(ranges[v]).

    Either as they stand, or because they determine digits of the variables (`i // T`, `i % T`), which determine these."""
    env, extents = env or Env(), {v: expr(extent) for v, extent in ranges.items()}
    for v, extent in extents.items():
        env = env.with_loop(v, extent)
    if _in_turn(indices, extents, env):
        return True
    digits = _stand_ins(indices, extents, env)
    if digits is None:
        return False
    free = {v: e for v, e in extents.items() if any(v in free_vars(x) for x in digits.indices)}
    wider = env
    for v, extent in digits.extents.items():
        wider = wider.with_loop(v, extent)
    return _in_turn(digits.indices, {**free, **digits.extents}, wider) and _in_turn(
        [*digits.nodes, *free], extents, env
    )


def _in_turn(indices: Sequence[Expr], ranges: Mapping[Var, Expr], env: Env) -> bool:
    """Some order of the variables separates one after the other, those before it being known from the indices."""
    left = dict(ranges)
    while left:
        found = next((v for v in left if separates(indices, v, {w: left[w] for w in left if w is not v}, env)), None)
        if found is None:
            return False
        del left[found]
    return True


@dataclass(frozen=True, slots=True)
class _Digits:
    """Indices in which a variable stands for each outermost quotient or remainder, those, and how many values each may take."""

    indices: tuple[Expr, ...]
    nodes: tuple[Op, ...]
    extents: Mapping[Var, Expr]


def _stand_ins(indices: Sequence[Expr], ranges: Mapping[Var, Expr], env: Env) -> _Digits | None:
    """None where there are none, or one may be negative or has no bound that is known."""
    made: dict[Op, Var] = {}

    def outer(n: Expr) -> Expr:
        done: dict[Expr, Expr] = {}
        stack = [n]
        while stack:
            x = stack[-1]
            if x in done:
                stack.pop()
                continue
            if isinstance(x, Op) and x.op in ("floordiv", "floormod") and not ranges.keys().isdisjoint(free_vars(x)):
                done[x] = made.setdefault(x, Var(f"digit{len(made)}"))
                continue
            waiting = [c for c in x.children if c not in done]
            if waiting:
                stack.extend(waiting)
                continue
            done[x] = rebuild(x, tuple(done[c] for c in x.children)) if x.children else x
        return done[n]

    replaced = tuple(outer(e) for e in indices)
    extents: dict[Var, Expr] = {}
    for node, stand_in in made.items():
        x, c = node.args
        if not ranges.keys().isdisjoint(free_vars(c)) or prove(le(1, c), env) is not Proof.YES:
            return None
        if node.op == "floormod":
            extents[stand_in] = c
            continue
        try:
            size = extent_of(x, {v: ranges[v] for v in free_vars(x) if v in ranges}, env)
        except ScheduleError:
            return None
        if prove(and_(le(0, x), lt(x, size)), env) is not Proof.YES:
            return None
        extents[stand_in] = simplify(ceildiv(size, c), env)
    return _Digits(replaced, tuple(made), extents) if made else None


def separates(indices: Sequence[Expr], var: Var, inner: Mapping[Var, Expr], env: Env) -> bool:
    """Whether different values of `var` provably give different indices, whatever the `inner` variables (with their extents) do.

    It looks at each index alone, and at the numbers whose digits (`u // E`, `u % E`, as fused loops make them) can all be
    read off the indices.
    """
    if prove(le(var, 0), env) is Proof.YES:
        return True  # it has one value
    flat = [simplify(e, env) for e in indices]
    return any(_steps(e, var, inner, env) for e in (*flat, *_joined(flat, var, inner, env)))


def _steps(e: Expr, var: Var, inner: Mapping[Var, Expr], env: Env) -> bool:
    """A step of `var` moves `e` by at least what `e` covers while the inner variables run; digits of these count as any numbers of
    their range."""
    own = {v: inner[v] for v in free_vars(e) if v in inner and v is not var}
    if linear(e, (var, *own), env) is None:
        alone = linear(e, (var,), env)
        digits = None if alone is None else _stand_ins((alone[1],), own, env)
        if alone is None or digits is None or var not in alone[0]:
            return False
        own = {v: x for v, x in own.items() if v in free_vars(digits.indices[0])} | dict(digits.extents)
        e = add(mul(alone[0][var], var), digits.indices[0])
    parts = linear(e, (var, *own), env)
    if parts is None or var not in parts[0] or any(v in inner for v in free_vars(parts[0][var])):
        return False
    try:
        covered = extent_of(e, own, env)
    except ScheduleError:
        return False
    step = parts[0][var]
    return any(prove(le(covered, s), env) is Proof.YES for s in (step, simplify(mul(step, -1))))


def _joined(indices: Sequence[Expr], var: Var, inner: Mapping[Var, Expr], env: Env) -> list[Expr]:
    """Expressions that the indices determine together, because each of their digits can be read off one index."""
    digits = [_place_of(d) for e in indices for d in _digits(e, var, inner, env)]
    found = []
    for u in dict.fromkeys(number for number, _, _ in digits):
        left = [(d, m) for number, d, m in digits if number is u or _congruent(number, d, m, u)]
        scale: Expr = const(1)
        while left:
            here = [d for d in left if prove_equal(d[0], scale) is Proof.YES]
            if any(modulus is None for _, modulus in here):
                found.append(u)
            if not here or u in found:
                break
            left.remove(here[0])
            assert here[0][1] is not None
            scale = mul(scale, here[0][1])
    return found


def _congruent(number: Expr, divisor: Expr, modulus: Expr | None, u: Expr) -> bool:
    """`number % modulus` is `u % modulus` (simplifying takes multiples of the modulus out)."""
    if modulus is None or as_int(divisor) != 1:
        return False
    return as_int(simplify(floormod(sub(number, u), modulus))) == 0


def _place_of(digit: Op) -> tuple[Expr, Expr, Expr | None]:
    """`u // d` as (u, d, None) and `u // d % m` as (u, d, m)."""
    modulus = digit.args[1] if digit.op == "floormod" else None
    number: Expr = digit if modulus is None else digit.args[0]
    divisor: Expr = const(1)
    while isinstance(number, Op) and number.op == "floordiv":
        divisor = mul(divisor, number.args[1])
        number = number.args[0]
    return number, divisor, modulus


def _digits(e: Expr, var: Var, inner: Mapping[Var, Expr], env: Env) -> list[Op]:
    """Quotients and remainders of something with `var` in it that `e` determines: outermost ones that `e` steps through."""
    nodes = [n for n in postorder((e,)) if isinstance(n, Op) and n.op in ("floordiv", "floormod")]
    outermost: dict[Op, Var] = {}
    plain: Expr = e
    for n in reversed(nodes):
        if var in free_vars(n.args[0]) and any(x is n for x in postorder((plain,))):
            stand_in = outermost.setdefault(n, Var(f"digit{len(outermost)}"))
            plain = _swap(plain, n, stand_in)
    return [n for n, stand_in in outermost.items() if _steps(plain, stand_in, inner, env)]


def _swap(e: Expr, old: Expr, new: Expr) -> Expr:
    return transform(e, lambda n: new if n is old else None)
