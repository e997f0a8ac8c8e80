"""Convolutions: sums of products over windows of an input, with fused producers and epilogues.

A tile of the output accumulates in registers over the whole reduction, as in a matmul. The forms differ in the
dimension along vectors, and in the layout of the input that lets the inner loop load neighbours:

- `rows`: vectors along whole rows of the padded input, read in place. The results between the output's rows are
  computed for nothing, and left out when the tile is written.
- `direct`: vectors along the last output dimension. With a stride, input elements are first grouped by their position
  modulo the stride, so that neighbours of the output are neighbours of the input.
- `flat`: vectors along all output positions of a channel, fused into one dimension, so short rows waste nothing. The
  input is copied for each tap along the last dimension (a partial im2col); the taps of the other dimensions are
  offsets.
- `lines`: vectors along the last output dimension of one channel, for channels that read inputs of their own: lines of a
  tile share the input that their windows have in common.
- `channels`: vectors along output channels; positions in a row are the rows of a tile. Nothing is copied and short rows
  waste nothing, but the writes are strided unless channels are the output's last dimension.

Weights are packed in the order in which the inner loop reads them, once if they are constant.

Tests: `tests/schedules/rules/test_on_devices.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, inf, prod
from typing import Literal

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr, Tunable, Var, as_int, ceildiv, le, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.schedules.analysis import final_block, reductions
from relax_tune.schedules.loop_tree import block_loads, find_block, find_loop
from relax_tune.schedules.rules.shared.blocks import writer_of
from relax_tune.schedules.rules.shared.contraction import register_tiles
from relax_tune.schedules.rules.shared.conv_analysis import (
    ConvolutionRoles,
    copy_by_remainder,
    copy_taps,
    find_convolution,
    fuse_dims,
    inline_around_windows,
    loops_by_iter,
    output_loops,
    pack_weights,
    parallelise_copy,
)
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

Form = Literal["rows", "direct", "flat", "lines", "channels"]
Order = Literal["panels", "blocks", "weights"]
TALLEST = 14  # channels of a tile at most
UNROLLED = 4  # taps that are unrolled at most
WHOLE_ROWS = 4  # vectors of a row that is vectorised whole
TYPICAL_ROW = 64  # elements of a row of unknown length
LIKELY = 2  # tiles that are guessed
SHALLOW = 192  # summed channels up to which a tile is written often
NEIGHBOURS = 2.0  # cost of a vector of neighbours, which mostly lies across two lines of the cache


@dataclass(frozen=True, slots=True)
class ConvolutionChoice:
    """The structural decisions of one sketch.

    Attributes:
        order: Whether workers share the positions (`panels`) or channels (`blocks`) of an image, or take channels for all images
            (`weights`), whose weights are then read once.
    """

    form: Form
    order: Order

    @property
    def name(self) -> str:
        return f"convolution.{self.form}.{self.order}"


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield every sketch of a convolution; none for other functions."""
    nodes = reductions(func)
    roles = find_convolution(nodes[0]) if len(nodes) == 1 and nodes[0].init is not None else None
    if roles is None:
        return
    choices = _likely_first(roles, {i.var: as_int(i.extent) for i in nodes[0].iters})
    yield from try_forms(func, ((choice.name, partial(build, func, hardware, choice)) for choice in choices))


