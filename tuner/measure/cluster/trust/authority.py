"""The certificate authority (CA) of a fleet: issuing, renewing and revoking certificates.

A certificate contains its role as a DNS name (`role_name`). A client verifies the server's role by this name, as TLS verifies host
names; a server reads the role from the client's certificate. Certificates of jobs are valid for clients only, and certificates of
database servers for servers only (extended key usage, RFC 5280 section 4.2.1.12). Revoked certificates are in a CRL (RFC 5280 section
5) in the folder of the authority.

Tests: `tests/tuner/cli/test_certificates.py`.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from filelock import FileLock

from relax_tune.errors import UserError, system_reason

Role = Literal["scheduler", "worker", "job", "database"]
"""The role of a process. `database` is a PostgreSQL server, which takes no part in Dask's connections."""
ROLES: tuple[Role, ...] = get_args(Role)
FLEET_ROLES: tuple[Role, ...] = ("scheduler", "worker", "job")
AUTHORITY_DAYS, DAYS = 365, 7
CA, CA_KEY, REVOKED, ISSUED = "ca.pem", "ca.key", "ca.crl", "ca.issued"
SOON_DAYS = DAYS / 2
_EARLIER = datetime.timedelta(minutes=5)  # the clocks of a fleet differ

_ROLE_DOMAIN = ".relax-tune.internal"
"""A reserved domain, so that no certificate of a public authority can have such a name."""


def role_name(role: Role) -> str:
    """Return the DNS name of a role in certificates."""
    return role + _ROLE_DOMAIN


def locked(folder: Path) -> Any:
    """Return the reentrant file lock of an authority's folder, which serialises issuing and revoking."""
    return FileLock(folder / ".lock", is_singleton=True)


def make_authority(folder: Path, days: int = AUTHORITY_DAYS) -> tuple[Path, Path]:
    """Create an authority in a folder. Returns the paths of its certificate, which is public, and of its private key.

    Raises:
        UserError: the folder has an authority already, or cannot be written.
    """
    x509, ec, hashes, _ = _cryptography()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "relax-tune authority")])
    # keyCertSign and cRLSign, by position.
    signs = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    builder = _builder(name, name, key.public_key(), days).add_extension(x509.BasicConstraints(True, 0), True)
    certificate = builder.add_extension(signs, True).sign(key, hashes.SHA256())
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritten(folder, error) from None
    _write(folder / CA_KEY, _pem_key(key), 0o600, False)
    _write(folder / CA, _pem(certificate), 0o644, False)
    (folder / REVOKED).unlink(missing_ok=True)  # signed by the key of a former authority
    return folder / CA, folder / CA_KEY


def issue(folder: Path, name: str, role: Role, days: int = DAYS, renew: bool = False) -> tuple[Path, Path]:
    """Issue a certificate with a new key. Returns the paths of both.

    Args:
        folder: folder of the authority.
        name: host of a scheduler, worker or database server, or any name of a job.
        renew: replace the certificate and the key of this name.

    Raises:
        UserError: there is no authority, the name is invalid, or it has a certificate already.
    """
    x509, ec, hashes, serialization = _cryptography()
    # A peer's role is a DNS name in its certificate: a certificate for a name in that domain would grant a role. DNS
    # names compare without case, and a final dot is optional.
    plain = name.replace("-", "").replace(".", "").isalnum() and name.isascii() and len(name) <= 64 and name != "ca"
    if not plain or name.lower().rstrip(".").endswith(_ROLE_DOMAIN):
        raise UserError(
            f"expected a name of at most 64 letters, digits, dots and dashes that is not the name of a role, got {name!r:.80}; give another"
        )
    authority, signer = _read(folder, x509, serialization)
    certificate, private = folder / f"{name}.pem", folder / f"{name}.key"
    if not renew and (certificate.exists() or private.exists()):
        raise UserError(f"{certificate}: {name} has a certificate already; --renew replaces it")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name(
        [
            x509.NameAttribute(x509.NameOID.ORGANIZATIONAL_UNIT_NAME, role),
            x509.NameAttribute(x509.NameOID.COMMON_NAME, name),
        ]
    )
    usages = x509.oid.ExtendedKeyUsageOID
    good_for = [] if role == "database" else [usages.CLIENT_AUTH]
    good_for += [] if role == "job" else [usages.SERVER_AUTH]
    builder = _builder(subject, authority.subject, key.public_key(), days)
    for extension, critical in (
        (x509.BasicConstraints(False, None), True),
        # digitalSignature, which is all that TLS asks of a key for ECDSA
        (x509.KeyUsage(True, False, False, False, False, False, False, False, False), True),
        (x509.ExtendedKeyUsage(good_for), True),
        (x509.SubjectAlternativeName([x509.DNSName(name), x509.DNSName(role_name(role))]), False),
    ):
        builder = builder.add_extension(extension, critical)
    signed = builder.sign(signer, hashes.SHA256())
    with locked(folder):  # two processes that renew one name must not mix their certificates and keys
        _note(folder, signed, name)
        _write(private, _pem_key(key), 0o600, renew)
        _write(certificate, _pem(signed), 0o644, renew)
    return certificate, private


