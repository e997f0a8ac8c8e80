"""Matrix-vector products (GEMV) and matmuls with few rows, which the bytes of the matrix bound.

`columns`: vector lanes are columns of the output. Constant weights lie in panels one vector wide, so one layout serves
every tile, and a tile of several panels reads several streams at once. Weights stored in few bits are decoded in the
kernel.
`dots`: vector lanes are steps of the reduction, which runs along memory in both operands; nothing is packed.

Tests: `tests/schedules/rules/test_on_devices.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.dtype import i8, i16, u8
from relax_tune.ir.core.expr import Var, add, as_int, floordiv, free_vars, le, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.schedules.analysis import final_block, reductions
from relax_tune.schedules.loop_tree import block_loads, find_block
from relax_tune.schedules.rules.shared.contraction import (
    FEW_ROWS,
    Contraction,
    contraction_roles,
    fits_worker_cache,
    inline_around,
    is_product,
    packed_steps,
)
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.searches import searches
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

Form = Literal["columns", "dots"]

PREFETCH_BYTES = 2048
"""The distance of a prefetch from its use in a panel."""
GROUPS_PREFETCH_BYTES = 8192
"""The same where an iteration reads a group of steps: beyond the panels of a tile, to the panels of the next tile."""


@dataclass(frozen=True, slots=True)
class GemvChoice:
    """The structural decisions of one sketch.

    Attributes:
        form: `columns` or `dots`.
        parallel: Whether tiles are spread over workers.
        grouped: Whether the scale of a group of steps is multiplied by once per group.
        prefetch: Whether panels are prefetched.
        whole: Whether the products of a group are summed as whole numbers, two steps at a time by an instruction.
    """

    form: Form
    parallel: bool
    grouped: bool = False
    prefetch: bool = False
    whole: bool = False

    @property
    def name(self) -> str:
        marks = f"{'.grouped' if self.grouped else ''}{'.whole' if self.whole else ''}{'.prefetch' if self.prefetch else ''}"
        return f"gemv.{self.form}{marks}.{'parallel' if self.parallel else 'serial'}"


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield every sketch of a product with few or unknown rows; none for other functions."""
    if not is_product(func) or searches(func):
        return
    # The likeliest sketch first: a build without records and without a prior dispatches the first guess of the first one.
    for order in hardware.orders:
        parallel = order == "parallel"
        choices = (
            GemvChoice("columns", parallel, grouped=True, whole=True),
            GemvChoice("columns", parallel, grouped=True, whole=True, prefetch=True),
            GemvChoice("columns", parallel),
            GemvChoice("columns", parallel, prefetch=True),
            GemvChoice("columns", parallel, grouped=True),
            GemvChoice("dots", parallel),
        )
        yield from try_forms(func, ((choice.name, partial(build, func, hardware, choice)) for choice in choices))


def build(func: PrimFunc, hardware: HardwareInfo, choice: GemvChoice) -> Schedule:
    """Apply one structural choice. Raises ScheduleError where it does not fit the function."""
    s = Schedule(func)
    main = reductions(func)[0].name
    inline_around(s, main)
    target = s.buffer_of(main)
    if target in s.func.output_buffers:
        s.cache_write(block=main, scope="local")
    else:
        s.set_scope(buffer=target.name, scope="local")
    epilogue = final_block(s.func)
    roles = contraction_roles(s, main)
    rows = roles.known_extent(roles.row)
    # With more rows the arithmetic bounds the time, and the tiles of the matmul rule reuse the panels better.
    if rows is not None and rows > FEW_ROWS and not _is_decoded(roles):
        raise ScheduleError(f"{func.name}: {rows} rows are too many")
    with suppress(ScheduleError):  # no factor may be independent of the reduction
        s.hoist_factors(block=main)
    if choice.form == "dots":
        return _dots(s, main, epilogue.name, roles, hardware, choice)
    return _columns(s, main, epilogue.name, roles, hardware, choice)


