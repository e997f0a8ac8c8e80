"""Reductions whose terms data choose, such as the rows of a sparse matrix in CSR.

Neither the terms nor the results' operands are neighbours in memory, so vectors would gather. A worker takes chunks of results, and
adds the terms of one result after the other in a register. The loop over the terms ends where the data say that the rest is neutral
(`end_loops_at_data`).

Tests: `tests/schedules/rules/test_on_devices.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import free_vars, loads
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.analysis import final_block, inlinable, reductions
from relax_tune.schedules.loop_tree import block_loads, find_block
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.searches import searches
from relax_tune.schedules.rules.shared.vectorize import decompose
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

CHUNKS = (1, 4, 16, 64, 256, 1024)
"""Results that a worker takes at a time."""


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield chunks of results spread over workers, and all on one worker, if one reduction gathers its terms."""
    nodes = reductions(func)
    if len(nodes) != 1 or not gathers(nodes[0]) or searches(func):
        return
    yield from try_forms(
        func,
        (
            (f"gathered_reductions.{order}", partial(build, func, hardware, order == "parallel"))
            for order in hardware.orders
        ),
    )


def gathers(block: Block) -> bool:
    """Return whether the places of terms along the reduction are read from memory."""
    steps = {i.var for i in block.iters if i.kind == "reduce"}
    return any(loads(*x.indices) and steps & set(free_vars(*x.indices)) for x in block_loads(block))


def build(func: PrimFunc, hardware: HardwareInfo, parallel: bool) -> Schedule:
    """Compute each result of the last stage in a register, right before it is used."""
    s = Schedule(func)
    for block in blocks(func.body):
        if inlinable(s.func, find_block(s.func, block.name)):
            s.compute_inline(block.name)
    if final_block(s.func).is_reduction:
        s.cache_write(block=final_block(s.func).name, scope="local")
    last = final_block(s.func)
    stages = [b.name for b in blocks(s.func.body) if b.name != last.name]
    if len(stages) != 1:
        raise ScheduleError(f"{func.name}: expected one reduction, and other blocks that can be inlined")
    rows = s.fuse(s.loops_of(last.name))
    if parallel:
        chunk, rows = s.split(rows, [None, s.tunable("CH", list(CHUNKS))])
        s.set_tail(chunk, "peel")
    (stage,) = stages
    s.compute_at(stage, rows)
    s.set_scope(buffer=s.buffer_of(stage).name, scope="local")
    decompose(s, stage, s.inner_loops(stage, rows))
    if parallel:
        s.set_kind(chunk, "group" if hardware.has_grid else "parallel")
    return s
