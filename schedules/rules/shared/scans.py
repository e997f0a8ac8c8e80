"""Prefix scans in the order of their results, for the rules of processors and GPUs."""

from __future__ import annotations

from relax_tune.errors import ScheduleError
from relax_tune.ir.core.expr import Expr
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.primitives.reduction.scans import scan_of
from relax_tune.schedules.schedule import Schedule


def scans(func: PrimFunc) -> tuple[Block, ...]:
    """Return the blocks that are prefix scans."""
    return tuple(b for b in blocks(func.body) if _is_scan(b))


def _is_scan(block: Block) -> bool:
    if not block.is_reduction:
        return False
    try:
        scan_of(block)
    except ScheduleError:
        return False
    return True


def scan_rows(s: Schedule, block: str, width: Expr | int | None = None) -> tuple[list[str], list[str]]:
    """Compute each row of a scan in order; its running total stays in registers.

    width: neighbouring rows that are scanned together
    Returns the loops over rows, outermost first, and those over the rows that are together: of the first totals, of the steps, of the
    results. Raises ScheduleError for a scan that cannot be computed so."""
    node = find_block(s.func, block)
    found = scan_of(node)
    names = dict(zip((i.var for i in node.iters), s.loops_of(block), strict=True))
    position, step = names.pop(found.position.var), names.pop(found.step.var)
    rows, inside = list(names.values()), list[str]()
    if width is not None and rows:
        outer, inner = s.split(rows[-1], [None, width])
        rows, inside = [*rows[:-1], outer], [inner]
    s.reorder([*rows, position, *inside, step])
    made = s.apply("serial_scan", block=block, loop=position)
    s.apply("set_scope", buffer=find_block(s.func, block).body.buffer.name, scope="local")
    together = [s.loops_of(b)[-1] for b in (*made, block)] if inside else []
    return rows, together
