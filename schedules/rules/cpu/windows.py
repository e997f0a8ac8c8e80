"""Padded rows: pooling, which reduces over small overlapping windows, and padding itself, with fused producers and epilogues.

The columns of a row are cut where padding begins, so that those between need no condition on the column, and vectors lie along
them. A row of a pool accumulates in a buffer that fits the cache, from which the epilogue reads it. Separable pooling reduces the
rows of windows first, which neighbouring windows share, and then along the columns.

Tests: `tests/schedules/rules/test_on_devices.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial, reduce

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.bounds import Env, interval
from relax_tune.ir.arith.linear import linear
from relax_tune.ir.arith.prove import Proof, prove_equal
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.expr import Expr, Var, as_int, const, floordiv, free_vars, maximum, minimum, postorder, sub
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.analysis import final_block, inlinable, reductions
from relax_tune.schedules.loop_tree import block_loads, find_block
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.injective import inline_into_outputs
from relax_tune.schedules.rules.shared.searches import searches
from relax_tune.schedules.rules.shared.vectorize import in_vectors
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

TAPS = 64
"""Points of a window that are unrolled at most."""
WHOLE_ROWS = 8
"""Vectors of a row that is vectorised whole at most."""


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield rows spread over threads, and the same on one thread, if the function pools by windows, or pads."""
    nodes = reductions(func)
    if len(nodes) > 1 or searches(func) or (nodes and not is_window(nodes[0])):
        return
    builders = {"windows.shared": build_shared, "windows": build} if nodes else {"padding": build_padding}
    yield from try_forms(
        func,
        (
            (f"{name}.{order}", partial(make, func, hardware, order == "parallel"))
            for name, make in builders.items()
            for order in hardware.orders
        ),
    )


def is_window(block: Block) -> bool:
    """Return whether a block reduces one array over a small window that moves along its columns."""
    steps = {i.var: as_int(i.extent) for i in block.iters if i.kind == "reduce"}
    column = block.body.indices[-1] if block.body.indices else None
    reads = [x for x in block_loads(block) if set(steps) & set(free_vars(*x.indices))]
    points = 1
    for extent in steps.values():
        points *= extent or TAPS + 1
    if block.init is None or not isinstance(column, Var) or len(reads) != 1 or not 1 < points <= TAPS:
        return False
    moves = any(set(steps) & set(free_vars(e)) and set(free_vars(e)) - set(steps) for e in reads[0].indices)
    return moves and column in free_vars(reads[0].indices[-1])


def _windows_and_epilogue(s: Schedule) -> tuple[str, str]:
    """Inline everything but the block of the windows and their epilogue. Raises ScheduleError where other stages or one row remain."""
    for block in blocks(s.func.body):
        if inlinable(s.func, find_block(s.func, block.name)):
            s.compute_inline(block.name)
    main = reductions(s.func)[0].name
    if s.buffer_of(main) in s.func.output_buffers:
        s.cache_write(block=main, scope="global")
    if len(blocks(s.func.body)) != 2:
        raise ScheduleError(f"{s.func.name}: expected windows and one epilogue")
    last = final_block(s.func).name
    if len(s.loops_of(last)) < 2:
        raise ScheduleError(f"{s.func.name}: a single row cannot be spread over workers")
    return main, last


