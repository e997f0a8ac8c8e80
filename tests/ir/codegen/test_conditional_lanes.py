"""Lanes of register vectors that are written one at a time under conditions: int64 has no masked vectors in C."""

from __future__ import annotations

import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import TARGETS, Compiled, opened
from tests.support.candidates import WIDE

from relax_tune.ir.codegen.generate import generate
from relax_tune.ir.core.dtype import i64
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.frontend.graph_builder import GraphBuilder
from relax_tune.ir.op.math.logic import NotEqual
from relax_tune.ir.op.reduction.reduce import Sum
from relax_tune.ir.passes.pipeline import lower
from relax_tune.schedules.sketch import generate_sketches, instantiate

CHOICES = [{"W": 16, "U": u, "LR": rows} for u in (1, 2, 4) for rows in (256, 1024)]


def sums(columns: int) -> list[PrimFunc]:
    """Return int64 sums over rows in two passes, with vectors of 16 lanes, of which `columns` are used."""
    g = GraphBuilder()
    x = g.input("x", (g.symbol("n", 1, 5000), columns), i64)
    (func,) = lower(g.finish(g.call(Sum((0,)), x))).module.prims.values()
    sketches = [s for s in generate_sketches(func, WIDE) if s.name.startswith("reductions.two_pass")]
    return [instantiate(s, values) for s in sketches for values in CHOICES]


@pytest.mark.ccompiler
@pytest.mark.parametrize("columns", [5, 13])
def test_sums_in_conditional_lanes_are_exact(columns: int) -> None:
    """gcc 12.2 lost terms with 512-bit vectors at -O3: 195 of 2,900 in 3,001 rows of 5."""
    device = opened("c")
    funcs = sums(columns)
    assert len(funcs) == 2 * len(CHOICES)
    kernels = Compiled.together(device, "c", funcs)
    for n in (1, 255, 256, 3001):
        x = np.random.default_rng(n).integers(-9, 9, (n, columns))
        for kernel in kernels:
            (y,) = kernel([x, np.zeros(columns, np.int64)])
            np.testing.assert_array_equal(y, x.sum(0))
    device.close()


def test_writers_of_conditional_lanes_turn_off_the_vectoriser() -> None:
    """The functions of parallel loops have the attribute, since gcc does not inherit it."""
    for func in sums(5):
        source = generate(func, TARGETS["c"]).source
        writers = [part for part in source.split("\n}\n") if "y_rf_rf_0[0] = " in part or "y_rf_0[0] = " in part]
        assert writers and all("RT_KEEP_LANES " in part for part in writers)


def test_vectors_stored_by_lane_turn_off_the_vectoriser() -> None:
    """gcc 12.2 took 18 s for the second of these kernels: it replaced the vectors by scalars, and vectorised those in another way."""
    g = GraphBuilder()
    x, y = (g.input(name, (g.symbol("n", 1, 1 << 20),), i64) for name in "xy")
    (func,) = lower(g.finish(g.call(NotEqual(), x, y))).module.prims.values()
    sketches = [s for s in generate_sketches(func, WIDE) if s.trace.tunables]
    sources = [
        generate(instantiate(s, {t.name: t.domain[-1] for t in s.tunables}), TARGETS["c"]).source for s in sketches
    ]
    by_lane = [part for source in sources for part in source.split("\n}\n") if "(t[0] != 0)" in part]
    assert by_lane and all("RT_KEEP_LANES " in part for part in by_lane)
