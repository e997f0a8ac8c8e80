"""Checks before Dask connects: the certificate files are usable, and a scheduler answers at an address.

Dask retries after permanent errors, and a scheduler that rejects a certificate only closes the connection. So the files are tested in
a handshake in memory, and the failure of one test connection is reported.
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

from relax_tune.errors import FleetUnavailable, MeasureError, system_reason
from relax_tune.tuner.measure.cluster.address import TlsFiles, host_and_port
from relax_tune.tuner.measure.cluster.trust.authority import FLEET_ROLES, Role, certificate_role, role_name

# Time limit of a test connection, from the DNS lookup to the scheduler's greeting.
ANSWER_SECS = 20.0
_RETRY_SECS = 0.2
_FILE_BYTES = 1 << 20
# Every Dask process begins with a message that contains this word, after its length; it has a few dozen bytes.
_GREETING, _GREETING_BYTES = b"compression", 1 << 16
_AGREE = "scheduler, workers and `tune` need certificates of one authority"


def check_files(tls: TlsFiles, roles: Sequence[Role] = FLEET_ROLES) -> None:
    """Check that other processes of the authority will accept the certificate.

    Args:
        roles: accepted roles. The certificate of a scheduler or worker must also be valid for a server.

    Raises:
        MeasureError: a file is missing or not PEM; the key has a passphrase, can be read by other users, or belongs to another
            certificate; or the certificate is expired, revoked, not valid yet, or of another authority or role. The message names
            the file.
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
            raise MeasureError(
                f"expected a TLS {what} in PEM in {path}, which the file does not contain; give the right file"
            )
    if b"ENCRYPTED" in key:
        raise MeasureError(
            f"expected a TLS key without a passphrase in {tls.key}, got one with a passphrase, which nobody could type; "
            "`openssl pkey` writes the key without it (keep the file at mode 600)"
        )
    server, client = _context(tls, ssl.Purpose.CLIENT_AUTH), _context(tls, ssl.Purpose.SERVER_AUTH)
    role = certificate_role(Path(tls.certificate))
    if role == "job":
        client.verify_mode = ssl.CERT_NONE
    try:
        _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        raise MeasureError(
            f"expected a certificate that the authority in {tls.ca} vouches for, got {tls.certificate} refused: "
            f"{error.verify_message}; {_AGREE}, within its dates"
        ) from None
    except ssl.SSLError as error:
        raise MeasureError(
            f"expected a certificate for TLS in {tls.certificate}, which cannot be used: {_reason(error)}; issue another"
        ) from None
    if role not in roles:
        raise MeasureError(
            f"expected a certificate of the role {' or '.join(roles)} in {tls.certificate}, got {role or 'no role of ours'}; "
            f"`relax-tune certificate issue FOLDER NAME --role {roles[0]}` makes one"
        )


def check_scheduler(address: str, tls: TlsFiles, within_secs: float = ANSWER_SECS) -> None:
    """Wait at most `within_secs` until a Dask scheduler answers at `address` and accepts the certificate.

    Raises:
        MeasureError: another service answered, or the scheduler rejected the certificate; raised without waiting.
        FleetUnavailable: no service answered in time.
    """
    give_up = time.monotonic() + within_secs
    expectation = f"expected a Dask scheduler at {address} within {within_secs:g} s, got "
    context = _context(tls, ssl.Purpose.SERVER_AUTH)
    context.check_hostname = True
    problem = "no answer; check host, port and firewall"
    where = _look_up(address, give_up, expectation)
    while True:
        for family, kind, protocol, _, place in where:
            with socket.socket(family, kind, protocol) as plain:
                try:
                    plain.settimeout(max(give_up - time.monotonic(), 0.001))
                    plain.connect(place)
                except OSError as error:
                    if not isinstance(error, TimeoutError):
                        problem = f"none ({error.strerror or error}); start one, or check host and port"
                    continue
                _greet(plain, context, give_up, expectation)
                return
        if time.monotonic() + _RETRY_SECS > give_up:
            raise FleetUnavailable(expectation + problem)
        time.sleep(_RETRY_SECS)


# Files.


