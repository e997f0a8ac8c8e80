"""Scheduler and worker processes: for `relax-tune scheduler` and `relax-tune worker`, and on loopback for tests.

Tests: `tests/tuner/measure/cluster/test_cluster.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType, TracebackType

from relax_tune.errors import MeasureError, system_reason
from relax_tune.runtime.child_process import clean_environment, python_command
from relax_tune.tuner.measure.cluster.address import TlsFiles, check_address, host_and_port, is_loopback
from relax_tune.tuner.measure.cluster.fleet import default_name
from relax_tune.tuner.measure.cluster.trust.loopback import make_loopback, place_of
from relax_tune.tuner.measure.reference import TOLERANCE
from relax_tune.tuner.measure.scratch import CLUSTER, ScratchFolder, sweep

END_SECS = 10.0
"""Seconds that a process has to end in after SIGTERM."""
PLACE_SECS = 60.0
"""Seconds that a worker on loopback waits for a scheduler of the same user."""

# Dask must not send the task of a lost worker to another one: `DaskRunner` does, and counts the attempts.
_SCHEDULER_SETTINGS = {
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "60s",
    "DASK_DISTRIBUTED__SCHEDULER__WORK_STEALING": "False",  # each batch names its worker
}
_WORKER_SETTINGS = {"DASK_DISTRIBUTED__WORKER__DAEMON": "False", "PYTHONUNBUFFERED": "1"}
_SHARED_SETTINGS = {"DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "True", "DASK_TEMPORARY_DIRECTORY": "{folder}"}


class ClusterProcess:
    """A scheduler or worker process in its own process group, with a private folder for its log and scratch files.

    Args:
        arguments, settings: `{folder}` is replaced by the path of this folder.
    """

    def __init__(self, arguments: Sequence[str], settings: Mapping[str, str]) -> None:
        self._scratch = ScratchFolder(CLUSTER)
        self.folder = self._scratch.path
        place = str(self.folder)
        self._lock = threading.Lock()
        self._read = 0
        with open(self.folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                python_command("-m", *(argument.replace("{folder}", place) for argument in arguments)),
                stdin=subprocess.PIPE,  # closes with this process, and the child ends: `end_with_parent`
                stdout=log,
                stderr=log,
                cwd=place,
                env=clean_environment() | {n: v.replace("{folder}", place) for n, v in settings.items()},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id, which is also the id of the process group."""
        return self._process.pid

    def wait(self, within_secs: float) -> int | None:
        """Return the exit status, or None if the process still runs after `within_secs`."""
        try:
            return self._process.wait(within_secs)
        except subprocess.TimeoutExpired:
            return None

    def log(self) -> str:
        """Return the end of its output."""
        return (self.folder / "log").read_bytes()[-2000:].decode(errors="replace").strip()

    def news(self) -> list[str]:
        """Return the complete lines of its output since the last call."""
        with open(self.folder / "log", "rb") as log:
            log.seek(self._read)
            data = log.read()
        # An incomplete last line is left for the next call.
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode(errors="replace").splitlines()

    def kill(self) -> None:
        """Kill the process group by SIGKILL, as if the machine were lost. Device processes end when their pipe closes."""
        with self._lock:
            if self._process.returncode is None:
                # Under the lock, and only before `wait` has collected the status: afterwards the id may be another
                # process's.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def close(self) -> None:
        """Terminate the process, kill it after `END_SECS`, remove its folder and those of its children. May be called twice."""
        with self._lock:
            if self._process.returncode is None:
                self._process.terminate()
        self.wait(END_SECS)
        self.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._scratch.remove()
        sweep()

    def __enter__(self) -> ClusterProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bracketed(host: str) -> str:
    """Return a host in Dask's form: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def free_port(host: str, port: int) -> int:
    """Return the port, or a free one for 0. Raises MeasureError for a port in use, before its certificates are replaced."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as listener:
            # As Dask does: accept a port whose last listener has just ended.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            return int(listener.getsockname()[1])
    except OSError as error:
        raise MeasureError(
            f"cannot listen on {host} at port {port}: {system_reason(error)}; stop the process that listens there, or choose another --port"
        ) from None


