"""The registry of devices: names, plug-ins, hand-written kernels."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from relax_tune.errors import BuildError, MeasureError, UserError
from relax_tune.runtime.device import registry
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.device.device_class import DeviceFailure
from relax_tune.runtime.device.registry import (
    BUILT_IN,
    concrete_name,
    device_classes,
    devices_of_class,
    find_devices,
    name_of_measured,
    open_device,
    service_kernels,
)
from relax_tune.runtime.device.service_kernels import AXIS, C_KERNELS, CUDA_KERNELS, LINE_BYTES, MARK, WGSL_KERNELS
from relax_tune.runtime.program.program import KernelSource
from relax_tune.tuner.job.devices import with_concrete_target
from relax_tune.tuner.settings import Settings

PLUGIN = """from relax_tune.runtime.device.c import CDevice

class Twin(CDevice):
    kind = {kind!r}
    forms = ("twin",)
"""


def install(folder: Path, source: str, value: str = "twin_device:Twin") -> None:
    (folder / "twin_device.py").write_text(source)
    metadata = folder / "twin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: twin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[relax_tune.devices]\ntwin = {value}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "twin_device", raising=False)
    return tmp_path


@pytest.mark.ccompiler
def test_plugin_is_opened_and_listed(site: Path) -> None:
    install(site, PLUGIN.format(kind="twin"))
    assert device_classes()[: len(BUILT_IN)] == BUILT_IN
    with pytest.raises(UserError, match=r"or twin, got 'nothing'; there are: "):
        open_device("nothing")
    device = open_device("twin")
    assert type(device).__name__ == "Twin"
    device.close()
    assert "twin" in dict(find_devices())


def test_plugin_of_a_used_kind_is_refused(site: Path) -> None:
    install(site, PLUGIN.format(kind="c"))
    with pytest.raises(BuildError, match=r"package twin, entry point relax_tune\.devices 'twin'.*'c'"):
        device_classes()


def test_plugin_of_another_class_is_refused(site: Path) -> None:
    install(site, "Twin = 3\n")
    with pytest.raises(BuildError, match="DeviceClass"):
        device_classes()


def test_unknown_kind_has_no_kernels() -> None:
    with pytest.raises(MeasureError, match="abacus"):
        service_kernels("abacus")
    assert service_kernels("c") is C_KERNELS


def test_every_built_in_class_has_all_but_eviction() -> None:
    for device_class in BUILT_IN:
        assert device_class.service.probe and device_class.service.flush and device_class.service.reference


def test_launch_shape_follows_the_axes() -> None:
    assert C_KERNELS.launch_shape(3, 64) == ((), ())
    assert CUDA_KERNELS.launch_shape(3, 64) == ((3,), (64,))
    assert WGSL_KERNELS.launch_shape(AXIS + 1, 64) == ((AXIS, 2), (64, 1))


def test_reference_kernel_gives_numpys_results(device: Device) -> None:
    service, n, k = service_kernels(device.info.kind), 300, 3
    name = "relax_tune_reference"
    kernel = device.compile([KernelSource(name, device.info.kind, service.reference)])[name]
    x = np.linspace(-1, 1, n, dtype=np.float32)
    buffers = [device.alloc(x.nbytes), device.alloc(x.nbytes)]
    device.upload(buffers[0], x)
    device.bind(kernel, buffers, [n, k], *service.launch_shape(-(-n // 256), 256))()
    expected = x
    for _ in range(k):
        expected = expected * np.float32(0.999) + np.float32(0.001)
    np.testing.assert_allclose(device.download(buffers[1], x.dtype, x.shape), expected, rtol=1e-6)


def test_flush_kernel_clears_marks(device: Device) -> None:
    service, lines, name = service_kernels(device.info.kind), 70, "relax_tune_flush"
    kernel = device.compile([KernelSource(name, device.info.kind, service.flush)])[name]
    words = np.full(lines * LINE_BYTES // 4, MARK, np.int32)
    buffer = device.alloc(words.nbytes)
    device.upload(buffer, words)
    device.bind(kernel, [buffer], [lines], *service.launch_shape(2, 64))()
    cleared = device.download(buffer, words.dtype, words.shape)
    assert not cleared[:: LINE_BYTES // 4].any() and (cleared[1 :: LINE_BYTES // 4] == MARK).all()


def test_name_without_a_fingerprint_is_the_kind() -> None:
    assert name_of_measured("c", None) == "c" and name_of_measured("abacus", {}) == "abacus"
    assert name_of_measured("c", {"cpu": "another"}) == "c"
    assert devices_of_class("c") == ["c"] and devices_of_class("c:part") == ["c:part"]


def test_failures_have_the_names_of_devices() -> None:
    for spec, entry in find_devices():
        assert not isinstance(entry, DeviceFailure) or entry.spec == spec


def test_aliases_name_the_best_device() -> None:
    assert concrete_name("opencl:PART") == "opencl:PART", "other names stay"
    if shutil.which("gcc") is not None:
        assert concrete_name("cpu") == "c"
    chosen = concrete_name("auto")
    assert chosen in ("cuda", "opencl", "c")
    try:
        gpu = concrete_name("gpu")
    except UserError as error:
        assert "device 'cuda' cannot be opened" in str(error) and chosen in ("c", "opencl")
    else:
        assert chosen == gpu or gpu == "webgpu"


def test_alias_of_no_device_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(spec: str) -> Device:
        raise UserError(f"{spec} is missing")

    monkeypatch.setattr(registry, "open_device", missing)
    with pytest.raises(UserError, match=r"target 'gpu', got none. cuda is missing; opencl"):
        concrete_name("gpu")


def test_alias_with_workers_is_refused() -> None:
    with pytest.raises(UserError, match="--target auto"):
        with_concrete_target(Settings(target="auto", scheduler="tls://127.0.0.1:8786"))
    assert with_concrete_target(Settings(target="c")).target == "c"
    assert with_concrete_target(Settings(browser="127.0.0.1:0")).target == "webgpu"


def test_default_target_is_the_best_device_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert Settings().target == "auto" and Settings(threads=2).target == "c:threads=2"
    best, said = concrete_name("auto"), list[str]()
    assert with_concrete_target(Settings(), said.append).target == best
    assert f"target {best}, chosen for auto" in said[0]
    with caplog.at_level("INFO", "relax_tune"):
        with_concrete_target(Settings())
    assert caplog.messages == said


@pytest.mark.parametrize(
    ("present", "best"),
    [
        ({"cuda": "gpu:0", "opencl": "gpu:1", "c": "cpu:a"}, "cuda"),
        ({"opencl": "gpu:1", "webgpu": "gpu:1", "c": "cpu:a"}, "opencl"),
        ({"webgpu": "gpu:1", "opencl": "cpu:a", "c": "cpu:a"}, "c"),
        ({"webgpu": "gpu:1", "opencl": "cpu:a"}, "opencl"),
    ],
)
def test_auto_takes_gpus_first_then_c(present: dict[str, str], best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(spec: str) -> Any:
        if spec not in present:
            raise UserError(f"{spec} is missing")
        return SimpleNamespace(info=SimpleNamespace(unit=present[spec]), close=lambda: None)

    monkeypatch.setattr(registry, "open_device", opened)
    assert concrete_name("auto") == best
