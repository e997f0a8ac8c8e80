"""Products with few rows: a matrix and a vector, or a small batch of vectors, bound by the bytes of the matrix.

Two forms. `columns`: columns of the output are vector lanes; constant weights, decoded in the kernel where they are stored in few
bits, lie in panels as wide as a vector, so that one layout serves every tile and a tile of several panels reads several streams at
once. `dots`: the reduction runs along memory in both operands, so that lanes are steps of it; nothing is packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, Var, add, as_int, floordiv, free_vars, le, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.analysis import final_block, reductions
from relax_tune.schedules.loop_tree import block_loads, find_block
from relax_tune.schedules.rules.shared.contraction import (
    FEW_ROWS,
    Contraction,
    find_contraction,
    inline_around,
    is_product,
    output_column,
    packed_steps,
)
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

Form = Literal["columns", "dots"]

PREFETCH_BYTES = 2048
"""How far ahead of its use a panel is asked for."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The structural decisions of one sketch. grouped: factors of groups of steps are multiplied by once a group; ahead: panels are
    asked of memory before they are needed."""

    form: Form
    parallel: bool
    grouped: bool = False
    prefetch: bool = False

    @property
    def name(self) -> str:
        marks = f"{'.grouped' if self.grouped else ''}{'.prefetch' if self.prefetch else ''}"
        return f"gemv.{self.form}{marks}.{'parallel' if self.parallel else 'serial'}"


def sketches(func: PrimFunc, machine: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Every sketch of a product with few rows, or rows of which nothing is known; nothing for other functions."""
    if not is_product(func):
        return
    for parallel in (True, False):
        if machine.has_grid and not parallel:
            continue
        choices = (
            Choice("columns", parallel),
            Choice("columns", parallel, prefetch=True),
            Choice("columns", parallel, grouped=True),
            Choice("dots", parallel),
        )
        yield from try_forms((choice.name, partial(build, func, machine, choice)) for choice in choices)


def build(func: PrimFunc, machine: HardwareInfo, choice: Choice) -> Schedule:
    """Apply one structural choice. Raises ScheduleError where it does not fit the function."""
    s = Schedule(func)
    main = reductions(func)[0].name
    inline_around(s, main)
    target = find_block(s.func, main).body.buffer
    if target in s.func.output_buffers:
        s.apply("cache_write", block=main, scope="local")
    else:
        s.apply("set_scope", buffer=target.name, scope="local")
    epilogue = final_block(s.func)
    roles = find_contraction(find_block(s.func, main), output_column(s, main, epilogue))
    rows = None if roles.row is None else as_int(_extent(roles.block, roles.row))
    if roles.row is not None and rows is not None and rows > FEW_ROWS and not _is_decoded(roles):
        raise ScheduleError(f"{func.name}: {rows} rows are many")
    with suppress(ScheduleError):  # nothing may be the same all along
        s.apply("hoist_factors", block=main)
    if choice.form == "dots":
        return _dots(s, main, epilogue.name, roles, machine, choice)
    return _columns(s, main, epilogue.name, roles, machine, choice)


