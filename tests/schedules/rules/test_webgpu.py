"""Sampled candidates of the GPU rules as WGSL, against the reference, at shapes that no tile divides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.ir.codegen.codegen_runner import Compiled, opened
from tests.support.candidates import CASES, arguments, function, problems
from tests.support.effort import thinned
from tests.support.wgsl import BROWSER, MACHINE, NAMES, few

from relax_tune.ir.core.expr import as_int
from relax_tune.runtime.device.base import Device
from relax_tune.schedules.occupancy import kernels, launch_limits, shared_bytes
from relax_tune.schedules.sketch import generate_sketches, instantiate
from relax_tune.schedules.target import HardwareInfo


@pytest.fixture(scope="module")
def webgpu() -> Iterator[Device]:
    device = opened("webgpu")
    yield device
    device.close()


@pytest.mark.slow
@pytest.mark.webgpu
@pytest.mark.parametrize("name", thinned(NAMES, 4))
def test_instances_webgpu_match_reference(name: str, webgpu: Device) -> None:
    wrong = []
    for sketch, values, instance in few(name, 3):
        kernel = Compiled(webgpu, "webgpu", instance)
        for seed, dims in enumerate(CASES[name][1]):
            arrays, scalars = arguments(function(name), dims, seed)
            actual = kernel(arrays, scalars)
            wrong += [f"{sketch} {values} {p}" for p in problems(function(name), arrays, actual, dims)]
    assert not wrong, "\n".join(wrong)


def test_machine_of_webgpu_has_limits_of_adapter() -> None:
    assert MACHINE.is_gpu and MACHINE.has_grid and not MACHINE.has_doubles and not MACHINE.has_shuffles
    assert (MACHINE.group_size, MACHINE.group_axes) == (BROWSER["max_group_size"], (256, 256, 64))
    assert (MACHINE.local_bytes, MACHINE.element_bytes, MACHINE.lanes) == (16 << 10, 4, 4)


def bounds(machine: HardwareInfo, case: str, part: str) -> set[int]:
    """Return the constants that the launch limits of one sketch compare with."""
    sketch = next(s for s in generate_sketches(function(case), machine) if part in s.name)
    return {int(x.value) for f in launch_limits(sketch.func, machine) for x in f.args if x.value is not None}


def test_launch_limits_bound_each_axis_of_a_group() -> None:
    narrow = replace(MACHINE, group_axes=(128, 17, 64))
    assert 17 in bounds(narrow, "matmul symbolic", "data_parallel")
    assert 17 not in bounds(MACHINE, "matmul symbolic", "data_parallel")


def test_shared_elements_of_few_bits_count_as_words() -> None:
    sketch = next(s for s in generate_sketches(function("turned, bf16"), MACHINE) if "transposed" in s.name)
    func = instantiate(sketch, {t.name: t.domain[0] for t in sketch.tunables})
    (kernel,) = kernels(func)
    words, halves = (shared_bytes(func, kernel, m) for m in (MACHINE, replace(MACHINE, element_bytes=1)))
    assert as_int(words) == 2 * (as_int(halves) or 0) > 0
