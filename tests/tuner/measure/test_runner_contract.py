"""The `Runner` contract, on every runner there is, with real kernels: good ones and every way of being bad."""

from __future__ import annotations

import importlib
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
from tests.tuner.measure.cluster.lent import lend
from tests.tuner.measure.measure_programs import LIMIT_SECS, POLICY, check, program, request

from relax_tune.database.reference import SPREAD
from relax_tune.errors import MeasureError
from relax_tune.runtime.library.registry import library_facts, open_libraries
from relax_tune.tuner.measure.base import OtherUnit, Runner
from relax_tune.tuner.measure.cluster.processes import start_scheduler
from relax_tune.tuner.measure.cluster.runner import DaskRunner
from relax_tune.tuner.measure.local import LocalRunner
from relax_tune.tuner.measure.messages import MeasureRequest, TimingPolicy

pytestmark = pytest.mark.process

OpenRunner = Callable[[str], Runner]


@pytest.fixture(scope="module")
def open_runner() -> Iterator[OpenRunner]:
    """Opens each kind of runner once for the module, and closes what was opened."""
    opened: dict[str, Runner] = {}
    with ExitStack() as stack:

        def opener(kind: str) -> Runner:
            if kind not in opened:
                if kind == "dask-c":
                    pytest.importorskip("distributed", reason="Dask Distributed is not installed (extra cluster)")
                    scheduler, address = start_scheduler()
                    stack.enter_context(scheduler)
                    stack.enter_context(lend(address))
                    opened[kind] = stack.enter_context(DaskRunner(address, "c"))
                elif kind == "browser":
                    pytest.importorskip("tornado", reason="tornado is not installed (extra browser)")
                    tabs = importlib.import_module("tests.tuner.measure.browser.tabs")
                    opened[kind] = stack.enter_context(tabs.runner_of(tabs.Tabs()))
                else:
                    opened[kind] = stack.enter_context(LocalRunner(kind.removeprefix("local-")))
            return opened[kind]

        yield opener


@pytest.fixture(
    params=[
        pytest.param("local-c", marks=pytest.mark.ccompiler),
        pytest.param("local-opencl", marks=pytest.mark.opencl),
        pytest.param("dask-c", marks=pytest.mark.ccompiler),
        "browser",
    ]
)
def runner(request: pytest.FixtureRequest, open_runner: OpenRunner) -> Runner:
    kind = str(request.param)
    if kind == "local-opencl":
        pytest.importorskip("pyopencl", reason="pyopencl is not installed (extra opencl)")
        skip_without_an_opencl_compiler(open_runner(kind))
    elif kind != "browser" and shutil.which("gcc") is None:
        pytest.skip("there is no C compiler")
    return open_runner(kind)


def skip_without_an_opencl_compiler(runner: Runner) -> None:
    """PoCL's wheel carries a compiler that refuses every kernel on processors younger than itself."""
    subject = program("good", "opencl")
    (result,) = runner.submit([MeasureRequest("probe", subject.to_json(), (), ())]).result(LIMIT_SECS)
    if result.stage == "compile" and "unknown target CPU" in result.message:
        pytest.skip("the OpenCL driver's compiler does not know this processor")


def language_of(runner: Runner) -> str:
    return runner.device_info().kind


def test_a_good_candidate_is_checked_and_timed_at_every_shape(runner: Runner) -> None:
    (result,) = runner.submit([request("good", language_of(runner))]).result(LIMIT_SECS)
    assert (result.status, result.stage, result.message) == ("ok", None, "")
    assert result.checked and result.build_secs > 0 and result.run_secs > 0
    assert [timing.symbols for timing in result.timings] == [{"n": 1}, {"n": 1000}, {"n": 5000}]
    for timing in result.timings:
        assert POLICY.min_repeats <= len(timing.samples_secs) <= POLICY.max_repeats
        assert min(timing.samples_secs) > 0
        assert timing.regime == "warm" and not timing.lost and timing.launches_per_sample >= 1


def test_result_names_worker_host_and_unit(runner: Runner) -> None:
    (result,) = runner.submit([request("syntax", language_of(runner))]).result(LIMIT_SECS)
    unit, host = result.unit, socket.gethostname()
    assert unit.host == host and unit.worker.startswith(host)
    assert unit.unit == ("browser" if language_of(runner) == "webgpu" else f"cpu:{host}")


def test_flushed_regime_times_with_cold_caches(runner: Runner) -> None:
    asked = replace(request("good", language_of(runner)), policy=replace(POLICY, regime="flushed"))
    (result,) = runner.submit([asked]).result(LIMIT_SECS)
    assert result.status == "ok" and result.checked
    for timing in result.timings:
        assert timing.regime == "flushed"
        assert timing.launches_per_sample == (16 if language_of(runner) == "webgpu" else 1)
        assert len(timing.samples_secs) >= POLICY.min_repeats and min(timing.samples_secs) > 0


