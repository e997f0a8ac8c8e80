"""Products with few rows on GPUs, bound by the bytes of the matrix.

`dots`: the reduction runs along memory, so that the items that share a column of the output read neighbouring vectors of it, and
then exchange their sums.
`columns`: neighbouring items have neighbouring columns, and those of the second axis share out the steps; constant weights are
laid out for that once, and decoded where they are read. The items' own sums meet in shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from relax_tune.errors import ScheduleError
from relax_tune.ir.expr import Expr, Var, as_int, const, free_vars, le, mul
from relax_tune.ir.function import PrimFunc
from relax_tune.ir.stmt import blocks
from relax_tune.schedules.analysis import Contraction, contraction, final_block, multiplies, reductions
from relax_tune.schedules.nest import block_loads, find_block
from relax_tune.schedules.rules.gpu_items import (
    NEIGHBOURS,
    each_point,
    factored,
    item_counts,
    limit_items,
    vector_widths,
)
from relax_tune.schedules.rules.lanes import mark
from relax_tune.schedules.rules.matmul import inline_around, output_column
from relax_tune.schedules.rules.matvec import FEW_ROWS, steps_together
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import Machine

HEIGHTS = (1, 2, 4, 8, 16)
# A number of columns that so many divide is cut by divisors.
EVEN = 32
# Sums of an item beside what it multiplies.
MOST_SUMS = 64


def sketches(func: PrimFunc, machine: Machine) -> Iterator[tuple[str, Schedule]]:
    """Every sketch of a product with few rows, or rows of which nothing is known; nothing for other functions."""
    found = reductions(func)
    if len(found) != 1 or found[0].init is None or not multiplies(found[0]):
        return
    for name, make in (("columns", _columns), ("dots", _dots)):
        try:
            s = Schedule(func)
            roles = _prepared(s)
            make(s, roles, machine)
        except ScheduleError:
            continue
        yield f"matvec.{name}", s


def _prepared(s: Schedule) -> Contraction:
    """The product alone with its epilogue, in an intermediate, multiplied by what is the same all along at the end."""
    main = reductions(s.func)[0].name
    inline_around(s, main)
    if find_block(s.func, main).body.buffer in s.func.output_buffers:
        s.apply("cache_write", block=main, scope="global")
    with suppress(ScheduleError):  # nothing may be the same all along
        s.apply("hoist_factors", block=main)
    roles = contraction(find_block(s.func, main), output_column(s, main, final_block(s.func)))
    rows = [as_int(i.extent) for i in roles.block.iters if i.var is roles.row]
    if len(roles.reduce) != 1 or any(r is not None and r > FEW_ROWS for r in rows):
        raise ScheduleError(f"{s.func.name}: many rows, or several dimensions to sum over")
    return roles


def _dots(s: Schedule, roles: Contraction, machine: Machine) -> None:
    """TX items take the steps of NR columns in vectors; TY times as many columns to a group."""
    main, step = roles.block.name, roles.reduce[0]
    if not any(x.indices[-1] is step and roles.column in free_vars(*x.indices) for x in block_loads(roles.block)):
        raise ScheduleError(f"{s.func.name}: the reduction does not run along the matrix")
    tx, ty = s.tunable("TX", NEIGHBOURS), s.tunable("TY", (1, 2, 4, 8, 16))
    columns = s.tunable("NR", (1, 2, 4, 8))
    width = s.tunable("VL", _widths(roles, step, machine))
    limit_items(s, machine, mul(tx, ty))
    nest = dict(zip((i.var for i in roles.block.iters), s.loops_of(main), strict=True))
    i_0, i_1 = _rows(s, roles, nest, mul(columns, width))
    j_0, j_t, j_1 = s.split(nest[roles.column], [None, ty, columns])
    vectors, lanes = s.split(nest[step], [None, width], divides=as_int(s.extent(nest[step])) is not None)
    rounds, item = s.split(vectors, [None, tx])
    batch = [nest[v] for v in roles.batch]
    s.reorder([*batch, *i_0, j_0, j_t, item, rounds, *i_1, j_1, lanes])
    own = s.reverse_compute_at(final_block(s.func).name, j_t)
    partial = factored(s, main, item, "warp" if machine.exchanges else "shared")
    factored(s, partial, lanes, "local")
    s.bind(item, "item", 0)
    left, *each = s.inner_loops(main, j_t)
    if machine.exchanges:  # every item has all sums
        s.reorder([*each, left])
        s.apply("decompose_reduction", block=main, loop=left)
        s.vectorize(own[-1])
        for name in own[:-1]:
            s.unroll(name)
    else:  # an item adds up those of a column
        s.apply("storage_align", buffer=find_block(s.func, partial).body.buffer.name, factor=1, offset=1)
        s.reorder([each[-1], *each[:-1], left])
        s.apply("decompose_reduction", block=main, loop=left)
        s.reorder([own[-1], *own[:-1]])
        for name in (each[-1], own[-1]):
            s.bind(name, "item", 0)
    mark(s, {n: "unrolled" for n in (*i_1, j_1)})
    s.apply("set_scope", buffer=find_block(s.func, main).body.buffer.name, scope="local")
    s.bind(j_t, "item", 1)
    _groups(s, j_0, i_0, batch)
    rows = {"MR": 1} if i_0 else {}
    s.guess({"TX": 32, "TY": 4, "NR": columns.domain[0], "VL": width.domain[-1], **rows})


def _columns(s: Schedule, roles: Contraction, machine: Machine) -> None:
    """TX items have VL columns each; TY times as many share out their steps."""
    main, step = roles.block.name, roles.reduce[0]
    halves, _ = steps_together(roles.block, roles)
    _lay_out(s, roles, min(256, machine.group_size))
    tx, ty = s.tunable("TX", [n for n in item_counts(machine, 8) if n <= 128]), s.tunable("TY", (1, 2, 4, 8, 16))
    extent = next(as_int(i.extent) for i in roles.block.iters if i.var is roles.column)
    # vectors of columns that may be incomplete would be fetched element by element
    even = extent is not None and extent % EVEN == 0
    width = s.tunable("VL", _widths(roles, roles.column, machine) if even else (1,))
    limit_items(s, machine, mul(tx, ty))
    nest = dict(zip((i.var for i in roles.block.iters), s.loops_of(main), strict=True))
    i_0, i_1 = _rows(s, roles, nest, mul(width, halves))
    j_0, j_t, lanes = s.split(nest[roles.column], [None, tx, width], divides=even)
    rounds, item, together = s.split(nest[step], [None, ty, halves])
    batch = [nest[v] for v in roles.batch]
    s.reorder([*batch, *i_0, j_0, j_t, item, rounds, *i_1, together, lanes])
    own = s.reverse_compute_at(final_block(s.func).name, j_t)
    partial = factored(s, main, item, "shared")
    of_item = factored(s, partial, together, "local", "serial")
    own_sums = find_block(s.func, of_item).body.buffer
    rank = len(own_sums.shape)
    place = next(d for d, e in enumerate(roles.block.body.indices) if e is roles.column)
    s.apply("permute_layout", buffer=own_sums.name, order=[*(d for d in range(rank) if d != place), place])
    s.bind(item, "item", 1)
    s.apply("decompose_reduction", block=main, loop=s.inner_loops(main, j_t)[0])
    mark(s, {lanes: "vectorized", together: "unrolled", **{n: "unrolled" for n in i_1}})
    # every item has the sums, and stores them: that is little beside the matrix
    *rows, columns = own
    s.vectorize(columns)
    for row in rows:
        s.unroll(row)
    left = find_block(s.func, partial).body.buffer
    s.apply("permute_layout", buffer=left.name, order=[rank - 2, *range(rank - 2)])
    s.apply("set_scope", buffer=find_block(s.func, main).body.buffer.name, scope="local")
    s.bind(j_t, "item", 0)
    _groups(s, j_0, i_0, batch)
    few = {"MR": 1} if i_0 else {}
    vector = width.domain[-1]
    beside = max(8, min(32, 128 // vector))
    s.guess({"TX": beside, "TY": min(16, 256 // beside), "VL": vector, **few})


def _widths(roles: Contraction, along: Var, machine: Machine) -> list[int]:
    """Elements that an item reads of the matrix at once: of CUDA's vectors, which are arrays, as many as one access has room for."""
    read = [x.buffer.dtype.bytes for x in block_loads(roles.block) if roles.column in free_vars(*x.indices)]
    size = min(read) if machine.language == "cuda" else 4
    return vector_widths([i.extent for i in roles.block.iters if i.var is along], machine, size)


