"""The table of quirks: where its entries apply, and what follows from them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.opencl_drivers import device_name

from relax_tune.errors import BuildError
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.device.c_compiler import find_compiler
from relax_tune.runtime.device.quirks import QUIRKS, Quirk, quirks_of, refusal, with_quirks
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.program.program import KernelSource
from relax_tune.schedules.target import HardwareInfo

WHEEL = {"platform": "Portable Computing Language OpenCL 3.0 PoCL 3.0-rc2  Linux, LLVM 14.0.6"}
RUSTICL = {"platform": "rusticl OpenCL 3.0 ", "device": "llvmpipe (LLVM 15.0.6, 256 bits)", "driver": "22.3.6"}
INTEL = {"platform": "Intel(R) OpenCL OpenCL 3.1 LINUX", "device": "Intel(R) Xeon(R) Processor"}
GCC = {"compiler": "gcc (Debian 12.2.0-14+deb12u1) 12.2.0"}
FOUND = [
    *(("opencl", {"platform": f"PoCL {v}"}) for v in ("1.8", "2.0", "3.0", "3.1", "5.0", "6.0")),
    *(("c", {"compiler": f"gcc {v}.2.0"}) for v in (11, 12, 13)),
    ("opencl", WHEEL), ("opencl", RUSTICL), ("c", GCC), ("opencl", {"platform": "Oclgrind 21.10"}), ("opencl", {}), ("c", {}),
]  # fmt: skip


def names(kind: str, fingerprint: dict[str, str]) -> set[str]:
    return {q.name for q in quirks_of(kind, fingerprint)}


def test_quirks_have_distinct_names_and_texts() -> None:
    assert len({(q.kind, q.name) for q in QUIRKS}) == len(QUIRKS)
    for q in QUIRKS:
        assert q.kind in ("c", "cuda", "opencl", "webgpu") and q.changes and q.symptom
        effects = (q.caps, q.facts, q.options, q.misreported, q.refused, q.ranks_nothing)
        assert any(effects), "facts without an effect are documented in docs/design/opencl.md"
        assert all(re.compile(pattern) for _, pattern in q.where)
        assert q.where or not q.refused, "a kind of device cannot be refused altogether"


@pytest.mark.parametrize(("kind", "fingerprint"), FOUND)
def test_caps_lower_and_facts_add(kind: str, fingerprint: dict[str, str]) -> None:
    told = {"max_vector_lanes": 16, "workers": 2}
    limits = with_quirks(kind, fingerprint, told)
    assert limits["workers"] == 2 and limits["max_vector_lanes"] <= 16 and limits["launch_ns"] > 0
    assert with_quirks(kind, fingerprint, {"max_vector_lanes": 1})["max_vector_lanes"] == 1
    assert with_quirks(kind, fingerprint, {"launch_ns": 7})["launch_ns"] == 7, "what a device tells is right"
    facts = [key for q in quirks_of(kind, fingerprint) for key in q.facts]
    assert len(set(facts)) == len(facts), "two entries tell the same"


def test_only_old_pocl_on_unknown_processor_widens_vectors() -> None:
    assert "wide vectors" not in names("opencl", WHEEL | {"cpu": "x86_64 Intel(R) Xeon(R) Processor"})
    assert "wide vectors" in names("opencl", WHEEL | {"cpu": "x86_64 AMD EPYC 9R14"})
    assert "wide vectors" in names("opencl", WHEEL) & names("opencl", {"platform": "PoCL 1.8"})
    assert "wide vectors" not in names("opencl", {"platform": "PoCL 3.1"}) | names("opencl", {"platform": "Intel 3.0"})
    assert with_quirks("opencl", WHEEL, {"max_vector_lanes": 16})["max_vector_lanes"] == 8


def test_quirks_tell_opencl_drivers_apart() -> None:
    told = {"max_vector_lanes": 16, "vector_bits": 512, "max_group_size": 1024}
    pocl, mesa, intel = (names("opencl", driver) for driver in (WHEEL, RUSTICL, INTEL))
    assert not mesa & (pocl | intel) and "slow launches" in pocl and intel == {"launches"}
    assert HardwareInfo.from_limits("opencl", with_quirks("opencl", RUSTICL, told)).is_gpu
    assert not HardwareInfo.from_limits("opencl", with_quirks("opencl", INTEL, told)).is_gpu
    assert with_quirks("opencl", RUSTICL, told)["registers"] == 255, "the processor's are not those of a work-item"
    assert "registers" not in with_quirks("opencl", INTEL, told) | with_quirks("opencl", WHEEL, told)
    assert "work-items are lanes" not in names("opencl", RUSTICL | {"device": "AMD Radeon RX 6600"})
    assert "wrong limits of kernels" not in names("opencl", RUSTICL | {"driver": "25.0.7"})


@pytest.mark.process
@pytest.mark.parametrize(
    ("version", "word"), [("clang version 17.0.6", "clang"), ("tcc version 0.9.27 (x86_64)", "tcc")]
)
def test_wrong_compilers_are_refused(version: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "cc"
    program.write_text(f"#!/bin/sh\necho '{version}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("CC", str(program))
    found = refusal("c", {"compiler": version})
    assert isinstance(found, Quirk)
    with pytest.raises(BuildError, match=f"got {word} in CC=") as error:
        find_compiler()
    assert found.symptom in str(error.value)
    assert refusal("c", GCC) is None


@pytest.mark.ccompiler
def test_compile_with_denormal_changing_options_is_refused() -> None:
    device = CDevice()
    with pytest.raises(BuildError, match=r"kernel f .*-ffast-math: .*denormals"):
        device.compile([KernelSource("f", "c", "void f(void) {}", ("-O2", "-ffast-math"))])
    device.close()


@pytest.mark.opencl
def test_opened_device_lists_quirks() -> None:
    info = open_device(device_name("opencl")).info
    limits = dict(info.limits)
    for quirk in quirks_of(info.kind, info.fingerprint):
        assert all(limits[key] <= most for key, most in quirk.caps.items())
        assert all(limits[key] == value for key, value in quirk.facts.items())
