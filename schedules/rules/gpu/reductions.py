"""GPU rule for reductions across columns, and for reductions of few long rows.

columns: consecutive threads have consecutive results, and the threads of axis 1 share the steps of a result.
two_pass: thread blocks reduce chunks of a long row, and a second kernel combines the partial results: a thread block for each
result, or one thread for a single result.

Tests: `tests/schedules/rules/test_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, as_int, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.analysis import final_block, inlinable, reductions
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.reductions import reduce_in_chunks, require_rowwise, stages_across
from relax_tune.schedules.rules.shared.threads import (
    limit_threads,
    reduce_across_threads,
    split_over_threads,
    thread_counts,
    thread_per_element,
    warps_per_row,
)
from relax_tune.schedules.rules.shared.vectorize import hoist_reciprocal
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

FEW_RESULTS = 64
"""From this number of results on, the rows occupy every multiprocessor."""
SHORT = 2048
"""A row with fewer steps than this is too short for several thread blocks."""
CHUNKS = (1 << 10, 1 << 12, 1 << 14, 1 << 16)
"""Steps of a chunk."""


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield the sketches of a reduction across columns or of few long rows; none for other functions."""
    if not reductions(func):
        return
    forms = (("columns", _columns), ("two_pass", _two_pass))
    yield from try_forms(func, ((f"reductions.{name}", partial(make, func, hardware)) for name, make in forms))


def _columns(func: PrimFunc, hardware: HardwareInfo) -> Schedule:
    """Compute all stages inside the loop over TX columns of the last one; TY threads share the steps of a column."""
    s = Schedule(func)
    _inline_stages(s)
    last = final_block(s.func)
    stages, across = stages_across(s.func)
    hoist_reciprocal(s, last.name)
    items = s.tunable("TX", [n for n in thread_counts(hardware, 16) if n <= 256])
    height = s.tunable("TY", (1, 2, 4, 8, 16, 32))
    limit_threads(s, hardware, mul(items, height))
    *outer, column = s.loops_of(last.name)
    j_0, j_t = s.split(column, [None, items])
    for block in reversed(stages):
        s.compute_at(block.name, j_t if block.name in across else j_0)
    for block in stages:
        loop = j_t if block.name in across else j_0
        s.set_scope(buffer=s.buffer_of(block.name).name, scope="local")
        first, *rest = s.inner_loops(block.name, loop)
        _share_steps(s, block.name, first, rest, height)
    s.bind(j_t, "item", 0)
    s.bind(j_0, "group", 0)
    if outer:
        s.bind(s.fuse(outer), "group", 1)
    s.guess({"TX": 32, "TY": 8})
    return s


def _share_steps(s: Schedule, block: str, first: str, rest: list[str], height: Expr) -> None:
    """Divide the steps of a reduction among `height` threads of axis 1, whose partial results meet in shared memory.

    Args:
        first, rest: The reduction's loops inside a column.
    """
    rounds, item, single = s.split(first, [None, height, 1])
    s.reorder([item, rounds, *rest, single])
    partial = reduce_across_threads(s, block, [item], single, axis=1)
    left = s.buffer_of(partial)
    rank = len(left.shape)
    # Consecutive threads have consecutive columns: with the sharing threads in front, they write different banks.
    s.permute_layout(buffer=left.name, order=[rank - 1, *range(rank - 1)])


def _two_pass(func: PrimFunc, hardware: HardwareInfo) -> Schedule:
    """Reduce in chunks, with a thread block for each chunk; give every point of the other blocks a thread."""
    s = Schedule(func)
    _inline_stages(s)
    nodes = reductions(s.func)
    for block in nodes:
        require_rowwise(block)
        _require_long(block)
    across = warps_per_row(s, hardware)
    chunk = s.tunable("L", CHUNKS)
    for block in blocks(s.func.body):
        if block not in nodes:
            names = s.loops_of(block.name)
            if names:
                thread_per_element(s, names, mul(*across))
            continue
        *outer, along = s.loops_of(block.name)
        c, inside = s.split(along, [None, chunk])
        # The two passes are two kernels, since thread blocks of one kernel cannot wait for each other.
        part = reduce_in_chunks(s, block.name, c, len(outer))
        _reduce_in_thread_block(s, part, inside, across)
        s.bind(s.fuse(s.loops_of(part)[: len(outer) + 1]), "group")
        left = s.loops_of(block.name)[-1]
        if outer:
            _reduce_in_thread_block(s, block.name, left, across)
            s.bind(s.fuse(outer), "group")
    s.guess({"TW": min(8, hardware.group_size // 32), "L": 1 << 12})
    return s


def _reduce_in_thread_block(s: Schedule, block: str, along: str, across: Sequence[Expr | int]) -> None:
    """Reduce over one loop by the threads of a thread block."""
    rounds, item, single = split_over_threads(s, along, across, 1)
    s.reorder([*item, rounds, single])
    reduce_across_threads(s, block, item, single)


def _inline_stages(s: Schedule) -> None:
    """Inline the elementwise blocks before outputs, and give each reduction an intermediate."""
    for block in blocks(s.func.body):
        if inlinable(s.func, find_block(s.func, block.name)):
            s.compute_inline(block.name)
    for block in reductions(s.func):
        if block.body.buffer in s.func.output_buffers:
            s.cache_write(block=block.name, scope="global")


def _require_long(block: Block) -> None:
    """Raise ScheduleError unless the block computes few results from long rows, as far as extents are known."""
    steps = [as_int(i.extent) for i in block.iters if i.kind == "reduce"]
    results = 1
    for i in block.iters:
        results *= (as_int(i.extent) or 1) if i.kind == "spatial" else 1
    if len(steps) != 1 or (steps[0] is not None and steps[0] < SHORT) or results >= FEW_RESULTS:
        raise ScheduleError(f"block {block.name!r} has enough rows for all multiprocessors, or too few steps")
