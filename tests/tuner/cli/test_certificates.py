"""Certificates of roles: what each serves for in a handshake, and who can make them."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import shutil
import socket
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.tuner.measure.cluster.fake_unit import start_fake
from typer.testing import CliRunner

from relax_tune.errors import FleetUnavailable, MeasureError, UserError
from relax_tune.tuner.cli.app import app
from relax_tune.tuner.measure.cluster.address import TlsFiles, host_and_port

x509 = pytest.importorskip("cryptography.x509", reason="cryptography is not installed (extra cluster)")
pytest.importorskip("distributed", reason="Dask Distributed is not installed (extra cluster)")
from relax_tune.tuner.measure.cluster.client import SchedulerConnection  # noqa: E402
from relax_tune.tuner.measure.cluster.processes import start_scheduler  # noqa: E402
from relax_tune.tuner.measure.cluster.tls import _context, _shake_hands, check_files, check_scheduler  # noqa: E402
from relax_tune.tuner.measure.cluster.trust.authority import (  # noqa: E402
    FLEET_ROLES,
    ROLES,
    Role,
    describe,
    issue,
    locked,
    make_authority,
    renew,
    revoke,
)
from relax_tune.tuner.measure.cluster.trust.expiry import end_of  # noqa: E402
from relax_tune.tuner.measure.cluster.trust.loopback import loopback_folder, make_loopback, place_of  # noqa: E402
from relax_tune.tuner.measure.cluster.trust.security import FleetSecurity  # noqa: E402


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> dict[Role, TlsFiles]:
    folder = tmp_path_factory.mktemp("fleet")
    ca, key = make_authority(folder)
    assert key.stat().st_mode & 0o777 == 0o600
    made: dict[Role, TlsFiles] = {}
    for role in ROLES:
        certificate, private = issue(folder, f"{role}.lan", role)
        assert private.stat().st_mode & 0o777 == 0o600
        made[role] = TlsFiles(str(ca), str(certificate), str(private))
    return made


@pytest.mark.parametrize("serves", ROLES)
@pytest.mark.parametrize("asks", ROLES)
def test_certificate_of_job_serves_nobody(fleet: dict[Role, TlsFiles], serves: Role, asks: Role) -> None:
    """As Dask sets TLS up: whoever asks wants a server's certificate, whoever serves a client's."""
    server, client = _context(fleet[serves], ssl.Purpose.CLIENT_AUTH), _context(fleet[asks], ssl.Purpose.SERVER_AUTH)
    if serves != "job" and asks != "database":
        _shake_hands(server, client)
        return
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        _shake_hands(server, client)


@pytest.mark.parametrize("asks, serves", [("job", "scheduler"), ("worker", "scheduler"), ("scheduler", "worker")])
def test_connection_wants_the_role_of_the_other_side(fleet: dict[Role, TlsFiles], asks: Role, serves: Role) -> None:
    """As the processes of a fleet set TLS up: each looks for one role alone, whatever else the authority vouches for."""
    for found in FLEET_ROLES:
        if found == "job":
            continue
        server = FleetSecurity(fleet[found]).get_listen_args(found)["ssl_context"]
        given = FleetSecurity(fleet[asks]).get_connection_args("client" if asks == "job" else asks)
        if found == serves:
            _shake_hands(server, given["ssl_context"], given["server_hostname"])
        else:
            with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
                _shake_hands(server, given["ssl_context"], given["server_hostname"])


def serial(files: TlsFiles) -> int:
    return x509.load_pem_x509_certificate(Path(files.certificate).read_bytes()).serial_number


def head_and_two_jobs(folder: Path) -> tuple[FleetSecurity, dict[str, TlsFiles], Callable[[str], int]]:
    """A scheduler, everybody's files, and a handshake of a job by name, which gives the scheduler's serial number."""
    ca, _ = make_authority(folder)
    given: tuple[tuple[str, Role], ...] = (("head", "scheduler"), ("tina", "job"), ("tom", "job"))
    files = {name: TlsFiles(str(ca), *map(str, issue(folder, name, role))) for name, role in given}
    head = FleetSecurity(files["head"])
    server = head.get_listen_args("scheduler")["ssl_context"]

    def shake(name: str) -> int:
        asked = FleetSecurity(files[name]).get_connection_args("client")
        return int(_shake_hands(server, asked["ssl_context"], asked["server_hostname"])["serialNumber"], 16)

    return head, files, shake


def test_revoked_certificate_is_refused_in_the_next_handshake(tmp_path: Path) -> None:
    head, files, shake = head_and_two_jobs(tmp_path)
    before = serial(files["tina"])
    issue(tmp_path, "tina", "job", renew=True)  # the older one, which nobody holds any more, is taken back too
    shake("tina")
    for name in ("tina", "tom"):
        path, new = revoke(tmp_path, name)
        assert path == tmp_path / "ca.crl" and new == (2 if name == "tina" else 1)
        assert head.refresh() and not head.refresh()
        with pytest.raises(ssl.SSLError, match="revoked"):
            shake(name)
    assert before in head.revoked() and serial(files["tina"]) in head.revoked()
    with pytest.raises(MeasureError, match=r"tina\.pem refused: certificate revoked"):
        check_files(files["tina"])
    issue(tmp_path, "tina", "job", renew=True)
    shake("tina")
    with pytest.raises(UserError, match="'nobody' has no certificate"):
        revoke(tmp_path, "nobody")


def test_renewal_by_the_authority_takes_certificates_ending_soon(tmp_path: Path) -> None:
    make_authority(tmp_path)
    issue(tmp_path, "soon", "worker", days=2)
    issue(tmp_path, "later", "worker", days=30)
    issue(tmp_path, "gone", "job", days=2)
    revoke(tmp_path, "gone")
    assert [path.name for path in renew(tmp_path, days=7)] == ["soon.pem"]
    assert renew(tmp_path) == [] and [p.name for p in renew(tmp_path, ["later"])] == ["later.pem"]
    left = [end_of(tmp_path / f"{name}.pem") - datetime.datetime.now(datetime.UTC) for name in ("soon", "later")]  # type: ignore[operator]
    assert [round(one / datetime.timedelta(days=1)) for one in left] == [7, 30]  # as said, and as long as before
    with pytest.raises(UserError, match="is revoked"):
        renew(tmp_path, ["gone"])


def test_process_renews_own_certificate_beside_the_key_of_the_authority(tmp_path: Path) -> None:
    ca, ca_key = make_authority(tmp_path)
    files = TlsFiles(str(ca), *map(str, issue(tmp_path, "gpu1", "worker", days=9)))
    own, before = FleetSecurity(files), serial(files)
    context = own.get_listen_args("worker")["ssl_context"]
    assert not own.renew(time.time() + 5 * 86400) and own.renew(time.time() + 7 * 86400) and own.refresh()
    assert serial(files) != before and len(own.contexts) == 1
    head = TlsFiles(str(ca), *map(str, issue(tmp_path, "head", "scheduler")))
    given = FleetSecurity(head).get_connection_args("scheduler")
    seen = _shake_hands(context, given["ssl_context"], given["server_hostname"])
    assert int(seen["serialNumber"], 16) == serial(files)
    ca_key.unlink()
    assert not own.renew(time.time() + 7 * 86400)


def test_list_is_good_where_clocks_are_behind(tmp_path: Path) -> None:
    make_authority(tmp_path)
    for name in ("tina", "tom"):
        issue(tmp_path, name, "job")
    began, updates = datetime.datetime.now(datetime.UTC), []
    for name in ("tina", "tom"):
        path, _ = revoke(tmp_path, name)
        updates.append(x509.load_pem_x509_crl(path.read_bytes()).last_update_utc)
    assert updates[0] < updates[1] < began - datetime.timedelta(minutes=4)


def test_revocations_at_once_lose_no_entry(tmp_path: Path) -> None:
    ca, _ = make_authority(tmp_path)
    names = [f"job{at}" for at in range(6)]
    for name in names:
        issue(tmp_path, name, "job")
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: revoke(tmp_path, name), names))
    files = [TlsFiles(str(ca), str(tmp_path / f"{name}.pem"), str(tmp_path / f"{name}.key")) for name in names]
    assert FleetSecurity(files[0]).revoked() == {serial(one) for one in files}


def test_renewal_gives_nothing_while_the_list_is_changed(tmp_path: Path) -> None:
    ca, _ = make_authority(tmp_path)
    own = FleetSecurity(TlsFiles(str(ca), *map(str, issue(tmp_path, "gpu1", "worker"))))
    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path):
            renewed = pool.submit(own.renew, time.time() + 6 * 86400)
            with pytest.raises(TimeoutError):
                renewed.result(0.3)
            revoke(tmp_path, "gpu1")
        assert renewed.result(10.0) is False


def test_pair_of_two_certificates_leaves_the_former_in_use_and_the_list_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head, files, shake = head_and_two_jobs(tmp_path)
    former, key = serial(files["head"]), Path(files["head"].key).read_bytes()
    issue(tmp_path, "head", "scheduler", renew=True)
    made = Path(files["head"].key).read_bytes()
    Path(files["head"].key).write_bytes(key)  # copied without its key
    revoke(tmp_path, "tina")
    assert not head.refresh() and not head.refresh()
    assert [record.message.count("key values mismatch") for record in caplog.records] == [1]
    assert shake("tom") == former
    with pytest.raises(ssl.SSLError, match="revoked"):
        shake("tina")
    Path(files["head"].key).write_bytes(made)
    assert head.refresh() and shake("tom") == serial(files["head"])


@pytest.mark.process
def test_job_and_worker_cut_off_a_revoked_scheduler(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ca, _ = make_authority(tmp_path)
    files = {
        role: TlsFiles(str(ca), *map(str, issue(tmp_path, f"{role}1", role)))  # type: ignore[arg-type]
        for role in FLEET_ROLES
    }
    process, address = start_scheduler(tls=files["scheduler"])
    with process, start_fake(address, "one", tls=files["worker"], secs=0.05) as worker:
        connection = SchedulerConnection(address, files["job"], 20.0)
        give_up = time.monotonic() + 60.0
        try:
            while not connection.devices():
                assert time.monotonic() < give_up, worker.log()
                time.sleep(0.2)
            revoke(tmp_path, "scheduler1")
            said = "a connection is closed: the peer's certificate is revoked"
            while said not in worker.log() or said not in caplog.text:
                assert time.monotonic() < give_up, (worker.log(), caplog.text)
                time.sleep(0.2)
        finally:
            connection.close()
        with pytest.raises(MeasureError, match=r"our authority .*certificate revoked"):
            check_scheduler(address, files["job"], 20.0)


@pytest.mark.process
def test_scheduler_at_a_taken_port_changes_no_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        make_loopback(port)
        before = {path.name: path.read_bytes() for path in loopback_folder(port).iterdir()}
        with pytest.raises(MeasureError, match=f"127.0.0.1 at port {port}: Address already"):
            start_scheduler(port=port)
    assert {path.name: path.read_bytes() for path in loopback_folder(port).iterdir()} == before


@pytest.mark.process
def test_running_scheduler_follows_renewal_and_revocation(tmp_path: Path) -> None:
    ca, _ = make_authority(tmp_path)
    files = {
        name: TlsFiles(str(ca), *map(str, issue(tmp_path, name, role)))
        for name, role in (("head", "scheduler"), ("tina", "job"))
    }  # type: ignore[arg-type]
    process, address = start_scheduler(tls=files["head"])
    with process:
        connection = SchedulerConnection(address, files["tina"], 20.0)
        try:
            renew(tmp_path, ["head"])
            give_up = time.monotonic() + 60.0
            while seen_serial(address, files["tina"]) != serial(files["head"]):
                assert time.monotonic() < give_up
                time.sleep(0.2)
            revoke(tmp_path, "tina")
            while "the certificate of job/tina is revoked" not in process.log():
                assert time.monotonic() < give_up, process.log()
                time.sleep(0.2)
        finally:
            connection.close()
        tls = dataclasses.replace(files["tina"], ca=shutil.copy(ca, tmp_path / "tinas-ca.pem"))  # without the list
        with pytest.raises(MeasureError, match=r"refuses our certificate: .*revoked"):
            check_scheduler(address, tls, 20.0)


def seen_serial(address: str, files: TlsFiles) -> int:
    given = FleetSecurity(files).get_connection_args("client")
    with (
        socket.create_connection(host_and_port(address), 10) as plain,
        given["ssl_context"].wrap_socket(plain, server_hostname=given["server_hostname"]) as safe,
    ):
        return int(safe.getpeercert()["serialNumber"], 16)


@pytest.mark.process
def test_scheduler_on_loopback_refuses_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, address = start_scheduler()
    with process:
        folder = loopback_folder(host_and_port(address)[1])
        assert address.startswith("tls://") and folder.stat().st_mode & 0o777 == 0o700
        with contextlib.closing(SchedulerConnection(address.replace("tls:", "tcp:"), None, 20.0)) as ours:
            assert ours.devices() == []
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # as another user's
        with pytest.raises(FleetUnavailable, match="none that this user has started"):
            SchedulerConnection(address, None, 0.5)
        make_loopback(host_and_port(address)[1])
        with pytest.raises(MeasureError, match="our authority does not vouch for"):
            SchedulerConnection(address, None, 5.0)
        bare = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        bare.check_hostname = False
        with socket.create_connection(host_and_port(address), 10) as plain, pytest.raises(OSError):
            bare.wrap_socket(plain).recv(1)


def test_files_of_job_are_refused_for_serving(fleet: dict[Role, TlsFiles]) -> None:
    with pytest.raises(MeasureError, match="purpose"):
        check_files(fleet["database"])
    for role in FLEET_ROLES:
        files = fleet[role]
        check_files(files)
        for wanted in FLEET_ROLES:
            if wanted == role:
                check_files(files, (wanted,))
            else:
                with pytest.raises(MeasureError, match=f"certificate of the role {wanted} .* got {role}"):
                    check_files(files, (wanted,))


def test_issue_replaces_certificates_only_by_renewal(tmp_path: Path) -> None:
    def said(*line: str) -> str:
        return " ".join(CliRunner().invoke(app, ["certificate", *line]).output.split())

    folder = str(tmp_path / "fleet")
    assert "expected an authority" in said("issue", folder, "gpu1", "--role", "worker")
    assert "ca.pem" in said("authority", folder)
    assert "cannot be written: File exists" in said("authority", folder)
    assert "gpu1, worker, until" in said("issue", folder, "gpu1", "--role", "worker")
    before = (tmp_path / "fleet" / "gpu1.key").read_bytes()
    assert "--renew replaces it" in said("issue", folder, "gpu1", "--role", "worker")
    assert (tmp_path / "fleet" / "gpu1.key").read_bytes() == before
    assert "gpu1, worker, until" in said("issue", folder, "gpu1", "--role", "worker", "--renew")
    assert (tmp_path / "fleet" / "gpu1.key").read_bytes() != before
    assert "gpu1, worker, until" in said("show", str(tmp_path / "fleet" / "gpu1.pem"))
    assert "--role expects scheduler, worker, job" in said("issue", folder, "gpu2", "--role", "owner")
    assert "--days expects 1 to 3650" in said("issue", folder, "gpu2", "--role", "job", "--days", "0")
    assert "expected a name" in said("issue", folder, "../gpu2", "--role", "job")
    with pytest.raises(UserError, match="expected a certificate in PEM"):
        describe(tmp_path / "fleet" / "ca.key")


@pytest.mark.parametrize(
    "name", ["worker.relax-tune.internal", "Scheduler.relax-tune.internal", "a.relax-tune.internal."]
)
def test_name_of_a_role_is_given_to_nobody(tmp_path: Path, name: str) -> None:
    make_authority(tmp_path)
    with pytest.raises(UserError, match="not the name of a role"):
        issue(tmp_path, name, "job")


def test_new_authority_leaves_no_list_of_an_older_one(tmp_path: Path) -> None:
    make_authority(tmp_path)
    issue(tmp_path, "gpu1", "worker")
    revoke(tmp_path, "gpu1")
    for name in ("ca.pem", "ca.key"):
        (tmp_path / name).unlink()
    make_authority(tmp_path)
    assert not (tmp_path / "ca.crl").exists()


def test_certificate_on_loopback_ending_soon_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    make_loopback(8786)
    issue(loopback_folder(8786), "job", "job", days=1, renew=True)
    _, files = place_of("tcp://127.0.0.1:8786", None, "job", 0.0)
    ends = end_of(Path(files.certificate))
    assert ends is not None and ends > datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=5)
