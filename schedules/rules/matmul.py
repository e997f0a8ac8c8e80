"""Matmul-like functions: sums of products with whatever is fused around them.

Register tiles of MR rows by NR vectorised columns accumulate over the whole reduction (no blocking of it:
panels of these sizes stay in cache); a constant operand is packed once into column panels, a strided one
per panel; the epilogue is computed on the tile while it is in registers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from relax_tune.errors import ScheduleError
from relax_tune.ir.expr import Tunable, Var, as_int, ceildiv, free_vars, le
from relax_tune.ir.function import PrimFunc
from relax_tune.ir.stmt import Block, Tail, blocks
from relax_tune.schedules.analysis import contraction, depends_on, final_block, inlinable, multiplies, reductions
from relax_tune.schedules.nest import block_loads, find_block, find_loop
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import Machine

Order = Literal["panels", "blocks", "serial"]


@dataclass(frozen=True, slots=True)
class Choice:
    """The structural decisions of one sketch."""

    order: Order
    tail: Tail
    packed: bool

    @property
    def name(self) -> str:
        return f"matmul.{self.order}.{self.tail}.{'packed' if self.packed else 'direct'}"


def sketches(func: PrimFunc, machine: Machine) -> Iterator[tuple[str, Schedule]]:
    """Every sketch of a matmul-like function; nothing when the function is none."""
    found = reductions(func)
    if len(found) != 1 or found[0].init is None or not multiplies(found[0]):
        return
    orders: tuple[Order, ...] = ("panels", "blocks", "serial")
    tails: tuple[Tail, ...] = ("pow2", "predicate")
    for order in orders:
        for tail in tails:
            for packed in (True, False):
                choice = Choice(order, tail, packed)
                try:
                    schedule = build(func, machine, choice)
                except ScheduleError:
                    continue
                yield choice.name, schedule


def build(func: PrimFunc, machine: Machine, choice: Choice) -> Schedule:
    """Apply one structural choice. Raises ScheduleError where it does not fit the function."""
    s = Schedule(func)
    main = reductions(func)[0].name
    inline_around(s, main)
    if find_block(s.func, main).body.buffer in s.func.output_buffers:
        s.apply("cache_write", block=main, scope="local")
    else:
        s.apply("set_scope", buffer=find_block(s.func, main).body.buffer.name, scope="local")
    epilogue = final_block(s.func)
    roles = contraction(find_block(s.func, main), output_column(s, main, epilogue))
    copy = _pack(s, main, roles.operand.buffer.name, roles.column, choice.packed)

    nest = dict(zip((i.var for i in find_block(s.func, main).iters), s.loops_of(main), strict=True))
    width = s.tunable("NR", _widths(find_block(s.func, main), roles.column, machine))
    divides = _always_divides(find_block(s.func, main), roles.column, width)
    if copy is not None and choice.packed and copy[1] == "prepare":
        dim = copy[2]
        rank = len(roles.operand.buffer.shape)
        rest = [d for d in range(rank + 1) if d not in (dim, dim + 1)]
        s.apply("tile_layout", buffer=copy[0], dim=dim, factor=width, order=[dim, *rest, dim + 1])
    j_0, j_1 = s.split(nest[roles.column], [None, width], divides=divides)
    if not divides:
        s.set_tail(j_0, "peel")
    batch = [nest[v] for v in roles.batch]
    reduce = [nest[v] for v in roles.reduce]
    rows: list[str] = []
    outer: list[str] = []
    if roles.row is not None:
        height = s.tunable("MR", range(1, 15))
        if choice.order == "blocks":
            group = s.tunable("IB", (1, 2, 4, 8, 16, 32))
            i_g, i_0, i_1 = s.split(nest[roles.row], [None, group, height])
            outer, rows = [i_g], [i_0, i_1]
        else:
            rows = s.split(nest[roles.row], [None, height])
        s.set_tail(rows[0], choice.tail)
        s.require(le(height * ceildiv(width, machine.lanes) + ceildiv(width, machine.lanes) + 1, machine.registers))
    elif choice.tail != "predicate" or choice.order == "blocks":
        raise ScheduleError("no row iterator: one order and one tail is all there is")
    s.reorder([*batch, *outer, j_0, *rows[:1], *reduce, *rows[1:], j_1])
    tile_loop = rows[0] if rows else j_0
    if copy is not None and copy[1] == "local":
        _local_panel(s, copy, j_0)
    e_loops = s.reverse_compute_at(epilogue.name, tile_loop)
    s.set_kind(e_loops[-1], "vectorized")
    for name in e_loops[:-1]:
        s.set_kind(name, "unrolled")
    for name in rows[1:]:
        s.set_kind(name, "unrolled")
    s.set_kind(j_1, "vectorized")
    s.apply("decompose_reduction", block=main, loop=reduce[0])
    _distribute(s, machine, choice.order, batch, outer, j_0)
    return s


def inline_around(s: Schedule, main: str) -> None:
    """Fold spatial producers into the contraction and the chain after it into its last block."""
    for b in blocks(s.func.body):
        if b.name != main and inlinable(s.func, b):
            s.compute_inline(b.name)
    last = final_block(s.func)
    rest = [b for b in blocks(s.func.body) if b.name not in (main, last.name)]
    if rest or (last.name != main and not depends_on(s.func, last, find_block(s.func, main))):
        raise ScheduleError(f"{s.func.name}: more than a contraction and its epilogue")


def output_column(s: Schedule, main: str, epilogue: Block) -> Var:
    """The contraction's iterator that is contiguous in the output."""
    block = find_block(s.func, main)
    access = next(x for x in block_loads(epilogue) if x.buffer is block.body.buffer)
    fast = epilogue.body.indices[-1]
    for e, out in zip(access.indices, block.body.indices, strict=True):
        if e is fast and isinstance(out, Var):
            return out
    raise ScheduleError(f"{s.func.name}: the fast output dimension is not one of the contraction's")