def _likely_first(roles: ConvolutionRoles, extents: Mapping[Var, int | None]) -> Iterator[ConvolutionChoice]:
    """Yield all choices, the likely fast ones first.

    A build without records and without a prior dispatches the first guess of the first sketch. Times of these guesses: on a CNN and a
    U-Net, `channels` was 1.1 to 2.1 times as fast as `rows`; for the 1 x 1 convolutions of MobileNetV3 and EfficientNet with a short
    sum, `rows` or `flat` was 1.2 to 1.9 times as fast as `channels`, whose writes are strided; in ResNet-50, blocks of channels
    were 1.2 times as fast as panels. `lines` fits only depthwise convolutions, and `channels` only others.
    """
    forms: tuple[Form, ...] = ("lines", "channels", "rows", "direct", "flat")
    orders: tuple[Order, ...] = ("panels", "blocks", "weights")
    pointwise = all(extents[w.tap] == 1 for w in roles.windows)
    if pointwise and any(extents[w.place] != 1 for w in roles.windows):
        depth, channels = (prod(extents[v] or 1 for v in vs) for vs in (roles.depth, (roles.channel,)))
        if depth > SHALLOW:
            orders = ("blocks", "panels", "weights")
        elif channels > depth:
            forms = ("lines", "flat", "rows", "channels", "direct")
        else:
            forms = ("lines", "rows", "flat", "channels", "direct")
    return (ConvolutionChoice(form, order) for form in forms for order in orders)


def build(func: PrimFunc, hardware: HardwareInfo, choice: ConvolutionChoice) -> Schedule:
    """Apply one structural choice. Raises ScheduleError where it does not fit the function."""
    s = Schedule(func)
    main = reductions(func)[0].name
    # Only producers that may be repeated for each window are inlined. The others stay as a copy, which workers share.
    producer = inline_around_windows(s, main)
    if s.buffer_of(main) in s.func.output_buffers:
        s.cache_write(block=main, scope="global")
    roles = find_convolution(find_block(s.func, main))
    if roles is None:
        raise ScheduleError(f"{func.name}: after inlining, it is no convolution")
    if choice.order == "weights":
        _require_many_images(s, hardware, main, roles)
    forms = {"rows": _rows, "direct": _direct, "flat": _flat, "lines": _lines, "channels": _channels}
    forms[choice.form](s, hardware, choice, main, roles)
    if producer is not None:
        parallelise_copy(s, hardware, s.loops_of(producer))
    return s


