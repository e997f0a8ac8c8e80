"""What only the far runner promises: lost workers and schedulers, missing labels, and who may be talked to openly."""

from __future__ import annotations

import contextlib
import json
import logging.handlers
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest
from tests.tuner.job.job_processes import JobProcess, scratch
from tests.tuner.measure.cluster.fake_unit import start_fake
from tests.tuner.measure.cluster.lent import lend, loopback_files
from tests.tuner.measure.measure_programs import LIMIT_SECS, POLICY, program, request

from relax_tune.errors import MeasureError
from relax_tune.tuner.measure.cluster.address import TlsFiles, check_address, host_and_port, is_loopback
from relax_tune.tuner.measure.cluster.processes import ClusterProcess, serve_worker, start_scheduler, start_worker
from relax_tune.tuner.measure.messages import MeasureRequest

distributed = pytest.importorskip("distributed", reason="Dask Distributed is not installed (extra cluster)")
from relax_tune.tuner.measure.cluster.client import SchedulerConnection  # noqa: E402
from relax_tune.tuner.measure.cluster.runner import DaskRunner  # noqa: E402
from relax_tune.tuner.measure.cluster.trust.security import FleetSecurity  # noqa: E402

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
FILES = TlsFiles("ca.pem", "certificate.pem", "key.pem")

T = TypeVar("T")


@pytest.fixture(scope="module")
def scheduler() -> Iterator[tuple[ClusterProcess, str]]:
    process, address = start_scheduler()
    with process:
        yield process, address


@pytest.mark.process
@needs_compiler
@pytest.mark.ccompiler
@pytest.mark.slow
def test_a_lost_worker_costs_no_result(scheduler: tuple[ClusterProcess, str]) -> None:
    _, address = scheduler
    first = lend(address)
    with first, DaskRunner(address, "c") as runner:
        future = runner.submit([request("hang", "c", deadline_secs=2.0), request("good", "c")])
        queued = runner.submit([request("also-good", "c")])
        with pytest.raises(TimeoutError):
            future.result(1.0)  # the hang is under way
        first.kill()
        with lend(address):
            assert [result.stage for result in future.result(LIMIT_SECS)] == ["timeout", None]
            assert [result.stage for result in queued.result(LIMIT_SECS)] == [None]


@pytest.mark.process
@needs_compiler
@pytest.mark.ccompiler
def test_request_losing_workers_is_given_up(scheduler: tuple[ClusterProcess, str]) -> None:
    _, address = scheduler
    first = lend(address)
    endless = MeasureRequest("endless", program("hang", "c").to_json(), (), ({"n": 1},), POLICY, deadline_secs=600.0)
    with first, DaskRunner(address, "c", attempts=1) as runner:
        future = runner.submit([endless])
        with pytest.raises(TimeoutError):
            future.result(1.5)
        first.kill()
        (result,) = future.result(LIMIT_SECS)
    assert result.stage == "crash" and "1 workers lost" in result.message


@pytest.mark.process
def test_label_without_worker_raises_in_time(scheduler: tuple[ClusterProcess, str]) -> None:
    with pytest.raises(MeasureError, match=r"'abacus'.* within 0\.5 s"):
        DaskRunner(scheduler[1], "abacus", open_secs=0.5)


@pytest.mark.process
def test_label_with_missing_device_raises(scheduler: tuple[ClusterProcess, str]) -> None:
    with start_worker(scheduler[1], ["abacus"]) as worker:
        assert worker.wait(LIMIT_SECS) == 3
        assert "expected a device c, c:PART" in worker.log() and "got 'abacus'" in worker.log()


@pytest.mark.slow
def test_no_scheduler_is_an_error_within_the_limit() -> None:
    with pytest.raises(MeasureError, match="expected a Dask scheduler"):
        DaskRunner("tcp://127.0.0.1:9", "c", open_secs=0.5)


