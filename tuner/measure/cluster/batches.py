"""Batches on their way: of a caller, as sent to workers, and the events between the threads of a runner."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from relax_tune.errors import MeasureError
from relax_tune.tuner.measure.cluster.fleet import LentDevice
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult


def hidden_key(key: str) -> str:
    """Return a hash of a task's key, by which others may count the task and not ask for it."""
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


@dataclass(slots=True)
class CallerBatch:
    """One caller's batch. Results are kept by request id, so an answer that comes twice changes nothing."""

    requests: list[MeasureRequest]
    future: Future[list[MeasureResult]]
    results: dict[str, MeasureResult]

    def finish(self) -> None:
        if not self.future.done() and all(request.id in self.results for request in self.requests):
            self.future.set_result([self.results[request.id] for request in self.requests])

    def fail(self, error: MeasureError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(slots=True)
class SentTask:
    """Requests of a job that a worker is running, and the number of workers lost while running them."""

    job: CallerBatch
    requests: list[MeasureRequest]
    losses: int = 0


@dataclass(slots=True)
class SentFlight:
    """A task under way on one worker. give_up: when it is sent to another worker too; sent_on: that was done;
    gone_since: when its worker was first missing, 0 while it is there"""

    task: SentTask
    future: Any
    device: LentDevice
    give_up: float
    sent_on: bool = False
    gone_since: float = 0.0


@dataclass(frozen=True, slots=True)
class RunnerEvent:
    """A new task, or the end of a flight: its key, and the answer or the error."""

    key: str | None = None
    task: SentTask | None = None
    answer: Any = None