def _rows(s: Schedule, hardware: HardwareInfo, choice: ConvolutionChoice, main: str, roles: ConvolutionRoles) -> None:
    """Compute blocks of whole rows for a few channels in scratch memory, from which the epilogue takes the output's rows."""
    # Along whole rows, neighbouring vector lanes read neighbouring elements only without strides.
    if len(roles.windows) < 2 or any(w.stride != 1 for w in roles.windows[-2:]):
        raise ScheduleError(f"{s.func.name}: expected windows of stride 1 in rows")
    after, extents = output_loops(s, main), _extents(s, main)
    *_, line, column = [w.place for w in roles.windows]
    tile = _ConvolutionTile.of(s, hardware, main, roles)
    scratch = s.buffer_of(main).name
    nest = loops_by_iter(s, main)
    length = as_int(s.extent(nest[column]))
    s.flatten_rows(block=main, names=[nest[line], nest[column]], buffer=roles.source.buffer.name)
    pack_weights(s, main, roles, tile.height, roles.steps)
    s.cache_write(block=main, scope="local")
    if length is not None:
        s.set_scope(buffer=scratch, scope="local")
    lines = s.tunable("LB", _blocks_of(as_int(s.extent(after[line]))))
    pitch = as_int(roles.source.buffer.shape[-1])
    if length is not None and pitch is not None:
        # The sums of a block of rows are in scratch memory until the epilogue reads them. The other half of L2 is for
        # the input.
        s.require(le(mul(tile.height, lines) * (4 * pitch), hardware.l2_bytes // 2))
    l_0, l_1 = s.split(after[line], [None, lines])
    j_0, j_1 = tile.split_channel(s, after[roles.channel])
    batch = [n for v, n in after.items() if v not in (roles.channel, line, column)]
    outer = _outer_order(choice, batch, l_0, j_0)
    s.reorder([*outer, j_1, l_1, after[column]])
    take = writer_of(s, scratch)
    *_, t_j, t_q = s.compute_at(take, outer[-1])
    # now, since after tiles reach beyond a block it cannot be proved that its rows are its own
    _parallelise(s, hardware, choice, batch, l_0, j_0, tile.exact)
    q_0, q_1 = s.split(t_q, [None, tile.width])
    s.set_tail(q_0, "peel")
    s.reorder([q_0, t_j, q_1])
    s.compute_at(main, q_0)
    loops_of_vars = loops_by_iter(s, main, q_0)
    *_, m_j, m_q = [n for v, n in loops_of_vars.items() if v not in roles.steps]
    _accumulate(s, main, [loops_of_vars[v] for v in roles.steps], m_j, m_q)
    s.unroll(t_j)
    s.vectorize(q_1)
    _vectorise_row(s, after[column], hardware)
    s.guess(*_guesses_of_rows(s, hardware, choice, roles, extents, tile, pitch))


def _guesses_of_rows(
    s: Schedule, hardware: HardwareInfo, choice: ConvolutionChoice, roles: ConvolutionRoles,
    extents: Mapping[Var, int | None], tile: _ConvolutionTile, pitch: int | None,
) -> list[Mapping[str, int]]:  # fmt: skip
    """Return the likely fast tiles, each in the best block of lines whose input lies in half of L2.

    The sums lie in half of L1. Idle workers and lines computed for nothing count as loads.
    """
    rows, row = extents[roles.windows[-2].place], pitch or TYPICAL_ROW
    deep, taps = prod(extents[v] or 1 for v in roles.depth), extents[roles.windows[-2].tap] or 1
    options: dict[tuple[int, int], tuple[float, int]] = {}
    domain = s.tunables["LB"].domain
    fitting = [n for n in domain if (n + taps - 1) * deep * 4 * row <= hardware.l2_bytes // 2] or domain[:1]
    # From the largest: with equal costs the first one stays, which has the fewest blocks to start.
    for lines in reversed(fitting):
        blocks = ceil(rows / lines) if rows else hardware.workers
        idle = 1.0 if choice.order == "blocks" else ceil(blocks / hardware.workers) * hardware.workers / blocks
        waste = blocks * lines / rows if rows else 1.0
        for loads, height, width in tile.likely(hardware, lines * row):
            cost = loads * idle * waste
            if height * lines * 4 * row <= hardware.l1_bytes // 2 and cost < options.get((height, width), (inf, 0))[0]:
                options[height, width] = cost, lines
    best = sorted(options, key=lambda tile: options[tile])[:LIKELY]
    return [{"MR": height, "NR": width, "LB": options[height, width][1]} for height, width in best]


def _blocks_of(rows: int | None) -> Sequence[int]:
    """Return the heights of blocks of rows: all rows, or parts of nearly equal height."""
    return (
        (2, 4, 8, 16, 32, 64)
        if rows is None
        else sorted({ceil(rows / k) for k in (1, 2, 3, 4, 6, 8, 12, 16)} - {0}) or (1,)
    )


def _flat(s: Schedule, hardware: HardwareInfo, choice: ConvolutionChoice, main: str, roles: ConvolutionRoles) -> None:
    """Compute tiles of channels by output positions, across row ends."""
    if len(roles.windows) < 2:
        raise ScheduleError(f"{s.func.name}: the output positions already are one dimension")
    tile = _ConvolutionTile.of(s, hardware, main, roles)
    out, epilogue = s.buffer_of(main), final_block(s.func).name
    copy_taps(s, hardware, main, roles)
    last = [w.tap for w in roles.windows[1:]]
    steps = [*roles.depth, *last, roles.windows[0].tap]
    pack_weights(s, main, roles, tile.height, steps)
    nest, after = loops_by_iter(s, main), output_loops(s, main)
    places = [w.place for w in roles.windows]
    s.fuse_block_iters(block=main, names=[nest[v] for v in places])
    s.fuse_block_iters(block=epilogue, names=[after[v] for v in places])
    fuse_dims(s, out, len(out.shape) - len(places), len(places))
    s.set_scope(buffer=out.name, scope="local")
    after = output_loops(s, main)
    position = next(v for v in after if v not in nest)
    q_0, q_1 = s.split(loops_by_iter(s, main)[position], [None, tile.width])
    s.set_tail(q_0, "peel")
    length = _extents(s, main)[position]
    _tile(s, hardware, choice, main, roles, tile, steps, position, q_0, q_1)
    _guess(s, tile.likely(hardware, length), hardware)


def _direct(s: Schedule, hardware: HardwareInfo, choice: ConvolutionChoice, main: str, roles: ConvolutionRoles) -> None:
    """Compute tiles of channels by output positions of one row."""
    tile = _ConvolutionTile.of(s, hardware, main, roles)
    out = s.buffer_of(main)
    if roles.windows[-1].stride > 1:
        copy_by_remainder(s, hardware, main, roles)
    pack_weights(s, main, roles, tile.height, roles.steps)
    s.set_scope(buffer=out.name, scope="local")
    column = roles.windows[-1].place
    p_0, p_1 = s.split(loops_by_iter(s, main)[column], [None, tile.width])
    s.set_tail(p_0, "peel")
    length = _extents(s, main)[column]
    _tile(s, hardware, choice, main, roles, tile, roles.steps, column, p_0, p_1)
    _guess(s, tile.likely(hardware, length), hardware)


def _lines(s: Schedule, hardware: HardwareInfo, choice: ConvolutionChoice, main: str, roles: ConvolutionRoles) -> None:
    """Compute tiles of lines by columns of one channel."""
    if roles.each != 1 or len(roles.windows) < 2 or choice.order != "panels":
        raise ScheduleError(f"{s.func.name}: expected several lines, and channels that read different inputs")
    *_, line, column = roles.windows
    extents = _extents(s, main)
    lines, columns = extents[line.place], extents[column.place]
    height = s.tunable("MR", range(1, min(TALLEST, lines or TALLEST) + 1))
    width = s.tunable("NR", _widths(columns, hardware.lanes))
    _require_registers(s, hardware, height, width)
    if column.stride > 1:
        copy_by_remainder(s, hardware, main, roles)
    s.set_scope(buffer=s.buffer_of(main).name, scope="local")
    nest = loops_by_iter(s, main)
    l_0, l_1 = s.split(nest[line.place], [None, height])
    s.set_tail(l_0, "pow2")
    p_0, p_1 = s.split(nest[column.place], [None, width])
    s.set_tail(p_0, "peel")
    batch = [n for v, n in nest.items() if v not in (line.place, column.place, *roles.steps)]
    # Taps along the lines go innermost: neighbouring lines of a tile read the same input lines at shifted taps, which
    # stay in registers.
    taps = [nest[v] for v in roles.steps if v is not line.tap]
    s.reorder([*batch, l_0, p_0, *taps, nest[line.tap], l_1, p_1])
    epilogue_loops = s.reverse_compute_at(final_block(s.func).name, p_0)
    s.unroll(*epilogue_loops[:-1])
    s.vectorize(epilogue_loops[-1])
    _accumulate(s, main, [*taps, nest[line.tap]], l_1, p_1, TALLEST)
    if hardware.has_grid:
        s.bind(p_0, "group", 0)
        s.bind(l_0, "group", 1)
        s.bind(s.fuse(batch), "group", 2)
    else:
        s.parallel(s.fuse(batch))
    _guess(s, register_tiles(height.domain, width.domain, hardware, lines, columns), hardware)


def _widths(columns: int | None, lanes: int) -> list[int]:
    """Return the widths of tiles in whole vectors, or half of one, up to the columns."""
    if columns is not None and columns <= lanes // 2:
        return [lanes // 2]
    widths = [lanes * v for v in (1, 2, 3, 4, 6, 8)]
    return [w for w in widths if columns is None or w < columns + lanes]


def _channels(
    s: Schedule, hardware: HardwareInfo, choice: ConvolutionChoice, main: str, roles: ConvolutionRoles
) -> None:
    """Compute tiles of output positions by channels. Rows that are shorter than a tile are taken several at a time, so that a
    vector of weights serves them all.
    """
    extents = _extents(s, main)
    count = roles.each or extents[roles.channel]
    # A vector of channels multiplies one input element, which channels with separate inputs do not share.
    if roles.each == 1 or (count is not None and count < hardware.lanes):
        raise ScheduleError(f"{s.func.name}: no vector of channels reads the same input")
    options = [hardware.lanes * v for v in (1, 2, 3, 4)]
    exact = [w for w in options if count is not None and count % w == 0]
    if roles.each is not None and not exact:
        raise ScheduleError(f"{s.func.name}: groups of {roles.each} channels are not multiples of a vector")
    width, height = s.tunable("NR", exact or options), s.tunable("MR", range(1, TALLEST + 1))
    rows = _rows_of_a_tile(extents, roles)
    most = s.tunable("LR", rows) if rows else None
    _require_registers(s, hardware, height if most is None else mul(height, most), width)
    pack_weights(s, main, roles, width, roles.steps)
    out = find_block(s.func, main).body
    dim = out.indices.index(roles.channel)
    s.set_scope(buffer=out.buffer.name, scope="local")
    # Accumulators are registers, so their layout is free. With channels last, each is one vector.
    s.permute_layout(buffer=out.buffer.name, order=[*(d for d in range(len(out.indices)) if d != dim), dim])
    nest, places, epilogue = loops_by_iter(s, main), [w.place for w in roles.windows], final_block(s.func)
    j_0, j_1 = s.split(nest[roles.channel], [None, width], divides=bool(exact))
    if not exact:
        s.set_tail(j_0, "peel")
    p_0, p_1 = s.split(nest[places[-1]], [None, height])
    s.set_tail(p_0, "pow2")
    images = [n for v, n in nest.items() if v not in (roles.channel, *places, *roles.steps)]
    lines = [nest[v] for v in places[:-1]]
    reduce = [nest[v] for v in roles.steps]
    rows_of_tile: list[str] = []
    if most is not None:
        # The number of lines in a tile divides their count, so that no tile needs a condition on the line.
        lines[-1], line = s.split(lines[-1], [None, most], divides=True)
        rows_of_tile = [line]
    outers = {
        "panels": [*images, *lines, j_0, p_0],
        "blocks": [*images, j_0, *lines, p_0],
        "weights": [j_0, *images, *lines, p_0],
    }
    s.reorder([*outers[choice.order], *reduce, *rows_of_tile, p_1, j_1])
    epilogue_loops = s.reverse_compute_at(epilogue.name, p_0)
    read = next(x for x in block_loads(epilogue) if x.buffer.name == out.buffer.name)
    across = next(n for v, n in loops_by_iter(s, epilogue.name, p_0).items() if v is read.indices[-1])
    others = [n for n in epilogue_loops if n != across]
    s.reorder([*others, across])
    s.unroll(*others)
    s.vectorize(across)
    s.reorder([*reduce, *rows_of_tile])
    s.unroll(*rows_of_tile)
    _accumulate(s, main, reduce, p_1, j_1)
    _spread_channels(s, hardware, choice, images, lines, j_0, bool(exact))
    tiles = register_tiles(height.domain, width.domain, hardware, extents[places[-1]], count)
    _guess(s, tiles, hardware, rows)


def _spread_channels(
    s: Schedule, hardware: HardwareInfo, choice: ConvolutionChoice, images: Sequence[str], lines: Sequence[str],
    channels: str, exact: bool,
) -> None:  # fmt: skip
    """Spread positions or blocks of channels over threads (C), or both over work-groups (OpenCL)."""
    spread = [*images, *lines] if choice.order == "panels" else images
    if hardware.has_grid:
        s.bind(channels, "group", 0)
        s.bind(s.fuse(spread), "group", 1)
    elif choice.order == "panels":
        s.parallel(s.fuse(spread))
    else:
        _parallelise_channels(s, choice, images, channels, exact)


def _parallelise_channels(
    s: Schedule, choice: ConvolutionChoice, batch: Sequence[str], channels: str, exact: bool
) -> None:
    """Spread blocks of channels over threads. Raises ScheduleError where the last block is incomplete, so that it is a separate loop."""
    if not exact:
        raise ScheduleError(
            f"{s.func.name}: the last block of channels is separate, and cannot be fused with other loops"
        )
    s.parallel(s.fuse([channels, *batch] if choice.order == "weights" else [*batch, channels]))


def _require_many_images(s: Schedule, hardware: HardwareInfo, main: str, roles: ConvolutionRoles) -> None:
    """Raise ScheduleError unless several images read weights that do not stay in a worker's cache."""
    extents = _extents(s, main)
    places = {roles.channel, *(w.place for w in roles.windows), *roles.steps}
    one = all(extent == 1 for v, extent in extents.items() if v not in places)
    weights = [extents[roles.channel], *(extents[v] for v in roles.steps)]
    small = None not in weights and 4 * prod(n or 1 for n in weights) <= hardware.l2_bytes
    if one or small or hardware.has_grid:
        raise ScheduleError(f"{s.func.name}: weights are not read again for another image, or stay in a worker's cache")


def _guess(
    s: Schedule, tiles: Sequence[tuple[float, int, int]], hardware: HardwareInfo, rows: Sequence[int] = ()
) -> None:
    """Set the first tiles (loads, height, width) as guesses, with the most of `rows` whose accumulators fit in registers."""
    guesses = []
    for _, height, width in tiles[:LIKELY]:
        fits = [n for n in rows if n == 1 or (n * height + 1) * ceil(width / hardware.lanes) < hardware.registers]
        guesses.append({"MR": height, "NR": width, **({"LR": max(fits)} if rows else {})})
    s.guess(*guesses)


def _rows_of_a_tile(extents: Mapping[Var, int | None], roles: ConvolutionRoles) -> list[int]:
    """Return how many short rows a tile may take, which divide their number; none for long rows or a single one."""
    places = [w.place for w in roles.windows]
    lines = extents[places[-2]] if len(places) > 1 else None
    length = extents[places[-1]]
    # A row of more than half the tallest tile fills the registers by itself.
    if lines is None or lines == 1 or length is None or 2 * length > TALLEST:
        return []
    return [n for n in (1, 2, 3, 4) if lines % n == 0]


def _require_registers(s: Schedule, hardware: HardwareInfo, height: Expr, width: Tunable) -> None:
    """Require registers for a tile's accumulators, one vector and one broadcast value."""
    vectors = ceildiv(width, hardware.lanes)
    # As for a matrix product: accumulators, one row of weights, and a broadcast element of the source.
    s.require(le(mul(height, vectors) + vectors + 1, hardware.registers))


def _tile(
    s: Schedule, hardware: HardwareInfo, choice: ConvolutionChoice, main: str, roles: ConvolutionRoles,
    tile: _ConvolutionTile, steps: Sequence[Var], column: Var, p_0: str, p_1: str,
) -> None:  # fmt: skip
    """Order the loops of a tile, and compute the epilogue where the tile is complete."""
    nest, epilogue = loops_by_iter(s, main), final_block(s.func).name
    j_0, j_1 = tile.split_channel(s, nest[roles.channel])
    batch = [n for v, n in nest.items() if v not in (roles.channel, column) and v not in steps]
    outer = _outer_order(choice, batch, p_0, j_0)
    reduce = [nest[v] for v in steps]
    s.reorder([*outer, *reduce, j_1, p_1])
    epilogue_loops = s.reverse_compute_at(epilogue, outer[-1])
    s.unroll(*epilogue_loops[:-1])
    s.vectorize(epilogue_loops[-1])
    _accumulate(s, main, reduce, j_1, p_1)
    _parallelise(s, hardware, choice, batch, p_0, j_0, tile.exact)


def _accumulate(s: Schedule, main: str, reduce: Sequence[str], row: str, vector: str, unrolled: int = UNROLLED) -> None:
    """Put the reduction outside the tile, unroll its rows and up to `unrolled` taps, and vectorise its innermost loop."""
    s.reorder([*reduce, row, vector])
    s.unroll(row)
    s.vectorize(vector)
    # Taps are few and known. A symbolic or long loop (the depth) would only make the code larger.
    if (as_int(s.extent(reduce[-1])) or unrolled + 1) <= unrolled:
        s.unroll(reduce[-1])
    s.decompose_reduction(block=main, loop=reduce[0])


def _outer_order(choice: ConvolutionChoice, batch: Sequence[str], places: str, channels: str) -> list[str]:
    orders = {
        "panels": [*batch, places, channels],
        "blocks": [*batch, channels, places],
        "weights": [channels, *batch, places],
    }
    return orders[choice.order]


@dataclass(frozen=True, slots=True)
class _ConvolutionTile:
    """A tile of channels by output positions.

    Attributes:
        exact: Whether the height divides the channels (of a group).
        channels: Their number, if it is constant.
    """

    height: Tunable
    width: Tunable
    exact: bool
    channels: int | None

    @staticmethod
    def of(s: Schedule, hardware: HardwareInfo, main: str, roles: ConvolutionRoles) -> _ConvolutionTile:
        count = roles.each or _extents(s, main)[roles.channel]
        fair = [d for d in range(1, TALLEST + 1) if count and count % d == 0]
        # With a prime number of channels the only divisors are 1 and itself: then tiles of any height with a tail
        # reuse the input better. A group must be whole, since the next group reads other inputs.
        exact = bool(fair) and (roles.each is not None or fair[-1] >= 4 or fair[-1] == count)
        height = s.tunable("MR", fair if exact else range(1, TALLEST + 1))
        width = s.tunable("NR", [hardware.lanes * v for v in (1, 2, 3, 4, 6, 8)])
        _require_registers(s, hardware, height, width)
        return _ConvolutionTile(height, width, exact, count)

    def split_channel(self, s: Schedule, loop: str) -> tuple[str, str]:
        """Split the loop over channels. Returns the loop over tiles and the loop inside a tile."""
        j_0, j_1 = s.split(loop, [None, self.height], divides=self.exact)
        if not self.exact:
            s.set_tail(j_0, "pow2")
        return j_0, j_1

    def likely(self, hardware: HardwareInfo, positions: int | None) -> list[tuple[float, int, int]]:
        """Return (loads per product, height, width) of likely fast tiles, best first."""
        heights, widths = self.height.domain, self.width.domain
        return register_tiles(heights, widths, hardware, self.channels, positions, NEIGHBOURS)


def _extents(s: Schedule, block: str) -> Mapping[Var, int | None]:
    return {i.var: as_int(i.extent) for i in find_block(s.func, block).iters}


def _vectorise_row(s: Schedule, loop: str, hardware: HardwareInfo) -> None:
    """Vectorise a row of the output."""
    length = as_int(s.extent(loop))
    if length is None or length > WHOLE_ROWS * hardware.lanes:
        v_0, loop = s.split(loop, [None, hardware.lanes])
        s.set_tail(v_0, "peel")
    s.vectorize(loop)


def _parallelise(
    s: Schedule,
    hardware: HardwareInfo,
    choice: ConvolutionChoice,
    batch: Sequence[str],
    places: str,
    channels: str,
    exact: bool,
) -> None:
    """Spread blocks of positions or channels over threads (C), or both over work-groups (OpenCL)."""
    # A peeled loop becomes two loops in the code, so it cannot be fused with others.
    peeled = find_loop(s.func, places).tail != "predicate"
    if hardware.has_grid:
        for axis, name in enumerate([channels, places] if choice.order == "panels" else [places, channels]):
            s.bind(name, "group", axis)
        if batch:
            s.bind(s.fuse(batch), "group", 2)
    elif choice.order == "panels":
        s.parallel(s.fuse([*batch, places]) if not peeled else places)
    else:
        _parallelise_channels(s, choice, batch, channels, exact)
