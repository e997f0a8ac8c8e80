"""The primitive for the places of the largest elements: quadratic_select."""

from __future__ import annotations

from dataclasses import replace

from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.expr import (
    Expr,
    ExprLike,
    add,
    and_,
    cast,
    ceildiv,
    const,
    eq,
    load,
    lt,
    maximum,
    minimum,
    mul,
    or_,
    select,
    sub,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import BufferStore, Stmt, seq
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.primitives.arguments import positive
from relax_tune.schedules.primitives.reduction.picked_rows import (
    KEYS,
    Iters,
    PickedRows,
    RowNests,
    Store,
    ordered_key,
    picked_rows,
)


def quadratic_select(func: PrimFunc, block: str, factor: ExprLike) -> PrimFunc:
    """Select elements in order, the largest first, from chunks whose largest elements are stored (Friend 1956, quadratic selection).

    Knuth, volume 3, 5.2.3. One of n elements then costs n / factor + factor steps instead of n. Elements become integer keys.
    `factor` is the number of elements of a chunk.

    Before: `for i: for k: R[i] += x(k) ahead of x(i)`, then `for j: for k: Y[j] += k if R[k] == j`
    After: `V[i] = key(x(i)); M[c], P[c] = largest key and its place of each chunk`, then `for j: c = first chunk with the largest
    M; Y[j] = c * factor + P[c]; M[c], P[c] = the next of chunk c`
    Checks: the block picks by ranks with one writer, whose only reader it is. Both have their own nests of serial unsplit
    loops, under no condition, and agree on the rows. All elements are ranked, and not written again. Afterwards the order of the
    loop over `j` is part of the meaning.
    """
    size = positive(func, f"quadratic_select({block!r})", factor, find_block(func, block))
    rewrite = _Selection(picked_rows(func, "quadratic_select", block), size)
    return rewrite.picked.replaced(rewrite.nest(seq(*rewrite.before(), rewrite.taken())), rewrite.allocs)


class _Selection(RowNests):
    """Builder of the selecting nest and its buffers.

    Attributes:
        keys: Keys of all elements, padded to whole chunks.
        best, places: For each chunk, the largest key that was not selected yet and its position; `size` if all were selected.
        top, chunk, at: The selected key, its chunk, and its position there.
        next_best, next_place: The largest key that is left in that chunk, and its position.
    """

    def __init__(self, picked: PickedRows, size: Expr) -> None:
        super().__init__(picked)
        self.size, self.dtype = size, KEYS[picked.element.dtype.bytes]
        self.chunks = maximum(ceildiv(self.length, size), 1)
        self.lowest = const(-(1 << (8 * self.dtype.bytes - 1)), self.dtype)
        self.highest = sub(const(-1, self.dtype), self.lowest)
        self.keys = self.buffer("keys", mul(self.chunks, size))
        self.best, self.places = self.buffer("best", self.chunks), self.buffer("places", self.chunks)
        one = ("top", "chunk", "at", "next_best", "next_place")
        self.top, self.chunk, self.at, self.next_best, self.next_place = map(self.buffer, one)
        self.allocs = (
            self.keys, self.best, self.places, self.top, self.chunk, self.at, self.next_best, self.next_place
        )  # fmt: skip

    def buffer(self, name: str, *extra: Expr) -> Buffer:
        return self.row_buffer(name, self.dtype, *extra)

    def before(self) -> tuple[Stmt, ...]:
        """Make the keys of a row, and the largest one of each chunk with its place."""
        key = ordered_key(self.picked.element, self.picked.largest)

        def keyed(r: tuple[Expr, ...], x: tuple[Expr, ...]) -> BufferStore:
            return BufferStore(self.keys, (*r, *x), self.in_row(substitute(key, {self.picked.position: x[0]}), r))

        def place(old: Expr, r: tuple[Expr, ...], c: Expr, e: Expr) -> Expr:
            best = eq(self.element(r, c, e), load(self.best, (*r, c)))
            return minimum(old, select(best, cast(e, self.dtype), cast(self.size, self.dtype)))

        over: Iters = (("spatial", self.chunks, None), ("reduce", self.size, None))
        # The last chunk is filled up with the lowest key, so that loops over chunks need no condition.
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
        """Return the chunk of the selected key, as an index that is provably in range."""
        return maximum(minimum(cast(load(self.chunk, r), i64), sub(self.chunks, 1)), 0)

    def left(self, r: tuple[Expr, ...], e: Expr) -> Expr:
        """Return whether an element of the chosen chunk follows the selected one in order."""
        value = self.element(r, self.chosen(r), e)
        # Equal keys follow each other by place, which makes the order total: no element is selected twice.
        tied = and_(eq(value, load(self.top, r)), lt(load(self.at, r), cast(e, self.dtype)))
        return or_(lt(value, load(self.top, r)), tied)

    def taken(self) -> Stmt:
        """Make the loop over results: take the largest key, and find the next one of its chunk."""
        dtype, size, j = self.dtype, cast(self.size, self.dtype), self.slot_loop.var

        def first(old: Expr, r: tuple[Expr, ...], c: Expr) -> Expr:
            # A place equal to the size marks a chunk without elements left, whose best key is the lowest and may tie
            # with real ones.
            is_best = and_(eq(load(self.best, (*r, c)), load(self.top, r)), lt(load(self.places, (*r, c)), size))
            return minimum(old, select(is_best, cast(c, dtype), self.highest))

        def result(r: tuple[Expr, ...], x: tuple[Expr, ...]) -> BufferStore:
            return self.result(r, x[0], add(mul(self.chosen(r), self.size), cast(load(self.at, r), i64)))

        def next_place(old: Expr, r: tuple[Expr, ...], e: Expr) -> Expr:
            is_best = and_(self.left(r, e), eq(self.element(r, self.chosen(r), e), load(self.next_best, r)))
            return minimum(old, select(is_best, cast(e, dtype), size))

        def keep(target: Buffer, value: Buffer) -> Store:
            return lambda r, x: BufferStore(target, (*r, self.chosen(r)), load(value, r))

        chunks: Iters = [("reduce", self.chunks, None)]
        elements: Iters = [("reduce", self.size, None)]
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
