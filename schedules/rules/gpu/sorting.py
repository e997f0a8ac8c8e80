"""GPU rule for the places of the largest elements of each row (`top_k`): a thread block sorts a row in shared memory.

Rows have a known number of elements, at most 2048 of at most 32 bits. Consecutive threads take consecutive elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.searches import inline_elements, picks, row_length
from relax_tune.schedules.rules.shared.threads import thread_counts
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

MOST_LENGTH = 2048
"""Elements of a row that a thread block sorts: keys before and after a step take 32 KiB."""


def sketches(func: PrimFunc, machine: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield one sketch for a function that picks places once, from rows of a known length; none for other functions."""
    if len(picks(func)) == 1:
        yield from try_forms([("sorting.bitonic", partial(build, func, machine))])


def build(func: PrimFunc, machine: HardwareInfo) -> Schedule:
    """Inline what makes the elements, and sort each row by a bitonic network of one thread block.

    Raises ScheduleError for rows of unknown length, or too long for shared memory."""
    s, chosen = inline_elements(func)
    length = row_length(chosen)
    if length is None or length > MOST_LENGTH:
        raise ScheduleError(f"{func.name}: wanted rows of a known number of elements, at most {MOST_LENGTH}")
    size = max(4, 1 << (length - 1).bit_length())
    if 16 * size > machine.local_bytes:
        raise ScheduleError(f"{func.name}: wanted {16 * size} bytes of shared memory, found {machine.local_bytes}")
    items = s.tunable("TX", [n for n in thread_counts(machine, 32) if n <= max(size // 2, 32)])
    made = s.apply("bitonic_sort", block=chosen.name, size=size)
    if {b.name for b in blocks(s.func.body)} != {*made, chosen.name}:
        raise ScheduleError(f"{func.name}: wanted one sort with what can be computed before it")
    rows = s.loops_of(made[0])[:-1]
    _, _, exchange, keep = made
    for name in (exchange, keep):
        s.apply("set_scope", buffer=find_block(s.func, name).body.buffer.name, scope="shared")
    for name in (*made, chosen.name):
        _, item = s.split(s.loops_of(name)[-1], [None, items])
        s.bind(item, "item")
    if rows:
        s.bind(s.fuse(rows), "group")
    s.guess({"TX": max(items.domain)})
    return s