def renew(
    folder: Path, names: Sequence[str] = (), within_days: float = SOON_DAYS, days: int | None = None
) -> list[Path]:
    """Renew certificates that expire soon. Returns their paths.

    Args:
        folder: folder of the authority.
        names: names to renew, regardless of their expiry; empty: all that expire within `within_days` and are not revoked.
        days: validity of the new certificates; None: as the old ones.

    Raises:
        UserError: there is no authority, or a name has no certificate or a revoked one.
    """
    x509, _, _, serialization = _cryptography()
    _read(folder, x509, serialization)
    renewed = []
    with locked(folder):  # a certificate that is revoked at the same time must not be renewed
        revoked = _revoked(folder)
        for path in sorted(folder / f"{name}.pem" for name in names) if names else sorted(folder.glob("*.pem")):
            if path.name == CA:
                continue
            certificate = _certificate(path)
            left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
            if certificate.serial_number in revoked and names:
                raise UserError(
                    f"{path}: the certificate is revoked and cannot be renewed; `issue --renew` replaces it"
                )
            role = role_of(certificate)
            if names or (
                certificate.serial_number not in revoked and role and left < datetime.timedelta(days=within_days)
            ):
                if role is None:
                    raise UserError(f"{path}: the certificate has no role of this package; issue another")
                renewed.append(
                    issue(folder, path.stem, role, _days_of(certificate) if days is None else days, renew=True)[0]
                )
    return renewed


def renew_own(path: Path, now: float, part: float) -> bool:
    """Renew a certificate in an authority's folder with the same validity, if it is due and not revoked.

    Args:
        now: seconds since the epoch.
        part: the certificate is due when this fraction of its validity remains.

    Returns:
        Whether it was renewed.

    Raises:
        UserError: there is no authority, or the file is not a certificate.
    """
    with locked(path.parent):
        certificate = _certificate(path)
        since, ends = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
        role = role_of(certificate)
        if role is None or ends - now > (ends - since) * part or certificate.serial_number in _revoked(path.parent):
            return False
        issue(path.parent, path.stem, role, _days_of(certificate), renew=True)
    return True


def _days_of(certificate: Any) -> int:
    """Return the validity of a certificate in days."""
    life: datetime.timedelta = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return max(round(life.total_seconds() / 86400), 1)


def revoke(folder: Path, name: str) -> tuple[Path, int]:
    """Revoke every certificate of a name that has not expired. Returns the path of the CRL, and the number of new entries.

    Raises:
        UserError: there is no authority, or the name has no certificate.
    """
    x509, _, hashes, serialization = _cryptography()
    authority, signer = _read(folder, x509, serialization)
    # (The times of a CRL are whole seconds.)
    path, now = folder / REVOKED, datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    with locked(folder):  # concurrent revocations must not lose entries, and a renewal must not interfere
        given = {n["serial"] for n in _notes(folder) if n["name"] == name and n["ends"] > now.timestamp()}
        own = folder / f"{name}.pem"
        if own.exists() and own.name != CA:
            given.add(_certificate(own).serial_number)
        if not given:
            raise UserError(f"{folder}: {name!r:.80} has no certificate to revoke; check the name")
        before = _revoked(folder)
        since, last = now - _EARLIER, _crl(folder)
        if last is not None and last.last_update_utc >= since:  # OpenSSL uses the newest CRL, and compares seconds
            since = last.last_update_utc + datetime.timedelta(seconds=1)
            time.sleep(max(since.timestamp() - time.time(), 0.0))
        # No `next_update` before the authority expires: an outdated CRL must not make a machine reject all certificates.
        builder = x509.CertificateRevocationListBuilder().issuer_name(authority.subject)
        builder = builder.last_update(since).next_update(authority.not_valid_after_utc)
        for serial in sorted(before | given):
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(since)
            builder = builder.add_revoked_certificate(entry.build())
        data = builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        _write(path, bytes(data), 0o644, True)
    return path, len(given - before)


