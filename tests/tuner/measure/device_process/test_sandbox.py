"""What a process in the sandbox cannot do, each shown to be possible outside of it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tuner.measure.measure_programs import LIMIT_SECS, request
from tests.tuner.measure.test_local import prying, system_call

from relax_tune.tuner.measure.device_process.sandbox import landlock_version
from relax_tune.tuner.measure.device_process.seccomp import (
    CHECKED,
    DENIED,
    FIRST_UNKNOWN,
    MACHINES,
    NAMESPACES,
    TRUNCATE,
    filter_program,
)
from relax_tune.tuner.measure.local import LocalRunner

ALLOWED, EPERM, ENOSYS = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS

here = os.uname().machine if sys.platform == "linux" else ""
needs_sandbox = pytest.mark.skipif(
    not landlock_version() or here not in MACHINES, reason="needs Linux with Landlock, on x86-64 or aarch64"
)

ATTEMPTS = """
import ctypes, json, os, socket, sys, threading
from pathlib import Path
from relax_tune.tuner.measure.device_process.sandbox import enter_sandbox
from relax_tune.tuner.measure.device_process.seccomp import DENIED
mode, folder, outside, user, parent = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
libc = ctypes.CDLL(None, use_errno=True)
column = 0 if os.uname().machine == "x86_64" else 1

def call(name, *arguments):
    ctypes.set_errno(0)
    if libc.syscall(DENIED[name][column], *arguments) < 0:
        raise OSError(ctypes.get_errno(), name)

def connect():
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(str(outside / "server"))

def send():
    one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.sendto(b"x", str(outside / "log"))

def watch():
    ear = libc.inotify_init1(0o4000)
    if ear < 0 or libc.inotify_add_watch(ear, bytes(outside), 0xfff) < 0:
        raise OSError(ctypes.get_errno(), "inotify")

def modes():
    os.chmod(outside / "file", 0o600)

def modes_of_open_file():
    os.fchmod(opened, 0o600)

def in_own_folder():
    (folder / "own").write_text("x")
    assert (folder / "own").read_text() == "x"

def starts():
    assert os.waitstatus_to_exitcode(os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)[1]) == 0
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()

opened = os.open(outside / "file", os.O_RDONLY)
if user:
    os.setgroups([]); os.setgid(user); os.setuid(user)
attempts = {
    "unix socket": connect, "datagram pair": send, "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW), "mode": modes, "mode of open file": modes_of_open_file,
    "owner": lambda: os.chown(outside / "file", user, user), "time": lambda: os.utime(outside / "file", (1, 1)),
    "attribute": lambda: os.setxattr(outside / "file", "user.x", b"1"),
    "shared memory": lambda: call("shmget", 0, 4096, 0o600), "queue": lambda: call("msgget", 0, 0o600),
    "tracing": lambda: call("ptrace", 0x4206, parent, 0, 0), "keys": lambda: call("keyctl", 0, -3, 1),
    "priority of another": lambda: os.setpriority(os.PRIO_PROCESS, parent, os.getpriority(os.PRIO_PROCESS, parent)),
    "limits of another": lambda: __import__("resource").prlimit(parent, 8, __import__("resource").prlimit(parent, 8)),
    "user namespace": lambda: call("unshare", 0x10000000),
    "names of files": watch, "truncation": lambda: os.truncate(outside / "empty", 0),
    "truncation by reading": lambda: os.open(outside / "empty", os.O_RDONLY | os.O_TRUNC),
    "truncation by no access": lambda: os.open(outside / "empty", 3 | os.O_TRUNC),
    "ring of calls": lambda: call("io_uring_setup", 1, ctypes.create_string_buffer(120)),
    "own folder": in_own_folder, "programs and threads": starts,
}
import resource
if mode == "sandbox":
    assert enter_sandbox(folder)
results = {}
for name, attempt in attempts.items():
    try:
        attempt()
        results[name] = 0
    except OSError as error:
        results[name] = error.errno
