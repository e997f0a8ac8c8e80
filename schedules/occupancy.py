"""GPU resources of a work-group in closed form over tunables: work-items, shared memory, registers, occupancy.

Buffer sizes are those after lowering (`relax_tune.ir.codegen.lower.shrink_buffers`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

from relax_tune.errors import ScheduleError
from relax_tune.ir.arith.linear import extent_of, linear
from relax_tune.ir.arith.simplify import simplify
from relax_tune.ir.core.buffer import Buffer, Scope
from relax_tune.ir.core.expr import (
    Const,
    Expr,
    Var,
    add,
    as_int,
    ceildiv,
    const,
    floordiv,
    free_vars,
    le,
    maximum,
    minimum,
    mul,
    substitute,
)
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import AXES, Block, For, Stmt, blocks, statements
from relax_tune.schedules.loop_tree import block_loads, block_value, enclosing, loop_env
from relax_tune.schedules.mean_extents import with_mean_extents
from relax_tune.schedules.symbols import only_tunables
from relax_tune.schedules.target import HardwareInfo

# One variable per axis for the work-item's index, shared by all loops over that axis.
ITEMS = tuple(Var(f"item_{axis}") for axis in range(AXES["item"]))
# Registers for addresses, loop counters and the compiler's temporaries.
SPARE_REGISTERS = 32
# Lower bounds of these and of operand registers, measured by experiments/gpu/ptxas_report.py.
MIN_SPARE_REGISTERS, MIN_OPERAND_REGISTERS = 24, 8
# Hardware allocates a warp's registers in multiples of this number per work-item.
REGISTER_GRANULE = 8


def kernels(func: PrimFunc) -> tuple[Stmt, ...]:
    """Return the statements that are launched one after the other."""
    return statements(func.body)


def axis_items(func: PrimFunc, kernel: Stmt) -> dict[int, Expr]:
    """Return the work-items of a group along each axis: its longest loop."""
    axes: dict[int, list[Expr]] = {}
    for b in blocks(kernel):
        for p in enclosing(func, b):
            if p.kind == "item":
                axes.setdefault(p.axis, []).append(p.extent)
    return {axis: reduce(maximum, dict.fromkeys(extents)) for axis, extents in axes.items()}


def group_items(func: PrimFunc, kernel: Stmt) -> Expr:
    """Return the work-items of a group."""
    total: Expr = const(1)
    for items in axis_items(func, kernel).values():
        total = mul(total, items)
    return simplify(total)


def stored_bytes(func: PrimFunc, kernel: Stmt, scope: Scope, least: int = 1) -> Expr:
    """Return the bytes of the buffers of a scope: `shared` by a group, of its `warp`s, or `local` to one work-item.

    Args:
        least: Bytes of the smallest element.
    """
    total: Expr = const(0)
    for buffer in func.allocs:
        if buffer.scope == scope:
            shape = stored_shape(func, kernel, buffer)
            if shape:
                total = total + mul(const(max(buffer.dtype.bytes, least)), reduce(mul, shape))
    return simplify(total)


def shared_bytes(func: PrimFunc, kernel: Stmt, hardware: HardwareInfo) -> Expr:
    """Return the bytes of shared memory of a group; `warp` buffers count where there are no shuffles."""
    shared = stored_bytes(func, kernel, "shared", hardware.element_bytes)
    return (
        shared
        if hardware.has_shuffles
        else simplify(shared + stored_bytes(func, kernel, "warp", hardware.element_bytes))
    )


def stored_shape(func: PrimFunc, kernel: Stmt, buffer: Buffer) -> tuple[Expr, ...]:
    """Return the shape of a buffer after lowering has shrunk it to its live elements; () if the kernel does not use it."""
    accesses = _accesses(func, kernel, buffer)
    if not accesses:
        return ()
    depth = _declaration_depth(buffer, accesses)
    shape = [_touched_extent(buffer, d, accesses, depth) for d in range(len(buffer.shape))]
    if buffer.row_alignment is not None and len(shape) > 1:
        factor, offset = buffer.row_alignment
        # As `storage_align` pads rows: to a multiple, plus an offset.
        shape[-1] = mul(ceildiv(shape[-1], factor), factor) + offset
    return tuple(map(simplify, shape)) or (const(1),)


_Access = tuple[tuple[Expr, ...], tuple[For, ...], bool]


def _accesses(func: PrimFunc, kernel: Stmt, buffer: Buffer) -> list[_Access]:
    """Return (indices over loop variables, loops around, written) of every access."""
    accesses: list[_Access] = []
    for b in blocks(kernel):
        path = enclosing(func, b)
        for where, written in [(b.body.indices, True)] * (b.body.buffer is buffer) + [
            (x.indices, False) for x in block_loads(b) if x.buffer is buffer
        ]:
            accesses.append((tuple(simplify(block_value(b, e), loop_env(path)) for e in where), path, written))
    return accesses


def _declaration_depth(buffer: Buffer, accesses: Sequence[_Access]) -> int:
    """Return the number of loops outside the buffer's declaration."""
    paths = [path for _, path, _ in accesses]
    depth = 0
    while all(len(p) > depth for p in paths) and all(p[depth] is paths[0][depth] for p in paths):
        depth += 1
    above = paths[0][:depth]
    enclosing_kinds = ("group",) if buffer.scope != "local" else ("group", "item")
    # Shared memory is declared for the group, inside its loops; registers also inside the loops over work-items.
    first = max((d + 1 for d, p in enumerate(above) if p.kind in enclosing_kinds), default=0)
    stores = [where for where, _, written in accesses if written]
    for d in range(first, depth):
        if above[d].kind == "item" or not all(any(above[d].var in free_vars(e) for e in where) for where in stores):
            return d
    return depth


