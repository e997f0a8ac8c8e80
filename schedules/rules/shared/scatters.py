"""Scatters in the order of their updates, for the rules of processors."""

from __future__ import annotations

from relax_tune.ir.core.dtype import f64
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import Block, blocks
from relax_tune.ir.deduce.pattern_kinds import prefix_scan
from relax_tune.ir.deduce.rankings import pick
from relax_tune.ir.deduce.scatters import scatter
from relax_tune.schedules.primitives.reduction.scatters import total_dtype
from relax_tune.schedules.target import HardwareInfo


def searches(func: PrimFunc) -> bool:
    """Return whether results search all terms for their few: prefix scans, selections and scatters.

    The loops take as many steps as pairs of a term and a result. Primitives of their own take about as many as terms and results."""
    return any(prefix_scan(b) or pick(b) or scatter(b) for b in blocks(func.body))


def serial_scatters(func: PrimFunc, machine: HardwareInfo) -> tuple[Block, ...]:
    """Return the scatters whose results the machine can keep: those of float32 are float64 while updates are added.

    None for a machine whose workers are many, since updates are combined one after the other."""
    if machine.is_gpu:
        return ()
    found = {b: pattern for b in blocks(func.body) if (pattern := scatter(b)) is not None and pick(b) is None}
    return tuple(b for b, p in found.items() if machine.has_doubles or total_dtype(p, b.body.buffer.dtype) is not f64)