status = Path("/proc/self/status").read_text()
results["uid"] = os.getuid()
results["capabilities"] = int(status.split("CapEff:")[1].split()[0], 16)
results["filters"] = int(status.split("Seccomp:")[1].split()[0])
results["links"] = sorted(os.listdir("/sys/class/net"))
print(json.dumps(results))
"""
STILL_POSSIBLE = ("own folder", "programs and threads")


def attempt(mode: str, tmp_path: Path, user: int) -> dict[str, int]:
    """The error number of each attempt, 0 for success, of a process in the sandbox or outside."""
    folder, outside = tmp_path / f"own-{mode}-{user}", tmp_path / f"outside-{mode}-{user}"
    for path in (folder, outside):
        path.mkdir()
        os.chown(path, user, user) if user else None
    (outside / "file").write_text("x")
    (outside / "empty").touch()
    (outside / "empty").chmod(0o666)
    os.chown(outside / "file", user, user) if user else None
    for ancestor in (folder, *folder.parents):
        if str(ancestor) in ("/tmp", "/"):
            break
        ancestor.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        server.bind(str(outside / "server"))
        server.listen()
        log.bind(str(outside / "log"))
        for name in ("server", "log"):
            (outside / name).chmod(0o777)
        who = {"user": user, "group": user, "extra_groups": []} if user else {}
        with subprocess.Popen(["sleep", "600"], **who) as other:
            try:
                command = [sys.executable, "-c", ATTEMPTS, mode, str(folder), str(outside), str(user), str(other.pid)]
                done = subprocess.run(command, capture_output=True, text=True)
            finally:
                other.kill()
    assert done.returncode == 0, done.stderr
    results: dict[str, int] = json.loads(done.stdout)
    return results


@needs_sandbox
@pytest.mark.process
@pytest.mark.parametrize("user", [0, 65534], ids=["this user", "without capabilities"])
def test_process_in_sandbox_reaches_no_sockets_modes_memory_and_processes(tmp_path: Path, user: int) -> None:
    if user and os.geteuid() != 0:
        pytest.skip("only the administrator starts processes of other users")
    bare, confined = attempt("bare", tmp_path, user), attempt("sandbox", tmp_path, user)
    facts = ("uid", "capabilities", "filters", "links")
    unsupported = {name for name, number in bare.items() if number in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES)}
    possible = {name for name, number in bare.items() if number == 0 and name not in facts}
    assert len(possible) >= len(bare) - len(facts) - len(unsupported) - 1, bare
    assert {name: confined[name] for name in STILL_POSSIBLE} == dict.fromkeys(STILL_POSSIBLE, 0)
    assert {n: confined[n] for n in possible if n not in STILL_POSSIBLE and confined[n] != errno.EPERM} == {}
    assert confined["uid"] == (user or os.getuid()) and confined["filters"] == 2
    assert confined["capabilities"] & ~0b110 == 0


@needs_sandbox
@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
def test_measured_c_kernel_reaches_no_unix_socket_modes_and_shared_memory(tmp_path: Path) -> None:
    """Each kernel aborts where its attempt succeeds; the last one aborts where it fails."""
    victim, place = tmp_path / "victim", tmp_path / "server"
    victim.write_text("x")
    victim.chmod(0o640)
    name = ", ".join(map(str, os.fsencode(str(place))))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place))
        server.listen()
        bodies = {
            "connects": "extern int socket(int, int, int), connect(int, const void *, unsigned); "
            f"struct {{ unsigned short f; char p[108]; }} a = {{1, {{{name}, 0}}}}; "
            "if (!connect(socket(1, 1, 0), &a, sizeof a)) __builtin_abort();",
            "opens": f'extern int chmod(const char *, unsigned); if (!chmod("{victim}", 0666)) __builtin_abort();',
            "dates": f'extern int utimes(const char *, const void *); if (!utimes("{victim}", 0)) __builtin_abort();',
            "shares": "extern int shmget(int, unsigned long, int); if (shmget(0, 4096, 0600) >= 0) __builtin_abort();",
            "insists": f'extern int chmod(const char *, unsigned); if (chmod("{victim}", 0666)) __builtin_abort();',
        }
        with LocalRunner("c") as runner:
            requests = [*(prying(id, body) for id, body in bodies.items()), request("good", "c")]
            results = runner.submit(requests).result(LIMIT_SECS)
    assert [(r.id, r.stage) for r in results] == [
        *((id, "crash" if id == "insists" else None) for id in bodies), ("good", None)
    ]  # fmt: skip
    assert victim.stat().st_mode & 0o777 == 0o640


@needs_sandbox
@pytest.mark.process
@pytest.mark.opencl
@pytest.mark.skipif(here != "x86_64", reason="needs system calls of x86-64")
def test_measured_opencl_kernel_reaches_no_unix_socket_modes_and_shared_memory(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("x")
    victim.chmod(0o640)
    path = f"long r = -1; char p[] = {{{', '.join(map(str, os.fsencode(str(victim))))}, 0}};"
    trap = "if (r >= 0) __builtin_trap();"
    bodies = {
        "socket": f"long r = -1; {system_call(DENIED['socket'][0] or 0, '1', '1')} {trap}",
        "mode": f"{path} {system_call(DENIED['chmod'][0] or 0, 'p', '0666')} {trap}",
        "memory": f"long r = -1; {system_call(DENIED['shmget'][0] or 0, '0', '4096', '0600')} {trap}",
        "insists": f"{path} {system_call(DENIED['chmod'][0] or 0, 'p', '0666')} if (r < 0) __builtin_trap();",
    }
    with LocalRunner("opencl") as runner:
        if not runner.sandbox:
            pytest.skip("this driver runs outside of the sandbox")
        requests = [*(prying(id, body, "opencl") for id, body in bodies.items()), request("good", "opencl")]
        results = runner.submit(requests).result(LIMIT_SECS)
    assert [(r.id, r.stage) for r in results] == [
        *((id, "crash" if id == "insists" else None) for id in bodies), ("good", None)
    ]  # fmt: skip
    assert victim.stat().st_mode & 0o777 == 0o640


def answer(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Run a filter as the kernel does, on `struct seccomp_data`."""
    data = struct.pack("=iIQ6Q", number, architecture, 0, *arguments, *(0,) * (6 - len(arguments)))
    steps, at, word = list(struct.iter_unpack("=HBBI", program)), 0, 0
    while True:
        code, true, false, operand = steps[at]
        at += 1
        if code == 0x20:
            (word,) = struct.unpack_from("=I", data, operand)
        elif code == 0x54:
            word &= operand
        elif code == 0x06:
            return int(operand)
        else:
            holds = {0x15: word == operand, 0x35: word >= operand, 0x45: bool(word & operand)}[code]
            at += true if holds else false


