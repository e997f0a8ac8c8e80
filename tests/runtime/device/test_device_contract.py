"""One contract, every device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cuda_emulation.driver import emulated
from tests.support.opencl_drivers import device_name

from relax_tune.errors import BuildError, MeasureError, UserError
from relax_tune.runtime.device.base import Device, DeviceClock, JoinsLaunches, RepeatsLaunches
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.device.device_class import DeviceFailure
from relax_tune.runtime.device.host import short_hash
from relax_tune.runtime.device.opencl import OpenCLDevice
from relax_tune.runtime.device.registry import list_devices, open_device
from relax_tune.runtime.device.source import join_sources
from relax_tune.runtime.device.wasm.device import SPEC as WASM
from relax_tune.runtime.device.wasm.device import WasmDevice
from relax_tune.runtime.program.program import KernelSource
from relax_tune.runtime.program.scalars import ARITY, Opcode, compile_scalars

pytestmark = pytest.mark.process

LIMITS = {
    *("workers", "vector_bits", "max_vector_lanes", "registers", "l1_bytes", "l2_bytes", "l3_bytes"),
    *("max_local_bytes", "max_group_size", "launch_ns"),
}
# what only GPUs tell
OF_CUDA = {
    *(
        "warp",
        "local_bytes_per_sm",
        "registers_per_sm",
        "threads_per_sm",
        "groups_per_sm",
        "compute_major",
        "compute_minor",
    ),
    *("clock_khz", "memory_clock_khz", "memory_bus_bits"),
}
OF_WEBGPU = {
    *("warp", "doubles", "serial_launches", "max_bindings", "max_binding_bytes", "max_groups"),
    *(f"max_group_{axis}" for axis in "xyz"),
}
OF_KIND: dict[str, set[str]] = {"cuda": OF_CUDA, "opencl": {"serial_launches"}, "webgpu": OF_WEBGPU}
# what not every driver or processor of a kind tells
OF_DRIVER = {
    "c": {"byte_dots", "bf16_dots", "tile_products"},
    "cuda": {"wgmma"},
    "opencl": {"doubles", "warp", "local_bytes_per_sm", "registers_per_sm", "loop_passes"},
    "webgpu": {"loop_passes"},
}
F32 = np.dtype(np.float32)
ADD = {
    "c": """#include <stdint.h>
void add(float* restrict a, int64_t n, int64_t by) { for (int64_t i = 0; i < n; ++i) a[i] += (float)by; }
""",
    "opencl": """kernel void add(global float* restrict a, long n, long by) {
  long i = get_global_id(0); if (i < n) a[i] += (float)by;
}
""",
    "cuda": """extern "C" __global__ void add(float* __restrict__ a, long long n, long long by) {
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; if (i < n) a[i] += (float)by;
}
""",
    "webgpu": """@group(0) @binding(0) var<storage, read_write> a: array<f32>;
struct Scalars { n: i32, by: i32 }
@group(0) @binding(1) var<uniform> s: Scalars;
@compute @workgroup_size(32) fn add(@builtin(global_invocation_id) at: vec3<u32>) {
  let i = i32(at.x); if (i < s.n) { a[i] += f32(s.by); }
}
""",
}
DOUBLE = {
    "c": """#include <stdint.h>
#if !defined(RT_PARALLEL_FOR)
#define RT_PARALLEL_FOR(part, data, count, uneven, pays) part(data, 0, count)
#endif
static void twice_part(const void* data, int64_t first, int64_t end) {
  float* a = *(float* const*)data;
  for (int64_t i = first; i < end; ++i) a[i] *= 2.0f;
}
void twice(float* restrict a, int64_t n) { RT_PARALLEL_FOR(twice_part, &a, n, 0, 1); }
""",
    "opencl": """kernel void twice(global float* restrict a, long n) {
  long i = get_global_id(0); if (i < n) a[i] *= 2.0f;
}
""",
    "cuda": """extern "C" __global__ void twice(float* __restrict__ a, long long n) {
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; if (i < n) a[i] *= 2.0f;
}
""",
    "webgpu": """@group(0) @binding(0) var<storage, read_write> a: array<f32>;
