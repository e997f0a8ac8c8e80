"""An authority of a fleet, the certificates that it gives, and the list of revoked ones.

A certificate has a role, as a name in it (`role_name`): whoever connects wants the name of the role that it looks for, and whoever is
connected to reads the name of the other side. TLS itself holds a job's apart, which is good for a client alone (extended key usage,
RFC 5280 4.2.1.12). The list is a CRL (RFC 5280 5) beside the authority's certificate.
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

Role = Literal["scheduler", "worker", "job"]
ROLES: tuple[Role, ...] = get_args(Role)
AUTHORITY_DAYS, DAYS = 365, 7
CA, CA_KEY, REVOKED, ISSUED = "ca.pem", "ca.key", "ca.crl", "ca.issued"
SOON_DAYS = DAYS / 2
_EARLIER = datetime.timedelta(minutes=5)  # clocks of a fleet differ

_ROLE_DOMAIN = ".relax-tune.internal"
"""A domain that nobody can register."""


def role_name(role: Role) -> str:
    """Return the name of a role in certificates."""
    return role + _ROLE_DOMAIN


def locked(folder: Path) -> Any:
    """Return the lock of an authority's folder, under which certificates are given and taken back. One thread may take it twice."""
    return FileLock(folder / ".lock", is_singleton=True)


def make_authority(folder: Path, days: int = AUTHORITY_DAYS) -> tuple[Path, Path]:
    """Make an authority in a folder. Returns the paths of its certificate, for all, and of its key, for this folder alone.

    Raises: UserError where there is one already, or the folder cannot be written."""
    x509, ec, hashes, _ = _cryptography()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "relax-tune authority")])
    signs = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    builder = _builder(name, name, key.public_key(), days).add_extension(x509.BasicConstraints(True, 0), True)
    made = builder.add_extension(signs, True).sign(key, hashes.SHA256())
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritten(folder, error) from None
    _write(folder / CA_KEY, _pem_key(key), 0o600, False)
    _write(folder / CA, _pem(made), 0o644, False)
    (folder / REVOKED).unlink(missing_ok=True)  # that of another authority, which nobody could verify
    return folder / CA, folder / CA_KEY


def issue(folder: Path, name: str, role: Role, days: int = DAYS, renew: bool = False) -> tuple[Path, Path]:
    """Give a certificate of the authority in a folder, and a new key. Returns the paths of both.

    name: host of a scheduler or worker, or any name of a job
    renew: replace the certificate and the key of this name

    Raises: UserError without an authority, for a name that is none, and for one that has a certificate already."""
    x509, ec, hashes, serialization = _cryptography()
    plain = name.replace("-", "").replace(".", "").isalnum() and name.isascii() and len(name) <= 64 and name != "ca"
    if not plain or name.lower().rstrip(".").endswith(_ROLE_DOMAIN):
        raise UserError(
            f"wanted a name of at most 64 letters, digits, dots and dashes that is no role's, found {name!r:.80}; give another"
        )
    authority, signer = _read(folder, x509, serialization)
    certificate, private = folder / f"{name}.pem", folder / f"{name}.key"
    if not renew and (certificate.exists() or private.exists()):
        raise UserError(f"{certificate}: wanted a new name, found a certificate of {name}; --renew replaces it")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name(
        [
            x509.NameAttribute(x509.NameOID.ORGANIZATIONAL_UNIT_NAME, role),
            x509.NameAttribute(x509.NameOID.COMMON_NAME, name),
        ]
    )
    usages = x509.oid.ExtendedKeyUsageOID
    good_for = [usages.CLIENT_AUTH] if role == "job" else [usages.CLIENT_AUTH, usages.SERVER_AUTH]
    builder = _builder(subject, authority.subject, key.public_key(), days)
    for extension, critical in (
        (x509.BasicConstraints(False, None), True),
        (x509.KeyUsage(True, False, False, False, False, False, False, False, False), True),
        (x509.ExtendedKeyUsage(good_for), True),
        (x509.SubjectAlternativeName([x509.DNSName(name), x509.DNSName(role_name(role))]), False),
    ):
        builder = builder.add_extension(extension, critical)
    made = builder.sign(signer, hashes.SHA256())
    with locked(folder):  # two processes that renew one name must not mix their pairs
        _note(folder, made, name)
        _write(private, _pem_key(key), 0o600, renew)
        _write(certificate, _pem(made), 0o644, renew)
    return certificate, private


def renew(
    folder: Path, names: Sequence[str] = (), within_days: float = SOON_DAYS, days: int | None = None
) -> list[Path]:
    """Give certificates of an authority's folder that end soon anew. Returns their paths.

    names: those to renew, whenever they end; none: all that end within `within_days` and are not revoked
    days: how long they live then; None: as long as before

    Raises: UserError without an authority, and for a name that has no certificate there."""
    x509, _, _, serialization = _cryptography()
    _read(folder, x509, serialization)
    renewed = []
    with locked(folder):  # one that is revoked meanwhile is not given anew
        taken_back = _revoked(folder)
        for path in sorted(folder / f"{name}.pem" for name in names) if names else sorted(folder.glob("*.pem")):
            if path.name == CA:
                continue
            found = _certificate(path)
            left = found.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
            if found.serial_number in taken_back and names:
                raise UserError(
                    f"{path}: wanted a certificate to renew, found it revoked; `issue --renew` gives the name another"
                )
            role = role_of(found)
            if names or (
                found.serial_number not in taken_back and role and left < datetime.timedelta(days=within_days)
            ):
                if role is None:
                    raise UserError(
                        f"{path}: wanted a certificate of a role, found none of our roles in it; issue another"
                    )
                renewed.append(issue(folder, path.stem, role, _days_of(found) if days is None else days, renew=True)[0])
    return renewed


