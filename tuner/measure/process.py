"""The parent's side of a device process: start in its own process group, messages, kill of the whole group.

Tests: `tests/tuner/measure/test_local.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relax_tune.errors import MeasureError, TryAgainLater
from relax_tune.runtime.child_process import clean_environment, python_command
from relax_tune.runtime.device.c_compiler import copy_own_libraries
from relax_tune.runtime.device.confinement import DEVICE_VARIABLES, marked_processes, only
from relax_tune.tuner.measure.codec import decode_device
from relax_tune.tuner.measure.protocol import FrameReader, ProgressMap, StepStatus, write_frame

_TAIL_BYTES = 2000
_LOG_LIMIT = 1 << 20
_POLL_SECS = 0.05
_STRAY_ROUNDS = 100
_ANSWER_BYTES = 1 << 28
"""Longest message of a device process. Kernels can write to its pipe."""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


class DeviceProcessKilled(MeasureError, TryAgainLater):
    """The device process was killed from outside while it opened its device, by a user or for lack of memory."""


class DeviceProcess:
    """A running `python -m relax_tune.tuner.measure.device_process.start`, with its device open.

    The constructor waits until the device is open. Only `kill` may be called from any thread.

    Args:
        folder: private to the job; holds the log of all output, and the folder `device`, the only one that a
            process in the sandbox writes, with compiler caches, which survive a new process.
        environment: variables in addition to the inherited `DEVICE_VARIABLES`.
        check_cancelled: called regularly while the device is being opened; an exception ends the attempt.
        confined: True requires the sandbox, False disables it, None falls back to no sandbox where the device's driver fails in it.

    Raises:
        MeasureError: the device cannot be opened within `open_secs`; the process group was killed.
    """

    stop_phrase = "killed"
    shares_steps = True
    departed = False  # any end may be the fault of the running request

    def __init__(
        self,
        device_spec: str,
        folder: Path,
        open_secs: float,
        environment: Mapping[str, str],
        check_cancelled: Callable[[], None] = lambda: None,
        confined: bool | None = None,
    ) -> None:
        self._spec = device_spec
        self._lock = threading.Lock()
        # Kernels may put links in the place of files there, so this process opens none of them.
        own = folder / "device"
        own.mkdir(exist_ok=True)
        self._mark = f"TMPDIR={own}"
        self._log = folder / "device-process.log"
        self._progress = ProgressMap()
        caches = {
            "POCL_CACHE_DIR": str(own / "pocl-cache"),
            "PYOPENCL_NO_CACHE": "1",
            "RELAX_TUNE_CACHE": str(own / "cache"),
            "TMPDIR": str(own),
        }
        for path in (own / "pocl-cache", own / "cache"):
            with contextlib.suppress(FileExistsError):
                path.mkdir()
        if device_spec.partition(":")[0] == "c":
            copy_own_libraries(own / "cache")  # two thirds of a second of gcc
        given = clean_environment({**only(DEVICE_VARIABLES), **caches, **environment})
        # A driver of OpenCL may find no device in the sandbox, or end the process.
        may_leave = confined is None and device_spec.partition(":")[0] == "opencl"
        self._start(folder, given, confined is not False)
        try:
            message = self._wait_until_open(open_secs, check_cancelled, may_leave)
            if message["kind"] == "unfit" and may_leave:
                self.kill()
                self._release()
                self._start(folder, given, False)
                message = self._wait_until_open(open_secs, check_cancelled)
            if message["kind"] != "ready":
                raise MeasureError(
                    str(message.get("message") or f"device {self._spec!r} cannot be opened, without a reason")
                )
            self.info = decode_device(message.get("info"))
        except BaseException:
            self.close()
            raise
        version = message.get("sandbox")
        self.sandbox = version if isinstance(version, int) else 0

    def _start(self, folder: Path, environment: Mapping[str, str], confined: bool) -> None:
        child_reads, self._write_to = os.pipe()
        read_from, child_writes = os.pipe()
        self._descriptors = [self._write_to, read_from]
        # A process that does not read must not block its supervisor: `write_frame` gives up in time.
        os.set_blocking(self._write_to, False)
        command = python_command("-m", "relax_tune.tuner.measure.device_process.start")
        inherited = child_reads, child_writes, self._progress.descriptor
        command += [self._spec, *map(str, inherited), "sandbox" if confined else "bare"]
        with open(self._log, "ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder / "device",  # the only folder that it may write in the sandbox
                env=environment,
                pass_fds=inherited,
                start_new_session=True,
            )
        # Only the child has these ends from now on, so the pipes close when it ends.
        os.close(child_reads)
        os.close(child_writes)
        self._reader = FrameReader(read_from, _ANSWER_BYTES)

    def _wait_until_open(
        self, open_secs: float, check_cancelled: Callable[[], None], may_end: bool = False
    ) -> dict[str, Any]:
        """Return the first message of the process, which has a `kind`.

        Args:
            may_end: return the kind `unfit` for a process that ends instead (its driver fails in the sandbox).
        """
        give_up = time.monotonic() + open_secs
        message = None
        while message is None and not self._reader.ended and (left := give_up - time.monotonic()) > 0:
            check_cancelled()
            message = self.receive(min(left, _POLL_SECS))
        if message is None and self._reader.ended:
            end = self.death()
            # A driver that does not bear the sandbox ends by its own fault; SIGKILL comes from outside and says
            # nothing about it.
            kind = DeviceProcessKilled if f"signal {signal.SIGKILL.name}" in end else MeasureError
            if may_end and kind is MeasureError:
                return {"kind": "unfit"}
            raise kind(
                f"expected the device {self._spec!r} opened in a separate process, but the process "
                f"{end}; run `relax-tune doctor` to see what is installed.{self.tail()}"
            )
        if message is None:
            raise MeasureError(
                f"expected the device {self._spec!r} opened within {open_secs:g} s, got no answer: it is busy or "
                f"its driver hangs; free it, or allow more time.{self.tail()}"
            )
        return {"kind": "refused", **message}

    @property
    def pid(self) -> int:
        """The process id, which is also its group's."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """True if no more messages will come."""
        return self._reader.ended

    def send(self, message: Mapping[str, Any], within_secs: float) -> None:
        """Send one message. Raises OSError (BrokenPipeError, TimeoutError) when the process does not read it."""
        self._progress.clear()
        with open(self._log, "ab") as log:
            # Kernels may print; a long run would otherwise fill the folder.
            if log.tell() > _LOG_LIMIT:
                log.truncate(0)
        self._log_start = self._log.stat().st_size
        write_frame(self._write_to, json.dumps(message, separators=(",", ":")), within_secs)

    def receive(self, within_secs: float) -> dict[str, Any] | None:
        """Return the next message, or None when none came in time or the process closed its pipe (`ended`).

        Raises MeasureError for anything else than a JSON object, which a kernel may have written.
        """
        text = self._reader.next(within_secs)
        if text is None:
            return None
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise MeasureError(
                f"expected a JSON object from the device process, got {text[:60]!r}; kill and respawn it"
            )
        return message

    def step(self) -> StepStatus | None:
        """Return the last step that it began."""
        return self._progress.read()

    def death(self) -> str:
        """Describe its end, as words that complete `the process ...`.

        Waits up to five seconds for the end, and does not reap. Until `kill` does, the group's id stays taken and its compilers
        can still be killed.
        """
        # The pipe closes a moment before the kernel reports the end of the process, so the status is waited for.
        # WNOWAIT leaves the process a zombie, whose id no other process can get until `kill` has used it.
        give_up = time.monotonic() + 5
        while time.monotonic() < give_up:
            try:
                status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return "was killed"
            if status is not None and status.si_code == os.CLD_EXITED:
                return f"exited with status {status.si_status}"
            if status is not None:
                return f"died of signal {_signal_name(status.si_status)}"
            time.sleep(0.005)
        return "closed its message pipe but goes on running"

    def tail(self) -> str:
        """Return the end of its output since the last message to it, as a clause to append to an error; else empty."""
        with open(self._log, "rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, log.tell() - _TAIL_BYTES))
            text = log.read().decode(errors="replace").strip()
        return f" It printed: {text}" if text else ""

    def kill(self) -> None:
        """Kill the whole group (including compilers it started) by SIGKILL, and reap it. May be called twice."""
        with self._lock:
            if self._process.returncode is not None:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # The leader is not reaped yet, so no other group can have its id.
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._kill_strays()

    def _kill_strays(self) -> None:
        """Kill the processes that a kernel started and that have left the group. They inherit our private TMPDIR."""
        for _ in range(_STRAY_ROUNDS):  # some may fork while we look
            strays = marked_processes(self._mark)
            for pid in strays:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not strays:
                return

    def close(self) -> None:
        """Kill, and release the pipes and the map. Only the thread that uses it may close it."""
        self.kill()
        self._release()
        self._progress.close()

    def _release(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []
