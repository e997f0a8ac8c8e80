"""Bitonic sorts: what they compute, on the interpreter and as kernels for GPUs, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.cuda_emulation.gpus import PLACES, gpu
from tests.ir.codegen.codegen_runner import Compiled, opened
from tests.schedules.primitives.reduction.test_radix_sorts import ALL, mixed
from tests.schedules.primitives.refusals import Refusal, check, refuse, step
from tests.support import schedule_functions as make
from tests.support.candidates import MACHINES
from tests.support.meaning import outputs_of

from relax_tune.ir.check.verify import verify
from relax_tune.ir.core.dtype import DType, bf16, f16, f32, i8, i64, u32
from relax_tune.ir.core.expr import const
from relax_tune.ir.core.function import PrimFunc
from relax_tune.ir.op.reduction.scan import TopK
from relax_tune.runtime.device.base import Device
from relax_tune.schedules.rules.gpu import sorting
from relax_tune.schedules.schedule import Schedule
from relax_tune.schedules.sketch import RULES, Sketch, generate_sketches, instantiate
from relax_tune.schedules.target import HardwareInfo

NARROW = tuple(t for t in ALL if t.bytes <= 4)
CUDA = HardwareInfo.from_limits(
    "cuda", {"workers": 108, "warp": 32, "max_group_size": 256, "max_local_bytes": 48 << 10}
)


def ordered(func: PrimFunc, size: int) -> PrimFunc:
    s = Schedule(func)
    s.apply("bitonic_sort", block="find", size=size)
    return s.func


@pytest.mark.parametrize("stored", NARROW, ids=str)
def test_bitonic_sort_any_type_keeps_the_order(stored: DType) -> None:
    rng = np.random.default_rng(6)
    for length, axis, largest in ((0, 1, True), (1, 0, False), (5, 1, True), (8, 0, False)):
        func = make.top_places_of(length, axis, largest, stored)
        scheduled = ordered(func, 8)
        verify(scheduled)
        for n, k in ((0, 1), (3, length), (1, 2)):
            arrays = [mixed(rng, (n, length) if axis else (length, n), stored)]
            dims = {"n": n, "k": k}
            (expected,), (actual,) = outputs_of(func, dims, arrays), outputs_of(scheduled, dims, arrays)
            assert np.array_equal(actual, expected), (dims, arrays)


@pytest.mark.parametrize("size", [4, 16, 32])
def test_bitonic_sort_networks_of_any_size_sort_equal_elements(size: int) -> None:
    length = size - 1
    func = make.top_places_of(length, stored=i8)
    arrays = [np.random.default_rng(size).integers(0, 3, (1, length)).astype(np.int8)]
    actual = outputs_of(ordered(func, size), {"n": 1, "k": length}, arrays)[0]
    assert np.array_equal(actual, TopK(const(length)).evaluate(arrays))


def sketch(func: PrimFunc, machine: HardwareInfo) -> Sketch:
    (first, *_) = generate_sketches(func, machine, {"sorting": RULES["gpu_sorting"]})
    return first


def sort_on(device: Device, language: str, machine: HardwareInfo, stored: DType) -> None:
    """Sort rows by the rule's guess and by its fewest threads, and compare with NumPy."""
    rng, cases = (
        np.random.default_rng(9),
        ((100, 1, True, 7), (300, 1, False, 300), (128, 0, False, 128), (1, 1, True, 1)),
    )
    funcs = [make.top_places_of(length, axis, largest, stored, k) for length, axis, largest, k in cases]
    candidates = [(s, s.guesses[0] if at % 2 else {"TX": 32}) for at, s in enumerate(sketch(f, machine) for f in funcs)]
    kernels = Compiled.together(device, language, [instantiate(s, values) for s, values in candidates])
    for (length, axis, largest, k), kernel in zip(cases, kernels, strict=True):
        x = mixed(rng, (3, length) if axis else (length, 3), stored)
        with np.errstate(invalid="ignore"):  # signalling NaN
            expected = TopK(const(k), axis, largest).evaluate([x])
        assert np.array_equal(kernel([x, np.zeros_like(expected)])[0], expected), (length, axis, largest, k)


@pytest.mark.process
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("stored", [f32, bf16, i8], ids=str)
def test_sorting_rule_cuda_matches_numpy(stored: DType, where: str, tmp_path: Path) -> None:
    device = gpu(where, tmp_path)
    try:
        sort_on(device, "cuda", CUDA, stored)
    finally:
        device.close()


@pytest.mark.opencl
@pytest.mark.parametrize("stored", [f16, u32], ids=str)
def test_sorting_rule_opencl_matches_numpy(stored: DType) -> None:
    device = opened("opencl")
    try:
        sort_on(device, "opencl", MACHINES["gpu"], stored)
    finally:
        device.close()


def test_sorting_rule_sorts_only_short_rows_of_known_length() -> None:
    assert [name for name, _ in sorting.sketches(make.top_places_of(2048), CUDA)] == ["sorting.bitonic"]
    for func in (make.top_places(), make.top_places_of(2049), make.top_places_of(9, stored=i64), make.dot()):
        assert not list(sorting.sketches(func, CUDA))
    little = HardwareInfo.from_limits("cuda", {"warp": 32, "max_group_size": 256, "max_local_bytes": 16 << 10})
    assert not list(sorting.sketches(make.top_places_of(2048), little))


def five() -> PrimFunc:
    return make.top_places_of(5)


SORT = step("bitonic_sort", block="find", size=8)
REFUSED = [
    refuse("the ranking", five, step("bitonic_sort", block="rank_1", size=8), message="to pick places by ranks"),
    refuse("rows of any length", make.top_places, SORT, message="provably at most 8 elements"),
    refuse("longer rows", lambda: make.top_places_of(9), SORT, message="provably at most 8 elements"),
    refuse("elements of 64 bits", lambda: make.top_places_of(5, stored=i64), SORT, message="at most 32 bits"),
    refuse("no power of two", five, step("bitonic_sort", block="find", size=6), message="a power of two"),
    refuse("a large network", five, step("bitonic_sort", block="find", size=1 << 17), message="a power of two"),
    refuse("a second time", five, SORT, SORT, message="to pick places by ranks"),
    refuse("spreading steps", five, SORT, step("set_kind", loop="find_step", kind="parallel"), message="may write the same element"),
    refuse("halves of a step separated", five, SORT, step("fission", loop="find_step", block="find_exchange"), message="fission"),
    refuse(
        "halves of a step together", five, SORT, step("fuse_sibling_loops", first="find_exchange_t", second="find_keep_c"),
        message="see elements",
    ),
    refuse("a step in place", five, SORT, step("compute_inline", block="find_exchange"), message="find_exchange"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda r: r.what)
def test_bitonic_sort_refusal_says_why(case: Refusal) -> None:
    check(case)