def _pack(s: Schedule, main: str, operand: str, column: Var, packed: bool) -> tuple[str, str, int] | None:
    """Copy the column operand when asked (constant: once, in `prepare`) or needed (strided). (buffer, kind, column dim)."""
    block = find_block(s.func, main)
    access = next(x for x in block_loads(block) if x.buffer.name == operand)
    dims = [d for d, e in enumerate(access.indices) if e is column]
    constant = access.buffer in s.func.consts
    contiguous = dims == [len(access.indices) - 1]
    if not packed and contiguous:
        return None
    if len(dims) != 1 or sum(x.buffer is access.buffer for x in block_loads(block)) != 1:
        raise ScheduleError(f"{s.func.name}: {operand!r} cannot be packed by columns")
    if packed and constant:
        s.apply("cache_read", block=main, buffer=operand, scope="global")
        made = f"{operand}_cache"
        copy = next(b for b in blocks(s.func.body) if b.body.buffer.name == made)
        s.apply("mark_prepare", block=copy.name)
        return made, "prepare", dims[0]
    if packed and not contiguous:
        depth = [i.extent for i in block.iters if i.kind == "reduce" and i.var in free_vars(*access.indices)]
        if any(as_int(e) is None for e in depth):
            raise ScheduleError(f"{s.func.name}: a panel of {operand!r} has no constant size")
        s.apply("cache_read", block=main, buffer=operand, scope="local")
        rank = len(access.indices)
        made = f"{operand}_cache"
        s.apply("permute_layout", buffer=made, order=[*(d for d in range(rank) if d != dims[0]), dims[0]])
        return made, "local", dims[0]
    raise ScheduleError(f"{s.func.name}: {operand!r} is used as it is only when columns are contiguous")


def _local_panel(s: Schedule, copy: tuple[str, str, int], j_0: str) -> None:
    """Copy the panel's columns into a small array at the panel loop, columns innermost."""
    block = next(b for b in blocks(s.func.body) if b.body.buffer.name == copy[0])
    names = s.compute_at(block.name, j_0)
    by_iter = {
        i.var: b
        for i, b in zip(find_block(s.func, block.name).iters, find_block(s.func, block.name).bindings, strict=True)
    }
    column = by_iter[find_block(s.func, block.name).iters[copy[2]].var]
    inner = [n for n in names if n in {v.name for v in free_vars(column)}]
    if len(inner) != 1:
        raise ScheduleError(f"{s.func.name}: the panel of {copy[0]!r} has no column loop")
    rest = [n for n in names if n != inner[0]]
    s.reorder([*rest, inner[0]])
    s.set_kind(inner[0], "vectorized")


def _widths(block: Block, column: Var, machine: Machine) -> Sequence[int]:
    """Panel widths: one to four vectors; for a constant extent those that divide it, when any does."""
    extent = as_int(next(i.extent for i in block.iters if i.var is column))
    options = [machine.lanes * v for v in (1, 2, 3, 4)]
    if extent is not None:
        exact = [w for w in options if extent % w == 0]
        if exact:
            return exact
        narrow = [w for w in (2, 4, 8, machine.lanes) if w <= machine.lanes and extent % w == 0]
        return narrow or [w for w in options if w < 2 * extent] or options[:1]
    return options


def _always_divides(block: Block, column: Var, width: Tunable) -> bool:
    extent = as_int(next(i.extent for i in block.iters if i.var is column))
    return extent is not None and all(extent % w == 0 for w in width.domain)


def _distribute(s: Schedule, machine: Machine, order: Order, batch: list[str], outer: list[str], j_0: str) -> None:
    """Hand tiles to threads (C) or work-groups (OpenCL)."""
    if order == "serial":
        if machine.groups:
            raise ScheduleError("a work-group device has no serial form")
        return
    if machine.groups:
        axes = [j_0, *outer]
        if batch:
            axes.append(s.fuse(batch))
        for axis, name in enumerate(axes):
            s.set_kind(name, "group", axis=axis)
        return
    # the peeled panel loop cannot be fused away: threads take the loops around it, or the panels themselves
    if _is_peeled(s, j_0) and (batch or outer):
        s.set_kind(s.fuse([*batch, *outer]), "parallel")
    else:
        s.set_kind(s.fuse([*batch, *outer, j_0]), "parallel")


def _is_peeled(s: Schedule, name: str) -> bool:
    return find_loop(s.func, name).tail == "peel"
