"""Insert barriers between the work-items of a group where one may depend on another.

Work-items depend on each other through shared memory, unless its indices identify the work-item. They depend on each other through
global memory if one loop over items writes it and another one accesses it. Inside one loop over items their elements are disjoint, which
was checked when the loop was bound. A barrier is placed before the outermost statement that needs it. A condition that holds for only
some items is moved into the statements between the barriers, so that all items reach every barrier.

Tests: `tests/ir/codegen/test_grid.py`, `tests/cuda_emulation/test_emulation.py`.
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
        BuildError: A barrier is needed inside a loop whose trip count differs among work-items, or below a condition that holds for
            some of them and reads memory.
    """
    sizes: dict[int, int] = {}
    for f in loops(n, "item"):
        sizes[f.axis] = max(sizes.get(f.axis, 1), _size(f, algebra))
    axes = frozenset(a for a, size in sizes.items() if size > 1)
    if not axes:
        return insert_waits(n, {}, algebra)
    # statements outside of a loop over an axis run once, not once per work-item
    # Before barriers are placed, since each of these statements then has a loop over items, as all others have.
    for axis in sorted(axes):
        n = _guard_single_thread(n, next(f for f in loops(n, "item") if f.axis == axis))
    placer = _BarrierPlacement(axes, algebra)
    placed, _ = placer.place(n, NO_ACCESSES, ThreadContext())
    # Conditions of padded loops come after the barriers, and are moved below them: a work-item that skips a barrier
    # would block the others for ever.
    placed = _pad_thread_loops(insert_waits(placed, placer.circular, algebra), sizes, algebra)
    return drop_divergent_intrinsics(_SinkConditions(placed, algebra).move(placed, ()), algebra)


def _size(m: For, algebra: Algebra) -> int:
    return as_int(algebra.expr(algebra.static(m.extent))) or 0


def _guard_single_thread(n: Stmt, item: For) -> Stmt:
    """Let only the first work-item execute statements outside of every loop over the item's axis.

    All items execute stores to local memory, which each has separately.
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
    # Each work-item has its own local buffers, so all of them must run statements that fill these.
    return {s.buffer.scope == "local" for s in stores(n)} == {False}


def _pad_thread_loops(n: Stmt, sizes: dict[int, int], algebra: Algebra) -> Stmt:
    """Give all item loops over one axis the same extent. Work-items beyond a loop's original extent skip its body."""

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
        """Return the accesses that barriers for these scopes do not order."""
        ordered = frozenset(scopes)
        others = (frozenset(b for b in buffers if b.scope not in ordered) for buffers in (self.read, self.written))
        return SharedAccesses(*others)


NO_ACCESSES = SharedAccesses(frozenset(), frozenset())


@dataclass(frozen=True, slots=True)
class ThreadContext:
    """Facts about the threads that reach a statement.

    Attributes:
        spread: Axes with an enclosing thread loop of several iterations.
        first_only: Axes on which only thread 0 reaches the statement.
        partitioned: Shared buffers partitioned among the threads of the enclosing loop.
        single: (buffer, axis) for each partitioned buffer that only thread 0 of the axis accesses.
        circular: Circular buffers of the enclosing pipelined loop, synchronised once per iteration.
    """

    spread: frozenset[int] = frozenset()
    first_only: frozenset[int] = frozenset()
    partitioned: frozenset[Buffer] = frozenset()
    single: frozenset[tuple[Buffer, int]] = frozenset()
    circular: frozenset[Buffer] = frozenset()


