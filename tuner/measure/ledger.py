"""The requests of a runner from submission to result: what is sent next, sent again after a loss, or given up.

A runner sends groups of requests over its transport (a device process, a page, Dask) and reports here how each attempt ended.
A ledger is not thread-safe: one thread of the runner uses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal

from relax_tune.errors import FleetUnavailable
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult, Stage, failed


@dataclass(slots=True, eq=False)
class Batch:
    """The batch of one caller.

    Attributes:
        results: by request id. The first result of a request counts, so a second answer has no effect.
        isolated: ids of requests that share no step with others, since one of them ended the process.
    """

    requests: list[MeasureRequest]
    future: Future[list[MeasureResult]] = field(default_factory=Future)
    results: dict[str, MeasureResult] = field(default_factory=dict)
    isolated: set[str] = field(default_factory=set)
    _begun: bool = False

    def begin(self) -> bool:
        """Mark the future as running; it can no longer be cancelled. Returns False if it was cancelled or is resolved."""
        if self._begun:
            return not self.future.done()
        # A future may be set running once only; a second call would raise.
        self._begun = True
        return self.future.set_running_or_notify_cancel()

    def store(self, results: Iterable[MeasureResult], expected: Sequence[MeasureRequest]) -> None:
        """Store the results of `expected`, and ignore others."""
        ids = {request.id for request in expected}
        for result in results:
            if result.id in ids:
                # The first result counts: a group that was sent again may answer twice after a slow connection.
                self.results.setdefault(result.id, result)

    def missing(self, requests: Sequence[MeasureRequest]) -> list[MeasureRequest]:
        """Return the requests without a result."""
        return [request for request in requests if request.id not in self.results]

    def finish(self) -> None:
        """Resolve the future once each request has a result."""
        if not self.missing(self.requests) and self.begin():
            self.future.set_result([self.results[request.id] for request in self.requests])

    def fail(self, error: BaseException) -> None:
        """Resolve the future with an error."""
        if self.begin():
            self.future.set_exception(error)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Requests of a batch that are sent together.

    Attributes:
        losses: number of attempts that ended without a request to blame.
        disconnects: number of attempts that ended because the connection was lost.
        suspect: the only request ended a process once, in a larger group.
    """

    batch: Batch
    requests: list[MeasureRequest]
    losses: int = 0
    disconnects: int = 0
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Blame:
    """The reason why an attempt ended before its group was complete.

    Attributes:
        kind: `lost` means a lost device whose process still answers, `departed` an end that no request has caused, `disconnected`
            a lost connection.
        ids: requests whose step was running; empty between requests, or if the steps are not known.
    """

    kind: Literal["crash", "timeout", "lost", "departed", "disconnected"]
    ids: tuple[str, ...]
    message: str


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often requests are sent again.

    Attributes:
        most_losses: number of losses without a request to blame at which a group fails.
        bisects: halve a group of several requests at each such loss, which then does not count. Otherwise the group is sent whole,
            and request by request for the last time.
        retries_single: retry a request after a crash even if it was the only one of its group.
        most_disconnects: number of lost connections after which a batch fails at the next one.
    """

    most_losses: int
    bisects: bool
    retries_single: bool = False
    most_disconnects: int = 0


class Ledger:
    """The groups that wait to be sent, in order, and the attribution of attempts that ended early."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._waiting: deque[Group] = deque()

    def __len__(self) -> int:
        """Return the number of waiting groups."""
        return len(self._waiting)

    def add(self, batch: Batch) -> None:
        """Append a batch; one without requests has nothing to send."""
        if batch.requests:
            self._waiting.append(Group(batch, batch.requests))

    def take(self) -> Group | None:
        """Remove and return the group to send next; None if there is none. Groups of cancelled batches are dropped."""
        while self._waiting:
            group = self._waiting.popleft()
            if group.batch.begin():
                return group
        return None

    def clear(self) -> list[Group]:
        """Remove and return all waiting groups."""
        groups = list(self._waiting)
        self._waiting.clear()
        return groups

    def put_back(self, *groups: Group) -> None:
        """Send groups next, in this order, except those whose batch is resolved."""
        self._waiting.extendleft(group for group in reversed(groups) if not group.batch.future.done())

    def end_early(self, group: Group, blame: Blame) -> None:
        """Decide what becomes of the requests of a group whose attempt ended early: sent again, or failed.

        A request that was running when the process died is measured once more in a group by itself, because an earlier
        candidate may have damaged the process; only a second death is its failure.
        """
        batch = group.batch
        rest = batch.missing(group.requests)
        if not rest or batch.future.done():
            return
        guilty = [request for request in rest if request.id in blame.ids]
        if blame.kind == "disconnected" and group.disconnects >= self._policy.most_disconnects:
            batch.fail(FleetUnavailable(blame.message))
        elif blame.kind == "disconnected":
            self.put_back(replace(group, requests=rest, disconnects=group.disconnects + 1))
        # Neither counts as a loss: no request caused the end, or the request that lost the device has its answer
        # already, so the group gets smaller with each attempt.
        elif blame.kind == "departed" or (blame.kind == "lost" and 1 < len(rest) < len(group.requests)):
            self.put_back(replace(group, requests=rest))
        elif not guilty:
            self._count_loss(group, rest, blame)
        elif len(guilty) > 1:
            # Several requests shared the step. Repeated one by one, only the guilty one ends the process.
            batch.isolated.update(request.id for request in guilty)
            self.put_back(replace(group, requests=rest))
        else:
            self._blame_one(group, guilty[0], blame)
            if others := [request for request in rest if request is not guilty[0]]:
                self.put_back(replace(group, requests=others))

    def _count_loss(self, group: Group, rest: list[MeasureRequest], blame: Blame) -> None:
        losses = group.losses + 1
        # Halving finds one bad request among n with about log2(n) losses instead of n.
        if len(rest) > 1 and self._policy.bisects:
            middle = len(rest) // 2
            self.put_back(replace(group, requests=rest[:middle]), replace(group, requests=rest[middle:]))
        elif losses >= self._policy.most_losses:
            for request in rest:
                self._blame_one(replace(group, requests=[request]), request, blame)
        # The last attempt sends each request separately, so that only the one at fault fails.
        elif len(rest) > 1 and losses == self._policy.most_losses - 1:
            self.put_back(*(Group(group.batch, [request], losses) for request in rest))
        else:
            self.put_back(replace(group, requests=rest, losses=losses))

    def _blame_one(self, group: Group, request: MeasureRequest, blame: Blame) -> None:
        retried = len(group.requests) == 1 and (group.suspect or not self._policy.retries_single)
        if blame.kind == "crash" and not retried:
            # Behind all other groups of its batch: if it ends the process again, the others are measured already.
            last = max((at for at, other in enumerate(self._waiting, 1) if other.batch is group.batch), default=0)
            self._waiting.insert(last, replace(group, requests=[request], suspect=True))
        else:
            stage: Stage = "timeout" if blame.kind == "timeout" else "crash"
            group.batch.results.setdefault(request.id, failed(request.id, stage, blame.message))
