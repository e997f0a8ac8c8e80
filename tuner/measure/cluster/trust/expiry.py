"""Warnings about certificates that expire soon.

Tests: `tests/tuner/measure/cluster/test_expiry.py`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from relax_tune.tuner.measure.cluster.address import TlsFiles

WARN_DAYS = 30
_WARN_PART = 1 / 4
"""A process that can renew its own certificate does so earlier, when a third of the validity is left."""


def life_of(certificate: Path) -> tuple[datetime, datetime] | None:
    """Return the interval in which all certificates of a file are valid; None for another file."""
    from cryptography import x509  # with Dask, in the extra `cluster`

    try:
        certificates = x509.load_pem_x509_certificates(certificate.read_bytes())
    except (OSError, ValueError):
        return None
    return max(c.not_valid_before_utc for c in certificates), min(c.not_valid_after_utc for c in certificates)


def end_of(certificate: Path) -> datetime | None:
    """Return when a certificate expires; None for another file."""
    life = life_of(certificate)
    return life and life[1]


def expiry_warnings(tls: TlsFiles | None, now: datetime | None = None) -> list[str]:
    """Return a sentence for each certificate, of this process and of its authority, that expires soon.

    A certificate expires soon if less than a quarter of its validity, and less than `WARN_DAYS`, is left. Files that are not
    certificates are skipped, since `tls.check_files` reports them.
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
                f"the TLS {what} {path} expires on {ends:%Y-%m-%d}, in {left.days} days; replace it before then "
                "(`relax-tune worker --help` says how), since all connections fail afterwards"
            )
    return lines
