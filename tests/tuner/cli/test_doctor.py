"""The doctor: what it says of variables, folders, quotas and devices; that its advice names what it should."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from relax_tune.runtime.device import host
from relax_tune.runtime.device.c import CDevice
from relax_tune.runtime.device.service_kernels import C_KERNELS
from relax_tune.tuner.cli import doctor
from relax_tune.tuner.cli.doctor import PACKAGES, THREAD_VARIABLES, Finding, examine, probe, thread_advice

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("OMP_NUM_THREADS", "1", "1 of 4 processors"),
        ("OMP_NUM_THREADS", "9", "no more threads"),
        ("OMP_NUM_THREADS", "2,1", "2 of 4"),
        ("OMP_THREAD_LIMIT", "2", "2 of 4"),
        ("POCL_MAX_PTHREAD_COUNT", "1", "1 of 4"),
        ("OMP_DYNAMIC", "TRUE", "unset"),
        ("OMP_PROC_BIND", "close", "inherit"),
        ("GOMP_CPU_AFFINITY", "0-3", "inherit"),
        ("OMP_WAIT_POLICY", "ACTIVE", "spin"),
        ("GOMP_SPINCOUNT", "30000000", "spin"),
        ("OPENBLAS_NUM_THREADS", "1", "OMP_NUM_THREADS"),
        ("POCL_DEVICES", "basic", "one thread"),
    ],
)
def test_thread_advice_for_slow_variable_is_given(name: str, value: str, says: str) -> None:
    assert name in THREAD_VARIABLES and says in thread_advice(name, value, 4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OMP_NUM_THREADS", "4"),
        ("OMP_NUM_THREADS", "many"),
        ("OMP_THREAD_LIMIT", "100"),
        ("OMP_DYNAMIC", "false"),
        ("OMP_PROC_BIND", "false"),
        ("OMP_WAIT_POLICY", "passive"),
        ("GOMP_SPINCOUNT", "0"),
        ("POCL_DEVICES", "pthread"),
        ("POCL_DEVICES", "pthread basic"),
    ],
)
def test_thread_advice_for_harmless_variable_is_empty(name: str, value: str) -> None:
    assert thread_advice(name, value, 4) == ""


def test_every_package_of_an_extra_is_looked_for() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    known = {name: extra for name, (extra, _) in PACKAGES.items()}
    for extra, needs in extras.items():
        for need in needs if extra not in ("dev", "cuda") else ():
            name = re.split(r"[\[<>=;~ ]", need)[0]
            assert name == "relax-tune" or need in extras.get(known.get(name, ""), ()), need


@pytest.mark.ccompiler
def test_doctor_of_device_with_wrong_results_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe("c", "c") is None
    monkeypatch.setattr(CDevice, "service", replace(C_KERNELS, probe="void probe(float *a) { a[3] = 9.0f; }\n"))
    assert "9.0" in (probe("c", "c") or "")
    monkeypatch.setattr(CDevice, "service", replace(C_KERNELS, probe="void probe(float *a) { no such thing }\n"))
    assert "refused the source" in (probe("c", "c") or "")
    assert "abacus" in (probe("abacus", "c") or "")


def named(findings: list[Finding], area: str, name: str) -> Finding:
    (found,) = [f for f in findings if (f.area, f.name) == (area, name)]
    return found


@pytest.mark.process
def test_the_whole_examination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_devices", list)  # devices take long; they have tests of their own
    missing = f"sqlite:///{tmp_path / 'none.db'}"
    found = examine(missing, {"OMP_DYNAMIC": "true", "CC": "some-cc"})
    assert named(found, "threads", "OMP_DYNAMIC").state == "advice"
    assert "CC=some-cc" in named(found, "compiler", "C").result
    assert named(found, "database", str(tmp_path / "none.db")).state == "ok"
    assert "GiB free" in named(found, "database", "folder").result and not (tmp_path / "none.db").exists()
    assert named(examine("mysql://x/y", {}), "database", "mysql://x/y").state == "missing"
    for finding in found:
        assert (finding.state == "ok") == (finding.advice == ""), finding


@pytest.mark.process
def test_little_space_and_a_busy_machine_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "find_devices", list)
    monkeypatch.setattr(doctor, "SPACE", 1 << 60)
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (float(host.usable_cpus()), 0.0, 0.0))
    found = examine(f"sqlite:///{tmp_path / 'none.db'}", {})
    assert "free some space" in named(found, "compiler", "cache").advice
    assert "quiet" in named(found, "machine", "load").advice
