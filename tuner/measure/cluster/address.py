"""Addresses of schedulers, and the TLS files of a process. On loopback certificates are generated; others are given by the user.

Tests: `tests/tuner/measure/cluster/test_tls.py`.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from relax_tune.errors import MeasureError, UserError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files for mutual TLS: the authority that both sides trust, the certificate of this process, and its key."""

    ca: str
    certificate: str
    key: str


def tls_files(ca: str | None, certificate: str | None, key: str | None) -> TlsFiles | None:
    """Return the three paths, or None if none is given. They are absolute, since child processes have another working folder.

    Raises:
        UserError: only some of them are given.
    """
    given = {"--ca": ca, "--certificate": certificate, "--key": key}
    paths = [os.path.abspath(os.path.expanduser(path)) for path in given.values() if path]
    if not paths:
        return None
    if len(paths) < len(given):
        missing = ", ".join(name for name, path in given.items() if not path)
        raise UserError(f"expected --ca, --certificate and --key together, got no {missing}; give all three, or none")
    return TlsFiles(*paths)


def check_needed(scheduler: str | None, *files: str | None) -> None:
    """Raise UserError for TLS files without a scheduler, which would have no effect."""
    if scheduler is None and any(files):
        raise UserError(
            "expected a --scheduler for --ca, --certificate and --key, got none; give its tls://HOST:PORT, or leave them out"
        )


def is_loopback(host: str) -> bool:
    """Return True for `localhost` and loopback addresses."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_and_port(address: str) -> tuple[str, int]:
    """Parse a scheduler's address. Raises MeasureError when it is not `tcp://HOST:PORT` or `tls://HOST:PORT`."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or not port or parts.scheme not in ("tcp", "tls") or parts.username is not None or parts.path:
        raise MeasureError(
            f"expected a scheduler address such as tls://127.0.0.1:8786 or tls://host:8786, got {address!r:.120}"
        )
    return host, port


def check_address(address: str, tls: TlsFiles | None) -> None:
    """Raise MeasureError unless `address` is on loopback, or `tls://` with certificates.

    All connections use TLS. On loopback a scheduler of the same user generates certificates (`trust.loopback`), and `tcp://` is an
    alias of `tls://`.
    """
    host, _ = host_and_port(address)
    safe = address.startswith("tls:")
    if not safe and tls is not None:
        raise MeasureError(f"expected a tls:// address with certificates, got {address}; the scheduler must use TLS")
    if not safe and not is_loopback(host):
        raise MeasureError(
            f"expected mutual TLS for the scheduler {address} beyond loopback, got a plain address; start scheduler and workers "
            "with certificates (`relax-tune certificate --help`) and use tls://"
        )
    if tls is None and not is_loopback(host):
        raise MeasureError(
            f"expected certificates for {address}, got none; give --ca, --certificate and --key (`relax-tune certificate --help` "
            "says how to make them)"
        )
