"""What becomes of requests whose attempt ended early: sent again in which groups, and failed after how many losses."""

from __future__ import annotations

from typing import Literal

import pytest

from relax_tune.errors import FleetUnavailable, MeasureError
from relax_tune.tuner.measure.ledger import Batch, Blame, Group, Ledger, RetryPolicy
from relax_tune.tuner.measure.messages import MeasureRequest, MeasureResult

KNOWN_STEPS = RetryPolicy(most_losses=2, bisects=True)
PAGE = RetryPolicy(most_losses=2, bisects=True, retries_single=True)
WORKERS = RetryPolicy(most_losses=3, bisects=False, most_disconnects=2)


def begin(policy: RetryPolicy, ids: str) -> tuple[Ledger, Batch]:
    ledger, batch = Ledger(policy), Batch([MeasureRequest(id, "{}", (), ()) for id in ids])
    ledger.add(batch)
    return ledger, batch


def ids_of(group: Group) -> str:
    return "".join(request.id for request in group.requests)


def take(ledger: Ledger) -> Group:
    group = ledger.take()
    assert group is not None
    return group


def sequence(ledger: Ledger) -> list[str]:
    """The waiting groups in order."""
    groups = ledger.clear()
    ledger.put_back(*groups)
    return [ids_of(group) for group in groups]


def end(
    ledger: Ledger,
    kind: Literal["crash", "timeout", "lost", "departed", "disconnected"],
    guilty: str = "",
    ok: str = "",
) -> str:
    """End the next attempt early, after results for `ok`; return the ids of its group."""
    group = take(ledger)
    group.batch.store([MeasureResult(id, "ok", checked=False) for id in ok], group.requests)
    ledger.end_early(group, Blame(kind, tuple(guilty), "why"))
    return ids_of(group)


def stages(batch: Batch) -> dict[str, str | None]:
    return {id: result.stage for id, result in sorted(batch.results.items())}


def test_request_crashing_in_a_group_is_deferred_and_fails_at_the_second_crash() -> None:
    ledger, batch = begin(KNOWN_STEPS, "abc")
    end(ledger, "crash", guilty="b", ok="a")
    assert sequence(ledger) == ["c", "b"]
    end(ledger, "departed")
    assert sequence(ledger) == ["c", "b"], "no request is to blame"
    take(ledger)
    end(ledger, "crash", guilty="b")
    assert not ledger and stages(batch) == {"a": None, "b": "crash"}


def test_request_over_the_deadline_fails_at_once() -> None:
    ledger, batch = begin(KNOWN_STEPS, "abc")
    end(ledger, "timeout", guilty="b", ok="a")
    assert sequence(ledger) == ["c"] and stages(batch)["b"] == "timeout"


def test_several_running_requests_are_isolated() -> None:
    ledger, batch = begin(KNOWN_STEPS, "abcd")
    end(ledger, "crash", guilty="bc", ok="a")
    assert sequence(ledger) == ["bcd"] and batch.isolated == {"b", "c"}


def test_crash_between_requests_is_attributed_by_bisection() -> None:
    ledger, batch = begin(KNOWN_STEPS, "abcde")
    end(ledger, "crash")
    assert sequence(ledger) == ["ab", "cde"]
    end(ledger, "crash", ok="a")
    assert sequence(ledger) == ["b", "cde"]
    end(ledger, "crash")
    assert sequence(ledger) == ["cde"] and stages(batch) == {"a": None, "b": "crash"}


def test_device_lost_after_results_continues_with_the_rest() -> None:
    ledger, _ = begin(KNOWN_STEPS, "abcd")
    end(ledger, "lost", ok="a")
    assert sequence(ledger) == ["bcd"]
    end(ledger, "lost")
    assert sequence(ledger) == ["b", "cd"]


@pytest.mark.parametrize(("policy", "crashes"), [(KNOWN_STEPS, 1), (PAGE, 2)])
def test_only_request_of_a_group_fails_after_the_crashes_of_the_policy(policy: RetryPolicy, crashes: int) -> None:
    ledger, batch = begin(policy, "a")
    for _ in range(crashes):
        end(ledger, "crash", guilty="a")
    assert not ledger and stages(batch) == {"a": "crash"}


@pytest.mark.parametrize(("policy", "losses"), [(KNOWN_STEPS, 2), (PAGE, 3)])
def test_only_request_without_running_step_is_retried(policy: RetryPolicy, losses: int) -> None:
    ledger, batch = begin(policy, "a")
    for _ in range(losses):
        assert not batch.results
        end(ledger, "crash")
    assert not ledger and stages(batch) == {"a": "crash"}


@pytest.mark.parametrize(
    ("most", "ids", "groups"),
    [(1, "ab", ["ab"]), (2, "ab", ["ab", "a", "b"]), (3, "ab", ["ab", "ab", "a", "b"]), (3, "a", ["a", "a", "a"])],
)
def test_lost_workers_send_the_group_whole_then_one_by_one_then_fail(most: int, ids: str, groups: list[str]) -> None:
    ledger, batch = begin(RetryPolicy(most, bisects=False), ids)
    ended = []
    while ledger:
        ended.append(end(ledger, "crash"))
    assert ended == groups
    batch.finish()
    assert [result.stage for result in batch.future.result(0)] == ["crash"] * len(ids)


def test_disconnects_are_no_losses_and_are_limited() -> None:
    ledger, batch = begin(WORKERS, "ab")
    for _ in range(2):
        assert end(ledger, "disconnected") == "ab"
    group = take(ledger)
    assert (group.losses, group.disconnects) == (0, 2) and not batch.future.done()
    ledger.end_early(group, Blame("disconnected", (), "lost 2 times"))
    assert not ledger and not batch.results
    with pytest.raises(FleetUnavailable, match="lost 2 times"):
        batch.future.result(0)


def test_resolved_batch_is_not_sent_again() -> None:
    ledger, batch = begin(WORKERS, "ab")
    group = take(ledger)
    batch.fail(MeasureError("closed"))
    ledger.put_back(group)
    kinds: tuple[Literal["crash", "departed", "disconnected"], ...] = ("crash", "departed", "disconnected")
    for kind in kinds:
        ledger.end_early(group, Blame(kind, (), "why"))
    assert not ledger and not batch.results


def test_suspect_request_is_measured_before_the_next_batch() -> None:
    ledger, _ = begin(KNOWN_STEPS, "abc")
    ledger.add(Batch([MeasureRequest("next", "{}", (), ())]))
    end(ledger, "crash", guilty="b", ok="a")
    assert sequence(ledger) == ["c", "b", "next"]


def test_cancelled_batch_is_not_sent_and_a_sent_one_is_not_cancelled() -> None:
    ledger, cancelled = begin(WORKERS, "ab")
    sent = Batch([MeasureRequest("c", "{}", (), ())])
    ledger.add(sent)
    assert cancelled.future.cancel() and ids_of(take(ledger)) == "c"
    assert ledger.take() is None and not ledger and not sent.future.cancel()
    cancelled.fail(MeasureError("closed"))
    assert cancelled.future.cancelled()


def test_second_answer_has_no_effect() -> None:
    _, batch = begin(WORKERS, "a")
    for run_secs in (1.0, 2.0):
        batch.store([MeasureResult(id, "ok", run_secs=run_secs) for id in "ax"], batch.requests)
        batch.finish()
    assert [result.run_secs for result in batch.future.result(0)] == [1.0] and set(batch.results) == {"a"}
