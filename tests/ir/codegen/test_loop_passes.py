"""The bounds of loop passes per work-item, compared with counters in the kernels."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from tests.ir.codegen.codegen_runner import TARGETS, kernels_of, number, opened
from tests.support.candidates import CASES, arguments, cases_of, drawn, function, sketches_of

from relax_tune.ir.arith.bounds import Env
from relax_tune.ir.codegen.generate import CodeTarget, Language
from relax_tune.ir.codegen.loop_passes import most_passes
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.interp.interp import bind_symbols
from relax_tune.ir.text.parser import parse_prim_func
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.program.program import KernelSource
from relax_tune.schedules.sketch import instantiate

ITEM = "(get_global_id(2) * get_global_size(1) + get_global_id(1)) * get_global_size(0) + get_global_id(0)"
LOOP = re.compile(r"for \((\w+) (\w+) = 0; ")
ITEMS = 1 << 20
CHOSEN = random.Random(3).sample(sorted(cases_of("opencl")), 8)
SUM = """
@prim_func(outputs=1)
def total(x: Buffer((n, k), f32), y: Buffer((n,), f32)):
    for i in group(n):
        for j in serial(k):
            with block("total"):
                vi = spatial(n, i)
                vj = reduce(k, j)
                with init():
                    y[vi] = 0.0
                y[vi] = y[vi] + x[vi, vj]
"""


@pytest.fixture(scope="module")
def opencl() -> Iterator[Device]:
    device = opened("opencl")
    yield device
    device.close()


def counted(device: Device, func: PrimFunc, arrays: Sequence[np.ndarray], scalars: Sequence[int]) -> int:
    """Run a function whose loops count their passes; return the largest count of one work-item in one kernel."""
    env, most = bind_symbols(func, arrays, scalars), 0
    buffers = {}
    for kernel in kernels_of(func, "opencl"):
        head, body = kernel.source.split("kernel void", 1)
        body = body.replace("(", "(global int *rt_passes, ", 1)
        body = LOOP.sub(rf"for (\1 \2 = 0; ++rt_passes[{ITEM}], ", body)
        ready = device.compile([KernelSource(kernel.name, "opencl", f"{head}kernel void{body}")])
        passes = device.alloc(4 * ITEMS)
        device.upload(passes, np.zeros(4 * ITEMS, np.uint8))
        for b in kernel.buffers:
            if b not in buffers:
                size = b.dtype.bytes * int(np.prod([number(d, env) for d in b.shape], dtype=np.int64))
                buffers[b] = device.alloc(size + 64)
                if b in func.input_buffers:
                    array = arrays[func.buffers.index(b)]
                    device.upload(buffers[b], np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        grid = tuple(number(e, env) for e in kernel.grid)
        assert np.prod(grid) * np.prod(kernel.local) <= ITEMS
        values = [number(s, env) for s in kernel.scalars]
        memory = [passes, *(buffers[b] for b in kernel.buffers)]
        device.bind(ready[kernel.name], memory, values, grid, kernel.local)()
        device.synchronize()
        most = max(most, int(device.download(passes, np.dtype(np.int32), (ITEMS,)).max()))
        device.free(passes)
    for buffer in buffers.values():
        device.free(buffer)
    return most


@pytest.mark.opencl
@pytest.mark.parametrize("name", CHOSEN)
def test_no_work_item_makes_more_passes_than_the_bound(name: str, opencl: Device) -> None:
    rng, func = random.Random(name), function(name)
    for sketch in (sketches_of(name, "opencl")[1][-1], rng.choice(sketches_of(name, "opencl")[1])):
        instance = instantiate(sketch, drawn(sketch, rng))
        for seed, dims in enumerate(CASES[name][1][:2]):
            arrays, scalars = arguments(func, dims, seed)
            exact = Env({v: (0, x) for v, x in bind_symbols(func, arrays, scalars).items()})
            bound, passes = most_passes(instance, TARGETS["opencl"], exact), counted(opencl, instance, arrays, scalars)
            assert bound is not None and passes <= bound, (sketch.name, dims, passes, bound)


@pytest.mark.opencl
def test_bound_of_a_sum_equals_the_passes_of_a_work_item(opencl: Device) -> None:
    func = parse_prim_func(SUM.lstrip())
    n, k = func.symbols
    arrays = [np.ones((3, 700), np.float32), np.zeros(3, np.float32)]
    bound = most_passes(func, TARGETS["opencl"], Env({n: (0, 3), k: (0, 700)}))
    assert bound == counted(opencl, func, arrays, ())


def test_bound_grows_with_the_range_and_is_none_without() -> None:
    func = parse_prim_func(SUM.lstrip())
    n, k = func.symbols
    target = CodeTarget("opencl", 1)
    one, two = (most_passes(func, target, Env({n: (0, 5), k: (0, x)})) for x in (100, 200))
    assert one is not None and two is not None and 100 < one < 120 and two - one == 100
    assert most_passes(func, target, Env({n: (0, 5)})) is None
    assert most_passes(func, target, Env({k: (0, 100)})) == one, "groups are no loops"


@pytest.mark.parametrize(
    ("language", "index", "each"),
    [
        ("opencl", "ids[vj]", 1),
        ("opencl", "ids[vj] // 3", 1),
        ("webgpu", "ids[vj]", 1),
        ("webgpu", "ids[vj] // 3", 66),
        ("webgpu", "vj // 3", 1),
        ("opencl", "cast(fmod(cast(ids[vj], f32), 3.0), i64)", 257),
    ],
)
def test_loops_inside_functions_count(language: Language, index: str, each: int) -> None:
    """An index from memory is divided in a loop where integers of 64 bits are pairs of words."""
    text = SUM.replace("x: Buffer((n, k), f32)", "x: Buffer((n, k), f32), ids: Buffer((k,), i64)")
    func = parse_prim_func(text.replace("x[vi, vj]", f"x[vi, {index}]").lstrip())
    n, k = func.symbols
    passes = most_passes(func, CodeTarget(language, 1), Env({n: (0, 5), k: (0, 1000)}))
    assert passes is not None and 1000 * each <= passes <= 1000 * each + 10
