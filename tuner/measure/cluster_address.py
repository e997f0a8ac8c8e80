"""Who may be talked to without certificates: loopback, and nobody else."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from relax_tune.errors import MeasureError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files for mutual TLS: the authority both sides trust, our certificate, its key."""

    ca: str
    certificate: str
    key: str


def is_loopback(host: str) -> bool:
    """Whether the host can only be this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(address: str, tls: TlsFiles | None) -> None:
    """Raises MeasureError unless `address` is `tcp://` on loopback, or `tls://` with certificates.

    A scheduler runs the code its clients send, so an open one beyond loopback would be a way into every worker.
    """
    parts = urlsplit(address)
    if parts.scheme not in ("tcp", "tls") or not parts.hostname:
        raise MeasureError(
            f"wanted a scheduler address such as tcp://127.0.0.1:8786 or tls://host:8786, found {address!r}"
        )
    if parts.scheme == "tls" and tls is None:
        raise MeasureError(f"wanted certificates for {address}, found none; give authority, certificate and key files")
    if parts.scheme == "tcp" and tls is not None:
        raise MeasureError(f"wanted a tls:// address with certificates, found {address}; the scheduler must use TLS")
    if parts.scheme == "tcp" and not is_loopback(parts.hostname):
        raise MeasureError(
            f"wanted mutual TLS for the scheduler {address} beyond loopback, found a plain address; "
            "start scheduler and workers with certificates and use tls://"
        )
