"""Insert barriers between the work-items of a group where one may depend on another.

Work-items depend on each other through shared memory, unless its indices identify the work-item. They depend on each
other through global memory if one loop over items writes it and another one touches it. Inside one loop over items each
has elements of its own: binding the loop checked that. A barrier stands before the outermost statement that needs it. A
condition that only some items meet sinks into the statements between the barriers, so that all items reach every
barrier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.lower.affine import Algebra, Poly
from relax_tune.ir.codegen.lower.async_copies import CircularBuffer, circular_buffers, insert_waits, pipelined_loop
from relax_tune.ir.codegen.print.intrinsic_calls import require_shared
from relax_tune.ir.core.buffer import Buffer, Scope
from relax_tune.ir.core.expr import Expr, Var, and_, as_int, const, loads, lt, not_
from relax_tune.ir.core.stmt import (
    EMPTY,
    Barrier,
    For,
    IfThenElse,
    Let,
    Seq,
    Stmt,
    accesses,
    bound_vars,
    is_empty,
    loops,
    own_accesses,
    rewrite,
    seq,
    stores,
    walk,
    when,
)
from relax_tune.ir.hardware.intrinsics import INTRINSICS


def insert_barriers(n: Stmt, algebra: Algebra) -> Stmt:
    """Insert barriers into a kernel whose group and item loops are the indices of its launch.

    Raises:
        BuildError: a barrier is needed inside a loop with different trip counts among the work-items, or below a condition
            that holds for some of them and reads memory.
    """
    sizes: dict[int, int] = {}
    for f in loops(n, "item"):
        sizes[f.axis] = max(sizes.get(f.axis, 1), _size(f, algebra))
    axes = frozenset(a for a, size in sizes.items() if size > 1)
    if not axes:
        return insert_waits(n, {}, algebra)
    for axis in sorted(axes):
        n = _guard_single_thread(n, next(f for f in loops(n, "item") if f.axis == axis))
    placer = _BarrierPlacement(axes, algebra)
    placed, _ = placer.place(n, NO_ACCESSES, ThreadContext())
    placed = _pad_thread_loops(insert_waits(placed, placer.circular, algebra), sizes, algebra)
    return drop_divergent_intrinsics(_SinkConditions(placed, algebra).move(placed, ()), algebra)


def _size(m: For, algebra: Algebra) -> int:
    return as_int(algebra.expr(algebra.static(m.extent))) or 0


def _guard_single_thread(n: Stmt, item: For) -> Stmt:
    """Let only the first work-item run statements outside of every loop over the item's axis.

    Stores to local memory stay with all items.
    """
    if _needs_guard(n, item):
        return For(item.var, const(1), n, "item", item.axis)
    if isinstance(n, For) and (n.kind, n.axis) == ("item", item.axis):
        return n
    if isinstance(n, Seq):
        runs = groupby(n.stmts, lambda c: _needs_guard(c, item))
        return seq(*(_guard_single_thread(c, item) for one, run in runs for c in ((seq(*run),) if one else run)))
    return n.with_children(tuple(_guard_single_thread(c, item) for c in n.children))


def _needs_guard(n: Stmt, item: For) -> bool:
    if any(f.kind == "group" or f.axis == item.axis for f in loops(n, "group", "item")):
        return False
    return {s.buffer.scope == "local" for s in stores(n)} == {False}


def _pad_thread_loops(n: Stmt, sizes: dict[int, int], algebra: Algebra) -> Stmt:
    """Give all item loops over one axis the same extent. Work-items beyond a loop's own extent skip its body."""

    def visit(m: Stmt) -> Stmt:
        if not isinstance(m, For) or m.kind != "item" or _size(m, algebra) == sizes[m.axis]:
            return m
        return replace(m, extent=const(sizes[m.axis]), body=when(lt(m.var, m.extent), m.body))

    return rewrite(n, visit)


