"""Rights of each role at a scheduler and at a worker, over Dask's own operations.

Whoever asks for another operation is cut off. The role is read from the certificate of the connection. Keys of tasks, clients and
addresses of workers belong to the certificate's name that brought them first. So no job reads or cancels what another submitted, and no
worker speaks for another.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed.comm.core import CommClosedError

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
"""Operations of a scheduler, by the role that may ask for them. A scheduler's own certificate may ask for all."""
OF_WORKER: Mapping[Role, frozenset[str]] = {"scheduler": frozenset({"run", "get_data", "terminate", "close"})}
"""Operations of a worker."""
PAGES: Mapping[str, Any] = {
    "distributed.scheduler.http.routes": ["distributed.http.health"],
    "distributed.worker.http.routes": ["distributed.http.health"],
}
"""Dask's settings of the page that it always opens in plain HTTP: one that says only that the process lives."""
_BROADCAST = "run"
_TOPICS = ("print", "warn")
_DROPPED = "log-event"
"""What Dask's workers tell all clients, which would print it."""


class Refused(CommClosedError):
    """An operation that the role does not have."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The other side of a connection, by its certificate. name: common to all certificates that the authority gave to it"""

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
    """Guards the connections of one scheduler or worker.

    operations: operations of each role. everything: a role that may ask for all
    """

    operations: Mapping[Role, frozenset[str]]
    everything: Role | None = None
    owners: dict[tuple[str, str], str] = field(default_factory=dict)
    open: dict[Any, Peer] = field(default_factory=dict)
    revoked: frozenset[int] = frozenset()

    def guard(self, comm: Any) -> None:
        """Let through a connection only what its role may ask for."""
        peer, read = peer_of(comm), comm.read
        self.open = {c: p for c, p in self.open.items() if not c.closed()} | {comm: peer}
        kept: set[tuple[str, str]] = set()

        async def guarded(*given: Any, **named: Any) -> Any:
            try:
                while True:
                    message = await read(*given, **named)
                    if peer.role is not None and peer.role == self.everything and peer.serial not in self.revoked:
                        return message
                    several = isinstance(message, list | tuple)
                    passed = [one for one in (message if several else (message,)) if not self._drops(one)]
                    for one in passed:
                        if why := self._refusal(one, peer, kept):
                            _LOG.warning(
                                "%s with a certificate of %s is cut off: %s", comm.peer_address, peer.name, why
                            )
                            comm.abort()
                            raise Refused(why)
                    if passed:
                        return passed if several else message
            except BaseException:
                for belonging in kept:
                    self.owners.pop(belonging, None)
                raise

        comm.read = guarded

    def cut(self, serials: frozenset[int]) -> None:
        """Cut off the connections of these certificates, and what comes of one whose greeting is still under way."""
        self.revoked = serials
        for comm, peer in list(self.open.items()):
            if peer.serial in serials and not comm.closed():
                _LOG.warning("%s is cut off: the certificate of %s is revoked", comm.peer_address, peer.name)
                comm.abort()

    def _drops(self, message: Any) -> bool:
        return isinstance(message, dict) and message.get("op") == _DROPPED

    def _refusal(self, message: Any, peer: Peer, kept: set[tuple[str, str]]) -> str:
        """Say why a message is refused; empty if it is not. kept: what belongs to this connection alone"""
        if peer.serial in self.revoked:
            return "its certificate is revoked"
        if not isinstance(message, dict):
            return "" if message == "OK" else "it sends no operation"
        operation = message.get("op")
        if peer.role is None or operation not in self.operations.get(peer.role, frozenset()):
            return f"it asks for {operation!r:.60}"
        inner = message.get("msg") if operation == "broadcast" else None
        if operation == "broadcast" and not (isinstance(inner, dict) and inner.get("op") == _BROADCAST):
            return "it broadcasts another operation than to run a function of ours"
        if operation == "subscribe-topic" and message.get("topic") not in _TOPICS:
            return f"it listens to {message.get('topic')!r:.60}"
        brings = {"register-client": "client", "update-graph": "key", "register-worker": "address"}.get(str(operation))
        for belonging in _belongings(message, peer.role):
            owner = self.owners.get(belonging)
            if owner is None and belonging[0] == brings:
                self.owners[belonging] = peer.name
                if brings != "address":
                    kept.add(belonging)
            elif owner != peer.name:
                return f"it asks {operation!r:.60} for the {belonging[0]} {belonging[1]!r:.80}, which is not its own"
        return ""


def _belongings(message: Mapping[str, Any], role: Role) -> Iterator[tuple[str, str]]:
    """Name what a message is about, and must be its sender's: a worker's tasks are a job's, and hold no secret from it."""
    for name in ("keys", "key") if role == "job" else ():
        found = message.get(name, ())
        for key in found if isinstance(found, list | tuple | set | frozenset) else (found,):
            yield "key", str(key)
    for name, what in (("client", "client"), ("address", "address"), ("worker", "address")):
        if message.get(name) is not None:
            yield what, str(message[name])