struct Scalars { n: i32 }
@group(0) @binding(1) var<uniform> s: Scalars;
@compute @workgroup_size(32) fn twice(@builtin(global_invocation_id) at: vec3<u32>) {
  let i = i32(at.x); if (i < s.n) { a[i] *= 2.0f; }
}
""",
}
# the start of a kernel, the address space of its parameters, and of a function that it calls
HEADS = {
    "c": ("void", "", "static inline"),
    "opencl": ("kernel void", "global ", ""),
    "cuda": ('extern "C" __global__ void', "", "static __device__"),
}
# the same in WGSL, where a body stands between
WGSL = "@group(0) @binding(0) var<storage, read_write> a: array<f32>;\n@compute @workgroup_size(1) fn {}() {{ {} }}\n"

Opener = Callable[[], Device]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("c", marks=pytest.mark.ccompiler),
        pytest.param("opencl", marks=pytest.mark.opencl),
        pytest.param("emulated", marks=pytest.mark.ccompiler),
        pytest.param("cuda", marks=pytest.mark.cuda),
        pytest.param("webgpu", marks=pytest.mark.webgpu),
        pytest.param(WASM, marks=[pytest.mark.cross, pytest.mark.process]),
    ],
)
def opener(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opener:
    """What opens the device, again and again. `emulated` is the CUDA device over a driver of the tests."""
    if request.param == "emulated":
        return partial(emulated, tmp_path_factory.mktemp("emulated"))
    try:
        open_device(device_name(request.param)).close()
    except UserError as error:
        pytest.skip(str(error))
    return partial(open_device, device_name(request.param))


@pytest.fixture(scope="module")
def device(opener: Opener) -> Iterator[Device]:
    opened = opener()
    yield opened
    opened.close()


def grid(device: Device, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return ((), ()) if device.info.kind == "c" else (((n + 31) // 32,), (32,))


def on_host(device: Device) -> bool:
    """True for the processor itself, whose memory is the host's."""
    return isinstance(device, CDevice)


@pytest.fixture(scope="module")
def kernels(device: Device) -> dict[str, Any]:
    kind = device.info.kind
    return device.compile([KernelSource("add", kind, ADD[kind]), KernelSource("twice", kind, DOUBLE[kind])])


def filled(device: Device, values: Any) -> Any:
    array = np.asarray(values, np.float32)
    buffer = device.alloc(array.nbytes)
    device.upload(buffer, array)
    return buffer