def renew_own(path: Path, now: float, part: float) -> bool:
    """Give a certificate anew, for as long, in the authority's folder where it lies. Returns whether it was due.

    part: part of its life that is left when it is due. One that is revoked never is.

    Raises: UserError without an authority, and for a file that is no certificate."""
    with locked(path.parent):
        found = _certificate(path)
        since, ends = found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp()
        role = role_of(found)
        if role is None or ends - now > (ends - since) * part or found.serial_number in _revoked(path.parent):
            return False
        issue(path.parent, path.stem, role, _days_of(found), renew=True)
    return True


def _days_of(certificate: Any) -> int:
    """Return how many days a certificate was given for."""
    life: datetime.timedelta = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return max(round(life.total_seconds() / 86400), 1)


def revoke(folder: Path, name: str) -> tuple[Path, int]:
    """Take back every certificate of a name that has not ended. Returns the path of the list, and the number of new entries.

    Raises: UserError without an authority, and for a name that has no certificate."""
    x509, _, hashes, serialization = _cryptography()
    authority, signer = _read(folder, x509, serialization)
    path, now = folder / REVOKED, datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    with locked(folder):  # two at once must not lose each other's entries, nor may a renewal come between
        given = {n["serial"] for n in _notes(folder) if n["name"] == name and n["ends"] > now.timestamp()}
        own = folder / f"{name}.pem"
        if own.exists() and own.name != CA:
            given.add(_certificate(own).serial_number)
        if not given:
            raise UserError(f"{folder}: wanted a certificate of {name!r:.80} to revoke, found none; check the name")
        before = _revoked(folder)
        since, last = now - _EARLIER, _list(folder)
        if (
            last is not None and last.last_update_utc >= since
        ):  # of several lists OpenSSL takes the newest, by the second
            since = last.last_update_utc + datetime.timedelta(seconds=1)
            time.sleep(max(since.timestamp() - time.time(), 0.0))
        # No end of its own: a list that a machine did not get anew must not shut all others out.
        builder = x509.CertificateRevocationListBuilder().issuer_name(authority.subject)
        builder = builder.last_update(since).next_update(authority.not_valid_after_utc)
        for serial in sorted(before | given):
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(since)
            builder = builder.add_revoked_certificate(entry.build())
        made = builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        _write(path, bytes(made), 0o644, True)
    return path, len(given - before)


def role_of(certificate: Any) -> Role | None:
    """Return the role that a certificate names; None for one of another maker."""
    x509 = _cryptography()[0]
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    found = set(names.get_values_for_type(x509.DNSName))
    return next((role for role in ROLES if role_name(role) in found), None)


def certificate_role(path: Path) -> Role | None:
    """Return the role that a file's certificate names; None for one of another maker. Raises UserError for no certificate."""
    return role_of(_certificate(path))


def describe(certificate: Path) -> str:
    """Return a line on a certificate: name, role, and the time it ends. Raises UserError for another file."""
    x509, found = _cryptography()[0], _certificate(certificate)
    named = {a.oid: str(a.value) for a in found.subject}
    role = role_of(found) or "no role"
    return f"{named.get(x509.NameOID.COMMON_NAME, '?')}, {role}, until {found.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"


def _certificate(path: Path) -> Any:
    try:
        return _cryptography()[0].load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: wanted a certificate in PEM, found: {error}; check the path") from None


def _list(folder: Path) -> Any:
    """Return the authority's list of revoked certificates; None where it has none. Raises UserError for another file."""
    path = folder / REVOKED
    try:
        return _cryptography()[0].load_pem_x509_crl(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: wanted a list of revoked certificates in PEM, found: {error}; restore it") from None


def _revoked(folder: Path) -> set[int]:
    found = _list(folder)
    return set() if found is None else {entry.serial_number for entry in found}


def _note(folder: Path, certificate: Any, name: str) -> None:
    """Note a certificate before it is given. It can then be revoked without its file."""
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
        raise UserError(f"{path}: wanted the list of given certificates, found: {error}; restore it") from None


def _builder(subject: Any, issuer: Any, public: Any, days: int) -> Any:
    if not 1 <= days <= 3650:
        raise UserError(f"--days wants 1 to 3650, found {days}")
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
            f"{folder}: wanted an authority ({CA} and {CA_KEY}), found: {why}; `relax-tune certificate authority` makes one"
        ) from None


def _pem(certificate: Any) -> bytes:
    return bytes(certificate.public_bytes(_cryptography()[3].Encoding.PEM))


def _pem_key(key: Any) -> bytes:
    forms = _cryptography()[3]
    return bytes(key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption()))


def _write(path: Path, data: bytes, mode: int, replace: bool) -> None:
    """Write a file of a mode that it has from its first moment on."""
    place = path.with_name(f"{path.name}.{os.urandom(8).hex()}.part") if replace else path
    try:
        with os.fdopen(os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
            file.write(data)
        if replace:
            place.replace(path)
    except OSError as error:
        raise _unwritten(path, error) from None


def _unwritten(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: wanted to write it, found: {system_reason(error)}; choose another folder")


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
            f"wanted the package cryptography for certificates, found: {error}; pip install 'relax-tune[cluster]'"
        ) from None
    return x509, ec, hashes, serialization
