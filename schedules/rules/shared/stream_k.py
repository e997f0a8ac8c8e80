"""Parts of the GPU rules: how thread blocks divide the work of a matrix product.

The three decompositions of Stream-K (Osama et al., PPoPP 2023). data_parallel: a thread block computes one output tile.
split_k: it sums one share of a tile's steps. stream_k: the steps of all tiles form one sequence, and each thread block takes an equal
range of it, which may begin and end inside tiles. The last two serve outputs with fewer tiles than the GPU can run at once. A fix-up
kernel adds the partial tiles and computes the epilogue.

Tests: `tests/schedules/rules/test_sketches.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, as_int, const, mul
from relax_tune.ir.core.stmt import Block
from relax_tune.schedules.analysis import final_block
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.rules.shared.blocks import separate_nest
from relax_tune.schedules.rules.shared.contraction import Contraction
from relax_tune.schedules.rules.shared.threads import thread_per_element
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

Decomposition = Literal["data_parallel", "split_k", "stream_k"]
DECOMPOSITIONS: tuple[Decomposition, ...] = ("data_parallel", "split_k", "stream_k")
WAVES = (1, 2, 3, 4)
"""Thread blocks of Stream-K for each multiprocessor."""
FIRST_WAVES: Mapping[str, int] = {"WAVES": 1}
SPLIT_K = (2, 4, 8, 16)
"""Shares of a tile's steps."""
SLICE_STEPS = (8, 16, 32)
"""Steps of a slice: the part of both operands that shared memory holds at once."""


def decompose_work(
    s: Schedule, main: str, hardware: HardwareInfo, form: Decomposition, slice_steps: Expr | None
) -> tuple[str, Block]:
    """Prepare a product for a decomposition; return the block that sums products and the one that stores a tile's results."""
    if form == "split_k":
        return split_k(s, main, hardware, slice_steps)
    return main, write_back_block(s, main) if form == "stream_k" else final_block(s.func)


def split_k(s: Schedule, main: str, hardware: HardwareInfo, slice_steps: Expr | None = None) -> tuple[str, Block]:
    """Sum shares of the steps separately, and add them in a fix-up kernel. Returns the block of the sums and the one
    that stores them.

    Without `slice_steps`, SK is the number of shares. With it, a share is SS slices of `slice_steps` steps, since a circular buffer needs
    shares that begin with a slice.
    """
    epilogue = final_block(s.func).name
    *points, steps = s.loops_of(main)
    known = as_int(s.extent(steps))
    if known is None or known % (min(SLICE_STEPS) * max(SPLIT_K)):
        raise ScheduleError(f"{s.func.name}: expected steps that shares divide, got {known}")
    if slice_steps is None:
        share, _ = s.split(steps, [s.tunable("SK", SPLIT_K), None], divides=True)
    else:
        each = mul(s.tunable("SS", slices_per_split(known)), slice_steps)
        share, _ = s.split(steps, [None, each], divides=True)
    (part,) = s.rfactor(block=main, loop=share, scope="global", whole=True)
    separate_nest(s, part, len(points))
    sums = s.buffer_of(part)
    rank = len(sums.shape)
    s.permute_layout(buffer=sums.name, order=[rank - 1, *range(rank - 1)])
    write = write_back_block(s, part)
    fixup_kernel(s, main, epilogue, hardware)
    return part, write


def slices_per_split(steps: int) -> list[int]:
    """Return the options for the slices of a share. `steps` steps make at least two shares, and a bounded number of them."""
    slices = steps // max(SLICE_STEPS)
    return [n for n in (2, 4, 8, 16, 32, 64) if slices % n == 0 and max(SPLIT_K) * 4 * n >= slices > n] or [1]


def write_back_block(s: Schedule, main: str) -> Block:
    """Sum in a new buffer; return the block that stores the sums where the product stored them."""
    (write,) = s.cache_write(block=main, scope="global")
    return find_block(s.func, write)