def _touched_extent(buffer: Buffer, d: int, accesses: Sequence[_Access], depth: int) -> Expr:
    """Return the touched elements of a dimension while the loops inside the declaration run.

    It is the whole dimension unless all accesses have the same start.
    """
    spans: list[tuple[bool, Expr, Expr]] = []
    size = buffer.shape[d]
    for where, path, _ in accesses:
        e, moving = where[d], {p.var for p in path[depth:] if p.kind == "serial"}
        if e.op == "floormod" and e.args[1] is size and moving & set(free_vars(e)):
            return size  # a circular buffer, which uses all its slots in turn
    for where, path, _ in accesses:
        inner = {p.var: p.extent for p in path[depth:] if buffer.scope != "local" or p.kind != "item"}
        reach = _index_range(where[d], inner)
        if reach is not None:
            plain = linear(where[d], tuple(inner)) is not None
            spans.append((plain, _by_axis(reach[0], path), reach[1]))
    # Accesses with a linear index decide; others, such as copies with quotients, touch the same elements in another
    # order.
    spanning = [x for x in spans if x[0]] or spans
    if not spanning or any(simplify(start - spanning[0][1]) is not const(0) for _, start, _ in spanning):
        return buffer.shape[d]
    covered = reduce(maximum, dict.fromkeys(simplify(extent) for _, _, extent in spanning))
    return covered if as_int(buffer.shape[d]) is None else minimum(covered, buffer.shape[d])


def _index_range(e: Expr, inner: Mapping[Var, Expr]) -> tuple[Expr, Expr] | None:
    """Return the start and extent of an index while the inner loops run; None if unknown."""
    extents = {v: inner[v] for v in free_vars(e) if v in inner}
    if not extents:
        return e, const(1)
    try:
        parts = linear(e, tuple(extents))
        if parts is not None:
            return parts[1], extent_of(e, extents)
    except ScheduleError:
        return None
    if e.op not in ("add", "mul", "floordiv", "floormod"):
        return None
    a, b = (_index_range(x, inner) for x in e.args)
    if a is None or b is None:
        return None
    if e.op == "add":
        return a[0] + b[0], a[1] + b[1] - 1
    # Products and quotients are bounded only by factors that do not change while the inner loops run.
    if b[1] is not const(1):
        return None
    if e.op == "mul":
        return mul(a[0], b[0]), mul(a[1] - 1, b[0]) + 1
    if simplify(a[0]) is not const(0):
        return None
    return const(0), ceildiv(a[1], b[0]) if e.op == "floordiv" else minimum(a[1], b[0])


def _by_axis(e: Expr, path: Sequence[For]) -> Expr:
    """Replace all loops over the work-items of an axis by one variable."""
    return simplify(substitute(e, {p.var: ITEMS[p.axis] for p in path if p.kind == "item"}))