def test_info_has_limits_for_rules(device: Device, opener: Opener) -> None:
    info = device.info
    assert set(dict(info.limits)) - OF_DRIVER.get(info.kind, set()) == LIMITS | OF_KIND.get(info.kind, set())
    assert all(type(v) is int for _, v in info.limits)
    assert dict(info.limits)["workers"] >= 1
    assert list(info.fingerprint) == sorted(info.fingerprint) and dict(info.fingerprint)["kind"] == info.kind
    assert all(type(k) is str and type(v) is str for k, v in info.fingerprint)
    again = opener()
    assert again.info == info, "the fingerprint does not change from one opening to the next"
    again.close()


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (0, 4), (), (1000, 7)])
def test_upload_then_download(device: Device, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    buffer = device.alloc(array.nbytes)
    device.upload(buffer, np.ascontiguousarray(array).reshape(shape))
    back = device.download(buffer, F32, shape)
    assert back.shape == shape and back.dtype == F32
    np.testing.assert_array_equal(back, array)
    device.free(buffer)


def test_copy_of_odd_bytes_leaves_the_rest(device: Device) -> None:
    source, target = device.alloc(8), device.alloc(8)
    device.upload(source, np.arange(8, dtype=np.uint8))
    device.upload(target, np.full(8, 9, np.uint8))
    for nbytes, wanted in ((3, [0, 1, 2, 9, 9, 9, 9, 9]), (6, [0, 1, 2, 3, 4, 5, 9, 9])):
        device.copy(target, source, nbytes)
        assert device.download(target, np.dtype(np.uint8), (8,)).tolist() == wanted


def test_download_is_a_copy(device: Device) -> None:
    buffer = filled(device, [1, 2])
    first = device.download(buffer, F32, (2,))
    device.upload(buffer, np.array([5, 6], np.float32))
    assert first.tolist() == [1, 2]


def test_launches_are_in_order(device: Device, kernels: dict[str, Any]) -> None:
    n = 1000
    buffer = filled(device, np.arange(n))
    add = device.bind(kernels["add"], [buffer], [n, 3], *grid(device, n))
    twice = device.bind(kernels["twice"], [buffer], [n], *grid(device, n))
    for launch in (add, twice, add, twice):  # the same closure may be launched again
        launch()
    device.synchronize()
    np.testing.assert_array_equal(device.download(buffer, F32, (n,)), ((np.arange(n) + 3) * 2 + 3) * 2)


def test_small_and_large_launches_are_in_order(device: Device, kernels: dict[str, Any]) -> None:
    """A device may run a launch of one group elsewhere than one of many."""
    few, many = 20, 300_000
    buffer = filled(device, np.zeros(many))
    launches = [device.bind(kernels["add"], [buffer], [n, 1], *grid(device, n)) for n in (few, many)]
    launches += [device.bind(kernels["twice"], [buffer], [n], *grid(device, n)) for n in (few, many)]
    wanted = np.zeros(many, np.float32)
    for k in np.random.default_rng(3).integers(0, 4, 60):
        launches[k]()
        n = (few, many)[k % 2]
        wanted[:n] = wanted[:n] + 1 if k < 2 else wanted[:n] * 2
        if k == 0 and wanted[0] > 2**20:
            device.synchronize()
            device.upload(buffer, wanted := np.zeros(many, np.float32))
    np.testing.assert_array_equal(device.download(buffer, F32, (many,)), wanted)


def test_copies_are_in_order_with_launches(device: Device, kernels: dict[str, Any]) -> None:
    n = 1000
    source, target = filled(device, np.arange(n)), filled(device, np.zeros(n))
    add = device.bind(kernels["add"], [source], [n, 3], *grid(device, n))
    add()
    device.copy(target, source, (n - 1) * 4)
    add()
    device.copy(target, source, 0)
    wanted = np.append(np.arange(n - 1) + 3, 0)
    np.testing.assert_array_equal(device.download(target, F32, (n,)), wanted)


def test_long_loops_end_early_only_beyond_the_limit_of_the_device(device: Device) -> None:
    """Each of two loops in a row adds what it finds in memory, so that no compiler knows their sum."""
    kind, steps = device.info.kind, 40_000
    if kind == "webgpu":
        loops = " ".join(f"for (var i = 0; i < {steps}; i++) {{ t += a[(i + {k}) % 4]; }}" for k in range(2))
        text = WGSL.format("count", f"var t = 0.0; {loops} a[4] = t;")
    else:
        head, space, _ = HEADS[kind]
        loops = " ".join(f"for (int i = 0; i < {steps}; i++) t += a[(i + {k}) % 4];" for k in range(2))
        text = f"{head} count({space}float *a) {{ float t = 0.0f; {loops} a[4] = t; }}\n"
    buffer = filled(device, [1, 1, 1, 1, 0])
    places = ((), ()) if kind == "c" else ((1,), (1,))
    device.bind(device.compile([KernelSource("count", kind, text)])["count"], [buffer], [], *places)()
    device.synchronize()
    found = int(device.download(buffer, F32, (5,))[4])
    limit = dict(device.info.limits).get("loop_passes")
    # a loop makes one pass more than it has steps
    assert found == (2 * steps if limit is None else limit - 1)


def test_recorded_launches_are_one(device: Device, kernels: dict[str, Any]) -> None:
    buffer = filled(device, np.arange(40))
    add = device.bind(kernels["add"], [buffer], [40, 3], *grid(device, 40))
    twice = device.bind(kernels["twice"], [buffer], [40], *grid(device, 40))
    one = device.record([add, twice, add])
    assert device.download(buffer, F32, (40,)).tolist() == list(range(40)), "nothing has run"
    assert device.record([]) is None
    assert (one is None) == (not isinstance(device, WasmDevice) and device.info.kind not in ("c", "cuda"))
    for launch in (add, *([add, twice, add] if one is None else [one]), twice):
        launch()
    np.testing.assert_array_equal(device.download(buffer, F32, (40,)), ((np.arange(40) + 6) * 2 + 3) * 2)


def test_joined_launches_keep_order(device: Device, kernels: dict[str, Any]) -> None:
    """Host code between kernels, an array in place of a buffer, and a kernel of more arguments than a loop passes on."""
    if not isinstance(device, JoinsLaunches):
        return
    count = 60
    parameters = ", ".join(f"int64_t n{i}" for i in range(count))
    terms = " + ".join(f"{i + 1} * n{i}" for i in range(count))
    text = f"#include <stdint.h>\nvoid many(float* restrict a, {parameters}) {{ a[0] += (float)({terms}); }}\n"
    many = device.compile([KernelSource("many", "c", text)])["many"]
    buffer = filled(device, np.arange(40))
    add = device.bind(kernels["add"], [buffer], [40, 3], (), ())
    twice = device.bind(kernels["twice"], [buffer], [40], (), ())
    wide = device.bind(many, [buffer], range(count), (), ())
    host = device.bind_host(lambda views: np.negative(views[0].view(F32), out=views[0].view(F32)), [buffer])
    assert host is not None
    steps = [add, twice, add, host, wide, twice, twice]
    joined = device.joined(steps)
    assert len(joined) == 4 and device.joined([add]) == [add] and not device.joined([])

    def done(values: Any) -> Any:
        found = -((values + 3) * 2 + 3)
        found[0] += sum((i + 1) * i for i in range(count))
        return found * 4

    other = np.full(40, 7, F32)
    assert device.place(buffer, other)
    for launch in joined:
        launch()
    assert device.place(buffer, None)
    np.testing.assert_array_equal(other, done(np.full(40, 7, F32)))
    for launch in joined:
        launch()
    np.testing.assert_array_equal(device.download(buffer, F32, (40,)), done(np.arange(40, dtype=F32)))


def test_repeated_launches_change_numbers_and_memory_from_step_to_step(device: Device, kernels: dict[str, Any]) -> None:
    """A table gives the numbers of each step; two buffers exchange their memory after each, and a host launch has no such loop."""
    if not isinstance(device, RepeatsLaunches):
        return
    assert isinstance(device, JoinsLaunches)
    numbers = np.array([8, 0], np.int64)
    first, second = (filled(device, np.zeros(8)) for _ in range(2))
    add = device.bind_numbers(kernels["add"], [first], [0, 1], numbers)
    twice = device.bind_numbers(kernels["twice"], [second], [0], numbers)
    cells = np.array([numbers.__array_interface__["data"][0] + numbers.itemsize], np.int64)
    here, there = map(device.cell, (first, second))
    moves = np.array([[here, there, 0], [there, here, 0]], np.int64)
    run = device.repeated([add, twice], cells, moves)
    assert run is not None
    run(np.array([[3], [5], [7]], np.int64))
    # An odd number of exchanges: what was the memory of one buffer is that of the other. 0 + 3, doubled, + 7; 0 doubled, + 5, doubled.
    assert device.download(first, F32, (8,)).tolist() == [(0 + 3) * 2 + 7] * 8
    assert device.download(second, F32, (8,)).tolist() == [(0 * 2 + 5) * 2] * 8
    for buffer in (first, second):
        device.place(buffer, None)
    run(np.empty((0, 1), np.int64))
    assert device.download(first, F32, (8,)).tolist() == [13] * 8
    host = device.bind_host(lambda views: None, [first])
    assert (
        host is not None
        and device.repeated([add, host], cells, moves) is None
        and device.repeated([], cells, moves) is None
    )


def test_launches_reading_numbers_want_live_buffers(device: Device, kernels: dict[str, Any]) -> None:
    """A launch reads its scalars when it runs; over a buffer that was freed there is none."""
    if not isinstance(device, JoinsLaunches):
        return
    buffer, numbers = filled(device, np.zeros(8)), np.array([5, 8, 3], np.int64)
    add = device.bind_numbers(kernels["add"], [buffer], [1, 2], numbers)
    add()
    numbers[:] = 0, 4, 1
    for launch in (add, *device.joined([add, add])):
        launch()
    assert device.download(buffer, F32, (8,)).tolist() == [6] * 4 + [3] * 4
    device.free(buffer)
    with pytest.raises(MeasureError, match="freed"):
        device.bind_numbers(kernels["add"], [buffer], [1, 2], numbers)


def test_buffer_of_other_memory_is_seen_by_bound_launches(device: Device, kernels: dict[str, Any]) -> None:
    if not isinstance(device, JoinsLaunches):
        return
    first, second, alias = filled(device, np.arange(40)), filled(device, np.arange(60, 100)), device.alloc(0)
    device.point(alias, first)
    add = device.bind(kernels["add"], [alias], [40, 3], (), ())
    twice = device.bind_host(lambda views: np.multiply(views[0].view(F32), 2, out=views[0].view(F32)), [alias])
    assert twice is not None and alias.nbytes == 160
    launches = device.joined([add, add, twice])
    for buffer, start in ((first, 0), (second, 60)):
        device.point(alias, buffer)
        for launch in launches:
            launch()
        expected = (np.arange(start, start + 40) + 6) * 2
        np.testing.assert_array_equal(device.download(buffer, F32, (40,)), expected)
        np.testing.assert_array_equal(device.download(alias, F32, (40,)), expected)


def test_numbers_advance_as_the_evaluator_says(device: Device) -> None:
    """Random scalars over the ends of int64 and small numbers; an error, or 0 at the end, leaves the numbers as they were."""
    if not isinstance(device, JoinsLaunches):
        return
    rng, ends, advanced = np.random.default_rng(0), [-(2**63), 2**63 - 1], 0
    for _ in range(400):
        code = [*(Opcode.SYMBOL, 1, 0, 0), *(Opcode.SYMBOL, 0, 0, 0)]
        for value in (ends[rng.integers(2)], *rng.integers(-4, 5, size=4).tolist()):
            code += [Opcode.CONST, value, 0, 0]
        for slot in range(7, 13):
            op = Opcode(int(rng.integers(2, len(Opcode))))
            operands = rng.integers(slot, size=ARITY[op]).tolist()
            code += [op, *operands, *[0] * (3 - len(operands))]
        code += [Opcode.CONST, int(rng.integers(5)), 0, 0]
        code = [int(number) for number in code]
        numbers = np.arange(14, dtype=np.int64)
        advance = device.advances(np.array(code), np.array([-5, 3]), np.array([[1, 9]]), numbers)
        try:
            expected = compile_scalars(code, 2)([-5, 9])
        except UserError:
            expected = [0]
        assert advance() == (expected[-1] != 0)
        assert numbers.tolist() == (expected if expected[-1] else list(range(14)))
        advanced += expected[-1] != 0
    assert 100 < advanced < 300


def test_clock_of_the_device_times_launches(device: Device, kernels: dict[str, Any]) -> None:
    """The time by the device's clock lies within that of the host, and the launches are done. Only WebGPU's adapters and node have one."""
    buffer = filled(device, np.zeros(4096))
    add = device.bind(kernels["add"], [buffer], [4096, 1], *grid(device, 4096))
    assert isinstance(device, DeviceClock) == (device.info.kind == "webgpu" or isinstance(device, WasmDevice))
    if not isinstance(device, DeviceClock):
        return
    device.synchronize()
    began = time.perf_counter()
    secs = device.elapsed(lambda: [add() for _ in range(50)])
    most = time.perf_counter() - began
    assert secs is not None and 0 < secs <= most
    assert (device.download(buffer, F32, (4096,)) == 50).all()


def test_bindings_do_not_share_arguments(device: Device, kernels: dict[str, Any]) -> None:
    first, second = filled(device, np.zeros(8)), filled(device, np.zeros(8))
    one = device.bind(kernels["add"], [first], [8, 1], *grid(device, 8))
    two = device.bind(kernels["add"], [second], [8, -2], *grid(device, 8))
    one()
    two()
    one()
    assert device.download(first, F32, (8,)).tolist() == [2] * 8
    assert device.download(second, F32, (8,)).tolist() == [-2] * 8


def test_scalars_are_int64(device: Device, kernels: dict[str, Any]) -> None:
    kind = device.info.kind
    if kind == "webgpu":  # WGSL has no integers of 64 bits
        with pytest.raises(MeasureError, match=rf"32 bits hold, got {3 << 40}"):
            device.bind(kernels["add"], [filled(device, [7])], [1, 3 << 40], *grid(device, 1))
        return
    body = "{ a[0] = (s >> 40) == 3 ? 1.0f : 0.0f; }"
    source = {
        "c": f"#include <stdint.h>\nvoid wide(float* a, int64_t s) {body}",
        "opencl": f"kernel void wide(global float* a, long s) {body}",
        "cuda": f'extern "C" __global__ void wide(float* a, long long s) {body}',
    }
    handle = device.compile([KernelSource("wide", kind, source[kind])])["wide"]
    buffer = filled(device, [7])
    device.bind(handle, [buffer], [3 << 40], *grid(device, 1))()
    assert device.download(buffer, F32, (1,)).tolist() == [1]


def test_host_code_joins_in_order(device: Device, kernels: dict[str, Any]) -> None:
    buffer, empty = filled(device, np.ones(64)), device.alloc(0)

    def host(views: list[Any]) -> None:
        assert [view.nbytes for view in views] == [256, 0]
        views[0].view(np.float32)[:] *= 10

    join = device.bind_host(host, [buffer, empty])
    assert (join is None) == (device.info.kind != "opencl" and not on_host(device)), "the others here are processors"
    if join is None:
        return
    add = device.bind(kernels["add"], [buffer], [64, 1], *grid(device, 64))
    for launch in (add, join, add, join):
        launch()
    assert device.download(buffer, F32, (64,)).tolist() == [210] * 64


def test_launches_reach_an_array_in_place_of_a_buffer(device: Device, kernels: dict[str, Any]) -> None:
    """Where the device can, of kernels and of host code; the buffer keeps its own contents."""
    buffer, array = filled(device, np.ones(64)), np.full(65, 5, np.float32)[1:]  # where vectors do not lie
    add = device.bind(kernels["add"], [buffer], [64, 1], *grid(device, 64))
    seen: list[Any] = []
    host = device.bind_host(lambda views: seen.append(views[0].view(np.float32).tolist()), [buffer])
    placed = device.place(buffer, array)
    assert placed == on_host(device)
    add()
    if host is not None:
        host()
    device.synchronize()
    assert array.tolist() == [6 if placed else 5] * 64
    assert host is None or seen == [[6 if placed else 2] * 64]
    if placed:
        assert device.download(buffer, F32, (64,)).tolist() == [1] * 64
        assert device.place(buffer, None)
    add()
    assert device.download(buffer, F32, (64,)).tolist() == [2 if placed else 3] * 64
    if host is not None:
        host()
        assert seen[1:] == [[2 if placed else 3] * 64]


def test_buffer_over_a_hosts_array_shares_memory(device: Device, kernels: dict[str, Any]) -> None:
    """Where the device can; freeing the buffer leaves the array alone."""
    array = np.full(65, 5, np.float32)[1:]  # where vectors do not lie
    buffer = device.wrap(array)
    reaches = on_host(device) or (isinstance(device, OpenCLDevice) and device._in_place)
    assert (buffer is not None) == reaches
    if buffer is None:
        return
    add = device.bind(kernels["add"], [buffer], [64, 1], *grid(device, 64))
    for step in (6, 7, 20):
        if step == 20:
            array[:] = 19
        add()
        device.synchronize()
        assert array.tolist() == [step] * 64
    assert buffer.nbytes == 256 and device.download(buffer, F32, (64,)).tolist() == [20] * 64
    device.free(buffer)
    assert array.tolist() == [20] * 64


@pytest.mark.opencl
def test_host_code_joins_through_mapping_too() -> None:
    """What drivers other than PoCL need: map, call, unmap."""
    device = open_device("opencl")
    assert isinstance(device, OpenCLDevice) and device._in_place
    device._in_place = False
    handles = device.compile([KernelSource("add", "opencl", ADD["opencl"])])
    test_host_code_joins_in_order(device, handles)
    device.close()


def test_native_queue_keeps_launch_order(device: Device, kernels: dict[str, Any]) -> None:
    """As libraries with kernels of their own do, by the driver's handles; devices without a queue say so."""
    buffers = [filled(device, np.full(64, value)) for value in (1, 2)]
    native = device.native(buffers)
    if device.info.kind in ("c", "webgpu"):
        assert native is None
        return
    assert native is not None and len(set(native[1])) == 2
    if device.info.kind == "opencl":
        _takes_its_turn(device, kernels, buffers, native)
    device.free(buffers[0])
    with pytest.raises(MeasureError, match="freed"):
        device.native(buffers)


def _takes_its_turn(
    device: Device, kernels: dict[str, Any], buffers: list[Any], native: tuple[int, tuple[int, ...]]
) -> None:
    import pyopencl as cl

    queue, memory = cl.CommandQueue.from_int_ptr(native[0]), [cl.Buffer.from_int_ptr(x) for x in native[1]]
    add = device.bind(kernels["add"], buffers[:1], [64, 1], *grid(device, 64))
    for _ in range(2):
        add()
        cl.enqueue_copy(queue, memory[1], memory[0])
    add()
    assert [device.download(x, F32, (64,)).tolist() for x in buffers] == [[4] * 64, [3] * 64]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 1, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 4, 600, 64), (1, 400_000, 1, 1), (3, 0, 2, 2)])
