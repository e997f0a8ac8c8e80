"""Streams: nothing lost, nothing doubled, in order, whatever fails or is cancelled; and the very results of single calls."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_tune.errors import ModelStateError, UserError
from relax_tune.runtime.artifact import new_artifact
from relax_tune.runtime.calls.stream import Stream
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.model import Model


def own_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("relax-tune-stream")]


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    gc.collect()
    for _ in range(500):
        if not own_threads():
            return
        time.sleep(0.01)
    pytest.fail(f"threads stay: {own_threads()}")


class Boom(Exception):
    """An error of a test's own."""


@pytest.fixture
def model(device: Device, small: Any) -> Iterator[Model]:
    with new_artifact(small.program(device.info.kind), small.constants).open(device) as opened:
        yield opened


def arrays(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.standard_normal((k % 9, 3), dtype=np.float32) for k in range(count)]


def test_stream_of_10000_items_equals_single_calls_to_the_bit(model: Model) -> None:
    total = 10_000 if model.artifact.device_kind == "c" else 300  # a call of the OpenCL device takes a millisecond
    inputs = arrays(total)
    with model.stream(({"x": x} for x in inputs), depth=3) as found:
        count = 0
        for x, results in zip(inputs, found, strict=True):
            (single,) = model.run([x])
            assert results[0].tobytes() == single.tobytes() and results[0].shape == single.shape
            count += 1
    assert count == total


def test_stream_carries_the_error_of_a_call_after_earlier_results(model: Model) -> None:
    inputs: list[Any] = [[x] for x in arrays(6)]
    inputs[4] = [np.zeros((2, 5), np.float32)]
    found = model.stream(inputs, depth=2)
    for x in inputs[:4]:
        assert next(found)[0].tobytes() == model.run(x)[0].tobytes()
    with pytest.raises(UserError, match="parameter x: expected 3"):
        next(found)
    assert list(found) == []


def test_stream_of_a_closed_model_is_refused(model: Model) -> None:
    found = model.stream(iter([[x] for x in arrays(50)]), depth=1)
    next(found)
    model.close()
    with pytest.raises(ModelStateError, match="closed"):
        list(found)
    with pytest.raises(ModelStateError):
        model.stream([])


def test_stream_refuses_wrong_arguments(model: Model) -> None:
    for depth in (0, -1, 1.5, True):
        with pytest.raises(UserError, match="depth: expected a whole number"):
            model.stream([], depth=depth)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="one of its functions"):
        model.stream([], function="nobody")
    with pytest.raises(UserError, match="got a int"):
        next(model.stream(3))  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_random_streams_give_each_item_once_and_in_order(seed: int) -> None:
    """Stages and sources that wait, fail and are cancelled anywhere: what comes is a prefix, each item once, then the error."""
    rng = random.Random(seed)
    count, depth, stages = rng.randrange(60), rng.randrange(1, 5), rng.randrange(4)
    fails_in, fails_at = rng.choice([None, *range(-1, stages)]), rng.randrange(60)
    stops_after = rng.choice([None, rng.randrange(60)])
    began: list[list[int]] = [[] for _ in range(stages)]

    def source() -> Iterator[int]:
        for k in range(count):
            if fails_in == -1 and k == fails_at:
                raise Boom(k)
            yield k

    def stage(number: int) -> Any:
        wait = rng.random() < 0.3

        def run(item: int) -> int:
            began[number].append(item)
            if wait and item % 7 == 0:
                time.sleep(0.0005)
            if fails_in == number and item == fails_at:
                raise Boom(item)
            return item

        return run

    found: list[int] = []
    error = None
    stream = Stream(source(), [stage(k) for k in range(stages)], depth)
    try:
        for item in stream:
            if stops_after is not None and len(found) == stops_after:
                stream.close()
                break
            found.append(item)
    except Boom as raised:
        error = raised
    reach = fails_at if fails_in is not None and fails_at < count else count
    wanted = reach if stops_after is None else min(reach, stops_after)
    assert found == list(range(wanted))
    cut = stops_after is not None and stops_after < reach
    assert (error is not None) == (fails_in is not None and fails_at < count and not cut)
    assert next(stream, "end") == "end"
    for items in began:
        assert items == list(range(len(items))), "an item was lost, doubled or out of order"


def test_stream_reads_no_further_ahead_than_the_queues(model: Model) -> None:
    """Before anything is asked for nothing is read; then at most two queues, two stages and the result."""
    read: list[int] = []

    def source() -> Iterator[int]:
        for k in range(1000):
            read.append(k)
            yield k

    stream = Stream(source(), [lambda x: x], depth=3)
    time.sleep(0.02)
    assert read == []
    assert next(stream) == 0
    for _ in range(100):
        if len(read) >= 9:
            break
        time.sleep(0.01)
    time.sleep(0.02)
    assert len(read) == 9  # 3 wait on each side, one is held by the reader and one by the stage, one was given
    stream.close()


def test_stages_of_one_stream_are_under_way_at_once() -> None:
    """A stage ends an item only after the stage before it has begun the next one: only side by side do they end."""
    begun = [[threading.Event() for _ in range(9)] for _ in range(3)]

    def stage(number: int) -> Any:
        def run(item: int) -> int:
            begun[number][item].set()
            assert number == 0 or item == 8 or begun[number - 1][item + 1].wait(20)
            return item

        return run

    assert list(Stream(range(9), [stage(0), stage(1)]).then(stage(2))) == list(range(9))


def _again(results: list[np.ndarray]) -> list[np.ndarray]:
    return [np.stack([results[0]] * 3, axis=1)]


def test_then_chains_models_and_leaves_the_first_stream(model: Model) -> None:
    inputs = [[x] for x in arrays(20)]
    first = model.stream(inputs)
    second = first.then(_again).then(model.run)
    with pytest.raises(UserError, match="the stream that `then` returned"):
        next(first)
    for x, results in zip(inputs, second, strict=True):
        assert results[0].tobytes() == model.run(_again(model.run(x)))[0].tobytes()
    with pytest.raises(UserError, match="not begun"):
        second.then(len)


def test_closing_ends_threads_and_the_source() -> None:
    ended = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from range(10**9)
        finally:
            ended.set()

    for leave in ("close", "with", "drop"):
        ended.clear()
        stream = Stream(source(), [lambda x: x, lambda x: x])
        assert next(stream) == 0
        if leave == "close":
            stream.close()
            stream.close()
        elif leave == "with":
            with stream:
                assert next(stream) == 1
        del stream
        gc.collect()
        assert ended.wait(10), leave


def test_stage_raising_stop_iteration_does_not_end_the_stream_silently() -> None:
    def stage(item: int) -> int:
        if item == 2:
            raise StopIteration
        return item

    found = Stream(range(9), [stage])
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(found)


@pytest.mark.process
def test_stream_in_a_forked_process_is_refused() -> None:
    stream = Stream(range(100), [lambda x: x])
    assert next(stream) == 0
    child = os.fork()
    if child == 0:
        try:
            next(stream)
        except ModelStateError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert list(stream) == list(range(1, 100))
