"""Functions without reductions: elementwise, broadcast, transpose, gather, in any fused combination.

Tests: `tests/schedules/rules/test_on_devices.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.buffer import Buffer
from relax_tune.ir.core.dtype import f32
from relax_tune.ir.core.expr import Expr, add, as_int, const, free_vars, mul
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.hardware.intrinsics import INTRINSICS
from relax_tune.schedules.analysis import reductions
from relax_tune.schedules.loop_tree import find_block, find_loop
from relax_tune.schedules.rules.shared.forms import try_forms
from relax_tune.schedules.rules.shared.injective import inline_into_outputs, transposed_reads
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo

# Non-temporal stores write whole cache lines.
LINE_BYTES = 64
# With more elements than this multiple of the cost of starting workers (in ns), one thread is too slow.
SMALL = 256

# parallel: several workers; serial: one thread without a parallel region; nontemporal: several, with stores past the caches.
Form = Literal["parallel", "serial", "nontemporal"]
# The loop over tiles that stays on a worker: along the rows of the output or of the inputs.
Inside = Literal["column", "row"]
TRANSPOSED: tuple[tuple[Form, Inside], ...] = (
    ("parallel", "column"), ("parallel", "row"), ("nontemporal", "row"), ("serial", "column"),
)  # fmt: skip


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield a sketch of each form that can be the fastest at some shape."""
    if reductions(func):
        return
    possible = _useful_forms(func, hardware)
    yield from _along_rows(func, hardware, possible)
    for form, inside in TRANSPOSED:
        # Tiles narrower than a cache line would bypass the caches with parts of lines.
        if form not in possible or (form == "nontemporal" and hardware.lanes * 4 < LINE_BYTES):
            continue
        try:
            schedule = _transposed(func, hardware, form, inside)
        except ScheduleError:
            break
        yield f"injective.transposed.{form}.{inside}", schedule


