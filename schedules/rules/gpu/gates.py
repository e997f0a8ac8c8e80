"""Steps of recurrent layers on GPUs: a thread computes all gates of one element, and then the new state.

Neighbouring threads read neighbouring columns of the weight.

Tests: `tests/schedules/rules/test_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.gates import has_gates
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

ITEMS = (32, 64, 128, 256)


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield the sketch of a product with gates and its readers; none for other functions."""
    if has_gates(func):
        yield from try_forms(func, [("gates", partial(build, func, hardware))])


def build(func: PrimFunc, hardware: HardwareInfo) -> Schedule:
    """Schedule the function. Raises ScheduleError if it does not fit."""
    s = Schedule(func)
    product, *readers = blocks(func.body)
    for block in (product, *readers):
        if block.body.buffer in func.allocs:
            s.set_scope(buffer=block.body.buffer.name, scope="local")
    gate, row, column, step = s.loops_of(product.name)
    items = [n for n in ITEMS if n <= hardware.group_size] or [hardware.warp]
    panel, item = s.split(column, [None, s.tunable("TX", items)])
    s.reorder([row, panel, item, step, gate])
    for reader in readers:
        s.reverse_compute_at(reader.name, item)
    s.unroll(gate)
    s.decompose_reduction(block=product.name, loop=step)
    s.bind(panel, "group", 0)
    s.bind(row, "group", 1)
    s.bind(item, "item", 0)
    s.guess({"TX": min(64, items[-1])})
    return s
