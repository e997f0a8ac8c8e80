"""Exports for processors that are not this machine's: aarch64 under qemu, wasm32 in node."""

from __future__ import annotations

import shutil
import subprocess
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.tuner_models import attention, feed_forward
from tests.tuner.export.c_exports import TEAM, build, called

from relax_tune.database.store import MemoryStore
from relax_tune.errors import BuildError, UserError
from relax_tune.ir.core.function import IRModule
from relax_tune.runtime.artifact import Artifact, load_artifact
from relax_tune.runtime.device import host
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.device.registry import open_device
from relax_tune.tuner.export.c_export import export_c
from relax_tune.tuner.job.device_job import device_job
from relax_tune.tuner.job.devices import device_info
from relax_tune.tuner.processors import PROCESSORS
from relax_tune.tuner.settings import Settings

RNG = np.random.default_rng(5)
WASI = """
import { readFile } from "node:fs/promises";
import { WASI } from "node:wasi";
const [file, folder, ...rest] = process.argv.slice(2);
const wasi = new WASI({ version: "preview1", args: [file, ...rest], preopens: { [folder]: folder }, returnOnExit: true });
const instance = await WebAssembly.instantiate(await WebAssembly.compile(await readFile(file)), wasi.getImportObject());
process.exitCode = wasi.start(instance);
"""


def floats(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def built(module: IRModule, target: str, folder: Path) -> Artifact:
    job = device_job(module, device_info(target), MemoryStore(), Settings(target=target, effort="quick"))
    artifact = load_artifact(job.artifact(job.build()).save(folder / "model.rta"))
    export_c(artifact, folder, "net")
    return artifact


def wanted(artifact: Artifact, inputs: Sequence[Any]) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its plans are another processor's
        with artifact.open("c") as model:
            return model.run(list(inputs))


def needs(*programs: str) -> None:
    missing = [p for p in programs if shutil.which(p) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def compare(artifact: Artifact, command: Sequence[str], folder: Path) -> None:
    for n in (1, 7, 128):
        x = floats(n, 24)
        (found,) = called(artifact.program, command, folder, {"n": n}, [x])
        np.testing.assert_allclose(found.reshape(n, 24), wanted(artifact, [x])[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"main: expected n <= 128, got 129"):
        called(artifact.program, command, folder, {"n": 129}, [floats(129, 24)])


@pytest.mark.cross
@pytest.mark.process
@pytest.mark.parametrize("target", ["aarch64", "aarch64-sve256"])
def test_aarch64_export_under_qemu_gives_results_of_artifact(tmp_path: Path, target: str) -> None:
    needs("aarch64-linux-gnu-gcc", "qemu-aarch64")
    artifact = built(feed_forward(), f"c:{target}", tmp_path)
    flags = PROCESSORS[target][0].split()
    build(tmp_path, tmp_path / "net", "aarch64-linux-gnu-gcc", *flags, *TEAM, "-static", main=True)
    emulator = ["qemu-aarch64", "-cpu", "max,sve256=on"] if "sve" in target else ["qemu-aarch64"]
    compare(artifact, [*emulator, str(tmp_path / "net")], tmp_path)
    text = subprocess.run(
        ["aarch64-linux-gnu-objdump", "-d", str(tmp_path / "net")], check=True, capture_output=True, text=True
    ).stdout
    assert ("ptrue" in text and "z0.s" in text) if "sve" in target else "v0.4s" in text


@pytest.mark.cross
@pytest.mark.process
def test_wasm_export_in_node_gives_results_of_artifact(tmp_path: Path) -> None:
    needs("clang", "wasm-ld", "node")
    if not Path("/usr/include/wasm32-wasi").is_dir():
        pytest.skip("not installed: wasi-libc")
    artifact = built(feed_forward(), "c:wasm32", tmp_path)
    build(tmp_path, tmp_path / "net.wasm", "clang", "--target=wasm32-wasi", "-msimd128", main=True)
    (tmp_path / "wasi.mjs").write_text(WASI)
    command = ["node", "--no-warnings", str(tmp_path / "wasi.mjs"), str(tmp_path / "net.wasm"), str(tmp_path)]
    compare(artifact, command, tmp_path)


@pytest.mark.parametrize("name", ["aarch64", "wasm32"])
def test_described_processor_decides_lanes_of_kernels(tmp_path: Path, name: str) -> None:
    artifact = built(attention(), f"c:{name}", tmp_path)
    lanes = dict(device_info(f"c:{name}").limits)["vector_bits"] // 32
    text = "".join(k.source for k in artifact.program.kernels)
    assert f"f32x{lanes}" in text and f"typedef float f32x{2 * lanes} " not in text
    assert PROCESSORS[name][0] in (tmp_path / "CMakeLists.txt").read_text()


@pytest.mark.ccompiler
@pytest.mark.process
def test_processor_of_another_name_is_not_opened() -> None:
    with pytest.raises(UserError, match=r"c, c:PART, .*, got 'c:aarch99'; .*c \("):
        open_device("c:aarch99")


def test_emulated_processor_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "emulator", lambda: "qemu-aarch64")
    with pytest.raises(BuildError, match=r"a real processor, .*got qemu-aarch64"):
        CDevice()


@pytest.mark.process
def test_emulator_is_seen_from_inside(tmp_path: Path) -> None:
    needs("aarch64-linux-gnu-gcc", "qemu-aarch64")
    source = "#include <stdio.h>\n#include <unistd.h>\n"
    source += 'int main(void) { char t[99] = {0}; return readlink("/proc/thread-self/exe", t, 98) < 0 || puts(t) < 0; }'
    (tmp_path / "who.c").write_text(source)
    subprocess.run(
        ["aarch64-linux-gnu-gcc", "-static", "-o", str(tmp_path / "who"), str(tmp_path / "who.c")], check=True
    )
    said = subprocess.run(["qemu-aarch64", str(tmp_path / "who")], check=True, capture_output=True, text=True).stdout
    assert Path(said.strip()).name.startswith("qemu-")
    assert host.emulator() is None


def test_sve_vectors_are_as_wide_as_the_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    length = tmp_path / "length"
    monkeypatch.setattr(host, "cpu_flags", lambda: frozenset(["asimd", "sve"]))
    monkeypatch.setattr(host, "_SVE_LENGTH", length)
    assert host.vector_bits() == 128 and host.vector_flags() == ()
    length.write_text("32\n")
    assert host.vector_bits() == 256 and host.vector_flags() == ("-msve-vector-bits=256",)
