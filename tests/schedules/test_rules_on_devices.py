"""Sampled candidates of every rule on both devices against the reference, at shapes no tile divides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.ir.codegen_runner import Compiled, opened
from tests.schedules.candidates import CASES, GPU_CASES, MACHINES, arguments, chosen, problems, sampled

from relax_tune.runtime.device.base import Device
from relax_tune.schedules.sketch import generate_sketches

LIMIT = 5  # candidates of one function on one device


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


def run(name: str, language: str, device: Device, machine: str = "", limit: int = LIMIT) -> None:
    func, shapes = CASES[name][0](), CASES[name][1]
    candidates = sampled(func, machine or language, limit, name)
    compiled = Compiled.together(device, language, [made for _, _, made in candidates])
    wrong = []
    for (sketch, values, _), kernel in zip(candidates, compiled, strict=True):
        for seed, dims in enumerate(shapes):
            arrays, scalars = arguments(func, dims, seed)
            found = kernel(arrays, scalars)
            wrong += [f"{sketch.name} {values} {p}" for p in problems(func, arrays, found, dims)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("language", ("c", "opencl"))
def test_no_structural_choice_is_left_out(language: str) -> None:
    made, run_ = set(), set()
    for name, (build, _) in CASES.items():
        func = build()
        made |= {s.name for s in generate_sketches(func, MACHINES[language])}
        run_ |= {s.name for s in chosen(func, language, LIMIT, name)}
    assert run_ == made


@pytest.mark.ccompiler
@pytest.mark.parametrize("name", CASES)
def test_c(name: str, c: Device) -> None:
    run(name, "c", c)


@pytest.mark.opencl
@pytest.mark.parametrize("name", CASES)
def test_opencl(name: str, opencl: Device) -> None:
    run(name, "opencl", opencl)


@pytest.mark.opencl
@pytest.mark.parametrize("name", GPU_CASES)
def test_groups_of_items(name: str, opencl: Device) -> None:
    """What is made for GPUs means the same where a processor runs the items of a group between barriers."""
    run(name, "opencl", opencl, "gpu", 9)