def test_upload_takes_any_order_of_memory(device: Device, shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    """Large ones on all threads of the C device, also where launches use another array's memory."""
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape).transpose(order)
    for given in (array, array[..., ::-1], np.broadcast_to(array[..., :1], array.shape)):
        buffer, other = device.alloc(array.nbytes), np.zeros(array.shape, np.int32)
        device.upload(buffer, given)
        np.testing.assert_array_equal(device.download(buffer, np.dtype(np.int32), array.shape), given)
        if array.size and device.place(buffer, other):
            device.upload(buffer, -given)
            np.testing.assert_array_equal(other, -given)
            device.place(buffer, None)
        device.free(buffer)


def test_memory_is_aligned(device: Device) -> None:
    for nbytes in (1, 100, 4096):
        addresses: list[int] = []
        buffer = device.alloc(nbytes)
        join = device.bind_host(lambda views: addresses.append(views[0].ctypes.data), [buffer])  # noqa: B023
        assert buffer.nbytes == nbytes
        if join is not None:
            join()
        elif (native := device.native([buffer])) is not None:
            addresses += native[1]
        assert not addresses or addresses[0] % 64 == 0


def test_oversized_transfer_is_refused(device: Device) -> None:
    buffer = device.alloc(8)
    with pytest.raises(MeasureError, match="12 bytes, got a buffer of 8"):
        device.upload(buffer, np.zeros(3, np.float32))
    with pytest.raises(MeasureError, match="12 bytes, got a buffer of 8"):
        device.download(buffer, F32, (3,))
    with pytest.raises(MeasureError, match="12 bytes, got a buffer of 8"):
        device.copy(device.alloc(12), buffer, 12)
    with pytest.raises(MeasureError, match="-1"):
        device.alloc(-1)
    with pytest.raises(MeasureError, match=r"expected 4611686018427387904 bytes"):
        device.alloc(2**62)


