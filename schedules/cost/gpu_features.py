"""Closed-form GPU features of a schedule: resident groups, memory coalescing of warps, and bank conflicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

from relax_tune.ir.arith.linear import extent_within, linear
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.expr import (
    Expr,
    Var,
    add,
    and_,
    as_int,
    ceildiv,
    const,
    eq,
    floordiv,
    floormod,
    free_vars,
    le,
    loads,
    maximum,
    minimum,
    mul,
    ne,
    postorder,
    select,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, For, Stmt, blocks
from relax_tune.ir.hardware.intrinsics import INTRINSICS
from relax_tune.ir.hardware.mma import ROW
from relax_tune.ir.hardware.swizzle import ACCESS_BYTES, LINE_BYTES, swizzled
from relax_tune.schedules.loop_tree import block_loads, block_value, enclosing, loop_env
from relax_tune.schedules.occupancy import (
    group_items,
    kernels,
    registers,
    resident_groups,
    shared_bytes,
    stored_shape,
)
from relax_tune.schedules.target import HardwareInfo

# Bytes of a memory sector, the unit of transfer; banks of shared memory, of four bytes each.
SECTOR_BYTES = 32
BANKS = 32
# Assumed elements between neighbours whose distance is unknown.
UNKNOWN_STRIDE = 64
ONE: Expr = const(1)


@dataclass(frozen=True, slots=True)
class WarpAccess:
    """An access as the work-items of a warp make it.

    Attributes:
        path: The loops around.
        stride: Elements between neighbouring work-items of the first axis; 0 if they touch the same.
        width: Adjacent elements that each work-item touches.
        bank_words: Places of the vectors (or words) served at once, where a stride does not determine them; counted in vectors, as many
            as fill all
            banks.
    """

    buffer: Buffer
    where: tuple[Expr, ...]
    path: tuple[For, ...]
    stride: Expr
    width: Expr
    bank_words: tuple[Expr, ...] = ()

    @property
    def executions(self) -> Expr:
        """The number of executions by all work-items of a group."""
        return _product([p.extent for p in self.path if p.kind not in ("group", "vectorized")])


def warp_accesses(func: PrimFunc, kernel: Stmt, shared: bool) -> Iterator[WarpAccess]:
    """Yield the accesses of a kernel to global memory, or to shared memory."""
    for b in blocks(kernel):
        path = enclosing(func, b)
        spots = [(b.body.buffer, b.body.indices), *((x.buffer, x.indices) for x in block_loads(b))]
        for buffer, where in dict.fromkeys(spots):
            if buffer.scope == ("shared" if shared else "global"):
                yield _warp_access(func, kernel, b, path, buffer, where)


def _warp_access(
    func: PrimFunc, kernel: Stmt, block: Block, path: tuple[For, ...], buffer: Buffer, where: tuple[Expr, ...]
) -> WarpAccess:
    env = loop_env(path)
    placed = tuple(simplify(block_value(block, e), env) for e in where)
    shape = stored_shape(func, kernel, buffer) if buffer.scope == "shared" else buffer.shape
    item = next((p for p in path if p.kind == "item" and p.axis == 0), None)
    lane = next((p for p in path if p.kind == "vectorized"), None)
    neighbour = ONE if lane is None else _stride_along(placed, shape, lane)
    width = ONE if lane is None else select(eq(neighbour, 1), lane.extent, ONE)
    bank_words = _bank_words(buffer, placed, shape, path, width) if buffer.scope == "shared" else ()
    return WarpAccess(
        buffer, placed, path, const(0) if item is None else _stride_along(placed, shape, item), width, bank_words
    )


def _bank_words(
    buffer: Buffer, where: Sequence[Expr], shape: Sequence[Expr], path: Sequence[For], width: Expr
) -> tuple[Expr, ...]:
    """Return the places that the work-items of a warp access at once; () where a stride determines them.

    They are rows of a matrix that a warp loads, vectors of swizzled rows that its first work-items access, or words of all
    its work-items. The last apply where indices are digits of the work-item's number.
    """
    marked = next((INTRINSICS[p.marks.intrinsic] for p in path if p.marks.intrinsic), None)
    by_warp = marked is not None and marked.of_warp
    items = sorted((p for p in path if p.kind == "item"), key=lambda p: p.axis)
    size = ROW if by_warp else buffer.swizzle or 1
    if not by_warp and (as_int(width) != size or not (buffer.swizzle or _has_remainder(where, items))):
        return ()
    if size * buffer.dtype.bytes not in ACCESS_BYTES:
        return ()
    count = LINE_BYTES // (size * buffer.dtype.bytes)
    if by_warp:
        words: list[tuple[Expr, Expr]] = [(const(r), const(0)) for r in range(count)]
    else:
        row: Expr = const(0)
        for e, d in zip(where[:-1], shape[:-1]):
            row = row * d + e
        start: dict[Var, Expr] = {p.var: const(0) for p in path}
        words = []
        for t in range(count):
            left: Expr = const(t)
            for p in items:
                start[p.var], left = floormod(left, p.extent), floordiv(left, p.extent)
            words.append((substitute(row, start), substitute(where[-1], start) // size))
    vectors = shape[-1] // size
    return tuple(simplify(r * vectors + (swizzled(r, c, vectors, count) if buffer.swizzle else c)) for r, c in words)


def _has_remainder(where: Sequence[Expr], items: Sequence[For]) -> bool:
    """Return whether an index has a remainder that moves with the work-items."""
    moving = {p.var for p in items}
    return any(n.op == "floormod" and moving & set(free_vars(n)) for n in postorder(where))


def _stride_along(where: Sequence[Expr], shape: Sequence[Expr], loop: For) -> Expr:
    """Return the elements between the accesses of consecutive iterations."""
    flat: Expr = const(0)
    total: Expr = const(0)
    scale: Expr = ONE
    for e, dim in zip(reversed(where), reversed(shape)):
        flat = flat + mul(scale, e)
        total = total + mul(scale, _index_step(e, loop.var))
        scale = mul(scale, dim)
    parts = linear(simplify(flat), (loop.var,))
    return simplify(total if parts is None else parts[0].get(loop.var, const(0)))


def _index_step(e: Expr, var: Var) -> Expr:
    """Return the change of an index as a variable grows by one.

    A remainder (lowest digit) moves like its number, a quotient (higher digit) counts as constant.
    """
    parts = None if loads(e) else linear(e, (var,))
    if parts is not None:
        return parts[0].get(var, const(0))
    if e.op in ("add", "sub"):
        return add(*(_index_step(x, var) for x in e.args)) if e.op == "add" else _index_step(e.args[0], var)
    if e.op == "mul" and var not in free_vars(e.args[1]):
        return mul(_index_step(e.args[0], var), e.args[1])
    if e.op in ("floormod", "min", "max"):
        return _index_step(e.args[0], var)
    if e.op == "floordiv":
        return const(0)
    return const(UNKNOWN_STRIDE)


def sector_bytes(x: WarpAccess) -> Expr:
    """Return the bytes of memory sectors per work-item: the used bytes at least, its own sectors at most."""
    size = x.buffer.dtype.bytes
    used = mul(x.width, size)
    # With strides beyond a sector, work-items share no sector: each moves whole ones.
    one_sector_each = mul(ceildiv(used, SECTOR_BYTES), SECTOR_BYTES)
    return select(eq(x.stride, 0), const(0), maximum(used, minimum(mul(x.stride, size), one_sector_each)))


def bank_conflicts(x: WarpAccess) -> Expr:
    """Return the factor by which bank conflicts slow down an access to shared memory.

    For a stride it is the greatest common divisor of the stride and the number of banks, both in accesses. Wide accesses are
    served to as many work-items at a time as there are banks for. Known places are counted.
    """
    if len(x.bank_words) == BANKS:  # words of a whole warp: count the conflicts with the first one
        first, *others = x.bank_words
        return _sum(
            [ONE, *(select(and_(ne(a, first), eq(floormod(a - first, BANKS), 0)), ONE, const(0)) for a in others)]
        )
    if x.bank_words:
        count = len(x.bank_words)
        first_of_word = [and_(*(ne(a, b) for b in x.bank_words[:at])) for at, a in enumerate(x.bank_words)]
        same = [
            _sum(
                [
                    select(and_(f, eq(floormod(a - b, count), 0)), ONE, const(0))
                    for f, b in zip(first_of_word, x.bank_words)
                ]
            )
            for a in x.bank_words
        ]
        return reduce(maximum, same)
    # Banks are four bytes wide, and an access of several words is served in several passes over fewer work-items.
    wide = ceildiv(mul(x.width, x.buffer.dtype.bytes), 4)
    words_between = ceildiv(ceildiv(mul(x.stride, x.buffer.dtype.bytes), 4), wide)
    total: Expr = ONE
    step = 2
    while step <= BANKS:
        total = total + select(
            # 1 + 1 + 2 + 4 ...: each power of two that divides the stride doubles the sum, which is then the common divisor
            and_(eq(floormod(words_between, step), 0), le(mul(wide, step), BANKS)),
            const(step // 2),
            const(0),
        )
        step *= 2
    return select(eq(x.stride, 0), ONE, total)


def group_bytes(accesses: Sequence[WarpAccess]) -> Expr:
    """Return the bytes of global memory that a group touches, once for each access in the program."""
    return _sum([_footprint(x) for x in accesses])


def _footprint(x: WarpAccess) -> Expr:
    total: Expr = const(x.buffer.dtype.bytes)
    inner = {p.var: p.extent for p in x.path if p.kind != "group"}
    for e, dim in zip(x.where, x.buffer.shape):
        extents = {v: inner[v] for v in free_vars(e) if v in inner}
        if extents:
            total = mul(total, extent_within(e, extents, dim))
    return total


def gpu_features(func: PrimFunc, main: Block, hardware: HardwareInfo) -> list[tuple[str, Expr, Expr, bool]]:
    """Return (name, numerator, denominator, logarithmic) of the GPU features, of the kernel that `main` is in."""
    kernel = next(k for k in kernels(func) if main in blocks(k))
    items, at_once = group_items(func, kernel), resident_groups(func, kernel, hardware)
    groups = _product([p.extent for p in enclosing(func, main) if p.kind == "group"])
    room = mul(at_once, hardware.workers)
    waves = ceildiv(groups, maximum(room, 1))
    far, near = list(warp_accesses(func, kernel, False)), list(warp_accesses(func, kernel, True))
    used = _sum([mul(x.executions, mul(x.width, x.buffer.dtype.bytes)) for x in far])
    moved = _sum([mul(x.executions, sector_bytes(x)) for x in far])
    return [
        ("gpu_items", items, ONE, True),
        ("gpu_groups", groups, ONE, True),
        ("gpu_shared", shared_bytes(func, kernel, hardware), ONE, True),
        ("gpu_registers", registers(func, kernel), ONE, True),
        ("gpu_at_once", at_once, ONE, True),
        ("gpu_occupancy", mul(at_once, items), const(hardware.sm_max_threads), False),
        ("gpu_waves", waves, ONE, True),
        ("gpu_wave_use", groups, mul(waves, room), False),
        ("gpu_used_of_moved", used, maximum(moved, 1), False),
        ("gpu_moved", moved, ONE, True),
        (
            "gpu_conflicts",
            _sum([mul(x.executions, bank_conflicts(x)) for x in near]),
            maximum(_sum([x.executions for x in near]), 1),
            True,
        ),
        ("gpu_group_bytes", group_bytes(far), ONE, True),
        ("gpu_traffic", mul(groups, group_bytes(far)), ONE, True),
        ("gpu_kernels", const(len(kernels(func))), ONE, False),
    ]


def _product(parts: Sequence[Expr]) -> Expr:
    return reduce(mul, parts, ONE)


def _sum(parts: Sequence[Expr]) -> Expr:
    total: Expr = const(0)
    for p in parts:
        total = total + p
    return total
