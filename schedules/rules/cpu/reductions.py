"""Reductions across memory: sums over leading and middle dimensions, masked pooling.

Neighbouring results are neighbours in memory, so vectors lie along the results. A few vectors accumulate in registers
over the reduction, and the epilogue is computed while they are there.

Some reductions take a few steps over elements around a result, such as the moments of a lattice Boltzmann cell. There all stages
of a strip are unrolled: each index is then a number of elements from the strip.

Tests: `tests/schedules/rules/test_on_devices.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, Var, as_int, free_vars
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.analysis import final_block, inlinable, reductions
from relax_tune.schedules.loop_tree import block_loads, find_block
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.reductions import stages_across
from relax_tune.schedules.rules.shared.searches import searches
from relax_tune.schedules.rules.shared.vectorize import decompose, hoist_reciprocal, in_vectors, strip_widths
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.symbols import are_variables
from relax_tune.schedules.target import HardwareInfo

STEPS = 32
"""Steps of a stage that are unrolled at most."""


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield strips of columns spread over threads, and the same on one thread, if a reduction is across columns."""
    if not reductions(func) or searches(func):
        return
    builders = {"columns": build, "unrolled": build_unrolled}
    yield from try_forms(
        func,
        (
            (f"reductions.{name}.{order}", partial(form, func, hardware, order == "parallel"))
            for name, form in builders.items()
            for order in hardware.orders
        ),
    )


def build(func: PrimFunc, hardware: HardwareInfo, parallel: bool) -> Schedule:
    """Compute all stages inside the loop over strips of columns of the last one."""
    s = Schedule(func)
    for block in blocks(func.body):
        if inlinable(s.func, find_block(s.func, block.name)):
            s.compute_inline(block.name)
    if final_block(s.func).is_reduction:
        s.cache_write(block=final_block(s.func).name, scope="local")
    last = final_block(s.func)
    stages, across = stages_across(s.func)
    hoist_reciprocal(s, last.name)
    *outer, column = s.loops_of(last.name)
    widths = strip_widths(last.iters[-1], hardware)
    width = s.tunable("W", widths)
    extent = as_int(last.iters[-1].extent)
    divides = extent is not None and all(extent % w == 0 for w in widths)
    strip, lanes = s.split(column, [None, width], divides)
    if not divides:
        s.set_tail(strip, "peel")
    # Last stage first: a stage can move only where all of its readers are already.
    for block in reversed(stages):
        s.compute_at(block.name, strip)
    for block in stages:
        buffer = s.buffer_of(block.name)
        s.set_scope(buffer=buffer.name, scope="local")
        if block.name in across:
            _strip(s, block.name, strip)
        else:
            in_vectors(s, block.name, s.inner_loops(block.name, strip)[-1], hardware.lanes)
            decompose(s, block.name, s.inner_loops(block.name, strip))
    s.vectorize(lanes)
    if hardware.has_grid and parallel:
        s.bind(strip, "group", 0)
        if outer:
            s.bind(s.fuse(outer), "group", 1)
    elif parallel:
        # a strip that may be incomplete has its own loop
        s.parallel(s.fuse([*outer, strip]) if divides else s.fuse(outer) if outer else strip)
    return s


def build_unrolled(func: PrimFunc, hardware: HardwareInfo, parallel: bool) -> Schedule:
    """Compute all stages of a strip of results, their few steps unrolled. Raises ScheduleError for other functions."""
    s = Schedule(func)
    for block in blocks(func.body):
        if inlinable(s.func, find_block(s.func, block.name)):
            s.compute_inline(block.name)
    last = final_block(s.func)
    stages = [b for b in blocks(s.func.body) if b.name != last.name]
    places = _shared_indices(s.func, last, stages)
    nest = s.iter_loops(last.name)
    *outer, column = [nest[v] for v in places]
    others = [nest[i.var] for i in last.iters if i.var not in places]
    width = s.tunable("W", [hardware.lanes * v for v in (1, 2)])
    strip, lanes = s.split(column, [None, width])
    s.set_tail(strip, "narrow")
    s.reorder([*outer, strip, *others, lanes])
    for block in reversed(stages):
        s.compute_at(block.name, strip)
    for block in stages:
        s.set_scope(buffer=s.buffer_of(block.name).name, scope="local")
        s.unroll(*_strip(s, block.name, strip))
    s.unroll(*others)
    s.vectorize(lanes)
    if parallel:
        around = s.fuse(outer) if outer else strip
        s.set_kind(around, "group" if hardware.has_grid else "parallel")
    return s


def _shared_indices(func: PrimFunc, last: Block, stages: Sequence[Block]) -> tuple[Var, ...]:
    """Return the iterators of the last block at which it reads every stage.

    Raises:
        ScheduleError: Unless there are several stages, of few steps each: other rules fit a single one.
    """
    if len(stages) < 2:
        raise ScheduleError(f"{func.name}: expected several reductions before the last stage, got {len(stages)}")
    indices: set[tuple[Expr, ...]] = set()
    for block in stages:
        steps = [as_int(i.extent) for i in block.iters if i.kind == "reduce"]
        if not steps or prod(e or STEPS + 1 for e in steps) > STEPS or not are_variables(block.body.indices):
            raise ScheduleError(f"{func.name}: block {block.name!r} has too many steps to unroll")
        indices |= {x.indices for x in block_loads(last) if x.buffer is block.body.buffer}
    extents = {i.var: as_int(i.extent) for i in last.iters if i.kind == "spatial"}
    (places,) = indices if len(indices) == 1 else ((),)
    rest = [e or STEPS + 1 for v, e in extents.items() if v not in places]
    if not places or last.is_reduction or any(v not in extents for v in places) or prod(rest) > STEPS:
        raise ScheduleError(f"{func.name}: the last stage does not read the others at the same index")
    if last.body.indices[-1] is not places[-1] or len({len(b.body.indices) for b in stages}) > 1:
        raise ScheduleError(f"{func.name}: results of a strip are not contiguous in memory")
    return tuple(v for v in places if isinstance(v, Var))


def _strip(s: Schedule, block: str, strip: str) -> list[str]:
    """Put the reduction outside the columns of a strip, whose sums stay in registers. Returns the loops over its steps."""
    node = find_block(s.func, block)
    inner = s.inner_loops(block, strip)
    steps = {v.name for i, b in zip(node.iters, node.bindings) if i.kind == "reduce" for v in free_vars(b)}
    columns = [n for n in inner if n not in steps]
    if len(columns) != 1:
        raise ScheduleError(f"{s.func.name}: block {block!r} has no loop over the columns of a strip")
    reduce = [n for n in inner if n in steps]
    s.reorder([*reduce, *columns])
    for new in decompose(s, block, reduce):
        s.vectorize(s.loops_of(new)[-1])
    s.vectorize(columns[0])
    return reduce