@dataclass(frozen=True, slots=True)
class SharedAccesses:
    """Buffers visible to several work-items that were read and written since the last barrier."""

    read: frozenset[Buffer]
    written: frozenset[Buffer]

    def __or__(self, other: SharedAccesses) -> SharedAccesses:
        return SharedAccesses(self.read | other.read, self.written | other.written)

    def without(self, scopes: Iterable[Scope]) -> SharedAccesses:
        gone = frozenset(scopes)
        kept = (frozenset(b for b in found if b.scope not in gone) for found in (self.read, self.written))
        return SharedAccesses(*kept)


NO_ACCESSES = SharedAccesses(frozenset(), frozenset())


@dataclass(frozen=True, slots=True)
class ThreadContext:
    """Facts about the threads that reach a statement.

    spread: axes with an enclosing thread loop of several iterations.
    first_only: axes on which only thread 0 reaches the statement.
    own: shared buffers partitioned among the threads of the enclosing loop.
    single: (buffer, axis) for each buffer of `own` that only thread 0 of the axis touches.
    circular: circular buffers of the enclosing pipelined loop, synchronised once an iteration.
    """

    spread: frozenset[int] = frozenset()
    first_only: frozenset[int] = frozenset()
    own: frozenset[Buffer] = frozenset()
    single: frozenset[tuple[Buffer, int]] = frozenset()
    circular: frozenset[Buffer] = frozenset()


class _BarrierPlacement:
    """Placement of barriers in one kernel. axes: axes with more than one work-item."""

    def __init__(self, axes: frozenset[int], algebra: Algebra) -> None:
        self.axes = axes
        self.algebra = algebra
        self.circular: dict[Buffer, CircularBuffer] = {}
        self._uses: dict[int, tuple[Stmt, SharedAccesses]] = {}

    def uses(self, n: Stmt) -> SharedAccesses:
        """Return all accesses below a statement."""
        found = self._uses.get(id(n))
        if found is None:
            read, written = set[Buffer](), set[Buffer]()
            for b, _indices, is_store in accesses(n):
                if b.scope != "local":
                    (written if is_store else read).add(b)
            found = self._uses[id(n)] = n, SharedAccesses(frozenset(read), frozenset(written))
        return found[1]

    def place(self, n: Stmt, before: SharedAccesses, bound: ThreadContext) -> tuple[Stmt, SharedAccesses]:
        """Return the statement with barriers, and the accesses since the last barrier after it."""
        now = self.uses(n)
        apart = (before.written & (now.read | now.written)) | (before.read & now.written)
        scopes = self._scopes(apart, bound)
        if isinstance(n, For) and (circular := circular_buffers(n, self.algebra)):
            return self._pipelined(n, circular, scopes, before, bound)
        if not scopes:
            return self._inside(n, before, bound)
        new, after = self._inside(n, before.without(scopes), bound)
        return seq(Barrier(scopes), new), after

    def _scopes(self, apart: Iterable[Buffer], bound: ThreadContext) -> frozenset[Scope]:
        if self.axes <= bound.first_only:
            return frozenset()
        return frozenset(b.scope for b in apart if b not in bound.circular and not self._is_kept(b, bound))

    def _is_kept(self, b: Buffer, bound: ThreadContext) -> bool:
        """Return whether the same work-item touches an element before and after."""
        met = self.axes - bound.spread - bound.first_only
        return not met if b.scope == "global" else b in bound.own and all((b, a) in bound.single for a in met)

    def _inside(self, n: Stmt, before: SharedAccesses, bound: ThreadContext) -> tuple[Stmt, SharedAccesses]:
        if not n.children:
            return n, before | self.uses(n)
        if isinstance(n, Seq):
            parts: list[Stmt] = []
            for c in n.stmts:
                new, before = self.place(c, before, bound)
                parts.append(new)
            return seq(*parts), before
        if isinstance(n, IfThenElse):
            made = [self.place(c, before, bound) for c in n.children]
            after = made[0][1] | (made[1][1] if len(made) > 1 else before)
            return n.with_children(tuple(new for new, _ in made)), after
        if isinstance(n, For):
            if n.kind not in ("group", "item"):
                return self._repeated(n, before, bound)
            bound = self._of_item(n, bound) if n.kind == "item" else bound
        (body,) = n.children
        new, after = self.place(body, before, bound)
        return n.with_children((new,)), after

    def _of_item(self, n: For, bound: ThreadContext) -> ThreadContext:
        """Return the facts about threads inside a loop over work-items."""
        if _size(n, self.algebra) == 1:
            return replace(bound, first_only=bound.first_only | {n.axis})
        own = _thread_private(n, self.algebra)
        own = own & bound.own if bound.spread else own
        return ThreadContext(bound.spread | {n.axis}, bound.first_only, own, self._single(n, own), bound.circular)

    def _single(self, n: For, own: frozenset[Buffer]) -> frozenset[tuple[Buffer, int]]:
        """Return (buffer, axis) for each buffer that a single work-item of the axis touches below a loop."""
        found = {b: set(self.axes) for b in own}

        def visit(m: Stmt, first_only: frozenset[int]) -> None:
            if isinstance(m, For) and m.kind == "item" and _size(m, self.algebra) == 1:
                first_only |= {m.axis}
            for b, _indices, _written in own_accesses(m):
                if b in found:
                    found[b] &= first_only
            for c in m.children:
                visit(c, first_only)

        visit(n.body, frozenset())
        return frozenset((b, a) for b, axes in found.items() for a in axes)

    def _pipelined(
        self,
        n: For,
        circular: Mapping[Buffer, CircularBuffer],
        scopes: frozenset[Scope],
        before: SharedAccesses,
        bound: ThreadContext,
    ) -> tuple[Stmt, SharedAccesses]:
        """Place barriers in a pipelined loop.

        Items meet at the start of each iteration, also for accesses before the loop.
        """
        self.circular |= circular
        body, after = self.place(n.body, NO_ACCESSES, replace(bound, circular=bound.circular | circular.keys()))
        now = self.uses(n.body)
        scopes |= self._scopes((after.written & now.read) | (after.read & now.written), bound)
        made = pipelined_loop(replace(n, body=body), circular, scopes, self.algebra)
        return made, before | after

    def _repeated(self, n: For, before: SharedAccesses, bound: ThreadContext) -> tuple[Stmt, SharedAccesses]:
        """Place barriers in a serial loop between conflicting iterations.

        Two items that write one element in two iterations, without a read between, write the same value: a block's store
        depends only on its iterators.
        """
        body, after = self.place(n.body, NO_ACCESSES, bound)
        now = self.uses(n.body)
        scopes = self._scopes((after.written & now.read) | (after.read & now.written), bound)
        if scopes:
            body = seq(Barrier(scopes), body)
        return replace(n, body=body), before | after