def _columns(
    s: Schedule, main: str, epilogue: str, roles: Contraction, machine: HardwareInfo, choice: Choice
) -> Schedule:
    """Lanes are columns; a tile is some rows by some vectors of columns, each vector from a panel of its own."""
    block = find_block(s.func, main)
    halves, group = packed_steps(block, roles)
    if choice.grouped and (group is None or len(roles.reduce) != 1):
        raise ScheduleError(f"{s.func.name}: no factor belongs to a group of steps")
    held = roles.operand.buffer
    sizes = [as_int(d) for d in held.shape]
    few = None not in sizes and prod(n or 0 for n in sizes) * held.dtype.bytes <= machine.l2_bytes // 4
    if choice.prefetch and (machine.has_grid or not choice.parallel or few):
        raise ScheduleError(f"{s.func.name}: only C asks ahead, for panels that may not stay in its workers' caches")
    nest = dict(zip((i.var for i in block.iters), s.loops_of(main), strict=True))
    _panels(s, main, roles, machine)
    j_v, j_2 = s.split(nest[roles.column], [None, machine.lanes], divides=_divides(block, roles.column, machine.lanes))
    panels = s.tunable("V", _counts(s.extent(j_v), (1, 2, 3, 4, 6, 8)))
    j_0, j_1 = s.split(j_v, [None, panels], divides=as_int(s.extent(j_v)) is not None)
    i_0, i_1 = _rows(s, block, roles, nest)
    *others, k = [nest[v] for v in roles.reduce]
    if choice.grouped and group is not None:
        steps = s.split(k, [None, group // halves, halves])
    else:
        steps = s.split(k, [None, halves]) if halves > 1 else [k]
    s.set_tail(steps[0], "peel")
    batch = [nest[v] for v in roles.batch]
    outer, inner, reduce = [*batch, j_0, *i_0], [*i_1, j_1, j_2], [*others, *steps]
    s.reorder([*outer, *inner, *reduce])
    sums = mul(s.tunables["MR"], panels) if i_1 else panels
    s.require(le(add(add(mul(sums, 2) if choice.grouped else sums, panels), 2), machine.registers))
    _epilogue(s, epilogue, outer[-1])
    if choice.grouped:
        _sum_groups(s, main, steps[0], outer, inner)
    else:
        s.reorder([*reduce, *inner])
        s.apply("decompose_reduction", block=main, loop=reduce[0])
    if halves > 1:
        s.set_kind(steps[-1], "unrolled")
    if choice.prefetch:
        each = roles.operand.buffer.dtype.bytes * machine.lanes
        s.apply("prefetch", loop=steps[0], iterations=PREFETCH_BYTES // each)
    for stage in blocks(s.func.body):
        if stage.name != epilogue and stage.role == "compute":
            _mark(s, [x for x in s.loops_of(stage.name)[len(outer) :] if x not in reduce][-len(inner) :])
    _spread(s, machine, choice, batch, j_0)
    return s


def _sum_groups(s: Schedule, main: str, groups: str, outer: Sequence[str], inner: Sequence[str]) -> None:
    """A sum of its own for each iteration of `groups`, added to the others at its end, times what belongs to the group."""
    s.apply("rfactor", block=main, loop=groups)
    factored = f"{main}_rf"
    sums = find_block(s.func, factored).body.buffer
    last = len(sums.shape) - 1
    s.apply("permute_layout", buffer=sums.name, order=[last, *range(last)])  # lanes are its columns
    s.apply("hoist_factors", block=factored)
    s.apply("decompose_reduction", block=main, loop=s.loops_of(main)[-1])
    _apart(s, [f"{factored}_init"], len(outer), len(inner) + 1)
    _apart(s, [factored, f"{main}_init"], len(outer), len(inner))
    around = []
    for name in (f"{factored}_init", factored, main):
        own = s.loops_of(name)[len(outer) :]
        s.reorder([*own[len(inner) :], *own[: len(inner)]])
        around.append(own[len(inner)])
    s.fuse_sibling_loops(around[0], around[1])
    s.fuse_sibling_loops(around[0], around[2])


def _apart(s: Schedule, stages: Sequence[str], outer: int, inner: int) -> None:
    """Nests of their own, inside the outer loops, for blocks that share the `inner` loops below those and one that follows."""
    for stage in stages:
        for depth in reversed(range(outer, outer + inner)):
            s.apply("fission", loop=s.loops_of(stage)[depth], block=stage)


def _dots(s: Schedule, main: str, epilogue: str, roles: Contraction, machine: HardwareInfo, choice: Choice) -> Schedule:
    """Lanes are steps of the reduction; a tile is some rows by some columns with a vector of sums for each of its elements."""
    block = find_block(s.func, main)
    if choice.grouped or len(roles.reduce) != 1:
        raise ScheduleError(f"{s.func.name}: dot products run over one dimension")
    step = roles.reduce[0]
    for x in block_loads(block):
        along = [i for i, d in zip(x.indices, x.buffer.shape, strict=True) if as_int(d) != 1][-1:]
        if step in free_vars(*x.indices) and (along != [step] or sum(step in free_vars(i) for i in x.indices) != 1):
            raise ScheduleError(f"{s.func.name}: the reduction does not run along {x.buffer.name!r}")
    nest = dict(zip((i.var for i in block.iters), s.loops_of(main), strict=True))
    columns = s.tunable("NR", _counts(_extent(block, roles.column), (1, 2, 4, 8)))
    j_0, j_1 = s.split(nest[roles.column], [None, columns], divides=as_int(s.extent(nest[roles.column])) is not None)
    i_0, i_1 = _rows(s, block, roles, nest)
    width = s.tunable("VL", [machine.lanes * u for u in (1, 2)])
    k_0, k_1 = s.split(nest[step], [None, width])
    s.set_tail(k_0, "peel")
    batch = [nest[v] for v in roles.batch]
    outer, inner = [*batch, j_0, *i_0], [*i_1, j_1]
    s.reorder([*outer, *inner, k_0, k_1])
    vectors = mul(columns, floordiv(width, machine.lanes))
    s.require(le(add(mul(s.tunables["MR"], vectors) if i_1 else vectors, add(vectors, 2)), machine.registers))
    _epilogue(s, epilogue, outer[-1])
    s.apply("rfactor", block=main, loop=k_1)
    s.apply("decompose_reduction", block=main, loop=s.loops_of(main)[-1])
    factored = f"{main}_rf"
    _apart(s, [f"{factored}_init", factored, f"{main}_init"], len(outer), len(inner))
    own = s.loops_of(factored)[len(outer) :]
    s.reorder([k_0, *(x for x in own if x != k_0)])
    for stage in (factored, f"{factored}_init"):
        _mark(s, [name for name in s.loops_of(stage)[len(outer) :] if name != k_0])
    for stage in (main, f"{main}_init"):
        for name in s.loops_of(stage)[len(outer) :][: len(inner)]:
            s.set_kind(name, "unrolled")
    narrow = (as_int(_extent(block, roles.column)) or machine.lanes) < machine.lanes
    _spread(s, machine, choice, batch, i_0[0] if narrow and i_0 and not batch else j_0)
    return s


def _rows(
    s: Schedule, block: Block, roles: Contraction, nest: Mapping[Var, str]
) -> tuple[Sequence[str], Sequence[str]]:
    """The loops over tiles of rows and over the rows of one; without a row, neither."""
    if roles.row is None:
        return (), ()
    extent = as_int(_extent(block, roles.row))
    even = {-(-(extent or 0) // t) for t in range(1, FEW_ROWS + 1)} & set(range(1, 9))
    height = s.tunable("MR", sorted(even) if extent else range(1, 9))
    i_0, i_1 = s.split(nest[roles.row], [None, height])
    s.set_tail(i_0, "exact")
    return (i_0,), (i_1,)


def _panels(s: Schedule, main: str, roles: Contraction, machine: HardwareInfo) -> None:
    """Constant operands with columns are laid out in panels one vector wide, once; others must have them last. Without any there is
    nothing that tiles of a product with many rows do not do as well."""
    packed = 0
    for access in block_loads(find_block(s.func, main)):
        if roles.column not in free_vars(*access.indices):
            continue
        dims = [d for d, e in enumerate(access.indices) if e is roles.column]
        rank = len(access.indices)
        if access.buffer not in s.func.consts or rank == 1:
            if dims != [rank - 1]:
                raise ScheduleError(f"{s.func.name}: columns of {access.buffer.name!r} are not next to each other")
            continue
        name = access.buffer.name
        if len(dims) != 1 or sum(x.buffer is access.buffer for x in block_loads(find_block(s.func, main))) != 1:
            raise ScheduleError(f"{s.func.name}: {name!r} cannot be packed by columns")
        s.apply("cache_read", block=main, buffer=name, scope="global")
        copy = next(b for b in blocks(s.func.body) if b.body.buffer.name == f"{name}_cache")
        s.apply("mark_prepack", block=copy.name)
        rest = [d for d in range(rank + 1) if d not in (dims[0], dims[0] + 1)]
        order = [dims[0], *rest, dims[0] + 1]
        s.apply("tile_layout", buffer=f"{name}_cache", dim=dims[0], factor=machine.lanes, order=order)
        packed += 1
    if not packed:
        raise ScheduleError(f"{s.func.name}: no constant operand has columns")


def _is_decoded(roles: Contraction) -> bool:
    """Whether the operand with columns is stored in fewer bits than it is computed with."""
    return any(x.buffer.dtype.is_int and roles.column in free_vars(*x.indices) for x in block_loads(roles.block))


def _extent(block: Block, var: Var) -> Expr:
    return next(i.extent for i in block.iters if i.var is var)


def _divides(block: Block, var: Var, factor: int) -> bool:
    extent = as_int(_extent(block, var))
    return extent is not None and extent % factor == 0


def _counts(extent: Expr, options: Sequence[int]) -> Sequence[int]:
    """The options that divide a constant extent, all of them where it is not constant."""
    size = as_int(extent)
    return options if size is None else [o for o in options if size % o == 0] or [1]


def _epilogue(s: Schedule, epilogue: str, loop: str) -> None:
    *rest, last = s.reverse_compute_at(epilogue, loop)
    s.set_kind(last, "vectorized")
    for name in rest:
        s.set_kind(name, "unrolled")


def _mark(s: Schedule, inner: Sequence[str]) -> None:
    """The last loop in vectors, the others written out."""
    *rest, last = inner
    s.set_kind(last, "vectorized")
    for name in rest:
        s.set_kind(name, "unrolled")


def _spread(s: Schedule, machine: HardwareInfo, choice: Choice, batch: Sequence[str], tiles: str) -> None:
    """Tiles to threads or work-groups, those of each batch element beside the others'."""
    if not choice.parallel:
        return
    if not machine.has_grid:
        s.set_kind(s.fuse([*batch, tiles]), "parallel")
        return
    s.set_kind(tiles, "group", axis=0)
    if batch:
        s.set_kind(s.fuse(batch), "group", axis=1)