def stream_k_loops(
    s: Schedule, roles: Contraction, write: str, copies: Sequence[str], nest: Sequence[str], hardware: HardwareInfo
) -> tuple[list[str], str, str, str]:
    """Give thread blocks equal ranges of the slices of all tiles, and build the fix-up kernel.

    Args:
        write: The block that stores a tile's sums.
        copies: The blocks that copy slices of the operands.
        nest: The loops over tiles, then the loop over the slices of one tile.

    Returns:
        The loops of `write` inside a tile, and the loops over thread blocks, over the tiles of a range and over their slices.
    """
    if roles.batch:
        raise ScheduleError(f"{s.func.name}: Stream-K needs a product without a batch")
    main, epilogue = roles.block.name, final_block(s.func).name
    *tiles, slices = nest
    for block in copies:
        s.compute_at(block, slices)
    write_loops = s.reverse_compute_at(write, tiles[-1])
    workers = mul(s.tunable("WAVES", WAVES), const(hardware.workers))
    *_, total = s.stream_k(block=main, tiles=tiles, steps=slices, workers=workers)
    fixup_kernel(s, total, epilogue, hardware)
    group, piece, step, *_ = s.loops_of(main)
    return write_loops, group, piece, step


@dataclass(frozen=True, slots=True)
class TileLoops:
    """The loops of a tiled product around a slice of its steps.

    Attributes:
        batch: Loops over the batch.
        row, column: Loops over tiles.
        slices: Loop over the slices of a tile.
        group: Loop over thread blocks with Stream-K; empty for other decompositions.
    """

    batch: list[str]
    row: str
    column: str
    slices: str
    group: str = ""

    def bind(self, s: Schedule) -> None:
        """Bind the loops over tiles, or over the thread blocks of Stream-K, to the grid."""
        if self.group:
            s.bind(self.group, "group", 0)
        else:
            bind_grid(s, self.column, [self.row], self.batch)


def accumulate_tiles(
    s: Schedule,
    roles: Contraction,
    last: Block,
    form: Decomposition,
    loops: TileLoops,
    copies: Sequence[str],
    hardware: HardwareInfo,
    stage: Callable[[str], None],
    epilogue: Callable[[list[str], bool], None],
    whole: bool,
) -> TileLoops:
    """Stage the operands of a product slice by slice, and run the epilogue on each finished tile.

    Args:
        last: The block that stores the results of a tile.
        loops: The loops of the product before a decomposition.
        copies: The blocks that copy slices of the operands.
        stage: Stages all operands inside the loop over slices.
        epilogue: Distributes the loops of `last` inside a tile; True if every vector is complete.
        whole: Tiles divide the columns.

    Returns:
        The loops after the decomposition.
    """
    if form == "stream_k":
        nest = [loops.row, loops.column, loops.slices]
        write_loops, group, column, slices = stream_k_loops(s, roles, last.name, copies, nest, hardware)
        stage(slices)
        epilogue(write_loops, True)
        return replace(loops, column=column, slices=slices, group=group)
    stage(loops.slices)
    epilogue(s.reverse_compute_at(last.name, loops.column), whole)
    s.decompose_reduction(block=roles.block.name, loop=loops.slices)
    return loops


def fixup_kernel(s: Schedule, main: str, epilogue: str, hardware: HardwareInfo) -> None:
    """Build the fix-up kernel: one thread adds the partial sums of an element and computes the epilogue."""
    *points, steps = s.loops_of(main)
    s.reverse_compute_at(epilogue, points[-1])
    s.decompose_reduction(block=main, loop=steps)
    s.set_scope(buffer=s.buffer_of(main).name, scope="local")
    thread_per_element(s, points, min(256, hardware.group_size))


def bind_grid(s: Schedule, columns: str, rows: Sequence[str], batch: Sequence[str]) -> None:
    """Bind the loops over tiles to the axes of the grid: columns, then rows, then the batch."""
    s.bind(columns, "group", 0)
    for loop in rows:
        s.bind(loop, "group", 1)
    if batch:
        s.bind(s.fuse(batch), "group", 2)