def test_every_bad_candidate_fails_by_itself(runner: Runner) -> None:
    language = language_of(runner)
    kinds = ["good", "syntax", "hang", "wrong", "silent", "no-library", "crash", "stale", "overrun", "also-good"]
    batch = [request(kind, language, deadline_secs=3.0 if kind == "hang" else 60.0) for kind in kinds]
    results = runner.submit(batch).result(LIMIT_SECS)
    assert [result.id for result in results] == kinds
    found = {result.id: result for result in results}
    for kind in ("good", "also-good"):
        assert found[kind].status == "ok", found[kind]
        assert len(found[kind].timings) == 3
    stages = {result.id: result.stage for result in results if result.status == "failed"}
    assert stages == {
        "syntax": "compile",
        "hang": "timeout",
        "wrong": "wrong-result",
        "silent": "wrong-result",
        "no-library": "launch",
        "crash": "crash",
        "stale": "wrong-result",
        "overrun": "wrong-result",
    }
    assert all(not result.timings and not result.checked for result in results if result.status == "failed")
    assert "error" in found["syntax"].message
    assert "3 s" in found["hang"].message
    assert "elements differ" in found["wrong"].message and "'n': 4096" in found["wrong"].message
    assert "never written" in found["silent"].message
    assert "nolib" in found["no-library"].message
    assert ("lost its device" if language == "webgpu" else "SIG") in found["crash"].message and "check" in found[
        "crash"
    ].message
    assert "after its 16384 bytes" in found["overrun"].message


def test_runner_repeated_id_is_measured_once_per_batch(runner: Runner) -> None:
    language = language_of(runner)
    twice = [request("good", language, id="a"), request("also-good", language, id="b")]
    for _ in range(2):
        results = runner.submit([*twice, twice[0]]).result(LIMIT_SECS)
        assert [(result.id, result.status) for result in results] == [("a", "ok"), ("b", "ok")]


def test_batches_may_be_queued_and_may_be_empty(runner: Runner) -> None:
    language = language_of(runner)
    futures = [runner.submit([request("good", language, id=f"r{number}")]) for number in range(3)]
    assert runner.submit([]).result(LIMIT_SECS) == []
    assert [future.result(LIMIT_SECS)[0].id for future in futures] == ["r0", "r1", "r2"]


def test_runner_marks_clear_loser_as_lost(runner: Runner) -> None:
    given = request("good", language_of(runner))
    policy = TimingPolicy(min_repeats=50, max_repeats=50, budget_secs=1.0, stop_above=(None, 1e-12, 1e6))
    raced = MeasureRequest(given.id, given.program_json, given.checks, given.timings, policy)
    (result,) = runner.submit([raced]).result(LIMIT_SECS)
    assert [timing.lost for timing in result.timings] == [False, True, False]
    counts = [len(timing.samples_secs) for timing in result.timings]
    assert counts[0] == counts[2] == 50 and counts[1] <= 2


def test_shapes_outside_the_bounds_and_unreadable_programs_are_values_too(runner: Runner) -> None:
    given = request("good", language_of(runner))
    outside = MeasureRequest("outside", given.program_json, (), ({"n": 5001},), POLICY)
    foreign = MeasureRequest("foreign", '{"schema": 99}', (), ({"n": 1},), POLICY)
    results = runner.submit([outside, foreign]).result(LIMIT_SECS)
    assert [(result.id, result.stage) for result in results] == [("outside", "constraint"), ("foreign", "compile")]
    assert "5001" in results[0].message


def test_a_result_without_checks_is_not_called_checked(runner: Runner) -> None:
    given = request("wrong", language_of(runner))
    unchecked = MeasureRequest(given.id, given.program_json, (), ({"n": 7},), POLICY)
    (result,) = runner.submit([unchecked]).result(LIMIT_SECS)
    assert result.status == "ok" and not result.checked


def test_runner_accepts_equal_kernel_names_with_different_sources(runner: Runner) -> None:
    language = language_of(runner)
    batch = []
    for kind in ("good", "wrong", "also-good"):
        subject = program(kind, language, name="same_name")
        batch.append(MeasureRequest(kind, subject.to_json(), (check(subject, 100, 5),), (), POLICY))
    results = runner.submit(batch).result(LIMIT_SECS)
    assert [result.stage for result in results] == [None, "wrong-result", None]


def test_the_device_describes_itself(runner: Runner) -> None:
    info = runner.device_info()
    assert info.kind in ("c", "opencl", "webgpu") and info.name and dict(info.fingerprint) and dict(info.limits)
    assert info.libraries == (() if info.kind == "webgpu" else library_facts(open_libraries()))


@pytest.mark.ccompiler
def test_closed_runner_refuses_and_ends_pending_futures() -> None:
    if shutil.which("gcc") is None:
        pytest.skip("there is no C compiler")
    subject = LocalRunner("c")
    pending = [subject.submit([request("hang", "c", id=str(number))]) for number in range(2)]
    subject.close()
    subject.close()
    for future in pending:
        with pytest.raises(MeasureError, match="closed"):
            future.result(LIMIT_SECS)
    with pytest.raises(MeasureError, match="closed"):
        subject.submit([])


def test_calibrate_returns_times_of_the_unit_and_refuses_other_times(runner: Runner) -> None:
    times = runner.calibrate({})
    kernels = {name: secs for name, secs in times.items() if not name.endswith(SPREAD)}
    assert len(kernels) == 2 and min(kernels.values()) > 0
    assert runner.calibrate(times) == times
    if not isinstance(runner, DaskRunner):  # the worker of these tests lends with any tolerance
        with pytest.raises(OtherUnit, match="reference kernel"):
            runner.calibrate({name: secs * 1e4 for name, secs in kernels.items()})
