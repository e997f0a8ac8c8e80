"""Products with fewer tiles than a GPU has room for, whose groups share out the steps of all tiles in one row: each takes an equal stretch
of it, which may begin and end within tiles. A second kernel adds up what they leave of each, with what follows the product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import const, mul
from relax_tune.ir.core.stmt import Block
from relax_tune.schedules.analysis import final_block
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.rules.gpu.threads import each_point
from relax_tune.schedules.rules.shared.contraction import Contraction
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

# What a group makes: `tiles`, sums over shares of the steps of one (`split`), or over a stretch of those of all (`stream`).
Form = Literal["tiles", "split", "stream"]
FORMS: tuple[Form, ...] = ("tiles", "split", "stream")
# Groups that take stretches, for each multiprocessor.
WAVES = (1, 2, 3, 4)
FIRST_WAVES: Mapping[str, int] = {"WAVES": 1}


def stored_apart(s: Schedule, main: str) -> Block:
    """The block that stores sums which the product now makes in memory of its own."""
    (write,) = s.apply("cache_write", block=main, scope="global")
    return find_block(s.func, write)


def stretches(
    s: Schedule, roles: Contraction, write: str, fetched: Sequence[str], nest: Sequence[str], machine: HardwareInfo
) -> tuple[list[str], str, str, str]:
    """Groups that take equal stretches of the slices of all tiles, some to each multiprocessor; and the elements from what they leave,
    with what follows. nest: the loops over tiles, and over the slices of one, in which blocks fetch these; write: the block that
    stores sums. Its own loops, and those over groups, over the pieces of a stretch and over the slices of a piece."""
    if roles.batch:
        raise ScheduleError(f"{s.func.name}: a batch has tiles enough for all groups")
    main, epilogue = roles.block.name, final_block(s.func).name
    *tiles, slices = nest
    for block in fetched:
        s.compute_at(block, slices)
    own = s.reverse_compute_at(write, tiles[-1])
    workers = mul(s.tunable("WAVES", WAVES), const(machine.workers))
    *_, total = s.apply("stream_k", block=main, tiles=tiles, steps=slices, workers=workers)
    add_up(s, total, epilogue, machine)
    group, piece, step, *_ = s.loops_of(main)
    return own, group, piece, step


def add_up(s: Schedule, main: str, epilogue: str, machine: HardwareInfo) -> None:
    """An item for each element, which adds up the sums that there are of it, and goes on with that."""
    *points, steps = s.loops_of(main)
    s.reverse_compute_at(epilogue, points[-1])
    s.apply("decompose_reduction", block=main, loop=steps)
    s.apply("set_scope", buffer=find_block(s.func, main).body.buffer.name, scope="local")
    each_point(s, points, min(256, machine.group_size))
