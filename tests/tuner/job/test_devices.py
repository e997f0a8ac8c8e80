"""Builds for a browser that is not at hand, by its records."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.support.tuner_models import feed_forward

from relax_tune.database.records import Target
from relax_tune.database.store import MemoryStore
from relax_tune.errors import UserError
from relax_tune.runtime.device.quirks import with_quirks
from relax_tune.tuner.job.device_job import build_here, device_job
from relax_tune.tuner.job.devices import device_info
from relax_tune.tuner.settings import Settings

FACTS = {"adapter": "GPU", "agent": "Chrome", "kind": "webgpu", "platform": "browser", "timer": "timestamp-query"}
LIMITS = {
    "max_group_size": 256, "max_local_bytes": 16384, "max_bindings": 8, "max_groups": 65535, "max_group_x": 256, "max_group_y": 256,
    "max_group_z": 64, "max_binding_bytes": 1 << 27, "vector_bits": 128, "max_vector_lanes": 4, "registers": 255, "l2_bytes": 0,
    "l3_bytes": 0,
}  # fmt: skip
PHONE = Target(
    "webgpu", "adreno in Chrome 140", tuple(FACTS.items()), tuple(with_quirks("webgpu", FACTS, LIMITS).items())
)
NATIVE = Target("webgpu", "adreno", (("kind", "webgpu"), ("platform", "Vulkan IntegratedGPU")))


def store_of(*targets: Target) -> MemoryStore:
    store = MemoryStore()
    for target in targets:
        store.add_target(target)
    return store


def test_browser_with_records_is_a_device_to_build_for() -> None:
    info = device_info("webgpu:browser", store_of(NATIVE, PHONE))
    assert Target(info.kind, info.name, info.fingerprint, info.limits).key == PHONE.key
    assert info.libraries == ()
    other = replace(PHONE, name="mali in Firefox 133")
    assert device_info("webgpu:browser:firefox", store_of(PHONE, other)).name == other.name


@pytest.mark.parametrize(
    ("targets", "spec", "found"),
    [
        ((), "webgpu:browser", "got none; `relax-tune tune MODEL --target webgpu --browser HOST:PORT` makes them"),
        ((NATIVE,), "webgpu:browser", "got none"),
        ((PHONE,), "webgpu:browser:mali", "got adreno in Chrome 140; choose with webgpu:browser:PART"),
        (
            (PHONE, replace(PHONE, name="mali in Firefox 133")),
            "webgpu:browser",
            "got adreno in Chrome 140; mali in Firefox 133; choose with webgpu:browser:PART, a part of its name",
        ),
    ],
)
def test_browser_without_records_or_one_of_several_is_refused(
    targets: tuple[Target, ...], spec: str, found: str
) -> None:
    with pytest.raises(UserError, match=rf"{spec}: .*one browser's device .*{re.escape(found)}"):
        device_info(spec, store_of(*targets))


def test_build_for_browser_without_self_test_says_so() -> None:
    store = store_of(PHONE)
    settings = Settings(target="webgpu:browser", self_test=False)
    built = build_here(device_job(feed_forward(), device_info(settings.target, store), store, settings), "generic")
    assert built.notes[0] == (
        "webgpu:browser: a browser that is described, not at hand: nothing is timed; no kernel ran"
    )
    assert {kernel.language for program in built.programs.values() for kernel in program.kernels} == {"webgpu"}