def _thread_private(n: For, algebra: Algebra) -> frozenset[Buffer]:
    """Return the shared buffers whose indices below a loop over items identify the item.

    Along some dimension all accesses have the same stride in the item's variable, larger than the span of the inner loops.
    """
    inner = bound_vars(n.body)
    steps: dict[Buffer, list[set[tuple[int, tuple[tuple[object, int], ...]] | None]]] = {}
    # in a warp operation each work-item touches the elements of all
    together = {b for f in loops(n) if f.marks.intrinsic for b, _i, _w in accesses(f)}
    for b, indices, _written in accesses(n):
        if b.scope == "shared" and b not in together:
            found = steps.setdefault(b, [set() for _ in indices])
            for d, e in enumerate(indices):
                found[d].add(_step(algebra.static(e), n.var, inner, algebra))
    return frozenset(b for b, dims in steps.items() if any(len(d) == 1 and None not in d for d in dims))


def _step(
    p: Poly, item: Var, inner: Collection[Var], algebra: Algebra
) -> tuple[int, tuple[tuple[object, int], ...]] | None:
    """Return the stride of an item in an index, and the fixed part of the index; None if the index does not identify the item."""
    step = p.get((item,), 0)
    rest = {m: c for m, c in p.items() if m != (item,)}
    if not step or algebra.depends(rest, (item,)):
        return None
    moving = {m: c for m, c in rest.items() if algebra.depends({m: c}, tuple(inner))}
    low, high = algebra.interval(moving)
    if low is None or high is None or high - low >= abs(step):
        return None
    fixed = {m: c for m, c in rest.items() if m not in moving}
    return step, tuple(sorted(((repr(m), c) for m, c in fixed.items())))