def test_in_place_launch_reads_old_elements(device: Device) -> None:
    """A kernel may get one buffer twice, to read and to write each element."""
    kind = device.info.kind
    head, space, _ = HEADS.get(kind, ("", "", ""))
    source = (
        "@group(0) @binding(0) var<storage, read> x: array<f32>;\n"
        + WGSL.format("next", "a[0] = x[0] + 1.0f;").replace("binding(0)", "binding(1)")
        if kind == "webgpu"
        else f"{head} next(const {space}float* x, {space}float* a) {{ a[0] = x[0] + 1.0f; }}"
    )
    buffer = filled(device, [3])
    shape: tuple[tuple[int, ...], ...] = ((), ()) if kind == "c" else ((1,), (1,))
    launch = device.bind(device.compile([KernelSource("next", kind, source)])["next"], [buffer] * 2, [], *shape)
    launch()
    launch()
    assert device.download(buffer, F32, (1,)).tolist() == [5]


def test_a_freed_buffer_is_refused(device: Device, kernels: dict[str, Any]) -> None:
    buffer = filled(device, [1.0])
    device.free(buffer)
    for use in (
        lambda: device.upload(buffer, np.zeros(1, np.float32)),
        lambda: device.download(buffer, F32, (1,)),
        lambda: device.copy(device.alloc(4), buffer, 4),
        lambda: device.bind(kernels["add"], [buffer], [1, 1], *grid(device, 1)),
    ):
        with pytest.raises(MeasureError, match="freed"):
            use()
    device.free(buffer)


