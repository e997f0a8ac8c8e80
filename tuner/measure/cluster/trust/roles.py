"""Permissions of each role at a scheduler and at a worker, as sets of Dask's operations.

The role is read from the certificate of the connection. A connection that requests any other operation is closed. Keys of tasks, ids of
clients and addresses of workers belong to the certificate name that registered them first. So a job cannot read or cancel the tasks of
another, and a worker cannot act for another.

Tests: `tests/tuner/measure/cluster/test_hostile.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed.comm.core import CommClosedError

from relax_tune.printable import printable
from relax_tune.tuner.measure.cluster.trust.authority import ROLES, Role, role_name

_LOG = logging.getLogger("distributed.relax_tune")
_STREAM = {"close", "close-stream", "keep-alive"}
OF_SCHEDULER: Mapping[Role, frozenset[str]] = {
    "job": frozenset(
        _STREAM
        | {
            "register-client",
            "heartbeat-client",
            "close-client",
            "identity",
            "processing",
            "broadcast",
            "subscribe-topic",
        }
        | {"update-graph", "gather", "client-releases-keys"}
    ),
    "worker": frozenset(
        _STREAM
        | {"register-worker", "heartbeat_worker", "unregister", "worker-status-change"}
        | {"task-finished", "task-erred", "release-worker-data", "long-running", "reschedule"}
    ),
}
"""Operations of a scheduler, by the roles that may request them. A certificate of the role scheduler may request all."""
OF_WORKER: Mapping[Role, frozenset[str]] = {"scheduler": frozenset({"run", "get_data", "terminate", "close"})}
"""Operations of a worker, by the roles that may request them."""
PAGES: Mapping[str, Any] = {
    "distributed.scheduler.http.routes": ["distributed.http.health"],
    "distributed.worker.http.routes": ["distributed.http.health"],
}
"""Dask's settings for its HTTP server, which it always starts without TLS: only the health check remains."""
_BROADCAST = "run"
_TOPICS = ("print", "warn")
_DROPPED = "log-event"
"""Messages of workers to all clients, which would print them; dropped."""


class Refused(CommClosedError):
    """An operation that is not permitted to the role."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The other side of a connection, by its certificate.

    Attributes:
        name: role and common name, which a renewed certificate shares.
    """

    role: Role | None
    name: str
    serial: int | None


def peer_of(comm: Any) -> Peer:
    """Return the other side of a connection."""
    certificate = comm.extra_info.get("peercert") or {}
    names = {value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"}
    subject = dict(pair for part in certificate.get("subject", ()) for pair in part)
    serial = certificate.get("serialNumber")
    role = next((role for role in ROLES if role_name(role) in names), None)
    return Peer(role, f"{role}/{subject.get('commonName', '')}", int(serial, 16) if serial else None)


@dataclass(eq=False)
class Gate:
    """Access control for the connections of one scheduler or worker.

    Attributes:
        operations: permitted operations of each role.
        everything: a role with all permissions.
        owners: certificate name that registered a (kind, id) of a key, client or address.
        open: the open connections.
        revoked: serial numbers of revoked certificates.
    """

    operations: Mapping[Role, frozenset[str]]
    everything: Role | None = None
    owners: dict[tuple[str, str], str] = field(default_factory=dict)
    open: dict[Any, Peer] = field(default_factory=dict)
    revoked: frozenset[int] = frozenset()

    def guard(self, comm: Any) -> None:
        """Make a connection deliver only messages that its role may send; any other message closes it."""
        peer, read = peer_of(comm), comm.read
        self.open = {c: p for c, p in self.open.items() if not c.closed()} | {comm: peer}
        registered: set[tuple[str, str]] = set()

        async def guarded(*given: Any, **named: Any) -> Any:
            try:
                while True:
                    message = await read(*given, **named)
                    if peer.role is not None and peer.role == self.everything and peer.serial not in self.revoked:
                        return message
                    several = isinstance(message, list | tuple)
                    passed = [one for one in (message if several else (message,)) if not self._drops(one)]
                    for one in passed:
                        if why := self._refusal(one, peer, registered):
                            _LOG.warning(
                                "%s with a certificate of %s is disconnected: %s",
                                comm.peer_address,
                                printable(peer.name),
                                printable(why),
                            )
                            comm.abort()
                            raise Refused(why)
                    if passed:
                        return passed if several else message
            except BaseException:
                for belonging in registered:
                    self.owners.pop(belonging, None)
                raise

        comm.read = guarded

    def cut(self, serials: frozenset[int]) -> None:
        """Close the connections of these certificates, including connections still in the handshake."""
        self.revoked = serials
        for comm, peer in list(self.open.items()):
            if peer.serial in serials and not comm.closed():
                _LOG.warning(
                    "%s is disconnected: the certificate of %s is revoked", comm.peer_address, printable(peer.name)
                )
                comm.abort()

    def _drops(self, message: Any) -> bool:
        return isinstance(message, dict) and message.get("op") == _DROPPED

    def _refusal(self, message: Any, peer: Peer, registered: set[tuple[str, str]]) -> str:
        """Return why a message is rejected; empty if it is permitted.

        Args:
            registered: receives the ids that belong to this connection, and end with it.
        """
        if peer.serial in self.revoked:
            return "its certificate is revoked"
        if not isinstance(message, dict):
            return "" if message == "OK" else "it sends a message without an operation"
        operation = message.get("op")
        if peer.role is None or operation not in self.operations.get(peer.role, frozenset()):
            return f"it requests {operation!r:.60}"
        inner = message.get("msg") if operation == "broadcast" else None
        if operation == "broadcast" and not (isinstance(inner, dict) and inner.get("op") == _BROADCAST):
            return f"it broadcasts an operation other than {_BROADCAST!r}"
        if operation == "subscribe-topic" and message.get("topic") not in _TOPICS:
            return f"it subscribes to {message.get('topic')!r:.60}"
        brings = {"register-client": "client", "update-graph": "key", "register-worker": "address"}.get(str(operation))
        for belonging in _belongings(message, peer.role):
            owner = self.owners.get(belonging)
            if owner is None and belonging[0] == brings:
                self.owners[belonging] = peer.name
                if brings != "address":
                    registered.add(belonging)
            elif owner != peer.name:
                return f"it requests {operation!r:.60} for the {belonging[0]} {belonging[1]!r:.80} of another owner"
        return ""


def _belongings(message: Mapping[str, Any], role: Role) -> Iterator[tuple[str, str]]:
    """Yield the (kind, id) of everything in a message that must belong to its sender.

    Keys are checked only for jobs: the tasks of a worker always belong to a job.
    """
    for name in ("keys", "key") if role == "job" else ():
        keys = message.get(name, ())
        for key in keys if isinstance(keys, list | tuple | set | frozenset) else (keys,):
            yield "key", str(key)
    for name, what in (("client", "client"), ("address", "address"), ("worker", "address")):
        if message.get(name) is not None:
            yield what, str(message[name])
