"""Barriers between the work-items of a group: wherever one may depend on another, and only where all of them come by.

Items depend on each other through shared memory, unless its places tell them apart, and through global memory that one loop over
items writes and another one touches (inside of one loop over items each has elements of its own: that is what binding a loop
checks). A barrier stands before the outermost statement that needs it. A condition that holds for some of the items moves inwards,
to what lies between the barriers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.lower.affine import Algebra, Poly
from relax_tune.ir.codegen.lower.async_copies import Ring, in_turn, rings_of, settle
from relax_tune.ir.codegen.print.intrinsic_calls import require_shared
from relax_tune.ir.core.buffer import Buffer, Scope
from relax_tune.ir.core.expr import Expr, Var, and_, as_int, const, loads, lt, not_
from relax_tune.ir.core.stmt import (
    EMPTY,
    Barrier,
    For,
    If,
    Let,
    Seq,
    Stmt,
    Store,
    accesses,
    is_empty,
    own_accesses,
    rewrite,
    seq,
    walk,
    when,
)
from relax_tune.ir.hardware.intrinsics import INTRINSICS


def synchronise(n: Stmt, algebra: Algebra) -> Stmt:
    """Put barriers into a kernel whose group and item loops are the indices of its launch.

    Raises:
        BuildError: a barrier is needed inside a loop that runs more often for some items than for others, or below a condition
            that holds for some of them and reads memory.
    """
    sizes: dict[int, int] = {}
    for m in walk(n):
        if isinstance(m, For) and m.kind == "item":
            sizes[m.axis] = max(sizes.get(m.axis, 1), _size(m, algebra))
    axes = frozenset(a for a, size in sizes.items() if size > 1)
    if not axes:
        return settle(n, {}, algebra)
    for axis in sorted(axes):
        n = _alone(n, next(m for m in walk(n) if isinstance(m, For) and (m.kind, m.axis) == ("item", axis)))
    placer = _Placer(axes, algebra)
    placed, _ = placer.place(n, NOTHING_YET, Within())
    placed = _even(settle(placed, placer.rings, algebra), sizes, algebra)
    return whole_warps(_Inwards(placed, algebra).move(placed, ()), algebra)


def _size(m: For, algebra: Algebra) -> int:
    return as_int(algebra.expr(algebra.static(m.extent))) or 0


def _alone(n: Stmt, item: For) -> Stmt:
    """What no loop over the item's axis is around is done by its first item, but for what each keeps to itself."""
    if _is_alone(n, item):
        return For(item.var, const(1), n, "item", item.axis)
    if isinstance(n, For) and (n.kind, n.axis) == ("item", item.axis):
        return n
    if isinstance(n, Seq):
        runs = groupby(n.stmts, lambda c: _is_alone(c, item))
        return seq(*(_alone(c, item) for one, run in runs for c in ((seq(*run),) if one else run)))
    return n.with_children(tuple(_alone(c, item) for c in n.children))


def _is_alone(n: Stmt, item: For) -> bool:
    below = list(walk(n))
    if any(isinstance(m, For) and (m.kind == "group" or (m.kind, m.axis) == ("item", item.axis)) for m in below):
        return False
    return {m.buffer.scope == "local" for m in below if isinstance(m, Store)} == {False}


def _even(n: Stmt, sizes: dict[int, int], algebra: Algebra) -> Stmt:
    """Item loops over one axis of one extent, which items beyond their own skip the body of."""

    def visit(m: Stmt) -> Stmt:
        if not isinstance(m, For) or m.kind != "item" or _size(m, algebra) == sizes[m.axis]:
            return m
        return replace(m, extent=const(sizes[m.axis]), body=when(lt(m.var, m.extent), m.body))

    return rewrite(n, visit)