def build_shared(func: PrimFunc, hardware: HardwareInfo, parallel: bool) -> Schedule:
    """Reduce the rows of windows first, then along their columns (`separable_reduce`), some rows at a time.

    Rows are stored before they are read at other offsets: a read that spans two stores under way waits for both.

    Raises:
        ScheduleError: Where other stages remain, or windows that cannot be separated, such as windows of one row or column.
    """
    s = Schedule(func)
    main, last = _windows_and_epilogue(s)
    node = find_block(s.func, main)
    # Along one axis there is nothing that neighbouring windows could share.
    if sum(i.kind == "reduce" and as_int(i.extent) != 1 for i in node.iters) < 2:
        raise ScheduleError(f"{func.name}: expected windows along two axes")
    loops = {i.kind: b for i, b in zip(node.iters, node.bindings)}  # the last of each kind
    assert isinstance(loops["spatial"], Var)
    assert isinstance(loops["reduce"], Var)
    (rows,) = s.separable_reduce(block=main, loop=loops["spatial"].name, step=loops["reduce"].name)
    *outer, row, column = s.loops_of(last)
    shared = s.buffer_of(rows)
    length = as_int(shared.shape[-1])
    most = hardware.l2_bytes // 2 // ((length or 1) * shared.dtype.bytes)
    several = s.tunable("R", _row_counts(as_int(s.extent(row)), most))
    block_of_rows, row = s.split(row, [None, several])
    s.compute_at(main, row)
    s.compute_at(rows, block_of_rows)
    columns = as_int(s.extent(column))
    if length is not None:
        s.set_scope(buffer=shared.name, scope="local")
    if columns is not None:
        s.set_scope(buffer=s.buffer_of(main).name, scope="local")
    inner = (block_of_rows, *_spatial_loops(s, rows, block_of_rows)[:-1])[-1]  # a single row has no loop
    edges, inside = _parts(s, rows, inner)
    wide = as_int(s.extent(_column_loop(s, inside, inner)))
    for name in edges:
        _accumulate(s, name, inner, None)
    _accumulate(s, inside, inner, s.tunable("V", _widths(wide, hardware)))
    width = s.tunable("W", _widths(columns, hardware))
    _accumulate(s, main, row, width)
    in_vectors(s, last, column, width)
    _spread(s, [*outer, block_of_rows], hardware, parallel)
    return s


def build(func: PrimFunc, hardware: HardwareInfo, parallel: bool) -> Schedule:
    """Accumulate row by row. Raises ScheduleError where other stages remain."""
    s = Schedule(func)
    main, last = _windows_and_epilogue(s)
    *outer, column = s.loops_of(last)
    s.compute_at(main, outer[-1])
    length = as_int(s.extent(column))
    if length is not None:
        s.set_scope(buffer=s.buffer_of(main).name, scope="local")
    edges, inside = _parts(s, main, outer[-1])
    wide = as_int(s.extent(_column_loop(s, inside, outer[-1])))
    width = s.tunable("W", _widths(wide, hardware))
    for name in edges:
        _accumulate(s, name, outer[-1], None)
    _accumulate(s, inside, outer[-1], width)
    in_vectors(s, last, column, width)
    _spread(s, outer, hardware, parallel)
    return s


def build_padding(func: PrimFunc, hardware: HardwareInfo, parallel: bool) -> Schedule:
    """Write row by row. Raises ScheduleError for a function without conditions on its columns."""
    s = Schedule(func)
    outputs = inline_into_outputs(s)
    if len(outputs) != 1:
        raise ScheduleError(f"{func.name}: expected one block, got {len(outputs)}")
    (block,) = outputs
    *outer, _ = s.loops_of(block.name)
    column = block.body.indices[-1] if block.body.indices else None
    if not outer or not isinstance(column, Var) or _inside(block, column) == (None, None):
        raise ScheduleError(f"{func.name}: no block has conditions on the columns of its rows")
    _, inside = _parts(s, block.name, outer[-1])
    columns = _column_loop(s, inside, outer[-1])
    in_vectors(s, inside, columns, s.tunable("W", _widths(as_int(s.extent(columns)), hardware)))
    _spread(s, outer, hardware, parallel)
    return s


def _spread(s: Schedule, rows: Sequence[str], hardware: HardwareInfo, parallel: bool) -> None:
    """Spread the loops over rows over workers, or only fuse them."""
    top = s.fuse(rows)
    if parallel:
        s.set_kind(top, "group" if hardware.has_grid else "parallel")


def _row_counts(rows: int | None, most: int) -> list[int]:
    """Return the numbers of rows of a block, at most `most`: powers of two, or all rows where they are few. None may be left."""
    counts = [r for r in (2, 4, 8, 16, 32) if (rows is None or r < rows) and r <= most]
    return counts if rows is None or rows > min(64, most) else [*counts, rows]


def _widths(columns: int | None, hardware: HardwareInfo) -> list[int]:
    """Return the widths of strips: some vectors, or all columns where they are few. Without columns none is positive."""
    vectors = [hardware.lanes * v for v in (1, 2, 4) if columns is None or hardware.lanes * v < columns]
    return vectors if columns is None or columns > WHOLE_ROWS * hardware.lanes else [*vectors, columns]


