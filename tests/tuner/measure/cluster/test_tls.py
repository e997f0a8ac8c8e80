"""Measuring over mutual TLS: real scheduler and worker processes, certificates made here, and everyone who is refused."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.tuner_models import row_scale
from tests.tuner.cli.cli_model import make_bert
from tests.tuner.measure.cluster.certificates import Authority
from tests.tuner.measure.cluster.lent import lend
from tests.tuner.measure.measure_programs import LIMIT_SECS, request
from tests.tuner.measure.test_runner_contract import (
    test_a_good_candidate_is_checked_and_timed_at_every_shape,
    test_every_bad_candidate_fails_by_itself,
    test_runner_repeated_id_is_measured_once_per_batch,
)
from typer.testing import CliRunner

import relax_tune as rt
from relax_tune.errors import FleetUnavailable, MeasureError
from relax_tune.tuner.allowed_files import allow
from relax_tune.tuner.cli.app import app
from relax_tune.tuner.job.devices import open_runner
from relax_tune.tuner.measure.base import Runner
from relax_tune.tuner.measure.cluster.address import TlsFiles, host_and_port
from relax_tune.tuner.measure.cluster.processes import start_scheduler
from relax_tune.tuner.measure.cluster.tls import check_files, check_scheduler
from relax_tune.tuner.settings import Settings, load_settings

distributed = pytest.importorskip("distributed", reason="Dask Distributed is not installed (extra cluster)")
from relax_tune.tuner.measure.cluster.runner import DaskRunner  # noqa: E402

pytestmark = pytest.mark.ccompiler
CONTRACT = (
    test_a_good_candidate_is_checked_and_timed_at_every_shape,
    test_every_bad_candidate_fails_by_itself,
    test_runner_repeated_id_is_measured_once_per_batch,
)


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    if shutil.which("gcc") is None:
        pytest.skip("there is no C compiler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and certificates, good ones and every way of being bad."""
    place = tmp_path_factory.mktemp("tls")
    make_bert(place / "bert")
    ours, foreign = Authority(place, "authority"), Authority(place, "foreign-authority")
    ours.sign("scheduler", "scheduler")
    ours.sign("worker", "worker")
    ours.sign("plain", None)
    for name in ("client", "open"):
        ours.sign(name, "job", client=True)
    ours.sign("expired", "job", days=(-9, -2))
    ours.sign("future", "job", days=(2, 9))
    ours.sign("hidden", "job", passphrase=b"sesame")
    ours.sign("client-only", "worker", client=True)
    foreign.sign("foreign", "worker")
    foreign.sign("foreign-job", "job", client=True)
    (place / "open.key").chmod(0o644)
    (place / "garbage.pem").write_text("no certificate")
    (place / "both.pem").write_bytes(Path(ours.ca).read_bytes() + Path(foreign.ca).read_bytes())
    return place


def files(folder: Path, name: str, ca: str = "authority") -> TlsFiles:
    return TlsFiles(*(str(folder / f) for f in (f"{ca}.pem", f"{name}.pem", f"{name}.key")))


@pytest.fixture(scope="module")
def scheduler(folder: Path) -> Iterator[str]:
    process, address = start_scheduler(tls=files(folder, "scheduler"))
    with process:
        assert address.startswith("tls://")
        yield address


@pytest.fixture(scope="module")
def worker(folder: Path, scheduler: str) -> Iterator[None]:
    """`relax-tune worker` as an administrator starts it: files by relative names, from variables."""
    variables = {"RELAX_TUNE_CA": "authority.pem", "RELAX_TUNE_CERTIFICATE": "worker.pem", "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-c", "from relax_tune.tuner.cli.start import main; main()"]
    command = [*start, "worker", scheduler, "--device", "c", "--key", "worker.key", "--tolerance", "1000000"]
    with subprocess.Popen(command, cwd=folder, env={**os.environ, **variables}, stderr=subprocess.DEVNULL) as process:
        yield
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def runner(folder: Path, scheduler: str, worker: object) -> Iterator[Runner]:
    tls = files(folder, "client")
    settings = Settings("c", scheduler=scheduler, ca=tls.ca, certificate=tls.certificate, key=tls.key)
    with contextlib.closing(open_runner(settings)) as found:
        yield found


