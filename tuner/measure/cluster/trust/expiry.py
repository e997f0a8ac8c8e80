"""Certificates that end soon, said in time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from relax_tune.tuner.measure.cluster.address import TlsFiles

WARN_DAYS = 30
_WARN_PART = 1 / 4
"""A process that can renew its own certificate does so before, with a third of its life left."""


def life_of(certificate: Path) -> tuple[datetime, datetime] | None:
    """Return from when to when a file's certificates are all good; None for a file that is none."""
    from cryptography import x509  # with Dask, in the extra `cluster`

    try:
        found = x509.load_pem_x509_certificates(certificate.read_bytes())
    except (OSError, ValueError):
        return None
    return max(c.not_valid_before_utc for c in found), min(c.not_valid_after_utc for c in found)


def end_of(certificate: Path) -> datetime | None:
    """Return when a certificate ends; None for a file that is none."""
    life = life_of(certificate)
    return life and life[1]


def expiry_warnings(tls: TlsFiles | None, now: datetime | None = None) -> list[str]:
    """Return a sentence for each certificate, ours and its authority's, that ends soon.

    Soon is a quarter of its life, and at most `WARN_DAYS`. `tls.check_files` has accepted the files; one that cannot be read as a
    certificate gives none.
    """
    if tls is None:
        return []
    lines = []
    for what, path in (("authority", tls.ca), ("certificate", tls.certificate)):
        life = life_of(Path(path))
        if life is None:
            continue
        since, ends = life
        left = ends - (now or datetime.now(UTC))
        if left < min(timedelta(days=WARN_DAYS), (ends - since) * _WARN_PART):
            lines.append(
                f"the TLS {what} {path} ends on {ends:%Y-%m-%d}, in {left.days} days; make another in time (`relax-tune worker --help` "
                "says how), since nothing connects afterwards"
            )
    return lines