def _spatial_loops(s: Schedule, block: str, row: str) -> list[str]:
    """Return the loops of a block inside `row` that are not its reduction's. A loop of one iteration may have been left out."""
    node = find_block(s.func, block)
    reduced = {v.name for i, b in zip(node.iters, node.bindings) if i.kind == "reduce" for v in free_vars(b)}
    return [n for n in s.inner_loops(block, row) if n not in reduced]


def _column_loop(s: Schedule, block: str, row: str) -> str:
    """Return the loop of a block inside `row` along the columns. Raises ScheduleError unless there is exactly one such loop."""
    names = _spatial_loops(s, block, row)
    if len(names) != 1:
        raise ScheduleError(f"{s.func.name}: expected one loop along the columns of {block!r}, got {names}")
    return names[0]


def _parts(s: Schedule, main: str, row: str) -> tuple[list[str], str]:
    """Cut the columns where conditions on them change. Return the blocks of the edges, and the block of the columns between."""
    node = find_block(s.func, main)
    column = node.body.indices[-1]
    assert isinstance(column, Var)
    low, high = _inside(node, column)
    edges, inside = list[str](), main
    start: Expr = const(0)
    if low is not None:
        loop = _column_loop(s, inside, row)
        start = simplify(minimum(low, s.extent(loop)))
        if as_int(start) != 0:
            # The first part is the edge; the rest, which `partition` creates, may be cut again at its end.
            edges, (inside,) = [inside], s.partition(loop=loop, at=start)
    if high is not None:
        loop = _column_loop(s, inside, row)
        extent = s.extent(loop)
        length = simplify(maximum(minimum(sub(high, start), extent), const(0)))
        if prove_equal(length, extent) is not Proof.YES:
            edges += s.partition(loop=loop, at=length)
    return edges, inside


def _inside(block: Block, column: Var) -> tuple[Expr | None, Expr | None]:
    """Return the range of columns for which every condition on the column holds in the whole window; None for an open end."""
    steps = {i.var: i.extent for i in block.iters if i.kind == "reduce"}
    env = Env()
    for v, extent in steps.items():
        env = env.with_loop(v, extent)
    lows, highs = list[Expr](), list[Expr]()
    for e in postorder((block.body.value,)):
        if e.op not in ("le", "lt") or column not in free_vars(e):
            continue
        parts = linear(sub(e.args[0], e.args[1]), (column, *steps))  # at most 0, or below it
        factor = None if parts is None else as_int(parts[0].get(column, const(0)))
        if parts is None or not factor:
            continue
        # For integers, a < b is a + 1 <= b.
        most: Expr = parts[1] if e.op == "le" else parts[1] + 1
        reach = [interval(k * (steps[v] - 1), env)[1] for v, k in parts[0].items() if v is not column]
        if None in reach:
            continue
        # The condition must hold at every point of the window, so the largest contribution of the taps counts.
        most = most + sum(max(r or 0, 0) for r in reach)
        # factor * column + most <= 0: an upper end for positive factors, a lower end for negative ones, rounded
        # towards the inside.
        if factor > 0:
            highs.append(floordiv(sub(const(0), most), const(factor)) + 1)
        else:
            lows.append(floordiv(most + (-factor - 1), const(-factor)))
    return (reduce(maximum, lows) if lows else None), (reduce(minimum, highs) if highs else None)


def _accumulate(s: Schedule, block: str, row: str, width: Expr | None) -> None:
    """Unroll the window inside a loop over columns, or around vectors of `width` columns."""
    column = _column_loop(s, block, row)
    taps = [n for n in s.inner_loops(block, row) if n != column]
    if width is not None:
        strip, lanes = s.split(column, [None, width])
        s.set_tail(strip, "peel")
        s.reorder([strip, *taps, lanes])
        s.vectorize(lanes)
    else:
        s.reorder([column, *taps])
    s.unroll(*taps)
    if not taps:
        raise ScheduleError(f"{s.func.name}: the window of {block!r} has one point")
    s.decompose_reduction(block=block, loop=taps[0])
