"""Run full tiles without their bound checks: the `peel`, `pow2` and `exact` tails of loops (`narrow_tails` has `narrow`).

A loop `o` has conditions `base + o*T + r < bound` below it, r from inner loops and at most R - 1. The conditions hold
in its first F = clamp((bound - base - R + T) // T, 0, extent) iterations, which drop them. The rest keeps them
(`peel`), and a tile of several vectors runs one vector at a time there: a copy for each would be most of the code. If one
tile loop of extent T remains, `pow2` runs it in pieces of descending powers of two, chosen by the bits of the remainder.
`exact` runs one tile of the remaining height, among bodies for all heights. Results are unchanged.

Tests: `tests/ir/codegen/test_schedules.py`, `tests/ir/codegen/test_text.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from relax_tune.ir.codegen.lower.affine import Algebra, Poly, as_constant, constant, plus
from relax_tune.ir.codegen.lower.guards import map_conjuncts, slack_below, with_extent
from relax_tune.ir.codegen.lower.narrow_tails import find_tiles, leaves_elements, narrow, producer_loops, widths
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import (
    Expr,
    Var,
    as_int,
    conjuncts,
    const,
    eq,
    floordiv,
    floormod,
    free_vars,
    lt,
    maximum,
    minimum,
)
from relax_tune.ir.core.stmt import (
    EMPTY,
    BufferStore,
    For,
    IfThenElse,
    Let,
    LoopKind,
    Stmt,
    accesses,
    loops,
    own_accesses,
    redirect,
    rewrite,
    seq,
    stores,
    substitute_stmt,
    when,
)

_THREADS: tuple[LoopKind, ...] = ("parallel", "group", "item")


@dataclass(frozen=True, slots=True, eq=False)
class TileGuard:
    """A condition `tile*o + r < rest`.

    Attributes:
        cond: The conjunct.
        tile: Coefficient of the split loop's variable.
        reach: Largest value of r, plus 1.
        rest: The bound without the loops' variables.
        inner: (variable, coefficient, extent) of the loops in r.
    """

    cond: Expr
    tile: int
    reach: int
    rest: Poly
    inner: tuple[tuple[Var, int, int], ...]


def lower_tails(n: Stmt, algebra: Algebra, lanes: int) -> Stmt:
    """Split every loop whose tail is not `predicate`, outermost first."""
    return _Splitter(algebra, home_loops(n), lanes).run(n)


def _guards(n: Stmt, o: Var, algebra: Algebra, inner: dict[Var, int | None]) -> Iterator[TileGuard]:
    inner = inner | {v: as_int(n.extent) if isinstance(n, For) else None for v in n.bound_vars}
    if isinstance(n, IfThenElse):
        guards = (_guard(c, o, algebra, inner) for c in conjuncts(n.cond))
        yield from (g for g in guards if g is not None)
    for below in n.children:
        yield from _guards(below, o, algebra, inner)


def _guard(c: Expr, o: Var, algebra: Algebra, inner: dict[Var, int | None]) -> TileGuard | None:
    slack = slack_below(c, algebra.static)
    tile = 0 if slack is None else -slack.get((o,), 0)
    if slack is None or tile <= 0:
        return None
    rest: Poly = {}
    used: list[tuple[Var, int, int]] = []
    reach = 1
    for m, k in slack.items():
        if m == (o,):
            continue
        if len(m) == 1 and isinstance(m[0], Var) and m[0] in inner:
            extent = inner[m[0]]
            # A slack that grows with an inner loop is smallest at its first iteration, so `reach` would not be the last element.
            if extent is None or k > 0:
                return None
            used.append((m[0], -k, extent))
            reach += -k * (extent - 1)
        elif any(not algebra.free(a).isdisjoint(inner) or o in algebra.free(a) for a in m):
            return None
        else:
            rest[m] = k
    return TileGuard(c, tile, reach, rest, tuple(used))


class _Splitter:
    """Splits the tails of one function.

    Attributes:
        homes: For each buffer, the variables of the loops around all of its accesses.
    """

    def __init__(self, algebra: Algebra, homes: dict[Buffer, frozenset[Var]], lanes: int) -> None:
        self.algebra = algebra
        self.homes = homes
        self.lanes = lanes

    def run(self, n: Stmt, around: tuple[Stmt, ...] = ()) -> Stmt:
        """Split the tails of a statement.

        Args:
            around: Loops, bindings and conditions around it, outermost first.
        """
        if isinstance(n, For) and n.tail != "predicate":
            without_tail = self.narrow(n, (*around, n)) if n.tail == "narrow" else self.split(n)
            if without_tail is not None:
                return self._below(without_tail, around)
            n = replace(n, tail="predicate")
        return self._below(n, around)

    def _below(self, n: Stmt, around: tuple[Stmt, ...]) -> Stmt:
        if isinstance(n, IfThenElse):
            orelse = () if n.orelse is None else (self.run(n.orelse, around),)
            return n.with_children((self.run(n.then, (*around, n)), *orelse))
        inside = (*around, n) if n.bound_vars else around
        return n.with_children(tuple(self.run(c, inside) for c in n.children))

    def narrow(self, f: For, around: tuple[Stmt, ...]) -> For | None:
        """Return the loop with one body for each width of its tiles; None if the `narrow` tail does not apply.

        Args:
            around: Statements around the loop's body including the loop, outermost first.
        """
        if isinstance(f.body, Let):  # the remaining width may depend on it
            inside = self.narrow(replace(f, body=f.body.body), (*around, f.body))
            return None if inside is None else replace(inside, body=replace(f.body, body=inside.body))
        tiles = find_tiles(f, self.algebra)
        private = self._private(f)
        loops = None if tiles is None else producer_loops(f, tiles, private, self.algebra)
        if tiles is None or loops is None:
            return None
        wide = widths(tiles, f, self.lanes)
        never_empty = leaves_elements(tiles, around, self.algebra)
        bodies = narrow(f, tiles, loops, wide, private, self.algebra, never_empty=never_empty)
        return replace(bodies, body=self._with_separate_registers(bodies.body, private)) if wide else bodies

    def _with_separate_registers(self, n: Stmt, private: frozenset[Buffer]) -> Stmt:
        """Give each body separate registers."""
        if isinstance(n, IfThenElse) and n.orelse is not None:
            return replace(
                n, then=self._clone(n.then, private), orelse=self._with_separate_registers(n.orelse, private)
            )
        return (
            n.with_children(tuple(self._with_separate_registers(c, private) for c in n.children))
            if isinstance(n, Let)
            else n
        )

    def split(self, f: For) -> Stmt | None:
        """Return the loop split into full iterations and the rest; None if no condition below mentions its variable."""
        algebra = self.algebra
        guards = tuple(_guards(f.body, f.var, algebra, {}))
        if not guards:
            return None
        extent = algebra.static(f.extent)
        full, single = self._full(f, guards)
        dropped = {g.cond for g in guards}
        fast = _drop(f.body, dropped)
        in_pieces = f.tail in ("pow2", "exact")
        rest = self._pieces(f, guards, dropped) if in_pieces else self._strips(f, guards, dropped)
        slow = self._clone(f.body, self._private(f)) if rest is None else rest
        known = as_constant(algebra.static(full))
        limit = Var(f"{f.var.name}_full")
        # the printer chooses the type of the new variable by its range
        algebra.ranges[limit] = (0, algebra.interval(extent)[1])
        end: Expr = limit if known is None else const(known)
        if f.kind in ("parallel", "group"):
            # a parallel loop is one launch, which cannot be followed by another loop: each iteration chooses its body
            body = when(lt(f.var, end), fast, slow)
            return replace(f, body=body if known is not None else Let(limit, full, body), tail="predicate")
        main: Stmt = EMPTY if known == 0 else replace(f, extent=end, body=fast, tail="predicate")
        # no rest if there are no further iterations, or if the only further one has no elements
        left = plus(extent, algebra.static(end), -1)
        if (as_constant(left) or 1) <= 0 or not left or (single and guards[0].reach == 1):
            return main if known is not None else Let(limit, full, main)
        if rest is not None or single:
            tail = when(lt(end, f.extent), Let(f.var, end, slow))
        else:
            rest_var = Var(f"{f.var.name}_rest")
            algebra.ranges[rest_var] = (0, algebra.interval(extent)[1])
            tail = For(rest_var, algebra.expr(left), Let(f.var, end + rest_var, slow))
        both = seq(main, tail)
        return both if known is not None else Let(limit, full, both)

    def _full(self, f: For, guards: tuple[TileGuard, ...]) -> tuple[Expr, bool]:
        """Return the number of full iterations, and whether at most one iteration after them does anything."""
        algebra = self.algebra
        full: Expr | None = None
        bounded = False
        bounds: list[tuple[int, int, Poly]] = []
        for g in guards:
            key = (g.tile, g.reach, g.rest)
            if key in bounds:
                continue
            bounds.append(key)
            dividend = plus(g.rest, constant(g.tile - g.reach))
            low = algebra.interval(dividend)[0]
            dividend_expr = algebra.expr(dividend)
            count = floordiv(
                dividend_expr if low is not None and low >= 0 else maximum(dividend_expr, 0), const(g.tile)
            )
            full = count if full is None else minimum(full, count)
            bounded = bounded or _covers(f.extent, g, algebra)
        assert full is not None
        if not bounded:
            full = minimum(full, f.extent)
        one_bound = len(bounds) == 1 and bounds[0][1] <= bounds[0][0]
        return full, one_bound and (bounded or not any(_unguarded(f.body, {g.cond for g in guards})))

    def _private(self, f: For) -> frozenset[Buffer]:
        """Return the local buffers whose values do not outlive an iteration: all accesses are below, and the first one writes."""
        written: set[Buffer] = set()
        carried: set[Buffer] = set()
        for b, _indices, is_store in accesses(f.body):
            if is_store:
                written.add(b)
            elif b not in written:
                carried.add(b)
        return frozenset(b for b in written - carried if b.scope == "local" and f.var in self.homes.get(b, frozenset()))

    def _clone(self, n: Stmt, private: frozenset[Buffer]) -> Stmt:
        """Return the statement with new private buffers, so that copies of a body have separate registers."""
        ordered = dict.fromkeys(b for b, _i, _w in accesses(n) if b in private)
        fresh = {b: replace(b) for b in ordered}
        for b, copy in fresh.items():
            self.homes[copy] = self.homes[b]
        return redirect(n, lambda b, i: (fresh[b], i) if b in fresh else None) if fresh else n

    def _tile_loops(
        self, f: For, guards: tuple[TileGuard, ...], conds: set[Expr], private: frozenset[Buffer]
    ) -> set[Var] | None:
        """Return the tile loops, and the loops that fill private buffers for them; None if the last tile cannot be cut.

        All conditions must agree on one bound, and each must have one tile loop of extent T. Every statement must be under the condition
        or store to memory private to the iteration.
        """
        g = guards[0]
        if any((x.tile, x.rest) != (g.tile, g.rest) or x.reach != g.tile for x in guards):
            return None
        if g.tile < 2 or any(len(x.inner) != 1 or x.inner[0][1:] != (1, g.tile) for x in guards):
            return None
        if any(s.buffer not in private for s in _unguarded(f.body, conds)):
            return None
        tiles = {x.inner[0][0] for x in guards}
        return tiles | _matching_tiles(f, tiles, g.tile, private)

    def _strips(self, f: For, guards: tuple[TileGuard, ...], conds: set[Expr]) -> Stmt | None:
        """Return the last tile of several vectors as a loop over single vectors, the last one masked; None if not applicable.

        A tile of constant width has no dead vectors, and items of a group share its barriers: both stay whole.
        """
        g, private, lanes, algebra = guards[0], self._private(f), self.lanes, self.algebra
        if g.tile % lanes or g.tile <= lanes or as_constant(g.rest) is not None or loops(f.body, *_THREADS):
            return None
        tiles = self._tile_loops(f, guards, conds, private)
        if tiles is None or any(m.kind != "vectorized" for m in loops(f.body) if m.var in tiles):
            return None
        left, strip, remaining = (Var(f"{f.var.name}_{name}") for name in ("left", "strip", "width"))
        algebra.ranges[left] = (0, g.tile - 1)
        algebra.ranges[strip] = (0, g.tile // lanes - 1)
        algebra.ranges[remaining] = (1, lanes)
        in_strip = {t: Var(t.name) for t in tiles}
        algebra.ranges |= dict.fromkeys(in_strip.values(), (0, lanes - 1))
        bounds = {x.cond: lt(in_strip[x.inner[0][0]], remaining) for x in guards}

        def narrower(m: Stmt) -> Stmt:
            return replace(m, var=in_strip[m.var], extent=const(lanes)) if isinstance(m, For) and m.var in tiles else m

        body = map_conjuncts(f.body, lambda c: bounds.get(c, c))
        body = substitute_stmt(body, {t: strip * lanes + v for t, v in in_strip.items()})
        body = self._clone(rewrite(body, narrower), private)
        amount = algebra.expr(plus(g.rest, {(f.var,): -g.tile}))
        each = Let(remaining, minimum(left - strip * lanes, lanes), body)
        every = For(strip, floordiv(left + (lanes - 1), const(lanes)), each)
        return Let(left, maximum(minimum(amount, g.tile - 1), 0), every)

    def _pieces(self, f: For, guards: tuple[TileGuard, ...], conds: set[Expr]) -> Stmt | None:
        """Return the last tile as pieces of T/2 .. 1 rows, or for `exact` as one of T-1 .. 1 rows; None if not applicable."""
        g, private = guards[0], self._private(f)
        tiles = self._tile_loops(f, guards, conds, private)
        if tiles is None:
            return None
        algebra = self.algebra
        left = Var(f"{f.var.name}_left")
        algebra.ranges[left] = (0, g.tile - 1)
        amount = algebra.expr(plus(g.rest, {(f.var,): -g.tile}))
        body = _drop(f.body, conds)
        parts: list[Stmt] = []
        if f.tail == "exact":
            for h in range(g.tile - 1, 0, -1):
                parts.append(when(eq(left, const(h)), self._clone(with_extent(body, tiles, h), private)))
            return Let(left, maximum(minimum(amount, g.tile - 1), 0), seq(*parts))
        # At most tile - 1 rows are left, so the largest piece is the highest power of two below the tile.
        h = 1 << (g.tile - 1).bit_length() - 1
        while h >= 1:
            shrunk = with_extent(body, tiles, h)
            # the pieces before this one cover the higher bits of the remainder, so it starts after them
            if 2 * h < g.tile:
                offset = Var(f"{f.var.name}_at{h}")
                algebra.ranges[offset] = (0, g.tile - 1)
                shifted = substitute_stmt(shrunk, {t: offset + t for t in tiles})
                start = floordiv(left, const(2 * h)) * (2 * h)
                piece: Stmt = Let(offset, start, self._clone(shifted, private))
            else:
                piece = self._clone(shrunk, private)
            parts.append(when(eq(floormod(floordiv(left, const(h)), const(2)), 1), piece))
            h //= 2
        return Let(left, maximum(minimum(amount, g.tile - 1), 0), seq(*parts))


def _covers(extent: Expr, g: TileGuard, algebra: Algebra) -> bool:
    """Return whether the loop's extent is known to be at least ceil(rest / tile), so that F needs no upper clamp."""
    target = plus(g.rest, constant(g.tile - 1))
    lo, _hi = algebra.interval(target)
    if extent.op == "floordiv" and as_int(extent.args[1]) == g.tile:
        return algebra.static(extent.args[0]) == target
    size, value = as_constant(algebra.static(extent)), as_constant(target)
    if size is not None and value is not None:
        return size == value // g.tile
    exact = algebra.static(floordiv(algebra.expr(target), const(g.tile)))
    return lo is not None and lo >= 0 and algebra.static(extent) == exact


