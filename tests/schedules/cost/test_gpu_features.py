"""Memory sectors and bank conflicts of a warp in closed form, against enumeration."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from math import prod

import pytest
from tests.support.candidates import CASES, MACHINES, drawn, sketches_of
from tests.support.effort import thinned

from relax_tune.ir.codegen.generate import CodeTarget, generate, split_kernels
from relax_tune.ir.core.expr import Expr, Var, as_int, const, substitute
from relax_tune.ir.core.stmt import blocks
from relax_tune.schedules.cost.features import FeatureFunction
from relax_tune.schedules.cost.gpu_features import (
    BANKS,
    SECTOR_BYTES,
    WarpAccess,
    bank_conflicts,
    gpu_features,
    sector_bytes,
    warp_accesses,
)
from relax_tune.schedules.occupancy import REGISTER_GRANULE, kernels, stored_shape
from relax_tune.schedules.sketch import Sketch, instantiate
from relax_tune.schedules.target import HardwareInfo

WARP = 32
COUNTED = ("NT, 128 steps", "int4, many columns", "turned, bf16", "softmax with mask")


def number(e: Expr, env: Mapping[Var, Expr]) -> int:
    value = as_int(substitute(e, env))
    assert value is not None, e
    return value


def addresses(x: WarpAccess, shape: tuple[Expr, ...], env: Mapping[Var, Expr]) -> list[list[int]]:
    """Return the byte addresses that the first work-items of the first axis touch, all else being at its start."""
    item = next(p for p in x.path if p.kind == "item" and p.axis == 0)
    lane = next((p.var for p in x.path if p.kind == "vectorized"), None)
    start: dict[Var, Expr] = {p.var: const(0) for p in x.path}
    by_item = []
    for t in range(WARP):
        own = []
        for v in range(number(x.width, env)):
            place = {**env, **start, item.var: const(t), **({} if lane is None else {lane: const(v)})}
            flat = 0
            for e, d in zip(x.where, shape, strict=True):
                flat = flat * number(d, env) + number(e, place)
            own.append(flat * x.buffer.dtype.bytes)
        by_item.append(own)
    return by_item


def points(name: str) -> list[tuple[Sketch, dict[Var, Expr]]]:
    """Sketches with values of their tunables that fill warps along the first axis, at one of the function's shapes."""
    func, sketches = sketches_of(name, "gpu")
    dims = {v: const(CASES[name][1][0][v.name]) for v in func.symbols}
    chosen = []
    for sketch in sketches:
        rng = random.Random(name)
        values = next((v for v in (drawn(sketch, rng) for _ in range(40)) if v.get("TX", WARP) >= WARP), None)
        if values is not None:
            chosen.append((sketch, {**dims, **{t: const(values[t.name]) for t in sketch.tunables}}))
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTED)
def test_warp_accesses_match_enumerated_sectors_and_banks(name: str) -> None:
    counted = 0
    for sketch, env in points(name):
        for kernel in kernels(sketch.func):
            for shared in (False, True):
                for x in warp_accesses(sketch.func, kernel, shared):
                    if not any(p.kind == "item" and p.axis == 0 for p in x.path) or number(x.stride, env) == 0:
                        continue
                    shape = stored_shape(sketch.func, kernel, x.buffer) if shared else x.buffer.shape
                    touched = addresses(x, shape, env)
                    if not _is_linear(touched):
                        continue
                    counted += 1
                    where = f"{sketch.name}: {x.buffer.name} {env}"
                    if shared:
                        assert number(bank_conflicts(x), env) == _longest(touched), where
                    else:
                        assert number(sector_bytes(x), env) * WARP == _sectors(touched) * SECTOR_BYTES, where
    assert counted


def _is_linear(addresses: list[list[int]]) -> bool:
    """Items at equal distances, whole elements of words that nobody shares."""
    steps = {b[0] - a[0] for a, b in zip(addresses, addresses[1:])}
    return len(steps) == 1 and addresses[1][0] - addresses[0][0] >= 4


