"""Row-wise functions: softmax, normalisations, row reductions, with fused producers and epilogues.

A thread or work-group takes a chunk of rows. Every stage runs on a row while it is in cache, in vector loops with one
accumulator per lane. Stages with the same steps along a row share one loop.

Tests: `tests/schedules/rules/test_on_devices.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.prove import Proof, prove
from relax_tune.ir.core.expr import Tunable, as_int, const, eq
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.analysis import final_block, inlinable, is_expensive, reductions
from relax_tune.schedules.loop_tree import find_block, find_loop, loop_env
from relax_tune.schedules.rules.shared.reductions import require_rowwise
from relax_tune.schedules.rules.shared.searches import searches
from relax_tune.schedules.rules.shared.vectorize import accumulate, decompose, hoist_reciprocal, in_vectors
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

Keep = Literal["expensive", "all", "none"]


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield every sketch of a row-wise function; none for other functions, nor for searches."""
    if not reductions(func) or searches(func):
        return
    forms: list[tuple[str, Keep, bool]] = [
        ("registers", "expensive", True),
        ("keep_expensive", "expensive", False),
        ("keep_all", "all", False),
        ("keep_none", "none", False),
    ]
    traces: set[str] = set()
    short = False
    for order in hardware.orders:
        for name, keep, in_registers in forms:
            if short and keep != "expensive":
                continue  # a row in registers is neither stored nor computed again
            try:
                schedule = build(func, hardware, order == "parallel", keep, in_registers)
            except ScheduleError:
                continue
            short = short or in_registers
            # Forms that inline or keep the same stages give the same schedule, which would be searched twice.
            text = schedule.trace.to_json()
            if text not in traces:
                traces.add(text)
                yield f"rowwise.{order}.{name}", schedule


def build(func: PrimFunc, hardware: HardwareInfo, parallel: bool, keep: Keep, in_registers: bool = False) -> Schedule:
    """Apply one structural choice.

    Args:
        keep: The elementwise stages that are stored rather than computed again where they are read.
        in_registers: Whether a row and its stored stages stay in registers.
    """
    s = Schedule(func)
    for block in blocks(func.body):
        current = find_block(s.func, block.name)
        # Several stages read an elementwise stage, such as exp of a softmax. Storing it costs a pass over the row,
        # computing it again its arithmetic.
        if inlinable(s.func, current) and (keep == "none" or (keep == "expensive" and not is_expensive(current))):
            s.compute_inline(block.name)
    for block in reductions(s.func):
        require_rowwise(block)
    if in_registers:
        _require_short(s.func, hardware)
    for block in blocks(s.func.body):
        hoist_reciprocal(s, block.name)
    per_thread = s.tunable("RB", (1, 2, 4, 8, 16, 32, 64, 128))
    if len(func.output_buffers) == 1:
        f_0, f_1 = _under_output(s, per_thread, in_registers)
    else:
        f_0, f_1 = _outputs_together(s, per_thread)
    if in_registers:
        for block in blocks(s.func.body):
            _vectorise_whole(s, block.name, f_1, hardware)
    else:
        width = s.tunable("VL", _widths(s.func, hardware))
        stages = [_vectorise(s, block.name, f_1, width) for block in blocks(s.func.body)]
        _fuse_stage_loops(s, [loop for loop in stages if loop is not None])
    for block in blocks(s.func.body):
        decompose(s, block.name, s.inner_loops(block.name, f_1))
    if parallel:
        s.set_kind(f_0, "group" if hardware.has_grid else "parallel")
    return s


def _widths(func: PrimFunc, hardware: HardwareInfo) -> list[int]:
    """Return the widths of one, two or four vectors, up to the length of constant rows."""
    extents = [as_int(b.iters[-1].extent) for b in _along_rows(func)]
    known = [e for e in extents if e is not None]
    longest = max(known) if known and len(known) == len(extents) else None
    options = [hardware.lanes * u for u in (1, 2, 4)]
    # A vector beyond the longest row would have idle lanes in every stage.
    return [w for w in options if longest is None or w < longest + hardware.lanes] or options[:1]


def _along_rows(func: PrimFunc) -> list[Block]:
    """Return the blocks that compute more than one number of a row."""
    rows = min((len(b.body.indices) for b in reductions(func)), default=0)
    return [b for b in blocks(func.body) if len(b.iters) > rows]


