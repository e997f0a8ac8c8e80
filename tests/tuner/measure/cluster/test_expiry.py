"""Certificates that end soon are named, with the day."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from relax_tune.tuner.measure.cluster.address import TlsFiles
from relax_tune.tuner.measure.cluster.trust.expiry import expiry_warnings

NOW = datetime(2030, 5, 1, tzinfo=UTC)


def certificate(path: Path, days: int, since: int = 99) -> str:
    """A self-signed certificate that ends so many days from NOW, and began so many before."""
    x509 = pytest.importorskip("cryptography.x509", reason="cryptography is not installed (extra cluster)")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = (
        made.serial_number(1).not_valid_before(NOW - timedelta(days=since)).not_valid_after(NOW + timedelta(days=days))
    )
    path.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return str(path)


def test_certificate_ending_within_30_days_is_named(tmp_path: Path) -> None:
    far, near = certificate(tmp_path / "far.pem", 31), certificate(tmp_path / "near.pem", 29)
    assert expiry_warnings(TlsFiles(far, far, "key"), NOW) == expiry_warnings(None) == []
    (line,) = expiry_warnings(TlsFiles(far, near, "key"), NOW)
    assert line.startswith(f"the TLS certificate {near} expires on 2030-05-30, in 29 days; replace it before")
    (line,) = expiry_warnings(TlsFiles(near, far, "key"), NOW)
    assert line.startswith(f"the TLS authority {near}")
    assert expiry_warnings(TlsFiles("none", "none", "key"), NOW) == []


def test_certificate_of_a_week_is_named_in_the_last_quarter(tmp_path: Path) -> None:
    fresh, old = certificate(tmp_path / "fresh.pem", 2, since=5), certificate(tmp_path / "old.pem", 1, since=6)
    assert expiry_warnings(TlsFiles(fresh, fresh, "key"), NOW) == []
    assert len(expiry_warnings(TlsFiles(old, fresh, "key"), NOW)) == 1