@dataclass(frozen=True, slots=True)
class Uses:
    """Buffers that items share, read and written since the last barrier."""

    read: frozenset[Buffer]
    written: frozenset[Buffer]

    def __or__(self, other: Uses) -> Uses:
        return Uses(self.read | other.read, self.written | other.written)

    def without(self, scopes: Iterable[Scope]) -> Uses:
        gone = frozenset(scopes)
        kept = (frozenset(b for b in found if b.scope not in gone) for found in (self.read, self.written))
        return Uses(*kept)


NOTHING_YET = Uses(frozenset(), frozenset())


@dataclass(frozen=True, slots=True)
class Within:
    """The axes that loops over items around a place are of, those that only one item of passes there, the shared buffers of which
    each item below has elements of its own, the axes of which the first item alone touches one of these, and the buffers that
    the loop around goes round, where items meet once in an iteration."""

    spread: frozenset[int] = frozenset()
    alone: frozenset[int] = frozenset()
    own: frozenset[Buffer] = frozenset()
    single: frozenset[tuple[Buffer, int]] = frozenset()
    rings: frozenset[Buffer] = frozenset()


class _Placer:
    """axes: those that more than one item is on."""

    def __init__(self, axes: frozenset[int], algebra: Algebra) -> None:
        self.axes = axes
        self.algebra = algebra
        self.rings: dict[Buffer, Ring] = {}
        self._uses: dict[int, tuple[Stmt, Uses]] = {}

    def uses(self, n: Stmt) -> Uses:
        """Everything that is touched below a node."""
        found = self._uses.get(id(n))
        if found is None:
            read, written = set[Buffer](), set[Buffer]()
            for b, _indices, is_store in accesses(n):
                if b.scope != "local":
                    (written if is_store else read).add(b)
            found = self._uses[id(n)] = n, Uses(frozenset(read), frozenset(written))
        return found[1]

    def place(self, n: Stmt, before: Uses, bound: Within) -> tuple[Stmt, Uses]:
        """The node after what was touched before it, and what has been touched since the last barrier after it."""
        now = self.uses(n)
        apart = (before.written & (now.read | now.written)) | (before.read & now.written)
        scopes = self._scopes(apart, bound)
        rings = rings_of(n, self.algebra) if isinstance(n, For) else {}
        if isinstance(n, For) and rings:
            return self._round(n, rings, scopes, before, bound)
        if not scopes:
            return self._inside(n, before, bound)
        new, after = self._inside(n, before.without(scopes), bound)
        return seq(Barrier(scopes), new), after

    def _scopes(self, apart: Iterable[Buffer], bound: Within) -> frozenset[Scope]:
        if self.axes <= bound.alone:
            return frozenset()
        return frozenset(b.scope for b in apart if b not in bound.rings and not self._is_kept(b, bound))

    def _is_kept(self, b: Buffer, bound: Within) -> bool:
        """Whether only the item that touches an element before touches it after."""
        met = self.axes - bound.spread - bound.alone
        return not met if b.scope == "global" else b in bound.own and all((b, a) in bound.single for a in met)

    def _inside(self, n: Stmt, before: Uses, bound: Within) -> tuple[Stmt, Uses]:
        if isinstance(n, Store):
            return n, before | self.uses(n)
        if isinstance(n, Seq):
            parts: list[Stmt] = []
            for c in n.stmts:
                new, before = self.place(c, before, bound)
                parts.append(new)
            return seq(*parts), before
        if isinstance(n, If):
            made = [self.place(c, before, bound) for c in n.children]
            after = made[0][1] | (made[1][1] if len(made) > 1 else before)
            return n.with_children(tuple(new for new, _ in made)), after
        if isinstance(n, For) and n.kind not in ("group", "item"):
            return self._repeated(n, before, bound)
        if isinstance(n, For) and n.kind == "item":
            if _size(n, self.algebra) == 1:
                bound = replace(bound, alone=bound.alone | {n.axis})
            else:
                own = _of_items(n, self.algebra)
                own = own & bound.own if bound.spread else own
                bound = Within(bound.spread | {n.axis}, bound.alone, own, self._single(n, own), bound.rings)
        (body,) = n.children
        new, after = self.place(body, before, bound)
        return n.with_children((new,)), after

    def _single(self, n: For, own: frozenset[Buffer]) -> frozenset[tuple[Buffer, int]]:
        """The buffers that below a loop one item along an axis touches, with these axes."""
        found = {b: set(self.axes) for b in own}

        def visit(m: Stmt, alone: frozenset[int]) -> None:
            if isinstance(m, For) and m.kind == "item" and _size(m, self.algebra) == 1:
                alone |= {m.axis}
            for b, _indices, _written in own_accesses(m):
                if b in found:
                    found[b] &= alone
            for c in m.children:
                visit(c, alone)

        visit(n.body, frozenset())
        return frozenset((b, a) for b, axes in found.items() for a in axes)

    def _round(
        self, n: For, rings: Mapping[Buffer, Ring], scopes: frozenset[Scope], before: Uses, bound: Within
    ) -> tuple[Stmt, Uses]:
        """A loop that goes round: items meet at the start of each iteration, also for what was before it."""
        self.rings |= rings
        body, after = self.place(n.body, NOTHING_YET, replace(bound, rings=bound.rings | rings.keys()))
        now = self.uses(n.body)
        scopes |= self._scopes((after.written & now.read) | (after.read & now.written), bound)
        made = in_turn(replace(n, body=body), rings, scopes, self.algebra)
        return made, before | after

    def _repeated(self, n: For, before: Uses, bound: Within) -> tuple[Stmt, Uses]:
        """A loop whose iterations follow each other. Different items that write one element in two of them, without a look at it in
        between, write the same: a block stores what its iterators say."""
        body, after = self.place(n.body, NOTHING_YET, bound)
        now = self.uses(n.body)
        scopes = self._scopes((after.written & now.read) | (after.read & now.written), bound)
        if scopes:
            body = seq(Barrier(scopes), body)
        return replace(n, body=body), before | after


