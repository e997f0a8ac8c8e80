"""Tests of PoCL's serial driver: where it is offered, and what runs there."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.support.opencl_drivers import DRIVERS

from relax_tune.errors import BuildError
from relax_tune.runtime.device import pocl
from relax_tune.runtime.device.opencl import OpenCLDevice, all_devices
from relax_tune.runtime.program.program import KernelSource

pytest.importorskip("pyopencl")

SCRIPT = """
import numpy as np
from relax_tune.runtime.device.opencl import OpenCLDevice, all_devices
from relax_tune.runtime.program.program import KernelSource
device = OpenCLDevice()
print(sum("PoCL" in name for name, _ in all_devices()), dict(device.info.limits)["serial_launches"])
source = "kernel void f(global float* a) { a[get_group_id(0)] += 1.0f; }"
buffer = device.alloc(64)
device.upload(buffer, np.zeros(16, np.float32))
handle = device.compile([KernelSource("f", "opencl", source)])["f"]
one, many = (device.bind(handle, [buffer], [], (n,), (1,)) for n in (1, 16))
seen = [device.upload(buffer, np.zeros(16, np.float32))]
one(); one(); before = device._busy
many(); one(); after = device._busy
print(before, after, int(device.download(buffer, np.dtype("f4"), (16,)).sum()), device._busy)
"""


def run(**environment: str) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if name != "POCL_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=kept | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.process
def test_single_groups_run_in_the_calling_thread_until_others_are_under_way() -> None:
    count, *others = run()
    assert count.endswith(" 1") and others == ["False True 19 False"]


@pytest.mark.process
def test_devices_of_the_user_are_kept() -> None:
    assert run(POCL_DEVICES="pthread") == ["1 0", "True True 19 False"]
    assert run(POCL_DEVICES="pthread basic") == ["1 1", "False True 19 False"]


@pytest.mark.process
@pytest.mark.drivers
def test_another_pocl_leaves_the_default_device_as_before(tmp_path: Path) -> None:
    other = next(d for d in DRIVERS if d.linked == "pocl")
    offered = other.environment(tmp_path)
    if offered is None:
        pytest.skip(f"{other.name} is not installed: {other.install}")
    assert run(**offered) == ["2 1", "False True 19 False"]
    (tmp_path / "one.icd").unlink()
    assert run(OCL_ICD_VENDORS=f"{tmp_path}/") == ["1 1", "False True 19 False"]


def test_the_variable_is_set_for_the_call_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POCL_DEVICES", raising=False)
    seen: list[tuple[Path, str]] = []
    monkeypatch.setattr(pocl, "_wheel_library", lambda: tmp_path)
    monkeypatch.setattr(pocl, "_ask_for_devices", lambda library: seen.append((library, os.environ["POCL_DEVICES"])))
    monkeypatch.setattr(pocl, "_asked", [])
    pocl.offer_serial_driver()
    pocl.offer_serial_driver()
    assert seen == [(tmp_path, "pthread basic")] and "POCL_DEVICES" not in os.environ
    monkeypatch.setenv("POCL_DEVICES", "pthread")
    monkeypatch.setattr(pocl, "_asked", [])
    pocl.offer_serial_driver()
    assert len(seen) == 1 and os.environ["POCL_DEVICES"] == "pthread"


def test_libraries_without_drivers_are_not_asked(tmp_path: Path) -> None:
    (tmp_path / "libpocl.so").write_text("no library")
    assert not pocl._ask_for_devices(tmp_path / "libpocl.so")
    assert not pocl._ask_for_devices(Path(ctypes.util.find_library("c") or "libc.so.6"))


@pytest.mark.parametrize(
    ("chosen", "usable", "found"),
    [(None, 8, "1"), ("0", 8, "0"), (None, 7, None)],
    ids=["usual", "chosen", "restricted"],
)
def test_threads_are_pinned_where_every_processor_is_usable(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, usable: int, found: str | None
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(pocl.host, "usable_cpus", lambda: usable)
    monkeypatch.setattr(pocl.host, "cpu_quota", lambda: None)
    monkeypatch.setattr(os, "environ", {} if chosen is None else {"POCL_AFFINITY": chosen})
    pocl.choose_threads()
    assert os.environ.get("POCL_AFFINITY") == found


@pytest.mark.parametrize(
    ("quota", "given", "expected"),
    [
        (None, {}, {"POCL_AFFINITY": "1"}),
        (2.5, {}, {"POCL_MAX_PTHREAD_COUNT": "2", "POCL_CPU_MAX_CU_COUNT": "2"}),
        (None, {"OMP_NUM_THREADS": "3"}, {"POCL_MAX_PTHREAD_COUNT": "3", "POCL_CPU_MAX_CU_COUNT": "3"}),
        (2.5, {"POCL_MAX_PTHREAD_COUNT": "4"}, {}),
    ],
    ids=["whole machine", "quota", "OMP_NUM_THREADS", "chosen"],
)
def test_quota_and_omp_num_threads_limit_threads_of_pocl(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, given: dict[str, str], expected: dict[str, str]
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(pocl.host, "usable_cpus", lambda: 8)
    monkeypatch.setattr(pocl.host, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "environ", dict(given))
    pocl.choose_threads()
    assert os.environ == given | expected


@pytest.mark.process
def test_limited_threads_are_the_workers_of_the_device() -> None:
    """In tests, too: `test_threads_of_pocl_have_a_processor_each` runs without a limit."""
    script = (
        "from relax_tune.runtime.device.opencl import OpenCLDevice\nprint(dict(OpenCLDevice().info.limits)['workers'])"
    )
    limited = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=limited, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.process
def test_threads_of_pocl_have_a_processor_each() -> None:
    script = SCRIPT + (
        "import os\n"
        "places = [sorted(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')]\n"
        "print(sorted({p[0] for p in places if len(p) == 1}) == list(range(os.cpu_count())))\n"
    )
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("POCL_DEVICES", "POCL_AFFINITY", "OMP_NUM_THREADS")
    }
    if len(os.sched_getaffinity(0)) != os.cpu_count():
        pytest.skip("this process may not use every processor")
    done = subprocess.run([sys.executable, "-c", script], env=kept, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True"


LINKED = """
#include <stdio.h>
__attribute__((constructor)) static void started(void) { fclose(fopen("RAN", "w")); }
"""


@pytest.mark.opencl
@pytest.mark.ccompiler
def test_library_of_the_current_folder_is_not_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = OpenCLDevice(next((name for name, _ in all_devices() if "Portable" in name), None))
    if not device.in_process:
        pytest.skip("needs PoCL")
    monkeypatch.chdir(tmp_path)
    kernel = KernelSource(
        "f", "opencl", f"kernel void f(global float* a) {{ a[0] = {os.getpid()}.5f; }}"
    )  # in no cache
    (tmp_path / "evil.c").write_text(LINKED)
    subprocess.run(["gcc", "-fPIC", "-c", "evil.c"], check=True)
    (tmp_path / "libgcc_s.so.1").write_text("INPUT(evil.o)")
    buffer = device.alloc(64)
    with pytest.raises(BuildError, match=r"without libgcc_s\.so\.1"):
        device.bind(device.compile([kernel])["f"], [buffer], [], (1,), (1,))()
        device.download(buffer, np.dtype("f4"), (16,))
    assert not (tmp_path / "RAN").exists()
    (tmp_path / "libgcc_s.so.1").unlink()
    device.compile([kernel])
