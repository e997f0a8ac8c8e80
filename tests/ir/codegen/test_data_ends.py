"""Loops that end early as the data make the remaining terms neutral: equal results, and no term is read behind the end."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ir.codegen.codegen_runner import Compiled, kernels_of, opened
from tests.support import schedule_functions as make
from tests.support.candidates import MACHINES, drawn
from tests.support.effort import examples

from relax_tune.ir.core.dtype import i32, i64
from relax_tune.ir.core.expr import Expr, Var, cast, const, le, lt, select
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.tensor_builder import TensorBuilder
from relax_tune.ir.interp.interp import run_prim
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.sketch import generate_sketches, instantiate

SPECIAL = [0.0, -0.0, 1.5, -2.25, float("inf"), float("-inf"), float("nan"), 1e-40]


def every_instance(func: PrimFunc) -> list[PrimFunc]:
    rng = random.Random(3)
    return [instantiate(s, drawn(s, rng)) for s in generate_sketches(func, MACHINES["c"])]


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[bool, list[Compiled]]]:
    device = opened("c")
    yield {most: Compiled.together(device, "c", every_instance(make.csr_rows(most))) for most in (False, True)}
    device.close()


@pytest.mark.ccompiler
@given(
    most=st.booleans(),
    starts=st.lists(st.integers(-2, 4), min_size=2, max_size=9),
    width=st.integers(0, 22),
    values=st.lists(st.sampled_from(SPECIAL), min_size=21, max_size=21),
)
@settings(max_examples=examples(60), deadline=None)
def test_results_equal_the_whole_loop(
    compiled: dict[bool, list[Compiled]], most: bool, starts: Sequence[int], width: int, values: Sequence[float]
) -> None:
    rows = len(starts) - 1
    inputs = [np.int32(starts), np.arange(21, dtype=np.int32) % 4, np.float32(values), np.float32([1, -1, 0.5, 3])]
    expected = np.full(rows, 77, np.float32)
    run_prim(make.csr_rows(most), [*inputs, expected], [width])
    for kernel in compiled[most]:
        (actual,) = kernel([*inputs, np.full(rows, 77, np.float32)], [width])[-1:]
        assert np.array_equal(np.isnan(actual), np.isnan(expected))
        sure = ~np.isnan(expected)
        if most:  # which of 0.0 and -0.0 is the maximum of both is not defined
            assert (actual[sure] == expected[sure]).all(), (actual, expected)
        else:
            assert (actual[sure].view(np.int32) == expected[sure].view(np.int32)).all(), (actual, expected)


def sums(condition: str) -> PrimFunc:
    """B[i] is the sum of A[j] over the j for which a condition on data holds."""
    n, m = Var("n"), Var("m")
    b = TensorBuilder("sums")
    x, last, z = b.input("A", (m,)), b.input("last", (n,), i32), b.output("B", (n,))

    def step(acc: Expr, i: Expr, j: Expr) -> Expr:
        bound = cast(last[i], i64)
        holds = {
            "below": lt(j, bound), "at most": le(j, bound), "twice": lt(2 * j, bound), "from": lt(bound, j), "index": lt(j, i)
        }[condition]  # fmt: skip
        return acc + select(holds, x[j], const(0.0))

    b.reduce(z, (m,), const(0.0), step, name="sum")
    return b.finish()


@pytest.mark.parametrize(
    ("condition", "ends"), [("below", True), ("at most", True), ("twice", False), ("from", False), ("index", False)]
)
def test_loop_ends_where_a_condition_on_data_fails_for_good(condition: str, ends: bool) -> None:
    s = Schedule(sums(condition))
    s.apply("decompose_reduction", block="sum", loop=s.loops_of("sum")[1])
    source = "".join(k.source for k in kernels_of(s.func, "c"))
    assert ("_end" in source) == ends