def _lay_out(s: Schedule, roles: Contraction, items: int) -> None:
    """Constant operands whose columns are not neighbours are turned once; others must have them last."""
    main = roles.block.name
    for access in block_loads(find_block(s.func, main)):
        if roles.column not in free_vars(*access.indices):
            continue
        dims = [d for d, e in enumerate(access.indices) if e is roles.column]
        rank = len(access.indices)
        if dims == [rank - 1]:
            continue
        name = access.buffer.name
        alone = sum(x.buffer is access.buffer for x in block_loads(find_block(s.func, main))) == 1
        if access.buffer not in s.func.consts or len(dims) != 1 or not alone:
            raise ScheduleError(f"{s.func.name}: columns of {name!r} are not next to each other")
        before = {b.name for b in blocks(s.func.body)}
        s.apply("cache_read", block=main, buffer=name, scope="global")
        copy = next(b for b in blocks(s.func.body) if b.name not in before)
        s.apply(
            "permute_layout", buffer=copy.body.buffer.name, order=[*(d for d in range(rank) if d != dims[0]), dims[0]]
        )
        each_point(s, s.loops_of(copy.name), items)
        s.apply("mark_prepare", block=copy.name)


def _rows(s: Schedule, roles: Contraction, nest: Mapping[Var, str], each: Expr) -> tuple[Sequence[str], Sequence[str]]:
    """The loops over tiles of rows and over the rows of one; without a row, neither. each: sums of an item for one row."""
    if roles.row is None:
        return (), ()
    known = next(as_int(i.extent) for i in roles.block.iters if i.var is roles.row)
    height = s.tunable("MR", [h for h in HEIGHTS if h == 1 or known is None or h <= known])
    s.require(le(mul(height, each), const(MOST_SUMS)))
    i_0, i_1 = s.split(nest[roles.row], [None, height])
    return (i_0,), (i_1,)


def _groups(s: Schedule, columns: str, rows: Sequence[str], batch: Sequence[str]) -> None:
    s.bind(columns, "group", 0)
    for name in rows:
        s.bind(name, "group", 1)
    if batch:
        s.bind(s.fuse(batch), "group", 2)