@pytest.mark.process
@needs_compiler
@pytest.mark.ccompiler
def test_a_lost_scheduler_ends_futures_with_an_error() -> None:
    process, address = start_scheduler()
    with process, lend(address), DaskRunner(address, "c", open_secs=20.0) as runner:
        future = runner.submit([request("hang", "c")])
        with pytest.raises(TimeoutError):
            future.result(1.0)
        said = logging.handlers.BufferingHandler(1000)
        logging.getLogger("distributed.client").addHandler(said)
        process.kill()
        with pytest.raises(MeasureError, match=r"scheduler at .* (lost|does not answer)|no worker"):
            future.result(LIMIT_SECS)
    logging.getLogger("distributed.client").removeHandler(said)
    assert not said.buffer and not logging.getLogger("distributed.client").filters


@pytest.mark.process
@pytest.mark.slow
def test_a_served_worker_comes_back_and_stops_when_told(scheduler: tuple[ClusterProcess, str]) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=serve_worker, args=(scheduler[1], ["c"], stop), kwargs={"tolerance": 1e6})
    thread.start()
    try:
        head = FleetSecurity(loopback_files(scheduler[1], "scheduler"))
        with distributed.Client(scheduler[1], security=head, set_as_default=False) as client:
            seen: set[str] = set()
            for _ in range(2):
                while not (new := set(client.scheduler_info()["workers"]) - seen):
                    time.sleep(0.1)
                (address,) = new
                seen.add(address)
                client.retire_workers([address], close_workers=True)
        assert len(seen) == 2
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1"])
def test_loopback_needs_no_certificates(address: str) -> None:
    check_address(address, None)
    with pytest.raises(MeasureError, match="tls://"):
        check_address(address, FILES)


@pytest.mark.process
@pytest.mark.parametrize("address", ["tcp://10.0.0.1:8786", "tcp://example.org:8786", "tls://10.0.0.1:8786"])
def test_beyond_loopback_certificates_are_needed(address: str) -> None:
    with pytest.raises(MeasureError, match=r"certificates|TLS"):
        check_address(address, None)
    with pytest.raises(MeasureError, match="TLS"):
        start_scheduler("0.0.0.0")


@pytest.mark.parametrize(
    "address",
    ["", "8786", "http://127.0.0.1:1", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:many", "tcp://[::1:8",
     "tcp://127.0.0.1:99999", "tls://me@127.0.0.1:1", "tls://127.0.0.1:1/x"],
)  # fmt: skip
def test_wrong_scheduler_address_is_refused(address: str) -> None:
    with pytest.raises(MeasureError, match="address"):
        check_address(address, None)


