"""The process of one job, from the service's side: its events, its log, its end.

Tests: `tests/tuner/service/test_service.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from typing import IO, Any, Protocol

from relax_tune.runtime.child_process import clean_environment, python_command


def command_of(module: str) -> tuple[str, ...]:
    """Return the command of a process that runs a module, for `JobProcess`."""
    return tuple(python_command("-m", module))


COMMAND: Sequence[str] = command_of("relax_tune.tuner.service.child")
LOG_BYTES = 4 << 20
"""Longest log of a run."""
_PART = 32 << 10
_EVENT_BYTES = 1 << 20


class Order(Protocol):
    """What a process is to do."""

    def to_json(self) -> str: ...


class JobProcess:
    """A running job. Its log is truncated after `LOG_BYTES`.

    Attributes:
        target: Key of the target whose reference times disagree with the unit's; empty if they agree.

    Args:
        command: The program. It reads the order from standard input, and must end at SIGTERM or when standard input closes.
    """

    def __init__(self, order: Order, command: Sequence[str] = COMMAND) -> None:
        self.progress: dict[str, Any] | None = None
        self.result: dict[str, Any] = {}
        self.error = ""
        self.target = ""
        self._log = b""
        self._log_bytes = 0
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean_environment(),
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._threads = [
            threading.Thread(target=self._read_events, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_log, args=(self._process.stderr,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        with contextlib.suppress(BrokenPipeError):  # the exit code says more
            self._process.stdin.write(order.to_json().encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """The id of the process and of its group."""
        return self._process.pid

    def wait(self, within_secs: float) -> int | None:
        """Return the exit code, negative for a signal; None if the process still runs after `within_secs`."""
        try:
            code = self._process.wait(within_secs)
        except subprocess.TimeoutExpired:
            return None
        for thread in self._threads:
            thread.join(5.0)  # its children may have the pipes open
        return code

    def log(self) -> list[str]:
        """Return the new parts of the log. While the process runs, they end at line ends unless a line is too long."""
        parts = []
        with self._lock:
            ended = self._process.returncode is not None
            while self._log:
                cut = len(self._log) if ended else self._log.rfind(b"\n", 0, _PART) + 1
                cut = min(cut or (_PART if len(self._log) >= _PART else 0), _PART)
                if not cut:
                    break
                part, self._log = self._log[:cut], self._log[cut:]
                # PostgreSQL stores no NUL in a text.
                parts.append(part.decode(errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}"))
        return parts

    def tell(self, line: str) -> None:
        """Add a line of the service to the log."""
        with self._lock:
            self._log += line.encode() + b"\n"

    def stop(self, grace_secs: float = 15.0) -> int:
        """Terminate the process, and kill its group after `grace_secs`. Returns the exit code."""
        if self._process.poll() is None:
            self._process.terminate()
        code = self.wait(grace_secs)
        if code is None:
            self.kill()
            code = self.wait(30.0)
        return -signal.SIGKILL if code is None else code

    def kill(self) -> None:
        """Kill the group of the process."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the group of the process and close its pipes."""
        self.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def _read_log(self, stream: IO[bytes]) -> None:
        while data := os.read(stream.fileno(), 65536):
            with self._lock:
                if self._log_bytes < LOG_BYTES <= self._log_bytes + len(data):
                    data = data[: LOG_BYTES - self._log_bytes] + b"\n(the log is longer; the rest is not stored)\n"
                # Read on, though nothing is stored: a full pipe would stop the job.
                elif self._log_bytes >= LOG_BYTES:
                    data = b""
                self._log_bytes += len(data)
                self._log += data

    def _read_events(self, stream: IO[bytes]) -> None:
        # A line without an end must not fill the memory of the service.
        while line := stream.readline(_EVENT_BYTES):
            try:
                event = json.loads(line)
            except ValueError:
                continue  # a line that the end of the process has truncated
            if isinstance(event.get("progress"), dict):
                self.progress = event["progress"]
            if isinstance(event.get("result"), dict):
                self.result = event["result"]
            if isinstance(event.get("error"), str):
                self.error = event["error"]
            if isinstance(event.get("target"), str):
                self.target = event["target"]
