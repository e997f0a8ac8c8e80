"""The local runner: one device process of this machine, supervised by one thread."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

from relax_tune.tuner.measure.process import DeviceProcess
from relax_tune.tuner.measure.supervised import SupervisedRunner


class LocalRunner(SupervisedRunner):
    """A `Runner` on a device of this machine.

    The device lives in a spawned child in its own process group.

    device_spec: argument of `relax_tune.runtime.device.registry.open_device`. open_secs: time limit of opening.
    environment: variables for the child, such as thread settings, on top of the inherited ones. worker, lock, notice: as
    of `SupervisedRunner`; worker is by default the host and the spec.

    `sandbox` is the version of Landlock that holds the child, 0 for none.

    Raises MeasureError when the device cannot be opened within `open_secs`.
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
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._open_secs = open_secs
        self._environment = dict(environment or {})
        self._confined: bool | None = None
        super().__init__(
            device_spec, f"{socket.gethostname()}/{device_spec}" if worker is None else worker, lock, notice
        )

    def _start(self) -> DeviceProcess:
        process = DeviceProcess(
            *(self._spec, self._folder.path, self._open_secs, self._environment, self._refuse_when_closed),
            confined=self._confined,
        )
        self.sandbox = process.sandbox
        if process.sandbox:  # a kernel could damage the folder so that a later process does not start in the sandbox
            self._confined = True
        return process