def _require_short(func: PrimFunc, hardware: HardwareInfo) -> None:
    """Raise ScheduleError unless every row fits in half of the vector registers."""
    for block in _along_rows(func):
        extent = as_int(block.iters[-1].extent)
        # The other half is for accumulators, constants, and the stages that are computed from the row.
        if extent is None or -(-extent // hardware.lanes) > hardware.registers // 2:
            raise ScheduleError(f"{func.name}: the rows of block {block.name!r} do not fit in registers")


def _outputs_together(s: Schedule, per_thread: Tunable) -> tuple[str, str]:
    """Fuse all stages of a function of several outputs into one loop over rows. Returns the loops over chunks and rows."""
    outputs = blocks(s.func.body)
    rows = min(len(b.body.indices) for b in outputs)
    if rows == 0 or any(b.body.indices[:rows] != tuple(i.var for i in b.iters[:rows]) for b in outputs):
        raise ScheduleError(f"{s.func.name}: rows are not the leading dimensions of every stage")
    # before fusing each nest: the loops of the dimensions show that rows are distinct, quotients of one fused loop do not
    first, *others = [s.loops_of(b.name)[:rows] for b in outputs]
    for other in others:
        for a, b in zip(first, other, strict=True):
            s.fuse_sibling_loops(a, b)
    f_0, f_1 = s.split(s.fuse(first), [None, per_thread])
    s.set_tail(f_0, "peel")
    return f_0, f_1


def _under_output(s: Schedule, per_thread: Tunable, in_registers: bool) -> tuple[str, str]:
    """Compute every stage inside the last stage's loop over rows. Returns the loops over chunks and rows."""
    last = final_block(s.func)
    rows = min(len(b.body.indices) for b in reductions(s.func))
    if last.is_reduction:
        rows = min(rows, len(last.body.indices))
    if rows == 0 or tuple(last.body.indices[:rows]) != tuple(i.var for i in last.iters[:rows]):
        raise ScheduleError(f"{s.func.name}: rows are not the leading dimensions of the output")
    others = [b for b in blocks(s.func.body) if b.name != last.name]
    row_loops = s.loops_of(last.name)[:rows]
    f_0, f_1 = s.split(s.fuse(row_loops), [None, per_thread])
    s.set_tail(f_0, "peel")
    for block in reversed(others):
        s.compute_at(block.name, f_1)
    for block in others:
        buffer = s.buffer_of(block.name)
        # One number per row is a register; a stage along the row is not.
        if in_registers or len(block.body.indices) == rows or all(_is_one(d) for d in buffer.shape[rows:]):
            s.set_scope(buffer=buffer.name, scope="local")
        else:
            _keep_in_output(s, buffer.name, last)
    return f_0, f_1


def _is_one(e: object) -> bool:
    return e is const(1)


def _keep_in_output(s: Schedule, buffer: str, last: Block) -> None:
    try:
        s.reuse_output(buffer=buffer, output=last.body.buffer.name)
    except ScheduleError:
        return  # stays in global scratch memory


def _vectorise(s: Schedule, block: str, row: str, width: Tunable) -> str | None:
    """Vectorise one stage. Returns its loop over vectors, or None for a stage without one."""
    inner = s.inner_loops(block, row)
    return in_vectors(s, block, inner[-1], width) if inner else None


def _vectorise_whole(s: Schedule, block: str, row: str, hardware: HardwareInfo) -> None:
    """Vectorise a whole row without a loop; in its last vector some lanes may be idle."""
    inner = s.inner_loops(block, row)
    if not inner:
        return
    column = inner[-1]
    outer = None
    if not hardware.has_grid:
        outer, column = s.split(column, [None, hardware.lanes])
    if find_block(s.func, block).is_reduction:
        accumulate(s, block, column)
    if outer is not None:
        s.unroll(outer)
    s.vectorize(column)


def _fuse_stage_loops(s: Schedule, stages: list[str]) -> None:
    """Fuse the vector loops of neighbouring stages where no iteration reads another iteration's elements."""
    current = stages[0] if stages else None
    for following in stages[1:]:
        assert current is not None
        a, b = find_loop(s.func, current), find_loop(s.func, following)
        try:
            if prove(eq(a.extent, b.extent), loop_env(())) is Proof.YES:
                s.fuse_sibling_loops(current, following)
                continue
        except ScheduleError:
            pass
        current = following
