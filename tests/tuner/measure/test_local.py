"""What only the local runner promises: supervision of its child process, and what that child is made of."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tuner.measure.measure_programs import BODIES, LIMIT_SECS, POLICY, check, kernel, program, request

from relax_tune.errors import MeasureError
from relax_tune.tuner.measure.device_process.sandbox import landlock_version
from relax_tune.tuner.measure.ledger import Blame
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.measure.messages import MeasureRequest
from relax_tune.tuner.measure.process import DeviceProcess
from relax_tune.tuner.measure.protocol import FrameReader, ProgressMap, write_frame

pytestmark = [
    pytest.mark.ccompiler,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler"),
]


@pytest.fixture(scope="module")
def runner() -> Iterator[LocalRunner]:
    with LocalRunner("c") as opened:
        yield opened


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> bool:
    give_up = time.monotonic() + 20
    while alive(pid) and time.monotonic() < give_up:
        time.sleep(0.02)
    return not alive(pid)


@pytest.mark.process
def test_missing_device_leaves_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with pytest.raises(MeasureError, match="abacus"):
            LocalRunner("abacus")
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.process
def test_device_process_compiles_no_library_of_the_device_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAX_TUNE_CACHE", str(tmp_path))

    def libraries(cache: Path) -> dict[str, int]:
        return {file.name: file.stat().st_mtime_ns for file in (cache / "c").iterdir()}

    with LocalRunner("c", lock=False) as runner:
        folder = runner.transport._folder
        assert folder is not None and len(libraries(tmp_path)) == 2
        assert libraries(folder.path / "device" / "cache") == libraries(tmp_path)


@pytest.mark.process
@pytest.mark.parametrize("spec", ["abacus", "opencl:no such device"])
def test_runner_of_missing_device_raises(spec: str) -> None:
    with pytest.raises(MeasureError, match=spec):
        LocalRunner(spec)


@pytest.mark.process
def test_runner_of_slow_device_raises(tmp_path: Path) -> None:
    # A compiler that never answers: opening the C device asks gcc for its version.
    (tmp_path / "gcc").write_text("#!/bin/sh\nsleep 600\n")
    (tmp_path / "gcc").chmod(0o755)
    slow = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with pytest.raises(MeasureError, match=r"within 1\.5 s"):
        LocalRunner("c", open_secs=1.5, environment=slow)


@pytest.mark.process
def test_the_child_imports_the_runtime_and_nothing_heavier() -> None:
    code = (
        "import sys, relax_tune.tuner.measure.device_process.start, relax_tune.tuner.measure.device_process.child\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in "
        "('xgboost', 'sqlalchemy', 'optuna', 'distributed', 'torch', 'onnx') "
        "or m.startswith(('relax_tune.ir', 'relax_tune.schedules', 'relax_tune.database'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.process
def test_close_runner_ends_process_group() -> None:
    with LocalRunner("c") as opened:
        assert opened.transport._process is not None
        pid = opened.transport._process.pid
        assert alive(pid) and os.getpgid(pid) == pid
    assert wait_until_gone(pid)


@pytest.mark.process
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "hanging"])
def test_child_of_killed_supervisor_ends(busy: bool) -> None:
    root = Path(__file__).parents[3]
    code = (
        f"import sys, time; sys.path.insert(0, {str(root)!r})\n"
        "from relax_tune.tuner.measure.local import LocalRunner\n"
        "from tests.tuner.measure.measure_programs import request\n"
        "runner = LocalRunner('c')\n"
        + ("runner.submit([request('hang', 'c')])\ntime.sleep(0.7)\n" if busy else "")
        + "print(runner.transport._process.pid, flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        assert alive(pid)
        supervisor.kill()
    assert wait_until_gone(pid)


@pytest.mark.process
def test_a_child_killed_from_outside_costs_nothing(runner: LocalRunner) -> None:
    kinds = ["good", "also-good"]
    future = runner.submit([request(kind, "c", id=f"{kind}{n}") for n in range(10) for kind in kinds])
    assert runner.transport._process is not None
    os.kill(runner.transport._process.pid, signal.SIGKILL)
    assert [result.status for result in future.result(LIMIT_SECS)] == ["ok"] * 20


@pytest.mark.process
def test_memory_corruption_does_not_fail_next_candidate(runner: LocalRunner) -> None:
    # It passes its own check, then leaves shared constants changed: the next candidate must not pay for that.
    subject = program("good", "c")
    body = (
        "t[i] = x[0]; y[i] = x[i] * w[i % 4] + t[i]; if (i == n - 1) for (int k = 0; k < 4; k++) ((float *)w)[k] = 0;"
    )
    text = kernel("vandal", body, "c")
    vandal = program("good", "c", name="vandal")
    vandal = type(vandal)(**{**{f: getattr(vandal, f) for f in vandal.__dataclass_fields__}, "kernels": (text,)})
    batch = [MeasureRequest("vandal", vandal.to_json(), (check(vandal, 64, 3),), (), POLICY)]
    batch += [MeasureRequest("good", subject.to_json(), (check(subject, 64, 4),), ({"n": 64},), POLICY)]
    found = {result.id: result for result in runner.submit(batch).result(LIMIT_SECS)}
    assert found["good"].status == "ok"


@pytest.mark.process
def test_crashes_and_hangs_lose_no_request(runner: LocalRunner) -> None:
    kinds = ["crash", "good", "hang", "crash", "also-good"]
    batch = [request(kind, "c", id=f"{at}", deadline_secs=1.0) for at, kind in enumerate(kinds)]
    stages = [result.stage for result in runner.submit(batch).result(LIMIT_SECS)]
    assert stages == ["crash", None, "timeout", "crash", None]


@pytest.mark.process
def test_kernel_taking_64_gib_fails_and_loses_no_other(runner: LocalRunner) -> None:
    results = runner.submit([request(kind, "c") for kind in ("good", "greedy", "also-good")]).result(LIMIT_SECS)
    assert [r.stage for r in results] == [None, "crash", None], results
    assert "SIGABRT" in results[1].message  # its allocation was refused


def marked(mark: str) -> list[int]:
    """Processes whose environment holds a text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


