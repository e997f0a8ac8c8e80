"""The way to a PostgreSQL server: beyond this machine its certificate and its name are verified."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from sqlalchemy import create_engine, text
from sqlalchemy.exc import ProgrammingError
from tests.database.records_made import MATMUL, ZEN, filled, timing

from relax_tune.database.engine import parse_url, transport, weaknesses
from relax_tune.database.jobs.queue import open_queue
from relax_tune.database.jobs.submitted import SubmittedJob
from relax_tune.database.records import JobRecord, Selection
from relax_tune.database.roles import ADMIN, READER, TUNER, role_script
from relax_tune.database.store import open_store
from relax_tune.errors import DatabaseError, UserError
from relax_tune.tuner.settings import load_settings

FULL = {"sslmode": "verify-full", "sslrootcert": "system"}


def without_settings(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    for name in ("HOST", "HOSTADDR", "SSLMODE", "SSLROOTCERT", "SERVICE", "SERVICEFILE", "SYSCONFDIR"):
        monkeypatch.delenv(f"PG{name}", raising=False)
    monkeypatch.setenv("HOME", str(home))


@pytest.mark.parametrize(
    ("url", "variables", "expected"),
    [
        ("postgresql:///x?hostaddr=10.0.0.5", {}, FULL),
        ("postgresql:///x?hostaddr=127.0.0.1", {}, {}),
        ("postgresql:///x?hostaddr=127.0.0.1,10.0.0.5", {}, FULL),
        ("postgresql://me@localhost/x?hostaddr=10.0.0.5", {}, FULL),
        ("postgresql://me@localhost/x", {"PGHOSTADDR": "10.0.0.5"}, FULL),
        ("postgresql://me@localhost/x", {"PGHOSTADDR": "::1"}, {}),
        ("postgresql:///x", {"PGHOST": "db.example"}, FULL),
        ("postgresql:///x?service=far", {}, FULL),
        ("postgresql:///x?service=address", {}, FULL),
        ("postgresql:///x?service=near", {}, {}),
        ("postgresql:///x?service=near", {"PGHOST": "db.example"}, {}),
        ("postgresql://db.example/x?service=near", {}, FULL),
        ("postgresql:///x?service=chosen", {}, {}),
        ("postgresql:///x?service=authority", {}, {"sslmode": "verify-full"}),
        ("postgresql:///x?service=directory", {}, FULL),
        ("postgresql:///x?service=unknown", {}, FULL),
        ("postgresql:///x", {"PGSERVICE": "far"}, FULL),
        ("postgresql:///x", {"PGSERVICE": "near"}, {}),
        ("postgresql:///x", {"PGSERVICE": "far", "PGSERVICEFILE": "/nowhere"}, FULL),
    ],
)
def test_transport_follows_addresses_and_services_as_libpq(
    url: str, variables: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_settings(monkeypatch, tmp_path)
    (tmp_path / ".pg_service.conf").write_text(
        "# services\n[far]\nhost=db.example\n\n[near]\nhost = localhost\nport=1\n[address]\nhostaddr=10.0.0.5\n"
        "[chosen]\nhost=db.example\nsslmode=require\n[authority]\nhost=db.example\nsslrootcert=/ca.pem\n"
        "[directory]\nldap://ldap.example/x\n"
    )
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert transport(parse_url(url)) == expected
    assert len(list(weaknesses(parse_url(url)))) == ("chosen" in url)


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("postgresql://me@localhost/x", {}),
        ("postgresql://me@127.0.0.3/x", {}),
        ("postgresql://me@[::1]/x", {}),
        ("postgresql:///x", {}),
        ("postgresql:///x?host=/run/postgresql", {}),
        ("postgresql://me@db.example/x", FULL),
        ("postgresql://me@10.0.0.1/x", FULL),
        ("postgresql:///x?host=localhost,db.example", FULL),
        ("postgresql://me@db.example/x?sslrootcert=/ca.pem", {"sslmode": "verify-full"}),
        ("postgresql://me@db.example/x?sslmode=require", {}),
    ],
)
def test_transport_to_far_host_is_verified(
    url: str, wanted: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_settings(monkeypatch, tmp_path)
    assert transport(parse_url(url)) == wanted
    weak = list(weaknesses(parse_url(url)))
    assert len(weak) == ("sslmode=require" in url) and all("does not verify the server" in w for w in weak)


@pytest.mark.parametrize("url", ["postgresql://me:hunter2@db/x", "postgresql://me@db/x?password=hunter2"])
def test_password_among_arguments_is_refused(url: str) -> None:
    with pytest.raises(UserError, match=r"--db expects a URL without a password") as error:
        load_settings({"db": url})
    assert "hunter2" not in str(error.value)
    assert load_settings({}, {"RELAX_TUNE_DB": url}).db == url


def certificate(folder: Path, name: str) -> Path:
    """A certificate of its own for a host, and its key, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number(), now, now + datetime.timedelta(1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), False)
        .add_extension(x509.BasicConstraints(True, None), True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    path = folder / f"{name}.pem"
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (folder / f"{name}.key").write_bytes(private)
    return path


@pytest.fixture
def tls_server(postgres_server: str, tmp_path: Path) -> Iterator[str]:
    """The URL of a server that offers TLS as db.example, without its host, after which TLS is off again."""
    admin = create_engine(postgres_server.replace("postgresql:", "postgresql+psycopg:") + "postgres").execution_options(
        isolation_level="AUTOCOMMIT"
    )
    certificate(tmp_path, "db.example")
    with admin.connect() as connection:
        data = Path(connection.scalar(text("SHOW data_directory")))
        for suffix, place in ((".pem", "server.crt"), (".key", "server.key")):
            shutil.copy(tmp_path / f"db.example{suffix}", data / place)
            shutil.chown(data / place, data.stat().st_uid, data.stat().st_gid)
            (data / place).chmod(0o600)
        for turned in ("on", "off"):
            connection.execute(text(f"ALTER SYSTEM SET ssl = {turned}"))
            connection.execute(text("SELECT pg_reload_conf()"))
            if turned == "on":
                yield postgres_server.partition("@127.0.0.1")[2]
    admin.dispose()


@pytest.mark.postgres
def test_server_of_other_certificate_or_name_is_refused(tls_server: str, tmp_path: Path) -> None:
    def url(host: str, authority: Path) -> str:
        return f"postgresql://relax@{host}{tls_server}postgres?hostaddr=127.0.0.1&sslrootcert={authority}"

    own, other = tmp_path / "db.example.pem", certificate(tmp_path, "other.example")
    with pytest.raises(DatabaseError, match="name that its certificate has"):
        open_store(url("other.example", own), create=False)
    with pytest.raises(DatabaseError, match="give its file by sslrootcert=FILE"):
        open_store(url("db.example", other), create=False)
    with pytest.raises(DatabaseError, match="is empty"):
        open_store(url("db.example", own), create=False)


@contextmanager
def logins(postgres_url: str) -> Iterator[None]:
    """Users of the documented roles of a database: tina of tuners, bert of readers, anna of admins."""
    open_store(postgres_url).close()
    owner = create_engine(postgres_url.replace("postgresql:", "postgresql+psycopg:"))
    users = (("tina", TUNER), ("bert", READER), ("anna", ADMIN))
    with owner.begin() as connection:
        for _ in range(2):  # again after an upgrade
            connection.exec_driver_sql(role_script())
        for name, role in users:
            connection.execute(text(f"CREATE ROLE {name} LOGIN IN ROLE {role}"))
    try:
        yield
    finally:
        names = ", ".join([name for name, _ in users] + [READER, TUNER, ADMIN])
        with owner.begin() as connection:
            connection.execute(text(f"REASSIGN OWNED BY {ADMIN} TO relax"))
            connection.execute(text(f"DROP OWNED BY {names}"))
            connection.execute(text(f"DROP ROLE {names}"))
        owner.dispose()


OF_READERS = (
    "INSERT INTO leases DEFAULT VALUES", "UPDATE leases SET expires_at = 0", "DELETE FROM leases",
    "UPDATE plans SET turn = 9", "INSERT INTO about DEFAULT VALUES", "UPDATE submitted_jobs SET state = 'done'",
    "INSERT INTO measurements DEFAULT VALUES",
)  # fmt: skip
OF_ALL = (
    "UPDATE measurements SET checked = true", "DELETE FROM measurements", "DELETE FROM plans", "DELETE FROM submitted_jobs",
    "DELETE FROM jobs", "UPDATE variants SET trace = NULL", "UPDATE workloads SET text = NULL", "UPDATE targets SET name = NULL",
    "TRUNCATE variants", "DROP TABLE leases", "ALTER TABLE plans ADD x int", "CREATE TABLE x (a int)",
    "INSERT INTO about DEFAULT VALUES",
    "UPDATE alembic_version SET version_num = NULL", "CREATE ROLE x", "ALTER ROLE tina SUPERUSER", "GRANT relax_admin TO tina",
    "SET ROLE relax_admin", "COPY plans TO PROGRAM 'id'", "SELECT pg_read_file('/etc/hostname')",
    "CREATE RULE x AS ON INSERT TO plans DO NOTHING", "CREATE FUNCTION public.x() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "CREATE TRIGGER x AFTER INSERT ON plans EXECUTE FUNCTION suppress_redundant_updates_trigger()", "ALTER SYSTEM SET ssl = off",
)  # fmt: skip


@pytest.mark.postgres
def test_hostile_tuner_and_reader_alter_and_remove_nothing_on_record(postgres_url: str) -> None:
    """Statements of clients with valid passwords, without this package between."""
    with logins(postgres_url):
        for name, statements in (("tina", OF_ALL), ("bert", (*OF_ALL, *OF_READERS))):
            engine = create_engine(
                postgres_url.replace("relax@", f"{name}@").replace("postgresql:", "postgresql+psycopg:"),
                isolation_level="AUTOCOMMIT",
            )
            for statement in statements:
                with engine.connect() as connection, pytest.raises(ProgrammingError) as error:
                    connection.exec_driver_sql(statement)
                assert getattr(error.value.orig, "sqlstate", None) == "42501", statement
            engine.dispose()


@pytest.mark.postgres
def test_documented_roles_are_enough_and_no_more(postgres_url: str) -> None:
    with logins(postgres_url):
        with open_store(postgres_url.replace("relax@", "tina@")) as store:
            filled(store).add_measurements([timing("a", 1.0)])
            store.put_plans(ZEN.key, {MATMUL.key: "{}"})
            store.put_job(JobRecord("job"))
            store.put_job(JobRecord("job", state="done"))
            lease = store.acquire_lease(MATMUL.key, ZEN.key, "tina", secs=9.0)
            assert lease is not None and store.release_lease(lease)
            with pytest.raises(DatabaseError, match="permission denied"):
                store.prune(ZEN.key, Selection(since=0.0))
        with open_store(postgres_url.replace("relax@", "bert@"), read_only=True) as store:
            assert store.count(ZEN.key) == 1
        with (
            open_store(postgres_url.replace("relax@", "bert@")) as store,
            pytest.raises(DatabaseError, match="permission denied"),
        ):
            store.add_measurements([timing("b", 1.0)])
        with open_queue(postgres_url.replace("relax@", "tina@")) as queue:
            queue.submit(SubmittedJob("job", "model", "name", "{}", "c"))
            taken = queue.take("holder", 9.0)
            assert taken is not None and queue.beat(taken, 9.0, 1.0, log=[(1, 0, "text")]) == "extended"
        with open_store(postgres_url.replace("relax@", "anna@")) as store:
            assert store.check() == []
            assert store.prune(ZEN.key, Selection(since=0.0)) == 1