def _read(what: str, path: str) -> bytes:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise MeasureError(f"expected a TLS {what} in PEM in {path}, got no plain file; give the right path")
        with open(path, "rb") as file:
            return file.read(_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise MeasureError(
            f"the TLS {what} {path!r} cannot be read: {system_reason(error)}; give the right path"
        ) from None


def _check_permissions(key: str) -> None:
    """Check that only the owner can read the key. If the owner is root and this process is not, a group may read it, too."""
    status = os.stat(key)
    lent = status.st_uid == 0 and os.geteuid() != 0
    if status.st_mode & (0o037 if lent else 0o077):
        raise MeasureError(
            f"expected the TLS key {key} to be readable only by its owner, got mode {stat.S_IMODE(status.st_mode):03o}: other users "
            f"could use it to run programs on every worker; chmod 600 {Path(key).name}, or issue a new one"
        )


def _context(tls: TlsFiles, purpose: ssl.Purpose) -> ssl.SSLContext:
    """Return a TLS context with the settings of `FleetSecurity`: the authority and its CRL decide, host names are not compared."""
    try:
        context = ssl.create_default_context(purpose, cafile=tls.ca)
    except ssl.SSLError as error:
        raise MeasureError(
            f"expected the certificates of an authority in {tls.ca}, got {_reason(error)}; give the right file"
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
            f"expected the TLS certificate {tls.certificate} and its key {tls.key}, got {reason}; give the pair"
        ) from None
    try:
        apply_crl(context, tls)
    except (OSError, ssl.SSLError) as error:
        raise MeasureError(
            f"expected a list of revoked certificates in {crl_path(tls)}, got {_reason(error)}; copy it again from the authority"
        ) from None
    return context


def crl_path(tls: TlsFiles) -> Path:
    """Return the path of the certificate revocation list (CRL), which for the authority `ca.pem` is `ca.crl`."""
    return Path(tls.ca).with_suffix(".crl")


def apply_crl(context: ssl.SSLContext, tls: TlsFiles) -> None:
    """Make a context reject the certificates in the authority's CRL, if there is one. OpenSSL uses the newest CRL that it has read.

    Raises:
        OSError, ssl.SSLError: the CRL cannot be read.
    """
    path = crl_path(tls)
    if path.exists():
        context.load_verify_locations(cafile=path)
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None = None) -> Any:
    """Run a handshake in memory, and return the server's certificate. Raises the ssl.SSLError of the side that rejects first."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):  # a handshake has at most three flights
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return sides[0].getpeercert()


# Addresses.


def _look_up(address: str, give_up: float, expectation: str) -> list[Any]:
    """Resolve the host, in a thread because the resolver has no time limit."""
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
        raise MeasureError(f"{expectation}no answer from the resolver for {host}; check the name")
    if isinstance(answer[0], Exception):
        reason = getattr(answer[0], "strerror", None) or answer[0]
        raise MeasureError(f"{expectation}no host of the name {host} ({reason}); check the name")
    return list(answer[0])


def _greet(plain: socket.socket, context: ssl.SSLContext, give_up: float, expectation: str) -> None:
    """Read the scheduler's greeting. In TLS 1.3 the server rejects a client certificate only after the client's handshake is complete."""
    connected = False
    try:
        plain.settimeout(max(give_up - time.monotonic(), 0.001))
        with context.wrap_socket(plain, server_hostname=role_name("scheduler")) as safe:
            connected = True
            _read_greeting(safe, give_up)
    except TimeoutError:
        _fail(
            expectation,
            "a service that accepts the connection and says nothing",
            "check the port",
        )
    except ssl.SSLCertVerificationError as error:
        if "mismatch" in error.verify_message.lower():
            _fail(
                expectation,
                "a service of our authority whose certificate lacks the role scheduler",
                "check host and port",
            )
        _fail(expectation, f"one whose certificate our authority does not vouch for: {error.verify_message}", _AGREE)
    except (ssl.SSLEOFError, ConnectionError, EOFError) as error:
        after = " after it received our certificate" if connected else ""
        hint = _AGREE if connected else "check the port, and that `relax-tune scheduler` runs there"
        _fail(
            expectation,
            f"a service that closed the connection{after} ({_reason(error)})",
            hint,
        )
    except ssl.SSLError as error:
        if "alert" in _reason(error):
            _fail(
                expectation, f"a service that refuses our certificate: {_reason(error)}", f"{_AGREE}, within its dates"
            )
        _fail(
            expectation,
            f"a service that does not speak TLS ({_reason(error)})",
            "start `relax-tune scheduler` there",
        )
    except OSError as error:
        _fail(expectation, f"no answer ({error})", "check host, port and firewall")


def _fail(expectation: str, problem: str, remedy: str) -> NoReturn:
    raise MeasureError(f"{expectation}{problem}; {remedy}") from None


def _read_greeting(stream: socket.socket, give_up: float) -> None:
    data = b""
    while _GREETING not in data and len(data) < _GREETING_BYTES:
        stream.settimeout(max(give_up - time.monotonic(), 0.001))
        more = stream.recv(4096)
        if not more:
            raise EOFError("before its greeting" if not data else "in the middle of its greeting")
        data += more
        if time.monotonic() > give_up:
            break
    if _GREETING not in data:
        raise TimeoutError


def _reason(error: Exception) -> str:
    """Return the message of OpenSSL, without library and line."""
    reason = getattr(error, "reason", None)
    return str(reason).replace("_", " ").lower() if reason else str(error)