def drop_divergent_intrinsics(n: Stmt, algebra: Algebra) -> Stmt:
    """Drop the marks of warp intrinsics in code that some work-items of a warp may skip. Each item then runs its part of the loops."""
    if not any(f.marks.intrinsic for f in loops(n)):
        return n
    divergence = _Divergence(algebra)

    def visit(m: Stmt, apart: bool) -> Stmt:
        divergence.note(m)
        apart = apart or (not isinstance(m, Let) and any(map(divergence.differs, m.own_exprs)))
        new = m.with_children(tuple(visit(c, apart) for c in m.children))
        intrinsic = INTRINSICS.get(new.marks.intrinsic) if isinstance(new, For) and apart else None
        if isinstance(new, For) and intrinsic is not None and intrinsic.of_warp:
            require_shared(new)
            return new.marked(intrinsic="")
        return new

    return visit(n, False)


def _synchronises(n: Stmt) -> bool:
    """Return whether work-items wait for each other at this node: at a barrier or a warp reduction."""
    return isinstance(n, Barrier) or (isinstance(n, For) and n.marks.warp_reduce != "")


class _Divergence:
    """The variables whose values may differ among the work-items of a group."""

    def __init__(self, algebra: Algebra) -> None:
        self.algebra = algebra
        self.variables: set[Var] = set()

    def note(self, m: Stmt) -> None:
        """Record the variable that a statement binds. Statements come outermost first."""
        if m.bound_vars and (any(map(self.differs, m.own_exprs)) or (isinstance(m, For) and m.kind == "item")):
            self.variables.update(m.bound_vars)

    def differs(self, e: Expr) -> bool:
        """Return whether work-items of one group may find different values."""
        return not self.variables.isdisjoint(self.algebra.free(e)) or any(x.buffer.scope == "local" for x in loads(e))


class _SinkConditions:
    """Moves conditions that differ among work-items below the barriers inside them."""

    def __init__(self, n: Stmt, algebra: Algebra) -> None:
        self.waiting: dict[int, bool] = {}
        divergence = _Divergence(algebra)
        for m in walk(n):
            divergence.note(m)
        self.differs = divergence.differs

    def waits(self, n: Stmt) -> bool:
        """Return whether work-items synchronise at or below a statement."""
        found = self.waiting.get(id(n))
        if found is None:
            found = self.waiting[id(n)] = _synchronises(n) or any([self.waits(c) for c in n.children])
        return found

    def move(self, n: Stmt, held: tuple[Expr, ...]) -> Stmt:
        """Move the conditions of `held` inward, so that the barriers of the statement are outside of them."""
        if _synchronises(n):
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
        if isinstance(n, IfThenElse):
            if not self.differs(n.cond):
                self._require_no_loads(n.cond, held)
                return when(n.cond, *(self.move(c, held) for c in n.children))
            self._require_no_loads(n.cond, (n.cond,))
            orelse = EMPTY if n.orelse is None else self.move(n.orelse, (*held, not_(n.cond)))
            then = self.move(n.then, (*held, n.cond))
            return then if is_empty(orelse) else seq(then, orelse)
        if isinstance(n, For) and self.differs(n.extent):
            raise BuildError(
                f"wanted barriers that every work-item of a group comes by, found one in the loop over {n.var.name}, which has "
                f"{n.extent!r} iterations, not the same number for each; run it to the largest number, under a condition"
            )
        for e in n.own_exprs:
            self._require_no_loads(e, held)
        return n.with_children(tuple(self.move(c, held) for c in n.children))

    def _require_no_loads(self, e: Expr, held: tuple[Expr, ...]) -> None:
        """Refuse an expression that work-items evaluate outside of its condition and that reads memory."""
        if held and any(True for _ in loads(e)):
            raise BuildError(
                f"wanted barriers that every work-item of a group comes by, found one below a condition that some of them meet, with "
                f"{e!r} between; compute what reads memory before the condition"
            )