def test_compile_error_is_reported(device: Device) -> None:
    kind = device.info.kind
    with pytest.raises(BuildError, match="nonsense"):
        text = (
            WGSL.format("broken", "nonsense;") if kind == "webgpu" else f"{HEADS[kind][0]} broken(void) {{ nonsense; }}"
        )
        device.compile([KernelSource("broken", kind, text)])
    with pytest.raises(BuildError, match="missing"):
        device.compile([KernelSource("missing", kind, ADD[kind])])
    other = "opencl" if kind == "c" else "c"
    with pytest.raises(BuildError, match=f"expected kernels in {kind}, got add in {other}"):
        device.compile([KernelSource("add", other, ADD[other])])


def test_flags_reach_the_compiler(device: Device) -> None:
    kind = device.info.kind
    head, space, _ = HEADS.get(kind, ("", "", ""))
    texts = {
        v: WGSL.format(f"value_{v}", "a[0] = VALUE;")
        if kind == "webgpu"
        else f"{head} value_{v}({space}float* a) {{ a[0] = VALUE; }}"
        for v in (3, 4)
    }
    kernels = [KernelSource(f"value_{v}", kind, text, (f"-DVALUE={v}",)) for v, text in texts.items()]
    handles = device.compile(kernels)
    buffer = filled(device, [0])
    for value in (3, 4):
        device.bind(handles[f"value_{value}"], [buffer], [], *grid(device, 1))()
        assert device.download(buffer, F32, (1,)).tolist() == [value]