@pytest.mark.parametrize("machine", MACHINES)
def test_filter_of_each_machine_denies_only_listed_calls(machine: str) -> None:
    program, architecture, column = filter_program(machine), MACHINES[machine], list(MACHINES).index(machine)
    denied = {row[column] for row in DENIED.values()} - {None}
    clone, ioctl, limits = (CHECKED[name][column] or 0 for name in ("clone", "ioctl", "prlimit64"))
    unreadable = [CHECKED[name][column] for name in ("clone3", "openat2")]
    for number in range(FIRST_UNKNOWN):
        expected = EPERM if number in denied else ENOSYS if number in unreadable else ALLOWED
        assert answer(program, architecture, number) == expected, number
        assert answer(program, architecture ^ 1, number) == EPERM
    assert (
        answer(program, architecture, 0x40000000 + 41) == ENOSYS
        and answer(program, architecture, FIRST_UNKNOWN) == ENOSYS
    )
    for flag in (f for f in (1 << n for n in range(32)) if f & NAMESPACES):
        assert answer(program, architecture, clone, flag | 0x11) == EPERM
    assert answer(program, architecture, clone, 0x3D0F00) == ALLOWED  # of threads
    for name, before in (("open", [0]), ("openat", [0, 0])):
        if (number := CHECKED[name][column]) is not None:
            for flags in range(4):
                expected = EPERM if flags in (0, 3) else ALLOWED
                assert answer(program, architecture, number, *before, flags | TRUNCATE | 0o100) == expected
                assert answer(program, architecture, number, *before, flags | 0o100) == ALLOWED
    assert answer(program, architecture, limits, 1) == EPERM and answer(program, architecture, limits, 0) == ALLOWED
    assert (
        answer(program, architecture, ioctl, 0, 0x5412) == EPERM
        and answer(program, architecture, ioctl, 0, 0x5401) == ALLOWED
    )


@pytest.mark.parametrize(
    ("column", "header"),
    [(0, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), (1, "/usr/include/asm-generic/unistd.h")],
    ids=["x86_64", "aarch64"],
)
def test_call_numbers_equal_the_system_headers(column: int, header: str) -> None:
    if not Path(header).is_file():
        pytest.skip(f"needs the headers of Linux ({header})")
    numbers: dict[str, int] = {}
    for name, value in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text()):
        numbers.setdefault(name, int(value))
    table = {name: row[column] for name, row in (*DENIED.items(), *CHECKED.items())}
    newest = max(numbers.values())
    known = {name: number for name, number in table.items() if number is None or number <= newest}
    assert len(known) > 90
    assert {name: (number, numbers.get(name)) for name, number in known.items() if number != numbers.get(name)} == {}