def epilogues(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield the sketches of what follows a library's call: with plain stores, along rows."""
    if not reductions(func):
        yield from _along_rows(func, hardware, [f for f in _useful_forms(func, hardware) if f != "nontemporal"])


def _along_rows(func: PrimFunc, hardware: HardwareInfo, forms: Sequence[Form]) -> Iterator[tuple[str, Schedule]]:
    return try_forms(func, ((f"injective.{form}", partial(build, func, hardware, form)) for form in forms))


def _useful_forms(func: PrimFunc, hardware: HardwareInfo) -> tuple[Form, ...]:
    """Return the forms that may be the fastest at some shape.

    serial: left out where all elements take much longer than starting workers (at a generous 1 ns an element).
    parallel: left out where all elements take less time than starting workers.
    nontemporal: left out where the outputs fit in the workers' private caches.
    """
    points = _total_size(func, lambda b: 1)
    nbytes = _total_size(func, lambda b: b.dtype.bytes)
    forms: list[Form] = []
    has_serial = "serial" in hardware.orders
    if not has_serial or (hardware.workers > 1 and (points is None or points > hardware.launch_ns)):
        forms.append("parallel")
    if has_serial and (hardware.workers == 1 or points is None or points < SMALL * hardware.launch_ns):
        forms.append("serial")
    if nbytes is None or nbytes > hardware.workers * hardware.l2_bytes:
        forms.append("nontemporal")
    return tuple(forms)


def _total_size(func: PrimFunc, weight: Callable[[Buffer], int]) -> int | None:
    """Return the sum of the outputs' sizes in `weight` per element, or None if it depends on a shape symbol."""
    total: Expr = const(0)
    for b in func.output_buffers:
        size: Expr = const(weight(b))
        for d in b.shape:
            size = mul(size, d)
        total = add(total, size)
    return as_int(total)


def build(func: PrimFunc, hardware: HardwareInfo, form: Form) -> Schedule:
    """Inline everything into the outputs and vectorise the last dimension of each.

    On several workers the runs of vectors are split into GP equal parts.
    """
    s = Schedule(func)
    left = inline_into_outputs(s)
    width = s.tunable("VL", [hardware.lanes * u for u in (1, 2, 4)])
    if form == "serial":
        for block in left:
            c_0, c_1 = s.split(s.loops_of(block.name)[-1], [None, width])
            s.set_tail(c_0, "peel")
            s.vectorize(c_1)
        return s
    run = s.tunable("RB", (1, 4, 16, 64, 256))
    parts = s.tunable("GP", [hardware.workers * k for k in (1, 2, 4, 8)])
    for block in left:
        *outer, column = s.loops_of(block.name)
        if outer:
            c_0, c_1, c_2 = s.split(column, [None, run, width])
            # Split by the number of parts and not by their size, so that all workers get equal shares at every shape.
            top, rest = s.split(s.fuse([*outer, c_0]), [parts, None])
        else:
            top, rest, c_1, c_2 = s.split(column, [parts, None, run, width])
        s.set_tail(rest, "peel")
        s.set_tail(c_1, "peel")
        s.vectorize(c_2)
        if form == "nontemporal":
            s.nontemporal_stores(loop=c_2)
        if hardware.has_grid:
            s.bind(top, "group", 0)
        else:
            s.parallel(top)
    return s


def _transposed(func: PrimFunc, hardware: HardwareInfo, form: Form, inside: Inside) -> Schedule:
    """Schedule a function that reads arrays along another dimension than it writes.

    Square tiles of these arrays are transposed in registers into a local buffer.
    """
    s = Schedule(func)
    block = inline_into_outputs(s)
    if len(block) != 1:
        raise ScheduleError(f"{func.name}: expected one block, got {len(block)}")
    name = block[0].name
    node, loops = find_block(s.func, name), s.loops_of(name)
    column = node.iters[-1].var
    if node.body.indices[-1] is not column or node.bindings[-1] is not find_loop(s.func, loops[-1]).var:
        raise ScheduleError(f"{func.name}: {name!r} does not write along its last iterator")
    reads = transposed_reads(node, column)
    # Square tiles of one vector per side: reads and writes are then both whole vectors.
    tile = hardware.lanes
    at = next(k for k, i in enumerate(node.iters) if i.var is reads[0].indices[-1])
    copies = []
    for access in reads:
        (copy_name,) = s.cache_read(block=name, buffer=access.buffer.name, scope="local")
        copies.append(find_block(s.func, copy_name))
    others = [n for k, n in enumerate(loops[:-1]) if k != at]
    r_0, r_1 = s.split(loops[at], [None, tile])
    c_0, c_1 = s.split(loops[-1], [None, tile])
    # Either writes or reads run along memory from tile to tile. The faster one depends on the sizes and on the cache,
    # so both are sketches.
    spread, inner = ([*others, r_0], c_0) if inside == "column" else ([*others, c_0], r_0)
    s.reorder([*spread, inner, r_1, c_1])
    for copy, access in zip(copies, reads, strict=True):
        nest = s.compute_at(copy.name, inner)
        wide = next(d for d, e in enumerate(access.indices) if column in free_vars(e))
        order = [d for d in range(len(access.indices)) if d != wide]
        s.permute_layout(buffer=copy.body.buffer.name, order=[*order, wide])
        intrinsic = f"transpose_f32_{tile}x{tile}"
        if len(nest) == 2 and access.buffer.dtype is f32 and intrinsic in INTRINSICS:
            s.tensorize(loop=nest[0], intrinsic=intrinsic)
    s.set_tail(inner, "peel")
    s.vectorize(c_1)
    if form == "nontemporal":
        s.nontemporal_stores(loop=c_1)
    if form != "serial":
        parts = s.tunable("GP", [hardware.workers * k for k in (1, 2, 4, 8)])
        top, rest = s.split(s.fuse(spread), [parts, None])
        s.set_tail(rest, "peel")
        s.set_kind(top, "group" if hardware.has_grid else "parallel")
    return s