def registers(func: PrimFunc, kernel: Stmt, least: bool = False) -> Expr:
    """Estimate the registers of a work-item: the largest live set at any statement, plus some to spare.

    Live are local buffers between their first and last use, and the statement's operands. A buffer used for the last time makes room for
    one that the statement makes.

    Args:
        least: Registers that the compiler can do with, by loading operands one after the other.
    """
    order, items = blocks(kernel), maximum(group_items(func, kernel), 1)
    spans: list[tuple[int, int, Expr]] = []
    for buffer in func.allocs:
        used = [b for b in order if b.body.buffer is buffer or buffer in {x.buffer for x in block_loads(b)}]
        if buffer.scope not in ("local", "warp") or not used:
            continue
        size = mul(const(buffer.dtype.bytes), reduce(mul, stored_shape(func, kernel, buffer) or (const(1),)))
        # A register has four bytes; `warp` buffers are spread over the registers of all work-items.
        each = mul(items, 4) if buffer.scope == "warp" else const(4)
        # constants take no registers before their first use
        varying = [b for b in used if not isinstance(b.body.value, Const)] or used
        live = [order.index(b) for b in _live_blocks(func, varying)]
        spans.append((min(live), max(live), ceildiv(size, each)))
    totals: dict[Expr, None] = {}
    for k, b in enumerate(order):
        ends: Expr = const(0)
        begins: Expr = const(0)
        operands = minimum(_operands(func, b), MIN_OPERAND_REGISTERS) if least else _operands(func, b)
        for first, last, size in spans:
            # A buffer that begins at a statement may take the registers of one that ends there, since operands are
            # read before the result is written; hence the maximum of the two below.
            if first == k < last:
                begins = begins + size
            elif first < k == last:
                ends = ends + size
            elif first <= k <= last:
                operands = operands + size
        totals[simplify(operands + maximum(ends, begins))] = None
    return simplify(reduce(maximum, totals) + (MIN_SPARE_REGISTERS if least else SPARE_REGISTERS))


def _live_blocks(func: PrimFunc, used: Sequence[Block]) -> Iterator[Block]:
    """Yield the blocks in the live range of a buffer: its users, and all blocks of loops that repeat a use."""
    paths = [enclosing(func, b) for b in used]
    for b, path in zip(used, paths):
        private_loops = (
            p for p in path if p.kind not in ("item", "vectorized") and not all(p in other for other in paths)
        )
        around = next(private_loops, None)
        yield from (b,) if around is None else blocks(around)


def _operands(func: PrimFunc, block: Block) -> Expr:
    """Return the registers of a statement's non-local operands.

    Each operand takes the extents of the vectorized and unrolled loops over elements; reduction steps run one by one.
    """
    total: Expr = const(0)
    steps = {v for i, e in zip(block.iters, block.bindings) if i.kind == "reduce" for v in free_vars(e)}
    path = [p for p in enclosing(func, block) if p.kind in ("vectorized", "unrolled") and blocks(p) == (block,)]
    for x in block_loads(block):
        if x.buffer.scope == "local":
            continue
        used = set(free_vars(*(block_value(block, e) for e in x.indices))) - steps
        size: Expr = const(1)
        for p in path:
            size = mul(size, p.extent) if p.var in used else size
        total = total + size
    return simplify(total)


def launched_items(axes: Mapping[int, Expr]) -> dict[int, Expr]:
    """Return the work-items along each axis of a launch, whose last one holds all further axes."""
    launched: dict[int, Expr] = {}
    for axis, items in axes.items():
        # A launch has as many axes as a group; further axes of work-items are fused into the last one.
        at = min(axis, AXES["group"] - 1)
        launched[at] = mul(launched[at], items) if at in launched else items
    return launched


def launch_limits(func: PrimFunc, hardware: HardwareInfo) -> tuple[Expr, ...]:
    """Return the facts over tunables without which a GPU cannot launch the kernels."""
    facts: list[Expr] = []
    func = with_mean_extents(func)
    for kernel in kernels(func):
        items, shared = group_items(func, kernel), shared_bytes(func, kernel, hardware)
        along = launched_items(axis_items(func, kernel))
        # The lower bound of registers is compared: a candidate is excluded only if it certainly cannot be launched.
        available = minimum(const(hardware.registers), floordiv(const(hardware.sm_registers), maximum(items, 1)))
        facts += [
            le(items, hardware.group_size),
            le(shared, hardware.local_bytes),
            *(le(n, hardware.group_axes[axis]) for axis, n in along.items() if axis < len(hardware.group_axes)),
            le(registers(func, kernel, True), available),
        ]
    return tuple(f for f in map(simplify, facts) if only_tunables(f))


def resident_groups(func: PrimFunc, kernel: Stmt, hardware: HardwareInfo) -> Expr:
    """Return the groups that a multiprocessor holds at once, by work-items, shared memory and registers."""
    warps = ceildiv(group_items(func, kernel), hardware.warp)
    shared = shared_bytes(func, kernel, hardware)
    each = mul(ceildiv(registers(func, kernel), REGISTER_GRANULE), REGISTER_GRANULE * hardware.warp)
    return simplify(
        reduce(
            minimum,
            (
                const(hardware.sm_max_groups),
                floordiv(const(hardware.sm_max_threads // hardware.warp), warps),
                floordiv(const(hardware.sm_shared_bytes), maximum(add(shared, const(hardware.reserved_bytes)), 1)),
                floordiv(const(hardware.sm_registers), mul(warps, each)),
            ),
        )
    )
