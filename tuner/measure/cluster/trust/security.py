"""TLS settings of a fleet's process: certificate of its role, verification of the peer's role, and reloading of changed files.

Tests: `tests/tuner/cli/test_certificates.py`.
"""

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
from relax_tune.tuner.measure.cluster.tls import apply_crl, crl_path
from relax_tune.tuner.measure.cluster.trust.authority import CA, CA_KEY, renew_own, role_name

_LOG = logging.getLogger("distributed.relax_tune")
LOOK_SECS = 5.0
"""Seconds between two checks of the files for changes."""
_RENEW_PART = 1 / 3
"""A certificate is renewed when this fraction of its validity is left."""


class FleetSecurity(distributed.Security):
    """Dask's TLS settings with verification of the peer's role and of the revocation list (CRL).

    A scheduler connects to workers, all other processes to a scheduler. Session resumption is disabled, so that each connection is
    checked with the CRL.

    Args:
        tls: files of this process.
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
        self._sockets: weakref.WeakSet[ssl.SSLSocket] = weakref.WeakSet()
        self._loaded = self._reported = self._stamp()

    def get_connection_args(self, role: str) -> dict[str, Any]:
        """Return Dask's arguments for outgoing connections."""
        arguments: dict[str, Any] = super().get_connection_args(role)  # type: ignore[no-untyped-call]
        context = self._register(arguments["ssl_context"])
        context.check_hostname = True
        self._note_sockets(context)
        return {**arguments, "server_hostname": role_name("worker" if role == "scheduler" else "scheduler")}

    def get_listen_args(self, role: str) -> dict[str, Any]:
        """Return Dask's arguments for listening."""
        arguments: dict[str, Any] = super().get_listen_args(role)  # type: ignore[no-untyped-call]
        self._register(arguments["ssl_context"]).num_tickets = 0
        return arguments

    def refresh(self) -> bool:
        """Reload changed files, and close the connections of revoked certificates.

        A certificate and key that do not match leave the former ones in use; the CRL is applied regardless.

        Returns:
            True if files had changed and all of them were loaded.
        """
        stamp = self._stamp()
        if stamp == self._loaded:
            return False
        steps = (self._read_authority, self._read_pair, lambda context: apply_crl(context, self.tls))
        failures = []
        for step in steps:
            try:
                # A broken file fails on the spare context, before it touches the ones in use.
                spare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                for context in (spare, *self.contexts):
                    step(context)
            except (OSError, ssl.SSLError, ValueError) as error:
                # The file may be incomplete: the next check reads it again.
                failures.append(str(error))
        self._cut(self.revoked())
        if failures and stamp != self._reported:
            _LOG.warning(
                "certificate, key and authority (%s, %s, %s) cannot be loaded: %s; the former ones remain in use",
                *(self.tls.certificate, self.tls.key, self.tls.ca, "; ".join(failures)),
            )
        self._reported = stamp
        if not failures:
            self._loaded = stamp
        return not failures

    def _read_authority(self, context: ssl.SSLContext) -> None:
        context.load_verify_locations(cafile=self.tls.ca)

    def _read_pair(self, context: ssl.SSLContext) -> None:
        # Without a password OpenSSL would ask for one at the terminal; an encrypted key is to fail.
        context.load_cert_chain(self.tls.certificate, self.tls.key, password=lambda: "")

    def _cut(self, serials: frozenset[int]) -> None:
        """Close this process's outgoing connections to holders of these certificates, including connections still in the handshake."""
        for connection in list(self._sockets) if serials else ():
            try:
                serial = int(str((connection.getpeercert() or {}).get("serialNumber", "0")), 16)
            except (OSError, ValueError):  # before the handshake, or after the end of the connection
                serial = None
            if serial is None or serial in serials:
                with contextlib.suppress(OSError):
                    # Not `SSLSocket.shutdown`, which also takes the TLS state from the thread that is reading.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)
                    state = "not known yet" if serial is None else "revoked"
                    _LOG.warning("a connection is closed: the peer's certificate is %s", state)

    def revoked(self) -> frozenset[int]:
        """Return the serial numbers in the CRL; empty if it does not exist or cannot be read."""
        from cryptography import x509

        try:
            return frozenset(e.serial_number for e in x509.load_pem_x509_crl(crl_path(self.tls).read_bytes()))
        except (OSError, ValueError):
            return frozenset()

    def renew(self, now: float) -> bool:
        """Renew the certificate of this process if it is due, and the authority's key is in its folder. Returns whether it was renewed."""
        path, folder = Path(self.tls.certificate), Path(self.tls.ca).parent
        if Path(self.tls.ca).name != CA or path.parent != folder or not os.access(folder / CA_KEY, os.R_OK):
            return False
        try:
            return renew_own(path, now, _RENEW_PART)
        except (OSError, ValueError, UserError):
            # The old certificate is still valid for a while; the next check tries again.
            return False

    def _note_sockets(self, context: ssl.SSLContext) -> None:
        """Record each socket that a context wraps, until it is garbage collected."""
        wrap = context.wrap_socket

        def recording(*given: Any, **named: Any) -> ssl.SSLSocket:
            wrapped = wrap(*given, **named)
            self._sockets.add(wrapped)
            return wrapped

        context.wrap_socket = recording  # type: ignore[method-assign]

    def _register(self, context: ssl.SSLContext) -> ssl.SSLContext:
        apply_crl(context, self.tls)
        self.contexts.append(context)
        return context

    def _stamp(self) -> tuple[Any, ...]:
        stamps = []
        for path in (self.tls.ca, self.tls.certificate, self.tls.key, str(crl_path(self.tls))):
            try:
                status = os.stat(path)
                # Another inode shows a file that was replaced within the resolution of its times.
                stamps.append((status.st_mtime_ns, status.st_ino, status.st_size))
            except OSError:
                stamps.append((0, 0, 0))
        return tuple(stamps)


async def keep_fresh(
    security: FleetSecurity, changed: Callable[[], None] = lambda: None, every_secs: float = LOOK_SECS
) -> None:
    """Renew and reload the files of a process until it ends.

    Args:
        changed: called after each change.
    """
    while True:
        await asyncio.sleep(every_secs)
        security.renew(time.time())
        if security.refresh():
            changed()
