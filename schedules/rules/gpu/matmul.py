"""GPU rule for matrix products on scalar arithmetic: data-parallel, split-K and Stream-K.

`relax_tune.schedules.rules.shared.register_tiles` does the tiling.

Tests: `tests/schedules/rules/test_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from relax_tune.ir.core.function import PrimFunc
from relax_tune.schedules.rules.shared.contraction import is_product, isolate_contraction
from relax_tune.schedules.rules.shared.forms import first_applicable
from relax_tune.schedules.rules.shared.register_tiles import tile_product
from relax_tune.schedules.rules.shared.staging import copy_strategies
from relax_tune.schedules.rules.shared.stream_k import DECOMPOSITIONS, Decomposition
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.target import HardwareInfo


def sketches(func: PrimFunc, hardware: HardwareInfo) -> Iterator[tuple[str, Schedule]]:
    """Yield a sketch for each decomposition of a matrix product; none for other functions."""
    if not is_product(func):
        return
    for form in DECOMPOSITIONS:
        options = (partial(build, func, hardware, form, asynchronous) for asynchronous in copy_strategies(hardware))
        yield from first_applicable(func, f"matmul.{form}", options)


def build(
    func: PrimFunc, hardware: HardwareInfo, form: Decomposition = "data_parallel", asynchronous: bool = False
) -> Schedule:
    """Schedule a matrix product.

    Args:
        asynchronous: Copy slices ahead of their use with `cp.async`.

    Raises:
        ScheduleError: Where the operands do not have rows and columns.
    """
    s = Schedule(func)
    tile_product(s, isolate_contraction(s), hardware, form, asynchronous)
    return s
