"""Compiled libraries that a crash cut short or altered: compiled again, never loaded."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_tune.errors import RelaxTuneWarning
from relax_tune.runtime.device.binaries import Binaries, seal, sealed_content
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.device.wasm.device import WasmDevice
from relax_tune.runtime.program.program import KernelSource

Damage = Callable[[bytes], bytes]
DAMAGES: dict[str, Damage] = {
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "elf header": lambda data: data[:64],
    "a page": lambda data: data[:4096],
    "half": lambda data: data[: len(data) // 2],
    "all but a byte": lambda data: data[:-1],
    "all but the seal": lambda data: data[:-64],
    "zeros": lambda data: bytes(len(data)),
    "zeros of the second half": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "zero page": lambda data: data[:4096] + bytes(4096) + data[8192:],
    "flipped byte": lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
    "flipped byte of the seal": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "another byte": lambda data: data + b"\0",
    "twice": lambda data: data + data,
}
KERNELS = [KernelSource("two", "c", "int two(void) { return 2; }")]
damages = pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))


def replace(file: Path, damage: Damage) -> None:
    """Damage a copy in the file's place: this process has the file itself mapped."""
    copy = file.with_suffix(".copy")
    copy.write_bytes(damage(file.read_bytes()))
    copy.replace(file)


@damages
def test_sealed_content_of_a_damaged_file_is_none(tmp_path: Path, damage: Damage) -> None:
    file, content = tmp_path / "f", bytes(range(256)) * 40
    file.write_bytes(content)
    assert sealed_content(file) is None
    seal(file)
    assert sealed_content(file) == content
    file.write_bytes(damage(file.read_bytes()))
    assert sealed_content(file) is None


def test_sealed_content_of_missing_or_writable_file_is_none(tmp_path: Path) -> None:
    assert sealed_content(tmp_path / "none") is None
    file = tmp_path / "f"
    file.write_bytes(b"content")
    seal(file)
    file.chmod(0o666)
    assert sealed_content(file) is None


@pytest.mark.ccompiler
@pytest.mark.process
@damages
def test_c_device_compiles_damaged_library_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Damage
) -> None:
    """A child process loads it: a library cut short ends the process that reads its missing pages (SIGBUS)."""
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path))
    CDevice().compile(KERNELS)
    for file in (tmp_path / "c").glob("*.so"):
        replace(file, damage)
    code = (
        "from relax_tune.runtime.device.c import CDevice; from relax_tune.runtime.program.program import KernelSource; "
        "two = CDevice().compile([KernelSource('two', 'c', 'int two(void) { return 2; }')])['two']; "
        "import ctypes; two.restype = ctypes.c_int; print(two())"
    )
    first, second = (subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(2))
    assert (first.returncode, first.stdout) == (0, "2\n"), first.stderr
    assert "compiled again" in first.stderr
    assert (second.returncode, second.stdout, second.stderr) == (0, "2\n", "")


@pytest.mark.ccompiler
@pytest.mark.process
def test_c_device_in_processes_at_once_leaves_whole_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path))
    code = "from relax_tune.runtime.device.c import CDevice; CDevice()"
    running = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(3)]
    assert [process.communicate()[1] for process in running] == [b""] * 3
    libraries = list((tmp_path / "c").glob("*.so"))
    assert libraries and all(sealed_content(file) is not None for file in libraries)
    assert [p for p in (tmp_path / "c").iterdir() if p.suffix != ".so"] == []


@pytest.mark.ccompiler
@pytest.mark.process
def test_c_device_on_whole_cache_compiles_nothing_and_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path))
    CDevice().compile(KERNELS)
    before = {p.name: p.stat().st_ino for p in (tmp_path / "c").iterdir()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CDevice().compile(KERNELS)
    assert {p.name: p.stat().st_ino for p in (tmp_path / "c").iterdir()} == before


@pytest.mark.cross
@pytest.mark.process
@pytest.mark.skipif(
    not all(map(shutil.which, ("clang", "wasm-ld", "node"))), reason="there is no clang with lld, or no node"
)
@pytest.mark.parametrize("name", ["empty", "half", "zeros", "flipped byte"])
def test_wasm_device_compiles_damaged_module_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path))
    WasmDevice().close()
    files = list((tmp_path / "wasm").glob("*.o"))
    for file in files:
        replace(file, DAMAGES[name])
    with pytest.warns(RelaxTuneWarning, match="compiled again"):
        WasmDevice().close()
    assert files and all(sealed_content(file) is not None for file in files)


@damages
def test_binaries_of_a_damaged_file_are_missing(tmp_path: Path, damage: Damage) -> None:
    kept = Binaries(tmp_path)
    kept.store("k", bytes(range(256)) * 40, {"registers": 3})
    (tmp_path / "k").write_bytes(damage((tmp_path / "k").read_bytes()))
    assert kept.find("k") is None