def test_many_kernels_with_one_prelude(device: Device) -> None:
    kind = device.info.kind
    void, space, head = HEADS.get(kind, ("", "", ""))
    function = (
        "fn third(x: f32) -> f32 { return x / 3.0f; }"
        if kind == "webgpu"
        else f"{head} float third(float x) {{ return x / 3.0f; }}"
    )
    prelude = f"/*prelude*/\n{function}\n/*end prelude*/\n"
    texts = [
        WGSL.format(f"k{i}", f"a[0] = third(a[0]) + {i};")
        if kind == "webgpu"
        else f"{void} k{i}({space}float* a) {{ a[0] = third(a[0]) + {i}; }}\n"
        for i in range(30)
    ]
    sources = [KernelSource(f"k{i}", kind, f"{prelude}{text}") for i, text in enumerate(texts)]
    handles = device.compile(sources)
    buffer = filled(device, [9])
    one = ((), ()) if kind == "c" else ((1,), (1,))
    device.bind(handles["k29"], [buffer], [], *one)()
    assert device.download(buffer, F32, (1,)).tolist() == [32]


def test_joined_sources_keep_each_prelude_once() -> None:
    kernels = [
        KernelSource("a", "c", "/*prelude*/\nint p;\n/*end prelude*/\nvoid a(void) {}\n"),
        KernelSource("b", "c", "/*prelude*/\nint p;\n/*end prelude*/\nvoid b(void) {}\n"),
        KernelSource("c", "c", "/*prelude*/\nint q;\n/*end prelude*/\nvoid c(void) {}\n"),
    ]
    text = join_sources(kernels)
    assert text.count("int p;") == 1 and text.count("int q;") == 1
    assert text.index("int q;") < text.index("void a") < text.index("void b") < text.index("void c")