@pytest.mark.process
def test_kernel_forking_is_ended_with_all_processes() -> None:
    with LocalRunner("c") as opened:
        mark = f"TMPDIR={opened.transport._folder.path}"
        batch = [request("good", "c"), request("forking", "c", deadline_secs=3.0), request("also-good", "c")]
        results = opened.submit(batch).result(LIMIT_SECS)
        assert [r.stage for r in results] == [None, "timeout", None], results
    assert marked(mark) == []


def prying(id: str, body: str, language: str = "c") -> MeasureRequest:
    """A request for a kernel that does more than compute: statements before its loop's own."""
    subject = program("good", language, name=id)
    text = kernel(id, f"if (!i) {{ {body} }} " + BODIES["good"], language)
    subject = replace(subject, kernels=(text,))
    return MeasureRequest(id, subject.to_json(), (check(subject, 64, 3),), ({"n": 64},), POLICY)


def system_call(number: int, *arguments: str) -> str:
    """A system call in a kernel of OpenCL, which has no functions of C; its result is in `r`."""
    places = zip(("D", "S", "d"), [*arguments, "0", "0", "0"], strict=False)
    given = ", ".join([f'"a"({number}L)', *(f'"{place}"((long)({value}))' for place, value in places)])
    return f'__asm__ volatile("syscall" : "=a"(r) : {given} : "rcx", "r11", "memory");'


def pries_of_opencl(secret: Path, made: Path, port: int) -> dict[str, str]:
    def path(name: str, place: object) -> str:
        return f"char {name}[] = {{{', '.join(map(str, os.fsencode(str(place))))}, 0}};"

    trap, seen = "if (r >= 0) __builtin_trap();", path("p", secret)
    address = f"uchar a[16] = {{2, 0, {port >> 8}, {port & 255}, 127, 0, 0, 1}};"
    found = {
        "reads": f"{seen} {system_call(2, 'p')} {trap}",
        "writes": f"{path('p', made)} {system_call(2, 'p', '0101', '0600')} {trap}",
        "spies": f"{path('p', f'/proc/{os.getpid()}/environ')} {system_call(2, 'p')} {trap}",
        "connects": f"{address} {system_call(41, '2', '1')} {system_call(42, 'r', 'a', '16')} {trap}",
        "insists": f"{seen} {system_call(2, 'p')} if (r < 0) __builtin_trap();",
    }
    return {id: f"long r = -1; {body}" for id, body in found.items()}


