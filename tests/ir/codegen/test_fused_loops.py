"""Loops over fused dims run as nests without divisions, with the same results."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ir.codegen.codegen_runner import Compiled, kernels_of, opened
from tests.support import schedule_functions as make
from tests.support.candidates import MACHINES, arguments, drawn
from tests.support.effort import examples, some
from tests.support.meaning import outputs_of

from relax_tune.ir.core.function import PrimFunc
from relax_tune.schedules.sketch import generate_sketches, instantiate

FUNCTIONS = {
    "four dims": (make.pointwise(4), "bn"),
    "turned": (make.transposed_scale(), "bnm"),
    "windows": (make.pooled(("h", "w"), 3, 2, 1, True), "hw"),
}
DIMS = st.sampled_from([0, 1, 2, 3, 5, 8, 17, 33])


def instances(func: PrimFunc) -> list[PrimFunc]:
    rng = random.Random(5)
    return [instantiate(s, drawn(s, rng)) for s in some(generate_sketches(func, MACHINES["c"]), 2)]


@pytest.fixture(scope="module")
def compiled() -> Iterator[dict[str, list[Compiled]]]:
    device = opened("c")
    yield {name: Compiled.together(device, "c", instances(func)) for name, (func, _) in FUNCTIONS.items()}
    device.close()


@pytest.mark.ccompiler
@given(name=st.sampled_from(sorted(FUNCTIONS)), sizes=st.tuples(DIMS, DIMS, DIMS))
@settings(max_examples=examples(90), deadline=None)
def test_results_equal_the_interpreters(compiled: dict[str, list[Compiled]], name: str, sizes: Sequence[int]) -> None:
    func, symbols = FUNCTIONS[name]
    dims = dict(zip(symbols, sizes, strict=False))
    arrays, scalars = arguments(func, dims)
    expected = outputs_of(func, dims, arrays[: len(func.input_buffers)])
    for kernel in compiled[name]:
        outputs = kernel(arrays, scalars)
        for actual, e in zip(outputs[-len(expected) :], expected, strict=True):
            np.testing.assert_allclose(actual, e, rtol=1e-5, atol=1e-6)


def test_kernels_over_fused_dims_of_unknown_size_do_not_divide_in_loops() -> None:
    (sketch,) = [s for s in generate_sketches(make.pointwise(4), MACHINES["c"]) if s.name == "injective.parallel"]
    (kernel,) = kernels_of(instantiate(sketch, {t.name: t.domain[0] for t in sketch.tunables}), "c")
    part = kernel.source[kernel.source.index("static void rt_part_0") :]
    assert "%" not in part[part.index("for (") :]
