"""The primitive for the order of all elements: radix_sort."""

from __future__ import annotations

from dataclasses import replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.core.dtype import DType, bool_, i16, i32, i64, u32, u64
from relax_tune.ir.core.expr import (
    Expr,
    Var,
    add,
    as_int,
    bitcast,
    cast,
    const,
    le,
    load,
    lt,
    maximum,
    minimum,
    mul,
    ne,
    op,
    select,
    sub,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import BufferStore, For, Stmt, seq
from relax_tune.schedules.primitives.reduction.picked_rows import Iters, PickedRows, RowNests, ordered_key, picked_rows

Row = tuple[Expr, ...]
MOST_DIGIT_BITS = 16


def key_bits(dtype: DType) -> int:
    """Return the number of bits that distinguish the keys of elements (`digit_key`)."""
    return 1 if dtype is bool_ else dtype.bits


def digit_key(x: Expr, largest: bool) -> Expr:
    """Return an unsigned integer of `key_bits` that orders elements as `top_k` does, the first in order with the smallest key."""
    dtype, wide = x.dtype, u64 if x.dtype.bytes == 8 else u32
    least, most = -(1 << (dtype.bits - 1)), (1 << (dtype.bits - 1)) - 1
    if dtype.is_half:
        # its own bits, since a fused chain rounds to 16 bits only where they are read
        bits = cast(bitcast(x, i16), i32)
        key = select(lt(bits, const(0, i32)), sub(const(least, i32), bits), bits)
        key = select(ne(x, x), const(most, i32), key)
        key = sub(const(-1, i32), key) if largest else key
    else:
        key = ordered_key(x, not largest)
        if dtype is bool_:
            least, most = 0, 1
        elif dtype.is_int and dtype not in (u32, u64):  # `ordered_key` makes those signed
            least, most = dtype.limits
    return add(bitcast(key, wide), const(1 + most if largest else -least, wide))


def _bits(name: str, a: Expr, b: Expr | int) -> Expr:
    return op(name, (a, const(b, a.dtype) if isinstance(b, int) else b), a.dtype)


def radix_sort(func: PrimFunc, block: str, digit_bits: int) -> PrimFunc:
    """Sort all elements by the digits of integer keys, the least significant first (Knuth, volume 3, 5.2.5).

    A pass over one digit of `digit_bits` bits moves places, stably, from one buffer to the other. Its count of each digit, as a
    prefix sum, tells where elements with the digit begin. A key has as many bits as its element.

    Before: `for i: for k: R[i] += x(k) ahead of x(i)`, then `for j: for k: Y[j] += k if R[k] == j`
    After: `V[i] = key(x(i)); P[i] = i; C[d] = number of keys with digit d`, then for each digit: `for d: F[d] = C[0] + ... + C[d - 1]`;
    `for i: d = digit of V[i]; W[F[d]] = V[i]; Q[F[d]] = P[i]; F[d] += 1`, then `for j: Y[j] = Q[j]`
    Checks: the block picks by ranks with one writer, whose only reader it is. Both have their own nests of serial unsplit
    loops, under no condition, and agree on the rows. All elements are ranked, and not written again. A digit has 1 to 16 bits.
    Afterwards the order of the loops over elements is part of the meaning.
    """
    if not 1 <= digit_bits <= MOST_DIGIT_BITS:
        raise ScheduleError(
            f"{func.name}: radix_sort({block!r}) expects digits of 1 to {MOST_DIGIT_BITS} bits, got {digit_bits}"
        )
    rewrite = _RadixSort(picked_rows(func, "radix_sort", block), digit_bits)
    return rewrite.picked.replaced(rewrite.nest(rewrite.body()), rewrite.allocs)


class _RadixSort(RowNests):
    """Builder of the sorting nest and its buffers.

    Attributes:
        keys, places: Buffers of keys and positions before and after a pass.
        counts: Number of elements with each digit of each pass.
        total: The sum of counts so far.
        first: The next position for an element with each digit.
    """

    def __init__(self, picked: PickedRows, digit_bits: int) -> None:
        super().__init__(picked)
        self.key = digit_key(picked.element, picked.largest)
        self.digit_bits, self.radix = digit_bits, const(1 << digit_bits)
        self.passes = -(-key_bits(picked.element.dtype) // digit_bits)
        # positions of 32 bits where they hold the length: they take half the memory
        few = prove(le(self.length, const(i32.limits[1]))) is Proof.YES
        self.positions = i32 if few else i64
        size = maximum(self.length, 1)
        self.keys = [self.row_buffer(f"keys_{i}", self.key.dtype, size) for i in range(min(self.passes, 2))]
        self.places = [self.row_buffer(f"places_{i}", self.positions, size) for i in range(2)]
        self.counts = self.row_buffer("counts", self.positions, const(self.passes), self.radix)
        self.total = self.row_buffer("total", self.positions)
        self.first = self.row_buffer("first", self.positions, self.radix)
        self.allocs = (*self.keys, *self.places[self.passes == 1 :], self.counts, self.total, self.first)

    def body(self) -> Stmt:
        """Make the keys of a row, the counts of their digits, the passes, and the results."""

        def keyed(r: Row, x: Row) -> BufferStore:
            key = self.in_row(substitute(self.key, {self.picked.position: x[0]}), r)
            return BufferStore(self.keys[0], (*r, *x), key)

        def counted(r: Row, x: Row) -> BufferStore:
            where = (*r, x[1], self.digit(load(self.keys[0], (*r, x[0])), x[1]))
            return BufferStore(self.counts, where, add(load(self.counts, where), const(1, self.positions)))

        def result(r: Row, x: Row) -> BufferStore:
            return self.result(r, x[0], cast(load(last, (*r, self.inside(x[0]))), i64))

        last, passes = self.places[self.passes % 2], const(self.passes)
        return seq(
            # a row without elements has one position, which is read and never selected
            self.block("none", [], lambda r, _: BufferStore(last, (*r, const(0)), const(0, self.positions))),
            self.block("key", [("spatial", self.length, None)], keyed),
            self.block(
                "clear", [("spatial", passes, None), ("spatial", self.radix, None)],
                lambda r, x: BufferStore(self.counts, (*r, *x), const(0, self.positions)),
            ),
            # The digits of all passes are counted in one sweep: sorting changes the order of keys, not how many have
            # a digit.
            self.block("count", [("spatial", self.length, None), ("spatial", passes, None)], counted),
            *(s for number in range(self.passes) for s in self.one_pass(number)),
            replace(self.slot_loop, body=self.block("", [("spatial", self.slot.extent, self.slot_loop.var)], result)),
        )  # fmt: skip

    def digit(self, key: Expr, number: Expr) -> Expr:
        """Return the digit of a key that a pass sorts by, as an index."""
        by = cast(mul(number, self.digit_bits), key.dtype)
        shifted = key if as_int(number) == 0 else _bits("shift_right", key, by)
        return cast(_bits("bitwise_and", shifted, (1 << self.digit_bits) - 1), i64)

    def inside(self, position: Expr) -> Expr:
        """Return a position as an index that is proved to be inside."""
        return maximum(minimum(position, sub(self.length, 1)), 0)

    def one_pass(self, number: int) -> tuple[Stmt, ...]:
        """Move places, and keys but for the last pass, to where their digit belongs."""
        old, new, one = number % 2, (number + 1) % 2, const(1, self.positions)
        d, i = Var(self.name(f"digit_{number}")), Var(self.name(f"element_{number}"))
        digits: Iters = [("spatial", self.radix, d)]
        elements: Iters = [("spatial", self.length, i)]

        def begun(r: Row, x: Row) -> BufferStore:
            return BufferStore(self.first, (*r, *x), load(self.total, r))

        def added(r: Row, x: Row) -> BufferStore:
            return BufferStore(self.total, r, add(load(self.total, r), load(self.counts, (*r, const(number), *x))))

        def begin(r: Row, i: Expr) -> tuple[Expr, ...]:
            return (*r, self.digit(load(self.keys[old], (*r, i)), const(number)))

        def to(r: Row, i: Expr) -> tuple[Expr, ...]:
            return (*r, self.inside(cast(load(self.first, begin(r, i)), i64)))

        def moved(r: Row, x: Row) -> BufferStore:
            place = load(self.places[old], (*r, *x)) if number else cast(x[0], self.positions)
            return BufferStore(self.places[new], to(r, x[0]), place)

        def move_key(r: Row, x: Row) -> BufferStore:
            return BufferStore(self.keys[new], to(r, x[0]), load(self.keys[old], (*r, *x)))

        def counted(r: Row, x: Row) -> BufferStore:
            return BufferStore(self.first, begin(r, x[0]), add(load(self.first, begin(r, x[0])), one))

        # The last pass needs no keys after it, so it moves only the places.
        moves = [self.block(f"move_{number}", elements, moved)]
        if number + 1 < self.passes:
            moves.append(self.block(f"move_key_{number}", elements, move_key))
        return (
            self.block(f"start_{number}", [], lambda r, _: BufferStore(self.total, r, const(0, self.positions))),
            For(d, self.radix, seq(
                self.block(f"first_{number}", digits, begun),
                self.block(f"add_{number}", [("reduce", self.radix, d)], added),
            )),
            For(i, self.length, seq(*moves, self.block(f"next_{number}", elements, counted))),
        )  # fmt: skip
