"""Panels that an instruction reads ahead of time: a line of the caches once, and the same results."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from tests.ir.codegen.codegen_runner import Compiled, opened
from tests.support.candidates import CASES, MACHINES, arguments, function, problems

from relax_tune.ir.codegen.generate import CodeTarget, generate, split_kernels
from relax_tune.schedules.cost.vectorized import ConstraintFunction
from relax_tune.schedules.sketch import Sketch, generate_sketches, instantiate

SMALL = replace(MACHINES["c"], lanes=8, l2_bytes=1024)
"""A machine whose caches hold no panels."""
FORMS = {
    "bytes by bytes": "matmul.panels.dots.prefetch",
    "bytes by bytes, KN": "matmul.panels.dots.prefetch",
    "bf16 by bf16": "matmul.panels.bf16_pairs.prefetch",
    "matmul 96, bf16": "matmul.panels.bf16_pairs.prefetch",
    "groups by shorts": "gemv.columns.grouped.whole.prefetch.parallel",
    "groups of int4 by shorts": "gemv.columns.grouped.whole.prefetch.parallel",
}
PREFETCH = re.compile(r"__builtin_prefetch\((\w+) \+ (.*)\);")


def sketch_of(case: str) -> Sketch:
    return next(s for s in generate_sketches(function(case), SMALL) if s.name == FORMS[case])


@pytest.mark.ccompiler
@pytest.mark.parametrize("case", FORMS)
def test_prefetched_panels_give_the_reference_s_results(case: str) -> None:
    device, func, sketch, rng = opened("c"), function(case), sketch_of(case), random.Random(case)
    values = sketch.guesses
    parts = [p for v in values for p in split_kernels(instantiate(sketch, v))]
    assert sum(len(PREFETCH.findall(generate(p, CodeTarget("c", 8)).source)) > 0 for p in parts) == len(values) > 0
    instance = Compiled.together(device, "c", [instantiate(sketch, v) for v in values])
    for kernel in instance:
        for dims in (*CASES[case][1], {n: rng.randint(1, 40) for n in CASES[case][1][0]}):
            arrays, scalars = arguments(func, dims)
            assert not problems(func, arrays, kernel(arrays, scalars), dims)
    device.close()


@pytest.mark.parametrize(("case", "bytes_a_vector"), [("bytes by bytes", 16), ("bf16 by bf16", 32)])
def test_every_line_of_a_step_is_prefetched_once(case: str, bytes_a_vector: int) -> None:
    sketch = sketch_of(case)
    legal, counts = ConstraintFunction(sketch), {}
    for vectors in next(t.domain for t in sketch.tunables if t.name == "V"):
        values = {"V": vectors, "MR": 1, "RG": 1}
        if not legal({n: [x] for n, x in values.items()})[0]:
            continue
        source = "".join(generate(p, CodeTarget("c", 8)).source for p in split_kernels(instantiate(sketch, values)))
        counts[vectors] = len(PREFETCH.findall(source))
    assert counts and counts == {v: -(-v * bytes_a_vector // 64) for v in counts}
