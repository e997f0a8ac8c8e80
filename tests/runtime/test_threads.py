"""One opened model called, closed and awaited from many threads; several models on one device; each result is right or an error."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_tune.errors import MeasureError, ModelStateError, UserError
from relax_tune.runtime.artifact import Artifact, new_artifact
from relax_tune.runtime.device.base import Device
from relax_tune.runtime.model import Model
from relax_tune.runtime.shapes import ShapeProfile

CHILD = Path(__file__).with_name("threads_checked.py")
CALLS = 320


@pytest.fixture
def artifact(device: Device, small: Any) -> Artifact:
    return new_artifact(small.program(device.info.kind), small.constants)


@pytest.fixture
def model(artifact: Artifact, device: Device) -> Iterator[Model]:
    with artifact.open(device) as opened:
        yield opened


def rows(n: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((n, 3), dtype=np.float32)


def check(model: Model, small: Any, n: int, seed: int) -> None:
    x = rows(n, seed)
    np.testing.assert_allclose(model.run([x])[0], small.reference(x), rtol=1e-5, atol=1e-5)


def together(count: int, work: Callable[[int], None]) -> None:
    """Call `work` in so many threads that start at once; the first error is raised."""
    start = threading.Barrier(count)

    def begin(thread: int) -> None:
        start.wait()
        work(thread)

    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(begin, thread) for thread in range(count)]:
            done.result()


@pytest.mark.parametrize("threads", [2, 8])
@pytest.mark.parametrize("changing", [False, True], ids=["equal shapes", "changing shapes"])
def test_model_in_threads_is_right(model: Model, small: Any, threads: int, changing: bool) -> None:
    def work(thread: int) -> None:
        for call in range(CALLS // threads):
            n = (thread * 37 + call * 101) % 700 + 14 if changing else 300
            check(model, small, n, thread * 1000 + call)

    together(threads, work)


def test_models_of_one_device_opened_run_and_closed_in_threads_are_right(
    artifact: Artifact, device: Device, small: Any
) -> None:
    def work(thread: int) -> None:
        for turn in range(4):
            with artifact.open(device) as model:
                for call in range(5):
                    check(model, small, 20 + 50 * thread + call, thread * 100 + turn)

    together(4, work)


def test_models_of_separate_devices_in_threads_are_right(artifact: Artifact, device: Device, small: Any) -> None:
    def work(thread: int) -> None:
        with artifact.open(device.info.kind) as model:
            for call in range(20):
                check(model, small, 20 + 50 * thread + call, thread * 100 + call)

    together(3, work)


def test_closed_model_refuses_with_a_runtime_error(model: Model) -> None:
    model.close()
    model.close()
    for call in (lambda: model.run([rows(3, 0)]), lambda: asyncio.run(model.run_async([rows(3, 0)]))):
        with pytest.raises(ModelStateError, match=r"open model, .*closed; open it again"):
            call()
    assert issubclass(ModelStateError, RuntimeError) and issubclass(ModelStateError, UserError)


def test_close_during_calls_lets_each_be_right_or_say_so(artifact: Artifact, device: Device, small: Any) -> None:
    for turn in range(6):
        model, refused = artifact.open(device), []

        def work(thread: int, model: Model = model, refused: list[int] = refused) -> None:
            if thread == 0:
                time.sleep(0.01)
                model.close()
                return
            for call in range(100_000):
                try:
                    check(model, small, 30 + (thread * 31 + call) % 400, call)
                except ModelStateError as error:
                    assert "closed; open it again" in str(error)
                    refused.append(thread)
                    return

        together(4, work)
        assert sorted(refused) == [1, 2, 3], turn


def test_close_twice_in_threads_closes_once(artifact: Artifact, device: Device) -> None:
    model = artifact.open(device)
    model.run([rows(3, 0)])
    together(4, lambda thread: model.close())


def test_shape_profile_counts_every_call_of_threads(artifact: Artifact, device: Device) -> None:
    profile = ShapeProfile()
    with artifact.open(device, shapes=profile) as model:
        together(4, lambda thread: [model.run([rows(n, 0)]) for n in range(20, 70)] and None)
    assert profile.histograms["small"]["n"].total == 200


def test_signal_handler_calls_inside_a_call_are_refused(model: Model) -> None:
    """As when a server's handler closes the model: the main thread is inside a call."""
    executor, found = model.executor, []

    def handler(*_: object) -> None:
        for action in (lambda: model.run([rows(3, 0)]), model.close):
            try:
                action()
            except ModelStateError as error:
                found.append(str(error))

    before, bind = signal.signal(signal.SIGUSR1, handler), executor.bind

    def interrupted(*given: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return bind(*given)

    executor.bind = interrupted  # type: ignore[method-assign]
    try:
        model.run([rows(3, 0)])
    finally:
        signal.signal(signal.SIGUSR1, before)
        del executor.bind
    assert len(found) == 2 and all("inside its own call" in text for text in found)
    model.run([rows(3, 0)])


def test_close_inside_a_call_of_one_function_closes_none(
    device: Device, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = [replace(small.program(device.info.kind), name=name) for name in ("first", "second")]
    with new_artifact(programs, small.constants).open(device) as model:
        second, found = model.executors["second"], []

        def closing(*given: Any) -> Any:
            with pytest.raises(ModelStateError, match="inside its own call"):
                model.close()
            found.append(1)
            return bind(*given)

        bind = second.bind
        monkeypatch.setattr(second, "bind", closing)
        for name in ("second", "first"):
            x = rows(20, 0)
            np.testing.assert_allclose(model.run([x], name)[0], small.reference(x), rtol=1e-5, atol=1e-5)
        assert found == [1]


def test_failed_call_leaves_the_turn_to_others(model: Model, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise MeasureError("the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(model.executor.device, "upload", fails)
        patch.setattr(model.executor.memory, "_place", lambda *_: False)
        with pytest.raises(MeasureError, match="the device is lost"):
            model.run([rows(20, 0)])
    together(2, lambda thread: check(model, small, 20, thread))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_forked_model_refuses_calls(model: Model, small: Any) -> None:
    """libgomp's threads, and those of OpenCL, stay in the first process: a call would wait for them for ever."""
    bound = model.bind([rows(20, 0)])
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with model.executor.device.turn:  # as a call in another thread when the process forks
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, from Python 3.12
        child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)
            with pytest.raises(ModelStateError, match="opened before fork"):
                model.run([rows(20, 0)])
            with pytest.raises(ModelStateError, match="opened before fork"):
                bound.run()
            model.close()
            code = 0
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    release.set()
    thread.join()
    assert status == 0
    check(model, small, 20, 2)


def test_run_async_in_two_event_loops_is_right(model: Model, small: Any) -> None:
    async def calls(thread: int) -> None:
        given = [rows(14 + (thread * 31 + k * 53) % 500, k) for k in range(20)]
        for x, (z,) in zip(given, await asyncio.gather(*(model.run_async([x]) for x in given)), strict=True):
            np.testing.assert_allclose(z, small.reference(x), rtol=1e-5, atol=1e-5)

    together(2, lambda thread: asyncio.run(calls(thread)))


def test_run_async_several_at_once_are_right(model: Model, small: Any) -> None:
    async def main() -> None:
        given = [rows(14 + (k * 53) % 500, k) for k in range(60)]
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        for x, (z,) in zip(given, await asyncio.gather(*(model.run_async([x]) for x in given)), strict=True):
            np.testing.assert_allclose(z, small.reference(x), rtol=1e-5, atol=1e-5)
        with pytest.raises(UserError, match="expected n <= 4096"):
            await model.run_async([rows(5000, 0)])
        ticking.cancel()
        assert ticks > 1  # the event loop went on

    asyncio.run(main())


def test_run_async_cancelled_while_waiting_returns_and_leaves_the_model_usable(model: Model, small: Any) -> None:
    async def main() -> None:
        held = threading.Event()

        def hold() -> None:
            with model.executor.device.turn:
                held.set()
                release.wait(30)

        release, thread = threading.Event(), threading.Thread(target=hold)
        thread.start()
        held.wait(30)
        running, waiting = (asyncio.create_task(model.run_async([rows(n, 0)])) for n in (5, 6))
        await asyncio.sleep(0.05)
        for task in (waiting, running):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        release.set()
        thread.join()
        x = rows(7, 1)
        np.testing.assert_allclose((await model.run_async([x]))[0], small.reference(x), rtol=1e-5, atol=1e-5)

    asyncio.run(main())


def test_run_async_waiting_when_the_model_closes_is_told(model: Model) -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(model.run_async([rows(2000, k)])) for k in range(40)]
        await asyncio.sleep(0)
        model.close()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(f, (list, ModelStateError)) for f in found)
        assert any(isinstance(f, ModelStateError) for f in found)

    asyncio.run(main())


def test_run_async_inside_run_async_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a host routine may do it: the one worker would wait for itself."""
    monkeypatch.setattr(model, "run", lambda *given: asyncio.run(model.run_async([rows(3, 0)])))
    with pytest.raises(ModelStateError, match=r"no asynchronous call .*inside another"):
        asyncio.run(model.run_async([rows(3, 0)]))


@pytest.mark.process
@pytest.mark.ccompiler
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["model", "unguarded", "plan"])
def test_c_device_under_thread_sanitizer(mode: str, tmp_path: Path) -> None:
    """The guarded model and the plan in C have no race; the same calls without the device's turn have."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    asked = subprocess.run(["gcc", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True)
    library = Path(asked.stdout.strip())
    if not library.is_absolute():
        pytest.skip("gcc has no ThreadSanitizer library (libtsan)")
    options = {"LD_PRELOAD": str(library), "TSAN_OPTIONS": "exitcode=66 report_signal_unsafe=0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(CHILD), mode, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **(options if mode != "plan" else {})},
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer cannot run with this system's address layout")
    raced = "WARNING: ThreadSanitizer: data race" in done.stderr
    assert f"{mode} done" in done.stdout, done.stdout[-1000:] + done.stderr[:6000]
    assert raced == (mode == "unguarded"), done.stderr[:6000]
