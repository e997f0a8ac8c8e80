"""Checks before Dask connects: that certificate files are usable, and that a scheduler answers at an address.

Dask retries hopeless connections, and a scheduler that refuses a certificate only closes the connection. So the files
are tested here in a handshake in memory, and one connection is made whose failure is reported.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from relax_tune.errors import FleetAway, MeasureError, system_reason
from relax_tune.tuner.measure.cluster.address import TlsFiles, host_and_port
from relax_tune.tuner.measure.cluster.trust.authority import ROLES, Role, certificate_role, role_name

# How long a scheduler may take to answer, from the name's look-up to its first words.
ANSWER_SECS = 20.0
_RETRY_SECS = 0.2
_FILE_BYTES = 1 << 20
# The first message of every Dask process names these; a few dozen bytes, after its length.
_GREETING, _GREETING_BYTES = b"compression", 1 << 16
_AGREE = "scheduler, workers and `tune` need certificates of one authority"


def check_files(tls: TlsFiles, roles: Sequence[Role] = ROLES) -> None:
    """Check that the three files make a certificate that other processes of the authority accept.

    roles: the accepted roles. One of a scheduler or worker must also serve a server, since others connect to it

    Raises MeasureError that names the file. It may be missing, not PEM, a key with a passphrase, or one that other users can read.
    It may be a key of another certificate, or a certificate that is expired, revoked, not valid yet, of another authority, or of
    another role.
    """
    authority = _read("authority", tls.ca)
    certificate = _read("certificate", tls.certificate)
    key = _read("key", tls.key)
    _check_permissions(tls.key)
    for what, path, data, mark in (
        ("authority", tls.ca, authority, b"-----BEGIN CERTIFICATE-----"),
        ("certificate", tls.certificate, certificate, b"-----BEGIN CERTIFICATE-----"),
        ("key", tls.key, key, b"PRIVATE KEY-----"),
    ):
        if mark not in data:
            raise MeasureError(f"wanted a TLS {what} in PEM in {path}, found none there; give the right file")
    if b"ENCRYPTED" in key:
        raise MeasureError(
            f"wanted a TLS key without a passphrase in {tls.key}, found one with: nobody is there to type it; "
            "`openssl pkey` writes it without (keep that file at mode 600)"
        )
    server, client = _context(tls, ssl.Purpose.CLIENT_AUTH), _context(tls, ssl.Purpose.SERVER_AUTH)
    role = certificate_role(Path(tls.certificate))
    if role == "job":
        client.verify_mode = ssl.CERT_NONE
    try:
        _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        raise MeasureError(
            f"wanted a certificate that the authority in {tls.ca} vouches for, found {tls.certificate} refused: "
            f"{error.verify_message}; {_AGREE}, within its dates"
        ) from None
    except ssl.SSLError as error:
        raise MeasureError(
            f"wanted a certificate for TLS in {tls.certificate}, found it unusable: {_reason(error)}; make another"
        ) from None
    if role not in roles:
        raise MeasureError(
            f"wanted a certificate of the role {' or '.join(roles)} in {tls.certificate}, found {role or 'no role of ours'}; "
            f"`relax-tune certificate issue FOLDER NAME --role {roles[0]}` makes one"
        )


def check_scheduler(address: str, tls: TlsFiles, within_secs: float = ANSWER_SECS) -> None:
    """Wait until a Dask scheduler answers at `address` and accepts us, for at most `within_secs`.

    Raises MeasureError that names the service that answered instead, or says that none did. It is raised at once where
    waiting cannot help.
    """
    give_up = time.monotonic() + within_secs
    wanted = f"wanted a Dask scheduler at {address} within {within_secs:g} s, found "
    context = _context(tls, ssl.Purpose.SERVER_AUTH)
    context.check_hostname = True
    found = "no answer; check host, port and firewall"
    where = _look_up(address, give_up, wanted)
    while True:
        for family, kind, protocol, _, place in where:
            with socket.socket(family, kind, protocol) as plain:
                try:
                    plain.settimeout(max(give_up - time.monotonic(), 0.001))
                    plain.connect(place)
                except OSError as error:
                    if not isinstance(error, TimeoutError):
                        found = f"none ({error.strerror or error}); start one, or check host and port"
                    continue
                _greet(plain, context, give_up, wanted)
                return
        if time.monotonic() + _RETRY_SECS > give_up:
            raise FleetAway(wanted + found)
        time.sleep(_RETRY_SECS)


# Files.


def _read(what: str, path: str) -> bytes:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise MeasureError(f"wanted a TLS {what} in PEM in {path}, found no plain file; give the right path")
        with open(path, "rb") as file:
            return file.read(_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise MeasureError(
            f"wanted to read the TLS {what} {path!r}, found {system_reason(error)}; give the right path"
        ) from None


def _check_permissions(key: str) -> None:
    """Check that only the owner can read the key. A group may read a key of root's if we are not root."""
    status = os.stat(key)
    lent = status.st_uid == 0 and os.geteuid() != 0
    if status.st_mode & (0o037 if lent else 0o077):
        raise MeasureError(
            f"wanted the TLS key {key} for its owner alone, found mode {stat.S_IMODE(status.st_mode):03o}: other users "
            f"can use it, and who holds it can run programs on every worker; chmod 600 {Path(key).name}, or make a new one"
        )


