"""Steps of recurrent layers: a product with the gates as a dimension, and what is computed from one element of all gates.

A register tile has MR rows and V vectors of columns of each gate. It accumulates `G` gates at a time over the whole reduction, and the
new state is computed while the sums are in registers or in the first cache. The weight is packed once, in the order in which the tiles
read it. Workers share the columns, so that each one's part of the weight stays in its cache from step to step.

Tests: `tests/schedules/rules/test_on_devices.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from relax_tune.ir.core.expr import add, as_int, le, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import blocks
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.gates import has_gates, weight_of
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

HEIGHTS = range(1, 13)
VECTORS = (1, 2, 4)
PREFETCH_STEPS = 32
"""Steps between the prefetch of a part of the weight and its use."""


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield the sketches of a product with gates and its readers; none for other functions."""
    if has_gates(func):
        forms = [(order, ahead) for order in hardware.orders for ahead in (False, True)]
        yield from try_forms(
            func,
            (
                (f"gates.{order}{'.prefetch' if ahead else ''}", partial(build, func, hardware, order, ahead))
                for order, ahead in forms
            ),
        )


def build(func: PrimFunc, hardware: HardwareInfo, order: str, ahead: bool = False) -> Schedule:
    """Apply one form. Raises ScheduleError if it does not fit the function."""
    s = Schedule(func)
    product, *readers = blocks(func.body)
    main, access = product.name, weight_of(func, product)
    gates, rows_of_call, width = (as_int(i.extent) for i in product.iters[:3])
    assert access is not None and gates is not None and width is not None
    before = {b.name for b in blocks(s.func.body)}
    s.reindex(block=main, buffer=access.buffer.name, dims=[1])
    (copy,) = (b for b in blocks(s.func.body) if b.name not in before)
    for block in (product, *readers):
        if block.body.buffer in func.allocs:
            s.set_scope(buffer=block.body.buffer.name, scope="local")

    lanes = hardware.lanes if width % hardware.lanes == 0 else 8
    vectors = s.tunable("V", [v for v in VECTORS if width % (v * lanes) == 0] or [1])
    together = s.tunable("G", [g for g in range(1, gates + 1) if gates % g == 0])
    height = s.tunable("MR", [h for h in HEIGHTS if rows_of_call is None or h <= max(rows_of_call, 1)])
    gate, row, column, step = s.loops_of(main)
    panel, *columns = s.split(column, [None, mul(vectors, lanes)], divides=True)
    tile, *rows = s.split(row, [None, height])
    s.set_tail(tile, "pow2")
    part, one = s.split(gate, [None, together], divides=True)
    s.reorder([panel, tile, part, step, one, *rows, *columns])
    # The sums of a tile, the vectors of a gate, and one broadcast element of a row.
    sums = mul(mul(height, together), vectors)
    s.require(le(add(add(sums, vectors), 1), hardware.registers))
    for reader in readers:
        loops = s.reverse_compute_at(reader.name, tile)
        s.vectorize(loops[-1])
        s.unroll(*loops[:-1])
    s.unroll(part, one, *rows)
    s.vectorize(*columns)
    s.decompose_reduction(block=main, loop=step)
    s.hold_vectors(loop=step)
    if ahead:
        s.prefetch(loop=step, iterations=PREFETCH_STEPS)
    s.mark_prepack(block=copy.name)
    # (steps, gates, columns) to (panels, parts, steps, gates of a part, columns of a panel)
    s.tile_layout(buffer=copy.body.buffer.name, dim=2, factor=mul(vectors, lanes), order=(2, 1, 0, 3))
    s.tile_layout(buffer=copy.body.buffer.name, dim=1, factor=together, order=(0, 1, 3, 2, 4))
    if order == "parallel":
        s.set_kind(panel, "group" if hardware.has_grid else "parallel")
    s.guess(*_guesses(s, hardware))
    return s


def _guesses(s: Schedule, hardware: HardwareInfo) -> Sequence[Mapping[str, int]]:
    """Return a tile with one vector of all gates, whose sums are independent also for one row, and one with the most rows."""
    gates, widest = s.tunables["G"].domain[-1], min(2, s.tunables["V"].domain[-1])
    shapes, heights = ((1, gates), (widest, 1)), s.tunables["MR"].domain
    return [{"V": v, "G": g, "MR": _height(heights, g * v, v, hardware)} for v, g in shapes]


def _height(heights: Sequence[int], sums: int, vectors: int, hardware: HardwareInfo) -> int:
    """Return the most rows whose sums fit into the registers."""
    return max((h for h in heights if h * sums + vectors + 1 <= hardware.registers), default=1)
