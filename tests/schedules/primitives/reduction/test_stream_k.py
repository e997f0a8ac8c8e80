"""Refusals of stream_k, and stretches of steps that begin and end anywhere in tiles."""

from __future__ import annotations

import pytest
from tests.schedules.primitives.refusals import Refusal, Step, check, refuse, step
from tests.support import schedule_functions as make
from tests.support.meaning import assert_same_meaning

from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.expr import as_int, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import loops
from relax_tune.schedules.mean_extents import with_mean_extents
from relax_tune.schedules.schedule import Schedule

COPIED = step("cache_write", block="mm", scope="global")
PADDED = step("pad", block="mm", factors=[2, 4, 3])
TAKEN = step("compute_inline", block="C_local_pad_take")
CUT = tuple(step("split", loop=f"mm_{x}", factors=[None, f]) for x, f in zip("ijk", (2, 4, 3)))
ORDER = step("reorder", names=["mm_i_0", "mm_j_0", "mm_k_0", "mm_i_1", "mm_j_1", "mm_k_1"])
STORED = step("reverse_compute_at", block="C_write", loop="mm_j_0")
FETCHED = tuple(step("compute_at", block=f"{x}_pad_fill", loop="mm_k_0") for x in "AW")
TILES = (COPIED, PADDED, TAKEN, *CUT, ORDER, *FETCHED, STORED)


def share(workers: int, tiles: tuple[str, ...] = ("mm_i_0", "mm_j_0"), steps: str = "mm_k_0") -> Step:
    return step("stream_k", block="mm", tiles=list(tiles), steps=steps, workers=workers)


def product() -> PrimFunc:
    return make.matmul(const_weight=False)


REFUSALS = [
    refuse("no tiles", product, *TILES, share(2, ()), message="one block that copies its sums"),
    refuse("other tiles", product, *TILES, share(2, ("mm_j_0", "mm_i_0")), message="one block that copies its sums"),
    refuse("steps of elements", product, *TILES, share(2, steps="mm_i_1"), message="one block that copies its sums"),
    refuse("nothing stored", product, *TILES[:-1], share(2), message="one block that copies its sums"),
    refuse("no workers", product, *TILES, share(0), message="positive factor"),
    refuse("tiles with conditions", product, COPIED, *CUT, ORDER, STORED, share(2), message="under no condition"),
    refuse(
        "separate initial values",
        product,
        *TILES,
        step("decompose_reduction", block="mm", loop="mm_k_0"),
        share(2),
        message="that may be combined more than once",
    ),
    refuse(
        "results of another step",
        product,
        *TILES,
        step("software_pipeline", block="A_pad_fill", loop="mm_k_0", stages=2),
        share(2),
        message="one block that copies its sums",
    ),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda c: c.what)
def test_stream_k_of_unfit_step_is_refused(case: Refusal) -> None:
    check(case)


def shared(workers: int) -> Schedule:
    s = Schedule(product())
    for primitive, args in (*TILES, share(workers)):
        s.apply(primitive, **args)
    verify(s.func)
    return s


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3, 23])
def test_stream_k_ranges_ending_within_tiles_keep_meaning(workers: int) -> None:
    scheduled = shared(workers).func
    for dims in ((5, 5, 10), (1, 1, 1), (3, 2, 0), (0, 5, 2), (3, 0, 4)):
        assert_same_meaning(product(), scheduled, dict(zip("mnk", dims)))


def test_stream_k_of_grouped_steps_keeps_meaning() -> None:
    """As many for each as there are for all, shared out; no more tiles than workers, so that two pieces make up a stretch."""
    for workers in (6, 12):
        scheduled = with_mean_extents(shared(workers).func)
        m, k, n = scheduled.symbols
        sizes = {m: 4, n: 8, k: 36}
        counted = {x.var.name: as_int(substitute(x.extent, sizes)) for x in loops(scheduled.body)}
        pieces, steps = counted["mm_k_0_piece"], counted["mm_k_0_step"]
        assert counted["mm_k_0_worker"] == workers and pieces == 2
        assert pieces * (steps or 0) * workers == 2 * 2 * 12
