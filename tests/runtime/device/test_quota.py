"""Threads by the quota of control groups, of both versions: in Python, and in the team that exported libraries start."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_tune.runtime.device import host

TEAM = Path(host.__file__).with_name("team.c")
# name: (the line of the process, files below the folder of groups, processors)
GROUPS: dict[str, tuple[str, dict[str, str], float | None]] = {
    "2": ("0::/a/b", {"a/b/cpu.max": "150000 100000"}, 1.5),
    "2, around": ("0::/a/b", {"a/b/cpu.max": "300000 100000", "a/cpu.max": "200000 100000"}, 2.0),
    "2, container": ("0::/", {"cpu.max": "40000 100000"}, 0.4),
    "2, other names": ("0::/elsewhere/x", {"cpu.max": "300000 100000"}, 3.0),
    "2, no limit": ("0::/a", {"a/cpu.max": "max 100000"}, None),
    "2, damaged": ("0::/a", {"a/cpu.max": "many"}, None),
    "1": ("4:cpu,cpuacct:/a", {"cpu,cpuacct/a/cpu.cfs_quota_us": "250000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, 2.5),
    "1, link": ("4:cpuacct,cpu:/a", {"cpu/a/cpu.cfs_quota_us": "100000", "cpu/a/cpu.cfs_period_us": "50000"}, 2.0),
    "1, no limit": ("4:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, None),
    "1, other controller": ("5:cpuset:/a", {"cpuset/a/cpu.max": "100000 100000"}, None),
    "none": ("", {}, None),
}  # fmt: skip
every_group = pytest.mark.parametrize("name", GROUPS)


@pytest.fixture
def grouped(tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """Write the files of a case; return the folder of groups and the file that names those of the process."""

    def write(name: str) -> tuple[Path, Path]:
        line, files, _ = GROUPS[name]
        own, root = tmp_path / "own", tmp_path / "groups"
        own.write_text(f"7:memory:/m\n{line}\n")
        root.mkdir()
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text + "\n")
        return root, own

    return write


@every_group
def test_quota_is_the_least_of_the_groups_around(name: str, grouped: Callable[[str], tuple[Path, Path]]) -> None:
    assert host.cpu_quota(*grouped(name)) == GROUPS[name][2]


@pytest.mark.parametrize(
    "quota, asked, expected",
    [(None, "", 8), (2.5, "", 2), (0.4, "", 1), (2.5, "1", 1), (None, "3", 3), (None, "9", 8), (16.0, "many", 8), (None, "0", 8)],
)  # fmt: skip
def test_threads_are_the_least_of_processors_quota_and_setting(
    quota: float | None, asked: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "cpu_quota", lambda: quota)
    monkeypatch.setattr(host, "usable_cpus", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert host.worker_threads() == expected


@pytest.mark.process
@pytest.mark.ccompiler
@every_group
def test_team_of_an_exported_library_has_as_many_threads(
    name: str, grouped: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    root, own = grouped(name)
    source, program = tmp_path / "main.c", tmp_path / "main"
    source.write_text(
        f'#include "{TEAM}"\nint main(void) {{ printf("%d %d", quota_threads(), usual_threads()); return 0; }}\n'
    )
    paths = [f'-DTEAM_GROUPS="{root}"', f'-DTEAM_OWN_GROUPS="{own}"']
    command = [
        os.environ.get("CC", "gcc"),
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pthread",
        *paths,
        str(source),
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True)
    quota, cpus = GROUPS[name][2], host.usable_cpus()
    whole = 0 if quota is None else max(1, int(quota))
    for asked in ("", "1"):
        text = subprocess.run(
            [program], env={"OMP_NUM_THREADS": asked}, capture_output=True, text=True, check=True
        ).stdout
        assert text == f"{whole} {1 if asked else min(cpus, whole or cpus)}"
