"""Sampled candidates of every rule on both devices against the reference, at shapes no tile divides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from tests.ir.codegen.codegen_runner import Compiled, opened
from tests.support.candidates import (
    CASES,
    GPU_CASES,
    arguments,
    cases_of,
    covering,
    few,
    function,
    problems,
    sampled,
    sketches_of,
)
from tests.support.effort import EFFORT, thinned

from relax_tune.runtime.device.base import Device
from relax_tune.schedules.sketch import Sketch

# Candidates of one function for a machine. PoCL takes seconds to compile one, and its sketches equal C's, with fewer lanes.
LEAST = {"c": 5, "opencl": 2}


@pytest.fixture(scope="module")
def c() -> Iterator[Device]:
    device = opened("c")
    yield device
    device.close()


@pytest.fixture(scope="module")
def opencl() -> Iterator[Device]:
    device = opened("opencl")
    yield device
    device.close()


def mine(machine: str, name: str) -> Sequence[Sketch]:
    """Return sketches of a function; under --heavy, all functions together have every sketch."""
    return covering(machine, LEAST[machine])[name] if EFFORT == "heavy" else few(name, machine, LEAST[machine])


def run(name: str, machine: str, device: Device, sketches: Sequence[Sketch]) -> None:
    func, shapes = function(name), CASES[name][1]
    candidates = sampled(sketches, f"{name} {func.name} {machine}")
    compiled = Compiled.together(device, device.info.kind, [instance for _, _, instance in candidates])
    wrong = []
    for (sketch, values, _), kernel in zip(candidates, compiled, strict=True):
        for seed, dims in enumerate(shapes):
            arrays, scalars = arguments(func, dims, seed)
            actual = kernel(arrays, scalars)
            wrong += [f"{sketch.name} {values} {p}" for p in problems(func, arrays, actual, dims)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.parametrize("machine", LEAST)
def test_covering_any_machine_has_every_sketch_name(machine: str) -> None:
    names = {s.name for name in cases_of(machine) for s in sketches_of(name, machine)[1]}
    assert {s.name for chosen in covering(machine, LEAST[machine]).values() for s in chosen} == names


@pytest.mark.ccompiler
@pytest.mark.parametrize("name", thinned(CASES, 4))
def test_instances_c_match_reference(name: str, c: Device) -> None:
    run(name, "c", c, mine("c", name))


@pytest.mark.opencl
@pytest.mark.parametrize("name", thinned(CASES, 8))
def test_instances_opencl_match_reference(name: str, opencl: Device) -> None:
    run(name, "opencl", opencl, mine("opencl", name))


@pytest.mark.opencl
@pytest.mark.parametrize("name", thinned(GPU_CASES, 4))
def test_instances_gpu_match_reference(name: str, opencl: Device) -> None:
    """Candidates for GPUs keep their meaning where a processor runs the items of a group between barriers."""
    run(name, "gpu", opencl, few(name, "gpu", 9 if EFFORT == "heavy" else 4))
