"""Blocked summation of long f32 sums, which bounds their rounding errors.

One f32 accumulator stops growing at 2**24 ones. The relative error of a sum of n terms of one sign, added one after the other, is at
most n / 2**24; added in parts of SUM_PART terms, it is at most (SUM_PART + n / SUM_PART) / 2**24 (Higham, Accuracy and Stability of
Numerical Algorithms, 2002, section 4.2).

Tests: `tests/ir/codegen/lower/test_long_sums.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod

from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.codegen.lower.affine import Algebra
from relax_tune.ir.codegen.lower.lowered import note_ranges
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import (
    Expr,
    Var,
    add,
    and_,
    as_int,
    ceildiv,
    conjuncts,
    const,
    free_vars,
    load,
    loads,
    lt,
    maximum,
    minimum,
    mul,
    postorder,
    sub,
    substitute,
)
from relax_tune.ir.core.stmt import (
    BufferStore,
    For,
    IfThenElse,
    LoopMarks,
    Stmt,
    loops,
    own_accesses,
    seq,
    stores,
    substitute_stmt,
    when,
)

# The error bound of a sequential sum grows with the number of its terms; in parts, with the terms of a part plus the number of
# parts (Higham, The Accuracy of Floating Point Summation, SIAM J. Sci. Comput. 14, 1993).
LONG_SUM, SUM_PART = 1 << 14, 1 << 12
"""Most terms that are added in one accumulator, and terms of the parts of longer sums."""
LONG_TILE_SUM = 1 << 16
"""Most terms that are added in one tile of a work-item's registers, where a total takes registers that the tile needs."""
WIDEST, WIDE_ON_ITEM = 512, 16
"""Elements of the largest accumulator that gets a total, and of the smallest accumulator that counts as a tile of a work-item."""

Path = tuple[Stmt, ...]


def split_long_sums(s: Stmt, algebra: Algebra, on_items: bool = False) -> Stmt:
    """Limit the length of sequential f32 sums: a loop that may add more than LONG_SUM terms runs in parts.

    Before: `for k in range(n): y = y + x[k]`
    After: `if n > SUM_PART: total = 0; for b in range(ceildiv(n, SUM_PART)): for k in range(min(SUM_PART, n - b * SUM_PART)):
    y = y + x[b * SUM_PART + k]; if more: total = total + y; y = 0; if n > SUM_PART: y = y + total`
    A short sum costs three comparisons, or one if the loop is a single store, and its loop does not change. Loops with asynchronous
    copies are not split, nor are loops of unknown length over a tile of a work-item's registers or through shared memory.

    Args:
        on_items: Whether the kernel has work-items, which have few registers.
    """
    sums = _long_sums(s, algebra, on_items) if isinstance(s, For) and s.kind == "serial" and _plain(s) else ()
    inside = s.with_children(tuple([split_long_sums(c, algebra, on_items) for c in s.children])) if s.children else s
    if not sums:
        return inside
    assert isinstance(s, For) and isinstance(inside, For)
    blocked = _in_parts(inside, sums)
    note_ranges(algebra, blocked)
    return blocked


@dataclass(frozen=True, slots=True, eq=False)
class _LongSum:
    """A sum into `store.buffer`.

    Attributes:
        columns: Inner loops over the elements of the sum.
        conds: Conditions under which elements are updated.
        steps: Number of terms in one iteration of the outer loop.
    """

    store: BufferStore
    columns: tuple[For, ...]
    conds: tuple[Expr, ...]
    steps: Expr

    def nest(self, statement: Callable[[Buffer, tuple[Expr, ...]], Stmt]) -> Stmt:
        """Return loops over the elements of the sum around the statement for each element."""
        vars_ = {f.var: Var(f.var.name) for f in self.columns}
        indices = tuple(substitute(i, vars_) for i in self.store.indices)
        body = when(and_(*(substitute(c, vars_) for c in self.conds)), statement(self.store.buffer, indices))
        for f in reversed(self.columns):
            body = For(vars_[f.var], f.extent, body, f.kind)
        return body


