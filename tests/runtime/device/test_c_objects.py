"""Compiled kernels for kinds of processors: which run here, what they need, and what a file may say of them."""

from __future__ import annotations

import platform
import re
from dataclasses import replace
from typing import Any

import pytest

from relax_tune.errors import ArtifactError, BuildError, UserError
from relax_tune.runtime.device import host
from relax_tune.runtime.device.binaries import cache_folder
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.device.c_objects import (
    FAMILIES,
    INTERFACE,
    CompiledObjects,
    best_objects,
    check_families,
    compile_objects,
    kernel_key,
    objects_from_json,
    why_unfit,
)
from relax_tune.runtime.program.program import KernelSource

KERNEL = KernelSource("twice", "c", "void twice(float *x) { x[0] *= 2.0f; }\n")
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86-64")


def described(name: str, flags: tuple[str, ...], machine: str = "x86_64") -> CompiledObjects:
    """Objects without code, for a C library that every system has."""
    return CompiledObjects(name, machine, flags, 0, (2, 2), "gcc", "0", {}, {"team": b"", "device": b""})


@pytest.fixture
def zen4(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system with every instruction of x86-64-v4, VNNI and glibc 2.36."""
    flags = frozenset((*FAMILIES["x86-64-v4"][1], "avx512_vnni"))
    monkeypatch.setattr(host, "cpu_flags", lambda: flags)
    monkeypatch.setattr(host, "c_library", lambda: (2, 36))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.mark.usefixtures("zen4")
def test_best_objects_of_several_have_widest_vectors() -> None:
    v2, v3, v4 = (described(name, flags) for name, (_, flags) in FAMILIES.items())
    native = described("native", (*v4.flags, "avx512_vnni"))
    newer = described("newer", (*native.flags, "amx_tile"))
    assert (
        best_objects([v2, v3]) is v3
        and best_objects([v4, v2, v3]) is v4
        and best_objects([v4, native, newer]) is native
    )
    assert not v3.uses_all() and not v4.uses_all() and native.uses_all()
    assert best_objects([newer, described("sve", (), "aarch64")]) is None


@pytest.mark.usefixtures("zen4")
def test_why_unfit_names_instructions_machine_and_c_library() -> None:
    objects = [
        described("a", ("avx2", "amx_tile")),
        described("b", (), "aarch64"),
        replace(described("c", ()), c_library=(2, 39)),
        replace(described("d", ()), sve_bits=256),
    ]
    text = why_unfit(objects)
    assert "a needs instructions amx_tile" in text and "avx2" not in text
    assert (
        "b needs a processor aarch64" in text and "c needs glibc 2.39 or newer" in text and "d needs SVE of 256" in text
    )


def test_missing_without_glibc_names_the_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "c_library", lambda: None)
    assert described("a", (), platform.machine()).missing() == ("glibc 2.2 or newer",)


@on_x86
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fpu vme de tsc msr sse sse2 pni ssse3 avx avx2 ibrs md_clear hypervisor", "sse sse2 pni ssse3 avx avx2"),
        (
            "avx512_vnni amx_tile avx_vnni sha_ni constant_tsc smep lahf_lm",
            "avx512_vnni amx_tile avx_vnni sha_ni lahf_lm",
        ),
    ],
)
def test_instruction_flags_leave_out_the_kernel_s(monkeypatch: pytest.MonkeyPatch, text: str, expected: str) -> None:
    monkeypatch.setattr(host, "cpu_flags", lambda: frozenset(text.split()))
    assert host.instruction_flags() == frozenset(expected.split())


@pytest.mark.ccompiler
def test_compiled_objects_need_the_c_library_alone() -> None:
    objects = compile_objects([KERNEL], "native")
    assert objects.missing() == () and objects.uses_all() and objects.kernels == {kernel_key(KERNEL): "0"}
    needed = {name for data in objects.libraries.values() for name in re.findall(rb"\0(\w[\w+-]*\.so[\w.]*)", data)}
    assert needed and needed <= {b"libc.so.6", b"libm.so.6", b"ld-linux-x86-64.so.2", b"ld-linux-aarch64.so.1"}
    read = objects_from_json([objects.to_json()], {f"native/{n}": data for n, data in objects.libraries.items()})
    assert read == (objects,)


@pytest.mark.ccompiler
@on_x86
def test_compile_objects_of_levels_differ() -> None:
    text = "#ifdef __AVX512F__\nvoid twice(float *x) { x[0] = 512.0f; }\n#else\nvoid twice(float *x) { x[0] = 0.0f; }\n#endif\n"
    levels = {name: compile_objects([KernelSource("twice", "c", text)], name).libraries["0"] for name in FAMILIES}
    assert levels["x86-64-v3"] != levels["x86-64-v4"]


@pytest.mark.ccompiler
def test_compile_objects_with_openmp_is_refused() -> None:
    loop = "void sum(float *x) {\n#pragma omp parallel for\n  for (int i = 0; i < 9; i++) x[i] += 1.0f;\n}\n"
    with pytest.raises(BuildError, match="OpenMP"):
        compile_objects([KernelSource("sum", "c", loop)], "native")


@pytest.mark.ccompiler
def test_device_with_objects_compiles_other_kernels() -> None:
    objects = compile_objects([KERNEL], "native")
    device = CDevice(1, [objects])
    assert device.objects is objects and device.provenance() == {"objects": "native", "libraries": 2, "compiled": 0}
    other = KernelSource("thrice", "c", "void thrice(float *x) { x[0] *= 3.0f; }\n")
    assert set(device.compile([KERNEL, other])) == {"twice", "thrice"}
    assert device.provenance() == {"objects": "native", "libraries": 4, "compiled": 1}
    device.close()


@pytest.mark.ccompiler
def test_device_with_object_of_other_content_raises() -> None:
    objects = compile_objects([KERNEL], "native")
    broken = replace(objects, libraries={**objects.libraries, "device": b"no library"})
    with pytest.raises(BuildError, match="objects native that can be loaded"):
        CDevice(1, [broken])
    assert not [f for f in (cache_folder() / "c").glob("object-*") if f.read_bytes().startswith(b"no library")]


@pytest.mark.parametrize("names", [["x86-64-v9"], ["native", ""], ["armv8-a"]])
def test_check_families_of_unknown_names_raises(names: list[str]) -> None:
    with pytest.raises(UserError, match=r"cpu: expected .*native, got"):
        check_families(names)


def test_check_families_gives_each_once() -> None:
    assert check_families(["native", "native"]) == ("native",)


ENTRY: dict[str, Any] = described("v3", ("avx2",)).to_json()
FILES = {"v3/team": b"1", "v3/device": b"2"}


@pytest.mark.parametrize(
    ("entries", "files"),
    [
        ({}, {}),
        ([1], {}),
        ([{**ENTRY, "flags": "avx2"}], FILES),
        ([{**ENTRY, "flags": [3]}], FILES),
        ([{**ENTRY, "c_library": [2]}], FILES),
        ([{**ENTRY, "kernels": {"key": "0"}}], FILES),
        ([ENTRY, ENTRY], FILES),
        ([ENTRY], {"v3/team": b"1"}),
        ([ENTRY], {**FILES, "v4/team": b"1"}),
        ([], FILES),
    ],
)
def test_objects_from_json_of_other_shape_raises(entries: object, files: dict[str, bytes]) -> None:
    with pytest.raises(ArtifactError, match=r"compiled objects|libraries of"):
        objects_from_json(entries, files)


def test_objects_from_json_leaves_out_another_interface() -> None:
    assert objects_from_json([{**ENTRY, "interface": INTERFACE + 1}], FILES) == ()
    assert objects_from_json([ENTRY], FILES)[0].name == "v3"
