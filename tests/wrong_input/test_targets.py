"""Devices that are not there and compilers that do not work: said at once, by name, with what there is; nothing is left behind."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.wrong_input.tiny_model import paragraph

from relax_tune.errors import BuildError, RelaxTuneError
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.device.device_class import DeviceFailure
from relax_tune.runtime.device.registry import list_devices, open_device
from relax_tune.runtime.program.program import KernelSource

needs_compiler = pytest.mark.ccompiler


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(folder))
    monkeypatch.delenv("CC", raising=False)
    return folder


def refused(spec: str) -> str:
    with pytest.raises(RelaxTuneError) as caught:
        open_device(spec).close()
    text = paragraph(caught.value)
    assert ";" in text
    return text


def left_in(cache: Path) -> list[str]:
    """What building left behind."""
    return sorted(str(p.relative_to(cache)) for p in cache.rglob("*") if not p.is_dir() or p.name.startswith("."))


@pytest.mark.parametrize(
    "spec",
    [
        "cuda:",
        "cuda:-1",
        "cuda:0x1",
        "cuda:٣",
        "opencll",
        "OpenCL",
        "C",
        "c:",
        "c:no such processor",
        "opencl:",
        "",
        " c",
        "metal",
        "x" * 5000,
        "c\n",
    ],
)
def test_unknown_target_error_lists_known_targets(cache: Path, spec: str) -> None:
    text = refused(spec)
    assert (
        text.startswith(
            "expected a device c, c:PART, c:wasm32-node, cuda, cuda:NUMBER, webgpu, webgpu:PART, opencl or opencl:PART, got "
        )
        and "; there are: c" in text
    )


def test_target_of_wrong_type_is_refused(cache: Path) -> None:
    for value in (None, 3, b"c", ["c"]):
        assert "expected the name of a device, got a" in refused(value)  # type: ignore[arg-type]


@pytest.mark.opencl
def test_unknown_opencl_device_error_lists_devices() -> None:
    text = refused("opencl:NoSuch")
    assert "expected one device matching 'NoSuch', got: " in text and "Portable Computing Language" in text
    assert "choose with opencl:PART" in text
    assert "Portable Computing Language" in refused("metal")


def other_process(code: str, **environment: str) -> str:
    """What a process with another environment says of a device (drivers read theirs once)."""
    script = (
        "from relax_tune.errors import RelaxTuneError\n"
        "from relax_tune.runtime.device.registry import open_device\n"
        f"try: open_device({code!r})\nexcept RelaxTuneError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.process
def test_unavailable_gpu_error_states_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    monkeypatch.setitem(sys.modules, "pycuda", None)
    for spec in ("cuda", "cuda:7"):
        assert "expected the package pycuda, got" in refused(spec) and "pip install 'relax-tune[cuda]'" in refused(spec)
    assert "cuda" in [e.spec for e in list_devices() if isinstance(e, DeviceFailure)]


@pytest.mark.process
@pytest.mark.opencl
def test_no_opencl_device_at_all() -> None:
    text = other_process("opencl", OCL_ICD_VENDORS="/nonexistent", OPENCL_VENDOR_PATH="/nonexistent")
    if not text:
        pytest.skip("this loader finds its platforms in another way")
    assert "pip install 'relax-tune[opencl]'" in text


@pytest.mark.process
@pytest.mark.opencl
def test_unwritable_opencl_cache_error_names_the_variable() -> None:
    text = other_process("opencl:Portable", POCL_CACHE_DIR="/proc/nothing/here")
    if not text:
        pytest.skip("this PoCL needs no cache")
    assert "point POCL_CACHE_DIR at a writable folder" in text


def program(folder: Path, name: str, script: str) -> str:
    """An executable shell script."""
    path = folder / name
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


GCC_LIKE = 'case "$*" in *help=target*) echo "  -march=x"; exit 0;; *--version*) echo "gcc 1"; exit 0;; esac\n'


@needs_compiler
@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("exit 1\n", "got exit code 1"),
        ("exit 0\n", "does not answer like it"),
        ("kill -9 $$\n", "got exit code -9"),
        ('printf "\\377\\376 hello\\n"\n', "does not answer like it"),
        ('echo "clang version 17"\n', "got clang in CC="),
        (GCC_LIKE + "exit 0\n", "it wrote none and gave no error"),
        (GCC_LIKE + 'printf "\\377: no\\nmath.h: none\\n" >&2; exit 4\n', "exit code 4: \ufffd: no math.h: none; install what it misses"),
        (GCC_LIKE + 'for a in "$@"; do case $a in *.so) echo junk > "$a";; esac; done\n', "expected a library that can be loaded"),
    ],
)  # fmt: skip
def test_broken_compiler_error_names_compiler(
    cache: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    monkeypatch.setenv("CC", program(cache.parent, "cc", script))
    with pytest.raises(RelaxTuneError, match="device 'c' cannot be opened: ") as caught:
        open_device("c")
    text = paragraph(caught.value)
    assert says in text and cache.parent.name in text
    assert not cache.exists() or left_in(cache) == []


@needs_compiler
@pytest.mark.parametrize("name", ["no-such-compiler", "/no/such/gcc", "gcc -m64", "/dev/null", "/tmp", " "])
def test_missing_compiler_error_names_variable(cache: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("CC", name)
    text = refused("c")
    assert f"CC={name}; set CC=gcc or unset it" in text and not cache.exists()


def test_no_compiler_on_the_path(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache.parent))
    text = refused("c")
    assert "expected gcc, got no gcc or cc on PATH; install it" in text and not cache.exists()
    failures = {f.spec: f.reason for f in list_devices() if isinstance(f, DeviceFailure)}
    assert "no gcc or cc on PATH" in failures["c"]


@needs_compiler
def test_unwritable_compiler_cache_error_names_the_variable(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where the folder should be")
    for folder in (cache, cache / "below", Path("/proc/nothing/here"), Path("/dev/null")):
        monkeypatch.setenv("RELAX_TUNE_CACHE", str(folder))
        text = refused("c")
        assert (
            f"expected to write compiled kernels to {folder}" in text and "point RELAX_TUNE_CACHE at a writable" in text
        )
    assert cache.read_text() == "a file where the folder should be"


@needs_compiler
def test_a_user_without_a_home(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELAX_TUNE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert "point RELAX_TUNE_CACHE at a writable folder" in refused("c")


KERNEL = KernelSource("twice", "c", "void twice(float* restrict x) { x[0] *= 2.0f; }\n")


@needs_compiler
def test_refused_source_leaves_no_file_in_the_cache(cache: Path) -> None:
    device = CDevice()
    before = left_in(cache)
    for source, says in (("void twice(float* x) { this is no C }\n", "twice:1"), ("", "defines no such function")):
        with pytest.raises(BuildError, match=says):
            device.compile([KernelSource("twice", "c", source)])
    assert [name for name in left_in(cache) if not name.endswith(".so")] == []
    assert before == [name for name in left_in(cache) if name in before]


@pytest.mark.process
@needs_compiler
@pytest.mark.parametrize("contents", [b"", b"\x7fELF", b"text", bytes(4096)])
def test_damaged_cached_kernels_are_made_anew(cache: Path, contents: bytes) -> None:
    CDevice().compile([KERNEL])
    for path in cache.rglob("*.so"):
        path.unlink()  # this process has it mapped: a new file, not new contents
        path.write_bytes(contents)
    code = (
        "from relax_tune.runtime.device.c import CDevice\n"
        "from relax_tune.runtime.program.program import KernelSource\n"
        f"print(sorted(CDevice().compile([{KERNEL!r}])))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "['twice']\n", done.stderr
    assert all(path.stat().st_size > 4096 for path in cache.rglob("*.so"))
