"""Measured kernels that attack the process that supervises them: its files, its reading of their messages, its clock."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tuner.measure.measure_programs import LIMIT_SECS, request
from tests.tuner.measure.test_local import prying

from relax_tune.tuner.measure import process_transport
from relax_tune.tuner.measure.device_process.sandbox import landlock_version
from relax_tune.tuner.measure.local import LocalRunner

pytestmark = [
    pytest.mark.process,
    pytest.mark.ccompiler,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler"),
    pytest.mark.skipif(not landlock_version(), reason="needs Linux with Landlock"),
]


@pytest.fixture
def runner() -> Iterator[LocalRunner]:
    with LocalRunner("c", lock=False) as opened:
        yield opened


def replaced(name: str, target: Path) -> str:
    """Statements that put a link in the place of a file or folder that the supervisor may use, in all folders near."""
    calls = "extern int rename(const char *, const char *), symlink(const char *, const char *);"
    return calls + "".join(
        f' rename("{place}{name}", "{place}{name}.old"); symlink("{target}", "{place}{name}");' for place in ("", "../")
    )


@pytest.mark.parametrize("name", ["device-process.log", "progress"])
def test_supervisor_follows_no_link_in_place_of_files(runner: LocalRunner, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(secret := b"secret\n" * (1 << 18))
    attack = replaced(name, victim) + " __builtin_abort();"
    prints = 'extern int puts(const char *); extern int fflush(void *); puts("printed"); fflush(0);'
    requests = [prying("attack", attack), prying("prints", f"{prints} __builtin_abort();"), request("good", "c")]
    results = runner.submit(requests).result(LIMIT_SECS)
    later = runner.submit([request("good", "c")]).result(LIMIT_SECS)
    assert victim.read_bytes() == secret
    assert [(r.id, r.stage) for r in (*results, *later)] == [
        ("attack", "crash"), ("prints", "crash"), ("good", None), ("good", None)
    ]  # fmt: skip
    assert not any("secret" in str(r.message) for r in results)


def test_supervisor_removes_no_file_of_a_link_in_place_of_arrays(runner: LocalRunner, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("x")
    results = runner.submit([prying("attack", replaced("arrays", tmp_path) + " __builtin_abort();")]).result(LIMIT_SECS)
    assert [r.stage for r in results] == ["crash"]
    assert [r.stage for r in runner.submit([request("good", "c")]).result(LIMIT_SECS)] == [None]
    assert [p.name for p in tmp_path.iterdir()] == ["victim"]


RESULT = {
    "id": "good", "status": "ok", "stage": None, "message": "", "timings": [], "checked": True, "build_secs": 0.0, "run_secs": 0.0,
    "unit": {"worker": "w", "host": "h", "unit": "u", "clock_mhz": None, "celsius": None},
}  # fmt: skip
TIMING = {
    "symbols": {},
    "samples_secs": [1.0],
    "launches_per_sample": 1,
    "regime": "hot",
    "lost": False,
    "contention": None,
}


def of_results(**changes: object) -> str:
    return json.dumps({"kind": "results", "results": json.dumps({"results": [RESULT | changes]})})


MESSAGES = {
    "no JSON": "{",
    "no object": "[]",
    "deep": "[" * 100_000,
    "long number": "9" * 10_000,
    "results of another kind": json.dumps({"kind": "results", "results": "[]"}),
    "deep results": json.dumps({"kind": "results", "results": "[" * 100_000}),
    "seconds beyond a float": of_results(build_secs=10**400),
    "half of a character": of_results(message="\ud800"),
    "count beyond 64 bits": of_results(timings=[TIMING | {"launches_per_sample": 1 << 64}]),
}


# The numbers of a device process's descriptors are those of its supervisor, which may have many open.
DESCRIPTORS = 1 << 12


def sends(data: str) -> str:
    """Statements that write bytes, the text of a C string, to all pipes of the process."""
    return (
        "extern long write(int, const void *, unsigned long); "
        f"static const char m[] = {data}; for (int f = 3; f < {DESCRIPTORS}; f++) write(f, m, sizeof m - 1);"
    )


def as_bytes(data: bytes) -> str:
    return '"' + "".join(f"\\{byte:03o}" for byte in data) + '"'


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
def test_message_written_by_a_kernel_costs_no_other_candidate(runner: LocalRunner, message: str) -> None:
    frame = len(message).to_bytes(8, "little") + message.encode()
    attack = prying("attack", f"{sends(as_bytes(frame))} for (volatile int go = 1; go;) {{ }}")
    results = runner.submit([attack, request("good", "c")]).result(LIMIT_SECS)
    assert [(r.id, r.stage) for r in results] == [("attack", "crash"), ("good", None)]


def test_message_written_to_a_pipe_with_a_high_number_reaches_the_supervisor() -> None:
    with ExitStack() as stack:
        for _ in range(100):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        runner = stack.enter_context(LocalRunner("c", lock=False))
        attack = prying(
            "attack", f"{sends(as_bytes(len('[]').to_bytes(8, 'little') + b'[]'))} for (volatile int go = 1; go;) {{ }}"
        )
        results = runner.submit([attack, request("good", "c")]).result(LIMIT_SECS)
    assert [(r.id, r.stage) for r in results] == [("attack", "crash"), ("good", None)]


def test_endless_message_of_a_kernel_takes_no_memory(runner: LocalRunner) -> None:
    size = (1 << 33).to_bytes(8, "little")
    results = runner.submit([prying("attack", sends(as_bytes(size))), request("good", "c")]).result(LIMIT_SECS)
    assert [(r.id, r.stage) for r in results] == [("attack", "crash"), ("good", None)]


def test_kernel_with_a_clock_set_ahead_is_ended_at_the_deadline(runner: LocalRunner) -> None:
    """It finds the progress that it shares with its supervisor, and lets its step begin in the future."""
    attack = (
        "extern void *fopen(const char *, const char *); extern char *fgets(char *, int, void *), *strstr(const char *, const char *); "
        'extern unsigned long strtoul(const char *, char **, int); char line[4096]; void *maps = fopen("/proc/self/maps", "r"); '
        'while (maps && fgets(line, sizeof line, maps)) if (strstr(line, "progress")) '
        "*(volatile double *)(strtoul(line, 0, 16) + 32) = 1e18; for (volatile int go = 1; go;) { }"
    )
    request_ = replace(prying("attack", attack), deadline_secs=2.0)
    results = runner.submit([request_, request("good", "c")]).result(LIMIT_SECS)
    assert [(r.id, r.stage) for r in results] == [("attack", "timeout"), ("good", None)]


def test_kernel_reporting_steps_for_ever_is_ended(runner: LocalRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_transport, "_PREPARE_SECS", 3.0)
    attack = (
        "extern void *fopen(const char *, const char *); extern char *fgets(char *, int, void *), *strstr(const char *, const char *); "
        "extern unsigned long strtoul(const char *, char **, int); extern int clock_gettime(int, void *); char line[4096]; "
        'volatile unsigned long *at = 0; long now[2]; void *maps = fopen("/proc/self/maps", "r"); '
        'while (maps && fgets(line, sizeof line, maps)) if (strstr(line, "progress")) at = (void *)strtoul(line, 0, 16); '
        "for (volatile int go = 1; go;) { clock_gettime(1, now); at[0]++; at[5]++; "
        "*(volatile double *)(at + 4) = now[0] + now[1] * 1e-9; }"
    )
    request_ = replace(prying("attack", attack), deadline_secs=1.0)
    results = runner.submit([request_]).result(LIMIT_SECS / 2)
    assert [r.stage for r in results] == ["timeout"]
    assert [r.stage for r in runner.submit([request("good", "c")]).result(LIMIT_SECS)] == [None]


def test_kernel_leaving_half_of_a_step_is_ended(runner: LocalRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor reads no step then, so it cannot know whether the step is over its deadline."""
    monkeypatch.setattr(process_transport, "_UNREADABLE_SECS", 1.0)
    attack = (
        "extern void *fopen(const char *, const char *); extern char *fgets(char *, int, void *), *strstr(const char *, const char *); "
        'extern unsigned long strtoul(const char *, char **, int); char line[4096]; void *maps = fopen("/proc/self/maps", "r"); '
        'while (maps && fgets(line, sizeof line, maps)) if (strstr(line, "progress")) ++*(volatile long *)strtoul(line, 0, 16); '
        "for (volatile int go = 1; go;) { }"
    )
    results = runner.submit([prying("attack", attack), request("good", "c")]).result(LIMIT_SECS)
    assert [(r.id, r.stage) for r in results] == [("attack", "crash"), ("good", None)]


def test_kernel_truncates_no_memory_of_the_supervisor(runner: LocalRunner) -> None:
    attack = (
        "extern int truncate(const char *, long), ftruncate(int, long); "
        f"for (int f = 0; f < {DESCRIPTORS}; f++) ftruncate(f, 0); "
        'truncate("progress", 0); truncate("../progress", 0); for (volatile int go = 1; go;) { }'
    )
    request_ = replace(prying("attack", attack), deadline_secs=2.0)
    results = runner.submit([request_, request("good", "c")]).result(LIMIT_SECS)
    assert [(r.id, r.stage) for r in results] == [("attack", "timeout"), ("good", None)]


def test_folders_nested_deeper_than_calls_are_removed() -> None:
    attack = (
        "extern int mkdir(const char *, unsigned), chdir(const char *), symlink(const char *, const char *); static int calls; "
        'for (int d = 0; !calls && d < 3000; d++) { symlink("/", "s"); mkdir("d", 0700); chdir("d"); } calls++;'
    )
    with LocalRunner("c", lock=False) as opened:
        folder = opened.transport._folder
        results = opened.submit([prying("attack", attack)]).result(LIMIT_SECS)
    assert [r.stage for r in results] == [None]
    assert folder is not None and not folder.path.exists()
