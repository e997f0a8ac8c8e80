"""Starting Dask's scheduler and workers as processes of our own: for `relax-tune worker`, and on loopback for tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType, TracebackType

from relax_tune.errors import MeasureError, system_reason
from relax_tune.tuner.measure.cluster.address import TlsFiles, check_address, host_and_port, is_loopback
from relax_tune.tuner.measure.cluster.fleet import default_name
from relax_tune.tuner.measure.cluster.reference import TOLERANCE
from relax_tune.tuner.measure.cluster.trust.loopback import make_loopback, place_of

PLACE_SECS = 60.0
"""Seconds that a worker waits for a scheduler of its user on loopback."""

# A lost worker must not pass its task on by itself: we send it again, and know how often.
_SCHEDULER_SETTINGS = {
    "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0",
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "60s",
    "DASK_DISTRIBUTED__SCHEDULER__WORK_STEALING": "False",  # each batch names its worker
}
_WORKER_SETTINGS = {"DASK_DISTRIBUTED__WORKER__DAEMON": "False", "PYTHONUNBUFFERED": "1"}
_SHARED_SETTINGS = {"DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "True"}


class ClusterProcess:
    """A scheduler or worker process in its own group, with its log and scratch in a folder of its own.

    arguments, settings: `{folder}` in them stands for this folder
    """

    def __init__(self, arguments: Sequence[str], settings: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="relax-tune-cluster-", ignore_cleanup_errors=True)
        self.folder = Path(self._folder.name)
        self._lock = threading.Lock()
        self._read = 0
        with open(self.folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *(argument.replace("{folder}", self._folder.name) for argument in arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder.name,
                env={**os.environ, **{n: v.replace("{folder}", self._folder.name) for n, v in settings.items()}},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id, which is also its group's."""
        return self._process.pid

    def wait(self, within_secs: float) -> int | None:
        """Return the exit status, or None when it still runs after `within_secs`."""
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
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode(errors="replace").splitlines()

    def kill(self) -> None:
        """Kill it by SIGKILL, as if the machine were lost; device processes notice by themselves."""
        with self._lock:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def close(self) -> None:
        """Ask it to end, kill it after three seconds, remove its folder. May be called twice."""
        with self._lock:
            if self._process.returncode is None:
                self._process.terminate()
        self.wait(3.0)
        self.kill()
        self._folder.cleanup()

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
    """Return the port, or a free one for 0. Raises MeasureError for one where another listens: its certificates are not touched."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as found:
            found.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # as Dask does: one that has just ended is no hindrance
            found.bind(place)
            return int(found.getsockname()[1])
    except OSError as error:
        raise MeasureError(
            f"wanted to listen on {host} at port {port}, found: {system_reason(error)}; end what listens there, or choose another --port"
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
    """Start a scheduler; return its process and address. port: 0 takes a free one

    tls: certificate of the scheduler; on loopback one is made, which workers and jobs of the same user fit (`trust.loopback`)
    metrics: `PORT` or `HOST:PORT` to answer Prometheus at. report: receives a sentence where that is

    Raises MeasureError when it does not come up within `within_secs`, or must listen beyond loopback without certificates.
    """
    if tls is None and not is_loopback(host):
        raise MeasureError(
            f"wanted mutual TLS for a scheduler on {host} beyond loopback, found no certificates; give them"
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
        with contextlib.suppress(OSError, json.JSONDecodeError):  # not written, or not wholly written, yet
            told = json.loads((process.folder / "scheduler.json").read_text())
            if metrics is not None:
                report(f"metrics at {told['metrics']}")
            return process, str(told["address"])
    log = process.log()
    process.close()
    raise MeasureError(f"wanted a Dask scheduler within {within_secs:g} s, found none; it printed: {log}")


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
    """Start a worker that lends one unit by these device specs. It ends after 60 s without a scheduler.

    name: worker's name in records (default: host and specs). tolerance: factor by which reference times may differ.
    tls: certificate of a worker; on loopback this user's own is taken.
    host: where the worker listens. Without certificates that is loopback.
    environment: variables on top of the inherited ones.

    Raises MeasureError when an address is beyond loopback without certificates.
    """
    check_address(scheduler_address, tls)
    if tls is None and host is not None and not is_loopback(host):
        raise MeasureError(
            f"wanted mutual TLS for a worker that listens on {host} beyond loopback, found no certificates; give them"
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
    """Keep one worker up until `stop` is set.

    A worker that ends is started again. The pause before doubles up to 30 s while workers keep ending within a minute.
    report: receives a sentence each time

    Raises MeasureError as `start_worker`.
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