def _context(tls: TlsFiles, purpose: ssl.Purpose) -> ssl.SSLContext:
    """Make a TLS context as `FleetSecurity` does: the authority and its list decide, names of hosts are not compared."""
    try:
        context = ssl.create_default_context(purpose, cafile=tls.ca)
    except ssl.SSLError as error:
        raise MeasureError(
            f"wanted the certificates of an authority in {tls.ca}, found {_reason(error)}; give the right file"
        ) from None
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        reason = _reason(error)
        if "key values mismatch" in reason:
            reason = "the key of another certificate"
        raise MeasureError(
            f"wanted the TLS certificate {tls.certificate} and its key {tls.key}, found {reason}; give the pair"
        ) from None
    try:
        follow_list(context, tls)
    except (OSError, ssl.SSLError) as error:
        raise MeasureError(
            f"wanted a list of revoked certificates in {list_beside(tls)}, found {_reason(error)}; copy it anew from the authority"
        ) from None
    return context


def list_beside(tls: TlsFiles) -> Path:
    """Return the path of the list of revoked certificates: beside the authority's certificate, `ca.crl` for `ca.pem`."""
    return Path(tls.ca).with_suffix(".crl")


def follow_list(context: ssl.SSLContext, tls: TlsFiles) -> None:
    """Refuse certificates in the authority's list, if there is one. Of several lists OpenSSL takes the newest.

    Raises: OSError and ssl.SSLError for a list that cannot be read."""
    path = list_beside(tls)
    if path.exists():
        context.load_verify_locations(cafile=path)
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None = None) -> Any:
    """Shake hands in memory. Returns the server's certificate. Raises the ssl.SSLError of the side that refuses first."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):  # a handshake is three flights at most
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return sides[0].getpeercert()


# Addresses.


def _look_up(address: str, give_up: float, wanted: str) -> list[Any]:
    """Resolve the host, in a thread because a resolver has no time limit."""
    host, port = host_and_port(address)
    answer: list[Any] = []

    def ask() -> None:
        try:
            answer.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answer.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(max(give_up - time.monotonic(), 0.0))
    if not answer:
        raise MeasureError(f"{wanted}no answer to where {host} is; check the name")
    if isinstance(answer[0], Exception):
        reason = getattr(answer[0], "strerror", None) or answer[0]
        raise MeasureError(f"{wanted}no host of the name {host} ({reason}); check the name")
    return list(answer[0])


def _greet(plain: socket.socket, context: ssl.SSLContext, give_up: float, wanted: str) -> None:
    """Read the scheduler's greeting, which it sends once it accepts us (TLS 1.3 refuses only then)."""
    ours = False
    try:
        plain.settimeout(max(give_up - time.monotonic(), 0.001))
        with context.wrap_socket(plain, server_hostname=role_name("scheduler")) as safe:
            ours = True
            _read_greeting(safe, give_up)
    except TimeoutError:
        _fail(
            wanted,
            "a service that takes the connection and says nothing",
            "check the port",
        )
    except ssl.SSLCertVerificationError as error:
        if "mismatch" in error.verify_message.lower():
            _fail(
                wanted, "a service of our authority whose certificate has not the role scheduler", "check host and port"
            )
        _fail(wanted, f"one whose certificate our authority does not vouch for: {error.verify_message}", _AGREE)
    except (ssl.SSLEOFError, ConnectionError, EOFError) as error:
        after = " after it saw our certificate" if ours else ""
        hint = _AGREE if ours else "check the port, and that `relax-tune scheduler` runs there"
        _fail(
            wanted,
            f"a service that closed the connection{after} ({_reason(error)})",
            hint,
        )
    except ssl.SSLError as error:
        if "alert" in _reason(error):
            _fail(wanted, f"that it refuses our certificate: {_reason(error)}", f"{_AGREE}, within its dates")
        _fail(
            wanted,
            f"a service that does not speak TLS ({_reason(error)})",
            "start `relax-tune scheduler` there",
        )
    except OSError as error:
        _fail(wanted, f"no answer ({error})", "check host, port and firewall")


def _fail(wanted: str, found: str, remedy: str) -> NoReturn:
    raise MeasureError(f"{wanted}{found}; {remedy}") from None


def _read_greeting(stream: socket.socket, give_up: float) -> None:
    data = b""
    while _GREETING not in data and len(data) < _GREETING_BYTES:
        stream.settimeout(max(give_up - time.monotonic(), 0.001))
        more = stream.recv(4096)
        if not more:
            raise EOFError("without a word" if not data else "in the middle of its greeting")
        data += more
        if time.monotonic() > give_up:
            break
    if _GREETING not in data:
        raise TimeoutError


def _reason(error: Exception) -> str:
    """Return the words of OpenSSL, without library and line."""
    reason = getattr(error, "reason", None)
    return str(reason).replace("_", " ").lower() if reason else str(error)