def _drop(n: Stmt, conds: set[Expr]) -> Stmt:
    return map_conjuncts(n, lambda c: None if c in conds else c)


def _unguarded(n: Stmt, conds: set[Expr]) -> Iterator[BufferStore]:
    if isinstance(n, BufferStore):
        yield n
    elif isinstance(n, IfThenElse) and not conds.isdisjoint(conjuncts(n.cond)):
        if n.orelse is not None:
            yield from _unguarded(n.orelse, conds)
    else:
        for c in n.children:
            yield from _unguarded(c, conds)


def home_loops(n: Stmt) -> dict[Buffer, frozenset[Var]]:
    """Return for every buffer the variables of the loops around all of its accesses."""
    homes: dict[Buffer, frozenset[Var]] = {}

    def visit(m: Stmt, path: frozenset[Var]) -> None:
        for b, _indices, _written in own_accesses(m):
            homes[b] = homes[b] & path if b in homes else path
        inside = path.union(m.bound_vars)
        for c in m.children:
            visit(c, inside)

    visit(n, frozenset())
    return homes


def _matching_tiles(f: For, tiles: set[Var], extent: int, private: frozenset[Buffer]) -> set[Var]:
    """Return loops of the same extent that index a private buffer like a tile loop, such as initialisations without a bound."""
    places = {
        (b, d)
        for b, indices, _w in accesses(f.body)
        if b in private
        for d, i in enumerate(indices)
        if _mentions(i, tiles)
    }
    matching: set[Var] = set()
    for m in loops(f.body):
        if (
            m.var not in tiles
            and as_int(m.extent) == extent
            and all(
                any((s.buffer, d) in places and _mentions(i, {m.var}) for d, i in enumerate(s.indices))
                for s in stores(m.body)
            )
        ):
            matching.add(m.var)
    return matching


def _mentions(e: Expr, variables: set[Var]) -> bool:
    return not variables.isdisjoint(free_vars(e))
