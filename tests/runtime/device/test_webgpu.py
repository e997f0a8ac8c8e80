"""What is known of WebGPU adapters without having one."""

from __future__ import annotations

import sys

import pytest

from relax_tune.errors import BuildError
from relax_tune.runtime.device.device_class import DeviceFailure
from relax_tune.runtime.device.quirks import quirks_of, with_quirks
from relax_tune.runtime.device.registry import list_devices
from relax_tune.runtime.device.webgpu.device import load_wgpu, numbered


@pytest.mark.parametrize(("adapter", "wanted"), [("CPU", True), ("DiscreteGPU", False)])
def test_software_adapter_ranks_nothing(adapter: str, wanted: bool) -> None:
    found = quirks_of("webgpu", {"adapter": adapter, "device": "any"})
    assert any(q.ranks_nothing for q in found) == wanted


def test_unreported_sizes_come_from_the_table() -> None:
    assert with_quirks("webgpu", {"adapter": "DiscreteGPU"}, {})["warp"] == 32
    assert with_quirks("webgpu", {"adapter": "CPU"}, {"workers": 2})["workers"] == 2


@pytest.mark.process
def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wgpu", None)
    with pytest.raises(BuildError, match=r"package wgpu, .*'relax-tune\[webgpu\]'"):
        load_wgpu()
    found = [e for e in list_devices() if isinstance(e, DeviceFailure) and e.spec == "webgpu"]
    assert len(found) == 1 and "relax-tune[webgpu]" in found[0].reason


def test_equal_adapters_are_numbered() -> None:
    found = numbered([("one", 1), ("one", 2), ("other", 3), ("one", 4)])
    assert found == [("one", 1), ("one | #2", 2), ("other", 3), ("one | #3", 4)]