class _BarrierPlacement:
    """Placement of barriers in one kernel.

    Attributes:
        axes: Axes with more than one work-item.
    """

    def __init__(self, axes: frozenset[int], algebra: Algebra) -> None:
        self.axes = axes
        self.algebra = algebra
        self.circular: dict[Buffer, CircularBuffer] = {}
        self._uses: dict[Stmt, SharedAccesses] = {}

    def uses(self, n: Stmt) -> SharedAccesses:
        """Return all accesses below a statement."""
        uses = self._uses.get(n)
        if uses is None:
            read, written = set[Buffer](), set[Buffer]()
            for b, _indices, is_store in accesses(n):
                if b.scope != "local":
                    (written if is_store else read).add(b)
            uses = self._uses[n] = SharedAccesses(frozenset(read), frozenset(written))
        return uses

    def place(self, n: Stmt, before: SharedAccesses, bound: ThreadContext) -> tuple[Stmt, SharedAccesses]:
        """Return the statement with barriers, and the accesses since the last barrier after it."""
        uses = self.uses(n)
        # read after write, write after write, write after read
        conflicting = (before.written & (uses.read | uses.written)) | (before.read & uses.written)
        scopes = self._scopes(conflicting, bound)
        if isinstance(n, For) and (circular := circular_buffers(n, self.algebra)):
            return self._pipelined(n, circular, scopes, before, bound)
        if not scopes:
            return self._inside(n, before, bound)
        new, after = self._inside(n, before.without(scopes), bound)
        return seq(Barrier(scopes), new), after

    def _scopes(self, conflicting: Iterable[Buffer], bound: ThreadContext) -> frozenset[Scope]:
        """Return the scopes that need a barrier between conflicting accesses."""
        # A single work-item reaches the statement, and its accesses take effect in program order.
        if self.axes <= bound.first_only:
            return frozenset()
        return frozenset(
            b.scope for b in conflicting if b not in bound.circular and not self._is_thread_private(b, bound)
        )

    def _is_thread_private(self, b: Buffer, bound: ThreadContext) -> bool:
        """Return whether conflicting accesses to an element come from the same work-item."""
        unbound = self.axes - bound.spread - bound.first_only
        if b.scope == "global":
            return not unbound
        return b in bound.partitioned and all((b, a) in bound.single for a in unbound)

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
            branches = [self.place(c, before, bound) for c in n.children]
            # without an else branch, the accesses before the condition may be the last ones
            after = branches[0][1] | (branches[1][1] if len(branches) > 1 else before)
            return n.with_children(tuple(new for new, _ in branches)), after
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
        partitioned = _thread_private(n, self.algebra)
        # Of several nested item loops, each must partition the buffer.
        partitioned = partitioned & bound.partitioned if bound.spread else partitioned
        spread = bound.spread | {n.axis}
        return ThreadContext(spread, bound.first_only, partitioned, self._single(n, partitioned), bound.circular)

    def _single(self, n: For, buffers: frozenset[Buffer]) -> frozenset[tuple[Buffer, int]]:
        """Return (buffer, axis) for each buffer that a single work-item of the axis accesses below a loop."""
        axes_of = {b: set(self.axes) for b in buffers}

        def visit(m: Stmt, first_only: frozenset[int]) -> None:
            if isinstance(m, For) and m.kind == "item" and _size(m, self.algebra) == 1:
                first_only |= {m.axis}
            for b, _indices, _written in own_accesses(m):
                if b in axes_of:
                    axes_of[b] &= first_only
            for c in m.children:
                visit(c, first_only)

        visit(n.body, frozenset())
        return frozenset((b, a) for b, axes in axes_of.items() for a in axes)

    def _pipelined(
        self,
        n: For,
        circular: Mapping[Buffer, CircularBuffer],
        scopes: frozenset[Scope],
        before: SharedAccesses,
        bound: ThreadContext,
    ) -> tuple[Stmt, SharedAccesses]:
        """Place barriers in a pipelined loop.

        One barrier at the start of each iteration orders its accesses, and those before the loop.
        """
        self.circular |= circular
        body, after = self.place(n.body, NO_ACCESSES, replace(bound, circular=bound.circular | circular.keys()))
        uses = self.uses(n.body)
        scopes |= self._scopes((after.written & uses.read) | (after.read & uses.written), bound)
        return pipelined_loop(replace(n, body=body), circular, scopes, self.algebra), before | after

    def _repeated(self, n: For, before: SharedAccesses, bound: ThreadContext) -> tuple[Stmt, SharedAccesses]:
        """Place barriers in a serial loop between conflicting iterations.

        Writes in different iterations do not conflict: a block's store depends only on its iterators, so two items that write one
        element write the same value.
        """
        # The accesses before the loop are ordered by the barrier in front of it, if they conflict with anything in
        # the loop.
        body, after = self.place(n.body, NO_ACCESSES, bound)
        uses = self.uses(n.body)
        scopes = self._scopes((after.written & uses.read) | (after.read & uses.written), bound)
        if scopes:
            body = seq(Barrier(scopes), body)
        return replace(n, body=body), before | after


def _thread_private(n: For, algebra: Algebra) -> frozenset[Buffer]:
    """Return the shared buffers whose indices below a loop over items identify the item.

    Along some dimension all accesses have the same stride in the item's variable, larger than the span of the inner loops.
    """
    inner = bound_vars(n.body)
    steps: dict[Buffer, list[set[tuple[int, tuple[tuple[object, int], ...]] | None]]] = {}
    # in an operation of a warp, each work-item accesses elements of all others
    warp_accessed = {b for f in loops(n) if f.marks.intrinsic for b, _i, _w in accesses(f)}
    for b, indices, _written in accesses(n):
        if b.scope == "shared" and b not in warp_accessed:
            dims = steps.setdefault(b, [set() for _ in indices])
            for d, e in enumerate(indices):
                dims[d].add(_step(algebra.static(e), n.var, inner, algebra))
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
    # The moving part must be less than a step, or else two items reach the same element.
    if low is None or high is None or high - low >= abs(step):
        return None
    # Accesses with different fixed parts belong to different items at the same element.
    fixed = {m: c for m, c in rest.items() if m not in moving}
    return step, tuple(sorted(((repr(m), c) for m, c in fixed.items())))


