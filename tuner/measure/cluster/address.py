"""Addresses of schedulers: on loopback certificates are made as needed, elsewhere they are given."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from relax_tune.errors import MeasureError, UserError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files for mutual TLS: the authority both sides trust, our certificate, its key."""

    ca: str
    certificate: str
    key: str


def tls_files(ca: str | None, certificate: str | None, key: str | None) -> TlsFiles | None:
    """Return the three paths, made absolute (processes are started elsewhere); None when none is given. Raises UserError for some
    of them only."""
    given = {"--ca": ca, "--certificate": certificate, "--key": key}
    paths = [os.path.abspath(os.path.expanduser(path)) for path in given.values() if path]
    if not paths:
        return None
    if len(paths) < len(given):
        missing = ", ".join(name for name, path in given.items() if not path)
        raise UserError(f"wanted --ca, --certificate and --key together, found no {missing}; give all three, or none")
    return TlsFiles(*paths)


def check_needed(scheduler: str | None, *files: str | None) -> None:
    """Raise UserError for certificates that nothing would use."""
    if scheduler is None and any(files):
        raise UserError(
            "wanted a --scheduler for --ca, --certificate and --key, found none; give its tls://HOST:PORT, or leave them out"
        )


def is_loopback(host: str) -> bool:
    """Return True if the host can only be this machine."""
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
            f"wanted a scheduler address such as tls://127.0.0.1:8786 or tls://host:8786, found {address!r:.120}"
        )
    return host, port


def check_address(address: str, tls: TlsFiles | None) -> None:
    """Raise MeasureError unless `address` is on loopback, or `tls://` with certificates.

    All connections are TLS. On loopback a scheduler of the same user has certificates of its own (`trust.loopback`), and
    `tcp://` means the same.
    """
    host, _ = host_and_port(address)
    safe = address.startswith("tls:")
    if not safe and tls is not None:
        raise MeasureError(f"wanted a tls:// address with certificates, found {address}; the scheduler must use TLS")
    if not safe and not is_loopback(host):
        raise MeasureError(
            f"wanted mutual TLS for the scheduler {address} beyond loopback, found a plain address; start scheduler and workers "
            "with certificates (`relax-tune certificate --help`) and use tls://"
        )
    if tls is None and not is_loopback(host):
        raise MeasureError(
            f"wanted certificates for {address}, found none; give --ca, --certificate and --key (`relax-tune certificate --help` "
            "says how to make them)"
        )