def start_scheduler(
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    tls: TlsFiles | None = None,
    within_secs: float = 30.0,
    metrics: str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> tuple[ClusterProcess, str]:
    """Start a scheduler, and return its process and address.

    Args:
        port: port to listen on; 0 selects a free one.
        tls: certificate of the scheduler. On loopback it defaults to a generated one, with others for workers and jobs of the same
            user (`trust.loopback`).
        metrics: `PORT` or `HOST:PORT` of the Prometheus endpoint.
        report: receives a sentence with the address of the endpoint.

    Raises:
        MeasureError: it does not start within `within_secs`, or would listen beyond loopback without certificates.
    """
    if tls is None and not is_loopback(host):
        raise MeasureError(
            f"expected mutual TLS for a scheduler on {host} beyond loopback, got no certificates; give them"
        )
    port = free_port(host, port)
    tls = make_loopback(port) if tls is None else tls
    options = {
        "host": _bracketed(host),
        "port": port,
        "tls": asdict(tls),
        "file": "{folder}/scheduler.json",
        "metrics": metrics,
    }
    arguments = ["relax_tune.tuner.measure.cluster.scheduler", json.dumps(options)]
    process = ClusterProcess(arguments, {**_SCHEDULER_SETTINGS, **_SHARED_SETTINGS})
    give_up = time.monotonic() + within_secs
    while time.monotonic() < give_up and process.wait(0.05) is None:
        with contextlib.suppress(OSError, json.JSONDecodeError):  # the file does not exist, or is not complete, yet
            started = json.loads((process.folder / "scheduler.json").read_text())
            if metrics is not None:
                report(f"metrics at {started['metrics']}")
            return process, str(started["address"])
    log = process.log()
    process.close()
    raise MeasureError(f"expected a Dask scheduler within {within_secs:g} s, got none; it printed: {log}")


def start_worker(
    scheduler_address: str,
    specs: Sequence[str],
    *,
    name: str | None = None,
    tolerance: float = TOLERANCE,
    tls: TlsFiles | None = None,
    host: str | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> ClusterProcess:
    """Start a worker that lends the devices of one unit. It ends after 60 s without a scheduler.

    Args:
        specs: device specs of the unit.
        name: name of the worker in records (default: host and specs).
        tolerance: factor by which reference times may differ.
        tls: certificate of the worker; on loopback it defaults to the generated one of this user.
        host: address to listen on; without certificates it defaults to loopback.
        environment: variables in addition to the inherited ones.

    Raises:
        MeasureError: an address is beyond loopback, and there are no certificates.
    """
    check_address(scheduler_address, tls)
    if tls is None and host is not None and not is_loopback(host):
        raise MeasureError(
            f"expected mutual TLS for a worker that listens on {host} beyond loopback, got no certificates; give them"
        )
    if tls is None and host is None:
        host = host_and_port(scheduler_address)[0]
    scheduler_address, tls = place_of(scheduler_address, tls, "worker", PLACE_SECS)
    called = default_name(specs) if name is None else name
    options = {
        "scheduler": scheduler_address,
        "specs": list(specs),
        "name": called,
        "tolerance": tolerance,
        "folder": "{folder}",
        "host": host if host is None else _bracketed(host),
        "tls": asdict(tls),
    }
    arguments = ["relax_tune.tuner.measure.cluster.worker", json.dumps(options)]
    return ClusterProcess(arguments, {**environment, **_WORKER_SETTINGS, **_SHARED_SETTINGS})


def serve_worker(
    scheduler_address: str,
    specs: Sequence[str],
    stop: threading.Event,
    *,
    name: str | None = None,
    tolerance: float = TOLERANCE,
    tls: TlsFiles | None = None,
    host: str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> None:
    """Run a worker until `stop` is set, and restart it when it ends.

    The delay before a restart doubles up to 30 s while workers end within a minute.

    Args:
        report: receives a sentence for each restart, and the state changes of the unit.

    Raises:
        MeasureError: see `start_worker`.
    """
    pause = 1.0
    while not stop.is_set():
        began = time.monotonic()
        with start_worker(scheduler_address, specs, name=name, tolerance=tolerance, tls=tls, host=host) as worker:
            while not stop.is_set() and worker.wait(0.2) is None:
                for line in worker.news():
                    if line.startswith("worker "):
                        report(line)
            last = (worker.log().splitlines() or ["nothing"])[-1]
        pause = 1.0 if time.monotonic() - began > 60 else min(pause * 2, 30.0)
        if not stop.is_set():
            report(f"the worker process has ended and is started again in {pause:g} s; it last printed: {last:.300}")
        stop.wait(pause)