def _in_parts(s: For, sums: Sequence[_LongSum]) -> Stmt:
    """Return the loop in parts, with a total for each sum."""
    total_of = {
        x.store.buffer: Buffer(f"{x.store.buffer.name}_total", x.store.buffer.shape, f32, "local") for x in sums
    }
    size = reduce(minimum, dict.fromkeys(_part(x.steps) for x in sums))

    def start(b: Buffer, at: tuple[Expr, ...]) -> Stmt:
        return BufferStore(total_of[b], at, const(0.0, f32))

    def flush(b: Buffer, at: tuple[Expr, ...]) -> Stmt:
        total = total_of[b]
        return seq(
            BufferStore(total, at, add(load(total, at), load(b, at))),
            BufferStore(b, at, const(0.0, f32)),
        )

    def finish(b: Buffer, at: tuple[Expr, ...]) -> Stmt:
        return BufferStore(b, at, add(load(b, at), load(total_of[b], at)))

    def each(statement: Callable[[Buffer, tuple[Expr, ...]], Stmt]) -> Stmt:
        return seq(*(x.nest(statement) for x in sums))

    part, k = Var(f"{s.var.name}_part"), Var(s.var.name)
    first = mul(part, size)
    terms = replace(
        s, var=k, extent=minimum(size, sub(s.extent, first)), body=substitute_stmt(s.body, {s.var: add(first, k)})
    )
    more, several = lt(add(first, size), s.extent), lt(size, s.extent)
    parts = For(part, ceildiv(s.extent, size), seq(terms, when(more, each(flush))))
    if isinstance(s.body, BufferStore):  # small enough to be printed twice
        return when(several, seq(each(start), parts, each(finish)), s)
    return seq(when(several, each(start)), parts, when(several, each(finish)))


def _part(steps: Expr) -> Expr:
    """Return the number of iterations of a part: the fewest that add at least SUM_PART terms."""
    return simplify(ceildiv(const(SUM_PART), maximum(steps, 1)))


def _long_sums(s: For, algebra: Algebra, on_items: bool) -> tuple[_LongSum, ...]:
    """Return the sums of a loop that may have more than LONG_SUM terms and can be split."""
    # Waits for asynchronous copies count iterations of this loop.
    if any(f.marks.async_copy for f in loops(s)):
        return ()
    sums_into: dict[Buffer, list[_LongSum] | None] = {}
    for path in _paths(s.body, ()):
        leaf = path[-1]
        for buffer, _indices, written in own_accesses(leaf):
            term = _term(leaf, buffer)
            if term is None or not isinstance(leaf, BufferStore):
                sums_into[buffer] = None
            elif written and sums_into.get(buffer, ()) is not None:
                new = _sum(s, path, leaf, algebra)
                sums_into[buffer] = None if new is None else [*(sums_into.get(buffer) or ()), new]
    covering = (_covering(sums, algebra) for sums in sums_into.values() if sums)
    return tuple(x for x in covering if x is not None and _may_be_long(s, x, algebra, on_items))


def _may_be_long(s: For, x: _LongSum, algebra: Algebra, on_items: bool) -> bool:
    """Return whether a sum of a loop may have more terms than one accumulator should add."""
    extent, steps = _most(s.extent, algebra), _most(x.steps, algebra)
    most = None if extent is None or steps is None else extent * steps
    if any(e.op == "floordiv" and as_int(e.args[1]) is None for e in postorder((s.extent,))):
        return False  # a loop over the partial sums of a Stream-K tile, at most one per worker
    # A tile of a GPU has few free registers. A total takes as many again as the sums, and would spill.
    staged = any(p.buffer.scope == "shared" for p in stores(s))
    if on_items and (staged or prod(as_int(f.extent) or 0 for f in x.columns) > WIDE_ON_ITEM):
        return most is not None and most > LONG_TILE_SUM
    return most is None or most > LONG_SUM


