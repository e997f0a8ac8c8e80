"""Shrink the last vectorised tiles to the remaining width: the `narrow` tail of loops.

Below the loop, vectorised tile loops of extent T are under conditions `x + tile < bound`. left = bound - x is the remaining width of an
iteration. An iteration with left >= T runs without the conditions. Another one runs a copy of the body with narrower tile loops,
and narrower loops that produce their operands: the smallest number of vectors, a power of two, that covers `left`. An iteration may
have nothing left, since a loop around it may exceed the bound. Results are unchanged.

Tests: `tests/ir/codegen/test_schedules.py`, `tests/ir/codegen/test_text.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.codegen.lower.affine import Algebra, Poly, as_constant, plus
from relax_tune.ir.codegen.lower.guards import map_conjuncts, with_extent
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import Expr, Var, as_int, conjuncts, floordiv, le, loads, lt, maximum, minimum
from relax_tune.ir.core.stmt import For, IfThenElse, Let, Stmt, accesses, loops, stores, when


@dataclass(frozen=True, slots=True, eq=False)
class GuardedTiles:
    """The tile loops below a loop.

    Attributes:
        conditions: For each condition, the variable of the tile loop that it bounds.
        extent: Extent of the tile loops.
        left: Remaining width.
    """

    conditions: dict[Expr, Var]
    extent: int
    left: Poly


def find_tiles(f: For, algebra: Algebra) -> GuardedTiles | None:
    """Return the guarded tile loops; None if no conditions are on vectorised loops, or if they disagree."""
    conditions: dict[Expr, Var] = {}
    extents: set[int] = set()
    left: list[Poly] = []
    for cond, inside in _conditions(f.body, {}):
        slack = plus(algebra.static(cond.args[1]), algebra.static(cond.args[0]), -1)
        inner_terms = {m for m in slack if any(not algebra.free(a).isdisjoint(inside) for a in m)}
        if len(inner_terms) != 1:
            continue
        (m,) = inner_terms
        loop = inside.get(m[0]) if len(m) == 1 else None
        size = as_int(loop.extent) if loop is not None and loop.kind == "vectorized" else None
        if loop is None or size is None or slack[m] != -1:
            continue
        rest = {n: c for n, c in slack.items() if n != m}
        conditions[cond] = loop.var
        extents.add(size)
        if rest not in left:
            left.append(rest)
    return GuardedTiles(conditions, extents.pop(), left[0]) if len(extents) == 1 and len(left) == 1 else None


def _conditions(n: Stmt, inside: dict[Expr, For]) -> Iterator[tuple[Expr, dict[Expr, For]]]:
    if isinstance(n, For):
        inside = inside | {n.var: n}
    elif isinstance(n, IfThenElse):
        for c in conjuncts(n.cond):
            if c.op == "lt" and c.args[0].dtype is i64:
                yield c, inside
    for below in n.children:
        yield from _conditions(below, inside)


def producer_loops(f: For, tiles: GuardedTiles, private: frozenset[Buffer], algebra: Algebra) -> frozenset[Var] | None:
    """Return the tile loops and the loops of the same extent that only fill private buffers for them.

    Return None if the body also accesses other elements of those buffers, or with another index.
    """
    variables = set(tiles.conditions.values())
    # the dimensions of private buffers along which the tile loops run
    places = {
        (b, d)
        for b, indices, _ in accesses(f.body)
        if b in private
        for d, e in enumerate(indices)
        if not algebra.free(e).isdisjoint(variables)
    }
    for loop in loops(f.body, "vectorized"):
        if loop.var in variables or as_int(loop.extent) != tiles.extent:
            continue
        if all(
            any((s.buffer, d) in places and loop.var in algebra.free(e) for d, e in enumerate(s.indices))
            for s in stores(loop.body)
        ):
            variables.add(loop.var)
    # Narrowing is correct only if all accesses use the same elements: `start + tile variable`, with one start per dimension.
    starts: dict[tuple[Buffer, int], Poly] = {}
    for b, indices, _ in accesses(f.body):
        for d, e in enumerate(indices):
            if (b, d) not in places:
                continue
            at = algebra.static(e)
            tile_terms = [m for m in at if any(not algebra.free(a).isdisjoint(variables) for a in m)]
            start = {m: c for m, c in at.items() if m not in tile_terms}
            if (
                len(tile_terms) != 1
                or len(tile_terms[0]) != 1
                or at[tile_terms[0]] != 1
                or starts.setdefault((b, d), start) != start
            ):
                return None
    return frozenset(variables)


def widths(tiles: GuardedTiles, f: For, lanes: int) -> Sequence[int]:
    """Return the widths in elements that tiles may need, narrowest first.

    For constant shapes this is one width if all partial tiles have the same, and no width if there are no partial tiles.
    """
    # Powers of two of vectors: each width is a copy of the body, and the next larger one wastes less than half of its
    # lanes.
    every = [w for w in range(lanes, tiles.extent, lanes) if _is_power(w // lanes)] + [tiles.extent]
    count = as_int(f.extent)
    step = -tiles.left.get((f.var,), 0)
    first = as_constant({m: c for m, c in tiles.left.items() if m != (f.var,)})
    if count is None or count < 1 or first is None:
        return every
    # `left` is linear in the loop variable, so it is smallest at one end.
    least = min(first, first - step * (count - 1))
    if least >= tiles.extent:
        return []
    if least < 1 or (step != 0 and count > 1 and least + abs(step) < tiles.extent):
        return every
    return [w for w in every if w >= least][:1]


def leaves_elements(tiles: GuardedTiles, around: Sequence[Stmt], algebra: Algebra) -> bool:
    """Return whether every iteration provably has at least one element left.

    Args:
        around: Statements around the tiles including the loop, outermost first. The tiles are in the `then` branch of each `IfThenElse`.
    """
    env = Env()
    for s in around:
        if isinstance(s, For):
            env = env.with_loop(s.var, s.extent)
        elif isinstance(s, Let) and s.value.dtype.is_int:
            env = env.with_bound(s.var, *_let_range(s.value, env))
        elif isinstance(s, IfThenElse) and not loads(s.cond):
            env = env.with_fact(s.cond)
    return prove(le(1, algebra.expr(tiles.left)), env) is Proof.YES


def _let_range(value: Expr, env: Env) -> tuple[Expr, Expr]:
    """Return symbolic bounds of a bound value. The quotient of a fused loop is bounded through the loop: division is monotonic."""
    if value.op == "floordiv":
        top, divisor = value.args
        low, high = env.bounds.get(top, (None, None)) if isinstance(top, Var) else (None, None)
        if low is not None and high is not None and (as_int(divisor) or 0) > 0:
            return floordiv(low, divisor), floordiv(high, divisor)
    return value, value


def _is_power(n: int) -> bool:
    return n & (n - 1) == 0


def narrow(
    f: For,
    tiles: GuardedTiles,
    tile_variables: frozenset[Var],
    wide: Sequence[int],
    private: frozenset[Buffer],
    algebra: Algebra,
    *,
    never_empty: bool,
) -> For:
    """Return the loop with one body for each width.

    If the conditions guard only stores to memory, not computation, the widest body keeps them and is used for whole tiles too.

    Args:
        tile_variables: Variables of the loops that are narrowed.
        wide: Widths of the bodies, narrowest first.
        never_empty: Whether every iteration has at least one element left.
    """
    left = Var(f"{f.var.name}_left")
    algebra.ranges[left] = algebra.interval(tiles.left)
    everywhere = not _guards_any(f.body, tiles, private)
    body = _with_conditions(f.body, tiles, None)
    for width in reversed(wide):
        remaining = Var(f"{f.var.name}_{width}")
        low = max((w + 1 for w in wide if w < width), default=int(never_empty))
        # the range of `remaining` lets the printers drop conditions on lanes that always hold in this body
        is_full = width == tiles.extent
        most = width - 1 if is_full and not everywhere else width
        algebra.ranges[remaining] = (low, most)
        narrower = with_extent(_with_conditions(f.body, tiles, remaining), tile_variables, width)
        part = Let(remaining, maximum(minimum(left, most), low), narrower)
        body = part if is_full and everywhere else when(le(left, most), part, body)
    return replace(f, body=Let(left, algebra.expr(tiles.left), body), tail="predicate")


def _guards_any(n: Stmt, tiles: GuardedTiles, private: frozenset[Buffer]) -> bool:
    """Return whether one of the conditions guards a store to a private buffer."""
    if isinstance(n, IfThenElse) and not tiles.conditions.keys().isdisjoint(conjuncts(n.cond)):
        return any(s.buffer in private for s in stores(n.then))
    return any(_guards_any(c, tiles, private) for c in n.children)


def _with_conditions(n: Stmt, tiles: GuardedTiles, left: Var | None) -> Stmt:
    """Express the conditions in terms of the remaining width, or drop them if it is None."""

    def new(c: Expr) -> Expr | None:
        tile = tiles.conditions.get(c)
        if tile is None:
            return c
        return None if left is None else lt(tile, left)

    return map_conjuncts(n, new)
