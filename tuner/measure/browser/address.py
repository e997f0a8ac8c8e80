"""The address that a page is opened at, and the certificate it is served with."""

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
_EARLIER = datetime.timedelta(minutes=5)  # the phone's clock differs


@dataclass(frozen=True, slots=True)
class Place:
    """An address to listen on: the very name or number that the browser reaches, and a port, 0 for any."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    def url(self, port: int) -> str:
        """Return the address of the page, once the port is known."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.loopback else 'https'}://{host}:{port}"


def parse_place(text: str) -> Place:
    """Parse `HOST:PORT`. Raises UserError for another text, and for an address that stands for all of a machine's."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16) or "/" in host:
        raise UserError(f"--browser wants HOST:PORT such as 127.0.0.1:8790, found {text!r:.80}")
    try:
        everywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        everywhere = False
    if everywhere:
        raise UserError(
            f"--browser wants the address under which the browser reaches this machine, such as 192.168.1.5:{port}, found "
            f"{text!r:.80}, which stands for all; `hostname -I` lists them"
        )
    return Place(host, int(port))


def server_tls(place: Place, certificate: str | None, key: str | None) -> tuple[ssl.SSLContext | None, str]:
    """Return the TLS context of a server and the SHA-256 of a certificate made for it, as browsers show it; none on loopback.

    certificate, key: PEM files of a certificate that the browser trusts; without them one is made for this run

    Raises UserError for one file without the other, for files that cannot be used, and where the package that makes certificates is
    missing.
    """
    if (certificate is None) != (key is None):
        raise UserError("wanted --certificate and --key together for --browser, found one of them; give both, or none")
    if place.loopback and certificate is None:
        return None, ""  # browsers take loopback for secure
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate is not None and key is not None:
        try:
            context.load_cert_chain(certificate, key, password=lambda: "")
        except (OSError, ValueError) as error:
            raise UserError(
                f"wanted a certificate in {certificate} and its key without a passphrase in {key}, found them unusable: "
                f"{system_reason(error)}"
            ) from None
        return context, ""
    pem, digest = made_certificate(place.host)
    with tempfile.TemporaryDirectory(prefix="relax-tune-browser-") as folder:  # of mode 0700
        path = Path(folder, "server.pem")
        path.write_bytes(pem)
        context.load_cert_chain(path)
    return context, digest


def made_certificate(host: str) -> tuple[bytes, str]:
    """Make a certificate for one host that signs itself (X.509, RFC 5280). Returns key and certificate in PEM, and its SHA-256."""
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
        (x509.SubjectAlternativeName([alternative]), False),
        (usage, False),
    ):
        builder = builder.add_extension(extension, critical)
    made = builder.sign(key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + made.public_bytes(serialization.Encoding.PEM), made.fingerprint(hashes.SHA256()).hex(":").upper()


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
            "wanted the package cryptography to make a certificate, found none; pip install 'relax-tune[browser]', or give "
            "--certificate and --key"
        ) from None
