"""The primitive for the order of few elements by many workers: bitonic_sort."""

from __future__ import annotations

from dataclasses import replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.core.dtype import i64, u64
from relax_tune.ir.core.expr import (
    Expr,
    Var,
    add,
    cast,
    const,
    eq,
    le,
    load,
    maximum,
    minimum,
    op,
    select,
    sub,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import BufferStore, For, Stmt, seq
from relax_tune.schedules.primitives.reduction.picked_rows import Iters, PickedRows, RowNests, picked_rows
from relax_tune.schedules.primitives.reduction.radix_sorts import digit_key

Row = tuple[Expr, ...]
LEAST_SIZE, MOST_SIZE = 4, 1 << 16


def bitonic_sort(func: PrimFunc, block: str, size: int) -> PrimFunc:
    """Sort all elements by a bitonic sorting network (Batcher 1968; Knuth, volume 3, 5.3.4).

    Each step compares all elements with partners at one distance, in any order. A key of 32 bits has the element's place in its
    low bits, which keeps equal elements in order. `size` is the number of keys: a power of two, at least the length of a row.

    Before: `for i: for k: R[i] += x(k) ahead of x(i)`, then `for j: for k: Y[j] += k if R[k] == j`
    After: `V[i] = key(x(i)), i`, then `for s: for t in range(s + 1): for i: W[i] = smaller or larger of V[i], V[i ^ 2 ** (s - t)];
    for i: V[i] = W[i]`, then `for j: Y[j] = place of V[j]`
    Checks: the block picks by ranks with one writer, whose only reader it is. Both have their own nests of serial unsplit
    loops, under no condition, and agree on the rows. All elements are ranked, and not written again. They have at most 32 bits,
    and provably are at most `size`, a power of two from 4 to 65,536.
    """
    if not LEAST_SIZE <= size <= MOST_SIZE or size & (size - 1):
        raise ScheduleError(
            f"{func.name}: bitonic_sort({block!r}) expects a power of two from {LEAST_SIZE} to {MOST_SIZE} as size, got {size}"
        )
    picked = picked_rows(func, "bitonic_sort", block)
    if picked.element.dtype.bytes > 4:
        raise ScheduleError(
            f"{func.name}: bitonic_sort expects elements of at most 32 bits, got {picked.element.dtype}"
        )
    if prove(le(picked.length, size)) is not Proof.YES:
        raise ScheduleError(
            f"{func.name}: bitonic_sort({block!r}) expects rows of provably at most {size} elements, got {picked.length!r}"
        )
    rewrite = _BitonicSort(picked, size)
    return picked.replaced(rewrite.nest(rewrite.body()), (rewrite.keys, rewrite.stepped))


class _BitonicSort(RowNests):
    """Builder of the sorting nest and its buffers.

    Attributes:
        keys: Buffer of the elements' keys with their positions, padded with the largest number.
        stepped: Buffer of the keys after a step.
    """

    def __init__(self, picked: PickedRows, size: int) -> None:
        super().__init__(picked)
        self.size, self.stages = const(size), size.bit_length() - 1
        self.keys, self.stepped = (self.row_buffer(name, u64, self.size) for name in ("keys", "stepped"))

    def body(self) -> Stmt:
        """Make the keys of a row, the steps of the network, and the results."""
        digits = cast(digit_key(self.picked.element, self.picked.largest), u64)

        def keyed(r: Row, x: Row) -> BufferStore:
            key = _bits("shift_left", self.in_row(substitute(digits, {self.picked.position: x[0]}), r), const(32, u64))
            return BufferStore(self.keys, (*r, *x), _bits("bitwise_or", key, cast(x[0], u64)))

        def filled(r: Row, x: Row) -> BufferStore:
            return BufferStore(self.keys, (*r, add(self.length, x[0])), const(-1, u64))

        def result(r: Row, x: Row) -> BufferStore:
            key = load(self.keys, (*r, minimum(x[0], sub(self.size, 1))))
            return self.result(r, x[0], cast(_bits("bitwise_and", key, const((1 << 32) - 1, u64)), i64))

        rest = maximum(sub(self.size, self.length), 0)
        slot = self.slot_loop
        return seq(
            self.block("key", [("spatial", self.length, None)], keyed),
            self.block("fill", [("spatial", rest, None)], filled),
            self.steps(),
            replace(slot, body=self.block("", [("spatial", self.slot.extent, slot.var)], result)),
        )

    def steps(self) -> Stmt:
        """Make the loops over stages, which double the sorted runs, and over the halved distances of each."""
        stage, step = Var(self.name("stage")), Var(self.name("step"))
        over: Iters = [
            ("spatial", const(self.stages), stage),
            ("spatial", const(self.stages), step),
            ("spatial", self.size, None),
        ]

        def exchanged(r: Row, x: Row) -> BufferStore:
            s, t, i = x
            distance = maximum(sub(s, t), 0)
            partner = _bits("bitwise_xor", i, _bits("shift_left", const(1), distance))
            other = load(self.keys, (*r, _bits("bitwise_and", partner, sub(self.size, 1))))
            key = load(self.keys, (*r, i))
            smaller = eq(_bit(i, add(s, 1)), _bit(i, distance))
            return BufferStore(self.stepped, (*r, i), select(smaller, minimum(key, other), maximum(key, other)))

        def save_key(r: Row, x: Row) -> BufferStore:
            return BufferStore(self.keys, (*r, *x), load(self.stepped, (*r, *x)))

        both = seq(
            self.block("exchange", over, exchanged), self.block("keep", [("spatial", self.size, None)], save_key)
        )
        return For(stage, const(self.stages), For(step, add(stage, 1), both))


def _bits(name: str, a: Expr, b: Expr) -> Expr:
    return op(name, (a, b), a.dtype)


def _bit(i: Expr, number: Expr) -> Expr:
    return _bits("bitwise_and", _bits("shift_right", i, number), const(1))
