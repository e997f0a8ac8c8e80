"""WGSL texts of sampled kernels, and the machine that they are made for."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.support.candidates import GPU_CASES, function, sampled

from relax_tune.ir.codegen.generate import CodeTarget, generate, split_kernels
from relax_tune.ir.core.function import PrimFunc
from relax_tune.schedules.sketch import generate_sketches
from relax_tune.schedules.target import HardwareInfo

# what browsers give on common adapters
BROWSER = {
    "workers": 16, "warp": 32, "doubles": 0, "max_group_size": 256, "max_group_x": 256, "max_group_y": 256, "max_group_z": 64,
    "max_local_bytes": 16 << 10, "max_bindings": 8, "max_groups": 65535, "vector_bits": 128, "max_vector_lanes": 4,
}  # fmt: skip
MACHINE = HardwareInfo.from_limits("webgpu", BROWSER)
TARGET = CodeTarget("webgpu", 4, BROWSER["max_local_bytes"], BROWSER["max_bindings"])
# besides those of GPU rules, functions with narrow types, positions and scatters
OTHERS = ("int8", "order of columns", "scatter of rows", "gather", "places of the largest of 21", "padding")
NAMES = (*GPU_CASES, *OTHERS)


def few(case: str, limit: int) -> list[tuple[str, dict[str, int], PrimFunc]]:
    """Return instances of at most `limit` sketches of a function, the fallback among them."""
    *others, last = generate_sketches(function(case), MACHINE)
    rng = random.Random(f"wgsl {case}")
    chosen = [*rng.sample(others, min(len(others), limit - 1)), last]
    return [(s.name, values, made) for s, values, made in sampled(chosen, f"wgsl {case}")]


def texts(names: tuple[str, ...] = NAMES, limit: int = 3) -> Iterator[tuple[str, str]]:
    """Yield (case and sketch, text) of every kernel of the sampled instances."""
    for case in names:
        for sketch, _values, made in few(case, limit):
            for part in split_kernels(made):
                yield f"{case}: {sketch}", generate(part, TARGET).source