def _of_items(n: For, algebra: Algebra) -> frozenset[Buffer]:
    """The shared buffers whose places below a loop over items tell which item it is: along some dimension all accesses step alike with
    it, by more than loops inside move them."""
    inner = {m.var for m in walk(n.body) if isinstance(m, (For, Let))}
    steps: dict[Buffer, list[set[tuple[int, tuple[tuple[object, int], ...]] | None]]] = {}
    # what a warp does together, each of its items does with the elements of all
    together = {b for m in walk(n) if isinstance(m, For) and m.marks.intrinsic for b, _i, _w in accesses(m)}
    for b, indices, _written in accesses(n):
        if b.scope == "shared" and b not in together:
            found = steps.setdefault(b, [set() for _ in indices])
            for d, e in enumerate(indices):
                found[d].add(_step(algebra.static(e), n.var, inner, algebra))
    return frozenset(b for b, dims in steps.items() if any(len(d) == 1 and None not in d for d in dims))


def _step(p: Poly, item: Var, inner: set[Var], algebra: Algebra) -> tuple[int, tuple[tuple[object, int], ...]] | None:
    """What an item moves an index by, and what is fixed of it; None where the index does not tell the item."""
    step = p.get((item,), 0)
    rest = {m: c for m, c in p.items() if m != (item,)}
    if not step or algebra.depends(rest, (item,)):
        return None
    moving = {m: c for m, c in rest.items() if algebra.depends({m: c}, tuple(inner))}
    low, high = algebra.bounds(moving)
    if low is None or high is None or high - low >= abs(step):
        return None
    fixed = {m: c for m, c in rest.items() if m not in moving}
    return step, tuple(sorted(((repr(m), c) for m, c in fixed.items())))