def _sectors(addresses: list[list[int]]) -> int:
    return len({b // SECTOR_BYTES for own in addresses for b in own})


def _longest(addresses: list[list[int]]) -> int:
    """The most words that one bank has to give at a time."""
    words = [sorted({b // 4 for b in own}) for own in addresses]
    together = BANKS // len(words[0])
    longest = 0
    for at in range(0, WARP, together):
        banks: dict[int, set[int]] = {}
        for own in words[at : at + together]:
            for w in own:
                banks.setdefault(w % BANKS, set()).add(w)
        longest = max(longest, *(len(b) for b in banks.values()))
    return longest


PLACED = (
    "gpu_items",
    "gpu_groups",
    "gpu_shared",
    "gpu_registers",
    "gpu_at_once",
    "gpu_occupancy",
    "gpu_waves",
    "gpu_wave_use",
)
LAUNCHED = ("matmul symbolic", "softmax with mask", "sum of all", "convolution by channel")


@pytest.mark.slow
@pytest.mark.parametrize("name", thinned(LAUNCHED))
def test_gpu_features_match_launch(name: str) -> None:
    """At shapes that the closed forms know by name only, against kernels generated for one candidate, placed group by group."""
    gpu, rng = MACHINES["gpu"], random.Random(name)
    # shared memory is what there is least of, and 1024 bytes of each group's are nobody's
    roomy = replace(gpu, sm_max_threads=1 << 14, sm_registers=1 << 20, sm_max_groups=64)
    machine = replace(roomy, language="cuda", sm_shared_bytes=gpu.local_bytes + 1024)
    assert (gpu.reserved_bytes, machine.reserved_bytes) == (0, 1024)
    func, sketches = sketches_of(name, "gpu")
    for sketch in sketches:
        values = drawn(sketch, rng)
        for kernel, instance in zip(kernels(sketch.func), split_kernels(instantiate(sketch, values)), strict=True):
            launch, main = generate(instance, CodeTarget("opencl", 4)), blocks(kernel)[-1]
            items = prod(launch.local)
            features = {n: (a, b) for n, a, b, _ in gpu_features(sketch.func, main, machine)}
            for sizes in CASES[name][1]:
                dims = {v: const(sizes[v.name]) for v in func.symbols}
                env = {**dims, **{t: const(values[t.name]) for t in sketch.tunables}}
                values_of = {n: (number(a, env), number(b, env)) for n, (a, b) in features.items() if n in PLACED}
                groups = prod(number(e, dims) for e in launch.grid)
                at_once = placed(machine, items, values_of["gpu_shared"][0], values_of["gpu_registers"][0])
                room = at_once * machine.workers
                waves = len(range(0, groups, room))
                assert {n: x for n, x in values_of.items() if n not in ("gpu_shared", "gpu_registers")} == {
                    "gpu_items": (items, 1),
                    "gpu_groups": (groups, 1),
                    "gpu_at_once": (at_once, 1),
                    "gpu_occupancy": (at_once * items, machine.sm_max_threads),
                    "gpu_waves": (waves, 1),
                    "gpu_wave_use": (groups, waves * room),
                }, f"{sketch.name} {values} {sizes}"


def placed(machine: HardwareInfo, items: int, shared: int, registers_each: int) -> int:
    """Groups that find room on one multiprocessor, one after the other."""
    warps = -(-items // machine.warp)
    each = {
        "sm_max_threads": warps * machine.warp,
        "sm_shared_bytes": shared + machine.reserved_bytes,
        "sm_max_groups": 1,
    }
    each["sm_registers"] = warps * machine.warp * (-(-registers_each // REGISTER_GRANULE) * REGISTER_GRANULE)
    left = {k: int(getattr(machine, k)) for k in each}
    count = 0
    while all(v >= each[k] for k, v in left.items()):
        left, count = {k: v - each[k] for k, v in left.items()}, count + 1
    return count


def test_gpu_features_exist_on_gpus_only() -> None:
    of = {m: FeatureFunction(sketches_of("pointwise 1", m)[1][0], MACHINES[m]).names for m in MACHINES}
    own = [n for n in of["gpu"] if n.startswith("gpu_")]
    assert of["gpu"] == (*of["c"], *own) and of["c"] == of["opencl"] and len(own) > 10
