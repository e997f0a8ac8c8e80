"""GPU resources of a work-group in closed form, against the generated kernels."""

from __future__ import annotations

import random
from math import prod

import pytest
from tests.support.candidates import GPU_CASES, MACHINES, drawn, sketches_of
from tests.support.effort import thinned

from relax_tune.errors import BuildError
from relax_tune.ir.codegen.generate import CodeTarget, generate, split_kernels
from relax_tune.ir.core.expr import Expr, as_int, const, substitute
from relax_tune.ir.core.function import PrimFunc
from relax_tune.schedules.occupancy import group_items, kernels
from relax_tune.schedules.occupancy import shared_bytes as estimated_bytes
from relax_tune.schedules.sketch import Sketch, instantiate


def value(e: Expr, sketch: Sketch, values: dict[str, int]) -> int:
    number = as_int(substitute(e, {t: const(values[t.name]) for t in sketch.tunables}))
    assert number is not None, e
    return number


def shared_bytes(func: PrimFunc) -> int:
    """Count the bytes that a generated kernel declares."""
    try:
        generate(func, CodeTarget("opencl", 4, -1))
    except BuildError as error:
        return int(str(error).partition("got ")[2].split()[0])
    raise AssertionError("no kernel has less than nothing")


@pytest.mark.slow
@pytest.mark.parametrize("name", thinned(GPU_CASES))
def test_occupancy_matches_generated_kernels(name: str) -> None:
    rng = random.Random(name)
    for sketch in sketches_of(name, "gpu")[1]:
        values = drawn(sketch, rng)
        instance = split_kernels(instantiate(sketch, values))
        parts = kernels(sketch.func)
        assert len(instance) == len(parts)
        for func, part in zip(instance, parts, strict=True):
            assert value(group_items(sketch.func, part), sketch, values) == prod(
                generate(func, CodeTarget("opencl", 4)).local
            )
            assert value(estimated_bytes(sketch.func, part, MACHINES["gpu"]), sketch, values) == shared_bytes(func), (
                sketch.name,
                values,
            )
