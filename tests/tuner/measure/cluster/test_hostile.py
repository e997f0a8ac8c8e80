"""Holders of valid certificates who turn hostile: what each role reaches of scheduler, workers and jobs, and what it does not.

The scheduler and the workers are real processes. Each attempt would leave a file behind where it runs, and each is Dask's own client or
messages of it; the first test shows that Dask alone lets them through.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.tuner.measure.cluster.fake_unit import Payload, start_fake
from tests.tuner.measure.measure_programs import LIMIT_SECS, request

from relax_tune.errors import MeasureError
from relax_tune.tuner.measure.cluster.address import TlsFiles
from relax_tune.tuner.measure.cluster.fleet import LentDevice
from relax_tune.tuner.measure.cluster.processes import start_scheduler

distributed = pytest.importorskip("distributed", reason="Dask Distributed is not installed (extra cluster)")
from distributed.core import rpc  # noqa: E402
from distributed.protocol.serialize import Serialize, ToPickle, to_serialize  # noqa: E402

from relax_tune.tuner.measure.cluster.client import SchedulerConnection  # noqa: E402
from relax_tune.tuner.measure.cluster.runner import DaskRunner  # noqa: E402
from relax_tune.tuner.measure.cluster.tls import check_files  # noqa: E402
from relax_tune.tuner.measure.cluster.trust.authority import ROLES, issue, make_authority, role_name  # noqa: E402
from relax_tune.tuner.measure.cluster.trust.roles import OF_SCHEDULER, Gate, Peer  # noqa: E402
from relax_tune.tuner.measure.cluster.trust.security import FleetSecurity  # noqa: E402
from relax_tune.tuner.measure.cluster.trust.unpickle import UnreadPickleError, loads  # noqa: E402

pytestmark = pytest.mark.process
WITHIN_SECS = 5.0


class Fleet:
    """A scheduler and two made-up workers; certificates of each role, and of a second job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ca, _ = make_authority(folder / "authority")
        self.files = {}
        for name, role in (*((role, role) for role in ROLES), ("mallory", "job"), ("eve", "worker")):
            certificate, key = issue(folder / "authority", name, role)  # type: ignore[arg-type]
            self.files[name] = TlsFiles(str(ca), str(certificate), str(key))

    def security(self, name: str, serves: str = "scheduler") -> FleetSecurity:
        """TLS of a holder of this name, who connects to servers of a role: a hostile one may choose it."""
        found = FleetSecurity(self.files[name])
        known = found.get_connection_args

        def args(role: str) -> dict[str, Any]:
            return {**known(role), "server_hostname": role_name(serves)}  # type: ignore[arg-type]

        found.get_connection_args = args  # type: ignore[method-assign]
        return found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    found = Fleet(tmp_path_factory.mktemp("hostile"))
    found.process, found.address = start_scheduler(tls=found.files["scheduler"])
    with contextlib.ExitStack() as stack:
        stack.enter_context(found.process)
        for unit in ("one", "two"):
            stack.enter_context(start_fake(found.address, unit, tls=found.files["worker"], secs=0.05))
        with DaskRunner(found.address, "c", tls=found.files["job"]) as job:
            while len(job.transport._fleet.devices()) < 2:
                time.sleep(0.1)
            found.workers = [device.address for device in job.transport._fleet.devices()]
        yield found


def attempt(talk: Callable[[], Coroutine[Any, Any, Any]]) -> str:
    """How a talk with a server ended: the name of its error, or an empty text."""

    async def timed() -> Any:
        return await asyncio.wait_for(talk(), WITHIN_SECS)

    try:
        answer = asyncio.run(timed())
    except Exception as error:
        return type(error).__name__
    refused = isinstance(answer, dict) and answer.get("status") == "uncaught-error"
    return "refused" if refused else ""