@pytest.mark.process
def test_without_certificates_nothing_listens_beyond_loopback(scheduler: tuple[ClusterProcess, str]) -> None:
    psutil = pytest.importorskip("psutil")  # a dependency of Dask
    process, address = scheduler
    with lend(address) as worker:
        give_up = time.monotonic() + LIMIT_SECS
        while "Registered" not in worker.log() and time.monotonic() < give_up:
            assert worker.wait(0.1) is None, worker.log()
        for pid in (process.pid, worker.pid):
            places = {c.laddr.ip for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN"}
            assert places and all(is_loopback(place) for place in places)
    with pytest.raises(MeasureError, match=r"listens on 0\.0\.0\.0 beyond loopback"):
        start_worker(address, ["here"], host="0.0.0.0")


@pytest.mark.process
@needs_compiler
@pytest.mark.ccompiler
def test_nonsense_answer_of_worker_is_one_error(scheduler: tuple[ClusterProcess, str]) -> None:
    good = json.dumps(
        {
            "kind": "c",
            "name": "a",
            "fingerprint": [["b", "c"]],
            "limits": [["d", 1]],
            "libraries": [["e", "f"]],
            "unit": "u",
        }
    )
    answers = [None, 7, "", "[]", "{}", "[" * 5000, "9" * 5000, good.replace("1", "true"), good.replace('"c"', "3"),
               good.replace('"f"', "3"), good.replace("libraries", "others")]  # fmt: skip
    with start_fake(scheduler[1], "liar", answers=[*answers, good]), DaskRunner(scheduler[1], "c") as runner:
        (device,) = runner.transport._fleet.asked()
        for _ in answers:
            with pytest.raises(MeasureError):
                runner.submit([request("good", "c")]).result(LIMIT_SECS)
            with pytest.raises(MeasureError):
                runner.transport._describe(device, time.monotonic() + LIMIT_SECS)
        told_now = runner.transport._describe(device, time.monotonic() + LIMIT_SECS)
        assert told_now.limits == (("d", 1),) and told_now.libraries == (("e", "f"),)


@pytest.mark.process
@needs_compiler
@pytest.mark.ccompiler
def test_processors_with_other_threads_are_two_devices(scheduler: tuple[ClusterProcess, str]) -> None:
    """Each job measures on workers of its own device, though both are lent as `c`."""
    _, address = scheduler
    with ExitStack() as stack:
        for threads in ("1", "2"):
            stack.enter_context(lend(address, name=f"threads-{threads}", environment={"OMP_NUM_THREADS": threads}))
        listed = stack.enter_context(contextlib.closing(SchedulerConnection(address, None, 30.0)))
        while len(devices := listed.devices()) < 2:
            time.sleep(0.1)
        runner = stack.enter_context(DaskRunner(address, "c"))
        threads = dict(runner.device_info().fingerprint)["threads"]
        futures = [runner.submit([request("good", "c", id=f"r{n}")]) for n in range(4)]
        assert {f.result(LIMIT_SECS)[0].unit.worker for f in futures} == {f"threads-{threads}"}
        assert len({device.identity for device in devices}) == 2


@pytest.mark.process
@needs_compiler
@pytest.mark.ccompiler
@pytest.mark.slow
def test_worker_of_dask_lends_a_unit_by_the_preload(scheduler: tuple[ClusterProcess, str]) -> None:
    _, address = scheduler
    words = [
        "distributed.cli.dask_worker",
        address,
        "--nthreads",
        "1",
        "--no-nanny",
        "--no-dashboard",
        "--name",
        "outside",
    ]
    tls = loopback_files(address, "worker")
    words += ["--tls-ca-file", tls.ca, "--tls-cert", tls.certificate, "--tls-key", tls.key]
    words += ["--worker-class", "relax_tune.tuner.measure.cluster.worker.FleetWorker"]
    words += ["--preload", "relax_tune.tuner.measure.cluster.preload", "--device", "c", "--tolerance", "1000000"]
    with ClusterProcess(words, {"TMPDIR": "{folder}"}) as worker, DaskRunner(address, "c") as runner:
        (result,) = runner.submit([request("good", "c")]).result(LIMIT_SECS)
        assert result.ok and result.unit is not None and result.unit.worker == "outside/c", worker.log()


@pytest.mark.process
def test_nothing_is_left_of_a_killed_scheduler_and_worker(tmp_path: Path) -> None:
    """The commands are killed by SIGKILL, which they cannot pass on to their children."""
    started: list[JobProcess] = []
    try:
        head = JobProcess(tmp_path, "scheduler", "--port", "0", log="scheduler")
        started.append(head)
        address = until(lambda: re.search(r"scheduler at (\S+);", head.said()), head).group(1)
        arguments = ("worker", address, "--device", "c", "--tolerance", "1000000")
        worker = JobProcess(tmp_path, *arguments, log="worker")
        started.append(worker)
        with contextlib.closing(SchedulerConnection(address, None, 30.0)) as connection:
            until(lambda: connection.devices(), worker)
        port = host_and_port(address)[1]
        for process in (worker, head):
            assert process.children()
            os.kill(process.process.pid, signal.SIGKILL)
            process.process.wait(30)
            assert process.orphans(40) == []
        again = JobProcess(tmp_path, "scheduler", "--port", str(port), log="again")
        started.append(again)
        until(lambda: address in again.said(), again)
        with contextlib.closing(SchedulerConnection(address, None, 30.0)) as connection:
            second = JobProcess(tmp_path, *arguments, log="second")
            started.append(second)
            until(lambda: connection.devices(), second)
        for process in (second, again):
            os.kill(process.process.pid, signal.SIGTERM)
            process.process.wait(60)
        assert [p.name for p in scratch(tmp_path).iterdir() if p.is_dir()] == []
    finally:
        for process in started:
            process.kill()


def until(call: Callable[[], T | None], process: JobProcess, secs: float = 90) -> T:
    give_up = time.monotonic() + secs
    while not (value := call()):
        assert process.process.poll() is None and time.monotonic() < give_up, process.said()
        time.sleep(0.05)
    return value
