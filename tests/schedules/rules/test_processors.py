"""Rules for every processor that tests describe: what they choose, and that it compiles and computes the same."""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tests.ir.codegen.codegen_runner import Compiled, kernels_of, opened
from tests.support import schedule_functions as make
from tests.support.candidates import CASES, arguments, drawn, problems
from tests.support.processors import PROCESSORS, Processor, described, executed

from relax_tune.ir.core.dtype import bf16
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import loops
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.c_compiler import BASE_FLAGS
from relax_tune.runtime.device.source import join_sources
from relax_tune.runtime.program.program import KernelSource
from relax_tune.schedules.sketch import Sketch, generate_sketches, instantiate
from relax_tune.schedules.target import HardwareInfo

# each form of a product that a processor may have an instruction for, at steps that fit it, and what is vectorised otherwise
FUNCTIONS: Mapping[str, Callable[[], PrimFunc]] = {
    "bytes by bytes": lambda: make.quantised(37, 128, 8, activations="int8"),
    "groups of int4 by bytes": lambda: make.quantised(40, 64, 4, activations="int8"),
    "bf16 by bf16": lambda: make.dense(37, 64, stored=bf16),
    "f32 by bf16": lambda: make.dense(37, 24, weights=bf16),
    "f32 by f32": lambda: make.matmul(96, 24),
    "softmax": CASES["softmax with mask"][0],
    "column extremes": CASES["column extremes"][0],
    "scatter": CASES["scatter of rows"][0],
    "pointwise": lambda: make.pointwise(4),
}
SIZES = (0, 1, 5, 18)


def marked(sketch: Sketch) -> set[str]:
    """The intrinsics that a sketch uses."""
    return {x.marks.intrinsic for x in loops(sketch.func.body) if x.marks.intrinsic}


@cache
def sketches_of(processor: str) -> Mapping[str, tuple[Sketch, ...]]:
    """Return all sketches of each function."""
    return {name: generate_sketches(func(), PROCESSORS[processor].machine) for name, func in FUNCTIONS.items()}


@cache
def instances(processor: str) -> tuple[tuple[str, PrimFunc], ...]:
    """Return (function, candidate): of every sketch with an intrinsic, and of the one that the rules guess."""
    rng = random.Random("processors")
    chosen = [
        (name, sketch)
        for name, sketches in sketches_of(processor).items()
        for at, sketch in enumerate(sketches)
        if at == 0 or marked(sketch)
    ]
    return tuple(
        (name, replace(instantiate(sketch, drawn(sketch, rng)), name=f"f{at}"))
        for at, (name, sketch) in enumerate(chosen)
    )


def allowed(machine: HardwareInfo, intrinsic: str) -> bool:
    """Say whether a machine has the instruction of an intrinsic, by its name."""
    if intrinsic.startswith("amx_"):
        return machine.has_tile_products
    if intrinsic.startswith("dot4_"):
        return machine.has_byte_dots and intrinsic.endswith(f"x{machine.lanes}")
    if intrinsic.startswith("dot2_bf16"):
        return machine.has_bf16_dots
    return True


def has(used: set[str], name: str) -> bool:
    return any(x.startswith(name) for x in used)


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS.values(), ids=PROCESSORS)
def test_rules_use_only_instructions_of_the_processor(processor: Processor) -> None:
    machine = processor.machine
    used = {x for sketches in sketches_of(processor.name).values() for s in sketches for x in marked(s)}
    assert not [x for x in used if not allowed(machine, x)]
    assert machine.has_byte_dots == has(used, "dot4_")
    assert machine.has_bf16_dots == has(used, "dot2_bf16")
    assert machine.has_tile_products == has(used, "amx_")


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS.values(), ids=PROCESSORS)
def test_kernels_print_for_a_processor(processor: Processor) -> None:
    lanes = processor.machine.lanes
    for name, func in instances(processor.name):
        kernels = kernels_of(func, "c", lanes)
        assert kernels and all(k.name in k.source for k in kernels), name
        widths = {int(w) for k in kernels for w in re.findall(r"\bf32x(\d+)\b", k.source)}
        assert max(widths, default=1) <= lanes, name


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.slow
@pytest.mark.parametrize("processor", described())
def test_kernels_compile_for_a_processor(processor: Processor, tmp_path: Path) -> None:
    if not processor.compiles_here:
        pytest.skip(f"this gcc does not compile for {processor.name}")
    sources = [k.source for _, f in instances(processor.name) for k in kernels_of(f, "c", processor.machine.lanes)]
    (tmp_path / "all.c").write_text(join_sources([KernelSource(f"k{n}", "c", text) for n, text in enumerate(sources)]))
    flags = [f for f in BASE_FLAGS if f not in ("-march=native", "-O3")]
    command = ["gcc", *flags, "-O1", *processor.options, "all.c", "-o", "all.so", "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[:2000]
    code = subprocess.run(["objdump", "-d", "all.so"], capture_output=True, text=True, cwd=tmp_path).stdout
    machine = processor.machine
    assert ("vpdpbusd" in code) == machine.has_byte_dots
    assert ("vdpbf16ps" in code) == machine.has_bf16_dots
    assert ("tdpbusd" in code) == machine.has_tile_products
    assert ("%zmm" in code, "%ymm" in code) == (machine.lanes == 16, machine.lanes >= 8)


class CompiledFor(Compiled):
    """A function compiled for a processor that is not this machine's."""

    def __init__(self, device: Device, processor: Processor, func: PrimFunc) -> None:
        self.options = (*processor.options, "-O1")
        super().__init__(device, "c", func, processor.machine.lanes)

    def sources(self, language: str) -> list[KernelSource]:
        return [KernelSource(k.name, language, k.source, self.options) for k in self.kernels]


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.slow
@pytest.mark.parametrize("processor", executed())
def test_kernels_compute_the_same_on_a_processor(processor: Processor) -> None:
    device = opened("c")
    for name, func in instances(processor.name):
        run = CompiledFor(device, processor, func)
        for size in SIZES:
            dims = {v.name: size for v in func.symbols}
            arrays, scalars = arguments(func, dims)
            assert not problems(FUNCTIONS[name](), arrays, run(arrays, scalars), dims), (name, dims)
    device.close()
