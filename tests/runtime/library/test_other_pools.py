"""Threads of libraries and of PoCL do not spin beside the threads of kernels."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.ccompiler,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not tell the states of threads"),
]

# Prints the names of threads that are not asleep soon after a product, in every one of many trials: those of a pool that spins.
CHILD = """
import os, sys, time
from pathlib import Path
import numpy as np
from relax_tune.runtime.device.registry import open_device
from relax_tune.runtime.library.registry import open_libraries

library, target = sys.argv[1:]
device = open_device(target)
buffers = [device.alloc(4 * 256 * 256) for _ in range(3)]
for buffer in buffers:
    device.upload(buffer, np.ones((256, 256), np.float32))
if library == "pocl":
    from relax_tune.runtime.program.program import KernelSource
    text = "kernel void probe(global float* a) { a[get_global_id(0)] += 1.0f; }"
    launch = device.bind(device.compile([KernelSource("probe", "opencl", text)])["probe"], buffers[:1], [], [1024], [64])
else:
    routine = {"openblas": "openblas.sgemm", "onednn": "onednn.matmul"}[library]
    epilogue = [0] * 7 if library == "onednn" else []
    launch = open_libraries()[library].bind(routine, device, buffers, [256, 256, 256, 0, 0, 256, 256, 256, *epilogue])

def awake():
    found = set()
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != os.getpid() and (task / "stat").read_text().rpartition(")")[2].split()[0] == "R":
            found.add(task.name)
    return found

spinning = None
for _ in range(100):
    launch()
    device.synchronize()
    time.sleep(0.001)
    spinning = awake() if spinning is None else spinning & awake()
print(f"{len(list(Path('/proc/self/task').iterdir()))} threads, {len(spinning)} of them spin")
"""
PACKAGES = {"openblas": "scipy_openblas32", "pocl": "pyopencl"}


def spinning(library: str, target: str, **variables: str) -> str:
    """Return how many threads a process has and how many of them spin while nothing runs."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "POCL_"))}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, library, target],
        capture_output=True,
        text=True,
        timeout=300,
        env={**own, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("library", "target"),
    [
        pytest.param("openblas", "c"),
        pytest.param("onednn", "c", marks=pytest.mark.onednn),
        pytest.param("openblas", "opencl", marks=pytest.mark.opencl),
        pytest.param("pocl", "opencl", marks=pytest.mark.opencl),
    ],
)
def test_no_other_pool_spins(library: str, target: str) -> None:
    if library in PACKAGES and importlib.util.find_spec(PACKAGES[library]) is None:
        pytest.skip(f"needs the package {PACKAGES[library]}")
    found = spinning(library, target)
    assert found.endswith(" 0 of them spin"), found


@pytest.mark.onednn
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor has no second thread")
def test_spinning_pool_is_found() -> None:
    found = spinning("onednn", "c", OMP_WAIT_POLICY="active")
    assert not found.endswith(" 0 of them spin"), found
