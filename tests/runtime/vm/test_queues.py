"""Queues of work: the caller does what it waits for, threads only what can run beside it, and nothing waits for ever."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from relax_tune.runtime.vm.queues import Work, WorkQueue

HERE = "relax-tune-"


def queues(count: int) -> list[WorkQueue]:
    made: list[WorkQueue] = []
    for at in range(count):
        made.append(WorkQueue(str(at), made))
    return made


def named() -> str:
    return threading.current_thread().name


def test_chain_over_two_queues_is_done_by_the_caller() -> None:
    a, b = queues(2)
    first = a.put(named, [])
    second = b.put(lambda: (first.result(), named()), [first])
    third = a.put(lambda: (*second.result(), named()), [second])
    assert third.result() == (named(),) * 3


def test_independent_work_is_done_side_by_side() -> None:
    a, b = queues(2)
    met = threading.Barrier(2, timeout=20)
    works = [q.put(lambda: (met.wait(), named()), []) for q in (a, b)]
    assert [w.result()[1].startswith(HERE) for w in works] == [False, True]


def test_ready_work_is_begun_beside_other_work() -> None:
    a, b = queues(2)
    met = threading.Barrier(2, timeout=20)
    first = a.put(named, [])
    other = b.put(lambda: (first.result(), met.wait()), [first])
    own = a.put(met.wait, [])
    own.result()
    other.result()


def test_error_of_work_is_raised_where_the_result_is_asked() -> None:
    a, b = queues(2)
    bad = a.put(lambda: 1 // 0, [])
    reads = b.put(bad.result, [bad])
    after = b.put(named, [])
    with pytest.raises(ZeroDivisionError):
        reads.result()
    assert after.result() == named()


def test_closed_queue_ends_the_thread() -> None:
    (a,) = queues(1)
    a.put(named, [])
    a.wake()
    (thread,) = [t for t in threading.enumerate() if t.name == f"{HERE}0" and t is a._thread]
    a.close()
    thread.join(20)
    assert not thread.is_alive()


def test_calls_of_several_threads_end_with_own_sums() -> None:
    """Random graphs of work, put in by four threads at once: each piece adds one to the sum of what it reads."""
    made = queues(3)

    def call(seed: int) -> None:
        rng = random.Random(seed)
        works: list[Work] = []
        wanted: list[int] = []
        for _ in range(12):
            reads = rng.sample(range(len(works)), min(len(works), rng.randrange(3)))
            pause = rng.choice([0, 0, 1e-4])
            needs = [works[r] for r in reads]

            def do(needs: list[Work] = needs, pause: float = pause) -> int:
                time.sleep(pause)
                return 1 + sum(w.result() for w in needs)

            works.append(rng.choice(made).put(do, needs))
            wanted.append(1 + sum(wanted[r] for r in reads))
            if rng.random() < 0.1:
                rng.choice(made).wake_if_ready()
        for at in rng.sample(range(12), 12):
            assert works[at].result() == wanted[at]

    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(call, range(400), timeout=100):
            pass
    for q in made:
        q.close()