@pytest.mark.ccompiler
def test_compiled_libraries_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(CDevice, "_team", None)  # as in a new process
    kernel = KernelSource("add", "c", ADD["c"])
    device = CDevice()
    device.compile([kernel])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")}
    assert len(before) == 3, "the kernel, the threads of kernels, and what a device tries its compiler on"
    CDevice().compile([kernel])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")} == before
    device.compile([KernelSource("add", "c", ADD["c"] + "// another text\n")])
    assert len(list(tmp_path.rglob("*.so"))) == len(before) + 1
    assert not list(tmp_path.rglob(".build-*")), "nothing temporary stays"


@pytest.mark.ccompiler
def test_no_compiler_is_said_plainly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(BuildError, match=r"got no such program .* in CC=no-such-compiler"):
        CDevice()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="apt-get install gcc"):
        CDevice()
    assert any(isinstance(entry, DeviceFailure) and entry.spec == "c" for entry in list_devices())
    clang = tmp_path / "clang"
    clang.write_text("#!/bin/sh\necho clang version 19\n")
    clang.chmod(0o755)
    monkeypatch.setenv("CC", str(clang))
    with pytest.raises(BuildError, match="got clang"):
        CDevice()


@pytest.mark.ccompiler
def test_the_c_device_has_no_grid(tmp_path: Path) -> None:
    device = CDevice()
    handle = device.compile([KernelSource("add", "c", ADD["c"])])["add"]
    with pytest.raises(MeasureError, match="no grid"):
        device.bind(handle, [device.alloc(4)], [1, 1], (1,), (1,))


@pytest.mark.opencl
def test_limits_are_checked_before_the_driver() -> None:
    device = open_device("opencl")
    most = dict(device.info.limits)["max_group_size"]
    handle = device.compile([KernelSource("add", "opencl", ADD["opencl"])])["add"]
    buffer = filled(device, [0])
    with pytest.raises(MeasureError, match=f"allowed .*{most}"):
        device.bind(handle, [buffer], [1, 1], (1,), (2 * most,))
    with pytest.raises(MeasureError, match=r"grid of 1 to 3 axes"):
        device.bind(handle, [buffer], [1, 1], (), ())
    with pytest.raises(MeasureError, match="0 or more"):
        device.bind(handle, [buffer], [1, 1], (-1,), (1,))
    with pytest.raises(MeasureError, match="do not fit"):
        device.bind(handle, [buffer], [1], (1,), (1,))
    device.bind(handle, [buffer], [1, 1], (0,), (1,))()
    assert device.download(buffer, F32, (1,)).tolist() == [0]
    local = dict(device.info.limits)["max_local_bytes"]
    source = f"kernel void big(global float* a) {{ local float t[{local // 4 + 64}]; t[get_local_id(0)] = a[0]; \
        barrier(CLK_LOCAL_MEM_FENCE); a[0] = t[0]; }}"
    with pytest.raises((BuildError, MeasureError), match=r"local memory|allowed"):
        device.bind(device.compile([KernelSource("big", "opencl", source)])["big"], [buffer], [], (1,), (1,))()
    device.close()


@pytest.mark.webgpu
def test_webgpu_limits_are_checked_before_the_driver() -> None:
    try:
        device = open_device("webgpu")
    except UserError as error:
        pytest.skip(str(error))
    limits = dict(device.info.limits)
    handle = device.compile([KernelSource("add", "webgpu", ADD["webgpu"])])["add"]
    buffer = filled(device, [0])
    for group, wanted in (
        ((2 * limits["max_group_x"],), "allowed"),
        ((1, 1, limits["max_group_z"] + 1), "on axis 2, allowed"),
    ):
        with pytest.raises(MeasureError, match=wanted):
            device.bind(handle, [buffer], [1, 1], (1,) * len(group), group)
    with pytest.raises(MeasureError, match=f"at most {limits['max_groups']}"):
        device.bind(handle, [buffer], [1, 1], (limits["max_groups"] + 1,), (32,))
    with pytest.raises(MeasureError, match="do not fit"):
        device.bind(handle, [buffer, buffer], [1, 1], (1,), (32,))
    device.bind(handle, [buffer], [1, 1], (0,), (32,))()
    assert device.download(buffer, F32, (1,)).tolist() == [0]
    device.close()


@pytest.mark.parametrize("spec", ["cuda:", "cuda:x", "", "opencl:", "c:no such processor", "opencl:no such thing"])
def test_unknown_device_names_known_devices(spec: str) -> None:
    with pytest.raises(UserError) as caught:
        open_device(spec)
    names = [entry.name for entry in list_devices() if not isinstance(entry, DeviceFailure) and entry.kind == "opencl"]
    assert spec in str(caught.value)
    assert all(name.split("-")[0] in str(caught.value) or "Portable" in str(caught.value) for name in names)


def test_hashes_are_stable() -> None:
    assert short_hash("a") == short_hash("a") != short_hash("b")
