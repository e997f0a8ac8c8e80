"""The process of one job as its service sees it: its events, its log, its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

from relax_tune.tuner.service.work_order import WorkOrder

COMMAND: Sequence[str] = (sys.executable, "-m", "relax_tune.tuner.service.child")
LOG_BYTES = 4 << 20
"""Bytes of log that a run keeps."""
_PART = 32 << 10
_EVENT_BYTES = 1 << 20


class JobProcess:
    """A running job. Its log is cut after `LOG_BYTES`.

    command: the program, which takes the order on standard input and is told to end by SIGTERM or when that closes
    """

    def __init__(self, order: WorkOrder, command: Sequence[str] = COMMAND) -> None:
        self.progress: dict[str, Any] | None = None
        self.result: dict[str, Any] = {}
        self.error = ""
        self._log = b""
        self._kept = 0
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._threads = [
            threading.Thread(target=self._read_events, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_log, args=(self._process.stderr,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        with contextlib.suppress(BrokenPipeError):  # its end says more
            self._process.stdin.write(order.to_json().encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """The process id, which is also its group's."""
        return self._process.pid

    def wait(self, within_secs: float) -> int | None:
        """Return the exit code, negative for a signal, or None when it still runs after `within_secs`."""
        try:
            code = self._process.wait(within_secs)
        except subprocess.TimeoutExpired:
            return None
        for thread in self._threads:
            thread.join(5.0)  # what it started may hold the pipes open
        return code

    def log(self) -> list[str]:
        """Return the parts of the log since the last call: whole lines while it runs, as far as they are not too long."""
        parts = []
        with self._lock:
            ended = self._process.returncode is not None
            while self._log:
                cut = len(self._log) if ended else self._log.rfind(b"\n", 0, _PART) + 1
                cut = min(cut or (_PART if len(self._log) >= _PART else 0), _PART)
                if not cut:
                    break
                part, self._log = self._log[:cut], self._log[cut:]
                parts.append(part.decode(errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}"))
        return parts

    def tell(self, line: str) -> None:
        """Add a line of the service's to the log."""
        with self._lock:
            self._log += line.encode() + b"\n"

    def stop(self, grace_secs: float = 15.0) -> int:
        """Ask it to end, kill its group after a while. Returns the exit code."""
        if self._process.poll() is None:
            self._process.terminate()
        code = self.wait(grace_secs)
        if code is None:
            self.kill()
            code = self.wait(30.0)
        return -signal.SIGKILL if code is None else code

    def kill(self) -> None:
        """Kill its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill what is left of it."""
        self.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()

    def _read_log(self, stream: IO[bytes]) -> None:
        while data := os.read(stream.fileno(), 65536):
            with self._lock:
                if self._kept < LOG_BYTES <= self._kept + len(data):
                    data = data[: LOG_BYTES - self._kept] + b"\n(the rest of this run's log is left out)\n"
                elif self._kept >= LOG_BYTES:
                    data = b""
                self._kept += len(data)
                self._log += data

    def _read_events(self, stream: IO[bytes]) -> None:
        while line := stream.readline(_EVENT_BYTES):
            try:
                event = json.loads(line)
            except ValueError:
                continue  # a line that its end has cut
            if isinstance(event.get("progress"), dict):
                self.progress = event["progress"]
            if isinstance(event.get("result"), dict):
                self.result = event["result"]
            if isinstance(event.get("error"), str):
                self.error = event["error"]
