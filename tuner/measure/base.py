"""The `Runner` contract: measuring candidates on one kind of device, local or remote.

Tests: `tests/tuner/measure/test_runner_contract.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

from relax_tune.errors import FleetUnavailable
from relax_tune.runtime.device.base import DeviceInfo
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult


class OtherUnit(FleetUnavailable):
    """No unit is as fast as the reference times of the records."""


class Runner(Protocol):
    """A service that builds, checks and times candidates on one device, in processes that it supervises.

    Promises of every implementation (`tests/tuner/measure/test_runner_contract.py` runs over all of them):

    * The future of `submit` resolves to one result per distinct request id, in the order the ids first appear. A
      request that hangs, crashes, is wrong or does not build becomes a failed result with its stage; the other requests
      of its batch are still measured. A future raises MeasureError only when no measurement is possible any
      more: the device or the cluster is gone, or the runner was closed.
    * An id given twice in a batch is measured once. An id may be submitted again later: measuring has no lasting
      effect.
    * As many batches are measured at a time as `slots` says, taken in the order of submission; candidates of one batch
      are timed in interleaved rounds on the same data, so their times may be compared with each other.
    * No deadline is needed by the caller: every step is bounded by `MeasureRequest.deadline_secs`, so futures resolve.
    * Requests and results are copied on the way: the runner keeps no reference to the caller's arrays once the future
      is done.
    * Methods may be called from any thread. `close` may be called twice; it kills running measurements, and pending
      futures then raise MeasureError.
    """

    def submit(self, batch: Sequence[MeasureRequest]) -> Future[list[MeasureResult]]:
        """Queue a batch and return immediately. An empty batch resolves to an empty list."""
        ...

    def device_info(self) -> DeviceInfo:
        """Describe the measured device.

        Raises:
            MeasureError: the device cannot be opened within the runner's time limit.
        """
        ...

    def slots(self) -> int:
        """Return how many batches it pays to submit at a time: 1 for one device."""
        ...

    def calibrate(self, reference: Mapping[str, float]) -> Mapping[str, float]:
        """Measure only on units whose reference kernels take about these times.

        Args:
            reference: as `database.reference.Reference`; empty if no unit was calibrated before.

        Returns:
            The reference times in force: the argument, or the times of a unit if it is empty.

        Raises:
            OtherUnit: no unit is as fast.
            MeasureError: a device cannot run the reference kernels.
        """
        ...

    def close(self) -> None:
        """Kill the processes this runner owns and release everything."""
        ...


class EnteringRunner:
    """A runner that calls a function before its first batch.

    Args:
        enter: may raise, and is then called again before the next batch.
    """

    def __init__(self, runner: Runner, enter: Callable[[], None]) -> None:
        self._runner, self._enter = runner, enter
        self._entered = False

    def submit(self, batch: Sequence[MeasureRequest]) -> Future[list[MeasureResult]]:
        """See `Runner.submit`."""
        # An empty batch measures nothing, so what its records would need is not entered yet.
        if batch and not self._entered:
            self._enter()
            self._entered = True
        return self._runner.submit(batch)

    def device_info(self) -> DeviceInfo:
        """See `Runner.device_info`."""
        return self._runner.device_info()

    def slots(self) -> int:
        """See `Runner.slots`."""
        return self._runner.slots()

    def calibrate(self, reference: Mapping[str, float]) -> Mapping[str, float]:
        """See `Runner.calibrate`."""
        return self._runner.calibrate(reference)

    def close(self) -> None:
        """See `Runner.close`."""
        self._runner.close()