def whole_warps(n: Stmt, algebra: Algebra) -> Stmt:
    """Without the marks of operations that a whole warp does at once where some of its items may not come by: each then does its part
    of the loops."""
    if not any(isinstance(m, For) and m.marks.intrinsic for m in walk(n)):
        return n
    differing = {m.var for m in walk(n) if isinstance(m, For) and m.kind == "item"}

    def differs(e: Expr) -> bool:
        return not differing.isdisjoint(algebra.free(e)) or any(x.buffer.scope == "local" for x in loads(e))

    def visit(m: Stmt, apart: bool) -> Stmt:
        if isinstance(m, Let) and differs(m.value):
            differing.add(m.var)
        apart = apart or (isinstance(m, If) and differs(m.cond)) or (isinstance(m, For) and differs(m.extent))
        new = m.with_children(tuple(visit(c, apart) for c in m.children))
        marked = isinstance(new, For) and new.marks.intrinsic in INTRINSICS and INTRINSICS[new.marks.intrinsic].of_warp
        if apart and marked and isinstance(new, For):
            require_shared(new)
            return new.marked(intrinsic="")
        return new

    return visit(n, False)


def _meets(n: Stmt) -> bool:
    """Whether items wait for each other here: at a barrier, or to exchange registers."""
    return isinstance(n, Barrier) or (isinstance(n, For) and n.marks.warp_reduce != "")


class _Inwards:
    """Moves conditions that differ between items below the places inside of them where items meet."""

    def __init__(self, n: Stmt, algebra: Algebra) -> None:
        self.algebra = algebra
        self.differing: set[Var] = set()
        self.waiting: dict[int, bool] = {}
        for m in walk(n):
            own = isinstance(m, For) and (m.kind == "item" or self.differs(m.extent))
            if own or (isinstance(m, Let) and self.differs(m.value)):
                assert isinstance(m, (For, Let))
                self.differing.add(m.var)

    def differs(self, e: Expr) -> bool:
        """Whether items of one group may find different values."""
        return not self.differing.isdisjoint(self.algebra.free(e)) or any(x.buffer.scope == "local" for x in loads(e))

    def waits(self, n: Stmt) -> bool:
        """Whether items meet at or below a node of the tree."""
        found = self.waiting.get(id(n))
        if found is None:
            found = self.waiting[id(n)] = _meets(n) or any([self.waits(c) for c in n.children])
        return found

    def move(self, n: Stmt, held: tuple[Expr, ...]) -> Stmt:
        """The node where all conditions of `held` hold, and its barriers everywhere."""
        if _meets(n):
            return n
        if not self.waits(n):
            return when(and_(*held), n)
        if isinstance(n, Seq):
            parts: list[Stmt] = []
            quiet: list[Stmt] = []
            for c in (*n.stmts, None):
                if c is not None and not self.waits(c):
                    quiet.append(c)
                    continue
                if quiet:
                    parts.append(when(and_(*held), seq(*quiet)))
                    quiet = []
                if c is not None:
                    parts.append(self.move(c, held))
            return seq(*parts)
        if isinstance(n, If):
            if not self.differs(n.cond):
                self._everywhere(n.cond, held)
                return when(n.cond, *(self.move(c, held) for c in n.children))
            self._everywhere(n.cond, (n.cond,))
            orelse = EMPTY if n.orelse is None else self.move(n.orelse, (*held, not_(n.cond)))
            then = self.move(n.then, (*held, n.cond))
            return then if is_empty(orelse) else seq(then, orelse)
        if isinstance(n, For):
            if self.differs(n.extent):
                raise BuildError(
                    f"wanted barriers that every work-item of a group comes by, found one in the loop over {n.var.name}, which has "
                    f"{n.extent!r} iterations, not the same number for each; run it to the largest number, under a condition"
                )
            self._everywhere(n.extent, held)
        if isinstance(n, Let):
            self._everywhere(n.value, held)
        (body,) = n.children
        return n.with_children((self.move(body, held),))

    def _everywhere(self, e: Expr, held: tuple[Expr, ...]) -> None:
        """Refuse what items evaluate before they know whether they may."""
        if held and any(True for _ in loads(e)):
            raise BuildError(
                f"wanted barriers that every work-item of a group comes by, found one below a condition that some of them meet, with "
                f"{e!r} between; compute what reads memory before the condition"
            )