@pytest.mark.process
def test_a_job_from_python_measures_over_tls(
    folder: Path, runner: object, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    result = rt.tune(
        row_scale(),
        target="c",
        db="tls.db",
        trials=1,
        scheduler=scheduler,
        ca="authority.pem",
        certificate="client.pem",
        key="client.key",
    )
    assert result.work.measurements > 0 and result.work.failures == 0 and not result.work.problems


@pytest.mark.process
def test_an_eavesdropper_sees_nothing_of_a_measurement(folder: Path, runner: object, scheduler: str) -> None:
    with relay(scheduler) as (address, heard), DaskRunner(address, "c", tls=files(folder, "client")) as through:
        given = request("good", "c")
        assert through.submit([given]).result(LIMIT_SECS)[0].status == "ok"
    data = b"".join(heard)
    assert len(data) > len(given.program_json)
    for word in (b"kernel_good", b"restrict", b"relax_tune", b"expected", b"compression"):
        assert word not in data


@pytest.mark.process
def test_client_without_certificate_is_refused(folder: Path, runner: DaskRunner, scheduler: str) -> None:
    (worker_address,) = {device.address for device in runner.transport._fleet.devices()}
    assert worker_address.startswith("tls://")
    for address in (scheduler, worker_address):
        with socket.create_connection(host_and_port(address), 10) as plain:
            plain.settimeout(0.3)
            with pytest.raises(TimeoutError):
                plain.recv(1)
            plain.settimeout(10)
            plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert len(plain.recv(1000)) <= 7  # at most an alert
                assert plain.recv(1000) == b""
        for signer in (None, "foreign"):
            context = ssl.create_default_context(cafile=str(folder / "authority.pem"))
            context.check_hostname = False
            if signer:
                context.load_cert_chain(folder / "foreign.pem", folder / "foreign.key")
            with socket.create_connection(host_and_port(address), 10) as plain, pytest.raises(OSError):
                context.wrap_socket(plain).recv(1)
    with pytest.raises((OSError, TimeoutError)):
        distributed.Client(scheduler.replace("tls:", "tcp:"), timeout=1.0, set_as_default=False)


@pytest.mark.process
def test_a_worker_of_a_foreign_authority_is_never_given_work(folder: Path, runner: DaskRunner, scheduler: str) -> None:
    known = {device.address for device in runner.transport._fleet.devices()}
    soon = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "1s"}  # by default it is refused for half a minute at a time
    with lend(scheduler, tls=files(folder, "foreign", "both"), environment=soon) as process:
        give_up = time.monotonic() + LIMIT_SECS
        while (
            process.log().count("Waiting to connect") < 3 and process.wait(0.1) is None and time.monotonic() < give_up
        ):
            pass  # each time but the first it was refused
        assert process.log().count("Waiting to connect") >= 3 and "Registered" not in process.log()
        assert {device.address for device in runner.transport._fleet.devices()} == known


# What the commands refuse: (options in the folder, words of the error).
REFUSED = {
    "some": (["--ca", "authority.pem", "--key", "client.key"], ["no --certificate"]),
    "missing": (["authority", "nobody"], ["nobody.pem", "No such file"]),
    "a folder": (["--ca", ".", "--certificate", "client.pem", "--key", "client.key"], ["no plain file"]),
    "no PEM": (["garbage", "client"], ["authority in PEM", "garbage.pem"]),
    "expired": (["authority", "expired"], ["expired.pem", "has expired"]),
    "not yet": (["authority", "future"], ["future.pem", "not yet valid"]),
    "foreign certificate": (["authority", "foreign"], ["foreign.pem", "authority.pem vouches"]),
    "foreign authority": (["foreign-authority", "foreign"], ["one whose certificate our authority does not vouch for"]),
    "refused there": (["both", "foreign"], ["refuses our certificate", "unknown ca"]),
    "a key for all to read": (["authority", "open"], ["mode 644", "chmod 600 open.key"]),
    "a passphrase": (["authority", "hidden"], ["without a passphrase"]),
    "no role": (["authority", "plain"], ["plain.pem", "no role of ours", "relax-tune certificate issue"]),
    "another key": (
        ["--ca", "authority.pem", "--certificate", "client.pem", "--key", "worker.key"],
        ["the key of another certificate"],
    ),
}


