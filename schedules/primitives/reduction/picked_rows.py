"""Rows whose places are picked by ranks (`top_k`): what the primitives that sort them share.

Tests: `tests/schedules/primitives/reduction/test_radix_sorts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import DType, bool_, f32, f64, i32, i64, u32, u64
from relax_tune.ir.core.expr import (
    Expr,
    Var,
    add,
    bitcast,
    cast,
    const,
    eq,
    load,
    loads,
    lt,
    ne,
    select,
    sub,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, BufferStore, For, IterKind, IterVar, Stmt, seq, statements
from relax_tune.ir.deduce.rankings import pick, ranking, same_rows
from relax_tune.schedules.independence import overwritten_later, writers
from relax_tune.schedules.loop_tree import find_block, fresh, readers, require_compute_block, trivial_loops, with_body
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
        # For negative numbers `lowest - bits` reverses the order of their magnitudes, and -0.0, whose bits are
        # `lowest`, gets the 0 of +0.0.
        key = select(lt(bits, const(0, key_dtype)), sub(lowest, bits), bits)
        # NaN counts as the largest number, as `top_k` says.
        key = select(ne(value, value), sub(const(-1, key_dtype), lowest), key)
    elif x.dtype in (u32, u64):
        key = add(bitcast(x, key_dtype), lowest)
    else:
        key = cast(x, key_dtype)
    return key if largest else sub(const(-1, key_dtype), key)


@dataclass(frozen=True, slots=True)
class PickedRows:
    """A block that picks places by the ranks that another block counts for no other reader.

    Attributes:
        func: The function.
        node: The block that picks.
        nests: The loops of the ranking and of the pick.
        slot: The iterator of the results of a row.
        length: The number of elements of a row.
        ranks: The buffer of the ranks.
        position, element: The iterator of the elements, and the element at it.
        largest: Whether larger elements come first.
    """

    func: PrimFunc
    node: Block
    nests: tuple[tuple[For, ...], tuple[For, ...]]
    slot: IterVar
    length: Expr
    ranks: Buffer
    position: Var
    element: Expr
    largest: bool

    def replaced(self, nest: Stmt, allocs: Sequence[Buffer]) -> PrimFunc:
        """Return the function with one nest in place of ranking and pick, and buffers in place of the ranks."""
        counted, picked = (nest[0] for nest in self.nests)
        parts = [nest if s is picked else s for s in statements(self.func.body) if s is not counted]
        others = tuple(a for a in self.func.allocs if a is not self.ranks)
        return with_body(replace(self.func, allocs=(*others, *allocs)), seq(*parts))


def picked_rows(func: PrimFunc, step: str, block: str) -> PickedRows:
    """Match a block that picks by ranks with one writer and no other reader.

    Both have nests of serial unsplit loops of their own, under no condition, and agree on the rows. All elements are ranked, and not
    written again.

    Raises:
        ScheduleError: In the name of the primitive `step`, for any other block.
    """
    node = find_block(func, block)
    picked = pick(node)
    makers = () if picked is None else writers(func, picked.ranks.buffer)
    pattern = ranking(makers[0]) if len(makers) == 1 else None
    if picked is None or pattern is None:
        raise ScheduleError(
            f"{func.name}: {step} expects {block!r} to pick places by ranks that another block counts, as `top_k` does, "
            f"got {node.body.value!r}"
        )
    (ranked,) = makers
    require_compute_block(func, step, node, ranked)
    if len(readers(func, picked.ranks.buffer)) != 1 or picked.ranks.buffer in func.output_buffers:
        raise ScheduleError(
            f"{func.name}: {step} expects {block!r} to be the only reader of {picked.ranks.buffer.name!r}"
        )
    if len(writers(func, node.body.buffer)) != 1 or any(x.buffer is node.body.buffer for x in loads(pattern.term)):
        raise ScheduleError(f"{func.name}: {step} expects {block!r} to be the only writer of {node.body.buffer.name!r}")
    rows = same_rows(ranked, pattern, picked, node.body.indices)
    sizes = {i.var: i.extent for b in (ranked, node) for i in b.iters}
    alike = [(pattern.position.extent, pattern.step.extent), (pattern.position.extent, picked.step.extent)]
    alike += [(sizes[a], sizes[b]) for a, b in (rows or {}).items()]
    if rows is None or any(prove(eq(a, b)) is not Proof.YES for a, b in alike):
        raise ScheduleError(
            f"{func.name}: {step} expects {block!r} and {ranked.name!r} to index rows alike, and all elements of a row to be ranked"
        )
    if (changed := overwritten_later(func, ranked)) is not None:
        raise ScheduleError(
            f"{func.name}: {step} expects the elements to stay as they were ranked, {changed.name!r} is written again"
        )
    nests = trivial_loops(func, ranked, any_order=True), trivial_loops(func, node, any_order=True)
    for f in (*nests[0], *nests[1]):
        require_serial(func, f, step)
    if pattern.term.dtype is not bool_ and pattern.term.dtype.is_small:
        raise ScheduleError(f"{func.name}: {step} expects numbers of whole bytes, got {pattern.term.dtype}")
    element, length = substitute(pattern.term, rows), pattern.position.extent
    return PickedRows(
        func, node, nests, picked.slot, length, picked.ranks.buffer, pattern.position.var, element, pattern.largest
    )


Store = Callable[[tuple[Expr, ...], tuple[Expr, ...]], BufferStore]
"""What a block stores, from the indices of the row and the block's other iterators."""
Iters = Sequence[tuple[IterKind, Expr, Var | None]]
"""The iterators of a block that follow the row's: kind, extent, and the variable of the loop, None for a new loop."""


