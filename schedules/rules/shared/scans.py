"""Prefix scans in the order of their results, for the rules of processors and GPUs.

Tests: `tests/schedules/rules/test_sketches.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from relax_tune.ir.core.dtype import f64
from relax_tune.ir.core.expr import Expr
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.ir.deduce.pattern_kinds import prefix_scan
from relax_tune.schedules.loop_tree import find_block
from relax_tune.schedules.primitives.reduction.scans import ACCUMULATORS, scan_of
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo


def scans(func: PrimFunc) -> tuple[Block, ...]:
    """Return the blocks that are prefix scans."""
    return tuple(b for b in blocks(func.body) if prefix_scan(b) is not None)


def serial_scans(func: PrimFunc, hardware: HardwareInfo) -> tuple[Block, ...]:
    """Return the prefix scans whose running totals the hardware can store: totals of float32 are float64 (`ACCUMULATORS`)."""
    nodes = scans(func)
    return (
        nodes if hardware.has_doubles else tuple(b for b in nodes if ACCUMULATORS.get(b.body.buffer.dtype) is not f64)
    )


@dataclass(frozen=True, slots=True)
class ScannedRows:
    """A scan whose rows are computed in order.

    Attributes:
        rows: The loops over rows, outermost first.
        together: The loops over rows that are scanned together: of the first totals, of the steps, of the results.
        blocks: The names of the blocks that compute the scan.
    """

    rows: list[str]
    together: list[str]
    blocks: tuple[str, ...]


def scan_rows(s: Schedule, block: str, width: Expr | int | None = None) -> ScannedRows:
    """Compute each row of a scan in order; its running total stays in registers.

    Args:
        width: Neighbouring rows that are scanned together.

    Raises:
        ScheduleError: For a scan that cannot be computed so.
    """
    node = find_block(s.func, block)
    pattern = scan_of(node)
    names = s.iter_loops(block)
    position, step = names.pop(pattern.position.var), names.pop(pattern.step.var)
    rows, inside = list(names.values()), list[str]()
    if width is not None and rows:
        outer, inner = s.split(rows[-1], [None, width])
        rows, inside = [*rows[:-1], outer], [inner]
    s.reorder([*rows, position, *inside, step])
    new = (*s.serial_scan(block=block, loop=position), block)
    s.set_scope(buffer=s.buffer_of(block).name, scope="local")
    return ScannedRows(rows, [s.loops_of(b)[-1] for b in new] if inside else [], new)