@pytest.mark.process
@pytest.mark.opencl
@pytest.mark.skipif(not landlock_version(), reason="needs a kernel with Landlock")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs system calls of x86-64")
def test_opencl_kernel_reaching_files_network_and_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel traps where it is let do what it tries, but for the last, which traps where it is not."""
    (tmp_path / "secret").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        tries = pries_of_opencl(tmp_path / "secret", tmp_path / "made", server.getsockname()[1])
        batch = [prying(id, body, "opencl") for id, body in tries.items()] + [request("good", "opencl")]
        with LocalRunner("opencl") as opened:
            assert opened.sandbox == landlock_version()
            results = opened.submit(batch).result(LIMIT_SECS)
            assert [(r.id, r.stage) for r in results] == [
                *((id, "crash" if id == "insists" else None) for id in tries), ("good", None)
            ]  # fmt: skip
            assert not (tmp_path / "made").exists()
            monkeypatch.setattr(opened, "_confined", False)  # and without: what it tries would succeed
            opened.transport._discard_process()
            (result,) = opened.submit([prying("reads", tries["reads"], "opencl")]).result(LIMIT_SECS)
            assert result.stage == "crash" and opened.sandbox == 0


@pytest.mark.process
@pytest.mark.opencl
def test_device_process_confined_once_is_confined_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may have damaged the folder, so that the driver no longer works in the sandbox."""
    asked = []
    monkeypatch.setattr(DeviceProcess, "_start", lambda self, folder, environment, confined: asked.append(confined))
    monkeypatch.setattr(DeviceProcess, "_wait_until_open", lambda *given: {"kind": "unfit", "message": "no driver"})
    monkeypatch.setattr(DeviceProcess, "kill", lambda self: None)
    monkeypatch.setattr(DeviceProcess, "_release", lambda self: None)
    for spec, confined, wanted in (
        ("opencl", True, [True]), ("opencl:Some", None, [True, False]), ("opencl", False, [False]), ("c:xeon", None, [True])
    ):  # fmt: skip
        with pytest.raises(MeasureError, match="no driver"):
            DeviceProcess(spec, tmp_path, 1.0, {}, confined=confined)
        assert asked == wanted
        asked.clear()


