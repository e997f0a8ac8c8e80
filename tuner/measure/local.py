"""The local runner: one device process of this machine."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from relax_tune.tuner.measure.process import DeviceProcess
from relax_tune.tuner.measure.process_transport import ProcessTransport
from relax_tune.tuner.measure.reference import Reference, wait_for_quiet
from relax_tune.tuner.measure.supervised import SupervisedRunner


class LocalRunner(SupervisedRunner):
    """A `Runner` on a device of this machine, which is opened in a child process with its own process group.

    Args:
        device_spec: argument of `relax_tune.runtime.device.registry.open_device`.
        open_secs: time limit for opening the device.
        environment: variables for the child, such as thread settings, in addition to the inherited ones.
        worker, lock, wait_secs, notice: see `ProcessTransport`; worker defaults to the host and the spec.

    Attributes:
        sandbox: version of Landlock that confines the child; 0 without confinement.

    Raises:
        MeasureError: the device cannot be opened within `open_secs`.
    """

    sandbox = 0

    def __init__(
        self,
        device_spec: str,
        *,
        open_secs: float = 60.0,
        environment: Mapping[str, str] | None = None,
        worker: str | None = None,
        lock: bool = True,
        wait_secs: float = 60.0,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._spec, self._open_secs, self._environment = device_spec, open_secs, dict(environment or {})
        self._wait_secs, self._notice = wait_secs, notice
        self._confined: bool | None = None
        worker = f"{socket.gethostname()}/{device_spec}" if worker is None else worker
        super().__init__(ProcessTransport(device_spec, worker, self._start, notice, lock=lock, wait_secs=wait_secs))

    def calibrate(self, reference: Reference) -> Reference:
        """Wait for a quiet moment on a busy machine, then compare the unit with reference times; see `Runner.calibrate`."""
        wait_for_quiet(self, self._wait_secs, self._notice)
        return super().calibrate(reference)

    def _start(self, folder: Path, check_cancelled: Callable[[], None]) -> DeviceProcess:
        process = DeviceProcess(self._spec, folder, self._open_secs, self._environment, check_cancelled, self._confined)
        self.sandbox = process.sandbox
        if process.sandbox:  # a kernel could damage the folder so that a later process does not start in the sandbox
            self._confined = True
        return process
