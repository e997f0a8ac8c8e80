"""A PostgreSQL server that goes away in the middle of work and comes back; and one that stays away."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit

import pytest
from sqlalchemy import create_engine, make_url, text
from tests.database.records_made import ZEN, filled, timing

from relax_tune.database import engine
from relax_tune.database.store import open_store
from relax_tune.errors import DatabaseError, TryAgainLater, is_temporary

pytestmark = pytest.mark.postgres


class Road:
    """A TCP road to a server: `cut` drops everybody on it and lets nobody on, `mend` opens it again."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._open: list[socket.socket] = []
        self._listener: socket.socket | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.mend()

    def mend(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(16)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        assert self._listener is not None
        for end in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(self._to)
                self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _by(road: Road, url: str) -> str:
    parts = urlsplit(url)
    return f"postgresql://{parts.username}@127.0.0.1:{road.port}{parts.path}"


def test_work_goes_on_when_the_server_comes_back(postgres_url: str) -> None:
    parts = urlsplit(postgres_url)
    road = Road(str(parts.hostname), int(parts.port or 5432))
    with open_store(_by(road, postgres_url)) as store:
        filled(store).add_measurements([timing("first", 1.0)])
        for interruption in range(2):
            road.cut()
            back = threading.Timer(1.0, road.mend)
            back.start()
            added = store.add_measurements([timing(f"m{interruption}-{i}", 1.0 + i) for i in range(5)])
            assert added == 5 and store.count(ZEN.key) == 1 + 5 * (interruption + 1)
            back.join()
        assert store.check() == []
    road.cut()


def test_start_waits_for_restarting_server(postgres_url: str) -> None:
    parts = urlsplit(postgres_url)
    road = Road(str(parts.hostname), int(parts.port or 5432))
    road.cut()
    said: list[str] = []
    back = threading.Timer(1.0, road.mend)
    back.start()
    with open_store(_by(road, postgres_url), wait_secs=60, notice=said.append) as store:
        assert filled(store).targets() and store.away_secs == 60
    back.join()
    road.cut()
    assert len(said) == 1 and "waiting up to 60 s for the database server" in said[0]


def test_session_ended_during_open_is_a_temporary_failure(postgres_url: str) -> None:
    with open_store(postgres_url) as store:
        filled(store)
    server = create_engine(make_url(postgres_url).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    done = threading.Event()

    def terminate() -> None:
        with server.connect() as connection:
            while not done.wait(0.001):
                connection.execute(text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid != pg_backend_pid()"
                                        " AND datname = current_database()"))  # fmt: skip

    killer = threading.Thread(target=terminate)
    killer.start()
    failures = []
    try:
        for _ in range(40):
            try:
                open_store(postgres_url).close()
            except DatabaseError as error:
                failures.append(error)
    finally:
        done.set()
        killer.join()
        server.dispose()
    assert failures and all(map(is_temporary, failures)), failures


def test_start_with_wrong_host_name_waits_for_nothing() -> None:
    said: list[str] = []
    with pytest.raises(DatabaseError, match="check the host name"):
        open_store("postgresql://relax@no-such-host.invalid/x", wait_secs=600, notice=said.append)
    assert not said


def test_lost_server_raises_in_time(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = urlsplit(postgres_url)
    road = Road(str(parts.hostname), int(parts.port or 5432))
    monkeypatch.setattr(engine, "AWAY_SECS", 1)
    with open_store(_by(road, postgres_url)) as store:
        filled(store)
        road.cut()
        with pytest.raises(TryAgainLater, match=r"could not add measurements.*(server|refused)"):
            store.add_measurements([timing("lost", 1.0)])
    with pytest.raises(DatabaseError, match="check that the server runs"):
        open_store(_by(road, postgres_url))
    with open_store(postgres_url) as store:
        assert store.count(ZEN.key) == 0 and store.check() == []