def role_of(certificate: Any) -> Role | None:
    """Return the role of a certificate; None if it has no role of this package."""
    x509 = _cryptography()[0]
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    domains = set(names.get_values_for_type(x509.DNSName))
    return next((role for role in ROLES if role_name(role) in domains), None)


def certificate_role(path: Path) -> Role | None:
    """Return the role of the certificate in a file; None if it has no role of this package. Raises UserError for another file."""
    return role_of(_certificate(path))


def describe(certificate: Path) -> str:
    """Return a line with name, role and expiry of a certificate. Raises UserError for another file."""
    x509, parsed = _cryptography()[0], _certificate(certificate)
    named = {a.oid: str(a.value) for a in parsed.subject}
    role = role_of(parsed) or "no role"
    return f"{named.get(x509.NameOID.COMMON_NAME, '?')}, {role}, until {parsed.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"


def _certificate(path: Path) -> Any:
    try:
        return _cryptography()[0].load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected a certificate in PEM, got: {error}; check the path") from None


def _crl(folder: Path) -> Any:
    """Return the authority's CRL; None if it has none. Raises UserError for another file."""
    path = folder / REVOKED
    try:
        return _cryptography()[0].load_pem_x509_crl(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected a list of revoked certificates in PEM, got: {error}; restore it") from None


def _revoked(folder: Path) -> set[int]:
    crl = _crl(folder)
    return set() if crl is None else {entry.serial_number for entry in crl}


def _note(folder: Path, certificate: Any, name: str) -> None:
    """Append a certificate to the log of issued ones, before it is written. It can then be revoked without its file."""
    line = {"serial": certificate.serial_number, "name": name, "ends": certificate.not_valid_after_utc.timestamp()}
    try:
        with open(folder / ISSUED, "a", encoding="utf-8") as notes:
            notes.write(json.dumps(line) + "\n")
    except OSError as error:
        raise _unwritten(folder / ISSUED, error) from None


def _notes(folder: Path) -> list[dict[str, Any]]:
    path = folder / ISSUED
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected the log of issued certificates, got: {error}; restore it") from None


def _builder(subject: Any, issuer: Any, public: Any, days: int) -> Any:
    if not 1 <= days <= 3650:
        raise UserError(f"--days expects 1 to 3650, got {days}")
    x509 = _cryptography()[0]
    now = datetime.datetime.now(datetime.UTC)
    ends = now + datetime.timedelta(days=days)
    return x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number(), now - _EARLIER, ends)


def _read(folder: Path, x509: Any, serialization: Any) -> tuple[Any, Any]:
    try:
        authority = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        return authority, serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        why = system_reason(error) if isinstance(error, OSError) else error
        raise UserError(
            f"{folder}: expected an authority ({CA} and {CA_KEY}), got: {why}; `relax-tune certificate authority` creates one"
        ) from None


def _pem(certificate: Any) -> bytes:
    return bytes(certificate.public_bytes(_cryptography()[3].Encoding.PEM))


def _pem_key(key: Any) -> bytes:
    forms = _cryptography()[3]
    return bytes(key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption()))


def _write(path: Path, data: bytes, mode: int, replace: bool) -> None:
    """Write a file that is created with its mode, so that a key is never readable by others."""
    target = path.with_name(f"{path.name}.{os.urandom(8).hex()}.part") if replace else path
    try:
        with os.fdopen(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
            file.write(data)
        if replace:
            target.replace(path)
    except OSError as error:
        raise _unwritten(path, error) from None


def _unwritten(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be written: {system_reason(error)}; choose another folder")


def _cryptography() -> tuple[Any, Any, Any, Any]:
    """Import the parts of cryptography for certificates. Raises UserError naming the extra without the package."""
    try:
        primitives = "cryptography.hazmat.primitives"
        parts = (
            "cryptography.x509",
            f"{primitives}.asymmetric.ec",
            f"{primitives}.hashes",
            f"{primitives}.serialization",
        )
        x509, ec, hashes, serialization = map(importlib.import_module, parts)
    except ImportError as error:
        raise UserError(
            f"certificates need the package cryptography: {error}; pip install 'relax-tune[cluster]'"
        ) from None
    return x509, ec, hashes, serialization