def drop_divergent_intrinsics(n: Stmt, algebra: Algebra) -> Stmt:
    """Drop the marks of warp intrinsics in code that some work-items of a warp may skip; the loops are then printed as loops."""
    if not any(f.marks.intrinsic for f in loops(n)):
        return n
    divergence = _Divergence(algebra)

    def visit(m: Stmt, divergent: bool) -> Stmt:
        divergence.note(m)
        # A Let binds a value and skips nothing.
        divergent = divergent or (not isinstance(m, Let) and any(map(divergence.differs, m.own_exprs)))
        new = m.with_children(tuple(visit(c, divergent) for c in m.children))
        intrinsic = INTRINSICS.get(new.marks.intrinsic) if isinstance(new, For) and divergent else None
        # PTX ISA, `mma` and `ldmatrix`: behaviour is undefined unless all threads of the warp execute the same
        # instruction.
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
        """Record the variables that a statement binds. Outer statements must be noted before inner ones."""
        if m.bound_vars and (any(map(self.differs, m.own_exprs)) or (isinstance(m, For) and m.kind == "item")):
            self.variables.update(m.bound_vars)

    def differs(self, e: Expr) -> bool:
        """Return whether an expression may have different values in work-items of one group."""
        return not self.variables.isdisjoint(self.algebra.free(e)) or any(x.buffer.scope == "local" for x in loads(e))


class _SinkConditions:
    """Moves conditions that differ among work-items below the barriers inside them."""

    def __init__(self, n: Stmt, algebra: Algebra) -> None:
        self.waiting: dict[Stmt, bool] = {}
        divergence = _Divergence(algebra)
        for m in walk(n):
            divergence.note(m)
        self.differs = divergence.differs

    def waits(self, n: Stmt) -> bool:
        """Return whether work-items synchronise at or below a statement."""
        waits = self.waiting.get(n)
        if waits is None:
            waits = self.waiting[n] = _synchronises(n) or any([self.waits(c) for c in n.children])
        return waits

    def move(self, n: Stmt, conditions: tuple[Expr, ...]) -> Stmt:
        """Move conditions inward, so that the barriers of the statement are outside of them.

        Args:
            conditions: Conditions to put around the parts of `n` that contain no barrier.
        """
        if _synchronises(n):
            return n
        if not self.waits(n):
            return when(and_(*conditions), n)
        if isinstance(n, Seq):
            parts: list[Stmt] = []
            quiet: list[Stmt] = []
            # The final None flushes the statements that are collected so far.
            for c in (*n.stmts, None):
                if c is not None and not self.waits(c):
                    quiet.append(c)
                    continue
                if quiet:
                    parts.append(when(and_(*conditions), seq(*quiet)))
                    quiet = []
                if c is not None:
                    parts.append(self.move(c, conditions))
            return seq(*parts)
        if isinstance(n, IfThenElse):
            # A condition that is the same for all work-items may stay around a barrier.
            if not self.differs(n.cond):
                self._require_no_loads(n.cond, conditions)
                return when(n.cond, *(self.move(c, conditions) for c in n.children))
            self._require_no_loads(n.cond, (n.cond,))
            orelse = EMPTY if n.orelse is None else self.move(n.orelse, (*conditions, not_(n.cond)))
            then = self.move(n.then, (*conditions, n.cond))
            return then if is_empty(orelse) else seq(then, orelse)
        # Work-items would reach the barrier inside of the loop a different number of times.
        if isinstance(n, For) and self.differs(n.extent):
            raise BuildError(
                f"a barrier is in the loop over {n.var.name}, whose extent {n.extent!r} differs among the work-items of a group; run the "
                "loop to the largest extent, with its body under a condition, so that all items reach the barrier"
            )
        for e in n.own_exprs:
            self._require_no_loads(e, conditions)
        return n.with_children(tuple(self.move(c, conditions) for c in n.children))

    def _require_no_loads(self, e: Expr, conditions: tuple[Expr, ...]) -> None:
        """Refuse an expression that work-items evaluate outside of its condition and that reads memory."""
        if conditions and any(True for _ in loads(e)):
            raise BuildError(
                f"a barrier is below a condition that holds for some work-items of a group only, and {e!r}, which reads memory, is between "
                "them; compute it before the condition"
            )
