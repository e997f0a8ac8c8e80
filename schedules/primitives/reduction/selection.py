"""The primitive for the places of the largest elements: quadratic_select."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, bool_, f32, f64, i32, i64, u32, u64
from relax_tune.ir.core.expr import (
    Expr,
    ExprLike,
    Var,
    add,
    and_,
    bitcast,
    cast,
    ceildiv,
    const,
    eq,
    load,
    loads,
    lt,
    maximum,
    minimum,
    mul,
    ne,
    or_,
    select,
    sub,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterKind, IterVar, Stmt, seq, statements
from relax_tune.ir.deduce.rankings import pick, ranking, same_rows
from relax_tune.schedules.independence import overwritten_later, writers
from relax_tune.schedules.loop_tree import (
    find_block,
    fresh,
    readers,
    require_compute_block,
    trivial_loops,
    with_body,
)
from relax_tune.schedules.primitives.arguments import positive
from relax_tune.schedules.primitives.loops.loops import require_serial

KEYS: Mapping[int, DType] = {1: i32, 2: i32, 4: i32, 8: i64}
"""The type of a key, by the bytes of an element."""


def ordered_key(x: Expr, largest: bool) -> Expr:
    """Return an integer that orders elements as `top_k` does, the first in order with the largest key.

    The bits of a float, read as an integer, order numbers of one sign (IEEE 754-2019, 5.10); both zeros have one key."""
    key_dtype = KEYS[x.dtype.bytes]
    lowest = const(-(1 << (8 * key_dtype.bytes - 1)), key_dtype)
    if x.dtype.is_float:
        value = x if x.dtype is f64 else cast(x, f32)
        bits = bitcast(value, key_dtype)
        key = select(lt(bits, const(0, key_dtype)), sub(lowest, bits), bits)
        key = select(ne(value, value), sub(const(-1, key_dtype), lowest), key)
    elif x.dtype in (u32, u64):
        key = add(bitcast(x, key_dtype), lowest)
    else:
        key = cast(x, key_dtype)
    return key if largest else sub(const(-1, key_dtype), key)


def quadratic_select(func: PrimFunc, block: str, factor: ExprLike) -> PrimFunc:
    """Select elements in order, the largest first, from chunks whose largest elements are kept (Friend 1956, quadratic selection).

    Knuth, volume 3, 5.2.3. One of n elements then costs n / factor + factor steps instead of n. Elements become integer keys.
    `factor` is the number of elements of a chunk.

    Before: `for i: for k: R[i] += x(k) ahead of x(i)`, then `for j: for k: Y[j] += k if R[k] == j`
    After: `V[i] = key(x(i)); M[c], P[c] = largest key and its place of each chunk`, then `for j: c = first chunk with the largest
    M; Y[j] = c * factor + P[c]; M[c], P[c] = the next of chunk c`
    Checks: the block picks by ranks that one other block alone makes for it alone. Both have their own nests of serial unsplit
    loops, under no condition, and agree on the rows. All elements are ranked, and not written again. Afterwards the order of the
    loop over `j` is part of the meaning.
    """
    node = find_block(func, block)
    size = positive(func, f"quadratic_select({block!r})", factor, node)
    found = pick(node)
    makers = () if found is None else writers(func, found.ranks.buffer)
    pattern = ranking(makers[0]) if len(makers) == 1 else None
    if found is None or pattern is None:
        raise ScheduleError(
            f"{func.name}: quadratic_select wants {block!r} to pick places by ranks that another block counts, as `top_k` does, "
            f"found {node.body.value!r}"
        )
    (ranked,) = makers
    require_compute_block(func, "quadratic_select", node, ranked)
    if len(readers(func, found.ranks.buffer)) != 1 or found.ranks.buffer in func.output_buffers:
        raise ScheduleError(f"{func.name}: quadratic_select wants {block!r} alone to read {found.ranks.buffer.name!r}")
    if len(writers(func, node.body.buffer)) != 1 or any(x.buffer is node.body.buffer for x in loads(pattern.term)):
        raise ScheduleError(f"{func.name}: quadratic_select wants {block!r} alone to make {node.body.buffer.name!r}")
    rows = same_rows(ranked, found, node.body.indices)
    sizes = {i.var: i.extent for b in (ranked, node) for i in b.iters}
    alike = [(pattern.position.extent, pattern.step.extent), (pattern.position.extent, found.step.extent)]
    alike += [(sizes[a], sizes[b]) for a, b in (rows or {}).items() if isinstance(b, Var)]
    if rows is None or any(prove(eq(a, b)) is not Proof.YES for a, b in alike):
        raise ScheduleError(
            f"{func.name}: quadratic_select wants {block!r} and {ranked.name!r} to index rows alike, and all elements of a row "
            "to be ranked"
        )
    if (changed := overwritten_later(func, ranked)) is not None:
        raise ScheduleError(
            f"{func.name}: quadratic_select wants the elements to stay as they were ranked, {changed.name!r} is written again"
        )
    nests = trivial_loops(func, ranked, any_order=True), trivial_loops(func, node, any_order=True)
    for f in (*nests[0], *nests[1]):
        require_serial(func, f, "quadratic_select")
    if pattern.term.dtype is not bool_ and pattern.term.dtype.is_small:
        raise ScheduleError(f"{func.name}: quadratic_select wants numbers of whole bytes, found {pattern.term.dtype}")
    made = _Selection(func, node, nests[1], found.slot, size, pattern.position.extent, KEYS[pattern.term.dtype.bytes])
    keys = ordered_key(substitute(pattern.term, rows), pattern.largest)
    body = made.nest(seq(*made.before(lambda i: substitute(keys, {pattern.position.var: i})), made.taken()))
    parts = [body if s is nests[1][0] else s for s in statements(func.body) if s is not nests[0][0]]
    allocs = tuple(a for a in func.allocs if a is not found.ranks.buffer)
    return with_body(replace(func, allocs=(*allocs, *made.allocs)), seq(*parts))


_Store = Callable[[tuple[Expr, ...], tuple[Expr, ...]], BufferStore]
_Iters = Sequence[tuple[IterKind, Expr, Var | None]]


class _Selection:
    """Maker of the nest that selects, with its buffers.

    keys: of all elements, in whole chunks. best, places: of each chunk, its largest key that was not taken and its place in the chunk,
    `size` where all were. top, chunk, at: the key taken, its chunk, its place there. next_best, next_place: of that chunk afterwards."""

    def __init__(
        self, func: PrimFunc, node: Block, nest: Sequence[For], slot: IterVar, size: Expr, length: Expr, dtype: DType
    ) -> None:
        self.func, self.node, self.slot, self.size, self.length, self.dtype = func, node, slot, size, length, dtype
        self.names: list[str] = []
        self.rows = [i for i in node.iters if i.kind == "spatial" and i is not slot]
        loops = dict(zip((i.var for i in node.iters), node.bindings, strict=True))
        self.row_loops = [next(f for f in nest if f.var is loops[i.var]) for i in self.rows]
        self.slot_loop = next(f for f in nest if f.var is loops[slot.var])
        self.chunks = maximum(ceildiv(length, size), 1)
        self.lowest = const(-(1 << (8 * dtype.bytes - 1)), dtype)
        self.highest = sub(const(-1, dtype), self.lowest)
        self.keys = self.buffer("keys", mul(self.chunks, size))
        self.best, self.places = self.buffer("best", self.chunks), self.buffer("places", self.chunks)
        one = ("top", "chunk", "at", "next_best", "next_place")
        self.top, self.chunk, self.at, self.next_best, self.next_place = map(self.buffer, one)
        self.allocs = (
            self.keys, self.best, self.places, self.top, self.chunk, self.at, self.next_best, self.next_place
        )  # fmt: skip

    def name(self, wanted: str) -> str:
        self.names.append(fresh(self.func, f"{self.node.name}_{wanted}", self.names))
        return self.names[-1]

    def buffer(self, name: str, *extra: Expr) -> Buffer:
        return Buffer(self.name(name), (*(i.extent for i in self.rows), *extra), self.dtype)

    def nest(self, body: Stmt) -> Stmt:
        """Put statements of one row under the loops over rows."""
        for f in reversed(self.row_loops):
            body = replace(f, body=body)
        return body

    def block(self, name: str, extra: _Iters, store: _Store, init: _Store | None = None) -> Stmt:
        """Make a block over the rows and more iterators: kind, extent, and the loop's variable, None for a loop of its own.

        store, init: from the indices of the row and the other iterators to what is stored"""
        rows = [replace(i, var=Var(i.var.name)) for i in self.rows]
        more, around = list[IterVar](), list[tuple[Var, Expr]]()
        bindings: list[Expr] = [f.var for f in self.row_loops]
        for number, (kind, extent, bound) in enumerate(extra):
            letter = "cet"[number]
            more.append(IterVar(Var(f"v{letter}"), extent, kind))
            if bound is None:
                bound = Var(self.name(f"{name}_{letter}"))
                around.append((bound, extent))
            bindings.append(bound)
        row, rest = tuple(i.var for i in rows), tuple(i.var for i in more)
        title = self.node.name if name == "" else self.name(name)
        start = None if init is None else init(row, rest)
        s: Stmt = Block(title, (*rows, *more), tuple(bindings), store(row, rest), start)
        for var, extent in reversed(around):
            s = For(var, extent, s)
        return s

    def reduction(self, name: str, target: Buffer, extra: _Iters, start: Expr, step: Callable[..., Expr]) -> Stmt:
        """Make a block that reduces over its last iterator. step: of the old value, the row, and the iterators."""
        lead = len(extra) - 1

        def store(r: tuple[Expr, ...], x: tuple[Expr, ...]) -> BufferStore:
            where = (*r, *x[:lead])
            return BufferStore(target, where, step(load(target, where), r, *x))

        return self.block(name, extra, store, lambda r, x: BufferStore(target, (*r, *x[:lead]), start))

    def before(self, key: Callable[[Expr], Expr]) -> tuple[Stmt, ...]:
        """Make the keys of a row, and the largest one of each chunk with its place. key: of the element at a place"""
        own = tuple(i.var for i in self.rows)

        def keyed(r: tuple[Expr, ...], x: tuple[Expr, ...]) -> BufferStore:
            return BufferStore(self.keys, (*r, *x), substitute(key(x[0]), dict(zip(own, r, strict=True))))

        def place(old: Expr, r: tuple[Expr, ...], c: Expr, e: Expr) -> Expr:
            best = eq(self.element(r, c, e), load(self.best, (*r, c)))
            return minimum(old, select(best, cast(e, self.dtype), cast(self.size, self.dtype)))

        over: _Iters = (("spatial", self.chunks, None), ("reduce", self.size, None))
        rest = sub(mul(self.chunks, self.size), self.length)
        return (
            self.block("key", [("spatial", self.length, None)], keyed),
            self.block(
                "fill", [("spatial", rest, None)],
                lambda r, x: BufferStore(self.keys, (*r, add(self.length, x[0])), self.lowest),
            ),
            self.reduction(
                "chunk_best", self.best, over, self.lowest, lambda old, r, c, e: maximum(old, self.element(r, c, e))
            ),
            self.reduction("chunk_place", self.places, over, cast(self.size, self.dtype), place),
        )  # fmt: skip

    def element(self, r: tuple[Expr, ...], c: Expr, e: Expr) -> Expr:
        return load(self.keys, (*r, add(mul(c, self.size), e)))

    def chosen(self, r: tuple[Expr, ...]) -> Expr:
        """Return the chunk of the key taken, as an index that is proved to be inside."""
        return maximum(minimum(cast(load(self.chunk, r), i64), sub(self.chunks, 1)), 0)

    def left(self, r: tuple[Expr, ...], e: Expr) -> Expr:
        """Return whether an element of the chosen chunk comes behind the one that was taken."""
        value = self.element(r, self.chosen(r), e)
        tied = and_(eq(value, load(self.top, r)), lt(load(self.at, r), cast(e, self.dtype)))
        return or_(lt(value, load(self.top, r)), tied)

    def taken(self) -> Stmt:
        """Make the loop over results: take the largest key, and find the next one of its chunk."""
        dtype, size = self.dtype, cast(self.size, self.dtype)
        j = self.slot_loop.var

        def first(old: Expr, r: tuple[Expr, ...], c: Expr) -> Expr:
            there = and_(eq(load(self.best, (*r, c)), load(self.top, r)), lt(load(self.places, (*r, c)), size))
            return minimum(old, select(there, cast(c, dtype), self.highest))

        def result(r: tuple[Expr, ...], x: tuple[Expr, ...]) -> BufferStore:
            row = {i.var: e for i, e in zip(self.rows, r, strict=True)}
            where = tuple(substitute(e, {**row, self.slot.var: x[0]}) for e in self.node.body.indices)
            place = add(mul(self.chosen(r), self.size), cast(load(self.at, r), i64))
            return BufferStore(self.node.body.buffer, where, select(lt(x[0], self.length), place, const(0)))

        def next_place(old: Expr, r: tuple[Expr, ...], e: Expr) -> Expr:
            there = and_(self.left(r, e), eq(self.element(r, self.chosen(r), e), load(self.next_best, r)))
            return minimum(old, select(there, cast(e, dtype), size))

        def keep(target: Buffer, value: Buffer) -> _Store:
            return lambda r, x: BufferStore(target, (*r, self.chosen(r)), load(value, r))

        chunks: _Iters = [("reduce", self.chunks, None)]
        elements: _Iters = [("reduce", self.size, None)]
        parts = (
            self.reduction(
                "take", self.top, chunks, self.lowest, lambda old, r, c: maximum(old, load(self.best, (*r, c)))
            ),
            self.reduction("take_chunk", self.chunk, chunks, self.highest, first),
            self.block("take_place", [], lambda r, _: BufferStore(self.at, r, load(self.places, (*r, self.chosen(r))))),
            self.block("", [("spatial", self.slot.extent, j)], result),
            self.reduction(
                "seek", self.next_best, elements, self.lowest,
                lambda old, r, e: maximum(old, select(self.left(r, e), self.element(r, self.chosen(r), e), self.lowest)),
            ),
            self.reduction("seek_place", self.next_place, elements, size, next_place),
            self.block("keep_best", [], keep(self.best, self.next_best)),
            self.block("keep_place", [], keep(self.places, self.next_place)),
        )  # fmt: skip
        return replace(self.slot_loop, body=seq(*parts))