def ask(fleet: Fleet, name: str, where: str, operation: str, serves: str = "scheduler", /, **message: Any) -> str:
    """Ask a server for an operation, as a holder of a name."""

    async def talk() -> Any:
        async with rpc(where, connection_args=fleet.security(name, serves).get_connection_args("client")) as peer:
            return await getattr(peer, operation)(**message)

    return attempt(talk)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that a payload makes where it runs; and it does where nothing restricts it."""
    path = tmp_path / "ran"
    pickle.loads(pickle.dumps(Payload(str(path)))).close()
    assert path.exists()
    path.unlink()
    return path


def payloads(marker: Path) -> dict[str, Any]:
    payload = Payload(str(marker))
    dask = {"serializer": "dask", "type-serialized": pickle.dumps(payload), "sub-header": {}, "frame-lengths": ()}
    return {"pickle": ToPickle(payload), "serialized": Serialize(payload), "argument": to_serialize(payload),
            "function": pickle.dumps(payload), "family": distributed.protocol.Serialized(dask, [])}  # fmt: skip


def still_measures(fleet: Fleet) -> bool:
    with DaskRunner(fleet.address, "c", tls=fleet.files["job"]) as job:
        return job.submit([request("good", "c")]).result(LIMIT_SECS)[0].ok


def test_dask_alone_runs_payloads_of_peers(marker: Path) -> None:
    """Why the rest is here."""

    async def talk() -> None:
        async with (
            distributed.Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as plain,
            rpc(plain.address) as peer,
        ):
            await peer.identity(n_workers=ToPickle(Payload(str(marker))))

    attempt(talk)
    assert marker.exists()


@pytest.mark.parametrize("kind", ["pickle", "serialized", "argument", "function", "family"])
@pytest.mark.parametrize("name", ["mallory", "eve"])
def test_pickle_of_a_hostile_peer_runs_nowhere(fleet: Fleet, marker: Path, name: str, kind: str) -> None:
    """To the scheduler in the operations of its role, and to the workers directly."""
    payload = payloads(marker)[kind]
    if name == "mallory":
        assert ask(fleet, name, fleet.address, "identity", n_workers=payload)
        ask(fleet, name, fleet.address, "broadcast", msg={"op": "run", "function": payload}, workers=None)
    else:
        heartbeat = {"address": "tls://127.0.0.1:1", "metrics": payload, "now": 0.0}
        assert ask(fleet, name, fleet.address, "heartbeat_worker", **heartbeat)
    for worker in fleet.workers:
        assert ask(fleet, name, worker, "run", "worker", function=payload)
    assert not marker.exists() and still_measures(fleet)


SCHEDULER_ONLY = {
    "run_function": {"function": pickle.dumps(len)},
    "register_scheduler_plugin": {"plugin": b""},
    "register_worker_plugin": {"plugin": b"", "name": "p"},
    "terminate": {},
    "retire_workers": {},
    "restart": {},
    "scatter": {"data": {}, "workers": None},
    "proxy": {"msg": {"op": "run"}, "worker": None},
    "who_has": {"keys": ()},
    "get_cluster_state": {"exclude": ()},
    "get_task_stream": {},
    "events": {},
}


@pytest.mark.parametrize("operation", SCHEDULER_ONLY)
@pytest.mark.parametrize("name", ["mallory", "eve"])
def test_operation_beyond_the_role_cuts_the_peer_off(fleet: Fleet, name: str, operation: str) -> None:
    assert ask(fleet, name, fleet.address, operation, **SCHEDULER_ONLY[operation])
    assert fleet.process.wait(0.0) is None


def test_hostile_job_submits_no_functions_and_takes_no_work(fleet: Fleet, tmp_path: Path, marker: Path) -> None:
    mallory = fleet.security("mallory")
    with distributed.Client(fleet.address, security=mallory, set_as_default=False, timeout=WITHIN_SECS) as client:
        future = client.submit(open, str(marker), "w", pure=False)
        with pytest.raises(Exception):  # noqa: B017  whatever Dask makes of it
            future.result(timeout=WITHIN_SECS)
        with pytest.raises(Exception):  # noqa: B017
            client.run(open, str(marker), "w")
    assert not marker.exists()
    module = tmp_path / "uploaded.py"
    module.write_text(f"open({str(marker)!r}, 'w')")
    told = {"op": "upload_file", "filename": module.name, "data": ToPickle(module.read_bytes()), "load": True}
    assert ask(fleet, "mallory", fleet.address, "broadcast", msg=told, workers=None)
    with pytest.raises(MeasureError, match=r"role worker .* got job"):
        check_files(fleet.files["mallory"], ("worker",))
    assert ask(fleet, "mallory", fleet.address, "register-worker", address="tls://127.0.0.1:1")
    assert not marker.exists() and still_measures(fleet)


def test_hostile_worker_submits_nothing_and_speaks_for_no_other(fleet: Fleet, marker: Path) -> None:
    assert ask(fleet, "eve", fleet.address, "register-client", client="Client-eve", versions={})
    for operation in ("gather", "processing", "broadcast", "identity", "update-graph"):
        assert ask(fleet, "eve", fleet.address, operation, keys=("k",), msg={"op": "run"}, workers=None)
    for worker in fleet.workers:
        assert ask(fleet, "eve", fleet.address, "unregister", address=worker)
        assert ask(fleet, "eve", fleet.address, "heartbeat_worker", address=worker, metrics={}, now=0.0)
    with DaskRunner(fleet.address, "c", tls=fleet.files["job"]) as job:
        assert [device.address for device in job.transport._fleet.devices()] == fleet.workers


def test_job_reads_and_cancels_nothing_of_another(fleet: Fleet) -> None:
    with DaskRunner(fleet.address, "c", tls=fleet.files["job"]) as job:
        (worker, *_) = fleet.workers
        wanted = job.transport._connection.client.submit(
            job.transport._tasks.measure_batch, "c", "{}", "[]", key="relax-tune-victim", workers=[worker], pure=False
        )
        wanted.result(LIMIT_SECS)
        key = ("relax-tune-victim",)
        for operation in ("gather", "client-releases-keys", "update-graph"):
            assert ask(fleet, "mallory", fleet.address, operation, keys=key), operation
            assert wanted.status == "finished"
        assert ask(fleet, "mallory", fleet.address, "subscribe-topic", topic="all", client="Client-m")
        assert not ask(fleet, "job", fleet.address, "gather", keys=key)


def test_keys_of_other_jobs_are_counted_and_not_told(fleet: Fleet) -> None:
    async def listed() -> Any:
        async with rpc(fleet.address, connection_args=fleet.security("mallory").get_connection_args("client")) as peer:
            return await peer.processing(workers=None)

    with (
        start_fake(fleet.address, "slow", tls=fleet.files["worker"], name="slow", secs=3.0),
        DaskRunner(fleet.address, "c", tls=fleet.files["job"]) as job,
    ):
        device = lent_as(job, "slow")
        wanted = job.transport._tasks.measure_batch
        job.transport._connection.client.submit(
            wanted, "c", "{}", "[]", key="relax-tune-secret", workers=[device.address], pure=False
        )
        time.sleep(0.5)
        found = [key for keys in asyncio.run(listed()).values() for key in keys]
        assert all(len(key) == 32 and int(key, 16) >= 0 for key in found) and "relax-tune-secret" not in found


def lent_as(job: DaskRunner, unit: str) -> LentDevice:
    while unit not in {device.worker for device in job.transport._fleet.devices()}:
        time.sleep(0.1)
    return next(device for device in job.transport._fleet.devices() if device.worker == unit)


@pytest.mark.parametrize("way", ["result", "error"])
def test_answer_of_a_hostile_worker_runs_nothing_in_the_job(fleet: Fleet, marker: Path, way: str) -> None:
    facts = {"name": f"hostile-{way}", "payload": str(marker), "way": way}
    with (
        start_fake(fleet.address, f"eve-{way}", tls=fleet.files["eve"], **facts),
        DaskRunner(fleet.address, "c", tls=fleet.files["job"]) as job,
    ):
        device = lent_as(job, f"eve-{way}")
        with pytest.raises(MeasureError):
            job.transport._describe(device, time.monotonic() + WITHIN_SECS)
        future = job.transport._connection.client.submit(
            job.transport._tasks.measure_batch, "c", "{}", "[]", workers=[device.address], pure=False
        )
        with pytest.raises(Exception):  # noqa: B017
            future.result(WITHIN_SECS)
    assert not marker.exists() and still_measures(fleet)


def test_worker_cannot_play_the_scheduler(fleet: Fleet) -> None:
    process, address = start_scheduler(tls=fleet.files["eve"])
    with process, pytest.raises(MeasureError, match="lacks the role scheduler"):
        DaskRunner(address, "c", tls=fleet.files["job"], open_secs=WITHIN_SECS)


def test_pages_of_dask_say_health_alone(fleet: Fleet) -> None:
    """Dask opens a page of statistics in plain HTTP, on loopback, for every user of the machine."""
    with contextlib.closing(SchedulerConnection(fleet.address, fleet.files["job"], 20.0)) as job:
        found = job.client.scheduler_info(n_workers=-1)
    ports = [one["services"]["dashboard"] for one in (found, *found["workers"].values())]
    assert len(ports) == 3

    for port in ports:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/sitemap.json", timeout=10) as answer:
            pages = json.load(answer)["paths"]
        assert {page for page in pages if not page.startswith("/statics/")} == {"/health", "/sitemap.json"}
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/info/main/workers.html", timeout=10)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("distributed.scheduler", "WorkerState"),
        ("distributed.core", "Status"),
        ("relax_tune.tuner.measure.cluster.task", "measure_batch"),
    ],
)
def test_pickle_alters_nothing_of_the_process(module: str, name: str) -> None:
    data = f"c{module}\n{name}\n(S'address'\nS'tls://eve'\ndb.".encode()  # names it, and sets a field of it
    with pytest.raises(UnreadPickleError, match=r"message of a measurement, .*alters a"):
        loads(data)


def test_revoked_peer_is_refused_however_late_the_greeting_comes() -> None:
    gate = Gate(OF_SCHEDULER)
    gate.cut(frozenset({7}))
    assert gate._refusal({"op": "identity"}, Peer("job", "job/mallory", 7), set()) == "its certificate is revoked"
    assert not gate._refusal({"op": "identity"}, Peer("job", "job/other", 8), set())


def test_refused_broadcast_names_the_allowed_operation() -> None:
    told = {"op": "broadcast", "msg": {"op": "terminate"}}
    why = Gate(OF_SCHEDULER)._refusal(told, Peer("job", "job/a", 2), set())
    assert why == "it broadcasts an operation other than 'run'"


def test_peer_without_a_role_may_ask_for_nothing() -> None:
    nobody, job = Peer(None, "None/plain", 1), Peer("job", "job/a", 2)
    gate = Gate(OF_SCHEDULER)
    assert gate._refusal({"op": "identity"}, nobody, set()) and not gate._refusal({"op": "identity"}, job, set())
    assert not gate._refusal({"op": "update-graph", "keys": ("k",)}, job, set())
    assert gate._refusal({"op": "gather", "keys": ("k",)}, replace(job, name="job/b"), set())
