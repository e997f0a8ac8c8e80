"""GPU rule for the places of the largest elements of each row (`top_k`): a thread block sorts a row in shared memory.

Rows have a known number of elements, at most 2048 of at most 32 bits. Consecutive threads take consecutive elements.

Tests: `tests/schedules/primitives/reduction/test_bitonic_sorts.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.searches import inline_elements, picks, row_length
from relax_tune.schedules.rules.shared.threads import thread_counts
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

MOST_LENGTH = 2048
"""Elements of a row that a thread block sorts: keys before and after a step take 32 KiB."""


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield one sketch for a function that picks places once, from rows of a known length; none for other functions."""
    if len(picks(func)) == 1:
        yield from try_forms(func, [("sorting.bitonic", partial(build, func, hardware))])


def build(func: PrimFunc, hardware: HardwareInfo) -> Schedule:
    """Inline the producers of the elements, and sort each row by a bitonic network of one thread block.

    Raises:
        ScheduleError: For rows of unknown length, or too long for shared memory.
    """
    s, chosen = inline_elements(func)
    length = row_length(chosen)
    if length is None or length > MOST_LENGTH:
        raise ScheduleError(f"{func.name}: expected rows of a known number of elements, at most {MOST_LENGTH}")
    # A bitonic network sorts powers of two; the missing ones get the largest key, which comes last.
    size = max(4, 1 << (length - 1).bit_length())
    # Keys of 64 bits, element and place, before and after a step: 16 bytes for each.
    if 16 * size > hardware.local_bytes:
        raise ScheduleError(f"{func.name}: expected {16 * size} bytes of shared memory, got {hardware.local_bytes}")
    items = s.tunable("TX", [n for n in thread_counts(hardware, 32) if n <= max(size // 2, 32)])
    new = s.bitonic_sort(block=chosen.name, size=size)
    if {b.name for b in blocks(s.func.body)} != {*new, chosen.name}:
        raise ScheduleError(f"{func.name}: expected one sort, and earlier blocks that can be inlined")
    rows = s.loops_of(new[0])[:-1]
    _, _, exchange, keep = new
    for name in (exchange, keep):
        s.set_scope(buffer=s.buffer_of(name).name, scope="shared")
    for name in (*new, chosen.name):
        _, item = s.split(s.loops_of(name)[-1], [None, items])
        s.bind(item, "item")
    if rows:
        s.bind(s.fuse(rows), "group")
    s.guess({"TX": max(items.domain)})
    return s
