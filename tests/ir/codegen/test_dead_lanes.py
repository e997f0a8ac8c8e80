"""Registers whose lanes beyond a bound are never read are stored without a mask; sums over lanes keep theirs."""

from __future__ import annotations

import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import Compiled, opened
from tests.support.candidates import CASES, MACHINES, arguments, by_rule, problems
from tests.support.meaning import assert_same_meaning

from relax_tune.ir.codegen.generate import CodeTarget, generate
from relax_tune.ir.core.function import PrimFunc
from relax_tune.schedules.sketch import instantiate


def instance(case: str, rule: str, sketch: str, **values: int) -> PrimFunc:
    (selected,) = [s for s in by_rule(case, "c", rule) if s.name == sketch]
    return instantiate(selected, {t.name: values.get(t.name, t.domain[0]) for t in selected.tunables})


def masked_selects(func: PrimFunc) -> list[str]:
    """Return the lines that keep the lanes of a register beyond a bound."""
    source = generate(func, CodeTarget("c", MACHINES["c"].lanes)).source
    lines = [line.strip() for line in source.split("/*end prelude*/")[-1].splitlines()]
    return [x for x in lines if " = rt_sel_" in x and x.endswith(f", {x.split(' = ')[0]});")]


def test_tile_of_masked_columns_is_stored_whole() -> None:
    func = instance("convolution by channel", "convolution", "convolution.lines.panels", MR=3)
    assert not masked_selects(func)
    for dims in CASES["convolution by channel"][1]:
        assert_same_meaning(CASES["convolution by channel"][0](), func, dims)


def test_sum_over_lanes_keeps_lanes_beyond_the_bound() -> None:
    assert masked_selects(instance("row sum", "rowwise", "rowwise.parallel.keep_expensive"))


@pytest.mark.process
def test_tile_of_masked_columns_gives_the_results_of_numpy() -> None:
    case = "convolution by channel"
    func = instance(case, "convolution", "convolution.lines.panels", MR=3)
    device = opened("c")
    run = Compiled(device, "c", func)
    for width in (1, 7, 15, 16, 17, 31, 37):
        dims = {"n": 1, "h": 5, "w": width}
        arrays, scalars = arguments(func, dims, width)
        arrays[0][..., -1] = np.inf  # values behind the end of a row enter no other column
        assert not problems(CASES[case][0](), arrays, run(arrays, scalars), dims)
    device.close()