class RowNests:
    """Builder of blocks over the rows of a pick, with their loops and buffers."""

    def __init__(self, picked: PickedRows) -> None:
        self.picked, self.func, self.node, self.slot = picked, picked.func, picked.node, picked.slot
        self.length = picked.length
        self.names: list[str] = []
        nest = picked.nests[1]
        self.rows = [i for i in self.node.iters if i.kind == "spatial" and i is not self.slot]
        loops = dict(zip((i.var for i in self.node.iters), self.node.bindings, strict=True))
        self.row_loops = [next(f for f in nest if f.var is loops[i.var]) for i in self.rows]
        self.slot_loop = next(f for f in nest if f.var is loops[self.slot.var])

    def name(self, suffix: str) -> str:
        self.names.append(fresh(self.func, f"{self.node.name}_{suffix}", self.names))
        return self.names[-1]

    def row_buffer(self, name: str, dtype: DType, *extra: Expr) -> Buffer:
        return Buffer(self.name(name), (*(i.extent for i in self.rows), *extra), dtype)

    def nest(self, body: Stmt) -> Stmt:
        """Put statements of one row under the loops over rows."""
        for f in reversed(self.row_loops):
            body = replace(f, body=body)
        return body

    def in_row(self, e: Expr, row: tuple[Expr, ...]) -> Expr:
        """Rewrite `e` from the pick's row iterators to the row iterators of another block."""
        return substitute(e, {i.var: r for i, r in zip(self.rows, row, strict=True)})

    def block(self, name: str, extra: Iters, store: Store, init: Store | None = None) -> Stmt:
        """Make a block over the rows and more iterators."""
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

    def reduction(self, name: str, target: Buffer, extra: Iters, start: Expr, step: Callable[..., Expr]) -> Stmt:
        """Make a block that reduces over its last iterator.

        Args:
            step: Builds the update from the old value, the row and the iterators.
        """
        lead = len(extra) - 1

        def store(r: tuple[Expr, ...], x: tuple[Expr, ...]) -> BufferStore:
            where = (*r, *x[:lead])
            return BufferStore(target, where, step(load(target, where), r, *x))

        return self.block(name, extra, store, lambda r, x: BufferStore(target, (*r, *x[:lead]), start))

    def result(self, row: tuple[Expr, ...], slot: Expr, place: Expr) -> BufferStore:
        """Store a place as the result at a slot; results after the last element are 0."""
        where = tuple(self.in_row(substitute(e, {self.slot.var: slot}), row) for e in self.node.body.indices)
        return BufferStore(self.node.body.buffer, where, select(lt(slot, self.length), place, const(0)))