def _paths(s: Stmt, around: Path) -> Iterator[Path]:
    """Yield every statement with the statements around it, outermost first."""
    here = (*around, s)
    yield here
    for c in s.children:
        yield from _paths(c, here)


def _term(s: Stmt, buffer: Buffer) -> Expr | None:
    """Return the term that a statement adds to an element of an f32 buffer; None if it is no sum, or reads the buffer otherwise."""
    if not isinstance(s, BufferStore) or s.buffer is not buffer or buffer.dtype is not f32 or s.value.op != "add":
        return None
    old = load(buffer, s.indices)
    a, b = s.value.args
    term = b if a is old else a
    if old not in (a, b) or buffer.scope not in ("local", "global"):
        return None
    return None if any(x.buffer is buffer for e in (term, *s.indices) for x in loads(e)) else term


def _sum(s: For, path: Path, store: BufferStore, algebra: Algebra) -> _LongSum | None:
    """Return the sum that a store inside a loop computes; None if separate loops cannot visit its elements."""
    places = set(free_vars(*store.indices))
    nest = [f for f in path if isinstance(f, For)]
    columns = tuple(f for f in nest if f.var in places)
    others = [f for f in nest if f.var not in places]
    inner = {v for f in path for v in f.bound_vars}
    steps = inner - {f.var for f in columns}
    if s.var in places or steps & places or any(f.kind in ("parallel", "group", "item") or not _plain(f) for f in nest):
        return None
    conds = [c for f in path if isinstance(f, IfThenElse) for c in conjuncts(f.cond)]
    # conditions on the steps or on data select terms; the others select elements, and hold for the total as well
    mixed = [c for c in conds if (steps | {s.var}) & set(free_vars(c)) or loads(c)]
    if any(isinstance(f, IfThenElse) and f.orelse is not None for f in path):
        return None
    # the loops over the elements would otherwise access elements of a parameter that the sum does not, perhaps out of bounds
    if store.buffer.scope == "global" and any(places & set(free_vars(c)) for c in mixed):
        return None
    count: Expr = const(1)
    for f in others:
        most = _most(f.extent, algebra)
        count = mul(count, const(most) if most is not None else f.extent)
    # the number of terms varies between iterations: assume that each has a full part
    if set(free_vars(count)) & (inner | {s.var}):
        count = const(SUM_PART)
    return _LongSum(store, columns, tuple(c for c in conds if c not in mixed), count)


def _covering(sums: Sequence[_LongSum], algebra: Algebra) -> _LongSum | None:
    """Return one sum that covers the elements of all sums into one buffer; None if there is none, or it has too many elements."""
    first = max(sums, key=lambda x: prod(as_int(f.extent) or 0 for f in x.columns))
    extents = [as_int(f.extent) for f in first.columns]
    if None in extents or prod(e or 0 for e in extents) > WIDEST:
        return None
    steps = first.steps
    for x in sums:
        if x is first:
            continue
        if len(x.columns) != len(first.columns):
            return None
        same = {f.var: g.var for f, g in zip(x.columns, first.columns)}
        tops = [_most(f.extent, algebra) for f in x.columns]
        if tuple(substitute(i, same) for i in x.store.indices) != first.store.indices:
            return None
        if any(top is None or top > (e or 0) for top, e in zip(tops, extents)):
            return None
        steps = add(steps, x.steps)
    shared = [c for c in first.conds if all(x is first or c in x.conds for x in sums)]
    return replace(first, conds=tuple(shared) if first.store.buffer.scope == "local" else first.conds, steps=steps)


def _most(extent: Expr, algebra: Algebra) -> int | None:
    """Return an upper bound of an extent; None if it is unbounded."""
    known = as_int(extent)
    return known if known is not None else algebra.interval(algebra.static(extent))[1]


def _plain(f: For) -> bool:
    """Return whether a loop has no marks except prefetching and nontemporal stores."""
    return replace(f.marks, prefetch_distance=0, nontemporal=False) == LoopMarks()
