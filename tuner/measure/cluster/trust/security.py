"""TLS of one process of a fleet: its role's certificate, the role that it connects to, and files that change while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed

from relax_tune.errors import UserError
from relax_tune.tuner.measure.cluster.address import TlsFiles
from relax_tune.tuner.measure.cluster.tls import follow_list, list_beside
from relax_tune.tuner.measure.cluster.trust.authority import CA, CA_KEY, renew_own, role_name

_LOG = logging.getLogger("distributed.relax_tune")
LOOK_SECS = 5.0
"""Seconds between two looks at the files."""
_RENEW_PART = 1 / 3
"""A certificate is renewed when a third of its life is left."""


class FleetSecurity(distributed.Security):
    """Dask's TLS settings with what a fleet adds: the other side's role, and the list of revoked certificates.

    There is no session resumption, so that each connection is checked against the list.

    A scheduler connects to workers, and all others to a scheduler.

    tls: files of this process
    """

    def __init__(self, tls: TlsFiles) -> None:
        names = ("client", "scheduler", "worker")
        certificates = {f"tls_{name}_cert": tls.certificate for name in names}
        keys = {f"tls_{name}_key": tls.key for name in names}
        super().__init__(  # type: ignore[no-untyped-call]
            require_encryption=True, tls_ca_file=tls.ca, tls_min_version=ssl.TLSVersion.TLSv1_3, **certificates, **keys
        )
        self.tls = tls
        self.contexts: list[ssl.SSLContext] = []
        self._made: weakref.WeakSet[ssl.SSLSocket] = weakref.WeakSet()
        self._seen = self._told = self._stamp()

    def get_connection_args(self, role: str) -> dict[str, Any]:
        """Return what Dask connects with."""
        found: dict[str, Any] = super().get_connection_args(role)  # type: ignore[no-untyped-call]
        context = self._kept(found["ssl_context"])
        context.check_hostname = True
        self._note_sockets(context)
        return {**found, "server_hostname": role_name("worker" if role == "scheduler" else "scheduler")}

    def get_listen_args(self, role: str) -> dict[str, Any]:
        """Return what Dask listens with."""
        found: dict[str, Any] = super().get_listen_args(role)  # type: ignore[no-untyped-call]
        self._kept(found["ssl_context"]).num_tickets = 0
        return found

    def refresh(self) -> bool:
        """Read files anew that have changed, and cut off who is in the list. Returns whether they had, and all of them fit.

        A certificate and key that do not fit leave the former ones in use. The list is followed all the same."""
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        steps = (self._read_authority, self._read_pair, lambda context: follow_list(context, self.tls))
        failures = []
        for step in steps:
            try:
                for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), *self.contexts):  # the first may break
                    step(context)
            except (OSError, ssl.SSLError, ValueError) as error:  # half written: the next look reads them
                failures.append(str(error))
        self._cut(self.revoked())
        if failures and stamp != self._told:
            _LOG.warning(
                "wanted certificate, key and authority that fit (%s, %s, %s), found: %s; those from before are used on",
                *(self.tls.certificate, self.tls.key, self.tls.ca, "; ".join(failures)),
            )
        self._told = stamp
        if not failures:
            self._seen = stamp
        return not failures

    def _read_authority(self, context: ssl.SSLContext) -> None:
        context.load_verify_locations(cafile=self.tls.ca)

    def _read_pair(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self.tls.certificate, self.tls.key, password=lambda: "")

    def _cut(self, serials: frozenset[int]) -> None:
        """Cut off the connections that this process has made to holders of these certificates, and unfinished ones."""
        for connection in list(self._made) if serials else ():
            try:
                found = int(str((connection.getpeercert() or {}).get("serialNumber", "0")), 16)
            except (OSError, ValueError):  # no handshake yet, or none any more
                found = None
            if found is None or found in serials:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)
                    state = "not known yet" if found is None else "revoked"
                    _LOG.warning("a connection is cut off: the other side's certificate is %s", state)

    def revoked(self) -> frozenset[int]:
        """Return the serial numbers of the list; empty without a list that can be read."""
        from cryptography import x509

        try:
            return frozenset(e.serial_number for e in x509.load_pem_x509_crl(list_beside(self.tls).read_bytes()))
        except (OSError, ValueError):
            return frozenset()

    def renew(self, now: float) -> bool:
        """Renew the own certificate where the authority's key lies beside it, and a third of its life is left."""
        path, folder = Path(self.tls.certificate), Path(self.tls.ca).parent
        if Path(self.tls.ca).name != CA or path.parent != folder or not os.access(folder / CA_KEY, os.R_OK):
            return False
        try:
            return renew_own(path, now, _RENEW_PART)
        except (OSError, ValueError, UserError):  # what it has stays good for a while, and the next look tries again
            return False

    def _note_sockets(self, context: ssl.SSLContext) -> None:
        """Note each socket that a context makes, as long as it lives."""
        wrap = context.wrap_socket

        def noted(*given: Any, **named: Any) -> ssl.SSLSocket:
            made = wrap(*given, **named)
            self._made.add(made)
            return made

        context.wrap_socket = noted  # type: ignore[method-assign]

    def _kept(self, context: ssl.SSLContext) -> ssl.SSLContext:
        follow_list(context, self.tls)
        self.contexts.append(context)
        return context

    def _stamp(self) -> tuple[Any, ...]:
        found = []
        for path in (self.tls.ca, self.tls.certificate, self.tls.key, str(list_beside(self.tls))):
            try:
                status = os.stat(path)
                found.append((status.st_mtime_ns, status.st_ino, status.st_size))
            except OSError:
                found.append((0, 0, 0))
        return tuple(found)


async def keep_fresh(
    security: FleetSecurity, changed: Callable[[], None] = lambda: None, every_secs: float = LOOK_SECS
) -> None:
    """Renew and reread the files of a process, for ever. changed: called after each change"""
    while True:
        await asyncio.sleep(every_secs)
        security.renew(time.time())
        if security.refresh():
            changed()