@pytest.mark.process
@pytest.mark.parametrize("command", ["tune", "worker"])
@pytest.mark.parametrize("case", REFUSED)
def test_unusable_certificates_are_refused(
    folder: Path, scheduler: str, command: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    options, words = REFUSED[case]
    if len(options) == 2:
        ca, name = options
        if command == "tune" and case in ("foreign authority", "refused there"):
            name = "foreign-job"
        options = ["--ca", f"{ca}.pem", "--certificate", f"{name}.pem", "--key", f"{name}.key"]
    error = refused(command, scheduler, *options)
    assert all(word in error for word in words), error


@pytest.mark.parametrize("command", ["tune", "worker"])
def test_plain_addresses_beyond_loopback_are_refused(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    error = refused(command, "tcp://192.0.2.1:8786")
    assert "mutual TLS" in error and "tls://" in error and "relax-tune certificate --help" in error
    tls = ["--ca", "authority.pem", "--certificate", "client.pem", "--key", "client.key"]
    assert "expected a tls:// address" in refused(command, "tcp://127.0.0.1:8786", *tls)


def test_certificates_without_a_scheduler_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    found = CliRunner().invoke(app, ["tune", "bert", "--target", "c", "--ca", "authority.pem"])
    assert found.exit_code == 2 and "expected a --scheduler" in found.stderr
    with pytest.raises(rt.UserError, match="expected a scheduler="):
        rt.tune("bert", target="c", key="client.key")


@pytest.mark.process
def test_settings_carry_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    text = 'scheduler = "tls://head:8786"\nca = "~/ca.pem"\nkey = "a.key"\n'
    (tmp_path / "relax-tune.toml").write_text(text)
    allow(tmp_path / "relax-tune.toml", text.encode())
    found = load_settings({"key": "b.key"}, {"RELAX_TUNE_CERTIFICATE": "b.pem"}, tmp_path)
    assert (found.scheduler, found.ca, found.certificate, found.key) == (
        "tls://head:8786",
        "~/ca.pem",
        "b.pem",
        "b.key",
    )


def refused(command: str, address: str, *options: str) -> str:
    """The error of a command line that must end with exit code 2 and one paragraph, and leave nothing behind."""
    before = sorted(os.listdir())
    line = ["tune", "bert", "--target", "c", "--scheduler", address, "--db", "never.db", "--out", "never.rta"]
    if command == "worker":
        line = ["worker", address, "--device", "c"]
    found = CliRunner().invoke(app, [*line, *options])
    assert found.exit_code == 2, (found.output, found.exception)
    assert found.stderr.startswith("error: ") and found.stderr.count("\n") == 1 and "Traceback" not in found.stderr
    assert sorted(os.listdir()) == before
    return found.stderr


# Who answers at the address instead.


@contextlib.contextmanager
def service(talk: Callable[[socket.socket], object]) -> Iterator[str]:
    """A server on loopback that does `talk` with whoever connects: its host and port."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as kept:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken = kept.enter_context(listener.accept()[0])
                    with contextlib.suppress(OSError):
                        talk(taken)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@contextlib.contextmanager
def relay(address: str) -> Iterator[tuple[str, list[bytes]]]:
    """An address that leads to `address`, and all that goes through in both directions."""
    heard: list[bytes] = []

    def copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                heard.append(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    with ExitStack() as kept:

        def connect(taken: socket.socket) -> None:
            beyond = kept.enter_context(socket.create_connection(host_and_port(address)))
            for pair in ((taken, beyond), (beyond, taken)):
                threading.Thread(target=copy, args=pair, daemon=True).start()

        with service(connect) as place:
            yield f"tls://{place}", heard


@pytest.mark.process
def test_scheduler_with_given_certificates_is_not_found_without(
    scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # where no earlier scheduler of this port has left certificates
    for address in (scheduler, scheduler.replace("tls:", "tcp:")):
        with pytest.raises(FleetUnavailable, match=r"within 0\.5 s, .*this user has started"):
            DaskRunner(address, "c", open_secs=0.5)


@pytest.mark.parametrize(
    ("talk", "says"),
    [
        (lambda s: None, "says nothing"),
        (lambda s: s.close(), "closed the connection"),
        (lambda s: s.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n"), "does not speak TLS"),
    ],
    ids=["silent", "closing", "talking"],
)
def test_other_services_are_told_apart_within_the_limit(
    folder: Path, talk: Callable[[socket.socket], object], says: str
) -> None:
    tls = files(folder, "client")
    with service(talk) as place, pytest.raises(MeasureError, match=rf"within 0\.5 s, got .*{says}"):
        check_scheduler(f"tls://{place}", tls, 0.5)


def test_tls_service_without_scheduler_is_recognised(folder: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "authority.pem"))
    context.load_cert_chain(folder / "scheduler.pem", folder / "scheduler.key")

    def drip(plain: socket.socket) -> None:
        with context.wrap_socket(plain, server_side=True) as safe:
            for _ in range(100):
                safe.sendall(b"220 mail\r\n")
                time.sleep(0.05)

    with service(drip) as place, pytest.raises(MeasureError, match=r"within 0\.5 s, got .*check the port"):
        check_scheduler(f"tls://{place}", files(folder, "client"), 0.5)


def test_unreachable_scheduler_raises_in_time(folder: Path) -> None:
    tls = files(folder, "client")
    with pytest.raises(MeasureError, match=r"tls://127\.0\.0\.1:9 within 0\.5 s, .*refused"):
        check_scheduler("tls://127.0.0.1:9", tls, 0.5)
    with pytest.raises(MeasureError, match=r"within 5 s, got no .*name"):
        check_scheduler("tls://no-such-host.invalid:8786", tls, 5.0)


def test_certificate_of_a_worker_for_clients_alone_is_refused(folder: Path) -> None:
    with pytest.raises(MeasureError, match=r"client-only\.pem refused: .*purpose"):
        check_files(files(folder, "client-only"))


def test_key_readable_by_others_is_refused(folder: Path, tmp_path: Path) -> None:
    given = files(folder, "client")
    key = tmp_path / "lent.key"
    shutil.copy(given.key, key)
    for mode, taken in ((0o400, True), (0o600, True), (0o640, False), (0o604, False), (0o666, False)):
        key.chmod(mode)
        with contextlib.nullcontext() if taken else pytest.raises(MeasureError, match=f"mode {mode:o}"):
            check_files(replace(given, key=str(key)))


def test_key_of_root_readable_by_a_group_is_taken(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service with a user of its own reads a key of root by its group; the group must not write it."""
    given = files(folder, "client")
    key = tmp_path / "lent.key"
    shutil.copy(given.key, key)
    plain = os.stat

    def owned_by_root(path: Any, *more: Any, **options: Any) -> os.stat_result:
        status = plain(path, *more, **options)
        return os.stat_result((*status[:4], 0, *status[5:])) if os.fspath(path) == str(key) else status

    monkeypatch.setattr(os, "stat", owned_by_root)
    for user, mode, taken in ((1000, 0o640, True), (1000, 0o644, False), (1000, 0o660, False), (0, 0o640, False)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        key.chmod(mode)
        with contextlib.nullcontext() if taken else pytest.raises(MeasureError, match=f"mode {mode:o}"):
            check_files(replace(given, key=str(key)))
