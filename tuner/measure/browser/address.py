"""The address of the measuring page, and the TLS certificate of its server.

Tests: `tests/tuner/measure/browser/test_runner.py`.
"""

from __future__ import annotations

import datetime
import importlib
import ipaddress
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_tune.errors import UserError, system_reason
from relax_tune.tuner.measure.cluster.address import is_loopback

_DAYS = 7
_EARLIER = datetime.timedelta(minutes=5)  # the clocks of phones differ


@dataclass(frozen=True, slots=True)
class Place:
    """An address to listen on: the name or IP address under which the browser reaches this machine, and a port (0: any)."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    def url(self, port: int) -> str:
        """Return the URL of the page at a port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.loopback else 'https'}://{host}:{port}"


def parse_place(text: str) -> Place:
    """Parse `HOST:PORT`. Raises UserError for another form, and for an unspecified address such as 0.0.0.0."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    # `isdigit` also accepts superscripts and digits of other scripts.
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16) or "/" in host:
        raise UserError(f"--browser expects HOST:PORT such as 127.0.0.1:8790, got {text!r:.80}")
    try:
        everywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        everywhere = False
    if everywhere:
        raise UserError(
            f"--browser expects the address under which the browser reaches this machine, such as 192.168.1.5:{port}, got "
            f"{text!r:.80}, which stands for all; `hostname -I` lists them"
        )
    return Place(host, int(port))


def server_tls(place: Place, certificate: str | None, key: str | None) -> tuple[ssl.SSLContext | None, str]:
    """Return the TLS context of a server, and the SHA-256 of a generated certificate in the form that browsers show.

    On loopback without a certificate the context is None.

    Args:
        certificate, key: PEM files of a certificate that the browser trusts. Without them one is generated for this run.

    Raises:
        UserError: one file is given without the other, they cannot be used, or the package cryptography is missing.
    """
    if (certificate is None) != (key is None):
        raise UserError("expected --certificate and --key together for --browser, got one of them; give both, or none")
    if place.loopback and certificate is None:
        return None, ""  # browsers treat loopback as a secure context
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate is not None and key is not None:
        try:
            # Without a password function, OpenSSL would ask on the terminal for the passphrase of an encrypted key.
            context.load_cert_chain(certificate, key, password=lambda: "")
        except (OSError, ValueError) as error:
            raise UserError(
                f"expected a certificate in {certificate} and its key without a passphrase in {key}, but they cannot be used: "
                f"{system_reason(error)}"
            ) from None
        return context, ""
    pem, digest = self_signed_certificate(place.host)
    # `ssl` loads a certificate only from a file.
    with tempfile.TemporaryDirectory(prefix="relax-tune-browser-") as folder:  # of mode 0700
        path = Path(folder, "server.pem")
        path.write_bytes(pem)
        context.load_cert_chain(path)
    return context, digest


def self_signed_certificate(host: str) -> tuple[bytes, str]:
    """Generate a self-signed certificate for one host (X.509, RFC 5280). Returns key and certificate in PEM, and its SHA-256."""
    x509, ec, hashes, serialization = _cryptography()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "relax-tune measuring page")])
    try:
        alternative = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        alternative = x509.DNSName(host)
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - _EARLIER).not_valid_after(now + datetime.timedelta(days=_DAYS))
    usage = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
    for extension, critical in (
        (x509.BasicConstraints(False, None), True),
        # Browsers compare the host with the alternative names and ignore the common name.
        (x509.SubjectAlternativeName([alternative]), False),
        (usage, False),
    ):
        builder = builder.add_extension(extension, critical)
    signed = builder.sign(key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + signed.public_bytes(serialization.Encoding.PEM), signed.fingerprint(hashes.SHA256()).hex(
        ":"
    ).upper()


def _cryptography() -> tuple[Any, Any, Any, Any]:
    try:
        return (
            importlib.import_module("cryptography.x509"),
            importlib.import_module("cryptography.hazmat.primitives.asymmetric.ec"),
            importlib.import_module("cryptography.hazmat.primitives.hashes"),
            importlib.import_module("cryptography.hazmat.primitives.serialization"),
        )
    except ImportError:
        raise UserError(
            "a certificate needs the package cryptography, which is not installed; pip install 'relax-tune[browser]', or give "
            "--certificate and --key"
        ) from None