def _columns(
    s: Schedule, main: str, epilogue: str, roles: Contraction, hardware: HardwareInfo, choice: GemvChoice
) -> Schedule:
    """Compute tiles of some rows by some vectors of columns, each vector from its own panel; lanes are columns."""
    block = find_block(s.func, main)
    halves, group = packed_steps(block, roles)
    if choice.grouped and (group is None or len(roles.reduce) != 1):
        raise ScheduleError(f"{s.func.name}: no factor is constant over a group of steps")
    dot = _dot_of(s, roles, hardware, group) if choice.whole else ""
    matrix = roles.operand.buffer
    # Panels that stay in the caches need no prefetch.
    if choice.prefetch and (hardware.has_grid or not choice.parallel or fits_worker_cache(matrix, hardware)):
        raise ScheduleError(f"{s.func.name}: prefetches need C, and panels larger than the workers' caches")
    nest = s.iter_loops(main)
    _pack_panels(s, main, roles, hardware)
    at_once = [halves]
    if choice.whole:  # the steps of an instruction lie next to each other, four bytes of two or one pair
        at_once = [4, 2] if matrix.dtype is u8 else [2]
        s.tile_layout(buffer=f"{matrix.name}_cache", dim=1, factor=at_once[0], order=[0, 1, 3, 2])
    count = roles.known_extent(roles.column)
    divides = count is not None and count % hardware.lanes == 0
    j_v, j_2 = s.split(nest[roles.column], [None, hardware.lanes], divides=divides)
    panels = s.tunable("V", _dividing(as_int(s.extent(j_v)), (1, 2, 3, 4, 6, 8)))
    j_0, j_1 = s.split(j_v, [None, panels], divides=as_int(s.extent(j_v)) is not None)
    i_0, i_1 = _row_tiles(s, roles, nest)
    *others, k = [nest[v] for v in roles.reduce]
    if choice.grouped and group is not None:
        # The outermost part is one group of steps, which share a scale; the innermost ones are what an instruction
        # multiplies.
        steps = s.split(k, [None, group // prod(at_once), *at_once])
    else:
        steps = s.split(k, [None, halves]) if halves > 1 else [k]
    s.set_tail(steps[0], "peel")
    batch = [nest[v] for v in roles.batch]
    outer, inner, reduce = [*batch, j_0, *i_0], [*i_1, j_1, j_2], [*others, *steps]
    s.reorder([*outer, *inner, *reduce])
    sums = mul(s.tunables["MR"], panels) if i_1 else panels
    # totals change once for a group of whole numbers
    accumulators = mul(sums, 2) if choice.grouped and not choice.whole else sums
    # Besides the sums: a vector of each panel, the broadcast element, and one for decoding.
    s.require(le(add(add(accumulators, panels), 2), hardware.registers))
    heights = [{"MR": h} for h in (4, 2, 1) if h in s.tunables["MR"].domain] if i_1 else [{}]
    s.guess(*({"V": v, **h} for h in heights for v in (4, 2, 1) if v in panels.domain))
    _place_epilogue(s, epilogue, outer[-1])
    over_steps = steps[0]
    if choice.grouped:
        over_steps = _sum_groups(s, main, steps, outer, inner, dot)
    else:
        s.reorder([*reduce, *inner])
        s.decompose_reduction(block=main, loop=reduce[0])
    if halves > 1 and not choice.whole:
        s.unroll(steps[-1])
    if choice.prefetch:
        each = matrix.dtype.bytes * hardware.lanes
        s.prefetch(loop=over_steps, iterations=_distance(each, halves, group if choice.grouped else None))
    for stage in blocks(s.func.body):
        if stage.name != epilogue and stage.role == "compute" and not (choice.whole and stage.name == f"{main}_rf"):
            _set_kinds(s, [x for x in s.loops_of(stage.name)[len(outer) :] if x not in reduce][-len(inner) :])
    _parallelise(s, hardware, choice, batch, j_0)
    return s


def _distance(each: int, halves: int, group: int | None) -> int:
    """Return the iterations ahead that a prefetch is for: bytes ahead, divided by the bytes of a panel that an iteration reads."""
    return max(1, PREFETCH_BYTES // each if group is None else GROUPS_PREFETCH_BYTES // (each * group // halves))


def _sum_groups(
    s: Schedule, main: str, steps: Sequence[str], outer: Sequence[str], inner: Sequence[str], dot: str
) -> str:
    """Sum each iteration of the first of `steps` by itself. Add the sum, times the group's scale, to the total.

    Args:
        dot: The intrinsic that sums those after the second in whole numbers; empty for sums of floats.

    Returns:
        The loop over groups.
    """
    s.rfactor(block=main, loop=steps[0])
    factored = f"{main}_rf"
    sums = s.buffer_of(factored)
    last = len(sums.shape) - 1
    s.permute_layout(buffer=sums.name, order=[last, *range(last)])  # lanes are its columns
    s.hoist_factors(block=factored)
    if dot:
        s.sum_as(block=factored, dtype="i32")
    s.decompose_reduction(block=main, loop=s.loops_of(main)[-1])
    _separate_nests(s, [f"{factored}_init"], len(outer), len(inner) + 1)
    _separate_nests(s, [factored, f"{main}_init"], len(outer), len(inner))
    around = []
    for name in (f"{factored}_init", factored, main):
        group_loops = s.loops_of(name)[len(outer) :]
        tile, reduce = group_loops[: len(inner)], group_loops[len(inner) :]
        within = reduce[2:] if dot and name == factored else []
        s.reorder([*reduce[: len(reduce) - len(within)], *tile, *within])
        around.append(reduce[0])
        if within:
            s.unroll(reduce[1], *tile[:-1])  # sums stay in registers
            s.tensorize(loop=tile[-1], intrinsic=dot)
    s.fuse_sibling_loops(around[0], around[1])
    s.fuse_sibling_loops(around[0], around[2])
    return around[0]


def _dot_of(s: Schedule, roles: Contraction, hardware: HardwareInfo, group: int | None) -> str:
    """Return the intrinsic that multiplies some steps of whole numbers. Raises ScheduleError for other operands."""
    matrix = roles.operand.buffer
    operands = [x.buffer for x in block_loads(roles.block) if roles.column not in free_vars(*x.indices)]
    left = [b for b in operands if b is not roles.block.body.buffer]
    name = (
        {(i16, i8): "dot2_i16i8", (i8, u8): "dot8_i8i4"}.get((left[0].dtype, matrix.dtype)) if len(left) == 1 else None
    )
    if hardware.language != "c" or name is None or len(matrix.shape) != 2 or (matrix.dtype is u8 and (group or 0) % 8):
        raise ScheduleError(f"{s.func.name}: expected rows and a matrix of whole numbers in groups")
    return f"{name}_x{hardware.lanes}"


def _separate_nests(s: Schedule, stages: Sequence[str], outer: int, inner: int) -> None:
    """Give blocks nests of their own inside the outer loops.

    Args:
        stages: Blocks that share `inner` loops below the outer ones with a block that follows.
    """
    for stage in stages:
        for depth in reversed(range(outer, outer + inner)):
            s.fission(loop=s.loops_of(stage)[depth], block=stage)


def _dots(
    s: Schedule, main: str, epilogue: str, roles: Contraction, hardware: HardwareInfo, choice: GemvChoice
) -> Schedule:
    """Compute tiles of some rows by some columns, with a vector of partial sums per element.

    Lanes are steps of the reduction.
    """
    block = find_block(s.func, main)
    if choice.grouped or len(roles.reduce) != 1:
        raise ScheduleError(f"{s.func.name}: dot products run over one dimension")
    step = roles.reduce[0]
    for x in block_loads(block):
        along = [i for i, d in zip(x.indices, x.buffer.shape, strict=True) if as_int(d) != 1][-1:]
        # Dims of 1 at the end do not change how the elements lie in memory.
        if step in free_vars(*x.indices) and (along != [step] or sum(step in free_vars(i) for i in x.indices) != 1):
            raise ScheduleError(f"{s.func.name}: the reduction does not run along {x.buffer.name!r}")
    nest = s.iter_loops(main)
    columns = s.tunable("NR", _dividing(roles.known_extent(roles.column), (1, 2, 4, 8)))
    j_0, j_1 = s.split(nest[roles.column], [None, columns], divides=as_int(s.extent(nest[roles.column])) is not None)
    i_0, i_1 = _row_tiles(s, roles, nest)
    width = s.tunable("VL", [hardware.lanes * u for u in (1, 2)])
    k_0, k_1 = s.split(nest[step], [None, width])
    s.set_tail(k_0, "peel")
    batch = [nest[v] for v in roles.batch]
    outer, inner = [*batch, j_0, *i_0], [*i_1, j_1]
    s.reorder([*outer, *inner, k_0, k_1])
    vectors = mul(columns, floordiv(width, hardware.lanes))
    s.require(le(add(mul(s.tunables["MR"], vectors) if i_1 else vectors, add(vectors, 2)), hardware.registers))
    _place_epilogue(s, epilogue, outer[-1])
    s.rfactor(block=main, loop=k_1)
    s.decompose_reduction(block=main, loop=s.loops_of(main)[-1])
    factored = f"{main}_rf"
    _separate_nests(s, [f"{factored}_init", factored, f"{main}_init"], len(outer), len(inner))
    inner_loops = s.loops_of(factored)[len(outer) :]
    s.reorder([k_0, *(x for x in inner_loops if x != k_0)])
    for stage in (factored, f"{factored}_init"):
        _set_kinds(s, [name for name in s.loops_of(stage)[len(outer) :] if name != k_0])
    for stage in (main, f"{main}_init"):
        s.unroll(*s.loops_of(stage)[len(outer) :][: len(inner)])
    # With few columns there are fewer tiles of columns than workers, so tiles of rows are shared instead.
    narrow = (roles.known_extent(roles.column) or hardware.lanes) < hardware.lanes
    _parallelise(s, hardware, choice, batch, i_0[0] if narrow and i_0 and not batch else j_0)
    return s


def _row_tiles(s: Schedule, roles: Contraction, nest: Mapping[Var, str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the loops over tiles of rows and over the rows of a tile; both empty without a row."""
    if roles.row is None:
        return (), ()
    extent = roles.known_extent(roles.row)
    # The heights of t nearly equal tiles: a height between two of these needs as many tiles as the smaller one.
    even = {-(-(extent or 0) // t) for t in range(1, FEW_ROWS + 1)} & set(range(1, 9))
    height = s.tunable("MR", sorted(even) if extent else range(1, 9))
    i_0, i_1 = s.split(nest[roles.row], [None, height])
    s.set_tail(i_0, "exact")
    return (i_0,), (i_1,)


def _pack_panels(s: Schedule, main: str, roles: Contraction, hardware: HardwareInfo) -> None:
    """Pack constant operands with columns into panels one vector wide.

    Other operands must have columns last.

    Raises:
        ScheduleError: Without a constant operand, since the matmul rule then does as well.
    """
    packed = 0
    for access in block_loads(find_block(s.func, main)):
        if roles.column not in free_vars(*access.indices):
            continue
        dims = [d for d, e in enumerate(access.indices) if e is roles.column]
        rank = len(access.indices)
        # Packing in the call would read the matrix once and write it once, more than the product itself reads.
        if access.buffer not in s.func.consts or rank == 1:
            if dims != [rank - 1]:
                raise ScheduleError(f"{s.func.name}: columns of {access.buffer.name!r} are not next to each other")
            continue
        name = access.buffer.name
        if len(dims) != 1 or sum(x.buffer is access.buffer for x in block_loads(find_block(s.func, main))) != 1:
            raise ScheduleError(f"{s.func.name}: {name!r} cannot be packed by columns")
        (copy,) = s.cache_read(block=main, buffer=name, scope="global")
        s.mark_prepack(block=copy)
        rest = [d for d in range(rank + 1) if d not in (dims[0], dims[0] + 1)]
        order = [dims[0], *rest, dims[0] + 1]
        s.tile_layout(buffer=f"{name}_cache", dim=dims[0], factor=hardware.lanes, order=order)
        packed += 1
    if not packed:
        raise ScheduleError(f"{s.func.name}: no constant operand has columns")


def _is_decoded(roles: Contraction) -> bool:
    """Return True if the operand with columns is stored as integers."""
    return any(x.buffer.dtype.is_int and roles.column in free_vars(*x.indices) for x in block_loads(roles.block))


def _dividing(extent: int | None, options: Sequence[int]) -> Sequence[int]:
    """Return the options that divide a constant extent, or all options for a symbolic one."""
    return options if extent is None else [o for o in options if extent % o == 0] or [1]


def _place_epilogue(s: Schedule, epilogue: str, loop: str) -> None:
    *rest, last = s.reverse_compute_at(epilogue, loop)
    s.vectorize(last)
    s.unroll(*rest)


def _set_kinds(s: Schedule, inner: Sequence[str]) -> None:
    """Vectorise the last loop and unroll the others."""
    *rest, last = inner
    s.vectorize(last)
    s.unroll(*rest)


def _parallelise(s: Schedule, hardware: HardwareInfo, choice: GemvChoice, batch: Sequence[str], tiles: str) -> None:
    """Spread tiles over threads, or tiles and batch elements over two axes of work-groups."""
    if not choice.parallel:
        return
    if not hardware.has_grid:
        s.parallel(s.fuse([*batch, tiles]))
        return
    s.bind(tiles, "group", 0)
    if batch:
        s.bind(s.fuse(batch), "group", 1)