@pytest.mark.process
@pytest.mark.opencl
@pytest.mark.skipif(not landlock_version(), reason="needs a kernel with Landlock")
def test_driver_aborting_in_the_sandbox_is_opened_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As PoCL does where it may not look at the machine: here a library of the loader that reads a file, or ends the process."""
    driver, inside = tmp_path / "driver", tmp_path / "inside"
    driver.mkdir()
    inside.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(driver), *filter(None, sys.path)]))
    (driver / "pyopencl.py").write_text(
        f"import os\ntry:\n    open({str(tmp_path / 'needed')!r}).close()\nexcept OSError:\n    os.abort()\n"
        "raise ImportError('opened outside')\n"
    )
    with pytest.raises(MeasureError, match="died of signal SIGABRT"):
        DeviceProcess("opencl", inside, 60.0, {})
    (tmp_path / "needed").touch()
    with pytest.raises(MeasureError, match="opened outside"):
        DeviceProcess("opencl", inside, 60.0, {})


@pytest.mark.process
def test_sandbox_is_entered_by_the_only_thread() -> None:
    """Landlock holds the thread that enters, and none that NumPy's libraries have started before."""
    code = (
        "import os, sys, relax_tune.tuner.measure.device_process.start as start\n"
        "start.enter_sandbox = lambda folder, read, listing: print(len(os.listdir('/proc/self/task')), 'numpy' in sys.modules)\n"
        "start.importlib.import_module = lambda name: sys.exit(0)\n"
        "start.main(['c:xeon', '0', '1', '2', 'sandbox'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1 False\n"


@pytest.mark.process
@pytest.mark.skipif(not landlock_version(), reason="needs a kernel with Landlock")
def test_kernel_reaching_files_network_and_processes_is_refused(runner: LocalRunner, tmp_path: Path) -> None:
    """Each kernel aborts where it is let do what it tries, but for the last, which aborts where it is not."""
    (tmp_path / "secret").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        files = "extern int open(const char *, int, ...);"
        port = server.getsockname()[1]
        address = f"unsigned char a[16] = {{2, 0, {port >> 8}, {port & 255}, 127, 0, 0, 1}};"
        tries = {
            "reads": f'{files} if (open("{tmp_path}/secret", 0) >= 0) __builtin_abort();',
            "writes": f'{files} if (open("{tmp_path}/made", 0101, 0600) >= 0) __builtin_abort();',
            "spies": f'{files} if (open("/proc/{os.getpid()}/environ", 0) >= 0) __builtin_abort();',
            "connects": "extern int socket(int, int, int), connect(int, const void *, unsigned);"
            f" {address} if (!connect(socket(2, 1, 0), a, 16)) __builtin_abort();",
            "starts": f'extern int system(const char *); if (!system("cat {tmp_path}/secret")) __builtin_abort();',
        }  # fmt: skip
        batch = [prying(id, body) for id, body in tries.items()] + [request("good", "c")]
        insists = f'{files} if (open("{tmp_path}/secret", 0) < 0) __builtin_abort();'
        results = runner.submit([*batch, prying("insists", insists), request("also-good", "c")]).result(LIMIT_SECS)
    assert [(r.id, r.stage) for r in results] == [
        *((r.id, None) for r in batch), ("insists", "crash"), ("also-good", None)
    ]  # fmt: skip
    assert not (tmp_path / "made").exists()


@pytest.mark.process
def test_device_process_has_limits_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_TUNE_DB", "postgresql://me:secret@far/records")
    monkeypatch.setenv("PGPASSWORD", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    with LocalRunner("c") as opened:
        assert opened.transport._process is not None
        folder = Path(f"/proc/{opened.transport._process.pid}")
        environment, limits = (folder / "environ").read_bytes(), (folder / "limits").read_text()
        status = (folder / "status").read_text()
    assert b"secret" not in environment and b"OMP_PROC_BIND=false" in environment
    assert re.search(r"Max core file size +0 +0 ", limits) and re.search(r"Max file size +4294967296 ", limits)
    assert re.search(r"Max processes +\d+ +\d+ ", limits) and "NoNewPrivs:\t1" in status


@pytest.mark.process
def test_hang_between_requests_loses_no_result(runner: LocalRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, ends = runner.transport._attempt, [Blame("timeout", (), "idle")]
    monkeypatch.setattr(runner.transport, "_attempt", lambda *given: ends.pop() if ends else whole(*given))
    (result,) = runner.submit([request("good", "c")]).result(LIMIT_SECS)
    assert result.status == "ok" and not ends
    monkeypatch.setattr(runner.transport, "_attempt", lambda *given: Blame("timeout", (), "idle"))
    (result,) = runner.submit([request("good", "c")]).result(LIMIT_SECS)
    assert result.stage == "timeout"


@pytest.mark.process
def test_hanging_compiler_does_not_fail_next_candidate(runner: LocalRunner) -> None:
    # gcc expands this for minutes; in one unit with its neighbours it holds them up, alone only itself.
    bomb = "".join(f"#define M{at + 1} M{at} M{at} M{at} M{at}\n" for at in range(14))
    subject = program("good", "c", name="bomb")
    source = kernel("bomb", "t[i] = x[0]; y[i] = 0; M14", "c")
    heavy = type(source)("bomb", "c", "#define M0 y[i] += x[i] * y[i];\n" + bomb + source.source)
    slow = type(subject)(**{**{f: getattr(subject, f) for f in subject.__dataclass_fields__}, "kernels": (heavy,)})
    batch = [
        MeasureRequest("bomb", slow.to_json(), (), ({"n": 1},), POLICY, deadline_secs=1.0),
        request("good", "c", deadline_secs=3.0),
    ]
    results = runner.submit(batch).result(LIMIT_SECS)
    assert [(result.id, result.stage) for result in results] == [("bomb", "timeout"), ("good", None)]
    assert "compile" in results[0].message


def test_frames_and_progress_round_trip() -> None:
    reads, writes = os.pipe()
    reader = FrameReader(reads)
    assert reader.next(0.0) is None and not reader.ended
    write_frame(writes, "one")
    write_frame(writes, "zwei ü")
    assert [reader.next(1.0), reader.next(1.0)] == ["one", "zwei ü"]
    os.write(writes, b"\x09\0\0\0\0\0\0\0half")
    os.close(writes)
    assert reader.next(1.0) is None and reader.ended
    os.close(reads)
    with ProgressMap() as told, ProgressMap(os.dup(told.descriptor)) as seen:
        told.tell(3, 2, "compile")
        step = seen.read()
        assert step is not None and (step.first, step.count, step.phase) == (3, 2, "compile")
        seen.clear()
        cleared = told.read()
        assert cleared is not None and cleared.count == 0 and cleared.phase == "idle"


def test_write_frame_to_stopped_reader_raises() -> None:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with pytest.raises(TimeoutError):
        write_frame(writes, "x" * (1 << 21), within_secs=0.1)
    os.close(reads)
    with pytest.raises(BrokenPipeError):
        write_frame(writes, "x" * (1 << 21), within_secs=0.1)
    os.close(writes)


@pytest.mark.process
def test_death_describes_the_exit(tmp_path: Path) -> None:
    process = DeviceProcess("c", tmp_path, 60.0, {})
    os.kill(process.pid, signal.SIGSEGV)
    assert process.receive(20.0) is None and process.ended
    assert process.death() == "died of signal SIGSEGV"
    process.close()
