"""Certificates for tests: authorities, what they sign, and what is wrong with some of it."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from relax_tune.tuner.measure.cluster.address import TlsFiles
from relax_tune.tuner.measure.cluster.trust.authority import Role, role_name

x509 = pytest.importorskip("cryptography.x509", reason="cryptography is not installed (extra cluster)")
from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402

NOW = datetime.datetime.now(datetime.UTC)
PEM = serialization.Encoding.PEM


class Authority:
    """A private authority in a folder: NAME.pem, and whatever it signs beside it."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca = self._write(f"{name}.pem", self._certificate(self._name, self._key, -1, 30, True))

    def _certificate(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        since: int,
        until: int,
        ca: bool,
        client: bool = False,
        role: Role | None = None,
    ) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW + datetime.timedelta(days=since))
            .not_valid_after(NOW + datetime.timedelta(days=until))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if role:
            name = x509.SubjectAlternativeName([x509.DNSName(role_name(role))])
            builder = builder.add_extension(name, critical=False)
        if client:
            builder = builder.add_extension(
                x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
            )
        return bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(PEM))

    def _write(self, name: str, data: bytes) -> str:
        path = self._folder / name
        path.touch(0o600)
        path.write_bytes(data)
        return str(path)

    def sign(
        self,
        name: str,
        role: Role | None,
        days: tuple[int, int] = (-1, 30),
        passphrase: bytes | None = None,
        client: bool = False,
    ) -> TlsFiles:
        """NAME.pem and NAME.key (mode 600), valid from and to so many days from now. client: good for a client only."""
        key = ec.generate_private_key(ec.SECP256R1())
        hidden = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        return TlsFiles(
            self.ca,
            self._write(f"{name}.pem", self._certificate(subject, key, *days, False, client, role)),
            self._write(f"{name}.key", key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, hidden)),
        )
