"""Products that an instruction sums several at a time: forms of processors with and without the instruction."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.ir.codegen.codegen_runner import Compiled, opened
from tests.support import schedule_functions as make
from tests.support.candidates import MACHINES, arguments, drawn, problems

from relax_tune.ir.core.dtype import bf16
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.core.stmt import loops
from relax_tune.schedules.sketch import generate_sketches, instantiate
from relax_tune.schedules.target import HardwareInfo


def test_byte_dots_need_processor_with_instruction() -> None:
    func = make.quantised(37, 24, 8, activations="int8")
    names = {s.name for s in generate_sketches(func, MACHINES["c"])}
    assert "matmul.panels.dots" in names and "matmul.panels.quads" not in names
    limits = {"vector_bits": 512, "max_vector_lanes": 16, "byte_dots": 1, "registers": 32}
    machine = HardwareInfo.from_limits("c", limits)
    assert "matmul.panels.quads" in {s.name for s in generate_sketches(func, machine)}


@pytest.mark.process
@pytest.mark.ccompiler
def test_dot_products_of_other_processors_compute_the_same() -> None:
    """Where there is no such instruction, its text says the same in others."""
    device = opened("c")
    machine = replace(MACHINES["c"], lanes=16, has_byte_dots=True, has_bf16_dots=True, has_tile_products=True)
    functions: dict[str, PrimFunc | list[PrimFunc]] = {
        "matmul.panels.tiles": [make.quantised(37, 128, 8, activations="int8"), make.dense(37, 64, stored=bf16)],
        "matmul.panels.quads": make.quantised(37, 24, 8, activations="int8"),
        "matmul.panels.bf16_dots": make.dense(37, 24, stored=bf16),
        "matmul.panels.bf16_pairs": make.dense(37, 24, stored=bf16),
        "matmul.panels.bf16_columns": [make.dense(37, 24, rows, weights=bf16) for rows in (None, 1)],
        "gemv.columns.grouped.whole.parallel": make.quantised(40, 64, 4, activations="int8"),
    }
    machines = {"matmul.panels.bf16_pairs": replace(machine, has_bf16_dots=False)}
    for name, func in (
        (n, f) for n, sketches in functions.items() for f in (sketches if isinstance(sketches, list) else [sketches])
    ):
        sketch = next(s for s in generate_sketches(func, machines.get(name, machine)) if s.name == name)
        values = drawn(sketch, random.Random(name))
        run = Compiled(device, "c", instantiate(sketch, values), 16)
        (marked,) = {x.marks.intrinsic for x in loops(sketch.func.body) if x.marks.intrinsic}
        assert f"rt_{marked}" in run.kernels[-1].source.split("/*end prelude*/")[1]
        for m in (1, 5, 18):
            arrays, scalars = arguments(func, {"m": m})
            assert not problems(func, arrays, run(arrays, scalars), {"m": m}), (name, values)
    device.close()
